"""The page of `kvtier simulate --report`: one HTML file that loads nothing."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from kvtier.policy.advice import ReuseCurve
from kvtier.report.chart import Line, bar_chart, line_chart
from kvtier.simulate.replay import ReplayResult
from kvtier.simulate.run import RunResult

_STYLE = """
:root{color-scheme:light dark;--ink:#1e293b;--paper:#fff;--faint:#e2e8f0;--soft:#64748b}
@media(prefers-color-scheme:dark){:root{--ink:#e2e8f0;--paper:#0f172a;--faint:#334155;--soft:#94a3b8}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:860px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{margin-top:2.4rem;border-top:1px solid var(--faint);padding-top:1.2rem}
svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .grid{stroke:var(--faint)}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}td,th{padding:.25rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--faint)}
td:first-child,th:first-child{text-align:left}.best{font-weight:700}.note{color:var(--soft)}.advice{font-size:1.05rem}
"""
GB = 1e9


def size_text(size_bytes: float) -> str:
    """A size for people: powers of ten."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.3g} {unit}"
    return f"{size_bytes:,.0f} B"


def sizing_advice(curve: ReuseCurve, capacity_bytes: int, what: str, step_bytes: float = 100e9) -> str:
    """What the next step of a tier's capacity would buy, in a sentence."""
    now = curve.hit_rate(capacity_bytes)
    then = curve.hit_rate(capacity_bytes + step_bytes)
    most = curve.hit_rate(1e18)
    if then - now < 0.0005:
        why = "nothing is asked for again that it does not hold" if most - now < 0.0005 else "it is too small a step"
        return f"The next {size_text(step_bytes)} of {what} buy no hits worth mention: {why}."
    more = (then / now - 1) * 100 if now else float("inf")
    rise = f"{more:.0f}% more hits" if now else "the first hits"
    return (
        f"The next {size_text(step_bytes)} of {what} buy {rise} (hit rate {now:.3f} to {then:.3f};"
        f" without any limit {most:.3f})."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def hit_rate_section(trace: str, results: Sequence[ReplayResult], infinite: ReplayResult) -> str:
    """Hit rate by capacity and policy."""
    policies = list(dict.fromkeys(result.policy for result in results))
    capacities = sorted({result.capacity_blocks for result in results})
    rate = {(result.policy, result.capacity_blocks): result.hit_rate for result in results}
    lines = [
        Line(
            name,
            [(capacity, rate[name, capacity]) for capacity in capacities if (name, capacity) in rate],
            dashed=name == "min",
            strong=name == "reuse",
        )
        for name in policies
    ]
    if len(capacities) > 1:
        bound = infinite.hit_rate
        lines.append(Line("infinite", [(capacities[0], bound), (capacities[-1], bound)], dashed=True))
    rows = []
    best = {
        capacity: max((rate[name, capacity] for name in policies if name != "min"), default=0.0)
        for capacity in capacities
    }
    for name in policies:
        cells = [
            f'<span class="best">{rate[name, capacity]:.4f}</span>'
            if name != "min" and rate[name, capacity] == best[capacity]
            else f"{rate[name, capacity]:.4f}"
            for capacity in capacities
        ]
        rows.append([escape(name), *cells])
    rows.append(["infinite", *[f"{infinite.hit_rate:.4f}"] * len(capacities)])
    return (
        f"<h2>{escape(trace)}: hit rate by capacity</h2>"
        + line_chart(
            lines, x_label="capacity in blocks", y_label="block hits over blocks asked", title="hit rate by capacity"
        )
        + _table(["policy", *[f"{capacity:,}" for capacity in capacities]], rows)
        + f'<p class="note">{infinite.asked_blocks:,} blocks asked, {infinite.stored_blocks:,} distinct. A hit is a block of '
        "the leading run of present blocks. <i>min</i> knows the future: no policy can do better. <i>infinite</i> never evicts.</p>"
    )


def run_section(trace: str, runs: Sequence[tuple[RunResult, ReuseCurve]]) -> str:
    """Times, bytes and sizing of the simulated tiers."""
    first, curve = runs[0]
    seconds: Callable[[float], str] = lambda s: f"{s:g} s" if s >= 1 else f"{s * 1000:g} ms"  # noqa: E731
    lines = [Line(run.policy, _thinned(run.ttft_curve), strong=run.policy == "reuse") for run, _ in runs]
    lines.append(Line("no cache", _thinned(first.ttft_without_curve), dashed=True))
    rows = [
        [
            escape(run.policy),
            f"{run.hit_rate:.4f}",
            f"{run.dram_hit_blocks:,}",
            f"{run.disk_hit_blocks:,}",
            *(f"{run.ttft_s[name]:.2f}" for name in ("mean", "p50", "p90", "p99")),
            f"{run.prefill_saved_s:,.0f}",
            size_text(run.written_bytes),
        ]
        for run, _ in runs
    ]
    rows.append(
        [
            "no cache",
            "",
            "",
            "",
            *(f"{first.ttft_without_s[name]:.2f}" for name in ("mean", "p50", "p90", "p99")),
            "",
            "",
        ]
    )
    tier, capacity = ("disk", first.disk_bytes) if first.disk_bytes else ("DRAM", first.dram_bytes)
    return (
        f"<h2>{escape(trace)}: time to first token</h2>"
        f"<p>DRAM {size_text(first.dram_bytes)}, disk {size_text(first.disk_bytes)}, {size_text(first.block_bytes)} a block,"
        f" {first.engines} engines, {first.requests:,} requests.</p>"
        + line_chart(
            lines,
            x_label="time to first token",
            y_label="share of requests served within",
            x_text=seconds,
            y_max=1.0,
            title="distribution of the time to first token",
        )
        + _table(
            ["policy", "hit rate", "DRAM hits", "disk hits", "mean s", "p50", "p90", "p99", "GPU s saved", "written"],
            rows,
        )
        + (
            "<h3>Bytes written to disk</h3>"
            + bar_chart(
                [(run.policy, float(run.written_bytes)) for run, _ in runs], text=size_text, title="bytes written"
            )
            if first.disk_bytes
            else ""
        )
        + f'<h3>Sizing</h3><p class="advice">{escape(sizing_advice(curve, capacity, tier))}</p>'
        + _table(
            [f"{tier} at", "size", "estimated hit rate"],
            [
                [f"{float(factor):g} times", size_text(float(factor) * capacity), f"{rate:.4f}"]
                for factor, rate in first.advice_disk.items()
            ],
        )
        + '<p class="note">Estimated from sampled reuse distances, for recency (<i>lru</i>); a better policy hits more at each size.</p>'
    )


def page(
    tables: Mapping[str, tuple[Sequence[ReplayResult], ReplayResult]],
    runs: Mapping[str, Sequence[tuple[RunResult, ReuseCurve]]],
    command: str,
) -> str:
    """The whole page. Traces by name."""
    sections = []
    for trace in dict.fromkeys((*tables, *runs)):
        if trace in tables:
            sections.append(hit_rate_section(trace, *tables[trace]))
        if trace in runs:
            sections.append(run_section(trace, runs[trace]))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>kvtier simulation</title><style>{_STYLE}</style><h1>kvtier simulation</h1>"
        f'<p class="note"><code>{escape(command)}</code></p>{"".join(sections)}</html>\n'
    )


def _thinned(points: Sequence[tuple[float, float]], most: int = 200) -> list[tuple[float, float]]:
    step = max(1, len(points) // most)
    kept = list(points[::step])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept
