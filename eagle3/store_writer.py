"""Writing the state store (its format: eagle3/store.py): samples in, sealed and proven shards out."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from eagle3.contract import StageError, fsync_dir
from eagle3.sizes import sample_bytes
from eagle3.store import CHUNK_BYTES, DTYPES, FORMAT, SHARD_NAME, Shard, Store, pread_into, quantize, raw

if TYPE_CHECKING:
    import torch

# Room for the header of a shard, written last. 128 KiB hold about 1,200 samples; a shard that runs out is
# sealed.
HEADER_ROOM = 128 * 1024
BASE = 8 + HEADER_ROOM
LIBC = ctypes.CDLL(None)


class DiskFull(StageError):
    """The disk (or the reserve on it) is reached: nothing is lost but the open shard."""


def disk_full(folder: Path, needed: int, reserve: int = 0) -> DiskFull:
    """The message every full disk gets: folder, needed, free and reserved bytes."""
    free = shutil.disk_usage(folder).free
    kept = f", {reserve} of them kept free (DISK_RESERVE_GB)" if reserve else ""
    return DiskFull(
        f"no space in {folder}: {needed} bytes needed, {free} free{kept}; free some and run it again"
    )


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


def start_writing(fd: int, offset: int, size: int) -> None:
    """Let the kernel begin to write a part of a file now, and don't wait: a later sync has less left to do.

    sync_file_range(2) with SYNC_FILE_RANGE_WRITE; where a filesystem has none, nothing happens.
    """
    LIBC.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), 2)


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
        import torch

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
            self.final.append(chunk[first:, -1].clone(memory_format=torch.contiguous_format))
        self.written += len(chunk)

    def commit(self, *, id: str, split: str, domain: str, source: str, input: str, flags=()) -> str:
        """The sample is whole; returns its checksum."""
        if self.written != self.states:
            raise ValueError(f"{id}: {self.written} states written, {self.states} announced")
        start_writing(
            self.shard.fd, BASE + self.start * self.writer.state_bytes, self.states * self.writer.state_bytes
        )
        # One piece each: a seal of hundreds of small writes takes seconds beside busy threads.
        self.aux_scale, self.final, self.final_scale = map(
            _joined, (self.aux_scale, self.final, self.final_scale)
        )
        for part in (*self.aux_scale, *self.final, *self.final_scale):
            self._digest.update(raw(part))
        entry = {"id": id, "split": split, "domain": domain, "source": source, "tokens": len(self.ids)}
        entry |= {"prompt": self.prompt, "checksum": self._digest.hexdigest(), "input": input}
        entry["flags"] = list(flags)
        self.writer._settle(self, entry)
        return entry["checksum"]

    def abort(self) -> None:
        """The sample is not to be stored; its place is closed up before the shard is sealed."""
        self.aux_scale, self.final, self.final_scale = [], [], []
        self.writer._settle(self, None)


def _joined(parts: list) -> list:
    import torch

    return [torch.cat(parts)] if len(parts) > 1 else parts


def next_number(folder: Path, part: str) -> int:
    """Number of the first shard behind those of a part."""
    taken = [SHARD_NAME.fullmatch(p.name) for p in folder.glob(f"shard-{part}-*.safetensors")]
    return 1 + max((int(m[2]) for m in taken if m), default=-1)


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
        writers: how many of them, in processes of their own, fill this folder and part at the same time.
        first: number of its first shard; the next is `writers` higher. None: behind those that are there.
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
        writers: int = 1,
        first: int | None = None,
    ):
        self.folder, self.part, self.layers, self.hidden = Path(folder), part, list(layers), hidden
        self.dtype, self.shard_bytes, self.reserve, self.prove = dtype, shard_bytes, reserve, prove
        self.state_bytes = (len(layers) - 1) * hidden * DTYPES[dtype][1]
        self.manifest = self.folder / f"manifest-{part}.jsonl"
        self.writers = writers
        self._next = next_number(self.folder, part) if first is None else first
        self._lock = threading.RLock()
        self._open: _Open | None = None
        self._dropped: list[dict] = []
        # Two at once: one waits for the disk while the other is read back. More would only hold memory; where
        # there are several writers, they are the others.
        sealers = 2 if writers == 1 else 1
        self._pool = ThreadPoolExecutor(sealers, thread_name_prefix="seal")
        self._room = threading.Semaphore(sealers + 1)
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
        # Final states wait in memory until their shard is sealed; the disk must hold them too, and what waits
        # in the other writers, which is about as much.
        needed = size + (self._waiting + HEADER_ROOM) * self.writers
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
            # Enough shards are being sealed already: the disk is the limit, wait for it without the lock.
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
                        # Not closed: a thread may still write, and its number must not be another file's.
                        shard.tmp.unlink(missing_ok=True)
                        self._room.release()
            self.seal()
        finally:
            self._pool.shutdown(wait=True)
            for tmp in self.folder.glob(f".shard-{self.part}-*.{os.getpid()}.tmp"):
                tmp.unlink(missing_ok=True)

    # -- inside

    def _raise_failed(self) -> None:
        with self._lock:
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
        self._next += self.writers
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
            size = os.fstat(shard.fd).st_size
            line = {"shard": shard.name, "bytes": size, "samples": [s.entry for s in slots]}
            slots.clear()
            shard.slots.clear()  # what waited in memory is in the file
            os.fsync(shard.fd)
            self._read_back(shard.tmp, line)
            os.replace(shard.tmp, path)
            fsync_dir(self.folder)
            if self.prove:
                self._prove(path, line)
            with self._lock:
                if self._dropped:
                    line["dropped"], self._dropped = self._dropped, []
                self._append(line)
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
        """Put behind the auxiliary states what waited in memory, and the header in front of them."""

        def waiting(name: str) -> list:
            return [chunk for s in slots for chunk in getattr(s, name)]

        def bounds(counts: np.ndarray) -> tuple[str, list[int], list]:
            return "I64", [len(slots) + 1], [np.concatenate([[0], np.cumsum(counts)]).astype("<i8")]

        kind, fp8, aux = DTYPES[self.dtype][0], self.dtype == "fp8", len(self.layers) - 1
        states = np.array([s.states for s in slots])
        finals = np.array([s.states - s.prompt + 1 for s in slots])
        total, last = int(states.sum()), int(finals.sum())
        # name -> (dtype, shape, what to write; None: it is in the file already)
        tensors = {"aux": (kind, [total, aux, self.hidden], None)}
        if fp8:
            tensors["aux_scale"] = ("F32", [total, aux], waiting("aux_scale"))
        tensors["final"] = (kind, [last, self.hidden], waiting("final"))
        if fp8:
            tensors["final_scale"] = ("F32", [last], waiting("final_scale"))
        tensors["offsets"], tensors["final_offsets"] = bounds(states), bounds(finals)
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
        store, shard = Store.of_shard(self.folder, {**line, "shard": tmp.name})
        aux, final = (store.tensors[tmp.name][key].shape for key in ("aux", "final"))
        total, last = (sum(getattr(s, key) for s in shard.samples) for key in ("states", "finals"))
        if aux != [total, len(self.layers) - 1, self.hidden] or final[0] != last:
            raise StageError(f"{tmp}: shapes read back differ from those written")
        for info in shard.samples:
            if store.checksum(info) != info.checksum:
                raise StageError(
                    f"{tmp}: row {info.id} does not read back as it was written: check disk and memory"
                )
        store.close()

    def _prove(self, path: Path, line: dict) -> None:
        store, shard = Store.of_shard(self.folder, line)
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
            fcntl.flock(fd, fcntl.LOCK_EX)  # other writers append to it too
            rest = (json.dumps(line, ensure_ascii=False) + "\n").encode()
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(self.folder, len(rest)) from None
            raise
        finally:
            os.close(fd)
        if fresh:
            fsync_dir(self.folder)
