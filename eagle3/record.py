"""stage.json and run.json: what a stage was made from, whether it is done, what it cost.

A stage is done when its stage.json says so for the same identity. identity.json, written when a stage
starts, carries the same identity while the stage is unfinished, so that a changed setting is refused in
the middle of a stage too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3 import provenance
from eagle3.contract import (
    SCRIPTS,
    STAGE_DIRS,
    ConfigError,
    RunDir,
    StageError,
    read_json,
    remove_temporaries,
    write_json,
)


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file's content."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Dotted keys whose values differ, each with the old and the new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for k in sorted(old.keys() | new.keys()):
            found += differences(old.get(k), new.get(k), f"{key}.{k}" if key else k)
        return found
    return [] if old == new else [f"{key}: was {_short(old)}, now {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


class StageRecord:
    """The record of one stage in one run directory.

    Args:
        run: the run directory.
        number: "01", "03", ...
        identity: JSON-able; what makes the result what it is (no path, no machine, no version).
        profile: name of the machine profile, for provenance.
    """

    def __init__(self, run: RunDir, number: str, identity: dict, profile: str):
        self.run, self.number, self.profile = run, number, profile
        self.folder = run.stage(number)
        self.identity = json.loads(json.dumps(identity))
        self.started = time.time()

    @property
    def path(self) -> Path:
        return self.folder / "stage.json"

    def done(self) -> dict | None:
        """stage.json if finished with this identity and its files have their sizes, else None."""
        old = read_json(self.path)
        if not old or old.get("status") != "done" or old["identity"] != self.identity:
            return None
        return None if self.damaged(old) else old

    def damaged(self, old: dict) -> list[str]:
        """Outputs that are missing or have another size than recorded."""
        bad = []
        for name, want in old["outputs"].items():
            path = self.folder / name
            if not path.exists():
                bad.append(f"{name} is missing")
            elif "bytes" in want and path.is_file() and path.stat().st_size != want["bytes"]:
                bad.append(f"{name} has {path.stat().st_size} bytes, recorded {want['bytes']}")
        return bad

    def begin(self, force: bool, makes: Callable[[Path], list[Path]]) -> dict | None:
        """Decide: None = work to do (folder is ready), else the finished stage.json.

        Args:
            force: drop what an earlier run with whatever identity made.
            makes: lists what this stage makes in its folder; nothing else is ever deleted.

        Raises:
            ConfigError: the folder was made with another identity; every change is named.
        """
        if force:
            for path in [*makes(self.folder), self.path, self.folder / "identity.json"]:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        self.refuse_other_identity()
        if old := self.done():
            return old
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(self.folder)
        self.path.unlink(missing_ok=True)
        write_json(self.folder / "identity.json", self.identity)
        return None

    def refuse_other_identity(self) -> None:
        """Raises ConfigError if the folder holds the result, or part of it, of other inputs."""
        old = read_json(self.path)
        found = old["identity"] if old else read_json(self.folder / "identity.json")
        if found is None:
            return
        if changed := differences(found, self.identity):
            raise ConfigError(
                f"{self.folder} was made with other settings: {'; '.join(changed)}. "
                f"Rerun {SCRIPTS[self.number]} with --force to make it anew, or choose another RUN_DIR"
            )

    def finish(self, outputs: dict[str, dict], rates: dict, **extra: Any) -> dict:
        """Write stage.json (last) and this stage's line of run.json.

        Args:
            outputs: relative path -> {"bytes", "sha256" or "count"}; bytes are filled in if missing.
            rates: measured rates by name, e.g. {"tokens_per_s": 1250.0}.
            extra: further top-level keys, e.g. counts.
        """
        for name, entry in outputs.items():
            path = self.folder / name
            if not path.exists():
                raise StageError(f"{path} should have been written and is not there")
            if path.is_file():
                entry.setdefault("bytes", path.stat().st_size)
        record = {
            "stage": STAGE_DIRS[self.number],
            "status": "done",
            "identity": self.identity,
            "provenance": provenance.collect(self.profile),
            "outputs": outputs,
            "seconds": round(time.time() - self.started, 2),
            "rates": rates,
            "peak_rss_bytes": provenance.peak_rss_bytes(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **extra,
        }
        write_json(self.path, record)
        (self.folder / "identity.json").unlink(missing_ok=True)
        return record


def has_rows(samples: dict, wanted: int | str) -> bool:
    """Whether 01 has the rows asked for now.

    Args:
        samples: of its record: {"asked", "exhausted", "train": rows made}.
        wanted: data.samples, a number or "all" (SAMPLES may have grown since).
    """
    if wanted == samples.get("asked"):
        return True
    return bool(samples.get("exhausted")) and (wanted == "all" or wanted >= samples["train"])


def add_to_book(run: RunDir, key: str, entry: dict) -> None:
    """Append an entry to a list of run.json ("attempts" of stages, "servers")."""
    path = run.path / "run.json"
    book = read_json(path) or {"attempts": []}
    book.setdefault(key, []).append(entry)
    write_json(path, book)


def note_attempt(run: RunDir, number: str, status: str, started: float, profile: str, **extra: Any) -> None:
    """Append one attempt of a stage to run.json: what ran, how it ended, what it cost.

    Args:
        status: "done", "skipped", "failed" or "interrupted".
        started: time.time() at the start.
        extra: e.g. error="one line".
    """
    add_to_book(
        run,
        "attempts",
        {
            "stage": number,
            "status": status,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.time() - started, 2),
            "peak_rss_bytes": provenance.peak_rss_bytes(),
            "settings": {k: os.environ[k] for k in ("SAMPLES", "RECIPE_SET", "ROUNDS") if os.environ.get(k)},
            **provenance.collect(profile),
            **extra,
        },
    )


def files_of(folder: Path, *patterns: str) -> list[Path]:
    """Files and folders directly below `folder` that match any pattern, sorted."""
    return sorted({p for pattern in patterns for p in folder.glob(pattern)})
