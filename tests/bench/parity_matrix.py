"""The parity gate over every combination of what a draft can be.

    python tests/bench/parity_matrix.py [--only TEXT] [--flip]

80 cells: {Llama verifier, Kimi-shaped verifier} x {plain, norm_before_residual, norm_before_fc, fc_norm,
norm_output} x {full vocabulary, reduced} x {full attention, window 8} x {default rope, yarn 64 with mscale
pair}. In each, a random draft is exported and vLLM's draft class must agree with the trained one in float32
and bf16. `--flip` also inverts each norm flag, the window and the rope in the exported config, one at a
time: the gate must refuse each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

AXES = {
    "verifier": ("llama", "kimi"),
    "flag": ("plain", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    "vocabulary": ("full", "reduced"),
    "attention": ("full", "window"),
    "rope": ("default", "yarn"),
}


def draft_of(cell: dict, verifier):
    """The toy draft of one cell."""
    import toy_drafts

    changes = {
        "draft_vocab_size": verifier.vocab_size if cell["vocabulary"] == "full" else verifier.vocab_size // 4
    }
    if cell["flag"] != "plain":
        changes[cell["flag"]] = True
    if cell["attention"] == "window":
        changes |= {"sliding_window": 8, "layer_types": ("sliding_attention",)}
    if cell["rope"] == "yarn":
        changes["rope"] = toy_drafts.YARN
    return toy_drafts.toy_draft(verifier, **changes)


def flips(draft) -> dict[str, dict]:
    """Single losses in an exported config: name -> changed keys (None: delete)."""
    import toy_drafts

    found = {flag: {flag: not getattr(draft, flag)} for flag in toy_drafts.FLAGS}
    window = draft.sliding_window is not None
    found["window"] = {
        "layer_types": ["full_attention" if window else "sliding_attention"],
        "sliding_window": 8,
    }
    other = {"rope_type": "default", "rope_theta": 10000.0}
    other = other if draft.rope["rope_type"] == "yarn" else toy_drafts.YARN
    found["rope"] = {"rope_parameters": other, "rope_theta": None, "rope_scaling": None}
    return found


def refused(folder: Path, checkpoint: Path, verifier, changes: dict) -> bool:
    """Whether the gate refuses a folder with these keys changed."""
    from eagle3.contract import StageError
    from eagle3.parity import gate

    broken = shutil.copytree(folder, folder.with_name("broken"))
    config = json.loads((broken / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    (broken / "config.json").write_text(json.dumps(config))
    try:
        gate(broken, checkpoint, verifier, dtypes=("float32",))
        return False
    except StageError:
        return True
    finally:
        shutil.rmtree(broken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--flip", action="store_true", help="also break each cell's config, key by key")
    args = parser.parse_args()
    import conftest
    import toy_drafts

    from eagle3.config import load_recipe
    from eagle3.contract import StageError
    from eagle3.parity import gate
    from eagle3.verifier import open_verifier

    worst = {"error": 0.0, "error_far": 0.0, "bf16_over_own": 0.0, "own_bf16": 0.0}
    cells, agree, broken, caught, failed, started = 0, 0, 0, 0, [], time.time()
    with tempfile.TemporaryDirectory() as tmp, contextlib.redirect_stdout(sys.stderr):
        base = Path(tmp)
        make = {
            # Heads of 32: vLLM's Triton attention sizes its buffers by the verifier's heads, not the draft's.
            "llama": lambda: conftest.make_toy_verifier(
                base / "llama", max_position_embeddings=262144, head_dim=32
            ),
            "kimi": lambda: open_verifier(load_recipe("kimi-tiny")).path,
        }
        paths = {name: build() for name, build in make.items() if not args.only or name in args.only}
        for values in itertools.product(*AXES.values()):
            cell, name = dict(zip(AXES, values, strict=True)), " ".join(values)
            if args.only not in name:
                continue
            cells += 1
            verifier, where = toy_drafts.open_toy(paths[cell["verifier"]]), base / str(cells)
            draft = draft_of(cell, verifier)
            checkpoint, folders, _, _ = toy_drafts.exported(where, verifier, draft, seed=cells)
            try:
                report = gate(folders["vllm"], checkpoint, verifier)
            except StageError as err:
                failed.append(f"{name}: {err}")
                print(f"FAILED {name}: {err}", flush=True)
                continue
            agree += 1
            fp32, bf16, own = report["float32"], report["bfloat16"], report["reference_in_bf16"]["error"]
            ratio = max(bf16["error"], bf16["error_far"]) / own
            for key, value in zip(worst, (fp32["error"], fp32["error_far"], ratio, own), strict=True):
                worst[key] = max(worst[key], value)
            line = f"{name}: float32 {fp32['error']:.1e}, far {fp32['error_far']:.1e}"
            line += f", bf16 {ratio:.2f} x {own:.1e}"
            if args.flip:
                found = {
                    k: refused(folders["vllm"], checkpoint, verifier, v) for k, v in flips(draft).items()
                }
                broken, caught = broken + len(found), caught + sum(found.values())
                missed = [k for k, v in found.items() if not v]
                failed += [f"{name}: not refused: {k}" for k in missed]
                line += f"; flipped keys refused {sum(found.values())} of {len(found)} {missed or ''}"
            print(line, flush=True)
            shutil.rmtree(where)
    print(
        json.dumps(
            {
                "bench": "parity_matrix",
                "cells": cells,
                "agree": agree,
                "flipped": broken,
                "refused": caught,
                "worst": {k: float(f"{v:.3g}") for k, v in worst.items()},
                "seconds_per_cell": round((time.time() - started) / max(1, cells), 2),
                "failed": failed,
            }
        )
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
