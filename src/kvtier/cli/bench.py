"""`kvtier bench WHAT`: measures one thing on this machine."""

import argparse

from kvtier.cli import bench_break_even, bench_codecs, bench_disk
from kvtier.cli.command import Command, add_commands

NAME = "bench"
HELP = "measure one thing on this machine"

# Adding a benchmark is one file, made as a command is, and one name here.
BENCHES: tuple[Command, ...] = (bench_break_even, bench_codecs, bench_disk)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every benchmark."""
    add_commands(parser, BENCHES, "WHAT")


def run(args: argparse.Namespace) -> int:
    """Never called."""
    raise AssertionError("argparse demands a benchmark, whose own run is called")
