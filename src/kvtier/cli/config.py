"""`kvtier config`: what is in force here, and where each value comes from."""

import argparse
import json
import os
from dataclasses import fields

NAME = "config"
HELP = "print every setting, its value, its source and its meaning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "--extra", metavar="JSON", default="{}", help="what an engine would pass as kv_connector_extra_config"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the configuration. Returns 0; a setting that cannot be is an error that names it."""
    from kvtier.config import Config, load_config
    from kvtier.errors import ConfigError

    try:
        extra = json.loads(args.extra)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra is {args.extra!r}, which is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f'--extra is {args.extra!r}: write a JSON object, such as \'{{"dram_bytes": "8GiB"}}\'')
    loaded = load_config(extra, environ=os.environ, extra_source="--extra")
    rows = [
        (item.name, getattr(loaded.config, item.name), loaded.sources[item.name], item.metadata["meaning"])
        for item in fields(Config)
    ]
    if args.json:
        print(
            json.dumps(
                {name: {"value": value, "source": source} for name, value, source, _ in rows}, default=str, indent=1
            )
        )
        return 0
    width = max(len(name) for name, *_ in rows)
    for name, value, source, meaning in rows:
        print(f"{name:{width}}  {'' if value is None else value!s:>14}  {source:10}  {meaning}")
    return 0
