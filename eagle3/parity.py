"""The gate between training and serving: vLLM's own draft class against the trained draft.

Both are loaded in this process, get the same states and tokens, and draft a chain as it is served. Without a
server and without the verifier's body, the gate covers what vLLM does from the exported folder onwards:

    covered      SpeculativeConfig and EAGLEConfig built from the folder; the layer ids its runners would
                 capture; the weight loader (a parameter it leaves unfilled is found, not guessed); sharing of
                 embedding and head; fc and norms; rope tables; the attention backend of this machine with its
                 KV cache, block tables and window; feedback of the state over steps; the map to target ids
    not covered  scheduling, rejection sampling, CUDA graphs, torch.compile, tensor parallelism; whether the
                 verifier's states are right (the state proof of 03 and `compare_with_store` are for that)

Two passes. float32: both sides compute in float32 with the exported (bf16) weights, so all that may differ
is the order of sums: 2e-7 to 4e-6 of a row's spread over the parity matrix. Far out (positions around
100,000) float32 holds position x frequency to 0.006 rad, and training counts a slot one higher than
serving: 5e-5 to 2e-3. bf16, as served: vLLM may be off by a small multiple of what PyTorch's own bf16 run
loses (0.7 to 2.6 %, measured in the same run; vLLM was at 0.7 to 1.7 times of it). In the matrix, each single
flag, window or rope flipped (480 cases) exceeded the bounds.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import StageError

if TYPE_CHECKING:
    import torch

    from eagle3.store import Store
    from eagle3.verifier import Verifier
    from eagle3.vllm_draft import Served

STEPS = 3  # draft steps compared; a flag that only acts on fed-back states shows from the second
FAR = 100_000  # position of the far-out requests, where the verifier goes that far
# Allowed error: root mean square over the logits of a row, relative to the reference's spread there. On a
# GPU, vLLM's float32 attention (Triton) multiplies in TF32, which keeps 11 bits: 1e-4 to 2e-3 were measured.
BOUNDS = {"fp32": 1e-4, "fp32_gpu": 1e-2, "fp32_far": 1e-2, "bf16_times_reference": 3.0, "bf16_floor": 5e-3}
ROPE_BOUND = 5e-2  # of cos and sin at position 100,000: 0.007 between CPU and GPU; another base differs by 1
STATES_BOUND = 0.08  # stored bf16 states against float32; neighbouring layers differ by 15 % and more
SMALL_VERIFIER = 2_000_000_000  # bytes of weights up to which transformers re-extracts a sample
SMALL_DRAFT = 2_000_000  # parameters of the layers below which threads cost more than they add
NEAR_TIE = 4.0  # top tokens may differ where the reference's gap is below this many times the error bound


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


# --- what both sides get ------------------------------------------------------------------------------------


def lengths(window: int | None, longest: int) -> list[int]:
    """Lengths that tell causes apart: one token (attends to itself), short, around and beyond the window."""
    wanted = {1, 5, 17, longest}
    if window:
        wanted |= {window - 1, window, window + 1, 2 * window + 3, 4 * window}
    return sorted(n for n in wanted if 0 < n <= longest)


def make_requests(samples: list[tuple], window: int | None, limit: int) -> list[Request]:
    """Cut samples into requests, each once near position 0 and once far out.

    Args:
        samples: (token_ids int64 [T+1], states float32 [T, A * H]) each.
        limit: positions the verifier has.
    """
    far = min(FAR, limit) - 1 - STEPS - max(len(s) for _, s in samples)
    requests = []
    for i, (ids, states) in enumerate(samples):
        for n in lengths(window, len(states)) if i == 0 else [len(states)]:
            for offset in sorted({0, max(0, far)}):
                requests.append(Request(ids[1 : n + 1], states[:n], offset))
    return requests


def random_samples(width: int, num_aux: int, vocab: int, window: int | None) -> list[tuple]:
    """Random tokens and states, with the spread of real states: growing with depth, a few large channels."""
    import torch

    rng = torch.Generator().manual_seed(0)
    n = min(max(64, 4 * (window or 0) + 1), 4096)
    scale = torch.tensor([0.5, 2.0] + [8.0] * num_aux)[:num_aux].view(1, -1, 1)
    samples = []
    for _ in range(2):
        states = torch.randn(n, num_aux, width, generator=rng) * scale
        states[:, :, :2] *= 10
        ids = torch.randint(0, vocab, (n + 1,), generator=rng)
        samples.append((ids, states.flatten(1).bfloat16().float()))
    return samples


def stored_samples(store: Store, window: int | None, count: int = 3) -> list[tuple]:
    """The first held-out (else validation) samples of a store, cut to what the window needs, at least 256."""
    longest = max(256, 4 * (window or 0) + 1)
    samples = []
    for info in (store.select("heldout") or store.select("val"))[:count]:
        sample = store.read(info)
        states = sample.aux[:longest].flatten(1).float()
        samples.append((sample.token_ids[: len(states) + 1], states))
    return samples


# --- the trained draft --------------------------------------------------------------------------------------


def load_reference(checkpoint: Path, verifier: Verifier, device: str):
    """The trained draft in float32, eager attention, with its own embedding if the checkpoint has one."""
    import torch

    from eagle3.draft import load_draft
    from eagle3.flat import EMBEDDING
    from eagle3.lazy import open_tensors
    from eagle3.vocab import find_map

    vocab_map = find_map(checkpoint)
    model = load_draft(checkpoint, vocab_map, verifier, attention="eager", frozen_dtype=torch.float32)
    own = open_tensors(checkpoint).get(EMBEDDING)
    if own is not None:
        model.embed_tokens.weight = torch.nn.Parameter(own.whole().float(), requires_grad=False)
    return model.to(device).requires_grad_(False)


class Reference:
    """speculators' modules run as a served chain: a KV cache per request, true positions, window by position.

    In training, position j + 1 goes with the state after token j; serving counts that slot as j. Rope only
    sees differences, so each side keeps its own habit here, and the gate proves that it does not matter.
    """

    def __init__(self, model):
        self.model = model

    @property
    def target_ids(self) -> torch.Tensor:
        """Target id of each draft id, int64 [D]."""
        import torch

        ids = torch.arange(self.model.draft_vocab_size, device=self.model.fc.weight.device)
        return ids if self.model.d2t is None else ids + self.model.d2t

    def draft(self, requests: list[Request], chain: torch.Tensor | None) -> tuple[list, torch.Tensor]:
        """Logits over the draft vocabulary of every slot, then of each later draft step.

        Args:
            chain: target ids [STEPS - 1, requests] to feed; None = its own top tokens.

        Returns:
            [[slots, D], then STEPS - 1 times [requests, D]], and the tokens fed.
        """
        import torch
        from transformers import DynamicCache

        device, dtype = self.model.fc.weight.device, self.model.fc.weight.dtype
        fed = torch.zeros(STEPS - 1, len(requests), dtype=torch.long) if chain is None else chain
        first, later = [], [[] for _ in range(STEPS - 1)]
        for r, request in enumerate(requests):
            cache, n = DynamicCache(), len(request)
            hidden = self.project(request.states.to(device, dtype)[None])
            hidden, logits = self.forward(request.tokens.to(device)[None], hidden, request.offset, 0, cache)
            first.append(logits[0])
            for k in range(STEPS - 1):
                if chain is None:
                    fed[k, r] = self.target_ids[logits[0, -1].argmax()]
                token = fed[k, r].view(1, 1).to(device)
                hidden, logits = self.forward(token, hidden[:, -1:], request.offset, n + k, cache)
                later[k].append(logits[0, -1])
        return [torch.cat(first), *(torch.stack(x) for x in later)], fed

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Auxiliary states [1, n, A * H] -> fc output [1, n, H], as Eagle3DraftModel.forward does."""
        import torch

        model = self.model
        if model.input_norm is not None:
            states = model.input_norm(states)
        if model.fc_norm is not None:
            parts = zip(model.fc_norm, states.chunk(len(model.fc_norm), dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
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

    @staticmethod
    def mask(slots: torch.Tensor, total: int, window: int | None, dtype) -> torch.Tensor:
        """Additive causal mask [1, 1, n, total]; a window of w covers a slot and the w - 1 before it."""
        import torch

        keys = torch.arange(total, device=slots.device)[None]
        seen = keys <= slots[:, None]
        if window:
            seen &= keys > slots[:, None] - window
        empty = torch.zeros(seen.shape, dtype=dtype, device=slots.device)
        return empty.masked_fill(~seen, float("-inf"))[None, None]


# --- comparing ----------------------------------------------------------------------------------------------


def compare(reference: list, served: list, ids: torch.Tensor, requests: list[Request]) -> list[dict]:
    """Errors per request and draft step.

    Args:
        reference: logits over the draft vocabulary (see Reference.draft).
        served: logits over the target vocabulary; entries outside the draft vocabulary must be -inf.
        ids: target id of each draft id, int64 [D].

    Returns:
        {"step", "length", "offset", "error", "gap", "differ", "rows"} per step and request. `error`: the
        largest root mean square difference of a row; `gap`: the largest distance of the two sides' top tokens
        in the reference's logits; both relative to the spread of the reference's logits in that row.

    Raises:
        StageError: a token outside the draft vocabulary could be drafted.
    """
    import torch

    found, sizes = [], [len(r) for r in requests]
    for step, (ours, theirs) in enumerate(zip(reference, served, strict=True)):
        ours, theirs = ours.float().cpu(), theirs.float().cpu()
        outside = torch.ones(theirs.shape[1], dtype=torch.bool)
        outside[ids] = False
        if not bool((theirs[:, outside] == float("-inf")).all()):
            raise StageError(
                "vLLM drafts tokens outside the draft vocabulary: d2t was lost or is read otherwise"
            )
        theirs = theirs[:, ids]
        spread = (ours.std(dim=1) if ours.shape[1] > 1 else ours.abs()[:, 0]).clamp_min(1e-12)
        error = (ours - theirs).square().mean(dim=1).sqrt() / spread
        error = torch.where(torch.isfinite(error), error, torch.inf)
        top, other = ours.argmax(dim=1), theirs.argmax(dim=1)
        gap = (ours.gather(1, top[:, None]) - ours.gather(1, other[:, None]))[:, 0] / spread
        parts = sizes if step == 0 else [1] * len(requests)
        columns = [x.split(parts) for x in (error, gap, (top != other).float())]
        for request, e, g, d in zip(requests, *columns, strict=True):
            found.append(
                {
                    "step": step,
                    "length": len(request),
                    "offset": request.offset,
                    "error": float(e.max()),
                    "gap": float(g.max()),
                    "differ": int(d.sum()),
                    "rows": len(e),
                }
            )
    return found


def spread(ours: list, reference: list, ids: torch.Tensor, requests: list[Request]) -> dict:
    """How far one run of the reference is from another one."""
    vocab = int(ids.max()) + 1
    target = [x.new_full((len(x), vocab), float("-inf")).index_copy(1, ids.to(x.device), x) for x in ours]
    rows = compare(reference, target, ids, requests)
    return {"error": max(r["error"] for r in rows), "differ": sum(r["differ"] for r in rows)}


def rope_tables(served: Served, reference: Reference, limit: int) -> float:
    """Largest difference of cos and sin between vLLM's table and the trained draft's, up to position `limit`.

    Raises:
        StageError: vLLM's table is shorter than the verifier's positions.
    """
    import torch

    positions = torch.tensor([0, 1, 17, 1000, 4095, 4096, 32_768, FAR])
    positions = positions[positions < limit]
    attention = next(m for m in served.model.modules() if hasattr(m, "rotary_emb"))
    table = attention.rotary_emb.cos_sin_cache
    if len(table) < limit:
        raise StageError(f"vLLM's rope table of the draft ends at {len(table)}, the verifier goes to {limit}")
    theirs = table[positions.to(table.device)].float().cpu()
    x = torch.zeros(1, 1, 1, device=reference.model.fc.weight.device)
    cos, sin = (t[0].float().cpu() for t in reference.model.rotary_emb(x, positions[None].to(x.device)))
    half = cos.shape[1] // 2
    return float((torch.cat([cos[:, :half], sin[:, :half]], dim=1) - theirs).abs().max())


def causes(rows: list[dict], bound: float, far_bound: float, window: int | None, rope_differs: bool) -> str:
    """What a pattern of errors points at."""
    bad = [r for r in rows if r["error"] > (far_bound if r["offset"] else bound)]
    near = [r for r in bad if not r["offset"]]
    if rope_differs:
        text = "the rope tables differ: rope_theta, scaling, mscale pair, original positions, head_dim"
    elif not near:
        text = "only far-out positions differ: rope scaling, or a position limit"
    elif any(r["length"] == 1 and not r["step"] for r in near):
        text = (
            "already a single token at the first step differs: a weight, a norm flag (norm_before_residual, "
            "norm_before_fc, fc_norm), rms_norm_eps, lm_head, d2t"
        )
    elif all(r["step"] for r in near) and any(r["length"] == 1 for r in near):
        text = "only fed-back states differ: norm_output"
    elif window and all(r["length"] + r["step"] > window for r in near):
        text = f"only sequences beyond the window of {window} differ: sliding_window, layer_types"
    elif not window and min(r["length"] + r["step"] for r in near) > 5:
        text = "only longer sequences differ: a window that was not trained (sliding_window, layer_types)"
    else:
        text = "all that attends to several tokens differs: q or k weights, heads, rope, window"
    return text


# --- the states ---------------------------------------------------------------------------------------------


def load_verifier(verifier: Verifier):
    """The verifier's text model in transformers, float32, also where it is nested in a larger one.

    Raises:
        StageError: transformers finds no weight for a part of the text model.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = verifier.text["model_type"]
    config = CONFIG_MAPPING[kind](**{k: v for k, v in verifier.text.items() if k != "model_type"})
    prefix = verifier.tensor_names["embed"].removesuffix("model.embed_tokens.weight")
    with _quiet_transformers():  # it lists every tensor of the towers beside the text model
        model, info = AutoModelForCausalLM.from_pretrained(
            verifier.path,
            config=config,
            key_mapping={"^" + prefix.replace(".", r"\."): ""} if prefix else None,
            dtype=torch.float32,
            output_loading_info=True,
        )
    if info["missing_keys"]:
        raise StageError(f"{verifier.path}: transformers finds no {sorted(info['missing_keys'])[:3]}")
    return model.eval()


@contextlib.contextmanager
def _quiet_transformers():
    from transformers.utils import logging

    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()


def verifier_states(model, ids: torch.Tensor, layers: list[int]) -> torch.Tensor:
    """States after `layers` (vLLM's numbering) for token ids [n]: float32 [n, len(layers), H].

    Args:
        model: from `load_verifier`.
    """
    import torch

    with torch.no_grad():
        states = model.model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.stack([states[k][0] for k in layers], dim=1)


def compare_with_store(store: Store, verifier: Verifier, longest: int = 256) -> dict:
    """Re-extract one stored sample with the exported layer ids; compare it with what the draft learnt from.

    Returns:
        {"checked": True, "tokens", "error": per layer, "neighbour": smallest one against a layer beside it};
        the error is the median over tokens of |a - b| / |b|, 1 to 3 % between a bf16 server and float32.

    Raises:
        StageError: a stored state is not the state after its layer.
    """
    info = (store.select("heldout") or store.select("val") or store.select("train"))[0]
    sample = store.read(info)
    aux, layers, n = sample.aux[:longest].float(), verifier.layers, verifier.num_layers
    beside = sorted({j for k in layers for j in (k - 1, k, k + 1) if 0 < j < n})
    fresh = verifier_states(load_verifier(verifier), sample.token_ids[: len(aux)], beside)

    def error(stored: torch.Tensor, layer: int) -> float:
        other = fresh[:, beside.index(layer)]
        return float(((stored - other).norm(dim=1) / other.norm(dim=1).clamp_min(1e-9)).median())

    own = [error(aux[:, i], k) for i, k in enumerate(layers)]
    others = [error(aux[:, i], j) for i, k in enumerate(layers) for j in (k - 1, k + 1) if j in beside]
    for k, e in zip(layers, own, strict=True):
        if not e < STATES_BOUND or e > min(others) / 2:
            raise StageError(
                f"the stored states of layer {k} (sample {info.id}) differ by {e:.1%} from the verifier's "
                f"(allowed {STATES_BOUND:.0%}; a layer beside it: {min(others):.1%}): wrong layer ids, or "
                "another verifier"
            )
    return {"checked": True, "tokens": len(aux), "error": own, "neighbour": min(others)}


def check_store(hidden: Path, verifier: Verifier) -> dict:
    """`compare_with_store` where it can be done in seconds: a store is there and the verifier is small."""
    size = sum(p.stat().st_size for p in verifier.path.glob("*.safetensors"))
    if size > SMALL_VERIFIER:
        return {"checked": False, "why": f"verifier of {size / 1e9:.0f} GB; the state proof of 03 covers it"}
    store = _open_store(hidden)
    if store is None:
        return {"checked": False, "why": "no states in 03_hidden"}
    return compare_with_store(store, verifier)


# --- the gate -----------------------------------------------------------------------------------------------


def gate(
    folder: Path,
    checkpoint: Path,
    verifier: Verifier,
    hidden: Path | None = None,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
) -> dict:
    """Compare vLLM's draft, loaded from `folder`, with the trained one in `checkpoint`.

    Args:
        folder: exported, or anyone's draft.
        checkpoint: the same draft in 04's form.
        hidden: 03_hidden, whose held-out samples are used if it is there; else random states.
        dtypes: passes to make.

    Returns:
        the report, with passed = True.

    Raises:
        StageError: drift beyond the bounds, with likely causes; other layer ids; what vLLM refuses.
    """
    import torch

    from eagle3.lazy import one_thread

    _room(verifier)
    model = load_reference(checkpoint, verifier, "cuda" if torch.cuda.is_available() else "cpu")
    window = model.sliding_window if model.sliding_window_indices else None
    samples = stored_samples(store, window) if (store := _open_store(hidden)) else []
    kind = "held-out" if samples else "random"
    if not samples:
        num_aux = len(model.config.eagle_aux_hidden_state_layer_ids)
        samples = random_samples(verifier.hidden_size, num_aux, verifier.vocab_size, window)
    requests = make_requests(samples, window, verifier.value("max_position_embeddings"))
    small = sum(p.numel() for p in model.layers.parameters()) < SMALL_DRAFT
    with one_thread() if small else contextlib.nullcontext():
        return {"passed": True, "states": kind, **_run(folder, model, verifier, requests, dtypes)}


def _run(folder: Path, model, verifier: Verifier, requests: list[Request], dtypes: tuple[str, ...]) -> dict:
    import torch

    from eagle3.vllm_draft import Served, engine_config, failures, runner_layer_ids, version, vllm_process

    window = model.sliding_window if model.sliding_window_indices else None
    layers, reference = list(model.config.eagle_aux_hidden_state_layer_ids), Reference(model)
    ids, slots = reference.target_ids.cpu(), max(map(len, requests)) + STEPS - 1
    with torch.no_grad():
        trained, chain = reference.draft(requests, None)
        for p in model.parameters():  # what the export holds
            p.copy_(p.bfloat16().float())
        exact, _ = reference.draft(requests, chain)
    report = {
        "requests": len(requests),
        "rows": sum(map(len, requests)) + (STEPS - 1) * len(requests),
        "steps": STEPS,
        "window": window,
        "farthest_position": max(r.offset + len(r) for r in requests) + STEPS - 1,
        "layers": layers,
        "bounds": BOUNDS,
        "rounding_weights_to_bf16": spread(exact, trained, ids, requests),
    }
    with vllm_process() as process:
        report |= {"vllm": version(), "device": process.device}
        for dtype in dtypes:
            config = engine_config(folder, verifier, dtype, STEPS)
            if (read := runner_layer_ids(config)) != layers:
                raise StageError(f"vLLM would capture layers {read} for {folder}, trained on {layers}")
            with failures(folder):
                served = Served(config, verifier, process, len(requests), slots)
                logits = served.draft(requests, chain)
            bound = BOUNDS["fp32" if process.device == "cpu" else "fp32_gpu"]
            rope_off, far_bound = 0.0, max(bound, BOUNDS["fp32_far"])
            if dtype == "float32":
                rope_off = rope_tables(served, reference, verifier.value("max_position_embeddings"))
                report["rope_table_difference"] = rope_off
            else:
                model.to(torch.bfloat16)
                with torch.no_grad():
                    own, _ = reference.draft(requests, chain)
                report["reference_in_bf16"] = spread(own, exact, ids, requests)
                bound = BOUNDS["bf16_times_reference"] * report["reference_in_bf16"]["error"]
                bound = far_bound = bound + BOUNDS["bf16_floor"]
            rows = compare(exact, logits, ids, requests)
            report[dtype] = _judge(
                rows, bound, far_bound, window, rope_off > ROPE_BOUND, f"{folder} in {dtype}"
            )
            del served
    return report


def _judge(rows: list[dict], bound: float, far_bound: float, window, rope_differs: bool, what: str) -> dict:
    """Figures of one pass.

    Raises:
        StageError: an error, or a differing top token that is no near-tie, beyond the bound.
    """
    near = max((r["error"] for r in rows if not r["offset"]), default=0.0)
    far = max((r["error"] for r in rows if r["offset"]), default=0.0)
    differ, gap = sum(r["differ"] for r in rows), max(r["gap"] for r in rows)
    if near > bound or far > far_bound or gap > NEAR_TIE * max(bound, far_bound) or rope_differs:
        raise StageError(
            f"parity: vLLM's draft from {what} is not the trained one: error {near:.2g} (allowed "
            f"{bound:.2g}), far out {far:.2g} (allowed {far_bound:.2g}), top tokens differ in {differ} of "
            f"{sum(r['rows'] for r in rows)} rows by up to {gap:.2g}. Likely: "
            f"{causes(rows, bound, far_bound, window, rope_differs)}"
        )
    return {
        "error": near,
        "error_far": far,
        "bound": bound,
        "bound_far": far_bound,
        "differ": differ,
        "gap": gap,
    }


def _room(verifier: Verifier) -> None:
    """Refuse before the machine runs out of memory: most of it is embeddings in float32, ours and vLLM's.

    Measured at Kimi-K2.5's size (one embedding = 4.7 GB): 20.7 GB of host memory with a GPU.

    Raises:
        StageError: what is needed and what there is.
    """
    import psutil
    import torch

    embeddings = 4.5 if torch.cuda.is_available() else 8
    need = embeddings * 4 * verifier.vocab_size * verifier.hidden_size
    free = psutil.virtual_memory().available
    if need > free:
        raise StageError(
            f"the parity gate needs about {need / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free: run "
            "05_convert.py where the verifier is served, or skip the gate with --no-parity"
        )


def _open_store(hidden: Path | None) -> Store | None:
    if hidden is None or not list(hidden.glob("manifest-*.jsonl")):
        return None
    from eagle3.store import Store

    return Store.open(hidden)


def summary(report: dict) -> list[str]:
    """The report in a few lines."""
    if not report.get("passed"):
        return [f"parity was not checked: {report.get('why', 'failed')}"]
    fp32, bf16 = report["float32"], report.get("bfloat16")
    lines = [
        f"parity with vLLM {report['vllm']} on {report['device']}: {report['rows']} rows of "
        f"{report['requests']} {report['states']} requests, {report['steps']} draft steps, positions up to "
        f"{report['farthest_position']}, layers {report['layers']}",
        f"float32: error {fp32['error']:.1e} (allowed {fp32['bound']:.0e}), far out {fp32['error_far']:.1e} "
        f"({fp32['bound_far']:.0e}), {fp32['differ']} top tokens differ",
    ]
    if bf16:
        lines.append(
            f"bf16: error {max(bf16['error'], bf16['error_far']):.1e} (PyTorch's own "
            f"{report['reference_in_bf16']['error']:.1e}, allowed {bf16['bound']:.1e}), {bf16['differ']} top "
            "tokens differ, all near-ties"
        )
    if (store := report.get("store") or {}).get("checked"):
        lines.append(
            f"stored states re-extracted with these layers: off by {max(store['error']):.1%} (a layer "
            f"beside: {store['neighbour']:.0%})"
        )
    return lines
