"""What a run will cost before anything is spent: tokens, bytes, memory, verifier loads, hours, price.

    ./run_pipeline.sh plan                    for RECIPE, PROFILE and SAMPLES
    ./run_pipeline.sh plan --json             the same as JSON
    ./run_pipeline.sh plan --from RUN_DIR     scale a smaller run up (two runs tell fixed costs apart)

Every rate says where it comes from, in this order: earlier run directories on this profile (those given
with --from, else those beside this run), this run so far, configs/rates.yaml (measured elsewhere, published,
computed or assumed). The interval of a figure is as wide as its origin is weak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from eagle3.contract import ROOT, STAGE_DIRS, ConfigError, RunDir, StageError, read_json

GB = 1e9
# Relative half-width of the interval by origin: several runs of one's own, one run, other people's figures.
SPREAD = {
    "runs": 0.15,
    "run": 0.3,
    "measured": 0.3,
    "earlier": 0.1,
    "published": 0.5,
    "computed": 0.4,
    "assumed": 0.6,
}


@dataclass
class Figure:
    """A number with its interval and its origin."""

    value: float
    low: float
    high: float
    origin: str

    def json(self) -> dict:
        return {"value": self.value, "low": self.low, "high": self.high, "origin": self.origin}


def figure(value: float, origin: str) -> Figure:
    """A figure whose interval follows from the first word of its origin."""
    spread = SPREAD.get(origin.split(":")[0].split()[0], 0.5)
    return Figure(value, value * (1 - spread), value * (1 + spread), origin)


# --- sizes -----------------------------------------------------------------------------------------------


def state_bytes(hidden: int, aux: int, dtype: str) -> tuple[float, float]:
    """Bytes of one token in the store: (auxiliary states, final state).

    bf16: 2 bytes a value. fp8: 1 byte a value and a float32 scale per token and layer.
    Kimi-K2.5 (hidden 7168, 3 auxiliary layers): 43,008 + 14,336 = 57,344 B in bf16.
    """
    size, scale = (2, 0) if dtype == "bf16" else (1, 4)
    return aux * (hidden * size + scale), hidden * size + scale


def parameters(recipe, hidden: int, vocab: int) -> dict[str, int]:
    """Parameters of the draft by part; fc, layers and norms are trained, embedding and heads are frozen."""
    d = recipe.draft
    size = vocab if d.vocab_size == "full" else d.vocab_size
    attention = 2 * hidden * d.head_dim * (d.num_attention_heads + 2 * d.num_key_value_heads)
    attention += d.num_attention_heads * d.head_dim * hidden
    layer = attention + 3 * hidden * d.intermediate_size + 3 * hidden
    trained = 3 * hidden * hidden + d.num_hidden_layers * layer + hidden
    return {"trained": trained, "embedding": vocab * hidden, "head": size * hidden, "draft_vocab": size}


def training_memory(recipe, profile, hidden: int, vocab: int) -> dict[str, float]:
    """Bytes on one training GPU, term by term (nothing fitted).

    Weights: fp32 masters, gradients and two Adam moments of what is trained (16 B a parameter) and the bf16
    copies that autocast keeps for one step (2 B); frozen embedding and two heads (the draft's and the
    verifier's rows of the draft vocabulary) in fp32 plus bf16 copies of the heads.
    Activations of one TTT step and token, saved for the backward pass, in bf16 values (2 B) unless said:
      input cat(embed, hidden) 2H, its fp32 copy for the norms 2H x 4 B, the normed cat 2H;
      q, k, v and their rotated copies 2(Q + 2K), attention output Q, its float32 row sums (neglected);
      residual and post-attention norm H + H x 4 B; gate, up, silu(gate), product 4I; output norm H x 4 B + H;
      logits D and their float32 log-softmax D x 4 B (its gradient D x 4 B flows one step at a time).
    Once per token: auxiliary states 3H and the final state H (bf16), targets D in bf16 and as float32
    probabilities D x 4 B. All TTT steps' activations live until the backward pass.
    """
    p = parameters(recipe, hidden, vocab)
    d, t = recipe.draft, profile.TRAIN_ROW_TOKENS
    trained = p["trained"] + (p["head"] if d.train_head else 0)
    frozen_head = p["head"] * (1 if d.train_head else 2)
    q, k = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
    step = 2 * (2 * hidden) + 4 * (2 * hidden) + 2 * (2 * hidden)
    step += 2 * 2 * (q + 2 * k) + 2 * q
    step += 2 * hidden + 4 * hidden + 2 * 4 * d.intermediate_size + 4 * hidden + 2 * hidden
    step += (2 + 4) * p["draft_vocab"]
    once = 2 * 4 * hidden + (2 + 4) * p["draft_vocab"] + 4 * p["draft_vocab"]
    return {
        "weights_gradients_optimizer": 18 * trained,
        "frozen_embedding_and_heads": 4 * p["embedding"] + 6 * frozen_head,
        "activations": t * (recipe.train.ttt_steps * step + once),
        "cuda_context_and_buffers": 1.5 * GB,
    }


def verifier_memory(recipe, profile, verifier, weight_bytes: float) -> dict[str, float]:
    """Bytes on one verifier GPU while extracting: weights, state buffer, and what is left for KV.

    State buffer: (batched tokens + sequences) x state bytes. KV of MLA: (kv_lora_rank + rotary part) values a
    layer and token on every tensor-parallel rank; of other models 2 x KV heads x head size, split over ranks.
    While extracting, the states of a token lie in the KV cache too.
    """
    aux, final = state_bytes(verifier.hidden_size, len(verifier.layers), "bf16")
    budget = profile.GPU_MEMORY_GB * GB * profile.VERIFIER_MEMORY_FRACTION
    rank = verifier.value("kv_lora_rank") if "kv_lora_rank" in _raw(verifier) else 512
    rope = _raw(verifier).get("qk_rope_head_dim", 64)
    kv = 2 * verifier.num_layers * (rank + rope) + aux + final
    buffer = (profile.VERIFIER_BATCH_TOKENS + profile.VERIFIER_MAX_SEQS) * (aux + final)
    weights = weight_bytes / profile.VERIFIER_TP
    left = budget - weights - buffer
    return {"budget": budget, "weights": weights, "state_buffer": buffer, "kv": left, "kv_tokens": left / kv}


def _raw(verifier) -> dict:
    return verifier.config.get("text_config") or verifier.config


# --- what earlier runs measured --------------------------------------------------------------------------


@dataclass
class Seen:
    """Measured amounts of one run directory."""

    name: str
    rows: int = 0
    prompt_tokens: float = 0
    answer_tokens: float = 0
    stored_bytes: float = 0
    kept_share: float = 1.0
    seconds: dict[str, float] | None = None
    train_tokens: float = 0
    loads: list[float] | None = None
    heldout: int = 0


def look(run: RunDir) -> Seen:
    """Read a run directory's records; what is not finished stays 0."""
    seen = Seen(run.path.name, seconds={}, loads=[])
    for number in STAGE_DIRS:
        record = read_json(run.stage(number) / "stage.json")
        if not record or record.get("status") != "done":
            continue
        seen.seconds[number] = _total_seconds(run, number, record["seconds"])
        if number == "01":
            counts = record.get("counts", {})
            seen.rows = counts.get("train", 0) + counts.get("val", 0)
            seen.heldout = counts.get("heldout", 0)
        if number == "03":
            seen.prompt_tokens = record["tokens"] - record["answer_tokens"]
            seen.answer_tokens = record["answer_tokens"]
            seen.stored_bytes = record["bytes"]
            dropped = sum(record.get("dropped", {}).values())
            seen.kept_share = record["rows"] / max(1, record["rows"] + dropped)
        if number == "04":
            seen.train_tokens = record["rates"].get("tokens", 0)
    book = read_json(run.path / "run.json") or {}
    seen.loads = [s["ready_seconds"] for s in book.get("servers", []) if s.get("ready_seconds")]
    return seen


def _total_seconds(run: RunDir, number: str, last: float) -> float:
    """Seconds over all attempts that led to the result, interrupted ones included."""
    book = read_json(run.path / "run.json") or {}
    attempts = [a for a in book.get("attempts", []) if a["stage"] == number and a["status"] != "skipped"]
    return max(last, sum(a["seconds"] for a in attempts if a["status"] in ("done", "interrupted")))


def earlier_runs(stage, given: list[str]) -> list[tuple[RunDir, Seen]]:
    """Runs to learn from: those given, else finished ones of this recipe and profile beside this run."""
    if given:
        folders = [Path(g) for g in given]
        if missing := [str(f) for f in folders if not (f / "run.json").is_file()]:
            raise ConfigError(f"--from {missing[0]}: no run.json there, not a run directory")
    else:
        beside = stage.run.path.parent
        folders = [f.parent for f in sorted(beside.glob("*/run.json")) if f.parent != stage.run.path]
    found = []
    for folder in folders:
        run = RunDir(folder.resolve())
        book = read_json(run.path / "run.json") or {}
        profiles = {a.get("profile") for a in book.get("attempts", [])}
        first = (
            (run.path / "recipe.yaml").read_text().partition("\n")[0]
            if (run.path / "recipe.yaml").exists()
            else ""
        )
        same = stage.profile.name in profiles and first.endswith(stage.recipe.name)
        seen = look(run)
        if (given or same) and seen.answer_tokens:
            found.append((run, seen))
    return found


def line(points: list[tuple[float, float]], x: float) -> Figure:
    """Seconds for x units from measured (units, seconds).

    One point: proportional, but at least what the fixed part may hide: the interval reaches from half to 1.3
    times. Several: least squares with a fixed cost of at least 0; the interval is 15 % or twice the largest
    relative residual.
    """
    if len(points) == 1:
        units, seconds = points[0]
        value = seconds * max(1.0, x / max(units, 1e-9))
        return Figure(value, 0.5 * value, 1.3 * value, "run: one measured run, scaled in proportion")
    mean_x, mean_y = statistics.fmean(p[0] for p in points), statistics.fmean(p[1] for p in points)
    var = sum((p[0] - mean_x) ** 2 for p in points)
    slope = sum((p[0] - mean_x) * (p[1] - mean_y) for p in points) / var if var else 0.0
    slope = max(slope, 0.0)
    fixed = mean_y - slope * mean_x
    if fixed < 0:
        fixed, slope = 0.0, mean_y / mean_x
    value = fixed + slope * x
    residual = max(abs(p[1] - fixed - slope * p[0]) / max(p[1], 1e-9) for p in points)
    spread = max(SPREAD["runs"], 2 * residual)
    # The further beyond the measured range, the less a line is to be trusted: +5 % per factor of ten.
    reach = max(0.0, len(str(int(x / max(p[0] for p in points) + 1))) - 1) * 0.05
    spread = min(0.9, spread + reach)
    return Figure(
        value, value * (1 - spread), value * (1 + spread), f"runs: line through {len(points)} measured runs"
    )


# --- the plan --------------------------------------------------------------------------------------------


def rates(profile: str) -> dict[str, Figure]:
    """configs/rates.yaml for a profile."""
    table = yaml.safe_load((ROOT / "configs" / "rates.yaml").read_text(encoding="utf-8"))
    return {k: figure(v["value"], v["origin"]) for k, v in table.get(profile, {}).items()}


def count_samples(stage) -> tuple[int, int, str]:
    """(training rows, held-out rows, origin)."""
    record = read_json(stage.run.prepare / "stage.json")
    counts = (record or {}).get("counts", {})
    wanted = stage.recipe.data.samples
    heldout = counts.get("heldout") or _lines(stage.recipe.data.heldout)
    if counts.get("train"):
        return counts["train"], heldout, "this run: 01"
    if wanted != "all":
        return int(wanted), heldout, "recipe or SAMPLES"
    total = _lines(stage.recipe.data.sources)
    if not total:
        raise StageError("the number of samples is unknown before 01 has run: set SAMPLES")
    return round(total * (1 - stage.recipe.data.val_share)), heldout, "lines of the data files"


def _lines(sources) -> int:
    total = 0
    for source in sources:
        path = (
            ROOT / source.path if source.path and not Path(source.path).exists() else Path(source.path or "")
        )
        if source.path and path.is_file() and path.suffix == ".jsonl":
            with open(path, "rb") as f:
                total += min(source.limit or sys.maxsize, sum(1 for _ in f))
    return total


def tokens_per_row(stage, runs) -> tuple[Figure, Figure]:
    """(prompt tokens, answer tokens) of a row."""
    own = look(stage.run)
    for seen in [own, *[s for _, s in runs]]:
        if seen.answer_tokens and seen.rows:
            rows = max(1, round((seen.rows + seen.heldout) * seen.kept_share))
            origin = f"{'this run' if seen is own else 'run: ' + seen.name}"
            return figure(seen.prompt_tokens / rows, origin), figure(seen.answer_tokens / rows, origin)
    recipe = stage.recipe
    prompt = recipe.data.expected_prompt_tokens
    answer = recipe.answers.expected_tokens
    expected, quarter = "published: recipe", recipe.data.max_prompt_tokens / 4
    return (
        figure(prompt, expected) if prompt else figure(quarter, "assumed: a quarter of the limit"),
        figure(answer, expected)
        if answer
        else figure(recipe.answers.max_tokens * 0.6, "assumed: 60 % of the limit"),
    )


def make_plan(stage, given: list[str] | None = None) -> dict:
    """The plan as data; see the module for what stands in it.

    Raises:
        StageError: the number of samples can't be known yet.
        ConfigError: a recipe without what a plan needs.
    """
    from eagle3.verifier import open_verifier, unseen_verifier

    recipe, profile = stage.recipe, stage.profile
    try:
        verifier = open_verifier(recipe, fetch=False)
        weight_bytes = sum(f.stat().st_size for f in verifier.path.glob("*.safetensors"))
    except StageError:
        verifier = unseen_verifier(recipe)
        weight_bytes = recipe.verifier.size_bytes or 0
    runs = earlier_runs(stage, given or [])
    table = rates(profile.name)
    train_rows, heldout_rows, rows_origin = count_samples(stage)
    val_rows = max(2, round(train_rows * recipe.data.val_share / (1 - recipe.data.val_share)))
    rows = train_rows + val_rows + heldout_rows
    kept = statistics.fmean(s.kept_share for _, s in runs) if runs else 1.0
    prompt, answer = tokens_per_row(stage, runs)
    per_row = prompt.value + answer.value
    tokens = {
        "prompt": rows * prompt.value,
        "answer": rows * answer.value,
        "all": rows * per_row,
        "train_all_epochs": train_rows * kept * per_row * recipe.train.epochs,
    }
    size = _bytes(stage, verifier, rows * kept, prompt.value, answer.value, weight_bytes, runs)
    stages = _stages(stage, runs, table, rows, tokens, heldout_rows, kept)
    loads = _loads(stage, runs, table)
    first, last = os.environ.get("FROM", "01"), os.environ.get("TO", "06")
    chosen = {k: v for k, v in stages.items() if first <= k <= last}
    waits = [x for x in loads if first <= x["stage"] <= last]
    total = [sum(getattr(f, k) for f in chosen.values()) for k in ("value", "low", "high")]
    total = [
        t + sum(w["seconds"][k] for w in waits) for t, k in zip(total, ("value", "low", "high"), strict=True)
    ]
    hours = [t / 3600 for t in total]
    names = ("value", "low", "high")
    return {
        "recipe": recipe.name,
        "profile": profile.name,
        "stages_planned": [first, last],
        "samples": {"train": train_rows, "val": val_rows, "heldout": heldout_rows, "origin": rows_origin},
        "tokens_per_row": {"prompt": prompt.json(), "answer": answer.json()},
        "tokens": {k: round(v) for k, v in tokens.items()},
        "bytes": size,
        "gpu_memory": _gpu_memory(recipe, profile, verifier, weight_bytes),
        "loads": loads,
        "seconds": {k: v.json() for k, v in stages.items()},
        "disk_read_needed_bytes_per_s": _read_rate(stage, table, size, tokens),
        "hours": dict(zip(names, hours, strict=True)),
        "price": {
            "currency": profile.PRICE_CURRENCY,
            "per_hour": profile.PRICE_PER_HOUR,
            **dict(zip(names, (h * profile.PRICE_PER_HOUR for h in hours), strict=True)),
        },
        "learned_from": [s.name for _, s in runs],
    }


def _bytes(stage, verifier, kept_rows, prompt, answer, weight_bytes, runs) -> dict:
    """Bytes on disk and in RAM."""
    recipe = stage.recipe
    aux, final = state_bytes(verifier.hidden_size, len(verifier.layers), recipe.states.dtype)
    states = kept_rows * ((prompt + answer - 1) * aux + answer * final + 4 * (prompt + answer))
    p = parameters(recipe, verifier.hidden_size, verifier.vocab_size)
    trained = p["trained"] + (p["head"] if recipe.draft.train_head else 0)
    # Newest two and the best: fp32 weights and two Adam moments each.
    checkpoints = 3 * 12 * trained
    export = 2 * 2 * (p["trained"] + p["head"])
    rounds = int(os.environ.get("ROUNDS", "1"))
    shard = recipe.states.shard_bytes
    longest = recipe.verifier.max_model_len * (aux + final)
    return {
        "per_token": aux + final,
        "states": round(states),
        "checkpoints": round(checkpoints),
        "export": round(export),
        "peak_disk": round(states / rounds + shard + checkpoints + export),
        "verifier": round(weight_bytes),
        # 03 holds one open shard, the longest sample and 1.5 GB; 04 on CPU the model and its optimizer.
        "ram": round(
            max(shard + longest + 1.5 * GB, (16 * trained + 4 * p["embedding"]) if stage.profile.cpu else 0)
        ),
    }


def _stages(stage, runs, table, rows, tokens, heldout, kept) -> dict[str, Figure]:
    """Seconds of each stage's own work, verifier loads of 03 not included."""
    seen = [s for _, s in runs]
    found = {}

    def fit(number: str, units, x: float) -> Figure | None:
        points = [(units(s), s.seconds[number]) for s in seen if number in s.seconds and units(s)]
        distinct = sorted({p[0]: p for p in points}.values())
        return line(distinct, x) if distinct else None

    found["01"] = fit("01", lambda s: s.rows + s.heldout, rows) or figure(
        10 + rows / 300, "assumed: 300 rows/s"
    )
    rate = table.get("extract_tokens_per_s") or figure(1000, "assumed")
    found["03"] = fit("03", lambda s: s.prompt_tokens + s.answer_tokens, tokens["all"]) or _over(
        tokens["all"], rate
    )
    found["04"] = fit("04", lambda s: s.train_tokens, tokens["train_all_epochs"]) or _over(
        tokens["train_all_epochs"], train_rate(stage, table)
    )
    found["05"] = fit("05", lambda s: 1, 1) or figure(60, "assumed")
    decode = table.get("decode_tokens_per_s") or figure(50, "assumed")
    found["06"] = fit("06", lambda s: s.heldout, heldout) or _over(_evaluate_tokens(stage, heldout), decode)
    return found


def _over(units: float, rate: Figure) -> Figure:
    """Seconds for units at a rate; a low rate makes the high end."""
    return Figure(units / rate.value, units / rate.high, units / max(rate.low, 1e-9), rate.origin)


def train_rate(stage, table) -> Figure:
    """Training tokens a second over all GPUs."""
    recipe, profile = stage.recipe, stage.profile
    small = table.get("train_tokens_per_s_one_sample_a_step")
    if small and recipe.train.tokens_per_step <= 1024:
        return small  # one short sample a step: more GPUs have nothing to share
    if per_gpu := table.get("train_tokens_per_s_per_gpu"):
        n = max(1, profile.TRAIN_GPUS)
        return Figure(per_gpu.value * n, per_gpu.low * n, per_gpu.high * n, f"{per_gpu.origin} x {n} GPUs")
    return table.get("train_tokens_per_s") or figure(1000, "assumed")


def _evaluate_tokens(stage, heldout: int) -> float:
    """Tokens that 06 decodes at one request in flight, plain and with the draft."""
    e = stage.recipe.evaluate
    timed = (e.timed_prompts or heldout) * (e.timed_tokens or e.max_tokens) * e.repeats * 2
    return timed + heldout * e.max_tokens / max(e.concurrency)


def _loads(stage, runs, table) -> list[dict]:
    """Every verifier load, named. 03: one (two in two-pass mode) per round; 06: with the draft, and plain."""
    measured = [x for _, s in runs for x in s.loads]
    if measured:
        value = statistics.median(measured)
        each = Figure(value, min(measured), max(measured), f"runs: {len(measured)} measured loads")
    else:
        each = table.get("load_seconds") or figure(120, "assumed")
    rounds = int(os.environ.get("ROUNDS", "1"))
    two = stage.recipe.states.mode == "two-pass"
    names = [
        ("03", f"extraction, round {k + 1}/{rounds}" if rounds > 1 else "extraction") for k in range(rounds)
    ]
    names += [("03", "answers (two-pass)")] * (rounds if two else 0)
    # 06's servers load inside the stage: a measured 06 holds their time already.
    inside = any("06" in s.seconds for _, s in runs)
    names += [] if inside else [("06", "with the draft"), ("06", "plain")]
    if stage.profile.cpu and not inside:
        names = names[:-1]  # side by side on the CPU: one wait
    return [{"stage": n, "what": what, "seconds": each.json()} for n, what in names]


def _gpu_memory(recipe, profile, verifier, weight_bytes) -> dict | None:
    if profile.cpu:
        return None
    train = training_memory(recipe, profile, verifier.hidden_size, verifier.vocab_size)
    return {
        "verifier_per_gpu": {
            k: round(v) for k, v in verifier_memory(recipe, profile, verifier, weight_bytes).items()
        },
        "training_per_gpu": {**{k: round(v) for k, v in train.items()}, "total": round(sum(train.values()))},
    }


def _read_rate(stage, table, size, tokens) -> float:
    """Bytes a second that the disk must deliver so that training is not held up."""
    per_token = size["states"] / max(1, tokens["all"])
    return round(train_rate(stage, table).value * per_token)


# --- output ----------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """90 -> 1.5 min, 5400 -> 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError


def table(plan: dict) -> str:
    """The plan for people."""
    s, t, b = plan["samples"], plan["tokens"], plan["bytes"]
    out = [
        f"recipe {plan['recipe']}, profile {plan['profile']}, stages {' to '.join(plan['stages_planned'])}",
        f"rows      {s['train']:,} training, {s['val']:,} validation, {s['heldout']:,} held out "
        f"({s['origin']})",
    ]
    p, a = plan["tokens_per_row"]["prompt"], plan["tokens_per_row"]["answer"]
    out += [
        f"tokens    {t['all']:,}: a row has {p['value']:.0f} prompt ({p['origin']}) "
        f"and {a['value']:.0f} answer tokens ({a['origin']})",
        f"disk      {size(b['peak_disk'])}: states {size(b['states'])} ({size(b['per_token'])} a token), "
        f"checkpoints {size(b['checkpoints'])}, export {size(b['export'])}; verifier {size(b['verifier'])}",
        f"memory    {size(b['ram'])} of RAM",
        f"reading   {size(plan['disk_read_needed_bytes_per_s'])}/s from disk, or training waits",
    ]  # fmt: skip
    if m := plan["gpu_memory"]:
        v, r = m["verifier_per_gpu"], m["training_per_gpu"]
        out += [
            f"GPU       verifier: weights {size(v['weights'])}, state buffer {size(v['state_buffer'])}, "
            f"KV {size(v['kv'])} = {v['kv_tokens']:,} tokens, of {size(v['budget'])}",
            f"          training: weights, gradients, optimizer {size(r['weights_gradients_optimizer'])}, "
            f"frozen {size(r['frozen_embedding_and_heads'])}, activations {size(r['activations'])}, "
            f"total {size(r['total'])}",
        ]
    out += ["", f"{'stage':<34}{'time':>10}{'interval':>22}  origin"]
    first, last = plan["stages_planned"]
    for number, f in plan["seconds"].items():
        if not first <= number <= last:
            continue
        out.append(_row(f"{number} {STAGE_DIRS[number][3:]}", f))
        out += [
            _row(f"   + load verifier: {x['what']}", x["seconds"])
            for x in plan["loads"]
            if x["stage"] == number
        ]
    h = plan["hours"]
    out.append(_row("total", {k: h[k] * 3600 for k in ("value", "low", "high")} | {"origin": ""}))
    price = plan["price"]
    if price["per_hour"]:
        out.append(
            f"price     {price['value']:.0f} {price['currency']} ({price['low']:.0f} to {price['high']:.0f}) "
            f"at {price['per_hour']:g} an hour (PRICE_PER_HOUR)"
        )
    out.append(
        f"learned from: {', '.join(plan['learned_from']) or 'no run of this recipe on this profile yet'}"
    )
    return "\n".join(out)


def _row(name: str, f: dict) -> str:
    interval = f"{duration(f['low'])} to {duration(f['high'])}"
    return f"{name:<34}{duration(f['value']):>10}{interval:>22}  {f['origin']}".rstrip()


def main(argv=None) -> int:
    from eagle3.cli import load_stage

    parser = argparse.ArgumentParser(
        prog="run_pipeline.sh plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument(
        "--from", dest="given", action="append", default=[], metavar="RUN_DIR", help="learn from it"
    )
    args = parser.parse_args(argv)
    args.run_dir = args.recipe = None
    args.set = []
    began = time.time()
    try:
        plan = make_plan(load_stage("01", args), args.given)
    except StageError as err:
        print(f"plan: {err}", file=sys.stderr)
        return err.exit_code
    plan["planned_in_seconds"] = round(time.time() - began, 2)
    print(json.dumps(plan, indent=2) if args.json else table(plan))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
