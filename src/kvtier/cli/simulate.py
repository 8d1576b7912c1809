"""`kvtier simulate`: policies and tiers on request traces."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.command import check_number
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.policy.advice import ReuseCurve
    from kvtier.simulate.replay import ReplayResult
    from kvtier.simulate.run import Machine, RunResult
    from kvtier.simulate.trace import Trace

NAME = "simulate"
HELP = "hit rates of policies on request traces; times, writes and sizing of simulated tiers"
CAPACITIES = "1000,3000,10000,30000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="JSON lines, .gz and .xz too")
    parser.add_argument(
        "--policy",
        default="all",
        metavar="A,B",
        help="policies by name; all; min, which knows the future; infinite, which never evicts (default all)",
    )
    parser.add_argument(
        "--capacity-blocks",
        metavar="N,M",
        help=f"policies alone, at these capacities in blocks (default {CAPACITIES} where no tier is given)",
    )
    parser.add_argument("--format", default="auto", help="auto, mooncake, bailian or kvtier (default auto)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out and count bad lines instead of stopping")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N requests of each trace")
    parser.add_argument("--json", type=Path, metavar="F", help="write the results to a file")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a page with charts, DIR/index.html")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    tiers = parser.add_argument_group(
        "tiers", "The whole control plane with simulated media and engines, where --dram is given."
    )
    tiers.add_argument("--dram", metavar="SIZE", help="DRAM tier, such as 200GB")
    tiers.add_argument("--disk", metavar="SIZE", help="disk tier (default none)")
    tiers.add_argument(
        "--kv-bytes-per-token", type=int, default=131_072, metavar="N", help="default 131072, an 8B model"
    )
    tiers.add_argument(
        "--engines", type=int, default=0, metavar="N", help="default: as many as keep up without a cache"
    )
    tiers.add_argument("--prefill-tokens-per-s", type=float, default=10_000.0, metavar="X", help="default 10000")
    tiers.add_argument("--disk-read", default="6GB", metavar="SIZE", help="bytes a second (default 6GB)")
    tiers.add_argument("--disk-write", default="3GB", metavar="SIZE", help="bytes a second (default 3GB)")
    tiers.add_argument("--disk-latency-us", type=float, default=100.0, metavar="X", help="default 100")
    tiers.add_argument("--copy", default="25GB", metavar="SIZE", help="engine to DRAM, bytes a second (default 25GB)")


def run(args: argparse.Namespace) -> int:
    """0, or an error that names what is wrong."""
    import msgspec

    from kvtier.simulate.replay import replay_infinite, replay_named
    from kvtier.simulate.run import simulate

    policies = _policies(args.policy)
    capacities = _capacities(args)
    machine = _machine(args)
    if machine is not None and not capacities and not set(policies) - {"min", "infinite"}:
        raise ConfigError(
            f"--policy is {args.policy!r}, and only policies that do not know the future run in tiers: name one, or --capacity-blocks"
        )
    results: list[dict[str, Any]] = []
    names: set[str] = set()
    tables: dict[str, tuple[list[ReplayResult], ReplayResult]] = {}
    runs: dict[str, list[tuple[RunResult, ReuseCurve]]] = {}
    for path in args.traces:
        trace = _trace(path, args)
        name = trace.name if trace.name not in names else str(path)
        if name in names:
            name = f"{path} ({len(names) + 1})"
        names.add(name)
        if capacities:
            # It holds every distinct block of the trace, so that it runs only where somebody will look at it.
            infinite = None
            if "infinite" in policies or args.report is not None:
                with _Progress(trace, f"{name} infinite", args.quiet):
                    infinite = replay_infinite(trace)
            rows: list[ReplayResult] = []
            for policy in policies:
                for capacity in capacities if policy != "infinite" else (0,):
                    with _Progress(trace, f"{name} {policy} {capacity or ''}", args.quiet):
                        row = infinite if policy == "infinite" else replay_named(trace, policy, capacity)
                    assert row is not None
                    results.append(_row(name, row))
                    rows.append(row)
                    print(f"{name:<24} {policy:<9} {capacity:>9,} {row.hit_rate:.4f} {row.seconds:7.1f} s", flush=True)
            _say_skipped(trace)
            if infinite is not None:
                tables[name] = ([row for row in rows if row.policy != "infinite"], infinite)
        if machine is not None:
            for policy in policies:
                if policy in ("min", "infinite"):
                    continue
                with _Progress(trace, f"{name} {policy} tiers", args.quiet):
                    result, curve = simulate(trace, machine, policy)
                result = msgspec.structs.replace(result, trace=name)
                runs.setdefault(name, []).append((result, curve))
                results.append(_run_row(result))
                _print_run(result)
            if not capacities:
                _say_skipped(trace)
            if name in runs:
                from kvtier.report.simulation import sizing_advice

                what, size = ("disk", machine.disk_bytes) if machine.disk_bytes else ("DRAM", machine.dram_bytes)
                print(sizing_advice(runs[name][0][1], size, what))
    _write(args, results, tables, runs)
    return 0


def _policies(text: str) -> list[str]:
    from kvtier.policy.registry import policy_names

    known = policy_names()
    wanted: list[str] = []
    for name in (part.strip().lower() for part in text.split(",")):
        if name == "all":
            wanted += known
        elif name in known or name in ("min", "infinite"):
            wanted.append(name)
        else:
            raise ConfigError(f"policy {name!r} is not known: use {', '.join(known)}, all, min or infinite")
    return list(dict.fromkeys(wanted))


def _capacities(args: argparse.Namespace) -> list[int]:
    text = args.capacity_blocks
    if text is None:
        text = CAPACITIES if args.dram is None else ""
    capacities = []
    for part in text.split(",") if args.capacity_blocks is not None or text else ():
        try:
            capacity = int(part)
        except ValueError:
            raise ConfigError(f"--capacity-blocks: {part!r} is not a number of blocks") from None
        if capacity <= 0:
            raise ConfigError(f"--capacity-blocks: a tier of {capacity} blocks can hold nothing: use 1 or more")
        capacities.append(capacity)
    return capacities


def _size(option: str, text: str, low: int) -> int:
    from kvtier.config import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as wrong:
        raise ConfigError(f"{option} is {text!r}: {wrong}") from None
    if size < low:
        raise ConfigError(f"{option} is {text!r}: use {low} bytes or more")
    return size


def _machine(args: argparse.Namespace) -> "Machine | None":
    if args.dram is None:
        if args.disk is not None:
            raise ConfigError(
                f"--disk is {args.disk!r} without --dram: what goes to disk passes through DRAM, give both"
            )
        return None
    from kvtier.simulate.media import PrefillSpeed
    from kvtier.simulate.run import Machine

    check_number("--kv-bytes-per-token", args.kv_bytes_per_token, 1, 1 << 40)
    check_number("--prefill-tokens-per-s", args.prefill_tokens_per_s, 0.001, 1e12)
    check_number("--engines", args.engines, 0, 100_000)
    check_number("--disk-latency-us", args.disk_latency_us, 0, 1e9)
    return Machine(
        dram_bytes=_size("--dram", args.dram, 1),
        disk_bytes=_size("--disk", args.disk, 0) if args.disk is not None else 0,
        kv_bytes_per_token=args.kv_bytes_per_token,
        copy_bytes_per_s=_size("--copy", args.copy, 1),
        disk_read_bytes_per_s=_size("--disk-read", args.disk_read, 1),
        disk_write_bytes_per_s=_size("--disk-write", args.disk_write, 1),
        disk_latency_s=args.disk_latency_us * 1e-6,
        curve=PrefillSpeed(tokens_per_s=args.prefill_tokens_per_s),
        engines=args.engines,
    )


def _trace(path: Path, args: argparse.Namespace) -> "Trace":
    from kvtier.simulate.trace import Trace

    if args.requests is not None and args.requests < 1:
        raise ConfigError(f"--requests is {args.requests}: use 1 or more")
    return Trace(path, format=args.format, skip_bad=args.skip_bad, requests_max=args.requests)


class _Progress:
    """A bar on standard error, where that is a terminal."""

    def __init__(self, trace: "Trace", title: str, quiet: bool) -> None:
        self._trace, self._title, self._seen, self._shown = trace, title, 0, -1
        self._on = not quiet and sys.stderr.isatty()

    def __enter__(self) -> None:
        if self._on:
            self._trace.progress = self._step

    def __exit__(self, *_: object) -> None:
        self._trace.progress = None
        if self._on:
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)

    def _step(self, read_bytes: int) -> None:
        self._seen += read_bytes
        part = self._seen / max(1, self._trace.file_bytes) % 1.0
        if int(part * 100) != self._shown:
            self._shown = int(part * 100)
            bar = "#" * int(part * 30)
            print(f"\r{self._title:<38.38} [{bar:<30}] {part:4.0%}", end="", file=sys.stderr, flush=True)


def _say_skipped(trace: "Trace") -> None:
    if trace.skipped:
        print(f"{trace.path}: {trace.skipped} bad lines skipped", file=sys.stderr)


def _row(trace: str, row: "ReplayResult") -> dict[str, Any]:
    return {
        "trace": trace,
        "policy": row.policy,
        "capacity_blocks": row.capacity_blocks,
        "hit_rate": row.hit_rate,
        "hit_blocks": row.hit_blocks,
        "asked_blocks": row.asked_blocks,
        "stored_blocks": row.stored_blocks,
        "seconds": row.seconds,
    }


def _run_row(result: "RunResult") -> dict[str, Any]:
    import msgspec

    row: dict[str, Any] = msgspec.to_builtins(result)
    del row["ttft_curve"], row["ttft_without_curve"]
    return row


def _print_run(result: "RunResult") -> None:
    from kvtier.report.simulation import size_text

    ttft, without = result.ttft_s, result.ttft_without_s
    print(
        f"{result.trace:<24} {result.policy:<9} DRAM {size_text(result.dram_bytes)}, disk {size_text(result.disk_bytes)},"
        f" {result.engines} engines: hit rate {result.hit_rate:.4f} (DRAM {result.dram_hit_blocks:,}, disk"
        f" {result.disk_hit_blocks:,} blocks); TTFT mean {ttft['mean']:.2f} s for {without['mean']:.2f}, p90 {ttft['p90']:.2f} for"
        f" {without['p90']:.2f}; {size_text(result.written_bytes)} written",
        flush=True,
    )


def _write(
    args: argparse.Namespace,
    results: list[dict[str, Any]],
    tables: "dict[str, tuple[list[ReplayResult], ReplayResult]]",
    runs: "dict[str, list[tuple[RunResult, ReuseCurve]]]",
) -> None:
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
        if args.report is not None:
            from kvtier.report.simulation import page

            args.report.mkdir(parents=True, exist_ok=True)
            command = shlex.join(["kvtier", *sys.argv[1:]])
            # A name that is no text is shown as its bytes.
            (args.report / "index.html").write_text(
                page(tables, runs, command), encoding="utf-8", errors="backslashreplace"
            )
            print(f"report: {args.report / 'index.html'}")
    except OSError as wrong:
        raise ConfigError(f"{wrong.filename}: {wrong.strerror}") from wrong
