"""The measuring bench of 06: which server is up when, and what it is asked.

Where servers fit side by side (CPU: an idle one costs no time) the timed repeats alternate between them. On
GPUs each server has the cards for itself, and repeats come in blocks.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from eagle3.cli import Stage
from eagle3.eval_report import Material, expected_at_one, with_draft_length
from eagle3.looping import is_looping
from eagle3.measure import TOP_LOGPROBS, Ask, Pass, ask_all, ask_counted, balanced
from eagle3.progress import Progress
from eagle3.server import Server, verifier_server
from eagle3.verifier import Verifier

log = logging.getLogger("eagle3")

# A shorter draft length gets a load of its own only if it should be faster by more than timing noise.
WORTH_A_LOAD = 1.03
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Draft:
    """A draft folder: how the report calls it, where it lies, a hash of its content."""

    name: str
    folder: Path
    fingerprint: str


@dataclass
class Bench:
    """One verifier, one list of prompts, and what was measured without a draft.

    Attributes:
        timed_rows: the prompts that are timed, chosen once the plain answers are there.
        plain_timed: concurrency -> {"plain": passes}, where the plain server had to make room.
        loads: every load that was made, in order.
    """

    stage: Stage
    verifier: Verifier
    rows: list[dict]
    timed_rows: list[dict] = field(default_factory=list)
    plain: Pass | None = None
    plain_timed: dict[int, dict[str, list[Pass]]] | None = None
    loads: list[str] = field(default_factory=list)

    @property
    def side_by_side(self) -> bool:
        return self.stage.profile.cpu

    def serve(self, draft: Draft | None = None, tokens: int | None = None):
        """A server that begins to load at once; call its `ready()`. Each role has its own port and log."""
        role = 0 if draft is None else 1 if tokens is None else 2
        port = self.stage.profile.VERIFIER_PORT + (role if self.side_by_side else 0)
        stage = self.stage
        if tokens:
            # The server reads the recipe anew, from its file and the overrides.
            changed = [*stage.args.set, f"evaluate.num_speculative_tokens={tokens}"]
            stage = replace(
                with_draft_length(stage, tokens), args=Namespace(**{**vars(stage.args), "set": changed})
            )
        what = "without a draft" if role == 0 else f"with {draft.name}"
        self.loads.append(what + (f", {tokens} draft tokens" if tokens else ""))
        name = ("verifier-plain", "verifier-draft", "verifier-short")[role]
        folder = draft.folder if draft else None
        return verifier_server("serve", stage, self.verifier, draft=folder, port=port, name=name, wait=False)

    def ask(self, temperature: float, **changes) -> Ask:
        """How prompts are asked at a temperature."""
        recipe = self.stage.recipe
        sampling = {"top_p": recipe.answers.top_p, "top_k": recipe.answers.top_k, "seed": recipe.seed}
        tokens = recipe.evaluate.max_tokens
        return Ask(**{"max_tokens": tokens, "temperature": temperature, **sampling, **changes})

    @property
    def in_flight(self) -> int:
        """Requests in flight where only counts matter, not time."""
        return min(self.stage.profile.EXTRACT_REQUESTS, self.stage.profile.VERIFIER_MAX_SEQS)

    def ask_plain(self, server: Server) -> None:
        """Ask every prompt without a draft; choose the timed prompts from those that don't loop."""
        temperatures = self.stage.recipe.evaluate.temperatures
        ask = self.ask(0.0 if 0.0 in temperatures else temperatures[0], logprobs=TOP_LOGPROBS)
        with Progress(len(self.rows), "prompt", "asking without a draft") as progress:
            self.plain = ask_all(server, self.rows, ask, self.in_flight, progress.update)
        loops = {a.id for a in self.plain.answers if is_looping(a.tokens)}
        good = [row for row in self.rows if row["id"] not in loops]
        self.timed_rows = balanced(good or self.rows, self.stage.recipe.evaluate.timed_prompts)

    def timed(self, servers: dict[str, Server], levels: list[int]) -> dict[int, dict[str, list[Pass]]]:
        """Repeats of the timed prompts: concurrency -> server name -> passes. Warm-up is not counted."""
        e = self.stage.recipe.evaluate
        found = {c: {name: [] for name in servers} for c in levels}
        tokens = e.timed_tokens or e.max_tokens
        rounds = [(c, r) for c in levels for r in range(e.repeats)]
        total = len(rounds) * len(servers) * len(self.timed_rows)
        with Progress(total, "prompt", f"timing {', '.join(servers)}") as progress:
            for server in servers.values():
                warm = self.ask(e.temperatures[0], max_tokens=WARM_UP_TOKENS, salt=str(time.time_ns()))
                ask_all(server, self.timed_rows[: max(levels)], warm, max(levels))
            for c, r in rounds:
                for name in list(servers)[:: 1 if r % 2 == 0 else -1]:  # neither is always the first
                    ask = self.ask(e.temperatures[0], max_tokens=tokens, salt=str(time.time_ns()))
                    done = ask_all(servers[name], self.timed_rows, ask, c, progress.update)
                    found[c][name].append(done)
        return found

    def measure(self, draft: Draft, served: Server, plain: Server | None) -> Material:
        """Everything about one draft at the recipe's draft length.

        Args:
            plain: the running server without a draft, or None where it had to make room.
        """
        e = self.stage.recipe.evaluate
        m = Material(draft.name, draft.folder, draft.fingerprint, e.num_speculative_tokens, plain=self.plain)
        # As many rows a step as without a draft: a verify step has one per draft token more.
        in_flight = max(1, self.in_flight // (1 + e.num_speculative_tokens))
        for temperature in e.temperatures:
            with Progress(len(self.rows), "prompt", f"asking with {draft.name}") as progress:
                m.passes[temperature] = ask_counted(
                    served, self.rows, self.ask(temperature), in_flight, progress.update
                )
        m.alternating = plain is not None
        servers = {"plain": plain, "draft": served} if plain else {"draft": served}
        for c, passes in self.timed(servers, e.concurrency).items():
            m.timed[c] = {**(self.plain_timed or {c: {}})[c], **passes}
        return m

    def time_shorter(self, draft: Draft, m: Material, plain: Server | None) -> None:
        """Time the shorter draft length that promises most, if it promises enough to be worth a load."""
        expected = expected_at_one(m)
        if not expected:
            return
        best = max(range(len(expected)), key=expected.__getitem__) + 1
        gain = expected[best - 1]
        if best == m.positions or gain < WORTH_A_LOAD * expected[-1] or gain < 1:
            return
        log.info(
            "%d draft tokens should be faster (%.2fx) than %d (%.2fx): one more load to time them",
            best, gain, m.positions, expected[-1],
        )  # fmt: skip
        with self.serve(draft, best) as server:
            server.ready()
            servers = {"plain": plain, "draft": server} if plain else {"draft": server}
            m.shorter[best] = {**(self.plain_timed or {1: {}})[1], **self.timed(servers, [1])[1]}


def measure_all(bench: Bench, drafts: list[Draft]) -> list[Material]:
    """Measure every draft with as few loads as the machine allows."""
    found = []
    with ExitStack() as outer:
        plain = outer.enter_context(bench.serve())
        for draft in drafts:
            with ExitStack() as inner:
                served = inner.enter_context(bench.serve(draft)) if bench.side_by_side else None
                if bench.plain is None:
                    plain.ready()
                    bench.ask_plain(plain)
                    if not bench.side_by_side:
                        bench.plain_timed = bench.timed(
                            {"plain": plain}, bench.stage.recipe.evaluate.concurrency
                        )
                        outer.close()
                        plain = None
                served = served or inner.enter_context(bench.serve(draft))
                served.ready()
                m = bench.measure(draft, served, plain)
            bench.time_shorter(draft, m, plain)
            found.append(m)
    return found
