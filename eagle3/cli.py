"""One skeleton for every Python stage: options, settings, log, signals, exit status."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3 import progress
from eagle3.contract import SCRIPTS, Interrupted, RunDir, StageError, write_text

if TYPE_CHECKING:
    from eagle3.config import Profile, Recipe

log = logging.getLogger("eagle3")


@dataclass
class Stage:
    """What a stage gets to work with."""

    number: str
    args: argparse.Namespace
    recipe: Recipe
    profile: Profile
    run: RunDir


def stage_parser(number: str, doc: str) -> argparse.ArgumentParser:
    """Options that every stage has; defaults come from the variables that run_pipeline.sh uses."""
    summary, _, rest = doc.strip().partition("\n")
    parser = argparse.ArgumentParser(
        prog=SCRIPTS[number],
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run-dir", metavar="DIR", help="default: $RUN_DIR, else runs/$RECIPE-$SAMPLES")
    parser.add_argument(
        "--recipe", metavar="FILE", help="name or YAML file; default: $RECIPE, else smollm2-135m"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="K=V", help="override a recipe key (repeatable)"
    )
    parser.add_argument("--force", action="store_true", help="drop what this stage made and make it anew")
    parser.add_argument(
        "--check",
        action="store_true",
        help="do nothing; exit 0 if the stage is done, 1 if work is left, 2 if refused",
    )
    return parser


def tool_parser(prog: str, doc: str) -> argparse.ArgumentParser:
    """Parser of a command beside the stages, which takes its settings from the environment alone."""
    parser = argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run_dir=None, recipe=None, set=[], force=False, check=False)
    return parser


def fraction(text: str) -> tuple[int, int]:
    """Type of an option: "2/4" -> (2, 4)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: write K/N with 1 <= K <= N")
    return int(match[1]), int(match[2])


def load_stage(number: str, args: argparse.Namespace) -> Stage:
    """Resolve recipe, profile and run directory of a stage from options and environment."""
    from eagle3 import config

    recipe = config.effective_recipe(args.recipe, args.set, args.run_dir)
    return Stage(number, args, recipe, config.load_profile(), config.run_dir(recipe, args.run_dir))


def run_stage(parser: argparse.ArgumentParser, number: str, body: Callable[[Stage], str], argv=None) -> int:
    """Parse, run, and turn every ending into the right exit status.

    Args:
        body: does the work and returns how it ended: "done" or "skipped"; with --check "done" or "todo".

    Returns:
        0 done, 1 failed (one line, the traceback only in the log), 2 bad usage, 128 + signal number.
    """
    args = parser.parse_args(argv)
    started, stage, status, code, error = time.time(), None, "failed", 1, None
    catch_signals()
    try:
        stage = load_stage(number, args)
        first = os.environ.get("RANK", "0") == "0"  # of several training processes one keeps the books
        start_log(stage.run, number, quiet=args.check or not first)
        if not args.check and first:
            from eagle3.config import dump_recipe

            progress.begin_file(stage.run.logs / f"{number}.progress.json")
            write_text(stage.run.path / "recipe.yaml", dump_recipe(stage.recipe))
            log.info("$ %s", shlex.join(["python", *sys.argv]))
        status = body(stage)
        code = 0 if status in ("done", "skipped") else 1
    except StageError as err:
        error, code = str(err), err.exit_code
        log.error("%s: %s", SCRIPTS[number], err)
    except Interrupted as err:
        status, code, error = "interrupted", 128 + err.signum, signal.Signals(err.signum).name
        log.error("%s: stopped by %s; run it again to continue", SCRIPTS[number], error)
    except ModuleNotFoundError as err:
        error = f"Python package {err.name!r} is missing; ./run_pipeline.sh setup, then use .venv/bin/python"
        log.error("%s: %s", SCRIPTS[number], error)
    except Exception as err:
        error = f"unexpected {type(err).__name__}: {' '.join(str(err).split())[:300]}"
        where = stage.run.logs / f"{number}.log" if stage else None
        if where and logging.getLogger("eagle3.trace").handlers:
            logging.getLogger("eagle3.trace").error("%s", traceback.format_exc())
            log.error("%s: %s (traceback in %s)", SCRIPTS[number], error, where)
        else:
            traceback.print_exc()
    progress.end_file()
    if stage and not args.check and first and stage.run.path.is_dir():
        from eagle3.record import note_attempt

        note_attempt(
            stage.run, number, status, started, stage.profile.name, **({"error": error} if error else {})
        )
    return code


def catch_signals() -> None:
    """HUP, INT and TERM raise Interrupted, once: a second one must not break the clean-up of the first."""
    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

    def interrupt(signum, _frame):
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(signum)

    for signum in signals:
        signal.signal(signum, interrupt)


def start_log(run: RunDir, number: str, quiet: bool = False) -> None:
    """Send log lines to stderr (short) and to logs/NN.log (with time; tracebacks only there)."""
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers.clear()
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(logging.Formatter(f"[{number}] %(message)s"))
    log.addHandler(screen)
    trace = logging.getLogger("eagle3.trace")
    trace.propagate = False
    trace.handlers.clear()
    if quiet:
        return
    run.logs.mkdir(parents=True, exist_ok=True)
    book = logging.FileHandler(run.logs / f"{number}.log", encoding="utf-8")
    book.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s"))
    log.addHandler(book)
    trace.addHandler(book)
