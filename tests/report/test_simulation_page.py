"""Charts and the page of a simulation: well-formed, loads nothing, says what was measured."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvtier.policy.advice import ReuseCurve
from kvtier.report.chart import Line, bar_chart, line_chart, log_ticks, nice_ticks
from kvtier.report.simulation import page, size_text, sizing_advice
from kvtier.simulate.replay import ReplayResult
from kvtier.simulate.run import Machine, Simulation
from kvtier.simulate.trace import Trace, TraceRequest


def test_ticks() -> None:
    assert nice_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(0, 0.37) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert log_ticks(1000, 30_000) == [1000, 2000, 5000, 10_000, 20_000]
    assert log_ticks(1e-3, 1e4) == pytest.approx([10.0**power for power in range(-3, 5)])


def test_line_chart_puts_points_where_they_belong() -> None:
    svg = line_chart([Line("a<b", [(10, 0.0), (100, 0.5), (1000, 1.0)])], x_label="x", y_label="y", y_max=1.0)
    tree = ElementTree.fromstring(svg)
    points = next(tree.iter("polyline")).attrib["points"].split()
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2), "the x axis is logarithmic"
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2), "the y axis is not, and runs upwards"
    assert "a&lt;b" in svg


def test_names_do_not_cover_one_another() -> None:
    svg = line_chart([Line(f"line {at}", [(1, 0.5), (10, 0.5)]) for at in range(9)], x_label="x", y_label="y")
    heights = sorted(float(at) for at in re.findall(r'y="([0-9.]+)" style="fill', svg))
    assert all(after - before >= 14.9 for before, after in itertools.pairwise(heights))


def test_nothing_to_draw() -> None:
    assert line_chart([], x_label="x", y_label="y") == bar_chart([], text=str) == ""


def test_bars_are_in_proportion() -> None:
    svg = bar_chart([("a", 10.0), ("b", 5.0)], text=lambda value: f"{value:g}")
    widths = [float(rect.attrib["width"]) for rect in ElementTree.fromstring(svg).iter("rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)


@pytest.mark.parametrize(("size", "text"), [(5, "5 B"), (2.5e6, "2.5 MB"), (1e11, "100 GB"), (3.13e12, "3.13 TB")])
def test_size_text(size: float, text: str) -> None:
    assert size_text(size) == text


def loop_of(gigabytes: int) -> ReuseCurve:
    curve = ReuseCurve()
    for at in range(2000):
        curve.request([b"%d" % (at % gigabytes)], 1_000_000_000)
    return curve


def test_advice_says_what_the_next_step_buys() -> None:
    assert "buy the first hits (hit rate 0.000 to 0.92" in sizing_advice(loop_of(150), 100_000_000_000, "disk")
    assert "nothing is asked for again that it does not hold" in sizing_advice(loop_of(50), 100_000_000_000, "disk")
    assert "too small a step" in sizing_advice(loop_of(500), 100_000_000_000, "disk")


def test_the_page() -> None:
    requests = [TraceRequest(float(at), [at % 9 * 2, at % 9 * 2 + 1], 1024, 9) for at in range(50)]
    simulation = Simulation(Machine(10 << 26, 40 << 26), "lru", 512, 1)
    simulation.run(requests)
    result = simulation.result(Trace(Path("chat.jsonl")), "lru", 1)
    rows = [ReplayResult("lru", size, size, 100, 5, 0.1) for size in (10, 20)]
    html = page(
        {"chat": (rows, ReplayResult("infinite", 0, 60, 100, 5, 0.1))},
        {"chat": [(result, simulation.curve)]},
        "kvtier simulate <x>",
    )
    assert "kvtier simulate &lt;x&gt;" in html
    assert not re.search(r"(?:src|href)=|@import|url\(|<script", html), "the page loads nothing"
    for svg in re.findall(r"<svg.*?</svg>", html):
        ElementTree.fromstring(svg)
    for said in ("0.2000", "0.6000", "no cache", "Bytes written", "The next 100 GB of disk"):
        assert said in html
