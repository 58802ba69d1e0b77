#!/usr/bin/env python3
"""Are states over a cached prefix those of an uncached one? If so, 02 may cache prefixes in extraction.

    python tests/bench/prefix_states.py          default verifier, real vLLM, two server loads

The same nine prompts (three of them twice, two blocks of shared prefix) go to a server without and one with
prefix caching, one after the other, so that batching can't differ. One JSON object as the last line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PORT = "8319"


def prompts() -> list[list[int]]:
    """Six prompts with 280 tokens in common (two blocks of the CPU build), the first three once more."""
    from eagle3.config import load_recipe
    from eagle3.verifier import open_verifier

    tokenizer = open_verifier(load_recipe("smollm2-135m")).tokenizer()
    with open(ROOT / "configs" / "data" / "train.jsonl") as f:
        texts = [json.loads(line)["messages"][-1]["content"] for line in f][:40]
    shared = tokenizer.encode(" ".join(texts))[:280]
    rows = [shared + tokenizer.encode(text)[:40] for text in texts[:6]]
    return rows + rows[:3]


def ask(flag: str) -> tuple[list, int]:
    """States of all prompts from a server started with `flag`, and how many tokens its cache gave."""
    import requests
    from safetensors.torch import load_file

    from eagle3 import config
    from eagle3.contract import RunDir
    from eagle3.extract import Staged
    from eagle3.server import served_name, server_args, staging_candidates
    from eagle3.verifier import open_verifier

    recipe, profile = config.load_recipe("smollm2-135m"), config.load_profile()
    verifier, url = open_verifier(recipe), f"http://127.0.0.1:{PORT}"
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        stage = SimpleNamespace(recipe=recipe, profile=profile, run=run)
        args = [a for a in server_args("extract", stage, verifier) if not a.endswith("enable-prefix-caching")]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *args, flag]
        log = open(run.path / "server.log", "ab")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        found = []
        try:
            while True:
                try:
                    if requests.get(f"{url}/health", timeout=2).ok:
                        break
                except requests.RequestException:
                    pass
                if process.poll() is not None:
                    raise SystemExit((run.path / "server.log").read_text()[-3000:])
                time.sleep(1)
            for ids in prompts():
                body = {"model": served_name(verifier), "prompt": ids, "max_tokens": 4, "temperature": 0}
                body["kv_transfer_params"] = {"include_output_tokens": True}
                reply = requests.post(f"{url}/v1/completions", json=body, timeout=900).json()
                path = reply["kv_transfer_params"]["hidden_states_path"]
                with Staged(path, staging_candidates(run)) as staged:
                    staged.wait(60, threading.Event())
                    found.append(load_file(path)["hidden_states"].float())
            text = requests.get(f"{url}/metrics", timeout=30).text
            lines = [x for x in text.splitlines() if x.startswith("vllm:prefix_cache_hits_total")]
            return found, int(sum(float(x.split()[-1]) for x in lines))
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def main() -> int:
    os.environ["PROFILE"], os.environ["VERIFIER_PORT"] = "cpu-smoke", PORT
    plain, none = ask("--no-enable-prefix-caching")
    cached, hits = ask("--enable-prefix-caching")
    worst = max(
        float(((a - b).norm(dim=-1) / a.norm(dim=-1)).max()) for a, b in zip(plain, cached, strict=True)
    )
    result = {"bench": "prefix-states", "prompts": len(plain), "tokens": sum(map(len, plain))}
    result |= {"cached_tokens": hits, "cached_tokens_without": none, "largest_relative_difference": worst}
    result["bit_equal"] = all((a == b).all().item() for a, b in zip(plain, cached, strict=True))
    # bf16 keeps 8 bits: another order of the same sums differs by a few thousandths.
    result["passes"] = hits > 0 and worst < 0.02
    print(json.dumps(result))
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
