"""The two kinds of settings: the recipe (the experiment, YAML) and the profile (the machine, an env file).

python -m eagle3.config get verifier.model        one value of the effective recipe
python -m eagle3.config env                       the profile as shell assignments (for eval)
python -m eagle3.config check FILE...             validate recipe and profile files
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import yaml
from dotenv import dotenv_values
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3.contract import ROOT, ConfigError, RunDir
from eagle3.setup import lists_gpu

RECIPES = ROOT / "configs" / "recipes"
PROFILES = ROOT / "configs" / "profiles"
DEFAULT_RECIPE = "smollm2-135m"


class Section(BaseModel):
    """Every section refuses unknown keys and keeps no implicit conversions."""

    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=())


class VerifierSection(Section):
    """The model that drafts are made for."""

    model: str = Field(description="folder, hub id, pip:NAME==VERSION/FILE.gguf, or script:FILE.py")
    revision: str | None = Field(None, description="hub revision (commit hash for a run that counts)")
    trust_remote_code: bool = Field(False, description="run Python that ships with the verifier")
    language_model_only: bool = Field(False, description="skip vision and audio towers when serving")
    layers: list[int] | None = Field(
        None, description="auxiliary layer ids, vLLM's numbering; default [2, n//2, n-3]"
    )
    max_model_len: int = Field(description="tokens of one request, prompt and answer together")
    expected: dict[str, int] = Field(
        default_factory=dict, description="values of the text config that must hold (hidden_size, ...)"
    )
    size_bytes: int | None = Field(None, description="weights on disk, for `plan` where no files are here")


class DraftSection(Section):
    """Geometry and flags of the draft: one or more Llama layers."""

    num_hidden_layers: int = 1
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = Field(description="chosen openly: a verifier's own value may be its rotary part")
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int | Literal["full"] = Field(description="draft vocabulary, by coverage of answer tokens")
    min_coverage: float = Field(0.98, ge=0, le=1, description="refuse a vocabulary that covers less")
    sliding_window: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_head: bool = False

    @model_validator(mode="after")
    def _flags(self):
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        return self


class Source(Section):
    """One place that chats come from: a local file or folder, or a hub data set."""

    path: str | None = Field(None, description="JSONL, JSON or parquet file, or a folder of them")
    hub: str | None = Field(None, description="data set id on the hub")
    revision: str | None = None
    subset: str | None = None
    split: str = "train"
    format: Literal["auto", "messages", "sharegpt", "prompt", "tokens"] = "auto"
    domain: str | None = Field(None, description="label for reports; default: the row's own `domain`")
    weight: float = Field(1.0, gt=0, description="share of the mixture, relative to the other sources")
    limit: int | None = Field(None, gt=0, description="rows taken at most")
    answers: Literal["own", "dataset"] = Field("own", description="own: the verifier answers in 03")
    history: Literal["dataset", "own"] = Field("dataset", description="own: earlier turns answered by it too")
    turns: Literal["last", "all"] = "last"
    thinking: Annotated[float | None, Field(ge=0, le=1)] = Field(
        None, description="share of rows rendered with thinking on; null: the template's default"
    )
    chat_template_kwargs: dict = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_place(self):
        if (self.path is None) == (self.hub is None):
            raise ValueError("give exactly one of path and hub")
        return self


class DataSection(Section):
    """What the draft learns from."""

    samples: int | Literal["all"] = Field("all", description="training rows; SAMPLES overrides")
    sources: list[Source] = Field(min_length=1)
    heldout: list[Source] = Field(default_factory=list, description="measured in 06, never trained on")
    exclude: list[str] = Field(default_factory=list, description="files whose prompts are kept out")
    val_share: float = Field(0.04, gt=0, lt=1, description="share of conversations kept for validation")
    max_prompt_tokens: int
    expected_prompt_tokens: int | None = Field(None, gt=0, description="mean, for `plan` before 01 has run")
    overlong: Literal["drop", "cut"] = Field("drop", description="cut: drop oldest turns until it fits")
    near_duplicate: float = Field(0.85, gt=0, le=1, description="Jaccard similarity that counts as equal")
    max_rejected_share: float = Field(0.5, ge=0, le=1)


class AnswerSection(Section):
    """How the verifier answers, as it is served in production."""

    max_tokens: int
    expected_tokens: int | None = Field(None, gt=0, description="mean, for `plan` before 03 has run")
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    looping: Literal["drop", "keep"] = Field("drop", description="answers that repeat themselves")
    at_limit: Literal["drop", "keep"] = Field("keep", description="answers cut at max_tokens")


class StatesSection(Section):
    """How hidden states are stored."""

    dtype: Literal["bf16", "fp8"] = "bf16"
    shard_bytes: int = Field(1_000_000_000, gt=0)
    mode: Literal["one-pass", "two-pass"] = "one-pass"
    proof_rows: int = Field(64, gt=0, description="rows whose log-probabilities are recomputed, at least")
    max_failed: int = Field(0, ge=0, description="rows 03 may fail before it exits 1")


class TrainSection(Section):
    """How the draft is trained."""

    tokens_per_step: int = Field(gt=0, description="global; accumulation follows from the profile")
    epochs: int = Field(gt=0)
    max_steps: int | None = Field(None, gt=0)
    lr: float = Field(gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.02, ge=0, lt=1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_lr: float | None = Field(None, gt=0, description="of Muon's matrices, scaled as AdamW's; null: lr")
    weight_decay: float = 0.0
    clip: float = Field(1.0, gt=0)
    ttt_steps: int = Field(3, gt=0)
    ttt_decay: float = Field(0.8, gt=0, le=1)
    loss: str = "kl_div"
    shard: Literal["ddp", "fsdp"] = "ddp"
    val_every: int | None = Field(None, gt=0, description="steps; null: once per epoch")
    checkpoint_minutes: float = Field(10, gt=0)
    checkpoint_steps: int | None = Field(None, gt=0)
    log_every: int = Field(10, gt=0)
    logger: Literal["none", "tensorboard", "wandb", "mlflow", "trackio"] = "none"
    init_from: str | None = Field(None, description="draft folder to start from (its vocabulary map too)")
    fc_init: Literal["random", "last_layer"] = Field(
        "random", description="last_layer: fc starts by passing the last auxiliary layer through"
    )
    seed: int = 0


class EvaluateSection(Section):
    """How the served draft is measured."""

    sets: list[str] = Field(["heldout"], min_length=1, description="heldout, a name, or a JSONL")
    prompts_per_set: int | None = Field(None, gt=0)
    num_speculative_tokens: int = Field(3, gt=0)
    max_tokens: int
    temperatures: list[Annotated[float, Field(ge=0)]] = Field([0.0], min_length=1)
    concurrency: list[Annotated[int, Field(gt=0)]] = Field([1, 4], min_length=1)
    repeats: int = Field(3, gt=0)
    timed_prompts: int | None = Field(None, gt=0, description="prompts per timed repeat; null: all")
    timed_tokens: int | None = Field(None, gt=0, description="tokens of a timed answer; null: max_tokens")
    max_gap: float = Field(0.1, gt=0, description="predicted against served acceptance per position")


class Recipe(Section):
    """One experiment. Unknown keys are errors; `--set a.b=value` overrides."""

    verifier: VerifierSection
    draft: DraftSection
    data: DataSection
    answers: AnswerSection
    states: StatesSection = Field(default_factory=StatesSection)
    train: TrainSection
    evaluate: EvaluateSection
    seed: int = 0
    _path: Path = Path("recipe.yaml")

    @model_validator(mode="after")
    def _lengths_fit(self):
        total = self.data.max_prompt_tokens + self.answers.max_tokens
        if total > self.verifier.max_model_len:
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + answers.max_tokens "
                f"{self.answers.max_tokens} = {total} exceeds verifier.max_model_len "
                f"{self.verifier.max_model_len}"
            )
        return self

    @property
    def path(self) -> Path:
        """The YAML file it was read from."""
        return self._path

    @property
    def name(self) -> str:
        return self._path.stem


class Profile(Section):
    """One machine; every field is an upper-case variable of a file in configs/profiles/."""

    name: str
    GPUS: int = Field(ge=0, description="GPUs used; 0 = CPU")
    GPU_MEMORY_GB: float = Field(ge=0, description="memory of one card, checked by preflight")
    GPU_ARCH: str = Field(description="compute capability (sm90), empty = any")
    VERIFIER_TP: int = Field(ge=1, description="tensor parallel size")
    VERIFIER_DP: int = Field(ge=1, description="data parallel size")
    VERIFIER_EP: bool = Field(description="expert parallel")
    VERIFIER_MEMORY_FRACTION: float = Field(gt=0, le=1, description="of a card's memory")
    VERIFIER_MAX_SEQS: int = Field(ge=1)
    VERIFIER_BATCH_TOKENS: int = Field(ge=1, description="tokens batched in one engine step")
    VERIFIER_ATTENTION_BACKEND: str = Field(description="vLLM backend name, empty = vLLM's choice")
    VERIFIER_KV_DTYPE: str
    VERIFIER_EAGER: bool
    VERIFIER_HOST: str
    VERIFIER_PORT: int = Field(ge=1, le=65535)
    VERIFIER_READY_TIMEOUT: int = Field(gt=0, description="seconds from start to ready")
    EXTRACT_REQUESTS: int = Field(ge=1, description="requests in flight")
    EXTRACT_STAGING_GB: float = Field(gt=0, description="state bytes between server and shard")
    DISK_RESERVE_GB: float = Field(ge=0, description="free space that no stage touches")
    TRAIN_GPUS: int = Field(ge=0)
    TRAIN_ROW_TOKENS: int = Field(ge=8, description="tokens in one packed row, one row per forward")
    TRAIN_THREADS: int = Field(ge=1, description="reader threads of the feed")
    PRICE_PER_HOUR: float = Field(ge=0, description="of the whole machine")
    PRICE_CURRENCY: str

    @property
    def cpu(self) -> bool:
        return self.GPUS == 0


# Variables that a profile hands to libraries as they are.
PASSED_ON = ("NCCL_", "VLLM_", "CUDA_", "OMP_", "PYTORCH_", "TORCH_", "HF_", "TOKENIZERS_", "SAFETENSORS_")


def _explain(err: ValidationError, where: str) -> str:
    """One line out of pydantic's list: key, problem, given value."""
    parts = []
    for e in err.errors():
        key = ".".join(str(x) for x in e["loc"]) or "(whole file)"
        if e["type"] == "extra_forbidden":
            parts.append(f"unknown key {key}")
        elif e["type"] == "missing":
            parts.append(f"{key} is missing")
        else:
            got = "" if isinstance(e.get("input"), dict) else f" (got {e.get('input')!r})"
            parts.append(f"{key}: {e['msg'].removeprefix('Value error, ')}{got}")
    return f"{where}: " + "; ".join(parts)


def recipe_path(name: str) -> Path:
    """A recipe by name or by file.

    Raises:
        ConfigError: listing the recipes there are.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise ConfigError(f"no recipe {name!r} ({path} is not there); known: {known}")
    return path


def load_recipe(name: str, overrides: list[str] | None = None, samples: str | None = None) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        name: a name under configs/recipes or a YAML file.
        overrides: `section.key=value` strings, values parsed as YAML.
        samples: overrides data.samples (the SAMPLES variable); None or "" leaves it.

    Raises:
        ConfigError: naming file, key and value.
    """
    path = recipe_path(name)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as err:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(err).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections")
    pairs = list(overrides or [])
    if samples:
        pairs.append(f"data.samples={samples}")
    for item in pairs:
        key, sep, value = item.partition("=")
        if not sep:
            raise ConfigError(f"--set {item!r}: write section.key=value")
        node = raw
        *parents, leaf = key.strip().split(".")
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict):
                raise ConfigError(f"--set {item!r}: {part} is not a section")
        node[leaf] = _number(yaml.safe_load(value))
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as err:
        raise ConfigError(_explain(err, str(path))) from None
    recipe._path = path.resolve()
    return recipe


def _number(value):
    """YAML 1.1 reads 1e-3 (no dot) as a string; people type it, so it is a number here."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def dump_recipe(recipe: Recipe) -> str:
    """The effective recipe as YAML, with the name of the file it came from on the first line."""
    body = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    known = recipe.path.parent == RECIPES
    return f"# recipe: {recipe.name if known else recipe.path}\n{body}"


def default_profile() -> str:
    """gpu-x1 where an NVIDIA GPU answers, else cpu-smoke."""
    return "gpu-x1" if lists_gpu() else "cpu-smoke"


def profile_values(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Variables of a profile: (ours, passed on), each with the environment winning.

    Raises:
        ConfigError: unknown profile, or an unknown variable in it.
    """
    path = Path(name) if name.endswith(".env") else PROFILES / f"{name}.env"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.env")))
        raise ConfigError(f"no profile {name!r} ({path} is not there); known: {known}")
    ours, passed = {}, {}
    for key, value in dotenv_values(path, interpolate=False).items():
        value = os.environ.get(key, value or "")
        if key in Profile.model_fields:
            ours[key] = value
        elif key.startswith(PASSED_ON):
            passed[key] = value
        else:
            raise ConfigError(f"{path}: unknown variable {key}")
    return ours, passed


def load_profile(name: str | None = None, export: bool = True) -> Profile:
    """Read and validate a profile; `export` puts its library variables into os.environ.

    Args:
        name: a name under configs/profiles, an .env file, or None for $PROFILE or the default.

    Raises:
        ConfigError: naming file and variable.
    """
    name = name or os.environ.get("PROFILE") or default_profile()
    ours, passed = profile_values(name)
    try:
        profile = Profile.model_validate({"name": Path(name).stem, **ours})
    except ValidationError as err:
        raise ConfigError(_explain(err, f"profile {name}")) from None
    if export:
        os.environ.update(passed)
    return profile


def run_dir(recipe: Recipe, given: str | None = None) -> RunDir:
    """--run-dir, else $RUN_DIR, else runs/$RECIPE-$SAMPLES."""
    chosen = given or os.environ.get("RUN_DIR")
    return RunDir(
        Path(chosen).resolve() if chosen else ROOT / "runs" / f"{recipe.name}-{recipe.data.samples}"
    )


def recorded_recipe(path: str | None) -> str | None:
    """The recipe name that an existing run directory was made with, so that RUN_DIR alone is enough."""
    if not path or not (saved := Path(path) / "recipe.yaml").is_file():
        return None
    first = saved.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# recipe: ").strip() or None


def effective_recipe(given: str | None = None, overrides: list[str] = (), run: str | None = None) -> Recipe:
    """The recipe in force: the given one, else $RECIPE, else the one a run directory was made with.

    Args:
        given: name or file. overrides: on top of $RECIPE_SET and $SAMPLES.
        run: the run directory, else $RUN_DIR.
    """
    recorded = recorded_recipe(run or os.environ.get("RUN_DIR"))
    name = given or os.environ.get("RECIPE") or recorded or DEFAULT_RECIPE
    sets = [*shlex.split(os.environ.get("RECIPE_SET", "")), *overrides]
    return load_recipe(name, sets, os.environ.get("SAMPLES"))


def main(argv=None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] == ["get"] and len(argv) == 2:
            value = effective_recipe().model_dump(mode="json")
            for part in argv[1].split("."):
                if not isinstance(value, dict) or part not in value:
                    raise ConfigError(f"no key {argv[1]!r} in the recipe")
                value = value[part]
            print(value if not isinstance(value, (dict, list)) else yaml.safe_dump(value).strip())
        elif argv == ["env"]:
            name = os.environ.get("PROFILE") or default_profile()
            load_profile(name, export=False)
            ours, passed = profile_values(name)
            print(f"PROFILE={shlex.quote(name)}")
            for key, value in {**ours, **passed}.items():
                print(f"{key}={shlex.quote(value)}")
        elif argv == ["run-dir"]:
            print(run_dir(effective_recipe()).path)
        elif argv[:1] == ["check"] and len(argv) > 1:
            for item in argv[1:]:
                if item.endswith(".env"):
                    load_profile(item, export=False)
                else:
                    load_recipe(item)
                print(f"{item}: ok")
        else:
            print(__doc__.strip(), file=sys.stderr)
            return 2
    except ConfigError as err:
        print(f"eagle3.config: {err}", file=sys.stderr)
        return err.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
