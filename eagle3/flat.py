"""What an EAGLE-3 draft is and how each format spells it: one table of tensors (TENSORS), one of keys (KEYS).

A format is read into a `Draft` (geometry, flags, layer ids) plus lazily read tensors under speculators'
names, and written from them. Whatever a source holds must be in the tables, whatever a target needs must be
filled from them, and nothing may contradict; anything else is a StageError that names it. Formats:

    speculators  nested config, `layers.0.*`                                 04 writes it; 0.3 to 0.9 are read
    vllm         flat config, `layers.0.*`, layer ids at the top level       written and read
    sglang       flat config, `midlayer.*`, layer ids under `eagle_config`;  written and read
                 EAGLE's and SpecForge's form too

Drafts that others trained are read in eagle3/foreign.py.

Layer ids. vLLM's number k is the residual stream after k decoder layers. SGLang, EAGLE and SpecForge count
layers from 0 and mean the output of that layer, so their 1 is vLLM's 2. SGLang adds 1 only where the first
id is 1 (since sgl-project/sglang#25454; before that always): a list that starts with 1 has this meaning,
any other is vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.contract import ConfigError, StageError, read_json, write_json
from eagle3.lazy import (
    CHUNK_BYTES,
    Lazy,
    in_memory,
    one_thread,
    open_file,
    open_tensors,
    write_tensors,
)
from eagle3.vocab import check_map, find_map

if TYPE_CHECKING:
    import torch

    from eagle3.verifier import Verifier

VERSION = 2  # of the tables: a change makes 05 convert anew
FORMS = ("vllm", "sglang")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # where the draft has its norms


# --- the draft, free of any format --------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """Everything that a draft is apart from its weights.

    Attributes:
        rope: `rope_type`, `rope_theta` and the scaling keys, as transformers 5 spells them.
        layer_types: "full_attention" | "sliding_attention" per layer.
        layer_ids: auxiliary layers in vLLM's numbering.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope: dict
    layer_types: tuple[str, ...]
    sliding_window: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    layer_ids: tuple[int, ...]
    bos_token_id: Any = None
    eos_token_id: Any = None
    pad_token_id: Any = None

    @property
    def reduced(self) -> bool:
        """Whether the draft vocabulary is a subset, which needs d2t and t2d."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def num_aux(self) -> int:
        return len(self.layer_ids)

    def check(self) -> Draft:
        """Refuse what no reader would serve as it was trained.

        Raises:
            StageError: every contradiction, by key and value.
        """
        bad = []
        if self.hidden_act != "silu":
            bad.append(f"hidden_act {self.hidden_act!r}: vLLM's Llama draft has silu only")
        if self.norm_before_fc and self.fc_norm:
            bad.append("norm_before_fc and fc_norm are both true: they exclude each other")
        if not self.layer_ids or sorted(set(self.layer_ids)) != list(self.layer_ids) or self.layer_ids[0] < 1:
            bad.append(
                f"layer ids {list(self.layer_ids)} are not ascending ids from 1, as vLLM captures them"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            bad.append(f"layer_types {list(self.layer_types)} for num_hidden_layers {self.num_hidden_layers}")
        if unknown := set(self.layer_types) - {"full_attention", "sliding_attention"}:
            bad.append(f"layer_types has {sorted(unknown)}")
        if ("sliding_attention" in self.layer_types) != (self.sliding_window is not None):
            bad.append(f"layer_types {list(self.layer_types)} and sliding_window {self.sliding_window}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            bad.append(f"draft_vocab_size {self.draft_vocab_size} and vocab_size {self.vocab_size}")
        if bad:
            raise StageError("draft config contradicts itself: " + "; ".join(bad))
        return self


# --- the table of config keys -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One key of a flat config.

    Attributes:
        value: Draft -> what is written. `reader` says who uses it and what a missing key would mean.
        forms: formats that carry it.
    """

    name: str
    value: Callable[[Draft], Any]
    reader: str
    forms: tuple[str, ...] = FORMS


def _field(name: str, reader: str, forms: tuple[str, ...] = FORMS) -> Key:
    return Key(name, lambda d: getattr(d, name), reader, forms)


def attn_factor(rope: dict) -> float | None:
    """yarn's magnitude for readers without mscale pair and attention_factor (vLLM 0.26, SGLang).

    They multiply 0.1 ln(factor) + 1 by `attn_factor`; readers that know the pair don't know this key. With
    the pair 1 / 1 at factor 64 the magnitude is 1.0; without this they would take 1.42.
    """
    if rope["rope_type"] != "yarn":
        return None

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0

    wanted = rope.get("attention_factor")
    if wanted is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        wanted = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return None if wanted is None else wanted / magnitude(1.0)


def new_rope(draft: Draft) -> dict:
    """`rope_parameters` as transformers 5 spells it, with yarn's magnitude for all readers."""
    factor = attn_factor(draft.rope)
    return {**draft.rope, **({} if factor is None else {"attn_factor": factor})}


def old_rope(draft: Draft) -> dict | None:
    """`rope_scaling` as transformers 4 spells it: no base in it, the kind under both of its names."""
    if draft.rope["rope_type"] == "default":
        return None
    scaling = {k: v for k, v in new_rope(draft).items() if k != "rope_theta"}
    return {**scaling, "type": draft.rope["rope_type"]}


def sglang_ids(draft: Draft) -> list[int]:
    """Auxiliary ids as SGLang's reader means them: output of layer i where the first is 1, else vLLM's."""
    return [i - 1 for i in draft.layer_ids] if draft.layer_ids[0] == 2 else list(draft.layer_ids)


KEYS = (
    Key("architectures", lambda d: ["LlamaForCausalLMEagle3"], "class of the draft in vLLM and SGLang"),
    Key("model_type", lambda d: "llama", "transformers: config class, and with it every default"),
    _field("hidden_size", "all"),
    _field("intermediate_size", "all"),
    _field("num_hidden_layers", "all; missing = 32"),
    _field("num_attention_heads", "all"),
    _field("num_key_value_heads", "all; missing = num_attention_heads"),
    _field("head_dim", "all; missing = hidden_size / heads (Kimi-K2.5: 112 instead of 128)"),
    _field("rms_norm_eps", "all; missing = 1e-6"),
    _field("hidden_act", "all"),
    _field("attention_bias", "vLLM: bias of q, k, v, o"),
    _field("mlp_bias", "vLLM, transformers"),
    _field("vocab_size", "all: rows of the embedding, width of the logits handed to the verifier"),
    _field("draft_vocab_size", "all: rows of lm_head; missing = vocab_size"),
    _field(
        "max_position_embeddings",
        "vLLM sizes the plain rope table by it; smaller than the verifier's = crash",
    ),
    Key(
        "rope_parameters",
        new_rope,
        "transformers 5, vLLM: base and scaling; missing = base 10000",
    ),
    Key(
        "rope_theta",
        lambda d: d.rope["rope_theta"],
        "transformers 4 and readers of its configs; missing = 10000",
    ),
    Key("rope_scaling", old_rope, "transformers 4 and readers of its configs; null = none"),
    Key("layer_types", lambda d: list(d.layer_types), "vLLM: which layers have the window; missing = none"),
    _field(
        "sliding_window",
        "vLLM: window of layers named in layer_types (SGLang: --speculative-draft-window-size)",
    ),
    Key("tie_word_embeddings", lambda d: False, "SGLang: true would use the embedding as head"),
    _field("norm_before_residual", "vLLM; missing = false here, true in its speculators path", ("vllm",)),
    _field(
        "norm_before_fc", "vLLM; SGLang since sglang#32334; missing = input_norm.weight is dropped unsaid"
    ),
    _field("fc_norm", "vLLM; SGLang since sglang#24663; missing = fc_norm.*.weight unused or refused"),
    _field("norm_output", "vLLM; SGLang since sglang#24663; missing = false, and no weight betrays it"),
    Key("target_hidden_size", lambda d: d.hidden_size, "vLLM, SGLang: width of one auxiliary state"),
    Key("num_aux_hidden_states", lambda d: d.num_aux, "vLLM's Llama draft, SGLang: width of fc; missing = 3"),
    Key(
        "eagle_aux_hidden_state_layer_ids",
        lambda d: list(d.layer_ids),
        "vLLM: layers it captures; missing = [2, n/2, n-3]",
        ("vllm",),
    ),
    Key(
        "eagle_config",
        lambda d: {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": sglang_ids(d)},
        "SGLang: layers it captures, in its numbering",
        ("sglang",),
    ),
    Key("dtype", lambda d: "bfloat16", "transformers 5: dtype of the tensors"),
    Key("torch_dtype", lambda d: "bfloat16", "transformers 4: the same"),
    _field("bos_token_id", "nobody for drafting; the verifier's"),
    _field("eos_token_id", "nobody for drafting; the verifier's"),
    _field("pad_token_id", "nobody for drafting; the verifier's"),
)

# Keys of other people's configs that change nothing for a draft, with the values that do so (None: any).
INERT: dict[str, tuple | None] = {
    "_name_or_path": None, "transformers_version": None, "use_cache": None, "initializer_range": None,
    "attention_dropout": None, "chunk_size_feed_forward": None, "id2label": None, "label2id": None,
    "is_encoder_decoder": (False,), "output_attentions": None, "output_hidden_states": None,
    "problem_type": None, "return_dict": None, "max_window_layers": None, "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
    "bias": (False, None), "qkv_bias": (False, None), "logit_scale": (1, None), "is_causal": (True,),
    "quantization_config": (None,), "tie_word_embeddings": (False, None), "dtype": None, "torch_dtype": None,
    "is_decoder": None, "auto_map": None,
}  # fmt: skip
SPECULATORS_OUTER: dict[str, tuple | None] = {  # beside the keys that read_speculators uses
    "speculators_model_type": ("eagle3",), "speculators_version": None, "speculators_config": None,
    "architectures": None, "embed_requires_grad": None, "has_no_defaults_at_init": None, **INERT,
}  # fmt: skip


def flat_config(draft: Draft, form: str) -> dict:
    """The config.json of one format."""
    return {key.name: key.value(draft) for key in KEYS if form in key.forms}


def sglang_refuses(draft: Draft) -> str | None:
    """Why SGLang's LlamaForCausalLMEagle3 can't serve this draft as trained, or None."""
    if draft.norm_before_residual:
        return "SGLang's Llama draft has no norm_before_residual"
    if draft.attention_bias:
        return "SGLang's Llama draft has no attention bias"
    if draft.layer_ids[0] == 1:
        return f"SGLang would add 1 to layer ids {list(draft.layer_ids)}, which start with 1"
    return None


def sglang_needs(draft: Draft) -> list[str]:
    """What a server must bring to serve the SGLang form as trained: versions, an option for the window."""
    found = []
    if draft.fc_norm or draft.norm_output:
        found.append("fc_norm and norm_output: SGLang with pull request 24663")
    if draft.norm_before_fc:
        found.append("norm_before_fc: SGLang with pull request 32334")
    if draft.layer_ids[0] != 2:
        found.append(f"layer ids {list(draft.layer_ids)} as they are: SGLang with pull request 25454")
    if draft.num_aux != 3:
        found.append(f"{draft.num_aux} auxiliary states: SGLang with pull request 24663")
    if draft.sliding_window is not None:
        found.append(f"the window is an option there: --speculative-draft-window-size {draft.sliding_window}")
    return found


# --- the table of tensors -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One tensor, or one per layer {i} or per auxiliary state {a}, under speculators' name.

    Attributes:
        shape: (draft, i) -> shape.
        when: (draft, i) -> whether the draft has it.
    """

    name: str
    shape: Callable[[Draft, int], tuple[int, ...]]
    when: Callable[[Draft, int], bool] = lambda d, i: True


def _q(d: Draft) -> int:
    return d.num_attention_heads * d.head_dim


def _kv(d: Draft) -> int:
    return d.num_key_value_heads * d.head_dim


def _in(d: Draft, i: int) -> int:
    """Width that layer i attends from: embedding and state side by side in the first layer."""
    return d.hidden_size * (2 if i == 0 else 1)


def _attention_bias(d: Draft, i: int) -> bool:
    return d.attention_bias


def _mlp_bias(d: Draft, i: int) -> bool:
    return d.mlp_bias


TENSORS = (
    Row("fc.weight", lambda d, i: (d.hidden_size, d.num_aux * d.hidden_size)),
    Row("input_norm.weight", lambda d, i: (d.num_aux * d.hidden_size,), lambda d, i: d.norm_before_fc),
    Row("fc_norm.{a}.weight", lambda d, i: (d.hidden_size,), lambda d, i: d.fc_norm),
    Row("layers.{i}.input_layernorm.weight", lambda d, i: (d.hidden_size,)),
    Row("layers.{i}.hidden_norm.weight", lambda d, i: (d.hidden_size,), lambda d, i: i == 0),
    Row("layers.{i}.post_attention_layernorm.weight", lambda d, i: (d.hidden_size,)),
    Row("layers.{i}.self_attn.q_proj.weight", lambda d, i: (_q(d), _in(d, i))),
    Row("layers.{i}.self_attn.k_proj.weight", lambda d, i: (_kv(d), _in(d, i))),
    Row("layers.{i}.self_attn.v_proj.weight", lambda d, i: (_kv(d), _in(d, i))),
    Row("layers.{i}.self_attn.o_proj.weight", lambda d, i: (d.hidden_size, _q(d))),
    Row("layers.{i}.self_attn.q_proj.bias", lambda d, i: (_q(d),), _attention_bias),
    Row("layers.{i}.self_attn.k_proj.bias", lambda d, i: (_kv(d),), _attention_bias),
    Row("layers.{i}.self_attn.v_proj.bias", lambda d, i: (_kv(d),), _attention_bias),
    Row("layers.{i}.self_attn.o_proj.bias", lambda d, i: (d.hidden_size,), _attention_bias),
    Row("layers.{i}.mlp.gate_proj.weight", lambda d, i: (d.intermediate_size, d.hidden_size)),
    Row("layers.{i}.mlp.up_proj.weight", lambda d, i: (d.intermediate_size, d.hidden_size)),
    Row("layers.{i}.mlp.down_proj.weight", lambda d, i: (d.hidden_size, d.intermediate_size)),
    Row("layers.{i}.mlp.gate_proj.bias", lambda d, i: (d.intermediate_size,), _mlp_bias),
    Row("layers.{i}.mlp.up_proj.bias", lambda d, i: (d.intermediate_size,), _mlp_bias),
    Row("layers.{i}.mlp.down_proj.bias", lambda d, i: (d.hidden_size,), _mlp_bias),
    Row("norm.weight", lambda d, i: (d.hidden_size,)),
    Row("lm_head.weight", lambda d, i: (d.draft_vocab_size, d.hidden_size)),
    Row("d2t", lambda d, i: (d.draft_vocab_size,), lambda d, i: d.reduced),
    Row("t2d", lambda d, i: (d.vocab_size,), lambda d, i: d.reduced),
)
EMBEDDING = "embed_tokens.weight"  # [vocab_size, hidden_size]; optional: the readers share the verifier's
MAPS = ("d2t", "t2d")

# Tensors of other people's checkpoints that are copies of the verifier's or are computed from the config.
DERIVED = ("verifier_lm_head.weight", "verifier_norm.weight")
DERIVED_SUFFIX = "rotary_emb.inv_freq"
ALIASES = {"midlayer.": "layers.0.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.",
           "aux_norm_high.": "fc_norm.2."}  # fmt: skip


def wanted_tensors(draft: Draft, with_embeddings: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the draft consists of, in file order."""
    found = {}
    for row in TENSORS:
        many = draft.num_hidden_layers if "{i}" in row.name else draft.num_aux if "{a}" in row.name else 1
        for i in range(many):
            if row.when(draft, i):
                found[row.name.format(i=i, a=i)] = row.shape(draft, i)
    if with_embeddings:
        found[EMBEDDING] = (draft.vocab_size, draft.hidden_size)
    return found


def name_in(form: str, name: str) -> str:
    """A tensor's name in a format. SGLang's later layers call their only input norm hidden_norm."""
    if form == "sglang" and name.startswith("layers."):
        if name.startswith("layers.0."):
            return "midlayer." + name.removeprefix("layers.0.")
        return name.replace(".input_layernorm.", ".hidden_norm.")
    return name


def canonical(name: str, sglang: bool) -> str:
    """A tensor's name in speculators' spelling. `sglang`: the file uses SGLang's names for later layers."""
    name = name.removeprefix("model.")
    for alias, ours in ALIASES.items():
        name = name.replace(alias, ours) if name.startswith(alias) else name
    if sglang and name.startswith("layers.") and not name.startswith("layers.0."):
        name = name.replace(".hidden_norm.", ".input_layernorm.")
    return name


# --- tensors, lazily ----------------------------------------------------------------------------------------


def verifier_rows(verifier: Verifier, which: str, ids: torch.Tensor | None = None) -> Lazy:
    """The verifier's `embed` or `head`, all rows or the given ones, without loading the rest.

    Args:
        ids: int64 [D] of rows, ascending; None = all.
    """
    import torch

    name = verifier.tensor_names[which]
    table = open_file(verifier.path / verifier.weight_map[name], only=name)[name]
    if ids is None:
        return table

    def rows(a: int, b: int) -> torch.Tensor:
        wanted = ids[a:b]
        picked = torch.empty((len(wanted), *table.shape[1:]), dtype=table.dtype)
        width = max(1, CHUNK_BYTES // (table.shape[1] * table.dtype.itemsize))
        first, done = int(wanted[0]), 0
        while done < len(wanted):  # read runs of neighbouring rows, a bounded span at a time
            upto = int(torch.searchsorted(wanted, first + width))
            last = int(wanted[upto - 1]) + 1
            picked[done:upto] = table.rows(first, last)[wanted[done:upto] - first]
            done = upto
            first = int(wanted[done]) if done < len(wanted) else 0
        return picked

    return Lazy((len(ids), *table.shape[1:]), table.dtype, rows)


def stored_dtype(name: str) -> torch.dtype:
    """Dtype in which exports hold a tensor."""
    import torch

    return {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)


# --- reading ------------------------------------------------------------------------------------------------


ROPE_KEYS = {
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor",
}  # fmt: skip


def read_rope(config: dict, where: str) -> dict:
    """Base and scaling out of either spelling, or both if they agree.

    Raises:
        StageError: the spellings differ, or a part without which readers compute other tables is missing.
    """
    new, old = (_one_rope(config.get(key), f"{where} {key}") for key in ("rope_parameters", "rope_scaling"))
    bases = [config.get("rope_theta"), new.pop("rope_theta", None), old.pop("rope_theta", None)]
    bases = sorted({base for base in bases if base is not None})
    if len(bases) > 1:
        raise StageError(f"{where}: rope_theta and rope_parameters give different bases {bases}")
    if new and "rope_scaling" in config and (old or {"rope_type": "default"}) != new:
        raise StageError(f"{where}: rope_scaling {old or None} and rope_parameters {new} disagree")
    rope = {**(new or old or {"rope_type": "default"}), "rope_theta": bases[0] if bases else 10000.0}
    given = rope.pop("attn_factor", None)
    if unknown := sorted(rope.keys() - ROPE_KEYS):
        raise StageError(f"{where}: rope keys {unknown} are not known: readers may compute other tables")
    if given is not None and not math.isclose(given, attn_factor(rope) or 1.0, rel_tol=1e-6):
        raise StageError(
            f"{where}: rope attn_factor {given}; the other rope keys mean {attn_factor(rope) or 1.0:.6g}"
        )
    pair = ("mscale" in rope) + ("mscale_all_dim" in rope)
    if pair == 1:
        raise StageError(
            f"{where}: rope has only one of mscale and mscale_all_dim; readers then differ by 1.42"
        )
    if rope["rope_type"] in ("yarn", "llama3", "longrope") and "original_max_position_embeddings" not in rope:
        raise StageError(f"{where}: rope {rope['rope_type']} without original_max_position_embeddings")
    return dict(sorted(rope.items()))


def _one_rope(rope: dict | None, where: str) -> dict:
    """One spelling with its kind under `rope_type`; empty if there is none."""
    rope = dict(rope or {})
    if any(isinstance(v, dict) for v in rope.values()):
        raise StageError(f"{where}: one rope per layer type is not supported for a draft")
    kind = rope.pop("type", None)
    if rope and rope.setdefault("rope_type", kind or "default") != (kind or rope["rope_type"]):
        raise StageError(f"{where}: type {kind!r} and rope_type {rope['rope_type']!r} disagree")
    return rope


def account_keys(config: dict, used: set[str], inert: dict[str, tuple | None], where: str) -> None:
    """Raises StageError for a key that is neither used nor inert with its value."""
    unknown, bad = [], []
    for key, value in config.items():
        if key in used:
            continue
        if key not in inert:
            unknown.append(f"{key}={value!r}"[:60])
        elif inert[key] is not None and value not in inert[key]:
            bad.append(f"{key}={value!r}")
    if unknown or bad:
        raise StageError(
            f"{where}: config keys that eagle3/flat.py does not carry: {', '.join(unknown + bad)}; "
            "remove them if they have no effect on drafting, else the table must learn them"
        )


LLAMA_KEYS = {
    "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "attention_bias",
    "mlp_bias", "vocab_size", "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling",
    "layer_types", "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


def read_llama(config: dict, where: str) -> dict:
    """Draft fields out of the keys of a Llama config; what is missing gets the class default of LlamaConfig.

    `head_dim` stays out if the config has none: the caller takes it from the weights or refuses.
    """
    if config.get("model_type", "llama") != "llama":
        raise StageError(f"{where}: model_type {config['model_type']!r}; only Llama drafts are converted")
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [k for k in needed if config.get(k) is None]:
        raise StageError(f"{where}: config lacks {', '.join(missing)}")
    n = config["num_hidden_layers"]
    types = tuple(config.get("layer_types") or ("full_attention",) * n)
    window = config.get("sliding_window") if "sliding_attention" in types else None
    fields = {k: config[k] for k in needed}
    fields.update(
        num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        hidden_act=config.get("hidden_act", "silu"),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        rope=read_rope(config, where),
        layer_types=types,
        sliding_window=window,
        **{k: config.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    if config.get("head_dim") is not None:
        fields["head_dim"] = config["head_dim"]
    return fields


def check_width(config: dict, fields: dict, where: str) -> None:
    """Raises StageError if the draft's states are said to be of another width than the verifier's."""
    if config.get("target_hidden_size") not in (None, fields["hidden_size"]):
        raise StageError(
            f"{where}: target_hidden_size {config['target_hidden_size']}, hidden_size {fields['hidden_size']}"
        )


def read_speculators(config: dict, where: str) -> Draft:
    """A Draft out of speculators' nested config (0.3 to 0.9).

    Raises:
        StageError: unknown key, missing head size or layer ids, contradiction.
    """
    used = {*FLAGS, "transformer_layer_config", "draft_vocab_size", "target_hidden_size"}
    account_keys(config, {*used, "eagle_aux_hidden_state_layer_ids"}, SPECULATORS_OUTER, where)
    layer = config.get("transformer_layer_config") or {}
    account_keys(layer, LLAMA_KEYS, INERT, f"{where} transformer_layer_config")
    if "norm_before_residual" not in config:
        raise StageError(
            f"{where}: norm_before_residual is missing; speculators would read false, vLLM true: add it"
        )
    if not config.get("eagle_aux_hidden_state_layer_ids"):
        raise ConfigError(
            f"{where}: eagle_aux_hidden_state_layer_ids is missing: give the layers it was trained on"
        )
    fields = read_llama(layer, where)
    if "head_dim" not in fields:
        raise StageError(f"{where}: head_dim is missing; readers would guess hidden_size / heads")
    check_width(config, fields, where)
    return Draft(
        **fields,
        draft_vocab_size=config["draft_vocab_size"],
        layer_ids=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        # Those that 0.3 does not have mean false where they are missing.
        **{flag: bool(config.get(flag, False)) for flag in FLAGS},
    ).check()


def fit_verifier(draft: Draft, verifier: Verifier, where: str) -> Draft:
    """The draft with the verifier's position limit and special tokens.

    Raises:
        StageError: width, vocabulary or layer ids don't belong to this verifier.
    """
    bad = []
    if draft.hidden_size != verifier.hidden_size:
        bad.append(f"hidden_size {draft.hidden_size}, verifier {verifier.hidden_size}")
    if draft.vocab_size != verifier.vocab_size:
        bad.append(f"vocab_size {draft.vocab_size}, verifier {verifier.vocab_size}")
    if draft.layer_ids[-1] > verifier.num_layers:
        bad.append(f"layer ids {list(draft.layer_ids)}, verifier has {verifier.num_layers} layers")
    if bad:
        raise StageError(f"{where} does not belong to verifier {verifier.path}: {'; '.join(bad)}")
    tokens = {k: verifier.value(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return replace(draft, max_position_embeddings=verifier.value("max_position_embeddings"), **tokens)


# --- accounting ---------------------------------------------------------------------------------------------


def account_shapes(tensors: dict[str, Lazy], draft: Draft, optional: set[str], where: str) -> None:
    """Every tensor is in the table with its shape, and every row of the table is filled.

    Args:
        tensors: under speculators' names.
        optional: names that may be missing (filled from the verifier).

    Raises:
        StageError: unmapped, unfilled, contradictory, each by name; flags are paired with their weights.
    """
    want = wanted_tensors(draft, EMBEDDING in tensors)
    left = sorted(tensors.keys() - want)
    missing = sorted(want.keys() - tensors.keys() - optional)
    shapes = [
        f"{n} has shape {list(tensors[n].shape)}, the config says {list(want[n])}"
        for n in want
        if n in tensors and tuple(tensors[n].shape) != tuple(want[n])
    ]
    hints = []
    for flag, weight in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        if not getattr(draft, flag) and any(n.startswith(weight) for n in left):
            hints.append(f"{flag} is false but {weight}* is there: the flag was lost")
        if getattr(draft, flag) and any(n.startswith(weight) for n in missing):
            hints.append(f"{flag} is true but {weight}* is missing")
    if not draft.reduced and any(n in MAPS for n in left):
        hints.append("a vocabulary map beside a full draft vocabulary")
    if draft.reduced and any(n in MAPS for n in missing):
        hints.append(
            f"draft_vocab_size {draft.draft_vocab_size} of {draft.vocab_size} without its table: readers "
            "would take the first ids"
        )
    if left or missing or shapes:
        parts = [f"unmapped {left}"] * bool(left) + [f"unfilled {missing}"] * bool(missing) + shapes + hints
        raise StageError(f"{where}: " + "; ".join(parts))


def account_config(config: dict, draft: Draft, form: str, where: str) -> None:
    """A written config holds exactly what the table says.

    Raises:
        StageError: unmapped, unfilled, contradictory, each by name.
    """
    want = flat_config(draft, form)
    left, missing = sorted(config.keys() - want), sorted(want.keys() - config.keys())
    other = [
        f"{k} is {config[k]!r}, trained with {want[k]!r}"
        for k in want
        if k in config and config[k] != want[k]
    ]
    if left or missing or other:
        parts = [f"unmapped {left}"] * bool(left) + [f"unfilled {missing}"] * bool(missing) + other
        raise StageError(f"{where}/config.json: " + "; ".join(parts))


def account_folders(folders: dict[str, Path], draft: Draft, tensors: dict[str, Lazy]) -> None:
    """Read exports back: every key, and every tensor bit by bit against what it was made from.

    Args:
        folders: format -> folder.
        tensors: the source, under speculators' names; the embedding among them if it was to be written.

    Raises:
        StageError: unmapped, unfilled, contradictory, each by name.
    """
    import torch

    stored = {}
    for form, folder in folders.items():
        account_config(read_json(folder / "config.json") or {}, draft, form, str(folder))
        stored[folder] = {canonical(n, form == "sglang"): t for n, t in open_tensors(folder).items()}
        account_shapes(stored[folder], draft, set(), str(folder))
        if left := sorted(stored[folder].keys() ^ tensors.keys()):
            raise StageError(f"{folder}: tensors {left} are on one side only")
    for name, source in tensors.items():
        dtype, at = stored_dtype(name), 0
        for folder, found in stored.items():
            if found[name].dtype != dtype:
                raise StageError(f"{folder}: {name} is {found[name].dtype}, not {dtype}")
        for piece in source.chunks():
            want = piece.to(dtype)
            for folder, found in stored.items():
                if not torch.equal(found[name].rows(at, at + len(piece)), want):
                    raise StageError(f"{folder}: values of {name} differ from the checkpoint's")
            at += len(piece)
    for folder, found in stored.items():
        if draft.reduced:
            check_map(found["d2t"].whole(), found["t2d"].whole(), str(folder))


# --- checkpoints of 04 --------------------------------------------------------------------------------------


def open_checkpoint(folder: Path, verifier: Verifier) -> tuple[Draft, dict[str, Lazy]]:
    """A checkpoint in 04's form as a draft with every tensor: its own, the verifier's head rows, the map.

    The embedding is among them only if the checkpoint has one of its own.

    Raises:
        StageError: unmapped, unfilled, contradictory; not this verifier's.
    """
    where = str(folder)
    config = read_json(folder / "config.json")
    if not config or "speculators_model_type" not in config:
        raise StageError(
            f"{folder}/config.json is no speculators EAGLE-3 config: not a checkpoint of 04_train.py"
        )
    vocab_map = find_map(folder)
    draft = fit_verifier(read_speculators(config, where), verifier, where)
    if (len(vocab_map.d2t), len(vocab_map.t2d)) != (draft.draft_vocab_size, draft.vocab_size):
        raise StageError(
            f"{where}: draft vocabulary {draft.draft_vocab_size} of {draft.vocab_size}, its map has "
            f"{len(vocab_map.d2t)} of {len(vocab_map.t2d)}"
        )
    tensors = {n: t for n, t in open_tensors(folder).items() if n not in (*DERIVED, *MAPS)}
    if "lm_head.weight" not in tensors:  # frozen in training: the verifier's rows
        ids = vocab_map.kept if draft.reduced else None
        tensors["lm_head.weight"] = verifier_rows(verifier, "head", ids)
    if draft.reduced:
        tensors |= {"d2t": in_memory(vocab_map.d2t), "t2d": in_memory(vocab_map.t2d)}
    account_shapes(tensors, draft, set(), where)
    return draft, {n: tensors[n] for n in wanted_tensors(draft, EMBEDDING in tensors)}


# --- export -------------------------------------------------------------------------------------------------


def export_tensors(
    draft: Draft, tensors: dict[str, Lazy], verifier: Verifier, with_embeddings: bool
) -> dict[str, Lazy]:
    """What goes into the files: without the embedding, unless it is the draft's own or asked for."""
    if EMBEDDING not in tensors and with_embeddings:
        tensors = {**tensors, EMBEDDING: verifier_rows(verifier, "embed")}
    return {n: tensors[n] for n in wanted_tensors(draft, EMBEDDING in tensors)}


def export(draft: Draft, tensors: dict[str, Lazy], folders: dict[str, Path]) -> None:
    """Write config.json and model.safetensors of each format, then read everything back.

    Args:
        tensors: see `export_tensors`.
        folders: format -> folder (made; the caller gives it its final name).

    Raises:
        StageError: NaN in a tensor; anything lost or changed on the way.
    """
    for form, folder in folders.items():
        folder.mkdir(parents=True)
        write_json(folder / "config.json", flat_config(draft, form))
    files = [(folder / "model.safetensors", _renamer(form)) for form, folder in folders.items()]
    with one_thread():
        write_tensors(files, tensors, {n: stored_dtype(n) for n in tensors})
        account_folders(folders, draft, tensors)


def _renamer(form: str) -> Callable[[str], str]:
    return lambda name: name_in(form, name)
