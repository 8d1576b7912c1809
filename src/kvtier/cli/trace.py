"""`kvtier trace`: checks a recording, sums it up by stage, and turns it into a trace that Perfetto and Chrome open."""

import argparse
import sys
from pathlib import Path

from kvtier.errors import ConfigError

NAME = "trace"
HELP = "check a recording, sum it up by stage, make a trace for Perfetto of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("recording", type=Path, metavar="RUN.jsonl", help="what the event recorder wrote")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="TRACE.json",
        help="write a trace for https://ui.perfetto.dev or chrome://tracing",
    )


def run(args: argparse.Namespace) -> int:
    """0 where the run is valid, 1 where it is no evidence; the trace is written either way."""
    from kvtier.observe.recorder import problems_of, read_jsonl, stages_of, write_chrome_trace

    try:
        # What is no text becomes an escape that JSON does not know.
        with args.recording.open(encoding="utf-8", errors="backslashreplace") as lines:
            recorded = read_jsonl(lines)
        if args.output is not None:
            write_chrome_trace(recorded, args.output)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    print(
        f"{'stage':<16} {'count':>8} {'total s':>10} {'p50 us':>10} {'p99 us':>10} {'raw':>14} {'stored':>14} {'moved':>14}"
    )
    for name, stage in stages_of(recorded).items():
        print(
            f"{name:<16} {stage.count:>8} {stage.total_s:>10.3f} {stage.p50_us:>10.1f} {stage.p99_us:>10.1f} {stage.raw_bytes:>14,} "
            f"{stage.stored_bytes:>14,} {stage.moved_bytes:>14,}"
        )
    problems = problems_of(recorded)
    for problem in problems[:20]:
        print(f"not valid: {problem}", file=sys.stderr)
    if len(problems) > 20:
        print(f"not valid: and {len(problems) - 20} more", file=sys.stderr)
    return 1 if problems else 0
