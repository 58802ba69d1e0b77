"""The client side of extraction: ask the verifier for answers and states, check them, hand them to the store.

A row without an answer is one completion request that generates it and leaves the states of prompt and answer
in the staging folder; a row that brought its answer is prefilled. Either way T = len(ids) - 1 states come
back.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from eagle3.contract import StageError
from eagle3.extract_store import Job, RowStore
from eagle3.looping import is_looping
from eagle3.state_checks import LayerRange, RowDropped, RowFailed, Stopped, Transient
from eagle3.store import input_digest
from eagle3.store_writer import disk_full

log = logging.getLogger("eagle3")

# Seconds the server may take to write the states of an answered request.
LOCK_TIMEOUT = 120.0
# Tries of one request in the face of transient faults; the waits grow from 0.5 to 20 s.
ATTEMPTS = 6
# Failures without a success between them that stop the run: the fault is not the rows'.
FAILURE_STREAK = 25
# Alternatives per position that a proof row asks for; vLLM allows 20 at most.
TOP_LOGPROBS = 8
# The server holds the logits of all prompt positions of a step at once: longer rows prove their last state.
LONGEST_PROMPT_LOGPROBS = 512


@dataclass(slots=True)
class Row:
    """One supervised turn; `input` is the digest of what it asked for."""

    id: str
    split: str
    domain: str
    source: str
    prompt_ids: list[int]
    response_ids: list[int] | None
    input: str
    history: dict | None = None
    finish: str = ""  # how a given answer ended, if a first pass of two made it


def row_of(record: dict, split: str) -> Row:
    """A line of 01 as a Row."""
    response, history = record["response_ids"], record.get("history")
    digest = input_digest(record["prompt_ids"], response)
    if history:
        text = json.dumps(history, sort_keys=True, ensure_ascii=False)
        digest = xxhash.xxh3_128(f"{digest}|{text}".encode()).hexdigest()
    return Row(
        record["id"],
        split,
        record["domain"],
        record["source"],
        record["prompt_ids"],
        response,
        digest,
        history,
    )


def row_seed(seed: int, row_id: str, turn: int = 0) -> int:
    """Sampling seed of one generation: a function of run seed, row id and turn, of nothing else."""
    return xxhash.xxh3_64(f"{seed}|{row_id}|{turn}".encode()).intdigest() & 0x7FFF_FFFF


# --- staged files -------------------------------------------------------------------------------------------


class Staged:
    """States that the server left in the staging folder; removed on exit, whatever happened.

    Args:
        path: as the server reported it.
        roots: folders that may hold it.

    Raises:
        RowFailed: a path outside of the staging folders (nothing is read or deleted then).
    """

    def __init__(self, path: str, roots: Iterable[Path]):
        self.path = Path(path)
        if self.path.resolve().parent not in [r.resolve() for r in roots]:
            raise RowFailed("foreign_path", f"the server reports {path}, outside of its staging folder")
        self.lock = Path(f"{path}.lock")

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_exc) -> None:
        for path in (self.path, self.lock):
            path.unlink(missing_ok=True)

    def wait(self, timeout: float, stop: threading.Event) -> None:
        """Wait until the server has finished writing: it holds a flock meanwhile, a dead server's lock is
        free.

        Raises:
            RowFailed: the lock is still held after `timeout` seconds.
            Transient: no lock and no file: the write failed in the server.
        """
        deadline, pause = time.monotonic() + timeout, 0.002
        while not self._unlocked():
            if stop.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                raise RowFailed("lock_timeout", f"{self.lock} is still held after {timeout:.0f} s")
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)
        if not self.path.exists():
            raise Transient(f"{self.path.name} was not written by the server")

    def _unlocked(self) -> bool:
        try:
            fd = os.open(self.lock, os.O_RDONLY)
        except FileNotFoundError:
            return self.path.exists()
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)


def empty_staging(roots: Iterable[Path]) -> int:
    """Delete states and locks that nobody will fetch any more; returns how many files there were."""
    found = [
        p for r in roots if r.is_dir() for p in r.iterdir() if p.name.endswith((".safetensors", ".lock"))
    ]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


# --- requests -----------------------------------------------------------------------------------------------


class Gate:
    """Bounds requests in flight, adapting to what the server takes, and bytes between server and shard."""

    def __init__(self, requests: int, budget: int, stop: threading.Event):
        self.most, self.limit, self.budget = requests, float(requests), budget
        self.requests = self.bytes = 0
        self._stop, self._changed = stop, threading.Condition()

    def enter(self, size: int) -> None:
        """Wait for a place for a request whose states will take `size` bytes; one alone always fits."""
        with self._changed:
            while self.requests >= int(self.limit) or (self.bytes and self.bytes + size > self.budget):
                if self._stop.is_set():
                    break
                self._changed.wait(0.2)
            if self._stop.is_set():
                raise Stopped
            self.requests += 1
            self.bytes += size

    def answered(self, ok: bool) -> None:
        """The request is over; a refused one (overload) lowers the limit by a third, 50 good ones add one."""
        with self._changed:
            self.requests -= 1
            self.limit = min(self.most, self.limit + 0.02) if ok else max(1.0, self.limit * 2 / 3)
            self._changed.notify_all()

    def freed(self, size: int) -> None:
        """The staged bytes of a request are gone."""
        with self._changed:
            self.bytes -= size
            self._changed.notify_all()


class Client:
    """Completion requests to one or more equal servers.

    Args:
        urls: endpoints; a dead one is left out, the last dead one ends the run.
        model: served model id.
        stop: ends waits.
        obituary: text about a dead server (its last log lines), if known.
    """

    def __init__(
        self, urls: list[str], model: str, stop: threading.Event, obituary: Callable[[], str] = lambda: ""
    ):
        self.urls, self.model, self.stop, self.obituary = list(urls), model, stop, obituary
        self.timeout = 900.0
        self.retries = 0
        self._lock, self._load = threading.Lock(), dict.fromkeys(urls, 0)
        self._local = threading.local()

    def complete(self, overload: Callable[[], None] = lambda: None, **body) -> dict:
        """POST /v1/completions, with growing waits after transient faults.

        Args:
            overload: called when the server says that it has too much to do.

        Raises:
            RowFailed: refused for good (HTTP 4xx), or no answer after the last try.
            StageError: no server is left.
            Stopped: the run ends.
        """
        import tenacity

        def pause(seconds: float) -> None:
            if self.stop.wait(seconds):
                raise Stopped

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Transient),
            wait=tenacity.wait_exponential_jitter(multiplier=0.5, max=20),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            sleep=pause,
            reraise=True,
        )
        try:
            return retrying(self._once, overload, {"model": self.model, **body})
        except Transient as err:
            raise RowFailed("no_answer", f"{err} ({ATTEMPTS} tries)") from None

    def _once(self, overload: Callable[[], None], body: dict) -> dict:
        import requests

        if self.stop.is_set():
            raise Stopped
        with self._lock:
            url = min(self._load, key=self._load.get, default=None)
            if url is None:
                raise StageError(self._gone())
            self._load[url] += 1
        try:
            session = getattr(self._local, "session", None)
            if session is None:
                session = self._local.session = requests.Session()
                session.trust_env = False
            reply = session.post(f"{url}/v1/completions", json=body, timeout=(10, self.timeout))
        except requests.RequestException as err:
            self.retries += 1
            if not self.stop.is_set() and not self._alive(url):
                self._bury(url)
            raise Transient(f"{url}: {type(err).__name__}") from None
        finally:
            with self._lock:
                if url in self._load:
                    self._load[url] -= 1
        if reply.status_code == 200:
            try:
                return reply.json()
            except ValueError:
                raise Transient(f"{url}: answer is not JSON") from None
        if reply.status_code in (408, 425, 429) or reply.status_code >= 500:
            self.retries += 1
            if reply.status_code in (429, 503):
                overload()
            raise Transient(f"{url}: HTTP {reply.status_code}")
        try:
            message = reply.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = reply.text
        raise RowFailed("refused", f"HTTP {reply.status_code}: {' '.join(str(message).split())[:300]}")

    def _alive(self, url: str) -> bool:
        """Whether a server that broke a connection still answers; two refusals half a second apart: no."""
        import requests

        for _ in range(2):
            try:
                if requests.get(f"{url}/health", timeout=10).status_code == 200:
                    return True
            except requests.Timeout:
                return True
            except requests.RequestException:
                pass
            if self.stop.wait(0.5):
                return True
        return False

    def _bury(self, url: str) -> None:
        with self._lock:
            if self._load.pop(url, None) is not None:
                log.error("server %s is gone", url)
            if not self._load:
                raise StageError(self._gone())

    def _gone(self) -> str:
        tail = self.obituary()
        return f"the verifier server is gone ({', '.join(self.urls)})" + (
            f"; last lines:\n{tail}" if tail else ""
        )


@dataclass
class Answer:
    """What a server said about one row: all ids, how it ended, path of states, log-probabilities."""

    ids: list[int]
    prompt: int
    finish: str
    path: str | None
    logprobs: dict[int, dict[int, float]] = field(default_factory=dict)


def parse_answer(reply: dict, prompt: list[int], given: list[int] | None) -> Answer:
    """Take a completion apart.

    Log-probabilities come back as {k: {token id: log-probability}}, where k counts final states: k = 0 is the
    prediction of the first answer token.

    Raises:
        RowFailed: the reply lacks token ids, or is about another prompt.
    """
    choice = reply["choices"][0]
    out, seen = choice.get("token_ids"), choice.get("prompt_token_ids")
    if given is None and out is None:
        raise RowFailed("no_token_ids", "the server does not return token ids; vLLM 0.26 or newer is needed")
    if given is None and seen not in (None, prompt):
        raise RowFailed("other_prompt", f"the server answered {len(seen)} other prompt tokens")
    path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")

    def best(top: dict[int, float]) -> dict[int, float]:
        # A token outside the likeliest ones is added to them; every position is to have as many.
        return dict(sorted(top.items(), key=lambda item: -item[1])[:TOP_LOGPROBS])

    ids = [*prompt, *out] if given is None else [*prompt, *given]
    first = 0 if given is None else len(given) - 1
    found = {}
    for i, top in enumerate((choice.get("logprobs") or {}).get("top_logprobs") or []):
        found[first + i] = best({int(k.partition(":")[2]): v for k, v in top.items()})
    for i, top in enumerate(choice.get("prompt_logprobs") or []):
        if given is not None and i >= len(prompt):
            found[i - len(prompt)] = best({int(k): v["logprob"] for k, v in top.items()})
    return Answer(ids, len(prompt), choice.get("finish_reason") or "", path, found)


class Extractor:
    """Turns rows into stored samples, many at once.

    Args:
        client: where to ask.
        gate: how much at once.
        store: where samples go; None only generates (first pass of two).
        settings: recipe.answers.
        seed: recipe.seed.
        limit: tokens of one request that the server takes.
        layers: auxiliary ids and the final one.
        hidden: values per state.
        roots: staging folders.
        wants_proof: row -> whether to ask log-probabilities with it.
        next_prompt: (history, earlier answers) -> prompt ids, for rows whose earlier turns the verifier
            answers.
    """

    def __init__(
        self, client: Client, gate: Gate, store: RowStore | None, settings, seed: int, limit: int,
        layers: list[int], hidden: int, roots: list[Path],
        wants_proof: Callable[[Row], bool] = lambda row: False,
        next_prompt: Callable[[dict, list[list[int]]], list[int]] | None = None,
    ):  # fmt: skip
        self.client, self.gate, self.store, self.settings, self.seed = client, gate, store, settings, seed
        self.limit, self.layers, self.hidden, self.roots = limit, layers, hidden, roots
        self.wants_proof, self.next_prompt = wants_proof, next_prompt
        self.stop, self.range = client.stop, LayerRange(layers)

    def token_bytes(self) -> int:
        """Staged bytes of one token: every served layer in bf16."""
        return len(self.layers) * self.hidden * 2

    def take(self, row: Row) -> Answer:
        """One row from request to committed sample; returns its answer.

        Raises:
            RowDropped, RowFailed: it is not stored, with the reason.
            StageError: nothing can be stored any more (dead server, full disk).
        """
        given, prompt = row.response_ids, self._prompt(row)
        total = len(prompt) + (self.settings.max_tokens if given is None else len(given))
        if total > self.limit:
            raise RowDropped("too_long", f"{total} tokens, the server takes {self.limit}")
        if given is not None and len(given) < 2:
            raise RowDropped("empty", f"{len(given)} answer tokens")
        size = (total - 1) * self.token_bytes()
        proof = self.store is not None and self.wants_proof(row)
        for attempt in range(ATTEMPTS):
            try:
                return self._try(row, prompt, given, size, proof)
            except Transient as err:
                self._staging_full(size)
                if attempt == ATTEMPTS - 1:
                    raise RowFailed("no_states", str(err)) from None
                if self.stop.wait(0.5 * 2**attempt * (0.5 + random.random())):
                    raise Stopped from None
        raise AssertionError("unreachable")

    def _ask(self, **body) -> dict:
        """The server's reply to one request; the gate learns how it went."""
        overloads = []
        try:
            return self.client.complete(lambda: overloads.append(1), **body)
        finally:
            self.gate.answered(not overloads)

    def _try(
        self, row: Row, prompt: list[int], given: list[int] | None, size: int, proof: bool
    ) -> Answer:  # fmt: skip
        self.gate.enter(size)
        try:
            reply = self._ask(**self._body(row, prompt, given, proof))
            answer = parse_answer(reply, prompt, given)
            if answer.path is None and self.store is not None:
                raise StageError(
                    "the server answers without states: ./02_launch_verifier.sh extract is needed, not serve"
                )
            with Staged(answer.path, self.roots) if answer.path is not None else nullcontext() as staged:
                flags = self._flags(row, answer, given)
                if self.store is not None:
                    staged.wait(LOCK_TIMEOUT, self.stop)
                    self.range.add(self.store.store(self._job(row, answer, flags, staged.path)))
            return answer
        finally:
            self.gate.freed(size)

    def _body(self, row: Row, prompt: list[int], given: list[int] | None, proof: bool) -> dict:
        body = {"prompt": prompt}
        if given is None:
            body["return_token_ids"] = True
            body |= {"max_tokens": self.settings.max_tokens, **self._sampling(row.id)}
            body["kv_transfer_params"] = {"include_output_tokens": True}
        else:
            # The state of the last token is never stored, so it is not sent: the states match generation's.
            body |= {"prompt": [*prompt, *given][:-1], "max_tokens": 1, "temperature": 0.0}
        if proof:
            body |= {"logprobs": TOP_LOGPROBS, "return_tokens_as_token_ids": True}
            if given is not None and len(prompt) + len(given) <= LONGEST_PROMPT_LOGPROBS:
                body["prompt_logprobs"] = TOP_LOGPROBS
        return body

    def _sampling(self, row_id: str, turn: int = 0) -> dict:
        s = self.settings
        found = {"temperature": s.temperature}
        if s.temperature > 0:
            found |= {"top_p": s.top_p, "top_k": s.top_k or -1, "seed": row_seed(self.seed, row_id, turn)}
        return found

    def _prompt(self, row: Row) -> list[int]:
        """The row's prompt; where earlier turns are the verifier's to answer, it answers them first."""
        if not row.history:
            return row.prompt_ids
        from eagle3.chats import BadRow

        answers: list[list[int]] = []
        try:
            for turn in range(1, row.history["answers"] + 1):
                prompt = self.next_prompt(row.history, answers)
                if len(prompt) + self.settings.max_tokens > self.limit:
                    raise RowDropped("too_long", f"turn {turn}: {len(prompt)} prompt tokens")
                answers.append(self._generate(row, prompt, turn))
            return self.next_prompt(row.history, answers)
        except BadRow as err:
            raise RowFailed(err.reason, err.detail) from None

    def _generate(self, row: Row, prompt: list[int], turn: int) -> list[int]:
        """An answer without its states (the server leaves them all the same; they are deleted)."""
        body = {"prompt": prompt, "return_token_ids": True, "max_tokens": self.settings.max_tokens}
        size = len(prompt) * self.token_bytes()
        self.gate.enter(size)
        try:
            answer = parse_answer(self._ask(**body, **self._sampling(row.id, turn)), prompt, None)
            if answer.path:
                with Staged(answer.path, self.roots) as staged:
                    staged.wait(LOCK_TIMEOUT, self.stop)
            return answer.ids[len(prompt) :]
        finally:
            self.gate.freed(size)

    def _flags(self, row: Row, answer: Answer, given: list[int] | None) -> tuple[str, ...]:
        """Apply the rules for answers: empty, looping, at the limit. Held-out rows are kept and flagged."""
        out, s = answer.ids[answer.prompt :], self.settings
        if len(out) < 2:
            raise RowDropped("empty", f"{len(out)} answer tokens")
        flags = []
        if is_looping(out):
            flags.append("looping")
        if (answer.finish if given is None else row.finish) == "length":
            flags.append("at_limit")
        for flag, rule in (("looping", s.looping), ("at_limit", s.at_limit)):
            if flag in flags and rule == "drop" and row.split != "heldout":
                raise RowDropped(flag, f"{len(out)} answer tokens")
        return tuple(flags)

    def _job(self, row: Row, answer: Answer, flags: tuple[str, ...], path: Path) -> Job:
        entry = {"id": row.id, "split": row.split, "domain": row.domain, "source": row.source}
        entry |= {"input": row.input, "flags": flags}
        return Job(path, answer.ids, answer.prompt, answer.logprobs, entry, self.range.usual())

    def _staging_full(self, size: int) -> None:
        """Raises DiskFull if a staging folder can't hold the states of a row (the server only logs it)."""
        for root in self.roots:
            if root.is_dir() and shutil.disk_usage(root).free < 2 * size + (1 << 20):
                raise disk_full(root, size)


class WorkerPool:
    """Threads over a shared iterator; the first exception that is not about one row stops all."""

    def __init__(self, count: int, rows: Iterator, work: Callable[[Row], None], stop: threading.Event):
        self._rows, self._work, self._stop = rows, work, stop
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        # Daemons: a request that hangs must not keep a stopped process alive.
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _loop(self) -> None:
        import torch

        torch.set_num_threads(1)
        try:
            while not self._stop.is_set():
                with self._lock:
                    row = next(self._rows, None)
                if row is None:
                    return
                self._work(row)
        except Stopped:
            pass
        except BaseException as err:
            if self.error is None:
                self.error = err
            self._stop.set()

    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self, seconds: float) -> bool:
        """Wait for the threads; returns whether all ended."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self.running()


def ask_again(client: Client, ids: list[int], prompt: int, roots: list[Path]) -> dict[int, dict[int, float]]:
    """Log-probabilities of a stored sample, by a request of its own; its states are deleted."""
    body = {"prompt": ids[:-1], "max_tokens": 1, "temperature": 0.0}
    body |= {"logprobs": TOP_LOGPROBS, "return_tokens_as_token_ids": True}
    if len(ids) <= LONGEST_PROMPT_LOGPROBS:
        body["prompt_logprobs"] = TOP_LOGPROBS
    try:
        answer = parse_answer(client.complete(**body), ids[:prompt], ids[prompt:])
    except (RowFailed, Stopped) as err:
        raise StageError(
            f"the state proof could not ask the server again: {err or 'the run was stopped'}"
        ) from None
    if answer.path:
        with Staged(answer.path, roots) as staged:
            staged.wait(LOCK_TIMEOUT, threading.Event())
    return answer.logprobs
