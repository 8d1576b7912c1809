"""The demo's summary, prompts and verdict, without an engine."""

from dataclasses import replace

import pytest

from examples import demo
from kvtier.testing.vllm.driver import Answer

KEYS = [
    "model",
    "prompt_tokens",
    "cold_ttft_s",
    "disk_ttft_s",
    "dram_ttft_s",
    "disk_restored_tokens",
    "dram_restored_tokens",
    "half_prefix_restored_tokens",
    "bytes_stored",
    "token_ids_equal",
]


def answer(ttft_s: float, restored: int, tokens: tuple[int, ...] = (1, 2, 3)) -> Answer:
    return Answer(tokens, (), demo.PROMPT_TOKENS, 0, restored, ttft_s, 0, "length")


@pytest.fixture
def measured() -> demo.Measured:
    return demo.Measured(
        cold=answer(6.0, 0),
        disk=answer(0.5, 4096),
        half=answer(3.0, 2048, (4, 5)),
        dram=answer(0.4, 4096),
        half_cold=answer(6.0, 0, (4, 5)),
        stored_payload_bytes=96 << 20,
        disk_bytes=97 << 20,
        disk_load_bytes=90 << 20,
        half_load_bytes=45 << 20,
        dram_load_bytes=90 << 20,
        disk_parts=32,
        dram_parts=32,
        page_cache="dropped",
    )


def test_summary_has_exactly_the_promised_keys(measured: demo.Measured) -> None:
    summary = demo.summary_of(measured)
    assert list(summary) == KEYS
    assert summary["token_ids_equal"] is True
    assert summary["prompt_tokens"] >= 4_000
    assert summary["disk_restored_tokens"] == 4096 and summary["half_prefix_restored_tokens"] == 2048


@pytest.mark.parametrize("which", ["disk", "dram", "half"])
def test_one_other_token_is_seen(measured: demo.Measured, which: str) -> None:
    wrong = replace(measured, **{which: answer(1.0, 1, (9,))})
    assert demo.summary_of(wrong)["token_ids_equal"] is False


def test_there_is_enough_real_text() -> None:
    text = demo.real_text()
    # A token of this text is about four characters; the second prompt needs as much again.
    assert len(text) > 2 * 5 * demo.PROMPT_TOKENS
    assert "Python" in text


def test_a_hit_ends_where_a_chunk_of_prefill_did() -> None:
    block_tokens = 128
    for tokens in (demo.PROMPT_TOKENS, demo.SHARED_TOKENS):
        assert (tokens - 1) // block_tokens * block_tokens % demo.CHUNK_TOKENS == 0
