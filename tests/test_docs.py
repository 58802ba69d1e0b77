"""Every command in README.md and notes/ is one that works: scripts, flags, verbs, variables, config names.

Read are the fenced bash blocks, and the `code` of the running text that calls a script of ours or sets a
variable.
"""

from __future__ import annotations

import functools
import re
import resource
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

from eagle3.config import PASSED_ON, PROFILES, Profile, load_recipe
from eagle3.contract import SCRIPTS, ConfigError

DOCS = [ROOT / "README.md", *sorted((ROOT / "notes").glob("*.md"))]
HEADER = (ROOT / "run_pipeline.sh").read_text(encoding="utf-8").partition("set -euo")[0]
VERBS = ("setup", "plan", "run", "status", "report")
VARIABLES = {*re.findall(r"\b([A-Z][A-Z_]+)=", HEADER), *Profile.model_fields}
OTHERS = {"rsync", "export", "bash", "python"}  # programs that are not ours


def commands() -> list[tuple[str, str]]:
    """(file:line, command)."""
    found = []
    for doc in DOCS:
        fence = None
        for number, line in enumerate(doc.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{doc.relative_to(ROOT)}:{number}"
            if line.startswith("```"):
                fence = None if fence is not None else line[3:]
            elif fence == "bash":
                found.append((where, line))
            elif fence is None:
                spans = re.findall(r"`([^`]+)`", line)
                found += [(where, s) for s in spans if is_command(s)]
    return [(where, c) for where, c in found if shlex.split(c, comments=True)]


def is_command(span: str) -> bool:
    first = span.split()[0]
    ours = re.match(r"(\./)?(run_pipeline\.sh|0\d_\w+\.(py|sh)|python|bash)$", first)
    return bool(re.match(r"[A-Z][A-Z_]+=", first) or (" " in span and (ours or first in VERBS)))


COMMANDS = commands()


def parts(command: str) -> tuple[dict[str, str], list[str]]:
    """Variables that a command sets, and its words."""
    words = shlex.split(command, comments=True)
    words = words[1:] if words[0] == "export" else words
    count = next((i for i, w in enumerate(words) if not re.match(r"[A-Z][A-Z_]+=", w)), len(words))
    return dict(w.split("=", 1) for w in words[:count]), words[count:]


@functools.cache
def help_of(*program: str) -> str:
    """What --help says; of run_pipeline.sh's verbs what their module says."""
    command = [*program, "--help"]
    if program[0].endswith(".py") or program[0] == "-m":
        command = [sys.executable, *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, f"{' '.join(program)} --help: {done.stderr[-500:]}"
    return done.stdout


def called(words: list[str]) -> tuple[list[str], list[str]]:
    """(program in the form that help_of takes, its arguments); ([], ...) for other people's programs."""
    first, rest = words[0].removeprefix("./"), words[1:]
    if first in ("python", "bash") and rest:
        if rest[0] == "-m":
            return ["-m", rest[1]], rest[2:]
        first, rest = rest[0], rest[1:]
    if first == "run_pipeline.sh" or first in VERBS:
        verb = first if first in VERBS else (rest.pop(0) if rest else "run")
        assert verb in VERBS, f"no verb {verb}"
        return ["./run_pipeline.sh"] if verb == "run" else ["-m", f"eagle3.{verb}"], rest
    if first.endswith((".py", ".sh")):
        assert (ROOT / first).is_file(), f"no {first}"
        if first == SCRIPTS["05"] and rest[:1] in (["import"], ["verify"]):
            return [first, rest[0]], rest[1:]
        return [first], rest
    assert first in OTHERS, f"{first}: no program that this test knows"
    return [], rest


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 30
    assert {where.partition(":")[0] for where, _ in COMMANDS} >= {"README.md", "notes/next-steps-eagle.md"}


@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=[f"{w} {c}"[:70] for w, c in COMMANDS])
def test_commands_name_what_exists(where, command):
    variables, words = parts(command)
    for name, value in variables.items():
        assert name in VARIABLES or name.startswith(PASSED_ON), f"{name} is no variable of ours"
        if name == "PROFILE":
            assert (PROFILES / f"{value}.env").is_file()
        if name in ("FROM", "TO", "FORCE"):
            assert set(value.split(",")) <= {"01", "03", "04", "05", "06"}
    recipe = variables.get("RECIPE", "smollm2-135m")
    load_recipe(recipe, shlex.split(variables.get("RECIPE_SET", "")), variables.get("SAMPLES"))
    if not words:
        return
    program, arguments = called(words)
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for flag in [a.partition("=")[0] for a in arguments if a.startswith("--") and program]:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", help_of(*program)), f"{program} has no {flag}"


WRONG = [
    "./run_pipeline.sh frob",
    "05_convert.py --nope",
    "02_launch.sh serve",
    "plan --fast",
    "FRM=04 ./run_pipeline.sh",
    "FROM=07 ./run_pipeline.sh",
    "PROFILE=none ./run_pipeline.sh",
    "RECIPE=none ./run_pipeline.sh",
    "RECIPE_SET=train.rate=1 ./run_pipeline.sh",
]


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_would_be_noticed(command):
    with pytest.raises((AssertionError, ConfigError)):
        test_commands_name_what_exists("here", command)


def test_the_header_of_the_orchestrator_names_what_it_reads():
    """A variable that run_pipeline.sh reads is explained at its top, and every verb is there."""
    body = (ROOT / "run_pipeline.sh").read_text(encoding="utf-8").partition("set -euo")[2]
    inner = {"BASH_SOURCE", "PYTHONPATH", "SECONDS", "HUP", "INT", "TERM", "EXIT"}
    inner |= {n for n in Profile.model_fields if n != "name"}  # explained in the profiles
    assert set(re.findall(r"\$\{?([A-Z][A-Z_]+)", body)) - inner <= set(re.findall(r"\b[A-Z_]+\b", HEADER))
    assert all(f"./run_pipeline.sh {verb}" in HEADER or verb == "run" for verb in VERBS)


# What a stage needs for its work, but not to answer --help.
HEAVY = ("torch", "transformers", "vllm", "speculators", "accelerate", "datasets", "pyarrow", "matplotlib")


@pytest.mark.parametrize("script", [s for s in SCRIPTS.values() if s.endswith(".py")])
def test_help_answers_at_once(script):
    """Under a second of CPU, nothing heavy imported, and an example in it."""
    code = (
        "import runpy, sys; sys.argv = [sys.argv[1], '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"finally: print('heavy:', *sorted(set({HEAVY}) & sys.modules.keys()))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and done.stdout.endswith("heavy:\n"), done.stdout[-200:] + done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert f"python {script}" in done.stdout
