"""A run directory whose states come from the toy verifier: what 03 would leave behind, made in a second."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

RECIPE = {
    "verifier": {"layers": [2, 4, 5], "max_model_len": 128},
    "draft": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": 48,
        "min_coverage": 0.2,
        "norm_output": True,
    },
    "data": {"sources": [{"path": "unused.jsonl"}], "max_prompt_tokens": 40},
    "answers": {"max_tokens": 40},
    "train": {"tokens_per_step": 64, "epochs": 3, "lr": 3e-3, "log_every": 1, "warmup_ratio": 0.1},
    "evaluate": {"max_tokens": 40},
}


def token_rows(
    count: int, prompt: tuple[int, int] = (4, 12), answer: tuple[int, int] = (6, 24), seed: int = 0
):
    """`count` made-up rows [(token ids, prompt length)]; answers count up in steps of 1 to 3."""
    import random

    rng, rows = random.Random(seed), []
    for _ in range(count):
        p, a = rng.randint(*prompt), rng.randint(*answer)
        ids = [rng.randrange(6, 64) for _ in range(p)]
        step = rng.randint(1, 3)
        for _ in range(a):
            ids.append(6 + (ids[-1] - 6 + step) % 58)
        rows.append((ids, p))
    return rows


def states_of(model, ids: list[int], layers: list[int]):
    """bf16 [len(ids) - 1, len(layers) + 1, hidden]: state after each layer, the final one un-normed."""
    import torch

    final = []
    hook = model.model.norm.register_forward_pre_hook(lambda _m, args: final.append(args[0]))
    with torch.no_grad():
        out = model(torch.tensor([ids[:-1]]), output_hidden_states=True)
    hook.remove()
    return torch.stack([*(out.hidden_states[k][0] for k in layers), final[0][0]], dim=1).to(torch.bfloat16)


def write_store(
    folder: Path,
    verifier: Path,
    rows: dict,
    dtype="bf16",
    layers=(2, 4, 5),
    shard_bytes=200_000,
    break_row=None,
    first=None,
):
    """A store of the toy verifier's states.

    Args:
        rows: split -> list of (ids, prompt length).
        first: split -> number of its first row, else 0.
        break_row: called with (id, states) before a row is stored; returns what to store.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from eagle3.store_writer import StoreWriter

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    writer = StoreWriter(folder, "1of1", [*layers, 8], 32, dtype, shard_bytes)
    for split, items in rows.items():
        for number, (ids, prompt) in enumerate(items, (first or {}).get(split, 0)):
            name = f"{split}-{number:03d}"
            states = states_of(model, ids, list(layers))
            if break_row:
                states = break_row(name, states)
            writer.add(
                states,
                ids,
                prompt,
                id=name,
                split=split,
                domain="ab"[number % 2],
                source="toy",
                input=f"{number:032x}",
            )
    writer.close()


def make_run(
    tmp: Path, verifier: Path, rows: dict | None = None, dtype="bf16", break_row=None, **changes
) -> tuple:
    """(run directory, recipe file) with states; `changes` are recipe keys like train__epochs=2."""
    recipe = json.loads(json.dumps(RECIPE))
    recipe["verifier"]["model"] = str(verifier)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        recipe[section][name] = value
    tmp.mkdir(parents=True, exist_ok=True)
    file = tmp / "toy.yaml"
    file.write_text(yaml.safe_dump(recipe))
    if rows is None:
        rows = {"train": token_rows(30), "val": token_rows(6, seed=1), "heldout": token_rows(6, seed=2)}
    write_store(tmp / "run" / "03_hidden", verifier, rows, dtype, break_row=break_row)
    return tmp / "run", file
