"""06: counters, figures, greedy comparison, reports, gates; the stage itself against a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT, load_stage

from eagle3 import bench, evalsets, measure, plots
from eagle3.contract import ConfigError, RunDir, StageError
from eagle3.eval_draft import check_draft, fingerprint
from eagle3.eval_report import Material, closure, expected_at_one, figures
from eagle3.measure import Answer, Counters, Pass
from eagle3.server import Server

K = 3
# As vLLM 0.32 wrote it (unrelated metrics cut), with a second engine as under data parallelism.
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="v"} 0.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="v"} 500.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="v"} 95.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="v"} 1.796055763020018e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="v"} 1500.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="v"} 285.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="v"} 420.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="v"} 100.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="v",position="0"} 240.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="v",position="1"} 110.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="v",position="2"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="v",position="0"} 46.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="v",position="1"} 34.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="v",position="2"} 20.0
"""


def answer(number: int, runs=None, tokens=None, seconds=1.0, domain="chat", top=None) -> Answer:
    drafted = K * sum(runs) if runs else 0
    return Answer(f"p{number}", domain, tokens or list(range(20)), "stop", seconds, runs, drafted, top)


# --- counters and figures ---------------------------------------------------------------------------------


def test_counters_are_summed_over_engines_and_positions_stay_in_order():
    assert measure.parse_counters(METRICS) == Counters(595, 1785, 520, (286, 144, 90))


def test_a_server_without_a_draft_exports_no_counters():
    plain = "\n".join(line for line in METRICS.splitlines() if "spec_decode" not in line)
    assert measure.parse_counters(plain + "\n") is None


def test_differences_of_counters_give_the_runs_of_accepted_tokens():
    before, after = Counters(10, 30, 7, (5, 2, 0)), Counters(14, 42, 13, (8, 4, 1))
    # Four new steps: of the three that accepted anything, two went on, one of them to the end.
    assert (after - before).runs() == [1, 1, 1, 1]


def test_acceptance_counts_steps_tokens_and_positions():
    got = measure.acceptance([answer(0, [1, 0, 2, 1]), answer(1, [3, 1, 0, 0]), answer(2, None)], K)
    assert (got["drafts"], got["accepted_tokens"], got["draft_tokens"]) == (8, 8, 24)
    assert got["accepted_per_position"] == [4, 3, 1]
    assert got["acceptance_length"] == 2.0
    low, high = got["acceptance_length_ci95"]
    assert low == pytest.approx(1.25) and high == pytest.approx(2.75)  # one prompt or the other, alone


def test_without_drafts_the_acceptance_length_is_null_not_one():
    got = measure.acceptance([answer(0, [0, 0, 0, 0]), answer(1, None)], K)
    assert got["acceptance_length"] is None and got["accepted_per_position"] is None


def test_intervals_are_repeatable_and_shrink_with_more_prompts():
    rng = random.Random(0)
    many = [answer(i, [rng.randrange(9), rng.randrange(9), rng.randrange(9), 1]) for i in range(100)]
    few = measure.acceptance(many[:10], K)["acceptance_length_ci95"]
    all_ = measure.acceptance(many, K)["acceptance_length_ci95"]
    assert all_ == measure.acceptance(many, K)["acceptance_length_ci95"]
    assert all_[1] - all_[0] < 0.6 * (few[1] - few[0])
    assert measure.acceptance(many[:1], K)["acceptance_length_ci95"] is None


def test_acceptance_of_shorter_drafts_follows_from_the_longest():
    rng = random.Random(1)
    runs = [rng.choices(range(K + 1), (50, 24, 11, 15))[0] for _ in range(5000)]
    got = measure.acceptance([answer(0, [runs.count(r) for r in range(K + 1)])], K)
    derived = measure.shorter_lengths(got["acceptance_rate_per_position"])
    for k in range(1, K + 1):
        assert derived[k - 1] == pytest.approx(1 + sum(min(r, k) for r in runs) / len(runs))


def test_expected_speedup_is_the_measured_one_at_the_measured_length():
    # field-notes.md: 58.8 -> 77.4 tok/s at 3 draft tokens; 1.34x was then measured at 2.
    expected = measure.expected_speedups(58.8, 77.4, [0.48, 0.24, 0.15])
    assert expected[2] == pytest.approx(77.4 / 58.8)
    assert expected[1] == pytest.approx(1.34, abs=0.015)


def test_speed_is_the_median_repeat_and_its_interval_contains_it():
    rng = random.Random(2)

    def repeat(rate: float) -> Pass:
        answers = [answer(i, tokens=[0] * 50, seconds=50 / rate * rng.uniform(0.9, 1.1)) for i in range(20)]
        return Pass(answers, sum(a.seconds for a in answers))

    plain, drafted = [repeat(r) for r in (50, 50, 5)], [repeat(r) for r in (60, 60, 600)]
    got = measure.speed(plain, drafted, 1)
    assert got["plain_tokens_per_s"] == pytest.approx(50, rel=0.05)
    assert got["speedup"] == pytest.approx(got["draft_tokens_per_s"] / got["plain_tokens_per_s"])
    low, high = got["speedup_ci95"]
    assert low < got["speedup"] < high and low > 1.05 and high < 1.35


def test_timed_prompts_come_from_all_domains():
    rows = [{"id": str(i), "domain": "chat" if i < 90 else "code"} for i in range(100)]
    chosen = measure.balanced(rows, 8)
    assert [r["domain"] for r in chosen] == ["chat", "code"] * 4
    assert len(measure.balanced(rows, None)) == 100


@pytest.mark.parametrize(
    ("other", "likely", "kind", "gap"),
    [
        ([1, 2, 3], None, "same", None),
        ([1, 5, 9], {2: -0.7, 5: -0.7 - measure.NEAR_TIE}, "near_tie", measure.NEAR_TIE),
        ([1, 5, 9], {2: -0.1, 5: -2.5}, "different", 2.4),
        ([1, 5, 9], {2: -0.1, 6: -0.2}, "different", None),  # the other token is not among the likely ones
        ([1, 2], {2: -0.1, 5: -0.2}, "different", None),  # ends early without an end token
    ],
)
def test_greedy_answers_are_compared_at_the_first_difference(other, likely, kind, gap):
    top = [{1: 0.0}, likely or {2: 0.0}, {3: 0.0}]
    got = measure.compare_greedy(answer(0, tokens=[1, 2, 3], top=top), answer(0, tokens=other))
    assert got["kind"] == kind and got["gap"] == (None if gap is None else pytest.approx(gap))


# --- drafts and prompt sets -------------------------------------------------------------------------------


def make_draft(folder: Path, d2t: bool = True, **config) -> Path:
    """A folder with the config of a draft of the toy verifier, and a weights file that is all header."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"hidden_size": 32, "vocab_size": 64, "draft_vocab_size": 16, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    names = ["fc.weight", *(["d2t"] if d2t else [])]
    header = json.dumps({n: {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for n in names}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


class ToyVerifier:
    hidden_size, vocab_size = 32, 64


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"max_position_embeddings": 100}, ("100", "256")),
        ({"d2t": False}, ("16 of 64", "d2t")),
        ({"hidden_size": 48}, ("48", "32")),
        ({"transformer_layer_config": {"max_position_embeddings": 8}}, ("8", "256")),
    ],
)
def test_drafts_that_would_be_served_badly_are_refused(tmp_path, made, words):
    """Fault cases 38 (limit below the server's, both named) and 33 (reduced vocabulary, no table)."""
    folder = make_draft(tmp_path / "draft", **made)
    with pytest.raises(StageError) as found:
        check_draft(folder, ToyVerifier, 256)
    assert all(word in str(found.value) for word in words)


def test_good_drafts_pass(tmp_path):
    """Fault 33: a full vocabulary needs no table. check_draft raises otherwise."""
    check_draft(make_draft(tmp_path / "reduced"), ToyVerifier, 256)
    check_draft(make_draft(tmp_path / "full", d2t=False, draft_vocab_size=None), ToyVerifier, 256)


def test_a_drafts_fingerprint_sees_config_and_weights(tmp_path):
    draft = make_draft(tmp_path / "draft")
    before = fingerprint(draft)
    assert fingerprint(make_draft(tmp_path / "elsewhere")) == before
    assert fingerprint(make_draft(tmp_path / "flag", norm_output=True)) != before
    assert fingerprint(make_draft(tmp_path / "weights", d2t=False)) != before


LAYOUT_ROWS = {
    "MT-Bench": {"question_id": 81, "category": "writing", "turns": ["w1 w2", "w3"]},
    "HumanEval": {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": ""},
    "C-Eval": {"id": 0, "question": "w1?", "A": "a", "B": "b", "C": "c", "D": "d", "answer": "A"},
    "BFCL": {
        "id": "simple_0",
        "question": [[{"role": "user", "content": "w7"}]],
        "function": [{"name": "f", "parameters": {"type": "dict", "properties": {"b": {"type": "float"}}}}],
    },
    "MATH500": {"problem": "w5", "solution": "s", "answer": "4", "subject": "Algebra", "level": 1},
    "GSM8K": {"question": "w4", "answer": "#### 72"},
}


@pytest.mark.parametrize("name", LAYOUT_ROWS)
def test_layouts_of_evaluation_sets_are_told_by_their_fields(name):
    messages, tools, domain, ids = evalsets._read(LAYOUT_ROWS[name])
    assert ids is None and messages[-1]["role"] == "user" and len(messages) == 1
    text = messages[0]["content"]
    asked = {"MT-Bench": "w1 w2", "HumanEval": "def f():", "C-Eval": "D. d", "BFCL": "w7", "MATH500": "w5"}
    assert asked.get(name, "w4") in text
    assert "72" not in text and "w3" not in text  # answers and later turns stay out
    assert domain == {"MT-Bench": "writing", "MATH500": "Algebra"}.get(name, "")
    if name == "BFCL":
        schema = tools[0]["function"]["parameters"]
        assert (schema["type"], schema["properties"]["b"]["type"]) == ("object", "number")


def test_local_files_are_rendered_and_their_bad_rows_counted(tmp_path, toy_verifier):
    from eagle3.verifier import Verifier

    config = json.loads((toy_verifier / "config.json").read_text())
    verifier = Verifier(toy_verifier, config, [2, 4, 5])
    rows = [
        {"question": "w1 w2", "answer": "x"},
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w9"}]},
        {"nothing": 1},
        {"question": "w3 " * 60, "answer": "x"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found, skipped = evalsets.load_sets([str(file)], RunDir(tmp_path), verifier, None, 10, 60, {})
    words = verifier.tokenizer().convert_ids_to_tokens
    assert [words(r["prompt_ids"]) for r in found] == [
        ["<user>", "w1", "w2", "<end>", "<assistant>"],
        ["<user>", "w1", "<end>", "<assistant>"],
    ]
    assert sorted(skipped.values()) == [1, 1] and any("60" in reason for reason in skipped)


def test_a_missing_set_lists_what_is_accepted(tmp_path):
    with pytest.raises(ConfigError) as found:
        evalsets.find_set("gsm9k", RunDir(tmp_path))
    assert all(name in str(found.value) for name in ("gsm9k", "heldout", *LAYOUT_ROWS))


# --- figures of a whole measurement -----------------------------------------------------------------------


def material(runs_by_domain: dict[str, list[int]], plain_rate=50.0, draft_rate=60.0, prompts=4) -> Material:
    """Everything measured of a draft, made up: per domain, every answer has the same runs."""
    rows = [(d, i) for d in runs_by_domain for i in range(prompts)]

    def asked(rate, draft):
        answers = [
            answer(n, runs_by_domain[d] if draft else None, [n, *range(30)], 31 / rate, d)
            for n, (d, _) in enumerate(rows)
        ]
        for a in answers:
            a.top = [{t: 0.0} for t in a.tokens]
        return Pass(answers, sum(a.seconds for a in answers))

    first = asked(draft_rate, True)
    m = Material("d", Path("d"), "f", K, {0.0: first}, asked(plain_rate, False))
    m.timed = {1: {"plain": [asked(plain_rate, False)], "draft": [asked(draft_rate, True)]}}
    first.counters = Counters(
        sum(sum(a.runs) for a in first.answers),
        sum(a.drafted for a in first.answers),
        sum(i * n for a in first.answers for i, n in enumerate(a.runs)),
        (0, 0, 0),
    )
    return m


def test_a_domain_in_which_the_draft_slows_serving_down_is_named():
    from eagle3.eval_report import warnings

    found = figures(material({"chat": [4, 3, 2, 4], "code": [17, 1, 0, 0]}))
    assert found["domains"]["code"]["slower"] is True and found["domains"]["chat"]["slower"] is False
    (line,) = [line for line in warnings(found, {}) if "domains" in line]
    assert "1 of 2" in line and "code (1.06 tokens a step" in line and "chat" not in line


def test_domains_add_up_to_the_whole():
    found = figures(material({"chat": [4, 3, 2, 4], "code": [17, 1, 0, 0]}))
    assert sum(d["drafts"] for d in found["domains"].values()) == found["drafts"]
    assert found["acceptance_length"] == 1 + sum(found["accepted_per_position"]) / found["drafts"]


def test_looping_answers_are_counted_and_kept_apart():
    m = material({"chat": [4, 3, 2, 4], "code": [4, 3, 2, 4]})
    for a in m.passes[0.0].answers[:2]:
        a.tokens, a.runs = [1, 2, 3] + [7, 8] * 40, [0, 0, 0, 21]
    found = figures(m)
    assert found["looping_answers"] == 2 and found["prompts"] == 6
    assert found["only_looping_answers"]["acceptance_length"] == 4.0
    assert found["acceptance_length"] < found["with_looping_answers"]["acceptance_length"] < 4.0


def test_counters_of_a_server_that_somebody_else_uses_are_noticed():
    from eagle3.eval_report import warnings

    m = material({"chat": [4, 3, 2, 4]})
    assert figures(m)["counters"]["agree_with_responses"] is True
    c = m.passes[0.0].counters
    m.passes[0.0].counters = Counters(c.drafts + 9, c.draft_tokens + 27, c.accepted + 4, c.per_position)
    assert any("counters" in line for line in warnings(figures(m), {}))


def test_a_shorter_draft_is_expected_to_win_when_late_positions_are_hardly_accepted():
    flat = expected_at_one(material({"chat": [2, 2, 2, 8]}, draft_rate=100.0))
    steep = expected_at_one(material({"chat": [9, 5, 0, 0]}))
    assert max(flat) == flat[2] and max(steep) == steep[0]


@pytest.mark.parametrize(("served", "passed"), [([10, 4, 2, 4], True), ([14, 4, 1, 1], False)])
def test_prediction_and_service_are_compared_position_by_position(served, passed):
    """Fault 43: a gap on the same prompts above the bound fails."""
    predicted = {"drafts": 200, "accepted_counts": [100, 60, 40]}
    m = material({"chat": served})
    stored = {a.id: a.tokens for a in m.passes[0.0].answers}
    close, why = closure(predicted, m, stored, 0.1)
    assert why is None and close["passed"] is passed
    assert close["gap_per_position"][0] == pytest.approx(sum(served[1:]) / sum(served) - 0.5)


def test_only_answers_as_stored_are_compared_where_the_prediction_is_known_by_prompt():
    m = material({"chat": [10, 4, 2, 4]})
    first, second = m.passes[0.0].answers[:2]
    first.runs = [20, 0, 0, 0]  # took another turn
    stored = {first.id: [9, 9, 9], second.id: [*second.tokens, 77]}  # a longer limit in 03 is no difference
    by_id = {key: {"drafts": 20, "accepted_counts": [10, 6, 4]} for key in (first.id, second.id)}
    close, _ = closure({"drafts": 40, "accepted_counts": [20, 12, 8], "by_id": by_id}, m, stored, 0.1)
    assert (close["prompts"], close["answers_otherwise"]) == (1, 1)
    assert close["gap_per_position"] == pytest.approx([0, 0, 0])


def test_no_prediction_is_said_and_not_taken_for_agreement():
    close, why = closure(None, material({"chat": [1, 1, 1, 1]}), {}, 0.1)
    assert close is None and "04_train" in why


# --- the stage against a stand-in for vLLM ----------------------------------------------------------------


class Stub:
    """A server that answers like vLLM: fixed answers, and with a draft, counters and counts per request.

    Attributes:
        per_request: whether responses carry counts, as since vLLM 0.32.
        exports: whether /metrics has the counters.
        die_after: requests after which it closes connections without an answer.
    """

    def __init__(self, runs: list[int] | None, per_request=True, exports=True, die_after=None, delay=0.0):
        self.runs, self.per_request, self.exports = runs, per_request, exports
        self.die_after, self.delay, self.asked, self.bodies = die_after, delay, 0, []
        self.totals = [0] * (K + 1)
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.reply(stub.metrics().encode(), "text/plain")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub.lock:
                    stub.asked += 1
                    dead = stub.die_after is not None and stub.asked > stub.die_after
                if dead:
                    self.close_connection = True
                    return
                if stub.delay:
                    threading.Event().wait(stub.delay)
                self.reply(json.dumps(stub.complete(body)).encode(), "application/json")

            def reply(self, content: bytes, kind: str):
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def complete(self, body: dict) -> dict:
        prompt, n = body["prompt"], body["max_tokens"]
        tokens = [(prompt[0] * 7 + i * i) % 61 for i in range(n)]
        choice = {"token_ids": tokens, "finish_reason": "length", "text": "", "logprobs": None}
        if body.get("logprobs"):
            likely = [{f"token_id:{t}": -0.1, "token_id:63": -4.0} for t in tokens]
            choice["logprobs"] = {"top_logprobs": likely}
        reply = {"choices": [choice], "metrics": None}
        with self.lock:
            self.bodies.append(body)
            if self.runs:
                self.totals = [a + b for a, b in zip(self.totals, self.runs)]
                if self.per_request:
                    drafted = K * sum(self.runs)
                    counted = {"acceptance_histogram": self.runs, "num_draft_tokens": drafted}
                    reply["metrics"] = {"speculative_decoding": counted}
        return reply

    def metrics(self) -> str:
        if not (self.runs and self.exports):
            return "# TYPE up gauge\nup 1.0\n"
        with self.lock:
            drafts, reached = sum(self.totals), [sum(self.totals[i + 1 :]) for i in range(K)]
        lines = []
        for name, value in (
            ("drafts", drafts),
            ("draft_tokens", K * drafts),
            ("accepted_tokens", sum(reached)),
        ):
            lines += [f"# TYPE vllm:spec_decode_num_{name}_total counter"]
            lines += [f"vllm:spec_decode_num_{name}_total 0.0".replace("0.0", f"{value}.0")]
        lines += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter"]
        for i, n in enumerate(reached):
            lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}.0']
        return "\n".join(lines) + "\n"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A run directory after 05 with a stand-in verifier folder, and servers that are stubs.

    `world.run(*args)` runs 06 in this process and returns its exit status.
    """
    return World(tmp_path, monkeypatch)


class World:
    def __init__(self, folder: Path, monkeypatch):
        self.verifier = folder / "verifier"
        self.verifier.mkdir()
        config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 64}
        (self.verifier / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        (self.verifier / "model.safetensors").write_bytes(b"")
        self.path = folder / "run"
        (self.path / "01_prepare").mkdir(parents=True)
        rows = [
            {"id": f"h{i}", "source": "s", "domain": ("chat", "code")[i % 2], "prompt_ids": [i + 1, 2]}
            for i in range(8)
        ]
        (self.path / "01_prepare" / "heldout.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        make_draft(self.path / "05_export" / "vllm")
        self.exported("x")
        self.stubs = {"plain": Stub(None), "draft": Stub([10, 5, 3, 2])}
        self.up, self.most, self.started, self.stored = 0, 0, [], {}
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(bench, "verifier_server", self.server)
        self.draw = plots._save
        monkeypatch.setattr(plots, "_save", lambda figure, path: path.write_bytes(b"not drawn"))  # 3 s a run
        monkeypatch.setattr(bench, "WORTH_A_LOAD", 1e9)  # stubs take no time, so their speed is noise
        for key in ("RECIPE", "RECIPE_SET", "SAMPLES", "RUN_DIR"):
            monkeypatch.delenv(key, raising=False)
        monkeypatch.setenv("PROFILE", "cpu-smoke")
        self.settings = [
            f"verifier.model={self.verifier}", "verifier.expected={}", "verifier.layers=[2, 4, 5]",
            "verifier.max_model_len=200", "data.max_prompt_tokens=60", "evaluate.max_tokens=24",
            "evaluate.timed_prompts=4", "evaluate.repeats=2", "evaluate.concurrency=[1, 2]",
        ]  # fmt: skip

    def exported(self, content: str) -> None:
        """As if 05 had written this content."""
        size = (self.path / "05_export" / "vllm" / "model.safetensors").stat().st_size
        outputs = {"vllm/model.safetensors": {"sha256": content, "bytes": size}}
        record = {"stage": "05_export", "status": "done", "identity": {}, "outputs": outputs}
        (self.path / "05_export" / "stage.json").write_text(json.dumps(record))

    @contextmanager
    def server(self, mode, stage, verifier, draft=None, port=None, name="verifier", wait=True):
        stub = self.stubs["draft" if draft else "plain"]
        self.started.append((name, port, stage.recipe.evaluate.num_speculative_tokens))
        self.up += 1
        self.most = max(self.most, self.up)
        try:
            yield Server(stub.url, "v", os.getpid(), self.path / f"{name}.log")
        finally:
            self.up -= 1

    def run(self, *args: str) -> int:
        sets = [x for s in self.settings for x in ("--set", s)]
        command = ["--run-dir", str(self.path), "--recipe", "smollm2-135m", *sets, *args]
        stage = load_stage("06_evaluate.py")
        stage.stored_heldout = lambda _: self.stored
        return stage.main(command)

    @property
    def folder(self) -> Path:
        return self.path / "06_evaluate"

    @property
    def report(self) -> dict:
        return json.loads((self.folder / "report.json").read_text())


# DESIGN.md, section 8: names that scripts of others rely on.
STABLE = (
    "acceptance_length", "acceptance_length_ci95", "accepted_per_position", "drafts", "draft_tokens",
    "concurrency", "domains", "greedy_identical", "looping_answers", "num_speculative_tokens", "prompts",
    "verifier", "draft",
)  # fmt: skip


def test_the_report_has_every_stable_name_and_figures_that_agree(world):
    assert world.run() == 0
    r = world.report
    assert all(r[name] is not None for name in STABLE)
    assert r["acceptance_length"] == pytest.approx(1 + (5 + 6 + 6) / 20)
    assert r["accepted_per_position"] == [8 * 10, 8 * 5, 8 * 2] and r["drafts"] == 8 * 20
    assert set(r["concurrency"]) == {"1", "2"}
    for level in r["concurrency"].values():
        assert level["speedup"] == pytest.approx(level["draft_tokens_per_s"] / level["plain_tokens_per_s"])
        assert level["speedup_ci95"][0] <= level["speedup"] <= level["speedup_ci95"][1]
    assert set(r["domains"]) == {"chat", "code"}
    assert all({"acceptance_length", "drafts"} <= set(d) for d in r["domains"].values())
    assert {k: r["greedy_identical"][k] for k in ("same", "near_tie", "different")} == {
        "same": 8, "near_tie": 0, "different": 0,
    }  # fmt: skip
    assert r["counters"]["agree_with_responses"] is True
    assert r["loads"][:2] == ["without a draft", "with 05_export/vllm"]
    record = json.loads((world.folder / "stage.json").read_text())
    assert record["status"] == "done" and set(record["outputs"]) == {
        "report.json", "report.md", "acceptance.png", "speed.png",
    }  # fmt: skip
    text = (world.folder / "report.md").read_text()
    assert "1 + accepted tokens / drafts" in text and r["serve_command"] in text


def test_the_last_lines_tell_the_result_and_how_to_serve_it(world, capsys):
    assert world.run() == 0
    lines = capsys.readouterr().err.splitlines()[-10:]
    said = "\n".join(lines)
    assert "acceptance length 1.85" in said and "speed-up" in said
    assert str(world.path / "05_export/vllm") in said
    assert "-m vllm.entrypoints.openai.api_server --model" in lines[-1] and '"method": "eagle3"' in lines[-1]
    assert "--max-model-len 200" in lines[-1] and "--host 127.0.0.1" in lines[-1]
    assert "served-model-name" not in lines[-1] and '"num_speculative_tokens": 3' in lines[-1]


def test_warm_up_and_repeats_reach_both_servers_alike_and_miss_the_prefix_cache(world):
    assert world.run() == 0
    timed = [[b for b in world.stubs[name].bodies if "cache_salt" in b] for name in ("plain", "draft")]
    warm = [[b for b in bodies if b["max_tokens"] == bench.WARM_UP_TOKENS] for bodies in timed]
    assert len(warm[0]) == len(warm[1]) == 2
    for bodies, warmed in zip(timed, warm):
        assert len(bodies) - len(warmed) == 2 * 2 * 4  # concurrencies x repeats x prompts
        assert len({b["cache_salt"] for b in bodies}) == len(bodies)


def test_a_finished_measurement_is_skipped_without_a_server(world):
    assert world.run("--check") == 1
    assert world.run() == 0
    world.started.clear()
    assert world.run() == 0 and world.run("--check") == 0 and world.started == []


def test_another_draft_is_refused_until_forced(world, capsys):
    assert world.run() == 0
    world.exported("y")
    assert world.run() == 2 and "drafts" in capsys.readouterr().err
    assert world.run("--force") == 0


def test_no_export_or_a_changed_one_names_the_stage_to_run(world, capsys):
    weights = world.path / "05_export" / "vllm" / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"x")
    assert world.run() == 1
    said = capsys.readouterr().err
    assert "model.safetensors" in said and "05_convert.py" in said
    (world.path / "05_export" / "stage.json").unlink()
    assert world.run() == 1 and "05_convert.py" in capsys.readouterr().err
    assert world.started == []


def test_missing_counters_are_null_with_a_reason(world):
    world.stubs["draft"] = Stub([10, 5, 3, 2], per_request=False, exports=False)
    assert world.run() == 0
    r = world.report
    assert r["acceptance_length"] is None and r["acceptance_length_ci95"] is None
    assert r["accepted_per_position"] is None and r["domains"]["chat"]["acceptance_length"] is None
    assert "counters" in r["why"]["acceptance_length"]
    assert r["concurrency"]["1"]["speedup"] > 0  # speed needs no counters


def test_a_server_that_counts_only_in_total_gives_the_same_figures(world):
    assert world.run() == 0
    want = world.report
    world.stubs["draft"] = Stub([10, 5, 3, 2], per_request=False)
    assert world.run("--force") == 0
    got = world.report
    for name in ("acceptance_length", "accepted_per_position", "drafts", "draft_tokens"):
        assert got[name] == want[name]
    assert got["domains"]["code"]["drafts"] == want["domains"]["code"]["drafts"]


def test_a_server_that_stops_answering_fails_the_stage_and_names_its_log(world, capsys):
    world.stubs["draft"] = Stub([10, 5, 3, 2], die_after=5)
    assert world.run() == 1
    said = capsys.readouterr().err
    assert "does not answer" in said and "verifier-draft.log" in said
    assert not (world.folder / "stage.json").exists() and world.up == 0


def test_gates_fail_after_the_report_and_again_on_a_rerun(world, capsys):
    assert world.run("--min-acceptance", "1.9") == 1
    assert "1.850 is below --min-acceptance 1.9" in capsys.readouterr().err
    assert world.report["acceptance_length"] == 1.85
    world.started.clear()
    assert world.run("--min-acceptance", "1.9") == 1 and world.run("--min-acceptance", "1.8") == 0
    assert world.started == []


def test_a_draft_served_unlike_its_training_fails_with_a_checklist(world, capsys):
    """Fault 43."""
    assert world.run() == 0
    assert world.report["closure"] is None and "04_train" in world.report["why"]["closure"]
    world.stored = {f"h{i}": ([i + 1, 2], [(i + 1) * 7 % 61]) for i in range(8)}
    (world.path / "04_train").mkdir()
    record = world.path / "04_train" / "stage.json"
    record.write_text(json.dumps({"heldout": {"drafts": 100, "accepted_counts": [75, 30, 12]}}))
    assert world.run("--force") == 1
    said = capsys.readouterr().err
    assert "0.750 / 0.500" in said and "eagle_aux_hidden_state_layer_ids" in said
    assert world.report["closure"]["passed"] is False and world.report["acceptance_length"] == 1.85
    assert "exceeds 0.1" in (world.folder / "report.md").read_text()
    assert world.run("--set", "evaluate.max_gap=0.3") == 0  # a gate is no part of what was measured


def test_a_baseline_catches_a_regression_and_refuses_other_prompts(world, capsys, tmp_path):
    assert world.run() == 0
    better = tmp_path / "better.json"
    better.write_text(json.dumps({**world.report, "acceptance_length": 2.5}))
    same = tmp_path / "same.json"
    same.write_text(json.dumps({**world.report, "concurrency": None}))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**world.report, "sets": {"heldout": "else"}}))
    assert world.run("--baseline", str(same)) == 0
    assert world.run("--baseline", str(better)) == 1
    assert "baseline's 2.500" in capsys.readouterr().err
    assert world.run("--baseline", str(other)) == 2
    assert world.run("--baseline", str(tmp_path / "none.json")) == 2


def test_several_drafts_stand_in_one_table(world, tmp_path):
    theirs = make_draft(tmp_path / "theirs", norm_output=True)
    own = world.path / "05_export" / "vllm"
    assert world.run("--draft", str(own), "--draft", str(theirs)) == 0
    r = world.report
    assert [d["draft"] for d in r["compared"]] == ["05_export/vllm", str(theirs)]
    assert r["draft"] == "05_export/vllm" and len(r["loads"]) >= 3
    table = (world.folder / "report.md").read_text().split("## All drafts")[1]
    assert str(theirs) in table


def test_gpu_profiles_hold_one_server_at_a_time_and_say_so(world):
    world.monkeypatch.setenv("PROFILE", "gpu-x1")
    assert world.run() == 0
    assert world.most == 1 and len({port for _, port, _ in world.started}) == 1
    r = world.report
    assert r["timing"]["alternating"] is False and r["concurrency"]["1"]["speedup"] > 0
    assert "not alternating" in (world.folder / "report.md").read_text()


def test_a_promising_shorter_draft_is_timed_with_one_more_load(world):
    # Nothing is accepted behind position 0, and a step with a draft takes clearly longer.
    world.monkeypatch.setattr(bench, "WORTH_A_LOAD", 1.03)
    world.stubs = {"plain": Stub(None, delay=0.06), "draft": Stub([10, 9, 1, 0], delay=0.06)}
    assert world.run() == 0
    assert world.started[-1][0] == "verifier-short" and world.started[-1][2] == 1
    rows = world.report["lengths"]
    assert rows[0]["speedup"] is not None and rows[1]["speedup"] is None and rows[1]["why"]
    assert len(world.report["loads"]) == 3


def test_no_load_is_spent_on_a_draft_that_slows_serving_down_at_any_length(world):
    world.monkeypatch.setattr(bench, "WORTH_A_LOAD", 1.03)
    world.stubs = {"plain": Stub(None, delay=0.02), "draft": Stub([20, 0, 0, 0], delay=0.06)}
    assert world.run() == 0
    assert len(world.started) == 2 and any("slows serving down" in w for w in world.report["warnings"])


def test_without_one_request_in_flight_speed_by_domain_and_length_is_null_with_a_reason(world):
    world.settings += ["evaluate.concurrency=[2]"]
    assert world.run() == 0
    r = world.report
    assert r["domains"]["chat"]["speedup"] is None and r["lengths"][2]["speedup"] is None
    assert {"lengths.speedup", "domains.speedup"} <= set(r["why"])


def test_temperatures_above_zero_send_the_recipes_sampling(world):
    world.settings += ["evaluate.temperatures=[0.0, 0.7]", "answers.top_p=0.9"]
    assert world.run() == 0
    hot = [b for b in world.stubs["draft"].bodies if b["temperature"] == 0.7]
    assert len(hot) == 8 and all(b["top_p"] == 0.9 for b in hot) and len({b["seed"] for b in hot}) == 8
    assert set(world.report["temperatures"]) == {"0", "0.7"}


def test_without_temperature_zero_greedy_equality_is_not_measured(world):
    world.settings += ["evaluate.temperatures=[0.7]"]
    assert world.run() == 0
    assert world.report["greedy_identical"] is None and "greedy_identical" in world.report["why"]


def test_an_interrupt_leaves_no_server_and_no_done_record(world, tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import os, signal, sys, threading\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import pytest\nfrom pathlib import Path\nfrom test_evaluate import Stub, World\n"
        "world = World(Path(sys.argv[1]), pytest.MonkeyPatch())\n"
        "world.stubs = {'plain': Stub(None, delay=0.3), 'draft': Stub([1, 1, 1, 1], delay=0.3)}\n"
        "world.settings += ['evaluate.repeats=20']\n"
        "threading.Timer(3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()\n"
        "code = world.run()\n"
        "print('up', world.up, flush=True)\n"
        "sys.exit(code)\n"
    )
    (tmp_path / "other").mkdir()
    command = [sys.executable, str(driver), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 143, done.stderr
    assert "up 0" in done.stdout and not (tmp_path / "other/run/06_evaluate/stage.json").exists()


@pytest.mark.parametrize("exports", [True, False])
def test_plots_are_drawn_for_whole_and_for_missing_figures(world, exports):
    world.monkeypatch.setattr(plots, "_save", world.draw)
    world.stubs["draft"] = Stub([10, 5, 3, 2], per_request=exports, exports=exports)
    assert world.run() == 0
    for name in ("acceptance.png", "speed.png"):
        assert (world.folder / name).read_bytes().startswith(b"\x89PNG")


# --- the real run of the tests ----------------------------------------------------------------------------


def test_the_real_run_is_measured_whole_and_agrees_with_its_training(e2e_run):
    r = json.loads((e2e_run.evaluate / "report.json").read_text())
    asked = r["with_looping_answers"]["prompts"]
    assert r["counters"]["agree_with_responses"] is True
    assert r["prompts"] + r["looping_answers"] == asked
    assert sum(r["greedy_identical"][k] for k in ("same", "near_tie", "different")) == asked
    assert 1 < r["acceptance_length"] <= 1 + r["num_speculative_tokens"]
    assert all(row["plain_tokens_per_s"] > 1 and row["speedup"] > 0 for row in r["concurrency"].values())
    assert r["closure"]["passed"] is True and r["closure"]["answers_as_stored"] > 0


def test_the_real_run_is_skipped_quickly(e2e_run):
    from conftest import E2E_SAMPLES, E2E_SET, run_stage_cmd

    env = {
        "RUN_DIR": str(e2e_run.path),
        "SAMPLES": E2E_SAMPLES,
        "RECIPE_SET": E2E_SET,
        "PROFILE": "cpu-smoke",
    }
    done = run_stage_cmd("06_evaluate.py", "--check", env=env, timeout=240)
    assert done.returncode == 0, done.stderr
