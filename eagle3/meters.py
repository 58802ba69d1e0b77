"""Figures of training: rates, FLOPs, the metrics file and its curve."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import read_jsonl, write_atomic, write_text

if TYPE_CHECKING:
    import torch

# Dense bf16 matmul peak by a part of the GPU's name, FLOP/s (vendors' data sheets, without sparsity).
PEAK_FLOPS = {
    "B300": 2250e12, "B200": 2250e12, "GB200": 2500e12, "H200": 989e12, "H100": 989e12, "H20": 148e12,
    "A100": 312e12,
    "RTX PRO 6000": 504e12, "L40S": 362e12, "RTX 4090": 165e12, "RTX 5090": 210e12,
}  # fmt: skip


class Window:
    """Tokens, seconds and waiting since the last log line, without validation and saves."""

    def __init__(self, wait: float):
        self.tokens, self.paused, self.began, self.wait = 0, 0.0, time.monotonic(), wait
        self.sums = (0, 0.0, 0.0)

    def add(self, tokens: int) -> None:
        self.tokens += tokens

    def pause(self, seconds: float) -> None:
        self.paused += seconds

    def close(self, wait: float) -> tuple[int, float, float]:
        now = time.monotonic()
        found = self.tokens, now - self.began - self.paused, wait - self.wait
        self.tokens, self.paused, self.began, self.wait = 0, 0.0, now, wait
        self.sums = tuple(a + b for a, b in zip(self.sums, found, strict=True))
        return found


def cut_metrics(path: Path, step: int, validated: int) -> None:
    """Drop lines after a checkpoint (and a torn last one), so that a resumed curve has every step once."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["step"] <= (step if entry["split"] == "train" else validated):
            kept.append(line)
    write_text(path, "".join(line + "\n" for line in kept))


def flops_per_token(model: torch.nn.Module, ttt_steps: int) -> float:
    """Matrix-product FLOPs that training spends on one position (attention scores left out: under 2 % at 2k
    tokens).

    2 per weight forward, 2 more for the gradient of the input, 2 more for that of the weight:
    TTT steps * (6 * decoder layers + (4 frozen or 6 trained) * head) + 4 * fc + 2 * head (targets).
    MFU = this * tokens/s / (peak of the GPU * GPUs); the embedding look-up costs none.
    """
    layers = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    head = model.lm_head.weight.numel()
    per_head = 6 if model.lm_head.weight.requires_grad else 4
    return ttt_steps * (6 * layers + per_head * head) + 4 * model.fc.weight.numel() + 2 * head


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the GPU by its name, None where it is not in the table."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def draw_curve(metrics: Path, out: Path) -> None:
    """Loss, accuracy per step and expected acceptance length over steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = list(read_jsonl(metrics))
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for split, style in (("train", "-"), ("val", "o--")):
        part = [line for line in lines if line["split"] == split]
        steps = [line["step"] for line in part]
        axes[0].plot(steps, [line["loss"] for line in part], style, label=split, ms=4)
        axes[2].plot(steps, [line["expected_acceptance_length"] for line in part], style, label=split, ms=4)
        for k in range(max((len(line["acc"]) for line in part), default=0)):
            values = [line["acc"][k] for line in part]
            axes[1].plot(
                steps, values, style, color=f"C{k}", ms=4, label=f"step {k}" if split == "train" else None
            )
    titles = ("loss", "conditional accuracy (whole vocabulary)", "expected acceptance length")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    write_atomic(out, lambda tmp: figure.savefig(tmp, format="png", dpi=110))
    plt.close(figure)
