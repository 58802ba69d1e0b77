"""The draft vocabulary: chosen by coverage, with a map that can't be read wrongly (fault cases 31, 32)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle3.contract import ConfigError, StageError
from eagle3.vocab import check_map, choose, count_answers, load_map, save_map

KEPT = [3, 7, 8, 20]


def mask(kept, vocab=32):
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    return t2d


def counts(ids, vocab=64):
    return np.bincount(np.asarray(ids, dtype=int), minlength=vocab).astype(np.int64)


def test_offsets_are_accepted():
    check_map(torch.tensor(KEPT) - torch.arange(4), mask(KEPT), "here")


@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        (torch.tensor(KEPT), "absolute ids"),
        (torch.arange(4), "plain range"),
        (torch.tensor([3, 7, 7, 20]) - torch.arange(4), "id 7 twice"),
        (torch.tensor([3, 8, 7, 20]) - torch.arange(4), "not rising"),
        (torch.tensor([3, 7, 8, 21]) - torch.arange(4), "id 21, which t2d does not keep"),
        (torch.tensor([3, 7, 8, 32]) - torch.arange(4), "id 32, outside the vocabulary of 32"),
        (torch.tensor([-1, 7, 8, 20]) - torch.arange(4), "id -1"),
        (torch.tensor([3, 7, 8]) - torch.arange(3), "t2d keeps 4 ids, d2t has 3"),
    ],
)
def test_every_other_form_is_refused_by_name(d2t, words):
    """Fault 32."""
    with pytest.raises(StageError, match=words):
        check_map(d2t, mask(KEPT), "here")


def test_fillers_are_unique_and_in_range():
    """Fault 31: 20 tokens seen, 32 wanted."""
    seen = [6 + i for i in range(20)]
    vocab_map = choose({"a": counts(seen)}, 32, 0.99)
    kept = vocab_map.kept.tolist()
    assert len(set(kept)) == 32 and set(seen) <= set(kept) and max(kept) < 64
    check_map(vocab_map.d2t, vocab_map.t2d, "here")


def test_the_most_frequent_are_kept_and_coverage_is_the_share_of_occurrences():
    found = choose({"a": counts([10] * 6 + [11] * 3 + [12]), "b": counts([11] * 4 + [13])}, 2, 0.5)
    assert found.kept.tolist() == [10, 11]
    assert found.coverage["overall"] == pytest.approx(13 / 15)
    assert found.coverage["domains"] == {"a": pytest.approx(0.9), "b": pytest.approx(0.8)}


def test_low_coverage_names_numbers_and_the_size_that_would_do():
    with pytest.raises(
        ConfigError, match=r"vocab_size 1 covers 50.00%.*0.00% in b.*min_coverage is 90.00%. 2 ids"
    ):
        choose({"a": counts([10] * 5), "b": counts([11] * 5)}, 1, 0.9)


def test_larger_than_the_verifier_and_no_answers_are_errors():
    """Fault 31."""
    with pytest.raises(ConfigError, match="65 exceeds .* 64"):
        choose({"a": counts([10])}, 65, 0.5)
    with pytest.raises(StageError, match="no answer token"):
        choose({"a": counts([])}, 8, 0.5)
    with pytest.raises(StageError, match="no answer token"):
        choose({}, 8, 0.5)


@pytest.mark.parametrize("bad", [64, -1])
def test_an_id_outside_the_vocabulary_names_id_and_row(bad, tmp_path):
    """Fault 31."""

    class Info:
        id, shard, prompt, domain = "row-1", "shard-x", 1, "a"

    class Fake:
        folder = tmp_path

        def token_ids(self, _info):
            return np.array([3, 4, bad], dtype=np.int32)

    with pytest.raises(StageError, match=f"row-1 holds token id {bad}"):
        count_answers(Fake(), [Info()], 64)


def test_a_map_survives_a_file_and_another_one_in_its_place_is_noticed(tmp_path):
    from safetensors.torch import save_file

    vocab_map = choose({"a": counts([10, 11, 12])}, 3, 0.9)
    save_map(tmp_path / "m.safetensors", vocab_map)
    back = load_map(tmp_path / "m.safetensors")
    assert back.fingerprint == vocab_map.fingerprint and back.coverage == vocab_map.coverage
    other = choose({"a": counts([10, 11, 13])}, 3, 0.9)
    save_file(
        {"d2t": other.d2t, "t2d": other.t2d},
        tmp_path / "m.safetensors",
        metadata={"fingerprint": vocab_map.fingerprint},
    )
    with pytest.raises(StageError, match="fingerprint"):
        load_map(tmp_path / "m.safetensors")


def test_full_vocabulary_is_zero_offsets():
    vocab_map = choose({"a": counts([10])}, "full", 0.9)
    assert vocab_map.full and not vocab_map.d2t.any() and vocab_map.t2d.all()
