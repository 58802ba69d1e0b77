"""The gate between training and serving: vLLM's own draft class against the trained draft.

Both are loaded in this process, get the same states and tokens, and draft a chain as it is served. Without a server and
without the verifier's body, the gate covers what vLLM does from the exported folder onwards:

    covered      SpeculativeConfig and EAGLEConfig built from the folder; the layer ids its runners would capture; the
                 weight loader (a parameter it leaves unfilled is found, not guessed); sharing of embedding and head; fc
                 and norms; rope tables; the attention backend of this machine with its KV cache, block tables and
                 window; feedback of the hidden state over draft steps; the map from draft ids to target ids
    not covered  scheduling, batching, rejection sampling, CUDA graphs, torch.compile, tensor parallelism, and whether
                 the verifier's states are right: the state proof of 03 and `compare_with_store` are for that

Two passes. fp32: both sides compute in float32 with the exported (bf16) weights, so all that may differ is the order of
sums; at positions around 100,000 also the rounding of position x frequency, which float32 holds to 0.006 rad. Served
dtype (bf16): each side is compared with the float32 reference; vLLM may be off by a small multiple of what the reference
itself loses in bf16, which is measured in the same run. BOUNDS says what is allowed; notes/ and the parity matrix have
the measurements behind it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from eagle3.contract import StageError

if TYPE_CHECKING:
    import torch

    from eagle3.store import Store
    from eagle3.verifier import Verifier

STEPS = 3  # draft steps compared; a flag that only acts on fed-back states shows from the second
FAR = 100_000  # position of the far-out requests, where the verifier goes that far
BLOCK = 128  # tokens of a KV block on CPU; on GPU vLLM's own choice
# Allowed error, as root mean square over the logits of a row, relative to the reference's standard deviation there.
BOUNDS = {"fp32": 2e-5, "fp32_far": 5e-3, "bf16_times_reference": 3.0, "bf16_floor": 5e-3}
NEAR_TIE = (
    4.0  # top tokens may differ where the reference's gap is below this many times the row's error bound
)


@dataclass(frozen=True)
class Request:
    """One sequence as a draft sees it in serving: slot j holds token j + 1 and the state after token j.

    Attributes:
        tokens: int64 [n], inputs. states: float32 [n, A * H].
        offset: position of slot 0, as the verifier counts it.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    offset: int

    def __len__(self) -> int:
        return len(self.tokens)


# --- what both sides get ----------------------------------------------------------------------------------------------


def lengths(window: int | None, longest: int) -> list[int]:
    """Lengths that tell causes apart: one token (no attention pattern), short, around and beyond the window."""
    wanted = {1, 5, 17, longest}
    if window:
        wanted |= {window - 1, window, window + 1, 2 * window + 3, 4 * window}
    return sorted(n for n in wanted if 0 < n <= longest)


def make_requests(samples: list[tuple], window: int | None, limit: int) -> list[Request]:
    """Cut samples into requests, each once near position 0 and once far out.

    Args:
        samples: (token_ids int64 [T+1], states float32 [T, A * H]) per sample.
        limit: positions the verifier has.
    """
    far = min(FAR, limit) - 1 - STEPS - max(len(s) for _, s in samples)
    requests = []
    for i, (ids, states) in enumerate(samples):
        for n in lengths(window, len(states)) if i == 0 else [len(states)]:
            for offset in {0, max(0, far)}:
                requests.append(Request(ids[1 : n + 1], states[:n], offset))
    return requests


def random_samples(width: int, num_aux: int, vocab: int, window: int | None) -> list[tuple]:
    """Random tokens and states, the states with the spread of real ones: growing with depth, a few large channels."""
    import torch

    rng = torch.Generator().manual_seed(0)
    n = max(64, 4 * (window or 0) + 1)
    n = min(n, 4096)
    samples = []
    for _ in range(2):
        states = torch.randn(n, num_aux, width, generator=rng)
        states *= torch.tensor([0.5, 2.0, 8.0, 8.0][:num_aux] + [8.0] * (num_aux - 4)).view(1, -1, 1)
        states[:, :, :2] *= 10
        samples.append(
            (torch.randint(0, vocab, (n + 1,), generator=rng), states.flatten(1).bfloat16().float())
        )
    return samples


def stored_samples(store: Store, count: int = 3, longest: int = 256) -> list[tuple]:
    """The first held-out samples of a store, cut to `longest` states."""
    samples = []
    for info in store.select("heldout")[:count] or store.select("val")[:count]:
        sample = store.read(info)
        states = sample.aux[:longest].flatten(1).float()
        samples.append((sample.token_ids[: len(states) + 1], states))
    return samples


# --- the trained draft ------------------------------------------------------------------------------------------------


def load_reference(checkpoint: Path, verifier: Verifier, device: str):
    """The trained draft in float32, eager attention, with an embedding of its own if the checkpoint has one."""
    import torch

    from eagle3.draft import load_draft
    from eagle3.flat import EMBEDDING, find_map, open_tensors

    model = load_draft(
        checkpoint, find_map(checkpoint), verifier, attention="eager", frozen_dtype=torch.float32
    )
    own = open_tensors(checkpoint).get(EMBEDDING)
    if own is not None:
        model.embed_tokens.weight = torch.nn.Parameter(own.whole().float(), requires_grad=False)
    return model.to(device).requires_grad_(False)


class Reference:
    """speculators' modules run as a served chain: one KV cache per request, true positions, window by position.

    In training, position j + 1 goes with the state after token j; serving counts that slot as j. Rope only sees
    differences, so each side keeps its own habit here, and the gate proves that it does not matter.
    """

    def __init__(self, model):
        self.model = model

    def draft(self, requests: list[Request], chain: torch.Tensor | None) -> tuple[list, torch.Tensor]:
        """Logits of every slot, then of each later draft step.

        Args:
            chain: target ids [STEPS - 1, requests] to feed; None = its own top tokens.

        Returns:
            [logits [slots, D], then STEPS - 1 times [requests, D]], and the tokens fed.
        """
        import torch
        from transformers import DynamicCache

        device, dtype = self.model.fc.weight.device, self.model.fc.weight.dtype
        first, later, fed = (
            [],
            [[] for _ in range(STEPS - 1)],
            torch.zeros(STEPS - 1, len(requests), dtype=torch.long),
        )
        for r, request in enumerate(requests):
            cache = DynamicCache()
            hidden = self.project(request.states.to(device, dtype)[None])
            hidden, logits = self.forward(request.tokens.to(device)[None], hidden, request.offset, 0, cache)
            first.append(logits[0])
            for k in range(STEPS - 1):
                top = self.target_ids()[logits[0, -1].argmax()].cpu()
                fed[k, r] = top if chain is None else chain[k, r]
                hidden, logits = self.forward(
                    fed[k, r].view(1, 1).to(device), hidden[:, -1:], request.offset, len(request) + k, cache
                )
                later[k].append(logits[0, -1])
        return [torch.cat(first), *(torch.stack(x) for x in later)], fed

    def target_ids(self) -> torch.Tensor:
        import torch

        d2t = self.model.d2t
        size = self.model.draft_vocab_size
        ids = torch.arange(size, device=self.model.fc.weight.device)
        return ids if d2t is None else ids + d2t

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Auxiliary states [1, n, A * H] -> fc output [1, n, H], as Eagle3DraftModel.forward does."""
        import torch

        model = self.model
        if model.input_norm is not None:
            states = model.input_norm(states)
        if model.fc_norm is not None:
            parts = states.chunk(len(model.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
        return model.fc(states)

    def forward(self, ids, hidden, offset: int, start: int, cache) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots start .. start + n of one sequence; returns (state fed back [1, n, H], logits [1, n, D])."""
        import torch

        model, n = self.model, ids.shape[1]
        slots = torch.arange(start, start + n, device=ids.device)
        x = torch.cat([model.embed_tokens(ids).to(hidden.dtype), hidden], dim=-1)
        positions = (slots + offset + 1)[None]
        rope = model.rotary_emb(x, positions)
        for i, layer in enumerate(model.layers):
            window = model.sliding_window if i in model.sliding_window_indices else None
            x = layer(
                x,
                attention_mask=self.mask(slots, start + n, window, x.dtype),
                position_ids=positions,
                past_key_values=cache,
                cache_position=slots,
                position_embeddings=rope,
            )
        normed = model.norm(x)
        return (normed if model.config.norm_output else x), model.lm_head(normed)

    def mask(self, slots: torch.Tensor, total: int, window: int | None, dtype) -> torch.Tensor:
        """Additive causal mask [1, 1, n, total]; a window of w covers the slot itself and the w - 1 before it."""
        import torch

        keys = torch.arange(total, device=slots.device)[None]
        seen = keys <= slots[:, None]
        if window:
            seen &= keys > slots[:, None] - window
        return torch.zeros(seen.shape, dtype=dtype, device=slots.device).masked_fill(~seen, float("-inf"))[
            None, None
        ]


# --- vLLM's draft -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def vllm_process():
    """One-process distributed state as a worker has it; taken down again. Quiet unless VLLM_LOGGING_LEVEL is set."""
    import unittest.mock

    import torch

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault(
        "VLLM_CPU_KVCACHE_SPACE", "1"
    )  # the engine config wants a size; nothing of it is allocated
    from vllm.distributed import parallel_state as state

    cuda = torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        tmp = stack.enter_context(tempfile.TemporaryDirectory())
        if not cuda:  # its loader empties the accelerator's cache, which raises where there is none
            patch = unittest.mock.patch.object
            stack.enter_context(patch(torch.accelerator, "empty_cache", lambda: None))
            stack.enter_context(patch(gc, "collect", lambda *a: 0))  # 0.3 s a call with vLLM in memory
        try:
            yield SimpleNamespace(device="cuda" if cuda else "cpu", store=f"file://{tmp}/store")
        finally:
            if state.model_parallel_is_initialized():
                state.destroy_model_parallel()
                state.destroy_distributed_environment()


def engine_config(folder: Path, verifier: Verifier, dtype: str):
    """VllmConfig of a server with this verifier and draft, built as `vllm serve` builds it.

    Raises:
        StageError: vLLM refuses the folder.
    """
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    known = {f.name for f in dataclasses.fields(EngineArgs)}
    extra = {"language_model_only": True} if "text_config" in verifier.config else {}
    try:
        return EngineArgs(
            model=str(verifier.path),
            trust_remote_code=verifier.trust_remote_code,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            speculative_config={"method": "eagle3", "model": str(folder), "num_speculative_tokens": STEPS},
            **{k: v for k, v in extra.items() if k in known},
        ).create_engine_config()
    except Exception as err:  # pydantic, transformers and vLLM each have their own classes
        reason = " ".join(str(err).split())[:400]
        raise StageError(f"vLLM refuses {folder} as draft of {verifier.path}: {reason}") from err


def runner_layer_ids(config) -> list[int]:
    """The layer ids that vLLM's runners would capture for this config (both runners, where this version has two).

    Raises:
        StageError: they would fall back to the model's defaults, or disagree.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    spec = config.speculative_config
    found = [GPUModelRunner._get_eagle3_aux_layers_from_config(SimpleNamespace(speculative_config=spec))]
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

        found.append(get_eagle3_aux_layers_from_config(spec))
    if None in found or len(set(found)) != 1:
        raise StageError(f"vLLM's runners read layer ids {found} from the folder: missing or contradictory")
    return list(found[0])


class Served:
    """vLLM's draft model, loaded from a folder, with a KV cache of its own.

    Raises:
        StageError: vLLM leaves a parameter unfilled, or has no attention backend for the draft.
    """

    def __init__(self, config, verifier: Verifier, process, blocks: int):
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state as state

        self.config, self.device = config, torch.device(process.device)
        backend = "nccl" if process.device == "cuda" else "gloo"
        with set_current_vllm_config(config):
            if not state.model_parallel_is_initialized():
                state.init_distributed_environment(1, 0, process.store, 0, backend)
                state.initialize_model_parallel()
            self.model = self._load(config)
            self._share(verifier)
            self._account()
            self._attach_cache(blocks)

    def _load(self, config):
        """vLLM's loader on parameters that hold NaN, so that what it leaves unfilled is seen."""
        import torch
        from vllm.model_executor.model_loader import get_model_loader

        loader = get_model_loader(config.load_config)
        load = loader.load_weights

        def poisoned(model, model_config):
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(float("nan")) if p.is_floating_point() else p.zero_()
            load(model, model_config)

        loader.load_weights = poisoned
        draft = config.speculative_config.draft_model_config
        try:
            return loader.load_model(vllm_config=config, model_config=draft)
        except (ValueError, KeyError, AssertionError, RuntimeError, NotImplementedError) as err:
            reason = " ".join(str(err).split())[:400] or type(err).__name__
            raise StageError(f"vLLM's draft class can't load {draft.model}: {reason}") from err

    def _share(self, verifier: Verifier) -> None:
        """Give it the verifier's embedding and head by the rules of vLLM's proposer."""
        import torch
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        model, dtype = self.model, self.config.model_config.dtype

        def layer(kind, which: str):
            with self.device:
                made = kind(verifier.vocab_size, verifier.hidden_size, params_dtype=dtype)
            made.weight_loader(made.weight, verifier.embedding() if which == "embed" else verifier.head())
            made.quant_method.process_weights_after_loading(made)
            return made

        inner = SimpleNamespace(embed_tokens=layer(VocabParallelEmbedding, "embed"))
        target = SimpleNamespace(model=inner)
        # The verifier's head only matters where it could take the place of the draft's.
        if not model.has_own_lm_head or model.draft_id_to_target_id is None:
            target.lm_head = layer(ParallelLMHead, "head")
        proposer = object.__new__(SpecDecodeBaseProposer)  # its rules, without its buffers
        proposer.model, proposer.vllm_config, proposer.use_local_argmax_reduction = model, self.config, False
        with torch.no_grad():
            SpecDecodeBaseProposer._maybe_share_embeddings(proposer, target)
            SpecDecodeBaseProposer._maybe_share_lm_head(proposer, target)

    def _account(self) -> None:
        import torch

        # Layers after the first have a hidden_norm that their forward never uses.
        idle = {f"model.layers.{i}.hidden_norm.weight" for i in range(1, len(self.model.model.layers))}
        floats = {n: p for n, p in self.model.named_parameters() if p.is_floating_point() and n not in idle}
        empty = [n for n, p in floats.items() if bool(torch.isnan(p).any())]
        if empty:
            raise StageError(
                f"vLLM's loader leaves {', '.join(empty)} unfilled: the folder lacks weights it wants"
            )
        table = self.model.draft_id_to_target_id
        if table is not None and not bool(table.any()):
            spec = self.config.speculative_config.draft_model_config.hf_config
            if spec.draft_vocab_size > 1:
                raise StageError(
                    f"vLLM would map the reduced vocabulary of {spec.draft_vocab_size} to the first ids: no d2t loaded"
                )

    def _attach_cache(self, blocks: int) -> None:
        """KV cache and metadata builder of each attention layer, from the backend vLLM chose for it."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        self.builders, self.block = {}, None
        for name, layer in get_layers_from_vllm_config(self.config, Attention).items():
            spec = layer.get_kv_cache_spec(self.config)
            backend = layer.get_attn_backend()
            cache = _kv_cache(name, spec, backend, blocks, self.device)
            if hasattr(layer, "bind_kv_cache"):
                layer.bind_kv_cache(cache)
            else:  # vLLM 0.26 keeps a list, one entry per virtual engine
                layer.kv_cache = [cache] if isinstance(layer.kv_cache, list) else cache
            self.builders[name] = (spec, backend.get_builder_cls()(spec, [name], self.config, self.device))

    def draft(self, requests: list[Request], chain: torch.Tensor) -> list:
        """Logits over the target vocabulary of every slot, then of each later draft step (see Reference.draft)."""
        import torch
        from vllm.config import set_current_vllm_config

        n = torch.tensor([len(r) for r in requests])
        start = torch.tensor([r.offset for r in requests])
        dtype = self.config.model_config.dtype
        with set_current_vllm_config(self.config), torch.no_grad():
            hidden = self.model.combine_hidden_states(
                torch.cat([r.states for r in requests]).to(self.device, dtype)
            )
            ids = torch.cat([r.tokens for r in requests])
            positions = torch.cat([torch.arange(r.offset, r.offset + len(r)) for r in requests])
            hidden, logits = self._step(ids, positions, hidden, n, n)
            found, last = [logits], n.cumsum(0) - 1
            for k in range(len(chain)):
                hidden, logits = self._step(
                    chain[k], start + n + k, hidden[last], torch.ones_like(n), n + k + 1
                )
                found.append(logits)
                last = torch.arange(len(requests))
        return found

    def _step(self, ids, positions, hidden, query: torch.Tensor, total: torch.Tensor):
        """One forward over a ragged batch: `query` new slots per request, `total` slots with them."""
        import torch
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        device = self.device
        starts = torch.cat([torch.zeros(1, dtype=torch.long), query.cumsum(0)])
        slots = torch.cat(
            [torch.arange(t - q, t) for q, t in zip(query.tolist(), total.tolist(), strict=True)]
        )
        owner = torch.repeat_interleave(torch.arange(len(query)), query)
        metadata, mapping = {}, {}
        for name, (spec, builder) in self.builders.items():
            per_request = -(-(int(total.max()) + STEPS) // spec.block_size)
            table = 1 + torch.arange(len(query) * per_request, dtype=torch.int32).view(
                len(query), per_request
            )
            where = table[owner, slots // spec.block_size].long() * spec.block_size + slots % spec.block_size
            common = CommonAttentionMetadata(
                query_start_loc=starts.int().to(device),
                query_start_loc_cpu=starts.int(),
                seq_lens=total.int().to(device),
                num_reqs=len(query),
                num_actual_tokens=len(ids),
                max_query_len=int(query.max()),
                max_seq_len=int(total.max()),
                block_table_tensor=table.to(device),
                slot_mapping=where.to(device),
                causal=True,
            )
            metadata[name] = builder.build(0, common)
            mapping[name] = where.to(device)
        with set_forward_context(metadata, self.config, num_tokens=len(ids), slot_mapping=mapping):
            out, fed_back = self.model(
                input_ids=ids.int().to(device), positions=positions.to(device), hidden_states=hidden
            )
        return fed_back, self.model.compute_logits(out)


def _kv_cache(name: str, spec, backend, blocks: int, device) -> torch.Tensor:
    """An empty KV cache for one layer, in the layout its backend wants."""
    import torch

    blocks = -(-blocks // spec.block_size) if blocks > spec.block_size else 1
    try:
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm.v1.worker.utils import allocate_kv_cache
    except ImportError:  # vLLM 0.26
        shape = backend.get_kv_cache_shape(blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    size = spec.page_size_bytes
    tensor = KVCacheTensor(size=blocks * size, layers=[name], layer_stride=blocks * size, block_stride=size)
    group = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec([name], spec)])
    layouts = backend.supported_kv_cache_layouts()
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = layouts[0] if layouts else KVCacheLayout.LBNHC
    return allocate_kv_cache(group, device, layout)[name]


# --- the gate ---------------------------------------------------------------------------------------------------------


def compare(reference: list, served: list, ids: torch.Tensor, requests: list[Request]) -> list[dict]:
    """Errors per request and draft step.

    Args:
        reference: float32 logits over the draft vocabulary (see Reference.draft).
        served: logits over the target vocabulary; entries outside the draft vocabulary must be -inf.
        ids: target id of each draft id, int64 [D].

    Returns:
        per step and request {"step", "length", "offset", "error", "worst_gap", "top_differs", "rows"}: error is the
        largest row's root mean square difference relative to the spread of the reference's logits in that row,
        worst_gap the largest reference gap (same unit) between the two sides' top tokens where they differ.
    """
    import torch

    found = []
    sizes = [len(r) for r in requests]
    for step, (ours, theirs) in enumerate(zip(reference, served, strict=True)):
        ours, theirs = ours.float().cpu(), theirs.float().cpu()
        outside = torch.ones(theirs.shape[1], dtype=torch.bool)
        outside[ids] = False
        if bool(outside.any()) and not bool((theirs[:, outside] == float("-inf")).all()):
            raise StageError(
                "vLLM drafts tokens outside the draft vocabulary: d2t was lost or misread on the way"
            )
        theirs = theirs[:, ids]
        spread = ours.std(dim=1).clamp_min(1e-12) if ours.shape[1] > 1 else ours.abs()[:, 0].clamp_min(1e-12)
        error = (ours - theirs).square().mean(dim=1).sqrt() / spread
        error = torch.where(torch.isfinite(error), error, torch.inf)
        top, other = ours.argmax(dim=1), theirs.argmax(dim=1)
        gap = (ours.gather(1, top[:, None]) - ours.gather(1, other[:, None]))[:, 0] / spread
        parts = sizes if step == 0 else [1] * len(requests)
        rows = [x.split(parts) for x in (error, gap, (top != other).float())]
        for request, e, g, d in zip(requests, *rows, strict=True):
            found.append(
                {
                    "step": step,
                    "length": len(request),
                    "offset": request.offset,
                    "error": float(e.max()),
                    "worst_gap": float(g.max()),
                    "top_differs": int(d.sum()),
                    "rows": len(e),
                }
            )
    return found


def rope_tables(served: Served, reference: Reference, limit: int) -> float:
    """Largest difference of cos and sin between vLLM's table and the trained draft's, at positions up to `limit`."""
    import torch

    positions = torch.tensor([0, 1, 17, 1000, 4095, 4096, 32_768, FAR])
    positions = positions[positions < limit]
    attention = next(m for m in served.model.modules() if hasattr(m, "rotary_emb"))
    table = attention.rotary_emb.cos_sin_cache
    if len(table) <= int(positions.max()):
        raise StageError(f"vLLM's rope table ends at position {len(table)}, the verifier goes to {limit}")
    theirs = table[positions.to(table.device)].float().cpu()
    model = reference.model
    x = torch.zeros(1, 1, 1, device=model.fc.weight.device)
    cos, sin = (t[0].float().cpu() for t in model.rotary_emb(x, positions[None].to(x.device)))
    half = cos.shape[1] // 2
    return float((torch.cat([cos[:, :half], sin[:, :half]], dim=1) - theirs).abs().max())


def causes(rows: list[dict], bound: float, far_bound: float, window: int | None, wrong_rope: bool) -> str:
    """What a pattern of errors points at."""
    bad = [r for r in rows if r["error"] > (far_bound if r["offset"] else bound)]
    near, single = [r for r in bad if not r["offset"]], [r for r in bad if r["length"] == 1 and not r["step"]]
    if not near:
        text = "only far-out positions differ: rope scaling, mscale pair, original_max_position_embeddings"
    elif single:
        text = (
            "already one token at the first step differs: a weight, a norm flag (norm_before_residual, norm_before_fc, "
            "fc_norm), rms_norm_eps, layer order of the states, lm_head or d2t"
        )
    elif not [r for r in near if not r["step"]]:
        text = "only fed-back states differ: norm_output"
    elif window and all(r["length"] + r["step"] > window for r in near):
        text = f"only sequences beyond the window of {window} differ: sliding_window, layer_types"
    elif not window and min(r["length"] for r in near) > 17:
        text = "only long sequences differ: a window that was not trained (sliding_window, layer_types)"
    else:
        text = "everything that attends differs: rope base or scaling, head_dim, heads, q/k weights"
    return text + ("; the rope tables differ" if wrong_rope else "")


@contextlib.contextmanager
def _threads(parameters: int):
    """One thread for small drafts: OpenMP's barriers cost more there than the sums, most of all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    if parameters < 2_000_000:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gate(
    folder: Path,
    checkpoint: Path,
    verifier: Verifier,
    hidden: Path | None,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
) -> dict:
    """Compare vLLM's draft, loaded from `folder`, with the trained one in `checkpoint`.

    Args:
        folder: exported, or anyone's draft.
        checkpoint: the same draft in 04's form.
        hidden: 03_hidden, whose held-out samples are used if it is there; else random states.
        dtypes: passes to make; the tests' matrix of flags is content with float32.

    Returns:
        the report, with passed = True.

    Raises:
        StageError: drift beyond the bounds, with likely causes; layer ids other than trained; what vLLM refuses.
    """
    import torch

    model = load_reference(checkpoint, verifier, "cuda" if torch.cuda.is_available() else "cpu")
    window = model.sliding_window if model.sliding_window_indices else None
    limit = verifier.value("max_position_embeddings")
    store = _open_store(hidden)
    samples = stored_samples(store) if store else []
    kind = "held-out" if samples else "random"
    layers = list(model.config.eagle_aux_hidden_state_layer_ids)
    samples = samples or random_samples(verifier.hidden_size, len(layers), verifier.vocab_size, window)
    requests = make_requests(samples, window, limit)
    with _threads(sum(p.numel() for p in model.layers.parameters())):
        return _gate(folder, model, verifier, requests, kind, dtypes)


def _gate(folder: Path, model, verifier: Verifier, requests: list[Request], kind: str, dtypes) -> dict:
    import torch

    window = model.sliding_window if model.sliding_window_indices else None
    limit = verifier.value("max_position_embeddings")
    layers = list(model.config.eagle_aux_hidden_state_layer_ids)
    reference = Reference(model)
    with torch.no_grad():
        trained, chain = reference.draft(requests, None)
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
        exact, _ = reference.draft(requests, chain)
    ids = reference.target_ids().cpu()
    report = {
        "passed": False,
        "states": kind,
        "requests": len(requests),
        "rows": sum(len(r) for r in requests) + (STEPS - 1) * len(requests),
        "steps": STEPS,
        "window": window,
        "farthest_position": max(r.offset + len(r) for r in requests) + STEPS - 1,
        "layers": layers,
        "bounds": BOUNDS,
        "rounding_to_bf16": _spread(_as_target(exact, ids, verifier.vocab_size), trained, ids, requests),
    }
    with vllm_process() as process:
        report |= {"vllm": _version(), "device": process.device}
        for dtype in dtypes:
            config = engine_config(folder, verifier, dtype)
            if (read := runner_layer_ids(config)) != layers:
                raise StageError(f"vLLM would capture layers {read} for {folder}, trained on {layers}")
            served = Served(config, verifier, process, sum(len(r) + STEPS + BLOCK for r in requests) + BLOCK)
            rows = compare(exact, served.draft(requests, chain), ids, requests)
            bound, far_bound = BOUNDS["fp32"], BOUNDS["fp32_far"]
            off = 0.0
            if dtype == "float32":
                off = rope_tables(served, reference, limit)
                report["rope_table_difference"] = off
            else:
                model.to(torch.bfloat16)
                own, _ = reference.draft(requests, chain)
                noise = _spread(_as_target(own, ids, verifier.vocab_size), exact, ids, requests)
                report["reference_in_bf16"] = noise
                bound = far_bound = BOUNDS["bf16_floor"] + BOUNDS["bf16_times_reference"] * noise["error"]
            report[dtype] = _judge(rows, bound, far_bound, window, off > 1e-2, f"{folder} in {dtype}")
            del served
    report["passed"] = True
    return report


def _judge(rows: list[dict], bound: float, far_bound: float, window, wrong_rope: bool, what: str) -> dict:
    """Figures of one pass.

    Raises:
        StageError: an error, or a differing top token that is no near-tie, beyond the bound.
    """
    near = max((r["error"] for r in rows if not r["offset"]), default=0.0)
    far = max((r["error"] for r in rows if r["offset"]), default=0.0)
    ties = sum(r["top_differs"] for r in rows)
    gap = max(r["worst_gap"] for r in rows)
    beyond = gap > NEAR_TIE * max(bound, far_bound)
    if near > bound or far > far_bound or beyond or wrong_rope:
        raise StageError(
            f"parity: vLLM's draft from {what} is not the trained one: error {near:.2g} (allowed {bound:.2g}), far out "
            f"{far:.2g} (allowed {far_bound:.2g}), top tokens differ in {ties} of {sum(r['rows'] for r in rows)} rows by "
            f"up to {gap:.2g}. Likely: {causes(rows, bound, far_bound, window, wrong_rope)}"
        )
    return {
        "error": near,
        "error_far": far,
        "bound": bound,
        "bound_far": far_bound,
        "top_differs": ties,
        "gap": gap,
    }


def _spread(served: list, reference: list, ids, requests: list[Request]) -> dict:
    rows = compare(reference, served, ids, requests)
    return {"error": max(r["error"] for r in rows), "top_differs": sum(r["top_differs"] for r in rows)}


def _as_target(logits: list, ids: torch.Tensor, vocab: int) -> list:
    """Logits over the draft vocabulary as logits over the target's."""
    return [x.new_full((len(x), vocab), float("-inf")).index_copy(1, ids.to(x.device), x) for x in logits]


def _open_store(hidden: Path | None) -> Store | None:
    if hidden is None or not list(hidden.glob("manifest-*.jsonl")):
        return None
    from eagle3.store import Store

    return Store.open(hidden)


def _version() -> str:
    import vllm

    return vllm.__version__


def summary(report: dict) -> list[str]:
    """The report in a few lines."""
    if not report.get("passed"):
        return [f"parity not checked: {report.get('why', 'failed')}"]
    fp32 = report["float32"]
    bf16 = report.get("bfloat16")
    return [
        f"parity with vLLM {report['vllm']} on {report['device']}: {report['rows']} rows of {report['requests']} "
        f"{report['states']} requests, {report['steps']} draft steps, positions up to {report['farthest_position']}",
        f"error in float32 {fp32['error']:.1e}, far out {fp32['error_far']:.1e} (allowed {fp32['bound']:.0e}, "
        f"{fp32['bound_far']:.0e}), top tokens that differ {fp32['top_differs']}",
        f"error in bf16 {max(bf16['error'], bf16['error_far']):.1e} (PyTorch's own {report['reference_in_bf16']['error']:.1e},"
        f" allowed {bf16['bound']:.1e}), top tokens that differ {bf16['top_differs']}, all near-ties"
        if bf16
        else "bf16 was not compared",
        f"layers {report['layers']} as trained",
    ]
