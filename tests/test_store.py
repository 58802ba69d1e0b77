"""The state store: what it gives back, what it refuses, what a kill leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from eagle3.contract import StageError
from eagle3.sizes import sample_bytes
from eagle3.store import Store, quantize, reconcile, widen
from eagle3.store_writer import DiskFull, StoreWriter

LAYERS, HIDDEN = [2, 4, 5, 8], 32


def make_sample(i: int):
    """(states [T, 4, 32], token ids, prompt length) of sample i."""
    length, prompt = 10 + i % 37, 3 + i % 5
    states = torch.randn(length, 4, HIDDEN, generator=torch.Generator().manual_seed(i)).bfloat16()
    return states, [(7 * i + k) % 60 for k in range(length + 1)], prompt


def add(writer: StoreWriter, i: int, split: str = "train") -> None:
    entry = {"split": split, "domain": "d", "source": "s", "input": f"in{i}"}
    writer.add(*make_sample(i), id=f"r{i}", **entry)


def fill(
    folder: Path, count: int = 20, part: str = "1of1", dtype: str = "bf16", first: int = 0, **kw
) -> Store:
    writer = StoreWriter(folder, part, LAYERS, HIDDEN, dtype, **{"shard_bytes": 160_000, **kw})
    for i in range(first, first + count):
        add(writer, i)
    writer.close()
    return Store.open(folder)


def test_what_threads_wrote_is_read_back_exactly_and_aborted_samples_leave_no_hole(tmp_path):
    writer = StoreWriter(tmp_path, "1of1", LAYERS, HIDDEN, shard_bytes=180_000)

    def work(k):
        for i in range(k, 60, 4):
            if i % 11 == 5:
                states, ids, prompt = make_sample(i)
                slot = writer.begin(ids, prompt)
                slot.write(states[:5])
                slot.abort()
            else:
                add(writer, i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    writer.close()
    store = Store.open(tmp_path)
    assert len(store.shards) > 2
    assert {s.id for s in store.samples} == {f"r{i}" for i in range(60) if i % 11 != 5}
    for info in store.samples:
        states, ids, prompt = make_sample(int(info.id[1:]))
        sample = store.read(info, verify=True)
        assert sample.token_ids.tolist() == ids
        assert sample.prompt == prompt
        assert torch.equal(sample.aux, states[:, :-1])
        assert torch.equal(sample.final, states[prompt - 1 :, -1])
    assert not list(tmp_path.glob(".*.tmp"))


def test_any_safetensors_reader_opens_a_shard(tmp_path):
    from safetensors.torch import load_file

    store = fill(tmp_path, 6, dtype="fp8")
    name = next(iter(store.shards))
    tensors = load_file(tmp_path / name)
    total = sum(s.states for s in store.shards[name].samples)
    assert tensors["aux"].dtype == torch.float8_e4m3fn
    assert list(tensors["aux"].shape) == [total, 3, HIDDEN]
    assert list(tensors["aux_scale"].shape) == [total, 3]
    assert tensors["offsets"][-1] == total


def test_fp8_keeps_small_layers_beside_an_outlier_layer(tmp_path):
    states = torch.randn(20, 4, HIDDEN).bfloat16()
    states[:, 1] *= 10_000
    writer = StoreWriter(tmp_path, "1of1", LAYERS, HIDDEN, "fp8")
    writer.add(states, list(range(21)), 4, id="a", split="train", domain="d", source="s", input="x")
    writer.close()
    store = Store.open(tmp_path)
    aux = store.read(store.samples[0]).aux.float()
    error = (aux - states[:, :-1].float()).norm(dim=-1) / states[:, :-1].float().norm(dim=-1)
    assert error.max() < 0.05


def test_quantized_rows_survive_zeros_and_keep_their_largest_value():
    x = torch.stack([torch.zeros(8), torch.linspace(-3, 1000, 8)]).bfloat16()
    back = widen(*quantize(x))
    assert torch.equal(back[0], x[0])
    assert (back - x).abs().div(x.abs().clamp(min=1e-9)).max() <= 1 / 16


def test_read_raw_fills_the_callers_rows_and_refuses_others(tmp_path):
    store = fill(tmp_path, 3)
    info = store.samples[1]
    whole = store.read(info)
    packed = torch.zeros(50, 3, HIDDEN, dtype=torch.bfloat16)
    final = torch.zeros(info.finals - 1, HIDDEN, dtype=torch.bfloat16)
    store.read_raw(info, aux_out=packed[5 : 5 + info.states - 1], final_out=final, final_first=1)
    assert torch.equal(packed[5 : 5 + info.states - 1], whole.aux[:-1])
    assert torch.equal(final, whole.final[1:])
    assert not packed[:5].any()
    assert not packed[5 + info.states - 1 :].any()
    with pytest.raises(ValueError, match="do not fit"):
        store.read_raw(info, aux_out=packed[: info.states], aux_first=1)
    with pytest.raises(ValueError, match="no aux_scale"):
        store.read_raw(info, aux_scale_out=torch.zeros(info.states, 3))


def test_fp8_takes_about_half_the_bytes(tmp_path):
    sizes = {d: sample_bytes(1000, 300, 3, 7168, d) for d in ("bf16", "fp8")}
    assert sizes["fp8"] <= 0.52 * sizes["bf16"]


def test_many_readers_share_files_safely(tmp_path):
    store, wrong = fill(tmp_path, 30, shard_bytes=140_000), []
    store._files._limit = 2

    def work(k):
        for info in store.samples[k:] + store.samples[:k]:
            if store.checksum(info) != info.checksum:
                wrong.append(info.id)

    threads = [threading.Thread(target=work, args=(7 * k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong
    assert len(store._files._open) <= 6


def test_digest_says_what_the_states_are_not_where_they_lie(tmp_path):
    one = fill(tmp_path / "one" if (tmp_path / "one").mkdir() is None else None, 12)
    (tmp_path / "two").mkdir()
    two = fill(tmp_path / "two", 12, shard_bytes=10**9)
    assert len(one.shards) != len(two.shards)
    assert one.digest("train") == two.digest("train")
    (tmp_path / "three").mkdir()
    assert fill(tmp_path / "three", 11).digest("train") != one.digest("train")


@pytest.mark.parametrize("damage", ["missing", "short", "empty", "foreign"])
def test_a_broken_shard_is_named_and_only_it_is_dropped(tmp_path, damage):
    """Fault 19."""
    store = fill(tmp_path, 20)
    victim, other = list(store.shards)[1], list(store.shards)[0]
    path = tmp_path / victim
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        size = path.stat().st_size
        (tmp_path / "x").mkdir()
        strange = fill(tmp_path / "x", 8, first=100)
        shutil.copy(tmp_path / "x" / next(iter(strange.shards)), path)
        lines = [json.loads(x) for x in (tmp_path / "manifest-1of1.jsonl").read_text().splitlines()]
        lines[1]["bytes"] = path.stat().st_size  # even with the size right
        (tmp_path / "manifest-1of1.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        assert size
    with pytest.raises(StageError, match=victim):
        Store.open(tmp_path)
    again, problems = reconcile(tmp_path, "1of1")
    assert list(problems) == [victim]
    assert set(again.shards) == set(store.shards) - {victim}
    assert other in Store.open(tmp_path).shards


def test_leftovers_of_a_kill_are_removed_and_other_parts_left_alone(tmp_path):
    """Fault 19: temporary files of a dead process."""
    store = fill(tmp_path, 8)
    name = next(iter(store.shards))
    shutil.copy(tmp_path / name, tmp_path / "shard-1of1-00099.safetensors")
    shutil.copy(tmp_path / name, tmp_path / "shard-2of2-00000.safetensors")
    manifest = tmp_path / "manifest-1of1.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b'{"shard": "shard-1of1-00099.safetens')
    Store.open(tmp_path)  # a reader is not disturbed
    again, problems = reconcile(tmp_path, "1of1")
    assert problems == {"shard-1of1-00099.safetensors": "was never sealed"}
    assert not (tmp_path / "shard-1of1-00099.safetensors").exists()
    assert (tmp_path / "shard-2of2-00000.safetensors").exists()
    assert len(again.samples) == 8
    assert manifest.read_bytes().endswith(b"\n")


def test_a_flipped_bit_is_found_on_a_verified_read(tmp_path):
    store = fill(tmp_path, 4)
    info = store.samples[2]
    begin, size = store._where(info)["aux"]
    with open(tmp_path / info.shard, "r+b") as f:
        f.seek(begin + size // 2)
        byte = f.read(1)
        f.seek(begin + size // 2)
        f.write(bytes([byte[0] ^ 1]))
    store = Store.open(tmp_path)
    with pytest.raises(StageError, match=f"{info.shard}: row {info.id}"):
        store.read(info, verify=True)
    store.read(store.samples[1], verify=True)


def test_parts_merge_by_being_put_together_and_overlap_is_refused(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    fill(a, 6, "1of2")
    fill(b, 6, "2of2", first=6)
    for path in b.iterdir():
        shutil.copy(path, a)
    assert {s.id for s in Store.open(a).samples} == {f"r{i}" for i in range(12)}
    (tmp_path / "c").mkdir()
    fill(tmp_path / "c", 2, "3of3", first=11)
    for path in (tmp_path / "c").iterdir():
        shutil.copy(path, a)
    with pytest.raises(StageError, match="repeats 1 rows.*r11"):
        Store.open(a)


def test_a_shard_that_is_not_proved_never_gets_listed(tmp_path):
    def refuse(store, shard):
        assert store.read(shard.samples[0]).aux.shape[1:] == (3, HIDDEN)
        raise StageError("not these")

    with pytest.raises(StageError, match="not these"):
        fill(tmp_path, 3, prove=refuse)
    assert list(tmp_path.iterdir()) == []


def test_deleting_shards_keeps_what_was_dropped_noted(tmp_path):
    writer = StoreWriter(tmp_path, "1of1", LAYERS, HIDDEN)
    add(writer, 0)
    writer.drop({"id": "q", "split": "train", "domain": "d", "reason": "looping", "input": "z"})
    writer.close()
    store = Store.open(tmp_path)
    store.delete(list(store.shards))
    again, problems = Store.scan(tmp_path)
    assert (again.samples, problems) == ([], {})
    assert again.dropped["q"]["reason"] == "looping"


def test_the_reserve_of_the_disk_is_kept(tmp_path):
    """Fault 21."""
    free = shutil.disk_usage(tmp_path).free
    writer = StoreWriter(tmp_path, "1of1", LAYERS, HIDDEN, reserve=free)
    with pytest.raises(DiskFull, match=rf"{tmp_path}: \d+ bytes needed, \d+ free, {free} of them kept free"):
        add(writer, 0)
    writer.close()


def test_a_full_disk_loses_only_the_open_shard(tmp_path, monkeypatch):
    """Fault 21."""
    store = fill(tmp_path, 6)
    writer = StoreWriter(tmp_path, "1of1", LAYERS, HIDDEN)
    real, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFull, match="no space in"):
        for i in range(6, 12):
            add(writer, i)
    with pytest.raises(StageError):
        writer.close()
    monkeypatch.undo()
    again, problems = reconcile(tmp_path, "1of1")
    assert not problems
    assert {s.id for s in again.samples} == {s.id for s in store.samples}
    assert not list(tmp_path.glob(".*.tmp"))


def test_kill_9_costs_at_most_the_open_shard(tmp_path):
    """Fault 19."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from test_store import *\n"
        "w = StoreWriter(Path(sys.argv[1]), '1of1', LAYERS, HIDDEN, shard_bytes=160_000)\n"
        "for i in range(10**6): add(w, i); print(i, flush=True)\n"
    )
    here = Path(__file__).resolve()
    command = [sys.executable, "-c", code, str(tmp_path), str(here.parent), str(here.parents[1])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    while len(list(tmp_path.glob("shard-*"))) < 4:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(process.stdout.read().splitlines())
    reconcile(tmp_path, "1of1")
    store = Store.open(tmp_path)
    lost = done - len(store.samples)
    assert 0 <= lost <= 4 * 12  # the open shard and those being sealed, about 12 samples each
    for info in store.samples:
        store.verify(info)
    writer = StoreWriter(tmp_path, "1of1", LAYERS, HIDDEN)
    add(writer, 10**6)
    writer.close()
    assert len(Store.open(tmp_path).samples) == len(store.samples) + 1


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_smallest_sample_has_one_state(tmp_path, dtype):
    writer = StoreWriter(tmp_path, "1of1", LAYERS, HIDDEN, dtype)
    slot = writer.begin([7, 8], 1)
    slot.write(make_sample(1)[0][:1])
    slot.commit(id="a", split="train", domain="d", source="s", input="x")
    with pytest.raises(ValueError, match="can't have a prompt of 2"):
        writer.begin([7, 8], 2)
    writer.close()
    (info,) = Store.open(tmp_path).samples
    sample = Store.open(tmp_path).read(info, verify=True)
    assert (info.states, info.finals, sample.aux.shape) == (1, 1, (1, 3, HIDDEN))
