"""What all tests share: stages by path, small verifiers, and one real end-to-end run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A port of our own, so that a server on the profile's port does not disturb the tests.
TEST_PORT = "8191"

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def load_stage(filename: str):
    """A numbered script as a module: load_stage("03_extract_hidden.py").main([...]) == 0."""
    name = "stage_" + filename.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, ROOT / filename)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # register before executing
    spec.loader.exec_module(module)
    return module


def run_stage_cmd(script: str, *args, env: dict | None = None, timeout: float = 600):
    """A stage by its real command; output is captured as text."""
    command = [sys.executable, str(ROOT / script), *map(str, args)]
    if script.endswith(".sh"):
        command = [str(ROOT / script), *map(str, args)]
    clean = {k: v for k, v in os.environ.items() if k not in ("RECIPE", "PROFILE", "RUN_DIR", "SAMPLES")}
    environment = {**clean, "PYTHON": sys.executable, "VERIFIER_PORT": TEST_PORT, **(env or {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def make_toy_verifier(out: Path, **config) -> Path:
    """A random Llama of 8 layers, hidden 32, vocabulary 64, untied, with a word-level tokenizer.

    Args:
        out: folder to write.
        config: LlamaConfig values to change.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<user>", "<assistant>", "<system>", "<tool>", "<end>"]
    words += [f"w{i}" for i in range(64 - len(words))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    torch.manual_seed(0)
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": 5,
        **config,
    }
    model = LlamaForCausalLM(LlamaConfig(**values)).to(torch.bfloat16)
    with torch.no_grad():  # a gain other than 1 shows a forgotten final norm
        model.model.norm.weight.mul_(torch.linspace(0.5, 1.5, values["hidden_size"]))
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def toy_verifier(tmp_path_factory) -> Path:
    """See `make_toy_verifier`."""
    return make_toy_verifier(tmp_path_factory.mktemp("toy") / "verifier")


@pytest.fixture(scope="session")
def smol() -> Path:
    """Folder of SmolLM2-135M-Instruct, made once in the cache."""
    from eagle3.config import load_recipe
    from eagle3.verifier import open_verifier

    return open_verifier(load_recipe("smollm2-135m")).path


# The end-to-end run of the tests: the default recipe on a small budget. Few answers, so a weak draft; what
# the tests look at is that every stage did its work and that the figures agree with each other.
E2E_SAMPLES = "48"
E2E_SET = (
    "train.epochs=3 train.tokens_per_step=512 answers.max_tokens=64 evaluate.max_tokens=48 "
    "evaluate.repeats=2 evaluate.timed_prompts=4 evaluate.concurrency=[1,4] draft.min_coverage=0.9 "
    "states.shard_bytes=20000000 'data.heldout=[{path: configs/data/heldout.jsonl, limit: 24}]'"
)


@pytest.fixture(scope="session")
def e2e_run(tmp_path_factory):
    """RunDir of one real run of ./run_pipeline.sh (real vLLM, real speculators); read only."""
    from eagle3.contract import RunDir

    folder = tmp_path_factory.mktemp("e2e") / "run"
    done = run_stage_cmd(
        "run_pipeline.sh",
        env={
            "SETUP": "off",
            "RUN_DIR": str(folder),
            "SAMPLES": E2E_SAMPLES,
            "RECIPE_SET": E2E_SET,
            "PROFILE": "cpu-smoke",
        },
        timeout=1500,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    (folder.parent / "output.txt").write_text(done.stdout + "\n----\n" + done.stderr)
    return RunDir(folder)


def stage_record(run, number: str) -> dict:
    """stage.json of a stage of a run."""
    return json.loads((run.stage(number) / "stage.json").read_text())
