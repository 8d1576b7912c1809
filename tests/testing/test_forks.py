"""Children of the fork harness bring back results, and every way of not doing so is told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.testing import forks
from kvtier.testing.tiny_models import publish_directory


def test_result_and_output(tmp_path: Path) -> None:
    log = tmp_path / "child.log"

    def child() -> dict[str, int]:
        os.write(1, b"said by the child\n")
        return {"pid": os.getpid()}

    result = forks.run(child, log=log)
    assert result["pid"] != os.getpid()
    assert "said by the child" in log.read_text()


def test_large_result(tmp_path: Path) -> None:
    assert len(forks.run(lambda: b"x" * 3_000_000, log=tmp_path / "log")) == 3_000_000


def test_exception_with_its_traceback_and_output(tmp_path: Path) -> None:
    def child() -> None:
        sys.stderr.write("the last words\n")
        raise ValueError("it broke")

    with pytest.raises(forks.ForkError, match=r"(?s)in child.*ValueError: it broke.*the last words"):
        forks.run(child, log=tmp_path / "log")


def test_result_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(forks.ForkError, match="pickle"):
        forks.run(lambda: lambda: None, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("end", "words"), [(lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"), (lambda: os._exit(3), "exit code 3")]
)
def test_death_without_a_result(end: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(forks.ForkError, match=words):
        forks.run(end, log=tmp_path / "log")  # type: ignore[arg-type]


def test_timeout_kills_and_tells_where_it_hung(tmp_path: Path) -> None:
    def hang() -> None:
        signal.pause()

    started = time.monotonic()
    with pytest.raises(forks.ForkError, match=r"(?s)longer than its timeout.*in hang"):
        forks.run(hang, log=tmp_path / "log", timeout_s=1.3)
    assert time.monotonic() - started < 10


def test_processes_left_behind_are_an_error_and_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "ORPHAN_GRACE_S", 0.0)

    def child() -> None:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    with pytest.raises(forks.ForkError, match=r"left processes behind.*signal.pause"):
        forks.run(child, log=tmp_path / "log")


def test_kill_takes_the_whole_session(tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def child() -> None:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        ready.touch()
        signal.pause()

    running = forks.start(child, log=tmp_path / "log", timeout_s=20)
    forks.wait_for(ready.exists, timeout_s=10, what="the child", child=running)
    assert len(forks.kill(running)) == 2
    assert forks.session_members(running.pid) == {}


def test_waiting_ends_with_the_child(tmp_path: Path) -> None:
    running = forks.start(lambda: None, log=tmp_path / "log")
    with pytest.raises(forks.ForkError, match="ended before the impossible"):
        forks.wait_for(lambda: False, timeout_s=10, what="the impossible", child=running)
    assert forks.join(running) is None


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "models" / "one"

    def half(path: Path) -> None:
        (path / "weights").write_text("half of th")
        raise RuntimeError("the power went")

    with pytest.raises(RuntimeError):
        publish_directory(final, half)
    assert list(final.parent.iterdir()) == []

    assert publish_directory(final, lambda path: (path / "weights").write_text("all of it") and None) == final
    assert (final / "weights").read_text() == "all of it"
    assert publish_directory(final, half) == final, "what is there is kept"
