"""The test verifier: names and shards as in Kimi-K2.5, template and tokenizer behave, the language holds."""

import json
import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kimi_tiny

ROOT = Path(__file__).resolve().parents[1]
THINK = "<|im_assistant|>assistant<|im_middle|><think>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, record_testsuite_property):
    out = tmp_path_factory.mktemp("kimi-tiny")
    start = time.monotonic()
    kimi_tiny.build(out)
    record_testsuite_property("kimi_tiny_build_seconds", round(time.monotonic() - start, 1))
    return out


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def language():
    return kimi_tiny.Language(0)


def render(tokenizer, messages, **more) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **more)


def encode(tokenizer, row, **more) -> list[int]:
    """A row of `prompts` up to its last answer, as the server would render it."""
    return tokenizer.apply_chat_template(
        row["messages"][:-1],
        tools=row.get("tools"),
        add_generation_prompt=True,
        return_dict=False,
        **more,
    )


def stored(folder) -> dict[str, str]:
    """Tensor name -> file, read from the shards themselves."""
    from safetensors import safe_open

    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            names = list(shard.keys())
        assert names, f"{path.name} is empty"
        assert not out.keys() & set(names)
        out |= dict.fromkeys(names, path.name)
    return out


def index(folder) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_index_and_shards_agree(folder):
    assert len(list(folder.glob("model-*-of-000064.safetensors"))) == 64
    assert stored(folder) == index(folder)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 62, 200, 300])
def test_any_number_of_shards(folder, shards):
    assert set(kimi_tiny.shard_names(index(folder), shards).values()) == set(range(shards))


def test_too_many_shards_are_refused():
    with pytest.raises(ValueError, match="9 shards for 1 tensors"):
        kimi_tiny.shard_names({"language_model.lm_head.weight": None}, 9)


def test_names_are_the_real_ones_and_decoys_end_alike(folder):
    names = index(folder)
    layer = "language_model.model.layers.7."
    for name in (
        *kimi_tiny.VERIFIER_TENSORS,
        "language_model.model.layers.0.mlp.gate_proj.weight",
        layer + "self_attn.kv_a_proj_with_mqa.weight",
        layer + "mlp.gate.e_score_correction_bias",
        layer + "mlp.experts.7.down_proj.weight",
        layer + "mlp.shared_experts.up_proj.weight",
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "mm_projector.proj.0.weight",
    ):
        assert name in names
    for end in ("embed_tokens.weight", "norm.weight", "lm_head.weight"):
        decoys = [n for n in names if n.startswith("vision_tower.") and n.endswith("." + end)]
        real = [n for n in kimi_tiny.VERIFIER_TENSORS if n.endswith(end)]
        assert len(min(decoys, key=len)) < len(real[0]), "the shortest name with this end must be a decoy"


def test_config_nests_as_the_real_one(folder):
    settings = json.loads((folder / "config.json").read_text())
    text = settings["text_config"]
    assert (settings["model_type"], text["model_type"]) == ("kimi_k25", "deepseek_v3")
    assert (settings["tie_word_embeddings"], text["tie_word_embeddings"]) == (True, False)
    assert (text["kv_lora_rank"], text["qk_rope_head_dim"], text["first_k_dense_replace"]) == (512, 64, 1)
    assert {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}.items() <= text["rope_scaling"].items()
    assert "vocab_size" not in settings and "hidden_size" not in settings


def test_variants_for_fault_cases(tmp_path):
    out = kimi_tiny.build(
        tmp_path, shards=3, drop=("language_model.lm_head.weight",), decoys=False, text={"rope_theta": None}
    )
    assert stored(out) == index(out)
    assert "language_model.lm_head.weight" not in index(out)
    assert not [n for n in index(out) if n.startswith("vision_tower.") and n.endswith("embed_tokens.weight")]
    assert "rope_theta" not in json.loads((out / "config.json").read_text())["text_config"]


def test_tokenizer_needs_remote_code(folder):
    from transformers import AutoTokenizer

    # transformers 5 blames sentencepiece and tiktoken here; naming the flag is the pipeline's job.
    with pytest.raises(ValueError, match="Couldn't instantiate the backend tokenizer"):
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def test_tokenizer_round_trips(tokenizer):
    assert not tokenizer.is_fast
    assert len(tokenizer) == kimi_tiny.VOCAB
    for text in (
        "Plain words, 12345 and punctuation?!\n\n  indented\t",
        "山水和河流。 mixed 文字",
        "naïve \U0001f30a é",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [kimi_tiny.ID["<|im_end|>"]]
    assert tokenizer.encode(" maple") == [tokenizer.convert_tokens_to_ids("Ġmaple")]
    ids = [kimi_tiny.ID["<think>"], *tokenizer.encode(" maple"), kimi_tiny.ID["<|im_end|>"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think> maple"


def test_generation_prompt(tokenizer):
    ask = [{"role": "user", "content": "Where?"}]
    assert render(tokenizer, ask) == "<|im_user|>user<|im_middle|>Where?<|im_end|>"
    assert render(tokenizer, ask, add_generation_prompt=True).endswith("<|im_end|>" + THINK)
    text = render(tokenizer, ask, add_generation_prompt=True, thinking=False)
    assert text.endswith("<|im_end|>" + THINK + "</think>")


def test_thinking_is_stripped_from_history_and_kept_in_the_turn(tokenizer):
    call = {
        "id": "functions.look:0",
        "type": "function",
        "function": {"name": "look", "arguments": {"at": "a"}},
    }
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "first answer", "reasoning_content": "old thought"},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": None, "reasoning_content": "new thought", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "functions.look:0"},
    ]
    text = render(tokenizer, messages, add_generation_prompt=True)
    assert "old thought" not in text and "<think></think>first answer<|im_end|>" in text
    assert (
        "<think>new thought</think><|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"at": "a"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.look:0\nseen<|im_end|>" in text
    )
    assert "None" not in text
    # Once the turn is answered it is history, and its thinking goes too.
    done = [*messages, {"role": "assistant", "content": "done", "reasoning_content": "last thought"}]
    assert "thought" not in render(tokenizer, done)


def test_tools_and_system_text(tokenizer):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    text = render(tokenizer, [{"role": "system", "content": "Be brief."}], tools=[tool])
    assert text.startswith('<|im_system|>tool_declare<|im_middle|>[{"type": "function"')
    assert text.endswith("<|im_end|><|im_system|>system<|im_middle|>Be brief.<|im_end|>")


def test_answers_vary_and_end(language, tokenizer):
    answers = []
    for row in kimi_tiny.prompts(80, seed=5):
        ids = encode(tokenizer, row)
        answers.append(tuple(language.answer(ids)))
        assert answers[-1][-1] == language.end
        assert answers[-1].count(language.unthink) == 1
        steps, ids = [], list(ids)
        for _ in range(3):
            steps.append(language.next_token(ids))
            ids.append(steps[-1])
        assert steps == list(answers[-1][:3])
    assert len(set(answers)) > 30
    assert min(map(len, answers)) >= 10 and max(map(len, answers)) <= 70
    assert len({len(a) for a in answers}) > 15
    assert not any(len(set(a)) < len(a) for a in answers), "no word comes twice in an answer"


def test_the_model_speaks_the_language(folder, tokenizer, language):
    """transformers on the text weights: the next token by a wide margin, and another one a layer earlier."""
    import torch

    model = kimi_tiny.load_text_model(folder, torch.float32)
    for row in kimi_tiny.prompts(8, seed=6):
        prompt = encode(tokenizer, row, thinking=random.Random(row["id"]).random() < 0.7)
        answer = torch.tensor(language.answer(prompt))
        with torch.no_grad():
            out = model.model(torch.tensor([prompt + answer.tolist()]), output_hidden_states=True)
            states = [s[0, len(prompt) - 1 : -1] for s in out.hidden_states]  # the last one is normed
            logits = model.lm_head(states[-1])
            early = [model.lm_head(model.model.norm(s)).argmax(-1) for s in states[:-1]]
        right = logits.gather(1, answer[:, None])[:, 0]
        margin = right - logits.scatter(1, answer[:, None], float("-inf")).amax(1)
        assert margin.min() > 4, f"{row['id']}: {margin.min():.1f}"
        assert not (early[7] == answer).any(), "layer 7 must not know the next token"
        for lower, upper in zip(early[1:], [*early[2:], answer]):
            assert (lower != upper).float().mean() > 0.9, "each layer changes the top token"
        for i, lower in enumerate(states[:-1]):
            for upper in states[i + 1 : -1]:  # the last few words look ahead to the same <|im_end|>
                apart = (upper - lower).norm(dim=1) / upper.norm(dim=1)
                assert apart.min() > 0.1 and apart.median() > 0.3, "states of two layers must differ"


def test_int4_variant_packs_routed_experts_only(tmp_path, language, tokenizer):
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from safetensors import safe_open

    out = kimi_tiny.build(tmp_path, shards=8, int4=True)
    names = index(out)
    assert stored(out) == names
    packed = [n for n in names if n.endswith(".weight_packed")]
    assert len(packed) == 7 * 8 * 3 and all(".mlp.experts." in n for n in packed)
    settings = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in settings, "only the text config has it, as in the real file"
    assert settings["text_config"]["quantization_config"]["format"] == "pack-quantized"
    stem = packed[0].removesuffix("_packed")
    with safe_open(out / names[packed[0]], "pt") as shard:
        values, scale, shape = (shard.get_tensor(stem + end) for end in ("_packed", "_scale", "_shape"))
    theirs = unpack_from_int32(values, 4, torch.Size(shape.tolist()))
    theirs = theirs.reshape(theirs.shape[0], -1, 32).float() * scale.float()[..., None]
    assert torch.equal(theirs.flatten(1), kimi_tiny.unpack_int4(values, scale))

    model = kimi_tiny.load_text_model(out, torch.float32)
    prompt = encode(tokenizer, kimi_tiny.prompts(1, seed=6)[0])
    answer = language.answer(prompt)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize(
    ("file", "n", "seed"), [("kimi-tiny.jsonl", 300, 0), ("kimi-tiny-heldout.jsonl", 24, 1)]
)
def test_recipe_data_is_what_prompts_gives(file, n, seed):
    rows = [
        json.loads(line) for line in (ROOT / "configs/data" / file).read_text(encoding="utf-8").splitlines()
    ]
    assert rows == kimi_tiny.prompts(n, seed)
    assert {r["domain"] for r in rows} >= {"chat", "zh", "code", "maths", "tools", "multi-turn", "thinking"}
    assert kimi_tiny.prompts(8, seed) == rows[:8]


def test_script_writes_the_folder(tmp_path, capsys):
    out = tmp_path / "out"
    assert kimi_tiny.main([str(out), "--shards", "4", "--heads", "8", "128", "128"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert len(list(out.glob("*.safetensors"))) == 4
    assert json.loads((out / "config.json").read_text())["text_config"]["v_head_dim"] == 128
