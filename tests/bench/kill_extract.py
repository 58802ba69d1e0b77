#!/usr/bin/env python3
"""kill -9 at random moments of an extraction, then completion. Prints one JSON object as its last line.

    python tests/bench/kill_extract.py [--kills 30] [--rows 300] [--given]   default verifier, vLLM on CPU

Compared with an uninterrupted run over the same rows, and that one with another: same row ids; equal token
ids where the answer is given (--given uses the first answers), for generated ones equal up to a near-tie
(first position where they differ, and how far apart the log-probabilities of the two tokens are there); no
stray file. The server stays up; what is killed is 03 itself, the part that has something to lose.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench")]

PORT = "8318"
# Two tokens that close in log-probability (nats) are a coin toss in bf16 with another batch.
NEAR_TIE = 0.25


def stage(run_dir: Path, log: Path) -> subprocess.Popen:
    out = open(log, "a")
    command = [sys.executable, "03_extract_hidden.py", "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)


def count_starts(run_dir: Path) -> int:
    """How often 03 got as far as taking rows, by its log."""
    log = run_dir / "logs" / "03.log"
    return log.read_text().count(" rows to take: ") if log.exists() else 0


def folder_of(run_dir: Path):
    from eagle3.store import Store

    return Store.open(run_dir / "03_hidden")


def strays(run_dir: Path) -> list[str]:
    """Files that a finished run should not have left."""
    from eagle3.contract import RunDir
    from eagle3.server import staging_candidates

    store = folder_of(run_dir)
    known = {*store.shards, "stage.json", "failures.jsonl", "manifest-1of1.jsonl"}
    found = [
        p.name for p in (run_dir / "03_hidden").iterdir() if p.name not in known and p.name != ".staging"
    ]
    for folder in staging_candidates(RunDir(run_dir)):
        found += [str(p) for p in folder.glob("*")]
    return found


def compare(run_dir: Path, other: Path, rows: list[dict], url: str, model: str) -> dict:
    """Token ids of two stores of these rows: equal, near a tie where they part, or different."""
    import requests

    a, b = folder_of(run_dir), folder_of(other)
    mine = {s.id for s in a.samples} | set(a.dropped)
    same = near = 0
    different, gaps = [], []
    kept = {s.id: s for s in b.samples}
    for info in a.samples:
        if info.id not in kept:
            continue  # dropped in one of the two (a loop, after a near-tie)
        x, y = a.token_ids(info).tolist(), b.token_ids(kept[info.id]).tolist()
        if x == y:
            same += 1
            continue
        k = next(i for i in range(min(len(x), len(y))) if x[i] != y[i])
        body = {"model": model, "prompt": x[:k], "max_tokens": 1, "temperature": 0, "logprobs": 20}
        reply = requests.post(
            f"{url}/v1/completions", json=body | {"return_tokens_as_token_ids": True}, timeout=300
        )
        top = reply.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        gap = abs(top.get(f"token_id:{x[k]}", -99) - top.get(f"token_id:{y[k]}", -99))
        gaps.append(round(gap, 4))
        near += gap <= NEAR_TIE
        if gap > NEAR_TIE:
            different.append(info.id)
    return {
        "same_ids": mine == {r["id"] for r in rows}, "rows": len(mine), "same": same, "near_tie": near,
        "different": different, "largest_gap": max(gaps, default=0.0),
    }  # fmt: skip


def inner(args) -> int:
    """With the server up: one uninterrupted run, one that is killed again and again, both compared."""
    from extract import write_rows

    from eagle3.config import load_recipe
    from eagle3.server import served_name
    from eagle3.verifier import open_verifier

    work, url = Path(args.work), f"http://127.0.0.1:{PORT}"
    verifier = open_verifier(load_recipe("smollm2-135m"))
    rows = json.loads((work / "rows.json").read_text())
    # The staging folder belongs to the server's run directory, so all runs use that one, one after the other.
    run_dir, whole = Path(os.environ["RUN_DIR"]), work / "whole"
    write_rows(run_dir, rows)
    began = time.time()
    assert stage(run_dir, work / "03.log").wait() == 0, (work / "03.log").read_text()[-3000:]
    seconds = time.time() - began
    whole.mkdir()
    (run_dir / "03_hidden").rename(whole / "03_hidden")
    # The same again without a kill: what differs between these two is the server's doing.
    assert stage(run_dir, work / "03.log").wait() == 0, (work / "03.log").read_text()[-3000:]
    control = compare(run_dir, whole, rows, url, served_name(verifier))
    shutil.rmtree(run_dir / "03_hidden")
    if args.given:
        store = folder_of(whole)
        answers = {s.id: store.token_ids(s).tolist()[s.prompt :] for s in store.samples}
        rows = [{**r, "response_ids": answers[r["id"]]} for r in rows if r["id"] in answers]
        write_rows(run_dir, rows)
        seconds /= 3
    rng, kills, stored = random.Random(args.seed), 0, [0]
    while kills < args.kills:
        begun = count_starts(run_dir)
        process = stage(run_dir, work / "03.log")
        # Importing and asking the server takes seconds in which there is nothing to lose; count from then.
        while process.poll() is None and count_starts(run_dir) == begun:
            time.sleep(0.05)
        # A shard is sealed a few seconds after the first answers: kills before, while and after that.
        # Where the rows are ahead of the kills, sooner, so that all kills fall before the end.
        ahead = stored[-1] / len(rows) > kills / args.kills
        wait = rng.uniform(0.0, 2.0 if ahead else 8.0 + 1.5 * seconds / args.kills)
        try:
            process.wait(wait)
            if process.returncode == 0:
                break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        manifest = run_dir / "03_hidden" / "manifest-1of1.jsonl"
        stored.append(
            sum(len(json.loads(x).get("samples", [])) for x in manifest.open()) if manifest.exists() else 0
        )
        print(f"[bench] kill {kills} after {wait:.1f} s: {stored[-1]} rows are stored", flush=True)
    code = stage(run_dir, work / "03.log").wait()
    found = {"bench": "kill-extract", "kills": kills, "exit": code, "stored_after_each_kill": stored[1:]}
    found |= {
        "uninterrupted_seconds": round(seconds, 1),
        "given_answers": args.given,
        "strays": strays(run_dir),
    }
    found |= compare(run_dir, whole, rows, url, served_name(verifier))
    found["two_uninterrupted_runs"] = control
    whole_run = code == 0 and kills == args.kills and not found["strays"]
    found["passes"] = bool(whole_run and found["same_ids"] and not found["different"])
    (work / "result.json").write_text(json.dumps(found))
    return 0


def outer(args) -> int:
    from eagle3.config import load_recipe
    from eagle3.verifier import open_verifier

    work = Path(tempfile.mkdtemp(prefix="bench-kill-"))
    tokenizer = open_verifier(load_recipe("smollm2-135m")).tokenizer()
    with open(ROOT / "configs" / "data" / "train.jsonl") as f:
        chats = [json.loads(line) for line in f][: args.rows]
    rows = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, return_dict=False)
        row = {"id": chat["id"], "source": "bench", "domain": "", "prompt_ids": ids, "response_ids": None}
        rows.append(row)
    (work / "rows.json").write_text(json.dumps(rows))
    env = {
        "RUN_DIR": str(work / "run"),
        "PROFILE": "cpu-smoke",
        "RECIPE": "smollm2-135m",
        "VERIFIER_PORT": PORT,
    }
    # Small shards, so that a kill finds sealed, open and half-sealed ones.
    env |= {
        "EXTRACT_REQUESTS": "8",
        "SAMPLES": "",
        "RECIPE_SET": f"answers.max_tokens={args.answer} states.shard_bytes=2000000",
    }
    command = [
        sys.executable,
        "-m",
        "eagle3.server",
        "run",
        "extract",
        "--",
        sys.executable,
        __file__,
        "--inner",
    ]
    command += ["--work", str(work), "--kills", str(args.kills), "--seed", str(args.seed)]
    command += ["--given"] if args.given else []
    try:
        code = subprocess.run(command, env={**os.environ, **env}, cwd=ROOT).returncode
        if code:
            return code
        found = json.loads((work / "result.json").read_text())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(found))
    return 0 if found["passes"] else 1


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=30)
    p.add_argument("--rows", type=int, default=300)
    p.add_argument("--answer", type=int, default=64, help="answer tokens at most")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--given", action="store_true", help="second run with given answers: token ids must be equal"
    )
    p.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--work", help=argparse.SUPPRESS)
    args = p.parse_args()
    return inner(args) if args.inner else outer(args)


if __name__ == "__main__":
    raise SystemExit(main())
