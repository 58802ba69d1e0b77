"""The verifier as files: what a draft takes of it, whatever else lies there (fault cases 12, 40, 41, 44)."""

from __future__ import annotations

import builtins
import json
import math
import subprocess
import sys
from pathlib import Path

import kimi_tiny
import pytest
import torch
from conftest import ROOT, make_toy_verifier
from safetensors.torch import load_file, save_file

from eagle3.config import load_recipe
from eagle3.contract import ConfigError, StageError
from eagle3.verifier import Verifier, open_verifier

EMBED, NORM, HEAD = kimi_tiny.VERIFIER_TENSORS
OTHER = "audio_tower.model."  # a prefix under which a second text model could lie


@pytest.fixture(scope="module")
def kimi() -> Path:
    """Kimi-K2.5's names in 64 shards, with a vision tower whose tensors end like the text model's."""
    return open_verifier(load_recipe("kimi-tiny")).path


@pytest.fixture(scope="module")
def shapes(kimi) -> dict[str, list[int]]:
    """Tensor name -> shape."""
    verifier = opened(kimi)
    return {name: verifier.shape(name) for name in verifier.weight_map}


def opened(folder: Path) -> Verifier:
    return open_verifier(load_recipe("kimi-tiny", [f"verifier.model={folder}"]))


def hollow(folder: Path, shapes: dict[str, list[int]], like: Path | None = None, **text) -> Path:
    """A verifier whose bf16 weight files, one a tensor, are holes: names and shapes are right, all is zero.

    Args:
        like: folder that config.json is taken from.
        text: changed keys of its text config.
    """
    folder.mkdir(exist_ok=True)
    files = {name: f"model-{i:05d}.safetensors" for i, name in enumerate(shapes)}
    for name, file in files.items():
        size = 2 * math.prod(shapes[name])
        entry = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [0, size]}
        header = json.dumps({name: entry}).encode()
        with open(folder / file, "wb") as f:
            f.write(len(header).to_bytes(8, "little") + header)
            f.truncate(f.tell() + size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if like:
        config = json.loads((like / "config.json").read_text())
        config["text_config"] |= text
        (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- case 40: text model under a prefix ---------------------------------------------------------------------


def test_40_tensors_of_the_text_model_not_of_a_tower(kimi):
    verifier = opened(kimi)
    assert verifier.tensor_names == {"embed": EMBED, "norm": NORM, "head": HEAD}
    stored = [load_file(kimi / verifier.weight_map[name])[name] for name in (EMBED, NORM, HEAD)]
    found = [verifier.embedding(), verifier.norm_weight(), verifier.head()]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, stored, strict=True))


def test_40_only_shards_with_a_candidate_are_opened(kimi, monkeypatch):
    import safetensors

    seen, real = set(), safetensors.safe_open

    def note(file, *args, **kw):
        seen.add(Path(file).name)
        return real(file, *args, **kw)

    monkeypatch.setattr(safetensors, "safe_open", note)
    verifier = opened(kimi)
    verifier.embedding(), verifier.norm_weight(), verifier.head()
    ends = ("embed_tokens.weight", "norm.weight", "head.weight")
    candidates = {f for n, f in verifier.weight_map.items() if n.endswith(ends) and ".layers." not in n}
    assert seen and seen <= candidates and len(candidates) < len(set(verifier.weight_map.values())) == 64


def test_40_ambiguity_names_the_candidates(tmp_path, kimi, shapes):
    second = {OTHER + "embed_tokens.weight": shapes[EMBED], OTHER + "norm.weight": shapes[NORM]}
    hollow(tmp_path / "v", {**shapes, **second, OTHER + "layers.7.mlp.up_proj.weight": [4, 4]}, kimi)
    with pytest.raises(StageError, match="several text models") as found:
        opened(tmp_path / "v").tensor_names  # noqa: B018
    assert EMBED in str(found.value) and OTHER + "embed_tokens.weight" in str(found.value)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (EMBED, None, "no text model with embedding"),
        (NORM, None, f"final norm {NORM}"),
        (NORM, [7], f"final norm {NORM}"),
        (HEAD, [7, kimi_tiny.HIDDEN], f"{HEAD} has shape"),
    ],
    ids=["no embedding", "no norm", "short norm", "short head"],
)
def test_40_missing_and_misshapen_tensors_are_named(tmp_path, kimi, shapes, name, shape, words):
    changed = {n: shape if n == name else s for n, s in shapes.items() if shape or n != name}
    hollow(tmp_path / "v", changed, kimi)
    with pytest.raises(StageError, match=words):
        opened(tmp_path / "v").tensor_names  # noqa: B018


def test_reading_three_tensors_costs_their_size_whatever_else_lies_there(tmp_path):
    """64 files of 1.3 GB together, of which 67 MB are the three tensors: peak memory is about those."""
    size = {"embed_tokens": [65_536, 256], "norm": [256]}
    names = {f"model.{name}.weight": shape for name, shape in size.items()}
    names |= {f"model.layers.{i % 8}.mlp.experts.{i}.weight": [10_000, 1_000] for i in range(61)}
    hollow(tmp_path, {**names, "lm_head.weight": [65_536, 256]})
    code = r"""if True:
        import re, sys, torch, safetensors.torch
        from pathlib import Path
        from eagle3.verifier import Verifier

        def memory(key):
            return 1024 * int(re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

        config = {"num_hidden_layers": 8, "vocab_size": 65536, "hidden_size": 256, "tie_word_embeddings": 0}
        v = Verifier(Path(sys.argv[1]), config, [2, 4, 5])
        before = memory("VmRSS")
        kept = [t + 1 for t in (v.embedding(), v.tensor(v.tensor_names["norm"]), v.head())]
        print(sum(t.nbytes for t in kept), memory("VmHWM") - before)
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    three, peak = map(int, done.stdout.split())
    assert three == 2 * (2 * 65_536 * 256 + 256)
    # Twice each: the pages of the files, and the sums that keep them from staying untouched.
    assert 1.8 * three < peak < 2.4 * three


# --- case 41: tied weights ----------------------------------------------------------------------------------


def test_41_an_untied_verifier_without_a_head_is_an_error(tmp_path, kimi, shapes):
    """The outer config of Kimi-K2.5 says tied; the text config, which counts, says untied."""
    hollow(tmp_path / "v", {n: s for n, s in shapes.items() if n != HEAD}, kimi)
    verifier = opened(tmp_path / "v")
    assert verifier.config["tie_word_embeddings"] is True and not verifier.tied
    with pytest.raises(StageError, match=f"{HEAD} is missing and the text config does not tie it") as found:
        verifier.head()
    assert "vision_tower.lm_head.weight" in str(found.value)  # listed as a candidate, not taken


def test_41_a_tied_text_config_gives_the_embedding(tmp_path, kimi, shapes):
    without = {n: s for n, s in shapes.items() if n != HEAD}
    hollow(tmp_path / "v", without, kimi, tie_word_embeddings=True)
    assert opened(tmp_path / "v").tensor_names["head"] == EMBED


def test_41_a_flat_untied_verifier_without_a_head(tmp_path):
    file = make_toy_verifier(tmp_path) / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != "lm_head.weight"}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(StageError, match=r"lm_head\.weight is missing"):
        Verifier(tmp_path, config, [2, 4, 5]).head()
    verifier = Verifier(tmp_path, {**config, "tie_word_embeddings": True}, [2, 4, 5])
    assert torch.equal(verifier.head(), verifier.embedding())


# --- case 12: remote code -----------------------------------------------------------------------------------


def never_ask(monkeypatch):
    """No terminal is attached: asking, or waiting for an answer, is a fault."""

    def refuse(*_):
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr(builtins, "input", refuse)
    monkeypatch.setattr(sys, "stdin", None)


@pytest.mark.parametrize("allowed", [True, False])
def test_12_a_draft_is_built_without_running_the_verifiers_code(kimi, monkeypatch, allowed):
    """04 reads config and weights as files: nothing of the folder's Python runs, flag or no flag."""
    from eagle3 import draft
    from eagle3.vocab import VocabMap

    never_ask(monkeypatch)
    before = {name for name in sys.modules if name.startswith("transformers_modules")}
    # A hub id, as in the real recipe, ends up in the draft's config; nothing may be looked up by it.
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 64}
    sets = [f"draft.{k}={v}" for k, v in {**sizes, "vocab_size": "full"}.items()]
    recipe = load_recipe("kimi-k2.5", [*sets, f"verifier.trust_remote_code={allowed}"])
    verifier = opened(kimi)
    config = draft.build_config(recipe, verifier)
    assert config.speculators_config.verifier.name_or_path == "moonshotai/Kimi-K2.5"
    n = verifier.vocab_size
    everything = VocabMap(torch.zeros(n, dtype=torch.long), torch.ones(n, dtype=torch.bool))
    model = draft.build_draft(config, everything, verifier)
    assert torch.equal(model.embed_tokens.weight, verifier.embedding())
    assert {name for name in sys.modules if name.startswith("transformers_modules")} == before


def test_12_the_tokenizer_runs_its_code_only_if_the_recipe_says_so(kimi, monkeypatch):
    never_ask(monkeypatch)
    config = json.loads((kimi / "config.json").read_text())
    assert Verifier(kimi, config, [2, 4, 5], trust_remote_code=True).tokenizer().encode("a")
    with pytest.raises(ConfigError, match=r"set verifier\.trust_remote_code: true"):
        Verifier(kimi, config, [2, 4, 5]).tokenizer()


# --- case 44: head size -------------------------------------------------------------------------------------


def test_44_head_size_is_the_recipes_not_the_rotary_part():
    """hidden 7168, 64 heads: the verifier's config answers 64 (rotary), a guess 112, the draft has 128."""
    from eagle3.draft import build_config
    from eagle3.flat import read_speculators

    recipe = load_recipe("kimi-k2.5")
    text = json.loads(json.dumps(kimi_tiny.config(False, kimi_tiny.CPU_HEADS)["text_config"]))
    text |= {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "vocab_size": 163840}
    verifier = Verifier(Path("kimi"), {"text_config": text}, [2, 30, 58])
    assert verifier.text["head_dim"] == 64
    config = build_config(recipe, verifier)
    layer = config.transformer_layer_config
    assert (layer.num_attention_heads, layer.head_dim, layer.hidden_size) == (64, 128, 7168)
    flat = read_speculators(json.loads(config.to_json_string()), "04")
    assert flat.head_dim == 128


def test_44_a_recipe_without_a_head_size_is_refused(tmp_path):
    import yaml

    recipe = yaml.safe_load((ROOT / "configs/recipes/kimi-k2.5.yaml").read_text())
    del recipe["draft"]["head_dim"]
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(ConfigError, match=r"draft\.head_dim is missing"):
        load_recipe(str(tmp_path / "r.yaml"))
