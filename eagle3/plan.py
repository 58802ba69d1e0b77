"""What a run will cost before anything is spent: tokens, bytes, memory, verifier loads, hours, price.

    ./run_pipeline.sh plan                    for RECIPE, PROFILE and SAMPLES
    ./run_pipeline.sh plan --json             the same as JSON
    ./run_pipeline.sh plan --from RUN_DIR     scale a smaller run up (two runs tell fixed costs apart)

Every rate says where it comes from, in this order: earlier run directories on this profile (those given with
--from, else those beside this run), this run so far, configs/rates.yaml (measured elsewhere, published,
computed, assumed). From a run on another profile only amounts of text are taken. The interval of a figure is
as wide as its origin is weak.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

from eagle3.contract import ROOT, SPLITS, STAGE_DIRS, StageError
from eagle3.learned import (
    Figure,
    Point,
    Seen,
    count,
    current_stages,
    earlier_runs,
    figure,
    line,
    look,
    quietly,
    same_speed,
)
from eagle3.rates import over, published_rates, train_rate
from eagle3.record import has_rows
from eagle3.sizes import disk_bytes, duration, ram_bytes, size, training_memory, verifier_memory

VALUES = ("value", "low", "high")


# --- rows and tokens ----------------------------------------------------------------------------------------


def count_rows(stage, own: Seen) -> tuple[dict[str, float], str]:
    """Rows by split, and where the figure comes from.

    Raises:
        StageError: the number of samples can't be known before 01 has run.
    """
    data = stage.recipe.data
    if own.rows.get("train") and is_current(stage, own):
        return own.rows, "this run: 01"
    heldout = own.rows.get("heldout") or lines_of(data.heldout)
    if data.samples != "all":
        train, origin = int(data.samples), "recipe or SAMPLES"
    elif total := lines_of(data.sources):
        train, origin = round(total * (1 - data.val_share)), "lines of the data files"
    else:
        raise StageError("the number of samples is unknown before 01 has run: set SAMPLES")
    val = max(1, round(train * data.val_share / (1 - data.val_share)))
    return {"train": train, "val": val, "heldout": heldout}, origin


def is_current(stage, own: Seen) -> bool:
    """Whether 01 of this run has the rows that are asked for now (SAMPLES may have grown since)."""
    made = {"asked": own.asked, "exhausted": own.exhausted, "train": own.rows["train"]}
    return has_rows(made, stage.recipe.data.samples)


def lines_of(sources) -> int:
    """Lines of the JSONL files among data sources."""
    total = 0
    for source in sources:
        path = Path(source.path or "")
        path = path if path.is_file() else ROOT / path
        if path.is_file() and path.suffix == ".jsonl":
            with open(path, "rb") as f:
                total += min(source.limit or sys.maxsize, sum(1 for _ in f))
    return total


def tokens_per_row(stage, own: Seen, runs: list[Seen]) -> dict[str, dict[str, Figure]]:
    """{"prompt" | "answer": {split: tokens of a row}}; best known first.

    Prompts: this run's 01 is exact. Else, and for answers: the largest run that has any, then the recipe's
    expectation, then a share of its limit.
    """
    recipe, known = stage.recipe, sorted(runs, key=lambda s: -s.kept.total())
    if own.kept and (not known or own.kept.total() >= known[0].kept.total()):
        known.insert(0, own)
    found = {"prompt": {}, "answer": {}}
    for split in SPLITS:
        exact = own.prompt(split) if own.prompt_tokens.get(split) else None
        given = recipe.data.expected_prompt_tokens
        if exact:
            found["prompt"][split] = Figure(exact, exact, exact, "this run: 01")
        elif value := next((v for s in known if (v := s.prompt(split))), None):
            found["prompt"][split] = figure(value, f"run: {known[0].name}")
        else:
            quarter = figure(recipe.data.max_prompt_tokens / 4, "assumed: a quarter of the limit")
            found["prompt"][split] = figure(given, "recipe: expected_prompt_tokens") if given else quarter
        if value := next((v for s in known if (v := s.answer(split))), None):
            found["answer"][split] = figure(value, f"run: {known[0].name}")
        elif recipe.answers.expected_tokens:
            found["answer"][split] = figure(recipe.answers.expected_tokens, "recipe: expected_tokens")
        else:
            found["answer"][split] = figure(recipe.answers.max_tokens * 0.6, "assumed: 60 % of the limit")
    return found


def count_tokens(stage, rows: dict, each: dict, kept_share: float) -> dict[str, float]:
    """Tokens in all: prompts, answers, what is stored, what all training epochs read."""
    prompt = {s: each["prompt"][s].value for s in SPLITS}
    answer = {s: each["answer"][s].value for s in SPLITS}
    train = rows["train"] * kept_share * (prompt["train"] + answer["train"])
    t = stage.recipe.train
    read = train * t.epochs
    return {
        "prompt": sum(rows[s] * prompt[s] for s in SPLITS),
        "answer": sum(rows[s] * answer[s] for s in SPLITS),
        "all": sum(rows[s] * (prompt[s] + answer[s]) for s in SPLITS),
        "stored": sum(rows[s] * kept_share * (prompt[s] + answer[s]) for s in SPLITS),
        "train_all_epochs": min(read, t.max_steps * t.tokens_per_step) if t.max_steps else read,
    }


# --- seconds ------------------------------------------------------------------------------------------------


def units_of(stage, seen: Seen, number: str) -> float:
    """Work of a stage in a measured run: rows, stored tokens, tokens x epochs, one (05), prompts (06)."""
    if number == "01":
        return count(seen.rows)
    if number == "03":
        return seen.stored_tokens
    if number == "04":
        train = seen.recipe.get("train", {})
        tokens = seen.kept_tokens["train"] * train.get("epochs", 1)
        steps = train.get("max_steps")
        return min(tokens, steps * train.get("tokens_per_step", tokens)) if steps else tokens
    return 1 if number == "05" else max(1, seen.rows.get("heldout", 0))


def own_slope(seen: Seen, number: str) -> float | None:
    """Seconds per unit from the rate that the stage itself noted (without its start-up)."""
    key = {"01": "rows_per_s", "03": "tokens_per_s", "04": "tokens_per_s"}.get(number)
    rate = (seen.rates.get(number) or {}).get(key)
    return 1 / rate if isinstance(rate, (int, float)) and rate > 0 else None


def measured(stage, runs: list[Seen], number: str, units: float) -> Figure | None:
    """Seconds of a stage from the runs whose times carry over; runs of one size count as one."""
    points = {}
    for seen in runs:
        if number in seen.seconds and (n := units_of(stage, seen, number)) and same_speed(stage, seen):
            points[n] = Point(n, seen.seconds[number], own_slope(seen, number))
    if number in ("05", "06") and points:  # constant work: the mean
        mean = statistics.fmean(p.seconds for p in points.values())
        return figure(
            mean * (units / statistics.fmean(points) if number == "06" else 1),
            f"runs: {len(points)} measured",
        )
    return line(list(points.values()), units) if points else None


def extract_seconds(stage, tokens: dict, table: dict) -> Figure:
    """03 without a run to learn from: prompts are read at the prefill rate, answers too or generated."""
    prefill = table.get("prefill_tokens_per_s") or figure(1000, "assumed")
    generate = table.get("generate_tokens_per_s") or figure(300, "assumed")
    sources = stage.recipe.data.sources
    weights = sum(s.weight for s in sources)
    given = sum(s.weight for s in sources if s.answers == "dataset") / weights
    read = over(tokens["prompt"] + given * tokens["answer"], prefill)
    made = over((1 - given) * tokens["answer"], generate)
    origin = f"{prefill.origin} (prefill)" if given == 1 else f"{generate.origin} (generation)"
    return Figure(read.value + made.value, read.low + made.low, read.high + made.high, origin)


def evaluate_seconds(stage, heldout: float, table: dict) -> Figure:
    """06 without its loads: timed repeats plain and drafted at every concurrency, and all prompts once each.

    The rate is that of one request in flight; c in flight are taken to yield c^0.8 times as much.
    """
    e = stage.recipe.evaluate
    prompts = min(heldout, e.prompts_per_set or heldout) if e.sets == ["heldout"] else heldout
    timed = min(e.timed_prompts or prompts, prompts) * (e.timed_tokens or e.max_tokens) * e.repeats * 2
    tokens = sum(timed / c**0.8 for c in e.concurrency)
    tokens += prompts * e.max_tokens * (1 + len(e.temperatures)) / max(e.concurrency) ** 0.8
    return over(tokens, table.get("decode_tokens_per_s") or figure(50, "assumed"))


def stage_seconds(
    stage, own: Seen, runs: list[Seen], table: dict, rows: dict, tokens: dict, rate: dict
) -> dict[str, Figure]:
    """Seconds of each stage's own work; verifier loads of 03 come on top."""
    total = sum(rows.values())
    units = {
        "01": total,
        "03": tokens["stored"],
        "04": tokens["train_all_epochs"],
        "05": 1,
        "06": max(1, rows["heldout"]),
    }
    otherwise = {
        "01": lambda: Figure(
            10 + total / 300, 5 + total / 1000, 20 + total / 50, "assumed: 10 s and 300 rows/s"
        ),
        "03": lambda: extract_seconds(stage, tokens, table),
        "04": lambda: over(tokens["train_all_epochs"], rate["rate"]),
        "05": lambda: figure(60, "assumed"),
        "06": lambda: evaluate_seconds(stage, rows["heldout"], table),
    }
    found = {}
    for number, fallback in otherwise.items():
        if number in finished_stages(stage, own):
            seconds = own.seconds[number]
            found[number] = Figure(seconds, seconds, seconds, "this run: measured")
        else:
            found[number] = (
                measured(stage, runs, number, units[number])
                or so_far(stage, own, number, units[number])
                or fallback()
            )
    return found


def so_far(stage, own: Seen, number: str, units: float) -> Figure | None:
    """Training time from the rate of this run's own last logged steps."""
    if number != "04":
        return None
    rates = [r for m in metrics(stage.run) if m.get("split") != "val" and (r := m.get("tokens_per_s"))]
    return over(units, figure(statistics.median(rates[-20:]), "this run so far")) if rates else None


def metrics(run) -> list[dict]:
    """Lines of metrics.jsonl; a torn last line is left out."""
    text = quietly(lambda: (run.train / "metrics.jsonl").read_text(encoding="utf-8"), "")
    found = [quietly(lambda t=t: json.loads(t), {}) for t in text.splitlines()]
    return [m for m in found if isinstance(m, dict) and m]


# --- what is left -------------------------------------------------------------------------------------------


def finished_stages(stage, own: Seen) -> list[str]:
    """Stages of this run that are done for the rows asked for."""
    return current_stages(own) if own.rows and is_current(stage, own) else []


def shares_left(stage, own: Seen, rows: dict, tokens: dict) -> dict[str, float]:
    """Share of each stage's work that is still to be done, 0 to 1."""
    done = finished_stages(stage, own)
    left = {n: 0.0 if n in done else 1.0 for n in STAGE_DIRS}
    if left["03"]:
        left["03"] = max(0.0, 1 - (own.kept.total() + own.dropped) / max(1, sum(rows.values())))
    elif left["04"]:
        steps = max((m.get("step") or 0 for m in metrics(stage.run)), default=0)
        total = max(1.0, tokens["train_all_epochs"] / stage.recipe.train.tokens_per_step)
        left["04"] = max(0.0, 1 - steps / total)
    return left


def load_list(stage, runs: list[Seen], table: dict) -> list[dict]:
    """Every verifier load, named, with its seconds.

    03: one per round (two in two-pass mode). 06: one plain, one with the draft, and one more to time a
    shorter draft length if that promises to be faster (counted in the high end only). A measured 06 holds its
    loads already.
    """
    speeds = [s for s in runs if same_speed(stage, s)]
    noted = [x for s in speeds for x in s.loads]
    each = table.get("load_seconds") or figure(120, "assumed")
    if noted:
        each = Figure(
            statistics.median(noted), 0.8 * min(noted), 1.2 * max(noted), f"runs: {len(noted)} measured loads"
        )
    rounds = int(os.environ.get("ROUNDS") or 1)
    found = []
    for k in range(rounds):
        which = f", round {k + 1}/{rounds}" if rounds > 1 else ""
        if stage.recipe.states.mode == "two-pass":
            found.append({"stage": "03", "what": f"answers{which}", "seconds": each.json()})
        found.append({"stage": "03", "what": f"extraction{which}", "seconds": each.json()})
    if not any("06" in s.seconds for s in speeds):
        maybe = {**each.json(), "value": 0.0, "low": 0.0}
        if stage.profile.cpu:  # both servers load side by side: one wait
            found.append({"stage": "06", "what": "plain and with the draft", "seconds": each.json()})
        else:
            found.append({"stage": "06", "what": "plain", "seconds": each.json()})
            found.append({"stage": "06", "what": "with the draft", "seconds": each.json()})
        found.append({"stage": "06", "what": "shorter draft, if faster", "seconds": maybe})
    return found


def cost(stages: dict[str, Figure], loads: list[dict], chosen, share: dict[str, float], profile) -> dict:
    """Hours and price of the chosen stages and their loads."""
    seconds = dict.fromkeys(VALUES, 0.0)
    for k in VALUES:
        seconds[k] += sum(getattr(stages[n], k) * share[n] for n in chosen)
        seconds[k] += sum(x["seconds"][k] for x in loads if x["stage"] in chosen and share[x["stage"]])
    hours = {k: v / 3600 for k, v in seconds.items()}
    price = {k: v * profile.PRICE_PER_HOUR for k, v in hours.items()}
    return {
        "hours": hours,
        "price": {"currency": profile.PRICE_CURRENCY, "per_hour": profile.PRICE_PER_HOUR, **price},
    }


# --- the plan -----------------------------------------------------------------------------------------------


def open_or_guess(recipe) -> tuple:
    """(verifier, bytes of its weights), from its files or from what the recipe says of it."""
    from eagle3.verifier import open_verifier, unseen_verifier

    try:
        verifier = open_verifier(recipe, fetch=False)
    except StageError:
        return unseen_verifier(recipe), recipe.verifier.size_bytes or 0
    return verifier, sum(f.stat().st_size for f in verifier.path.glob("*.safetensors"))


def make_plan(stage, given: list[str] | None = None) -> dict:
    """The plan as data; `remaining` is what is left of it for this run directory.

    Raises:
        StageError: the number of samples can't be known yet.
        ConfigError: a recipe without what a plan needs, or a --from that does not help.
    """
    recipe, profile = stage.recipe, stage.profile
    verifier, weights = open_or_guess(recipe)
    own, runs = look(stage.run, "this run"), earlier_runs(stage, given or [])
    table = published_rates(profile.name)
    if own.seconds and not finished_stages(stage, own):
        runs = [*runs, own]  # it has grown: what it measured is an earlier, smaller run
    rows, rows_origin = count_rows(stage, own)
    each = tokens_per_row(stage, own, runs)
    kept = statistics.fmean(s.kept_share for s in runs) if runs else own.kept_share
    tokens = count_tokens(stage, rows, each, kept)
    amounts = {k: {s: f.value for s, f in v.items()} for k, v in each.items()}
    disk = disk_bytes(
        recipe, verifier, {s: n * kept for s, n in rows.items()}, amounts["prompt"], amounts["answer"]
    )
    rounds = int(os.environ.get("ROUNDS") or 1)
    disk["peak_disk"] = round(
        disk["states"] / rounds + recipe.states.shard_bytes + disk["checkpoints"] + disk["export"]
    )
    disk["verifier"] = round(weights)
    disk["ram"] = ram_bytes(recipe, profile, verifier.hidden_size, verifier.vocab_size, len(verifier.layers))
    rate = train_rate(stage, verifier, table, runs, disk["states"] / max(1.0, tokens["stored"]))
    stages = stage_seconds(stage, own, runs, table, rows, tokens, rate)
    loads = load_list(stage, runs, table)
    first, last = os.environ.get("FROM") or "01", os.environ.get("TO") or "06"
    chosen = [n for n in stages if first <= n <= last]
    left = shares_left(stage, own, rows, tokens)
    return {
        "recipe": recipe.name,
        "profile": profile.name,
        "stages_planned": [first, last],
        "rounds": rounds,
        "samples": {**{s: round(rows[s]) for s in SPLITS}, "origin": rows_origin},
        "tokens_per_row": {k: v["train"].json() for k, v in each.items()},
        "tokens": {k: round(v) for k, v in tokens.items()},
        "bytes": disk,
        "gpu_memory": None if profile.cpu else gpu_memory(recipe, profile, verifier, weights),
        "training_rate": {
            "bound": rate["bound"],
            "tokens_per_s": rate["rate"].json(),
            "compute_tokens_per_s": rate["compute"].json(),
            "disk_read_bytes_per_s": rate["disk"].json() if rate["disk"] else None,
            "disk_read_needed_bytes_per_s": round(rate["needs"]),
        },
        "seconds": {k: v.json() for k, v in stages.items()},
        "loads": loads,
        **cost(stages, loads, chosen, dict.fromkeys(stages, 1.0), profile),
        "remaining": {"share": left, **cost(stages, loads, chosen, left, profile)},
        "learned_from": [f"{s.name}{'' if same_speed(stage, s) else ' (tokens only)'}" for s in runs],
    }


def gpu_memory(recipe, profile, verifier, weights: float) -> dict:
    """Bytes per GPU of verifier and training."""
    train = training_memory(recipe, profile, verifier.hidden_size, verifier.vocab_size)
    served = verifier_memory(recipe, profile, verifier, weights)
    return {
        "verifier_per_gpu": {k: round(v) for k, v in served.items()},
        "training_per_gpu": {**{k: round(v) for k, v in train.items()}, "total": round(sum(train.values()))},
    }


# --- output -------------------------------------------------------------------------------------------------


def money(price: dict) -> str:
    """12 USD (8 to 17) at 3.5 an hour; empty where the machine costs nothing."""
    if not price["per_hour"]:
        return ""
    low, value, high = (
        f"{price[k]:.0f}" if price[k] >= 10 else f"{price[k]:.2f}" for k in ("low", "value", "high")
    )
    return f"{value} {price['currency']} ({low} to {high}) at {price['per_hour']:g} an hour (PRICE_PER_HOUR)"


def table(plan: dict) -> str:
    """The plan for people."""
    s, t, b, r = plan["samples"], plan["tokens"], plan["bytes"], plan["training_rate"]
    p, a = plan["tokens_per_row"]["prompt"], plan["tokens_per_row"]["answer"]
    first, last = plan["stages_planned"]
    rounds = f", {plan['rounds']} rounds" if plan["rounds"] > 1 else ""
    rate, compute = r["tokens_per_s"], r["compute_tokens_per_s"]
    held = f"{s['val']:,} validation, {s['heldout']:,} held out"
    parts = ", ".join(f"{k} {size(b[k])}" for k in ("states", "checkpoints", "export"))
    out = [
        f"recipe {plan['recipe']}, profile {plan['profile']}, stages {first} to {last}{rounds}",
        f"rows      {s['train']:,} training, {held} ({s['origin']})",
        f"tokens    {t['all']:,}: {p['value']:.0f} of prompt ({p['origin']}) and {a['value']:.0f} of answer "
        f"({a['origin']}) in a row",
        f"disk      {size(b['peak_disk'])}: {parts}; {size(b['per_token'])} of states a token; "
        f"verifier {size(b['verifier'])}",
        f"memory    {size(b['ram'])} of RAM",
        f"training  {rate['value']:,.0f} tokens/s, limited by {r['bound']} ({rate['origin']})",
        f"reading   {size(r['disk_read_needed_bytes_per_s'])}/s from disk are needed to keep up with "
        f"{compute['value']:,.0f} tokens/s",
    ]
    if d := r["disk_read_bytes_per_s"]:
        out[-1] += f"; the disk gives {size(d['value'])}/s ({d['origin']})"
    if m := plan["gpu_memory"]:
        out += gpu_lines(m)
    out += ["", f"{'stage':<38}{'time':>10}{'interval':>22}  origin"]
    for number, f in plan["seconds"].items():
        if first <= number <= last:
            out.append(row(f"{number} {STAGE_DIRS[number][3:]}", f))
            mine = [x for x in plan["loads"] if x["stage"] == number]
            out += [row(f"   + load: {x['what']}", x["seconds"]) for x in mine]
    total = {k: v * 3600 for k, v in plan["hours"].items()}
    out.append(row("total", {**total, "origin": ""}))
    remaining = {k: v * 3600 for k, v in plan["remaining"]["hours"].items()}
    if remaining["value"] < 0.999 * total["value"]:
        out.append(row("still to do in this run directory", {**remaining, "origin": ""}))
    if price := money(plan["price"]):
        out.append(f"price     {price}")
    learned = ", ".join(plan["learned_from"]) or "no run of this recipe on this profile yet"
    out.append(f"learned from: {learned}")
    return "\n".join(out)


def gpu_lines(memory: dict) -> list[str]:
    """Memory per GPU for people."""
    v, r = memory["verifier_per_gpu"], dict(memory["training_per_gpu"])
    total = r.pop("total")
    terms = ", ".join(f"{k.replace('_', ' ')} {size(n)}" for k, n in r.items() if n)
    return [
        f"GPU       verifier: weights {size(v['weights'])}, state buffer {size(v['state_buffer'])}, KV "
        f"{size(max(0, v['kv']))} = {max(0, v['kv_tokens']):,} tokens of {size(v['kv_bytes_per_token'])}, in "
        f"{size(v['budget'])}",
        f"          training {size(total)}: {terms}",
    ]


def row(name: str, f: dict) -> str:
    interval = f"{duration(f['low'])} to {duration(f['high'])}"
    return f"{name:<38}{duration(f['value']):>10}{interval:>22}  {f['origin']}".rstrip()


def main(argv=None) -> int:
    from eagle3.cli import load_stage, tool_parser

    parser = tool_parser("run_pipeline.sh plan", __doc__)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument(
        "--from",
        dest="given",
        action="append",
        default=[],
        metavar="RUN_DIR",
        help="learn from it (repeatable)",
    )
    args = parser.parse_args(argv)
    try:
        plan = make_plan(load_stage("01", args), args.given)
    except StageError as err:
        print(f"plan: {err}", file=sys.stderr)
        return err.exit_code
    print(json.dumps(plan, indent=2) if args.json else table(plan))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
