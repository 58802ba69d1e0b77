"""Four kinds of drafts served by vLLM: the tokens it accepts against those that the trained draft predicts.

    python tests/bench/served_matrix.py [--only TEXT] [--steps 150]

Cells: {Llama, Kimi-shaped verifier}, with and without norm flags, full and reduced vocabulary, with and
without a window, both ropes. Each draft is trained for a few hundred steps on the verifier's own greedy
answers, exported, passed through the gate, and served in float32 by vLLM (offline engine, 3 draft tokens,
greedy). Its counters are compared with a walk over the answers that it gave: the trained draft in PyTorch
on the verifier's states, as chain drafting runs. In float32 both agree but for near-ties and the last,
cut-off draft of an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

WINDOW = {"sliding_window": 8, "layer_types": ("sliding_attention",)}
CELLS = {
    "llama plain full-vocabulary": ("llama", {}, None),
    "llama norm_output reduced window yarn": ("llama", {"norm_output": True, "yarn": True, **WINDOW}, 0.5),
    "kimi norm_before_residual full-vocabulary yarn": (
        "kimi",
        {"norm_before_residual": True, "yarn": True},
        None,
    ),
    "kimi fc_norm reduced": ("kimi", {"fc_norm": True}, 0.25),
    "kimi norm_before_fc full-vocabulary window": ("kimi", {"norm_before_fc": True, **WINDOW}, None),
}
PROMPTS, ANSWER, MAX_GAP = 24, 48, 0.03


def prompts(which: str, verifier) -> list[list[int]]:
    """Prompts as token ids: random words for the Llama, chats of its language for the Kimi-shaped one."""
    import torch

    rng = torch.Generator().manual_seed(1)
    if which == "llama":
        return torch.randint(6, verifier.vocab_size, (2 * PROMPTS, 12), generator=rng).tolist()
    import kimi_tiny

    tokenizer = verifier.tokenizer()
    words = kimi_tiny.PROMPT_WORDS
    found = []
    for i in range(2 * PROMPTS):
        pick = torch.randint(0, len(words), (5,), generator=rng).tolist()
        chat = [
            {"role": "user", "content": " ".join(words[j] for j in pick) + ("?", ".", " {}", " 3")[i % 4]}
        ]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
        found.append(list(ids["input_ids"] if hasattr(ids, "keys") else ids))
    return found


def answers(model, asked: list[list[int]], end: set[int]) -> list[list[int]]:
    """Greedy answers of the verifier, at most ANSWER tokens, with their prompts in front."""
    import torch

    found = []
    with torch.no_grad():
        for ids in asked:
            out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=ANSWER, pad_token_id=0,
                                 eos_token_id=sorted(end))  # fmt: skip
            found.append(out[0].tolist())
    return found


def train(verifier, model, checkpoint: Path, texts: list[tuple[list[int], int]], steps: int) -> None:
    """A short training of a checkpoint, in place, with speculators' own forward."""
    import torch
    from safetensors.torch import save_file
    from speculators.losses import resolve_loss_config

    from eagle3.checkpoint import trainable
    from eagle3.parity import load_reference, verifier_states

    net = load_reference(checkpoint, verifier, "cpu")
    names = [n for n, _ in net.named_parameters() if not n.startswith(("embed", "verifier", "lm_head"))]
    for name in names:
        net.get_parameter(name).requires_grad_(True)
    assert names == list(trainable(net))
    optimizer = torch.optim.AdamW([net.get_parameter(n) for n in names], lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    loss_config = resolve_loss_config("kl_div", "eager")
    rows = []
    for ids, prompt in texts:
        ids = torch.tensor(ids)
        states = verifier_states(model, ids[:-1], [*verifier.layers]).flatten(1)
        with torch.no_grad():  # the final state before the norm: the head of the draft's target applies it
            captured = []
            hook = model.model.norm.register_forward_pre_hook(lambda _, x, to=captured: to.append(x[0][0]))
            model.model(ids[None, :-1])
            hook.remove()
        rows.append((ids, states, captured[0], prompt))
    rng = torch.Generator().manual_seed(0)
    for _ in range(steps):
        picked = [rows[i] for i in torch.randint(0, len(rows), (8,), generator=rng)]
        batch = {"hidden_states": [], "input_ids": [], "verifier_last_hidden_states": [], "loss_mask": []}
        documents, positions = [], []
        for d, (ids, states, final, prompt) in enumerate(picked):
            n = len(ids) - 2  # input x_j, state g_(j-1), target y_j for j = 1 .. n
            batch["hidden_states"].append(states[:n])
            batch["input_ids"].append(ids[1 : n + 1])
            batch["verifier_last_hidden_states"].append(final[1 : n + 1])
            batch["loss_mask"].append(torch.arange(1, n + 1) >= prompt)
            documents.append(torch.full((n,), d))
            positions.append(torch.arange(1, n + 1))
        packed = {k: torch.cat(v)[None] for k, v in batch.items()}
        _, loss, _ = net(
            **packed,
            document_ids=torch.cat(documents)[None],
            position_ids=torch.cat(positions)[None],
            ttt_steps=3,
            ttt_step_loss_decay=0.8,
            loss_config=loss_config,
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([net.get_parameter(n) for n in names], 1.0)
        optimizer.step(), schedule.step()
    save_file(
        {n: net.get_parameter(n).detach().contiguous() for n in names}, checkpoint / "model.safetensors"
    )


def vocabulary(verifier, texts, share: float | None, folder: Path) -> None:
    """Replace the checkpoint's random map by the most frequent answer tokens."""
    import torch

    from eagle3.vocab import FILE, choose, save_map

    counts = torch.zeros(verifier.vocab_size, dtype=torch.long)
    for ids, prompt in texts:
        counts += torch.bincount(torch.tensor(ids[prompt:]), minlength=verifier.vocab_size)
    size = "full" if share is None else int(verifier.vocab_size * share)
    save_map(folder / FILE, choose({"all": counts.numpy()}, size, 0.0))


SERVE = """
import json, sys
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
speculative = {"method": "eagle3", "model": job["draft"], "num_speculative_tokens": 3}
llm = LLM(model=job["model"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
          max_model_len=256, trust_remote_code=True, enable_prefix_caching=False, disable_log_stats=False,
          max_num_seqs=8,
          speculative_config=speculative, **job["extra"])
sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], detokenize=False,
                          stop_token_ids=job["end"])
out = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
found = {"answers": [list(o.outputs[0].token_ids) for o in out]}
for m in llm.get_metrics():
    if m.name.startswith("vllm:spec_decode"):
        found[m.name] = getattr(m, "values", None) or getattr(m, "value", None)
json.dump(found, open(sys.argv[2], "w"))
"""


def serve(verifier, folder: Path, asked: list[list[int]], end: set[int], tmp: Path) -> dict:
    """Answers and counters of a served draft, from an engine in a process of its own."""
    import torch

    extra = {}
    if (
        "text_config" in verifier.config
    ):  # an MLA verifier; its Llama draft starts on the CPU with our patch only
        extra = {"language_model_only": True}
        if not torch.cuda.is_available():
            extra["worker_extension_cls"] = "patches.vllm_cpu_mla_draft.WorkerExtension"
    job = {
        "model": str(verifier.path),
        "draft": str(folder),
        "prompts": asked,
        "tokens": ANSWER,
        "end": sorted(end),
        "extra": extra,
    }
    (tmp / "job.json").write_text(json.dumps(job))
    (tmp / "serve.py").write_text("if __name__ == '__main__':\n" + textwrap.indent(SERVE, "    "))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **settings}
    command = [sys.executable, *(str(tmp / n) for n in ("serve.py", "job.json", "out.json"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"serving failed:\n{done.stderr[-3000:]}")
    return json.loads((tmp / "out.json").read_text())


def walk(verifier, model, checkpoint: Path, texts: list[tuple[list[int], int]]) -> dict:
    """Drafts and accepted tokens per position of a chain over finished answers."""
    import torch

    from eagle3.parity import STEPS, Reference, Request, load_reference, verifier_states

    reference = Reference(load_reference(checkpoint, verifier, "cpu"))
    drafts, accepted = 0, [0] * STEPS
    for ids, prompt in texts:
        tokens = torch.tensor(ids)
        states = verifier_states(model, tokens[:-1], verifier.layers).flatten(1)
        slot = prompt - 1  # holds the first answer token and the state before it
        while slot + 2 < len(ids):  # a token is left to be drafted
            request = Request(tokens[1 : slot + 2], states[: slot + 1], 0)
            with torch.no_grad():
                logits, fed = reference.draft([request], None)
            last = int(reference.target_ids[logits[-1][0].argmax()])
            proposed = [*fed[:, 0].tolist(), last]
            right = 0
            for mine, true in zip(proposed, ids[slot + 2 :]):
                if mine != true:
                    break
                accepted[right] += 1
                right += 1
            drafts += 1
            slot += right + 1
    return {"drafts": drafts, "accepted": accepted}


def cell(name: str, paths: dict, models: dict, steps: int, base: Path) -> dict:
    """Train, export, gate, serve and predict one kind of draft."""
    import toy_drafts

    from eagle3 import flat
    from eagle3.parity import gate, load_verifier

    which, changes, share = CELLS[name]
    verifier = toy_drafts.open_toy(paths[which])
    model = models.setdefault(which, load_verifier(verifier))
    # The toy Llama never ends by itself; the other one has a word for it.
    end = {verifier.vocab_size - 254} if which == "kimi" else set()
    asked = prompts(which, verifier)
    texts = [(t, len(p)) for t, p in zip(answers(model, asked[PROMPTS:], end), asked[PROMPTS:], strict=True)]
    rope = toy_drafts.YARN if changes.get("yarn") else {"rope_type": "default", "rope_theta": 10000.0}
    size = verifier.vocab_size if share is None else int(verifier.vocab_size * share)
    kept = {k: v for k, v in changes.items() if k != "yarn"}
    draft = toy_drafts.toy_draft(verifier, draft_vocab_size=size, rope=rope, intermediate_size=256, **kept)
    where = base / name.replace(" ", "-")
    checkpoint = toy_drafts.toy_checkpoint(where / "checkpoint", verifier, draft)
    vocabulary(verifier, texts, share, checkpoint)
    train(verifier, model, checkpoint, texts, steps)
    read, tensors = flat.open_checkpoint(checkpoint, verifier)
    flat.export(read, flat.export_tensors(read, tensors, verifier, False), {"vllm": where / "vllm"})
    report = gate(where / "vllm", checkpoint, verifier)
    out = serve(verifier, where / "vllm", asked[:PROMPTS], end, where)
    served = [(p + a, len(p)) for p, a in zip(asked[:PROMPTS], out["answers"], strict=True)]
    predicted = walk(verifier, model, checkpoint, served)
    drafts, per_position = (
        out["vllm:spec_decode_num_drafts"],
        out["vllm:spec_decode_num_accepted_tokens_per_pos"],
    )
    rates = [a / drafts for a in per_position]
    expected = [a / predicted["drafts"] for a in predicted["accepted"]]
    return {
        "cell": name,
        "float32_error": report["float32"]["error"],
        "drafts": drafts,
        "predicted_drafts": predicted["drafts"],
        "accepted_per_position": [round(r, 3) for r in rates],
        "predicted_per_position": [round(r, 3) for r in expected],
        "gap": round(max(abs(a - b) for a, b in zip(rates, expected, strict=True)), 4),
        "length": round(1 + sum(rates), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    import conftest
    import torch

    from eagle3.config import load_recipe
    from eagle3.verifier import open_verifier

    torch.set_num_threads(1)  # toy matrices
    found, models, started = [], {}, time.time()
    with tempfile.TemporaryDirectory() as tmp, contextlib.redirect_stdout(sys.stderr):
        base = Path(tmp)
        paths = {
            "llama": conftest.make_toy_verifier(base / "llama", max_position_embeddings=262144, head_dim=32),
            "kimi": open_verifier(load_recipe("kimi-tiny")).path,
        }
        for name in CELLS:
            if args.only in name:
                found.append(cell(name, paths, models, args.steps, base))
                print(json.dumps(found[-1]), flush=True)
    worst = max(c["gap"] for c in found)
    print(json.dumps({"bench": "served_matrix", "cells": found, "worst_gap": worst, "allowed": MAX_GAP,
                      "seconds": round(time.time() - started)}))  # fmt: skip
    return 1 if worst > MAX_GAP else 0


if __name__ == "__main__":
    raise SystemExit(main())
