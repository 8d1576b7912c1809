"""`kvtier bench break-even`: measures what recomputing and loading cost with one model here, and writes the break-even file.

Three engines run one after another, each in a process of its own: one without any cache gives `f`; one stores every prompt; one is
started anew on that disk, so that nothing is in memory, and gives `g_ssd` when a prompt is asked for first and `g_mem` when it is
asked for again. One request at a time, one output token, the first of each length discarded. Every sample is checked to have come
from where it should: a prefix that was found in part, or in the wrong tier, ends the run.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.testing.vllm.driver import Engine

NAME = "break-even"
HELP = "from which prefix length on loading pays with a model: writes the file of prefix_cache_break_even_path"
TOKENS = "1024,2048,4096,8192,16384,32768"
ENGINE_TIMEOUT_S = 4 * 3600.0
ANSWER_DEADLINE_S = 900.0


@dataclass
class Samples:
    """What was measured.

    Attributes:
        seconds: by curve and tokens, one figure a repetition.
        floors: by curve, the same for a prompt of one token, which loads nothing.
        facts: what the engine says of itself, for the file.
    """

    seconds: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    floors: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, curve: str, tokens: int, seconds: float) -> None:
        """One figure."""
        self.seconds.setdefault(curve, {}).setdefault(tokens, []).append(seconds)


@dataclass(frozen=True)
class Plan:
    """What to measure: a model, on a disk, at some prefix lengths, so many times."""

    model: str
    disk: Path
    tokens: tuple[int, ...]
    repeats: int
    dram_bytes: int
    disk_bytes: int
    engine: dict[str, Any]

    def start(self, **more: Any) -> "Engine":
        """An engine as it would serve, with room for the longest prompt."""
        from kvtier.testing.vllm.driver import Engine

        settings = {
            "enforce_eager": False,
            "kv_cache_memory_bytes": None,
            "max_model_len": max(self.tokens) + 1024,
            **self.engine,
            **more,
        }
        return Engine(self.model, **settings)

    def kvtier(self) -> dict[str, Any]:
        """kvtier's settings."""
        return {"dram_bytes": self.dram_bytes, "disk_path": str(self.disk), "disk_bytes": self.disk_bytes}

    def lengths(self, engine: "Engine") -> list[int]:
        """The prefix lengths, rounded up to blocks."""
        block = engine.block_tokens
        return sorted({-(-tokens // block) * block for tokens in self.tokens})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--model", required=True, help="as vLLM is given it")
    parser.add_argument("--disk", type=Path, required=True, help="an existing directory on the disk that will serve")
    parser.add_argument("--json", type=Path, required=True, help="write the break-even file here")
    parser.add_argument("--tokens", default=TOKENS, help=f"prefix lengths, comma-separated (default {TOKENS})")
    parser.add_argument("--repeats", type=int, default=3, help="figures of which the median is kept (default 3)")
    parser.add_argument("--dram", default="4GiB", help="kvtier's DRAM; holds the longest prefix (default 4GiB)")
    parser.add_argument("--disk-bytes", default="64GiB", help="kvtier's disk; holds all prefixes (default 64GiB)")
    parser.add_argument("--margin", type=int, default=0, help="safety_margin_tokens of the file (default 0)")
    parser.add_argument("--name", help="model_name of the file, where the model is served by another (default --model)")
    parser.add_argument(
        "--engine", default="{}", help="further arguments of vLLM's engine, as JSON: '{\"tensor_parallel_size\": 2}'"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the file."""
    from kvtier.plan.break_even import NEVER, parse_break_even

    plan = _plan_of(args)
    samples = measure(plan)
    content = break_even_file(samples, model=args.name or args.model, margin=args.margin, plan=plan)
    text = json.dumps(content, indent=1) + "\n"
    parse_break_even(text, name=str(args.json), models=[content["model_name"]], kv_dtypes=[content["kv_dtype"]])
    args.json.write_text(text)
    print_table(samples)
    for medium, field_name in (("disk", "break_even_ssd_tokens"), ("memory", "break_even_mem_tokens")):
        tokens = content[field_name]
        words = "never pays" if tokens >= NEVER else f"pays from {tokens:,} tokens on" if tokens else "always pays"
        print(f"loading from {medium} {words}")
    return 0


def _plan_of(args: argparse.Namespace) -> Plan:
    from kvtier.config import parse_bytes
    from kvtier.errors import ConfigError

    try:
        tokens = tuple(int(text) for text in args.tokens.split(","))
        dram_bytes, disk_bytes = parse_bytes(args.dram), parse_bytes(args.disk_bytes)
        engine = json.loads(args.engine)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--tokens {args.tokens!r}, --dram {args.dram!r}, --disk-bytes {args.disk_bytes!r}, --engine {args.engine!r}: {error}"
        ) from None
    if min(tokens) < 1 or args.repeats < 1 or args.margin < 0:
        raise ConfigError(
            f"--tokens is {args.tokens!r}, --repeats {args.repeats} and --margin {args.margin}: use positive lengths, at least one "
            "repetition and no negative margin"
        )
    if not isinstance(engine, dict):
        raise ConfigError(f"--engine is {args.engine!r}: write a JSON object")
    if not args.disk.is_dir():
        raise ConfigError(f"--disk is {str(args.disk)!r}: name an existing directory on the disk that will serve")
    return Plan(args.model, args.disk, tokens, args.repeats, dram_bytes, disk_bytes, engine)


def measure(plan: Plan) -> Samples:
    """Run the three engines. What they leave on the disk is removed."""
    from kvtier.errors import KVTierError
    from kvtier.testing import forks

    merged = Samples()
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as logs,
        tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=plan.disk) as disk,
    ):
        inner = Plan(**{**plan.__dict__, "disk": Path(disk)})
        for number, phase in enumerate((recompute, store, load)):
            try:
                found = forks.run(
                    _in_child(phase, inner), log=Path(logs) / f"engine-{number}.log", timeout_s=ENGINE_TIMEOUT_S
                )
            except forks.ForkError as error:
                raise KVTierError(f"the engine that was to {phase.__name__} did not: {error}") from None
            merged.seconds |= found.seconds
            merged.floors |= found.floors
            merged.facts |= found.facts
    return merged


def _in_child(phase: Callable[[Plan], Samples], plan: Plan) -> Callable[[], Samples]:
    def child() -> Samples:
        # The driver sets these for tests; here an engine runs as it would serve, unless it is told otherwise.
        os.environ.setdefault("HF_HUB_OFFLINE", "0")
        if not plan.engine.get("enforce_eager"):
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "0")
        return phase(plan)

    return child


def recompute(plan: Plan) -> Samples:
    """`f`: prompts that no cache knows."""
    samples = Samples()
    with plan.start(enable_prefix_caching=False) as engine:
        lengths = plan.lengths(engine)
        _floor(engine, plan, samples, "f")
        for tokens in lengths:
            for number in range(plan.repeats + 1):
                seconds = _ask(engine, prompt(number, tokens))[0]
                if number:
                    samples.add("f", tokens, seconds)
    return samples


def store(plan: Plan) -> Samples:
    """Every prompt is computed and written to disk."""
    with plan.start(kvtier=plan.kvtier()) as engine:
        for tokens in plan.lengths(engine):
            for number in range(plan.repeats + 1):
                _ask(engine, prompt(number, tokens + 1))
                engine.settle(deadline_s=ANSWER_DEADLINE_S)
    return Samples()


def load(plan: Plan) -> Samples:
    """`g_ssd` and `g_mem`: every prompt is found on disk, then in memory."""
    samples = Samples()
    with plan.start(kvtier=plan.kvtier()) as engine:
        samples.facts = engine.facts()
        for curve in ("g_ssd", "g_mem"):
            _floor(engine, plan, samples, curve)
        for tokens in plan.lengths(engine):
            for number in range(plan.repeats + 1):
                for curve, tier, other in (("g_ssd", "disk", "dram"), ("g_mem", "dram", "disk")):
                    engine.settle()
                    engine.reset_prefix_cache()
                    before = _loaded(engine, other)
                    seconds, found = _ask(engine, prompt(number, tokens + 1))
                    engine.settle()
                    _check(found == tokens, f"{found} of {tokens} tokens were found: give --disk-bytes more")
                    _check(
                        _loaded(engine, other) == before,
                        f"a prefix of {tokens} tokens did not come from {tier} alone: give --dram more",
                    )
                    if number:
                        samples.add(curve, tokens, seconds)
    return samples


def prompt(number: int, tokens: int) -> list[int]:
    """A prompt of small token numbers, which every vocabulary has; no two begin alike."""
    generator = random.Random(number * 1_000_003 + tokens)
    return [generator.randrange(1, 250) for _ in range(tokens)]


def _ask(engine: "Engine", tokens: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and the tokens that kvtier gave."""
    (answer,) = engine.answer([tokens], max_tokens=1, deadline_s=ANSWER_DEADLINE_S)
    return answer.ttft_s, answer.external_tokens


def _floor(engine: "Engine", plan: Plan, samples: Samples, curve: str) -> None:
    figures = [_ask(engine, prompt(number, 1))[0] for number in range(plan.repeats + 1)]
    samples.floors[curve] = figures[1:]


def _loaded(engine: "Engine", tier: str) -> float:
    return engine.counters[f"vllm:kvtier_load_{tier}_parts"]


def _check(holds: bool, words: str) -> None:
    if not holds:
        raise AssertionError(words)


def disk_model(path: Path) -> str:
    """What the disk under `path` calls itself; "unknown" where the system does not say."""
    device = path.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for above in (place, *place.parents[:2]):
        model = above / "device" / "model"
        if model.is_file():
            return model.read_text().strip()
    return "unknown"


def break_even_file(samples: Samples, *, model: str, margin: int, plan: Plan) -> dict[str, Any]:
    """The file's content, version 2: medians as knots, where the curves cross, and golden points between the knots."""
    from kvtier import __version__
    from kvtier.plan.break_even import CURVE_NAMES, Curve, break_even_tokens

    raw: dict[str, Any] = {}
    curves: dict[str, Curve] = {}
    for name in CURVE_NAMES:
        knots = {tokens: round(median(figures), 9) for tokens, figures in sorted(samples.seconds[name].items())}
        floor_s = round(median(samples.floors[name]), 9)
        raw[name] = {"floor": floor_s, "knots": {str(tokens): seconds for tokens, seconds in knots.items()}}
        curves[name] = Curve(floor_s, knots)
    lengths = [0, *sorted(samples.seconds["f"])]
    golden = [(low + high) // 2 for low, high in pairwise(lengths)] + [2 * lengths[-1]]
    spread = {
        name: {str(tokens): [round(min(figures), 9), round(max(figures), 9)] for tokens, figures in by_tokens.items()}
        for name, by_tokens in samples.seconds.items()
    }
    facts = dict(samples.facts)
    return {
        "schema_version": 2,
        "model_name": model,
        "kv_dtype": facts["kv_dtype"],
        "gpu_model": facts["gpu_model"],
        "ssd_model": disk_model(plan.disk),
        "kv_bytes_per_token": facts["kv_bytes_per_token"],
        "break_even_ssd_tokens": break_even_tokens(curves["f"], curves["g_ssd"]),
        "break_even_mem_tokens": break_even_tokens(curves["f"], curves["g_mem"]),
        "safety_margin_tokens": margin,
        "curves": raw,
        "golden": [{"tokens": n, **{name: round(curve(n), 9) for name, curve in curves.items()}} for n in golden],
        "provenance": {
            "tool": f"kvtier {__version__} bench break-even",
            "vllm": facts["vllm"],
            "repeats": plan.repeats,
            "engine": plan.engine,
            "min_max": spread,
        },
    }


def print_table(samples: Samples) -> None:
    """Medians in milliseconds, with the least and the greatest figure."""
    print(f"{'tokens':>8}  " + "  ".join(f"{name + ' ms':>28}" for name in ("f", "g_ssd", "g_mem")))
    for tokens in sorted(samples.seconds["f"]):
        print(f"{tokens:>8}  " + "  ".join(_cell(samples.seconds[name], tokens) for name in ("f", "g_ssd", "g_mem")))


def _cell(by_tokens: Mapping[int, list[float]], tokens: int) -> str:
    figures = [1000 * seconds for seconds in by_tokens[tokens]]
    return f"{median(figures):>10.2f} ({min(figures):.2f}..{max(figures):.2f})".rjust(28)
