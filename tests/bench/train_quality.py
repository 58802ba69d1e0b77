"""Held-out acceptance after the same training time on the same answers: our recipe against stock speculators.

    python tests/bench/train_quality.py --run-dir runs/smollm2-135m-all [--minutes 4] [--ours 'train.lr=2e-3']

Reads a finished 03_hidden of the default recipe. Both train for the same time (process CPU time divided by
the threads, so that a busy machine is fair to both), each with its own schedule stretched over it, then walk
the same stored held-out answers as chain serving does. Stock is speculators' own model defaults, dataset,
loader, optimizer (Muon), schedule and Trainer loop, with what a CPU needs: sdpa, eager loss, no workers, rows
of 1,024 instead of 8,192 (whose dense masks would not fit), float32 where the CPU has no bf16 units. `--ours`
may be given several times: each is a variant. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PROFILE", "cpu-smoke")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from eagle3 import training  # noqa: E402

STOCK = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "norm_output": True,
    "fc_norm": False,
    "train_head": False,
    "sliding_window": 2048,
}


class Clock:
    """CPU seconds of this process per thread: what training would take on an idle machine."""

    def __init__(self):
        self.threads = torch.get_num_threads()
        self.began = time.process_time()

    @property
    def seconds(self) -> float:
        return (time.process_time() - self.began) / self.threads


def summary(found: dict) -> dict:
    """What a variant reports, from a walk over the held-out answers."""
    from eagle3.score import Walk

    walks = [w for _, w in found["walks"].values()]
    total = Walk(walks[0].steps)
    for walk in walks:
        total.add(walk)
    return {
        "acceptance_length": round(total.length, 4),
        "accepted_per_position": [round(a / total.drafts, 4) for a in total.accepted],
        "drafts": total.drafts,
        "conditional_accuracy": [round(a, 4) for a in found["conditional_accuracy"]],
        "expected_acceptance_length": round(found["expected_acceptance_length"], 4),
        "loss": round(found["loss"], 4),
    }


class Ours:
    """One variant of our recipe."""

    def __init__(self, args, overrides: list[str], work: Path):
        from eagle3.config import load_profile, load_recipe
        from eagle3.contract import RunDir
        from eagle3.store import Store
        from eagle3.verifier import open_verifier

        self.work = work
        recipe = load_recipe(args.recipe, [*overrides, "train.checkpoint_minutes=600", "train.log_every=50"])
        work.mkdir(parents=True)
        (work / "03_hidden").symlink_to(Path(args.run_dir).resolve() / "03_hidden")
        self.stage = SimpleNamespace(
            recipe=recipe,
            profile=load_profile(),
            run=RunDir(work),
            args=SimpleNamespace(round=None, continue_from=None),
        )
        self.verifier, self.store = open_verifier(recipe), Store.open(work / "03_hidden")

    def trainer(self):
        shutil.rmtree(self.work / "04_train", ignore_errors=True)
        return training.make_trainer(self.stage, self.store, self.verifier, {})

    def seconds_per_step(self) -> float:
        """Without the first step, which pays for warm-up."""
        trainer = self.trainer()
        plan, stream, marks = trainer.train_loader.plan(0), trainer.train_loader.batches(0), []
        trainer.model.train()
        clock = Clock()
        for batch in stream:
            trainer._train_row(batch, plan[batch.step])
            if batch.last:
                trainer._finish_step(plan[batch.step])
                marks.append(clock.seconds)
            if len(marks) == 6:
                break
        stream.close()
        return (marks[-1] - marks[0]) / (len(marks) - 1)

    def run(self, seconds: float) -> dict:
        per_step = self.seconds_per_step()
        train = self.stage.recipe.train
        train.max_steps, train.epochs, train.val_every = max(2, int(seconds / per_step)), 1000, None
        probe = self.trainer()
        steps = probe.train_loader
        epochs = 1
        while sum(len(steps.plan(e)) for e in range(epochs)) < train.max_steps:
            epochs += 1
        train.epochs = epochs
        trainer = self.trainer()
        clock = Clock()
        trainer.run_training()
        spent = clock.seconds
        found = summary(trainer.evaluate(trainer.heldout, trainer.job.val_steps, walk=True))
        tokens = sum(s.tokens for e in range(epochs) for s in steps.plan(e)) * train.max_steps
        tokens /= sum(len(steps.plan(e)) for e in range(epochs))
        return {
            **found,
            "steps": train.max_steps,
            "epochs": round(train.max_steps / len(steps.plan(0)), 2),
            "seconds_with_validation": round(spent, 1),
            "tokens_per_s": round(tokens / (per_step * train.max_steps), 1),
            "best_on_validation": trainer.at.best_length,
        }


class Stock:
    """speculators' own training, fed with the same answers."""

    def __init__(self, args, base: Ours, work: Path):
        self.base, self.work, self.row = base, work, 1024
        self.dtype = torch.bfloat16 if training.autocasts() else torch.float32
        self.write_data()

    def write_data(self) -> None:
        """The store's training samples as speculators' dataset and files."""
        from datasets import Dataset
        from safetensors.torch import save_file

        folder = self.work / "hidden_states"
        folder.mkdir(parents=True)
        rows = {"input_ids": [], "loss_mask": [], "seq_len": []}
        store = self.base.store
        self.infos = store.select("train")
        for n, info in enumerate(self.infos):
            sample = store.read(info)
            final = torch.zeros(info.states, store.hidden_size, dtype=torch.bfloat16)
            final[info.prompt - 1 :] = sample.final
            states = torch.cat([sample.aux, final.unsqueeze(1)], dim=1)
            ids = sample.token_ids[:-1].clone()
            save_file({"hidden_states": states, "token_ids": ids}, folder / f"hs_{n}.safetensors")
            rows["input_ids"].append(ids.tolist())
            rows["loss_mask"].append([0] * info.prompt + [1] * (info.states - info.prompt))
            rows["seq_len"].append(info.states)
        Dataset.from_dict(rows).with_format("torch").save_to_disk(self.work)

    def model(self):
        from eagle3 import draft, vocab

        stage = self.base.stage
        recipe = copy.deepcopy(stage.recipe)
        for key, value in STOCK.items():
            setattr(recipe.draft, key, value)
        counts = vocab.count_answers(self.base.store, self.infos, self.base.verifier.vocab_size)
        self.vocab_map = vocab.choose(counts, draft.draft_size(recipe, self.base.verifier), 0.0)
        config = draft.build_config(recipe, self.base.verifier, "sdpa")
        return draft.build_draft(config, self.vocab_map, self.base.verifier, frozen_dtype=self.dtype)

    def train(self, steps: int):
        """speculators' Trainer over `steps` steps: (model, seconds per step, tokens per step)."""
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import shift_batch
        from speculators.train import trainer as upstream
        from speculators.train.data import ArrowDataset
        from speculators.train.dataloader import _setup_dataloader

        dataset = ArrowDataset(
            self.row, self.work, on_missing="raise", model="x", hidden_states_dtype=self.dtype
        )
        loader = _setup_dataloader(
            dataset, self.row, self.base.store.hidden_size, num_workers=0, preprocess=shift_batch
        )
        loss = resolve_loss_config("kl_div", "eager")
        kwargs = {"ttt_steps": 3, "ttt_step_loss_decay": 1.0, "loss_config": loss}
        config = upstream.TrainerConfig(
            lr=1e-3, num_epochs=1000, save_path=str(self.work / "out"), train_call_kwargs=kwargs,
            val_call_kwargs=kwargs, optimizer="muon", weight_decay=0.01, muon_lr=1e-3,
            scheduler_type="linear",
            scheduler_total_steps=steps, hidden_states_dtype=self.dtype, log_freq=10**9, max_steps=steps,
        )  # fmt: skip
        torch.manual_seed(0)
        model, marks = self.model(), []
        trainer = upstream.Trainer(model, config, loader)
        trainer.maybe_save_checkpoint = lambda *_a, **_k: None
        clock = Clock()
        epoch = 0
        while trainer.global_step < steps:
            trainer.train_epoch(epoch, step_callback=lambda: marks.append(clock.seconds))
            epoch += 1
        per_step = (marks[-1] - marks[0]) / max(1, len(marks) - 1)
        return model, per_step, sum(i.states for i in self.infos) / len(loader), epoch

    def run(self, seconds: float) -> dict:
        from eagle3 import fastpath

        _, per_step, tokens, _ = self.train(4)
        steps = max(2, int(seconds / per_step))
        model, per_step, tokens, epochs = self.train(steps)
        # The same walk as ours: only the attention function is exchanged (equal to sdpa,
        # tests/test_train.py).
        model.config.transformer_layer_config._attn_implementation = fastpath.ATTENTION
        stage = self.base.stage
        trainer = self.base.trainer()
        trainer.model = trainer.inner = model
        trainer.kept = self.vocab_map.kept
        trainer.job.hook = fastpath.AnswerRows(model)
        found = summary(trainer.evaluate(trainer.heldout, trainer.job.val_steps, walk=True))
        assert stage.recipe.evaluate.num_speculative_tokens == trainer.job.chain
        return {**found, "steps": steps, "epochs": epochs, "tokens_per_s": round(tokens / per_step, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--recipe", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument(
        "--ours", action="append", default=[], metavar="'K=V K=V'", help="a variant (repeatable)"
    )
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--work", default="/tmp/eagle3-quality")
    args = parser.parse_args()
    work = Path(args.work)
    shutil.rmtree(work, ignore_errors=True)
    from eagle3.trainer import log

    log.setLevel("INFO")
    training.prepare_torch()
    out: dict = {"bench": "train_quality", "minutes": args.minutes, "threads": torch.get_num_threads()}
    variants = args.ours or [""]
    for n, text in enumerate(variants):
        ours = Ours(args, shlex.split(text), work / f"ours-{n}")
        out.setdefault("variants", []).append({"set": text, **ours.run(60 * args.minutes)})
        print(json.dumps(out["variants"][-1]), flush=True)
    out["ours"] = max(out["variants"], key=lambda v: v["acceptance_length"])
    if not args.no_stock:
        base = Ours(args, [], work / "stock-base")
        out["stock"] = Stock(args, base, work / "stock").run(60 * args.minutes)
        out["ratio"] = round(out["ours"]["acceptance_length"] / out["stock"]["acceptance_length"], 4)
    shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
