"""`kvtier`: finds the command and runs it.

A command is one file here, see `kvtier.cli.command`. Exit codes: 0 success; 1 what the command was to show does not hold; 2 it was used
wrongly or cannot run here.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from kvtier import __version__
from kvtier.cli import bench, config, gc, quickstart, simulate, trace
from kvtier.cli.command import Command, add_commands
from kvtier.errors import KVTierError

# Adding a command is one file and one name here.
COMMANDS: tuple[Command, ...] = (bench, config, gc, quickstart, simulate, trace)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvtier", description="Keeps the KV cache of large language models outside the GPU and brings it back."
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    add_commands(parser, COMMANDS, "COMMAND")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    args = make_parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        code = args.run(args)
        assert isinstance(code, int)
        sys.stdout.flush()
        return code
    except KVTierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone: say nothing more to it
        _mute()
        return 141
    except OSError as error:  # our output cannot be written, or something else that a command did not foresee
        _mute()
        print(f"kvtier: {error}", file=sys.stderr)
        return 2


def _mute() -> None:
    """Let what is still to be written go nowhere, or it would fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
