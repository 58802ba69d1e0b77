"""Progress of long work: a bar with rate and ETA on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from tqdm import tqdm


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

    def update(self, n: int = 1, note: str = "") -> None:
        """Add `n` units; `note` (loss, rate of something else) stands behind the figures."""
        self.n += n
        self.note = note or self.note
        if not self._bar.disable:
            self._bar.set_postfix_str(self.note, refresh=False)
            self._bar.update(n)
        elif time.time() - self.last >= self.every:
            self.last = time.time()
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
