"""status: what it says must be true in every state of a run, also after a kill -9."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from hand_made import HandMade, settings

from eagle3.contract import process_start_time, write_json
from eagle3.status import all_stages, next_command, status, table

WORKER = """
import sys, time
from pathlib import Path
from eagle3 import progress
progress.begin_file(Path(sys.argv[1]))
bar = progress.Progress(200, "row", "answers")
bar.saved = -10
bar.update(50, note="12 in flight")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def made(tmp_path):
    return HandMade(settings(tmp_path / "run", samples="10"))


@pytest.fixture
def worker(made):
    """A real process that has noted progress on stage 03, as a stage does."""
    made.run.logs.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(made.run.logs / "03.progress.json")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def states(made) -> list[str]:
    return [s["state"] for s in all_stages(made.run).values()]


def test_nothing_has_run(made):
    assert states(made) == ["todo"] * 5


def test_done_stages_are_done_and_the_rest_is_todo(made):
    made.prepare()
    made.extract()
    assert states(made) == ["done", "done", "todo", "todo", "todo"]


def test_a_running_stage_has_pid_progress_and_eta(made, worker):
    made.prepare()
    found = all_stages(made.run)["03"]
    assert (found["state"], found["pid"], found["n"], found["total"]) == ("running", worker.pid, 50, 200)
    assert found["note"] == "12 in flight" and found["eta_seconds"] >= 0


def test_a_killed_stage_is_not_said_to_run(made, worker):
    made.prepare()
    made.manifest({"train": 6, "heldout": 1})
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    found = all_stages(made.run)["03"]
    assert found["state"] == "interrupted" and f"process {worker.pid} was killed" in found["error"]
    assert found["n"] == 50 and found["reached"].startswith("7 rows sealed")
    assert "interrupted" in table(status(made.run))


def test_a_reused_pid_is_not_taken_for_the_stage(made):
    me = os.getpid()
    note = {"pid": me, "start_time": "1", "began": time.time() - 9, "updated": time.time()}
    write_json(made.run.logs / "04.progress.json", note)
    assert all_stages(made.run)["04"]["state"] == "interrupted"
    write_json(made.run.logs / "04.progress.json", {**note, "start_time": process_start_time(me)})
    assert all_stages(made.run)["04"]["state"] == "running"


@pytest.mark.parametrize("how", ["failed", "interrupted"])
def test_a_stage_that_ended_badly_says_how_and_why(made, how):
    made.prepare()
    made.attempt("03", how, error="port 8192 is in use")
    found = status(made.run)
    assert found["stages"]["03"]["state"] == how
    assert found["last_error"] == "03_extract_hidden.py: port 8192 is in use"
    assert "port 8192 is in use" in table(found)


def test_an_error_that_was_overcome_is_no_longer_the_last_error(made):
    made.attempt("01", "failed", error="disk full")
    made.prepare()
    assert status(made.run)["last_error"] is None


def test_all_done_has_no_next_command(made):
    made.all()
    found = status(made.run)
    assert states(made) == ["done"] * 5 and found["next_command"] is None
    assert "all stages are done" in table(found)


def test_a_grown_01_makes_03_go_on_and_the_rest_stale(made):
    made.all()
    (made.run.prepare / "stage.json").unlink()
    made.prepare(train=30)
    assert states(made) == ["done", "todo", "stale", "stale", "stale"]
    assert "FORCE=04,05,06 " in next_command(made.run, all_stages(made.run))


def test_results_older_than_their_input_are_stale(made):
    made.all()
    (made.run.train / "stage.json").unlink()
    made.train(after=60)
    assert states(made) == ["done", "done", "done", "stale", "stale"]


def test_an_unfinished_stage_makes_later_results_stale(made):
    made.all()
    (made.run.train / "stage.json").unlink()
    made.attempt("04", "interrupted")
    assert states(made) == ["done", "done", "interrupted", "stale", "stale"]


def test_next_command_can_be_pasted_and_sets_what_the_run_had(made, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMPLES", "10")
    monkeypatch.setenv("RECIPE_SET", "train.lr=1e-3 answers.max_tokens=64")
    made.prepare()
    monkeypatch.delenv("SAMPLES")
    monkeypatch.delenv("RECIPE_SET")
    line = next_command(made.run, all_stages(made.run))
    assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0
    show = 'printf "%s\\n" "$RECIPE" "$PROFILE" "$SAMPLES" "$RECIPE_SET" "$RUN_DIR"'
    probe = line.replace("./run_pipeline.sh", f"bash -c {shlex.quote(show)}")
    said = subprocess.run(
        ["bash", "-c", probe], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said == [
        "smollm2-135m",
        "cpu-smoke",
        "10",
        "train.lr=1e-3 answers.max_tokens=64",
        str(made.run.path),
    ]


def test_a_recipe_file_that_did_not_move_along_is_replaced_by_the_run_s_own(made):
    text = (made.run.path / "recipe.yaml").read_text()
    (made.run.path / "recipe.yaml").write_text(
        text.replace("# recipe: smollm2-135m", "# recipe: /gone/mine.yaml")
    )
    assert f"RECIPE={made.run.path}/recipe.yaml" in next_command(made.run, all_stages(made.run))


def test_damaged_files_do_not_stop_status(made):
    made.all()
    for path in (
        made.run.path / "run.json",
        made.run.train / "stage.json",
        made.run.hidden / "manifest-0of1.jsonl",
    ):
        path.write_text('{"half')
    (made.run.logs).mkdir(exist_ok=True)
    (made.run.logs / "05.progress.json").write_text("")
    (made.run.path / "verifier.pid").write_text('{"pid": 1}')
    found = status(made.run)
    assert found["stages"]["04"]["state"] == "todo" and found["servers"] == []


def test_servers_up_orphaned_and_dead_are_told_apart(made):
    me, mine = os.getpid(), process_start_time(os.getpid())
    noted = {"pid": me, "start_time": mine, "mark": f"1-{time.time_ns()}", "port": 8192, "mode": "extract"}
    write_json(made.run.path / "a.pid", {**noted, "owner": [me, mine]})
    write_json(made.run.path / "b.pid", {**noted, "owner": [me, "0"]})
    write_json(made.run.path / "c.pid", {**noted, "start_time": "0", "owner": [me, "0"]})
    assert [s["state"] for s in status(made.run)["servers"]] == ["up", "orphan", "dead"]


def test_a_working_pipeline_is_noticed_without_taking_its_lock(made):
    assert not status(made.run)["working"]
    with open(made.run.path / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert status(made.run)["working"]
        assert "next: wait" in table(status(made.run))


def test_the_command_answers_quickly_in_both_forms(made):
    made.prepare()
    env = {**os.environ, "RUN_DIR": str(made.run.path), "PROFILE": "cpu-smoke"}
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.status", "--json"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stages"]["01"]["state"] == "done"
    assert time.time() - began < 10  # 0.3 s of work; the machine of the tests may be busy
