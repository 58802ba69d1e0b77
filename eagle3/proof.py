"""State proof: the verifier's final norm and head, applied to stored states, must give what the server said.

A state that is missing, of another layer, of another request or zero trains to a plausible, worthless draft;
nothing else in the pipeline would notice. The server's raw log-probabilities of its likeliest tokens are
compared with those computed here, on the CPU, from the states of the sealed shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import StageError
from eagle3.store import SampleInfo, Shard, Store, pread_into, raw, widen
from eagle3.tensorfile import read_header

if TYPE_CHECKING:
    import torch

    from eagle3.verifier import Verifier

log = logging.getLogger("eagle3")

# Positions looked at per row: a row's states are written in one go, so more would say little more.
POSITIONS = 16
# The control is judged over at least so many: at a single position another layer may agree by chance, and
# that must not end a run (seen once in 90 shards of a bench whose rows have one position each).
CONTROL_POSITIONS = 16
# Work over the whole vocabulary in a run (64 rows: SmolLM2 1e11, Kimi 5e12 flops): when it is used up, shards
# are proved by the differences between the likeliest tokens, which told wrong layers as well in every trial.
# With 5e11 the first eight shards at Kimi's width took four seconds each, and everything waited for them.
FULL_FLOPS = 2e11
# What reading and widening the head costs, in flops per weight.
HEAD_READ = 40.0
# Head rows multiplied at once: 4,096 x 7,168 in float32 is 117 MB.
SLICE = 4096


@dataclass(frozen=True)
class Bounds:
    """Allowed |difference| of log-probabilities of one row, in standard deviations of the logits.

    A scale-free unit, because logits of a small random model span 0.5 and those of a chat model 40. Measured
    as median / p99 of the worst of 24 rows: SmolLM2 0.011 / 0.056 in bf16 (the server rounds its logits to
    bf16), 0.027 / 0.25 in fp8 (3 bits of mantissa); a random toy 0.003 / 0.014 and 0.019 / 0.084. The nearest
    wrong layer, n - 1, gives at least 0.24 / 1.6 on SmolLM2 and 0.086 / 0.44 on the toy. `gap` is the lead of
    the server's best token from which ours must be the same; the largest lead at which fp8 changed it was
    0.16.
    """

    median: float
    p99: float
    gap: float


BOUNDS = {"bf16": Bounds(0.04, 0.20, 0.5), "fp8": Bounds(0.07, 0.50, 0.5)}


@dataclass
class Comparison:
    """How far the states of one row (or of all) are from what the server said."""

    median: float
    p99: float
    top1_wrong: int
    top1_checked: int
    positions: int

    def passes(self, bounds: Bounds) -> bool:
        return self.median <= bounds.median and self.p99 <= bounds.p99 and not self.top1_wrong

    def __str__(self) -> str:
        return (
            f"median {self.median:.3f}, p99 {self.p99:.3f} of the logits' spread over {self.positions} "
            f"positions, top-1 differs at {self.top1_wrong} of {self.top1_checked} with a clear winner"
        )


class Head:
    """Final norm and output head of a verifier, read in slices of the vocabulary to keep memory small."""

    def __init__(self, verifier: Verifier):
        import torch

        name = verifier.tensor_names["head"]
        self.path = Path(verifier.path) / verifier.weight_map[name]
        dtype, self.shape, self.begin, _ = read_header(self.path)[0][name]
        kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        if dtype not in kinds:
            raise StageError(f"{self.path}: head {name} is {dtype}; the state proof reads {', '.join(kinds)}")
        self.dtype = kinds[dtype]
        self.norm = verifier.norm_weight()
        self.eps = float(verifier.value("rms_norm_eps"))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm as the server does it: float32 inside, bf16 out (returned as float32)."""
        import torch

        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm
        return x.to(torch.bfloat16).float()

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Head rows [count, H] as float32."""
        import torch

        out = torch.empty(count, self.shape[1], dtype=self.dtype)
        with open(self.path, "rb") as f:
            pread_into(f.fileno(), raw(out), self.begin + first * out[0].nbytes, self.path)
        return out.float()

    def full(self, x: torch.Tensor, wanted: torch.Tensor):
        """Over the whole vocabulary, from normed states x [P, H].

        Returns:
            Log-probabilities of the `wanted` [P, k] tokens, top token [P], standard deviation of the logits
            [P].
        """
        import torch

        lse = torch.full((len(x),), -torch.inf)
        best, top = torch.full((len(x),), -torch.inf), torch.zeros(len(x), dtype=torch.long)
        picked, total, squares = torch.empty(wanted.shape), torch.zeros(len(x)), torch.zeros(len(x))
        for first in range(0, self.shape[0], SLICE):
            logits = x @ self.rows(first, min(SLICE, self.shape[0] - first)).T
            lse = torch.logaddexp(lse, logits.logsumexp(-1))
            high, where = logits.max(-1)
            top = torch.where(high > best, where + first, top)
            best = torch.maximum(best, high)
            total, squares = total + logits.sum(-1), squares + logits.pow(2).sum(-1)
            inside = (wanted >= first) & (wanted < first + logits.shape[1])
            values = logits.gather(1, (wanted - first).clamp(0, logits.shape[1] - 1))
            picked = torch.where(inside, values, picked)
        spread = (squares / self.shape[0] - (total / self.shape[0]).pow(2)).clamp(min=0).sqrt()
        return picked - lse[:, None], top, spread

    def sampled_spread(self, x: torch.Tensor) -> float:
        """Mean standard deviation of the logits of normed states x [P, H], from at most 4,096 tokens."""
        import torch

        size, last = min(64, self.shape[0]), self.shape[0] - min(64, self.shape[0])
        firsts = sorted({round(i * last / 63) for i in range(64)})
        logits = torch.cat([x @ self.rows(first, size).T for first in firsts], 1)
        return float(logits.std(-1, correction=0).mean())

    def few(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Logits of `wanted` [P, k] tokens only."""
        import torch

        weight = torch.stack([self.rows(t, 1)[0] for t in wanted.flatten().tolist()])
        return torch.einsum("ph,pkh->pk", x, weight.view(*wanted.shape, -1))


@dataclass
class Evidence:
    """States of one row at P positions beside what the server said there: k tokens, best first."""

    row: str
    final: torch.Tensor  # [P, H]
    control: torch.Tensor  # [P, H], the last auxiliary layer
    tokens: torch.Tensor  # [P, k]
    said: torch.Tensor  # [P, k]


@dataclass
class Verdict:
    """All rows, the worst one, the mean standard deviation of the logits, and how far each value is off."""

    found: Comparison
    row: str
    worst: Comparison
    spread: float
    off: torch.Tensor  # [P, k], in spreads


def pooled(verdicts: list[Verdict]) -> Comparison:
    """Several verdicts as one."""
    import torch

    flat, found = torch.cat([v.off.flatten() for v in verdicts]), [v.found for v in verdicts]
    wrong, checked = sum(f.top1_wrong for f in found), sum(f.top1_checked for f in found)
    positions = sum(f.positions for f in found)
    return Comparison(float(flat.median()), float(flat.quantile(0.99)), wrong, checked, positions)


def compare(head: Head, evidence: list[Evidence], bounds: Bounds, spread: float | None) -> list[Verdict]:
    """Compare states with the server's log-probabilities: the final ones, and the control.

    Args:
        bounds: by which the worst row is chosen; `gap` is the lead of the server's best token, in spreads,
            from which the top token must agree.
        spread: standard deviation of logits if it is known: then only differences between the k tokens are
            compared, which takes k head rows a position; None: the whole vocabulary.
    """
    import torch

    tokens, said = torch.cat([e.tokens for e in evidence]), torch.cat([e.said for e in evidence])
    # Both at once: reading the head costs more than multiplying with it.
    x = head.normed(torch.cat([e.final for e in evidence] + [e.control for e in evidence]))
    twice = torch.cat([tokens, tokens])
    if spread is None:
        here, top, spreads = head.full(x, twice)
        off = (here - torch.cat([said, said])).abs()
    else:
        here, spreads = head.few(x, twice), torch.full((len(x),), spread)
        top = twice.gather(1, here.argmax(-1, keepdim=True))[:, 0]
        off = here - here.mean(-1, keepdim=True)
        off = (off - torch.cat([said - said.mean(-1, keepdim=True)] * 2)).abs()
    # A spread of zero comes from states that are all alike; nothing agrees with the server then.
    off = (off / spreads[:, None]).nan_to_num(1e9, posinf=1e9)
    lead = said[:, 0] - said[:, 1]
    ends = torch.tensor([len(e.tokens) for e in evidence]).cumsum(0).tolist()

    def verdict(part: slice) -> Verdict:
        mine, clear = off[part], lead >= bounds.gap * spreads[part]
        wrong = clear & (top[part] != tokens[:, 0])

        def summary(rows: slice) -> Comparison:
            flat, checked = mine[rows].flatten(), int(clear[rows].sum())
            middle, high = float(flat.median()), float(flat.quantile(0.99))
            return Comparison(middle, high, int(wrong[rows].sum()), checked, len(mine[rows]))

        rows = [summary(slice(end - len(e.tokens), end)) for end, e in zip(ends, evidence, strict=True)]

        def badness(i: int) -> tuple[int, float]:
            row = rows[i]
            return row.top1_wrong, max(row.median / bounds.median, row.p99 / bounds.p99)

        worst = max(range(len(rows)), key=badness)
        spread = float(spreads[part].mean())
        return Verdict(summary(slice(None)), evidence[worst].row, rows[worst], spread, mine)

    return [verdict(slice(None, len(tokens))), verdict(slice(len(tokens), None))]


class Prover:
    """Proves each sealed shard before it is listed; called by StoreWriter.

    Args:
        head: of the verifier.
        said: row id -> {k: {token: log-probability}} of rows that asked with their request; taken out when
            used.
        rows: rows checked over the whole vocabulary, as far as FULL_FLOPS go (but always the first shard);
            later shards get the cheaper comparison. 0: all do, beside a prover that does the other.
        ask: (token ids, prompt length) -> the same for a row that did not ask, for shards without any.
        threads: of the matrix products.
    """

    def __init__(
        self,
        head: Head,
        said: dict[str, dict],
        rows: int,
        ask: Callable[[list[int], int], dict],
        threads: int = 1,
    ):
        self.head, self.said, self.rows, self.ask, self.threads = head, said, rows, ask, threads
        self.done, self.flops, self.spread = 0, 0.0, None
        self._control: list[Verdict] = []

    def __call__(self, store: Store, shard: Shard) -> dict:
        """What to note about the shard.

        Raises:
            StageError: the states are not what the server computed its answer from, or the test can't tell.
        """
        import torch

        torch.set_num_threads(self.threads)
        chosen = [(info, said) for info in shard.samples if (said := self.said.pop(info.id, None))]
        if not chosen:
            info = min(shard.samples, key=lambda s: s.tokens)
            chosen = [(info, self.ask(store.token_ids(info).tolist(), info.prompt))]
        parts = [self._evidence(store, info, said) for info, said in chosen]
        weights = self.head.shape[0] * self.head.shape[1]
        work = weights * (4.0 * sum(len(e.tokens) for e in parts) + HEAD_READ)
        full = self.done < self.rows and (self.spread is None or self.flops + work <= FULL_FLOPS)
        self.done, self.flops = self.done + len(chosen), self.flops + work * full
        bounds, path = BOUNDS[store.dtype], store.folder / shard.name
        if not full and self.spread is None:
            x = self.head.normed(torch.cat([e.final for e in parts]))
            self.spread = self.head.sampled_spread(x)
        final, control = compare(self.head, parts, bounds, None if full else self.spread)
        if full:
            self.spread = final.spread
        if not final.worst.passes(bounds):
            raise StageError(
                f"state proof failed for {path}: final norm and head over the stored states of layer "
                f"{store.layers[-1]} do not give the server's log-probabilities; worst row {final.row}: "
                f"{final.worst}; allowed: median {bounds.median}, p99 {bounds.p99}. Likely causes: the last "
                "layer id is off by one, states of requests are swapped, or the server wrote zeros. The "
                "shard was removed"
            )
        self._control.append(control)
        if sum(v.found.positions for v in self._control) >= CONTROL_POSITIONS:
            same, self._control = pooled(self._control), []
            if same.passes(bounds):
                raise StageError(
                    f"state proof of {path} proves nothing: layer {store.layers[-2]} passes it too "
                    f"({same}), so it and layer {store.layers[-1]} are the same. The shard was removed"
                )
        found, worst = final.found, final.worst
        log.info("%s proved by %d rows: %s", shard.name, len(chosen), found)
        return {
            "rows": len(chosen), "positions": found.positions, "median": round(found.median, 4),
            "p99": round(found.p99, 4), "worst_row_median": round(worst.median, 4),
            "top1_checked": found.top1_checked, "vocabulary": "all" if full else "few",
            "control_median": round(control.found.median, 4),
        }  # fmt: skip

    def _evidence(self, store: Store, info: SampleInfo, said: dict) -> Evidence:
        """States at up to POSITIONS positions of a row, with what was said there.

        Raises:
            StageError: nothing was said about any stored state.
        """
        import torch

        ks = sorted(k for k in said if k < info.finals and len(said[k]) > 1)
        ks = [ks[i * len(ks) // min(POSITIONS, len(ks))] for i in range(min(POSITIONS, len(ks)))]
        if not ks:
            raise StageError(f"row {info.id}: the server gave no log-probabilities for the state proof")
        width = min(len(said[k]) for k in ks)
        ranked = [sorted(said[k].items(), key=lambda item: -item[1])[:width] for k in ks]
        return Evidence(
            info.id,
            torch.stack([_row(store, info, k, last=True) for k in ks]),
            torch.stack([_row(store, info, k, last=False) for k in ks]),
            torch.tensor([[t for t, _ in r] for r in ranked]),
            torch.tensor([[v for _, v in r] for r in ranked]),
        )


def _row(store: Store, info: SampleInfo, k: int, last: bool) -> torch.Tensor:
    """Final state k, or the last auxiliary state at the same position, as float32 [H]."""
    import torch

    layers = 1 if last else store.num_aux
    x = torch.empty(1, layers, store.hidden_size, dtype=store.torch_dtype)
    scale = torch.empty(1, layers) if store.dtype == "fp8" else None
    if last:
        store.read_raw(info, final_out=x, final_scale_out=scale, final_first=k)
    else:
        store.read_raw(info, aux_out=x, aux_scale_out=scale, aux_first=info.prompt - 1 + k)
    x = x if scale is None else widen(x, scale)
    return x[0, -1].float()
