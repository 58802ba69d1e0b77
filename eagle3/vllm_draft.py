"""vLLM's draft model by itself: loaded from a folder as serving loads it, run with a KV cache of its own.

Written against vLLM 0.32; where 0.26 (of the GPU image) differs, a comment says so.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from eagle3.contract import StageError

if TYPE_CHECKING:
    import torch

    from eagle3.parity import Request
    from eagle3.verifier import Verifier


@contextlib.contextmanager
def vllm_process():
    """One-process distributed state as a worker has it; quiet unless VLLM_LOGGING_LEVEL is set.

    Yields:
        SimpleNamespace(device="cpu" | "cuda", store: rendezvous file).
    """
    import unittest.mock

    import torch

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Its config wants a size; nothing of it is allocated.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
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


def engine_config(folder: Path, verifier: Verifier, dtype: str, steps: int):
    """VllmConfig of a server with this verifier and draft, built as `vllm serve` builds it.

    Args:
        dtype: "float32" or "bfloat16".
        steps: num_speculative_tokens.

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
            use_tqdm_on_load=False,
            speculative_config={"method": "eagle3", "model": str(folder), "num_speculative_tokens": steps},
            **{k: v for k, v in extra.items() if k in known},
        ).create_engine_config()
    except Exception as err:  # pydantic, transformers and vLLM each raise classes of their own
        raise StageError(f"vLLM refuses {folder} as draft of {verifier.path}: {_line(err)}") from err


def runner_layer_ids(config) -> list[int]:
    """The layer ids that vLLM's runners would capture; both runners, where this version has two.

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
        raise StageError(
            f"vLLM's runners read layer ids {found} from the folder: missing or contradictory (import and "
            "export a draft in SGLang's or EAGLE's form before serving it with vLLM)"
        )
    return list(found[0])


@contextlib.contextmanager
def failures(folder: Path):
    """What goes wrong inside vLLM's draft class, as an error of the folder it was loaded from."""
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as err:
        raise StageError(f"vLLM's draft class fails on {folder}: {type(err).__name__}: {_line(err)}") from err


def version() -> str:
    """vLLM's version."""
    import vllm

    return vllm.__version__


class Served:
    """vLLM's draft model, loaded from a folder, with a KV cache of its own.

    Args:
        config: from `engine_config`. process: from `vllm_process`.
        count: requests it gets at once. slots: the most slots of one of them, later draft steps included.

    Raises:
        StageError: vLLM leaves a parameter unfilled.
    """

    def __init__(self, config, verifier: Verifier, process, count: int, slots: int):
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state as state

        self.config, self.device = config, torch.device(process.device)
        with set_current_vllm_config(config):
            if not state.model_parallel_is_initialized():
                backend = "nccl" if process.device == "cuda" else "gloo"
                state.init_distributed_environment(1, 0, process.store, 0, backend)
                state.initialize_model_parallel()
            self.model = self._load(config)
            self._share(verifier)
            self._account()
            self._attach_cache(count, slots)

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
        return loader.load_model(vllm_config=config, model_config=draft)

    def _share(self, verifier: Verifier) -> None:
        """Give it the verifier's embedding and head by the rules of vLLM's proposer."""
        import torch
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        model, dtype = self.model, self.config.model_config.dtype

        def layer(kind, values: torch.Tensor):
            with self.device:
                made = kind(verifier.vocab_size, verifier.hidden_size, params_dtype=dtype)
            made.weight_loader(made.weight, values)
            made.quant_method.process_weights_after_loading(made)
            return made

        target = SimpleNamespace(
            model=SimpleNamespace(embed_tokens=layer(VocabParallelEmbedding, verifier.embedding()))
        )
        # The verifier's head only matters where it could take the place of the draft's.
        if not model.has_own_lm_head or model.config.draft_vocab_size == verifier.vocab_size:
            target.lm_head = layer(ParallelLMHead, verifier.head())
        proposer = object.__new__(SpecDecodeBaseProposer)  # its rules, without its buffers
        proposer.model, proposer.vllm_config = model, self.config
        proposer.use_local_argmax_reduction = False
        with torch.no_grad():
            proposer._maybe_share_embeddings(target)
            proposer._maybe_share_lm_head(target)

    def _account(self) -> None:
        import torch

        # Layers after the first have a hidden_norm that their forward never uses.
        idle = {f"model.layers.{i}.hidden_norm.weight" for i in range(1, len(self.model.model.layers))}
        floats = {n: p for n, p in self.model.named_parameters() if p.is_floating_point() and n not in idle}
        if empty := [n for n, p in floats.items() if bool(torch.isnan(p).any())]:
            raise StageError(
                f"vLLM's loader leaves {', '.join(empty)} unfilled: the folder lacks weights it wants"
            )

    def _attach_cache(self, count: int, slots: int) -> None:
        """KV cache, block table and metadata builder of each attention layer, by its backend."""
        import torch
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        self.layers = {}
        for name, layer in get_layers_from_vllm_config(self.config, Attention).items():
            spec, backend = layer.get_kv_cache_spec(self.config), layer.get_attn_backend()
            each = -(-slots // spec.block_size)
            table = 1 + torch.arange(count * each, dtype=torch.int32).view(count, each)  # 0 is nobody's block
            cache = _kv_cache(name, spec, backend, 1 + count * each, self.device)
            if hasattr(layer, "bind_kv_cache"):
                layer.bind_kv_cache(cache)
            else:  # vLLM 0.26: a list with one entry per virtual engine, or the tensor
                layer.kv_cache = [cache] if isinstance(layer.kv_cache, list) else cache
            builder = backend.get_builder_cls()(spec, [name], self.config, self.device)
            self.layers[name] = (spec.block_size, table, builder)

    def draft(self, requests: list[Request], chain: torch.Tensor) -> list[torch.Tensor]:
        """Logits over the target vocabulary: of every slot [slots, V], then of each later step [requests, V].

        Args:
            chain: target ids [steps - 1, requests] to feed; the states fed back are its own.
        """
        import torch
        from vllm.config import set_current_vllm_config

        n = torch.tensor([len(r) for r in requests])
        start = torch.tensor([r.offset for r in requests])
        states = torch.cat([r.states for r in requests])
        with set_current_vllm_config(self.config), torch.no_grad():
            hidden = self.model.combine_hidden_states(states.to(self.device, self.config.model_config.dtype))
            ids = torch.cat([r.tokens for r in requests])
            positions = torch.cat([torch.arange(r.offset, r.offset + len(r)) for r in requests])
            hidden, logits = self._step(0, ids, positions, hidden, n, n)
            found, last = [logits], n.cumsum(0) - 1
            for k in range(len(chain)):
                one = torch.ones_like(n)
                hidden, logits = self._step(k + 1, chain[k], start + n + k, hidden[last], one, n + k + 1)
                found.append(logits)
                last = torch.arange(len(requests))
        return found

    def _step(self, step: int, ids, positions, hidden, query: torch.Tensor, total: torch.Tensor):
        """One forward over a ragged batch: `query` new slots per request, `total` slots with them."""
        import torch
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        device = self.device
        starts = torch.cat([torch.zeros(1, dtype=torch.long), query.cumsum(0)])
        pairs = zip(query.tolist(), total.tolist(), strict=True)
        slots = torch.cat([torch.arange(t - q, t) for q, t in pairs])
        owner = torch.repeat_interleave(torch.arange(len(query)), query)
        metadata, mapping = {}, {}
        for name, (block, table, builder) in self.layers.items():
            where = table[owner, slots // block].long() * block + slots % block
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
            metadata[name] = builder.build_for_drafting(common, step)
            mapping[name] = where.to(device)
        with set_forward_context(metadata, self.config, num_tokens=len(ids), slot_mapping=mapping):
            out, fed_back = self.model(
                input_ids=ids.int().to(device), positions=positions.to(device), hidden_states=hidden
            )
        return fed_back, self.model.compute_logits(out)


def _kv_cache(name: str, spec, backend, blocks: int, device) -> torch.Tensor:
    """An empty KV cache of one layer, in the layout that its backend wants."""
    import torch

    try:
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache
    except ImportError:  # vLLM 0.26
        shape = backend.get_kv_cache_shape(blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        order = tuple(range(len(shape)))
        with contextlib.suppress(AttributeError, NotImplementedError):
            order = backend.get_kv_cache_stride_order()
        stored = torch.zeros([shape[i] for i in order], dtype=spec.dtype, device=device)
        return stored.permute([order.index(i) for i in range(len(order))])
    size = spec.page_size_bytes
    place = KVCacheTensor(size=blocks * size, layers=[name], layer_stride=blocks * size, block_stride=size)
    config = KVCacheConfig(blocks, [place], [KVCacheGroupSpec([name], spec)])
    layouts = backend.supported_kv_cache_layouts()
    return allocate_kv_cache(config, device, layouts[0] if layouts else KVCacheLayout.LBNHC)[name]


def _line(err: Exception) -> str:
    """An exception as one line of bounded length."""
    return " ".join(str(err).split())[:400] or type(err).__name__
