"""`kvtier gc`: bound what lies on a shared filesystem."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from kvtier.cli.command import check_number

NAME = "gc"
HELP = "bound a shared filesystem's parts by size, age and value, and sweep up after dead writers; safe beside running engines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("root", type=Path, help="the shared directory (shared_storage_path)")
    parser.add_argument("--bytes-max", help="most bytes that parts may take, for instance 4TiB")
    parser.add_argument("--age-max-hours", type=float, help="remove what was not used for this long")
    parser.add_argument(
        "--orphan-age-hours",
        type=float,
        default=1.0,
        help="temporary files older than this are a dead writer's (default 1)",
    )
    parser.add_argument("--grace-s", type=float, default=60.0, help="leave younger files alone (default 60)")
    parser.add_argument("--every-s", type=float, help="sweep again and again, this many seconds apart")
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object a sweep")


def run(args: argparse.Namespace) -> int:
    """Sweep once, or for ever. 0 where nothing refused to go."""
    from kvtier.config import SECONDS_MAX, parse_bytes
    from kvtier.errors import ConfigError
    from kvtier.tier.disk.janitor import JanitorRules, sweep

    try:
        bytes_max = parse_bytes(args.bytes_max) if args.bytes_max is not None else None
    except ValueError as error:
        raise ConfigError(f"--bytes-max is {args.bytes_max!r}: {error}") from None
    for option, value, low in (
        ("--age-max-hours", args.age_max_hours, 0),
        ("--orphan-age-hours", args.orphan_age_hours, 0),
        ("--grace-s", args.grace_s, 0),
        ("--every-s", args.every_s, 0.001),
    ):
        check_number(option, value, low, SECONDS_MAX)
    rules = JanitorRules(
        bytes_max=bytes_max,
        age_max_s=args.age_max_hours * 3600 if args.age_max_hours is not None else None,
        orphan_age_s=args.orphan_age_hours * 3600,
        grace_s=args.grace_s,
    )
    while True:
        report = sweep(args.root, rules, now_s=time.time(), dry_run=args.dry_run)
        if args.json:
            print(json.dumps(dataclasses.asdict(report)), flush=True)
        else:
            verb = "would be removed" if args.dry_run else "removed"
            removed = report.records_removed_by_age + report.records_removed_by_size
            print(
                f"{report.records} records, {report.bytes_found:,} bytes; {verb}: {removed} records, {report.bytes_removed:,} bytes "
                f"({report.records_removed_by_age} by age, {report.records_removed_by_size} by size), {report.orphans_removed} orphans",
                flush=True,
            )
            for text in report.errors[:10]:
                print(f"not removed: {text}", flush=True)
        if args.every_s is None:
            return 1 if report.errors else 0
        time.sleep(args.every_s)
