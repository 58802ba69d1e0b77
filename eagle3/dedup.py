"""Which chats are the same: duplicates and near-duplicates among the rows, and overlap with evaluation sets.

Compared is what is asked (user and tool turns, joined), not how it was answered. A word is a run of letters
and digits, one CJK character, or one punctuation mark; a shingle is three words in a row.
  - Texts below SHORT words are equal if they are the same after normalisation, system text included: three
    words say too little for a similarity, and "Hi" to a pirate is not "Hi" to a tutor.
  - Longer ones are near-duplicates if the Jaccard similarity of their shingle sets reaches the threshold.
    Candidates come from a MinHash LSH index that finds at least 99 % of such pairs; then the similarity
    itself is computed, exactly up to KEPT shingles, from the KEPT smallest hashes above that (standard error
    0.016).
  - A chat overlaps an evaluation prompt if it holds the threshold's share of the prompt's shingles, wherever
    it stands in the chat (exact, by an inverted index), or if they are the same after normalisation.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SHORT = 8
SHINGLE = 3
KEPT = 512
PERMUTATIONS = 128
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+|[^\w\s]")


def normal(text: str) -> str:
    """Case, width of characters, blanks and the punctuation at the ends taken out; that inside can matter."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .?!…,;:\"'。？！")


def shingles(words: list[str]) -> set[int]:
    """32-bit hashes of all runs of three words (of all words, if they are fewer)."""
    if len(words) < SHINGLE:
        return {zlib.crc32(" ".join(words).encode())}
    runs = zip(words, words[1:], words[2:])
    return {zlib.crc32(" ".join(run).encode()) for run in runs}


def key(text: str) -> int:
    """64 bits that stand for a normalised text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def bands(threshold: float) -> tuple[int, int]:
    """(bands, rows per band) of the index: the longest bands that find 99 % of pairs at the threshold."""
    for rows in range(PERMUTATIONS, 1, -1):
        count = PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** count >= 0.99:
            return count, rows
    return PERMUTATIONS, 1


class Duplicates:
    """Texts seen so far; the earlier one wins.

    Memory: about 6 kB a text.

    Args:
        threshold: Jaccard similarity from which two texts count as one; 1.0: only equal ones do.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.equal: dict[int, str] = {}
        self.kept: dict[str, np.ndarray] = {}
        self._index = None

    def find(self, name: str, asked: str, system: str = "") -> tuple[str, str] | None:
        """(reason, name of the earlier one) if the text is known, else None and the text is remembered.

        Args:
            name: unique name of the text.
            asked: user and tool turns, joined.
            system: system text, which tells short ones apart.
        """
        text = normal(asked)
        words = WORD.findall(text)
        if len(words) < SHORT:
            text = f"{normal(system)}\n{text}"
        exact = key(text)
        if exact in self.equal:
            return "duplicate", self.equal[exact]
        if len(words) >= SHORT and self.threshold < 1 and (near := self._near(name, shingles(words))):
            return "near-duplicate", near
        self.equal[exact] = name
        return None

    def _near(self, name: str, found: set[int]) -> str | None:
        """Name of the most similar text at or above the threshold; without one, this text is remembered."""
        import datasketch
        import numpy as np

        if self._index is None:
            self._empty = datasketch.MinHash(PERMUTATIONS, seed=1, scheme="affine32", hashfunc=int)
            self._index = datasketch.MinHashLSH(
                self.threshold, num_perm=PERMUTATIONS, params=bands(self.threshold)
            )
        hashes = np.sort(np.fromiter(found, dtype=np.uint32, count=len(found)))
        sketch = self._empty.copy()
        sketch.update_batch(hashes)
        small = hashes[:KEPT]
        near = [(jaccard(small, self.kept[other]), other) for other in self._index.query(sketch)]
        best = max(near, default=(0.0, ""))
        if best[0] >= self.threshold:
            return best[1]
        self._index.insert(name, sketch, check_duplication=False)
        self.kept[name] = small
        return None


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Similarity of two shingle sets from their (at most KEPT) smallest hashes, sorted."""
    import numpy as np

    union = np.union1d(a, b)[:KEPT]
    return len(np.intersect1d(np.intersect1d(a, b), union)) / len(union)


class Evaluation:
    """Prompts of evaluation sets, which training must not hold.

    Args:
        threshold: share of an evaluation prompt's shingles that counts as holding it.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.equal: dict[int, str] = {}
        self.index: dict[int, list[int]] = {}
        self.sizes: list[int] = []
        self.names: list[str] = []

    def add(self, name: str, turns: list[str]) -> None:
        """One evaluation prompt: the user turns of one chat."""
        self.equal.setdefault(key(normal("\n".join(turns))), name)
        for turn in turns:
            words = WORD.findall(normal(turn))
            if len(words) < SHORT:
                continue
            found = shingles(words)
            for shingle in found:
                self.index.setdefault(shingle, []).append(len(self.sizes))
            self.sizes.append(len(found))
            self.names.append(name)

    def find(self, turns: list[str]) -> str | None:
        """Name of an evaluation prompt that a chat with these user and tool turns overlaps, or None."""
        whole = "\n".join(turns)
        for text in {whole, *turns}:
            if name := self.equal.get(key(normal(text))):
                return name
        if not self.sizes:
            return None
        hits = Counter(e for s in shingles(WORD.findall(normal(whole))) for e in self.index.get(s, ()))
        return next(
            (self.names[e] for e, n in hits.most_common() if n >= self.threshold * self.sizes[e]), None
        )
