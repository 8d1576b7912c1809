"""Run a function in a forked child and bring back its result, its exception or its last words.

An engine takes 15 to 25 seconds to import and two to start: a process that has imported it once and forks for each scenario
gives each a process of its own for those two seconds. What a child must not do is leave anything behind, so:

- The child leads a session of its own and dies with its parent. When it has ended, every process still in its session is
  killed and reported as an error, since an engine that leaves workers behind is a fault worth a failing test.
- Its standard output and error go to a file, whose tail is part of every error raised here.
- It has a deadline. Shortly before the end its threads' stacks are written to that file; then the session is killed.
- It leaves by `os._exit`: exit handlers of the parent (pytest's, a logger's) are not its business. What it has to close it closes
  itself before it returns.

The parent should not have run any parallel region (OpenMP) and should hold no threads of importance: a fork copies one thread.
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

TAIL_BYTES = 12_000
STACKS_BEFORE_END_S = 2.0
PR_SET_PDEATHSIG = 1
LENGTH_BYTES = 8
POLL_S = 0.1
KILL_WAIT_S = 5.0
ORPHAN_GRACE_S = 3.0

T = TypeVar("T")


class ForkError(AssertionError):
    """A child did not bring back a result: it raised, died, ran out of time or left processes behind."""


@dataclass(frozen=True, slots=True)
class Child:
    """A child under way: hand it to `join`, or `kill` it.

    Attributes:
        pid: its process, session and process group.
        log: where its output goes.
        pipe: file descriptor from which its pickled result comes.
        deadline: `time.monotonic()` at which it is killed.
    """

    pid: int
    log: Path
    pipe: int
    deadline: float


def run(function: Callable[[], T], *, log: Path, timeout_s: float = 120.0) -> T:
    """What `function` returns (by pickle) in a child; at most `timeout_s` seconds.

    Raises:
        ForkError: it raised (with its traceback), died, took too long, or left processes behind.
    """
    result: T = join(start(function, log=log, timeout_s=timeout_s))
    return result


def start(function: Callable[[], Any], *, log: Path, timeout_s: float = 120.0) -> Child:
    """Fork a child that runs `function`; `join` waits for its result."""
    log.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _run_child(function, log, write_end, parent, timeout_s)
    os.close(write_end)
    return Child(pid, log, read_end, time.monotonic() + timeout_s)


def join(child: Child) -> Any:
    """The result of `child`; see `run`."""
    payload = _read_result(child)
    if payload is None and not _has_ended(child):
        left = kill(child)
        raise ForkError(f"the child took longer than its timeout and was killed, with all of {left}\n{tail(child.log)}")
    _, status = os.waitpid(child.pid, 0)
    # Helpers that end with their parent (multiprocessing's resource tracker) get a moment for it.
    end = time.monotonic() + ORPHAN_GRACE_S
    while session_members(child.pid) and time.monotonic() < end:
        time.sleep(POLL_S / 10)
    left = _signal_session(child.pid, signal.SIGKILL)
    if payload is None:
        raise ForkError(f"the child died with {_words(status)} and without a result\n{tail(child.log)}")
    kind, value = pickle.loads(payload)
    if kind == "raised":
        raise ForkError(f"the child raised:\n{value}\n{tail(child.log)}")
    if left:
        raise ForkError(f"the child ended but left processes behind, now killed: {left}\n{tail(child.log)}")
    return value


def kill(child: Child) -> list[str]:
    """Kill the child's whole session (SIGKILL) and wait for its end; the processes that were in it."""
    left = _signal_session(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(child.pipe)
    return left


def wait_for(condition: Callable[[], bool], *, timeout_s: float, what: str, child: Child | None = None) -> None:
    """Poll `condition` every few milliseconds until it is true.

    Raises:
        ForkError: it was not within `timeout_s`, or `child` ended before.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise ForkError(f"waited {timeout_s:.0f} s in vain for {what}\n{tail(child.log) if child else ''}")
        if child is not None and _has_ended(child):
            raise ForkError(f"the child ended before {what}\n{tail(child.log)}")
        time.sleep(0.005)


def tail(log: Path) -> str:
    """The end of a child's output, framed."""
    try:
        text = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    except FileNotFoundError:
        text = "(no output)"
    return f"----- last output, all of it in {log} -----\n{text}"


def session_members(session: int) -> dict[int, str]:
    """Command lines, by process id, of the processes that live in `session` (zombies left out)."""
    members = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            members[int(entry.name)] = command
    return members


def _run_child(function: Callable[[], Any], log: Path, pipe: int, parent: int, timeout_s: float) -> NoReturn:
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pytest may have replaced these by objects that write elsewhere.
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(file=2)
        faulthandler.dump_traceback_later(max(timeout_s - STACKS_BEFORE_END_S, 1.0), exit=False, file=2)
        try:
            outcome = ("returned", function())
        except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
            outcome = ("raised", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        try:
            payload = pickle.dumps(outcome)
        except Exception:  # noqa: BLE001 - a result that cannot be pickled is the scenario's error
            payload = pickle.dumps(("raised", traceback.format_exc()))
        with open(pipe, "wb") as file:
            file.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)


def _read_result(child: Child) -> bytes | None:
    """The bytes that the child sent, or None if it ended without or its deadline passed. Closes the pipe when it has them."""
    received = bytearray()
    wanted = LENGTH_BYTES
    ended = False
    while len(received) < wanted:
        ready, _, _ = select.select([child.pipe], [], [], POLL_S)
        part = os.read(child.pipe, 1 << 20) if ready else b""
        received += part
        if len(received) >= LENGTH_BYTES:
            wanted = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
        # The end of the pipe is not awaited: a worker left behind would hold it open. One more read after the child's end.
        if not part:
            if ended or time.monotonic() > child.deadline:
                return None
            ended = _has_ended(child)
    os.close(child.pipe)
    return bytes(received[LENGTH_BYTES:])


def _has_ended(child: Child) -> bool:
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_session(session: int, number: signal.Signals) -> list[str]:
    """Signal every process of `session` and, after SIGKILL, wait until they are gone; what they were."""
    members = session_members(session)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    end = time.monotonic() + KILL_WAIT_S
    while number == signal.SIGKILL and session_members(session) and time.monotonic() < end:
        time.sleep(0.002)
    return [f"{pid} {command[:80]}" for pid, command in members.items()]


def _words(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"
