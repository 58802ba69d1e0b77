"""05_convert: the table of tensors and keys, export, import, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import toy_drafts
from conftest import load_stage, make_toy_verifier, run_stage_cmd
from toy_drafts import FLAGS, YARN, exported, open_toy, toy_checkpoint, toy_draft

from eagle3 import flat, foreign, lazy
from eagle3.contract import ConfigError, StageError, read_json

WINDOW = {"sliding_window": 8, "layer_types": ("sliding_attention",)}


@pytest.fixture(scope="module")
def verifier_path(tmp_path_factory):
    return make_toy_verifier(tmp_path_factory.mktemp("convert") / "v", max_position_embeddings=8192)


@pytest.fixture()
def verifier(verifier_path):
    return open_toy(verifier_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, verifier_path):
    """An export that no test changes: (checkpoint, folders, draft, tensors)."""
    verifier = open_toy(verifier_path)
    return exported(tmp_path_factory.mktemp("plain"), verifier, toy_draft(verifier, rope=YARN))


def edit_config(folder, **changes):
    """Change keys of a folder's config; a value of `...` deletes the key."""
    config = read_json(folder / "config.json")
    for key, value in changes.items():
        config.pop(key, None)
        if value is not ...:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    """Apply `change(dict)` to a folder's tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def copy(plain, tmp_path, form="vllm"):
    return shutil.copytree(plain[1][form], tmp_path / "copy")


# --- export -------------------------------------------------------------------------------------------------


def test_files_are_plain_safetensors_in_bf16(plain, verifier):
    import torch
    from safetensors.torch import load_file

    checkpoint, folders, draft, _ = plain
    source = load_file(checkpoint / "model.safetensors")
    ours, theirs = (load_file(folders[f] / "model.safetensors") for f in ("vllm", "sglang"))
    assert source["fc.weight"].dtype == torch.float32
    for name, tensor in source.items():
        assert torch.equal(ours[name], tensor.bfloat16())
        assert torch.equal(theirs[name.replace("layers.0.", "midlayer.")], tensor.bfloat16())
    assert ours.keys() == source.keys() | {"lm_head.weight", "d2t", "t2d"}
    assert torch.equal(
        ours["lm_head.weight"], verifier.head()[ours["t2d"]]
    )  # frozen head: the verifier's rows


def test_trained_head_wins_over_the_verifiers(tmp_path, verifier):
    import torch
    from safetensors.torch import load_file

    checkpoint, folders, _, _ = exported(tmp_path, verifier, toy_draft(verifier), train_head=True)
    trained = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_file(folders["vllm"] / "model.safetensors")["lm_head.weight"], trained.bfloat16())


def test_embedding_only_when_asked_for(tmp_path, verifier, plain):
    import torch
    from safetensors.torch import load_file

    assert flat.EMBEDDING not in load_file(plain[1]["vllm"] / "model.safetensors")
    _, folders, _, _ = exported(tmp_path, verifier, toy_draft(verifier), with_embeddings=True)
    assert torch.equal(load_file(folders["vllm"] / "model.safetensors")[flat.EMBEDDING], verifier.embedding())


def test_full_vocabulary_has_no_table(tmp_path, verifier):
    _, folders, _, _ = exported(tmp_path, verifier, toy_draft(verifier, draft_vocab_size=64))
    assert not {"d2t", "t2d"} & lazy.open_tensors(folders["vllm"]).keys()


@pytest.mark.parametrize(
    "ids, theirs", [((2, 4, 5), [1, 3, 4]), ((3, 4, 6), [3, 4, 6]), ((2, 3, 4, 5), [1, 2, 3, 4])]
)
def test_24_layer_ids_verbatim_for_vllm_and_in_sglangs_numbering(tmp_path, verifier, ids, theirs):
    _, folders, _, _ = exported(tmp_path, verifier, toy_draft(verifier, layer_ids=ids))
    config = read_json(folders["vllm"] / "config.json")
    assert config["eagle_aux_hidden_state_layer_ids"] == list(ids)
    assert config["num_aux_hidden_states"] == len(ids)  # where vLLM's Llama draft takes the width of fc from
    assert "eagle_config" not in config
    nested = read_json(folders["sglang"] / "config.json")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert nested == theirs
    assert foreign.import_draft(folders["sglang"], tmp_path / "back", verifier)["layer_ids"] == list(ids)


def test_36_rope_in_both_spellings_reads_the_same(plain):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = read_json(plain[1]["vllm"] / "config.json")
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    tables = []
    for spelling in (config, new, old):
        rope = LlamaRotaryEmbedding(LlamaConfig(**spelling))
        tables.append((rope.inv_freq, rope.attention_scaling))
    assert all(torch.equal(t, tables[0][0]) and s == 1.0 for t, s in tables)  # 1.42 without the mscale pair
    assert config["rope_theta"] == 50000.0 and config["rope_scaling"]["type"] == "yarn"
    # vLLM 0.26 and SGLang know no mscale: (0.1 ln 64 + 1) * attn_factor is their magnitude.
    assert (0.1 * math.log(64) + 1) * config["rope_parameters"]["attn_factor"] == pytest.approx(1.0)


def test_38_position_limit_is_the_verifiers(tmp_path, verifier):
    draft = toy_draft(verifier, max_position_embeddings=2048)
    _, folders, _, _ = exported(tmp_path, verifier, draft)
    assert read_json(folders["vllm"] / "config.json")["max_position_embeddings"] == 8192


def test_44_head_size_is_written_and_never_guessed(tmp_path, verifier, plain):
    assert read_json(plain[1]["vllm"] / "config.json")["head_dim"] == 32  # hidden size over heads is 16
    checkpoint = toy_checkpoint(tmp_path / "c", verifier, toy_draft(verifier))
    config = read_json(checkpoint / "config.json")
    del config["transformer_layer_config"]["head_dim"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(StageError, match="head_dim is missing"):
        flat.open_checkpoint(checkpoint, verifier)


def test_broken_weights_are_not_exported(tmp_path, verifier):
    checkpoint = toy_checkpoint(tmp_path / "checkpoint", verifier, toy_draft(verifier))
    edit_tensors(checkpoint, lambda t: t["layers.0.mlp.up_proj.weight"].view(-1)[5:6].fill_(float("nan")))
    draft, tensors = flat.open_checkpoint(checkpoint, verifier)
    with pytest.raises(StageError, match="layers.0.mlp.up_proj.weight holds NaN"):
        flat.export(draft, tensors, {"vllm": tmp_path / "vllm"})


@pytest.mark.parametrize("change, why", [({"norm_before_residual": True}, "norm_before_residual"),
                                         ({"layer_ids": (1, 4, 5)}, "start with 1")])  # fmt: skip
def test_what_sglang_would_serve_wrong_is_not_written_for_it(tmp_path, verifier, change, why):
    _, folders, draft, _ = exported(tmp_path, verifier, toy_draft(verifier, **change))
    assert list(folders) == ["vllm"] and why in flat.sglang_refuses(draft)


# --- the account --------------------------------------------------------------------------------------------


def other(value):
    """A value that differs from the given one and keeps its type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [other(value[0]), *value[1:]]
    if isinstance(value, dict):
        key = sorted(value)[0]
        return {**value, key: other(value[key])}
    return 1  # null


@pytest.mark.parametrize("form", flat.FORMS)
@pytest.mark.parametrize("key", [key.name for key in flat.KEYS])
def test_every_key_is_accounted_for(plain, key, form):
    draft, config = plain[2], read_json(plain[1][form] / "config.json")
    flat.account_config(config, draft, form, "x")
    if key not in config:
        with pytest.raises(StageError, match=f"unmapped.*{key}"):
            flat.account_config({**config, key: 1}, draft, form, "x")
        return
    with pytest.raises(StageError, match=f"unfilled.*{key}"):
        flat.account_config({k: v for k, v in config.items() if k != key}, draft, form, "x")
    with pytest.raises(StageError, match=f"{key} is"):
        flat.account_config({**config, key: other(config[key])}, draft, form, "x")


@pytest.mark.parametrize("name", flat.wanted_tensors(toy_drafts.bare_draft()))
def test_every_tensor_is_accounted_for(tmp_path, plain, name):
    _, _, draft, tensors = plain
    folder = copy(plain, tmp_path)
    flat.account_folders({"vllm": folder}, draft, tensors)
    edit_tensors(folder, lambda t: t.update({name: ~t[name] if name == "t2d" else t[name] + 1}))
    with pytest.raises(StageError, match=name):
        flat.account_folders({"vllm": folder}, draft, tensors)
    edit_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(StageError, match=f"unfilled.*{name}"):
        flat.account_folders({"vllm": folder}, draft, tensors)


def test_39_extra_and_misshapen_tensors_are_named(tmp_path, plain):
    import torch

    folder = copy(plain, tmp_path)
    edit_tensors(folder, lambda t: t.update({"layers.0.extra.weight": torch.ones(2)}))
    with pytest.raises(StageError, match="unmapped.*layers.0.extra.weight"):
        flat.account_folders({"vllm": folder}, plain[2], plain[3])
    folder = copy(plain, tmp_path / "2")
    edit_tensors(folder, lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].contiguous()}))
    with pytest.raises(StageError, match=r"fc.weight has shape \[32, 64\], the config says \[32, 96\]"):
        flat.account_folders({"vllm": folder}, plain[2], plain[3])


@pytest.mark.parametrize("form, message", [("absolute", "absolute ids"), ("range", "plain range"),
                                           ("duplicate", "twice"), ("mask", "contradict")])  # fmt: skip
def test_32_only_offsets_pass(tmp_path, plain, verifier, form, message):
    import torch

    def change(t):
        ids = t["d2t"] + torch.arange(16)
        if form == "absolute":
            t["d2t"] = ids
        elif form == "range":
            t["d2t"] = torch.arange(16)
        elif form == "duplicate":
            t["d2t"][1] = ids[0] - 1
        else:  # a mask of as many other ids
            t["t2d"] = t["t2d"].roll(1)

    folder = copy(plain, tmp_path)
    edit_tensors(folder, change)
    with pytest.raises(StageError, match=message):
        foreign.import_draft(folder, tmp_path / "back", verifier)


def test_33_reduced_vocabulary_without_its_table_is_refused(tmp_path, plain, verifier):
    folder = copy(plain, tmp_path)
    edit_tensors(folder, lambda t: (t.pop("d2t"), t.pop("t2d")))
    with pytest.raises(StageError, match="draft_vocab_size 16 of 64 without its table"):
        foreign.import_draft(folder, tmp_path / "back", verifier)


@pytest.mark.parametrize(
    "flag, weight", [("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")]
)
def test_34_flags_are_paired_with_their_weights(tmp_path, verifier, flag, weight):
    _, folders, draft, tensors = exported(tmp_path, verifier, toy_draft(verifier, **{flag: True}))
    assert weight in tensors
    edit_config(folders["vllm"], **{flag: ...})
    with pytest.raises(StageError, match=f"{flag} is false but"):
        foreign.import_draft(folders["vllm"], tmp_path / "back", verifier)
    edit_config(folders["vllm"], **{flag: True})
    edit_tensors(folders["vllm"], lambda t: t.pop(weight))
    with pytest.raises(StageError, match=f"{flag} is true but"):
        foreign.import_draft(folders["vllm"], tmp_path / "back", verifier)


# --- import -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [
    {}, {"fc_norm": True, "norm_output": True, "rope": YARN}, {"norm_before_fc": True},
    {"draft_vocab_size": 64, **WINDOW}, {"num_hidden_layers": 2, "layer_types": ("full_attention",) * 2},
])  # fmt: skip
def test_round_trips_are_bit_equal(tmp_path, verifier, change):
    """midlayer.* -> speculators -> vLLM -> speculators -> midlayer.*, embedding included."""
    draft = toy_draft(verifier, **change)
    _, folders, _, _ = exported(tmp_path, verifier, draft, train_head=True, with_embeddings=True)
    start, at = folders["sglang"], folders["sglang"]
    for i, form in enumerate(("vllm", "sglang")):
        foreign.import_draft(at, tmp_path / f"c{i}", verifier)
        read, tensors = flat.open_checkpoint(tmp_path / f"c{i}", verifier)
        assert replace(read, rope=dict(sorted(draft.rope.items()))) == read
        at = tmp_path / f"{form}{i}"
        flat.export(read, flat.export_tensors(read, tensors, verifier, True), {form: at})
    for file in ("model.safetensors", "config.json"):
        assert (at / file).read_bytes() == (start / file).read_bytes()


def eagle_form(tmp_path, verifier, plain, **config):
    """The same draft as EAGLE publishes it: pytorch_model.bin, midlayer.*, a short config."""
    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "eagle"
    folder.mkdir()
    tensors = load_file(plain[1]["sglang"] / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    short = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 64,
        "draft_vocab_size": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
        "torch_dtype": "float16",
        "use_cache": True, "pad_token_id": 0, **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(short))
    return folder


def test_import_of_eagles_own_form(tmp_path, verifier, plain):
    folder = eagle_form(tmp_path, verifier, plain)
    meta = foreign.import_draft(folder, tmp_path / "out", verifier)
    draft, tensors = flat.open_checkpoint(tmp_path / "out", verifier)
    assert meta["imported"]["form"] == "sglang" and draft.layer_ids == (
        2,
        4,
        5,
    )  # [2, n/2, n-3], as all read it
    assert draft.head_dim == 32  # from q_proj, not 32 / 2 heads
    assert (
        draft.rope == {"rope_type": "default", "rope_theta": 10000.0}
        and draft.max_position_embeddings == 8192
    )
    assert not any((draft.norm_before_residual, draft.norm_before_fc, draft.fc_norm, draft.norm_output))
    assert (tmp_path / "out" / "COMPLETE").is_file() and (
        tmp_path / "out" / "vocab_map.safetensors"
    ).is_file()


@pytest.mark.parametrize("nested, given, result", [([1, 3, 4], None, [2, 4, 5]), ([3, 4, 6], None, [3, 4, 6]),
                                                   (None, [3, 5, 6], [3, 5, 6]),
                                                   ([1, 3, 4], [1, 3, 4], ConfigError)])  # fmt: skip
def test_import_reads_nested_layer_ids_in_their_own_numbering(
    tmp_path, verifier, plain, nested, given, result
):
    eagle = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": nested, "use_aux_hidden_state": True}}
    folder = eagle_form(tmp_path, verifier, plain, **(eagle if nested else {}))
    if result is ConfigError:
        with pytest.raises(ConfigError, match=r"layers \[2, 4, 5\]"):
            foreign.import_draft(folder, tmp_path / "out", verifier, given)
    else:
        assert foreign.import_draft(folder, tmp_path / "out", verifier, given)["layer_ids"] == result


def test_import_of_an_older_speculators_checkpoint(tmp_path, verifier):
    """As speculators 0.3 saved it: no new flags, old rope spelling, the verifier's copies in the weights."""
    import torch
    from safetensors.torch import load_file, save_file

    source = toy_checkpoint(tmp_path / "new", verifier, toy_draft(verifier, rope=YARN), train_head=True)
    config = read_json(source / "config.json")
    for key in ("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad", "auto_map"):
        config.pop(key, None)
    layer = config["transformer_layer_config"]
    rope = layer.pop("rope_parameters")
    layer["rope_theta"], layer["rope_scaling"] = rope.pop("rope_theta"), rope
    layer["torch_dtype"], config["speculators_version"] = "bfloat16", "0.3.0"
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(config))
    tensors = {n: t.bfloat16() for n, t in load_file(source / "model.safetensors").items()}
    maps = load_file(source / "vocab_map.safetensors")
    extra = {"embed_tokens.weight": verifier.embedding(), "verifier_norm.weight": torch.ones(32)}
    save_file({**tensors, **maps, **extra}, old / "model.safetensors")
    meta = foreign.import_draft(old, tmp_path / "out", verifier)
    read, found = flat.open_checkpoint(tmp_path / "out", verifier)
    assert meta["imported"]["form"] == "speculators" and not meta["own_embedding"]
    assert read.rope == dict(sorted(YARN.items()))
    assert all(torch.equal(found[n].whole().bfloat16(), t) for n, t in tensors.items())


def test_import_keeps_an_embedding_of_its_own(tmp_path, verifier, plain):
    folder = copy(plain, tmp_path)
    edit_tensors(folder, lambda t: t.update({flat.EMBEDDING: verifier.embedding() + 1}))
    assert foreign.import_draft(folder, tmp_path / "out", verifier)["own_embedding"]
    draft, tensors = flat.open_checkpoint(tmp_path / "out", verifier)
    assert flat.EMBEDDING in flat.export_tensors(draft, tensors, verifier, with_embeddings=False)


def test_import_drops_identity_maps_of_a_full_vocabulary(tmp_path, verifier):
    import torch

    _, folders, _, _ = exported(tmp_path, verifier, toy_draft(verifier, draft_vocab_size=64), train_head=True)
    identity = {"d2t": torch.zeros(64, dtype=torch.long), "t2d": torch.ones(64, dtype=torch.bool)}
    edit_tensors(folders["sglang"], lambda t: t.update(identity))  # as SpecForge writes them
    foreign.import_draft(folders["sglang"], tmp_path / "out", verifier)


@pytest.mark.parametrize("config, message", [
    ({"parallel_drafting": True}, "parallel_drafting=True"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM"),
    ({"rope_theta": 10000.0}, r"different bases \[10000.0, 50000.0\]"),
    ({"rope_parameters": {**YARN, "attn_factor": 1.0}, "rope_scaling": ...}, "attn_factor 1.0"),
    ({"rope_parameters": {**YARN, "extrapolation_factor": 2.0}, "rope_scaling": ...}, "extrapolation_factor"),
    ({"rope_scaling": None}, "rope_scaling None and rope_parameters"),
    ({"rope_parameters": {k: v for k, v in YARN.items() if k != "mscale"}, "rope_scaling": ...},
     "mscale_all_dim"),
    ({"target_hidden_size": 64}, "target_hidden_size 64"),
    ({"num_aux_hidden_states": 4}, "num_aux_hidden_states 4"),
    ({"vocab_size": 128}, "vocab_size 128, verifier 64"),
    ({"head_dim": 16}, r"q_proj.weight has shape \[64, 64\], the config says \[32, 64\]"),
    ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
    ({"layer_types": ["sliding_attention"]}, "sliding_window None"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"eagle_aux_hidden_state_layer_ids": [5, 4, 2]}, "not ascending"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "verifier has 8 layers"),
])  # fmt: skip
def test_contradictory_and_unknown_keys_are_named(tmp_path, verifier, plain, config, message):
    folder = copy(plain, tmp_path)
    edit_config(folder, **config)
    with pytest.raises(StageError, match=message):
        foreign.import_draft(folder, tmp_path / "out", verifier)
    assert not (tmp_path / "out").exists()


def test_import_does_not_overwrite(tmp_path, verifier, plain):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        foreign.import_draft(plain[1]["vllm"], tmp_path / "out", verifier)


# --- tensors piecewise --------------------------------------------------------------------------------------


def test_small_pieces_give_the_same_files(tmp_path, verifier, plain, monkeypatch):
    """Head rows, conversion and account do not depend on where a tensor is cut."""
    monkeypatch.setattr(lazy, "CHUNK_BYTES", 300)
    monkeypatch.setattr(flat, "CHUNK_BYTES", 300)
    read, tensors = flat.open_checkpoint(plain[0], verifier)
    flat.export(read, flat.export_tensors(read, tensors, verifier, False), {"vllm": tmp_path / "v"})
    name = "model.safetensors"
    assert (tmp_path / "v" / name).read_bytes() == (plain[1]["vllm"] / name).read_bytes()


def test_damaged_file_is_named(tmp_path, plain):
    folder = copy(plain, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StageError, match="shorter than its header"):
        lazy.open_tensors(folder)


def test_head_rows_come_from_a_file_that_holds_scalars_too(tmp_path):
    """NVFP4 verifiers keep a scale without a dimension beside each weight."""
    import torch
    from safetensors.torch import save_file

    head = torch.randn(16, 8).bfloat16()
    save_file({"lm_head.weight": head, "x.input_scale": torch.tensor(0.5)}, tmp_path / "m.safetensors")
    verifier = SimpleNamespace(
        path=tmp_path,
        tensor_names={"head": "lm_head.weight"},
        weight_map={"lm_head.weight": "m.safetensors"},
    )
    rows = flat.verifier_rows(verifier, "head", torch.tensor([3, 9])).whole()
    assert torch.equal(rows, head[[3, 9]])


# --- the stage ----------------------------------------------------------------------------------------------


RECIPE = """
verifier: {{model: {verifier}, layers: [2, 4, 5], max_model_len: 64}}
draft: {{num_attention_heads: 2, num_key_value_heads: 1, head_dim: 32, intermediate_size: 48,
  rms_norm_eps: 1.0e-6, vocab_size: 16}}
data: {{sources: [{{path: x.jsonl}}], max_prompt_tokens: 32}}
answers: {{max_tokens: 32}}
train: {{tokens_per_step: 64, epochs: 1, lr: 1.0e-3}}
evaluate: {{max_tokens: 32}}
"""


@pytest.fixture()
def run(tmp_path, verifier):
    """A run directory with a trained toy checkpoint, laid out as 04 does."""
    folder = tmp_path / "run"
    train = folder / "04_train"
    step = toy_checkpoint(train / "step-000007", verifier, toy_draft(verifier))
    shutil.move(step / "vocab_map.safetensors", train)
    (train / "best").symlink_to("step-000007")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(verifier=verifier.path))
    return folder


def convert(run, *args):
    return load_stage("05_convert.py").main(
        ["--run-dir", str(run), "--recipe", str(run.parent / "recipe.yaml"), *args]
    )


def test_stage_by_its_command_then_skip_refuse_force(run):
    args = ("--run-dir", run, "--recipe", run.parent / "recipe.yaml", "--no-parity")
    done = run_stage_cmd("05_convert.py", *args)
    assert done.returncode == 0, done.stderr
    record = read_json(run / "05_export" / "stage.json")
    files = ("README.md", "config.json", "model.safetensors")
    assert set(record["outputs"]) == {f"{form}/{name}" for form in flat.FORMS for name in files}
    assert "was not checked" in done.stderr and record["parity"]["passed"] is None
    card = (run / "05_export" / "vllm" / "README.md").read_text()
    assert "[2, 4, 5]" in card and "--speculative-config" in card and "step-000007" in card
    before = (run / "05_export" / "stage.json").stat().st_mtime_ns
    assert convert(run, "--no-parity") == 0 and convert(run, "--no-parity", "--check") == 0
    assert (run / "05_export" / "stage.json").stat().st_mtime_ns == before
    assert convert(run, "--no-parity", "--with-embeddings") == 2  # refused: made with other settings
    assert convert(run, "--no-parity", "--with-embeddings", "--force") == 0
    assert flat.EMBEDDING in lazy.open_tensors(run / "05_export" / "vllm")


def test_stage_names_nothing_before_the_gate_agrees(run, monkeypatch, caplog):
    from eagle3 import parity

    seen = {}

    def drift(folder, *rest):
        seen["written"] = (folder / "model.safetensors").is_file()
        raise StageError("parity: drift")

    monkeypatch.setattr(parity, "gate", drift)
    assert convert(run) == 1
    assert seen["written"] and not list((run / "05_export").glob("*vllm*"))
    assert not (run / "05_export" / "stage.json").exists()


def test_stage_refuses_a_checkpoint_on_other_layers(run, tmp_path):
    recipe = run.parent / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("[2, 4, 5]", "[2, 4, 6]"))
    assert convert(run, "--no-parity") == 1
    assert "trained on layers [2, 4, 5], the recipe says [2, 4, 6]" in (run / "logs" / "05.log").read_text()


def test_stage_refuses_an_unfinished_checkpoint(run):
    (run / "04_train" / "step-000007" / "COMPLETE").unlink()
    assert convert(run, "--no-parity") == 1
    assert "no whole checkpoint: it has no COMPLETE" in (run / "logs" / "05.log").read_text()


def test_import_command_makes_a_folder_that_04_can_start_from(tmp_path, verifier, plain):
    from eagle3.draft import load_draft

    out = tmp_path / "start"
    code = load_stage("05_convert.py").main(
        ["import", str(plain[1]["sglang"]), "--out", str(out), "--verifier", str(verifier.path)]
    )
    assert code == 0
    model = load_draft(out, flat.find_map(out), verifier)
    assert model.config.draft_vocab_size == 16 and model.fc.weight.shape == (32, 96)


def test_04_continues_from_an_import_of_its_own_export(tmp_path):
    """Every key that 04 compares survives export and import, for a verifier with yarn in all spellings."""
    from eagle3.config import load_recipe
    from eagle3.draft import build_config, read_config
    from eagle3.record import differences
    from eagle3.verifier import open_verifier

    recipe = load_recipe(
        "kimi-tiny", ["draft.vocab_size=256", "draft.fc_norm=true", "draft.sliding_window=64"]
    )
    verifier = open_verifier(recipe)
    config = build_config(recipe, verifier)
    config.save_pretrained(tmp_path / "config")
    draft = flat.read_speculators(read_json(tmp_path / "config" / "config.json"), "04")
    _, folders, _, _ = exported(tmp_path, verifier, draft)
    for form in flat.FORMS:
        foreign.import_draft(folders[form], tmp_path / f"from-{form}", verifier)
        found, wanted = (
            json.loads(c.to_json_string()) for c in (read_config(tmp_path / f"from-{form}"), config)
        )
        found.pop("speculators_config"), wanted.pop("speculators_config")
        assert differences(found, wanted) == []


def test_import_command_fails_in_one_line(tmp_path, verifier, capfd):
    code = load_stage("05_convert.py").main(
        ["import", str(tmp_path / "none"), "--out", str(tmp_path / "o"), "--verifier", str(verifier.path)]
    )
    assert code == 2 and capfd.readouterr().err.strip().endswith("none is not a folder")


def test_card_of_the_sglang_form_names_what_a_server_needs(verifier):
    draft = toy_draft(verifier, fc_norm=True, layer_ids=(3, 4, 5), **WINDOW)
    needs = " ".join(flat.sglang_needs(draft))
    assert "24663" in needs and "25454" in needs and "--speculative-draft-window-size 8" in needs
    assert flat.sglang_needs(toy_draft(verifier)) == []


def test_flags_are_all_in_the_table():
    assert set(FLAGS) <= {key.name for key in flat.KEYS}
