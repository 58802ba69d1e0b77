"""What two or more stages share, named once: folders, files, tensors, errors, atomic writes.

Nothing heavy is imported here, so `--help` of every stage answers at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Splits of the data: one JSONL file each in 01_prepare/, one label per row in the manifests of 03.
SPLITS = ("train", "val", "heldout")

# Stage number -> folder under the run directory. 02 is a server: it leaves a log, not a folder.
STAGE_DIRS = {
    "01": "01_prepare",
    "03": "03_hidden",
    "04": "04_train",
    "05": "05_export",
    "06": "06_evaluate",
}
SCRIPTS = {
    "01": "01_prepare.py",
    "02": "02_launch_verifier.sh",
    "03": "03_extract_hidden.py",
    "04": "04_train.py",
    "05": "05_convert.py",
    "06": "06_evaluate.py",
}


class StageError(Exception):
    """Something the user can fix; shown as one line without a traceback, exit status 1."""

    exit_code = 1


class ConfigError(StageError):
    """A wrong setting or a refused identity, found before anything is spent; exit status 2."""

    exit_code = 2


class Interrupted(BaseException):
    """A signal asked us to stop. BaseException, so that no `except Exception` swallows it.

    Exit status 128 + signal number (HUP 129, INT 130, TERM 143).
    """

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Nothing absolute is stored in any file below it, so it can be moved."""

    path: Path

    def stage(self, number: str) -> Path:
        return self.path / STAGE_DIRS[number]

    @property
    def prepare(self) -> Path:
        return self.stage("01")

    @property
    def hidden(self) -> Path:
        return self.stage("03")

    @property
    def train(self) -> Path:
        return self.stage("04")

    @property
    def export(self) -> Path:
        return self.stage("05")

    @property
    def evaluate(self) -> Path:
        return self.stage("06")

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rows(self, split: str) -> Path:
        """JSONL of tokenized rows of one split, written by 01."""
        return self.prepare / f"{split}.jsonl"


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Give a file its final name only when it is whole and on disk.

    The temporary name starts with a dot and ends in .tmp, which no resume pattern matches.

    Args:
        path: final name; its folder is made.
        write: called with the temporary path; whatever it raises leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(tmp)
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(tmp, path)
        fsync_dir(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Atomically write UTF-8 text."""
    write_atomic(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Atomically write indented JSON (keys keep their order)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing file is None, a broken one an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as err:
        raise StageError(f"{path} is not valid JSON ({err}); delete it to redo its stage") from None


def usable_cores() -> int:
    """Cores that this process may use: fewer than the machine's under taskset or in a container."""
    return len(os.sched_getaffinity(0))


def nearest_existing(path: Path) -> Path:
    """The path itself or the closest folder above it that is there (to ask for free space)."""
    return next(p for p in (path, *path.parents) if p.exists())


def fsync_dir(path: Path) -> None:
    """Make a rename durable: the directory entry itself is synced."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_temporaries(folder: Path) -> int:
    """Delete what a killed `write_atomic` left in `folder`; returns how many files."""
    left = [p for p in folder.glob(".*.tmp") if p.is_file()] if folder.is_dir() else []
    for p in left:
        p.unlink(missing_ok=True)
    return len(left)


def read_jsonl(path: Path):
    """Yield one object per line of a file that a stage wrote (whole by construction).

    Raises:
        StageError: naming file and line, if a line is not JSON after all.
    """
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                yield json.loads(line)
            except ValueError as err:
                raise StageError(f"{path}:{number}: {err}") from None


def process_start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat); None if it is gone.

    With the pid it names a process for good: pids are used again, the pair is not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
