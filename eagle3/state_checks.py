"""What a row's states must look like before they are stored, and how staged ones are read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eagle3.store import CHUNK_BYTES, pread_into
from eagle3.tensorfile import Stored

if TYPE_CHECKING:
    import torch

# A row whose median norm is 10 times smaller or larger than the others' is no state of this layer.
NORM_FACTOR = 10.0


class RowFailed(Exception):
    """This row can't be had; the run goes on. `reason` is counted, `detail` is for the reader."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class RowDropped(RowFailed):
    """This row is left out by a rule of the recipe: noted, never redone."""


class Transient(Exception):
    """Worth another try."""


class Stopped(Exception):
    """The run is ending; drop what is in hand."""


class LayerRange:
    """Typical size of a layer's states over the rows accepted so far; thread-safe."""

    SETTLED = 16

    def __init__(self, layers: list[int]):
        self.layers, self._lock = layers, threading.Lock()
        self._logs = np.zeros(len(layers))
        self._rows = 0
        self.low, self.high = np.full(len(layers), np.inf), np.zeros(len(layers))

    def usual(self) -> np.ndarray | None:
        """Median norm of each layer (geometric mean over rows), None while too few rows are known."""
        with self._lock:
            return np.exp(self._logs / self._rows) if self._rows >= self.SETTLED else None

    def add(self, medians: np.ndarray) -> None:
        """Count in a row that was stored."""
        with self._lock:
            self._logs += np.log(medians)
            self._rows += 1
            self.low, self.high = np.minimum(self.low, medians), np.maximum(self.high, medians)

    def report(self) -> dict:
        """Layer id -> [lowest, highest] median norm of a row."""
        return {
            str(k): [float(f"{a:.4g}"), float(f"{b:.4g}")]
            for k, a, b in zip(self.layers, self.low, self.high)
            if self._rows
        }


def check_norms(layers: list[int], medians: np.ndarray, usual: np.ndarray | None) -> None:
    """Raises RowFailed if a layer's median norm (one value per layer) is far from the other rows'."""
    if usual is None:
        return
    off = np.abs(np.log(medians / usual))
    if off.max() > np.log(NORM_FACTOR):
        k = int(off.argmax())
        detail = f"layer {layers[k]}: median norm {medians[k]:.4g}, other rows {usual[k]:.4g}"
        raise RowFailed("norm_range", detail)


class StateCheck:
    """Looks at the states of one row by chunks: finite, not zero or constant, layers and tokens distinct."""

    def __init__(self, layers: list[int], token_ids: np.ndarray):
        self.layers, self.ids = layers, token_ids
        self.norms: list[np.ndarray] = []
        self._first: torch.Tensor | None = None
        self._twins = np.ones((len(layers), len(layers)), dtype=bool)
        self._still = np.ones(len(layers), dtype=bool)

    def add(self, x: torch.Tensor) -> None:
        """Check a chunk bf16 [t, A + 1, H]; raises RowFailed."""
        import torch

        done = sum(map(len, self.norms))
        norms = torch.linalg.vector_norm(x, dim=-1).float()
        if not torch.isfinite(norms).all():
            t, k = (int(i) for i in (~torch.isfinite(norms)).nonzero()[0])
            raise RowFailed("not_finite", f"layer {self.layers[k]}, position {done + t}")
        # A constant row has |x0| * sqrt(H) as its norm; only rows that come near it are looked at closely.
        flat = (norms - x[..., 0].float().abs() * x.shape[-1] ** 0.5).abs() <= 0.02 * norms
        for t, k in flat.nonzero().tolist():
            if (x[t, k] == x[t, k, 0]).all():
                what = "zeros" if x[t, k, 0] == 0 else "constant"
                raise RowFailed(what, f"layer {self.layers[k]}, position {done + t}")
        self.norms.append(norms.numpy())
        if self._first is None:
            self._first = x[0].clone()
        probe = [x[0], x[len(x) // 2], x[-1]]
        for i in range(len(self.layers)):
            for j in range(i):
                if self._twins[i, j]:
                    self._twins[i, j] = all(torch.equal(p[i], p[j]) for p in probe)
            if self._still[i]:
                self._still[i] = all(torch.equal(p[i], self._first[i]) for p in probe)

    def finish(self) -> np.ndarray:
        """Last checks over the whole row; returns the median norm per layer."""
        for i, j in zip(*np.nonzero(np.tril(self._twins, -1))):
            raise RowFailed("same_layers", f"layers {self.layers[j]} and {self.layers[i]} are identical")
        if len(self.ids) > 2 and len(set(self.ids.tolist())) > 1 and self._still.any():
            k = self.layers[int(self._still.argmax())]
            raise RowFailed("same_states", f"layer {k} has the same state at every position")
        return np.median(np.concatenate(self.norms), axis=0)


def chunks_of(path: Path, stored: Stored, count: int) -> Iterator[torch.Tensor]:
    """bf16 [t, L, H] chunks of the first `count` states of a staged tensor; the buffer is reused.

    A server on a CPU without bf16 computes in float32 and leaves its states so.
    """
    import torch

    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[stored.dtype]
    _, layers, hidden = stored.shape
    width = layers * hidden * dtype.itemsize
    step = max(1, CHUNK_BYTES // width)
    buffer = torch.empty(min(step, count) * width, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(0, count, step):
            size = min(step, count - at) * width
            pread_into(fd, view[:size], stored.begin + at * width, path)
            chunk = buffer[:size].view(dtype).view(-1, layers, hidden)
            yield chunk if dtype == torch.bfloat16 else chunk.to(torch.bfloat16)
    finally:
        os.close(fd)


def staged_ids(path: Path, stored: Stored) -> np.ndarray:
    """Token ids beside the staged states, int64 or int32 [t]; raises RowFailed for another kind of tensor."""
    if stored.dtype not in ("I64", "I32"):
        raise RowFailed("shape", f"token ids are {stored.dtype} {stored.shape}")
    out = np.empty(stored.shape, dtype="<i8" if stored.dtype == "I64" else "<i4")
    with open(path, "rb") as f:
        f.seek(stored.begin)
        f.readinto(memoryview(out).cast("B"))
    return out
