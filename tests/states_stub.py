"""A stand-in for vLLM in extraction mode: its requests, replies, files and locks, real states of a toy model.

Faults are planted by the test: `stub.spoil` changes states before they are written, `stub.refuse` answers a
request with a status, `stub.write` replaces the writing of a file.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

LAYERS = [2, 4, 5]
# What one test run costs: 12 training rows, 2 of validation, 3 held-out.
ROWS = {"train": 12, "val": 2, "heldout": 3}
PADDED = 128


class ToyModel:
    """Greedy or given continuation with raw log-probabilities and the residual stream after every layer."""

    def __init__(self, path: Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._lock, self._last, self._known = threading.Lock(), None, {}
        self.model.model.norm.register_forward_pre_hook(lambda _m, args: setattr(self, "_last", args[0]))

    def run(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [T, V] and states [T, layers + 1, H]: k = after k layers, last un-normed."""
        with self._lock:
            if tuple(ids) not in self._known:
                self._known[tuple(ids)] = self._run(ids)
            return self._known[tuple(ids)]

    @torch.no_grad()
    def _run(self, ids: list[int]):
        # Always as long: bf16 units (AVX-512, AMX) round the same position otherwise in a longer sequence.
        padded = [*ids, *[0] * (PADDED - len(ids))]
        out = self.model(torch.tensor([padded]), output_hidden_states=True)
        states = torch.stack([h[0] for h in (*out.hidden_states[:-1], self._last)], 1)
        return out.logits[0, : len(ids)].float().log_softmax(-1), states[: len(ids)]


# One model for all tests: they ask the same things again and again.
toy_model = functools.cache(ToyModel)


class Stub:
    """An HTTP server on a free port; use as `with Stub(path, staging).serve() as stub`."""

    def __init__(self, path: Path, staging: Path, name: str, layers=(*LAYERS, 8), limit: int = 64):
        self.toy, self.staging, self.name, self.layers, self.limit = (
            toy_model(path),
            staging,
            name,
            list(layers),
            limit,
        )
        self.requests: list[dict] = []
        self.spoil = lambda states, ids, number: states
        self.refuse = lambda body, number: None
        self.write = self._write
        self.answer = None  # prompt -> forced answer
        self.delay = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def serve(self):
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                model = {"id": stub.name, "max_model_len": stub.limit}
                self._reply(200, {"data": [model]} if self.path == "/v1/models" else {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tokenize":
                    ids = stub.toy.tokenizer.encode(body["prompt"], add_special_tokens=False)
                    self._reply(200, {"tokens": ids})
                else:
                    self._reply(*stub.complete(body))

            def _reply(self, status, value):
                if stub.dead:  # a dead server breaks its open connections too
                    self.close_connection = True
                    return
                data = json.dumps(value).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"

        def kill():
            self.dead = True
            server.shutdown()
            server.server_close()

        self.kill, self.dead = kill, False
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield self
        finally:
            self.kill()

    def complete(self, body: dict) -> tuple[int, dict]:
        with self._lock:
            self.requests.append(body)
            number = len(self.requests) - 1
        if refused := self.refuse(body, number):
            return refused, {"error": {"message": f"refused with {refused}"}}
        time.sleep(self.delay)
        prompt = body["prompt"]
        if len(prompt) + 1 > self.limit:
            return 400, {"error": {"message": f"maximum context length is {self.limit} tokens"}}
        forced = self.answer(prompt) if self.answer and body["max_tokens"] > 1 else None
        out, top, finish = [], [], "length"
        for k in range(min(body["max_tokens"], self.limit - len(prompt))):
            logp, states = self.toy.run([*prompt, *out])
            best = logp[-1].topk(body.get("logprobs") or 1)
            top.append({f"token_id:{t}": v for t, v in zip(best.indices.tolist(), best.values.tolist())})
            if forced is not None and k >= len(forced):
                out.append(5)
            else:
                out.append(best.indices[0].item() if forced is None else forced[k])
            if out[-1] == 5:
                finish = "stop"
                break
        keep = (body.get("kv_transfer_params") or {}).get("include_output_tokens")
        ids = [*prompt, *out][:-1] if keep else prompt
        _, states = self.toy.run(ids)
        path = self.staging / f"req-{os.getpid()}-{id(self)}-{number}.safetensors"
        self.write(path, self.spoil(states[:, self.layers].clone(), ids, number), torch.tensor(ids))
        choice = {"token_ids": out, "prompt_token_ids": prompt, "finish_reason": finish, "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": top}
        if n := body.get("prompt_logprobs"):
            logp, _ = self.toy.run(prompt)
            rows = [row.topk(n) for row in logp[:-1]]
            choice["prompt_logprobs"] = [None] + [
                {str(t): {"logprob": v} for t, v in zip(r.indices.tolist(), r.values.tolist())} for r in rows
            ]
        return 200, {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}

    def _write(self, path: Path, states: torch.Tensor, ids: torch.Tensor) -> None:
        """As vLLM does it: a locked .lock file, the reply, then the file, then the lock is let go."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)

        def later():
            time.sleep(0.01)
            save_file({"hidden_states": states.contiguous(), "token_ids": ids}, path)
            os.close(fd)

        threading.Thread(target=later).start()


def make_recipe(folder: Path, verifier: Path, **changes) -> Path:
    """A recipe file for the toy verifier; `changes` are {"section.key": value}."""
    recipe = {
        "verifier": {"model": str(verifier), "layers": LAYERS, "max_model_len": 64},
        "draft": {
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
            "rms_norm_eps": 1e-6, "vocab_size": 32,
        },
        "data": {"sources": [{"path": "none.jsonl"}], "max_prompt_tokens": 40},
        "answers": {"max_tokens": 12, "looping": "keep"},
        "states": {"proof_rows": 64},
        "train": {"tokens_per_step": 64, "epochs": 1, "lr": 1e-3},
        "evaluate": {"max_tokens": 8},
    }  # fmt: skip
    for key, value in changes.items():
        section, _, leaf = key.partition(".")
        recipe[section][leaf] = value
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def toy_row(number: int, split: str, response: list[int] | None = None, length: int | None = None) -> dict:
    """Row with a prompt of its own."""
    g = torch.Generator().manual_seed(1000 * list(ROWS).index(split) + number)
    n = length or 6 + number % 7
    ids = torch.randint(6, 64, (n,), generator=g).tolist()
    return {
        "id": f"{split}-{number}", "source": "toy", "domain": f"d{number % 2}", "prompt_ids": ids,
        "response_ids": response,
    }  # fmt: skip


def write_rows(run: Path, rows: dict[str, list[dict]]) -> None:
    """01_prepare of a run, as far as 03 reads it."""
    folder = run / "01_prepare"
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {}
    for split in ROWS:
        text = "".join(json.dumps(row) + "\n" for row in rows.get(split, []))
        (folder / f"{split}.jsonl").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        outputs[f"{split}.jsonl"] = {"count": len(rows.get(split, [])), "sha256": digest, "bytes": len(text)}
    (folder / "stage.json").write_text(json.dumps({"status": "done", "identity": {}, "outputs": outputs}))


def default_rows() -> dict[str, list[dict]]:
    return {split: [toy_row(i, split) for i in range(n)] for split, n in ROWS.items()}
