"""Progress of long work: a bar with rate and ETA on a terminal, a plain line now and then elsewhere.

While a stage runs, logs/NN.progress.json says how far it is, for `./run_pipeline.sh status` in another shell.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from eagle3.contract import process_start_time

# The progress file of the running stage; None in tests, tools and ranks other than 0.
_file: Path | None = None
_began = 0.0


def begin_file(path: Path) -> None:
    """Note that this process works on a stage. A kill -9 leaves the file; its pid is then dead."""
    global _file, _began
    _file, _began = path, time.time()
    _write({})


def end_file() -> None:
    """The stage ended in an orderly way."""
    global _file
    if _file:
        _file.unlink(missing_ok=True)
    _file = None


def _write(values: dict) -> None:
    if _file is None:
        return
    me = os.getpid()
    note = {
        "pid": me,
        "start_time": process_start_time(me),
        "began": _began,
        "updated": time.time(),
        **values,
    }
    tmp = _file.with_suffix(".tmp")  # no fsync: it is worth nothing after a crash
    tmp.write_text(json.dumps(note))
    os.replace(tmp, _file)


class Progress:
    """Counts units of work.

    Args:
        total: units in all.
        unit: name of one unit ("row", "token").
        what: what is being done.
        initial: units that an earlier run already did (not counted into the rate).
        every: seconds between plain lines when stderr is no terminal.
    """

    def __init__(self, total: int, unit: str, what: str, initial: int = 0, every: float = 15.0):
        self._bar = tqdm(
            total=total, unit=unit, desc=what, initial=initial, dynamic_ncols=True, leave=False,
            unit_scale=total >= 100_000, disable=not sys.stderr.isatty(), file=sys.stderr,
        )  # fmt: skip
        self.total, self.unit, self.what, self.initial, self.every = total, unit, what, initial, every
        self.n, self.began, self.last, self.note = initial, time.time(), time.time(), ""
        self.saved = 0.0

    def update(self, n: int = 1, note: str = "") -> None:
        """Add `n` units; `note` (loss, rate of something else) stands behind the figures."""
        self.n += n
        self.note = note or self.note
        now = time.time()
        if now - self.saved >= 2:
            self.saved = now
            rate = (self.n - self.initial) / max(now - self.began, 1e-9)
            eta = (self.total - self.n) / rate if rate else None
            _write({"what": self.what, "n": self.n, "total": self.total, "unit": self.unit, "rate": rate,
                    "eta_seconds": eta, "note": self.note})  # fmt: skip
        if not self._bar.disable:
            self._bar.set_postfix_str(self.note, refresh=False)
            self._bar.update(n)
        elif now - self.last >= self.every:
            self.last = now
            logging.getLogger("eagle3").info("%s", self)

    def __str__(self) -> str:
        meter = tqdm.format_meter(
            self.n, self.total, time.time() - self.began, ncols=0, prefix=self.what, unit=self.unit,
            initial=self.initial, unit_scale=self.total >= 100_000, postfix=self.note or None,
            bar_format="{desc}: {n_fmt}/{total_fmt} {percentage:.0f}% {rate_fmt} eta {remaining}{postfix}",
        )  # fmt: skip
        return meter

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exc) -> None:
        self._bar.close()
