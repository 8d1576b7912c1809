"""The break-even benchmark's arithmetic, and its refusals. A run on an engine is in tests/engine/real."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.bench_break_even import Plan, Samples, break_even_file, disk_model, print_table, prompt
from kvtier.cli.main import main
from kvtier.plan.break_even import NEVER, parse_break_even

FACTS = {"kv_dtype": "bfloat16", "kv_bytes_per_token": 1024, "gpu_model": "a GPU", "vllm": "0"}


def samples(**a_token_s: float) -> Samples:
    """Figures on straight lines through 10 ms, with one that is far off in each three."""
    made = Samples(facts=dict(FACTS))
    for name, rate in a_token_s.items():
        made.floors[name] = [0.01, 0.01, 9.0]
        for tokens in (1000, 2000, 4000):
            for factor in (1.0, 1.0, 3.0):
                made.add(name, tokens, (0.01 + rate * tokens) * factor)
    return made


def content_of(made: Samples, tmp_path: Path) -> dict[str, Any]:
    plan = Plan("m", tmp_path, (1000,), 3, 1, 1, {"dtype": "bfloat16"})
    return break_even_file(made, model="m", margin=64, plan=plan)


def test_the_file_holds_medians_and_where_the_curves_cross(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = samples(f=1e-4, g_ssd=2e-5, g_mem=1e-5)
    made.floors["g_ssd"] = [0.17]
    made.seconds["g_ssd"] = {tokens: [0.17 + 2e-5 * tokens] for tokens in (1000, 2000, 4000)}
    content = content_of(made, tmp_path)
    assert content["curves"]["f"] == {"floor": 0.01, "knots": {"1000": 0.11, "2000": 0.21, "4000": 0.41}}
    assert content["break_even_ssd_tokens"] == pytest.approx(2000, abs=1)
    assert content["break_even_mem_tokens"] == 0
    assert content["provenance"]["min_max"]["f"]["1000"] == pytest.approx([0.11, 0.33])
    costs = parse_break_even(json.dumps(content), name="f", models=["m"], kv_dtypes=["bfloat16"])
    assert costs.curves is not None and costs.ssd_tokens == content["break_even_ssd_tokens"] + 64
    assert [point["tokens"] for point in content["golden"]] == [500, 1500, 3000, 8000]
    print_table(made)
    assert "110.00 (110.00..330.00)" in capsys.readouterr().out


def test_where_loading_never_pays_the_file_says_so(tmp_path: Path) -> None:
    content = content_of(samples(f=1e-5, g_ssd=2e-5, g_mem=1e-5), tmp_path)
    assert content["break_even_ssd_tokens"] == NEVER and content["break_even_mem_tokens"] == 0
    costs = parse_break_even(content, name="f", models=["m"], kv_dtypes=["bfloat16"])
    assert costs.declines(1_000_000, in_dram=False)


def test_prompts_differ_from_their_first_block_on() -> None:
    made = [tuple(prompt(number, tokens)[:16]) for number in range(4) for tokens in (64, 65, 128, 1024)]
    assert len(set(made)) == len(made)
    assert prompt(1, 64) == prompt(1, 64)


def test_the_disk_has_a_name(tmp_path: Path) -> None:
    assert disk_model(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "0"], "--tokens is '0'"),
        (["--tokens", "many"], "--tokens 'many'"),
        (["--repeats", "0"], "--repeats 0"),
        (["--dram", "plenty"], "--dram 'plenty'"),
        (["--engine", "[1]"], "--engine is '[1]'"),
        (["--engine", "{"], "--engine '{'"),
        (["--disk", "/none/such"], "--disk is '/none/such'"),
    ],
)
def test_mistakes_are_refused_by_name(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    required = ["--model", "m", "--disk", str(tmp_path), "--json", str(tmp_path / "b.json")]
    assert main(["bench", "break-even", *required, *arguments]) != 0
    assert words in capsys.readouterr().err
