#!/usr/bin/env python3
"""Train the draft on stored states.

Reads 03_hidden/ (splits train, val, heldout) and the verifier's embedding, final norm and head. Writes into
04_train/: vocab_map.safetensors, step-NNNNNN/ (newest two and best), best -> step-NNNNNN, metrics.jsonl,
    curve.png,
stage.json.

    python 04_train.py --run-dir runs/smollm2-135m-all
    torchrun --nproc-per-node 8 04_train.py --run-dir DIR          (or accelerate launch --multi_gpu)

Stop it at any time: TERM, INT and HUP save at the end of the step; the same command continues on the next
batch.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import sys
from pathlib import Path

from eagle3.cli import Stage, run_stage, stage_parser
from eagle3.contract import ConfigError, Interrupted, StageError
from eagle3.record import StageRecord, differences, file_sha256, files_of

log = logging.getLogger("eagle3")

# Keys of `train` that change how a run is watched, saved or spread over machines, but not what comes out of
# it; init_from counts by the content of the draft it names.
NOT_IDENTITY = ("log_every", "logger", "checkpoint_minutes", "checkpoint_steps", "shard", "init_from")


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


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


def fraction(text: str) -> tuple[int, int]:
    """ "2/4" -> (2, 4)."""
    k, _, n = text.partition("/")
    if not (k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r}: write K/N with 1 <= K <= N")
    return int(k), int(n)


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
    old = record.done()
    if old and not stage.args.force and not up_to_round(stage, old):
        record.path.unlink()  # of the round before this one
    if record.begin(stage.args.force, made_here):
        log.info("already trained: %s", stage.run.train)
        return True
    return False


def up_to_round(stage: Stage, old: dict | None) -> bool:
    """Whether a finished record covers the round that is asked for."""
    return bool(old) and (stage.args.round is None or old["round"][0] >= stage.args.round[0])


def train_as_rank(stage: Stage, record: StageRecord, store, verifier) -> str:
    """One process of several: rank 0 decides whether there is work, and writes every file."""
    import torch.distributed as dist

    prepare_torch()
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
    prepare_torch()
    trainer = make_trainer(stage, store, verifier, record.identity)
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


def draft_folder(given: str) -> Path:
    """The checkpoint folder `init_from` means: itself, or the best one of a 04_train or run directory."""
    path = Path(given)
    for folder in (path, path / "best", path / "04_train" / "best"):
        if (folder / "model.safetensors").is_file() and (folder / "config.json").is_file():
            return folder.resolve()
    raise ConfigError(
        f"train.init_from {given}: no config.json and model.safetensors there, nor in best/ below it"
    )


def made_here(folder: Path) -> list[Path]:
    """What this stage makes, for --force."""
    return files_of(
        folder,
        "step-*",
        ".step-*.tmp",
        "best",
        "vocab_map.safetensors",
        "metrics.jsonl",
        "curve.png",
        "logger",
    )


def prepare_torch() -> None:
    """Patches on a CPU, matmul precision on a GPU; refuses launchers that would do something else."""
    from eagle3.trainer import refuse_other_launchers

    refuse_other_launchers()
    import torch

    if torch.accelerator.is_available():
        torch.set_float32_matmul_precision("high")
        # Dynamo's DDP graph splitter refuses graphs with flex attention. It could not overlap anything here:
        # each weight is used in every TTT step, so all gradients are ready only when the backward pass ends.
        torch._dynamo.config.optimize_ddp = False
        return
    from patches import speculators_cpu

    speculators_cpu.apply()


def autocasts() -> bool:
    """bf16 autocast pays on GPUs and on CPUs with bf16 units; elsewhere float32 is several times faster."""
    import torch

    if torch.accelerator.is_available():
        return True
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def vocabulary(stage: Stage, store, verifier, infos: list):
    """The draft vocabulary: the one on disk, the starting draft's, or a new one by coverage.

    Raises:
        ConfigError: the starting draft has another vocabulary size than the recipe; coverage below the floor.
    """
    from eagle3 import vocab
    from eagle3.draft import draft_size

    path, size = stage.run.train / vocab.FILE, draft_size(stage.recipe, verifier)
    if path.is_file():
        return vocab.load_map(path)
    counts = vocab.count_answers(store, infos, verifier.vocab_size)
    if stage.recipe.train.init_from:
        folder = draft_folder(stage.recipe.train.init_from)
        source = next((f for f in (folder / vocab.FILE, folder.parent / vocab.FILE) if f.is_file()), None)
        if source is None:
            raise StageError(f"{folder.parent / vocab.FILE} is missing: a draft is of no use without its map")
        vocab_map = vocab.load_map(source)
        if len(vocab_map.d2t) != size or len(vocab_map.t2d) != verifier.vocab_size:
            raise ConfigError(
                f"{source} keeps {len(vocab_map.d2t)} of {len(vocab_map.t2d)} ids, the recipe asks for "
                f"{size} of "
                f"{verifier.vocab_size}: set draft.vocab_size to the starting draft's"
            )
        vocab_map.coverage = vocab.coverage(vocab_map, counts)
    else:
        vocab_map = vocab.choose(counts, size, stage.recipe.draft.min_coverage)
    vocab.save_map(path, vocab_map)
    return vocab_map


def make_model(stage: Stage, vocab_map, verifier, attention: str, autocast: bool):
    """The draft: fresh, or with the weights of `train.init_from`.

    Raises:
        ConfigError: the starting draft has another geometry, layers or flags; each difference is named.
    """
    import torch

    from eagle3 import draft

    recipe = stage.recipe
    config = draft.build_config(recipe, verifier, attention)
    if recipe.train.init_from:
        folder = draft_folder(recipe.train.init_from)
        keys = ("transformer_layer_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *FLAGS)
        found, wanted = (
            {key: json.loads(c.to_json_string()).get(key) for key in keys}
            for c in (draft.read_config(folder), config)
        )
        if changed := differences(found, wanted):
            raise ConfigError(f"{folder} can't be continued with this recipe: {'; '.join(changed)}")
    frozen = torch.bfloat16 if autocast else torch.float32
    model = draft.build_draft(config, vocab_map, verifier, recipe.draft.train_head, frozen, recipe.train.seed)
    if recipe.train.init_from:
        draft.load_trainable(model, folder)
        log.info("starting from the weights of %s", folder)
    return model


def window(stage: Stage, store) -> list:
    """Training samples: the round's share of 01's rows, all without --round."""
    infos = store.select("train")
    if not stage.args.round:
        return infos
    from eagle3.contract import read_jsonl

    ids = [row["id"] for row in read_jsonl(stage.run.rows("train"))]
    k, n = stage.args.round
    taken = set(ids[len(ids) * (k - 1) // n : len(ids) * k // n])
    return [info for info in infos if info.id in taken]


def make_trainer(stage: Stage, store, verifier, identity: dict):
    """Feeds, model, TrainerConfig, and the trainer that ties them together.

    Raises:
        StageError: no sample with a supervised token. ConfigError: rows too short, or not a whole number of
            blocks.
    """
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.train import distributed
    from speculators.train.trainer import TrainerConfig

    from eagle3 import fastpath
    from eagle3.checkpoint import Checkpoints, remove_leftovers
    from eagle3.draft import frozen_fingerprints
    from eagle3.feed import Feed, usable
    from eagle3.trainer import DraftTrainer, Job

    recipe, profile, settings = stage.recipe, stage.profile, stage.recipe.train
    cpu, autocast = not torch.accelerator.is_available(), autocasts()
    device = torch.device("cpu") if cpu else torch.device("cuda", distributed.get_local_rank())
    rank, world = distributed.get_rank(), distributed.get_world_size()
    chain, row = recipe.evaluate.num_speculative_tokens, profile.TRAIN_ROW_TOKENS
    if not cpu and row % 128:
        raise ConfigError(f"TRAIN_ROW_TOKENS {row}: block masks want a multiple of 128")
    val_steps = max(settings.ttt_steps, chain)
    infos = {}
    for split in ("train", "val", "heldout"):
        chosen = window(stage, store) if split == "train" else store.select(split)
        infos[split], empty = usable(chosen, row, val_steps - 1)
        if empty:
            log.info("%s: %d samples without a supervised token left out", split, empty)
    if not infos["train"]:
        raise StageError(
            f"{store.folder} has no training sample with a supervised token (an answer of two tokens or "
            "more): "
            "look at the counts in 01_prepare/stage.json and 03_hidden/stage.json"
        )
    if rank == 0:
        remove_leftovers(stage.run.train)
        vocab_map = vocabulary(stage, store, verifier, infos["train"])
    if world > 1:
        torch.distributed.barrier()
    vocab_map = vocab_map if rank == 0 else vocabulary(stage, store, verifier, infos["train"])
    attention = fastpath.ATTENTION if cpu else "simple_flex_attention"
    model = make_model(stage, vocab_map, verifier, attention, autocast)

    def feed(split: str, budget: int, lead: int, seed: int) -> Feed:
        return Feed(
            store, infos[split], budget, row, lead, device, torch.bfloat16 if autocast else torch.float32,
            static=not cpu, compact=cpu, seed=seed, rank=rank, world=world, threads=profile.TRAIN_THREADS,
        )  # fmt: skip

    loss = resolve_loss_config(settings.loss, "eager")
    if cpu and settings.loss == "kl_div":
        loss = {"kl_div": (fastpath.KlLoss(), 1.0)}
    kwargs = {"ttt_steps": settings.ttt_steps, "ttt_step_loss_decay": settings.ttt_decay, "loss_config": loss}
    trained = feed("train", settings.tokens_per_step, val_steps - 1, settings.seed)
    k, n = stage.args.round or (1, 1)
    lengths = [len(trained.plan(epoch)) for epoch in range((k - 1) * settings.epochs, k * settings.epochs)]
    total = min(sum(lengths), settings.max_steps or sum(lengths))
    schedule = total if n == 1 else 1_000_000  # in rounds the schedule goes by fractions of the whole
    warmup = int(schedule * settings.warmup_ratio)
    config = TrainerConfig(
        lr=settings.lr,
        num_epochs=settings.epochs,
        save_path=str(stage.run.train),
        train_call_kwargs=kwargs,
        val_call_kwargs=kwargs,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        muon_lr=settings.muon_lr or settings.lr,
        muon_weight_decay=settings.weight_decay,
        scheduler_type="none" if settings.schedule == "constant" else settings.schedule,
        scheduler_warmup_steps=warmup,
        scheduler_total_steps=schedule,
        hidden_states_dtype=torch.bfloat16 if autocast else torch.float32,
        log_freq=settings.log_every,
        fsdp_shard=settings.shard == "fsdp",
        max_steps=total,
    )
    stamp = {
        "identity": identity,
        "vocabulary": vocab_map.fingerprint,
        "frozen": frozen_fingerprints(model),
        "flags": {key: getattr(model.config, key) for key in FLAGS},
    }
    job = Job(
        folder=stage.run.train,
        checkpoints=Checkpoints(stage.run.train, stamp),
        vocab_map=vocab_map,
        norm=copy.deepcopy(model.verifier_norm).to(device),  # FSDP will shard the model's own
        head=verifier.head().to(device),
        clip=settings.clip,
        warmup_steps=warmup,
        schedule_steps=schedule,
        total_steps=total,
        round=(k, n),
        chain=chain,
        val_steps=val_steps,
        constant=settings.schedule == "constant",
        val_every=settings.val_every,
        log_every=settings.log_every,
        checkpoint_seconds=60 * settings.checkpoint_minutes,
        checkpoint_steps=settings.checkpoint_steps,
        autocast=autocast,
        documents=cpu,
        hook=fastpath.HeadRows(model.lm_head) if cpu else None,
    )
    if rank == 0 and settings.logger != "none":
        from speculators.train.logger import setup_metric_logger

        setup_metric_logger(settings.logger, stage.run.path.name, str(stage.run.train / "logger"))
    val = feed("val", row * world, val_steps - 1, 0) if infos["val"] else None
    trainer = DraftTrainer(model, config, trained, val, job)
    trainer.heldout = feed("heldout", row * world, val_steps - 1, 0) if infos["heldout"] else None
    if rank == 0:
        describe(trainer, infos, lengths, autocast)
    return trainer


def describe(trainer, infos: dict, lengths: list[int], autocast: bool) -> None:
    """The few lines that say what is about to happen."""
    import torch

    from eagle3.checkpoint import trainable

    plan, job = trainer.train_loader.plan(0), trainer.job
    rows = sum(-(-len(s.rows) // trainer.world) for s in plan)
    cover = job.vocab_map.coverage
    lowest = sorted(cover.get("domains", {}).items(), key=lambda item: item[1])
    log.info(
        "draft vocabulary %d of %d ids: %.2f %% of %d answer tokens (lowest: %s)",
        len(job.vocab_map.d2t), len(job.vocab_map.t2d), 100 * cover.get("overall", 0),
        cover.get("answer_tokens", 0),
        ", ".join(f"{k} {v:.1%}" for k, v in lowest[:3]),
    )  # fmt: skip
    log.info(
        "%d samples, %d validation, %d held out; %d tokens an epoch in %d steps of %.1f rows; %d steps in "
        "all",
        len(infos["train"]), len(infos["val"]), len(infos["heldout"]), sum(s.tokens for s in plan),
        lengths[0],
        rows / len(plan), job.total_steps,
    )  # fmt: skip
    log.info(
        "%.1f M trainable parameters in float32, %s on %s x %d, %d threads, attention %s",
        sum(p.numel() for p in trainable(trainer.model).values()) / 1e6,
        "bf16 autocast" if autocast else "float32",
        trainer.device.type, trainer.world, torch.get_num_threads(),
        trainer.inner.config.transformer_layer_config._attn_implementation,
    )  # fmt: skip


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
    draw_curve(folder / "metrics.jsonl", folder / "curve.png")
    best, val = trainer.at.best_step, trainer.at.val
    name = f"step-{best:06d}"
    outputs = {
        "vocab_map.safetensors": {"sha256": file_sha256(folder / "vocab_map.safetensors")},
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


def draw_curve(metrics: Path, out: Path) -> None:
    """Loss, accuracy per step and expected acceptance length over steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from eagle3.contract import read_jsonl, write_atomic

    lines = list(read_jsonl(metrics))
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for split, style in (("train", "-"), ("val", "o--")):
        part = [line for line in lines if line["split"] == split]
        steps = [line["step"] for line in part]
        axes[0].plot(steps, [line["loss"] for line in part], style, label=split, ms=4)
        axes[2].plot(steps, [line["expected_acceptance_length"] for line in part], style, label=split, ms=4)
        for k in range(max((len(line["acc"]) for line in part), default=0)):
            values = [line["acc"][k] for line in part]
            axes[1].plot(
                steps, values, style, color=f"C{k}", ms=4, label=f"step {k}" if split == "train" else None
            )
    titles = ("loss", "conditional accuracy (whole vocabulary)", "expected acceptance length")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    write_atomic(out, lambda tmp: figure.savefig(tmp, format="png", dpi=110))
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
