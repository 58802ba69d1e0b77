"""Bytes on disk, in RAM and on GPUs, derived from configs alone; nothing is loaded and nothing is fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass

GB = 1e9
# CUDA context, cuBLAS and NCCL buffers of one process; beyond what torch's allocator counts.
CUDA_CONTEXT = 1.5 * GB


def state_bytes(hidden: int, aux: int, dtype: str) -> tuple[int, int]:
    """Bytes of one token in the store: (auxiliary states, final state).

    bf16: 2 bytes a value. fp8: 1 byte a value and a float32 scale per token and layer.
    Kimi-K2.5 (hidden 7168, 3 auxiliary layers): 43,008 + 14,336 = 57,344 B in bf16.
    """
    size, scale = (2, 0) if dtype == "bf16" else (1, 4)
    return aux * (hidden * size + scale), hidden * size + scale


def sample_bytes(tokens: float, prompt: float, aux: int, hidden: int, dtype: str) -> float:
    """Bytes of one sample in a shard: its states, `tokens` int32 ids, prompt length and two offsets."""
    per_aux, per_final = state_bytes(hidden, aux, dtype)
    return (tokens - 1) * per_aux + (tokens - prompt) * per_final + 4 * tokens + 20


@dataclass(frozen=True)
class Parameters:
    """Parameters of a draft by part: fc, layers, norms are trained; embedding, head are the verifier's."""

    fc: int
    layers: int
    norms: int
    embedding: int
    head: int
    draft_vocab: int

    @property
    def body(self) -> int:
        return self.fc + self.layers + self.norms


def parameters(recipe, hidden: int, vocab: int) -> Parameters:
    """Of the recipe's draft for a verifier of that width and vocabulary (3 auxiliary layers)."""
    d = recipe.draft
    size = vocab if d.vocab_size == "full" else d.vocab_size
    q, kv = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
    mlp = 3 * hidden * d.intermediate_size
    first = 2 * hidden * (q + 2 * kv) + q * hidden + mlp  # its attention reads [embedding, hidden]
    further = hidden * (q + 2 * kv) + q * hidden + mlp
    norms = (3 + 2 * (d.num_hidden_layers - 1) + 1 + (3 if d.fc_norm or d.norm_before_fc else 0)) * hidden
    return Parameters(
        fc=3 * hidden * hidden,
        layers=first + (d.num_hidden_layers - 1) * further,
        norms=norms,
        embedding=vocab * hidden,
        head=size * hidden,
        draft_vocab=size,
    )


def saved_per_token(recipe, hidden: int, draft_vocab: int, frozen: str = "bf16") -> dict[str, float]:
    """Bytes a token that autograd keeps from forward to backward pass, under bf16 autocast with fp32 weights.

    All TTT steps live until the backward pass. tests/test_plan.py compares every term with what the model
    really saves. A tensor that is cast or computed twice from the same values counts once (torch.compile
    merges them), and short-lived temporaries of the loss do not count.

    Args:
        frozen: dtype of embedding and heads. "bf16" (ours): the residual stream is bf16 and each norm keeps a
            float32 copy of its input. "fp32" (stock speculators): the stream itself is float32.
    """
    d, t = recipe.draft, recipe.train.ttt_steps
    h, q, kv = hidden, d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
    stream = 2 if frozen == "bf16" else 4
    layers = d.num_hidden_layers
    # Norm: float32 input, and the normed values for the gradient of the gain.
    norm = (4 + stream) * h
    step = {
        # embedding and hidden state: two norms; their bf16 concatenation is the input of q, k and v
        "first_layer_input": 2 * norm + 2 * 2 * h,
        "further_layer_inputs": (layers - 1) * (norm + 2 * h),
        "query": layers * 2 * q,
        "attention_output": layers * (2 * q + 4 * d.num_attention_heads),
        # flex attention keeps its output in head order; the output projection reads a copy (CPU sdpa: one
        # tensor)
        "attention_output_copy": layers * 2 * q,
        "mlp_input": layers * (norm + 2 * h),
        # gate, silu(gate), up, and their product
        "mlp": layers * 4 * 2 * d.intermediate_size,
        "head_input": 2 * h if recipe.draft.train_head else 0,
        # float32 log-probabilities of the draft and probabilities of the verifier
        "loss": 2 * 4 * draft_vocab,
        "rotary_table": 2 * stream * d.head_dim,
    }
    once = {
        # the output norm of a step and the hidden norm of the next read the same values: one of both counts
        "output_norms": norm if frozen == "bf16" else (4 * t + stream) * h,
        # step k attends to the keys and values of steps 1..k, each kept as one concatenation
        "keys_and_values": layers * t * (t + 1) / 2 * 2 * 2 * kv,
        "auxiliary_states": 3 * 2 * h,
        "final_state_and_targets": 2 * h + 2 * draft_vocab,
    }
    return {**{k: t * v for k, v in step.items()}, **once}


def training_memory(recipe, profile, hidden: int, vocab: int, frozen: str = "bf16") -> dict[str, float]:
    """Bytes on one training GPU, term by term.

    Trained weights: fp32 master, gradient and two Adam moments (16 B) and the bf16 copy that autocast keeps
    for a step (2 B). DDP adds gradient buckets (4 B); FSDP divides the 16 B by the ranks. Frozen: embedding,
    and one head that draft and targets share ("bf16", ours), or both heads and a bf16 copy in fp32 (stock).
    """
    p, t, ranks = parameters(recipe, hidden, vocab), recipe.train, max(1, profile.TRAIN_GPUS)
    trained = p.body + (p.head if recipe.draft.train_head else 0)
    width = 2 if frozen == "bf16" else 4
    heads = width * p.head * (1 if frozen == "bf16" or recipe.draft.train_head else 2)
    copies = 2 * trained + (2 * p.head if frozen == "fp32" else 0)
    owned = 16 * trained / (ranks if t.shard == "fsdp" else 1)
    return {
        "weights_gradients_optimizer": owned,
        "bf16_copies": copies,
        "gradient_buckets": 4 * trained if ranks > 1 and t.shard == "ddp" else 0,
        "frozen_embedding_and_heads": width * p.embedding + heads,
        "activations": profile.TRAIN_ROW_TOKENS
        * sum(saved_per_token(recipe, hidden, p.draft_vocab, frozen).values()),
        "cuda_context": CUDA_CONTEXT,
    }


def verifier_memory(recipe, profile, verifier, weight_bytes: float) -> dict[str, float]:
    """Bytes on one verifier GPU while extracting: weights, state buffer, and what is left for KV.

    State buffer: (batched tokens + sequences) x state bytes. The states of a token lie in the KV cache too.
    KV of MLA: kv_lora_rank + rotary part values a layer on every tensor-parallel rank; of other models 2 x KV
    heads x head size, split over the ranks. A verifier that is known by name only is taken for MLA of 512 +
    64 (Kimi's).
    """
    config = verifier.config.get("text_config") or verifier.config
    aux, final = state_bytes(verifier.hidden_size, len(verifier.layers), "bf16")
    if "kv_lora_rank" in config or "num_attention_heads" not in config:
        per_layer = config.get("kv_lora_rank", 512) + config.get("qk_rope_head_dim", 64)
    else:
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        size = config.get("head_dim") or verifier.hidden_size // config["num_attention_heads"]
        per_layer = 2 * size * max(1, heads / profile.VERIFIER_TP)
    kv = 2 * verifier.num_layers * per_layer + aux + final
    budget = profile.GPU_MEMORY_GB * GB * profile.VERIFIER_MEMORY_FRACTION
    buffer = (profile.VERIFIER_BATCH_TOKENS + profile.VERIFIER_MAX_SEQS) * (aux + final)
    weights = weight_bytes / profile.VERIFIER_TP
    left = budget - weights - buffer
    return {
        "budget": budget,
        "weights": weights,
        "state_buffer": buffer,
        "kv": left,
        "kv_bytes_per_token": kv,
        "kv_tokens": left / kv,
    }


def disk_bytes(
    recipe, verifier, kept: dict[str, float], prompt: dict[str, float], answer: dict[str, float]
) -> dict:
    """Bytes on disk: states, checkpoints, export.

    Args:
        kept, prompt, answer: by split: rows in the store, prompt and answer tokens of a row.
    """
    shape = (len(verifier.layers), verifier.hidden_size, recipe.states.dtype)
    states = sum(rows * sample_bytes(prompt[s] + answer[s], prompt[s], *shape) for s, rows in kept.items())
    p = parameters(recipe, verifier.hidden_size, verifier.vocab_size)
    trained = p.body + (p.head if recipe.draft.train_head else 0)
    return {
        "per_token": sum(state_bytes(verifier.hidden_size, len(verifier.layers), recipe.states.dtype)),
        "states": round(states),
        # The newest two and the best: fp32 weights and two Adam moments each.
        "checkpoints": 3 * 12 * trained,
        # For vLLM and for SGLang, bf16, without the embedding.
        "export": 2 * 2 * (p.body + p.head),
    }


def ram_bytes(recipe, profile, hidden: int, vocab: int, aux: int) -> int:
    """Resident memory of the hungriest stage of ours (the server's own is not in it).

    03: one open shard, the longest sample and 1.5 GB. 04: per rank the verifier's embedding and head (bf16)
    and the fp32 draft before they go to the GPU; without a GPU also gradients, moments and activations.
    """
    p = parameters(recipe, hidden, vocab)
    extract = recipe.states.shard_bytes + recipe.verifier.max_model_len * sum(
        state_bytes(hidden, aux, "bf16")
    )
    trained = p.body + (p.head if recipe.draft.train_head else 0)
    rank = 4 * trained + 4 * p.embedding + 0.5 * GB
    if profile.cpu:
        saved = sum(saved_per_token(recipe, hidden, p.draft_vocab, "fp32").values())
        rank += 12 * trained + 8 * p.head + profile.TRAIN_ROW_TOKENS * saved
    return round(max(extract + 1.5 * GB, rank * max(1, profile.TRAIN_GPUS)))


def duration(seconds: float) -> str:
    """45 -> 45 s, 90 -> 1.5 min, 5400 -> 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(n: float) -> str:
    """Bytes for people."""
    unit = min(4, int(math.log10(n) // 3)) if n >= 1 else 0
    return f"{n / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"
