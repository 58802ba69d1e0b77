"""Run directories made by hand, through the same records that the stages use: fast material for tests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

from eagle3 import config
from eagle3.contract import RunDir, write_json, write_text
from eagle3.record import StageRecord, note_attempt


def settings(run: Path, recipe="smollm2-135m", profile="cpu-smoke", sets=(), samples=None, **variables):
    """What stages get: recipe, profile (with variables changed) and run directory."""
    loaded = config.load_profile(profile, export=False)
    values = {**loaded.model_dump(), **variables}
    return SimpleNamespace(
        recipe=config.load_recipe(recipe, list(sets), samples),
        profile=config.Profile.model_validate(values),
        run=RunDir(run),
        args=SimpleNamespace(set=[]),
    )


class HandMade:
    """A run directory that stages seem to have worked in.

    Args:
        stage: from `settings`.
    """

    def __init__(self, stage):
        self.stage, self.run = stage, stage.run
        write_text(self.run.path / "recipe.yaml", config.dump_recipe(stage.recipe))

    def attempt(self, number: str, status: str = "done", seconds: float = 10.0, **extra) -> None:
        note_attempt(self.run, number, status, time.time() - seconds, self.stage.profile.name, **extra)

    def finish(self, number: str, seconds: float = 10.0, outputs=(), rates=None, after: float = 0.0, **extra):
        """A finished stage; `after` shifts its time stamp by seconds."""
        record = StageRecord(self.run, number, {"of": number}, self.stage.profile.name)
        record.begin(False, lambda folder: [])
        for name in outputs:
            (record.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (record.folder / name).touch()
        made = record.finish({name: {} for name in outputs}, rates or {}, **extra)
        made["seconds"] = seconds
        made["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + after))
        write_json(record.path, made)
        self.attempt(number, seconds=seconds)

    def prepare(self, train=10, val=2, heldout=4, prompt=50, seconds=8.0, **extra):
        rows = {"train": train, "val": val, "heldout": heldout}
        self.finish(
            "01",
            seconds,
            rates={"rows_per_s": 100.0},
            samples={"asked": self.stage.recipe.data.samples, "train": train, "exhausted": False},
            counts={s: {"chat": n // 2, "code": n - n // 2} for s, n in rows.items()},
            tokens={s: {"prompt": n * prompt, "answer": 0} for s, n in rows.items()},
            records=sum(rows.values()) + 3,
            rejected={"duplicate": 2, "unknown role": 1},
            **extra,
        )

    def manifest(self, rows: dict[str, int], prompt=50, answer=100, dropped=0, per_token=4608):
        """A line per split, as 03 writes them."""
        lines = []
        for number, (split, n) in enumerate(rows.items()):
            samples = [
                {"id": f"{split}{i}", "split": split, "tokens": prompt + answer, "prompt": prompt}
                for i in range(n)
            ]
            size = n * (prompt + answer) * per_token
            lines.append({"shard": f"shard-0of1-{number:05d}.safetensors", "bytes": size, "samples": samples})
        lines.append({"dropped": [{"id": f"d{i}", "reason": "looping"} for i in range(dropped)]})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_text(self.run.hidden / "manifest-0of1.jsonl", text)

    def extract(self, train=10, val=2, heldout=4, prompt=50, answer=100, seconds=30.0, load=25.0, **extra):
        rows = {"train": train, "val": val, "heldout": heldout}
        self.manifest(rows, prompt, answer, dropped=1)
        n = sum(rows.values())
        self.finish(
            "03",
            seconds,
            rates={"tokens_per_s": n * (prompt + answer) / (seconds - 5)},
            counts=rows,
            tokens=n * (prompt + answer),
            answer_tokens=n * answer,
            bytes=n * (prompt + answer) * 4608,
            dropped={"looping": 1},
            proof={"rows": 64, "shards": 1, "median": 0.01},
            **extra,
        )
        self.server("extract", load)

    def server(self, mode: str, ready: float | None):
        path = self.run.path / "run.json"
        book = json.loads(path.read_text())
        entry = {
            "mode": mode,
            "draft": None,
            "peak_rss_bytes": 3 * 10**9,
            "ready_seconds": ready,
            "seconds": 99.0,
        }
        book.setdefault("servers", []).append(entry)
        write_json(path, book)

    def train(self, seconds=60.0, **extra):
        log = self.run.train / "metrics.jsonl"
        write_text(log, '{"step": 40, "split": "train", "loss": 1.25, "tokens_per_s": 1500.0}\n{"step": 4')
        self.finish(
            "04",
            seconds,
            outputs=["metrics.jsonl", "curve.png"],
            rates={"tokens_per_s": 1500.0},
            best_step=40,
            val={"expected_acceptance_length": 1.91, "conditional_accuracy": [0.5, 0.4, 0.3]},
            heldout={"drafts": 200, "accepted_counts": [100, 50, 20], "acceptance_length": 1.85},
            **extra,
        )

    def convert(self, **extra):
        self.finish("05", 5.0, outputs=["vllm/config.json"], parity={"passed": True}, **extra)

    def evaluate(self, domains=("chat", "code"), **changes):
        """06's report.json with one domain that the draft slows down."""
        names = {
            n: {"acceptance_length": 1.9, "acceptance_length_ci95": [1.7, 2.1], "drafts": 90} for n in domains
        }
        names |= {"bad": {"acceptance_length": 1.1, "drafts": 9, "expected_speedup": 0.81, "slower": True}}
        speed = {
            "plain_tokens_per_s": 50.0,
            "draft_tokens_per_s": 65.0,
            "speedup": 1.3,
            "speedup_ci95": [1.2, 1.4],
        }
        report = {
            "acceptance_length": 1.876,
            "acceptance_length_ci95": [1.81, 1.95],
            "accepted_per_position": [90, 45, 18],
            "drafts": 180,
            "num_speculative_tokens": 3,
            "concurrency": {"1": speed},
            "lengths": [
                {"num_speculative_tokens": n, "speedup": x} for n, x in ((1, None), (2, None), (3, 1.3))
            ],
            "best_num_speculative_tokens": 3,
            "domains": names,
            "warnings": [
                "the draft slows serving down in domain bad: acceptance length 1.10, expected 0.81x"
            ],
            "why": {"greedy_identical": "no temperature 0"},
            "serve_command": "python -m vllm.entrypoints.openai.api_server --model /v --port 1",
            **changes,
        }
        write_json(self.run.evaluate / "report.json", report)
        self.finish("06", 120.0, outputs=["report.json", "acceptance.png"], acceptance_length=1.876)

    def all(self):
        self.prepare()
        self.extract()
        self.train()
        self.convert()
        self.evaluate()
        return self
