"""How good a draft is, counted as serving counts: against the verifier's top token over its full head.

A position whose top token lies outside the draft vocabulary is one the draft can't get right, so it counts as
wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eagle3.feed import supervised

if TYPE_CHECKING:
    import torch

    from eagle3.feed import Batch, Piece

# Rows of the head multiplied at once: 8,192 x 7,168 in bf16 are 117 MB.
HEAD_SLICE = 8192


def full_top1(states: torch.Tensor, norm: torch.nn.Module, head: torch.Tensor) -> torch.Tensor:
    """The verifier's top token, from its final states.

    Args:
        states: final, un-normed states [S, H].
        norm: its final norm.
        head: its whole head [V, H], any dtype; multiplied in slices, in float32 on a CPU.

    Returns:
        int64 [S].
    """
    import torch

    kind = torch.float32 if states.device.type == "cpu" else head.dtype
    with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
        normed = norm(states.float()).to(kind)
        best, index = None, None
        for first in range(0, len(head), HEAD_SLICE):
            value, at = (normed @ head[first : first + HEAD_SLICE].to(kind).T).max(dim=-1)
            if best is None:
                best, index = value, at
                continue
            better = value > best
            best, index = torch.where(better, value, best), torch.where(better, at + first, index)
    return index


def matches(
    drafts: list[torch.Tensor], top1: torch.Tensor, mask: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafted tokens the verifier would accept.

    Args:
        drafts: per TTT step, the draft's top token [1, S] (draft ids), drafted from position s.
        top1: the verifier's top token at each position, int64 [S] (any value where not supervised).
        mask: supervised positions, bool [S].
        kept: verifier id of each draft id, int64 [D].

    Returns:
        right, valid: bool [K, S]. Entry [k, s] is about the token that a chain started at s drafts for s + k;
        valid if both are supervised (they then lie in one document: feed.py keeps documents K - 1
        unsupervised positions apart).
    """
    import torch

    steps, length = len(drafts), len(mask)
    right = torch.zeros(steps, length, dtype=torch.bool, device=mask.device)
    valid = torch.zeros_like(right)
    for k, draft in enumerate(drafts):
        if k < length:
            valid[k, : length - k] = mask[: length - k] & mask[k:]
            right[k, : length - k] = kept[draft[0, : length - k]] == top1[k:]
    return right & valid, valid


def chain_counts(right: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Chains that got as far as step k, and those of them right there: float64 [2, K] (tried, right)."""
    import torch

    alive = torch.cat([torch.ones_like(right[:1]), right[:-1].int().cumprod(0).bool()])
    tried = alive & valid
    return torch.stack([tried.sum(1), (tried & right).sum(1)]).double()


def conditional(counts: torch.Tensor) -> list[float]:
    """Conditional accuracy per step from `chain_counts`; 0 where no chain got that far."""
    tried, right = counts.tolist()
    return [r / t if t else 0.0 for t, r in zip(tried, right, strict=True)]


def expected_length(accuracy: list[float]) -> float:
    """Expected tokens per verify step of a chain: 1 + a0 + a0 a1 + a0 a1 a2 + ...

    With a_k the probability that the draft's token k is accepted given that those before it were, the product
    a0 ... a_k is the probability that at least k + 1 are, and the sum of these is the expected number of
    accepted tokens; one more comes from the verifier itself. (Leviathan, Kalman, Matias 2023, "Fast Inference
    from Transformers via Speculative Decoding", eq. 1, is the case of equal a_k: (1 - a^(n+1)) / (1 - a).)
    """
    total, product = 1.0, 1.0
    for a in accuracy:
        product *= a
        total += product
    return total


@dataclass
class Walk:
    """Counts of chain serving over stored answers; fields as vLLM's counters."""

    steps: int
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.accepted = self.accepted or [0] * self.steps

    def answer(self, right: list[list[bool]]) -> None:
        """Walk one answer as the server does.

        The first draft starts at the first supervised position; r tokens in a row are right (at most
        `steps`); the next draft starts r + 1 positions on, after the verifier's own token.

        Args:
            right: [K][n], from `matches`, for the n supervised positions of one document.
        """
        start, n = 0, len(right[0])
        while start < n:
            run = 0
            while run < self.steps and start + run < n and right[run][start]:
                run += 1
            self.drafts += 1
            for k in range(run):
                self.accepted[k] += 1
            start += run + 1

    def add(self, other: Walk) -> None:
        self.drafts += other.drafts
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]

    @property
    def length(self) -> float | None:
        """Acceptance length: 1 + accepted / drafts."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None


class Top1Cache:
    """The verifier's top tokens of whole samples, computed once (a full head costs as much as training)."""

    def __init__(self):
        self._known: dict[str, torch.Tensor] = {}

    def of(self, batch: Batch, norm: torch.nn.Module, head: torch.Tensor, keep: bool) -> torch.Tensor:
        """int64 [S] for a batch, 0 where unsupervised.

        Args:
            keep: remember it by sample (validation), or not (a training step that is logged).
        """
        import torch

        mask = batch.loss_mask[0]
        out = torch.zeros(len(mask), dtype=torch.long, device=mask.device)
        pieces: tuple[Piece, ...] = batch.row.pieces
        if not pieces:
            return out
        if keep and all(p.info.id in self._known for p in pieces):
            out[mask] = torch.cat([self._known[p.info.id] for p in pieces]).to(out)
            return out
        found = full_top1(batch.targets[0][mask], norm, head)
        out[mask] = found
        if keep:
            sizes = [supervised(p.info) for p in pieces]
            self._known.update(
                (p.info.id, part.int().cpu()) for p, part in zip(pieces, found.split(sizes), strict=True)
            )
        return out
