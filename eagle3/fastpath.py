"""The draft's forward pass on a CPU without the work that changes nothing: same loss, same gradients.

Speculators' model stays as it is; three of its openings are used.

- Attention: in a packed row a position attends to its own document only, and from the second TTT step on to
  itself in the later steps. "document_sdpa", registered with transformers, computes just that, where dense
  masks make every position look at `TTT steps x row` others.
- Layers: hooks hand the head, and what of the layer nobody looks at elsewhere, only the positions that the
  loss looks at (feed.py, `head_rows`).
- Loss: KL divergence whose gradient is written down (softmax(draft) - target) instead of traced through five
  passes over [positions, draft vocabulary].
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers.modeling_utils import AttentionInterface

ATTENTION = "document_sdpa"


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    scaling: float | None = None,
    documents: tuple[tuple[int, int], ...] = (),
    sliding_window: int | None = None,
    **_kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of one packed row at one TTT step.

    Args:
        query: [1, heads, T, d]. key, value: [1, KV heads, (k + 1) * T, d], the T of each TTT step behind one
            another.
        attention_mask: unused; `documents` says the same.
        documents: first and one past the last position of each document.
        sliding_window: the layer's window over the first T keys; later ones are only a position's own.

    Returns:
        [1, T, heads, d]; zero outside documents.
    """
    window = getattr(module.config, "sliding_window", None) if sliding_window is None else sliding_window
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    steps = key.shape[2] // length
    out = query.new_zeros(1, length, query.shape[1], query.shape[3])
    if not documents:  # a row of padding: keep it part of the graph
        return out + 0 * (query.sum() + key.sum() + value.sum()), None
    key, value = (x.unflatten(2, (steps, length)).repeat_interleave(group, dim=1) for x in (key, value))
    parts, at = [], 0
    for first, end in documents:
        if first > at:
            parts.append(out[:, at:first])
        q, k, v = query[:, :, first:end], key[:, :, :, first:end], value[:, :, :, first:end]
        mask = _window_mask(end - first, window, query.device) if window else None
        if steps == 1:
            mixed = F.scaled_dot_product_attention(
                q, k[:, :, 0], v[:, :, 0], mask, is_causal=mask is None, scale=scaling
            )
        else:
            mixed = _with_own_steps(q, k, v, mask, scaling)
        parts.append(mixed.transpose(1, 2))
        at = end
    if at < length:
        parts.append(out[:, at:])
    return torch.cat(parts, dim=1), None


def _window_mask(n: int, window: int, device) -> torch.Tensor:
    """Causal mask [n, n] of positions less than `window` back."""
    i = torch.arange(n, device=device)
    back = i[:, None] - i[None, :]
    return (back >= 0) & (back < window)


def _with_own_steps(q, k, v, mask, scaling):
    """One document at TTT step >= 1: q [1, h, L, d], k and v [1, h, steps, L, d] -> [1, h, L, d]."""
    scaling = scaling or q.shape[-1] ** -0.5
    if mask is None:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    q = q * scaling
    past = (q @ k[:, :, 0].transpose(-1, -2)).masked_fill(~mask, float("-inf"))
    own = (q.unsqueeze(2) * k[:, :, 1:]).sum(-1)  # [1, h, steps - 1, L]
    weights = torch.cat([past, own.transpose(-1, -2)], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
    past, own = weights.split([q.shape[2], own.shape[2]], dim=-1)
    return past @ v[:, :, 0] + (own.transpose(-1, -2).unsqueeze(-1) * v[:, :, 1:]).sum(2)


AttentionInterface.register(ATTENTION, document_attention)


class _Kl(torch.autograd.Function):
    """KL(softmax(targets) || softmax(logits)) per position; its gradient is the difference of the two."""

    @staticmethod
    def forward(ctx, logits, target_p, target_entropy):
        logq = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        ctx.save_for_backward(logq, target_p)
        return target_entropy - torch.linalg.vecdot(target_p, logq)

    @staticmethod
    def backward(ctx, grad):
        logq, target_p = ctx.saved_tensors
        return logq.exp().sub_(target_p).mul_(grad.unsqueeze(-1)), None, None


class KlLoss:
    """speculators' `kl_div` for dense [1, S, D] logits and targets, for its `loss_config`.

    The targets are one tensor, looked at from a later position at every TTT step, so its softmax is taken
    once.
    """

    def __init__(self):
        self._p = self._entropy = None

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = targets.storage_offset() // targets.shape[-1]
        if first == 0:
            logp = F.log_softmax(targets, dim=-1, dtype=torch.float32)
            self._p = logp.exp()
            self._entropy = torch.linalg.vecdot(self._p, logp)  # sum p log p
        return _Kl.apply(logits, self._p[:, first:], self._entropy[:, first:])


class AnswerRows:
    """The draft computes only what the loss looks at: answers, not prompts.

    Nobody needs a prompt position's prediction, only its key and value, and those at the first TTT step:
    later steps are seen by their own position alone. So the head and, in a draft of one layer, query, output,
    MLP and (from the second step on) key and value get the chosen positions; elsewhere their output is zero.

    Attributes:
        rows: int64 [S], the chosen positions (Batch.head_rows), or None for all; to be set before each
            forward pass.
    """

    def __init__(self, model: torch.nn.Module):
        self.rows = None
        model.lm_head.register_forward_pre_hook(self._select)
        if len(model.layers) > 1:
            return
        attention = model.layers[0].self_attn
        for module in (attention.q_proj, attention.o_proj, model.layers[0].mlp):
            self._narrow(module, first_step=0)
        for module in (attention.k_proj, attention.v_proj):
            self._narrow(module, first_step=1)

    @property
    def rows(self) -> torch.Tensor | None:
        return self._rows

    @rows.setter
    def rows(self, rows: torch.Tensor | None) -> None:
        self._rows, self._step = rows, 0

    def _select(self, _head, args):
        self._step += 1  # the head ends a TTT step
        return None if self._rows is None else (args[0].index_select(1, self._rows),)

    def _narrow(self, module: torch.nn.Module, first_step: int) -> None:
        def before(_module, args):
            if self._rows is None or self._step < first_step:
                return None
            self._length = args[0].shape[1]
            return (args[0].index_select(1, self._rows),)

        def after(_module, _args, out):
            if self._rows is None or self._step < first_step:
                return None
            return out.new_zeros(1, self._length, out.shape[2]).index_copy(1, self._rows, out)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
