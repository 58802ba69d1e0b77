"""The draft model: speculators' Eagle3DraftModel built from the recipe, filled from the verifier's tensors.

Speculators' own loader finds the verifier's tensors by name ending and fills gaps with guesses; here they
come from eagle3.verifier, which finds them through the config or stops. Trainable weights are float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import ConfigError, StageError
from eagle3.flat import FLAGS
from eagle3.verifier import NO_HUB_ID

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    from eagle3.config import Recipe
    from eagle3.verifier import Verifier
    from eagle3.vocab import VocabMap

# Tensors that are the verifier's: never trained, never saved, told apart by fingerprint.
FROZEN = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
# Config keys of verifiers whose logits are not simply head(norm(state)), with the values that change nothing.
LOGIT_RULES = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
}


def draft_size(recipe: Recipe, verifier: Verifier) -> int:
    """Entries of the draft vocabulary.

    Raises:
        ConfigError: more than the verifier has.
    """
    size = recipe.draft.vocab_size
    if size == "full":
        return verifier.vocab_size
    if size > verifier.vocab_size:
        raise ConfigError(
            f"draft.vocab_size {size} exceeds the verifier's vocabulary of {verifier.vocab_size}; or say full"
        )
    return size


def rope_parameters(verifier: Verifier) -> dict:
    """The verifier's rotary embedding whole: base, scaling, and the mscale pair that sets yarn's magnitude.

    Raises:
        ConfigError: the verifier's config has none.
    """
    rope = verifier.text.get("rope_parameters")
    if rope and "full_attention" in rope:  # one rope per layer type; the draft's layer is a full one
        rope = rope["full_attention"]
    if not rope or "rope_theta" not in rope:
        raise ConfigError(
            f"{verifier.path}: no rope_theta in the text config; can't build the draft's rotary embedding"
        )
    return dict(rope)


def build_config(recipe: Recipe, verifier: Verifier, attention: str = "sdpa") -> Eagle3SpeculatorConfig:
    """The draft's config: geometry and flags from recipe.draft, rope and position limit from the verifier.

    Args:
        attention: "sdpa" (dense masks, any device), "simple_flex_attention" (block masks, GPU) or
            fastpath.ATTENTION (document by document, CPU).

    Raises:
        ConfigError: the verifier scales or caps its logits, which the training target does not reproduce.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig

    draft, text = recipe.draft, verifier.text
    for key, harmless in LOGIT_RULES.items():
        if text.get(key) not in harmless:
            raise ConfigError(
                f"{verifier.path}: {key} {text[key]} changes the logits; targets would not be the verifier's"
            )
    window = {}
    if draft.sliding_window:
        window = {
            "sliding_window": draft.sliding_window,
            "layer_types": ["sliding_attention"] * draft.num_hidden_layers,
        }
    geometry = dict(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=draft.intermediate_size,
        num_hidden_layers=draft.num_hidden_layers,
        num_attention_heads=draft.num_attention_heads,
        num_key_value_heads=draft.num_key_value_heads,
        head_dim=draft.head_dim,
        rms_norm_eps=draft.rms_norm_eps,
        hidden_act="silu",
        max_position_embeddings=text["max_position_embeddings"],
        rope_parameters=rope_parameters(verifier),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        # Explicit, so that no class default (or a look-up through an image processor) decides: an EAGLE-3
        # draft has no mask token, pads with id 0 outside every document, and never zeroes an embedding row of
        # the verifier.
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **window,
    )
    try:
        layer = LlamaConfig(**geometry)
    except StrictDataclassError as err:
        raise ConfigError(f"{recipe.path}: draft geometry: {err.__cause__ or err}") from None
    layer._attn_implementation = attention
    model = recipe.verifier.model
    return speculator_config(
        layer,
        verifier,
        draft_vocab_size=draft_size(recipe, verifier),
        layer_ids=verifier.layers,
        flags={flag: getattr(draft, flag) for flag in FLAGS},
        tokens=recipe.evaluate.num_speculative_tokens,
        hub_id=None if model.startswith(NO_HUB_ID) or Path(model).exists() else model,
    )


def speculator_config(
    layer: LlamaConfig,
    verifier: Verifier,
    draft_vocab_size: int,
    layer_ids: Iterable[int],
    flags: dict[str, bool],
    tokens: int = 3,
    hub_id: str | None = None,
) -> Eagle3SpeculatorConfig:
    """speculators' config of a draft around the config of its layers.

    Args:
        flags: value of each of FLAGS.
        tokens: drafted in a step, a hint for servers.
        hub_id: the verifier's, if it has one.
    """
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        **flags,
        embed_requires_grad=False,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=hub_id, architectures=list(verifier.config.get("architectures") or [])
            ),
        ),
    )


def build_draft(
    config: Eagle3SpeculatorConfig,
    vocab_map: VocabMap,
    verifier: Verifier,
    train_head: bool = False,
    frozen_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Eagle3DraftModel:
    """A draft with fresh trainable weights (float32, a function of `seed`) and the verifier's frozen ones.

    Args:
        train_head: train `lm_head`, which starts as the verifier's rows of the draft vocabulary.
        frozen_dtype: dtype of frozen tensors; None keeps the verifier's (bf16). Autocast takes bf16 as it is;
            without autocast it must be float32.
    """
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Eagle3DraftModel(config)
    fill_frozen(model, vocab_map, verifier, train_head, frozen_dtype)
    return model


def fill_frozen(
    model: Eagle3DraftModel,
    vocab_map: VocabMap,
    verifier: Verifier,
    train_head: bool = False,
    frozen_dtype: torch.dtype | None = None,
) -> None:
    """Put the verifier's embedding, final norm and head rows, and the vocabulary map, into a draft.

    `lm_head` gets the head's rows too (frozen, or as the start of training); a trained one is loaded
    afterwards.

    Raises:
        StageError: a size that does not fit.
    """
    import torch

    if len(vocab_map.t2d) != verifier.vocab_size or len(vocab_map.d2t) != model.draft_vocab_size:
        raise StageError(
            f"vocabulary map of {len(vocab_map.d2t)} of {len(vocab_map.t2d)} ids does not fit a draft of "
            f"{model.draft_vocab_size} under a verifier of {verifier.vocab_size}"
        )
    if model.use_draft_vocab:
        model.d2t.copy_(vocab_map.d2t)
        model.t2d.copy_(vocab_map.t2d)

    def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(tensor.to(frozen_dtype or tensor.dtype).contiguous(), requires_grad=False)

    head = verifier.head()
    rows = head if vocab_map.full else head[vocab_map.kept]
    model.embed_tokens.weight = frozen(verifier.embedding())
    model.verifier_lm_head.weight = frozen(rows)
    # Tied storage while frozen: 459 MB saved at Kimi size, and the two can't drift apart.
    model.lm_head.weight = (
        torch.nn.Parameter(rows.float().clone()) if train_head else model.verifier_lm_head.weight
    )
    # The gain as it multiplies (1 + w for the Gemma family), so the plain norm class is right for every
    # verifier; its epsilon is the verifier's, not the draft's.
    model.verifier_norm.weight = torch.nn.Parameter(verifier.norm_weight(), requires_grad=False)
    model.verifier_norm.variance_epsilon = verifier.value("rms_norm_eps")


def pass_last_layer(model: Eagle3DraftModel) -> None:
    """Let `fc` [H, A * H] begin as [0 ... 0 I]: what enters the layer is the last auxiliary state itself.

    That state lives in the space that the head reads, so the layer need not learn the way there first.
    """
    import torch

    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.weight[:, -model.hidden_size :].fill_diagonal_(1.0)


def frozen_fingerprints(model: Eagle3DraftModel) -> dict[str, str]:
    """xxh3_64 of each frozen tensor's values in bf16, by name (independent of the dtype it is held in)."""
    import torch
    import xxhash

    found = {}
    for name in FROZEN:
        tensor = model.get_parameter(name).detach().to("cpu", torch.bfloat16).contiguous()
        found[name] = xxhash.xxh3_64(tensor.view(torch.uint8).numpy()).hexdigest()
    return found


def read_config(folder: Path) -> Eagle3SpeculatorConfig:
    """The config of a draft folder in speculators' form.

    Raises:
        StageError: missing, or not such a config.
    """
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise StageError(f"{file} can't be read: {err}") from None
    if raw.get("speculators_model_type") != "eagle3":
        raise StageError(
            f"{file} is no speculators EAGLE-3 config; 05_convert.py import makes one of a foreign draft"
        )
    return Eagle3SpeculatorConfig.from_dict(raw)


def load_trainable(model: Eagle3DraftModel, folder: Path) -> None:
    """Load model.safetensors of a checkpoint into a draft whose frozen tensors are filled.

    Raises:
        StageError: a tensor missing, left over, or of another shape; all are named.
    """
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    if not file.is_file():
        raise StageError(f"{file} is missing")
    tensors = load_file(file)
    have = model.state_dict()
    wanted = {n for n in have if n not in (*FROZEN, "d2t", "t2d", "lm_head.weight")}
    optional = {"lm_head.weight", "d2t", "t2d", "embed_tokens.weight"}
    problems = [f"{n} is missing" for n in sorted(wanted - tensors.keys())]
    problems += [f"{n} has no place in this draft" for n in sorted(tensors.keys() - wanted - optional)]
    problems += [
        f"{n} is {list(tensors[n].shape)}, not {list(have[n].shape)}"
        for n in sorted((wanted | {"lm_head.weight"}) & tensors.keys())
        if tensors[n].shape != have[n].shape
    ]
    if problems:
        raise StageError(f"{file} does not fit its config: {'; '.join(problems)}")
    import torch

    with torch.no_grad():
        for name in sorted(wanted):
            model.get_parameter(name).copy_(tensors[name])
        if "lm_head.weight" in tensors:
            head = model.lm_head.weight
            if head is model.verifier_lm_head.weight:  # untie: this draft's head was trained
                model.lm_head.weight = torch.nn.Parameter(
                    tensors["lm_head.weight"].to(head.dtype), requires_grad=False
                )
            else:
                head.copy_(tensors["lm_head.weight"])


def own_tensors(model: Eagle3DraftModel, folder: Path) -> list[str]:
    """Names of embedding and head of a checkpoint that differ from the frozen ones of a draft."""
    import torch
    from safetensors import safe_open

    frozen = {
        "embed_tokens.weight": model.embed_tokens.weight,
        "lm_head.weight": model.verifier_lm_head.weight,
    }
    with safe_open(folder / "model.safetensors", "pt") as f:
        return [
            name for name in sorted(frozen.keys() & set(f.keys()))
            if not torch.equal(f.get_tensor(name).to(frozen[name].dtype), frozen[name])
        ]  # fmt: skip


def load_draft(
    checkpoint: Path,
    vocab_map: VocabMap,
    verifier: Verifier,
    attention: str = "sdpa",
    frozen_dtype: torch.dtype | None = None,
) -> Eagle3DraftModel:
    """A trained draft as it was: config and weights from a checkpoint, the rest from map and verifier.

    Args:
        checkpoint: 04_train/step-NNNNNN (or best).
        frozen_dtype: as for `build_draft`; float32 for use without autocast.

    Raises:
        StageError: layer ids other than the verifier's, or tensors that do not fit.
    """
    config = read_config(checkpoint)
    config.transformer_layer_config._attn_implementation = attention
    if config.eagle_aux_hidden_state_layer_ids != verifier.layers:
        raise StageError(
            f"{checkpoint}: trained on layers {config.eagle_aux_hidden_state_layer_ids}, the recipe says "
            f"{verifier.layers}"
        )
    model = build_draft(config, vocab_map, verifier, frozen_dtype=frozen_dtype)
    load_trainable(model, checkpoint)
    return model.eval()
