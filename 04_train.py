#!/usr/bin/env python3
"""Train the draft on stored states.

Reads 03_hidden/ (splits train, val, heldout) and the verifier's embedding, final norm and head. Writes into
04_train/: vocab_map.safetensors, step-NNNNNN/ (newest two and best), best -> step-NNNNNN, metrics.jsonl,
curve.png, stage.json.

    python 04_train.py --run-dir runs/smollm2-135m-all
    torchrun --nproc-per-node 8 04_train.py --run-dir DIR          (or accelerate launch --multi_gpu)

Stop it at any time: TERM, INT and HUP save at the end of the step, and the same command continues on the very
next batch. How it is set up: eagle3/training.py; the loop: eagle3/trainer.py; the data: eagle3/feed.py.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from eagle3.checkpoint import Checkpoints, draft_folder, step_name
from eagle3.cli import Stage, fraction, run_stage, stage_parser
from eagle3.contract import ConfigError, Interrupted, read_json
from eagle3.record import StageRecord, file_sha256, files_of
from eagle3.vocab import FILE as MAP_FILE

log = logging.getLogger("eagle3")

# Keys of `train` that change how a run is watched, saved or spread over machines, but not what comes out of
# it; init_from counts by the content of the draft it names.
NOT_IDENTITY = ("log_every", "logger", "checkpoint_minutes", "checkpoint_steps", "shard", "init_from")


def parser():
    p = stage_parser("04", __doc__)
    p.add_argument(
        "--continue-from",
        metavar="DIR",
        help="start from this draft's weights and vocabulary map (same as train.init_from)",
    )
    p.add_argument(
        "--round",
        type=fraction,
        metavar="K/N",
        help="train on the K-th of N windows that 03 --round extracted",
    )
    return p


def main(argv=None) -> int:
    return run_stage(parser(), "04", body, argv)


def body(stage: Stage) -> str:
    from eagle3.store import Store
    from eagle3.verifier import open_verifier

    if stage.args.continue_from:
        stage.recipe.train.init_from = stage.args.continue_from
    verifier = open_verifier(stage.recipe)
    store = Store.open(stage.run.hidden)
    record = StageRecord(stage.run, "04", identity_of(stage, store, verifier), stage.profile.name)
    if stage.args.check:
        record.refuse_other_identity()
        return "done" if up_to_round(stage, record.done()) else "todo"
    if "RANK" in os.environ:
        return train_as_rank(stage, record, store, verifier)
    if begin(stage, record):
        return "skipped"
    return train(stage, record, store, verifier)


def begin(stage: Stage, record: StageRecord) -> bool:
    """Whether there is nothing left to do; else the folder is ready for work."""
    if not stage.args.force:
        record.refuse_other_identity()
        old = record.done()
        if up_to_round(stage, old):
            log.info("already trained: %s", stage.run.train)
            return True
        if old:
            record.path.unlink()  # of the round before this one
    record.begin(stage.args.force, made_here)
    return False


def up_to_round(stage: Stage, old: dict | None) -> bool:
    """Whether training covers the round that is asked for.

    The finished record says so, or the newest checkpoint: a later round takes the record away when it begins.
    """
    if stage.args.round is None or old:
        return bool(old) and (stage.args.round is None or old["round"][0] >= stage.args.round[0])
    (k, n), newest = stage.args.round, Checkpoints(stage.run.train, {}).newest()
    meta = read_json(newest / "meta.json") if newest else {}
    return meta.get("round", 0) > k or (k < n and meta.get("round") == k and meta["round_whole"])


def train_as_rank(stage: Stage, record: StageRecord, store, verifier) -> str:
    """One process of several: rank 0 decides whether there is work, and writes every file."""
    import torch.distributed as dist

    from eagle3 import training

    training.prepare_torch()
    from speculators.train import distributed

    distributed.maybe_setup_distributed()
    if dist.get_rank():
        log.setLevel(logging.ERROR)
    decision = [dist.get_rank() == 0 and begin(stage, record)]
    dist.broadcast_object_list(decision, src=0)
    try:
        status = "skipped" if decision[0] else train(stage, record, store, verifier)
    except Interrupted:
        # All ranks stop together. After an error others may sit in a collective: joining them would hang.
        distributed.maybe_destroy_distributed()
        raise
    distributed.maybe_destroy_distributed()
    return status


def train(stage: Stage, record: StageRecord, store, verifier) -> str:
    """Train to the end, measure the best checkpoint on held-out answers, write the record."""
    from eagle3 import training

    training.prepare_torch()
    trainer = training.make_trainer(stage, store, verifier, record.identity)
    if start := trainer.job.checkpoints.newest():
        trainer.resume(start)
        log.info(
            "continuing from %s: epoch %d, %d steps of it done",
            start.name,
            trainer.at.epoch,
            trainer.at.epoch_step,
        )
    elif trainer.rank == 0:
        trainer.metrics_file.unlink(missing_ok=True)
    trainer.enter_round(stage.recipe.train.epochs)
    trainer.run_training()
    trainer.restore_best()
    heldout = measure_heldout(trainer, stage, store)
    if trainer.rank == 0:
        finish(record, stage.run.train, trainer, heldout)
    trainer.train_loader.close()
    return "done"


# --- set-up -------------------------------------------------------------------------------------------------


def identity_of(stage: Stage, store, verifier) -> dict:
    """What makes the result what it is: states, verifier, layers, and the recipe's draft and train keys."""
    recipe = stage.recipe
    if store.layers != verifier.served_layers:
        raise ConfigError(
            f"{store.folder} holds layers {store.layers}, the recipe asks for {verifier.served_layers}: "
            "rerun 03 with this recipe in another RUN_DIR"
        )
    start, rounds = recipe.train.init_from, stage.args.round
    if rounds and recipe.train.max_steps:
        raise ConfigError("train.max_steps counts steps of a whole run; with --round leave it out")
    return {
        # In rounds the training states come and go; 03 answers for their being the ones of 01's rows.
        "states": store.digest("val") if rounds else store.digest("train", "val"),
        "rounds": rounds[1] if rounds else 1,
        "verifier": verifier.fingerprint,
        "layers": verifier.layers,
        "draft": recipe.draft.model_dump(mode="json"),
        "train": {k: v for k, v in recipe.train.model_dump(mode="json").items() if k not in NOT_IDENTITY},
        "init_from": file_sha256(draft_folder(start) / "model.safetensors") if start else None,
    }


def made_here(folder: Path) -> list[Path]:
    """What this stage makes, for --force."""
    return files_of(
        folder,
        "step-*",
        ".step-*.tmp",
        "best",
        MAP_FILE,
        "metrics.jsonl",
        "curve.png",
        "logger",
    )


# --- results ------------------------------------------------------------------------------------------------


def measure_heldout(trainer, stage: Stage, store) -> dict:
    """Walk over the stored held-out answers as chain serving does, with the best checkpoint."""
    from eagle3.score import Walk

    chain, (k, n) = trainer.job.chain, trainer.job.round
    result = {
        "num_speculative_tokens": chain, "rows": 0, "drafts": 0, "accepted_counts": None,
        "accepted_per_position": None, "acceptance_length": None, "conditional_accuracy": None,
        "expected_acceptance_length": None, "domains": {}, "by_id": {}, "states": store.digest("heldout"),
    }  # fmt: skip
    if trainer.heldout is None:
        return {**result, "why": "03_hidden holds no held-out answers"}
    if k < n:
        return {**result, "why": f"measured after round {n}"}
    found = trainer.evaluate(trainer.heldout, trainer.job.val_steps, walk=True)
    trainer.heldout.close()
    walks = found.pop("walks")
    total, domains = Walk(chain), {}
    for domain, walk in walks.values():
        total.add(walk)
        domains.setdefault(domain, Walk(chain)).add(walk)
    return {
        **result,
        "rows": len(walks),
        **walked(total),
        "conditional_accuracy": found["conditional_accuracy"],
        "expected_acceptance_length": found["expected_acceptance_length"],
        "domains": {name: walked(w) for name, w in sorted(domains.items())},
        "by_id": {
            name: {"drafts": w.drafts, "accepted_counts": w.accepted}
            for name, (_, w) in sorted(walks.items())
        },
    }


def walked(walk) -> dict:
    """Figures of a walk, counted as vLLM's counters are."""
    return {
        "drafts": walk.drafts,
        "accepted_counts": walk.accepted,
        "accepted_per_position": [a / walk.drafts for a in walk.accepted],
        "acceptance_length": walk.length,
    }


def finish(record: StageRecord, folder: Path, trainer, heldout: dict) -> None:
    """Curve, stage.json, and the line that people look for."""
    from eagle3.meters import draw_curve

    draw_curve(folder / "metrics.jsonl", folder / "curve.png")
    best, val = trainer.at.best_step, trainer.at.val
    name = step_name(best)
    outputs = {
        MAP_FILE: {"sha256": file_sha256(folder / MAP_FILE)},
        "metrics.jsonl": {},
        "curve.png": {},
        f"{name}/config.json": {"sha256": file_sha256(folder / name / "config.json")},
        f"{name}/model.safetensors": {"sha256": file_sha256(folder / name / "model.safetensors")},
        f"{name}/COMPLETE": {},
    }
    record.finish(
        outputs,
        trainer.rates(),
        best_step=best,
        steps=trainer.at.step,
        round=list(trainer.job.round),
        val=val,
        heldout=heldout,
        vocabulary={"size": len(trainer.kept), **trainer.job.vocab_map.coverage},
    )
    expected = val["expected_acceptance_length"]
    drafts = heldout["drafts"]
    walked = f"{heldout['acceptance_length']:.3f} in {drafts} drafts" if drafts else heldout["why"]
    log.info(
        "best: step %d, expected acceptance length %s on validation; held-out answers, walked as served: %s",
        best, "not measured" if expected is None else f"{expected:.3f}",
        walked,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
