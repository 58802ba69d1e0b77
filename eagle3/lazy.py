"""Tensors of checkpoints, read and written piecewise: a draft of any size converts in little memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import StageError
from eagle3.tensorfile import Stored, WrongSize, read_header
from eagle3.vocab import FILE as MAP_FILE

if TYPE_CHECKING:
    import torch

# Tensors are read and written in pieces of at most this: a piece stays in a core's cache from reading to
# writing, and the allocator reuses it (64 MB pieces took twice the time).
CHUNK_BYTES = 4 << 20


@contextlib.contextmanager
def one_thread():
    """For small tensors: threads gain nothing there, while OpenMP's waiting costs four times the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read in row slices; `rows(a, b)` -> [b - a, ...] in the stored dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], torch.Tensor]

    def whole(self) -> torch.Tensor:
        return self.rows(0, self.shape[0])

    def chunks(self) -> Iterator[torch.Tensor]:
        """The tensor in pieces of at most CHUNK_BYTES."""
        width = self.dtype.itemsize
        for n in self.shape[1:]:
            width *= n
        step = max(1, CHUNK_BYTES // width)
        for a in range(0, self.shape[0], step):
            yield self.rows(a, min(a + step, self.shape[0]))


def in_memory(tensor: torch.Tensor) -> Lazy:
    """A tensor that is here already."""
    return Lazy(tuple(tensor.shape), tensor.dtype, lambda a, b: tensor[a:b])


def open_file(path: Path, only: str | None = None) -> dict[str, Lazy]:
    """Tensors of one safetensors file by name, read with pread: nothing is mapped, memory stays at one piece.

    Args:
        only: a name to take alone; then whatever else is in the file does not matter.

    Raises:
        StageError: not a safetensors file, or of another size than its header says; a tensor without rows or
            of a dtype that torch does not have.
    """
    try:
        tensors, _ = read_header(path)
    except WrongSize as err:
        if err.found < err.wanted:
            raise StageError(f"{path} is shorter than its header says: it is damaged") from None
        raise StageError(f"{path} is not a readable safetensors file ({err})") from None
    except (ValueError, OSError) as err:
        raise StageError(f"{path} is not a readable safetensors file ({err})") from None
    return {name: _lazy(path, name, t) for name, t in tensors.items() if only in (None, name)}


def _lazy(path: Path, name: str, stored: Stored) -> Lazy:
    import torch
    from safetensors.torch import _TYPES

    shape, dtype = stored.shape, _TYPES.get(stored.dtype)
    if not shape or not shape[0] or dtype is None:
        raise StageError(f"{path}: tensor {name} of shape {shape} and dtype {stored.dtype} is no draft's")
    row_bytes = stored.bytes // shape[0]

    def rows(a: int, b: int) -> torch.Tensor:
        raw = torch.empty((b - a) * row_bytes, dtype=torch.uint8)
        with open(path, "rb", buffering=0) as f:
            if os.preadv(f.fileno(), [memoryview(raw.numpy())], stored.begin + a * row_bytes) != len(raw):
                raise StageError(f"{path} ends early: it is damaged")
        return raw.view(dtype).view(b - a, *shape[1:])

    return Lazy(tuple(shape), dtype, rows)


def open_tensors(folder: Path) -> dict[str, Lazy]:
    """All tensors of a checkpoint folder under their stored names: *.safetensors, else pytorch_model*.bin.

    Raises:
        StageError: no weights, or one name in two files.
    """
    import torch

    files = sorted(f for f in folder.glob("*.safetensors") if f.name != MAP_FILE)
    found: dict[str, Lazy] = {}
    for path in files or sorted(folder.glob("pytorch_model*.bin")):
        if path.suffix == ".bin":
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            part = {name: in_memory(t) for name, t in state.items()}
        else:
            part = open_file(path)
        if twice := found.keys() & part.keys():
            raise StageError(f"{folder}: {sorted(twice)[:3]} are in two files")
        found |= part
    if not found:
        raise StageError(f"{folder} holds neither *.safetensors nor pytorch_model.bin")
    return found


def write_tensors(
    files: list[tuple[Path, Callable[[str], str]]], tensors: dict[str, Lazy], dtypes: dict
) -> None:
    """Write the same tensors into several safetensors files, each under its own names, in one pass.

    Args:
        files: (path, name in speculators' spelling -> name in that file).
        dtypes: name -> dtype to store.

    Raises:
        StageError: a value is NaN or infinite.
    """
    import torch
    from safetensors.torch import _TYPES

    codes = {dtype: code for code, dtype in _TYPES.items()}
    handles = []
    for path, rename in files:
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name, lazy in tensors.items():
            size = dtypes[name].itemsize
            for n in lazy.shape:
                size *= n
            header[rename(name)] = {"dtype": codes[dtypes[name]], "shape": list(lazy.shape),
                                    "data_offsets": [offset, offset + size]}  # fmt: skip
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        handle = open(path, "wb", buffering=0)
        handle.write(len(text).to_bytes(8, "little") + text)
        handles.append(handle)
    try:
        for name, lazy in tensors.items():
            for piece in lazy.chunks():
                piece = piece.to(dtypes[name]).contiguous()
                # NaN and infinity survive a sum; one pass instead of a mask per value.
                if piece.is_floating_point() and not bool(piece.sum(dtype=torch.float32).isfinite()):
                    raise StageError(f"tensor {name} holds NaN or infinite values: the draft is broken")
                raw = memoryview(piece.reshape(-1).view(torch.uint8).numpy())
                for handle in handles:
                    if handle.write(raw) != len(raw):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), handle.name)
        for handle in handles:
            os.fsync(handle.fileno())
    finally:
        for handle in handles:
            handle.close()


def same_values(a: Lazy, b: Lazy) -> bool:
    """Whether two tensors are equal in bf16, compared piecewise."""
    import torch

    if a.shape != b.shape:
        return False
    at = 0
    for piece in a.chunks():
        if not torch.equal(piece.to(torch.bfloat16), b.rows(at, at + len(piece)).to(torch.bfloat16)):
            return False
        at += len(piece)
    return True
