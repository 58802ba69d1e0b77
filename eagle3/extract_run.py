"""One run of 03 over the missing rows: server, threads, writer, counts, budget, answers of a first pass."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from eagle3.contract import Interrupted, StageError, fsync_dir, nearest_existing
from eagle3.extract import (
    FAILURE_STREAK,
    Client,
    Extractor,
    Gate,
    WorkerPool,
    empty_staging,
    row_of,
)
from eagle3.extract_store import RowStore, StoreSettings, open_store
from eagle3.server import Server, probe, served_name, staging_candidates, staging_dir, tail
from eagle3.sizes import sample_bytes
from eagle3.state_checks import RowDropped, RowFailed

log = logging.getLogger("eagle3")

# Held-out and validation rows first: whatever happens later, there is something to measure with.
ORDER = ("heldout", "val", "train")


def lines_at(path: Path) -> Iterator[tuple[int, dict]]:
    """Lines of a JSONL file with their byte offsets."""
    with open(path, "rb") as f:
        offset = 0
        for number, line in enumerate(f, 1):
            try:
                yield offset, json.loads(line)
            except ValueError as err:
                raise StageError(f"{path}:{number}: {err}") from None
            offset += len(line)


def budget_of(args) -> dict:
    return {k: v for k in ("max_tokens", "max_bytes") if (v := getattr(args, k)) is not None}


class Work:
    """One run over the missing rows: server, threads, writer, counts."""

    def __init__(self, stage, verifier, store, part: str):
        self.stage, self.verifier, self.store, self.part = stage, verifier, store, part
        self.mode = stage.args.mode or stage.recipe.states.mode
        self.stop, self._lock = threading.Event(), threading.Lock()
        self.failed: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.failures: list[dict] = []
        self.example = ""
        self.taken = self.tokens = self.answer_tokens = 0
        self._busy = self._streak = self._asked = self._since = 0
        self.planned_tokens = sum(s.tokens for s in store.samples)
        self.planned_bytes = store.bytes
        self.budget_reached = False
        self.seconds = 0.0
        self.extractor = self.answers = None

    def run(self, plan) -> None:
        """Take all rows of the plan and seal them; if it raises, what was whole is sealed too."""
        from eagle3.progress import Progress

        stage, profile, verifier = self.stage, self.stage.profile, self.verifier
        urls, roots = self._urls(), staging_candidates(stage.run)
        # First, because its processes need seconds to start.
        rows = None if stage.args.answers_only else self._store(urls, roots)
        try:
            limit = self._limit(urls)
        except BaseException:
            if rows:
                rows.close(discard=True)
            raise
        if left := empty_staging(roots):
            log.info("%d files of an interrupted run removed from the staging folder", left)
        name = served_name(verifier)
        client = Client(urls, name, self.stop, lambda: tail(stage.run.path / "verifier.log"))
        gate = Gate(profile.EXTRACT_REQUESTS, self._staging_budget(), self.stop)
        if self.mode == "two-pass":
            self.answers = Answers(stage.run.hidden / "answers.jsonl")
        self.extractor = Extractor(
            client, gate, rows, stage.recipe.answers, stage.recipe.seed, limit, verifier.served_layers,
            verifier.hidden_size, roots, self._wants_proof, self._next_prompt(),
        )  # fmt: skip
        self._failures = open(stage.run.hidden / "failures.jsonl", "w", encoding="utf-8")
        self._began = time.time()
        try:
            with Progress(plan.wanted, "row", "extracting", plan.wanted - len(plan.todo)) as self._progress:
                self._drive(plan, rows)
        finally:
            self.seconds = time.time() - self._began
            self._failures.close()
            if self.answers:
                self.answers.close()
            empty_staging(roots)

    def _drive(self, plan, rows: RowStore | None) -> None:
        """Start the threads, wait for them, seal."""
        # A few more threads than requests: some check and store while the others wait for the server.
        pool = WorkerPool(self.stage.profile.EXTRACT_REQUESTS + 4, self._rows(plan), self._one, self.stop)
        try:
            while pool.running():
                pool.join(0.2)
        except Interrupted:
            self.stop.set()
            raise
        finally:
            self._close(pool, rows)
        if pool.error:
            raise pool.error

    def _close(self, pool: WorkerPool, rows: RowStore | None) -> None:
        """Seal what is whole; if that fails while another error is on its way, that one counts.

        Threads that wait for an answer are left behind; those that are storing one get five seconds.
        """
        if rows is None:
            return
        stopped = self.stop.is_set()
        deadline = time.monotonic() + 5.0
        while stopped and rows.pending and time.monotonic() < deadline:
            pool.join(0.05)
        try:
            rows.close(discard=rows.pending > 0)
        except StageError as err:
            if not stopped:
                raise
            log.warning("the open shard is lost: %s", err)

    def _urls(self) -> list[str]:
        profile = self.stage.profile
        host = "127.0.0.1" if profile.VERIFIER_HOST == "0.0.0.0" else profile.VERIFIER_HOST
        return [u.rstrip("/") for u in self.stage.args.endpoint or [f"http://{host}:{profile.VERIFIER_PORT}"]]

    def _limit(self, urls: list[str]) -> int:
        """The tokens that one request may have.

        Raises:
            StageError: an endpoint doesn't answer, is another model, or its limit is below the recipe's.
        """
        import requests

        want = self.stage.recipe.verifier.max_model_len
        for url in urls:
            try:
                models = requests.get(f"{url}/v1/models", timeout=30).json()["data"]
            except (requests.RequestException, ValueError, KeyError):
                raise StageError(
                    f"no verifier answers at {url}: run FROM=03 TO=03 ./run_pipeline.sh, which starts and "
                    "stops one, or start ./02_launch_verifier.sh extract and name it with --endpoint"
                ) from None
            probe(Server(url, served_name(self.verifier), 0), self.verifier)
            limit = next(
                (m.get("max_model_len") for m in models if m["id"] == served_name(self.verifier)), None
            )
            if limit is not None and limit < want:
                raise StageError(
                    f"{url} takes {limit} tokens a request, the recipe's verifier.max_model_len is {want}: "
                    "start it again with this recipe"
                )
        return want

    def _staging_budget(self) -> int:
        """Bytes that may lie between server and shard: the profile's, or half of what the folder has free."""
        where = staging_dir(self.stage.run, self.stage.profile)
        free = shutil.disk_usage(nearest_existing(where)).free
        return int(min(self.stage.profile.EXTRACT_STAGING_GB * 1e9, free / 2))

    def _store(self, urls: list[str], roots: list[Path]) -> RowStore:
        stage, states = self.stage, self.stage.recipe.states
        reserve, verifier = int(stage.profile.DISK_RESERVE_GB * 1e9), self.verifier
        settings = StoreSettings(
            stage.run.hidden, self.part, verifier.served_layers, verifier.hidden_size, states.dtype,
            states.shard_bytes, reserve, states.proof_rows, urls, served_name(verifier), roots,
        )  # fmt: skip
        return open_store(settings, verifier, self.stop)

    def _next_prompt(self):
        """Renderer of the next turn of chats whose earlier answers are the verifier's own."""
        made, lock = [], threading.Lock()

        def render(history: dict, answers: list[list[int]]) -> list[int]:
            from eagle3 import chats

            with lock:
                if not made:
                    v = self.verifier
                    made.append(chats.Renderer(v.tokenizer(), v.path, v.vocab_size))
                return chats.next_prompt(made[0], history, answers)

        return render

    def _wants_proof(self, row) -> bool:
        """The first rows ask for log-probabilities, then about eight per shard, so that each gets some."""
        with self._lock:
            size = self.stage.recipe.states.shard_bytes
            if self._asked < self.stage.recipe.states.proof_rows or self._since >= size // 8:
                self._asked, self._since = self._asked + 1, 0
                return True
            return False

    # -- rows in, results out

    def _rows(self, plan) -> Iterator:
        """Rows of the plan, read when they are needed; ends early when the budget is reached."""
        files = {split: open(self.stage.run.rows(split), "rb") for split in ORDER}
        before = ORDER[0]
        for split, offset in plan.todo:
            if self.stage.args.round and split == "train" and before != split:
                self._part_shards()
            before = split
            files[split].seek(offset)
            row = row_of(json.loads(files[split].readline()), split)
            if self.answers and self.answers.fill(row) and self.stage.args.answers_only:
                continue
            if not self._fits(row):
                self.budget_reached = True
                log.info("budget reached: %s", budget_of(self.stage.args))
                break
            yield row
        for f in files.values():
            f.close()

    def _part_shards(self) -> None:
        """Training rows of a round get shards of their own, so that they can be deleted when it is over."""
        while self._busy and not self.stop.is_set():
            time.sleep(0.05)
        if self.extractor.store:
            self.extractor.store.next_shard()

    def _fits(self, row) -> bool:
        """Count a row into the budget at its largest; a row that does not fit ends the run."""
        answer = self.stage.recipe.answers.max_tokens if row.response_ids is None else len(row.response_ids)
        tokens = len(row.prompt_ids) + answer
        size = sample_bytes(
            tokens, len(row.prompt_ids), len(self.verifier.layers), self.verifier.hidden_size,
            self.stage.recipe.states.dtype,
        )  # fmt: skip
        args = self.stage.args
        with self._lock:
            self.planned_tokens += tokens
            self.planned_bytes += size
            self._since += size
            return self.planned_tokens <= (args.max_tokens or float("inf")) and self.planned_bytes <= (
                args.max_bytes or float("inf")
            )

    def _one(self, row) -> None:
        """One row, start to end; called by many threads."""
        with self._lock:
            self._busy += 1
        try:
            answer = self.extractor.take(row)
        except RowDropped as err:
            self._note(row, err, "dropped")
            if self.extractor.store:
                entry = {"id": row.id, "split": row.split, "domain": row.domain, "reason": err.reason}
                self.extractor.store.drop({**entry, "input": row.input, "detail": err.detail})
        except RowFailed as err:
            self._note(row, err, "failed")
        else:
            if self.stage.args.answers_only:
                self.answers.put(row, answer)
            with self._lock:
                self._streak = 0
                self.taken += 1
                self.tokens += len(answer.ids)
                self.answer_tokens += len(answer.ids) - answer.prompt
        finally:
            with self._lock:
                self._busy -= 1
        with self._lock:
            rate = self.tokens / (time.time() - self._began)
            self._progress.update(1, f", {rate:.0f} tok/s")

    def _note(self, row, err: RowFailed, kind: str) -> None:
        """Count and write down a row that is not stored; raises StageError if nothing but failures comes."""
        with self._lock:
            (self.dropped if kind == "dropped" else self.failed)[err.reason] += 1
            entry = {
                "id": row.id,
                "split": row.split,
                "kind": kind,
                "reason": err.reason,
                "detail": err.detail,
            }
            self._failures.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._failures.flush()
            if kind == "dropped":
                self._streak = 0
                return
            self.failures.append(entry)
            self.example = self.example or f"{row.id}: {err}"
            log.warning("row %s failed: %s", row.id, err)
            self._streak += 1
            if self._streak == FAILURE_STREAK:
                self.stop.set()  # here, so that no other thread asks for one more row meanwhile
                raise StageError(
                    f"{self._streak} rows in a row failed, the last: {err}; see {self._failures.name}"
                )

    def refuse_failures(self) -> None:
        """Raises StageError if more rows failed than states.max_failed allows."""
        count, allowed = self.failed.total(), self.stage.recipe.states.max_failed
        if count > allowed:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.failed.most_common())
            raise StageError(
                f"{count} rows failed ({reasons}), states.max_failed allows {allowed}; first: "
                f"{self.example}. All others are stored, a rerun retries just these; {self._failures.name}"
            )

    def layer_norms(self) -> dict | None:
        return self.extractor.range.report() if self.extractor else None

    def rates(self, store) -> dict:
        tokens = sum(s.tokens for s in store.samples)
        found = {"bytes_per_token": round(store.bytes / max(1, tokens), 1)}
        if self.seconds and self.taken:
            found["tokens_per_s"] = round(self.tokens / self.seconds, 1)
            found["answer_tokens_per_s"] = round(self.answer_tokens / self.seconds, 1)
            found["rows_per_s"] = round(self.taken / self.seconds, 3)
            found["run_seconds"], found["run_rows"] = round(self.seconds, 2), self.taken
            found["retries"] = self.extractor.client.retries
            found["final_request_limit"] = int(self.extractor.gate.limit)
        return found


class Answers:
    """answers.jsonl of the first pass: appended as answers arrive, read by offset."""

    def __init__(self, path: Path):
        self.path, self._lock = path, threading.Lock()
        self._at: dict[str, tuple[int, str]] = {}
        fresh = not path.exists()
        self._file = open(path, "ab+")
        if fresh:
            fsync_dir(path.parent)
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a line that a kill cut short
        for offset, entry in lines_at(path):
            self._at[entry["id"]] = (offset, entry["input"])

    def fill(self, row) -> bool:
        """Give a row the answer it got (and the prompt that was asked with); False if there is none yet."""
        offset, digest = self._at.get(row.id, (0, None))
        if digest != row.input:
            return False
        with self._lock:
            self._file.seek(offset)
            entry = json.loads(self._file.readline())
        row.prompt_ids, row.history = entry.get("prompt_ids", row.prompt_ids), None
        row.response_ids, row.finish = entry["token_ids"], entry["finish"]
        return True

    def put(self, row, answer) -> None:
        """Append an answer."""
        entry = {"id": row.id, "input": row.input, "token_ids": answer.ids[answer.prompt :]}
        entry["finish"] = answer.finish
        if row.history:
            entry["prompt_ids"] = answer.ids[: answer.prompt]
        with self._lock:
            self._at[row.id] = (self._file.seek(0, 2), row.input)
            self._file.write((json.dumps(entry) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
