"""How well the GPU is fed at the real Kimi-K2.5 draft size: our feed, the stock feed, the in-memory ceiling.

    python tests/bench/train_kimi_size.py [--work DIR] [--budget 330]        one GPU
    python tests/bench/train_kimi_size.py --gpus 2                           two GPUs of one host, NCCL
    python tests/bench/train_kimi_size.py --device cpu                       the default recipe's size

Synthetic states in our store (bf16 and fp8) and in speculators' files; hidden 7168, draft vocabulary 32,000,
3 TTT steps, 8,192 tokens a step. Everything runs on one model in one process, so the figures differ by the
feed alone. On a GPU the files are written by processes of their own while the model is built and compiled.
Needs torch, transformers, speculators (and datasets for the stock feed); no network, no verifier, no vLLM.
What matters most comes first; a phase that fails is reported under "errors"; the last line is one JSON
object, which --out also writes after every phase.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
SIZES = {
    "cuda": {
        "hidden": 7168, "vocab": 163840, "draft_vocab": 32000, "seen": 40000, "heads": 64, "kv": 64,
        "head_dim": 128,
        "inner": 12288, "rope": YARN, "limit": 262144, "tokens_per_step": 8192, "row": 8192, "tokens": 2048,
        "prompt": 512, "samples": 48, "steps": 24, "threads": 4,
    },
    "cpu": {
        "hidden": 576, "vocab": 49152, "draft_vocab": 8192, "seen": 12000, "heads": 9, "kv": 3,
        "head_dim": 64,
        "inner": 1536, "rope": {"rope_type": "default", "rope_theta": 100000.0}, "limit": 8192,
        "tokens_per_step": 512,
        "row": 512, "tokens": 140, "prompt": 40, "samples": 64, "steps": 12, "threads": 1,
    },
}  # fmt: skip
LAYERS = [2, 30, 58]
TTT = 3
FORMATS = ("bf16", "fp8", "stock")


class Bench:
    """Sizes, places, time left, and what was found."""

    def __init__(self, args):
        self.args, self.size, self.began = args, SIZES[args.device], time.monotonic()
        self.work = Path(args.work)
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = (
            torch.device("cpu")
            if args.device == "cpu"
            else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        )
        self.out: dict = {"bench": "train_kimi_size", "device": args.device, "gpus": self.world, "errors": {}}

    @property
    def left(self) -> float:
        return self.args.budget - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    @contextmanager
    def phase(self, name: str, needs: float = 0):
        """One measurement; a failure is noted and the others go on."""
        if self.left < needs:
            self.out["errors"][name] = f"skipped: {self.left:.0f} s left, {needs:.0f} needed"
            self.say(f"{name}: {self.out['errors'][name]}")
            raise _Skip
        self.say(f"{name} ...")
        began = time.monotonic()
        try:
            yield
        except Exception as err:
            self.out["errors"][name] = f"{type(err).__name__}: {' '.join(str(err).split())[:400]}"
            traceback.print_exc()
            self.say(f"{name} FAILED: {self.out['errors'][name]}")
        self.out.setdefault("phase_seconds", {})[name] = round(time.monotonic() - began, 1)
        self.write()

    def write(self) -> None:
        """What is known so far, so that a run that is cut off loses nothing."""
        if self.args.out and self.rank == 0:
            Path(self.args.out).write_text(json.dumps(self.out) + "\n")

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class _Skip(Exception):
    pass


# --- data ---------------------------------------------------------------------------------------------------


def sample_states(b: Bench):
    """Yields (number, states bf16 [T, 4, H], token ids [T + 1]) on the CPU: windows of one pool of noise."""
    s = b.size
    g = torch.Generator().manual_seed(0)
    length = s["tokens"] - 1
    pool = torch.randn(length + 4 * s["samples"], 4, s["hidden"], generator=g).to(torch.bfloat16)
    for n in range(s["samples"]):
        ids = torch.randint(0, s["seen"], (s["tokens"],), generator=torch.Generator().manual_seed(n))
        yield n, pool[4 * n : 4 * n + length], ids


def write_data(b: Bench, form: str, folder: str | None = None, samples: int | None = None) -> None:
    """Our store in one dtype, or speculators' data folder ("stock"), of the same samples."""
    target = b.work / (folder or form)
    if form == "stock":
        write_stock(b, target)
        return
    from eagle3.store_writer import StoreWriter

    target.mkdir(parents=True, exist_ok=True)
    writer = StoreWriter(target, "1of1", [*LAYERS, 61], b.size["hidden"], form, 2_000_000_000)
    for n, states, ids in sample_states(b):
        if n == samples:
            break
        entry = {"id": f"row-{n:05d}", "split": "train", "domain": "x", "source": "x", "input": f"{n:032x}"}
        writer.add(states, ids.tolist(), b.size["prompt"], **entry)
    writer.close()


def write_stock(b: Bench, target: Path) -> None:
    from datasets import Dataset
    from safetensors.torch import save_file

    s, rows = b.size, []
    (target / "hidden_states").mkdir(parents=True, exist_ok=True)
    for n, states, ids in sample_states(b):
        tensors = {"hidden_states": states.clone(), "token_ids": ids[:-1].clone()}
        save_file(tensors, target / "hidden_states" / f"hs_{n}.safetensors")
        rows.append(ids[:-1].tolist())
    length = s["tokens"] - 1
    # A boolean mask, as our feed has it, so that both feeds run the same compiled model.
    mask = [[False] * s["prompt"] + [True] * (length - s["prompt"])] * len(rows)
    data = {"input_ids": rows, "loss_mask": mask, "seq_len": [length] * len(rows)}
    Dataset.from_dict(data).with_format("torch").save_to_disk(target)


def start_writers(b: Bench) -> dict[str, subprocess.Popen]:
    """A process per format; they need a CPU only."""
    if b.rank:
        return {}
    shutil.rmtree(b.work, ignore_errors=True)
    b.work.mkdir(parents=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--device", b.args.device]
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {
        form: subprocess.Popen([*command, "--work", str(b.work), "--write", form], env=alone)
        for form in FORMATS
    }


def wait_for_writers(b: Bench, writers: dict[str, subprocess.Popen]) -> None:
    with b.phase("data"):
        for form, process in writers.items():
            if process.wait(max(1, b.left)):
                b.out["errors"][f"{form} data"] = f"exit status {process.returncode}"
        if b.rank == 0:
            b.out["store_bytes"] = {
                form: sum(f.stat().st_size for f in (b.work / form).rglob("*") if f.is_file())
                for form in FORMATS
            }
    if b.world > 1:
        torch.distributed.barrier()


def drop_cache(folder: Path) -> None:
    """Forget a folder's pages (synced first, or they could not be dropped)."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


# --- model --------------------------------------------------------------------------------------------------


def make_model(b: Bench, attention: str, frozen: torch.dtype):
    """Our draft at this size on random frozen weights."""
    from eagle3 import draft, vocab

    s = b.size
    seen = torch.zeros(s["vocab"], dtype=torch.long)
    seen[: s["seen"]] = torch.arange(s["seen"], 0, -1)
    vocab_map = vocab.choose({"x": seen.numpy()}, s["draft_vocab"], 0.0)
    text = {"rope_parameters": s["rope"], "max_position_embeddings": s["limit"], "rms_norm_eps": 1e-5}

    def matrix():
        return (torch.randn(s["vocab"], s["hidden"], device=b.device) * 0.02).to(torch.bfloat16)

    verifier = SimpleNamespace(
        path=Path("synthetic"), text=text, config={}, layers=LAYERS, hidden_size=s["hidden"],
        vocab_size=s["vocab"],
        value=text.get, embedding=matrix, head=matrix,
        norm_weight=lambda: torch.ones(s["hidden"], device=b.device),
    )  # fmt: skip
    recipe = SimpleNamespace(
        draft=SimpleNamespace(
            num_hidden_layers=1, num_attention_heads=s["heads"], num_key_value_heads=s["kv"],
            head_dim=s["head_dim"],
            intermediate_size=s["inner"], rms_norm_eps=1e-6, vocab_size=s["draft_vocab"], sliding_window=None,
            norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
            train_head=False,
        ),
        verifier=SimpleNamespace(model="/synthetic"),
        evaluate=SimpleNamespace(num_speculative_tokens=3),
        path=Path("synthetic"),
    )  # fmt: skip
    with torch.device(b.device):
        config = draft.build_config(recipe, verifier, attention)
    with torch.device(b.device):  # 829 M normal numbers take a while on a CPU
        model = _build(config, vocab_map, verifier, frozen)
    return model, vocab_map, verifier.head()


def _build(config, vocab_map, verifier, frozen):
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3 import draft

    model = Eagle3DraftModel(config)
    cpu_map = type(vocab_map)(vocab_map.d2t.to("cpu"), vocab_map.t2d.to("cpu"))
    with torch.device("cpu"):
        kept = cpu_map.kept
    fill = SimpleNamespace(
        d2t=cpu_map.d2t, t2d=cpu_map.t2d, full=cpu_map.full, kept=kept.to(model.embed_tokens.weight.device)
    )
    draft.fill_frozen(model, fill, verifier, False, frozen)
    return model


def make_feed(b: Bench, folder: str, autocast: bool, compact: bool):
    from eagle3.feed import Feed, usable
    from eagle3.store import Store

    s, store = b.size, Store.open(b.work / folder)
    infos, _ = usable(store.select("train"), s["row"], TTT - 1)
    return Feed(
        store, infos, s["tokens_per_step"] * b.world, s["row"], TTT - 1, b.device,
        torch.bfloat16 if autocast else torch.float32, static=b.device.type == "cuda", compact=compact,
        rank=b.rank,
        world=b.world, threads=s["threads"],
    )  # fmt: skip


def make_trainer(b: Bench, model, vocab_map, head, feed, autocast: bool, documents: bool, hook):
    from speculators.losses import resolve_loss_config
    from speculators.train.trainer import TrainerConfig

    from eagle3 import fastpath
    from eagle3.checkpoint import Checkpoints
    from eagle3.trainer import DraftTrainer, Job

    loss = {"kl_div": (fastpath.KlLoss(), 1.0)} if documents else resolve_loss_config("kl_div", "eager")
    config = TrainerConfig(
        lr=3e-5, num_epochs=1000, save_path=str(b.work / "out"), scheduler_type="cosine",
        scheduler_warmup_steps=10,
        scheduler_total_steps=100_000, weight_decay=0.0,
        train_call_kwargs={"ttt_steps": TTT, "ttt_step_loss_decay": 0.8, "loss_config": loss},
        hidden_states_dtype=torch.bfloat16 if autocast else torch.float32,
    )  # fmt: skip
    folder = b.work / "out"
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(
        folder=folder, checkpoints=Checkpoints(folder, {}), vocab_map=vocab_map, norm=model.verifier_norm,
        head=head,
        clip=1.0, warmup_steps=10, schedule_steps=100_000, total_steps=100_000, chain=3, val_steps=3,
        log_every=10, autocast=autocast,
        documents=documents, hook=hook,
    )  # fmt: skip
    return DraftTrainer(model, config, feed, None, job)


# --- measurements -------------------------------------------------------------------------------------------


def timed_steps(b: Bench, trainer, feed, steps: int, warm: int = 2) -> dict:
    """Optimizer steps fed by `feed`, epoch after epoch."""
    done, tokens, began, wait, seconds, last = 0, 0, 0.0, 0.0, [], 0.0
    stream = feed.batches(0, until=1000)
    while done < warm + steps:
        batch = next(stream)
        step = feed.plan(batch.epoch)[batch.step]
        trainer._train_row(batch, step)
        if not batch.last:
            continue
        trainer._finish_step(step)
        done, now = done + 1, time.monotonic()
        if done > warm:
            tokens += step.tokens
            seconds.append(now - last)
        last = now
        if done == warm:
            b.sync()
            began, wait, last = time.monotonic(), feed.wait_seconds, time.monotonic()
    stream.close()
    b.sync()
    total = time.monotonic() - began
    return {
        "tokens_per_s": round(tokens / total, 1),
        "wait_share": round((feed.wait_seconds - wait) / total, 4),
        "step_ms_median": round(1000 * sorted(seconds)[len(seconds) // 2], 1),
        "steps": steps,
    }


def ceiling(b: Bench, trainer, feed, steps: int, warm: int = 3) -> dict:
    """The same step on a batch that already lies in the device's memory."""
    plan, stream = feed.plan(0), feed.batches(0)
    batches = []
    for batch in stream:
        batches.append(batch)
        if batch.last:
            break
    stream.close()
    step = plan[batches[0].step]
    for done in range(warm + steps):
        if done == warm:
            b.sync()
            began = time.monotonic()
        for batch in batches:
            trainer._train_row(batch, step)
        trainer._finish_step(step)
    b.sync()
    total = time.monotonic() - began
    rate = steps * step.tokens / total
    peak = trainer.peak
    return {
        "tokens_per_s": round(rate, 1),
        "step_ms": round(1000 * total / steps, 1),
        "mfu": round(rate * trainer.flops / peak / b.world, 4) if peak else None,
    }


def parts_of_a_step(b: Bench, trainer, feed) -> dict:
    """Milliseconds of forward, backward, clip and optimizer on a resident batch."""
    stream = feed.batches(0)
    batch = next(stream)
    stream.close()
    kwargs = trainer.config.train_call_kwargs
    marks = dict.fromkeys(("forward", "backward", "clip", "optimizer"), 0.0)
    from eagle3.checkpoint import trainable

    rounds = 5
    for _ in range(rounds):
        b.sync()
        t = [time.monotonic()]
        trainer._optimizers_zero_grad()
        _, loss, _ = trainer._forward(batch, kwargs)
        b.sync()
        t.append(time.monotonic())
        loss.backward()
        b.sync()
        t.append(time.monotonic())
        torch.nn.utils.clip_grad_norm_(trainable(trainer.model).values(), 1.0)
        b.sync()
        t.append(time.monotonic())
        trainer._optimizers_step()
        b.sync()
        t.append(time.monotonic())
        for key, first, then in zip(marks, t, t[1:], strict=False):
            marks[key] += 1000 * (then - first) / rounds
    return {f"{key}_ms": round(value, 1) for key, value in marks.items()}


def without_extras(_model, args, kwargs):
    """Drops what the stock collator adds and the model ignores: it would be compiled a second time."""
    return args, {k: v for k, v in kwargs.items() if k != "error_records"}


@contextmanager
def long_epochs(dataloader, times: int):
    """Stock epochs that repeat their batches, so that no epoch's end empties the workers' queues."""
    own = dataloader.MultipackDistributedBatchSamplerV2

    class Repeated(own):
        def __iter__(self):
            yield from list(super().__iter__()) * times

        def __len__(self):
            return super().__len__() * times

    dataloader.MultipackDistributedBatchSamplerV2 = Repeated
    try:
        yield
    finally:
        dataloader.MultipackDistributedBatchSamplerV2 = own


def stock_feed(b: Bench, model, workers: int, steps: int, dtype: torch.dtype, loss: dict) -> dict:
    """speculators' own dataset, collator, loader and Trainer loop, on a given model.

    Args:
        steps: steps that count, after those whose batches were loaded ahead while the workers started.
        loss: the `loss_config` of the model's call.
    """
    from speculators.models.eagle3 import shift_batch
    from speculators.train import dataloader
    from speculators.train import trainer as upstream
    from speculators.train.data import ArrowDataset

    dataloader._limit_worker_threads()
    s, profiles = b.size, []
    ahead = 2  # batches a worker loads ahead; the rate does not depend on it once they are used up
    warm = (ahead + 1) * workers + 2
    dataset = ArrowDataset(
        s["row"], b.work / "stock", on_missing="raise", model="x", hidden_states_dtype=torch.bfloat16
    )
    if dtype != torch.bfloat16:
        dataset.hidden_states_dtype = dtype
    with long_epochs(dataloader, 16):
        loader = dataloader._setup_dataloader(
            dataset, s["row"], s["hidden"], num_workers=workers, num_target_layers=3,
            prefetch_factor=ahead, preprocess=shift_batch,
        )  # fmt: skip
    original = upstream._StepTimer.profile

    def profile(self, tokens):
        if (found := original(self, tokens)) is not None:
            profiles.append(found)
        return found

    kwargs = {"ttt_steps": TTT, "ttt_step_loss_decay": 0.8, "loss_config": loss}
    config = upstream.TrainerConfig(
        lr=3e-5, num_epochs=1, save_path=str(b.work / "stock-out"), train_call_kwargs=kwargs,
        val_call_kwargs=kwargs,
        scheduler_total_steps=1000, hidden_states_dtype=dtype, log_freq=1, max_steps=warm + steps,
    )  # fmt: skip
    upstream._StepTimer.profile = profile
    hook = model.register_forward_pre_hook(without_extras, with_kwargs=True)
    began = time.monotonic()
    try:
        trainer = upstream.Trainer(model, config, loader)
        trainer.train_epoch(0)
    finally:
        upstream._StepTimer.profile = original
        hook.remove()
        del loader
    first = profiles[0]["fetch_ms"] / 1000
    use = profiles[warm:]
    total = sum(p["step_ms"] for p in use)
    return {
        "workers": workers,
        "tokens_per_s": round(sum(p["tokens_per_s"] * p["step_ms"] for p in use) / total, 1),
        "wait_share": round(sum(p["fetch_ms"] for p in use) / total, 4),
        "step_ms_median": round(sorted(p["step_ms"] for p in use)[len(use) // 2], 1),
        "steps": len(use),
        "seconds_to_first_batch": round(first, 1),
        "seconds_in_all": round(time.monotonic() - began, 1),
        "last_step": {k: round(use[-1][k], 1) for k in ("fetch_ms", "h2d_ms", "fwd_ms", "bwd_ms", "opt_ms")},
    }


# --- runs ---------------------------------------------------------------------------------------------------


def quiet(phase):
    """A phase that may be skipped."""
    try:
        return phase()
    except _Skip:
        return None


def run_gpu(b: Bench) -> None:
    writers = start_writers(b)
    parts = set_up(b)
    wait_for_writers(b, writers)
    if parts is not None:
        measure(b, parts)
    b.out["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)


def set_up(b: Bench) -> SimpleNamespace | None:
    """Model and trainer, compiled on a store of a single step."""
    parts = None
    with b.phase("model"):
        b.out["gpu"] = torch.cuda.get_device_name(b.device)
        b.out["versions"] = {"torch": torch.__version__, "cuda": torch.version.cuda}
        model, vocab_map, head = make_model(b, "simple_flex_attention", torch.bfloat16)
        seed = f"seed-{b.rank}"
        write_data(b, "bf16", seed, samples=b.size["tokens_per_step"] // b.size["tokens"] * b.world)
        feed = make_feed(b, seed, True, False)
        trainer = make_trainer(b, model, vocab_map, head, feed, True, False, None)
        b.out["trainable_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        parts = SimpleNamespace(model=model, trainer=trainer, resident=feed)
    if parts is None:
        return None
    with b.phase("compile"):
        ceiling(b, parts.trainer, parts.resident, 1, warm=1)
        b.sync()
    return parts


def measure(b: Bench, parts: SimpleNamespace) -> None:
    """Everything that is timed, the most important first."""
    steps, trainer = b.size["steps"], parts.trainer
    feeds: dict = {}
    # Bytes of states per position: three auxiliary layers, and the final one where it is a target.
    per_token = {
        d: (4 - b.size["prompt"] / b.size["tokens"]) * b.size["hidden"] * width
        for d, width in (("bf16", 2), ("fp8", 1))
    }

    def compute():
        with b.phase("ceiling"):
            b.out["ceiling"] = ceiling(b, trainer, parts.resident, steps)
            b.say(f"ceiling {b.out['ceiling']}")
            if b.world == 1:
                b.out["ceiling"]["parts"] = parts_of_a_step(b, trainer, parts.resident)

    def ours(dtype: str, cache: str, needs: float):
        name = f"{dtype}_{cache}"
        with b.phase(f"ours {name}", needs=needs):
            if dtype not in feeds:
                feeds[dtype] = make_feed(b, dtype, True, False)
            feed = feeds[dtype]
            if cache == "cold":
                drop_cache(b.work / dtype)
                feed._verified.clear()  # as in the first epoch of a run
            # Cold reads count only until the pages are back: one epoch, no second one.
            found = timed_steps(b, trainer, feed, steps if cache == "warm" else len(feed) - 2)
            found["read_gb_per_s"] = round(found["tokens_per_s"] * per_token[dtype] / 1e9, 2)
            found["of_ceiling"] = round(found["tokens_per_s"] / b.out["ceiling"]["tokens_per_s"], 4)
            found["mfu"] = round(found["tokens_per_s"] * trainer.flops / trainer.peak / b.world, 4)
            b.out.setdefault("ours", {})[name] = found
            b.say(f"ours {name}: {found}")

    def ceiling_again():
        with b.phase("ceiling again"):
            b.out["ceiling"]["again"] = ceiling(b, trainer, parts.resident, 8)["tokens_per_s"]

    def stock(workers: int):
        with b.phase(f"stock {workers} workers", needs=50):
            loss = trainer.config.train_call_kwargs["loss_config"]
            found = stock_feed(b, parts.model, workers, steps, torch.bfloat16, loss)
            b.out.setdefault("stock_runs", []).append(found)
            best = b.out["stock"] = max(b.out["stock_runs"], key=lambda r: r["tokens_per_s"])
            b.out["ratio"] = round(b.out["ours"]["bf16_warm"]["tokens_per_s"] / best["tokens_per_s"], 2)
            b.say(f"stock: {found}")

    def save():
        with b.phase("checkpoint", needs=30):
            trainer.save()
            folder = next((b.work / "out").glob("step-*"))
            size = sum(f.stat().st_size for f in folder.iterdir())
            b.out["checkpoint"] = {"seconds": round(trainer.save_seconds, 1), "bytes": size}
            b.say(f"checkpoint: {b.out['checkpoint']}")
            shutil.rmtree(folder)

    compute()
    quiet(lambda: ours("bf16", "warm", 12))
    quiet(lambda: ours("fp8", "warm", 12))
    if b.world == 1:
        quiet(ceiling_again)
        quiet(lambda: stock(6))
        quiet(save)
    quiet(lambda: ours("bf16", "cold", 20))
    quiet(lambda: ours("fp8", "cold", 15))
    if b.world == 1:
        quiet(lambda: stock(12))


def run_several(b: Bench) -> None:
    """DDP over all GPUs, beside one GPU's own rate in the same run, and the all-reduce."""
    import torch.distributed as dist
    from speculators.train import distributed

    distributed.maybe_setup_distributed()
    with b.phase("all-reduce"):
        weights = torch.zeros(829_000_000, device=b.device)
        for done in range(8):
            if done == 3:
                b.sync()
                began = time.monotonic()
            dist.all_reduce(weights)
        b.sync()
        seconds = (time.monotonic() - began) / 5
        moved = 2 * (b.world - 1) / b.world * weights.numel() * 4
        b.out["all_reduce"] = {
            "bytes": weights.numel() * 4, "ms": round(1000 * seconds, 2),
            "bus_gb_per_s": round(moved / seconds / 1e9, 1)
        }  # fmt: skip
        del weights
        torch.cuda.empty_cache()
    run_gpu(b)
    with b.phase("one GPU alone", needs=20):
        alone = Bench(b.args)
        alone.world, alone.rank = 1, 0
        distributed._is_distributed = False
        distributed._world_size = 1
        feed = make_feed(alone, "bf16", True, False)
        model, vocab_map, head = make_model(b, "simple_flex_attention", torch.bfloat16)
        trainer = make_trainer(alone, model, vocab_map, head, feed, True, False, None)
        b.out["one_gpu"] = ceiling(alone, trainer, feed, 10)
        distributed._is_distributed = True
        b.out["speedup"] = round(
            b.out["ours"]["bf16_warm"]["tokens_per_s"] / b.out["one_gpu"]["tokens_per_s"], 3
        )


def run_cpu(b: Bench) -> None:
    """Default recipe's size on this CPU: our path against stock, in stock's own bf16 and in float32."""
    from patches import speculators_cpu

    speculators_cpu.apply()
    from eagle3 import fastpath

    wait_for_writers(b, start_writers(b))
    b.out["threads"] = torch.get_num_threads()
    with b.phase("ours"):
        model, vocab_map, head = make_model(b, fastpath.ATTENTION, torch.float32)
        hook = fastpath.AnswerRows(model)
        for dtype in ("bf16", "fp8"):
            feed = make_feed(b, dtype, False, True)
            trainer = make_trainer(b, model, vocab_map, head, feed, False, True, hook)
            b.out.setdefault("ours", {})[f"{dtype}_warm"] = timed_steps(
                b, trainer, feed, b.size["steps"], warm=1
            )
            b.say(f"ours {dtype}: {b.out['ours'][f'{dtype}_warm']}")
            feed.close()
        b.out["ceiling"] = ceiling(
            b, trainer, feed_again := make_feed(b, "bf16", False, True), b.size["steps"], warm=1
        )
        feed_again.close()
    from speculators.losses import resolve_loss_config

    for dtype in (torch.float32, torch.bfloat16):
        with b.phase(f"stock {dtype}", needs=30):
            model, _, _ = make_model(b, "sdpa", torch.float32)
            loss = resolve_loss_config("kl_div", "eager")
            found = {"dtype": str(dtype), **stock_feed(b, model, 0, 3, dtype, loss)}
            b.out.setdefault("stock_runs", []).append(found)
            b.say(f"stock: {found}")
    if runs := b.out.get("stock_runs"):
        b.out["stock"] = max(runs, key=lambda r: r["tokens_per_s"])
        b.out["ratio"] = round(b.out["ours"]["bf16_warm"]["tokens_per_s"] / b.out["stock"]["tokens_per_s"], 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--work", default="/tmp/eagle3-train-bench", help="24 GB are written here on a GPU machine"
    )
    parser.add_argument(
        "--budget", type=float, default=330, help="seconds in all; phases that no longer fit are skipped"
    )
    parser.add_argument("--keep", action="store_true", help="leave the work folder")
    parser.add_argument("--out", help="file for the JSON object, rewritten after every phase")
    parser.add_argument("--write", choices=FORMATS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
        write_data(Bench(args), args.write)
        return 0
    if args.gpus > 1 and "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
        os.execv(sys.executable, [sys.executable, *command, str(Path(__file__).resolve()), *sys.argv[1:]])
    import logging

    logging.basicConfig(level=logging.WARNING)
    bench = Bench(args)
    try:
        if args.device == "cpu":
            run_cpu(bench)
        else:
            torch.cuda.set_device(bench.device)
            torch.set_float32_matmul_precision("high")
            torch._dynamo.config.optimize_ddp = False  # as 04 does
            run_several(bench) if bench.world > 1 else run_gpu(bench)
    except _Skip:
        pass
    except Exception as err:
        traceback.print_exc()
        bench.out["errors"]["run"] = f"{type(err).__name__}: {' '.join(str(err).split())[:400]}"
    if bench.rank == 0:
        bench.out["seconds"] = round(time.monotonic() - bench.began, 1)
        bench.write()
        if not args.keep:
            shutil.rmtree(bench.work, ignore_errors=True)
        print(json.dumps(bench.out), flush=True)
    return 0 if bench.out.get("ours") else 1


if __name__ == "__main__":
    raise SystemExit(main())
