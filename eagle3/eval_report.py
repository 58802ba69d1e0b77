"""The report of 06: from measured passes to report.json's figures, report.md, and the verdict on them."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from eagle3.contract import ConfigError, StageError, read_json
from eagle3.looping import is_looping
from eagle3.measure import (
    NEAR_TIE,
    Answer,
    Counters,
    Pass,
    acceptance,
    by_domain,
    compare_greedy,
    expected_speedups,
    shorter_lengths,
    speed,
)

FORMULA = "acceptance length = 1 + accepted tokens / drafts"
# What a draft that is served otherwise than it was trained has got wrong, commonest first (fault-cases.md).
CHECKLIST = (
    "layer ids: eagle_aux_hidden_state_layer_ids of 05_export/vllm/config.json = the ids 03 stored (24)",
    "norm flags: norm_before_residual, norm_before_fc, fc_norm, norm_output as trained (34)",
    "rope: base, scaling and mscale pair in both spellings (36); position limit (38)",
    "vocabulary: d2t holds offsets and is in the weights (32, 33)",
    "window and layer_types as trained",
    "05_convert.py verify 05_export/vllm compares served and trained draft logit by logit",
    "verifier: same weights, dtype and quantization in 03 as in serving; KV cache dtype (VERIFIER_KV_DTYPE)",
    "prompts: same chat template and thinking mode in 01 as in serving (5)",
    "states: 03_extract_hidden.py --check --deep (18, 23)",
)


@dataclass
class Material:
    """Everything that was measured of one draft.

    Attributes:
        passes: by temperature: all prompts asked once with the draft; the first one is the report's.
        plain: all prompts asked once without it, with its most likely tokens.
        timed: concurrency -> repeats without and with the draft.
        shorter: draft tokens -> the same at one in flight, for the shorter lengths that were timed.
        why: figures that could not be measured, each with the reason.
    """

    draft: str
    folder: Path
    fingerprint: str
    positions: int
    passes: dict[float, Pass] = field(default_factory=dict)
    plain: Pass | None = None
    timed: dict[int, dict[str, list[Pass]]] = field(default_factory=dict)
    shorter: dict[int, dict[str, list[Pass]]] = field(default_factory=dict)
    alternating: bool = True
    why: dict[str, str] = field(default_factory=dict)


def figures(m: Material) -> dict:
    """All figures of one draft, under the names of report.json."""
    temperature, first = next(iter(m.passes.items()))
    why = dict(m.why)
    loops = {a.id for a in first.answers if is_looping(a.tokens)}
    kept = [a for a in first.answers if a.id not in loops]
    out = {
        "draft": m.draft,
        "draft_fingerprint": m.fingerprint,
        "num_speculative_tokens": m.positions,
        "temperature": temperature,
        "formula": FORMULA,
        **acceptance(kept, m.positions),
        "looping_answers": len(loops),
        "answers_at_limit": sum(a.finish == "length" for a in first.answers),
        "with_looping_answers": acceptance(first.answers, m.positions),
        "only_looping_answers": acceptance([a for a in first.answers if a.id in loops], m.positions),
        "counters": counters_check(first),
    }
    if out["acceptance_length"] is None:
        if any(a.runs for a in first.answers):
            reason = "no draft was made: every answer loops or ends on its first token"
        else:
            reason = "the server exports no vllm:spec_decode counters"
        for name in ("acceptance_length", "acceptance_length_ci95", "accepted_per_position"):
            why.setdefault(name, reason)
    elif out["acceptance_length_ci95"] is None:
        why["acceptance_length_ci95"] = "an interval needs at least two prompts"
    out["temperatures"] = {
        f"{t:g}": acceptance([a for a in p.answers if not is_looping(a.tokens)], m.positions)
        for t, p in m.passes.items()
    }
    out |= speeds(m, out, why)
    out["domains"] = domains(m, kept, loops, out)
    out["greedy_identical"] = greedy(m, why)
    out["why"] = why
    return out


def counters_check(done: Pass) -> dict | None:
    """The server's own counters of a pass beside the sums over its responses."""
    if done.counters is None:
        return None
    counted = [a for a in done.answers if a.runs]
    ours = Counters(
        sum(sum(a.runs) for a in counted),
        sum(a.drafted for a in counted),
        sum(n * i for a in counted for i, n in enumerate(a.runs)),
        (),
    )
    c = done.counters
    agree = (c.drafts, c.draft_tokens, c.accepted) == (ours.drafts, ours.draft_tokens, ours.accepted)
    return {
        "drafts": c.drafts,
        "draft_tokens": c.draft_tokens,
        "accepted_tokens": c.accepted,
        "accepted_per_position": list(c.per_position),
        "agree_with_responses": agree,
    }


def speeds(m: Material, out: dict, why: dict[str, str]) -> dict:
    """`concurrency`, and `lengths`: acceptance and speed-up at every draft length up to the served one."""
    levels = {str(c): speed(t["plain"], t["draft"], c) for c, t in m.timed.items()}
    for level in levels.values():
        level["alternating"] = m.alternating
    found = {"concurrency": levels or None, "lengths": None, "best_num_speculative_tokens": None}
    rates = out["acceptance_rate_per_position"]
    if "1" not in levels:
        for name in ("lengths.speedup", "domains.speedup"):
            why[name] = "evaluate.concurrency has no 1"
    if rates is None:
        why.setdefault("lengths", why["acceptance_length"])
        return found
    lengths = [
        {"num_speculative_tokens": k, "acceptance_length": length, "derived": k < m.positions}
        for k, length in enumerate(shorter_lengths(rates), 1)
    ]
    expected = expected_at_one(m)
    for k, row in enumerate(lengths, 1):
        row |= {"expected_speedup": expected[k - 1] if expected else None, "speedup": None}
        if k == m.positions and "1" in levels:
            row |= {"speedup": levels["1"]["speedup"], "speedup_ci95": levels["1"]["speedup_ci95"]}
        elif k in m.shorter:
            got = speed(m.shorter[k]["plain"], m.shorter[k]["draft"], 1)
            row |= {"speedup": got["speedup"], "speedup_ci95": got["speedup_ci95"], "timed": got}
        else:
            row["why"] = "not timed: not expected to be faster than the longest, or no other load was allowed"
    timed = [row for row in lengths if row["speedup"] is not None]
    best = max(timed, key=lambda row: row["speedup"], default=None)
    return found | {
        "lengths": lengths,
        "best_num_speculative_tokens": best["num_speculative_tokens"] if best else m.positions,
    }


def expected_at_one(m: Material) -> list[float] | None:
    """Expected speed-up at 1 .. K draft tokens at one in flight, from the timed answers themselves."""
    if 1 not in m.timed:
        return None
    passes = m.timed[1]["draft"]
    rates = acceptance([a for p in passes for a in p.answers], m.positions)["acceptance_rate_per_position"]
    if rates is None:
        return None
    got = speed(m.timed[1]["plain"], passes, 1)
    return expected_speedups(got["plain_tokens_per_s"], got["draft_tokens_per_s"], rates)


def domains(m: Material, kept: list[Answer], loops: set[str], out: dict) -> dict:
    """Acceptance and speed by domain; `slower` marks those in which the draft slows serving down.

    A few timed prompts per domain are noisy, so there are two speed-ups at one in flight: `speedup` of the
    domain's own timed answers, and `expected_speedup` = overall speed-up x the domain's acceptance length
    over that of the timed answers (a step costs the same everywhere). `slower`: the expected one is below 1.
    """
    timed = m.timed.get(1)
    plain, drafted = (by_domain(timed[name]) for name in ("plain", "draft")) if timed else ({}, {})
    overall = None
    if timed:
        done = acceptance([a for p in timed["draft"] for a in p.answers], m.positions)["acceptance_length"]
        overall = out["concurrency"]["1"]["speedup"] / done if done else None
    found = {}
    for name in sorted({a.domain for a in m.plain.answers}):
        mine = [a for a in kept if a.domain == name]
        got = acceptance(mine, m.positions)
        length = got["acceptance_length"]
        row = {key: got[key] for key in ("acceptance_length", "acceptance_length_ci95", "drafts", "prompts")}
        row["accepted_per_position"] = got["accepted_per_position"]
        row["looping_answers"] = sum(a.domain == name and a.id in loops for a in m.plain.answers)
        row["plain_tokens_per_s"], row["draft_tokens_per_s"] = plain.get(name), drafted.get(name)
        row["speedup"] = drafted[name] / plain[name] if name in plain and name in drafted else None
        row["expected_speedup"] = overall * length if overall and length else None
        row["slower"] = row["expected_speedup"] < 1 if row["expected_speedup"] else None
        if length is None:
            row["why"] = "no draft was made in an answer that does not loop"
        found[name] = row
    return found


def greedy(m: Material, why: dict[str, str]) -> dict | None:
    """How many greedy answers are the same with and without the draft."""
    if 0.0 not in m.passes or m.plain is None:
        why["greedy_identical"] = "evaluate.temperatures has no 0"
        return None
    pairs = [compare_greedy(a, b) for a, b in zip(m.plain.answers, m.passes[0.0].answers, strict=True)]
    kinds = [p["kind"] for p in pairs]
    gaps = [p["gap"] for p in pairs if p["kind"] == "near_tie"]
    return {
        **{kind: kinds.count(kind) for kind in ("same", "near_tie", "different")},
        "near_tie_bound": NEAR_TIE,
        "largest_near_tie_gap": max(gaps, default=None),
        "differences": [p for p in pairs if p["kind"] != "same"],
    }


def closure(
    predicted: dict | None, m: Material, stored: dict[str, list[int]], bound: float
) -> tuple[dict | None, str | None]:
    """04's prediction on the stored held-out answers beside the served counts on the same prompts.

    Args:
        predicted: `heldout` of 04's stage.json: drafts, accepted_counts per position, and the same two by
            prompt under `by_id`, if it has that: then only prompts answered as stored are compared.
        stored: answer tokens that 03 stored, by prompt id.

    Returns:
        the comparison, or None and why there is none.
    """
    if not predicted or not predicted.get("drafts"):
        return None, "04_train/stage.json holds no held-out prediction"
    if 0.0 not in m.passes:
        return None, "evaluate.temperatures has no 0, and 04 predicts greedy serving"
    answers = [a for a in m.passes[0.0].answers if a.id in stored]
    # The shorter of two token limits is no difference.
    same = {a.id for a in answers if all(x == y for x, y in zip(a.tokens, stored[a.id], strict=False))}
    by_id, chosen, on = predicted.get("by_id") or {}, answers, "prompts that 04 walked"
    drafts, reached = predicted["drafts"], predicted["accepted_counts"]
    if common := [a for a in answers if a.id in same and a.id in by_id]:
        chosen, on = common, "prompts whose served answer is the stored one"
        drafts = sum(by_id[a.id]["drafts"] for a in common)
        reached = [sum(x) for x in zip(*(by_id[a.id]["accepted_counts"] for a in common), strict=True)]
    served = acceptance(chosen, m.positions)
    if not served["drafts"] or not drafts or len(reached) < m.positions:
        return None, "no draft was made on the prompts that 04 walked, or it walked fewer positions"
    want = [n / drafts for n in reached[: m.positions]]
    got = served["acceptance_rate_per_position"]
    gaps = [b - a for a, b in zip(want, got, strict=True)]
    return {
        "on": on,
        "prompts": len(chosen),
        "answers_as_stored": len(same),
        "answers_otherwise": len(answers) - len(same),
        "predicted_per_position": want,
        "served_per_position": got,
        "gap_per_position": gaps,
        "predicted_acceptance_length": 1 + sum(want),
        "served_acceptance_length": served["acceptance_length"],
        "max_gap": bound,
        "passed": max(map(abs, gaps)) <= bound,
        "checklist": list(CHECKLIST),
    }, None


def warnings(result: dict, skipped: dict[str, int]) -> list[str]:
    """What a reader must not overlook."""
    found = []
    slow = [
        f"{name} ({row['acceptance_length']:.2f} tokens a step, {row['expected_speedup']:.2f}x)"
        for name, row in result["domains"].items()
        if row["slower"]
    ]
    if slow:
        of = len(result["domains"])
        found.append(f"the draft slows serving down in {len(slow)} of {of} domains: {', '.join(slow)}")
    for level, row in (result["concurrency"] or {}).items():
        if row["speedup"] < 1:
            found.append(f"the draft slows serving down at {level} in flight: {row['speedup']:.2f}x")
    greedy_ = result["greedy_identical"]
    if greedy_ and greedy_["different"]:
        found.append(
            f"{greedy_['different']} greedy answers differ with the draft by more than a near-tie "
            f"(> {NEAR_TIE} nats)"
        )
    if result["counters"] and not result["counters"]["agree_with_responses"]:
        found.append("the server's counters and its responses disagree: does anything else use this server?")
    asked = result["with_looping_answers"]["prompts"]
    if result["looping_answers"] > 0.2 * asked:
        found.append(f"{result['looping_answers']} of {asked} answers loop and are left out of the figures")
    found += [f"{n} prompts skipped: {reason}" for reason, n in skipped.items()]
    return found


def serve_command(stage, verifier, folder: Path, tokens: int) -> str:
    """The plain vLLM command that serves verifier and draft as they were measured."""
    from eagle3.config import profile_values
    from eagle3.server import server_args

    stage = with_draft_length(stage, tokens)
    args = server_args("serve", stage, verifier, folder)
    for flag in ("--served-model-name", "--seed", "--generation-config", "--per-request-spec-decode-metrics"):
        if flag in args:  # for the pipeline's own use
            del args[args.index(flag) : args.index(flag) + 2]
    _, passed = profile_values(os.environ.get("PROFILE") or stage.profile.name)
    serving = ("VLLM_", "NCCL_", "TORCH_")
    settings = [f"{key}={shlex.quote(v)}" for key, v in passed.items() if key.startswith(serving)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *args]
    return " ".join([*settings, shlex.join(command)])


def with_draft_length(stage, tokens: int):
    """The stage with another evaluate.num_speculative_tokens."""
    evaluate = stage.recipe.evaluate.model_copy(update={"num_speculative_tokens": tokens})
    return replace(stage, recipe=stage.recipe.model_copy(update={"evaluate": evaluate}))


# --- verdict ------------------------------------------------------------------------------------------------


def read_baseline(path: Path, identity: dict) -> dict:
    """An earlier report.json that this one may be compared with.

    Raises:
        ConfigError: missing, not a report, or measured on something else (what differs is named).
    """
    old = read_json(path)
    if not isinstance(old, dict) or "acceptance_length" not in old:
        raise ConfigError(
            f"--baseline {path}: {'no such file' if old is None else 'not a report.json of 06'}"
        )
    differ = [f"{key} {old.get(key)!r}, now {now!r}" for key, now in identity.items() if old.get(key) != now]
    if differ:
        raise ConfigError(f"--baseline {path} was measured on something else: {'; '.join(differ)}")
    return old


def judge(report: dict, max_gap: float, min_acceptance: float | None, baseline: dict | None) -> None:
    """The gates, applied to a finished report.

    Raises:
        StageError: every gate that failed, with its figures.
    """
    problems = []
    length, interval = report["acceptance_length"], report["acceptance_length_ci95"]
    if min_acceptance is not None and (length is None or length < min_acceptance):
        got = "not measured" if length is None else f"{length:.3f}"
        problems.append(f"acceptance length {got} is below --min-acceptance {min_acceptance:g}")
    if baseline is not None:
        problems += regressions(report, baseline, length, interval)
    if (close := report["closure"]) and max(map(abs, close["gap_per_position"])) > max_gap:
        pairs = ", ".join(
            f"position {i}: {a:.3f} / {b:.3f}"
            for i, (a, b) in enumerate(
                zip(close["predicted_per_position"], close["served_per_position"], strict=True)
            )
        )
        problems.append(
            f"predicted and served acceptance differ by more than evaluate.max_gap {max_gap:g} ({pairs}); "
            "check, in this order:\n  - " + "\n  - ".join(CHECKLIST)
        )
    if problems:
        raise StageError("; ".join(problems))


def regressions(report: dict, baseline: dict, length: float | None, interval: list | None) -> list[str]:
    """What got worse than the baseline by more than the interval of the new figure allows."""
    old = baseline["acceptance_length"]
    if old is None:
        return ["the baseline has no acceptance length"]
    if length is None:
        return [f"acceptance length was not measured; the baseline has {old:.3f}"]
    found = []
    if (interval[1] if interval else length) < old:
        found.append(f"acceptance length {length:.3f} is below the baseline's {old:.3f}, interval included")
    for level, row in (report["concurrency"] or {}).items():
        was = ((baseline.get("concurrency") or {}).get(level) or {}).get("speedup")
        if was and (row["speedup_ci95"] or [0, row["speedup"]])[1] < was:
            found.append(
                f"speed-up at {level} in flight {row['speedup']:.2f} is below the baseline's {was:.2f}, "
                "interval included"
            )
    return found
