"""The feed: packed rows read straight from the store, ahead of the device that trains on them.

An epoch is a list of optimizer steps, a step a set of samples, a row some of them behind one another. Which
samples form which step is a function of (row ids, seed, epoch, tokens per step) and of nothing else: not of
shards, not of the length or number of rows, not of the number of processes. Those only decide how a step's
samples are spread.

One sample of T states (T + 1 tokens, prompt p) becomes T - 1 positions, speculators' `shift_batch`:

    position j = 1 .. T - 1: token x_j, auxiliary state g_(j-1), target state y_j (predicts x_(j+1)),
                             position id j; supervised where j >= p, so the first pair is (first answer
                             token -> second)

At TTT step k the loss compares the draft's output at j with the target at j + k, across the end of a document
too. So that those pairs never count, a document begins with at least `lead` = TTT steps - 1 unsupervised
positions; where the prompt is shorter than that, padding (document -1) stands before it. The targets of
unsupervised positions are never read from disk: they are zero.

Threads pread the bytes of whole samples into a few reusable host buffers (pinned for a GPU); one more thread
copies finished rows to the device on a stream of its own and widens fp8 there. The trainer only takes
finished rows; the time it waits for them is counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from eagle3.contract import ConfigError

if TYPE_CHECKING:
    import torch

    from eagle3.store import SampleInfo, Store

# Samples a step may look ahead in the epoch's order for ones that still fit (less padding).
LOOK_AHEAD = 64


@dataclass(frozen=True)
class Piece:
    """A sample's place in a row: its first position (a padding gap, if any, comes before it)."""

    info: SampleInfo
    start: int

    @property
    def end(self) -> int:
        return self.start + self.info.states - 1


@dataclass(frozen=True)
class Row:
    """Samples behind one another; an empty row is padding that keeps ranks in step."""

    pieces: tuple[Piece, ...]

    @property
    def used(self) -> int:
        """Positions up to the end of the last document."""
        return self.pieces[-1].end if self.pieces else 0

    @property
    def supervised(self) -> int:
        return sum(supervised(p.info) for p in self.pieces)

    @property
    def tokens(self) -> int:
        """Positions that belong to documents."""
        return sum(p.end - p.start for p in self.pieces)


@dataclass(frozen=True)
class Step:
    """What one optimizer step trains on: rows of all ranks."""

    index: int
    rows: tuple[Row, ...]

    @property
    def supervised(self) -> int:
        return sum(row.supervised for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def ids(self) -> list[str]:
        return [p.info.id for row in self.rows for p in row.pieces]


@dataclass
class Batch:
    """One row on its device. T positions, S rows of the head (S = T unless compact), A aux layers, H hidden.

    Attributes:
        hidden_states: bf16 (float32 on a CPU) [1, T, A * H].
        input_ids, document_ids, position_ids: int64 [1, T]; document -1 is padding.
        targets: final states, [1, S, H], zero where unsupervised.
        loss_mask: bool [1, S].
        head_rows: int64 [S], the positions that the head is asked for; None: all of them.
        row, step, last: what it is made of, its step's index in the epoch, whether it is this rank's last of
        the step.
    """

    hidden_states: torch.Tensor
    input_ids: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    head_rows: torch.Tensor | None
    row: Row
    epoch: int
    step: int
    last: bool


def supervised(info: SampleInfo) -> int:
    """Positions of a sample that add to the loss: its answer tokens but the first."""
    return info.states - info.prompt


def gap(info: SampleInfo, lead: int) -> int:
    """Padding before a sample whose prompt gives fewer than `lead` unsupervised positions."""
    return max(0, lead - (info.prompt - 1))


def usable(infos: list[SampleInfo], row_tokens: int, lead: int) -> tuple[list[SampleInfo], int]:
    """Samples that can be trained on, and how many have no supervised position.

    Raises:
        ConfigError: a sample is longer than a row; both numbers are named.
    """
    kept = [info for info in infos if supervised(info) > 0]
    longest = max(kept, key=lambda i: i.states - 1 + gap(i, lead), default=None)
    if longest and (need := longest.states - 1 + gap(longest, lead)) > row_tokens:
        raise ConfigError(
            f"row {longest.id} takes {need} positions, TRAIN_ROW_TOKENS is {row_tokens}: raise it in the "
            "profile (or lower data.max_prompt_tokens or answers.max_tokens and run 01 anew)"
        )
    return kept, len(infos) - len(kept)


def epoch_order(infos: list[SampleInfo], seed: int, epoch: int) -> list[SampleInfo]:
    """A shuffle that depends on ids, seed and epoch only."""
    return sorted(infos, key=lambda i: (xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{i.id}".encode()), i.id))


def plan_steps(ordered: list[SampleInfo], budget: int, row_tokens: int, lead: int) -> list[Step]:
    """Cut an order of samples into optimizer steps of at most `budget` positions (at least one sample each).

    A sample that no longer fits stays first in line for the next step, while up to LOOK_AHEAD later ones are
    tried.
    """
    steps, waiting, rest = [], deque(), iter(ordered)
    waiting.extend(info for info, _ in zip(rest, range(LOOK_AHEAD)))
    while waiting:
        chosen, left, kept = [], budget, deque()
        while waiting:
            info = waiting.popleft()
            size = info.states - 1 + gap(info, lead)
            if size <= left or not chosen:
                chosen.append(info)
                left -= size
                if (more := next(rest, None)) is not None:
                    waiting.append(more)
            else:
                kept.append(info)
        waiting = kept
        steps.append(Step(len(steps), pack(chosen, row_tokens, lead)))
    return steps


def pack(infos: list[SampleInfo], row_tokens: int, lead: int) -> tuple[Row, ...]:
    """Spread samples over as few rows as best-fit-decreasing finds."""
    rows: list[list[Piece]] = []
    used: list[int] = []
    for info in sorted(infos, key=lambda i: (-(i.states + gap(i, lead)), i.id)):
        size = info.states - 1 + gap(info, lead)
        fits = [r for r in range(len(rows)) if used[r] + size <= row_tokens]
        at = max(fits, key=lambda r: used[r], default=None)
        if at is None:
            at = len(rows)
            rows.append([])
            used.append(0)
        rows[at].append(Piece(info, used[at] + gap(info, lead)))
        used[at] += size
    return tuple(Row(tuple(pieces)) for pieces in rows)


def rank_rows(step: Step, rank: int, world: int) -> list[Row]:
    """The rows that one rank computes; every rank gets the same number, the last may be padding."""
    rows = list(step.rows) + [Row(())] * (-len(step.rows) % world)
    return rows[rank::world]


class _Buffer:
    """Host memory for one row: aux [T, A, H] and final [T, H] as stored, scales, small int64 tensors."""

    def __init__(self, rows: int, aux: int, hidden: int, fp8: bool, pinned: bool):
        import torch

        kind = torch.float8_e4m3fn if fp8 else torch.bfloat16

        def make(*shape, dtype):
            return torch.zeros(*shape, dtype=dtype, pin_memory=pinned)

        self.aux, self.final = make(rows, aux, hidden, dtype=kind), make(rows, hidden, dtype=kind)
        self.aux_scale = make(rows, aux, dtype=torch.float32) if fp8 else None
        self.final_scale = make(rows, dtype=torch.float32) if fp8 else None
        self.ids, self.documents, self.positions = (make(rows, dtype=torch.int64) for _ in range(3))
        self.mask = make(rows, dtype=torch.bool)


class Feed:
    """Rows of a set of samples for one rank.

    Args:
        store, infos: where the samples lie, and which (see `usable`).
        tokens_per_step: positions of one optimizer step over all ranks.
        row_tokens: positions of one row at most.
        lead: unsupervised positions that a document begins with at least: TTT steps - 1.
        device: where rows go.
        compute: dtype of the states handed out: bfloat16 under autocast, else float32.
        static: every row has `row_tokens` positions (a compiled model wants one shape); else rows end with
            their last document.
        compact: the head is asked only for supervised positions and the `lead` before them.
        threads, depth: readers, and rows in the making.
    """

    def __init__(
        self,
        store: Store,
        infos: list[SampleInfo],
        tokens_per_step: int,
        row_tokens: int,
        lead: int,
        device: torch.device,
        compute: torch.dtype,
        static: bool,
        compact: bool,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        threads: int = 1,
        depth: int = 3,
    ):
        self.store, self.infos, self.budget, self.row_tokens, self.lead = (
            store, infos, tokens_per_step, row_tokens, lead,
        )  # fmt: skip
        self.device, self.compute, self.static, self.compact = device, compute, static, compact
        self.seed, self.rank, self.world, self.depth = seed, rank, world, depth
        self.wait_seconds = 0.0
        self._verified: set[str] = set()
        self._plans: dict[int, list[Step]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="feed")
        self._buffers: list[_Buffer] = []

    def plan(self, epoch: int) -> list[Step]:
        """The optimizer steps of an epoch."""
        if epoch not in self._plans:
            self._plans = {e: p for e, p in self._plans.items() if e in (0, epoch - 1)}
            ordered = epoch_order(self.infos, self.seed, epoch)
            self._plans[epoch] = plan_steps(ordered, self.budget, self.row_tokens, self.lead)
        return self._plans[epoch]

    def __len__(self) -> int:
        """Optimizer steps of the first epoch (what speculators' Trainer asks a loader for)."""
        return len(self.plan(0))

    def batches(self, epoch: int, first_step: int = 0, until: int | None = None) -> Iterator[Batch]:
        """Rows of this rank from `first_step` of `epoch` on, in order; closing the iterator stops the
        readers.

        Args:
            until: the epoch to end before, None: just this one. Readers go on across the end of an epoch.

        Raises:
            StageError: a sample that can't be read or is not what was sealed; row and shard are named.
        """

        def rows() -> Iterator[tuple[Row, int, int, bool]]:
            for e in range(epoch, epoch + 1 if until is None else until):
                for step in self.plan(e)[first_step if e == epoch else 0 :]:
                    mine = rank_rows(step, self.rank, self.world)
                    yield from ((row, e, step.index, row is mine[-1]) for row in mine)

        yield from self._stream(rows())

    def _stream(self, todo: Iterator[tuple[Row, int, int, bool]]) -> Iterator[Batch]:
        out: queue.Queue = queue.Queue(maxsize=1 if self.device.type == "cpu" else 2)
        stop = threading.Event()
        worker = threading.Thread(target=self._work, args=(todo, out, stop), name="feed-rows", daemon=True)
        worker.start()
        try:
            while True:
                began = time.perf_counter()
                item, event = out.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                if event is not None:
                    _take(item, event)
                self.wait_seconds += time.perf_counter() - began
                yield item
        finally:
            stop.set()
            while worker.is_alive():
                try:
                    out.get(timeout=0.05)
                except queue.Empty:
                    continue
            worker.join()

    def _work(self, todo, out: queue.Queue, stop: threading.Event) -> None:
        """Body of the row thread: keep `depth` rows in the making, hand them out in order."""
        making: deque = deque()

        def start_next() -> None:
            if (item := next(todo, None)) is not None:
                buffer = self._buffer()
                reads = [self._pool.submit(self._read, piece, buffer) for piece in item[0].pieces]
                making.append((item, buffer, reads))

        try:
            stream = self._side_stream()
            for _ in range(self.depth):
                start_next()
            while making and not stop.is_set():
                item, buffer, reads = making.popleft()
                for read in reads:
                    read.result()
                batch, event = self._hand_over(*item, buffer, stream)
                out.put((batch, event))
                if event is not None:
                    event.synchronize()  # the buffer may be overwritten only after its copy
                self._buffers.append(buffer)
                start_next()
            out.put((None, None))
        except BaseException as err:  # the trainer raises it, in its own thread
            out.put((err, None))
        finally:
            for _, buffer, reads in making:
                for read in reads:
                    read.cancel() or read.exception()
                self._buffers.append(buffer)

    def _buffer(self) -> _Buffer:
        if self._buffers:
            return self._buffers.pop()
        store = self.store
        return _Buffer(
            self.row_tokens,
            store.num_aux,
            store.hidden_size,
            store.dtype == "fp8",
            self.device.type == "cuda",
        )

    def _read(self, piece: Piece, buffer: _Buffer) -> None:
        """Bytes of one sample into its place; its checksum is compared the first time."""
        info, store = piece.info, self.store
        if info.id not in self._verified:
            store.verify(info)
            self._verified.add(info.id)
        where = slice(piece.start, piece.end)
        rows = slice(piece.end - supervised(info), piece.end)
        scales = (None, None)
        if buffer.aux_scale is not None:
            scales = (buffer.aux_scale[where], buffer.final_scale[rows])
        # Final state 0 is position p - 1's, whose prediction (the first answer token) a draft never makes.
        store.read_raw(info, buffer.aux[where], scales[0], buffer.final[rows], scales[1], final_first=1)
        import torch

        buffer.ids[where] = torch.from_numpy(store.token_ids(info)[1:-1].astype("int64"))

    def _hand_over(self, row: Row, epoch: int, step: int, last: bool, buffer: _Buffer, stream):
        """Finish a row in its buffer and put it on the device: (Batch, event of the copy or None)."""
        import torch

        length = self.row_tokens if self.static else max(row.used, self.lead + 1)
        selected = arrange(row, buffer, length, self.lead)
        chosen = selected if self.compact else None
        small = [buffer.ids, buffer.documents, buffer.positions]
        if stream is None:
            ids, documents, positions = (t[:length].clone() for t in small)
            states = self._widen(buffer.aux[:length], buffer.aux_scale, length)
            finals, mask = buffer.final[:length], buffer.mask[:length]
            scale = buffer.final_scale[:length] if buffer.final_scale is not None else None
            if chosen is not None:
                finals, mask = finals[chosen], mask[chosen]
                scale = scale[chosen] if scale is not None else None
            targets, mask, event = self._widen(finals, scale, len(finals)), mask.clone(), None
        else:
            with torch.cuda.stream(stream):
                ids, documents, positions = (t[:length].to(self.device, non_blocking=True) for t in small)
                states = self._widen(*self._send(buffer.aux, buffer.aux_scale, length), length)
                targets = self._widen(*self._send(buffer.final, buffer.final_scale, length), length)
                mask = buffer.mask[:length].to(self.device, non_blocking=True)
                if chosen is not None:
                    chosen = chosen.to(self.device, non_blocking=True)
                    targets, mask = targets[chosen], mask[chosen]
                event = torch.cuda.Event()
                event.record(stream)
        return Batch(
            states.view(1, length, -1), ids[None], documents[None], positions[None], targets[None],
            mask[None],
            chosen, row, epoch, step, last,
        ), event  # fmt: skip

    def _send(self, values, scale, length: int):
        scale = scale[:length].to(self.device, non_blocking=True) if scale is not None else None
        return values[:length].to(self.device, non_blocking=True), scale

    def _widen(self, values, scale, length: int):
        """Stored states as the compute dtype; always a copy, the buffer is used again."""
        if scale is None:
            return values.to(self.compute, copy=self.device.type == "cpu")
        return (values.float() * scale[:length].unsqueeze(-1)).to(self.compute)

    def _side_stream(self):
        import torch

        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._buffers.clear()


def arrange(row: Row, buffer: _Buffer, length: int, lead: int):
    """Fill what is not read from disk: documents, positions, mask, zeros in between.

    Returns:
        int64 [S]: supervised positions and the `lead` before each document's first, in order.
    """
    import torch

    documents, positions, mask = buffer.documents[:length], buffer.positions[:length], buffer.mask[:length]
    documents.fill_(-1)
    positions.zero_()
    mask.zero_()
    chosen, at = [], 0
    for number, piece in enumerate(row.pieces):
        first = piece.end - supervised(piece.info)
        for part in (buffer.aux[at : piece.start], buffer.final[at:first]):
            part.view(torch.uint8).zero_()  # whatever an earlier row left there
        buffer.ids[at : piece.start] = 0
        documents[piece.start : piece.end] = number
        positions[piece.start : piece.end] = torch.arange(1, piece.end - piece.start + 1)
        mask[first : piece.end] = True
        chosen.append(torch.arange(first - lead, piece.end))
        at = piece.end
    buffer.aux[at:length].view(torch.uint8).zero_()
    buffer.final[at:length].view(torch.uint8).zero_()
    buffer.ids[at:length] = 0
    return torch.cat(chosen) if chosen else torch.arange(lead + 1)


def _take(batch: Batch, event) -> None:
    """Let the current stream use tensors that the copy stream made."""
    import torch

    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    for value in vars(batch).values():
        if isinstance(value, torch.Tensor):
            value.record_stream(stream)


def diagnose(store: Store, row: Row) -> str | None:
    """The first sample of a row that holds a NaN or an infinity, as a message; None if all are finite."""
    for piece in row.pieces:
        sample = store.read(piece.info)
        for name in ("aux", "final"):
            states = getattr(sample, name)
            if not states.float().isfinite().all():
                bad = (~states.float().isfinite()).flatten(1).any(1).nonzero()[0]
                return (
                    f"{store.folder / piece.info.shard}: row {piece.info.id} holds a non-finite {name} "
                    f"state ({int(bad)})"
                )
    return None
