"""Where a run stands, in a second, at any time, also while another process works on it.

./run_pipeline.sh status           a table, and the next command
./run_pipeline.sh status --json    the same content
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

from eagle3.contract import ROOT, SCRIPTS, STAGE_DIRS, RunDir, StageError, process_start_time, read_json
from eagle3.plan import duration, size


def stage_status(run: RunDir, number: str) -> dict:
    """State of one stage: done, running, interrupted (killed), failed, or todo; with what is known of it."""
    progress = _quietly(lambda: read_json(run.logs / f"{number}.progress.json")) or {}
    record = _quietly(lambda: read_json(run.stage(number) / "stage.json")) or {}
    attempts = [
        a for a in _book(run).get("attempts", []) if a["stage"] == number and a["status"] != "skipped"
    ]
    found = {"stage": STAGE_DIRS[number], "state": "todo", "attempts": len(attempts)}
    if progress:
        alive = process_start_time(progress["pid"]) == progress["start_time"]
        found |= {k: progress.get(k) for k in ("what", "n", "total", "unit", "rate", "note")}
        if alive:
            since = time.time() - progress["updated"]
            eta = progress.get("eta_seconds")
            found |= {"state": "running", "pid": progress["pid"], "seconds": time.time() - progress["began"]}
            return found | {"eta_seconds": max(0.0, eta - since) if eta is not None else None}
        return found | {"state": "interrupted", "error": f"process {progress['pid']} was killed"}
    if record.get("status") == "done":
        keep = {k: record.get(k) for k in ("seconds", "finished", "rates", "peak_rss_bytes")}
        return found | {"state": "done", **keep}
    if attempts:
        last = attempts[-1]
        state = "interrupted" if last["status"] == "interrupted" else "failed"
        return found | {"state": state if last["status"] != "done" else "todo", "error": last.get("error")}
    return found


def _quietly(read):
    """A file that is being replaced or was cut is no reason for status to fail."""
    try:
        return read()
    except (OSError, StageError, ValueError):
        return None


def _book(run: RunDir) -> dict:
    return _quietly(lambda: read_json(run.path / "run.json")) or {}


def reached(run: RunDir, number: str) -> str:
    """What an unfinished stage has on disk already."""
    if number == "03":
        rows = bytes_ = 0
        for manifest in run.hidden.glob("manifest-*.jsonl"):
            for text in manifest.read_text(encoding="utf-8").splitlines():
                entry = _quietly(lambda text=text: json.loads(text)) or {}
                rows, bytes_ = rows + len(entry.get("samples", [])), bytes_ + entry.get("bytes", 0)
        return f"{rows:,} rows sealed, {size(bytes_)}" if rows else ""
    if number == "04":
        steps = sorted(d.parent.name for d in run.train.glob("step-*/COMPLETE"))
        metrics = run.train / "metrics.jsonl"
        last = (
            _quietly(lambda: json.loads(metrics.read_text().splitlines()[-1])) if metrics.is_file() else None
        )
        parts = [f"checkpoint {steps[-1]}"] if steps else []
        if last:
            parts.append(f"step {last.get('step')}, loss {last.get('loss', float('nan')):.3f}")
        return ", ".join(parts)
    return ""


def servers(run: RunDir) -> list[dict]:
    """Verifier servers of this run: up, or left behind by a killed owner."""
    found = []
    for path in sorted(run.path.glob("*.pid")):
        noted = _quietly(lambda path=path: read_json(path))
        if not noted:
            continue
        up = process_start_time(noted["pid"]) == noted["start_time"]
        owned = process_start_time(noted["owner"][0]) == noted["owner"][1]
        state = ("up" if owned else "orphan") if up else "dead"
        age = time.time() - int(noted["mark"].partition("-")[2]) / 1e9
        found.append({"state": state, "age_seconds": age, **{k: noted[k] for k in ("pid", "port", "mode")}})
    return found


def next_command(run: RunDir) -> str:
    """The command that continues this run, with the variables it needs, from the repository's root."""
    saved = run.path / "recipe.yaml"
    attempts = _book(run).get("attempts", [])
    settings = {}
    if attempts:
        settings["PROFILE"] = attempts[-1]["profile"]
        settings |= {k: v for k, v in attempts[-1].get("settings", {}).items() if v}
    if saved.is_file():
        settings["RECIPE"] = saved.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# recipe: ")
    settings["RUN_DIR"] = short(run.path)
    return " ".join(f"{k}={shlex.quote(v)}" for k, v in settings.items()) + " ./run_pipeline.sh"


def short(path: Path) -> str:
    """Relative to the repository where that is shorter to read."""
    return os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)


def status(run: RunDir, reserve_gb: float = 0.0) -> dict:
    """Everything that `./run_pipeline.sh status` shows, as data."""
    stages = {n: stage_status(run, n) for n in STAGE_DIRS}
    for number, found in stages.items():
        if found["state"] not in ("done", "todo"):
            found["reached"] = reached(run, number)
    here = next(p for p in [run.path, *run.path.parents] if p.exists())
    errors = [a for a in _book(run).get("attempts", []) if a.get("error")]
    done = all(s["state"] == "done" for s in stages.values())
    return {
        "run_dir": str(run.path),
        "exists": run.path.is_dir(),
        "stages": stages,
        "servers": servers(run),
        "disk": {
            "free_bytes": shutil.disk_usage(here).free,
            "reserve_bytes": reserve_gb * 1e9,
            "used_bytes": sum(
                f.stat().st_size for f in run.path.rglob("*") if f.is_file() and not f.is_symlink()
            ),
        },
        "last_error": f"{SCRIPTS[errors[-1]['stage']]}: {errors[-1]['error']}"
        if errors and not done
        else None,
        "next_command": None if done else next_command(run),
    }


def table(found: dict) -> str:
    """The same for people."""
    out = [f"run directory {found['run_dir']}" + ("" if found["exists"] else " (not there yet)")]
    for number, s in found["stages"].items():
        line = f"  {number} {s['stage'][3:]:<9} {s['state']:<12}"
        if s["state"] == "done":
            line += f"{duration(s['seconds'])}, finished {s['finished']}"
        elif s["state"] == "running":
            line += f"{duration(s['seconds'])} so far, pid {s['pid']}"
        if s.get("total"):
            line += f"; {s['what']}: {s['n']:,}/{s['total']:,} {s['unit']}s"
            line += f", {s['rate']:.3g} {s['unit']}s/s" if s.get("rate") else ""
            line += f", eta {duration(s['eta_seconds'])}" if s.get("eta_seconds") is not None else ""
            line += f", {s['note']}" if s.get("note") else ""
        line += f"; {s['reached']}" if s.get("reached") else ""
        line += f"; {s['error']}" if s.get("error") else ""
        out.append(line)
    for s in found["servers"]:
        out.append(
            f"  server    {s['state']:<12}{s['mode']}, port {s['port']}, pid {s['pid']}, {duration(s['age_seconds'])}"
        )
    d = found["disk"]
    out.append(
        f"  disk      {size(d['free_bytes'])} free ({size(d['reserve_bytes'])} kept), run {size(d['used_bytes'])}"
    )
    if found["last_error"]:
        out.append(f"  last error: {found['last_error']}")
    out.append(
        f"next: {found['next_command']}" if found["next_command"] else "all stages are done; see REPORT.md"
    )
    return "\n".join(out)


def main(argv=None) -> int:
    from eagle3.cli import load_stage

    parser = argparse.ArgumentParser(
        prog="run_pipeline.sh status",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    args = parser.parse_args(argv)
    args.run_dir = args.recipe = None
    args.set = []
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
