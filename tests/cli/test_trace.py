"""`kvtier trace`: valid runs, runs that are no evidence, files that are none."""

import json
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.observe.recorder import Recorder, write_jsonl


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    recorder = Recorder()
    with recorder.span("encode", raw_bytes=4096, stored_bytes=1000) as encode:
        pass
    with recorder.span("store", after=[encode.id], moved_bytes=1000):
        pass
    path = tmp_path / "run.jsonl"
    with path.open("w") as out:
        write_jsonl(recorder.finish(), out)
    return path


def test_a_valid_run_is_summed_up_and_drawn(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = recording.with_name("trace.json")
    assert main(["trace", str(recording), "--output", str(trace)]) == 0
    assert {event["name"] for event in json.loads(trace.read_text())["traceEvents"]} >= {"encode", "store", "after"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["stage", "encode", "store"]
    assert lines[1].split()[-3:] == ["4,096", "1,000", "0"]


def test_a_run_that_was_cut_short_is_exit_code_1(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording.write_text("".join(recording.read_text().splitlines(keepends=True)[:-1]))
    assert main(["trace", str(recording)]) == 1
    assert "not valid: the run did not end cleanly" in capsys.readouterr().err


def test_many_problems_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    for _ in range(30):
        recorder.event("orphan", parent=999)
    path = tmp_path / "run.jsonl"
    with path.open("w") as out:
        write_jsonl(recorder.finish(), out)
    assert main(["trace", str(path)]) == 1
    assert "and 10 more" in capsys.readouterr().err


def test_what_is_no_recording_is_exit_code_2(
    tmp_path: Path, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jsonl").write_text('{"type":"event"}\n')
    assert main(["trace", str(tmp_path / "other.jsonl")]) == 2
    assert main(["trace", str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl: No such file" in capsys.readouterr().err
    assert main(["trace", str(recording), "--output", str(tmp_path / "no" / "trace.json")]) == 2


@pytest.mark.parametrize(
    "noise", [b"\xff\xfe\0" * 100 + b"\n", b'{"type":"event","id":1,"name":"\xff"}\n', b"[" * 100_000 + b"\n"]
)
def test_bytes_that_are_no_text_are_exit_code_2_where_a_torn_end_is_1(
    noise: bytes, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = recording.read_bytes()
    recording.write_bytes(noise + whole)
    assert main(["trace", str(recording)]) == 2
    assert "line 1" in capsys.readouterr().err
    head, event, *_ = whole.splitlines(keepends=True)
    recording.write_bytes(head + event + noise.rstrip())
    assert main(["trace", str(recording)]) == 1
