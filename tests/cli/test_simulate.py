"""`kvtier simulate` from the outside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.cli.main import main

DATA = Path(__file__).parents[1] / "data"
TRACE = str(DATA / "synthetic_trace.jsonl.xz")


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    code = main(
        f"simulate {TRACE} --requests 300 --policy lru,min,infinite --capacity-blocks 100,1000 --json {out}".split()
    )
    assert code == 0
    rows = json.loads(out.read_text())
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        ("lru", 100), ("lru", 1000), ("min", 100), ("min", 1000), ("infinite", 0),
    ]  # fmt: skip
    assert {"trace", "policy", "capacity_blocks", "hit_rate", "seconds"} <= set(rows[0])
    assert rows[0]["trace"] == "synthetic_trace"
    rates = {(row["policy"], row["capacity_blocks"]): row["hit_rate"] for row in rows}
    assert rates["lru", 100] <= rates["min", 100] <= rates["min", 1000] <= rates["infinite", 0]
    assert f"{rates['min', 1000]:.4f}" in capsys.readouterr().out


def test_tiers_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        f"simulate {TRACE} --requests 300 --policy lru,min --dram 20GB --disk 200GB --json {tmp_path}/o.json --report {tmp_path}/page".split()
    )
    assert code == 0
    (row,) = json.loads((tmp_path / "o.json").read_text())
    assert row["policy"] == "lru" and row["disk_bytes"] == 200_000_000_000 and row["hit_rate"] > 0
    assert "<svg" in (tmp_path / "page" / "index.html").read_text()
    assert "The next 100 GB of disk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--capacity-blocks", ","], "'' is not a number of blocks"),
        (["--capacity-blocks", ""], "'' is not a number of blocks"),
        (["--policy", "min,infinite", "--dram", "1GB"], "only policies that do not know the future run in tiers"),
        (["--disk", "1GB"], "--disk is '1GB' without --dram"),
        (["--dram", ""], "--dram is ''"),
        (["--dram", "1GB", "--disk", ""], "--disk is ''"),
        (["--dram", "1GB", "--disk-latency-us", "nan"], "--disk-latency-us is nan"),
        (["--dram", "1GB", "--disk-latency-us", "inf"], "--disk-latency-us is inf"),
        (["--dram", "1GB", "--prefill-tokens-per-s", "nan"], "--prefill-tokens-per-s is nan"),
        (["--dram", "1GB", "--prefill-tokens-per-s", "1e-320"], "--prefill-tokens-per-s is 1e-320"),
        (["--dram", "1GB", "--engines", "1000000000000"], "--engines is 1000000000000"),
        (["--policy", "mru"], "policy 'mru' is not known: use arc, fifo"),
        (["--capacity-blocks", "0"], "a tier of 0 blocks can hold nothing"),
        (["--capacity-blocks", "many"], "'many' is not a number of blocks"),
        (["--dram", "lots"], "--dram is 'lots'"),
        (["--dram", "1MB"], "no room for one block"),
        (["--dram", "1GB", "--engines", "-1"], "--engines is -1"),
        (["--format", "csv"], "trace format 'csv' is not known"),
        (["--requests", "0"], "--requests is 0"),
        (
            ["--json", "/nowhere/at/all.json", "--requests", "5", "--policy", "lru"],
            "/nowhere/at/all.json: No such file",
        ),
    ],
)
def test_bad_arguments(arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", TRACE, *arguments]) == 2
    assert wrong in capsys.readouterr().err


def test_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    good = '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    path.write_text(good + "nonsense\n" + good)
    base = ["simulate", str(path), "--policy", "lru", "--capacity-blocks", "5"]
    assert main(base) == 2
    assert "t.jsonl, line 2:" in capsys.readouterr().err
    assert main([*base, "--skip-bad"]) == 0
    assert "1 bad lines skipped" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["empty.jsonl", "nowhere.jsonl"])
def test_no_trace(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert main(["simulate", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err


def test_traces_of_one_name_are_told_apart_in_tiers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"timestamp": 0, "hash_ids": [1, 2], "input_length": 1024, "output_length": 1}\n'
    for place in "ab":
        (tmp_path / place).mkdir()
        (tmp_path / place / "trace.jsonl").write_text(line + "nonsense\n")
    names = [str(tmp_path / place / "trace.jsonl") for place in "abb"]
    for tier in (["--capacity-blocks", "5"], ["--dram", "1GB"]):
        arguments = ["simulate", *names, "--policy", "lru", "--skip-bad", *tier]
        assert main([*arguments, "--json", f"{tmp_path}/o.json", "--report", f"{tmp_path}/page"]) == 0
        told = capsys.readouterr()
        assert [row["trace"] for row in json.loads((tmp_path / "o.json").read_text())] == [
            "trace",
            names[1],
            f"{names[2]} (3)",
        ]
        assert told.err.count("1 bad lines skipped") == 3
        assert (tmp_path / "page" / "index.html").read_text().count("<h2>") == 3


def test_a_file_whose_name_is_no_text_is_shown_as_its_bytes(tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/\xff<b>.jsonl"
    with open(file, "w") as trace:
        trace.write('{"timestamp": 0, "hash_ids": [1, 2], "input_length": 1024, "output_length": 1}\n')
    command = [sys.executable, "-m", "kvtier.cli.main", "simulate", file, "--policy", "lru", "--capacity-blocks", "5"]
    done = subprocess.run(
        [*command, "--json", tmp_path / "o.json", "--report", tmp_path / "\udcfepage"],
        env={"PYTHONPATH": str(Path(kvtier.__file__).parents[1])},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    page = (tmp_path / "\udcfepage" / "index.html").read_text()
    assert "<b>" not in page and "\\udcff&lt;b&gt;" in page


def test_a_block_that_is_named_twice_is_one_block(tmp_path: Path) -> None:
    """`kvtier.open` records what it is asked for, and a caller may ask for a key twice."""
    trace = tmp_path / "twice.jsonl"
    line = '{"timestamp": %d, "hash_ids": [1, 1, 2, 1, 3], "input_length": 1536, "output_length": 1}\n'
    trace.write_text("".join(line % (60_000 * number) for number in range(3)))
    for tier in (["--capacity-blocks", "5"], ["--dram", "1GB", "--disk", "1GB"]):
        arguments = ["simulate", str(trace), "--policy", "all", *tier, "--json", f"{tmp_path}/o.json"]
        assert main(arguments) == 0
        rows = json.loads((tmp_path / "o.json").read_text())
        assert {row["asked_blocks"] for row in rows} == {9}
        assert {row["hit_rate"] for row in rows} == {6 / 9}
