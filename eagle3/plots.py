"""The plots of 06, made to be read at a glance."""

from __future__ import annotations

from pathlib import Path

from eagle3.contract import write_atomic

PLAIN, DRAFT, SLOW, EXPECTED = "#9aa5b1", "#2f6fb0", "#c4572e", "#222222"


def _figure(columns: int, width: float = 11.0, height: float = 4.2):
    """A figure with `columns` axes side by side, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure, path: Path) -> None:
    write_atomic(path, lambda tmp: figure.savefig(tmp, dpi=110, format="png"))


def _empty(ax, text: str) -> None:
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, wrap=True)
    ax.set_axis_off()


def _whiskers(values: list[float], intervals: list[list[float] | None]) -> list[list[float]]:
    """Distances from values to the ends of their intervals, as matplotlib wants error bars."""
    ends = [interval or [v, v] for v, interval in zip(values, intervals, strict=True)]
    low = [max(0.0, v - lo) for v, (lo, _) in zip(values, ends, strict=True)]
    return [low, [max(0.0, hi - v) for v, (_, hi) in zip(values, ends, strict=True)]]


def acceptance(report: dict, path: Path) -> None:
    """Share of draft tokens accepted by position (beside the prediction), acceptance length by domain."""
    figure, (left, right) = _figure(2)
    rates = report["acceptance_rate_per_position"]
    if rates is None:
        for ax in (left, right):
            _empty(ax, f"not measured: {report['why']['acceptance_length']}")
        return _save(figure, path)
    where, close = range(len(rates)), report["closure"]
    bars = [("served", rates, DRAFT)]
    if close:
        bars.insert(0, ("predicted in training", close["predicted_per_position"], PLAIN))
    width = 0.7 / len(bars)
    for n, (label, shares, color) in enumerate(bars):
        at = [i + (n - (len(bars) - 1) / 2) * width for i in where]
        drawn = left.bar(at, shares, width * 0.95, color=color, label=label)
        left.bar_label(drawn, [f"{r:.0%}" for r in shares], padding=2)
    if close:
        left.legend(frameon=False)
    left.set_xticks(list(where), [f"token {i + 1}" for i in where])
    left.set_ylim(0, min(1.08, 1.25 * max([0.05, *(share for _, shares, _ in bars for share in shares)])))
    left.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    left.set_title("Draft tokens accepted")

    rows = {k: r for k, r in report["domains"].items() if r["acceptance_length"] is not None}
    names = sorted(rows, key=lambda k: rows[k]["acceptance_length"])
    values = [rows[k]["acceptance_length"] for k in names]
    spread = _whiskers(values, [rows[k]["acceptance_length_ci95"] for k in names])
    colors = [SLOW if rows[k]["slower"] else DRAFT for k in names]
    right.barh(names, [v - 1 for v in values], left=1, color=colors, xerr=spread, ecolor="#555555", capsize=2)
    right.axvline(report["acceptance_length"], color=EXPECTED, linestyle="--", linewidth=1)
    right.set_xlim(1, 1 + 1.08 * max(v - 1 + up for v, up in zip(values, spread[1], strict=True)) + 0.01)
    slow = ", red: serving gets slower" if SLOW in colors else ""
    right.set_title(f"Acceptance length by domain (dashed: {report['acceptance_length']:.2f} overall{slow})")
    right.set_xlabel("tokens per verifier step; 1 = nothing accepted")
    _save(figure, path)


def speed(report: dict, path: Path) -> None:
    """Tokens/s without and with the draft by load, and speed-up by draft length."""
    figure, (left, right) = _figure(2)
    levels = report["concurrency"] or {}
    if not levels:
        for ax in (left, right):
            _empty(ax, f"not measured: {report['why'].get('concurrency', '')}")
        return _save(figure, path)
    for shift, key, color, label in (
        (-0.19, "plain_tokens_per_s", PLAIN, "without draft"),
        (0.19, "draft_tokens_per_s", DRAFT, "with draft"),
    ):
        values = [row[key] for row in levels.values()]
        bars = left.bar([i + shift for i in range(len(levels))], values, 0.36, color=color, label=label)
        left.bar_label(bars, [f"{v:.0f}" for v in values], padding=2)
    ticks = [f"{c} in flight\n{row['speedup']:.2f}x" for c, row in levels.items()]
    left.set_xticks(range(len(levels)), ticks)
    left.margins(y=0.15)
    left.set_ylabel("output tokens/s")
    left.set_title("Speed without and with the draft")
    left.legend(frameon=False)

    lengths = [row for row in report["lengths"] or [] if row["expected_speedup"] is not None]
    if not lengths:
        _empty(right, "speed-up by draft length: needs one request in flight and accepted drafts")
        return _save(figure, path)
    where = [row["num_speculative_tokens"] for row in lengths]
    right.plot(where, [row["expected_speedup"] for row in lengths], "o--", color=PLAIN, label="computed")
    timed = [row for row in lengths if row["speedup"] is not None]
    values = [row["speedup"] for row in timed]
    right.errorbar(
        [row["num_speculative_tokens"] for row in timed], values,
        yerr=_whiskers(values, [row.get("speedup_ci95") for row in timed]),
        fmt="o", color=DRAFT, capsize=3, label="timed (95 %)",
    )  # fmt: skip
    right.axhline(1, color=SLOW, linewidth=1)
    right.annotate("no gain", (where[0], 1), textcoords="offset points", xytext=(0, 4), color=SLOW)
    right.set_xticks(where)
    right.set_xlabel("draft tokens per step")
    right.set_ylabel("speed-up")
    right.set_title("Speed-up by draft length, one in flight")
    right.legend(frameon=False)
    _save(figure, path)
