"""What run directories measured, and lines through it: how a small run tells what a large one will take."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from eagle3.contract import SPLITS, STAGE_DIRS, ConfigError, RunDir, StageError, read_json

# Relative half-width of a figure's interval by the first word of its origin.
SPREAD = {"this": 0.1, "runs": 0.15, "run": 0.3, "earlier": 0.1, "measured": 0.3, "computed": 0.4}
SPREAD |= {"published": 0.5, "recipe": 0.25, "assumed": 0.6}
# Two sizes tell fixed and growing cost apart only if they differ by this factor; else noise decides.
APART = 3


@dataclass
class Figure:
    """A number with its interval and its origin."""

    value: float
    low: float
    high: float
    origin: str

    def json(self) -> dict:
        return {"value": self.value, "low": self.low, "high": self.high, "origin": self.origin}

    def times(self, factor: float, why: str = "") -> Figure:
        return Figure(self.value * factor, self.low * factor, self.high * factor, f"{self.origin}{why}")


def figure(value: float, origin: str) -> Figure:
    """A figure whose interval follows from the first word of its origin."""
    spread = SPREAD.get(origin.split(":")[0].split()[0], 0.5)
    return Figure(value, value * (1 - spread), value * (1 + spread), origin)


def quietly(read, default):
    """A file that is missing, cut or being replaced is no reason to fail."""
    try:
        found = read()
    except (OSError, StageError, ValueError, yaml.YAMLError):
        return default
    return default if found is None else found


def read_dict(path: Path) -> dict:
    """A JSON object from a file; {} if the file is missing, broken, or holds something else."""
    found = quietly(lambda: read_json(path), {})
    return found if isinstance(found, dict) else {}


def read_book(run: RunDir) -> dict[str, list[dict]]:
    """run.json: {"attempts": [...], "servers": [...]}, of which only whole entries."""
    book = read_dict(run.path / "run.json")
    lists = {k: book.get(k) if isinstance(book.get(k), list) else [] for k in ("attempts", "servers")}
    return {k: [x for x in v if isinstance(x, dict)] for k, v in lists.items()}


def extracting(book: dict[str, list[dict]]) -> list[dict]:
    """The servers of 03; those of 06 run inside its own time."""
    return [s for s in book["servers"] if s.get("mode") == "extract"]


def count(value) -> float:
    """Sum of a number, or of the numbers in nested mappings (rows by split and domain)."""
    if isinstance(value, dict):
        return sum(count(v) for v in value.values())
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0


@dataclass
class Seen:
    """Measured amounts of one run directory; what was not measured is empty or 0."""

    name: str
    profiles: set[str] = field(default_factory=set)
    recipe: dict = field(default_factory=dict)
    asked: int | str | None = None
    exhausted: bool = False
    rows: dict[str, float] = field(default_factory=dict)
    prompt_tokens: dict[str, float] = field(default_factory=dict)
    kept: Counter = field(default_factory=Counter)
    kept_tokens: Counter = field(default_factory=Counter)
    kept_prompt: Counter = field(default_factory=Counter)
    dropped: int = 0
    extracted: float = 0
    stored_bytes: float = 0
    seconds: dict[str, float] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    rates: dict[str, dict] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)

    @property
    def stored_tokens(self) -> float:
        return self.kept_tokens.total()

    def answer(self, split: str) -> float | None:
        """Mean answer tokens of a stored row of that split, else of all."""
        rows, tokens, prompt = self.kept[split], self.kept_tokens[split], self.kept_prompt[split]
        if not rows:
            rows, tokens, prompt = self.kept.total(), self.kept_tokens.total(), self.kept_prompt.total()
        return (tokens - prompt) / rows if rows else None

    def prompt(self, split: str) -> float | None:
        """Mean prompt tokens of a row of that split; exact where 01 has run."""
        if self.rows.get(split) and self.prompt_tokens.get(split):
            return self.prompt_tokens[split] / self.rows[split]
        rows = self.kept.total()
        return self.kept_prompt.total() / rows if rows else None

    @property
    def kept_share(self) -> float:
        rows = self.kept.total() + self.dropped
        return self.kept.total() / rows if rows else 1.0


def look(run: RunDir, name: str | None = None) -> Seen:
    """Read a run directory's records; a stage that is not finished leaves its part empty."""
    seen = Seen(name or run.path.name)
    book = read_book(run)
    attempts = book["attempts"]
    seen.profiles = {a.get("profile") for a in attempts}
    _, seen.recipe = saved_recipe(run)
    for number in STAGE_DIRS:
        record = read_dict(run.stage(number) / "stage.json")
        if record.get("status") != "done":
            continue
        seen.seconds[number] = total_seconds(attempts, number, record.get("seconds") or 0.0)
        seen.finished[number] = record.get("finished") or ""
        seen.rates[number] = record.get("rates") or {}
        if number == "01":
            seen.rows = {s: count(record.get("counts", {}).get(s)) for s in SPLITS}
            seen.prompt_tokens = {s: (record.get("tokens", {}).get(s) or {}).get("prompt", 0) for s in SPLITS}
            samples = record.get("samples") or {}
            seen.asked, seen.exhausted = samples.get("asked"), bool(samples.get("exhausted"))
        if number == "03":
            in_all = count(record.get("counts")) + count(record.get("dropped"))
            seen.extracted = 0 if record.get("round") else in_all  # a round holds its own window only
    read_manifests(run, seen)
    seen.loads = [s["ready_seconds"] for s in extracting(book) if s.get("ready_seconds")]
    return seen


def current_stages(seen: Seen) -> list[str]:
    """Stages that are done, and not for the inputs of yesterday.

    03 is not current when 01 has grown since: it will take the new rows. 04 to 06 are not current when the
    stage before them finished later: they made their result from something else, and refuse until they are
    forced.
    """
    found, newest, behind = [], "", False
    for number in STAGE_DIRS:
        if number not in seen.finished:
            continue
        grows = number == "03" and 0 < seen.extracted < count(seen.rows)
        behind = behind or grows or (number > "03" and seen.finished[number] < newest)
        newest = max(newest, seen.finished[number]) if number != "01" else ""
        if not behind:
            found.append(number)
    return found


def read_manifests(run: RunDir, seen: Seen) -> None:
    """Rows, tokens and bytes of the sealed shards, by split; also of a 03 that is not finished."""
    for manifest in sorted(run.hidden.glob("manifest-*.jsonl")):
        for text in quietly(lambda m=manifest: m.read_text(encoding="utf-8"), "").splitlines():
            line = quietly(lambda t=text: json.loads(t), {})
            seen.dropped += len(line.get("dropped", []))
            seen.stored_bytes += line.get("bytes", 0)
            for sample in line.get("samples", []):
                split = sample.get("split", "train")
                seen.kept[split] += 1
                seen.kept_tokens[split] += sample.get("tokens", 0)
                seen.kept_prompt[split] += sample.get("prompt", 0)


def saved_recipe(run: RunDir) -> tuple[str, dict]:
    """(name, values) of the recipe.yaml that a run directory carries; ("", {}) without one."""
    text = quietly(lambda: (run.path / "recipe.yaml").read_text(encoding="utf-8"), "")
    name = text.partition("\n")[0].removeprefix("# recipe: ").strip() if text.startswith("# recipe: ") else ""
    found = quietly(lambda: yaml.safe_load(text), {})
    return name, found if isinstance(found, dict) else {}


def total_seconds(attempts: list[dict], number: str, last: float) -> float:
    """Seconds that led to a stage's result: its last attempt and the interrupted or failed ones it continued.

    03 grows its result over several finished attempts, the others make a new one; --force starts over.
    """
    total = 0.0
    for attempt in attempts:
        if attempt.get("stage") != number or attempt.get("status") == "skipped":
            continue
        if "--force" in attempt.get("command", ""):
            total = 0.0
        total += attempt.get("seconds", 0.0)
        if attempt.get("status") == "done":
            last, total = max(last, total), total if number == "03" else 0.0
    return last


def same_work(stage, seen: Seen) -> bool:
    """Whether a run's amounts of text carry over: same verifier, same way of answering."""
    old, now = seen.recipe, stage.recipe.model_dump(mode="json")
    if old.get("verifier", {}).get("model") != now["verifier"]["model"]:
        return False
    keys = ("max_tokens", "temperature", "at_limit", "looping")
    return all(old.get("answers", {}).get(k) == now["answers"][k] for k in keys)


def same_speed(stage, seen: Seen) -> bool:
    """Whether a run's times carry over: besides, the same machine profile, draft and training step."""
    old, now = seen.recipe, stage.recipe.model_dump(mode="json")
    if stage.profile.name not in seen.profiles or old.get("draft") != now["draft"]:
        return False
    keys = ("ttt_steps", "tokens_per_step", "loss")
    return same_work(stage, seen) and all(old.get("train", {}).get(k) == now["train"][k] for k in keys)


def earlier_runs(stage, given: list[str]) -> list[Seen]:
    """Runs to learn from: those given, else those beside this run; amounts must carry over.

    Raises:
        ConfigError: a given folder is no run directory, or is about another verifier.
    """
    if given:
        folders = [Path(g).resolve() for g in given]
        for folder in folders:
            if not (folder / "run.json").is_file():
                raise ConfigError(f"--from {folder}: no run.json there, not a run directory")
    else:
        folders = sorted(p.parent for p in stage.run.path.parent.glob("*/run.json"))
    found = []
    for folder in folders:
        if folder == stage.run.path:
            continue
        seen = look(RunDir(folder))
        if seen.stored_tokens and same_work(stage, seen):
            found.append(seen)
        elif given:
            why = (
                "has no stored answers yet"
                if not seen.stored_tokens
                else "is about another verifier or answers"
            )
            raise ConfigError(
                f"--from {folder}: this run {why}; nothing can be learned from it for this recipe"
            )
    return found


@dataclass(frozen=True)
class Point:
    """One measured stage: units of work, seconds, and the stage's own seconds per unit if it noted a rate."""

    units: float
    seconds: float
    slope: float | None = None


def line(points: list[Point], units: float) -> Figure:
    """Seconds for `units` from measured stages: a fixed part (start-up, imports) and a part that grows.

    Sizes that differ by APART or more: least squares. Else the stage's own rate gives the slope, and without
    one the time is taken as proportional. The fixed part is never negative. The interval is 15 % (one run: 30
    %), plus twice the largest residual, plus 5 % per factor of ten beyond the largest measured size.
    """
    largest = max(points, key=lambda p: p.units)
    smallest = min(p.units for p in points)
    slope = None
    if largest.units >= APART * smallest:
        mean_x = statistics.fmean(p.units for p in points)
        mean_y = statistics.fmean(p.seconds for p in points)
        spread_x = sum((p.units - mean_x) ** 2 for p in points)
        slope = sum((p.units - mean_x) * (p.seconds - mean_y) for p in points) / spread_x
    if slope is None or slope <= 0:
        slope = largest.slope or largest.seconds / largest.units
    slope = min(slope, largest.seconds / largest.units)
    fixed = max(0.0, statistics.fmean(p.seconds - slope * p.units for p in points))
    value = fixed + slope * units
    spread = SPREAD["runs" if len(points) > 1 else "run"]
    spread += 0.05 * max(0.0, math.log10(units / largest.units)) if units else 0.0
    spread += 2 * max(abs(p.seconds - fixed - slope * p.units) / max(p.seconds, 1e-9) for p in points)
    spread = min(spread, 0.9)
    many = f"runs: line through {len(points)} measured runs" if len(points) > 1 else "run: one measured run"
    return Figure(value, value * (1 - spread), value * (1 + spread), many)
