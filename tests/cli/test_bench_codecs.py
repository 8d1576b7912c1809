"""The benchmark of codecs: its figures are of what it was given, and it refuses what it cannot measure."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.cli.main import main
from kvtier.record.codec_lossy import from_float


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    numbers = np.random.default_rng(0).normal(size=2 * 2 * 64 * 3 * 16).astype(np.float32)
    path = tmp_path / "kv.npy"
    np.save(path, from_float(numbers, "bf16").reshape(2, 2, 64, 3, 16))
    return path


def test_it_measures_every_codec_beside_a_copy(
    kv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    out = tmp_path / "figures.json"
    assert main(["bench", "codecs", "--kv", str(kv), "--chunk-tokens", "16", "--rounds", "2", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["kv"] == {
        "source": "kv.npy",
        "shape": [2, 2, 64, 3, 16],
        "raw_bytes": 24576,
        "part_bytes": 6144,
        "parts": 4,
    }
    assert figures["copy_gbs"] > 0
    rows: dict[tuple[str, int], dict[str, Any]] = {
        (row["codec"], row["threads"]): row
        for row in figures["codecs"]
        if "threads" in row and "level" not in row["params"]
    }
    assert set(rows) == {
        (codec, threads) for codec in ("identity", "zstd", "bf16_split", "int8", "fp8") for threads in (1, 2)
    }
    for row in rows.values():
        assert all(row[name] > 0 for name in ("encode_gbs", "decode_gbs", "encode_cpu_gbs", "decode_cpu_gbs"))
        assert row["lossy"] is (row["codec"] in ("int8", "fp8"))
        assert ("error_abs_max" in row) is row["lossy"]
        if row["lossy"]:
            assert 0 < row["error_abs_max"] <= row["error_bound"]
            assert 0 < row["error_rms_relative"] < 0.05
    assert rows["identity", 1]["ratio"] == 1
    assert rows["fp8", 1]["ratio"] == 2
    assert rows["bf16_split", 1]["ratio"] > 1.3
    assert [row["codec"] for row in figures["codecs"] if "refused" in row] == ["ans"]
    shown = capsys.readouterr().out
    assert "a memory copy runs at" in shown
    assert "refused: codec 'ans' needs nvCOMP" in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--chunk-tokens", "0"], "--chunk-tokens 0"),
        (["--chunk-tokens", "65"], "64 tokens"),
        (["--rounds", "0"], "--rounds 0"),
        (["--threads", "0"], "--threads 0"),
    ],
)
def test_what_it_cannot_measure_with_is_refused(
    kv: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "codecs", "--kv", str(kv), *arguments]) == 2
    assert named in capsys.readouterr().err


def test_files_that_hold_no_kv_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "floats.npy", np.zeros((2, 2, 4, 1, 2), np.float32))
    np.save(tmp_path / "flat.npy", np.zeros(16, np.uint16))
    (tmp_path / "text.npy").write_text("not an array")
    for name in ("floats.npy", "flat.npy", "text.npy", "missing.npy"):
        assert main(["bench", "codecs", "--kv", str(tmp_path / name)]) == 2
        assert name in capsys.readouterr().err


def test_a_model_needs_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codecs", "--model", str(tmp_path)]) == 2
    assert "--text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "codecs"])


def test_the_kv_of_a_model_is_kept_for_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = tmp_path / "tiny"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(model)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1, "b": 2, "?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    text = tmp_path / "text"
    text.write_text("a b " * 40)
    command = ["bench", "codecs", "--chunk-tokens", "16", "--rounds", "1", "--threads", "1"]
    assert (
        main(
            [*command, "--model", str(model), "--text", str(text), "--tokens", "64", "--save", str(tmp_path / "kv.npy")]
        )
        == 0
    )
    assert np.load(tmp_path / "kv.npy").shape == (2, 2, 64, 2, 8)
    assert main([*command, "--kv", str(tmp_path / "kv.npy")]) == 0
    capsys.readouterr()
    assert main([*command, "--model", str(tmp_path / "none"), "--text", str(text)]) == 2
    assert "none" in capsys.readouterr().err
