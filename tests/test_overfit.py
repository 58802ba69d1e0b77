"""The chain on the Kimi-shaped verifier: what is learned by heart is served by heart (fault case 43)."""

import json

from conftest import run_stage_cmd, stage_record

from eagle3.contract import RunDir


def test_ten_samples_learned_by_heart_are_served_by_heart(tmp_path):
    """01 to 06 with the real vLLM: a flag, rope key, table or layer id lost on the way costs acceptance."""
    folder = tmp_path / "run"
    changes = [
        "train.epochs=75",
        "train.lr=2e-3",
        "train.val_every=75",
        f"evaluate.sets=[{folder}/01_prepare/train.jsonl]",
        "evaluate.concurrency=[1]",
        "evaluate.repeats=1",
        "evaluate.timed_prompts=2",
    ]
    env = {"SETUP": "off", "RECIPE": "kimi-tiny", "PROFILE": "cpu-smoke", "SAMPLES": "10"}
    env |= {"RUN_DIR": str(folder), "RECIPE_SET": " ".join(changes)}
    done = run_stage_cmd("run_pipeline.sh", env=env, timeout=1500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    run = RunDir(folder)
    lines = [json.loads(line) for line in (run.train / "metrics.jsonl").read_text().splitlines()]
    assert min([x for x in lines if x["split"] == "train"][-1]["acc"]) > 0.95
    report = json.loads((run.evaluate / "report.json").read_text())
    assert report["prompts"] == 10 and report["num_speculative_tokens"] == 3
    assert report["acceptance_length"] >= 3.5, report["accepted_per_position"]
    assert stage_record(run, "05")["parity"]["passed"]
