"""How each tiny model is served in tests, which prompts it gets, and how answers are compared."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.testing.vllm.driver import Answer, Engine

DRAM_BYTES = "48MiB"
DISK_BYTES = "512MiB"
LOGPROBS = 3
# Room for the longest prompt with its answer; more would ask for more KV memory than "so little that it preempts".
MODEL_TOKENS_MAX = 736


@dataclass(frozen=True)
class Case:
    """One model, served so that a chunk of prefill is one block: then cold and hit compute the same, to the bit.

    Attributes:
        model: name of the tiny checkpoint.
        block_tokens: the engine's block, which is also what it computes at once.
        blocks: blocks of KV memory, so few that several requests at once are preempted.
        dtype: float32 where vLLM's CPU kernels have it: then requests that are batched differently agree too.
        has_state: recurrent layers. Their state after decoding a token differs in the last bits from the state after prefilling it.
        batch_exact: the engine gives the same tokens whether requests run alone or together. Two of vLLM 0.32's kernels for CPUs
            do not, without kvtier too: MLA on AMX, where the logprobs of a first token move by up to 1 with what else is in the
            batch; and short convolutions, where requests that resume from a cached state spoil others in the same step.
        settings: what else the engine needs.
    """

    model: str
    block_tokens: int
    blocks: int
    dtype: str = "float32"
    has_state: bool = False
    batch_exact: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    def engine(self, path: Path, **more: Any) -> Engine:
        """This engine; give `kvtier=kvtier_settings(...)` for one with kvtier."""
        settings = {
            "block_size": self.block_tokens,
            "max_num_batched_tokens": self.block_tokens,
            "max_num_seqs": 4,
            "max_model_len": MODEL_TOKENS_MAX,
            "num_gpu_blocks_override": self.blocks,
            "dtype": self.dtype,
            **self.settings,
        }
        return Engine(path, **(settings | more))

    @property
    def long_tokens(self) -> int:
        """Length of the long prompt: several blocks and a part of one."""
        blocks = 15 if self.block_tokens < 64 else 5
        return blocks * self.block_tokens + self.block_tokens // 2 + 3

    @property
    def half_tokens(self) -> int:
        """Length of what the half-prefix prompt shares with the long one: blocks, and a part of one."""
        return self.long_tokens // 2 // self.block_tokens * self.block_tokens + self.block_tokens // 3

    def whole_blocks(self, tokens: int) -> int:
        """`tokens` rounded down to blocks; a hit leaves at least one token to compute."""
        return (tokens - 1) // self.block_tokens * self.block_tokens

    @property
    def long(self) -> list[int]:
        return text(1, self.long_tokens)

    def half_shared(self, seed: int) -> list[int]:
        """As long as the long prompt, with its first half."""
        return self.long[: self.half_tokens] + text(seed, self.long_tokens - self.half_tokens)

    @property
    def short(self) -> list[int]:
        """A prompt of two and a half blocks, to be continued."""
        return text(5, 2 * self.block_tokens + self.block_tokens // 2 + 3)

    @property
    def crowd(self) -> list[list[int]]:
        """Four prompts that, with answers of `crowd_answer_tokens`, do not fit into KV memory together."""
        tokens = 110 if self.block_tokens < 64 else 2 * self.block_tokens + self.block_tokens // 2
        return [text(10 + place, tokens + place * 7) for place in range(4)]

    crowd_answer_tokens: int = 96


# Windows and states are kept at every block, and not at a prompt's end alone: else no prompt with half of it has a hit, which is
# vLLM's own rule for its own cache (its default keeps ends and junctions seen twice).
_DENSE = {"prefix_cache_retention_interval": None}
_STATE = {"enable_prefix_caching": True, **_DENSE}

# What vLLM's MLA kernels take as a block depends on the CPU.
_MLA_BLOCK_TOKENS = 32 if "amx_tile" in Path("/proc/cpuinfo").read_text() else 16

CASES = (
    Case("llama", 32, 25),
    Case("gemma3", 32, 50, settings=_DENSE),
    Case("gptoss", 32, 38, settings=_DENSE),
    Case("deepseek2", _MLA_BLOCK_TOKENS, 800 // _MLA_BLOCK_TOKENS, dtype="bfloat16", batch_exact=False),
    Case("qwen3next", 128, 20, dtype="bfloat16", has_state=True, settings=_STATE),
    Case("lfm2", 128, 20, has_state=True, batch_exact=False, settings=_STATE),
    Case("granite4", 96, 20, has_state=True, settings=_STATE),
    Case("falconh1", 96, 15, has_state=True, settings=_STATE),
)
LLAMA = CASES[0]


def kvtier_settings(disk_path: Path | None, **more: Any) -> dict[str, Any]:
    """Settings of kvtier in these tests: with the ring, which small arenas like theirs do not get by themselves."""
    settings: dict[str, Any] = {"dram_bytes": DRAM_BYTES}
    if disk_path is not None:
        settings |= {"disk_io": "ring", "disk_path": str(disk_path), "disk_bytes": DISK_BYTES, "disk_free_bytes_min": 0}
    return settings | more


def text(seed: int, tokens: int) -> list[int]:
    """A prompt of random bytes, the same for the same seed."""
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(tokens)]


def assert_same(answer: Answer, reference: Answer, what: str) -> None:
    """Tokens and logprobs equal, to the bit."""
    assert answer.token_ids == reference.token_ids, f"{what}: other tokens"
    assert answer.logprobs == reference.logprobs, f"{what}: same tokens, other logprobs: {distance(answer, reference)}"


def assert_agrees(answer: Answer, reference: Answer, what: str, *, tolerance: float) -> None:
    """Logprobs within `tolerance` as far as the tokens are equal, and where they part, it was a tie within `tolerance`."""
    for place, (token, expected) in enumerate(zip(answer.token_ids, reference.token_ids, strict=True)):
        wanted = dict(reference.logprobs[place])
        assert token in wanted, f"{what}: token {place} is none of the {LOGPROBS} likeliest"
        gap = max(wanted.values()) - wanted[token]
        assert gap <= tolerance, f"{what}: token {place} is {gap:.3f} less likely than the best"
        if token != expected:
            return
        got = dict(answer.logprobs[place])[token]
        assert abs(got - wanted[token]) <= tolerance, f"{what}: logprob of token {place} is {got}, not {wanted[token]}"


def distance(answer: Answer, reference: Answer) -> float:
    """Largest difference of a logprob that both name."""
    pairs = zip(answer.logprobs, reference.logprobs, strict=True)
    return max(abs(value - dict(theirs).get(token, value)) for ours, theirs in pairs for token, value in ours)


def ask_crowd(engine: Engine, case: Case) -> list[Answer]:
    """The crowd's answers, all of its requests in the engine at the same time."""
    return engine.answer(case.crowd, max_tokens=case.crowd_answer_tokens, logprobs=LOGPROBS)


def counters_of(engine: Engine) -> dict[str, float]:
    """kvtier's counters and gauges so far, without their prefix."""
    return {
        name.removeprefix("vllm:kvtier_"): value
        for name, value in engine.counters.values.items()
        if name.startswith("vllm:kvtier_")
    }


def external(answers: Sequence[Answer]) -> list[int]:
    return [answer.external_tokens for answer in answers]
