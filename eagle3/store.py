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
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from eagle3.contract import SPLITS, StageError, fsync_dir, read_jsonl, write_text
from eagle3.tensorfile import Stored, read_header

if TYPE_CHECKING:
    import torch

log = logging.getLogger("eagle3")

FORMAT = "eagle3-states-1"
SHARD_NAME = re.compile(r"shard-(\d+of\d+)-(\d{5,})\.safetensors")
# Room for the header of a shard, written last. 128 KiB hold about 1,200 samples; a shard that runs out is
# sealed.
HEADER_ROOM = 128 * 1024
BASE = 8 + HEADER_ROOM
DTYPES = {"bf16": ("BF16", 2), "fp8": ("F8_E4M3", 1)}
FP8_MAX = 448.0
# Bytes moved at once: small enough to stay in a core's cache between reading, checking and writing.
CHUNK_BYTES = 8 << 20


class DiskFull(StageError):
    """The disk (or the reserve on it) is reached: nothing is lost but the open shard."""


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
    part: str
    samples: list[SampleInfo]
    proof: dict | None = None


def input_digest(prompt_ids: list[int], response_ids: list[int] | None) -> str:
    """What a row asked for: 128-bit hash of its prompt and, if it brought one, its answer."""
    digest = xxhash.xxh3_128(np.asarray(prompt_ids, dtype="<i4").tobytes())
    if response_ids is not None:
        digest.update(b"|")
        digest.update(np.asarray(response_ids, dtype="<i4").tobytes())
    return digest.hexdigest()


def sample_bytes(tokens: int, prompt: int, aux: int, hidden: int, dtype: str) -> int:
    """Bytes of one sample in a shard: `tokens` ids, `aux` auxiliary layers of `hidden` values."""
    states, finals, width = tokens - 1, tokens - prompt, DTYPES[dtype][1]
    scales = 4 * (states * aux + finals) if dtype == "fp8" else 0
    return 4 * tokens + width * hidden * (states * aux + finals) + scales + 20


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


def pwrite_all(fd: int, data, offset: int, path: Path) -> None:
    """Write a whole buffer at an offset.

    Raises:
        DiskFull: no space, naming folder and free bytes.
    """
    view, done = raw(data), 0
    try:
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path.parent, len(view) - done) from None
        raise


def disk_full(folder: Path, needed: int, reserve: int = 0) -> DiskFull:
    """The message every full disk gets: folder, needed, free and reserved bytes."""
    free = shutil.disk_usage(folder).free
    kept = f", {reserve} of them kept free (DISK_RESERVE_GB)" if reserve else ""
    return DiskFull(
        f"no space in {folder}: {needed} bytes needed, {free} free{kept}; free some and run it again"
    )


REPAIR_HINT = "run 03_extract_hidden.py: it drops what is broken and redoes just these rows"


# --- reading ------------------------------------------------------------------------------------------------


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
            for old in [p for p, e in self._open.items() if e[1] == 0][: len(self._open) - self._limit]:
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
            for path in [p for p, e in self._open.items() if e[1] == 0]:
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
        shards: by name.
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
        self._files = _Files()
        self._tensors: dict[str, dict[str, Stored]] = {}  # by shard

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
            _cut_torn_line(manifest, dry=True)
            part = manifest.stem.removeprefix("manifest-")
            for line in _lines(manifest):
                store.dropped.update((row["id"], row) for row in line.get("dropped", []))
                if "shard" not in line:
                    continue
                shard = _shard(line, part)
                why = store._problem(shard, line)
                if why:
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

    def _problem(self, shard: Shard, line: dict) -> str | None:
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
        self._tensors[shard.name] = tensors
        return None

    @property
    def samples(self) -> list[SampleInfo]:
        return [info for shard in self.shards.values() for info in shard.samples]

    @property
    def num_aux(self) -> int:
        """A: auxiliary layers."""
        return len(self.layers) - 1

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
        tensors = self._tensors[info.shard]
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
        kind = torch.bfloat16 if self.dtype == "bf16" else torch.float8_e4m3fn
        aux = torch.empty(info.states, self.num_aux, self.hidden_size, dtype=kind)
        final = torch.empty(info.finals, self.hidden_size, dtype=kind)
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

    def drop(self, names: list[str]) -> None:
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
            self._tensors.pop(name, None)

    # The name under which issue 4 asks for it.
    delete = drop

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
    store.drop(list(problems))
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


def _cut_torn_line(manifest: Path, dry: bool = False) -> None:
    """Remove a last line that a kill cut short (its shard was not sealed yet)."""
    with open(manifest, "rb") as f:
        data = f.read()
    if data and not data.endswith(b"\n") and not dry:
        os.truncate(manifest, data.rfind(b"\n") + 1)


def _lines(manifest: Path) -> Iterator[dict]:
    """Whole lines of a manifest; a last one without its newline was never finished."""
    data = manifest.read_bytes()
    if data.endswith(b"\n") or not data:
        yield from read_jsonl(manifest)
        return
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)


def _shard(line: dict, part: str) -> Shard:
    """A manifest line as objects, with the place of each sample in its shard."""
    samples, start, final_start = [], 0, 0
    for index, s in enumerate(line["samples"]):
        info = SampleInfo(
            s["id"], s["split"], s["domain"], s["source"], s["tokens"], s["prompt"], s["checksum"],
            s["input"], tuple(s["flags"]), line["shard"], index, start, final_start,
        )  # fmt: skip
        samples.append(info)
        start, final_start = start + info.states, final_start + info.finals
    return Shard(line["shard"], line["bytes"], part, samples, line.get("proof"))


# --- writing ------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """A shard that is being filled: auxiliary states go to its temporary file, the rest waits in memory."""

    name: str
    tmp: Path
    fd: int
    slots: list[Slot] = field(default_factory=list)
    states: int = 0
    bytes: int = 0
    header: int = 2048
    pending: int = 0
    full: bool = False


class Slot:
    """Place of one sample in the open shard; filled chunk by chunk, then committed or aborted."""

    def __init__(self, writer: StoreWriter, shard: _Open, token_ids: list[int], prompt: int):
        self.writer, self.shard, self.prompt = writer, shard, prompt
        self.ids = np.asarray(token_ids, dtype="<i4")
        self.start, self.states, self.written = shard.states, len(token_ids) - 1, 0
        self.entry: dict | None = None
        self.aux_scale: list = []
        self.final: list = []
        self.final_scale: list = []
        self._digest = xxhash.xxh3_64(raw(self.ids))

    def write(self, chunk: torch.Tensor) -> None:
        """Append states.

        Args:
            chunk: bf16 [t, A + 1, H], auxiliary layers first, the final state last.
        """
        writer, first = self.writer, max(0, self.prompt - 1 - self.written)
        if writer.dtype == "fp8":
            chunk, scale = quantize(chunk)
            self.aux_scale.append(scale[:, :-1].contiguous())
            self.final_scale.append(scale[first:, -1].contiguous())
        aux = raw(chunk[:, :-1].contiguous())
        self._digest.update(aux)
        at = BASE + (self.start + self.written) * writer.state_bytes
        pwrite_all(self.shard.fd, aux, at, self.shard.tmp)
        if first < len(chunk):
            # A copy: the caller's buffer is used again.
            self.final.append(chunk[first:, -1].clone(memory_format=_contiguous()))
        self.written += len(chunk)

    def commit(self, *, id: str, split: str, domain: str, source: str, input: str, flags=()) -> str:
        """The sample is whole; returns its checksum."""
        if self.written != self.states:
            raise ValueError(f"{id}: {self.written} states written, {self.states} announced")
        for part in (*self.aux_scale, *self.final, *self.final_scale):
            self._digest.update(raw(part))
        entry = {"id": id, "split": split, "domain": domain, "source": source, "tokens": len(self.ids)}
        entry |= {
            "prompt": self.prompt,
            "checksum": self._digest.hexdigest(),
            "input": input,
            "flags": list(flags),
        }
        self.writer._settle(self, entry)
        return entry["checksum"]

    def abort(self) -> None:
        """The sample is not to be stored; its place is closed up before the shard is sealed."""
        self.aux_scale, self.final, self.final_scale = [], [], []
        self.writer._settle(self, None)


def _contiguous():
    import torch

    return torch.contiguous_format


class StoreWriter:
    """Appends samples to shards of one part; sealing runs in the background. `begin` and slots are
    thread-safe.

    Args:
        folder: 03_hidden.
        part: "1of1", or "2of4" for the second of four machines.
        layers: auxiliary layer ids and the final one.
        hidden: values per state.
        dtype: "bf16" or "fp8".
        shard_bytes: a shard is sealed before it grows beyond this (a longer sample gets a shard of its own).
        reserve: bytes of the disk that stay free.
        prove: called with (store of the one sealed shard, its Shard) before its manifest line is written;
            returns what to note about it; a StageError from it removes the shard.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        layers: list[int],
        hidden: int,
        dtype: str = "bf16",
        shard_bytes: int = 1_000_000_000,
        reserve: int = 0,
        prove: Callable[[Store, Shard], dict | None] | None = None,
    ):
        self.folder, self.part, self.layers, self.hidden = Path(folder), part, list(layers), hidden
        self.dtype, self.shard_bytes, self.reserve, self.prove = dtype, shard_bytes, reserve, prove
        self.state_bytes = (len(layers) - 1) * hidden * DTYPES[dtype][1]
        self.manifest = self.folder / f"manifest-{part}.jsonl"
        self.sealed_bytes = self.sealed_samples = 0
        taken = [SHARD_NAME.fullmatch(p.name) for p in self.folder.glob(f"shard-{part}-*.safetensors")]
        self._next = 1 + max((int(m[2]) for m in taken if m), default=-1)
        self._lock = threading.RLock()
        self._open: _Open | None = None
        self._dropped: list[dict] = []
        # Two at once: one waits for the disk while the other is read back. More would only hold memory.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="seal")
        self._room = threading.Semaphore(3)
        self._waiting = self._pending = 0
        self._sealing: list[Future] = []

    def begin(self, token_ids: list[int], prompt: int) -> Slot:
        """Take a place for a sample of len(token_ids) - 1 states; may wait for shards that are being sealed.

        Raises:
            DiskFull: the sample would reach into the reserve.
            StageError: an earlier shard could not be sealed.
        """
        if not 1 <= prompt <= len(token_ids) - 1:
            raise ValueError(f"a sample of {len(token_ids)} tokens can't have a prompt of {prompt}")
        self._raise_failed()
        size = sample_bytes(len(token_ids), prompt, len(self.layers) - 1, self.hidden, self.dtype)
        # Final states wait in memory until their shard is sealed; the disk must hold them too.
        needed = size + self._waiting + HEADER_ROOM
        if shutil.disk_usage(self.folder).free < needed + self.reserve:
            raise disk_full(self.folder, needed, self.reserve)
        while True:
            with self._lock:
                if self._open and not self._fits(self._open, size):
                    self._close_open()
                if self._open is None and self._room.acquire(blocking=False):
                    self._open = self._new_shard()
                if self._open:
                    return self._take(self._open, token_ids, prompt, size)
            # Three shards are being sealed already: the disk is the limit, wait for it without the lock.
            self._room.acquire()
            self._room.release()
            self._raise_failed()

    def add(self, states: torch.Tensor, token_ids: list[int], prompt: int, **entry) -> str:
        """Store one sample that lies in memory: states bf16 [T, A + 1, H]; `entry` as for Slot.commit."""
        slot = self.begin(token_ids, prompt)
        step = max(1, CHUNK_BYTES // (states.shape[1] * self.hidden * 2))
        try:
            for at in range(0, len(states), step):
                slot.write(states[at : at + step])
        except BaseException:
            slot.abort()
            raise
        return slot.commit(**entry)

    def drop(self, entry: dict) -> None:
        """Note a row that is left out on purpose; durable with the next sealed shard or close."""
        with self._lock:
            self._dropped.append(entry)

    @property
    def pending(self) -> int:
        """Samples begun and neither committed nor aborted."""
        with self._lock:
            return self._pending

    def next_shard(self) -> None:
        """Let later samples begin another shard."""
        with self._lock:
            if self._open:
                self._close_open()

    def seal(self) -> None:
        """Seal the open shard (when its last sample is settled) and wait until every shard is on disk."""
        self.next_shard()
        for future in list(self._sealing):
            future.result()
        self._sealing.clear()
        with self._lock:
            if self._dropped:
                self._append({"dropped": self._dropped})
                self._dropped = []

    def close(self, discard: bool = False) -> None:
        """Finish: seal what is open, or throw the open shard away.

        Args:
            discard: drop the open shard instead (its rows are taken again by the next run).
        """
        try:
            if discard:
                with self._lock:
                    shard, self._open = self._open, None
                    if shard:
                        shard.full = False
                        os.close(shard.fd)
                        shard.tmp.unlink(missing_ok=True)
                        self._room.release()
            self.seal()
        finally:
            self._pool.shutdown(wait=True)
            for tmp in self.folder.glob(f".shard-{self.part}-*.{os.getpid()}.tmp"):
                tmp.unlink(missing_ok=True)

    # -- inside

    def _raise_failed(self) -> None:
        for future in list(self._sealing):
            if future.done():
                self._sealing.remove(future)
                future.result()

    def _fits(self, shard: _Open, size: int) -> bool:
        if not shard.slots:
            return True
        return shard.bytes + size <= self.shard_bytes - BASE and shard.header < HEADER_ROOM - 16_384

    def _take(self, shard: _Open, token_ids: list[int], prompt: int, size: int) -> Slot:
        slot = Slot(self, shard, token_ids, prompt)
        shard.slots.append(slot)
        shard.states += slot.states
        shard.bytes += size
        self._waiting += size - slot.states * self.state_bytes
        # Until the entry is known, room for an ordinary one; _settle corrects it.
        shard.header += 400
        shard.pending += 1
        self._pending += 1
        return slot

    def _new_shard(self) -> _Open:
        name = f"shard-{self.part}-{self._next:05d}.safetensors"
        self._next += 1
        tmp = self.folder / f".{name}.{os.getpid()}.tmp"
        return _Open(name, tmp, os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644))

    def _close_open(self) -> None:
        shard, self._open = self._open, None
        shard.full = True
        if shard.pending == 0:
            self._sealing.append(self._pool.submit(self._finish, shard))

    def _settle(self, slot: Slot, entry: dict | None) -> None:
        with self._lock:
            shard = slot.shard
            slot.entry = entry
            shard.pending -= 1
            self._pending -= 1
            shard.header -= 400
            if entry:
                # Strings are escaped twice: JSON lists inside the header's JSON.
                texts = (entry["id"], entry["split"], entry["domain"], entry["source"], entry["checksum"])
                shard.header += sum(
                    len(json.dumps(json.dumps(t, ensure_ascii=False)).encode()) + 4 for t in texts
                )
            if shard.full and shard.pending == 0:
                self._sealing.append(self._pool.submit(self._finish, shard))

    def _finish(self, shard: _Open) -> None:
        """Write the small tensors and the header, sync, read back, rename, prove, list."""
        path = self.folder / shard.name
        try:
            slots = self._compact(shard)
            if not slots:
                return
            self._write_rest(shard, slots)
            os.fsync(shard.fd)
            size = os.fstat(shard.fd).st_size
            line = {"shard": shard.name, "bytes": size, "samples": [s.entry for s in slots]}
            slots.clear()
            shard.slots.clear()
            self._read_back(shard.tmp, line)
            os.replace(shard.tmp, path)
            fsync_dir(self.folder)
            if self.prove:
                self._prove(path, line)
            with self._lock:
                if self._dropped:
                    line["dropped"], self._dropped = self._dropped, []
                self._append(line)
                self.sealed_bytes += size
                self.sealed_samples += len(line["samples"])
        finally:
            os.close(shard.fd)
            shard.tmp.unlink(missing_ok=True)
            with self._lock:
                self._waiting -= shard.bytes - shard.states * self.state_bytes
            self._room.release()

    def _compact(self, shard: _Open) -> list[Slot]:
        """Close the gaps that aborted samples left; returns the samples that stay."""
        kept, at = [], 0
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for slot in shard.slots:
            if slot.entry is None:
                continue
            size = slot.states * self.state_bytes
            source, target = BASE + slot.start * self.state_bytes, BASE + at * self.state_bytes
            for offset in range(0, size if source != target else 0, CHUNK_BYTES):
                view = buffer[: min(CHUNK_BYTES, size - offset)]
                pread_into(shard.fd, view, source + offset, shard.tmp)
                pwrite_all(shard.fd, view, target + offset, shard.tmp)
            slot.start = at
            at += slot.states
            kept.append(slot)
        os.ftruncate(shard.fd, BASE + at * self.state_bytes)
        return kept

    def _write_rest(self, shard: _Open, slots: list[Slot]) -> None:
        kind = DTYPES[self.dtype][0]
        states = np.array([s.states for s in slots])
        finals = np.array([s.states - s.prompt + 1 for s in slots])
        total, last, aux = int(states.sum()), int(finals.sum()), len(self.layers) - 1
        tensors = {"aux": (kind, [total, aux, self.hidden], None)}
        if self.dtype == "fp8":
            tensors["aux_scale"] = ("F32", [total, aux], [x for s in slots for x in s.aux_scale])
        tensors["final"] = (kind, [last, self.hidden], [x for s in slots for x in s.final])
        if self.dtype == "fp8":
            tensors["final_scale"] = ("F32", [last], [x for s in slots for x in s.final_scale])
        for name, counts in (("offsets", states), ("final_offsets", finals)):
            tensors[name] = (
                "I64",
                [len(slots) + 1],
                [np.concatenate([[0], np.cumsum(counts)]).astype("<i8")],
            )
        tensors["token_ids"] = ("I32", [total + len(slots)], [s.ids for s in slots])
        tensors["prompt_lens"] = ("I32", [len(slots)], [np.array([s.prompt for s in slots], dtype="<i4")])
        metadata = {"format": FORMAT, "dtype": self.dtype, "layers": json.dumps(self.layers)}
        for key in ("id", "split", "domain", "source", "checksum"):
            metadata[f"{key}s"] = json.dumps([s.entry[key] for s in slots], ensure_ascii=False)
        header, at = {"__metadata__": metadata}, 0
        for name, (dtype, shape, parts) in tensors.items():
            size = total * self.state_bytes if parts is None else 0
            for part in parts or ():
                pwrite_all(shard.fd, part, BASE + at + size, shard.tmp)
                size += raw(part).nbytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, ensure_ascii=False).encode()
        if len(text) > HEADER_ROOM:
            raise StageError(
                f"{shard.name}: header of {len(text)} bytes; row ids or source names are too long"
            )
        pwrite_all(shard.fd, HEADER_ROOM.to_bytes(8, "little") + text.ljust(HEADER_ROOM), 0, shard.tmp)

    def _read_back(self, tmp: Path, line: dict) -> None:
        """Read the synced file as a reader will, sample by sample.

        Raises:
            StageError: a shape or checksum differs: the disk or memory of this machine is not to be trusted.
        """
        store, shard = self._alone(tmp.name, line)
        tensors = store._tensors[tmp.name]
        total, last = (sum(getattr(s, key) for s in shard.samples) for key in ("states", "finals"))
        if (
            tensors["aux"].shape != [total, len(self.layers) - 1, self.hidden]
            or tensors["final"].shape[0] != last
        ):
            raise StageError(f"{tmp}: shapes read back differ from those written")
        for info in shard.samples:
            if store.checksum(info) != info.checksum:
                raise StageError(
                    f"{tmp}: row {info.id} does not read back as it was written: check disk and memory"
                )
        store.close()

    def _alone(self, name: str, line: dict) -> tuple[Store, Shard]:
        """A store of just one shard that no manifest lists yet."""
        store, shard = Store(self.folder), _shard({**line, "shard": name}, self.part)
        if why := store._problem(shard, line):
            raise StageError(f"{self.folder / name} {why}")
        store.shards[name] = shard
        return store, shard

    def _prove(self, path: Path, line: dict) -> None:
        store, shard = self._alone(path.name, line)
        try:
            if proof := self.prove(store, shard):
                line["proof"] = proof
        except BaseException:
            path.unlink()
            raise
        finally:
            store.close()

    def _append(self, line: dict) -> None:
        """Append a manifest line durably; called with the lock held."""
        fresh = not self.manifest.exists()
        fd = os.open(self.manifest, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            pwrite = (json.dumps(line, ensure_ascii=False) + "\n").encode()
            while pwrite:
                pwrite = pwrite[os.write(fd, pwrite) :]
            os.fsync(fd)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(self.folder, len(pwrite)) from None
            raise
        finally:
            os.close(fd)
        if fresh:
            fsync_dir(self.folder)
