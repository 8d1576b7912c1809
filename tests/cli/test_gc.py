"""`kvtier gc` from the outside: what it is told is checked before anything is removed."""

from pathlib import Path

import pytest

from kvtier.cli.main import main


@pytest.mark.parametrize("text", ["nan", "-1", "inf", "1e300"])
@pytest.mark.parametrize("option", ["--age-max-hours", "--orphan-age-hours", "--grace-s", "--every-s"])
def test_what_is_no_time_is_refused(option: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(tmp_path), f"{option}={text}"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"kvtier: {option} is ") and told.err.count("\n") == 1
