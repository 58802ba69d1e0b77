"""Other people's drafts (EAGLE's, SGLang's, SpecForge's, vLLM's): read in any format, made into a checkpoint.

Their tensors and keys go through the tables of eagle3/flat.py, as strictly as our own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.checkpoint import mark_complete
from eagle3.contract import ConfigError, StageError, read_json, write_json
from eagle3.flat import (
    DERIVED,
    DERIVED_SUFFIX,
    EMBEDDING,
    FLAGS,
    INERT,
    LLAMA_KEYS,
    MAPS,
    Draft,
    account_keys,
    account_shapes,
    canonical,
    check_width,
    fit_verifier,
    read_llama,
    read_rope,
    read_speculators,
    verifier_rows,
    wanted_tensors,
)
from eagle3.lazy import Lazy, in_memory, one_thread, open_tensors, same_values, write_tensors
from eagle3.record import digest
from eagle3.vocab import FILE as MAP_FILE
from eagle3.vocab import VocabMap, check_map, save_map

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    from eagle3.verifier import Verifier


def read_layer_ids(config: dict, num_layers: int, given: list[int] | None, where: str) -> tuple[int, ...]:
    """Auxiliary ids of a flat config in vLLM's numbering.

    Args:
        num_layers: the verifier's, for the default that all readers share.
        given: the user's word, which wins where the config is silent and must agree where it is not.

    Raises:
        ConfigError: `given` contradicts the config.
    """
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if nested and nested[0] == 1:
        nested = [i + 1 for i in nested]
    if top and nested and list(top) != list(nested):
        raise StageError(
            f"{where}: layer ids {top} at the top level and {nested} (in vLLM's numbering) in eagle_config"
        )
    found = top or nested
    if given and found and list(given) != list(found):
        raise ConfigError(
            f"{where}: its config says layers {list(found)} (vLLM's numbering), you say {given}"
        )
    return tuple(found or given or (2, num_layers // 2, num_layers - 3))


def read_flat(
    config: dict, tensors: dict[str, Lazy], verifier: Verifier, given: list[int] | None, where: str
) -> Draft:
    """A Draft out of a flat config of vLLM, SGLang, EAGLE or SpecForge.

    Args:
        tensors: under canonical names; the head size comes from q_proj where the config has none.
        given: layer ids in vLLM's numbering, or None.

    Raises:
        StageError: unknown key, another architecture, contradiction.
    """
    known = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
    if (arch := (config.get("architectures") or [known[0]])[0]) not in known:
        raise StageError(f"{where}: architecture {arch}; only Llama drafts ({known[0]}) are converted")
    used = {*LLAMA_KEYS, *FLAGS, "use_aux_norm", "draft_vocab_size", "target_hidden_size"}
    used |= {"num_aux_hidden_states", "eagle_config", "eagle_aux_hidden_state_layer_ids"}
    account_keys(config, used, INERT, where)
    nested = config.get("eagle_config") or {}
    allowed = {"use_aux_hidden_state": (True,), "eagle_aux_hidden_state_layer_ids": None,
               "norm_before_fc": (config.get("norm_before_fc", False),)}  # fmt: skip
    account_keys(nested, set(), allowed, f"{where} eagle_config")
    fields = read_llama(config, where)
    if "head_dim" not in fields:
        rows = tensors["layers.0.self_attn.q_proj.weight"].shape[0]
        fields["head_dim"] = rows // fields["num_attention_heads"]
    ids = read_layer_ids(config, verifier.num_layers, given, where)
    check_width(config, fields, where)
    if config.get("num_aux_hidden_states") not in (None, len(ids)):
        raise StageError(
            f"{where}: num_aux_hidden_states {config['num_aux_hidden_states']}, layer ids {list(ids)}"
        )
    on = {f: bool(config.get(f, False)) for f in FLAGS}
    on["fc_norm"] = on["fc_norm"] or bool(config.get("use_aux_norm", False))
    return Draft(
        **fields, **on, draft_vocab_size=config.get("draft_vocab_size") or fields["vocab_size"], layer_ids=ids
    ).check()


def open_foreign(
    folder: Path, verifier: Verifier, given: list[int] | None
) -> tuple[Draft, dict[str, Lazy], str]:
    """A draft in any format known here: geometry, tensors under speculators' names, name of the format.

    The embedding stays only if it differs from the verifier's; lm_head may be missing for a full vocabulary.

    Raises:
        StageError: unknown format; unmapped, unfilled, contradictory by name.
    """
    import torch

    where, config, stored = str(folder), read_json(folder / "config.json"), open_tensors(folder)
    if not config:
        raise StageError(f"{folder} has no config.json")
    form = "sglang" if any("midlayer." in n for n in stored) else "vllm"
    if "speculators_model_type" in config:
        form = "speculators"
    tensors: dict[str, Lazy] = {}
    for name, lazy in stored.items():
        ours = canonical(name, form == "sglang")
        if ours in DERIVED or ours.endswith(DERIVED_SUFFIX):
            continue
        if ours in tensors:
            raise StageError(f"{where}: two tensors are {ours}")
        if lazy.dtype not in (torch.bfloat16, torch.float16, torch.float32) and ours not in MAPS:
            raise StageError(f"{where}: {name} is {lazy.dtype}; only bf16, fp16 and fp32 drafts are read")
        tensors[ours] = lazy
    if "layers.0.self_attn.q_proj.weight" not in tensors:
        raise StageError(
            f"{where}: no layers.0.self_attn.q_proj.weight (or midlayer.*) among {sorted(stored)[:5]}"
        )
    if form == "speculators":
        ids = config.get("eagle_aux_hidden_state_layer_ids") or given
        if given and list(ids) != list(given):
            raise ConfigError(f"{where}: its config says layers {ids}, you say {given}")
        draft = read_speculators({**config, "eagle_aux_hidden_state_layer_ids": ids}, where)
    else:
        draft = read_flat(config, tensors, verifier, given, where)
    draft = fit_verifier(draft, verifier, where)
    if not draft.reduced and "d2t" in tensors and not tensors["d2t"].whole().any():
        tensors.pop("d2t")  # SpecForge writes identity maps beside a full vocabulary
        tensors.pop("t2d", None)
    if draft.reduced and "d2t" in tensors:
        tensors |= _whole_map(tensors["d2t"].whole(), tensors.get("t2d"), draft, where)
    with one_thread():
        if EMBEDDING in tensors and same_values(tensors[EMBEDDING], verifier_rows(verifier, "embed")):
            tensors.pop(EMBEDDING)
    account_shapes(tensors, draft, set() if draft.reduced else {"lm_head.weight"}, where)
    return draft, {n: tensors[n] for n in wanted_tensors(draft, EMBEDDING in tensors) if n in tensors}, form


def _whole_map(d2t: torch.Tensor, t2d: Lazy | None, draft: Draft, where: str) -> dict[str, Lazy]:
    """d2t int64 and t2d bool; t2d is made where the file has none, as vLLM and SGLang never read it."""
    import torch

    if t2d is not None:
        mask = t2d.whole()
        if mask.dtype != torch.bool and bool(((mask == 0) | (mask == 1)).all()):
            mask = mask.bool()
    else:
        ids = d2t.long() + torch.arange(len(d2t))
        mask = torch.zeros(draft.vocab_size, dtype=torch.bool)
        mask[ids[(ids >= 0) & (ids < draft.vocab_size)]] = True
    check_map(d2t, mask, where)
    return {"d2t": in_memory(d2t.long()), "t2d": in_memory(mask)}


def speculators_config(draft: Draft, verifier: Verifier) -> Eagle3SpeculatorConfig:
    """The config that 04 would have given this draft (draft.build_config makes it from a recipe)."""
    from transformers import LlamaConfig

    from eagle3.draft import rope_parameters, speculator_config

    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias",
            "vocab_size", "max_position_embeddings")  # fmt: skip
    window = {"layer_types": list(draft.layer_types), "sliding_window": draft.sliding_window}
    # The verifier's own spelling where both mean the same: 04 compares a starting draft's config key by key.
    theirs = rope_parameters(verifier)
    same_rope = read_rope({"rope_parameters": theirs}, "verifier") == draft.rope
    layer = LlamaConfig(
        **{k: getattr(draft, k) for k in same},
        rope_parameters=theirs if same_rope else dict(draft.rope),
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **(window if draft.sliding_window is not None else {}),
    )
    flags = {flag: getattr(draft, flag) for flag in FLAGS}
    return speculator_config(layer, verifier, draft.draft_vocab_size, draft.layer_ids, flags)


def import_draft(folder: Path, out: Path, verifier: Verifier, given: list[int] | None = None) -> dict:
    """Turn a draft of any known format into a checkpoint folder of 04's form (float32), for train.init_from.

    Args:
        out: must not hold anything yet; appears under its name only when whole.
        given: layer ids in vLLM's numbering, needed where the draft's own config is silent and unusual.

    Returns:
        meta.json's content.

    Raises:
        StageError, ConfigError: by name.
    """
    import torch

    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give a new folder")
    draft, tensors, form = open_foreign(folder, verifier, given)
    maps = {n: tensors.pop(n).whole() for n in MAPS if n in tensors}
    if not maps:
        v = draft.vocab_size
        maps = {"d2t": torch.zeros(v, dtype=torch.int64), "t2d": torch.ones(v, dtype=torch.bool)}
    tmp = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        speculators_config(draft, verifier).save_pretrained(tmp)
        with one_thread():
            write_tensors([(tmp / "model.safetensors", str)], tensors, dict.fromkeys(tensors, torch.float32))
        save_map(tmp / MAP_FILE, VocabMap(**maps))
        origin = {"form": form, "config": digest(read_json(folder / "config.json")), "name": folder.name}
        meta = {"step": 0, "epoch": 0, "imported": origin, "layer_ids": list(draft.layer_ids)}
        meta["own_embedding"] = EMBEDDING in tensors
        write_json(tmp / "meta.json", meta)
        mark_complete(tmp, sorted(p.name for p in tmp.iterdir()))
        if out.exists():
            out.rmdir()
        tmp.rename(out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return meta
