"""The break-even file: from which prefix length on loading pays, and curves of what loading and recomputing cost.

Version 1 names two thresholds in tokens, one for prefixes that lie in memory and one for those that lie on disk, and a margin to add. 0
is no gate. Version 2 adds three curves of seconds by tokens: `f`, to recompute a prompt; `g_ssd` and `g_mem`, to the first token
when the whole prefix is read from disk, or taken from memory. Each is `{"floor": seconds, "knots": {"tokens": seconds}}`.

Between knots a curve is PCHIP: a cubic with slopes by Fritsch and Carlson's rule, so that it rises where the knots rise and nowhere
overshoots. It begins at (0, floor), and goes on from the last knot with the slope that it has there, at least 0. `golden` points
in the file say what its writer's curves give: where ours give something else, one of the two is wrong, and the file is refused.

A file is refused as a whole, with the field, its value and the way out: a gate that works by half would cost more than it saves.
"""

import difflib
import json
import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from kvtier.errors import ConfigError

CURVE_NAMES = ("f", "g_ssd", "g_mem")
NEVER = 1 << 40
"""Tokens from which on loading pays, where it never does."""
GOLDEN_ABSOLUTE_S = 1e-6
GOLDEN_RELATIVE = 1e-3
_SECONDS_MAX = 1_000_000
_KNOTS_MAX = 10_000
_FIELDS_1 = (
    "schema_version",
    "model_name",
    "kv_dtype",
    "break_even_ssd_tokens",
    "break_even_mem_tokens",
    "safety_margin_tokens",
    "provenance",
)
_FIELDS_2 = (*_FIELDS_1, "gpu_model", "ssd_model", "kv_bytes_per_token", "curves", "golden")
_SAME_TYPE = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "fp8_e4m3",
}


class Curve:
    """Seconds by tokens: PCHIP through (0, floor) and the knots, linear beyond the last.

    Args:
        floor_s: seconds at 0 tokens.
        knots: seconds at numbers of tokens above 0, at least one.
    """

    def __init__(self, floor_s: float, knots: Mapping[int, float]) -> None:
        if not knots or min(knots) <= 0:
            raise ValueError("a curve needs knots, at numbers of tokens above 0")
        self._x = [0, *sorted(knots)]
        self._y = [floor_s, *(knots[tokens] for tokens in self._x[1:])]
        self._slopes = _slopes(self._x, self._y)

    @property
    def last_tokens(self) -> int:
        """The last knot: beyond it the curve is a guess."""
        return self._x[-1]

    @property
    def last_slope(self) -> float:
        """Seconds a token beyond the last knot."""
        return max(0.0, self._slopes[-1])

    def __call__(self, tokens: float) -> float:
        """Seconds at `tokens`; below 0 tokens those at 0."""
        if tokens <= 0:
            return self._y[0]
        if tokens >= self._x[-1]:
            return self._y[-1] + (tokens - self._x[-1]) * self.last_slope
        place = bisect_right(self._x, tokens) - 1
        width = self._x[place + 1] - self._x[place]
        t = (tokens - self._x[place]) / width
        low, high = self._y[place], self._y[place + 1]
        rise = t * t * (3 - 2 * t)
        bend = t * (1 - t) * ((1 - t) * self._slopes[place] - t * self._slopes[place + 1])
        return low + (high - low) * rise + width * bend


def _slopes(x: list[int], y: list[float]) -> list[float]:
    """Slopes at the knots: weighted harmonic means of the two neighbours' where both go the same way, else 0."""
    steps = [right - left for left, right in pairwise(x)]
    rates = [(high - low) / step for (low, high), step in zip(pairwise(y), steps, strict=True)]
    if len(rates) == 1:
        return [rates[0], rates[0]]
    inner = []
    for (step_0, step_1), (rate_0, rate_1) in zip(pairwise(steps), pairwise(rates), strict=True):
        if rate_0 * rate_1 <= 0:
            inner.append(0.0)
            continue
        weight_0, weight_1 = 2 * step_1 + step_0, step_1 + 2 * step_0
        inner.append((weight_0 + weight_1) / (weight_0 / rate_0 + weight_1 / rate_1))
    return [_end(steps[0], steps[1], rates[0], rates[1]), *inner, _end(steps[-1], steps[-2], rates[-1], rates[-2])]


def _end(step: float, next_step: float, rate: float, next_rate: float) -> float:
    """Slope at an end, out of three points, kept from turning back and from overshooting."""
    slope = ((2 * step + next_step) * rate - step * next_rate) / (step + next_step)
    if slope * rate <= 0:
        return 0.0
    if rate * next_rate <= 0 and abs(slope) > 3 * abs(rate):
        return 3 * rate
    return slope


class Curves(NamedTuple):
    """What things cost on one setup, in seconds.

    Attributes:
        f: to recompute a prompt, by its tokens.
        g_ssd: to the first token when the whole prefix of so many tokens is read from disk.
        g_mem: the same when it is in memory.
    """

    f: Curve
    g_ssd: Curve
    g_mem: Curve


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A break-even file's content.

    Attributes:
        ssd_tokens: from so many tokens on a load from disk pays, margin included; 0 for no gate.
        mem_tokens: the same for a load of what is in memory in all its parts.
        curves: of a file of version 2.
    """

    ssd_tokens: int = 0
    mem_tokens: int = 0
    curves: Curves | None = None

    def threshold(self, *, in_dram: bool) -> int:
        """Tokens below which a load is declined; `in_dram`: all its parts are in memory."""
        return self.mem_tokens if in_dram else self.ssd_tokens

    def declines(self, prefix_tokens: int, *, in_dram: bool) -> bool:
        """Whether a load of so many tokens is not worth it."""
        return 0 < prefix_tokens < self.threshold(in_dram=in_dram)

    def store_tokens_min(self, *, has_disk: bool) -> int:
        """Tokens that a request must have for anything of it to be stored: less is never loaded, from whatever tier."""
        return min(self.mem_tokens, self.ssd_tokens) if has_disk else self.mem_tokens


def break_even_tokens(f: Curve, g: Curve) -> int:
    """The least number of tokens from which on recomputing (`f`) takes no less than loading (`g`).

    0 where loading always pays, NEVER where it never does. Looked for at one token, at every knot and at 64 places between two of them; beyond the
    last knots only where loading did not pay up to there.
    """
    ends = sorted({0, 1, f.last_tokens, g.last_tokens} | set(f._x) | set(g._x))
    places = sorted({low + (high - low) * part // 64 for low, high in pairwise(ends) for part in range(65)})

    def pays(tokens: int) -> bool:
        return f(tokens) >= g(tokens)

    # The shortest prefix is one token: at 0 there is nothing to load.
    losing = [tokens for tokens in places if tokens > 0 and not pays(tokens)]
    if not losing:
        return 0
    low, high = losing[-1], next((tokens for tokens in places if tokens > losing[-1]), 0)
    if not high:
        gain = f.last_slope - g.last_slope
        if gain <= 0 or (g(low) - f(low)) / gain > NEVER:
            return NEVER
        high = low + math.ceil((g(low) - f(low)) / gain) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def parse_break_even(
    content: str | Mapping[str, object], *, name: str, models: Collection[str], kv_dtypes: Collection[str]
) -> BreakEven:
    """Read a break-even file, version 1 or 2.

    Args:
        content: the file's text, or what its JSON holds.
        name: how messages name the file.
        models: names of the model that is served, the one to show first.
        kv_dtypes: names of the type of its KV cache, likewise; "auto" among them where it is the model's own.

    Raises:
        ConfigError: the file is malformed, or was measured on another model or type.
    """
    return _File(name).read(content, models, kv_dtypes)


class _File:
    """One file being read: knows how messages name it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, field: str, value: object, way_out: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ConfigError(f"break-even file {self.name}: {field} is {shown}: {way_out}")

    def read(
        self, content: str | Mapping[str, object], models: Collection[str], kv_dtypes: Collection[str]
    ) -> BreakEven:
        data = self._json(content) if isinstance(content, str) else content
        if not isinstance(data, Mapping):
            self.fail("its content", data, "write a JSON object with model_name and break_even_ssd_tokens")
        version = data.get("schema_version", 2 if "curves" in data else 1)
        if isinstance(version, bool) or version not in (1, 2):
            self.fail("schema_version", version, "this kvtier reads versions 1 and 2; measure again, or write 1 or 2")
        known = _FIELDS_1 if version == 1 else _FIELDS_2
        for field, value in data.items():
            if field not in known:
                if field in _FIELDS_2:
                    self.fail(field, value, "this field belongs to version 2: set schema_version to 2")
                near = difflib.get_close_matches(str(field), known, n=1)
                self.fail(
                    str(field), value, f"not known; did you mean {near[0]}?" if near else "not known; leave it away"
                )
        self._identity(data, models, kv_dtypes)
        curves = self._curves(data) if version == 2 else None
        if version == 1 and not data.keys() & {"break_even_ssd_tokens", "break_even_mem_tokens"}:
            self.fail(
                "break_even_ssd_tokens", None, "write the tokens from which on loading from disk pays, 0 for no gate"
            )
        margin = self._count(data, "safety_margin_tokens", 0)
        ssd = self._count(data, "break_even_ssd_tokens", break_even_tokens(curves.f, curves.g_ssd) if curves else 0)
        mem = self._count(data, "break_even_mem_tokens", break_even_tokens(curves.f, curves.g_mem) if curves else 0)
        return BreakEven(ssd + margin if ssd else 0, mem + margin if mem else 0, curves)

    def _json(self, text: str) -> Any:
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            result = dict(pairs)
            if len(result) < len(pairs):
                names = [name for name, _ in pairs]
                twice = next(name for name in names if names.count(name) > 1)
                self.fail(twice, result[twice], "it is there twice: leave one away")
            return result

        try:
            return json.loads(text, object_pairs_hook=once)
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"break-even file {self.name} is no JSON ({error}): measure it again, or set prefix_cache_break_even_path to "
                "another file"
            ) from None

    def _identity(self, data: Mapping[str, object], models: Collection[str], kv_dtypes: Collection[str]) -> None:
        model = data.get("model_name")
        if not isinstance(model, str) or not model:
            self.fail("model_name", model, "write the name of the model that was measured")
        if model.rstrip("/") not in {known.rstrip("/") for known in models}:
            self.fail(
                "model_name",
                model,
                f"the model that is served is {next(iter(models), '')!r}; give the file measured with it, measure one, or, where it is the same "
                "model, give vLLM this name too (--served-model-name)",
            )
        dtype = data.get("kv_dtype")
        if dtype is None:
            return
        if not isinstance(dtype, str) or not dtype:
            self.fail(
                "kv_dtype", dtype, "write the type of the KV cache that was measured, such as 'bfloat16' or 'auto'"
            )
        if _type_name(dtype) not in {_type_name(known) for known in kv_dtypes}:
            self.fail(
                "kv_dtype",
                dtype,
                f"the KV cache that is served has {next(iter(kv_dtypes), '')!r}; give the file measured with it, or measure one",
            )

    def _count(self, data: Mapping[str, object], field: str, default: int, low: int = 0) -> int:
        value = data.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= NEVER:
            self.fail(field, value, f"write a whole number, {low} or more")
        return value

    def _seconds(self, field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _SECONDS_MAX:
            self.fail(field, value, "write seconds, 0 or more")
        return float(value)

    def _curves(self, data: Mapping[str, object]) -> Curves:
        if "kv_bytes_per_token" in data:
            self._count(data, "kv_bytes_per_token", 1, low=1)
        raw = data.get("curves")
        if not isinstance(raw, Mapping) or set(raw) != set(CURVE_NAMES):
            shown = sorted(map(str, raw)) if isinstance(raw, Mapping) else raw
            self.fail(
                "curves", shown, "version 2 has exactly f, g_ssd and g_mem; without curves set schema_version to 1"
            )
        curves = Curves(*(self._curve(f"curves.{name}", raw[name]) for name in CURVE_NAMES))
        golden = data.get("golden", [])
        if not isinstance(golden, list):
            self.fail("golden", golden, "write a list of points, or leave it away")
        for place, point in enumerate(golden):
            self._check_golden(f"golden[{place}]", point, curves)
        return curves

    def _curve(self, field: str, raw: object) -> Curve:
        if not isinstance(raw, Mapping) or set(raw) != {"floor", "knots"}:
            shown = sorted(map(str, raw)) if isinstance(raw, Mapping) else raw
            self.fail(field, shown, 'write {"floor": seconds, "knots": {"tokens": seconds}}')
        floor_s = self._seconds(f"{field}.floor", raw["floor"])
        if not isinstance(raw["knots"], Mapping) or len(raw["knots"]) > _KNOTS_MAX:
            self.fail(f"{field}.knots", raw["knots"], f'write {{"tokens": seconds}}, at most {_KNOTS_MAX:,} of them')
        knots: dict[int, float] = {}
        for text, value in raw["knots"].items():
            place = f"{field}.knots[{text!r}]"
            if not isinstance(text, str) or not (text.isascii() and text.isdigit() and len(text) <= 12):
                self.fail(place, value, "the name of a knot is a whole number of tokens, in digits")
            seconds = self._seconds(place, value)
            if int(text) in knots:
                self.fail(place, value, "this number of tokens is there twice: leave one away")
            knots[int(text)] = seconds
        if knots.pop(0, floor_s) != floor_s:
            self.fail(
                f"{field}.knots['0']",
                raw["knots"],
                f"floor is {floor_s} at 0 tokens too: make them equal, or leave knot 0 away",
            )
        if not knots:
            self.fail(f"{field}.knots", raw["knots"], "at least one knot above 0 tokens is needed")
        return Curve(floor_s, knots)

    def _check_golden(self, field: str, point: object, curves: Curves) -> None:
        if not isinstance(point, Mapping) or not {"tokens", *CURVE_NAMES} <= set(point):
            self.fail(field, point, 'write {"tokens": tokens, "f": seconds, "g_ssd": seconds, "g_mem": seconds}')
        tokens = self._count(point, "tokens", 0)
        for name, curve in zip(CURVE_NAMES, curves, strict=True):
            expected = self._seconds(f"{field}.{name}", point[name])
            if not math.isclose(curve(tokens), expected, rel_tol=GOLDEN_RELATIVE, abs_tol=GOLDEN_ABSOLUTE_S):
                self.fail(
                    f"{field}.{name}",
                    expected,
                    f"the curve gives {curve(tokens):.6g} s at {tokens} tokens: the file was edited, or made by other rules; measure it "
                    "again, or leave golden away to trust the knots",
                )


def _type_name(name: str) -> str:
    lower = name.strip().lower().removeprefix("torch.")
    return _SAME_TYPE.get(lower, lower)
