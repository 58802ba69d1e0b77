"""What a safetensors file holds, from its header alone; any file of that format, ours or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple


class Stored(NamedTuple):
    """Where a tensor lies: dtype as the format spells it ("BF16"), shape, first byte in the file, bytes."""

    dtype: str
    shape: list[int]
    begin: int
    bytes: int


class WrongSize(ValueError):
    """A file of another size than its header adds up to."""

    def __init__(self, found: int, wanted: int):
        super().__init__(f"{found} bytes, its header says {wanted}")
        self.found, self.wanted = found, wanted


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors by name, and the file's metadata.

    Raises:
        WrongSize: cut off, or with something behind its last tensor.
        ValueError: not a safetensors file.
    """
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        length = int.from_bytes(f.read(8), "little")
        if size < 10 or not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f"{size} bytes, no safetensors header")
        header = json.loads(f.read(length))
    tensors, base = {}, 8 + length
    try:
        metadata = header.pop("__metadata__", {})
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = Stored(entry["dtype"], entry["shape"], base + begin, end - begin)
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise ValueError(f"no safetensors header ({type(err).__name__}: {err})") from None
    wanted = max((t.begin + t.bytes for t in tensors.values()), default=base)
    if wanted != size:
        raise WrongSize(size, wanted)
    return tensors, metadata
