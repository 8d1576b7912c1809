"""Folders that need vLLM are not even imported where tests with an engine are left out: the import alone takes seconds."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests/engine/vllm and tests/engine/real under `-m "not engine ..."`."""
    without_engine = "not engine" in (config.option.markexpr or "")
    return True if without_engine and collection_path.parts[-2:] in (("engine", "vllm"), ("engine", "real")) else None
