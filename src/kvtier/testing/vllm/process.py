"""An engine in a process of its own, that another process starts, asks and really stops.

The child runs `python -m kvtier.testing.vllm.process`: it reads one JSON command a line from its standard input and writes one JSON
answer a line to the pipe that it was given; what vLLM prints goes to a log file. It dies with its parent, and stops when its input ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from kvtier.testing.vllm.driver import ENVIRONMENT, Answer, Engine

PR_SET_PDEATHSIG = 1
TAIL_CHARACTERS = 4_000

Progress = Callable[[int], None]


class EngineProcessError(RuntimeError):
    """The engine's process ended, or answered with an error; the text has the end of its log."""


class EngineProcess:
    """A client of one engine process.

    Args:
        model: directory of the checkpoint.
        kvtier: settings of kvtier; None for an engine without it.
        log: file to which the engine's output is appended.
        settings: further arguments of the engine, see `Engine`.

    Use as a context manager: leaving it kills what is still running.

    Raises:
        EngineProcessError: the engine did not start.
    """

    def __init__(self, model: Path, *, kvtier: Mapping[str, Any] | None, log: Path, **settings: Any) -> None:
        self.block_tokens = 0
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "kvtier.testing.vllm.process", str(write_end)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(write_end,),
                start_new_session=True,
                env=ENVIRONMENT | os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        os.close(write_end)
        self._answers = os.fdopen(read_end, "r")
        self._arguments = {
            "model": str(model),
            "kvtier": None if kvtier is None else dict(kvtier),
            "settings": settings,
        }

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> dict[str, Any]:
        """Load the engine, which takes a while; facts about it: `block_tokens`, `versions`."""
        facts: dict[str, Any] = self._call({"start": self._arguments})
        self.block_tokens = int(facts["block_tokens"])
        return facts

    def ask(
        self, prompt: Sequence[int], *, max_tokens: int, progress: Progress | None = None, cache_salt: str | None = None
    ) -> Answer:
        """One prompt alone; `progress` is told the prompt tokens computed or restored so far."""
        command = {"ask": list(prompt), "max_tokens": max_tokens, "cache_salt": cache_salt}
        answer = self._call(command, progress)
        return Answer(**{**answer, "token_ids": tuple(answer["token_ids"]), "logprobs": ()})

    def settle(self) -> dict[str, float]:
        """Wait until stores and writes have ended; the counters."""
        counters: dict[str, float] = self._call({"settle": True})
        return counters

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own prefix cache."""
        self._call({"reset": True})

    def stop(self, timeout_s: float = 60.0) -> None:
        """Shut the engine down and wait for the end of its process.

        Raises:
            EngineProcessError: it did not end in time, or not well.
        """
        self._call({"stop": True})
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise EngineProcessError(f"the engine did not stop within {timeout_s:.0f} s{self._tail()}") from None
        if code:
            raise EngineProcessError(f"the engine ended with exit code {code}{self._tail()}")

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._answers.close()

    def _call(self, command: Mapping[str, Any], progress: Progress | None = None) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineProcessError(f"the engine's process has ended{self._tail()}") from None
        while line := self._answers.readline():
            answer = json.loads(line)
            if "progress" in answer:
                if progress is not None:
                    progress(answer["progress"])
            elif "error" in answer:
                raise EngineProcessError(f"{answer['error']}{self._tail()}")
            else:
                return answer["result"]
        raise EngineProcessError(f"the engine's process has ended{self._tail()}")

    def _tail(self) -> str:
        text = self._log.read_text(errors="replace")[-TAIL_CHARACTERS:]
        return f"\n----- the end of {self._log} -----\n{text}"


class _Server:
    """The child's side: one method for each command."""

    def __init__(self, say: Callable[[Mapping[str, Any]], None]) -> None:
        self._say = say
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "start comes first"
        return self._engine

    def start(self, command: Mapping[str, Any]) -> dict[str, Any]:
        import torch
        import vllm

        arguments = command["start"]
        self._engine = Engine(Path(arguments["model"]), kvtier=arguments["kvtier"], **arguments["settings"])
        return {
            "block_tokens": self._engine.block_tokens,
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
        }

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        engine = self.engine
        request_id = engine.submit(
            command["ask"], max_tokens=command["max_tokens"], cache_salt=command["cache_salt"] or None
        )
        last = -1
        while engine.unfinished(request_id):
            computed = min(engine.computed_tokens(request_id), len(command["ask"]))
            if computed > last:
                self._say({"progress": computed})
                last = computed
            engine.step()
        return asdict(engine.result(request_id))

    def settle(self, _: Mapping[str, Any]) -> dict[str, float]:
        self.engine.settle()
        return self.engine.counters.values

    def reset(self, _: Mapping[str, Any]) -> None:
        self.engine.settle()
        self.engine.reset_prefix_cache()

    def stop(self, _: Mapping[str, Any]) -> None:
        self.engine.close()


def main() -> None:
    """Serve commands until the input ends or `stop` was answered."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    # The parent decides what an interrupt at the terminal ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(int(sys.argv[1]), "w")

    def say(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    server = _Server(say)
    for line in sys.stdin:
        command = json.loads(line)
        name = next(iter(command))
        try:
            say({"result": getattr(server, name)(command)})
        except Exception as error:  # noqa: BLE001 - the parent raises it
            import traceback

            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from None
        if name == "stop":
            return


if __name__ == "__main__":
    main()
