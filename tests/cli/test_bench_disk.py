"""The benchmark of disks: small runs on a real directory, and its arithmetic."""

import json
import shutil
from pathlib import Path

import pytest

from kvtier.cli.bench_disk import Sample, medians, percentiles, print_table
from kvtier.cli.main import main

ROW = {"store", "operation", "block_bytes", "depth", "gbs", "cpu_s_per_gb", "p50_ms", "p99_ms"}


def test_it_measures_both_stores_and_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = [
        "--path",
        str(disk),
        "--json",
        str(out),
        "--rounds",
        "1",
        "--bytes",
        "2MiB",
        "--blocks",
        "64KiB",
        "--depths",
        "2",
    ]
    assert main(["bench", "disk", *arguments, "--stores", "segment,shared", "--engine", "threads"]) == 0
    rows = json.loads(out.read_text())
    assert all(set(row) == ROW for row in rows)
    assert {(row["store"], row["operation"]) for row in rows} == {
        ("segment", "write"), ("segment", "read"), ("segment", "read_busy"), ("segment", "write_busy"), ("segment", "read_mixed"),
        ("shared", "write"), ("shared", "read"),
    }  # fmt: skip
    assert all(row["gbs"] > 0 and (row["block_bytes"], row["depth"]) == (65536, 2) for row in rows)
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in rows if not row["operation"].endswith("_busy"))
    assert list(disk.iterdir()) == []
    assert "segment" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_runs_beside_the_stores(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    arguments = [
        "--path",
        str(tmp_path),
        "--json",
        str(out),
        "--rounds",
        "1",
        "--bytes",
        "2MiB",
        "--blocks",
        "64KiB",
        "--depths",
        "2",
    ]
    assert main(["bench", "disk", *arguments, "--stores", "fio"]) == 0
    assert {(row["store"], row["operation"]) for row in json.loads(out.read_text())} == {
        ("fio", "write"),
        ("fio", "read"),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stores", "tape"],
        ["--rounds", "0"],
        ["--blocks", "1000"],
        ["--blocks", "lots"],
        ["--depths", "x"],
        ["--path", "/nonexistent"],
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "disk", "--path", str(tmp_path), *arguments]) == 2
    assert arguments[-1].strip("/") in capsys.readouterr().err


def test_medians_are_of_each_figure_alone() -> None:
    rounds = [Sample("fio", "read", 1, 1, gbs, cpu, 1.0, 2.0) for gbs, cpu in ((1.0, 9.0), (3.0, 8.0), (2.0, 1.0))]
    assert medians([*rounds, Sample("segment", "read", 1, 1, 5.0, 5.0, 5.0, 5.0)]) == [
        Sample("fio", "read", 1, 1, 2.0, 8.0, 1.0, 2.0),
        Sample("segment", "read", 1, 1, 5.0, 5.0, 5.0, 5.0),
    ]


def test_the_table_says_what_fraction_of_fio_was_reached(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Sample("fio", "read", 4096, 1, 2.0, 0, 0, 0), Sample("segment", "read", 4096, 1, 1.0, 0, 0, 0)])
    assert "0.50" in capsys.readouterr().out


def test_percentiles() -> None:
    assert percentiles([number / 1000 for number in range(1, 101)]) == (51.0, 100.0)
