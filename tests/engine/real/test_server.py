"""The real server process: `vllm serve` with kvtier, ended by a signal as a service manager or a terminal does it."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.real.cases import LLAMA, kvtier_settings, text
from tests.engine.real.conftest import Fork

from kvtier.testing import forks
from kvtier.testing.vllm.driver import fork_processes, kv_transfer_config

pytestmark = pytest.mark.engine

ANSWER_TOKENS = 4
# vLLM's processes need seconds to end even without kvtier; after 15 s (see `give_time_to_close`) they are killed.
END_S = 14.0


def serve(model: Path, settings: dict[str, Any], port: int) -> int:
    """`vllm serve` in this process, with its engine core and worker in others; its exit code."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    fork_processes()
    sys.argv = ["vllm", "serve", str(model), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    sys.argv += ["--enforce-eager", "--dtype", LLAMA.dtype, "--block-size", str(LLAMA.block_tokens), "--seed", "0"]
    sys.argv += ["--max-num-batched-tokens", str(LLAMA.block_tokens), "--max-num-seqs", "4", "--max-model-len", "736"]
    sys.argv += ["--kv-cache-memory-bytes", str(64 << 20)]
    sys.argv += ["--kv-transfer-config", json.dumps(kv_transfer_config(settings))]
    from vllm.entrypoints.cli.main import main

    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def complete(port: int, prompt: list[int], max_tokens: int) -> tuple[int, ...]:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return tuple(json.load(answer)["choices"][0]["token_ids"])


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_with_everything_published(
    number: signal.Signals, fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With a request under way: the catalog is closed, what was answered just before is on disk, and the next engine serves it."""
    model = checkpoint(LLAMA.model)
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = kvtier_settings(disk, disk_io="auto")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = forks.start(lambda: serve(model, settings, port), log=tmp_path / "server.log", timeout_s=90)
    cut_short = threading.Event()

    def long_request() -> None:
        try:
            complete(port, text(9, 40), 600)
        except (OSError, urllib.error.HTTPError):
            cut_short.set()

    try:
        forks.wait_for(lambda: answers(port), timeout_s=60, what="the server", child=child)
        other = threading.Thread(target=long_request, daemon=True)
        other.start()
        prompts = [LLAMA.long, text(3, LLAMA.long_tokens)]
        cold = [complete(port, prompt, ANSWER_TOKENS) for prompt in prompts]
        assert other.is_alive(), "the long request was to be under way"
        os.kill(child.pid, number)
        signalled_s = time.monotonic()
    except BaseException:
        forks.kill(child)
        raise
    assert forks.join(child) == 0
    assert time.monotonic() - signalled_s < END_S, "ended, but only because it was killed"
    other.join(10)
    assert [path.name for path in disk.rglob("catalog.sqlite*")] == ["catalog.sqlite"], "the catalog was not closed"

    def again() -> list[tuple[tuple[int, ...], int]]:
        with LLAMA.engine(model, kvtier=settings) as engine:
            found = [engine.ask(prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts]
            return [(answer.token_ids, answer.external_tokens) for answer in found]

    restored = fork(again)
    assert [tokens for tokens, _ in restored] == cold
    # The last chunk's store begins with the step after the last token's.
    least = LLAMA.whole_blocks(LLAMA.long_tokens) - LLAMA.block_tokens
    assert [count >= least for _, count in restored] == [True, True], restored
