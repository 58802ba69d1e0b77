"""When an answer counts as one that repeats itself: 03 drops such rows, 06 leaves them out of its figures."""

from __future__ import annotations

import numpy as np


def is_looping(token_ids: list[int]) -> bool:
    """Whether an answer ends in a loop; the closing token, if there is one, is not looked at.

    Three signs: the tail repeats a block of at most 32 tokens up to the end (4 times, or 3 times if the
    block has 8 or more tokens; 24 tokens in all at least); three quarters of the last tokens (64 to 96) equal
    the one a period of at most 64 before (a block that repeats but for a counter or a name); fewer than half
    of the 4-grams of the last 96 tokens are different ones.
    """
    ids = np.asarray(token_ids)
    return any(map(_tail_repeats, (ids, ids[:-1]))) or _nearly_repeats(ids[:-1]) or _few_ngrams(ids[:-1])


def _tail_repeats(ids: np.ndarray) -> bool:
    for period in range(1, min(32, len(ids) // 3) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        same = len(ids) - period - (int(differs[-1]) + 1 if len(differs) else 0)
        if same + period >= max(24, period * (3 if period >= 8 else 4)):
            return True
    return False


def _nearly_repeats(ids: np.ndarray) -> bool:
    for period in range(1, 65):
        window = min(96, len(ids) - period)
        if window < 64:
            return False
        if (ids[-window:] == ids[-window - period : -period]).mean() >= 0.75:
            return True
    return False


def _few_ngrams(ids: np.ndarray, window: int = 96, n: int = 4) -> bool:
    tail = ids[-window:]
    if len(tail) < window:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(tail, n)
    return len(np.unique(grams, axis=0)) < 0.5 * len(grams)
