"""The feed: what is supervised, in which order, and what a bad sample gets (fault cases 4, 19, 26, 27)."""

from __future__ import annotations

import shutil

import pytest
import torch
from toy_store import token_rows, write_store

from eagle3.contract import ConfigError, StageError
from eagle3.feed import Feed, Row, diagnose, epoch_order, plan_steps, rank_rows, usable
from eagle3.store import Store

CPU = torch.device("cpu")
LEAD = 2


@pytest.fixture(scope="module")
def stores(toy_verifier, tmp_path_factory):
    """The same rows in bf16, in fp8, and in smaller shards."""
    rows = {"train": [([*range(6, 16)], 6), *token_rows(20, prompt=(1, 9))]}
    found = {}
    for name, dtype, shard in (
        ("bf16", "bf16", 200_000),
        ("fp8", "fp8", 200_000),
        ("small", "bf16", 140_000),
    ):
        folder = tmp_path_factory.mktemp("store") / name
        write_store(folder, toy_verifier, rows, dtype, shard_bytes=shard)
        found[name] = Store.open(folder)
    return found


def feed(store, budget=96, row=64, **changes):
    infos, _ = usable(store.select("train"), row, LEAD)
    options = {"static": False, "compact": False, "threads": 2, **changes}
    return Feed(store, infos, budget, row, LEAD, CPU, torch.float32, **options)


def pairs(row, store) -> list[tuple[int, int, int]]:
    """(position, input token, target token) of every pair that adds to the loss at TTT step 0."""
    found = []
    for piece in row.pieces:
        ids = store.token_ids(piece.info)
        found += [(j, int(ids[j]), int(ids[j + 1])) for j in range(piece.info.prompt, piece.info.states)]
    return found


def test_supervised_pairs_of_one_answer(stores):
    """Fault 4: ids 6..15, prompt of 6; the pair (first answer token -> second) counts, none of the prompt."""
    info = next(i for i in stores["bf16"].samples if i.id == "train-000")
    (step,) = plan_steps([info], 64, 64, LEAD)
    assert pairs(step.rows[0], stores["bf16"]) == [(6, 12, 13), (7, 13, 14), (8, 14, 15)]
    (batch,) = Feed(stores["bf16"], [info], 64, 64, LEAD, CPU, torch.float32, False, False).batches(0)
    mask = batch.loss_mask[0]
    assert batch.input_ids[0][mask].tolist() == [12, 13, 14]
    assert batch.position_ids[0].tolist() == list(range(1, 9))
    sample = stores["bf16"].read(info)
    assert torch.equal(batch.hidden_states[0], sample.aux[:-1].flatten(1).float())
    assert torch.equal(batch.targets[0][mask], sample.final[1:].float()) and not batch.targets[0][~mask].any()


def test_equals_speculators_own_shift(stores):
    """The same sample through speculators' shift_batch: same tokens, states, targets, positions, mask."""
    from speculators.models.eagle3 import shift_batch

    store = stores["bf16"]
    info = next(i for i in store.samples if i.prompt > 3)
    sample = store.read(info)
    n, p = info.states, info.prompt
    last = torch.zeros(n, 32)
    last[p - 1 :] = sample.final.float()
    # Token n (the last one) has no state: upstream sees n tokens, of which the last target is the closing
    # token.
    theirs = shift_batch(
        {
            "input_ids": sample.token_ids[:n],
            "hidden_states": sample.aux.flatten(1).float(),
            "verifier_last_hidden_states": last,
            "loss_mask": torch.arange(n) >= p,
            "lengths": torch.tensor([n]),
            "position_ids": torch.arange(n),
        }
    )
    (ours,) = Feed(store, [info], 64, 64, LEAD, CPU, torch.float32, False, False).batches(0)
    gap = int((ours.document_ids[0] == -1).sum())
    for mine, name in (
        (ours.input_ids, "input_ids"),
        (ours.hidden_states, "hidden_states"),
        (ours.loss_mask, "loss_mask"),
        (ours.position_ids, "position_ids"),
    ):
        assert torch.equal(mine[0][gap:], theirs[name]), name
    mask = theirs["loss_mask"]
    assert torch.equal(ours.targets[0][gap:][mask], theirs["verifier_last_hidden_states"][mask])


def test_every_document_starts_with_unsupervised_positions(stores):
    """Else a chain that starts in one document would be scored against the next one's targets."""
    for batch in feed(stores["bf16"]).batches(0):
        for piece in batch.row.pieces:
            first = piece.end - (piece.info.states - piece.info.prompt)
            assert not batch.loss_mask[0][first - LEAD : first].any()
            assert batch.loss_mask[0][first : piece.end].all()


def test_order_depends_on_ids_seed_and_epoch_only(stores):
    steps = {name: [s.ids for s in feed(stores[name]).plan(1)] for name in ("bf16", "small")}
    assert len(stores["small"].shards) > len(stores["bf16"].shards)
    assert steps["bf16"] == steps["small"]
    infos = stores["bf16"].select("train")
    ids = [[i.id for i in epoch_order(infos, seed, epoch)] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert ids[0] != ids[1] and ids[0] != ids[2] and sorted(ids[0]) == sorted(ids[1])


def test_steps_do_not_depend_on_rows_or_ranks(stores):
    infos = stores["bf16"].select("train")
    ordered = epoch_order(infos, 0, 0)
    wide, narrow = plan_steps(ordered, 96, 96, LEAD), plan_steps(ordered, 96, 40, LEAD)
    assert [sorted(s.ids) for s in wide] == [sorted(s.ids) for s in narrow]
    assert max(len(s.rows) for s in narrow) > 1
    assert sorted(i for s in wide for i in s.ids) == sorted(i.id for i in infos)  # each once
    for step in narrow:
        shares = [rank_rows(step, rank, 2) for rank in (0, 1)]
        assert len(shares[0]) == len(shares[1])
        together = [p.info.id for rows in shares for row in rows for p in row.pieces]
        assert sorted(together) == sorted(step.ids)
        assert all(row.used <= 40 for row in step.rows)


def test_fp8_is_widened_to_what_the_store_says(stores):
    store = stores["fp8"]
    for batch in feed(store).batches(0):
        for piece in batch.row.pieces:
            sample = store.read(piece.info)
            got = batch.hidden_states[0, piece.start : piece.end]
            assert torch.allclose(got, sample.aux[:-1].flatten(1).float(), rtol=1e-2, atol=1e-3)


def test_rows_read_into_used_buffers_hold_nothing_of_earlier_rows(stores):
    """Buffers go round; what they held before must not travel in the padding."""
    for batch in feed(stores["bf16"], row=64, static=True).batches(0):
        empty = batch.document_ids[0] == -1
        assert not batch.hidden_states[0][empty].any() and not batch.input_ids[0][empty].any()
        assert not batch.targets[0][~batch.loss_mask[0]].any()


@pytest.mark.parametrize("stored", ["bf16", "fp8"])
def test_a_row_of_padding_has_the_shapes_of_any_other(toy_verifier, tmp_path, stored):
    """Fault 26: what stands in for a missing row, in bf16 with four auxiliary layers, is like any other."""
    write_store(tmp_path / "s", toy_verifier, {"train": token_rows(4)}, stored, layers=(1, 2, 4, 5))
    store = Store.open(tmp_path / "s")
    infos, _ = usable(store.select("train"), 64, LEAD)
    f = Feed(store, infos, 64, 64, LEAD, CPU, torch.bfloat16, True, False, threads=2)
    real = next(f.batches(0))
    (batch,) = f._stream(iter([(Row(()), 0, 0, True)]))
    assert batch.hidden_states.shape == (1, 64, 128) and batch.hidden_states.dtype == torch.bfloat16
    for name in ("input_ids", "hidden_states", "targets", "loss_mask", "document_ids", "position_ids"):
        a, b = getattr(batch, name), getattr(real, name)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
    assert not batch.loss_mask.any() and batch.row.supervised == 0


def test_resuming_in_the_middle_of_an_epoch_gives_the_very_next_rows(stores):
    whole = [(b.step, [p.info.id for p in b.row.pieces]) for b in feed(stores["bf16"]).batches(0)]
    rest = [(b.step, [p.info.id for p in b.row.pieces]) for b in feed(stores["bf16"]).batches(0, 2)]
    assert rest == [item for item in whole if item[0] >= 2]


def test_readers_go_on_across_the_end_of_an_epoch(stores):
    f = feed(stores["bf16"])
    apart = [(e, b.step, [p.info.id for p in b.row.pieces]) for e in (1, 2) for b in f.batches(e)]
    together = [(b.epoch, b.step, [p.info.id for p in b.row.pieces]) for b in f.batches(1, until=3)]
    assert together == apart


def test_a_sample_longer_than_a_row_names_both_numbers(stores):
    with pytest.raises(ConfigError, match=r"takes \d+ positions, TRAIN_ROW_TOKENS is 16"):
        usable(stores["bf16"].select("train"), 16, LEAD)


def test_samples_without_a_supervised_token_are_counted(stores):
    infos = stores["bf16"].select("train")
    answers_of_one = [i for i in infos if i.states == i.prompt]
    kept, dropped = usable(infos, 64, LEAD)
    assert dropped == len(answers_of_one) and all(i.states > i.prompt for i in kept)


def damaged(store, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(store.folder, folder)
    return folder


def test_a_flipped_byte_stops_with_row_and_shard(stores, tmp_path):
    """Fault 19, the 04 half: what was sealed is what is trained on."""
    folder = damaged(stores["bf16"], tmp_path)
    store = Store.open(folder)
    info = store.select("train")[3]
    begin, size = store._where(info)["aux"]
    with open(folder / info.shard, "rb+") as f:
        f.seek(begin + size // 2)
        byte = f.read(1)[0]
        f.seek(begin + size // 2)
        f.write(bytes([byte ^ 1]))
    with pytest.raises(StageError, match=f"{info.shard}: row {info.id} is not what was sealed"):
        list(feed(store).batches(0))


def test_a_cut_shard_is_named_before_anything_is_read(stores, tmp_path):
    """Fault 19, the 04 half: half a file and an empty one."""
    folder = damaged(stores["bf16"], tmp_path)
    shard = sorted(folder.glob("shard-*"))[0]
    with open(shard, "rb+") as f:
        f.truncate(shard.stat().st_size - 100)
    with pytest.raises(StageError, match=shard.name):
        Store.open(folder)
    shard.write_bytes(b"")
    with pytest.raises(StageError, match=shard.name):
        Store.open(folder)


def test_a_non_finite_state_is_found_by_row_and_shard(toy_verifier, tmp_path):
    """Fault 27: named precisely (the trainer calls this when a loss is not finite)."""

    def spoil(name, states):
        if name == "train-002":
            states[3, 1, 5] = float("inf")
        return states

    write_store(tmp_path / "s", toy_verifier, {"train": token_rows(6)}, break_row=spoil)
    store = Store.open(tmp_path / "s")
    messages = [diagnose(store, row) for step in feed(store).plan(0) for row in step.rows]
    (message,) = [m for m in messages if m]
    assert "row train-002 holds a non-finite aux state (3)" in message and "shard-1of1" in message


def test_an_abandoned_stream_leaves_no_reader_behind(stores):
    import threading

    f = feed(stores["bf16"])
    stream = f.batches(0)
    next(stream)
    stream.close()
    f.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("feed")]
