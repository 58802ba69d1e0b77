"""Small random drafts in 04's checkpoint form, for the tests and benchmarks of conversion."""

from __future__ import annotations

import json
from pathlib import Path

from eagle3.flat import FLAGS

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def toy_draft(verifier, **changes):
    """A Draft for a verifier: one layer, 2 heads of 32, 1 KV head, 16 of the verifier's tokens.

    32 is the smallest head that vLLM's CPU attention has.
    """
    sizes = {
        "hidden_size": verifier.hidden_size,
        "vocab_size": verifier.vocab_size,
        "max_position_embeddings": verifier.value("max_position_embeddings"),
    }
    return bare_draft(**{**sizes, **changes})


def bare_draft(**changes):
    """A Draft for no verifier in particular."""
    from eagle3.flat import Draft

    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 64,
        "draft_vocab_size": 16,
        "max_position_embeddings": 8192,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ("full_attention",),
        "sliding_window": None,
        **dict.fromkeys(FLAGS, False),
        "layer_ids": (2, 4, 5),
        **changes,
    }
    return Draft(**values).check()


def toy_checkpoint(folder: Path, verifier, draft, seed: int = 0, train_head: bool = False) -> Path:
    """Write a random draft as 04 writes a checkpoint; gains are random too, so that none is neutral."""
    import torch
    from safetensors.torch import save_file

    from eagle3.contract import write_json
    from eagle3.flat import MAPS, wanted_tensors
    from eagle3.foreign import speculators_config
    from eagle3.vocab import FILE, VocabMap, save_map

    folder.mkdir(parents=True)
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in wanted_tensors(draft).items():
        if name in MAPS or (name == "lm_head.weight" and not train_head):
            continue
        if len(shape) == 1:
            tensors[name] = 0.5 + torch.rand(shape, generator=rng)
        else:
            tensors[name] = torch.randn(shape, generator=rng) / shape[1] ** 0.5
    speculators_config(draft, verifier).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    v, d = draft.vocab_size, draft.draft_vocab_size
    kept = torch.randperm(v, generator=rng)[:d].sort().values
    mask = torch.zeros(v, dtype=torch.bool)
    mask[kept] = True
    save_map(folder / FILE, VocabMap(kept - torch.arange(d), mask))
    write_json(folder / "meta.json", {"step": 7, "epoch": 1, "seed": seed})
    sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != FILE}
    (folder / "COMPLETE").write_text(json.dumps(sizes))
    return folder


def open_toy(path: Path, layers=(2, 4, 5)):
    """The Verifier of a folder."""
    from eagle3.verifier import Verifier

    config = json.loads((path / "config.json").read_text())
    return Verifier(path, config, list(layers), trust_remote_code=True)


def exported(tmp: Path, verifier, draft, with_embeddings: bool = False, **checkpoint):
    """A toy checkpoint and its export: (checkpoint, {"vllm": folder, "sglang": folder}, draft, tensors)."""
    from eagle3 import flat

    verifier.layers = list(draft.layer_ids)
    source = toy_checkpoint(tmp / "checkpoint", verifier, draft, **checkpoint)
    read, tensors = flat.open_checkpoint(source, verifier)
    tensors = flat.export_tensors(read, tensors, verifier, with_embeddings)
    forms = ("vllm",) if flat.sglang_refuses(read) else flat.FORMS
    folders = {form: tmp / form for form in forms}
    flat.export(read, tensors, folders)
    return source, folders, read, tensors
