"""`kvtier bench codecs`."""

import argparse

NAME = "codecs"
HELP = "ratio, speed and error of every codec on KV of a real model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""


def run(args: argparse.Namespace) -> int:
    """Measure."""
    return 0
