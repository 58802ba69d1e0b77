"""Rates that no run of one's own has measured: from configs/rates.yaml, computed, or probed here."""

from __future__ import annotations

import os
import time
from pathlib import Path

import yaml

from eagle3.contract import ROOT, nearest_existing
from eagle3.learned import Figure, Seen, figure, quietly
from eagle3.sizes import GB, parameters, size

# Multiply-adds of a token in the Kimi-size draft that the GPU training rates were measured with (see `work`).
REFERENCE_WORK = 6 * 154_140_672 + 3 * (6 * 675_282_944 + 4 * 229_376_000) + 2 * 229_376_000
# A draft far smaller than Kimi's is bound by kernel launches, not by its matrices.
SMALL_DRAFT_GAIN = 8
# Below this rate no disk is the limit, so none is probed.
PROBE_FROM = 0.2 * GB


def published_rates(profile: str) -> dict[str, Figure]:
    """configs/rates.yaml for a profile."""
    table = yaml.safe_load((ROOT / "configs" / "rates.yaml").read_text(encoding="utf-8"))
    return {k: figure(v["value"], v["origin"]) for k, v in table.get(profile, {}).items()}


def work(recipe, hidden: int, vocab: int) -> float:
    """Work per training token, up to a constant: forward 2, backward 4 (frozen heads 2) per parameter."""
    p = parameters(recipe, hidden, vocab)
    return 6 * p.fc + recipe.train.ttt_steps * (6 * p.layers + 4 * p.head) + 2 * p.head


def compute_rate(stage, verifier, table: dict) -> Figure:
    """Training tokens a second that the GPUs (or the CPU) allow, if data is always there."""
    recipe, gpus = stage.recipe, max(1, stage.profile.TRAIN_GPUS)
    small = table.get("train_tokens_per_s_one_sample_a_step")
    if small and recipe.train.tokens_per_step <= 1024:
        return small  # one short sample a step: more GPUs have nothing to share
    if per_gpu := table.get("train_tokens_per_s_per_gpu"):
        heavier = work(recipe, verifier.hidden_size, verifier.vocab_size) / REFERENCE_WORK
        factor = min(1 / heavier, SMALL_DRAFT_GAIN)
        why = f" x {gpus} GPUs" if abs(factor - 1) < 0.02 else f" x {gpus} GPUs x {factor:.2g} for this draft"
        return per_gpu.times(gpus * factor, why)
    return table.get("train_tokens_per_s") or figure(1000, "assumed")


def train_rate(stage, verifier, table: dict, runs: list[Seen], per_token: float) -> dict:
    """Training rate = min(compute, disk read / bytes per token), with the binding one named.

    Returns:
        {"rate": Figure, "compute": Figure, "disk": Figure in bytes/s or None, "needs": bytes/s, "bound":
        name}
    """
    compute = compute_rate(stage, verifier, table)
    needs = compute.value * per_token
    disk = disk_rate(stage, table, runs, needs)
    rate, bound = compute, "compute"
    if disk and disk.value < needs:
        rate, bound = disk.times(1 / per_token, f", disk-bound at {size(per_token)} a token"), "disk read"
    return {"rate": rate, "compute": compute, "disk": disk, "needs": needs, "bound": bound}


def disk_rate(stage, table: dict, runs: list[Seen], needs: float) -> Figure | None:
    """Bytes a second the run's disk reads: noted by earlier runs, probed here, or from configs/rates.yaml."""
    from eagle3 import provenance

    noted = [
        s.rates["04"]["read_bytes_per_s"] for s in runs if (s.rates.get("04") or {}).get("read_bytes_per_s")
    ]
    if noted:
        return figure(max(noted), f"runs: fastest of {len(noted)} measured")
    profile = stage.profile
    if needs > PROBE_FROM and not profile.cpu:
        gpus = provenance.gpus()
        here = len(gpus) >= profile.GPUS and all(profile.GPU_ARCH in ("", g["arch"]) for g in gpus)
        if here and (found := quietly(lambda: probe_disk(stage.run.path, profile.TRAIN_THREADS), None)):
            return figure(found, "measured: 1 s of reading on this disk")
    return table.get("disk_read_bytes_per_s")


def probe_disk(folder: Path, threads: int, total: int = 1 << 29, seconds: float = 1.0) -> float:
    """Bytes a second that `threads` readers get from a file of `total` bytes, its page cache dropped."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    here = nearest_existing(folder)
    block = os.urandom(1 << 20) * 8
    with tempfile.NamedTemporaryFile(dir=here, prefix=".probe-", suffix=".tmp") as f:
        for _ in range(total // len(block)):
            f.write(block)
        f.flush()
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()

        def read(first: int) -> int:
            done = 0
            for offset in range(first * len(block), total, threads * len(block)):
                if time.monotonic() - began > seconds:
                    break
                done += len(os.pread(f.fileno(), len(block), offset))
            return done

        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(read, range(threads)))
        return done / (time.monotonic() - began)


def over(units: float, rate: Figure) -> Figure:
    """Seconds for units at a rate; a low rate makes the high end."""
    return Figure(units / rate.value, units / rate.high, units / max(rate.low, 1e-9), rate.origin)
