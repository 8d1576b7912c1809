"""What a command is."""

import argparse
from collections.abc import Sequence
from typing import Protocol

from kvtier.errors import ConfigError


class Command(Protocol):
    """What a command's module has, as functions. What is heavy to import is imported inside `run`."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run it; its exit code."""


def check_number(option: str, value: float | None, low: float, high: float) -> None:
    """Raises ConfigError where `value`, of an option that was given, is below `low`, above `high`, or no number."""
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{option} is {value}: use {low:,g} to {high:,g}")


def add_commands(parser: argparse.ArgumentParser, commands: Sequence[Command], what: str) -> None:
    """Make `commands` subcommands of `parser`. The innermost that is chosen runs as `args.run(args)`."""
    choices = parser.add_subparsers(metavar=what, required=True)
    for command in commands:
        child = choices.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        child.set_defaults(run=command.run)
        command.add_arguments(child)
