"""04: the same numbers as speculators, honest steps, exact resume (fault cases 3, 25, 27, 28, 29, 31)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, load_stage, make_toy_verifier
from safetensors.torch import load_file, save_file
from toy_store import make_run, token_rows, write_store

from eagle3.contract import StageError

STEPS = 15


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Toy sizes gain nothing from threads; one also makes sums independent of the machine's load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("PROFILE", "cpu-smoke")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RUN_DIR", "RECIPE", "RECIPE_SET", "SAMPLES"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def sharp(tmp_path_factory) -> Path:
    """A toy verifier that is sure of itself, so that there is something to learn."""
    return make_toy_verifier(tmp_path_factory.mktemp("sharp") / "verifier", initializer_range=0.3)


@pytest.fixture(scope="module")
def template(sharp, tmp_path_factory):
    """(run directory with states, recipe file), to be copied; two epochs of which STEPS steps are taken."""
    return make_run(tmp_path_factory.mktemp("template"), sharp, train__max_steps=STEPS, train__epochs=2)


@pytest.fixture
def fresh(template, tmp_path):
    """A copy of the template; `fresh(a__b=1)` changes recipe keys."""

    def make(name="run", **changes):
        run = tmp_path / name / "run"
        shutil.copytree(template[0] / "03_hidden", run / "03_hidden")
        recipe = yaml.safe_load(template[1].read_text())
        for key, value in changes.items():
            section, _, leaf = key.partition("__")
            recipe[section][leaf] = value
        file = tmp_path / name / "toy.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return run, file

    return make


def train(run: Path, recipe: Path, *more: str) -> int:
    return load_stage("04_train.py").main(["--run-dir", str(run), "--recipe", str(recipe), *more])


def lines(run: Path, split: str | None = None) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    found = [json.loads(line) for line in (run / "04_train" / "metrics.jsonl").read_text().splitlines()]
    timed = ("tokens_per_s", "wait_share", "mfu")
    return [
        {k: v for k, v in line.items() if k not in timed} for line in found if split in (None, line["split"])
    ]


def weights(run: Path, step: int | None = None) -> dict:
    folder = run / "04_train" / (f"step-{step:06d}" if step else "best")
    return load_file(folder / "model.safetensors")


def last_step(run: Path) -> int:
    return max(int(p.name[5:]) for p in (run / "04_train").glob("step-*"))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def unbroken(template, tmp_path_factory):
    return uninterrupted(template, tmp_path_factory.mktemp("unbroken"))


def uninterrupted(template, folder: Path) -> Path:
    """What an uninterrupted run gives."""
    shutil.copytree(template[0] / "03_hidden", folder / "run" / "03_hidden")
    os.environ["PROFILE"] = "cpu-smoke"
    torch.set_num_threads(1)
    assert train(folder / "run", template[1]) == 0
    return folder / "run"


def stop_at(monkeypatch, step: int, how):
    """Call `how` right after optimizer step `step`."""
    from eagle3.trainer import DraftTrainer

    original = DraftTrainer._finish_step

    def finish(self, *args):
        original(self, *args)
        if self.at.step == step:
            how()

    monkeypatch.setattr(DraftTrainer, "_finish_step", finish)


# --- what is computed ---------------------------------------------------------------------------------------


def parts(recipe_file: Path, run: Path, attention: str, **flags):
    """(model, feed maker) for the toy recipe."""
    from eagle3 import draft, vocab
    from eagle3.config import load_recipe
    from eagle3.feed import Feed
    from eagle3.store import Store
    from eagle3.verifier import open_verifier

    recipe = load_recipe(str(recipe_file), [f"draft.{k}={json.dumps(v)}" for k, v in flags.items()])
    verifier, store = open_verifier(recipe), Store.open(run / "03_hidden")
    infos = store.select("train")
    vocab_map = vocab.choose(vocab.count_answers(store, infos, 64), recipe.draft.vocab_size, 0.0)
    model = draft.build_draft(
        draft.build_config(recipe, verifier, attention), vocab_map, verifier, frozen_dtype=torch.float32
    )
    return model, Feed(
        store, infos, 200, 200, 2, torch.device("cpu"), torch.float32, False, attention == "document_sdpa"
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_output": False},
        {"norm_output": True, "fc_norm": True},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"sliding_window": 4, "num_hidden_layers": 2},
    ],
    ids=lambda f: "-".join(f),
)
def test_fast_path_gives_speculators_own_loss_and_gradients(template, flags):
    """Document-wise attention, head rows, written-down gradient: against dense masks and the eager loss."""
    from speculators.losses import resolve_loss_config

    from eagle3 import fastpath

    found = {}
    for attention in ("sdpa", "eager", "document_sdpa"):
        model, feed = parts(template[1], template[0], attention, **flags)
        batch = next(iter(feed.batches(0)))
        assert len(batch.row.pieces) > 3
        extra = {"loss_config": resolve_loss_config("kl_div", "eager")}
        if attention == "document_sdpa":
            fastpath.AnswerRows(model).rows = batch.head_rows
            extra = {
                "loss_config": {"kl_div": (fastpath.KlLoss(), 1.0)},
                "documents": tuple((p.start, p.end) for p in batch.row.pieces),
            }
            assert len(batch.head_rows) < batch.input_ids.shape[1]
        _, loss, metrics = model(
            hidden_states=batch.hidden_states, input_ids=batch.input_ids, document_ids=batch.document_ids,
            position_ids=batch.position_ids, loss_mask=batch.loss_mask,
            verifier_last_hidden_states=batch.targets,
            ttt_steps=3, ttt_step_loss_decay=0.8, **extra,
        )  # fmt: skip
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        counts = {k: v.item() for k, v in metrics.items() if k.startswith("full_acc")}
        found[attention] = (loss.item(), gradient, counts)
        feed.close()
    for other in ("eager", "document_sdpa"):
        assert found[other][0] == pytest.approx(found["sdpa"][0], rel=1e-6)
        error = (found[other][1] - found["sdpa"][1]).norm() / found["sdpa"][1].norm()
        assert error < 1e-5, other
        assert found[other][2] == found["sdpa"][2]


def logits_of_targets(folder: Path, ids: list[int], layers: list[int], final):
    """What 04 takes for the verifier's logits, from stored final states."""
    from eagle3 import draft, vocab
    from eagle3.config import load_recipe
    from eagle3.verifier import open_verifier

    n = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    recipe = load_recipe(
        "smollm2-135m",
        [
            f"verifier.model={folder}",
            f"verifier.layers={layers}",
            "verifier.expected={}",
            "draft.vocab_size=full",
            "draft.num_attention_heads=4",
            "draft.num_key_value_heads=2",
        ],
    )
    verifier = open_verifier(recipe)
    assert verifier.served_layers[-1] == n
    vocab_map = vocab.VocabMap(
        torch.zeros(verifier.vocab_size, dtype=torch.long), torch.ones(verifier.vocab_size, dtype=torch.bool)
    )
    model = draft.build_draft(
        draft.build_config(recipe, verifier), vocab_map, verifier, frozen_dtype=torch.float32
    )
    return model.verifier_lm_head(model.verifier_norm(final.float())), model


def final_states(model, ids: list[int]):
    seen = []
    hook = model.model.norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    hook.remove()
    return seen[0][0], logits


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_targets_are_the_verifiers_own_logits(family, tmp_path):
    """Fault 25: final norm of 0.1, another epsilon than the draft's, and the (1 + w) family."""
    from transformers import GemmaConfig, GemmaForCausalLM, LlamaForCausalLM

    torch.manual_seed(0)
    if family == "llama":
        make_toy_verifier(tmp_path, rms_norm_eps=0.3)
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        with torch.no_grad():
            model.model.norm.weight.fill_(0.1)
    else:
        model = GemmaForCausalLM(
            GemmaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8,
                num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-3,
            )
        )  # fmt: skip
        with torch.no_grad():
            model.model.norm.weight.normal_(std=0.5)
    model.float().save_pretrained(tmp_path)
    final, logits = final_states(model, [7, 8, 9, 20, 30])
    found, draft = logits_of_targets(tmp_path, [7, 8, 9, 20, 30], [2, 4, 5], final)
    assert torch.allclose(found, logits, rtol=1e-4, atol=1e-5)
    assert not draft.verifier_norm.weight.requires_grad and not draft.embed_tokens.weight.requires_grad


def test_a_missing_final_norm_is_an_error(tmp_path):
    """Fault 25: not a warning and a norm of ones."""

    make_toy_verifier(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(StageError, match=r"model\.norm\.weight"):
        logits_of_targets(tmp_path, [], [2, 4, 5], torch.zeros(1, 32))


def test_config_has_the_verifiers_rope_and_no_path(sharp, template, tmp_path):
    """Rope whole, position limit, chosen head size, explicit attention; no absolute path."""
    from eagle3.config import load_recipe
    from eagle3.draft import build_config
    from eagle3.verifier import open_verifier

    yarn = {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4,
    }  # fmt: skip
    folder = make_toy_verifier(tmp_path / "v", rope_parameters=yarn)
    recipe = load_recipe(str(template[1]), [f"verifier.model={folder}"])
    config = build_config(recipe, open_verifier(recipe))
    layer = config.transformer_layer_config
    assert layer.rope_parameters == yarn and layer.max_position_embeddings == 256 and layer.head_dim == 8
    assert layer._attn_implementation == "sdpa" and config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert str(tmp_path) not in config.to_json_string()


def test_a_verifier_that_caps_its_logits_is_refused(template, tmp_path):
    from eagle3.config import load_recipe
    from eagle3.contract import ConfigError
    from eagle3.draft import build_config
    from eagle3.verifier import open_verifier

    folder = make_toy_verifier(tmp_path / "v")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    recipe = load_recipe(str(template[1]), [f"verifier.model={folder}"])
    with pytest.raises(ConfigError, match="final_logit_softcapping 30.0"):
        build_config(recipe, open_verifier(recipe))


def test_expected_length_and_walk():
    from eagle3.score import Walk, chain_counts, conditional, expected_length, matches

    assert expected_length([0.5, 0.4, 0.25]) == pytest.approx(1 + 0.5 + 0.2 + 0.05)
    assert expected_length([0.6] * 3) == pytest.approx((1 - 0.6**4) / (1 - 0.6))
    # Six positions; what a chain started at s gets right at its steps 0, 1, 2.
    right = [[True, True, False, True, True, True], [True, False, False, True, True, False], [False] * 6]
    walk = Walk(3)
    walk.answer([[bool(x) for x in row] for row in right])
    # Start 0: two right, next start 3. Start 3: two right, next start 6 = the end.
    assert (walk.drafts, walk.accepted) == (2, [2, 2, 0]) and walk.length == 3.0
    # Out of the draft vocabulary = wrong: top token 9 is not among the kept ids.
    top1, mask = torch.tensor([5, 9, 5, 5]), torch.tensor([False, True, True, True])
    drafts = [torch.zeros(1, 4, dtype=torch.long)] * 2
    found, valid = matches(drafts, top1, mask, torch.tensor([5, 6]))
    assert found.tolist() == [[False, False, True, True], [False, True, True, False]]
    assert valid.sum().item() == 5
    assert conditional(chain_counts(found, valid)) == [pytest.approx(2 / 3), 1.0]


def test_top1_is_taken_over_the_whole_head():
    from eagle3 import score

    torch.manual_seed(0)
    head, states = torch.randn(3 * score.HEAD_SLICE // 2, 8), torch.randn(40, 8)
    norm = torch.nn.Identity()
    assert torch.equal(score.full_top1(states, norm, head), (states @ head.T).argmax(-1))


# --- honest steps -------------------------------------------------------------------------------------------


def test_fifteen_steps_are_fifteen(unbroken):
    """Fault 29: a limit in the middle of the second epoch; nothing is rounded to epochs."""
    record = json.loads((unbroken / "04_train" / "stage.json").read_text())
    assert record["steps"] == STEPS and last_step(unbroken) == STEPS
    assert [line["step"] for line in lines(unbroken, "train")] == list(range(1, STEPS + 1))
    meta = json.loads((unbroken / "04_train" / f"step-{STEPS:06d}" / "meta.json").read_text())
    per_epoch = next(line["step"] for line in lines(unbroken, "val"))
    assert meta["epoch"] == 1 and 0 < STEPS - per_epoch < per_epoch


def test_metrics_have_the_agreed_names(unbroken):
    text = (unbroken / "04_train" / "metrics.jsonl").read_text().splitlines()
    names = [
        "step",
        "epoch",
        "loss",
        "lr",
        "acc",
        "expected_acceptance_length",
        "tokens_per_s",
        "wait_share",
        "mfu",
    ]
    for line in map(json.loads, text):
        assert list(line) == [*names, "split"] and len(line["acc"]) == 3
    assert (unbroken / "04_train" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_record_says_what_stages_after_it_need(unbroken):
    record = json.loads((unbroken / "04_train" / "stage.json").read_text())
    heldout = record["heldout"]
    assert record["best_step"] in (STEPS, lines(unbroken, "val")[0]["step"])
    assert (unbroken / "04_train" / "best").readlink() == Path(f"step-{record['best_step']:06d}")
    assert heldout["acceptance_length"] == pytest.approx(
        1 + sum(heldout["accepted_counts"]) / heldout["drafts"]
    )
    assert sum(d["drafts"] for d in heldout["domains"].values()) == heldout["drafts"] > 0
    assert (
        sum(d["drafts"] for d in heldout["by_id"].values()) == heldout["drafts"]
        and len(heldout["by_id"]) == 6
    )
    best = max(lines(unbroken, "val"), key=lambda x: x["expected_acceptance_length"])
    assert record["val"]["expected_acceptance_length"] == best["expected_acceptance_length"]
    assert set(weights(unbroken)) == {
        "fc.weight", "norm.weight", *(f"layers.0.{n}.weight" for n in (
            "input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )),
    }  # fmt: skip
    assert all(t.dtype == torch.float32 for t in weights(unbroken).values())


def test_norm_weights_move(unbroken):
    """Fault 28: in bf16 they would stay at exactly 1."""
    norms = {n: t for n, t in weights(unbroken, STEPS).items() if "norm" in n}
    assert len(norms) == 4 and all((t != 1).all() for t in norms.values())


def test_done_is_skipped_and_other_settings_are_refused(unbroken, template, tmp_path, capfd):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run, symlinks=True)
    assert train(run, template[1]) == 0 and "already trained" in capfd.readouterr().err
    assert train(run, template[1], "--check") == 0
    assert train(run, template[1], "--set", "train.lr=0.001") == 2
    assert "train.lr: was 0.003, now 0.001" in capfd.readouterr().err
    assert train(run, template[1], "--set", "draft.norm_output=false") == 2
    assert "norm_output: was true, now false" in capfd.readouterr().err
    assert train(run, template[1], "--set", "train.log_every=7") == 0  # not part of the identity
    assert train(run, template[1], "--set", "train.lr=0.001", "--set", "train.max_steps=2", "--force") == 0
    assert last_step(run) == 2


def test_no_supervised_token_anywhere_is_an_error(sharp, fresh, capfd):
    """Fault 3, the 04 half: answers of one token have nothing to train on."""
    run, recipe = fresh()
    shutil.rmtree(run / "03_hidden")
    write_store(run / "03_hidden", sharp, {"train": token_rows(4, answer=(1, 1))})
    assert train(run, recipe) == 1
    assert "no training sample with a supervised token" in capfd.readouterr().err


def test_a_nan_stops_before_the_step_and_names_the_sample(sharp, fresh, capfd):
    """Fault 27: one NaN in one of thirty rows."""
    run, recipe = fresh(train__checkpoint_steps=1)
    shutil.rmtree(run / "03_hidden")

    def spoil(name, states):
        if name == "train-013":
            states[2, 0, 0] = float("nan")
        return states

    write_store(run / "03_hidden", sharp, {"train": token_rows(30), "val": token_rows(4)}, break_row=spoil)
    assert train(run, recipe) == 1
    message = capfd.readouterr().err
    assert (
        "stopped before the optimizer step" in message and "row train-013 holds a non-finite aux" in message
    )
    assert "/shard-1of1-0000" in message
    kept = last_step(run)
    assert f"step {kept + 1}: loss nan" in message and f"step-{kept:06d} is kept" in message
    assert all(t.isfinite().all() for t in weights(run, kept).values())


def test_a_tiny_set_without_validation_still_trains(sharp, fresh):
    run, recipe = fresh(train__max_steps=2)
    shutil.rmtree(run / "03_hidden")
    write_store(run / "03_hidden", sharp, {"train": token_rows(6)})
    assert train(run, recipe) == 0
    record = json.loads((run / "04_train" / "stage.json").read_text())
    assert record["best_step"] == 2 and record["val"]["why"] and record["heldout"]["why"]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "train__optimizer": "muon",
            "train__muon_lr": 0.02,
            "train__schedule": "constant",
            "draft__train_head": True,
        },
        {
            "train__loss": '{"ce": 0.5, "tv": 0.5}',
            "train__schedule": "linear",
            "draft__fc_norm": True,
            "train__logger": "tensorboard",
        },
        {"draft__vocab_size": "full", "train__val_every": 2, "evaluate__num_speculative_tokens": 5},
    ],
    ids=["muon-constant-head", "two-losses-linear-fc_norm", "full-vocabulary-longer-chain"],
)
def test_other_settings_train(fresh, changes):
    run, recipe = fresh(train__max_steps=4, **changes)
    assert train(run, recipe) == 0
    rates = [line["lr"] for line in lines(run, "train")]
    if "draft__train_head" in changes:
        assert "lm_head.weight" in weights(run) and rates[-1] == [0.02, 0.003]
    if "draft__fc_norm" in changes:
        assert "fc_norm.2.weight" in weights(run)
        assert list((run / "04_train" / "logger").rglob("events.out.tfevents*"))
        assert "best: step" in (run / "logs" / "04.log").read_text()  # the logger left ours alone
    if "train__val_every" in changes:
        assert [x["step"] for x in lines(run, "val")] == [2, 4] and len(lines(run, "val")[0]["acc"]) == 5


def test_ten_samples_are_learned_by_heart(sharp, fresh):
    """Fault 43, the 04 half of the overfit test: accuracy near 1 at every step of chain and walk."""
    from transformers import AutoModelForCausalLM

    model, rows = AutoModelForCausalLM.from_pretrained(sharp, dtype=torch.bfloat16), []
    for ids, p in token_rows(10):
        out = model.generate(
            torch.tensor([ids[:p]]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        rows.append((out[0].tolist(), p))
    run, recipe = fresh(
        train__max_steps=None, train__epochs=150, train__lr=1e-2, train__tokens_per_step=256,
        train__log_every=50,
        train__val_every=150, draft__vocab_size="full", draft__intermediate_size=256, draft__head_dim=16,
    )  # fmt: skip
    shutil.rmtree(run / "03_hidden")
    write_store(run / "03_hidden", sharp, {"train": rows, "val": rows, "heldout": rows})
    assert train(run, recipe) == 0
    record = json.loads((run / "04_train" / "stage.json").read_text())
    assert min(record["val"]["conditional_accuracy"]) > 0.95, record["val"]
    assert record["heldout"]["acceptance_length"] > 3.5, record["heldout"]


def test_muon_s_iteration_makes_singular_values_one():
    from patches.torch_muon_cpu import orthogonalize

    for shape in ((24, 60), (60, 24)):
        grad = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        left, _, right = torch.linalg.svd(grad, full_matrices=False)
        found = orthogonalize(grad, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        values = torch.linalg.svdvals(found)
        assert found.dtype == torch.float32 and values.min() > 0.6 and values.max() < 1.3
        assert torch.nn.functional.cosine_similarity(found.flatten(), (left @ right).flatten(), 0) > 0.97


def test_argmax_by_way_of_max_is_the_same(monkeypatch):
    from patches import torch_argmax_cpu

    monkeypatch.setattr(torch, "argmax", torch.argmax)
    x = torch.randint(-4, 4, (2, 50, 300), generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 7, 100] = torch.nan
    wanted = [
        torch.argmax(x, -1),
        torch.argmax(x, 1, keepdim=True),
        torch.argmax(x),
        torch.argmax(x.float(), -1),
    ]
    torch_argmax_cpu.apply()
    assert torch.argmax is torch_argmax_cpu.argmax
    found = [
        torch.argmax(x, dim=-1),
        torch.argmax(x, 1, keepdim=True),
        torch.argmax(x),
        torch.argmax(x.float(), -1),
    ]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


# --- stop and go on -----------------------------------------------------------------------------------------


def equals_unbroken(run: Path, unbroken: Path) -> None:
    assert lines(run) == lines(unbroken)
    assert same(weights(run, STEPS), weights(unbroken, STEPS)) and same(weights(run), weights(unbroken))


@pytest.mark.parametrize(("step", "name", "code"), [(3, "TERM", 143), (8, "INT", 130), (10, "HUP", 129)])
def test_a_signal_saves_and_the_rerun_is_bit_equal(fresh, unbroken, monkeypatch, step, name, code):
    """Fault 29, and the middle, the end, and past the end of an epoch."""
    run, recipe = fresh()
    with monkeypatch.context() as patch:
        stop_at(patch, step, lambda: os.kill(os.getpid(), getattr(signal, f"SIG{name}")))
        assert train(run, recipe) == code
    assert last_step(run) == step and not (run / "04_train" / "stage.json").exists()
    assert train(run, recipe) == 0
    equals_unbroken(run, unbroken)


def test_muon_goes_on_bit_equal(fresh, monkeypatch):
    """Its momentum and AdamW's moments, each optimizer with a schedule of its own."""
    muon = {"train__optimizer": "muon", "train__muon_lr": 0.01}
    whole, recipe = fresh("whole", **muon)
    assert train(whole, recipe) == 0
    run, recipe = fresh("stopped", **muon)
    with monkeypatch.context() as patch:
        stop_at(patch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(run, recipe) == 143
    assert last_step(run) == 7
    assert train(run, recipe) == 0
    equals_unbroken(run, whole)


class Killed(BaseException):
    """Stands in for kill -9: nothing after it runs, nothing is saved."""


def test_a_kill_loses_only_steps_since_the_checkpoint(fresh, unbroken, monkeypatch):
    run, recipe = fresh(train__checkpoint_steps=4)

    def die():
        raise Killed

    with monkeypatch.context() as patch:
        stop_at(patch, 7, die)
        with pytest.raises(Killed):
            train(run, recipe)
    assert last_step(run) == 4 and lines(run)[-1]["step"] >= 6  # the curve ran ahead of the checkpoint
    assert train(run, recipe) == 0
    equals_unbroken(run, unbroken)


def test_kill_9_of_the_real_command(fresh, unbroken):
    run, recipe = fresh(train__checkpoint_steps=1)
    command = [sys.executable, str(ROOT / "04_train.py"), "--run-dir", str(run), "--recipe", str(recipe)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(run, 3, child)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert train(run, recipe) == 0
    equals_unbroken(run, unbroken)
    assert not list((run / "04_train").glob(".*.tmp"))


@pytest.mark.parametrize("damage", ["no COMPLETE", "no weights", "cut state"])
def test_a_broken_newest_checkpoint_gives_way_to_the_one_before(fresh, unbroken, monkeypatch, capfd, damage):
    """Fault 29: said, and the result is that of an unbroken run."""
    run, recipe = fresh(train__checkpoint_steps=3)
    with monkeypatch.context() as patch:
        stop_at(patch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(run, recipe)
    newest = run / "04_train" / "step-000008"
    if damage == "no COMPLETE":
        (newest / "COMPLETE").unlink()
    elif damage == "no weights":
        (newest / "model.safetensors").unlink()
    else:
        os.truncate(newest / "state.pt", 100)
    capfd.readouterr()
    assert train(run, recipe) == 0
    message = capfd.readouterr().err
    assert "checkpoint step-000008" in message and "continuing from step-000006" in message
    equals_unbroken(run, unbroken)


def test_checkpoints_by_time_keep_the_newest_two_and_the_best(fresh):
    run, recipe = fresh(train__checkpoint_minutes=1e-6)
    assert train(run, recipe) == 0
    kept = {p.name for p in (run / "04_train").glob("step-*")}
    best = (run / "04_train" / "best").readlink().name
    assert kept == {f"step-{STEPS:06d}", f"step-{STEPS - 1:06d}", best}


def test_a_checkpoint_of_another_vocabulary_or_verifier_is_refused(fresh, monkeypatch, capfd):
    run, recipe = fresh()
    with monkeypatch.context() as patch:
        stop_at(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(run, recipe)
    meta = run / "04_train" / "step-000003" / "meta.json"
    good = json.loads(meta.read_text())
    for key, value, words in (
        ("vocabulary", "0" * 64, "vocabulary: was"),
        ("flags", {**good["flags"], "norm_output": False}, "flags.norm_output: was false, now true"),
        (
            "identity",
            {**good["identity"], "layers": [1, 4, 5]},
            r"identity.layers: was [1, 4, 5], now [2, 4, 5]",
        ),
        ("frozen", {**good["frozen"], "verifier_norm.weight": "x"}, "frozen.verifier_norm.weight: was"),
    ):
        meta.write_text(json.dumps({**good, key: value}))
        (meta.parent / "COMPLETE").write_text(
            json.dumps({p.name: p.stat().st_size for p in meta.parent.iterdir() if p.name != "COMPLETE"})
        )
        capfd.readouterr()
        assert train(run, recipe) == 2, key
        assert words in capfd.readouterr().err, key


def test_optimizer_state_is_exact_beyond_what_bf16_can_count():
    """Fault 28: step 10001 must not come back as 9984."""
    from eagle3.checkpoint import load_optimizer_state, optimizer_state

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        return model, [torch.optim.AdamW(model.parameters(), lr=1e-3)]

    model, optimizers = make()
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizers[0].step()
    for state in optimizers[0].state.values():
        state["step"].fill_(10001)
    saved = optimizer_state(model, optimizers)
    other, fresh_optimizers = make()
    load_optimizer_state(other, fresh_optimizers, saved)
    for a, b in zip(optimizers[0].state.values(), fresh_optimizers[0].state.values(), strict=True):
        assert a["step"].item() == b["step"].item() == 10001
        assert torch.equal(a["exp_avg"], b["exp_avg"]) and torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])


def test_continue_from_keeps_weights_and_vocabulary(fresh, unbroken, template, capfd):
    run, recipe = fresh(train__max_steps=1, train__lr=1e-6)
    shutil.rmtree(run / "03_hidden")
    verifier = yaml.safe_load(template[1].read_text())["verifier"]["model"]
    rows = {"train": token_rows(12, seed=7), "val": token_rows(6, seed=1)}
    write_store(run / "03_hidden", Path(verifier), rows)
    assert train(run, recipe, "--continue-from", str(unbroken)) == 0
    assert (run / "04_train" / "vocab_map.safetensors").read_bytes()  # same ids, own coverage
    maps = [load_file(r / "04_train" / "vocab_map.safetensors")["d2t"] for r in (run, unbroken)]
    assert torch.equal(*maps)
    old, new = weights(unbroken), weights(run)
    assert all((new[n] - old[n]).abs().max() < 1e-4 for n in old)
    assert lines(run, "val")[0]["loss"] == pytest.approx(
        min(x["loss"] for x in lines(unbroken, "val")), abs=0.05
    )
    capfd.readouterr()
    code = train(
        run, recipe, "--force", "--continue-from", str(unbroken), "--set", "draft.intermediate_size=32"
    )
    assert code == 2 and "intermediate_size: was 64, now 32" in capfd.readouterr().err
    assert train(run, recipe, "--force", "--continue-from", str(run / "nowhere")) == 2


def test_a_head_of_its_own_is_trained_or_refused(fresh, unbroken, tmp_path, capfd):
    run, recipe = fresh(train__max_steps=1)
    old = tmp_path / "old"
    shutil.copytree(unbroken / "04_train", old / "04_train", symlinks=True)
    file = (old / "04_train" / "best").resolve() / "model.safetensors"
    tensors, size = load_file(file), json.loads((file.parent / "config.json").read_text())["draft_vocab_size"]
    own = {"lm_head.weight": torch.randn(size, tensors["norm.weight"].shape[0])}
    save_file(tensors | own, file)
    assert train(run, recipe, "--continue-from", str(old)) == 2
    assert "set draft.train_head=true" in capfd.readouterr().err
    head = ["--force", "--set", "draft.train_head=true"]
    assert train(run, recipe, "--continue-from", str(old), *head) == 0
    assert (weights(run)["lm_head.weight"] - own["lm_head.weight"]).abs().max() < 0.1


# --- several processes --------------------------------------------------------------------------------------


def test_accelerates_own_sharding_is_refused(fresh, monkeypatch, capfd):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert train(*fresh()) == 2
    message = capfd.readouterr().err
    assert "train.shard" in message and "ACCELERATE_USE_FSDP" in message


@pytest.fixture(scope="module")
def unbroken_float32(template, tmp_path_factory):
    """As `unbroken`, in float32 everywhere: bf16 rounds a row and its halves apart, by 0.4 % of a loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle3.training.autocasts", lambda: False)
        return uninterrupted(template, tmp_path_factory.mktemp("unbroken32"))


IN_FLOAT32 = """\
import runpy, sys
from eagle3 import training
training.autocasts = lambda: False
runpy.run_path({stage!r}, run_name="__main__")
"""


def launch(run: Path, recipe: Path, port: int, launcher: str = "torchrun") -> subprocess.Popen:
    """04 as two processes on this CPU, in float32; rows of 48 make several a step."""
    start = {
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)],
        "accelerate": [
            "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(port),
        ],
    }[launcher]  # fmt: skip
    script = run.parent / "train_float32.py"
    script.write_text(IN_FLOAT32.format(stage=str(ROOT / "04_train.py")))
    stage = [str(script), "--run-dir", str(run), "--recipe", str(recipe)]
    env = {**os.environ, "TRAIN_ROW_TOKENS": "48", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *start, *stage], env=env, stderr=subprocess.PIPE, text=True)


def wait_for(run: Path, count: int, child: subprocess.Popen) -> None:
    """Until metrics.jsonl has so many lines."""
    metrics, end = run / "04_train" / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.exists() and metrics.read_text().count("\n") >= count) and time.monotonic() < end:
        assert child.poll() is None, child.communicate()[1][-3000:]
        time.sleep(0.02)


def like_unbroken(run: Path, unbroken: Path) -> None:
    """The same up to the order in which floats were summed."""
    for mine, theirs in zip(lines(run), lines(unbroken), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4), mine["step"]
        assert mine["step"] == theirs["step"] and mine["split"] == theirs["split"]
    alone, together = weights(unbroken, STEPS), weights(run, STEPS)
    assert all(torch.allclose(alone[n], together[n], atol=1e-4) for n in alone)


def test_two_ranks_train_what_one_does_and_stop_together(fresh, unbroken_float32, monkeypatch):
    """DDP: the same losses; TERM to the launcher saves; one process finishes what two began."""
    run, recipe = fresh()
    child = launch(run, recipe, port=29701)
    wait_for(run, 4, child)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=600)
    assert child.returncode != 0 and 4 <= last_step(run) < STEPS
    assert [a["status"] for a in json.loads((run / "run.json").read_text())["attempts"]] == ["interrupted"]
    monkeypatch.setattr("eagle3.training.autocasts", lambda: False)
    assert train(run, recipe) == 0
    like_unbroken(run, unbroken_float32)


def test_sharded_ranks_continue_what_one_began(fresh, unbroken_float32, monkeypatch):
    """FSDP2 under accelerate launch, from a checkpoint of one process: it has one form for all."""
    run, recipe = fresh(train__shard="fsdp")
    with monkeypatch.context() as patch:
        patch.setattr("eagle3.training.autocasts", lambda: False)
        stop_at(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(run, recipe) == 143
    child = launch(run, recipe, port=29702, launcher="accelerate")
    error = child.communicate(timeout=900)[1]
    assert child.returncode == 0, error[-3000:]
    like_unbroken(run, unbroken_float32)


# --- rounds -------------------------------------------------------------------------------------------------


def test_rounds_train_on_one_window_after_the_other(sharp, fresh, unbroken, capfd, monkeypatch):
    """Three windows extracted, trained on and deleted in turn: one schedule, one vocabulary, one curve."""
    run, recipe = fresh(train__max_steps=None, train__epochs=1, train__warmup_ratio=0.0)
    rows = token_rows(30)
    prepare = run / "01_prepare"
    prepare.mkdir()
    ids = [f"train-{n:03d}" for n in range(30)]
    (prepare / "train.jsonl").write_text("".join(json.dumps({"id": i}) + "\n" for i in ids))
    assert train(run, recipe, "--round", "2/3") == 1  # what is here is no second round of anything
    assert "builds on round 1" in capfd.readouterr().err
    shutil.rmtree(run / "04_train")
    ends = []
    for k in (1, 2, 3):
        shutil.rmtree(run / "03_hidden")
        part = {
            "train": rows[10 * k - 10 : 10 * k],
            "val": token_rows(6, seed=1),
            "heldout": token_rows(4, seed=2),
        }
        write_store(run / "03_hidden", sharp, part, first={"train": 10 * k - 10})
        if k == 3:  # stopped in the last round: those before it stay done, though their record is gone
            with monkeypatch.context() as patch:
                stop_at(patch, ends[-1] + 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
                assert train(run, recipe, "--round", "3/3") == 143
            checks = [train(run, recipe, "--check", "--round", f"{i}/3") for i in (1, 2, 3)]
            assert checks == [0, 0, 1]
            assert train(run, recipe, "--round", "1/3") == 0 and "already trained" in capfd.readouterr().err
        assert train(run, recipe, "--round", f"{k}/3") == 0
        assert train(run, recipe, "--round", f"{k}/3") == 0 and "already trained" in capfd.readouterr().err
        ends.append(last_step(run))
        record = json.loads((run / "04_train" / "stage.json").read_text())
        assert record["round"] == [k, 3] and bool(record["heldout"]["drafts"]) == (k == 3)
    steps = [line["step"] for line in lines(run, "train")]
    rates = [line["lr"] for line in lines(run, "train")]
    assert steps == list(range(1, ends[-1] + 1)) and ends[0] < ends[1] < ends[2]
    assert rates == sorted(rates, reverse=True) and rates[0] == 0.003  # one cosine over the whole, no restart
    assert rates[ends[0]] == pytest.approx(
        0.003 * 0.75, rel=1e-3
    )  # a third of the way down: (1 + cos(pi/3)) / 2
    assert train(run, recipe, "--round", "3/4") == 2  # another number of rounds is another run
