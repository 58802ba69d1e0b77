"""Where a run stands, in a second, at any time, also while another process works on it. From files alone.

./run_pipeline.sh status           a table, and the next command
./run_pipeline.sh status --json    the same content
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

from eagle3.contract import (
    ROOT,
    SCRIPTS,
    STAGE_DIRS,
    RunDir,
    StageError,
    nearest_existing,
    process_start_time,
)
from eagle3.learned import Seen, current_stages, look, quietly, read_book, read_dict, saved_recipe
from eagle3.plan import metrics
from eagle3.sizes import GB, duration, size

# Variables that name another machine's paths or are settings of one call only.
KEPT_SETTINGS = ("SAMPLES", "RECIPE_SET", "ROUNDS")


def attempts_of(run: RunDir, number: str | None = None) -> list[dict]:
    """Attempts in run.json that did something, of one stage or of all."""
    found = [a for a in read_book(run)["attempts"] if a.get("status") != "skipped"]
    return [a for a in found if number in (None, a.get("stage"))]


def stage_status(run: RunDir, number: str) -> dict:
    """One stage: done, stale (done, but an earlier stage is newer), running, interrupted, failed, or todo."""
    progress = read_dict(run.logs / f"{number}.progress.json")
    record = read_dict(run.stage(number) / "stage.json")
    attempts = attempts_of(run, number)
    found = {"stage": STAGE_DIRS[number], "state": "todo", "attempts": len(attempts)}
    if progress.get("pid"):
        found |= {k: progress.get(k) for k in ("what", "n", "total", "unit", "rate", "note")}
        now = time.time()
        if process_start_time(progress["pid"]) == progress["start_time"]:
            eta = progress.get("eta_seconds")
            left = None if eta is None else max(0.0, eta - (now - progress["updated"]))
            since = now - progress["began"]
            return found | {"state": "running", "pid": progress["pid"], "seconds": since, "eta_seconds": left}
        error = (
            f"process {progress['pid']} was killed after {duration(progress['updated'] - progress['began'])}"
        )
        return found | {"state": "interrupted", "error": error}
    if record.get("status") == "done":
        keep = {k: record.get(k) for k in ("seconds", "finished", "rates", "peak_rss_bytes")}
        return found | {"state": "done", **keep}
    if attempts and attempts[-1].get("status") != "done":
        last = attempts[-1]
        state = "interrupted" if last.get("status") == "interrupted" else "failed"
        return found | {"state": state, "error": last.get("error")}
    return found


def all_stages(run: RunDir) -> dict[str, dict]:
    """Status of every stage; "stale": done for inputs that changed since (03: "todo", it grows)."""
    seen = look(run)
    current = current_stages(seen)
    stages = {number: stage_status(run, number) for number in STAGE_DIRS}
    unfinished = False
    for number, found in stages.items():
        unfinished = unfinished or found["state"] in ("running", "interrupted", "failed")
        if found["state"] == "done" and (number not in current or unfinished):
            if number == "03":
                found |= {"state": "todo", "reached": reached(run, number, seen)}
            else:
                found |= {
                    "state": "stale",
                    "error": f"made before its input changed; FORCE={number} makes it anew",
                }
        elif found["state"] not in ("done", "todo") and (text := reached(run, number, seen)):
            found["reached"] = text
    return stages


def reached(run: RunDir, number: str, seen: Seen) -> str:
    """What an unfinished stage has on disk already."""
    if number == "03":
        return f"{seen.kept.total():,} rows sealed, {size(seen.stored_bytes)}" if seen.kept else ""
    if number == "04":
        steps = sorted(d.parent.name for d in run.train.glob("step-*/COMPLETE"))
        parts = [f"checkpoint {steps[-1]}"] if steps else []
        if (logged := metrics(run)) and isinstance(loss := logged[-1].get("loss"), (int, float)):
            parts.append(f"step {logged[-1].get('step')}, loss {loss:.3f}")
        return ", ".join(parts)
    return ""


def servers(run: RunDir) -> list[dict]:
    """Verifier servers of this run: up, orphan (their owner was killed; the next run stops them), or dead."""
    found = []
    for path in sorted(run.path.glob("*.pid")):
        noted = read_dict(path)
        try:
            up = process_start_time(noted["pid"]) == noted["start_time"]
            owned = process_start_time(noted["owner"][0]) == noted["owner"][1]
            age = time.time() - int(noted["mark"].partition("-")[2]) / 1e9
            state = ("up" if owned else "orphan") if up else "dead"
            found.append(
                {"state": state, "age_seconds": age, **{k: noted[k] for k in ("pid", "port", "mode")}}
            )
        except (KeyError, IndexError, TypeError, ValueError):
            continue
    return found


def working(run: RunDir) -> bool:
    """Whether a run_pipeline.sh holds this run directory right now (also between two stages).

    Read from /proc/locks: taking the lock to see whether it is free could get in the way of a start.
    """
    lock = quietly(lambda: (run.path / ".lock").stat(), None)
    held = quietly(lambda: Path("/proc/locks").read_text(), "")
    return lock is not None and any(
        "FLOCK" in line and line.split()[-3].endswith(f":{lock.st_ino}") for line in held.splitlines()
    )


def settings_of(run: RunDir) -> dict[str, str]:
    """The variables that name this run: recipe, profile, run directory, and what was overridden."""
    attempts = attempts_of(run)
    name, _ = saved_recipe(run)
    if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
        # The run has moved to another machine; its own copy came along.
        name = short(run.path / "recipe.yaml")
    settings = {"RECIPE": name or os.environ.get("RECIPE", "")}
    settings["PROFILE"] = (attempts[-1].get("profile") if attempts else "") or os.environ.get("PROFILE", "")
    last = attempts[-1].get("settings") or {} if attempts else os.environ
    settings |= {k: last.get(k, "") for k in KEPT_SETTINGS}
    settings["RUN_DIR"] = short(run.path)
    return {k: v for k, v in settings.items() if v}


def command(settings: dict[str, str], words: str = "") -> str:
    """A pasteable ./run_pipeline.sh line."""
    line = " ".join(f"{k}={shlex.quote(v)}" for k, v in settings.items())
    return f"{line} ./run_pipeline.sh {words}".strip()


def short(path: Path) -> str:
    """Relative to the repository where that is shorter to read."""
    return os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)


def next_command(run: RunDir, stages: dict[str, dict]) -> str | None:
    """The command that continues this run from the repository's root; None when all is done."""
    if all(s["state"] == "done" for s in stages.values()):
        return None
    stale = ",".join(n for n, s in stages.items() if s["state"] == "stale")
    return command({**settings_of(run), **({"FORCE": stale} if stale else {})})


def status(run: RunDir, reserve_gb: float = 0.0) -> dict:
    """Everything that `./run_pipeline.sh status` shows, as data."""
    stages = all_stages(run)
    here = nearest_existing(run.path)
    errors = [a for a in attempts_of(run) if a.get("error") and a.get("stage") in stages]
    last = errors[-1] if errors and stages[errors[-1]["stage"]]["state"] not in ("done", "running") else None
    return {
        "run_dir": str(run.path),
        "exists": run.path.is_dir(),
        "working": working(run),
        "stages": stages,
        "servers": servers(run),
        "disk": {
            "free_bytes": shutil.disk_usage(here).free,
            "reserve_bytes": reserve_gb * GB,
            "used_bytes": used_bytes(run.path),
        },
        "last_error": f"{SCRIPTS[last['stage']]}: {last['error']}" if last else None,
        "next_command": next_command(run, stages),
    }


def used_bytes(folder: Path) -> int:
    """Size of all files below a folder; what disappears meanwhile does not count."""
    total = 0
    for path in folder.rglob("*"):
        total += quietly(lambda p=path: p.lstat().st_size if p.is_file() and not p.is_symlink() else 0, 0)
    return total


def stage_line(number: str, s: dict) -> str:
    """One stage for people."""
    parts = []
    if s["state"] in ("done", "stale"):
        parts.append(f"{duration(s.get('seconds') or 0)}, finished {s.get('finished')}")
    elif s["state"] == "running":
        parts.append(f"{duration(s['seconds'])} so far, pid {s['pid']}")
    if s.get("total"):
        meter = f"{s['what']}: {s['n']:,}/{s['total']:,} {s['unit']}s"
        meter += f", {s['rate']:.3g} {s['unit']}s/s" if s.get("rate") else ""
        meter += f", eta {duration(s['eta_seconds'])}" if s.get("eta_seconds") is not None else ""
        parts.append(meter + (f", {s['note'].strip(' ,')}" if s.get("note") else ""))
    parts += [s[k] for k in ("reached", "error") if s.get(k)]
    return f"  {number} {s['stage'][3:]:<9} {s['state']:<12}{'; '.join(parts)}".rstrip()


def table(found: dict) -> str:
    """The status for people."""
    busy = " (run_pipeline.sh is working on it)" if found["working"] else ""
    out = [f"run directory {found['run_dir']}" + (busy if found["exists"] else " (not there yet)")]
    out += [stage_line(number, s) for number, s in found["stages"].items()]
    for s in found["servers"]:
        age = duration(s["age_seconds"])
        out.append(f"  server       {s['state']:<12}{s['mode']}, port {s['port']}, pid {s['pid']}, {age}")
    d = found["disk"]
    kept = f", {size(d['reserve_bytes'])} of it reserved" if d["reserve_bytes"] else ""
    out.append(f"  disk         {size(d['free_bytes'])} free{kept}; this run has {size(d['used_bytes'])}")
    if found["last_error"]:
        out.append(f"last error: {found['last_error']}")
    if found["working"]:
        out.append("next: wait; nothing to do")
    elif found["next_command"]:
        out.append(f"next: {found['next_command']}")
    else:
        out.append("all stages are done; see REPORT.md in the run directory")
    return "\n".join(out)


def main(argv=None) -> int:
    from eagle3.cli import load_stage, tool_parser

    parser = tool_parser("run_pipeline.sh status", __doc__)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    args = parser.parse_args(argv)
    try:
        stage = load_stage("01", args)
    except StageError as err:
        print(f"status: {err}", file=sys.stderr)
        return err.exit_code
    found = status(stage.run, stage.profile.DISK_RESERVE_GB)
    print(json.dumps(found, indent=2) if args.json else table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
