"""Mistakes in the settings end the start of a real engine, with a message that names the setting and the way out."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, StoreUnavailableError
from kvtier.testing.vllm.driver import Engine

pytestmark = pytest.mark.engine
GOOD = {"dram_bytes": "16MiB", "disk_bytes": "64MiB", "disk_free_bytes_min": 0}


def start(model: Path, settings: dict[str, Any], **engine: Any) -> tuple[str, str]:
    """Kind and text of the error that ends the start; empty when it does not fail."""
    try:
        with Engine(model, kvtier=settings, **engine):
            return "", ""
    except (ConfigError, StoreUnavailableError) as error:
        return type(error).__name__, str(error)


def spoiled(name: str, path: Path) -> dict[str, Any]:
    """Settings with one mistake."""
    mistakes: dict[str, Callable[[], dict[str, Any]]] = {
        "unknown setting": lambda: {"dram_byte": 1},
        "malformed size": lambda: {"dram_bytes": "plenty"},
        "missing disk path": lambda: {"disk_path": str(path / "none")},
        "disk path is a file": lambda: {"disk_path": str(_file(path))},
        "arena larger than memory": lambda: {"dram_bytes": "500TiB"},
        "arena below a few parts": lambda: {"dram_bytes": "64KiB"},
        "trace in no directory": lambda: {"trace_path": str(path / "none" / "trace.jsonl")},
    }
    return {**GOOD, **mistakes[name]()}


def _file(path: Path) -> Path:
    (path / "file").write_text("not a directory")
    return path / "file"


@pytest.mark.parametrize(
    ("mistake", "kind", "words"),
    [
        ("unknown setting", "ConfigError", ("dram_byte", "did you mean 'dram_bytes'")),
        ("malformed size", "ConfigError", ("dram_bytes", "plenty", "256MiB")),
        ("missing disk path", "StoreUnavailableError", ("none",)),
        ("disk path is a file", "StoreUnavailableError", ("file", "director")),
        ("arena larger than memory", "ConfigError", ("dram_bytes", "available", "lower dram_bytes")),
        ("arena below a few parts", "ConfigError", ("dram_bytes", "65,536", "at least")),
        ("trace in no directory", "ConfigError", ("trace_path", "none", "directory that exists")),
    ],
)
def test_a_mistake_is_refused_by_name(
    mistake: str, kind: str, words: tuple[str, ...], fork: Any, checkpoint: Any, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    found, text = fork(lambda: start(model, spoiled(mistake, tmp_path)))
    assert found == kind, text
    assert all(word in text for word in words), text
    assert not list(tmp_path.rglob("*.sqlite*")), "a refused start leaves nothing behind"


def test_a_filesystem_without_direct_io_works_and_says_so(fork: Any, checkpoint: Any, tmp_path: Path) -> None:
    model = checkpoint("llama")
    settings = {**GOOD, "disk_path": str(tmp_path)}
    log = tmp_path.parent / "buffered.log"

    def buffered(prompt: list[int]) -> tuple[int, ...]:
        import logging

        logging.getLogger("kvtier").addHandler(logging.FileHandler(log))
        real_open = os.open

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument", str(path))
            return real_open(path, flags, *args, **kwargs)

        os.open = refuse
        with Engine(model, kvtier=settings) as engine:
            answer = engine.ask(prompt)
            engine.settle()
            return (answer.external_tokens, *answer.token_ids)

    prompt = list(range(100, 250)) * 3
    cold = fork(lambda: buffered(prompt))
    warm = fork(lambda: buffered(prompt))
    assert cold[0] == 0 and warm[0] > 0
    assert cold[1:] == warm[1:]
    assert "without direct I/O" in log.read_text()
