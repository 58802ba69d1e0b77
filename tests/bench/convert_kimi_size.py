"""Seconds and peak memory of converting a draft of Kimi-K2.5's size (random weights).

    python tests/bench/convert_kimi_size.py [--vocab 32000] [--with-embeddings] [--keep DIR] [--gate]

Hidden 7168, 64 heads x 128, intermediate 12288, verifier vocabulary 163,840: the checkpoint is 4.2 GB of
float32 at a draft vocabulary of 32,000 with a trained head. Measured: the checkpoint to vLLM's and SGLang's
form with every value read back and compared, and the import of the SGLang form as a checkpoint, each in a
process of its own, so that the peak is its own. The reference is what a plain conversion does: load_file,
cast, rename, save_file for the same two folders, without reading anything back. `--gate` also runs the parity
gate (on a GPU, or with 64 GB of memory).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SIZES = {
    "hidden_size": 7168,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "layer_ids": (2, 30, 58),
}


def build(folder: Path, vocab: int) -> None:
    """A verifier folder that holds only what conversion reads (embedding, norm, head), and a checkpoint."""
    import kimi_tiny
    import torch
    import toy_drafts
    from safetensors.torch import save_file

    hidden, rows = SIZES["hidden_size"], SIZES["vocab_size"]
    verifier = folder / "verifier"
    verifier.mkdir(parents=True)
    config = kimi_tiny.config(True, (64, 128, 128))
    config["text_config"] |= {
        "hidden_size": hidden, "vocab_size": rows, "num_hidden_layers": 61, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8, "q_lora_rank": 1536,
    }  # fmt: skip
    (verifier / "config.json").write_text(json.dumps(config))
    shutil.copy(kimi_tiny.FILES / "configuration_kimi_tiny.py", verifier)
    shared = torch.randn(rows, hidden, dtype=torch.bfloat16)
    prefix = "language_model.model."
    save_file(
        {
            f"{prefix}embed_tokens.weight": shared,
            f"{prefix}norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{prefix}layers.60.input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            "language_model.lm_head.weight": shared.flip(0).contiguous(),
        },
        verifier / "model.safetensors",
    )
    draft = toy_drafts.bare_draft(**SIZES, draft_vocab_size=vocab, rope=toy_drafts.YARN)
    toy_drafts.toy_checkpoint(folder / "checkpoint", open_verifier(folder), draft, train_head=True)


def open_verifier(folder: Path):
    import toy_drafts

    return toy_drafts.open_toy(folder / "verifier", SIZES["layer_ids"])


def export(folder: Path, with_embeddings: bool) -> None:
    from eagle3 import flat

    verifier = open_verifier(folder)
    draft, tensors = flat.open_checkpoint(folder / "checkpoint", verifier)
    tensors = flat.export_tensors(draft, tensors, verifier, with_embeddings)
    flat.export(draft, tensors, {form: folder / form for form in flat.FORMS})


def take_in(folder: Path) -> None:
    from eagle3.foreign import import_draft

    import_draft(folder / "sglang", folder / "imported", open_verifier(folder))


def run_gate(folder: Path) -> dict:
    from eagle3.parity import gate, summary

    report = gate(folder / "vllm", folder / "checkpoint", open_verifier(folder))
    print("\n".join(summary(report)), file=sys.stderr)
    return report


def plain(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "checkpoint" / "model.safetensors")
    tensors = {n: t.to(torch.bfloat16) for n, t in tensors.items()}
    renamed = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    for name, state in (("plain-vllm", tensors), ("plain-sglang", renamed)):
        (folder / name).mkdir()
        save_file(state, folder / name / "model.safetensors")


def measure(what: str, folder: Path, with_embeddings: bool, vocab: int = 0) -> dict:
    """Run one part in a process of its own; seconds exclude the import of torch."""
    command = [sys.executable, __file__, "--part", what, "--keep", str(folder), "--vocab", str(vocab)]
    done = subprocess.run(command + ["--with-embeddings"] * with_embeddings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--with-embeddings", action="store_true")
    parser.add_argument("--keep", metavar="DIR", help="work in this folder and leave it")
    parser.add_argument("--gate", action="store_true", help="run the parity gate on the export")
    parser.add_argument(
        "--part", choices=["build", "export", "import", "plain", "gate"], help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    folder = Path(args.keep) if args.keep else Path(tempfile.mkdtemp(prefix="convert-"))
    if args.part:
        import torch  # noqa: F401  (not part of the figure)

        started = time.time()
        parts = {
            "build": lambda: build(folder, args.vocab),
            "export": lambda: export(folder, args.with_embeddings),
            "import": lambda: take_in(folder),
            "plain": lambda: plain(folder),
            "gate": lambda: run_gate(folder),
        }
        report = parts[args.part]()
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds, cpu, peak = time.time() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
        figures = {
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "peak_gb": round(peak / 1e9, 2),
        }
        print(json.dumps({**figures, **({"report": report} if report else {})}))
        return 0
    try:
        if not (folder / "checkpoint").is_dir():
            measure("build", folder, False, args.vocab)  # not in this process: a child inherits its peak
        for old in ("vllm", "sglang", "imported", "plain-vllm", "plain-sglang"):
            shutil.rmtree(folder / old, ignore_errors=True)
        found = {p: measure(p, folder, args.with_embeddings) for p in ("export", "plain")}
        shutil.rmtree(folder / "plain-vllm"), shutil.rmtree(folder / "plain-sglang")
        found["import"] = measure("import", folder, args.with_embeddings)
        sizes = {
            n: (folder / n / "model.safetensors").stat().st_size for n in ("checkpoint", "vllm", "sglang")
        }
        result = {
            "bench": "convert_kimi_size",
            "draft_vocabulary": args.vocab,
            "with_embeddings": args.with_embeddings,
            "gb": {n: round(s / 1e9, 2) for n, s in sizes.items()},
            "export": found["export"],
            "import": found["import"],
            "reference": found["plain"],
            "ratio": round(found["export"]["seconds"] / found["plain"]["seconds"], 2),
        }
        if args.gate:
            result["gate"] = measure("gate", folder, args.with_embeddings)
        print(json.dumps(result))
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
