"""03: what is stored is what the verifier computed; faults are caught, named, and nothing is done twice."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load_stage
from states_stub import LAYERS, Stub, default_rows, make_recipe, toy_row, write_rows

from eagle3 import extract, state_checks
from eagle3.config import load_recipe
from eagle3.contract import ROOT, RunDir
from eagle3.extract import row_seed
from eagle3.looping import is_looping
from eagle3.server import served_name, staging_candidates
from eagle3.store import Store
from eagle3.verifier import open_verifier


class Toy:
    """One run directory with a stub server; `run` is the stage by its own main."""

    def __init__(self, folder, verifier, **recipe):
        self.folder, self.verifier_path = folder, verifier
        self.run_dir = RunDir(folder / "run")
        self.rows = default_rows()
        self.stage = load_stage("03_extract_hidden.py")
        self.configure(**recipe)

    def configure(self, **recipe):
        self.recipe = make_recipe(self.folder, self.verifier_path, **recipe)
        self.verifier = open_verifier(load_recipe(str(self.recipe)))

    def stub(self, **kw):
        self.staging = staging_candidates(self.run_dir)[1]
        self.server = Stub(self.verifier_path, self.staging, served_name(self.verifier), **kw)
        return self.server.serve()

    def run(self, *args, url: str | None = None) -> int:
        write_rows(self.run_dir.path, self.rows)
        url = url or getattr(getattr(self, "server", None), "url", "http://127.0.0.1:9")
        common = ["--recipe", str(self.recipe), "--run-dir", str(self.run_dir.path)]
        return self.stage.main([*common, "--endpoint", url, *args])

    @property
    def log(self) -> str:
        return (self.run_dir.logs / "03.log").read_text()

    @property
    def store(self) -> Store:
        return Store.open(self.run_dir.hidden)

    @property
    def record(self) -> dict:
        return json.loads((self.run_dir.hidden / "stage.json").read_text())

    @property
    def failures(self) -> list[dict]:
        return [json.loads(x) for x in (self.run_dir.hidden / "failures.jsonl").read_text().splitlines()]


@pytest.fixture
def toy(tmp_path, toy_verifier, monkeypatch):
    for name in ("RUN_DIR", "RECIPE", "SAMPLES", "RECIPE_SET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROFILE", "cpu-smoke")
    monkeypatch.setenv("DISK_RESERVE_GB", "0")
    monkeypatch.setenv("EXTRACT_REQUESTS", "4")
    signals = {s: signal.getsignal(s) for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield Toy(tmp_path, toy_verifier)
    torch.set_num_threads(threads)
    for signum, handler in signals.items():
        signal.signal(signum, handler)


# --- answers ------------------------------------------------------------------------------------------------


def test_loops_are_told_from_lists():
    text = list(range(100, 160))
    assert not is_looping(text)
    assert not is_looping([*text, 2])
    assert is_looping([*text, *[7, 8, 9] * 12])
    assert is_looping([*text, *[7, 8, 9] * 12, 2])  # the model closed it after all
    assert is_looping([*text, *list(range(20)) * 3])
    assert not is_looping([*text, *[7, 8] * 5])  # "ha ha ha" is short
    assert not is_looping([*text, *list(range(20)) * 2])
    counter = [t for i in range(20) for t in (11, 12, 13, 14, 15, 900 + i)]  # "3. the same again"
    assert is_looping([*text, *counter])
    bullets = [t for i in range(20) for t in (11, *range(200 + 7 * i, 206 + 7 * i), 12)]
    assert not is_looping(bullets)
    assert is_looping(list(range(48)) * 3)  # longer than any block looked for
    assert not is_looping([])
    assert not is_looping([5, 5, 5])


def test_seeds_depend_on_run_and_row_only():
    assert row_seed(0, "a") == row_seed(0, "a")
    assert len({row_seed(0, "a"), row_seed(1, "a"), row_seed(0, "b"), row_seed(0, "a", 1)}) == 4


# --- a whole run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_stored_states_are_the_verifiers_own(toy, dtype):
    toy.configure(**{"states.dtype": dtype})
    with toy.stub() as stub:
        assert toy.run() == 0
        rows = {r["id"]: r for split in toy.rows.values() for r in split}
        assert {s.id for s in toy.store.samples} == set(rows)
        for info in toy.store.samples:
            sample = toy.store.read(info, verify=True)
            ids, prompt = sample.token_ids.tolist(), rows[info.id]["prompt_ids"]
            assert ids[: info.prompt] == prompt
            assert len(ids) <= len(prompt) + 12
            _, states = stub.toy.run(ids[:-1])
            for mine, real in (
                (sample.aux, states[:, LAYERS]),
                (sample.final, states[info.prompt - 1 :, 8]),
            ):
                assert mine.shape == real.shape
                error = (mine.float() - real.float()).norm(dim=-1) / real.float().norm(dim=-1)
                assert error.max() <= (0 if dtype == "bf16" else 0.05)
    extra = toy.record
    assert extra["counts"] == {"train": 12, "val": 2, "heldout": 3}
    assert extra["proof"]["rows"] == 17
    assert extra["tokens"] == sum(s.tokens for s in toy.store.samples)
    assert not list(toy.staging.glob("*")) and not list(staging_candidates(toy.run_dir)[0].glob("*"))


def test_a_finished_stage_skips_without_a_server_and_grows_by_new_rows_only(toy):
    with toy.stub():
        assert toy.run() == 0
    before = toy.store.digest("train")
    assert toy.run("--check", url="http://127.0.0.1:9") == 0
    assert toy.run(url="http://127.0.0.1:9") == 0  # nobody listens there
    toy.rows["train"] += [toy_row(i, "train") for i in range(12, 15)]
    assert toy.run("--check") == 1
    with toy.stub() as stub:
        assert toy.run() == 0
        assert len(stub.requests) == 3
    assert len(toy.store.select("train")) == 15
    assert toy.store.digest("train") != before


def test_given_answers_are_prefilled_to_the_same_states(toy):
    with toy.stub():
        assert toy.run() == 0
        one = {s.id: toy.store.read(s) for s in toy.store.samples}
        for split in toy.rows.values():
            for row in split:
                row["response_ids"] = one[row["id"]].token_ids.tolist()[len(row["prompt_ids"]) :]
        assert toy.run() == 2  # other rows than before
        assert "rows of" in toy.log and "changed" in toy.log
        assert toy.run("--force") == 0
    for info in toy.store.samples:
        sample = toy.store.read(info)
        assert torch.equal(sample.token_ids, one[info.id].token_ids)
        assert torch.equal(sample.aux, one[info.id].aux)
        assert torch.equal(sample.final, one[info.id].final)


def test_two_passes_give_what_one_pass_gives(toy):
    with toy.stub():
        assert toy.run() == 0
        one = toy.store.digest()
        assert toy.run("--force", "--mode", "two-pass", "--answers-only") == 0
        assert not (toy.run_dir.hidden / "stage.json").exists()
        answers = (toy.run_dir.hidden / "answers.jsonl").read_text()
        assert len(answers.splitlines()) == 17
        # A kill cut the last line: that row is asked for again, no other.
        (toy.run_dir.hidden / "answers.jsonl").write_text(answers[:-20])
        before = len(toy.server.requests)
        assert toy.run("--mode", "two-pass", "--answers-only") == 0
        assert len(toy.server.requests) == before + 1
        assert toy.run("--mode", "two-pass") == 0
        assert all(r["max_tokens"] == 1 for r in toy.server.requests[before + 1 :])
    assert toy.store.digest() == one


def test_a_row_without_an_answer_fails_the_first_pass_too(toy):
    with toy.stub() as stub:
        stub.refuse = lambda body, number: 400 if number == 3 else None
        assert toy.run("--mode", "two-pass", "--answers-only") == 1
        assert "1 rows failed (1 refused)" in toy.log
        asked = len(stub.requests)
        assert toy.run("--mode", "two-pass", "--answers-only") == 0
        assert len(stub.requests) == asked + 1


def test_sampling_is_the_recipes_with_a_seed_per_row(toy):
    toy.configure(**{"answers.temperature": 0.7, "answers.top_p": 0.9, "answers.top_k": 5})
    with toy.stub() as stub:
        assert toy.run() == 0
        asked = {tuple(r["prompt"]): r for r in stub.requests}
    row = toy.rows["train"][3]
    body = asked[tuple(row["prompt_ids"])]
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 5)
    assert body["seed"] == row_seed(0, row["id"])


# --- planted faults -----------------------------------------------------------------------------------------


def zeros(states, ids, number):
    return states * 0 if number == 5 else states


def one_nan(states, ids, number):
    if number == 5:
        states[3, 1, 7] = float("nan")
    return states


def one_inf(states, ids, number):
    if number == 5:
        states[3, 3, 7] = float("inf")
    return states


def constant_row(states, ids, number):
    if number == 5:
        states[4, 2] = 1.0
    return states


def short(states, ids, number):
    return states[:-2] if number == 5 else states


def too_large(states, ids, number):
    return states * 1000 if number == 14 else states


def same_layers(states, ids, number):
    if number == 5:
        states[:, 1] = states[:, 0]
    return states


def same_states(states, ids, number):
    return states[:1].expand_as(states) if number == 5 else states


def no_last_layer(states, ids, number):
    return states[:, :3] if number == 5 else states


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (zeros, "zeros"),
        (one_nan, "not_finite"),
        (one_inf, "not_finite"),
        (constant_row, "constant"),
        (short, "length"),
        (too_large, "norm_range"),
        (same_layers, "same_layers"),
        (same_states, "same_states"),
        (no_last_layer, "shape"),
    ],
)
def test_a_spoiled_sample_is_named_the_others_are_stored_and_a_rerun_redoes_it(
    toy, spoil, reason, monkeypatch
):
    """Fault cases 18 (zeros, constant rows) and 27 (one NaN, one inf), and other shapes of the same."""
    monkeypatch.setenv("EXTRACT_REQUESTS", "1")
    monkeypatch.setattr(state_checks.LayerRange, "SETTLED", 6)
    with toy.stub() as stub:
        stub.spoil = spoil
        assert toy.run() == 1
        (failure,) = toy.failures
        assert failure["reason"] == reason
        assert f"1 rows failed (1 {reason})" in toy.log
        assert failure["id"] not in {s.id for s in toy.store.samples}
        assert len(toy.store.samples) == 16
        assert not (toy.run_dir.hidden / "stage.json").exists()
        asked = len(stub.requests)
        stub.spoil = lambda states, ids, number: states
        assert toy.run() == 0
        assert len(stub.requests) == asked + 1


def test_allowed_failures_do_not_fail_the_stage(toy):
    toy.configure(**{"states.max_failed": 1})
    with toy.stub() as stub:
        stub.spoil = zeros
        assert toy.run() == 0
    assert toy.record["counts"]["train"] + toy.record["counts"]["val"] + toy.record["counts"]["heldout"] == 16


class Swap:
    """Exchanges the states of the first two answers of equal length."""

    def __init__(self):
        self.kept, self.lock = None, threading.Lock()

    def __call__(self, states, ids, number):
        with self.lock:
            if self.kept is None:
                self.kept = states.clone()
            elif self.kept is not True and len(self.kept) == len(states):
                states, self.kept = self.kept, True
            return states


def one_layer_early(stub):
    stub.layers = [2, 4, 5, 7]


def swapped(stub):
    stub.spoil = Swap()


def copy_of_aux(stub):
    stub.layers = [2, 4, 8, 8]
    stub.spoil = lambda states, ids, number: states + torch.tensor([0, 0, 1e-3, 0]).bfloat16()[:, None]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (one_layer_early, "state proof failed .* stored states of layer 8"),
        (swapped, "state proof failed"),
        (copy_of_aux, "proves nothing: layer 5 passes it too"),
    ],
)
def test_the_state_proof_stops_states_that_only_look_right(toy, fault, text, monkeypatch):
    """Fault cases 18 (states of another request) and 23 (the last layer is one early; the id is named)."""
    monkeypatch.setenv("EXTRACT_REQUESTS", "1")
    with toy.stub() as stub:
        fault(stub)
        assert toy.run() == 1
    assert re.search(text, toy.log)
    assert not list(toy.run_dir.hidden.glob("shard-*"))
    assert not list(toy.run_dir.hidden.glob("manifest-*"))


def test_the_proofs_control_waits_for_enough_positions(toy, monkeypatch):
    """A layer that agrees by chance at one position ended a run."""
    monkeypatch.setattr("eagle3.proof.CONTROL_POSITIONS", 100)
    toy.configure(**{"states.shard_bytes": 30_000})
    with toy.stub() as stub:
        copy_of_aux(stub)
        assert toy.run() == 1
    refused = re.search(r"proves nothing: .* over (\d+) positions", toy.log)
    assert int(refused[1]) >= 100
    assert toy.store.shards


def test_every_shard_is_proved_even_if_none_of_its_rows_asked(toy):
    toy.configure(**{"states.proof_rows": 1, "states.shard_bytes": 150_000})
    with toy.stub() as stub:
        assert toy.run() == 0
        shards = toy.store.shards
        assert len(shards) > 2
        assert all(s.proof and s.proof["rows"] >= 1 for s in shards.values())
        assert len(stub.requests) > 17  # some were asked again
        stub.layers = [2, 4, 5, 7]  # and that would have noticed
        assert toy.run("--force") == 1


# --- limits, refusals, the server ---------------------------------------------------------------------------


def test_rows_at_the_limit_are_taken_longer_ones_dropped_once(toy):
    """Fault 16: 63, 64 and 65 tokens against a server that takes 64."""
    answer = list(range(10, 30))
    toy.rows["train"] = [toy_row(n, "train", answer, length=n - 20) for n in (63, 64, 65)]
    with toy.stub() as stub:
        assert toy.run() == 0
        assert {s.tokens for s in toy.store.select("train")} == {63, 64}
        assert toy.record["dropped"] == {"too_long": 1}
        assert "65 tokens, the server takes 64" in (toy.run_dir.hidden / "failures.jsonl").read_text()
        asked = len(stub.requests)
        assert max(len(r["prompt"]) for r in stub.requests) == 63
        (toy.run_dir.hidden / "stage.json").unlink()
        assert toy.run() == 0
        assert len(stub.requests) == asked


def test_a_server_with_a_smaller_limit_is_refused_once_with_both_numbers(toy):
    """Fault 16: found up front, not sample by sample."""
    with toy.stub(limit=48) as stub:
        assert toy.run() == 1
        assert not stub.requests
    assert "takes 48 tokens a request, the recipe's verifier.max_model_len is 64" in toy.log


def test_a_permanent_refusal_is_not_retried_a_transient_one_is(toy, monkeypatch):
    """Fault 16."""
    monkeypatch.setenv("EXTRACT_REQUESTS", "1")
    with toy.stub() as stub:
        stub.refuse = lambda body, number: {2: 400, 6: 503, 7: 429}.get(number)
        assert toy.run() == 1
        assert len(stub.requests) == 17 + 2
        (failure,) = toy.failures
        assert failure["reason"] == "refused"
        assert "HTTP 400: refused with 400" in failure["detail"]


def test_a_long_run_of_failures_stops_early(toy, monkeypatch):
    monkeypatch.setattr("eagle3.extract_run.FAILURE_STREAK", 5)
    with toy.stub() as stub:
        stub.refuse = lambda body, number: 400
        assert toy.run() == 1
        assert len(stub.requests) < 12
    assert "5 rows in a row failed" in toy.log


def test_no_server_names_the_command(toy):
    assert toy.run(url="http://127.0.0.1:9") == 1
    assert "FROM=03 TO=03 ./run_pipeline.sh" in toy.log


def test_another_model_is_refused(toy):
    with toy.stub() as stub:
        stub.name = "verifier-of-others"
        assert toy.run() == 1
    assert "serves verifier-of-others, the recipe asks for verifier-" in toy.log


def test_a_server_without_states_is_refused_at_once(toy):
    with toy.stub() as stub:
        complete = stub.complete

        def plain(body):
            status, reply = complete(body)
            return status, {**reply, "kv_transfer_params": None}

        stub.complete = plain
        assert toy.run() == 1
    assert "02_launch_verifier.sh extract is needed" in toy.log


def test_a_dying_server_ends_the_run_and_the_rest_is_taken_later(toy):
    with toy.stub() as stub:
        stub.delay = 0.05
        refuse = stub.refuse

        def die(body, number):
            if number == 9:
                threading.Thread(target=stub.kill).start()
                time.sleep(0.3)
                return 500
            return refuse(body, number)

        stub.refuse = die
        began = time.time()
        assert toy.run() == 1
        assert time.time() - began < 20
    assert "the verifier server is gone" in toy.log
    done = {s.id for s in toy.store.samples}
    assert 0 < len(done) < 17
    with toy.stub() as stub:
        assert toy.run() == 0
        assert len(stub.requests) == 17 - len(done)


def test_two_servers_share_the_rows_and_one_may_die(toy):
    with toy.stub() as first:
        other = Stub(toy.verifier_path, toy.staging, first.name)
        other.delay = 0.05
        with other.serve():
            other.refuse = lambda body, number: other.kill() or 500 if number == 2 else None
            assert toy.run("--endpoint", other.url) == 0
    assert len(toy.store.samples) == 17
    assert len(other.requests) >= 2


# --- staging ------------------------------------------------------------------------------------------------


def test_a_lock_that_stays_held_is_named_after_the_timeout(toy, monkeypatch):
    """Fault 19."""
    monkeypatch.setattr(extract, "LOCK_TIMEOUT", 0.3)
    monkeypatch.setenv("EXTRACT_REQUESTS", "1")
    with toy.stub() as stub:
        real, held = stub._write, []

        def hold(path, states, ids):
            if len(held) < 1:
                path.parent.mkdir(parents=True, exist_ok=True)
                held.append(os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY))
                fcntl.flock(held[0], fcntl.LOCK_EX)
            else:
                real(path, states, ids)

        stub.write = hold
        assert toy.run() == 1
        os.close(held[0])
    assert toy.failures[0]["reason"] == "lock_timeout"
    assert "is still held after 0 s" in toy.failures[0]["detail"]
    assert not list(toy.staging.glob("*"))


def test_a_dead_lock_is_ignored_and_a_path_elsewhere_never_touched(toy, tmp_path):
    """Fault 19."""
    elsewhere = tmp_path / "elsewhere.safetensors"
    with toy.stub() as stub:

        def dead(path, states, ids):
            path.parent.mkdir(parents=True, exist_ok=True)
            open(f"{path}.lock", "w").close()  # a lock file that nobody holds
            stub_save(path, states, ids)

        stub.write = dead
        assert toy.run() == 0
        stub_save(elsewhere, torch.zeros(2, 4, 32).bfloat16(), torch.zeros(2))
        complete = stub.complete

        def lie(body):
            status, reply = complete(body)
            reply["kv_transfer_params"]["hidden_states_path"] = str(elsewhere)
            return status, reply

        stub.complete = lie
        toy.rows["train"].append(toy_row(99, "train"))
        assert toy.run() == 1
    assert toy.failures[0]["reason"] == "foreign_path"
    assert elsewhere.exists()


def stub_save(path, states, ids):
    from safetensors.torch import save_file

    save_file({"hidden_states": states.contiguous(), "token_ids": ids.long()}, path)


def test_a_full_staging_folder_stops_with_folder_needed_and_free(toy, monkeypatch):
    """Fault 21."""
    real = shutil.disk_usage
    with toy.stub() as stub:
        write, full = stub._write, threading.Event()

        def cut(path, states, ids):
            if len(stub.requests) > 8:
                full.set()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"\0" * 100)
            else:
                write(path, states, ids)

        def usage(path):
            found = real(path)
            inside = str(path) == str(toy.staging) and full.is_set()
            return SimpleNamespace(total=found.total, used=found.used, free=1000 if inside else found.free)

        stub.write = cut
        monkeypatch.setattr(shutil, "disk_usage", usage)
        assert toy.run() == 1
        assert f"no space in {toy.staging}: " in toy.log
        assert "1000 free" in toy.log
        stored = {s.id for s in toy.store.samples}
        monkeypatch.setattr(shutil, "disk_usage", real)
        stub.write = write
        before = len(stub.requests)
        assert toy.run() == 0
        assert len(stub.requests) - before == 17 - len(stored)


# --- resume, parts, rounds, budgets -------------------------------------------------------------------------


def test_a_full_output_folder_stops_with_folder_needed_and_free(toy, monkeypatch):
    """Fault 21: the estimate comes first; once there is space again, a rerun takes only what is missing."""
    toy.configure(**{"states.shard_bytes": 150_000})
    real = os.pwrite

    def full(fd, data, at):
        if len(list(toy.run_dir.hidden.glob("shard-*"))) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    with toy.stub() as stub:
        monkeypatch.setattr(os, "pwrite", full)
        assert toy.run() == 1
        assert re.search(rf"no space in {toy.run_dir.hidden}: \d+ bytes needed, \d+ free", toy.log)
        assert toy.log.index("17 of 17 rows to take: about") < toy.log.index("no space in")
        monkeypatch.setattr(os, "pwrite", real)
        kept, asked = {s.id for s in toy.store.samples}, len(stub.requests)
        assert 0 < len(kept) < 17
        assert toy.run() == 0
        assert len(stub.requests) - asked == 17 - len(kept)
    assert len(toy.store.samples) == 17


def test_states_that_do_not_fit_are_refused_before_the_start(toy, monkeypatch):
    """Fault 21."""
    free = shutil.disk_usage(toy.folder).free
    monkeypatch.setenv("DISK_RESERVE_GB", str(free / 1e9))
    with toy.stub() as stub:
        assert toy.run() == 1
        assert not stub.requests
    assert "states will take about" in toy.log
    assert "ROUNDS=" in toy.log


@pytest.mark.parametrize("change", ["changed", "removed"])
def test_changed_and_removed_rows_are_refused_with_an_example(toy, change):
    with toy.stub():
        assert toy.run() == 0
        if change == "changed":
            toy.rows["train"][4]["prompt_ids"][0] = 50
        else:
            del toy.rows["train"][4]
        assert toy.run() == 2
    assert "1 rows of" in toy.log
    assert "train-4" in toy.log


def test_other_settings_are_refused_by_identity(toy):
    with toy.stub():
        assert toy.run() == 0
        assert toy.run("--set", "answers.max_tokens=11") == 2
        assert "answers.max_tokens: was 12, now 11" in toy.log
        assert toy.run("--set", "verifier.layers=[1,4,5]") == 2
        assert toy.run("--set", "states.dtype=fp8", "--force") == 0
    assert toy.store.dtype == "fp8"


@pytest.mark.parametrize("damage", ["short", "empty"])
def test_only_the_rows_of_a_broken_shard_are_redone(toy, damage):
    """Fault 19: half files and empty ones."""
    toy.configure(**{"states.shard_bytes": 150_000})
    with toy.stub() as stub:
        assert toy.run() == 0
        digest, victim = toy.store.digest(), list(toy.store.shards.values())[1]
        os.truncate(toy.run_dir.hidden / victim.name, victim.bytes - 7 if damage == "short" else 0)
        before = len(stub.requests)
        assert toy.run("--check") == 1
        assert toy.run() == 0
        assert len(stub.requests) - before == len(victim.samples)
    assert f"{victim.name} has" in toy.log
    assert toy.store.digest() == digest


def test_deep_finds_a_flipped_bit_and_redoes_its_shard(toy):
    with toy.stub() as stub:
        assert toy.run() == 0
        digest, info = toy.store.digest(), toy.store.samples[3]
        begin, _ = toy.store._where(info)["final"]
        with open(toy.run_dir.hidden / info.shard, "r+b") as f:
            f.seek(begin)
            byte = f.read(1)[0]
            f.seek(begin)
            f.write(bytes([byte ^ 4]))
        assert toy.run("--check") == 0
        assert toy.run("--check", "--deep") == 1
        before = len(stub.requests)
        assert toy.run("--deep") == 0
        assert len(stub.requests) > before
        assert toy.run("--check", "--deep") == 0
    assert toy.store.digest() == digest


def test_parts_are_disjoint_and_merge_without_a_server(toy, tmp_path):
    a, b = toy.run_dir, RunDir(tmp_path / "b")
    with toy.stub():
        assert toy.run("--part", "1/2") == 0
        assert not (a.hidden / "stage.json").exists()
        toy.run_dir = b
        with toy.stub():
            assert toy.run("--part", "2/2") == 0
    for path in b.hidden.glob("*-2of2*"):
        shutil.copy(path, a.hidden)
    toy.run_dir = a
    assert toy.run("--check") == 1
    assert toy.run(url="http://127.0.0.1:9") == 0
    assert sum(toy.record["counts"].values()) == 17


def test_rounds_hold_one_window_of_training_rows_at_a_time(toy):
    seen = []
    with toy.stub() as stub:
        for k in (1, 2, 3):
            assert toy.run("--check", "--round", f"{k}/3") == 1
            assert toy.run("--round", f"{k}/3") == 0
            assert toy.run("--check", "--round", f"{k}/3") == 0
            assert toy.record["counts"] == {"train": 4, "val": 2, "heldout": 3}
            seen += [s.id for s in toy.store.select("train")]
        assert len(stub.requests) == 17
    assert sorted(seen) == sorted(r["id"] for r in toy.rows["train"])


def test_a_budget_is_kept_and_a_larger_one_goes_on(toy):
    with toy.stub() as stub:
        assert toy.run("--max-tokens", "200") == 0
        assert 100 < toy.record["tokens"] <= 200
        assert toy.record["budget"] == {"max_tokens": 200}
        assert toy.run("--check", "--max-tokens", "200") == 0
        assert toy.run("--check") == 1
        before = len(stub.requests)
        assert toy.run() == 0
        assert before < 17
        assert len(stub.requests) == 17
    assert toy.record["budget"] is None


def test_dropped_answers_are_counted_and_not_asked_for_again(toy):
    toy.configure(**{"answers.looping": "drop", "answers.max_tokens": 30, "data.max_prompt_tokens": 30})
    toy.rows["train"] = toy.rows["train"][:6]
    with toy.stub() as stub:
        loops = {tuple(r["prompt_ids"]) for r in (toy.rows["train"][1], toy.rows["heldout"][0])}
        empty = tuple(toy.rows["train"][2]["prompt_ids"])
        stub.answer = lambda p: [9, 10] * 14 if tuple(p) in loops else [] if tuple(p) == empty else [8, 7, 6]
        assert toy.run() == 0
        assert toy.record["dropped"] == {"looping": 1, "empty": 1}
        assert {s.id: s.flags for s in toy.store.samples}["heldout-0"] == ("looping",)
        assert toy.record["looping"] == 1
        asked = len(stub.requests)
        (toy.run_dir.hidden / "stage.json").unlink()
        assert toy.run() == 0
        assert len(stub.requests) == asked
    assert [f["reason"] for f in toy.failures] == ["empty", "looping"]


def test_answers_at_the_limit_follow_their_rule(toy):
    toy.configure(**{"answers.at_limit": "drop"})
    with toy.stub() as stub:
        first = tuple(toy.rows["train"][0]["prompt_ids"])
        stub.answer = lambda p: [8, 7, 6] if tuple(p) == first else list(range(20, 40))
        assert toy.run() == 0
    assert toy.record["counts"] == {"train": 1, "val": 0, "heldout": 3}
    assert toy.record["dropped"] == {"at_limit": 13}


def test_an_interrupt_seals_what_is_whole_and_exits_with_its_signal(toy):
    with toy.stub() as stub:
        stub.delay = 0.05

        def interrupt(body, number):
            if number == 8:
                os.kill(os.getpid(), signal.SIGTERM)
            if number >= 8:  # the others are still being answered; nobody waits for them
                time.sleep(8)

        stub.refuse = interrupt
        began = time.time()
        assert toy.run() == 143
        assert time.time() - began < 8
        stored = len(toy.store.samples)
        assert 0 < stored < 17
        assert not (toy.run_dir.hidden / "stage.json").exists()
        assert not list(toy.run_dir.hidden.glob(".*.tmp"))
        stub.refuse = lambda body, number: None
        before = len(stub.requests)
        assert toy.run() == 0
        assert len(stub.requests) - before == 17 - stored


def test_two_runs_in_one_folder_are_refused(toy):
    toy.run_dir.hidden.mkdir(parents=True)
    with toy.stage.folder_lock(toy.run_dir.hidden):
        assert toy.run() == 1
    assert "another 03_extract_hidden.py works in" in toy.log


def test_earlier_turns_are_answered_by_the_verifier_itself(toy, monkeypatch):
    from eagle3 import chats

    history = {"messages": [], "tools": None, "kwargs": {}, "answers": 1}
    toy.rows["train"] = [{**toy_row(0, "train"), "history": history}]
    first, seen = toy.rows["train"][0]["prompt_ids"], []

    def next_prompt(renderer, given, answers):
        seen.append([list(a) for a in answers])
        return [*first, *(t for a in answers for t in a), *([6, 7] if answers else [])]

    monkeypatch.setattr(chats, "next_prompt", next_prompt)
    monkeypatch.setattr(chats, "Renderer", lambda *args: None)
    with toy.stub():
        assert toy.run() == 0
    (info,) = toy.store.select("train")
    earlier = seen[-1][0]
    assert toy.store.token_ids(info).tolist()[: info.prompt] == [*first, *earlier, 6, 7]
    toy.rows["train"][0]["history"] = {**history, "kwargs": {"x": 1}}
    assert toy.run() == 2


# --- several processes --------------------------------------------------------------------------------------


@pytest.fixture
def two_processes(monkeypatch):
    monkeypatch.setattr("eagle3.extract_store.usable_cores", lambda: 4)


def test_processes_store_what_threads_store(toy, two_processes, monkeypatch):
    with toy.stub():
        assert toy.run() == 0
        assert "2 processes check and store" in toy.log
        shards = toy.store.shards.values()
        assert len(shards) >= 2  # each has its own
        assert all(s.proof for s in shards) and toy.log.count("proved by") == len(shards)
        # One proves over the whole vocabulary, the other without reading the head.
        assert sorted({s.proof["vocabulary"] for s in shards}) == ["all", "few"]
        several, peak = toy.store.digest(), toy.record["peak_rss_bytes"]
        assert set(toy.record["layer_norms"]) == {str(k) for k in [*LAYERS, 8]}
        assert peak > 300e6  # two processes with torch are counted
        monkeypatch.setattr("eagle3.extract_store.usable_cores", lambda: 2)
        assert toy.run("--force") == 0
        assert toy.store.digest() == several
        assert len(toy.store.shards) == 1


def test_processes_name_a_spoiled_row_and_a_wrong_layer(toy, two_processes):
    with toy.stub() as stub:
        stub.spoil = zeros
        assert toy.run() == 1
        (failure,) = toy.failures
        assert (failure["reason"], len(toy.store.samples)) == ("zeros", 16)
        stub.spoil = lambda states, ids, number: states
        assert toy.run() == 0
        assert len(stub.requests) == 18
        one_layer_early(stub)
        assert toy.run("--force") == 1
    assert "state proof failed" in toy.log
    assert not list(toy.run_dir.hidden.glob("shard-*"))


def writers_of(pid: int) -> list[int]:
    """Processes of a 03 that check and store."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            status, command = (entry / "status").read_text(), (entry / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if f"PPid:\t{pid}\n" in status and b"eagle3.extract_store" in command:
            found.append(int(entry.name))
    return found


def test_a_process_that_dies_ends_the_run_and_a_rerun_takes_its_rows(toy, two_processes):
    toy.configure(**{"states.shard_bytes": 150_000})
    with toy.stub() as stub:

        def kill_one(body, number):
            if number == 14:
                os.kill(writers_of(os.getpid())[0], signal.SIGKILL)

        stub.refuse = kill_one
        assert toy.run() == 1
        assert "a process that stores states ended with status -9: out of memory?" in toy.log
        assert not writers_of(os.getpid())
        stub.refuse, asked, kept = lambda body, number: None, len(stub.requests), len(toy.store.samples)
        assert 0 < kept < 17
        assert toy.run() == 0
        assert len(stub.requests) - asked == 17 - kept


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_03_and_a_rerun_takes_what_is_missing(toy, two_processes, signum):
    """Its whole group gets the TERM of a Ctrl-C; a kill -9 hits 03 alone, and the kernel takes the others."""
    toy.configure(**{"states.shard_bytes": 150_000})
    write_rows(toy.run_dir.path, toy.rows)
    reached = threading.Event()
    with toy.stub() as stub:

        def hold(body, number):
            if number >= 14:
                reached.set()
                time.sleep(5)

        stub.refuse = hold
        code = (
            "import runpy, sys, eagle3.extract_store as e; e.usable_cores = lambda: 4; "
            "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        command = [sys.executable, "-c", code, "03_extract_hidden.py", "--recipe", str(toy.recipe)]
        command += ["--run-dir", str(toy.run_dir.path), "--endpoint", stub.url]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        assert reached.wait(60)
        writers = writers_of(process.pid)
        assert len(writers) == 2
        if signum == signal.SIGTERM:
            os.killpg(process.pid, signum)
        else:
            process.kill()
        assert process.wait(20) == (143 if signum == signal.SIGTERM else -9)
        deadline = time.time() + 5
        while any(Path(f"/proc/{pid}").exists() for pid in writers) and time.time() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in writers)
        stub.refuse = lambda body, number: None
        asked = len(stub.requests)
        assert toy.run() == 0
        if signum == signal.SIGTERM:
            assert len(stub.requests) - asked < 10  # what was whole was sealed
    assert len(toy.store.samples) == 17
    assert not list(toy.run_dir.hidden.glob(".shard*"))
