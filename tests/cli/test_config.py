"""`kvtier config` as a user runs it."""

import json

import pytest

from kvtier.cli.main import main


def test_values_and_sources_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_IO_DEPTH", "5")
    assert main(["config", "--json", "--extra", '{"dram_bytes": "1MiB"}']) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["dram_bytes"] == {"value": 1 << 20, "source": "--extra"}
    assert shown["io_depth"] == {"value": 5, "source": "KVTIER_IO_DEPTH"}
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(shown)
    assert any(line.startswith("io_depth") and "KVTIER_IO_DEPTH" in line for line in lines)


@pytest.mark.parametrize("extra", ["{", "[]", '{"dram_byte": 1}'])
def test_a_mistake_is_named(extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--extra", extra]) != 0
    assert "--extra" in capsys.readouterr().err
