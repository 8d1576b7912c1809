"""`kvtier quickstart`: the contract of records and byte stores, shown in a second without an engine, and evidence of it in files."""

import argparse
import json
import sys
from pathlib import Path

from kvtier.errors import ConfigError

NAME = "quickstart"
HELP = "store two synthetic records through the real connector, check every promise, write evidence"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="new or empty directory for summary.json, events.jsonl, evidence.json",
    )
    parser.add_argument(
        "--break",
        dest="broken",
        metavar="NAME",
        help="break one invariant on purpose, to see that its check fails; '?' lists them",
    )


def prepare(output: Path) -> None:
    """Make the output directory. Raises ConfigError where it cannot be one, or holds something."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        taken = next(output.iterdir(), None)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be used as a directory: {error.strerror}") from error
    if taken is not None:
        raise ConfigError(f"--output {output} is not empty ({taken.name} is there): name a new directory")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every invariant held, 1 if one failed."""
    from kvtier.cli import quickstart_demo as demo

    if args.broken == "?":
        print("\n".join(demo.INVARIANTS))
        return 0
    if args.broken is not None and args.broken not in demo.INVARIANTS:
        raise ConfigError(f"--break {args.broken} is no invariant: use one of {', '.join(demo.INVARIANTS)}")
    prepare(args.output)
    result = demo.run(args.broken)
    files = {"evidence.json": json.dumps(result.evidence(), indent=2) + "\n"}
    if result.failure is None:
        files["summary.json"] = json.dumps(result.summary(), indent=2) + "\n"
        files["events.jsonl"] = "".join(json.dumps(line) + "\n" for line in result.events())
    try:
        for name, text in files.items():
            (args.output / name).write_text(text)
    except OSError as error:
        unwritten = f"--output {args.output} cannot be written: {error.strerror}"
        if result.failure is None:
            raise ConfigError(unwritten) from error
        print(f"kvtier: {unwritten}", file=sys.stderr)
    if result.failure is not None:
        print(f"invariant failed: {result.failure.invariant}: {result.failure}", file=sys.stderr)
        return 1
    print(
        f"{'arm':<9} {'record':<6} {'raw':>6} = {'payload':>7} + {'metadata':>8} + {'framing':>7} -> {'stored':>6}  raw/stored"
    )
    for arm in result.arms:
        for record, sizes in arm.records.items():
            print(
                f"{arm.name:<9} {record:<6} {sizes.raw_bytes:>6}   {sizes.payload_bytes:>7}   {sizes.metadata_bytes:>8}   {sizes.framing_bytes:>7}    "
                f"{sizes.stored_bytes:>6}  {sizes.raw_to_envelope_ratio:.3f}"
            )
    print(f"{len(demo.INVARIANTS)} invariants held in {len(result.arms)} arms; evidence is in {args.output}")
    return 0
