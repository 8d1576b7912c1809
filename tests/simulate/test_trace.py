"""Reading traces: formats, and every kind of bad line."""

import gzip
import lzma
from pathlib import Path

import pytest

from kvtier.observe.requests import block_id, trace_line
from kvtier.simulate.trace import Trace, TraceError

DATA = Path(__file__).parents[1] / "data"
GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 18446744073709551615]}\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path / "one.jsonl", GOOD + "\n" + GOOD.replace("1500", "1501")))
    first, second = trace
    assert (first.time_s, first.input_tokens, first.output_tokens) == (1.5, 600, 7)
    assert list(first.block_ids) == [0, 2**64 - 1]
    assert second.time_s == pytest.approx(1.501)
    assert (trace.name, trace.resolved_format(), trace.tokens_per_block) == ("one", "mooncake", 512)


def test_bailian(tmp_path: Path) -> None:
    line = (
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132,'
        ' "type": "text", "turn": 1, "hash_ids": [1089, 1090]}\n'
    )
    trace = Trace(write(tmp_path / "b.jsonl", line))
    (request,) = trace
    assert (request.time_s, list(request.block_ids)) == (61.114, [1089, 1090])
    assert (trace.resolved_format(), trace.tokens_per_block) == ("bailian", 16)


def test_compressed_equals_plain(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", GOOD)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(GOOD.encode()))
    assert list(Trace(plain)) == list(Trace(packed))


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("damage", ["cut short", "bytes flipped", "another format", "empty"])
@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_a_damaged_archive_is_an_error_that_names_it(tmp_path: Path, ending: str, damage: str, skip_bad: bool) -> None:
    lines = "".join(GOOD.replace("1500", str(1500 + number * number)) for number in range(20_000))
    packed = bytearray((gzip if ending == "gz" else lzma).compress(lines.encode()))
    if damage == "cut short":
        del packed[len(packed) // 2 :]
    elif damage == "bytes flipped":
        packed[len(packed) // 2 : len(packed) // 2 + 8] = b"\xff\x00" * 4
    else:
        packed = bytearray(lines.encode() if damage == "another format" else b"")
    file = tmp_path / f"a.jsonl.{ending}"
    file.write_bytes(packed)
    with pytest.raises(TraceError, match=str(file)):
        list(Trace(file, skip_bad=skip_bad))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`"),
        ('{"timestamp": 2000}', "missing required field `hash_ids`"),
        ('{"timestamp": "x", "hash_ids": [1]}', "Expected `float`"),
        ('{"timestamp": 2000, "hash_ids": []}', "hash_ids is empty"),
        ('{"timestamp": 2000, "hash_ids": [1.5]}', "Expected `int`"),
        ('{"timestamp": 2000, "hash_ids": [18446744073709551616]}', "18446744073709551616"),
        ('{"timestamp": 2000, "hash_ids": [-1]}', "hash id -1 does not fit in 64 bits"),
        ('{"timestamp": 1499, "hash_ids": [1]}', "before that of the request ahead"),
        ('{"timestamp": -1, "hash_ids": [1]}', "not a time"),
        ('{"timestamp": 2000, "hash_ids": [1], "input_length": -5}', "negative"),
        ("\udcff{}", "utf-8|malformed"),
    ],
)
def test_bad_line(tmp_path: Path, line: str, wrong: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes((GOOD + line + "\n" + GOOD).encode(errors="surrogateescape"))
    with pytest.raises(TraceError, match=f"bad.jsonl, line 2: .*(?:{wrong})"):
        list(Trace(path))
    lenient = Trace(path, skip_bad=True)
    assert len(list(lenient)) == 2
    assert lenient.skipped == 1


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_trace(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="no request"):
        list(Trace(write(tmp_path / "e.jsonl", text)))


def test_only_bad_lines(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="2 bad lines were skipped"):
        list(Trace(write(tmp_path / "e.jsonl", "{\n{\n"), skip_bad=True))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.jsonl: No such file"):
        list(Trace(tmp_path / "nowhere.jsonl"))


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="'csv' is not known: use one of auto"):
        Trace(tmp_path / "x", format="csv")


def test_progress_counts_bytes(tmp_path: Path) -> None:
    seen: list[int] = []
    trace = Trace(write(tmp_path / "p.jsonl", GOOD * 3000), progress=seen.append)
    assert len(list(trace)) == 3000
    assert 0 < sum(seen) <= trace.file_bytes


def test_stops_at_requests_max(tmp_path: Path) -> None:
    assert len(list(Trace(write(tmp_path / "m.jsonl", GOOD * 9), requests_max=4))) == 4


def test_what_an_engine_writes_is_read_back(tmp_path: Path) -> None:
    keys = [block_id(key) for key in (bytes([7]) * 32, bytes(range(32)))]
    path = tmp_path / "live.jsonl"
    path.write_bytes(trace_line(1.25, keys, 40, 9, 16) + trace_line(2.5, keys[:1], 17, 0, 16))
    trace = Trace(path)
    first, second = trace
    assert (trace.resolved_format(), trace.tokens_per_block) == ("kvtier", 16)
    assert (first.time_s, first.input_tokens, first.output_tokens) == (1.25, 40, 9)
    assert first.block_ids[0] == second.block_ids[0] == 0x0707070707070707
    assert len(first.block_ids) == 2
