"""REPORT.md: what a run is, where it stands, how good its draft is, what it cost, and how to go on.

./run_pipeline.sh report                write it, say where
python -m eagle3.report --quiet         the same without a word (the end of every run, also of a failed one)
python -m eagle3.report --summary       the last lines of a finished run

Written for somebody who has never seen the project, from the run directory's files alone, in about a second.
A figure that was not measured is said to be so; a broken file costs its own lines and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections import Counter

from eagle3.contract import ROOT, SCRIPTS, STAGE_DIRS, RunDir, StageError, write_text
from eagle3.learned import count, extracting, quietly, read_book, read_dict, saved_recipe
from eagle3.report_text import FALLBACKS, KIMI_NOTE, KIMI_TABLE, STAGE_TEXTS, WHAT_IT_IS
from eagle3.sizes import duration, size
from eagle3.status import attempts_of, command, settings_of, short, status

NOT_YET = "not measured yet"
# Rows of a JSONL that are read at most for a count of reasons: the report has to be quick.
MOST_LINES = 200_000


class Run:
    """A run directory's records, read once; what is missing is empty.

    Args:
        run: the run directory.
        stage: recipe and profile, for the plan of what remains; None if they can't be read.
    """

    def __init__(self, run: RunDir, stage=None):
        self.run, self.stage = run, stage
        self.status = status(run)
        self.stages = self.status["stages"]
        self.records = {n: read_dict(run.stage(n) / "stage.json") for n in STAGE_DIRS}
        self.evaluation = read_dict(run.evaluate / "report.json") if self.done("06") else {}
        self.book, self.attempts = read_book(run), attempts_of(run)
        self.name, self.recipe = saved_recipe(run)
        if not self.recipe and stage:
            self.name, self.recipe = stage.recipe.name, stage.recipe.model_dump(mode="json")
        self.settings = settings_of(run)
        if stage and "RECIPE" not in self.settings:
            self.settings = {"RECIPE": self.name, **self.settings}
        self.settings.setdefault("PROFILE", stage.profile.name if stage else "")

    def done(self, number: str) -> bool:
        return self.stages[number]["state"] in ("done", "stale")

    @property
    def finished(self) -> bool:
        return self.status["next_command"] is None

    @property
    def verifier(self) -> str:
        return str(self.recipe.get("verifier", {}).get("model") or "the verifier of the recipe")

    @property
    def verifier_name(self) -> str:
        """The last part of its id or path, without file endings."""
        return (
            re.sub(r"(\.Q\d\w*)?\.(gguf|py)$", "", self.verifier.rstrip("/").rpartition("/")[2])
            or self.verifier
        )

    @property
    def is_kimi(self) -> bool:
        """The real Kimi-K2.5 (not the tiny model of its shape), by hub id or folder name."""
        return bool(re.search(r"kimi[-_]?k2[._]?5", self.verifier_name, re.I))

    def setup(self) -> dict[str, str]:
        """Variables that name an interpreter which is already equipped, if this run used one."""
        return {"SETUP": "off", "PYTHON": sys.executable} if os.environ.get("SETUP") == "off" else {}

    def again(self, words: str = "", **more: str) -> str:
        """A command about this run; `more` variables are added or, if empty, taken out."""
        settings = {k: v for k, v in {**self.settings, **self.setup(), **more}.items() if v}
        return command(settings, words)

    def look(self) -> str:
        """The status command; the run directory knows the rest."""
        return command({**self.setup(), "RUN_DIR": self.settings["RUN_DIR"]}, "status")

    def exports(self, **more: str) -> str:
        """The variables of this run for several commands in one block."""
        settings = {k: v for k, v in {**self.settings, **self.setup(), **more}.items() if v}
        return "export " + " ".join(f"{k}={shlex.quote(v)}" for k, v in settings.items())


# --- small parts ----------------------------------------------------------------------------------------


def number(value, digits: int = 2, unit: str = "") -> str:
    """A figure, or that it was not measured."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:.{digits}f}{unit}" if known else NOT_YET


def interval(pair, digits: int = 2) -> str:
    """[lo to hi] behind a figure; nothing without one."""
    good = isinstance(pair, (list, tuple)) and len(pair) == 2 and None not in pair
    return f" [{pair[0]:.{digits}f} to {pair[1]:.{digits}f}]" if good else ""


def markdown_table(head: list[str], rows: list[list]) -> list[str]:
    """A table; pipes and line breaks in cells are escaped."""

    def line(cells):
        return "| " + " | ".join(" ".join(str(c).split()).replace("|", "\\|") for c in cells) + " |"

    return [line(head), "|" + " --- |" * len(head), *map(line, rows), ""]


def bash(*lines: str) -> list[str]:
    return ["```bash", *lines, "```", ""]


def to_root(run: RunDir) -> str:
    """The repository, seen from the run directory where it lies inside."""
    return os.path.relpath(ROOT, run.path) if run.path.is_relative_to(ROOT) else str(ROOT)


# --- sections -------------------------------------------------------------------------------------------


def headline(r: Run) -> list[str]:
    """One paragraph: how it stands, what came out."""
    if r.finished:
        state = f"**Finished.** {result_line(r)}"
    else:
        at = next((n for n, s in r.stages.items() if s["state"] not in ("done", "todo")), None)
        if at is None:
            left = [n for n, s in r.stages.items() if s["state"] != "done"]
            nothing = len(left) == len(STAGE_DIRS)
            state = f"**Not finished**: {'nothing has run yet' if nothing else f'next is stage {left[0]}'}."
        else:
            s = r.stages[at]
            state = f"**{s['state'].capitalize()} in stage {at}** (`{SCRIPTS[at]}`)"
            state += f": {' '.join(str(s['error']).split())}" if s.get("error") else "."
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return [
        f"# EAGLE-3 draft for {r.verifier_name}",
        "",
        state,
        "",
        f"Run `{short(r.run.path)}`, recipe `{r.name or 'unknown'}`, written {when}.",
        "",
    ]


def result_line(r: Run) -> str:
    """Acceptance and speed-up in a sentence."""
    e = r.evaluation
    length = number(e.get("acceptance_length")) + interval(e.get("acceptance_length_ci95"))
    tokens, best = e.get("num_speculative_tokens") or 3, e.get("best_num_speculative_tokens")
    row = next((x for x in e.get("lengths") or [] if x["num_speculative_tokens"] == best), {})
    speed = number(row.get("speedup"), 2, "x") + interval(row.get("speedup_ci95"))
    return (
        f"Acceptance length on held-out prompts: {length} with {tokens} draft tokens (1 = the draft helps "
        f"nothing, {tokens + 1} is the most); speed-up at one request in flight: {speed} at the best draft "
        f"length, {best or tokens}."
    )


def how_to_go_on(r: Run) -> list[str]:
    """Where things lie, what to install, the one command."""
    inside = r.run.path.is_relative_to(ROOT)
    place = "The repository is the folder that holds `run_pipeline.sh`"
    where = f"{place}; this file lies in its `{short(r.run.path)}`."
    if not inside:
        where = f"{place}: `{ROOT}`. This run lies outside of it, in `{r.run.path}`."
    needs = (
        "Nothing has to be installed by hand: the script makes `.venv` (x86-64 Linux, Python 3.11 or 3.12, a "
        "package index; 3 GB, with a GPU 11 GB)."
    )
    if r.setup():
        needs = (
            "The command uses a Python that is already equipped (SETUP=off PYTHON=...); without these two "
            "the script makes `.venv` itself, which takes a package index and 3 GB, with a GPU 11 GB."
        )
    lines = ["## How to go on", "", f"{where} {needs}", ""]
    cd = f"cd {shlex.quote(to_root(r.run))}" + ("   # from the folder of this file" if inside else "")
    if r.status["working"]:
        lines += ["Somebody is working on this run right now; look with:", "", *bash(cd, r.look())]
    elif r.finished:
        lines += ["Nothing is left to do. To see where it stands:", "", *bash(cd, r.look())]
    else:
        lines += [
            "This command continues the run. Finished work is kept; only what is missing is done. It may be "
            "interrupted and repeated at any time.",
            "",
            *bash(cd, *go_on(r)),
            "It ends with `all stages done` and the figures. In another terminal, at any time:",
            "",
            *bash(r.look()),
            "On another machine: copy the whole folder and put another PROFILE (`configs/profiles/`) into "
            "the command; nothing else changes.",
            "",
        ]
    return lines


def go_on(r: Run) -> list[str]:
    """The continuing command, with what status says must be forced."""
    stale = ",".join(n for n, s in r.stages.items() if s["state"] == "stale")
    return [r.again("", FORCE=stale)]


def what_was_done(r: Run) -> list[str]:
    """Table of stages."""
    rows = []
    for n, folder in STAGE_DIRS.items():
        s, record = r.stages[n], r.records[n]
        seconds = sum(a.get("seconds") or 0 for a in r.attempts if a.get("stage") == n) or s.get("seconds")
        peak = max((p for p in (record.get("peak_rss_bytes"), *peaks(r, n)) if p), default=None)
        state = s["state"] + (f" ({s['reached']})" if s.get("reached") else "")
        result = stage_result(r, n) if r.done(n) else ""
        rows.append([
            f"{n} {folder[3:]}", state, duration(seconds) if seconds else "", size(peak) if peak else "",
            result,
        ])  # fmt: skip
    texts = [f"- **{n}** `{SCRIPTS[n]}`: {text}" for n, text in STAGE_TEXTS.items()]
    head = ["stage", "state", "time, all attempts", "peak memory", "result"]
    loads, up = r.book["servers"], [s for s in r.status["servers"] if s["state"] == "up"]
    servers = f"The verifier was started {len(loads) + len(up)} time(s)"
    if big := max((s.get("peak_rss_bytes") or 0 for s in loads), default=0):
        servers += f"; it took up to {size(big)} of RAM"
    return ["## What was done", "", *markdown_table(head, rows), f"{servers}.", "", *texts, ""]


def peaks(r: Run, n: str) -> list:
    return [a.get("peak_rss_bytes") for a in r.attempts if a.get("stage") == n]


def stage_result(r: Run, n: str) -> str:
    """What a finished stage has to show, from its record."""
    record = r.records[n]
    if n == "01":
        counts = {s: count(v) for s, v in (record.get("counts") or {}).items()}
        return ", ".join(f"{v:,} {s}" for s, v in counts.items()) + " rows" if counts else ""
    if n == "03":
        parts = [f"{record['tokens']:,} tokens"] if isinstance(record.get("tokens"), (int, float)) else []
        parts += [size(record["bytes"])] if isinstance(record.get("bytes"), (int, float)) else []
        return ", ".join(parts + proof(record.get("proof")))
    if n == "04":
        value = (record.get("val") or {}).get("expected_acceptance_length")
        return f"step {record.get('best_step', '?')}, expected acceptance length {number(value)} (validation)"
    if n == "05":
        passed = (record.get("parity") or {}).get("passed")
        checked = {
            True: "equals the trained draft in vLLM's own class",
            False: "DIFFERS from the trained draft",
        }
        return f"`05_export/vllm`, {checked.get(passed, 'parity not checked')}"
    return f"acceptance length {number(record.get('acceptance_length'))}"


def proof(found) -> list[str]:
    """The state proof in a few words."""
    if not isinstance(found, dict):
        return []
    rows = found.get("rows")
    return [f"states proven on {rows} rows" if rows else "states proven"]


def quality(r: Run) -> list[str]:
    """Training curve, expected and measured acceptance, by position, domain and load."""
    e, train = r.evaluation, r.records["04"] if r.done("04") else {}
    val, walk = train.get("val") or {}, train.get("heldout") or {}
    rows = [
        [
            "expected on validation rows (04)",
            number(val.get("expected_acceptance_length")),
            "training's estimate",
        ],
        [
            "predicted on held-out answers (04)",
            number(walk.get("acceptance_length")),
            "a walk over stored answers",
        ],
        [
            "**measured, held-out prompts (06)**",
            number(e.get("acceptance_length")) + interval(e.get("acceptance_length_ci95")),
            "served by vLLM, its own counters; 95 % interval",
        ],
    ]
    out = [
        "## Quality",
        "",
        "Acceptance length = tokens that one step of the verifier yields (1 + accepted / drafts).",
        "",
    ]
    out += markdown_table(["acceptance length", "value", "how"], rows)
    for folder, title in ((r.run.train, "training curve"), (r.run.evaluate, "measured")):
        for picture in sorted(folder.glob("*.png")):
            out += [f"![{title}: {picture.stem}]({picture.relative_to(r.run.path).as_posix()})", ""]
    if not e:
        return [*out, f"Acceptance by position and domain, speed-up: {NOT_YET} (stage 06).", "", *kimi(r)]
    out += by_position(r, walk) + by_domain(e) + by_load(e)
    out += [f"- **Warning**: {w}" for w in e.get("warnings") or []]
    out += [f"- Not measured: {k} ({why})" for k, why in (e.get("why") or {}).items()]
    return [*out, "", "All figures: [06_evaluate/report.md](06_evaluate/report.md).", "", *kimi(r)]


def by_position(r: Run, walk: dict) -> list[str]:
    """Share of drafts accepted at each position, predicted and served."""
    close, e = r.evaluation.get("closure") or {}, r.evaluation
    served = close.get("served_per_position") or e.get("acceptance_rate_per_position")
    if not served and e.get("drafts"):
        served = [n / e["drafts"] for n in e.get("accepted_per_position") or []]
    wanted = close.get("predicted_per_position")
    if not wanted and walk.get("drafts"):
        counts = walk.get("accepted_counts")
        wanted = [n / walk["drafts"] for n in counts] if counts else walk.get("accepted_per_position")
    if not served:
        return [f"By position: {NOT_YET}.", ""]
    rows = [
        [i, number(wanted[i] if wanted and i < len(wanted) else None), number(value)]
        for i, value in enumerate(served)
    ]
    return markdown_table(
        ["position of the drafted token", "accepted, predicted by 04", "accepted, served"], rows
    )


def by_domain(e: dict) -> list[str]:
    rows = [
        [
            name,
            number(d.get("acceptance_length")) + interval(d.get("acceptance_length_ci95")),
            number(d.get("expected_speedup", d.get("speedup")), 2, "x"),
            d.get("drafts", NOT_YET),
            "**slower with the draft**" if d.get("slower") else "",
        ]
        for name, d in (e.get("domains") or {}).items()
    ]
    head = ["domain", "acceptance length", "speed-up, one in flight", "drafts", ""]
    return markdown_table(head, rows) if rows else [f"By domain: {NOT_YET}.", ""]


def by_load(e: dict) -> list[str]:
    rows = [
        [
            level,
            number(c.get("plain_tokens_per_s"), 1),
            number(c.get("draft_tokens_per_s"), 1),
            number(c.get("speedup"), 2, "x") + interval(c.get("speedup_ci95")),
        ]
        for level, c in (e.get("concurrency") or {}).items()
    ]
    head = ["requests in flight", "tokens/s without", "tokens/s with the draft", "speed-up"]
    return markdown_table(head, rows) if rows else [f"Speed: {NOT_YET}.", ""]


def kimi(r: Run) -> list[str]:
    """Beside the published figures, where the verifier is Kimi-K2.5."""
    if not r.is_kimi:
        return []
    ours = r.evaluation.get("domains") or {}
    rows = []
    for name, published in KIMI_TABLE:
        key = re.sub(r"\W", "", name).lower()
        mine = next((d for k, d in ours.items() if key in re.sub(r"\W", "", k).lower()), {})
        rows.append([name, number(mine.get("acceptance_length")), published])
    best = max(
        (c.get("draft_tokens_per_s") or 0 for c in (r.evaluation.get("concurrency") or {}).values()),
        default=0,
    )
    rows.append(["tokens/s, highest", number(best or None, 0), "340+ (Baseten, NVFP4 on Blackwell)"])
    return [
        "### Beside what others publish for Kimi-K2.5",
        "",
        *markdown_table(["acceptance length on", "this draft", "published"], rows),
        KIMI_NOTE,
        "",
    ]


def prices(r: Run) -> tuple[float, str]:
    """(price of all attempts, currency), each by the profile it ran on; PRICE_PER_HOUR set now wins."""
    from eagle3.config import load_profile

    total, currency, known = 0.0, "", {}
    for a in [*r.attempts, *({"profile": r.settings.get("PROFILE"), "seconds": s} for s in load_seconds(r))]:
        name = a.get("profile")
        if name not in known:
            known[name] = quietly(lambda n=name: load_profile(n, export=False), None) if name else None
        if profile := known[name]:
            total += (a.get("seconds") or 0) / 3600 * profile.PRICE_PER_HOUR
            currency = profile.PRICE_CURRENCY
    return total, currency


def load_seconds(r: Run) -> list[float]:
    """Seconds of each extraction server before it was ready (its stage was not running yet)."""
    return [s.get("ready_seconds") or s.get("seconds") or 0 for s in extracting(r.book)]


def cost(r: Run) -> list[str]:
    """Seconds of all attempts and verifier loads, and what they cost."""
    if not r.attempts:
        return ["## Cost so far", "", "Nothing has run yet.", ""]
    rows = []
    for n in STAGE_DIRS:
        mine = [a for a in r.attempts if a.get("stage") == n]
        rows.append(
            [f"{n} {STAGE_DIRS[n][3:]}", len(mine), duration(sum(a.get("seconds") or 0 for a in mine))]
        )
    loads = load_seconds(r)
    rows.append(["verifier loads for 03", len(loads), duration(sum(loads))])
    total = sum(a.get("seconds") or 0 for a in r.attempts) + sum(loads)
    price, currency = prices(r)
    rows.append(["**all**", "", f"**{duration(total)}**"])
    paid = (
        f"{price:.2f} {currency} at the profile's PRICE_PER_HOUR"
        if price
        else "nothing (PRICE_PER_HOUR is 0)"
    )
    return [
        "## Cost so far", "", *markdown_table(["part", "attempts", "time"], rows),
        f"Machine time: {duration(total)}, price: {paid}. Verifier loads of 06 are inside its own time. What "
        "a killed process (kill -9, power cut) did is not in these figures.", "",
    ]  # fmt: skip


def what_failed(r: Run) -> list[str]:
    """Attempts that did not end well, and rows left out, by reason."""
    out = ["## What failed, and how often", ""]
    ends = Counter(
        (a.get("stage"), a.get("status"), " ".join(str(a.get("error") or "").split())[:300])
        for a in r.attempts
        if a.get("status") != "done"
    )
    if ends:
        rows = [[SCRIPTS.get(s, s), how, n, error] for (s, how, error), n in ends.most_common()]
        out += markdown_table(["stage", "ended", "times", "error"], rows)
    else:
        out += ["No attempt of a stage has failed." if r.attempts else "Nothing has run yet.", ""]
    killed = [
        n
        for n, s in r.stages.items()
        if s["state"] == "interrupted" and s.get("pid") is None and s.get("what")
    ]
    reasons = [("01", k, v) for k, v in (r.records["01"].get("rejected") or {}).items()]
    reasons += [("03", k, v) for k, v in (r.records["03"].get("dropped") or {}).items()]
    reasons += [("03", k, v) for k, v in failures(r).items()]
    if reasons:
        out += markdown_table(["stage", "rows left out because", "rows"], [list(x) for x in reasons])
    elif r.done("01"):
        out += ["No row was rejected or dropped.", ""]
    if killed:
        out += [f"Stage {', '.join(killed)} was killed without a chance to say so.", ""]
    return out


def failures(r: Run) -> Counter:
    """Rows of 03's failures.jsonl by reason, where 03 has no record that counts them."""
    found = Counter()
    if r.records["03"].get("dropped"):
        return found
    try:
        with open(r.run.hidden / "failures.jsonl", encoding="utf-8") as f:
            for text, _ in zip(f, range(MOST_LINES), strict=False):
                row = quietly(lambda t=text: json.loads(t), {})
                found[str(row.get("reason", "unknown") if isinstance(row, dict) else "unknown")] += 1
    except (OSError, UnicodeDecodeError):
        pass
    return found


def next_steps(r: Run) -> list[str]:
    """Exact commands: continue, serve, grow, and the hero run."""
    out = ["## Next steps", ""]
    if not r.finished:
        out += ["1. **Finish this run**, as above. What follows is for afterwards.", ""]
    elif serve := r.evaluation.get("serve_command"):
        out += [
            "1. **Serve the draft** (vLLM's OpenAI server, verifier and draft together):",
            "",
            *bash(serve),
        ]
    samples = r.recipe.get("data", {}).get("samples")
    if isinstance(samples, int):
        more = str(samples * 10)
        out += [
            f"2. **More data.** This run has {samples} training rows; ten times as many is the usual next "
            "size. Rows that are there stay, only new ones are extracted; then 04 to 06 are made anew. If "
            "that is interrupted, `status` gives the command that goes on.",
            "",
            *bash(r.exports(SAMPLES=more), "./run_pipeline.sh plan", "FORCE=04,05,06 ./run_pipeline.sh"),
        ]
    else:
        out += [
            "2. **More data.** This run uses all rows of its sources: add sources to the recipe "
            "(`data.sources`).",
            "",
        ]
    out += ["3. **Train again on the same states**, for instance longer:", ""]
    kept = re.sub(r"(^| )train\.epochs=\S+", "", r.settings.get("RECIPE_SET", ""))
    longer = f"{kept} train.epochs={2 * epochs(r)}".strip()
    out += bash(r.exports(RECIPE_SET=longer), "FROM=04 FORCE=04,05,06 ./run_pipeline.sh")
    return out + hero(r)


def epochs(r: Run) -> int:
    found = r.recipe.get("train", {}).get("epochs")
    return found if isinstance(found, int) else 3


def hero(r: Run) -> list[str]:
    """The large run on a rented machine."""
    recipe = r.name if r.is_kimi else "kimi-k2.5"
    known = f" --from {shlex.quote(short(r.run.path))}" if r.is_kimi else ""
    big = f"RECIPE={shlex.quote(recipe)} PROFILE=b200-nvl8"
    return [
        "4. **The hero run** (Kimi-K2.5 on a rented 8-GPU node; `rtx-pro-6000-x8` is the local twin). Copy "
        "the folder, then on the node, inside tmux; every step says what it will cost before it starts:",
        "",
        *bash(
            "# here: rsync -a --exclude .venv --exclude runs ./ NODE:eagle3/   then on NODE: cd eagle3",
            "./run_pipeline.sh setup",
            f"{big} SAMPLES=10 RUN_DIR=runs/kimi-10 .venv/bin/python -m eagle3.preflight",
            f"{big} SAMPLES=10 RUN_DIR=runs/kimi-10 ./run_pipeline.sh plan{known}",
            f"{big} SAMPLES=10 RUN_DIR=runs/kimi-10 ./run_pipeline.sh",
            f"{big} SAMPLES=1000 RUN_DIR=runs/kimi-1000 ./run_pipeline.sh plan --from runs/kimi-10",
            f"{big} SAMPLES=1000 RUN_DIR=runs/kimi-1000 ./run_pipeline.sh",
        ),
        "When the figures of 1,000 samples are better than those of 10, and the plan for the full run "
        "(`plan --from runs/kimi-10 --from runs/kimi-1000`, without SAMPLES) fits the budget, go on.",
        "",
    ]


def fallbacks(r: Run) -> list[str]:
    """Symptom -> what to do; the row that fits the last error comes first and is bold."""
    last = " ".join(str(r.status.get("last_error") or "").split())
    rows = []
    for pattern, symptom, remedy in FALLBACKS:
        hit = bool(last and pattern and re.search(pattern, last, re.I))
        if hit:
            rows.insert(0, [f"**{symptom}** (this run)", remedy])
        else:
            rows.append([symptom, remedy])
    return ["## If something goes wrong", "", *markdown_table(["symptom", "what to do"], rows)]


def what_remains(r: Run) -> list[str]:
    """The plan for the rest."""
    from eagle3.plan import make_plan, money, row

    out = ["## Plan for what remains", ""]
    if r.finished:
        return [*out, "Nothing remains.", ""]
    if r.stage is None:
        return [*out, "No plan: the recipe or the profile of this run can't be read here.", ""]
    try:
        plan = make_plan(r.stage)
    except StageError as err:
        return [*out, f"No plan yet: {err}", ""]
    left = plan["remaining"]
    lines = []
    for n, f in plan["seconds"].items():
        if share := left["share"][n]:
            scaled = {k: f[k] * share for k in ("value", "low", "high")}
            lines.append(row(f"{n} {STAGE_DIRS[n][3:]}", {**scaled, "origin": f["origin"]}))
            lines += [row(f"   + load: {x['what']}", x["seconds"]) for x in plan["loads"] if x["stage"] == n]
    lines.append(row("in all", {**{k: v * 3600 for k, v in left["hours"].items()}, "origin": ""}))
    if price := money(left["price"]):
        lines.append(f"price {price}")
    disk = plan["bytes"]
    lines.append(f"disk {size(disk['peak_disk'])} at most, states {size(disk['states'])}")
    return [*out, "Time, interval, and where the figure comes from:", "", "```", *lines, "```", ""]


def provenance(r: Run) -> list[str]:
    """Commit, versions, patches, machine, recipe."""
    out, last = ["## Where this comes from", ""], r.attempts[-1] if r.attempts else {}
    machine = last.get("machine") or {}
    gpus = Counter(g.get("name") for g in machine.get("gpus") or [])
    versions = ", ".join(f"{k} {v}" for k, v in (last.get("versions") or {}).items())
    commits = list(dict.fromkeys(str(a.get("commit")) for a in r.attempts if a.get("commit")))
    ram = machine.get("ram_bytes")
    rows = [
        ["commit", ", ".join(commits) or "unknown"],
        ["profile", ", ".join(dict.fromkeys(str(a.get("profile")) for a in r.attempts)) or "none yet"],
        ["versions", versions or "unknown"],
        ["patches", ", ".join(sorted({p for a in r.attempts for p in a.get("patches") or []})) or "none"],
        [
            "machine",
            f"{machine.get('cpu', 'unknown')}, {machine.get('cores', '?')} cores, "
            f"{size(ram) if ram else '?'}",
        ],
        ["GPUs", ", ".join(f"{n} x {name}" for name, n in gpus.items()) or "none"],
    ]
    out += markdown_table(["", ""], rows)
    out += [
        "Every attempt with its command stands in `run.json`, every stage's inputs in its `stage.json`.",
        "",
    ]
    text = quietly(lambda: (r.run.path / "recipe.yaml").read_text(encoding="utf-8"), "")
    if text:
        out += [
            "<details><summary>The recipe as it ran</summary>",
            "",
            "```yaml",
            text.strip(),
            "```",
            "",
            "</details>",
            "",
        ]
    return out


SECTIONS = (
    headline,
    how_to_go_on,
    lambda r: ["## What this is", "", *WHAT_IT_IS.format(verifier=r.verifier).splitlines(), ""],
    what_was_done,
    quality,
    cost,
    what_failed,
    next_steps,
    fallbacks,
    what_remains,
    provenance,
)


def markdown(r: Run) -> str:
    """The whole report. Damaged records cost the section that reads them, never the report."""
    out = []
    for section in SECTIONS:
        try:
            out += section(r)
        except Exception as err:  # whatever a damaged file does to a section, the others must be written
            name = section.__name__.replace("_", " ")
            out += [f'(The part "{name}" could not be written: {type(err).__name__}: {err})', ""]
    return "\n".join(out)


def summary(r: Run) -> list[str]:
    """The last lines of a finished run."""
    e = r.evaluation
    if not e:
        return [f"nothing measured yet; {r.status['next_command'] or ''}"]
    lines = [result_line(r)]
    lines += [f"WARNING: {w}" for w in e.get("warnings") or [] if "slows serving" in w]
    lines.append(f"draft:   {short(r.run.export / 'vllm')}")
    lines.append(f"report:  {short(r.run.path / 'REPORT.md')}")
    lines.append(f"serve it with:\n{e.get('serve_command') or NOT_YET}")
    return lines


# --- entry ----------------------------------------------------------------------------------------------


def load(args):
    """Recipe, profile and run directory: from the environment, else what the run directory recorded."""
    from eagle3 import config
    from eagle3.cli import load_stage

    stage = load_stage("01", args)
    saved = stage.run.path / "recipe.yaml"
    if not any(os.environ.get(k) for k in ("RECIPE", "SAMPLES", "RECIPE_SET")) and saved.is_file():
        stage.recipe = config.load_recipe(str(saved))
    return stage


def main(argv=None) -> int:
    from eagle3.cli import tool_parser

    parser = tool_parser("run_pipeline.sh report", __doc__)
    parser.add_argument("--quiet", action="store_true", help="say nothing, also not where it lies")
    parser.add_argument("--summary", action="store_true", help="print the last lines of a finished run")
    args = parser.parse_args(argv)
    try:
        stage = load(args)
        if not stage.run.path.is_dir():
            raise StageError(f"{stage.run.path} is not there: nothing has run yet")
        found = Run(stage.run, stage)
        write_text(stage.run.path / "REPORT.md", markdown(found))
    except (StageError, OSError) as err:
        print(f"report: {err}", file=sys.stderr)
        return getattr(err, "exit_code", 1)
    if args.summary:
        print("\n".join(summary(found)))
    elif not args.quiet:
        print(stage.run.path / "REPORT.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
