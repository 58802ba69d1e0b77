"""What 06 measures on a running server, and the arithmetic behind every figure of its report.

Acceptance. One verify step checks K draft tokens, accepts the r <= K of them before the first wrong one, and
adds one token of the verifier's own. So

    acceptance length = 1 + accepted tokens / drafts

with both counted by vLLM. Its counters run from the server's start: only differences mean anything. The
response of a request carries the same counts for that request (how many steps accepted 0, 1, ... K tokens),
which tells prompts apart at any concurrency; the sums are checked against the counters.

Shorter drafts. A chain draft of k < K tokens is the beginning of the one of K, so it accepts min(r, k):

    acceptance length at k = 1 + (accepted at position 0 + ... + accepted at position k-1) / drafts

Temperature. At 0 a draft token is accepted if it is the verifier's most likely one: the expected acceptance
is top-1 agreement. Above 0 the served draft is still greedy, and vLLM accepts its token x with the
probability p(x) that the verifier gives it (after temperature, top-p and top-k): the expected acceptance is
the mean of p(draft's top token), not top-1 agreement.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from eagle3.contract import StageError

if TYPE_CHECKING:
    import numpy as np

    from eagle3.server import Server

COUNTERS = "vllm:spec_decode_num_"
# A first difference where the plain server's two tokens lie this close (in nats) is a tie that batching
# decides: bf16 logits of 16 to 32 are 0.125 apart, and other batches change sums by a few of these steps.
NEAR_TIE = 0.5
TOP_LOGPROBS = 5
RESAMPLES = 2000
REQUEST_TIMEOUT = 900.0


# --- counters -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counters:
    """vLLM's counters of speculative decoding: since its start, or a difference of two readings."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.drafts - other.drafts,
            self.draft_tokens - other.draft_tokens,
            self.accepted - other.accepted,
            tuple(a - b for a, b in zip(self.per_position, other.per_position, strict=True)),
        )

    def runs(self) -> list[int]:
        """Steps that accepted exactly 0, 1, ... K tokens (the histogram behind the per-position counts)."""
        reached = [self.drafts, *self.per_position, 0]
        return [a - b for a, b in itertools.pairwise(reached)]


def parse_counters(text: str) -> Counters | None:
    """Counters out of the text of /metrics, summed over engines; None if the server exports none."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(COUNTERS)
            if name == "accepted_tokens_per_pos_total":
                at = int(sample.labels["position"])
                positions[at] = positions.get(at, 0) + int(sample.value)
            elif name in ("drafts_total", "draft_tokens_total", "accepted_tokens_total"):
                totals[name] = totals.get(name, 0) + int(sample.value)
    if len(totals) < 3 or not positions:
        return None
    per_position = tuple(positions[i] for i in sorted(positions))
    return Counters(
        totals["drafts_total"], totals["draft_tokens_total"], totals["accepted_tokens_total"], per_position
    )


def read_counters(server: Server) -> Counters | None:
    """Counters of a server now; None if it exports none."""
    import requests

    try:
        answer = requests.get(f"{server.url}/metrics", timeout=60)
    except requests.RequestException as err:
        raise lost(server, err) from None
    return parse_counters(answer.text) if answer.status_code == 200 else None


def settled_counters(
    server: Server, drafts: int | None = None, since: Counters | None = None
) -> Counters | None:
    """Counters once the last step is booked, which happens a moment after the last response.

    Args:
        drafts: steps that the responses since `since` add up to; None: wait until the counters stand still.
    """
    last = read_counters(server)
    for _ in range(20):
        if last is None or (drafts is not None and (last - since).drafts == drafts):
            break
        time.sleep(0.1)
        now = read_counters(server)
        if drafts is None and now == last:
            break
        last = now
    return last


# --- requests -----------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """One answered prompt.

    Attributes:
        tokens: answer tokens, the closing one included.
        seconds: from request to response.
        runs: verify steps that accepted 0, 1, ... K draft tokens; None without a draft, or if nobody counted.
        drafted: draft tokens of all steps.
        top: per answer token the most likely tokens (token -> log-probability), where asked for.
    """

    id: str
    domain: str
    tokens: list[int]
    finish: str
    seconds: float
    runs: list[int] | None = None
    drafted: int = 0
    top: list[dict[int, float]] | None = None


@dataclass
class Ask:
    """How prompts are asked."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    salt: str | None = field(default=None)


@dataclass
class Pass:
    """All prompts asked once."""

    answers: list[Answer]
    seconds: float
    counters: Counters | None = None

    @property
    def tokens(self) -> int:
        return sum(len(a.tokens) for a in self.answers)

    @property
    def rate(self) -> float:
        """Output tokens per second of wall time, prompt processing included."""
        return self.tokens / self.seconds


def lost(server: Server, err: Exception) -> StageError:
    """Why a server does not answer: it died (with its last log lines), or something else is wrong."""
    from eagle3.server import tail

    time.sleep(0.5)  # a dying process needs a moment to be gone
    if server.alive:
        return StageError(f"{server.url} does not answer ({type(err).__name__}); its log is {server.log}")
    return StageError(f"the server at {server.url} died; last lines of {server.log}:\n{tail(server.log)}")


def request(server: Server, session, row: dict, ask: Ask) -> Answer:
    """One completion of a tokenized prompt.

    Raises:
        StageError: the server is gone, or refuses the request; its own words are passed on.
    """
    import requests

    body = {"model": server.model, "prompt": row["prompt_ids"], "max_tokens": ask.max_tokens}
    body |= {"temperature": ask.temperature, "return_token_ids": True, "seed": ask.seed}
    if ask.temperature > 0:
        body |= {"top_p": ask.top_p, "top_k": ask.top_k}
    if ask.logprobs:
        body |= {"logprobs": ask.logprobs, "return_tokens_as_token_ids": True}
    if ask.salt:
        # Repeats must compute the prompt again, as for a new user: no hit in the prefix cache.
        body["cache_salt"] = f"{ask.salt}-{row['id']}"
    began = time.perf_counter()
    try:
        response = session.post(f"{server.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT)
        seconds = time.perf_counter() - began
        if response.status_code != 200:
            words = " ".join(response.text.split())[:300]
            raise StageError(f"{server.url} refused prompt {row['id']} ({response.status_code}): {words}")
        reply = response.json()
        choice = reply["choices"][0]
        counted = (reply.get("metrics") or {}).get("speculative_decoding") or {}
        tokens, top = choice["token_ids"], None
        if ask.logprobs:
            top = [
                {int(token.removeprefix("token_id:")): value for token, value in (at or {}).items()}
                for at in choice["logprobs"]["top_logprobs"]
            ]
    except requests.RequestException as err:
        raise lost(server, err) from None
    except (ValueError, KeyError, TypeError, IndexError) as err:
        raise StageError(
            f"{server.url} does not answer as vLLM's completions endpoint ({type(err).__name__}: {err})"
        ) from None
    runs, drafted = counted.get("acceptance_histogram"), counted.get("num_draft_tokens", 0)
    return Answer(row["id"], row["domain"], tokens, choice["finish_reason"], seconds, runs, drafted, top)


def ask_all(
    server: Server, rows: list[dict], ask: Ask, concurrency: int, done: Callable[[], None] = lambda: None
) -> Pass:
    """Ask every prompt once, `concurrency` in flight; answers come back in the order of `rows`.

    Args:
        done: called after every answer (from several threads, one at a time).
    """
    import requests

    session = requests.Session()
    session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=concurrency))
    lock = threading.Lock()

    def one(row: dict) -> Answer:
        # Seeds differ per prompt, so that equal prompts don't draw equal answers.
        found = request(server, session, row, replace(ask, seed=ask.seed + row["number"]))
        with lock:
            done()
        return found

    pool = ThreadPoolExecutor(concurrency)
    began = time.perf_counter()
    try:
        answers = [future.result() for future in [pool.submit(one, row) for row in rows]]
        return Pass(answers, time.perf_counter() - began)
    finally:
        # On an error or a signal requests in flight are left behind: stopping the server ends them.
        pool.shutdown(wait=False, cancel_futures=True)


def ask_counted(
    server: Server, rows: list[dict], ask: Ask, concurrency: int, done: Callable[[], None] = lambda: None
) -> Pass:
    """`ask_all` on a server with a draft, with the counters' difference and per-prompt counts.

    A server that does not report counts per request (vLLM before 0.32, or without
    --per-request-spec-decode-metrics) is asked one prompt at a time, with its counters read in between.
    """
    before = read_counters(server)
    first = ask_all(server, rows[:1], ask, 1, done)
    if first.answers[0].runs is None and before is not None:
        return _ask_one_by_one(server, rows, ask, done)
    rest = ask_all(server, rows[1:], ask, concurrency, done)
    answers = first.answers + rest.answers
    counters = None
    if before is not None:
        steps = sum(sum(a.runs) for a in answers if a.runs)
        counters = settled_counters(server, steps, before) - before
    return Pass(answers, first.seconds + rest.seconds, counters)


def _ask_one_by_one(server: Server, rows: list[dict], ask: Ask, done: Callable[[], None]) -> Pass:
    """One prompt at a time, each with its own difference of the server's counters."""
    start = last = settled_counters(server)
    answers, seconds = [], 0.0
    for row in rows:
        one = ask_all(server, [row], ask, 1, done)
        now = settled_counters(server)
        step, last = now - last, now
        answers.append(replace(one.answers[0], runs=step.runs(), drafted=step.draft_tokens))
        seconds += one.seconds
    return Pass(answers, seconds, last - start)


# --- acceptance ---------------------------------------------------------------------------------------------


def acceptance(answers: Iterable[Answer], positions: int) -> dict:
    """Drafts, draft tokens and accepted tokens of some answers.

    Args:
        positions: K, draft tokens of a step.

    Returns:
        acceptance_length (None if no draft was made), acceptance_length_ci95, accepted_per_position (counts),
        acceptance_rate_per_position (each divided by drafts), drafts, draft_tokens, accepted_tokens, prompts.
    """
    import numpy as np

    answers = list(answers)
    runs = np.array([a.runs for a in answers if a.runs], dtype=np.int64).reshape(-1, positions + 1)
    drafts, accepted = runs.sum(1), runs @ np.arange(positions + 1)
    reached = [int(runs[:, i + 1 :].sum()) for i in range(positions)]
    total = int(drafts.sum())
    drafted = drafts > 0  # an answer of one token never met the draft

    def length(index: np.ndarray) -> np.ndarray:
        return 1 + accepted[drafted][index].sum(-1) / drafts[drafted][index].sum(-1)

    return {
        "acceptance_length": 1 + int(accepted.sum()) / total if total else None,
        "acceptance_length_ci95": bootstrap(int(drafted.sum()), length),
        "accepted_per_position": reached if total else None,
        "acceptance_rate_per_position": [n / total for n in reached] if total else None,
        "drafts": total,
        "draft_tokens": sum(a.drafted for a in answers),
        "accepted_tokens": int(accepted.sum()),
        "prompts": len(answers),
    }


def bootstrap(n: int, figure: Callable[[np.ndarray], np.ndarray]) -> list[float] | None:
    """95 % percentile interval of a figure over resampled prompts; None for fewer than two prompts.

    Args:
        n: number of prompts.
        figure: computes it for prompts chosen by index; an index array [..., n] gives [...].
    """
    if n < 2:
        return None
    import numpy as np
    from scipy.stats import bootstrap as resample

    found = resample(
        (np.arange(n),), lambda index, axis: figure(np.moveaxis(index, axis, -1)), n_resamples=RESAMPLES,
        method="percentile", vectorized=True, batch=200, rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return [float(found.low), float(found.high)]


def shorter_lengths(rates: list[float]) -> list[float]:
    """Acceptance length at 1, 2, ... K draft tokens, from the acceptance rates per position at K."""
    return [1 + total for total in itertools.accumulate(rates)]


# --- speed --------------------------------------------------------------------------------------------------


def speed(plain: list[Pass], drafted: list[Pass], concurrency: int) -> dict:
    """Output tokens/s without and with the draft: medians over repeats, their ratio, and its interval.

    The interval resamples prompts, with the median over repeats inside. Tokens of a request over its seconds
    stand in for the wall time there (the same thing at one in flight; a constant factor apart at more).
    """
    import numpy as np

    def table(passes: list[Pass]) -> tuple[np.ndarray, np.ndarray]:  # [repeats, prompts] each
        tokens = np.array([[len(a.tokens) for a in p.answers] for p in passes], dtype=float)
        return tokens, np.array([[a.seconds for a in p.answers] for p in passes])

    (plain_tokens, plain_seconds), (draft_tokens, draft_seconds) = table(plain), table(drafted)

    def ratio(index: np.ndarray) -> np.ndarray:
        def rate(tokens, seconds):
            return np.median(tokens[:, index].sum(-1) / seconds[:, index].sum(-1), axis=0)

        return rate(draft_tokens, draft_seconds) / rate(plain_tokens, plain_seconds)

    rates = [float(np.median([p.rate for p in passes])) for passes in (plain, drafted)]
    point, everybody = rates[1] / rates[0], np.arange(plain_tokens.shape[1])
    interval = bootstrap(len(everybody), ratio)
    scale = point / float(ratio(everybody))
    return {
        "plain_tokens_per_s": rates[0],
        "draft_tokens_per_s": rates[1],
        "speedup": point,
        "speedup_ci95": [bound * scale for bound in interval] if interval else None,
        "repeats": {"plain": [p.rate for p in plain], "draft": [p.rate for p in drafted]},
        "prompts": len(everybody),
        "concurrency": concurrency,
    }


def expected_speedups(plain_rate: float, draft_rate: float, rates: list[float]) -> list[float]:
    """Speed-up at 1, 2, ... K draft tokens, from one measurement without and one with K draft tokens.

    A step with k draft tokens takes plain + k/K x (what K draft tokens add to a step), both at one in flight.

    Args:
        plain_rate, draft_rate: tokens/s without a draft and with K tokens.
        rates: acceptance rates per position at K, of the same prompts.
    """
    lengths = shorter_lengths(rates)
    plain, step = 1 / plain_rate, lengths[-1] / draft_rate
    steps = [plain + (step - plain) * k / len(rates) for k in range(1, len(rates) + 1)]
    return [length * plain / seconds for length, seconds in zip(lengths, steps, strict=True)]


def by_domain(passes: list[Pass]) -> dict[str, float]:
    """Tokens per second of request time by domain, over all repeats."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for answer in itertools.chain.from_iterable(p.answers for p in passes):
        tokens[answer.domain] = tokens.get(answer.domain, 0) + len(answer.tokens)
        seconds[answer.domain] = seconds.get(answer.domain, 0.0) + answer.seconds
    return {domain: tokens[domain] / seconds[domain] for domain in tokens}


def balanced(rows: list[dict], limit: int | None) -> list[dict]:
    """The first `limit` rows, taken from the domains in turn."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["domain"], []).append(row)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    return list(itertools.islice((row for row in turns if row is not None), limit))


# --- greedy comparison --------------------------------------------------------------------------------------


def compare_greedy(plain: Answer, drafted: Answer) -> dict:
    """Whether a greedy answer is the same with the draft, and how near the tie was where it is not.

    Returns:
        {"id", "kind": "same" | "near_tie" | "different", "position", "gap"}: gap is how much less likely (in
        nats) the plain server finds the other token at the first difference; None if that token is not among
        its most likely ones.
    """
    at = next(
        (i for i, (a, b) in enumerate(itertools.zip_longest(plain.tokens, drafted.tokens)) if a != b), None
    )
    if at is None:
        return {"id": plain.id, "kind": "same", "position": None, "gap": None}
    gap = None
    if plain.top and at < min(len(plain.tokens), len(drafted.tokens)):
        likely = plain.top[at]
        if drafted.tokens[at] in likely:
            gap = likely[plain.tokens[at]] - likely[drafted.tokens[at]]
    near = gap is not None and gap <= NEAR_TIE
    return {"id": plain.id, "kind": "near_tie" if near else "different", "position": at, "gap": gap}
