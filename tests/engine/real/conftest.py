"""Engines for tests: vLLM is imported once in this process, and every engine runs in a fork of it."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing import forks
from kvtier.testing.tiny_models import tiny_checkpoint
from kvtier.testing.vllm.driver import import_vllm

# One thread an engine: several of them spin against each other on a busy machine, and sums come out in another order.
ENGINE_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_ATTN_SPLIT_KV": "0"}
MODELS = Path(__file__).parents[3] / "work" / "models" / "tiny"

Fork = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def vllm_imported() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    for name in [name for name in os.environ if name.startswith(("KVTIER_", "AIBRIX_", "VLLM_"))]:
        del os.environ[name]
    os.environ.update(ENGINE_ENVIRONMENT)
    import_vllm()


@pytest.fixture(scope="session")
def checkpoint(vllm_imported: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives a tiny model's directory, made in a fork so that this process starts no threads."""

    def make(name: str) -> Path:
        log = tmp_path_factory.getbasetemp() / f"checkpoint-{name}.log"
        return forks.run(lambda: tiny_checkpoint(name, MODELS), log=log)

    return make


@pytest.fixture(scope="module")
def fork_module(vllm_imported: None, tmp_path_factory: pytest.TempPathFactory) -> Fork:
    """Like `fork`, for fixtures that live longer than one test."""
    return _forker(tmp_path_factory.mktemp("engines"))


@pytest.fixture
def fork(vllm_imported: None, tmp_path: Path) -> Fork:
    """`fork(scenario, timeout_s=...)`: what `scenario()` returns in a child of its own, whose output is shown when it fails."""
    return _forker(tmp_path)


def _forker(directory: Path) -> Fork:
    count = 0

    def run(scenario: Callable[[], Any], *, timeout_s: float = 120.0) -> Any:
        nonlocal count
        count += 1
        return forks.run(scenario, log=directory / f"engine-{count}.log", timeout_s=timeout_s)

    return run
