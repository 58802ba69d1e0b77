"""The owner of the verifier server: it notices, it stops, it never touches anything else."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, TEST_PORT, run_stage_cmd

from eagle3 import server
from eagle3.config import load_profile, load_recipe
from eagle3.contract import RunDir, StageError

# A launcher that behaves like 02: writes a log line, then serves what vLLM would, or fails.
FAKE = """#!{python}
import http.server, json, os, sys
print("Loading safetensors checkpoint shards: 50% Completed | 1/2 [00:01<00:01]", flush=True)
mode = os.environ.get("FAKE_MODE", "")
if mode == "die":
    print("ValueError: something the user should read", flush=True); sys.exit(3)
if mode == "oom":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", flush=True); sys.exit(1)
if mode == "sleep":
    import time; time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({{"data": [{{"id": os.environ["FAKE_MODEL"], "max_model_len": 64}}]}})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({{"tokens": json.loads(os.environ["FAKE_TOKENS"])}})
http.server.HTTPServer(("127.0.0.1", int(os.environ["VERIFIER_PORT"])), Handler).serve_forever()
"""


class FakeTokenizer:
    def encode(self, _text, add_special_tokens=True):
        return [1, 2, 3]


@pytest.fixture
def bed(tmp_path, monkeypatch):
    """A stage, a verifier stand-in and a fake launcher."""
    launcher = tmp_path / "launcher"
    launcher.write_text(FAKE.format(python=sys.executable))
    launcher.chmod(0o755)
    monkeypatch.setattr(server, "LAUNCHER", launcher)
    monkeypatch.setenv("VERIFIER_READY_TIMEOUT", "20")
    verifier = SimpleNamespace(
        fingerprint="0" * 64, served_layers=[2, 4, 5, 8], tokenizer=lambda: FakeTokenizer(), path=tmp_path
    )
    monkeypatch.setenv("FAKE_MODEL", server.served_name(verifier))
    monkeypatch.setenv("FAKE_TOKENS", "[1, 2, 3]")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    stage = SimpleNamespace(
        recipe=load_recipe("smollm2-135m"),
        profile=load_profile("cpu-smoke", export=False),
        run=RunDir(tmp_path / "run"),
        args=argparse.Namespace(set=[], recipe=None),
    )
    stage.run.path.mkdir()
    return SimpleNamespace(stage=stage, verifier=verifier, port=port, run=stage.run)


def start(bed, **kw):
    return server.verifier_server("serve", bed.stage, bed.verifier, port=bed.port, **kw)


def leftovers(bed):
    return [p.name for p in bed.run.path.iterdir() if p.suffix == ".pid"]


def test_ready_then_stopped(bed):
    with start(bed) as running:
        assert running.url.endswith(str(bed.port))
        assert leftovers(bed) == ["verifier.pid"]
    assert not server.group_members(running.pid)
    assert not leftovers(bed)
    book = json.loads((bed.run.path / "run.json").read_text())
    assert book["servers"][0]["peak_rss_bytes"] > 1e6


def test_stopped_when_the_work_fails(bed):
    with pytest.raises(RuntimeError), start(bed) as running:
        raise RuntimeError
    assert not server.group_members(running.pid)


def test_a_dead_server_is_noticed_at_once_with_code_and_last_lines(bed, monkeypatch):
    monkeypatch.setenv("FAKE_MODE", "die")
    began = time.time()
    with pytest.raises(StageError, match="exit code 3(.|\n)*something the user should read"), start(bed):
        pass
    assert time.time() - began < 10
    assert not leftovers(bed)


def test_the_first_error_is_shown_even_if_it_lies_far_up(tmp_path):
    path = tmp_path / "verifier.log"
    cause = "(Worker pid=7) ERROR 11-30 [executor.py:1063] torch.InductorError: CppCompileError: no compiler"
    refused = ['INFO: "POST /v1/completions HTTP/1.1" 500 Internal Server Error'] * 400
    path.write_text("\n".join(["starting", cause, *refused, "Finished server process [7]"]))
    shown = server.tail(path, 5).splitlines()
    assert shown[0] == f"first error: {cause}" and shown[-1] == "Finished server process [7]"
    assert len(shown) == 2 + 5
    with open(path, "a") as log:  # the next server, in the same log: the old cause is not its own
        log.write("\n+ python -m vllm\nstarting\nall is well\n")
    assert server.tail(path) == "+ python -m vllm\nstarting\nall is well"


def test_out_of_memory_names_the_variables_to_lower(bed, monkeypatch):
    monkeypatch.setenv("FAKE_MODE", "oom")
    with pytest.raises(StageError, match="VERIFIER_MAX_SEQS(.|\n)*VERIFIER_BATCH_TOKENS"), start(bed):
        pass


def test_the_deadline_ends_the_wait(bed, monkeypatch):
    monkeypatch.setenv("FAKE_MODE", "sleep")
    bed.stage.profile.VERIFIER_READY_TIMEOUT = 2
    with pytest.raises(StageError, match="not ready after 2 s"), start(bed):
        pass
    assert not leftovers(bed)


def test_a_busy_port_is_refused(bed):
    with socket.socket() as s:
        s.bind(("127.0.0.1", bed.port))
        s.listen()
        with pytest.raises(StageError, match=f"port {bed.port} is in use"), start(bed):
            pass


def test_another_model_is_refused(bed, monkeypatch):
    monkeypatch.setenv("FAKE_MODEL", "verifier-111111111111-layers-2-4-5-8")
    with pytest.raises(StageError, match="serves verifier-1111"), start(bed):
        pass


def test_another_tokenizer_is_refused(bed, monkeypatch):
    monkeypatch.setenv("FAKE_TOKENS", "[1, 2, 4]")
    with pytest.raises(StageError, match="tokenizes the probe"), start(bed):
        pass


def orphan(bed, owner_alive: bool):
    """A server noted by an owner that lives (this process) or is gone."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    owner = [os.getpid(), server.process_start_time(os.getpid())] if owner_alive else [process.pid, "1"]
    note = {"pid": process.pid, "start_time": server.process_start_time(process.pid), "mark": "x"}
    note["owner"] = owner
    (bed.run.path / "verifier.pid").write_text(json.dumps({**note, "staging": str(bed.run.path / "staging")}))
    return process


def test_an_orphan_is_stopped_and_its_staging_emptied(bed, monkeypatch):
    (bed.run.path / "staging").mkdir()
    process = orphan(bed, owner_alive=False)
    sent, killpg = [], os.killpg
    monkeypatch.setattr(server.os, "killpg", lambda *what: (sent.append(what), killpg(*what)))
    assert server.stop_orphans(bed.run) == 1
    assert sent == [(process.pid, signal.SIGTERM)] and not server.group_members(process.pid)
    assert not leftovers(bed) and not (bed.run.path / "staging").exists()


def test_a_server_with_a_living_owner_is_left_alone(bed):
    process = orphan(bed, owner_alive=True)
    assert server.stop_orphans(bed.run) == 0
    assert process.poll() is None and leftovers(bed)
    process.kill()


def test_a_recycled_pid_is_left_alone(bed):
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    note = {"pid": process.pid, "start_time": "12345", "mark": "x", "owner": [process.pid, "1"]}
    (bed.run.path / "verifier.pid").write_text(json.dumps({**note, "staging": "/nonexistent/x"}))
    assert server.stop_orphans(bed.run) == 0
    assert process.poll() is None and not leftovers(bed)
    process.kill()


def test_a_killed_owner_takes_the_server_with_it(bed, tmp_path):
    """kill -9 of the owner: the kernel sends the server a TERM (PDEATHSIG)."""
    code = (
        "import subprocess, sys, time; from eagle3.server import _die_with_parent\n"
        "p = subprocess.Popen(['sleep', '60'], start_new_session=True, preexec_fn=_die_with_parent)\n"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    deadline = time.time() + 5
    while server.process_start_time(pid) is not None and time.time() < deadline:
        time.sleep(0.05)
    assert server.process_start_time(pid) is None


def test_fault_15_invalid_flag_fails_in_seconds_not_at_the_deadline(tmp_path, smol):
    """The real vLLM with a backend that does not exist, deadline 600 s."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.server", "run", "serve", "--", "true"],
        env={
            **os.environ,
            "RUN_DIR": str(tmp_path),
            "RECIPE": "smollm2-135m",
            "PROFILE": "cpu-smoke",
            "VERIFIER_PORT": TEST_PORT,
            "VERIFIER_ATTENTION_BACKEND": "NO_SUCH_BACKEND",
            "VERIFIER_READY_TIMEOUT": "600",
        },
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 1
    assert time.time() - began < 100
    assert "died with exit code" in done.stderr and "NO_SUCH_BACKEND" in done.stderr
    assert not list(tmp_path.glob("*.pid"))


def test_02_refuses_a_busy_port_and_bad_usage(tmp_path, smol):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        env = {"RUN_DIR": str(tmp_path), "VERIFIER_PORT": port, "RECIPE": "smollm2-135m"}
        busy = run_stage_cmd("02_launch_verifier.sh", "serve", env=env)
    assert busy.returncode == 1 and f"port {port} is in use" in busy.stderr
    assert run_stage_cmd("02_launch_verifier.sh", "dance").returncode == 2
    assert run_stage_cmd("02_launch_verifier.sh", "--help").returncode == 0
