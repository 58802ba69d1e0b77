"""report.md of 06: readable without having seen the project."""

from __future__ import annotations


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A figure, or a dash where it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def span(interval: list[float] | None, digits: int = 2) -> str:
    """A 95 % interval in brackets."""
    return "" if interval is None else f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table; the first column is text, the others are figures."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]


def headline(report: dict) -> list[str]:
    """Two or three lines that say how good the draft is."""
    length, loops = report["acceptance_length"], report["looping_answers"]
    if length is None:
        lines = [f"acceptance length: not measured ({report['why']['acceptance_length']})"]
    else:
        with_loops = report["with_looping_answers"]["acceptance_length"]
        lines = [
            f"held-out acceptance length {length:.2f}{span(report['acceptance_length_ci95'])} (95 %) with "
            f"{report['num_speculative_tokens']} draft tokens, {report['prompts']} prompts, "
            f"{loops} looping answers left out (with them {number(with_loops)})"
        ]
    for level, row in (report["concurrency"] or {}).items():
        lines.append(
            f"speed-up {row['speedup']:.2f}x{span(row['speedup_ci95'])} at {level} in flight: "
            f"{row['plain_tokens_per_s']:.1f} -> {row['draft_tokens_per_s']:.1f} tokens/s"
        )
    best = report["best_num_speculative_tokens"]
    if best and best != report["num_speculative_tokens"]:
        row = report["lengths"][best - 1]
        gain = f"{row['speedup']:.2f}x{span(row['speedup_ci95'])}"
        lines.append(f"best draft length {best}: {gain} at 1 in flight")
    return lines


def markdown(report: dict) -> str:
    """The whole report."""
    parts = [
        "# How good the draft is",
        "",
        *[f"- {line}" for line in headline(report)],
        *[f"- **Warning**: {line}" for line in report["warnings"]],
        "",
        "![acceptance](acceptance.png)",
        "",
        "![speed](speed.png)",
        "",
        *what(report),
        *compared(report),
        *positions(report),
        *by_domain(report),
        *by_load(report),
        *texts(report),
        *temperatures(report),
        *closure(report),
        *missing(report),
        "## Serve it",
        "",
        "```",
        report["serve_command"],
        "```",
        "",
    ]
    return "\n".join(parts)


def what(report: dict) -> list[str]:
    timing = report["timing"]
    order = "alternating without and with it" if timing["alternating"] else "in blocks, not alternating"
    asked = report["with_looping_answers"]["prompts"]
    return [
        "## What was measured",
        "",
        f"A draft model (`{report['draft']}`) proposes {report['num_speculative_tokens']} tokens at a time "
        f"for the verifier (`{report['verifier']}`), which checks them in one step. The more are accepted, "
        "the faster the same text appears.",
        "",
        f"- Acceptance: {asked} prompts ({', '.join(report['sets'])}), answers of up to "
        f"{report['max_tokens']} tokens at temperature {report['temperature']:g}, {report['in_flight']} in "
        f"flight. {report['formula']}, counted by the server as a difference of its counters; 1 means that "
        f"nothing was accepted, {report['num_speculative_tokens'] + 1} is the most possible.",
        "- Answers that repeat themselves are easy to guess, so they are left out unless said otherwise.",
        f"- Speed: {timing['prompts']} prompts, answers of up to {timing['max_tokens']} tokens, median of "
        f"{timing['repeats']} repeats {order}, after a warm-up, prompt processing included.",
        "- Intervals are 95 % bootstrap intervals over prompts.",
        f"- Verifier loads: {len(report['loads'])} ({'; '.join(report['loads'])}). "
        f"Profile: {report['profile']}.",
        "",
    ]


def compared(report: dict) -> list[str]:
    if not report["compared"]:
        return []
    rows = []
    for r in report["compared"]:
        levels = r["concurrency"] or {}
        rows.append(
            [
                f"`{r['draft']}`",
                number(r["acceptance_length"]) + span(r["acceptance_length_ci95"]),
                *[number(x, 3) for x in r["acceptance_rate_per_position"] or []],
                *[number(row["speedup"], 2, "x") + span(row["speedup_ci95"]) for row in levels.values()],
            ]
        )
    first = report["compared"][0]
    head = ["draft", "acceptance length", *[f"position {i}" for i in range(first["num_speculative_tokens"])]]
    head += [f"speed-up at {c}" for c in first["concurrency"] or {}]
    return ["## All drafts", "", *table(head, rows), "", f"The rest is about `{report['draft']}`.", ""]


def positions(report: dict) -> list[str]:
    lengths = report["lengths"]
    if not lengths:
        return []
    rates, reached = report["acceptance_rate_per_position"], report["accepted_per_position"]
    rows = [
        [
            str(row["num_speculative_tokens"]),
            str(reached[i]),
            number(rates[i], 3),
            number(row["acceptance_length"]),
            number(row["expected_speedup"], 2, "x"),
            number(row["speedup"], 2, "x") + span(row.get("speedup_ci95")),
        ]
        for i, row in enumerate(lengths)
    ]
    head = ["draft tokens", "accepted at the last", "share", "acceptance length", "computed", "timed"]
    return [
        "## Draft lengths",
        "",
        f"{report['drafts']} drafts, {report['draft_tokens']} draft tokens, {report['accepted_tokens']} "
        "accepted. Acceptance of the shorter lengths follows from the longest. Speed-ups are for one request "
        "in flight: computed from the step time of the longest, or timed.",
        "",
        *table(head, rows),
        "",
    ]


def by_domain(report: dict) -> list[str]:
    rows = [
        [
            name + (" (slower)" if row["slower"] else ""),
            str(row["prompts"]),
            number(row["acceptance_length"]) + span(row["acceptance_length_ci95"]),
            str(row["drafts"]),
            str(row["looping_answers"]),
            number(row["plain_tokens_per_s"], 1),
            number(row["draft_tokens_per_s"], 1),
            number(row["speedup"], 2, "x"),
            number(row["expected_speedup"], 2, "x"),
        ]
        for name, row in report["domains"].items()
    ]
    head = ["domain", "prompts", "acceptance length", "drafts", "looping", "tokens/s plain", "with draft"]
    return [
        "## Domains",
        "",
        "`timed` is the speed-up of the few timed prompts of the domain at one in flight; `expected` is the "
        "overall speed-up at this domain's acceptance length, and steadier. Slower: expected below 1.",
        "",
        *table([*head, "timed", "expected"], rows),
        "",
    ]


def by_load(report: dict) -> list[str]:
    if not report["concurrency"]:
        return []
    rows = []
    for level, row in report["concurrency"].items():
        repeats = zip(row["repeats"]["plain"], row["repeats"]["draft"], strict=True)
        rows.append(
            [
                level,
                number(row["plain_tokens_per_s"], 1),
                number(row["draft_tokens_per_s"], 1),
                number(row["speedup"], 2, "x") + span(row["speedup_ci95"]),
                ", ".join(number(draft / plain) for plain, draft in repeats),
            ]
        )
    head = ["requests in flight", "tokens/s plain", "with draft", "speed-up", "each repeat"]
    return ["## Speed", "", *table(head, rows), ""]


def texts(report: dict) -> list[str]:
    found = report["greedy_identical"]
    counters = report["counters"]
    lines = [
        "## Are the answers the same?",
        "",
        f"Answers that loop: {report['looping_answers']}; that end at the token limit: "
        f"{report['answers_at_limit']}. Acceptance length of the looping ones alone: "
        f"{number(report['only_looping_answers']['acceptance_length'])}.",
        "",
    ]
    if found:
        lines += [
            f"Greedy answers with and without the draft: {found['same']} the same, {found['near_tie']} part "
            f"at a near-tie (the plain server finds the other token at most {found['near_tie_bound']:g} nats "
            f"less likely; largest gap {number(found['largest_near_tie_gap'], 3)}), {found['different']} "
            "differ otherwise. bf16 sums depend on what is batched together, so near-ties fall either way.",
            "",
        ]
    if counters:
        agree = "agree" if counters["agree_with_responses"] else "DISAGREE"
        lines += [
            f"The server's counters ({counters['drafts']} drafts, {counters['accepted_tokens']} accepted) "
            f"and the counts in its responses {agree}.",
            "",
        ]
    return lines


def temperatures(report: dict) -> list[str]:
    if len(report["temperatures"]) < 2:
        return []
    rows = [
        [t, number(r["acceptance_length"]) + span(r["acceptance_length_ci95"]), str(r["drafts"])]
        for t, r in report["temperatures"].items()
    ]
    return [
        "## Temperature",
        "",
        "The served draft is greedy. At temperature 0 a draft token is accepted if it is the verifier's top "
        "token; above 0 with the probability that the verifier gives it, which is what to expect there.",
        "",
        *table(["temperature", "acceptance length", "drafts"], rows),
        "",
    ]


def closure(report: dict) -> list[str]:
    close = report["closure"]
    if not close:
        return []
    rows = [
        [str(i), number(a, 3), number(b, 3), f"{b - a:+.3f}"]
        for i, (a, b) in enumerate(
            zip(close["predicted_per_position"], close["served_per_position"], strict=True)
        )
    ]
    rows.append(
        [
            "acceptance length",
            number(close["predicted_acceptance_length"]),
            number(close["served_acceptance_length"]),
            f"{close['served_acceptance_length'] - close['predicted_acceptance_length']:+.2f}",
        ]
    )
    lines = [
        "## Training's prediction and what was served",
        "",
        f"Training walked the stored held-out answers as a server would; this is beside it what the server "
        f"accepted, on {close['prompts']} {close['on']}. {close['answers_as_stored']} served answers are the "
        f"stored ones, {close['answers_otherwise']} took another turn at a near-tie or differ.",
        "",
        *table(["position", "predicted", "served", "gap"], rows),
        "",
    ]
    if not close["passed"]:
        lines += [f"**The gap exceeds {close['max_gap']:g}.** Check, in this order:", ""]
        lines += [*[f"- {item}" for item in close["checklist"]], ""]
    return lines


def missing(report: dict) -> list[str]:
    if not report["why"]:
        return []
    return ["## Not measured", "", *[f"- {name}: {why}" for name, why in report["why"].items()], ""]
