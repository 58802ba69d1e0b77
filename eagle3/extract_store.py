"""Where answered rows go: their states are checked while they are copied into a shard.

On a machine with few cores the threads of 03 do it. With more, processes do, each with an open shard of its
own: one interpreter can't read, check, hash and write as fast as an engine gives and a disk takes. They talk
to 03 over a pipe, one row at a time, and end with it, however it ends.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from eagle3 import provenance
from eagle3.contract import ROOT, StageError, usable_cores
from eagle3.state_checks import (
    RowFailed,
    StateCheck,
    Stopped,
    Transient,
    check_norms,
    chunks_of,
    staged_ids,
)
from eagle3.store_writer import StoreWriter, next_number
from eagle3.tensorfile import read_header

if TYPE_CHECKING:
    from eagle3.proof import Head
    from eagle3.verifier import Verifier

log = logging.getLogger("eagle3")

# Sixteen cores at Kimi's width: ten processes and the server keep a disk of 2 GB/s busy (notes/gpu.md).
CORES_PER_PROCESS = 1.5
MOST_PROCESSES = 12
# glibc gives memory back after every piece of a row by itself, and taking it again costs a third of the time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


@dataclass
class Job:
    """An answered row whose states lie in the staging folder, to be stored.

    Attributes:
        path: of the staged file. ids, prompt: of the whole sample. logprobs: for the state proof.
        entry: id, split, domain, source, input, flags.
        usual: median norm of each layer in the other rows, None while too few are known.
    """

    path: Path
    ids: list[int]
    prompt: int
    logprobs: dict[int, dict[int, float]]
    entry: dict
    usual: np.ndarray | None = None


@dataclass
class StoreSettings:
    """What a store needs to open, here or in another process.

    Attributes:
        layers, hidden, head: of the verifier: served layers, values per state, for the state proof.
        urls, model, roots: of the servers and their staging folders, for proofs that have to ask again.
        processes, first: how many write at the same time, and the number of this one's first shard.
    """

    folder: Path
    part: str
    layers: list[int]
    hidden: int
    dtype: str
    shard_bytes: int
    reserve: int
    proof_rows: int
    urls: list[str]
    model: str
    roots: list[Path]
    head: Head | None = None
    processes: int = 1
    first: int | None = None


class RowStore(Protocol):
    """Where Extractor leaves its rows: RowChecks or StoreProcesses."""

    pending: int

    def store(self, job: Job) -> np.ndarray:
        """Check and store one row; returns the median norm of each layer.

        Raises:
            RowFailed, Transient: not stored, the run goes on. StageError: nothing can be stored any more.
        """

    def drop(self, entry: dict) -> None: ...

    def next_shard(self) -> None: ...

    def close(self, discard: bool = False) -> None: ...


def open_store(settings: StoreSettings, verifier: Verifier, stop: threading.Event) -> RowStore:
    """Threads of this process do the work, or, with three cores and more, processes."""
    from eagle3.proof import Head

    settings.processes = max(1, min(MOST_PROCESSES, int(usable_cores() / CORES_PER_PROCESS)))
    if settings.processes > 1:
        return StoreProcesses(settings, lambda: Head(verifier))
    settings.head = Head(verifier)
    return RowChecks(settings, stop)


class RowChecks:
    """The store of one process: rows are checked and written by the threads that call it."""

    def __init__(self, settings: StoreSettings, stop: threading.Event):
        from eagle3.extract import Client, ask_again
        from eagle3.proof import Prover

        share, client = settings.processes, Client(settings.urls, settings.model, stop)
        self.layers, self.hidden, self.stop = settings.layers, settings.hidden, stop
        self.proofs: dict[str, dict] = {}
        prover = Prover(
            settings.head, self.proofs, settings.proof_rows,
            lambda ids, prompt: ask_again(client, ids, prompt, settings.roots),
            threads=1 if not settings.proof_rows else max(1, usable_cores() // (2 if share == 1 else 4)),
        )  # fmt: skip
        self.writer = StoreWriter(
            settings.folder, settings.part, self.layers, self.hidden, settings.dtype, settings.shard_bytes,
            settings.reserve, prover, share, settings.first,
        )  # fmt: skip
        # Reading, checking and converting is CPU work: more of it at once than cores only costs memory.
        self._readers = threading.Semaphore(max(1, usable_cores() - 1))
        self.drop, self.next_shard, self.close = self.writer.drop, self.writer.next_shard, self.writer.close

    @property
    def pending(self) -> int:
        """Rows that are being stored."""
        return self.writer.pending

    def store(self, job: Job) -> np.ndarray:
        """Check staged states while copying them into the open shard; see RowStore."""
        with self._readers:
            return self._store(job)

    def _store(self, job: Job) -> np.ndarray:
        if self.stop.is_set():
            raise Stopped
        count = len(job.ids) - 1
        try:
            tensors = read_header(job.path)[0]
        except ValueError as err:  # a write that failed half-way
            raise Transient(f"{job.path.name}: {err}") from None
        if "hidden_states" not in tensors or "token_ids" not in tensors:
            raise RowFailed("no_tensors", f"the staged file holds {', '.join(sorted(tensors))}")
        states = tensors["hidden_states"]
        dtype, shape = states.dtype, states.shape
        if dtype not in ("BF16", "F32") or len(shape) != 3 or shape[1:] != [len(self.layers), self.hidden]:
            raise RowFailed(
                "shape",
                f"states are {dtype} {shape}, expected BF16 [{count}, {len(self.layers)}, {self.hidden}]",
            )
        if shape[0] != count:
            raise RowFailed("length", f"{shape[0]} states for {count} tokens")
        ids = staged_ids(job.path, tensors["token_ids"])
        if ids.tolist() != job.ids[:-1]:
            raise RowFailed("other_tokens", "token ids beside the states are not those of the answer")
        slot, check = self.writer.begin(job.ids, job.prompt), StateCheck(self.layers, ids)
        try:
            for chunk in chunks_of(job.path, states, count):
                if self.stop.is_set():
                    raise Stopped
                check.add(chunk)
                slot.write(chunk)
            medians = check.finish()
            check_norms(self.layers, medians, job.usual)
        except BaseException:
            slot.abort()
            raise
        if job.logprobs:
            self.proofs[job.entry["id"]] = job.logprobs
        slot.commit(**job.entry)
        return medians


# --- processes ----------------------------------------------------------------------------------------------


class StoreProcesses:
    """The same in several processes, for the threads of this one; each takes one row at a time."""

    def __init__(self, settings: StoreSettings, head: Callable[[], Head]):
        self._ends, self._processes = [], []
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock, self.pending = threading.Lock(), 0
        first = next_number(settings.folder, settings.part)
        for number in range(settings.processes):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "eagle3.extract_store", str(theirs.fileno())]
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env=KEEP_MEMORY | os.environ,
            )  # fmt: skip
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
            self._idle.put(number)
        # Made here, once, while they start; torch's way to send a tensor would be shared memory.
        settings.head = head()
        for number, end in enumerate(self._ends):
            # One of them proves over the whole vocabulary: reading a head of 2 GB eight times held up all.
            rows = settings.proof_rows if number == 0 else 0
            mine = replace(settings, first=first + number, proof_rows=rows)
            end.send_bytes(pickle.dumps((os.getpid(), mine)))
        log.info("%d processes check and store", settings.processes)

    def store(self, job: Job) -> np.ndarray:
        """See RowStore; waits for an idle process."""
        with self._lock:
            self.pending += 1
        try:
            return self._any("store", job)
        finally:
            with self._lock:
                self.pending -= 1

    def drop(self, entry: dict) -> None:
        self._any("drop", entry)

    def next_shard(self) -> None:
        numbers = [self._idle.get() for _ in self._processes]
        for number in numbers:
            self._call(number, "next_shard")

    def close(self, discard: bool = False) -> None:
        """Let every process seal what it has (or throw it away) and end.

        Args:
            discard: a process that is still storing a row is killed.

        Raises:
            StageError: what one of them could not seal; the others have sealed theirs.
        """
        numbers, errors = set(), []
        try:
            while len(numbers) < len(self._processes):
                numbers.add(self._idle.get(timeout=0.1 if discard else None))
        except queue.Empty:
            pass
        for number, process in enumerate(self._processes):
            if number not in numbers:
                process.kill()

        def end(number: int) -> None:
            try:
                provenance.add_helper(self._call(number, "close", discard))
            except StageError as err:
                errors.append(err)

        enders = [threading.Thread(target=end, args=(number,)) for number in numbers]
        for thread in enders:
            thread.start()
        for thread in enders:
            thread.join()
        for process in self._processes:
            process.wait()
        if errors:
            raise errors[0]

    def _any(self, method: str, *args):
        number = self._idle.get()
        try:
            return self._call(number, method, *args)
        finally:
            self._idle.put(number)

    def _call(self, number: int, method: str, *args):
        """One call in one process; its log lines and its exception come back as if it were made here."""
        end: Connection = self._ends[number]
        try:
            end.send((method, args))
            kind, value, lines = end.recv()
        except (EOFError, OSError):
            status = self._processes[number].wait()
            why = ": out of memory?" if status == -signal.SIGKILL else ""
            raise StageError(
                f"a process that stores states ended with status {status}{why} (its open shard is lost; "
                "a rerun takes those rows again)"
            ) from None
        for level, text in lines:
            log.log(level, "%s", text)
        if kind == "row":
            raise RowFailed(*value)
        if kind == "transient":
            raise Transient(value)
        if kind == "stage":
            raise StageError(value)
        if kind == "error":
            raise RuntimeError(f"in a process that stores states:\n{value}")
        return value


class _Lines(logging.Handler):
    """Collects log lines, which go to 03 with the next answer."""

    def __init__(self):
        super().__init__()
        self._found: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append((record.levelno, record.getMessage()))

    def take(self) -> list[tuple[int, str]]:
        found, self._found = self._found, []
        return found


def serve(end: Connection) -> None:
    """Body of one process: open a store, answer calls until `close` or until 03 is gone."""
    import torch

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # 03 decides what becomes of the open shard
    try:
        parent, settings = pickle.loads(end.recv_bytes())
    except EOFError:  # 03 failed before it had settings
        return
    end_with(parent)
    torch.set_num_threads(1)
    lines = _Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    rows = RowChecks(settings, threading.Event())
    method = ""
    while method != "close":
        try:
            method, args = end.recv()
        except EOFError:
            rows.close(discard=True)
            return
        try:
            reply = "done", getattr(rows, method)(*args)
            if method == "close":
                reply = "done", provenance.peak_rss_bytes()
        except RowFailed as err:
            reply = "row", (err.reason, err.detail)
        except Transient as err:
            reply = "transient", str(err)
        except StageError as err:
            reply = "stage", str(err)
        except Exception:
            reply = "error", traceback.format_exc()
        end.send((*reply, lines.take()))


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, even by kill -9 (prctl(2), PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    from eagle3 import extract_store  # so that what is pickled has one name in both processes

    extract_store.serve(Connection(int(sys.argv[1])))
