"""The training loop: a subclass of speculators' Trainer that adds accumulation, exact resume and honesty.

Inherited: model set-up (device, DDP, FSDP2), optimizers, schedules, losses, metrics, TrainerConfig.
Replaced: the loop, the checkpoints, validation.

Weighting. Speculators' loss of one row is the sum over TTT steps of decay^k times the mean over the row's n
supervised positions (with n + 1e-5 in the denominator). A step's loss is the mean over all its N supervised
positions, so a row weighs (n + 1e-5) / N, whatever row, accumulation round or rank it is in: the gradient is
the same for 1 x 4 rows, 4 x 1 rows, or 2 ranks x 2 rows, up to the order in which floats are summed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from speculators.losses.utils import _LOSS_REDUCTION_EPS
from speculators.train.trainer import Trainer, TrainerConfig
from torch.nn.parallel import DistributedDataParallel
from transformers import get_constant_schedule_with_warmup

from eagle3.checkpoint import (
    Checkpoints,
    full,
    load_optimizer_state,
    load_weights,
    optimizer_state,
    step_name,
    trainable,
)
from eagle3.contract import Interrupted, StageError, write_text
from eagle3.feed import Batch, Feed, Row, Step, diagnose, supervised
from eagle3.meters import Window, cut_metrics, flops_per_token, peak_flops
from eagle3.progress import Progress
from eagle3.score import Top1Cache, Walk, chain_counts, conditional, expected_length, matches

if TYPE_CHECKING:
    from eagle3.vocab import VocabMap

log = logging.getLogger("eagle3")
metric_log = logging.getLogger("speculators.metrics")

NOT_MEASURED = {
    "conditional_accuracy": None, "expected_acceptance_length": None, "loss": None, "positions": 0,
    "why": "the store has no validation rows",
}  # fmt: skip


@dataclass
class Job:
    """What the trainer needs beside model, feeds and TrainerConfig.

    Attributes:
        folder: 04_train. checkpoints: its checkpoints.
        vocab_map: the draft vocabulary.
        norm, head: the verifier's final norm and whole head [V, H], on the training device.
        clip: gradient norm. constant: constant learning rate after warm-up (speculators has no such
            schedule).
        warmup_steps, schedule_steps: of the learning rate's schedule.
        total_steps: optimizer steps of this run (of this round).
        round: (k, n), the k-th of n windows of the data. The schedule spans all rounds by the fraction done,
            as the steps of rounds that are not extracted yet are unknown.
        val_every: steps between validations, None: once per epoch. log_every: steps between lines of
            metrics.jsonl.
        checkpoint_seconds, checkpoint_steps: when to save.
        chain: drafted tokens that the expected acceptance length counts. steps: TTT steps of validation.
        autocast: bf16 autocast. documents: the attention wants document ranges (fastpath.py).
        hook: hooks of the draft (fastpath.AnswerRows), or None.
    """

    folder: Path
    checkpoints: Checkpoints
    vocab_map: VocabMap
    norm: torch.nn.Module
    head: torch.Tensor
    clip: float
    warmup_steps: int
    schedule_steps: int
    total_steps: int
    chain: int
    val_steps: int
    round: tuple[int, int] = (1, 1)
    constant: bool = False
    val_every: int | None = None
    log_every: int = 10
    checkpoint_seconds: float = 600.0
    checkpoint_steps: int | None = None
    autocast: bool = True
    documents: bool = False
    hook: Any = None


@dataclass
class Position:
    """Where training stands: `step` optimizer steps done, `epoch_step` of them in `epoch`.

    `round` is the window of data being trained on, which began after `round_start` steps and takes
    `round_steps`.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    validated: int = 0
    best_step: int | None = None
    best_length: float = 0.0
    val: dict = field(default_factory=dict)
    round: int = 1
    round_start: int = 0
    round_steps: int = 0


class Signals:
    """Turns HUP, INT and TERM into a wish to stop at the next step boundary."""

    def __init__(self):
        self.signum = 0
        self._before: dict = {}

    def __enter__(self) -> Signals:
        for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            self._before[s] = signal.signal(s, self._note)
        return self

    def __exit__(self, *_exc) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _note(self, signum, _frame) -> None:
        if not self.signum:
            log.info("%s: saving after this step", signal.Signals(signum).name)
        self.signum = self.signum or signum


class DraftTrainer(Trainer):
    """Trains an EAGLE-3 draft on a Feed.

    Args:
        model: Eagle3DraftModel, filled.
        config: speculators' TrainerConfig; `max_steps` is obeyed exactly.
        train, val: feeds of this rank.
        job: see Job.
    """

    def __init__(self, model, config: TrainerConfig, train: Feed, val: Feed | None, job: Job):
        self.job, self.inner = job, model
        self.at = Position(round_steps=job.total_steps)
        super().__init__(model, config, train, val)
        self.device = next(self.inner.parameters()).device
        self.world = dist.get_world_size() if self.is_distributed else 1
        self.top1 = Top1Cache()
        self.kept = job.vocab_map.kept.to(self.device)
        self.metrics_file = job.folder / "metrics.jsonl"
        self.flops = flops_per_token(self.inner, config.train_call_kwargs["ttt_steps"])
        self.peak = peak_flops(self.device)
        self._saved_at, self.save_seconds = time.monotonic(), 0.0
        self._window = Window(train.wait_seconds)
        self._open: _OpenStep | None = None

    # -- set-up

    def setup_optimizer(self) -> None:
        """Speculators' optimizers and schedules; fused AdamW and warm-up before a constant rate are ours."""
        super().setup_optimizer()
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.AdamW):
                # One pass over the moments: 7 instead of 17 ms a step at Kimi size on an H200 (notes/gpu.md).
                for group in optimizer.param_groups:
                    group["fused"] = True
        if self.job.constant:
            self.schedulers = [
                get_constant_schedule_with_warmup(opt, self.job.warmup_steps) for opt in self.optimizers
            ]

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint: weights, moments, schedules, random state, position, metrics.jsonl."""
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True, mmap=True)
        load_weights(self.model, folder)
        load_optimizer_state(self.model, self.optimizers, state["optimizers"])
        for scheduler, saved in zip(self.schedulers, state["schedules"], strict=True):
            scheduler.load_state_dict(saved)
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"], self.device)
        self.at = Position(**state["position"])
        if self.rank == 0:
            cut_metrics(self.metrics_file, self.at.step, self.at.validated)

    @property
    def end(self) -> int:
        """The optimizer step that this run (this round) ends with."""
        return self.at.round_start + self.job.total_steps

    def enter_round(self, epochs: int) -> None:
        """After `resume`: go on within this round, or begin it where the one before it ended.

        Raises:
            StageError: the round before is not finished.
        """
        at, (k, n) = self.at, self.job.round
        if at.round == k and (at.step or k == 1):
            return
        if at.round != k - 1 or at.step < at.round_start + at.round_steps:
            raise StageError(
                f"round {k} of {n} builds on round {k - 1}, and training stands in round {at.round} at step "
                f"{at.step - at.round_start} of {at.round_steps}: finish that one first (--round "
                f"{at.round}/{n})"
            )
        at.round, at.round_start, at.round_steps = k, at.step, self.job.total_steps
        at.epoch, at.epoch_step = (k - 1) * epochs, 0

    def _schedulers_step(self) -> None:
        k, n = self.job.round
        if n > 1:
            done = (self.at.step + 1 - self.at.round_start) / self.job.total_steps
            for scheduler in self.schedulers:  # step() adds the one that is taken off here
                scheduler.last_epoch = self.job.schedule_steps * (k - 1 + done) / n - 1
        super()._schedulers_step()

    # -- the loop

    def run_training(self) -> None:
        """Train to the last step.

        Raises:
            Interrupted: after a save at a step boundary.
            StageError: non-finite loss or gradient, before the step that it would have spoiled.
        """
        plan = self.train_loader.plan
        bar = Progress(self.end, "step", "training", initial=self.at.step) if self.rank == 0 else None
        with Signals() as self.signals, bar or nullcontext():
            self.model.train()
            self._after_step(bar)  # a run stopped between a step and its validation catches up here
            until = self.job.round[0] * self.config.num_epochs
            stream = self.train_loader.batches(self.at.epoch, self.at.epoch_step, until)
            with closing(stream):
                while self.at.step < self.end:
                    batch = next(stream)
                    if batch.epoch != self.at.epoch:
                        self.at.epoch, self.at.epoch_step = batch.epoch, 0
                    step = plan(batch.epoch)[batch.step]
                    self._train_row(batch, step)
                    if batch.last:
                        self._finish_step(step)
                        self._after_step(bar)

    def _train_row(self, batch: Batch, step: Step) -> None:
        """Forward and backward of one row; gradients, loss and counts of its step add up."""
        if self._open is None:
            self._open = _OpenStep(self.config.train_call_kwargs["ttt_steps"], self.device)
            self._optimizers_zero_grad()
        with self._sync_gradients(batch.last):
            drafts, loss, _ = self._forward(batch, self.config.train_call_kwargs)
            loss = loss * ((batch.row.supervised + _LOSS_REDUCTION_EPS) / step.supervised)
            (loss * self.world).backward()  # DDP and FSDP average over ranks; a sum is wanted
        self._open.loss += loss.detach()
        self._open.rows.append(batch.row)
        if self._scored(self.at.step + 1):
            self._open.counts += chain_counts(*self._matches(batch, drafts, keep=False))

    def _finish_step(self, step: Step) -> None:
        """Clip, look whether all is finite, and take the optimizer step."""
        done, self._open = self._open, None
        norm = torch.nn.utils.clip_grad_norm_(trainable(self.model).values(), self.job.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if self.is_distributed:
            dist.all_reduce(done.loss)
        # The one wait for the device in a step.
        loss, norm = torch.stack([done.loss.float(), norm.float().to(self.device)]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._refuse_step(step, done.rows, loss, norm)
        rates = [opt.param_groups[0]["lr"] for opt in self.optimizers]
        self._optimizers_step()
        self._schedulers_step()
        self.at.step, self.at.epoch_step = self.at.step + 1, self.at.epoch_step + 1
        self._window.add(step.tokens)
        self.last_loss = loss
        if self._scored(self.at.step):
            self._log_train(loss, rates, done.counts)

    def _scored(self, number: int) -> bool:
        """Whether step `number` gets a line in metrics.jsonl (its accuracies cost a full head)."""
        return number % self.job.log_every == 0 or number == self.end

    def _forward(self, batch: Batch, kwargs: dict):
        """speculators' forward on a row: (draft tokens per TTT step, loss, metrics)."""
        extra = {}
        if self.job.documents:
            extra["documents"] = tuple((p.start, p.end) for p in batch.row.pieces)
        if self.job.hook is not None:
            self.job.hook.rows = batch.head_rows
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.job.autocast):
            return self.model(
                hidden_states=batch.hidden_states,
                input_ids=batch.input_ids,
                document_ids=batch.document_ids,
                position_ids=batch.position_ids,
                loss_mask=batch.loss_mask,
                verifier_last_hidden_states=batch.targets,
                **extra,
                **kwargs,
            )

    def _sync_gradients(self, last: bool):
        """Exchange gradients only with the last row of a step."""
        if isinstance(self.model, DistributedDataParallel):
            return nullcontext() if last else self.model.no_sync()
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def _refuse_step(self, step: Step, rows: list[Row], loss: float, norm: float) -> None:
        """Stop before a step that would destroy the weights; say what was in it."""
        causes = filter(None, (diagnose(self.train_loader.store, row) for row in rows))
        ids = step.ids
        saved = self.job.checkpoints.all()
        raise StageError(
            f"step {self.at.step + 1}: loss {loss}, gradient norm {norm}; stopped before the optimizer step, "
            f"{f'{saved[0].name} is kept' if saved else 'nothing was saved yet'}. "
            f"{next(causes, 'All its states are finite')}. Samples of the step: {', '.join(ids[:20])}"
            + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")
        )

    def _after_step(self, bar) -> None:
        """Validate, save and stop as due; every rank decides the same."""
        at, job = self.at, self.job
        if bar is not None and at.step > bar.n:
            bar.update(1, self._note())
        late = time.monotonic() - self._saved_at >= job.checkpoint_seconds
        stop, late = self._agree(self.signals.signum, late)
        finished = at.step >= self.end
        ended = at.epoch_step >= len(self.train_loader.plan(at.epoch))
        due = at.step and (finished or (ended if job.val_every is None else at.step % job.val_every == 0))
        better = False
        if due and at.validated != at.step and not stop:
            better = self._validate()
        periodic = job.checkpoint_steps and at.step % job.checkpoint_steps == 0
        newest = job.checkpoints.folder / step_name(at.step)
        fresh = bool(better or not (newest / "COMPLETE").is_file())
        if at.step and fresh and (stop or better or finished or late or periodic):
            self.save()
        if stop:
            raise Interrupted(stop)

    def _agree(self, signum: int, late: bool) -> tuple[int, bool]:
        """Signals seen by any rank stop all; rank 0's clock decides about saving."""
        if not self.is_distributed:
            return signum, late
        flags = torch.tensor([signum, int(late) if self.rank == 0 else 0], device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        signum, late = flags.tolist()
        return signum, bool(late)

    # -- checkpoints

    def save(self) -> Path | None:
        """Write a checkpoint (all ranks take part, rank 0 writes); keep the newest two and the best."""
        from safetensors.torch import save_file

        began = time.monotonic()
        weights = {name: full(p) for name, p in sorted(trainable(self.model).items())}
        state = {
            "optimizers": optimizer_state(self.model, self.optimizers),
            "schedules": [s.state_dict() for s in self.schedulers],
            "rng": {"cpu": torch.get_rng_state()},
            "position": vars(self.at).copy(),
        }
        if self.device.type == "cuda":
            state["rng"]["cuda"] = torch.cuda.get_rng_state(self.device)
        path = None
        if self.rank == 0:

            def write(folder: Path) -> None:
                # Not save_pretrained: it adds an auto_map to a class file that is not there.
                write_text(folder / "config.json", self.inner.config.to_json_string())
                save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
                torch.save(state, folder / "state.pt")

            meta = {"epoch": self.at.epoch, "val": self.at.val if self.at.validated == self.at.step else None}
            meta |= {"round": self.at.round, "round_whole": self.at.step >= self.end}
            path = self.job.checkpoints.save(self.at.step, meta, write)
            if self.at.best_step == self.at.step:
                self.job.checkpoints.link_best(self.at.step)
            self.job.checkpoints.prune(self.at.best_step)
        if self.is_distributed:
            dist.barrier()
        self._saved_at = time.monotonic()
        self.save_seconds = self._saved_at - began
        self._window.pause(self.save_seconds)
        return path

    def restore_best(self) -> None:
        """Put the best checkpoint's weights into the model."""
        load_weights(self.model, self.job.folder / step_name(self.at.best_step))

    # -- validation

    @torch.no_grad()
    def evaluate(self, feed: Feed, steps: int, walk: bool = False) -> dict:
        """Conditional accuracy over the full head, loss, and (walk) what chain serving would accept.

        Args:
            steps: TTT steps; the last of `job.chain` is the longest chain.

        Returns:
            {"conditional_accuracy": [steps], "expected_acceptance_length", "loss", "positions"} and with
                `walk`
            {"walks": {row id: (domain, Walk)}}.
        """
        self.model.eval()
        kwargs = {**(self.config.val_call_kwargs or self.config.train_call_kwargs), "ttt_steps": steps}
        trained = self.config.train_call_kwargs["ttt_steps"]
        sums = torch.zeros(2, steps, dtype=torch.float64, device=self.device)
        loss = torch.zeros(2, dtype=torch.float64, device=self.device)
        walks: dict[str, tuple[str, Walk]] = {}
        with closing(feed.batches(0)) as stream:
            for batch in stream:
                drafts, _, metrics = self._forward(batch, kwargs)
                right, valid = self._matches(batch, drafts, keep=True)
                sums += chain_counts(right, valid)
                n = batch.row.supervised
                loss[0] += sum(metrics[f"loss_{k}_sum"].double() for k in range(min(trained, steps))) * n
                loss[1] += n
                if walk:
                    self._walk(batch, right, walks)
        if self.is_distributed:
            dist.all_reduce(sums)
            dist.all_reduce(loss)
            parts: list = [None] * self.world
            dist.all_gather_object(parts, walks)
            walks = {name: walk for part in parts for name, walk in part.items()}
        self.model.train()
        if hasattr(self.model, "reshard"):  # FSDP leaves the root whole after a forward without a backward
            self.model.reshard()
        accuracy = conditional(sums)
        found = {
            "conditional_accuracy": accuracy,
            "expected_acceptance_length": expected_length(accuracy[: self.job.chain]),
            "loss": (loss[0] / loss[1]).item() if loss[1] else None,
            "positions": int(loss[1]),
        }
        return {**found, "walks": walks} if walk else found

    def _walk(self, batch: Batch, right: torch.Tensor, walks: dict[str, tuple[str, Walk]]) -> None:
        rows = right[: self.job.chain, batch.loss_mask[0]].tolist()
        at = 0
        for piece in batch.row.pieces:
            n = supervised(piece.info)
            walk = Walk(self.job.chain)
            walk.answer([r[at : at + n] for r in rows])
            walks[piece.info.id] = (piece.info.domain, walk)
            at += n

    def _matches(self, batch: Batch, drafts: list[torch.Tensor], keep: bool):
        top1 = self.top1.of(batch, self.job.norm, self.job.head, keep)
        return matches(drafts, top1, batch.loss_mask[0], self.kept)

    def _validate(self) -> bool:
        """Validate, log, and tell whether this is the best so far."""
        began = time.monotonic()
        self.at.validated = self.at.step
        if self.val_loader is None:  # nothing to choose by: the newest is the best
            self.at.best_step, self.at.val = self.at.step, NOT_MEASURED
            return True
        found = self.evaluate(self.val_loader, self.job.val_steps)
        length = found["expected_acceptance_length"]
        better = self.at.best_step is None or length > self.at.best_length
        if better:
            self.at.best_step, self.at.best_length, self.at.val = self.at.step, length, found
        seconds = time.monotonic() - began
        self._window.pause(seconds)
        self._write(
            {
                "step": self.at.step, "epoch": self.at.epoch, "loss": found["loss"], "lr": None,
                "acc": found["conditional_accuracy"], "expected_acceptance_length": length,
                "tokens_per_s": None,
                "wait_share": None, "mfu": None, "split": "val",
            }
        )  # fmt: skip
        log.info(
            "step %d: validation loss %.3f, accuracy %s, expected acceptance length %.3f%s (%.0f s)",
            self.at.step, found["loss"], _shares(found["conditional_accuracy"]), length,
            ", the best so far" if better else f", best {self.at.best_length:.3f} at {self.at.best_step}",
            seconds,
        )  # fmt: skip
        return better

    # -- figures

    def _log_train(self, loss: float, rates: list[float], counts: torch.Tensor) -> None:
        if self.is_distributed:
            dist.all_reduce(counts)
        accuracy = conditional(counts)
        tokens, seconds, wait = self._window.close(self.train_loader.wait_seconds)
        rate = tokens / max(seconds, 1e-9)
        self.last = {
            "step": self.at.step,
            "epoch": self.at.epoch,
            "loss": loss,
            "lr": rates[0] if len(rates) == 1 else rates,
            "acc": accuracy,
            "expected_acceptance_length": expected_length(accuracy[: self.job.chain]),
            "tokens_per_s": round(rate, 1),
            "wait_share": round(wait / max(seconds, 1e-9), 4),
            "mfu": round(rate * self.flops / (self.peak * self.world), 4) if self.peak else None,
            "split": "train",
        }
        self._write(self.last)

    def rates(self) -> dict:
        """Rates over the logged part of this process's run."""
        tokens, seconds, wait = self._window.sums
        rate = tokens / seconds if seconds else None
        return {
            "tokens_per_s": rate and round(rate, 1),
            "wait_share": round(wait / seconds, 4) if seconds else None,
            "mfu": round(rate * self.flops / (self.peak * self.world), 4) if rate and self.peak else None,
            "train_seconds": round(seconds, 1),
            "checkpoint_save_seconds": round(self.save_seconds, 2),
        }

    def _note(self) -> str:
        """What stands behind the progress bar."""
        last = getattr(self, "last", None)
        if last is None:
            return f"loss {self.last_loss:.3f}"
        mfu = "-" if last["mfu"] is None else f"{last['mfu']:.0%}"
        return (
            f"loss {self.last_loss:.3f} acc {_shares(last['acc'])} length "
            f"{last['expected_acceptance_length']:.2f} "
            f"{last['tokens_per_s']:,.0f} tok/s wait {last['wait_share']:.1%} mfu {mfu}"
        )

    def _write(self, line: dict) -> None:
        if self.rank != 0:
            return
        with open(self.metrics_file, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        plain = {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "epoch")}
        plain |= {f"acc_{k}": a for k, a in enumerate(line["acc"])}
        metric_log.info({line["split"]: plain}, extra={"step": line["step"]})


class _OpenStep:
    """What adds up over the rows of one step."""

    def __init__(self, ttt_steps: int, device: torch.device):
        self.loss = torch.zeros((), device=device)
        self.counts = torch.zeros(2, ttt_steps, dtype=torch.float64, device=device)
        self.rows: list[Row] = []


def _shares(values: list[float]) -> str:
    return "/".join(f"{v:.2f}" for v in values)


def refuse_other_launchers() -> None:
    """accelerate's FSDP and DeepSpeed modes set these and would silently train with plain DDP.

    Raises:
        ConfigError: naming the variable and what to do instead.
    """
    from eagle3.contract import ConfigError

    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "DEEPSPEED_ZERO_STAGE"):
        if os.environ.get(name, "").lower() not in ("", "0", "false"):
            raise ConfigError(
                f"{name} is set: speculators trains with plain torch.distributed, so this would silently "
                "be DDP. Launch with "
                "`accelerate launch --multi_gpu` or torchrun, and choose sharding with train.shard: ddp | "
                "fsdp"
            )
