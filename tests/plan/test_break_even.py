"""The break-even file: what it means, what is refused and how, and the curves between its knots."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.plan.break_even import NEVER, BreakEven, Curve, break_even_tokens, parse_break_even

MODEL = "Qwen/Qwen3-4B"
KNOTS_F = {"1024": 0.09, "4096": 0.34, "16384": 1.3}


def version_1(**changes: Any) -> dict[str, Any]:
    return {
        "model_name": MODEL,
        "kv_dtype": "fp16",
        "break_even_ssd_tokens": 559,
        "break_even_mem_tokens": 481,
        "safety_margin_tokens": 0,
    } | changes


def version_2(**changes: Any) -> dict[str, Any]:
    return {
        "schema_version": 2,
        "gpu_model": "a GPU",
        "ssd_model": "a disk",
        "model_name": MODEL,
        "kv_dtype": "auto",
        "kv_bytes_per_token": 131072,
        "provenance": {"generated": "today"},
        "break_even_ssd_tokens": 6057,
        "break_even_mem_tokens": 736,
        "safety_margin_tokens": 128,
        "golden": [],
        "curves": {
            "f": {"floor": 0.0, "knots": KNOTS_F},
            "g_ssd": {"floor": 0.031, "knots": {"0": 0.031, "1024": 0.031, "4096": 0.05, "16384": 0.12}},
            "g_mem": {"floor": 0.003, "knots": {"1024": 0.003, "4096": 0.006, "16384": 0.02}},
        },
    } | changes


def read(content: Any, **changes: Any) -> BreakEven:
    text = content if isinstance(content, str) else json.dumps(content)
    return parse_break_even(text, name="b.json", **({"models": [MODEL], "kv_dtypes": ["auto", "float16"]} | changes))


def edited(*path: Any, value: Any) -> dict[str, Any]:
    """Version 2 with one place changed; without it where `value` is `...`."""
    content: Any = json.loads(json.dumps(version_2()))
    place = content
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return dict(content)


# ---- thresholds


@pytest.mark.parametrize(("ssd", "mem"), [(559, 481), (6057, 736), (6203, 825)])
def test_published_files_of_version_1(ssd: int, mem: int) -> None:
    costs = read(version_1(break_even_ssd_tokens=ssd, break_even_mem_tokens=mem))
    assert (costs.threshold(in_dram=False), costs.threshold(in_dram=True), costs.curves) == (ssd, mem, None)
    for in_dram, threshold in ((False, ssd), (True, mem)):
        assert [costs.declines(n, in_dram=in_dram) for n in (0, 1, threshold - 1, threshold, threshold + 1)] == [
            *(False, True, True),
            *(False, False),
        ]


def test_the_margin_is_added_and_makes_no_gate_of_none() -> None:
    costs = read(version_1(break_even_mem_tokens=0, safety_margin_tokens=100))
    assert (costs.ssd_tokens, costs.mem_tokens) == (659, 0)
    assert not costs.declines(1, in_dram=True)


def test_what_could_be_loaded_from_some_tier_is_stored() -> None:
    assert BreakEven(600, 100).store_tokens_min(has_disk=True) == 100
    assert BreakEven(100, 600).store_tokens_min(has_disk=True) == 100
    assert BreakEven(100, 600).store_tokens_min(has_disk=False) == 600
    assert BreakEven(600, 0).store_tokens_min(has_disk=True) == 0


def test_version_2_without_thresholds_finds_them_on_its_curves() -> None:
    content = version_2(safety_margin_tokens=0)
    del content["break_even_ssd_tokens"], content["break_even_mem_tokens"]
    costs = read(content)
    assert costs.curves is not None
    f, g_ssd, g_mem = costs.curves
    for threshold, g in ((costs.ssd_tokens, g_ssd), (costs.mem_tokens, g_mem)):
        assert 0 < threshold < 1024 and f(threshold - 1) < g(threshold - 1) and f(threshold) >= g(threshold)
    assert costs.mem_tokens < costs.ssd_tokens


# ---- identity


@pytest.mark.parametrize("dtype", ["fp16", "half", "float16", "torch.float16", "auto", "AUTO"])
def test_names_of_one_type_are_one(dtype: str) -> None:
    read(version_1(kv_dtype=dtype))


def test_a_model_answers_to_each_of_its_names() -> None:
    read(version_1(model_name="/models/qwen/"), models=["served", "/models/qwen"])
    read({"model_name": MODEL, "break_even_ssd_tokens": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name": "other"}, rf"model_name is 'other': the model that is served is '{MODEL}'.*measure"),
        ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8': the KV cache that is served has 'auto'.*measure"),
        ({"kv_dtype": "bf16"}, "kv_dtype is 'bf16'"),
    ],
)
def test_another_model_or_type_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"break-even file b\.json: {message}"):
        read(version_1(**changes))
    with pytest.raises(ConfigError, match=message):
        read(version_2(**changes))


# ---- what is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no JSON.*measure it again"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "its content is .* write a JSON object"),
        ('{"model_name": "a", "model_name": "b"}', "model_name is 'b': it is there twice"),
        (version_1(schema_version=3), "schema_version is 3: this kvtier reads versions 1 and 2"),
        (version_1(schema_version=True), "schema_version is True"),
        (
            version_1(break_even_sdd_tokens=1),
            "break_even_sdd_tokens is 1: not known; did you mean break_even_ssd_tokens",
        ),
        (version_1(whatever=1), "whatever is 1: not known"),
        (version_1(golden=[]), "golden is .*version 2: set schema_version to 2"),
        (version_1(model_name=None), "model_name is None: write the name"),
        (version_1(kv_dtype=3), "kv_dtype is 3: write the type"),
        (version_1(break_even_ssd_tokens=-1), "break_even_ssd_tokens is -1: write a whole number, 0 or more"),
        (version_1(break_even_mem_tokens=1.5), "break_even_mem_tokens is 1.5: write a whole number"),
        (version_1(safety_margin_tokens=True), "safety_margin_tokens is True: write a whole number"),
        (version_1(break_even_ssd_tokens="9"), "break_even_ssd_tokens is '9'"),
        ({"model_name": MODEL}, "break_even_ssd_tokens is None: write the tokens"),
        (version_1(schema_version=2), "curves is None: version 2 has exactly"),
        (version_1(schema_version=1, curves={}), "curves is .*set schema_version to 2"),
        (edited("kv_bytes_per_token", value=0), "kv_bytes_per_token is 0: write a whole number, 1 or more"),
        (edited("curves", "g_mem", value=...), r"curves is \['f', 'g_ssd'\]: version 2 has exactly"),
        (edited("curves", "extra", value={}), "curves is .*version 2 has exactly"),
        (edited("curves", "f", "floor", value=...), r"curves\.f is \['knots'\]: write"),
        (edited("curves", "f", "floor", value=-1), r"curves\.f\.floor is -1: write seconds"),
        (edited("curves", "f", "floor", value=math.nan), r"curves\.f\.floor is nan: write seconds"),
        (edited("curves", "f", "floor", value=10**400), r"curves\.f\.floor is 1000.*: write seconds"),
        (edited("curves", "g_ssd", "knots", value={}), r"curves\.g_ssd\.knots is \{\}: at least one knot"),
        (edited("curves", "g_ssd", "knots", value={"0": 0.031}), r"curves\.g_ssd\.knots is .*at least one knot"),
        (edited("curves", "f", "knots", "0", value=0.5), r"curves\.f\.knots\['0'\] is .*floor is 0\.0 at 0 tokens too"),
        (edited("curves", "f", "knots", "ten", value=1), r"curves\.f\.knots\['ten'\] is 1: .*whole number of tokens"),
        (edited("curves", "f", "knots", "-5", value=1), r"curves\.f\.knots\['-5'\] is 1: .*whole number of tokens"),
        (edited("curves", "f", "knots", "1_0", value=1), r"curves\.f\.knots\['1_0'\]"),
        (edited("curves", "f", "knots", "01024", value=1), r"curves\.f\.knots\['01024'\] is 1: .*twice"),
        (edited("curves", "f", "knots", "1024", value="x"), r"curves\.f\.knots\['1024'\] is 'x': write seconds"),
        (edited("curves", "f", "knots", "1024", value=math.inf), r"curves\.f\.knots\['1024'\] is inf"),
        (edited("curves", "f", "knots", value=[1]), r"curves\.f\.knots is \[1\]: write"),
        (edited("golden", value={}), r"golden is \{\}: write a list"),
        (edited("golden", value=[{"tokens": 7, "f": 1, "g_ssd": 1}]), r"golden\[0\] is .*: write"),
        (edited("golden", value=[5]), r"golden\[0\] is 5: write"),
        (
            edited("golden", value=[{"tokens": 1024, "f": 0.0905, "g_ssd": 0.031, "g_mem": 0.003}]),
            r"golden\[0\]\.f is 0\.0905: the curve gives 0\.09 s at 1024 tokens.*measure it again",
        ),
    ],
)
def test_malformed_files_are_refused_with_a_way_out(content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"break-even file b\.json(: | ){message}"):
        read(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATHS = [
    *([name] for name in version_2()),
    *(["curves", name] for name in ("f", "g_ssd", "g_mem")),
    *(["curves", "f", name] for name in ("floor", "knots")),
    ["curves", "f", "knots", "1024"],
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PATHS), JSON)
def test_whatever_stands_in_a_field_the_file_is_read_or_refused(path: list[str], value: Any) -> None:
    try:
        read(edited(*path, value=value))
    except ConfigError as error:
        assert "b.json" in str(error)


# ---- curves


def test_golden_points_hold_within_1e_6_or_1e_3() -> None:
    curves = read(version_2()).curves
    assert curves is not None
    point = {"tokens": 3000, "f": curves.f(3000) * 1.0009, "g_ssd": curves.g_ssd(3000), "g_mem": curves.g_mem(3000)}
    read(edited("golden", value=[point]))
    with pytest.raises(ConfigError, match=r"golden\[0\]\.f"):
        read(edited("golden", value=[point | {"f": curves.f(3000) * 1.0012}]))
    read(edited("golden", value=[point | {"tokens": 0, "f": 9e-7, "g_ssd": 0.031, "g_mem": 0.003}]))
    with pytest.raises(ConfigError, match=r"golden\[0\]\.f"):
        read(edited("golden", value=[point | {"tokens": 0, "f": 2e-6, "g_ssd": 0.031, "g_mem": 0.003}]))


def test_knots_and_the_floor_are_met() -> None:
    curve = Curve(0.5, {10: 1.0, 30: 1.5, 40: 4.0})
    assert [curve(x) for x in (-1, 0, 10, 30, 40)] == [0.5, 0.5, 1.0, 1.5, 4.0]


def test_slopes_and_values_by_hand() -> None:
    # Steps 1, 1, 2; rates 1, 3, 1. Inner slopes: 2 rates of equal steps give 6 / (3/1 + 3/3) = 1.5; then weights 2*2+1 = 5 and
    # 2+2*1 = 4 give 9 / (5/3 + 4/1) = 27/17. Ends: (3*1 - 3)/2 = 0; ((2*2+1)*1 - 2*3)/3 = -1/3, which turns back: 0.
    curve = Curve(0.0, {1: 1.0, 2: 4.0, 4: 6.0})
    assert curve._slopes == pytest.approx([0.0, 1.5, 27 / 17, 0.0])
    # Middle of [1, 2]: (1 + 4)/2 + (1.5 - 27/17)/8.
    assert curve(1.5) == pytest.approx(2.5 + (1.5 - 27 / 17) / 8)
    assert curve(3) == pytest.approx(5 + 2 * (27 / 17 - 0) / 8)
    assert curve(100) == 6.0


def test_a_straight_line_stays_straight_and_goes_on() -> None:
    curve = Curve(1.0, {10: 2.0, 20: 3.0, 50: 6.0})
    assert [curve(x) for x in (5, 15, 35, 70)] == pytest.approx([1.5, 2.5, 4.5, 8.0])
    assert Curve(1.0, {10: 2.0})(30) == pytest.approx(4.0)


def test_beyond_a_last_knot_that_falls_it_falls_no_further() -> None:
    curve = Curve(1.0, {10: 3.0, 20: 2.0})
    assert curve(1000) == curve(20) == 2.0


def test_known_answers_of_scipy() -> None:
    """Of `scipy.interpolate.PchipInterpolator`, on knots with flats, turns and uneven steps."""
    interpolate = pytest.importorskip(
        "scipy.interpolate", reason="scipy is not installed: the other tests hold known answers"
    )
    for knots in (KNOTS, {1: 2.0, 2: 2.0, 5: 1.0, 9: 7.0}, {3: 0.5, 4: 9.0}):
        theirs = interpolate.PchipInterpolator([0, *knots], [0.25, *knots.values()])
        ours = Curve(0.25, knots)
        for x in range(10 * max(knots)):
            assert ours(x / 10) == pytest.approx(float(theirs(x / 10)), abs=1e-12)


KNOTS = {2: 0.5, 3: 0.6, 7: 2.0, 8: 2.0, 20: 9.0}


@st.composite
def rising(draw: st.DrawFn) -> Curve:
    steps = draw(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 10)), min_size=1, max_size=12))
    floor = draw(st.floats(0, 5))
    tokens, seconds, knots = 0, floor, {}
    for step, rise in steps:
        tokens, seconds = tokens + step, seconds + rise
        knots[tokens] = seconds
    return Curve(floor, knots)


@settings(max_examples=60, deadline=None)
@given(rising(), st.lists(st.floats(0, 100_000), min_size=2, max_size=20))
def test_where_the_knots_rise_the_curve_rises(curve: Curve, places: list[float]) -> None:
    values = [curve(place) for place in sorted(places)]
    assert all(high >= low - 1e-9 * max(1.0, low) for low, high in pairwise(values))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(1, 1000), st.floats(0, 100), min_size=1, max_size=8), st.floats(0, 1))
def test_it_never_leaves_the_range_of_its_two_knots(knots: dict[int, float], place: float) -> None:
    curve = Curve(1.0, knots)
    x, y = [0, *sorted(knots)], [1.0, *(knots[k] for k in sorted(knots))]
    for left, right, low, high in zip(x, x[1:], y, y[1:], strict=False):
        value = curve(left + (right - left) * place)
        assert min(low, high) - 1e-9 <= value <= max(low, high) + 1e-9


# ---- where two curves cross


def test_crossings_by_hand() -> None:
    line = Curve(0.0, {1000: 1.0})
    assert break_even_tokens(line, Curve(0.5, {1000: 0.5})) == 500
    assert break_even_tokens(line, Curve(0.0, {1000: 0.5})) == 0
    assert break_even_tokens(line, Curve(1.0, {1000: 2.0})) == NEVER
    # It does not pay for the shortest prefixes alone, shorter than a place between two knots.
    assert break_even_tokens(line, Curve(0.005, {1000: 0.5})) == 10
    assert break_even_tokens(Curve(0.0, {64_000: 64.0}), Curve(0.005, {64_000: 32.0})) == 10
    # Beyond the last knot: 0.001 a token against 1.5 + 0.0005 a token.
    assert break_even_tokens(line, Curve(1.5, {1000: 2.0})) == pytest.approx(3000, abs=2)


@settings(max_examples=60, deadline=None)
@given(rising(), rising())
def test_from_the_crossing_on_loading_pays(f: Curve, g: Curve) -> None:
    threshold = break_even_tokens(f, g)
    last = max(f.last_tokens, g.last_tokens)
    slack = 1e-6
    if threshold == NEVER:
        assert f(last) < g(last)
        return
    assert f(max(1, threshold)) >= g(max(1, threshold)) - slack
    assert threshold > last or f(last) >= g(last)
    if threshold > 1:
        assert f(threshold - 1) < g(threshold - 1) + slack * max(1.0, g(threshold - 1))
