"""The command line's own duties."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier import __version__
from kvtier.cli import bench, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["bench"], ["no-such-command"], ["quickstart"]])
def test_wrong_use_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2


def test_every_command_has_a_name_and_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    for commands in (main.COMMANDS, bench.BENCHES):
        names = [command.NAME for command in commands]
        assert len(set(names)) == len(names)
        assert all(command.HELP and "\n" not in command.HELP for command in commands)
    with pytest.raises(SystemExit):
        main.main(["--help"])
    shown = capsys.readouterr().out
    assert all(command.NAME in shown for command in main.COMMANDS)


def test_the_command_line_is_light_to_import() -> None:
    code = "import sys, kvtier.cli.main; heavy = {'torch', 'numba', 'numpy', 'zstandard', 'asyncio', 'vllm'} & set(sys.modules); sys.exit(repr(heavy) if heavy else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(main.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_exit_code_2_and_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", "config"],
            env={"PYTHONPATH": str(Path(main.__file__).parents[2])},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("kvtier: ") and "No space left" in done.stderr
    assert done.stderr.count("\n") == 1
