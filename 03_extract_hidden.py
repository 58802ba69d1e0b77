#!/usr/bin/env python3
"""03: the verifier's answers and hidden states for every row, proven and stored.

Reads   01_prepare/{train,val,heldout}.jsonl and a running `02_launch_verifier.sh extract` server.
Writes  03_hidden/shard-<part>-NNNNN.safetensors, manifest-<part>.jsonl, failures.jsonl, stage.json.

    python -m eagle3.server run extract -- python 03_extract_hidden.py    starts and stops the server
    python 03_extract_hidden.py --endpoint http://127.0.0.1:8192          with a server that runs already
    python 03_extract_hidden.py --check --deep                            verify every stored checksum

Rows without an answer are answered and extracted in one request; rows that bring one are prefilled. Only
missing rows are taken. --part i/n takes the i-th of n disjoint parts: put the n folders together and run it
once more. --round k/n keeps held-out and validation rows and the k-th of n windows of the training rows, and
deletes the other windows. --mode two-pass answers with a plain or speculative server first (--answers-only),
then prefills. A budget (--max-tokens, --max-bytes) is part of what was asked for: reached, the stage is done
with what it has; without it, or with a larger one, a rerun goes on.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.cli import Stage, fraction, run_stage, stage_parser
from eagle3.contract import SPLITS, ConfigError, StageError, read_json, write_text
from eagle3.extract_run import ORDER, Work, budget_of, lines_at
from eagle3.record import StageRecord, files_of

log = logging.getLogger("eagle3")


def parser():
    p = stage_parser("03", __doc__)
    p.add_argument("--endpoint", action="append", metavar="URL", help="a running server (repeatable)")
    p.add_argument("--mode", choices=["one-pass", "two-pass"], help="default: states.mode of the recipe")
    p.add_argument("--answers-only", action="store_true", help="first pass of two: answers.jsonl, no states")
    p.add_argument("--part", default="1/1", type=fraction, metavar="I/N", help="one of N disjoint parts")
    p.add_argument("--round", type=fraction, metavar="K/N", help="one of N windows of the training rows")
    p.add_argument("--max-tokens", type=int, metavar="N", help="store at most so many tokens")
    p.add_argument("--max-bytes", type=int, metavar="N", help="store at most so many bytes")
    p.add_argument("--deep", action="store_true", help="verify every stored checksum first")
    return p


def main(argv=None) -> int:
    return run_stage(parser(), "03", body, argv)


def body(stage: Stage) -> str:
    """Decide what is left, then do it."""
    from eagle3.store import FORMAT
    from eagle3.verifier import open_verifier

    verifier = open_verifier(stage.recipe, fetch=False)
    answers = stage.recipe.answers.model_dump(exclude={"expected_tokens"})  # that one is for `plan` only
    identity = {"format": FORMAT, "verifier": verifier.fingerprint, "layers": verifier.served_layers}
    identity |= {"dtype": stage.recipe.states.dtype, "answers": answers, "seed": stage.recipe.seed}
    record = StageRecord(stage.run, "03", identity, stage.profile.name)
    if stage.args.check:
        return check(stage, record)
    with folder_lock(stage.run.hidden):
        if (old := record.begin(stage.args.force, made_here)) and fresh(stage, old) and not stage.args.deep:
            log.info("done already: %d rows, %.2f GB", sum(old["counts"].values()), old["bytes"] / 1e9)
            return "skipped"
        return extract(stage, record, verifier)


def made_here(folder: Path) -> list[Path]:
    """Everything that --force removes."""
    return files_of(
        folder, "shard-*.safetensors", "manifest-*.jsonl", "failures.jsonl", "answers.jsonl", ".staging"
    )


def inputs_of(stage: Stage) -> dict:
    """What 01 recorded about the row files; changes when rows are added."""
    book = read_json(stage.run.prepare / "stage.json")
    if not book or book.get("status") != "done":
        raise StageError(f"{stage.run.prepare} is not finished: run 01_prepare.py first")
    return {f"{s}.jsonl": book["outputs"][f"{s}.jsonl"] for s in SPLITS if f"{s}.jsonl" in book["outputs"]}


def fresh(stage: Stage, old: dict) -> bool:
    """Whether a finished record is about these rows, this round and no smaller budget than asked."""
    round_ = list(stage.args.round) if stage.args.round else None
    budget = old.get("budget") or {}
    return (
        old["inputs"] == inputs_of(stage) and old["round"] == round_ and budget in ({}, budget_of(stage.args))
    )


def check(stage: Stage, record: StageRecord) -> str:
    """--check: is there work left? With --deep every checksum is computed anew, broken shards are named."""
    from eagle3.store import Store

    record.refuse_other_identity()
    old = record.done()
    if stage.args.deep:
        bad = damaged_shards(Store.open(stage.run.hidden))
        if bad:
            raise StageError(
                f"{len(bad)} broken shards: {'; '.join(bad.values())}. "
                "03_extract_hidden.py --deep redoes them"
            )
        log.info("every stored checksum is right")
    return "done" if old and fresh(stage, old) else "todo"


def damaged_shards(store) -> dict[str, str]:
    """Shard name -> which row has another checksum."""
    from eagle3.progress import Progress

    bad = {}
    with Progress(len(store.samples), "row", "verifying") as progress:
        for info in store.samples:
            if info.shard not in bad and store.checksum(info) != info.checksum:
                bad[info.shard] = f"{store.folder / info.shard}: row {info.id} is not what was sealed"
            progress.update()
    return bad


def write_failures(path: Path, store, failed: list[dict]) -> None:
    """failures.jsonl of a finished stage: every row that was left out, by a rule or by a fault."""
    keys = ("id", "split", "reason", "detail")
    rows = [{"kind": "dropped", **{k: d.get(k) for k in keys}} for d in store.dropped.values()]
    rows = sorted(rows + failed, key=lambda row: (row["kind"], row["reason"], row["id"]))
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


class folder_lock:
    """One 03 per folder; the kernel frees the lock of a killed one."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.fd)
            raise StageError(f"another 03_extract_hidden.py works in {self.folder}") from None

    def __exit__(self, *_exc):
        os.close(self.fd)


# --- what is left -------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Rows to take, and figures about them."""

    todo: list[tuple[str, int]] = field(default_factory=list)  # split, byte offset of its line
    wanted: int = 0
    elsewhere: int = 0  # rows that other parts have to bring
    tokens: int = 0  # known: prompts, and answers that are given
    finals: int = 0  # known: final states of given answers
    open_rows: int = 0  # rows that get their answer here


def make_plan(stage: Stage, store) -> Plan:
    """Compare the rows of 01 with what is stored, row by row.

    Raises:
        ConfigError: stored rows changed or vanished in 01.
    """
    import xxhash

    from eagle3.extract import row_of

    known = {s.id: s.input for s in store.samples} | {k: d["input"] for k, d in store.dropped.items()}
    plan, changed, (part, parts) = Plan(), [], stage.args.part
    for split in ORDER:
        path = stage.run.rows(split)
        total = count_lines(path) if stage.args.round else 0
        for number, (offset, record) in enumerate(lines_at(path)):
            row = row_of(record, split)
            had = known.pop(row.id, None)
            if had is not None and had != row.input:
                changed.append(row.id)
            if stage.args.round and split == "train":
                k, n = stage.args.round
                if not total * (k - 1) // n <= number < total * k // n:
                    continue
            plan.wanted += 1
            if had is not None:
                continue
            if xxhash.xxh3_64(row.id.encode()).intdigest() % parts != part - 1:
                plan.elsewhere += 1
                continue
            plan.todo.append((split, offset))
            plan.tokens += len(row.prompt_ids) + len(row.response_ids or ())
            plan.finals += len(row.response_ids or ())
            plan.open_rows += row.response_ids is None
    for what, ids in (("changed", changed), ("no longer exist", list(known))):
        if ids:
            raise ConfigError(
                f"{len(ids)} rows of {stage.run.hidden} {what} in {stage.run.prepare} (e.g. {ids[0]}): "
                "run 03_extract_hidden.py --force to make them anew, or choose another RUN_DIR"
            )
    return plan


def count_lines(path: Path) -> int:
    with open(path, "rb") as f:
        return sum(1 for _ in f)


def estimate(stage: Stage, plan: Plan, store, verifier) -> tuple[int, int]:
    """Bytes that the missing rows will take: (expected, at most)."""
    from eagle3.sizes import sample_bytes

    longest = stage.recipe.answers.max_tokens
    own = [s.finals for s in store.samples[-2000:]]
    mean = sum(own) / len(own) if own else 0.75 * longest

    def size(answer: float) -> int:
        extra = int(plan.open_rows * answer)
        tokens, finals = plan.tokens + extra, plan.finals + extra
        aux = len(verifier.layers)
        return sample_bytes(
            tokens + 1, tokens + 1 - finals, aux, verifier.hidden_size, stage.recipe.states.dtype
        )

    return size(mean), size(longest)


def refuse_if_too_big(stage: Stage, plan: Plan, store, verifier) -> None:
    """Print the estimate; raises StageError if the expected bytes do not fit beside the reserve."""
    expected, most = estimate(stage, plan, store, verifier)
    if (cap := stage.args.max_bytes) is not None:
        expected, most = min(expected, cap), min(most, cap)
    free, reserve = shutil.disk_usage(stage.run.hidden).free, int(stage.profile.DISK_RESERVE_GB * 1e9)
    log.info(
        "%d of %d rows to take: about %.3g GB, at most %.3g GB; %.4g GB free, %.3g GB of them kept free",
        len(plan.todo), plan.wanted, expected / 1e9, most / 1e9, free / 1e9, reserve / 1e9,
    )  # fmt: skip
    if expected > free - reserve:
        rounds = -(-expected // max(1, free - reserve))
        raise StageError(
            f"states will take about {expected} bytes, {stage.run.hidden} has {free} free, {reserve} of them "
            f"kept free (DISK_RESERVE_GB): free some, or set ROUNDS={rounds + 1}, fewer SAMPLES or "
            "states.dtype=fp8"
        )
    if most > free - reserve:
        log.warning("if every answer is as long as allowed, the disk will not do; the run stops cleanly then")


# --- the work -----------------------------------------------------------------------------------------------


def extract(stage: Stage, record: StageRecord, verifier) -> str:
    """Repair what is broken, take what is missing, seal, prove, record."""
    from eagle3.store import reconcile

    folder, part = stage.run.hidden, "{}of{}".format(*stage.args.part)
    store, problems = reconcile(folder, part)
    for name, why in problems.items():
        log.warning("%s %s: its rows are taken again", name, why)
    if stage.args.deep:
        bad = damaged_shards(store)
        for why in bad.values():
            log.warning("%s: its rows are taken again", why)
        store.delete(list(bad))
    if store.shards and [store.dtype, store.layers] != [stage.recipe.states.dtype, verifier.served_layers]:
        raise ConfigError(f"{folder} holds {store.dtype} states of layers {store.layers}: use --force")
    if stage.args.round:
        drop_other_rounds(stage, store)
    plan = make_plan(stage, store)
    work = Work(stage, verifier, store, part)
    if plan.todo:
        refuse_if_too_big(stage, plan, store, verifier)
        work.run(plan)
        work.refuse_failures()
        if stage.args.answers_only:
            return "done"
    return finish(stage, record, plan, work)


def drop_other_rounds(stage: Stage, store) -> None:
    """Delete shards whose training rows are all outside this round's window; the draft has seen them."""
    k, n = stage.args.round
    log.info("round %d of %d: each round loads the verifier once, %d loads in all", k, n, n)
    path = stage.run.rows("train")
    total = count_lines(path)
    window = {
        r["id"] for i, (_, r) in enumerate(lines_at(path)) if total * (k - 1) // n <= i < total * k // n
    }
    old = [
        name
        for name, shard in store.shards.items()
        if all(s.split == "train" and s.id not in window for s in shard.samples)
    ]
    if old:
        log.info("round %d of %d: %d shards of other rounds are deleted", k, n, len(old))
        store.delete(old)


def finish(stage: Stage, record: StageRecord, plan: Plan, work: Work) -> str:
    """Count what lies in the folder and write stage.json, if no row is missing."""
    from eagle3.store import Store

    if plan.elsewhere:
        log.info(
            "part %d/%d is complete; %d rows are other parts': put their shards and manifests into %s and "
            "run 03_extract_hidden.py once more (it needs no server then)",
            *stage.args.part, plan.elsewhere, stage.run.hidden,
        )  # fmt: skip
        return "done"
    store = Store.open(stage.run.hidden)
    samples = store.samples
    counts = {split: sum(s.split == split for s in samples) for split in SPLITS}
    tokens, answer = sum(s.tokens for s in samples), sum(s.finals for s in samples)
    dropped = dict(Counter(d["reason"] for d in store.dropped.values()))
    write_failures(stage.run.hidden / "failures.jsonl", store, work.failures)
    outputs = {name: {"bytes": shard.bytes} for name, shard in store.shards.items()}
    outputs |= {p.name: {} for p in files_of(stage.run.hidden, "manifest-*.jsonl")}
    outputs["failures.jsonl"] = {"count": count_lines(stage.run.hidden / "failures.jsonl")}
    proofs = [s.proof for s in store.shards.values() if s.proof]
    proof = {"shards": len(proofs), "rows": sum(p["rows"] for p in proofs)}
    if proofs:
        proof |= {"median": max(p["median"] for p in proofs), "p99": max(p["p99"] for p in proofs)}
        proof["control_median"] = min(p["control_median"] for p in proofs)
    record.finish(
        outputs,
        work.rates(store),
        counts=counts, tokens=tokens, answer_tokens=answer, bytes=store.bytes, dropped=dropped, proof=proof,
        looping=sum("looping" in s.flags for s in samples), at_limit=sum("at_limit" in s.flags for s in
        samples), inputs=inputs_of(stage), round=list(stage.args.round) if stage.args.round else None,
        budget=budget_of(stage.args) if work.budget_reached else None, layer_norms=work.layer_norms(),
    )  # fmt: skip
    log.info(
        "%s rows, %d tokens (%d of answers), %.3f GB, %.0f bytes a token, %d shards",
        " + ".join(f"{n} {s}" for s, n in counts.items()), tokens, answer, store.bytes / 1e9,
        store.bytes / max(1, tokens), len(store.shards),
    )  # fmt: skip
    log.info("left out: %s", ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items())) or "none")
    return "done"


if __name__ == "__main__":
    raise SystemExit(main())
