"""The state store, format "eagle3-states-1": few large shards, named only when whole, and a manifest of them.

A row with a prompt of p tokens and an answer of a tokens has n = p + a token ids and T = n - 1 states: the
last token was never an input. Shard `shard-<part>-NNNNN.safetensors` holds N samples:

    token_ids    I32 [sum T + N]      of sample i: offsets[i] + i : offsets[i + 1] + i + 1
    prompt_lens  I32 [N]
    offsets, final_offsets            I64 [N + 1], in states
    aux          BF16 | F8_E4M3 [sum T, A, H]
    aux_scale    F32 [sum T, A]       fp8 only; value = fp8 * scale
    final        BF16 | F8_E4M3 [sum F, H], F = T - (p - 1): positions p - 1 .. T - 1
    final_scale  F32 [sum F]          fp8 only
    metadata     format, dtype, layers, ids, splits, domains, sources, checksums (JSON lists)

A checksum is xxh3_64 of ids | aux | aux_scale | final | final_scale. `manifest-<part>.jsonl` has a line per
sealed shard, appended after the shard got its name: a shard without a line was never finished, a line without
its whole shard is damage. Rows left out on purpose stand in the manifest too; a rerun does not redo them.
Here it is read; eagle3/store_writer.py writes it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from eagle3.contract import SPLITS, StageError, read_jsonl, write_text
from eagle3.tensorfile import Stored, read_header

if TYPE_CHECKING:
    import torch

log = logging.getLogger("eagle3")

FORMAT = "eagle3-states-1"
SHARD_NAME = re.compile(r"shard-(\d+of\d+)-(\d{5,})\.safetensors")
DTYPES = {"bf16": ("BF16", 2), "fp8": ("F8_E4M3", 1)}
FP8_MAX = 448.0
# Bytes moved at once: small enough to stay in a core's cache between reading, checking and writing.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """One stored sample; `start` and `final_start` count states (final states) before it in its shard."""

    id: str
    split: str
    domain: str
    source: str
    tokens: int
    prompt: int
    checksum: str
    input: str
    flags: tuple[str, ...]
    shard: str
    index: int
    start: int
    final_start: int

    @property
    def states(self) -> int:
        """T: auxiliary states stored."""
        return self.tokens - 1

    @property
    def finals(self) -> int:
        """F: final states stored, for positions prompt - 1 .. T - 1."""
        return self.tokens - self.prompt


@dataclass
class Sample:
    """One sample read back: token_ids int64 [T + 1], prompt length, aux bf16 [T, A, H], final bf16 [F, H]."""

    token_ids: torch.Tensor
    prompt: int
    aux: torch.Tensor
    final: torch.Tensor


@dataclass
class Shard:
    """One line of a manifest."""

    name: str
    bytes: int
    samples: list[SampleInfo]
    proof: dict | None = None


def input_digest(prompt_ids: list[int], response_ids: list[int] | None) -> str:
    """What a row asked for: 128-bit hash of its prompt and, if it brought one, its answer."""
    digest = xxhash.xxh3_128(np.asarray(prompt_ids, dtype="<i4").tobytes())
    if response_ids is not None:
        digest.update(b"|")
        digest.update(np.asarray(response_ids, dtype="<i4").tobytes())
    return digest.hexdigest()


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [..., H] -> (fp8 e4m3 [..., H], float32 scale [...]): value = fp8 * scale, a scale per row.

    The largest value of a row becomes 448, the largest of e4m3. The multiplier is rounded to bf16 first
    (twice as fast as through float32) and the scale is its exact inverse, so that costs no precision.
    """
    import torch

    # The bits of |x| order like |x|, and an integer maximum is ten times as fast.
    top = (x.view(torch.int16) & 0x7FFF).amax(-1).view(torch.bfloat16).float().clamp_(min=1e-30)
    up = (FP8_MAX / top).to(torch.bfloat16)
    return (x * up.unsqueeze(-1)).to(torch.float8_e4m3fn), up.float().reciprocal_()


def widen(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantize`, as bf16."""
    import torch

    return (x.float() * scale.unsqueeze(-1)).to(torch.bfloat16)


def raw(tensor) -> memoryview:
    """Bytes of a contiguous torch tensor, numpy array or buffer, without a copy."""
    if isinstance(tensor, memoryview):
        return tensor.cast("B") if tensor.nbytes else memoryview(b"")
    if isinstance(tensor, np.ndarray):
        return memoryview(tensor.reshape(-1).view(np.uint8))
    if hasattr(tensor, "data_ptr"):
        import torch

        if not tensor.is_contiguous():
            raise ValueError("a buffer for states must be contiguous")
        # as_strided, because a dimension of size 1 may have any stride and still be contiguous.
        return memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())
    return memoryview(tensor).cast("B")


def pread_into(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from a file; releases the GIL while it copies.

    Raises:
        StageError: the file ends too early.
    """
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if got == 0:
            raise StageError(
                f"{path} ends at byte {offset + done}, {len(buffer) - done} bytes short; {REPAIR_HINT}"
            )
        done += got


REPAIR_HINT = "run 03_extract_hidden.py: it drops what is broken and redoes just these rows"


class _Files:
    """A few open files, shared by threads; a file in use is never closed."""

    def __init__(self, limit: int = 32):
        self._lock, self._limit = threading.Lock(), limit
        self._open: OrderedDict[Path, list[int]] = OrderedDict()  # path -> [fd, users]

    @contextmanager
    def use(self, path: Path) -> Iterator[int]:
        """File descriptor of `path`, open for reading."""
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = self._open[path] = [os.open(path, os.O_RDONLY), 0]
            self._open.move_to_end(path)
            entry[1] += 1
            idle = [p for p, (_, users) in self._open.items() if not users]
            for old in idle[: max(0, len(self._open) - self._limit)]:
                os.close(self._open.pop(old)[0])
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def forget(self, path: Path) -> None:
        """Close a file that is about to be deleted."""
        with self._lock:
            if path in self._open and self._open[path][1] == 0:
                os.close(self._open.pop(path)[0])

    def close(self) -> None:
        with self._lock:
            for path in [p for p, (_, users) in self._open.items() if not users]:
                os.close(self._open.pop(path)[0])


def read_shard_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors and metadata of a shard.

    Raises:
        StageError: naming the file and what is wrong with it.
    """
    try:
        tensors, metadata = read_header(path)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"format {metadata.get('format')!r}, not {FORMAT!r}")
    except FileNotFoundError:
        raise StageError(f"{path} is missing; {REPAIR_HINT}") from None
    except ValueError as err:
        raise StageError(f"{path} is not a whole shard ({err}); {REPAIR_HINT}") from None
    return tensors, metadata


class Store:
    """Sealed shards of a folder, all parts together. Thread-safe for reading.

    Attributes:
        folder: 03_hidden.
        shards: by name. tensors: what each holds, and where.
        samples: every sample, in the order of the manifests.
        dropped: rows left out on purpose: id -> {"id", "split", "domain", "reason", "input", ...}.
        dtype, layers, hidden_size: "bf16" or "fp8"; the auxiliary layer ids and the final one; values per
            state.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.shards: dict[str, Shard] = {}
        self.dropped: dict[str, dict] = {}
        self.dtype: str | None = None
        self.layers: list[int] = []
        self.hidden_size = 0
        self.tensors: dict[str, dict[str, Stored]] = {}
        self._files = _Files()

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open a folder and compare its manifests with its files (names, sizes, headers; no payload is read).

        Raises:
            StageError: nothing there, or a listed shard is missing, short, empty or another one; it is named.
        """
        store, problems = cls.scan(folder)
        if problems:
            name, why = next(iter(problems.items()))
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise StageError(f"{store.folder / name} {why}{more}; {REPAIR_HINT}")
        if not store.shards:
            raise StageError(f"{store.folder} holds no sealed states; run 03_extract_hidden.py")
        return store

    @classmethod
    def scan(cls, folder: Path) -> tuple[Store, dict[str, str]]:
        """As `open`, but broken shards are returned (name -> what is wrong) and left out of the store."""
        store, problems = cls(folder), {}
        for manifest in sorted(store.folder.glob("manifest-*.jsonl")):
            for line in _lines(manifest):
                store.dropped.update((row["id"], row) for row in line.get("dropped", []))
                if "shard" not in line:
                    continue
                shard = _shard(line)
                if why := store._problem(shard):
                    problems[shard.name] = why
                else:
                    store.shards[shard.name] = shard
        seen: set[str] = set()
        for shard in store.shards.values():
            ids = {info.id for info in shard.samples}
            if double := seen & ids:
                raise StageError(
                    f"{store.folder / shard.name} repeats {len(double)} rows of other shards (first: "
                    f"{min(double)}): parts overlap; delete one of the two and its manifest line"
                )
            seen |= ids
        return store, problems

    @classmethod
    def of_shard(cls, folder: Path, line: dict) -> tuple[Store, Shard]:
        """A store of one shard that no manifest lists yet; `line` is what its manifest will say.

        Raises:
            StageError: the file is not what the line says.
        """
        store, shard = cls(folder), _shard(line)
        if why := store._problem(shard):
            raise StageError(f"{store.folder / shard.name} {why}")
        store.shards[shard.name] = shard
        return store, shard

    def _problem(self, shard: Shard) -> str | None:
        """What is wrong with a listed shard, or None."""
        path = self.folder / shard.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return "is missing, its manifest lists it"
        if size != shard.bytes:
            return f"has {size} bytes, its manifest says {shard.bytes}"
        try:
            tensors, metadata = read_shard_header(path)
        except StageError as err:
            return f"is broken: {str(err).partition(';')[0]}"
        if json.loads(metadata["ids"]) != [s.id for s in shard.samples]:
            return "is foreign: it holds other rows than its manifest says"
        if json.loads(metadata["checksums"]) != [s.checksum for s in shard.samples]:
            return "is foreign: its checksums are not the manifest's"
        kind = (metadata["dtype"], json.loads(metadata["layers"]), tensors["aux"].shape[2])
        if self.dtype is None:
            self.dtype, self.layers, self.hidden_size = kind
        elif kind != (self.dtype, self.layers, self.hidden_size):
            return (
                f"is foreign: {kind} is not the {(self.dtype, self.layers, self.hidden_size)} of the others"
            )
        self.tensors[shard.name] = tensors
        return None

    @property
    def samples(self) -> list[SampleInfo]:
        return [info for shard in self.shards.values() for info in shard.samples]

    @property
    def num_aux(self) -> int:
        """A: auxiliary layers."""
        return len(self.layers) - 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype in which states lie in the shards."""
        import torch

        return torch.float8_e4m3fn if self.dtype == "fp8" else torch.bfloat16

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards.values())

    def select(self, *splits: str) -> list[SampleInfo]:
        """Samples of these splits, sorted by id, so that the order does not depend on shards."""
        return sorted((s for s in self.samples if s.split in splits), key=lambda s: s.id)

    def digest(self, *splits: str) -> str:
        """sha256 over sorted (id, checksum): what the states of these splits are, wherever they lie."""
        chosen = self.select(*(splits or SPLITS))
        return sha256("\n".join(f"{s.id} {s.checksum}" for s in chosen).encode()).hexdigest()

    def _where(self, info: SampleInfo) -> dict[str, tuple[int, int]]:
        """First byte and length of every tensor of a sample."""
        tensors = self.tensors[info.shard]
        rows = {
            "token_ids": (info.start + info.index, info.tokens),
            "aux": (info.start, info.states),
            "aux_scale": (info.start, info.states),
            "final": (info.final_start, info.finals),
            "final_scale": (info.final_start, info.finals),
        }
        found = {}
        for name, (first, count) in rows.items():
            if tensor := tensors.get(name):
                width = tensor.bytes // tensor.shape[0]
                found[name] = (tensor.begin + first * width, count * width)
        return found

    def token_ids(self, info: SampleInfo) -> np.ndarray:
        """Token ids of a sample, int32 [T + 1]."""
        out = np.empty(info.tokens, dtype="<i4")
        path = self.folder / info.shard
        with self._files.use(path) as fd:
            pread_into(fd, raw(out), self._where(info)["token_ids"][0], path)
        return out

    def read_raw(
        self,
        info: SampleInfo,
        aux_out=None,
        aux_scale_out=None,
        final_out=None,
        final_scale_out=None,
        aux_first: int = 0,
        final_first: int = 0,
    ) -> None:
        """Read stored bytes straight into the caller's buffers; the GIL is released while they are copied.

        Any buffer may be left out. A buffer is a contiguous, writable CPU tensor (pinned or not), numpy array
        or memoryview; as many rows are read as fit into it, beginning with `aux_first` / `final_first`.

        Args:
            aux_out: rows of A * H values in the store's dtype (bf16: 2 bytes, fp8: 1 byte each). State k of
                the row is the one after token k; pass T - 1 rows to leave out the last state, which training
                never reads.
            aux_scale_out: fp8 only, rows of A float32.
            final_out: rows of H values; row 0 is position prompt - 1, row F - 1 position T - 1.
            final_scale_out: fp8 only, a float32 per row.

        Raises:
            StageError: the shard is shorter than its header says.
            ValueError: a buffer that is no whole number of rows, or asks for more rows than there are.
        """
        where, path = self._where(info), self.folder / info.shard
        wanted = (
            ("aux", aux_out, aux_first, info.states),
            ("aux_scale", aux_scale_out, aux_first, info.states),
            ("final", final_out, final_first, info.finals),
            ("final_scale", final_scale_out, final_first, info.finals),
        )
        with self._files.use(path) as fd:
            for name, out, first, rows in wanted:
                if out is None:
                    continue
                if name not in where:
                    raise ValueError(f"{self.dtype} states have no {name}")
                begin, size = where[name]
                width, view = size // rows, raw(out)
                if len(view) % width or first + len(view) // width > rows:
                    raise ValueError(
                        f"{name}: {len(view)} bytes from row {first} do not fit {rows} rows of {width} bytes"
                    )
                pread_into(fd, view, begin + first * width, path)

    def read(self, info: SampleInfo, verify: bool = False) -> Sample:
        """A whole sample, fp8 widened to bf16.

        Args:
            verify: compare the checksum first.

        Raises:
            StageError: with `verify`, other bytes than were sealed; shard and row are named.
        """
        import torch

        if verify:
            self.verify(info)
        aux = torch.empty(info.states, self.num_aux, self.hidden_size, dtype=self.torch_dtype)
        final = torch.empty(info.finals, self.hidden_size, dtype=self.torch_dtype)
        if self.dtype == "fp8":
            aux_scale, final_scale = torch.empty(aux.shape[:2]), torch.empty(info.finals)
            self.read_raw(info, aux, aux_scale, final, final_scale)
            aux, final = widen(aux, aux_scale), widen(final, final_scale)
        else:
            self.read_raw(info, aux, None, final)
        return Sample(torch.from_numpy(self.token_ids(info).astype(np.int64)), info.prompt, aux, final)

    def checksum(self, info: SampleInfo) -> str:
        """Checksum of what lies on disk now, read in chunks."""
        digest, path = xxhash.xxh3_64(), self.folder / info.shard
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with self._files.use(path) as fd:
            for begin, size in self._where(info).values():
                for at in range(0, size, CHUNK_BYTES):
                    view = buffer[: min(CHUNK_BYTES, size - at)]
                    pread_into(fd, view, begin + at, path)
                    digest.update(view)
        return digest.hexdigest()

    def verify(self, info: SampleInfo) -> None:
        """Compare a sample with its checksum.

        Raises:
            StageError: naming shard and row.
        """
        if self.checksum(info) != info.checksum:
            raise StageError(
                f"{self.folder / info.shard}: row {info.id} is not what was sealed (checksum); "
                "03_extract_hidden.py --check --deep lists all such shards, --deep alone redoes their rows"
            )

    def delete(self, names: list[str]) -> None:
        """Delete shards: first their manifest lines, durably, then the files. Dropped rows stay noted."""
        names = set(names)
        for manifest in sorted(self.folder.glob("manifest-*.jsonl")):
            lines = list(_lines(manifest))
            if not any(line.get("shard") in names for line in lines):
                continue
            kept = []
            for line in lines:
                if line.get("shard") not in names:
                    kept.append(line)
                elif line.get("dropped"):
                    kept.append({"dropped": line["dropped"]})
            write_text(manifest, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        for name in sorted(names):
            self._files.forget(self.folder / name)
            (self.folder / name).unlink(missing_ok=True)
            self.shards.pop(name, None)
            self.tensors.pop(name, None)

    def close(self) -> None:
        self._files.close()


def reconcile(folder: Path, part: str) -> tuple[Store, dict[str, str]]:
    """Open a folder for going on: leftovers of this part are removed, broken shards are dropped from the
    manifests.

    Args:
        part: whose unlisted shards are leftovers of a killed run; those of other parts are left alone, since
            their manifest may still be on its way.

    Returns:
        The store, and what was dropped or removed: name -> why.
    """
    folder = Path(folder)
    for manifest in folder.glob("manifest-*.jsonl"):
        _cut_torn_line(manifest)
    store, problems = Store.scan(folder)
    store.delete(list(problems))
    for path in sorted(folder.glob("shard-*.safetensors")):
        match = SHARD_NAME.fullmatch(path.name)
        if path.name in store.shards or path.name in problems:
            continue
        if match and match[1] == part:
            problems[path.name] = "was never sealed"
            path.unlink()
        else:
            log.warning("%s is in no manifest of this folder: ignored", path)
    return store, problems


def _cut_torn_line(manifest: Path) -> None:
    """Remove a last line that a kill cut short (its shard was not sealed yet)."""
    data = manifest.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(manifest, data.rfind(b"\n") + 1)


def _lines(manifest: Path) -> Iterator[dict]:
    """Whole lines of a manifest; a last one without its newline was never finished."""
    data = manifest.read_bytes()
    if data.endswith(b"\n") or not data:
        yield from read_jsonl(manifest)
        return
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)


def _shard(line: dict) -> Shard:
    """A manifest line as objects, with the place of each sample in its shard."""
    samples, start, final_start = [], 0, 0
    for index, s in enumerate(line["samples"]):
        info = SampleInfo(
            s["id"], s["split"], s["domain"], s["source"], s["tokens"], s["prompt"], s["checksum"],
            s["input"], tuple(s["flags"]), line["shard"], index, start, final_start,
        )  # fmt: skip
        samples.append(info)
        start, final_start = start + info.states, final_start + info.finals
    return Shard(line["shard"], line["bytes"], samples, line.get("proof"))
