"""Serve the draft beside the verifier and measure it on held-out prompts.

Reads   05_export/vllm, or every --draft DIR; 01_prepare/heldout.jsonl, or what evaluate.sets names;
        03_hidden and 04_train/stage.json for the comparison with what 04 predicted
Does    starts the verifier without and with the draft, asks all prompts of both, times some, compares
Writes  06_evaluate/report.json  report.md  acceptance.png  speed.png  stage.json

python 06_evaluate.py
python 06_evaluate.py --min-acceptance 1.6 --baseline runs/before/06_evaluate/report.json
python 06_evaluate.py --run-dir runs/compare --draft runs/a/05_export/vllm --draft /drafts/theirs

Verifier loads: one without a draft, one per draft, and one more per draft if a shorter draft length promises
to be more than 3 % faster than evaluate.num_speculative_tokens. Gates come after the measurement: one that
fails (exit 1) leaves a finished report, and a rerun applies the gates to it without measuring again.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from eagle3.bench import Bench, Draft, measure_all
from eagle3.cli import Stage, run_stage, stage_parser
from eagle3.contract import ConfigError, StageError, read_json, write_json, write_text
from eagle3.evalsets import HELDOUT, load_sets, set_digests
from eagle3.record import StageRecord, digest

log = logging.getLogger("eagle3")

MAKES = ("report.json", "report.md", "acceptance.png", "speed.png")
OWN = "05_export/vllm"


def parser() -> argparse.ArgumentParser:
    found = stage_parser("06", __doc__)
    add = found.add_argument
    add("--draft", action="append", type=Path, metavar="DIR", help="draft to measure (repeatable)")
    add("--min-acceptance", type=float, metavar="X", help="exit 1 below this acceptance length")
    add("--baseline", type=Path, metavar="FILE", help="report.json whose figures must be reached")
    return found


# --- what is measured -------------------------------------------------------------------------------------


def find_drafts(stage: Stage) -> list[Draft]:
    """The run's own export, or the drafts of the command line.

    Raises:
        StageError: 05 is not finished.
        ConfigError: a --draft without config.json.
    """
    from eagle3.eval_draft import fingerprint

    if not stage.args.draft:
        made = read_json(stage.run.export / "stage.json")
        if not made or made.get("status") != "done":
            raise StageError(
                f"{stage.run.export} holds no finished draft: run 05_convert.py, or pass --draft DIR"
            )
        content = {name: entry for name, entry in made["outputs"].items() if name.startswith("vllm/")}
        if damaged := StageRecord(stage.run, "05", {}, "").damaged({"outputs": content}):
            raise StageError(f"{stage.run.export}: {'; '.join(damaged)}; run 05_convert.py --force")
        return [Draft(OWN, stage.run.path / OWN, digest(content))]
    found = []
    for path in stage.args.draft:
        folder = path.expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--draft {path} holds no config.json: not a draft folder")
        inside = folder.is_relative_to(stage.run.path)
        name = str(folder.relative_to(stage.run.path)) if inside else str(path)
        found.append(Draft(name, folder, fingerprint(folder)))
    return found


def identity(stage: Stage, verifier, drafts: list[Draft]) -> dict:
    """What the figures depend on; gates are not part of it, they can be applied again."""
    recipe = stage.recipe
    return {
        "drafts": [d.fingerprint for d in drafts],
        "verifier": verifier.fingerprint,
        "max_model_len": recipe.verifier.max_model_len,
        "sets": set_digests(recipe.evaluate.sets, stage.run),
        "evaluate": recipe.evaluate.model_dump(mode="json", exclude={"max_gap"}),
        "sampling": {"top_p": recipe.answers.top_p, "top_k": recipe.answers.top_k, "seed": recipe.seed},
    }


def stored_heldout(stage: Stage) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and answer tokens of the held-out rows that 03 stored, by id; empty where there is no 03."""
    if not (stage.run.hidden / "stage.json").is_file():
        return {}
    from eagle3.store import Store

    store = Store.open(stage.run.hidden)
    found = {}
    for info in store.select(HELDOUT):
        ids = store.token_ids(info).tolist()
        found[info.id] = (ids[: info.prompt], ids[info.prompt :])
    return found


# --- the stage --------------------------------------------------------------------------------------------


def announce(stage: Stage, drafts: list[Draft], rows: list[dict]) -> None:
    """Say what is about to be spent."""
    e = stage.recipe.evaluate
    how = "side by side, repeats alternate" if stage.profile.cpu else "one after the other, repeats in blocks"
    log.info(
        "%d prompts in %d domains, %d draft(s) with %d draft tokens",
        len(rows), len({r["domain"] for r in rows}), len(drafts), e.num_speculative_tokens,
    )  # fmt: skip
    log.info(
        "verifier loads: %d (one without a draft, one per draft; %s), up to %d more to time a shorter draft",
        1 + len(drafts), how, len(drafts),
    )  # fmt: skip


def build_report(stage: Stage, verifier, bench: Bench, materials: list, skipped: dict, stored: dict) -> dict:
    """report.json: the first draft's figures at the top level, all drafts in `compared`."""
    from eagle3 import eval_report

    recipe, e = stage.recipe, stage.recipe.evaluate
    results = [eval_report.figures(m) for m in materials]
    for result, m in zip(results, materials, strict=True):
        close, why = None, "predictions are 04's of this run, for its own export only"
        if m.draft == OWN:
            predicted = (read_json(stage.run.train / "stage.json") or {}).get("heldout")
            answers = {key: answer for key, (_, answer) in stored.items()}
            close, why = eval_report.closure(predicted, m, answers, e.max_gap)
        result["closure"] = close
        if close is None:
            result["why"]["closure"] = why
        result["warnings"] = eval_report.warnings(result, skipped)
        result["serve_command"] = eval_report.serve_command(
            stage, verifier, m.folder, result["best_num_speculative_tokens"]
        )
    return {
        "verifier": recipe.verifier.model,
        "verifier_fingerprint": verifier.fingerprint,
        "sets": set_digests(e.sets, stage.run),
        "max_tokens": e.max_tokens,
        "in_flight": bench.in_flight,
        "timing": {
            "prompts": len(bench.timed_rows),
            "max_tokens": e.timed_tokens or e.max_tokens,
            "repeats": e.repeats,
            "alternating": bench.side_by_side,
        },
        "loads": bench.loads,
        "profile": stage.profile.name,
        **results[0],
        "compared": results if len(results) > 1 else [],
    }


def summary(report: dict, folder: Path) -> None:
    """The last lines: acceptance, speed-up, where the draft lies, how to serve it."""
    from eagle3.eval_markdown import headline

    for line in headline(report):
        log.info("%s", line)
    for line in report["warnings"]:
        log.warning("warning: %s", line)
    log.info("report: %s", folder / "report.md")
    log.info("draft: %s", report["draft"] if report["draft"] != OWN else folder.parent / OWN)
    log.info("serve it: %s", report["serve_command"])


def judge(stage: Stage, report: dict, baseline: dict | None) -> None:
    from eagle3.eval_report import judge as apply

    apply(report, stage.recipe.evaluate.max_gap, stage.args.min_acceptance, baseline)


def body(stage: Stage) -> str:
    from eagle3.eval_draft import check_draft
    from eagle3.eval_report import read_baseline
    from eagle3.verifier import open_verifier

    e = stage.recipe.evaluate
    verifier = open_verifier(stage.recipe, fetch=False)
    drafts = find_drafts(stage)
    made_of = identity(stage, verifier, drafts)
    record = StageRecord(stage.run, "06", made_of, stage.profile.name)
    same = {"verifier_fingerprint": verifier.fingerprint, "sets": made_of["sets"]}
    same |= {"num_speculative_tokens": e.num_speculative_tokens, "temperature": e.temperatures[0]}
    baseline = read_baseline(stage.args.baseline, same) if stage.args.baseline else None
    if stage.args.check:
        record.refuse_other_identity()
        if not record.done():
            return "todo"
        judge(stage, read_json(record.folder / "report.json"), baseline)
        return "done"
    for draft in drafts:
        check_draft(draft.folder, verifier, stage.recipe.verifier.max_model_len)
    if record.begin(stage.args.force, lambda folder: [folder / name for name in MAKES]):
        report = read_json(record.folder / "report.json")
        log.info("already measured for this draft and these settings; --force measures again")
        summary(report, record.folder)
        judge(stage, report, baseline)
        return "skipped"

    stored = stored_heldout(stage)
    prompts = {key: prompt for key, (prompt, _) in stored.items()}
    limits = (e.prompts_per_set, e.max_tokens, stage.recipe.verifier.max_model_len)
    rows, skipped = load_sets(e.sets, stage.run, verifier, *limits, prompts)
    for number, row in enumerate(rows):
        row["number"] = number
    announce(stage, drafts, rows)
    bench = Bench(stage, verifier, rows)
    materials = measure_all(bench, drafts)
    report = build_report(stage, verifier, bench, materials, skipped, stored)
    write_outputs(record.folder, report)
    level = (report["concurrency"] or {}).get(str(e.concurrency[0])) or {}
    rates = {key: level.get(key) for key in ("plain_tokens_per_s", "draft_tokens_per_s")}
    figures = {key: report[key] for key in ("acceptance_length", "acceptance_length_ci95", "loads")}
    record.finish({name: {} for name in MAKES}, rates, **figures, speedup=level.get("speedup"))
    summary(report, record.folder)
    judge(stage, report, baseline)
    return "done"


def write_outputs(folder: Path, report: dict) -> None:
    from eagle3 import eval_markdown, plots

    write_json(folder / "report.json", report)
    write_text(folder / "report.md", eval_markdown.markdown(report))
    plots.acceptance(report, folder / "acceptance.png")
    plots.speed(report, folder / "speed.png")


def main(argv=None) -> int:
    return run_stage(parser(), "06", body, argv)


if __name__ == "__main__":
    raise SystemExit(main())
