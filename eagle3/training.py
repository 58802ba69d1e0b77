"""Setting training up: from recipe, profile, store and verifier to a trainer that is ready to run."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import dataclass

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train import distributed
from speculators.train.logger import setup_metric_logger
from speculators.train.trainer import TrainerConfig

from eagle3 import draft, fastpath, vocab
from eagle3.checkpoint import Checkpoints, draft_folder, remove_leftovers, trainable
from eagle3.cli import Stage
from eagle3.contract import ConfigError, StageError, read_jsonl
from eagle3.draft import frozen_fingerprints
from eagle3.feed import Feed, usable
from eagle3.flat import FLAGS
from eagle3.record import differences
from eagle3.trainer import DraftTrainer, Job, refuse_other_launchers

log = logging.getLogger("eagle3")


def prepare_torch() -> None:
    """Patches on a CPU, matmul precision on a GPU; refuses launchers that would do something else."""
    refuse_other_launchers()
    if torch.accelerator.is_available():
        torch.set_float32_matmul_precision("high")
        # Dynamo's DDP graph splitter refuses graphs with flex attention. It could not overlap anything here:
        # each weight is used in every TTT step, so all gradients are ready only when the backward pass ends.
        torch._dynamo.config.optimize_ddp = False
        return
    from patches import speculators_cpu, torch_argmax_cpu, torch_muon_cpu

    speculators_cpu.apply()
    (torch_argmax_cpu if autocasts() else torch_muon_cpu).apply()


def autocasts() -> bool:
    """bf16 autocast pays on GPUs and on CPUs with bf16 units; elsewhere float32 is several times faster."""
    if torch.accelerator.is_available():
        return True
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def vocabulary(stage: Stage, store, verifier, infos: list) -> vocab.VocabMap:
    """The draft vocabulary: the one on disk, the starting draft's, or a new one by coverage.

    Raises:
        ConfigError: the starting draft has another vocabulary size than the recipe; coverage below the floor.
    """
    path, size = stage.run.train / vocab.FILE, draft.draft_size(stage.recipe, verifier)
    if path.is_file():
        return vocab.load_map(path)
    counts = vocab.count_answers(store, infos, verifier.vocab_size)
    if stage.recipe.train.init_from:
        folder = draft_folder(stage.recipe.train.init_from)
        source = vocab.map_file(folder)
        if not source.is_file():
            raise StageError(f"{source} is missing: a draft is of no use without its map")
        vocab_map = vocab.load_map(source)
        if len(vocab_map.d2t) != size or len(vocab_map.t2d) != verifier.vocab_size:
            raise ConfigError(
                f"{source} keeps {len(vocab_map.d2t)} of {len(vocab_map.t2d)} ids, the recipe asks for "
                f"{size} of {verifier.vocab_size}: set draft.vocab_size to the starting draft's"
            )
        vocab_map.coverage = vocab.coverage(vocab_map, counts)
    else:
        vocab_map = vocab.choose(counts, size, stage.recipe.draft.min_coverage)
    vocab.save_map(path, vocab_map)
    return vocab_map


def make_model(stage: Stage, vocab_map, verifier, attention: str, frozen: torch.dtype) -> Eagle3DraftModel:
    """The draft: fresh, or with the weights of `train.init_from`.

    Raises:
        ConfigError: the starting draft has another geometry, layers or flags (each difference is named), an
            embedding of its own, or a head of its own that is not to be trained.
    """
    recipe = stage.recipe
    config = draft.build_config(recipe, verifier, attention)
    if recipe.train.init_from:
        folder = draft_folder(recipe.train.init_from)
        keys = ("transformer_layer_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
        found, wanted = (
            {key: json.loads(c.to_json_string()).get(key) for key in (*keys, *FLAGS)}
            for c in (draft.read_config(folder), config)
        )
        if changed := differences(found, wanted):
            raise ConfigError(f"{folder} can't be continued with this recipe: {'; '.join(changed)}")
    model = draft.build_draft(config, vocab_map, verifier, recipe.draft.train_head, frozen, recipe.train.seed)
    if recipe.train.init_from:
        own = draft.own_tensors(model, folder)
        if "embed_tokens.weight" in own:
            raise ConfigError(f"{folder} has an embedding of its own; here it is the verifier's, frozen")
        if "lm_head.weight" in own and not recipe.draft.train_head:
            raise ConfigError(
                f"{folder} has a head of its own, which would be left out of every checkpoint: "
                "set draft.train_head=true"
            )
        draft.load_trainable(model, folder)
        log.info("starting from the weights of %s", folder)
    elif recipe.train.fc_init == "last_layer":
        draft.pass_last_layer(model)
    return model


def window(stage: Stage, store) -> list:
    """Training samples: the round's share of 01's rows, all without --round."""
    infos = store.select("train")
    if not stage.args.round:
        return infos
    ids = [row["id"] for row in read_jsonl(stage.run.rows("train"))]
    k, n = stage.args.round
    taken = set(ids[len(ids) * (k - 1) // n : len(ids) * k // n])
    return [info for info in infos if info.id in taken]


@dataclass(frozen=True)
class Machine:
    """Where this process trains."""

    device: torch.device
    autocast: bool
    rank: int
    world: int

    @property
    def cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def compute(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else torch.float32

    @classmethod
    def here(cls) -> Machine:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        cpu = not torch.accelerator.is_available()
        device = torch.device("cpu") if cpu else torch.device("cuda", distributed.get_local_rank())
        return cls(device, autocasts(), rank, world)


def samples(stage: Stage, store, lead: int) -> dict[str, list]:
    """Trainable samples by split.

    Raises:
        StageError: none in the training split. ConfigError: one is longer than a row.
    """
    found = {}
    for split in ("train", "val", "heldout"):
        chosen = window(stage, store) if split == "train" else store.select(split)
        found[split], empty = usable(chosen, stage.profile.TRAIN_ROW_TOKENS, lead)
        if empty:
            log.info("%s: %d samples without a supervised token left out", split, empty)
    if not found["train"]:
        raise StageError(
            f"{store.folder} has no training sample with a supervised token (an answer of two or more): look "
            "at the counts in 01_prepare/stage.json and 03_hidden/stage.json"
        )
    return found


def make_trainer(stage: Stage, store, verifier, identity: dict) -> DraftTrainer:
    """Feeds, model, TrainerConfig, and the trainer that ties them together.

    Raises:
        StageError, ConfigError: see `samples`, `vocabulary`, `make_model`.
    """
    recipe, settings, machine = stage.recipe, stage.recipe.train, Machine.here()
    row = stage.profile.TRAIN_ROW_TOKENS
    if not machine.cpu and row % 128:
        raise ConfigError(f"TRAIN_ROW_TOKENS {row}: block masks want a multiple of 128")
    val_steps = max(settings.ttt_steps, recipe.evaluate.num_speculative_tokens)
    infos = samples(stage, store, val_steps - 1)
    if machine.rank == 0:
        remove_leftovers(stage.run.train)
        vocab_map = vocabulary(stage, store, verifier, infos["train"])
    if machine.world > 1:
        torch.distributed.barrier()
    if machine.rank:
        vocab_map = vocabulary(stage, store, verifier, infos["train"])

    def feed(split: str, budget: int, ttt_steps: int, seed: int = 0) -> Feed | None:
        if not infos[split]:
            return None
        return Feed(
            store, infos[split], budget, row, ttt_steps - 1, machine.device, machine.compute,
            static=not machine.cpu, compact=machine.cpu, seed=seed, rank=machine.rank, world=machine.world,
            threads=stage.profile.TRAIN_THREADS,
        )  # fmt: skip

    train = feed("train", settings.tokens_per_step, settings.ttt_steps, settings.seed)
    k, n = stage.args.round or (1, 1)
    lengths = [len(train.plan(epoch)) for epoch in range((k - 1) * settings.epochs, k * settings.epochs)]
    total = min(sum(lengths), settings.max_steps or sum(lengths))
    attention = fastpath.ATTENTION if machine.cpu else "simple_flex_attention"
    model = make_model(stage, vocab_map, verifier, attention, machine.compute)
    job = make_job(stage, machine, model, vocab_map, verifier, identity, total)
    trainer = DraftTrainer(
        model,
        trainer_config(stage, machine, job),
        train,
        feed("val", row * machine.world, val_steps),
        job,
    )
    trainer.heldout = feed("heldout", row * machine.world, val_steps)
    if machine.rank == 0:
        if settings.logger != "none":
            setup_metric_logger(settings.logger, stage.run.path.name, str(stage.run.train / "logger"))
        describe(trainer, infos, lengths, machine)
    return trainer


def make_job(stage: Stage, machine: Machine, model, vocab_map, verifier, identity: dict, total: int) -> Job:
    """What the trainer needs beside speculators' TrainerConfig.

    Args:
        total: optimizer steps of this run (of this round).
    """
    settings, rounds = stage.recipe.train, stage.args.round or (1, 1)
    chain = stage.recipe.evaluate.num_speculative_tokens
    schedule = total if rounds[1] == 1 else 1_000_000  # in rounds the schedule goes by fractions of the whole
    stamp = {
        "identity": identity,
        "vocabulary": vocab_map.fingerprint,
        "frozen": frozen_fingerprints(model),
        "flags": {key: getattr(model.config, key) for key in FLAGS},
    }
    return Job(
        folder=stage.run.train,
        checkpoints=Checkpoints(stage.run.train, stamp),
        vocab_map=vocab_map,
        norm=copy.deepcopy(model.verifier_norm).to(machine.device),  # FSDP will shard the model's own
        head=verifier.head().to(machine.device),
        clip=settings.clip,
        warmup_steps=int(schedule * settings.warmup_ratio),
        schedule_steps=schedule,
        total_steps=total,
        round=rounds,
        chain=chain,
        val_steps=max(settings.ttt_steps, chain),
        constant=settings.schedule == "constant",
        val_every=settings.val_every,
        log_every=settings.log_every,
        checkpoint_seconds=60 * settings.checkpoint_minutes,
        checkpoint_steps=settings.checkpoint_steps,
        autocast=machine.autocast,
        documents=machine.cpu,
        hook=fastpath.AnswerRows(model) if machine.cpu else None,
    )


def trainer_config(stage: Stage, machine: Machine, job: Job) -> TrainerConfig:
    """The recipe's train section as speculators' TrainerConfig."""
    settings = stage.recipe.train
    # Eager, because the fused ones are Triton and fail under torch.compile.
    loss = resolve_loss_config(settings.loss, "eager")
    if machine.cpu and settings.loss == "kl_div":
        loss = {"kl_div": (fastpath.KlLoss(), 1.0)}
    kwargs = {"ttt_steps": settings.ttt_steps, "ttt_step_loss_decay": settings.ttt_decay, "loss_config": loss}
    return TrainerConfig(
        lr=settings.lr,
        num_epochs=settings.epochs,
        save_path=str(stage.run.train),
        train_call_kwargs=kwargs,
        val_call_kwargs=kwargs,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        muon_lr=settings.muon_lr or settings.lr,
        muon_weight_decay=settings.weight_decay,
        scheduler_type="none" if job.constant else settings.schedule,
        scheduler_warmup_steps=job.warmup_steps,
        scheduler_total_steps=job.schedule_steps,
        hidden_states_dtype=machine.compute,
        log_freq=settings.log_every,
        fsdp_shard=settings.shard == "fsdp",
        max_steps=job.total_steps,
    )


def describe(trainer, infos: dict, lengths: list[int], machine: Machine) -> None:
    """The few lines that say what is about to happen."""
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
        "%d samples, %d validation, %d held out; an epoch: %d tokens, %d steps of %.1f rows; %d steps in all",
        len(infos["train"]), len(infos["val"]), len(infos["heldout"]), sum(s.tokens for s in plan),
        lengths[0],
        rows / len(plan), job.total_steps,
    )  # fmt: skip
    log.info(
        "%.1f M trainable parameters in float32, %s on %s x %d, %d threads, attention %s",
        sum(p.numel() for p in trainable(trainer.model).values()) / 1e6,
        "bf16 autocast" if machine.autocast else "float32",
        trainer.device.type, trainer.world, torch.get_num_threads(),
        trainer.inner.config.transformer_layer_config._attn_implementation,
    )  # fmt: skip
