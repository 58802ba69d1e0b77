"""The gate: vLLM's draft class, its loader and attention in this process against the trained draft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import load_stage, make_toy_verifier
from test_convert import edit_config, edit_tensors
from toy_drafts import FLAGS, YARN, bare_draft, exported, open_toy, toy_checkpoint, toy_draft

from eagle3 import flat, parity
from eagle3.contract import StageError

WINDOW = {"sliding_window": 8, "layer_types": ("sliding_attention",)}
FULL = {"draft_vocab_size": None}  # as many as the verifier has


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Verifier with room for positions around 100,000."""
    return make_toy_verifier(tmp_path_factory.mktemp("parity") / "v", max_position_embeddings=262144)


@pytest.fixture(scope="module")
def kimi():
    """The Kimi-shaped verifier, made once in the cache."""
    from eagle3.config import load_recipe
    from eagle3.verifier import open_verifier

    return open_verifier(load_recipe("kimi-tiny")).path


def make(tmp_path, path, **changes):
    """(verifier, checkpoint, vLLM folder) of a toy draft."""
    verifier = open_toy(path)
    if changes.get("draft_vocab_size", 16) is None:
        changes["draft_vocab_size"] = verifier.vocab_size
    checkpoint, folders, _, _ = exported(tmp_path, verifier, toy_draft(verifier, **changes))
    return verifier, checkpoint, folders["vllm"]


# Every pair of values of any two of: verifier, norm flag, vocabulary, attention, rope (all 80 cells:
# tests/bench/parity_matrix.py).
PAIRWISE = [
    ("llama", None, {}, {}, {}),
    ("kimi", None, FULL, WINDOW, {"rope": YARN}),
    ("llama", "norm_before_residual", FULL, WINDOW, {"rope": YARN}),
    ("kimi", "norm_before_residual", {}, {}, {}),
    ("llama", "norm_before_fc", {}, WINDOW, {}),
    ("kimi", "norm_before_fc", FULL, {}, {"rope": YARN}),
    ("llama", "fc_norm", FULL, {}, {"rope": YARN}),
    ("kimi", "fc_norm", {}, WINDOW, {}),
    ("llama", "norm_output", FULL, {}, {}),
    ("kimi", "norm_output", {}, WINDOW, {"rope": YARN}),
]


@pytest.mark.parametrize("which, flag, vocabulary, attention, rope", PAIRWISE)
def test_gate_agrees(request, tmp_path, which, flag, vocabulary, attention, rope):
    flags = {flag: True} if flag else {}
    verifier, checkpoint, folder = make(
        tmp_path, request.getfixturevalue(which), **flags, **vocabulary, **attention, **rope
    )
    dtypes = ("float32", "bfloat16") if flag in (None, "norm_output") else ("float32",)
    report = parity.gate(folder, checkpoint, verifier, dtypes=dtypes)
    assert report["passed"] and report["layers"] == [2, 4, 5]
    assert report["float32"]["error"] < parity.BOUNDS["fp32"] / 5  # the bound has room, but not much
    assert report["farthest_position"] > 90_000
    assert report["window"] == attention.get("sliding_window")


@pytest.mark.parametrize(
    "change", [{"layer_ids": (2, 3, 4, 5)}, {"num_hidden_layers": 2, "layer_types": ("full_attention",) * 2}]
)
def test_gate_agrees_on_more_layers(tmp_path, llama, change):
    verifier, checkpoint, folder = make(tmp_path, llama, **change)
    assert parity.gate(folder, checkpoint, verifier, dtypes=("float32",))["passed"]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory, llama):
    """A draft in which every key matters: window, yarn, reduced vocabulary, two norm flags."""
    changes = {**WINDOW, "rope": YARN, "fc_norm": True, "norm_output": True, "rms_norm_eps": 1e-3}
    return make(tmp_path_factory.mktemp("windowed"), llama, **changes)


def test_gate_agrees_on_the_draft_that_the_next_tests_break(windowed):
    verifier, checkpoint, folder = windowed
    assert parity.gate(folder, checkpoint, verifier, dtypes=("float32",))["passed"]


# Key -> value that loses or flips it. Keys that change nothing in vLLM are the account's (test_convert).
WITHOUT_MSCALE = {k: v for k, v in YARN.items() if k not in ("mscale", "mscale_all_dim")}
LOST = {
    "architectures": ["LlamaForCausalLM2"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": ...,
    "rms_norm_eps": ...,
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "vocab_size": 32,
    "draft_vocab_size": ...,
    "layer_types": ...,
    "sliding_window": 6,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": ...,
    "norm_output": ...,
    "target_hidden_size": 64,
    "num_aux_hidden_states": 4,
    "eagle_aux_hidden_state_layer_ids": ...,
}


@pytest.mark.parametrize("key", LOST)
def test_gate_fails_without_a_key(tmp_path, windowed, key):
    """Fault 34 for the norm flags, and every other key that vLLM reads."""
    verifier, checkpoint, folder = windowed
    folder = shutil.copytree(folder, tmp_path / "copy")
    edit_config(folder, **{key: LOST[key]})
    with pytest.raises(StageError):
        parity.gate(folder, checkpoint, verifier, dtypes=("float32",))


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_parameters": ..., "rope_scaling": ..., "rope_theta": ...}, "rope tables differ"),
        ({"rope_parameters": WITHOUT_MSCALE, "rope_scaling": ...}, "rope tables differ"),
        (
            {"rope_parameters": {**YARN, "rope_theta": 10000.0}, "rope_scaling": ..., "rope_theta": 10000.0},
            "rope",
        ),
        (
            {"rope_parameters": {**YARN, "factor": 32.0}, "rope_scaling": ...},
            "rope table of the draft ends at",
        ),
    ],
)
def test_36_gate_fails_without_rope_keys(tmp_path, windowed, rope, message):
    verifier, checkpoint, folder = windowed
    folder = shutil.copytree(folder, tmp_path / "copy")
    edit_config(folder, **rope)
    with pytest.raises(StageError, match=message):
        parity.gate(folder, checkpoint, verifier, dtypes=("float32",))


ALL_TENSORS = list(flat.wanted_tensors(bare_draft(fc_norm=True), with_embeddings=False))


@pytest.mark.parametrize("name", [n for n in ALL_TENSORS if n != "t2d"])  # vLLM and SGLang never read t2d
def test_gate_fails_on_any_tensor(tmp_path, windowed, name):
    import torch

    verifier, checkpoint, folder = windowed
    folder = shutil.copytree(folder, tmp_path / "copy")

    def change(tensors):
        value = tensors[name]
        rng = torch.Generator().manual_seed(0)
        # One bf16 step of an eighth of the entries, or another target id.
        hit = torch.rand(value.shape, generator=rng) < 0.125
        tensors[name] = torch.cat([value[:-1], value[-1:] - 1]) if name == "d2t" else value * (1 + hit / 64)

    edit_tensors(folder, change)
    with pytest.raises(StageError):
        parity.gate(folder, checkpoint, verifier, dtypes=("float32",))
    edit_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(StageError):
        parity.gate(folder, checkpoint, verifier, dtypes=("float32",))


def test_39_four_ways_to_load_give_equal_logits(tmp_path, llama):
    verifier, checkpoint, folder = make(tmp_path, llama)
    draft, tensors = flat.open_checkpoint(checkpoint, verifier)
    errors = set()
    for embeddings in (False, True):
        out = tmp_path / f"e{embeddings}"
        everything = flat.export_tensors(draft, tensors, verifier, embeddings)
        flat.export(draft, everything, {form: out / form for form in flat.FORMS})
        shutil.copy(out / "vllm" / "config.json", out / "sglang")  # midlayer.* names under vLLM's config
        for form in flat.FORMS:
            report = parity.gate(out / form, checkpoint, verifier, dtypes=("float32",))
            errors.add((report["float32"]["error"], report["float32"]["error_far"]))
    assert len(errors) == 1  # the same numbers to the last bit


@pytest.mark.parametrize(
    "flags, key, value, cause",
    [
        ({"norm_output": True}, "norm_output", ..., "norm_output"),
        ({}, "norm_before_residual", True, "norm_before_residual"),
        (WINDOW, "layer_types", ..., "beyond the window of 8"),
        ({}, "layer_types", ["sliding_attention"], "window that was not trained"),
        ({"rope": YARN}, "rope_theta", 10000.0, "rope tables differ"),
    ],
)
def test_drift_names_its_cause(tmp_path, llama, flags, key, value, cause):
    verifier, checkpoint, folder = make(tmp_path, llama, **flags)
    changes = {key: value}
    if key == "layer_types" and value is not ...:
        changes["sliding_window"] = 8
    if key == "rope_theta":
        changes["rope_parameters"] = {**YARN, "rope_theta": value}
    edit_config(folder, **changes)
    with pytest.raises(StageError, match=cause):
        parity.gate(folder, checkpoint, verifier, dtypes=("float32",))


def test_24_layer_ids_of_another_numbering_stop_the_gate(tmp_path, llama):
    verifier, checkpoint, folder = make(tmp_path, llama)
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[3, 5, 6])
    with pytest.raises(StageError, match=r"capture layers \[3, 5, 6\].*trained on \[2, 4, 5\]"):
        parity.gate(folder, checkpoint, verifier, dtypes=("float32",))


def test_bf16_pass_catches_what_it_should(tmp_path, llama):
    """The bound that follows from PyTorch's own bf16 error is tight enough for a lost flag."""
    verifier, checkpoint, folder = make(tmp_path, llama)
    edit_config(folder, norm_before_residual=True)
    with pytest.raises(StageError, match="in bfloat16 is not the trained one"):
        parity.gate(folder, checkpoint, verifier, dtypes=("bfloat16",))


@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_reference_chain_is_what_training_unrolls(tmp_path, llama, flag):
    """Fed the training's tokens, the served chain's top tokens are those of Eagle3DraftModel.forward."""
    import torch

    verifier = open_toy(llama)
    draft = toy_draft(verifier, **({flag: True} if flag else {}))
    checkpoint = toy_checkpoint(tmp_path / "c", verifier, draft)
    model = parity.load_reference(checkpoint, verifier, "cpu")
    ids, states = parity.random_samples(32, 3, 64, None)[0]
    n = 24
    with torch.no_grad():
        unrolled = model(
            hidden_states=states[None, :n],
            input_ids=ids[None, 1 : n + 1],
            document_ids=torch.zeros(1, n, dtype=torch.long),
            ttt_steps=parity.STEPS,
        )
        for base in (0, 7, 20):
            request = parity.Request(ids[1 : base + 2], states[: base + 1], 0)
            chain = ids[base + 2 : base + 2 + parity.STEPS - 1].view(-1, 1)
            logits, _ = parity.Reference(model).draft([request], chain)
            served = [int(x[-1].argmax()) for x in logits]
            assert served == [int(step[0, base]) for step in unrolled]


def test_stored_states_are_re_extracted(tmp_path, llama):
    """The check on the store passes on the verifier's own states and fails on those of the layer before."""
    import torch

    from eagle3.store import Store
    from eagle3.store_writer import StoreWriter

    verifier = open_toy(llama)
    ids = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    for shift in (0, 1):
        layers = [k - shift for k in verifier.layers]
        states = parity.verifier_states(parity.load_verifier(verifier), ids[:-1], [*layers, 7]).bfloat16()
        (tmp_path / f"{shift}").mkdir()
        writer = StoreWriter(tmp_path / f"{shift}", "0of1", verifier.served_layers, 32, "bf16", 10**8)
        entry = {"id": "a", "split": "heldout", "domain": "d", "source": "s", "input": "x"}
        writer.add(states, ids.tolist(), 10, **entry)
        writer.close()
        store = Store.open(tmp_path / f"{shift}")
        if not shift:
            assert max(parity.compare_with_store(store, verifier)["error"]) < 0.01
        else:
            with pytest.raises(StageError, match="stored states of layer 2.*wrong layer ids"):
                parity.compare_with_store(store, verifier)


def test_re_extraction_reads_a_nested_verifier(kimi):
    import torch

    model = parity.load_verifier(open_toy(kimi))
    states = parity.verifier_states(model, torch.arange(10, 20), [2, 4, 5])
    assert states.shape == (10, 3, 256) and bool(torch.isfinite(states).all())


def test_gate_refuses_before_memory_runs_out(tmp_path, llama, monkeypatch):
    from types import SimpleNamespace

    import psutil

    verifier, checkpoint, folder = make(tmp_path, llama)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(StageError, match="needs about .* GB .*--no-parity"):
        parity.gate(folder, checkpoint, verifier)


def test_verify_command(tmp_path, llama, capfd):
    """A draft in vLLM's form passes; in SGLang's form it does not, because vLLM would read other layers."""
    verifier = open_toy(llama)
    _, folders, _, _ = exported(tmp_path, verifier, toy_draft(verifier))
    main = load_stage("05_convert.py").main
    assert main(["verify", str(folders["vllm"]), "--verifier", str(llama)]) == 0
    assert "top tokens differ" in capfd.readouterr().err
    assert main(["verify", str(folders["sglang"]), "--verifier", str(llama)]) == 1
    assert "vLLM's runners read layer ids [(1, 3, 4), None]" in capfd.readouterr().err


def test_stage_with_the_gate(tmp_path, llama):
    """05 as users run it, on stored states: the record and the card carry the gate's figures."""
    from test_convert import RECIPE

    verifier, run = open_toy(llama), tmp_path / "run"
    step = toy_checkpoint(run / "04_train" / "step-000007", verifier, toy_draft(verifier))
    shutil.move(step / "vocab_map.safetensors", run / "04_train")
    (run / "04_train" / "best").symlink_to("step-000007")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(verifier=llama))
    assert load_stage("05_convert.py").main(["--run-dir", str(run), "--recipe", str(recipe)]) == 0
    record = json.loads((run / "05_export" / "stage.json").read_text())
    assert record["parity"]["passed"] and record["parity"]["store"]["checked"] is False
    assert "parity with vLLM" in Path(run / "05_export" / "vllm" / "README.md").read_text()


def test_real_run_was_gated_on_its_own_states(e2e_run):
    """In a real run the gate used held-out samples; their states were re-extracted with the exported ids."""
    record = json.loads((e2e_run.export / "stage.json").read_text())
    config = json.loads((e2e_run.export / "vllm" / "config.json").read_text())
    found = record["parity"]
    assert found["passed"] and found["states"] == "held-out" and found["store"]["checked"]
    assert found["layers"] == config["eagle_aux_hidden_state_layer_ids"] == record["identity"]["layers"]
    assert max(found["store"]["error"]) < found["store"]["neighbour"] / 2
