"""run_pipeline.sh with a stub interpreter: order, ranges, failure status, signals, dry run.

The stub answers `-m eagle3.config ...` through the real interpreter and only notes everything else.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

STUB = """#!/usr/bin/env bash
case "$*" in
    "-m eagle3.config"*) exec {python} "$@" ;;
esac
name=$(basename "${{!#}}")
echo "$*" | sed 's#{root}/##g' >>"$STUB_LOG"
case "$*" in
    *03_extract_hidden.py\\ --check*) exit "${{STUB_CHECK_03:-1}}" ;;
    *04_train.py\\ --check*) [[ ,${{STUB_TRAINED-}}, != *,"${{!#}}",* ]]; exit $((! $?)) ;;
    *"${{STUB_FAIL:-nothing-at-all}}"*) exit "${{STUB_STATUS:-1}}" ;;
    *"${{STUB_HANG:-nothing-at-all}}"*) echo $$ >"$STUB_LOG.pid"; trap 'exit 143' TERM; trap 'exit 130' INT
        trap 'exit 129' HUP; for _ in $(seq 200); do sleep 0.1; done ;;
esac
"""


@pytest.fixture
def stub(tmp_path):
    """Runs ./run_pipeline.sh with the stub; .calls() lists what it was asked to do."""
    program = tmp_path / "python-stub"
    program.write_text(STUB.format(python=sys.executable, root=ROOT))
    program.chmod(0o755)

    class Stub:
        log = tmp_path / "calls"
        folder = tmp_path / "run"

        def environment(self, **env):
            clean = {k: v for k, v in os.environ.items() if k not in ("RECIPE", "SAMPLES", "FROM", "TO")}
            fixed = {"SETUP": "off", "PYTHON": str(program), "STUB_LOG": str(self.log)}
            return {**clean, **fixed, "RUN_DIR": str(self.folder), "PROFILE": "cpu-smoke", **env}

        def run(self, *args, **env):
            command = [str(ROOT / "run_pipeline.sh"), *args]
            return subprocess.run(
                command, env=self.environment(**env), capture_output=True, text=True, timeout=240
            )

        def start(self, **env):
            return subprocess.Popen(
                [str(ROOT / "run_pipeline.sh")],
                env=self.environment(**env),
                stderr=subprocess.PIPE,
                text=True,
            )

        def calls(self):
            return self.log.read_text().splitlines() if self.log.exists() else []

        def stages(self):
            """Stage numbers in the order they were run (checks left out)."""
            found = [c for c in self.calls() if ".py" in c and "--check" not in c]
            return [re.findall(r"(0\d)_\w+\.py", c)[-1] for c in found]

    return Stub()


def test_all_stages_in_order_and_a_report_at_the_end(stub):
    done = stub.run()
    assert done.returncode == 0, done.stderr
    assert stub.stages() == ["01", "03", "04", "05", "06"]
    assert "-m eagle3.server run extract --" in " ".join(stub.calls())
    assert stub.calls()[-1] == "-m eagle3.report --quiet"


def test_from_and_to_choose_stages(stub):
    assert stub.run(FROM="04", TO="05").returncode == 0
    assert stub.stages() == ["04", "05"]


def test_no_server_when_no_row_is_missing(stub):
    assert stub.run(STUB_CHECK_03="0").returncode == 0
    assert not any("eagle3.server run" in c for c in stub.calls())


def test_a_refused_check_stops_before_the_server(stub):
    assert stub.run(STUB_CHECK_03="2").returncode == 2
    assert stub.stages() == ["01"]


@pytest.mark.parametrize(("stage", "status"), [("01_prepare", 1), ("04_train", 2), ("06_evaluate", 1)])
def test_a_failing_stage_ends_the_run_with_its_status(stub, stage, status):
    done = stub.run(STUB_FAIL=stage, STUB_STATUS=str(status))
    assert done.returncode == status
    assert stub.stages()[-1] == stage[:2]
    said = "refused these settings: status 2" if status == 2 else f"failed with status {status}"
    assert said in done.stderr
    assert stub.calls()[-1] == "-m eagle3.report --quiet"  # a failed run has a report too


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_reaches_the_running_stage_and_sets_the_status(stub, signum):
    process = stub.start(STUB_HANG="04_train")
    pid_file = stub.log.with_name("calls.pid")
    deadline = time.time() + 30
    while not pid_file.exists() and time.time() < deadline:
        time.sleep(0.05)
    began = time.time()
    process.send_signal(signum)
    assert process.wait(timeout=120) == 128 + signum
    assert time.time() - began < 10
    assert not os.path.exists(f"/proc/{pid_file.read_text().strip()}")
    assert stub.stages() == ["01", "03", "04"]


def test_dry_run_prints_pasteable_commands_and_runs_nothing(stub):
    done = stub.run(DRY_RUN="1", PYTHON=sys.executable, SETUP="off")
    assert done.returncode == 0, done.stderr
    for script in ("01_prepare.py", "03_extract_hidden.py", "04_train.py", "05_convert.py", "06_evaluate.py"):
        assert script in done.stdout
    assert "vllm.entrypoints.openai.api_server" in done.stdout
    assert not stub.calls() and not stub.folder.exists()


def test_rounds_repeat_extraction_and_training(stub):
    assert stub.run(ROUNDS="2").returncode == 0
    assert stub.stages() == ["01", "03", "04", "03", "04", "05", "06"]
    assert any("03_extract_hidden.py --round 2/2" in c for c in stub.calls())


def test_rounds_that_are_trained_on_are_not_extracted_again(stub):
    assert stub.run(ROUNDS="3", STUB_TRAINED="1/3,2/3").returncode == 0
    assert stub.stages() == ["01", "03", "04", "05", "06"]
    assert any("03_extract_hidden.py --round 3/3" in c for c in stub.calls())


def test_force_in_rounds_is_for_the_first_round_only(stub):
    assert stub.run(ROUNDS="2", FORCE="04,05", STUB_TRAINED="1/2,2/2").returncode == 0
    forced = [c for c in stub.calls() if "--force" in c]
    assert [re.findall(r"0\d_\w+", c)[-1] for c in forced] == ["04_train", "05_convert"]
    assert "--round 1/2" in forced[0]


def test_force_reaches_only_the_named_stage(stub):
    assert stub.run(FORCE="05").returncode == 0
    forced = [c for c in stub.calls() if "--force" in c]
    assert len(forced) == 1 and "05_convert.py" in forced[0]


def test_two_runs_in_one_directory_are_refused(stub):
    first = stub.start(STUB_HANG="04_train")
    deadline = time.time() + 30
    while not stub.log.with_name("calls.pid").exists() and time.time() < deadline:
        time.sleep(0.05)
    second = stub.run()
    first.terminate()
    first.wait(timeout=120)
    assert second.returncode == 1
    assert "another run_pipeline.sh works in" in second.stderr


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["frobnicate"], {}, "unknown command frobnicate"),
        (["run", "--fast"], {}, "takes no arguments"),
        ([], {"FROM": "05", "TO": "03"}, "FROM=05 TO=03"),
        ([], {"RECIPE": "no-such"}, "no recipe 'no-such'"),
        ([], {"PROFILE": "no-such"}, "no profile 'no-such'"),
        ([], {"RECIPE_SET": "train.learning_rate=1"}, "unknown key train.learning_rate"),
        ([], {"ROUNDS": "many"}, "ROUNDS=many"),
        ([], {"ROUNDS": "2", "TO": "03"}, "ROUNDS=2 TO=03"),
    ],
)
def test_bad_usage_is_exit_2_with_the_reason(stub, args, env, words):
    done = stub.run(*args, **env)
    assert done.returncode == 2
    assert words in done.stderr
    assert not stub.stages()


def test_help_answers_without_anything_installed(stub):
    done = subprocess.run(
        [str(ROOT / "run_pipeline.sh"), "--help"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "RECIPE=" in done.stdout and "FROM=03" in done.stdout
