"""The draft vocabulary: which verifier tokens a draft can propose, chosen by coverage of answer tokens.

`vocab_map.safetensors` holds d2t int64 [D], offsets (verifier id of draft id i = i + d2t[i]), and t2d bool
[V], the mask of kept ids. Each determines the other; `check_map` compares them wherever they are read. A
draft with the verifier's whole vocabulary has d2t = 0 and t2d = True everywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import ConfigError, StageError, write_atomic

if TYPE_CHECKING:
    import numpy as np
    import torch

    from eagle3.store import SampleInfo, Store

log = logging.getLogger("eagle3")

FILE = "vocab_map.safetensors"


@dataclass
class VocabMap:
    """A checked map: d2t int64 [D] offsets, t2d bool [V], and what share of the answer tokens it covers."""

    d2t: torch.Tensor
    t2d: torch.Tensor
    coverage: dict = field(default_factory=dict)

    @property
    def kept(self) -> torch.Tensor:
        """Verifier id of each draft id, int64 [D], rising."""
        import torch

        return self.d2t + torch.arange(len(self.d2t))

    @property
    def full(self) -> bool:
        return len(self.d2t) == len(self.t2d)

    @property
    def fingerprint(self) -> str:
        """sha256 over vocabulary size and kept ids."""
        return hashlib.sha256(f"{len(self.t2d)}:".encode() + self.kept.numpy().tobytes()).hexdigest()


def check_map(d2t: torch.Tensor, t2d: torch.Tensor, where: str) -> None:
    """Refuse a map whose two halves are not the offset form of the same set of ids.

    Args:
        d2t: int [D]. t2d: bool [V].
        where: file or folder to name.

    Raises:
        StageError: absolute ids, a plain range, ids repeated or out of order, out of range, or another set
            than t2d.
    """
    import torch

    if d2t.ndim != 1 or t2d.ndim != 1 or t2d.dtype != torch.bool or d2t.dtype.is_floating_point:
        raise StageError(
            f"{where}: d2t must be whole numbers [D] and t2d a mask [V]; got {d2t.dtype} {list(d2t.shape)} "
            f"and {t2d.dtype} {list(t2d.shape)}"
        )
    d2t, ids = d2t.long(), t2d.nonzero().flatten()
    size, vocab = len(d2t), len(t2d)
    if len(ids) != size:
        raise StageError(f"{where}: t2d keeps {len(ids)} ids, d2t has {size}")
    kept = d2t + torch.arange(size)
    if torch.equal(kept, ids):
        return
    if torch.equal(d2t, ids):
        raise StageError(
            f"{where}: d2t holds absolute ids (it starts {d2t[:4].tolist()}), not offsets: subtract the "
            "index from each"
        )
    if torch.equal(d2t, torch.arange(size)):
        raise StageError(f"{where}: d2t is a plain range 0..{size - 1}, which is neither offsets nor ids")
    if size and (int(kept.min()) < 0 or int(kept.max()) >= vocab):
        bad = kept.min() if int(kept.min()) < 0 else kept.max()
        raise StageError(f"{where}: d2t leads to id {int(bad)}, outside the vocabulary of {vocab}")
    steps = kept[1:] - kept[:-1]
    if (steps == 0).any():
        raise StageError(
            f"{where}: d2t leads to id {int(kept[1:][steps == 0][0])} twice; ids must be distinct"
        )
    if (steps < 0).any():
        raise StageError(f"{where}: index + d2t is not rising (at index {int((steps < 0).nonzero()[0]) + 1})")
    odd = int(kept[~t2d[kept]][0])
    raise StageError(
        f"{where}: d2t and t2d contradict each other: d2t leads to id {odd}, which t2d does not keep"
    )


def count_answers(store: Store, infos: list[SampleInfo], vocab: int) -> dict[str, np.ndarray]:
    """How often each verifier token occurs in answers.

    Returns:
        domain -> int64 [vocab].

    Raises:
        StageError: an id outside the vocabulary; id, row and shard are named.
    """
    import numpy as np

    counts: dict[str, np.ndarray] = {}
    for info in infos:
        ids = store.token_ids(info)
        if ids.min() < 0 or ids.max() >= vocab:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise StageError(
                f"{store.folder / info.shard}: row {info.id} holds token id {int(bad)}, outside the "
                f"verifier's vocabulary of {vocab}; it was tokenized for another model"
            )
        seen = counts.setdefault(info.domain, np.zeros(vocab, dtype=np.int64))
        seen += np.bincount(ids[info.prompt :], minlength=vocab)
    return counts


def choose(counts: dict[str, np.ndarray], size: int | str, floor: float) -> VocabMap:
    """The `size` most frequent answer tokens; what is left over is filled with the lowest unseen ids.

    Args:
        counts: domain -> int64 [V], from `count_answers`.
        size: D, or "full".
        floor: coverage below which the map is refused, overall and in every domain.

    Raises:
        ConfigError: D above V, or coverage below the floor; the numbers are named.
        StageError: no answer token at all.
    """
    import numpy as np
    import torch

    total = sum(counts.values()) if counts else np.zeros(0, dtype=np.int64)
    vocab = len(total)
    if not total.sum():
        raise StageError(
            "no answer token in the training split: nothing to train on; look at 03_hidden/stage.json"
        )
    if size == "full":
        size = vocab
    if size > vocab:
        raise ConfigError(
            f"draft.vocab_size {size} exceeds the verifier's vocabulary of {vocab}; or say full"
        )
    # Most frequent first, low ids first among equals: BPE gives common pieces low ids, so fillers are of use.
    order = np.lexsort((np.arange(vocab), -total))
    kept = np.sort(order[:size])
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    vocab_map = VocabMap(torch.from_numpy(kept - np.arange(size)), t2d)
    vocab_map.coverage = coverage(vocab_map, counts)
    low = {k: v for k, v in vocab_map.coverage["domains"].items() if v < floor}
    if vocab_map.coverage["overall"] < floor or low:
        worst = "".join(f", {v:.2%} in {k}" for k, v in sorted(low.items(), key=lambda kv: kv[1]))
        need = int(np.searchsorted(np.cumsum(total[order]), floor * total.sum()) + 1)
        raise ConfigError(
            f"draft.vocab_size {size} covers {vocab_map.coverage['overall']:.2%} of {int(total.sum())} "
            f"answer tokens{worst}; draft.min_coverage is {floor:.2%}. {need} ids would cover that overall: "
            "raise draft.vocab_size, or lower draft.min_coverage"
        )
    return vocab_map


def coverage(vocab_map: VocabMap, counts: dict[str, np.ndarray]) -> dict:
    """Share of answer tokens in the draft vocabulary.

    Returns:
        {"overall", "domains": {name: share}, "answer_tokens", "distinct": different tokens seen}.
    """
    mask = vocab_map.t2d.numpy()
    total = sum(counts.values())
    return {
        "overall": float(total[mask].sum() / max(1, total.sum())),
        "domains": {k: float(c[mask].sum() / max(1, c.sum())) for k, c in sorted(counts.items())},
        "answer_tokens": int(total.sum()),
        "distinct": int((total > 0).sum()),
    }


def save_map(path: Path, vocab_map: VocabMap) -> None:
    """Write vocab_map.safetensors atomically."""
    from safetensors.torch import save_file

    check_map(vocab_map.d2t, vocab_map.t2d, str(path))
    metadata = {"fingerprint": vocab_map.fingerprint, "coverage": json.dumps(vocab_map.coverage)}
    tensors = {"d2t": vocab_map.d2t, "t2d": vocab_map.t2d}
    write_atomic(path, lambda tmp: save_file(tensors, tmp, metadata=metadata))


def load_map(path: Path) -> VocabMap:
    """Read and check vocab_map.safetensors.

    Raises:
        StageError: not there, or its halves or its fingerprint contradict each other.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise StageError(f"{path} is missing: run 04_train.py, which makes it")
    try:
        with safe_open(path, framework="pt") as f:
            metadata, d2t, t2d = f.metadata() or {}, f.get_tensor("d2t"), f.get_tensor("t2d")
    except SafetensorError as err:
        raise StageError(f"{path} can't be read ({err}); 04_train.py --force makes it anew") from None
    check_map(d2t, t2d, str(path))
    vocab_map = VocabMap(d2t, t2d, json.loads(metadata.get("coverage", "{}")))
    if metadata.get("fingerprint") not in (None, vocab_map.fingerprint):
        raise StageError(f"{path}: the ids are not the ones its fingerprint was taken of")
    return vocab_map


def map_file(checkpoint: Path) -> Path:
    """Where a checkpoint's vocabulary map lies: in its folder (imported drafts) or beside it (04_train)."""
    inside = checkpoint / FILE
    return inside if inside.is_file() else checkpoint.resolve().parent / FILE


def find_map(checkpoint: Path) -> VocabMap:
    """The vocabulary map of a checkpoint, checked."""
    return load_map(map_file(checkpoint))
