"""An I/O engine on one io_uring, whose loop never holds the GIL.

Three threads meet here. A *caller* packs its jobs into tables of plain integers, publishes them by moving a tail, and writes to an eventfd. The *ring
thread* spends its whole life in one compiled function: it takes jobs from the tables, chooses by lane, fills submission entries, enters
the kernel, reaps completions, continues short transfers, runs each job's next step, and puts ended jobs into another table. The *herald*, a Python
thread, sleeps on a second eventfd and hands ended jobs over. So between the first byte and the last of a transfer list nothing waits for the GIL, and with
nothing to do both threads sleep in the kernel.

Invariants:

- A job slot is the caller's until the tail passes it, then the ring thread's, then, once its number is in the table of ended jobs, the herald's.
  Each table has one writer, and tails are read and written as atomics with acquire and release order.
- One submission entry at most is out for each job, so a submission ring of (depth + opens ahead + a few) entries never overflows.
- Python objects that a job points at (buffers, names) are kept by the slot until the herald took it.
- The herald is woken when 16 jobs or 8 MiB ended, when the oldest ended 0.3 ms ago, or when nothing else is in flight.

The kernel's ring indices are shared memory between processors; the loop is used on x86-64 alone, where it was measured and tested.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kvtier.errors import ConfigError
from kvtier.tier.disk.base import Lane
from kvtier.tier.disk.io import END_OF_FILE, RETRIES_MAX, Finished, IOEngine, Job, Op, Step
from kvtier.tier.disk.lanes import CREDIT_MAX, LANE_INDEX
from kvtier.tier.disk.threads import ThreadIO, hand_over

# -- what the kernel calls things

SYS_SETUP, SYS_ENTER, SYS_REGISTER = 425, 426, 427
SYS_WRITE = 1
SETUP_CLAMP, SETUP_SUBMIT_ALL, SETUP_SINGLE_ISSUER, SETUP_DEFER_TASKRUN = 1 << 4, 1 << 7, 1 << 12, 1 << 13
FEAT_SINGLE_MMAP, FEAT_NODROP, FEAT_EXT_ARG = 1, 2, 1 << 8
ENTER_GETEVENTS, ENTER_EXT_ARG = 1, 1 << 3
OFF_SQES = 0x10000000
REGISTER_FILES2, REGISTER_BUFFERS2, REGISTER_BUFFERS_UPDATE, REGISTER_PROBE = 13, 15, 16, 8
RSRC_SPARSE = 1
SQE_FIXED_FILE = 1
UO_FSYNC, UO_READ_FIXED, UO_WRITE_FIXED, UO_FALLOCATE, UO_OPENAT, UO_CLOSE = 3, 4, 5, 17, 18, 19
UO_FILES_UPDATE, UO_STATX, UO_READ, UO_WRITE, UO_RENAMEAT, UO_UNLINKAT, UO_MKDIRAT, UO_LINKAT = (
    20,
    21,
    22,
    23,
    35,
    36,
    37,
    39,
)
AT_FDCWD = -100
STATX_SIZE = 0x200
REQUIRED = (UO_READ, UO_WRITE, UO_READ_FIXED, UO_WRITE_FIXED, UO_FSYNC, UO_FALLOCATE, UO_OPENAT, UO_CLOSE, UO_STATX)
NAMES = {Op.RENAME: UO_RENAMEAT, Op.UNLINK: UO_UNLINKAT, Op.MKDIR: UO_MKDIRAT, Op.LINK: UO_LINKAT}

# -- the tables

SLOTS = 8192
STEPS_MAX = 12
# Columns of the jobs' table.
J_LANE, J_DEADLINE, J_COUNT, J_STEP, J_ERROR, J_FAILED, J_MOVED, J_FD, J_RETRIES, J_DONE, J_STAGE, J_NEXT = range(12)
JOB_COLUMNS = 12
# Columns of the steps' table.
(
    S_OP,
    S_FD,
    S_ADDRESS,
    S_LENGTH,
    S_OFFSET,
    S_FLAGS,
    S_PATH,
    S_PATH_TO,
    S_TOLERATED,
    S_ALWAYS,
    S_BUFFER_INDEX,
    S_FIXED,
) = range(12)
STEP_COLUMNS = 12
# Places in the control words: each on a cache line of its own.
C_SUBMITTED, C_ENDED, C_CANCELS, C_STOP, C_IN_FLIGHT, C_PASSES = 0, 8, 16, 24, 32, 40
CONTROL_WORDS = 64
# The ring thread's own variables.
(
    V_SQ_TAIL,
    V_UNSUBMITTED,
    V_ENDED,
    V_UNREPORTED,
    V_UNREPORTED_BYTES,
    V_UNREPORTED_SINCE,
    V_ACTIVE,
    V_AHEAD,
    V_DELAYED_HEAD,
    V_DELAYED_COUNT,
    V_ENTRIES,
    V_RING_FD,
    V_DONE_FD,
    V_TRANSFER_MAX,
    V_IODEPTH,
    V_WRITE_MIN,
    V_RESERVE,
    V_OPEN_AHEAD,
    V_WAKE_FD,
    V_STATS_AT,
    V_WRITE_CREDIT,
    V_CREDIT_A_START,
) = range(22)
VARIABLES = 32
# Words that the kernel reads or fills: the argument of a wait (3), its timeout (2), the clock (2), what goes into and comes out of an eventfd.
W_ARGUMENT, W_PAUSE, W_CLOCK, W_ONE, W_WAKE = 0, 3, 5, 7, 8
NO_DEADLINE = (1 << 63) - 1
OP_REGISTER, OP_FILES_UPDATE = 100, 101
LANES_COUNT = 4
# Lists of waiting jobs: lane * 2 + timed for jobs that may move data; 8 more for those whose file is to be opened first.
LISTS = 16
STAGE_NONE, STAGE_TO_OPEN, STAGE_OPENED, STAGE_DATA = 0, 1, 2, 3
REPORT_JOBS, REPORT_BYTES, REPORT_AGE_NS = 16, 8 << 20, 300_000
BACK_OFF_NS = 500_000
CREDIT_UNIT = 1_000_000
CREDIT_LIMIT = int(CREDIT_MAX * CREDIT_UNIT)
WAKE = SLOTS
# What a caller asks of a job that waits: to give it up, or to move it to the lane that is added.
FLAG_CANCELLED, FLAG_PROMOTED = 1, 2
_COMPILE_DEADLINE_S = 120.0
E_INTR, E_AGAIN, E_BUSY, E_INVAL, E_NOSPC, E_CANCELED = (
    errno.EINTR,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINVAL,
    errno.ENOSPC,
    errno.ECANCELED,
)
E_END = END_OF_FILE
O_READ, O_WRITE, O_SYNC_DATA, O_SYNC, O_OPEN, O_CLOSE, O_LINK, O_RENAME, O_UNLINK, O_MKDIR, O_FALLOCATE, O_STAT = (
    int(op) for op in Op
)
RETRIES = RETRIES_MAX

# What only the loop calls needs no way in from Python, which saves half of the time to compile.
_INNER = njit(nogil=True, cache=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_errno_place = types.ExternalFunction("__errno_location", types.int64())
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@intrinsic
def _load32(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.zext(builder.load_atomic(pointer, "acquire", 4), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _store32(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        builder.store_atomic(builder.trunc(arguments[1], ir.IntType(32)), pointer, "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _load64(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store64(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_INNER
def _now_ns(words: Any, address: int) -> int:
    _clock(types.int32(1), address)
    return words[W_CLOCK] * 1_000_000_000 + words[W_CLOCK + 1]  # type: ignore[no-any-return]


@_INNER
def _append(jobs: Any, heads: Any, tails: Any, counts: Any, which: int, job: int) -> None:
    """Add to a waiting list; lists of odd number are sorted by deadline."""
    jobs[job, J_NEXT] = -1
    counts[which] += 1
    if heads[which] < 0:
        heads[which] = job
        tails[which] = job
        return
    if which % 2 == 0 or jobs[tails[which], J_DEADLINE] <= jobs[job, J_DEADLINE]:
        jobs[tails[which], J_NEXT] = job
        tails[which] = job
        return
    before = -1
    here = heads[which]
    while jobs[here, J_DEADLINE] <= jobs[job, J_DEADLINE]:
        before = here
        here = jobs[here, J_NEXT]
    jobs[job, J_NEXT] = here
    if before < 0:
        heads[which] = job
    else:
        jobs[before, J_NEXT] = job


@_INNER
def _take(jobs: Any, heads: Any, tails: Any, counts: Any, base: int) -> int:
    """The first job of a lane: of the timed list if it has any."""
    which = base + 1 if counts[base + 1] > 0 else base
    job = heads[which]
    heads[which] = jobs[job, J_NEXT]
    counts[which] -= 1
    if heads[which] < 0:
        tails[which] = -1
    return job  # type: ignore[no-any-return]


@_INNER
def _list_of(jobs: Any, job: int) -> int:
    which = jobs[job, J_LANE] * 2 + (1 if jobs[job, J_DEADLINE] != NO_DEADLINE else 0)
    return which + 8 if jobs[job, J_STAGE] == STAGE_TO_OPEN else which  # type: ignore[no-any-return]


@_INNER
def _choose(jobs: Any, heads: Any, counts: Any, flying: Any, own: Any, now_ns: int) -> int:
    """The lane whose first job may start, -1 for none. The rules are those of `kvtier.tier.disk.lanes`."""
    total = flying[0] + flying[1] + flying[2] + flying[3]
    if total >= own[V_IODEPTH]:
        return -1
    demand = counts[0] + counts[1]
    preload = counts[2] + counts[3]
    write = counts[4] + counts[5]
    maintenance = counts[6] + counts[7]
    writes_few = flying[2] < own[V_WRITE_MIN]
    if write > 0 and writes_few and own[V_WRITE_CREDIT] >= CREDIT_UNIT:
        return 2
    if (
        counts[3] > 0
        and jobs[heads[3], J_DEADLINE] <= now_ns
        and not (counts[1] > 0 and jobs[heads[1], J_DEADLINE] <= jobs[heads[3], J_DEADLINE])
    ):
        return 1
    if demand > 0:
        return 0
    spare = own[V_IODEPTH] - own[V_RESERVE]
    if write > 0 and (writes_few or (flying[0] == 0 and flying[2] < spare)):
        return 2
    if preload > 0 and total < spare:
        return 1
    if maintenance > 0 and write == 0 and preload == 0 and flying[3] < max(1, own[V_RESERVE]):
        return 3
    return -1


@_INNER
def _account(counts: Any, own: Any, lane: int) -> None:
    """A job of that lane starts: waiting writes earn or spend credit, in millionths."""
    if lane == 2:
        own[V_WRITE_CREDIT] = max(0, own[V_WRITE_CREDIT] - CREDIT_UNIT)
    elif counts[4] + counts[5] > 0:
        own[V_WRITE_CREDIT] = min(CREDIT_LIMIT, own[V_WRITE_CREDIT] + own[V_CREDIT_A_START])


@_INNER
def _choose_open(counts: Any, flying: Any, own: Any) -> int:
    """The lane whose next file may be opened, -1 for none."""
    if own[V_AHEAD] >= own[V_OPEN_AHEAD]:
        return -1
    if counts[12] + counts[13] > 0 and counts[4] + counts[5] + flying[2] == 0:
        return 2
    if counts[8] + counts[9] > 0:
        return 0
    if counts[12] + counts[13] > 0:
        return 2
    if counts[0] + counts[1] > 0:
        return -1
    if counts[10] + counts[11] > 0:
        return 1
    if counts[14] + counts[15] > 0:
        return 3
    return -1


@_INNER
def _entry(
    sqes: Any,
    own: Any,
    opcode: int,
    flags: int,
    fd: int,
    offset: int,
    address: int,
    length: int,
    extra: int,
    user: int,
    buffer_index: int,
) -> None:
    """Fill the next submission entry."""
    place = own[V_SQ_TAIL] & (own[V_ENTRIES] - 1)
    sqes[place, 0] = opcode | (flags << 8) | ((fd & 0xFFFFFFFF) << 32)
    sqes[place, 1] = offset
    sqes[place, 2] = address
    sqes[place, 3] = (length & 0xFFFFFFFF) | (extra << 32)
    sqes[place, 4] = user
    sqes[place, 5] = buffer_index
    sqes[place, 6] = 0
    sqes[place, 7] = 0
    own[V_SQ_TAIL] += 1
    own[V_UNSUBMITTED] += 1


@_INNER
def _issue(jobs: Any, steps: Any, sqes: Any, own: Any, job: int) -> bool:  # noqa: C901 - a branch for each operation
    """Put the job's next step on the submission ring. False where it has none left: the job ended."""
    while jobs[job, J_STEP] < jobs[job, J_COUNT]:
        row = job * STEPS_MAX + jobs[job, J_STEP]
        op = steps[row, S_OP]
        fd = steps[row, S_FD] if steps[row, S_FD] >= 0 else jobs[job, J_FD]
        length = steps[row, S_LENGTH]
        moves = op in (O_READ, O_WRITE)
        if (
            (jobs[job, J_ERROR] != 0 and steps[row, S_ALWAYS] == 0)
            or (op == O_CLOSE and fd < 0)
            or (moves and length == 0)
        ):
            jobs[job, J_STEP] += 1
            continue
        if op == OP_REGISTER:
            if _syscall(SYS_REGISTER, own[V_RING_FD], steps[row, S_FLAGS], steps[row, S_ADDRESS], length, 0, 0) < 0:
                jobs[job, J_ERROR] = _load32(_errno_place())
                jobs[job, J_FAILED] = jobs[job, J_STEP]
            jobs[job, J_STEP] += 1
            continue
        if moves:
            done = jobs[job, J_DONE]
            flags = 0
            index = steps[row, S_BUFFER_INDEX]
            if index >= 0:
                opcode = UO_READ_FIXED if op == O_READ else UO_WRITE_FIXED
            else:
                opcode = UO_READ if op == O_READ else UO_WRITE
                index = 0
            if steps[row, S_FIXED] >= 0:
                fd = steps[row, S_FIXED]
                flags = SQE_FIXED_FILE
            count = min(length - done, own[V_TRANSFER_MAX])
            _entry(
                sqes,
                own,
                opcode,
                flags,
                fd,
                steps[row, S_OFFSET] + done,
                steps[row, S_ADDRESS] + done,
                count,
                0,
                job,
                index,
            )
        elif op in (O_SYNC_DATA, O_SYNC):
            _entry(sqes, own, UO_FSYNC, 0, fd, 0, 0, 0, 1 if op == O_SYNC_DATA else 0, job, 0)
        elif op == O_OPEN:
            _entry(sqes, own, UO_OPENAT, 0, AT_FDCWD, 0, steps[row, S_PATH], 0o644, steps[row, S_FLAGS], job, 0)
        elif op == O_CLOSE:
            _entry(sqes, own, UO_CLOSE, 0, fd, 0, 0, 0, 0, job, 0)
        elif op in (O_LINK, O_RENAME):
            opcode = UO_LINKAT if op == O_LINK else UO_RENAMEAT
            _entry(sqes, own, opcode, 0, AT_FDCWD, steps[row, S_PATH_TO], steps[row, S_PATH], AT_FDCWD, 0, job, 0)
        elif op == O_UNLINK:
            _entry(sqes, own, UO_UNLINKAT, 0, AT_FDCWD, 0, steps[row, S_PATH], 0, 0, job, 0)
        elif op == O_MKDIR:
            _entry(sqes, own, UO_MKDIRAT, 0, AT_FDCWD, 0, steps[row, S_PATH], 0o755, 0, job, 0)
        elif op == O_FALLOCATE:
            _entry(sqes, own, UO_FALLOCATE, 0, fd, steps[row, S_OFFSET], length, steps[row, S_FLAGS], 0, job, 0)
        elif op == O_STAT:
            _entry(
                sqes, own, UO_STATX, 0, AT_FDCWD, own[V_STATS_AT] + 256 * job, steps[row, S_PATH], STATX_SIZE, 0, job, 0
            )
        else:
            _entry(sqes, own, UO_FILES_UPDATE, 0, -1, steps[row, S_OFFSET], steps[row, S_ADDRESS], length, 0, job, 0)
        return True
    return False


@_INNER
def _fail(jobs: Any, job: int, error: int) -> None:
    if jobs[job, J_ERROR] == 0:
        jobs[job, J_ERROR] = error
        jobs[job, J_FAILED] = jobs[job, J_STEP]


@_INNER
def _ended(jobs: Any, ended: Any, flying: Any, own: Any, control: int, job: int, now_ns: int) -> None:
    """The job is the herald's from here on."""
    if jobs[job, J_STAGE] == STAGE_DATA:
        flying[jobs[job, J_LANE]] -= 1
    ended[own[V_ENDED] & (SLOTS - 1)] = job
    if own[V_UNREPORTED] == 0:
        own[V_UNREPORTED_SINCE] = now_ns
    own[V_UNREPORTED] += 1
    own[V_UNREPORTED_BYTES] += jobs[job, J_MOVED]
    own[V_ENDED] += 1
    _store64(control + 8 * C_ENDED, own[V_ENDED])


@_INNER
def _judge(jobs: Any, steps: Any, stats: Any, job: int, result: int) -> int:
    """What a completion means: 0 the step is done, 1 issue it again, 2 issue it again after a pause."""
    row = job * STEPS_MAX + jobs[job, J_STEP]
    op = steps[row, S_OP]
    if result < 0:
        error = -result
        if error in (E_INTR, E_AGAIN, E_BUSY) and jobs[job, J_RETRIES] < RETRIES:
            jobs[job, J_RETRIES] += 1
            return 1 if error == E_INTR else 2
        packed = steps[row, S_TOLERATED]
        tolerated = False
        while packed != 0:
            tolerated = tolerated or (packed & 0xFFFF) == error
            packed >>= 16
        if not tolerated:
            # A direct read that continues at an odd place past a cut end of file is refused instead of being empty.
            _fail(jobs, job, E_END if op == O_READ and error == E_INVAL and jobs[job, J_DONE] > 0 else error)
    elif op == O_OPEN:
        jobs[job, J_FD] = result
    elif op in (O_READ, O_WRITE):
        if result == 0:
            _fail(jobs, job, E_END if op == O_READ else E_NOSPC)
        else:
            jobs[job, J_MOVED] += result
            jobs[job, J_DONE] += result
            jobs[job, J_RETRIES] = 0
            if jobs[job, J_DONE] < steps[row, S_LENGTH]:
                return 1
    elif op == O_STAT:
        size = stats[job, 5]
        jobs[job, J_MOVED] = size
        if steps[row, S_LENGTH] >= 0 and size != steps[row, S_LENGTH]:
            _fail(jobs, job, E_END)
    if op == O_CLOSE:
        jobs[job, J_FD] = -1
    jobs[job, J_DONE] = 0
    jobs[job, J_RETRIES] = 0
    jobs[job, J_STEP] += 1
    return 0


@_INNER
def _sweep(
    jobs: Any, cancelled: Any, deadlines: Any, heads: Any, tails: Any, counts: Any, everything: bool, swept: Any
) -> int:
    """Take cancelled jobs out of the waiting lists, into `swept`, and move promoted ones to other lists. Returns how many were cancelled."""
    count = 0
    for which in range(LISTS):
        job = heads[which]
        heads[which] = -1
        tails[which] = -1
        counts[which] = 0
        while job >= 0:
            following = jobs[job, J_NEXT]
            flag = cancelled[job]
            if everything or flag == FLAG_CANCELLED:
                swept[count] = job
                count += 1
            elif flag >= FLAG_PROMOTED:
                cancelled[job] = 0
                jobs[job, J_LANE] = flag - FLAG_PROMOTED
                jobs[job, J_DEADLINE] = deadlines[job]
                _append(jobs, heads, tails, counts, _list_of(jobs, job), job)
            else:
                _append(jobs, heads, tails, counts, which, job)
            job = following
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _run(  # noqa: C901 - one loop, in the order of its comments
    ring: Any,
    own: Any,
    control: int,
    words: Any,
    words_at: int,
    submitted: Any,
    ended: Any,
    jobs: Any,
    steps: Any,
    stats: Any,
    cancelled: Any,
    deadlines: Any,
    lists: Any,
    flying: Any,
    swept: Any,
    delayed: Any,
    sqes: Any,
    cqes: Any,
) -> int:
    """The ring thread's life. Returns 0 after a stop, or the errno of a ring that broke.

    `ring` holds addresses: submission tail, completion head, completion tail, then the completion mask. The other arrays are the tables that the
    module's text speaks of, and room to work in, made by Python because that compiles faster.
    """
    sq_tail_at, cq_head_at, cq_tail_at, cq_mask = ring[0], ring[1], ring[2], ring[3]
    words[W_ARGUMENT + 2] = words_at + 8 * W_PAUSE
    words[W_ONE] = 1
    heads, tails, counts = lists[0], lists[1], lists[2]
    taken = 0
    cancels = 0
    waiting_for_wake = False
    while True:
        now_ns = _now_ns(words, words_at + 8 * W_CLOCK)
        if not waiting_for_wake:
            _entry(sqes, own, UO_READ, 0, own[V_WAKE_FD], -1, words_at + 8 * W_WAKE, 8, 0, WAKE, 0)
            waiting_for_wake = True
        # Take in what callers published.
        tail = _load64(control + 8 * C_SUBMITTED)
        while taken != tail:
            job = submitted[taken & (SLOTS - 1)]
            taken += 1
            own[V_ACTIVE] += 1
            if jobs[job, J_COUNT] == 0:
                own[V_ACTIVE] -= 1
                _ended(jobs, ended, flying, own, control, job, now_ns)
            else:
                jobs[job, J_STAGE] = STAGE_TO_OPEN if steps[job * STEPS_MAX, S_OP] == O_OPEN else STAGE_NONE
                _append(jobs, heads, tails, counts, _list_of(jobs, job), job)
        stop = _load64(control + 8 * C_STOP)
        asked = _load64(control + 8 * C_CANCELS)
        if asked != cancels or stop != 0:
            cancels = asked
            for index in range(_sweep(jobs, cancelled, deadlines, heads, tails, counts, stop != 0, swept)):
                job = swept[index]
                if jobs[job, J_STAGE] == STAGE_OPENED:
                    own[V_AHEAD] -= 1
                _fail(jobs, job, E_CANCELED)
                if jobs[job, J_STAGE] == STAGE_OPENED and _issue(jobs, steps, sqes, own, job):
                    # Its file is open and must be closed.
                    jobs[job, J_STAGE] = STAGE_DATA
                    flying[jobs[job, J_LANE]] += 1
                else:
                    own[V_ACTIVE] -= 1
                    _ended(jobs, ended, flying, own, control, job, now_ns)
        # What was paused after EAGAIN or EBUSY.
        while own[V_DELAYED_COUNT] > 0 and delayed[own[V_DELAYED_HEAD] & (SLOTS - 1), 0] <= now_ns:
            _issue(jobs, steps, sqes, own, delayed[own[V_DELAYED_HEAD] & (SLOTS - 1), 1])
            own[V_DELAYED_HEAD] += 1
            own[V_DELAYED_COUNT] -= 1
        # Start jobs.
        lane = _choose_open(counts, flying, own)
        while lane >= 0:
            job = _take(jobs, heads, tails, counts, 8 + lane * 2)
            own[V_AHEAD] += 1
            _issue(jobs, steps, sqes, own, job)
            lane = _choose_open(counts, flying, own)
        lane = _choose(jobs, heads, counts, flying, own, now_ns)
        while lane >= 0:
            job = _take(jobs, heads, tails, counts, lane * 2)
            if jobs[job, J_STAGE] == STAGE_OPENED:
                own[V_AHEAD] -= 1
            jobs[job, J_STAGE] = STAGE_DATA
            flying[lane] += 1
            _account(counts, own, lane)
            if not _issue(jobs, steps, sqes, own, job):
                own[V_ACTIVE] -= 1
                _ended(jobs, ended, flying, own, control, job, now_ns)
            lane = _choose(jobs, heads, counts, flying, own, now_ns)
        _store64(control + 8 * C_IN_FLIGHT, flying[0] + flying[1] + flying[2] + flying[3] + own[V_AHEAD])
        # Tell the herald.
        quiet = own[V_ACTIVE] == 0
        if own[V_UNREPORTED] > 0 and (
            quiet
            or own[V_UNREPORTED] >= REPORT_JOBS
            or own[V_UNREPORTED_BYTES] >= REPORT_BYTES
            or now_ns - own[V_UNREPORTED_SINCE] >= REPORT_AGE_NS
        ):
            own[V_UNREPORTED] = 0
            own[V_UNREPORTED_BYTES] = 0
            _syscall(SYS_WRITE, own[V_DONE_FD], words_at + 8 * W_ONE, 8, 0, 0, 0)
        if stop != 0 and quiet:
            return 0
        # Enter the kernel.
        wait_ns = -1
        if own[V_UNREPORTED] > 0:
            wait_ns = max(0, own[V_UNREPORTED_SINCE] + REPORT_AGE_NS - now_ns)
        if own[V_DELAYED_COUNT] > 0:
            until = max(0, delayed[own[V_DELAYED_HEAD] & (SLOTS - 1), 0] - now_ns)
            wait_ns = until if wait_ns < 0 else min(wait_ns, until)
        head = _load32(cq_head_at)
        wanted = 1 if _load32(cq_tail_at) == head else 0
        flags = ENTER_GETEVENTS
        at = 0
        size = 0
        if wanted == 1 and wait_ns >= 0:
            words[W_PAUSE] = wait_ns // 1_000_000_000
            words[W_PAUSE + 1] = wait_ns % 1_000_000_000
            flags |= ENTER_EXT_ARG
            at = words_at + 8 * W_ARGUMENT
            size = 24
        _store32(sq_tail_at, own[V_SQ_TAIL])
        _store64(control + 8 * C_PASSES, _load64(control + 8 * C_PASSES) + 1)
        entered = _syscall(SYS_ENTER, own[V_RING_FD], own[V_UNSUBMITTED], wanted, flags, at, size)
        if entered >= 0:
            own[V_UNSUBMITTED] -= entered
        else:
            error = _load32(_errno_place())
            # ETIME: nothing ended in time. With a timeout the kernel tells it only where nothing was submitted.
            if error == 62:
                pass
            elif error not in (E_INTR, E_AGAIN, E_BUSY):
                return error  # type: ignore[no-any-return]
        # Reap.
        head = _load32(cq_head_at)
        tail = _load32(cq_tail_at)
        if head != tail:
            now_ns = _now_ns(words, words_at + 8 * W_CLOCK)
        while head != tail:
            place = head & cq_mask
            user = cqes[place, 0]
            result = np.int64(np.int32(cqes[place, 1] & 0xFFFFFFFF))
            head = (head + 1) & 0xFFFFFFFF
            if user == WAKE:
                waiting_for_wake = False
                continue
            job = user
            verdict = _judge(jobs, steps, stats, job, result)
            if verdict == 2:
                spot = (own[V_DELAYED_HEAD] + own[V_DELAYED_COUNT]) & (SLOTS - 1)
                delayed[spot, 0] = now_ns + BACK_OFF_NS
                delayed[spot, 1] = job
                own[V_DELAYED_COUNT] += 1
            elif verdict == 0 and jobs[job, J_STAGE] == STAGE_TO_OPEN:
                jobs[job, J_STAGE] = STAGE_OPENED
                if cancelled[job] == FLAG_CANCELLED:
                    _fail(jobs, job, E_CANCELED)
                _append(jobs, heads, tails, counts, _list_of(jobs, job), job)
            elif not _issue(jobs, steps, sqes, own, job):
                own[V_ACTIVE] -= 1
                _ended(jobs, ended, flying, own, control, job, now_ns)
        _store32(cq_head_at, head)


# -- Python's side

_libc = ctypes.CDLL(None, use_errno=True)
_pack_job = struct.Struct(f"{JOB_COLUMNS}q").pack_into
_pack_step = struct.Struct(f"{STEP_COLUMNS}q").pack_into


def _call(number: int, *arguments: int) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


_LIST, _TABLE, _WORD = types.int64[::1], types.int64[:, ::1], types.int64
_RUN_TYPES = (
    _LIST, _LIST, _WORD, _LIST, _WORD, _LIST, _LIST, _TABLE, _TABLE, _TABLE, types.uint8[::1], _LIST, _TABLE, _LIST, _LIST, _TABLE,
    _TABLE, _TABLE,
)  # fmt: skip


def compile_loop() -> None:
    """Compile the loop, or take it from numba's cache on disk."""
    _run.compile(_RUN_TYPES)


def _compile_beside() -> None:
    """Where the cache has no loop yet, have a child compile it: what compiling leaves in memory, 30 MiB, goes with the child.

    A child that cannot do it leaves it to this process.
    """
    kept = Path(_run.stats.cache_path or "")
    newest = max((file.stat().st_mtime for file in kept.glob("ring._run-*.nbi")), default=0.0)
    if not kept.name or newest >= Path(__file__).stat().st_mtime:
        return
    command = [sys.executable, "-c", f"import {__name__} as ring; ring.compile_loop()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            env=environment,
            timeout=_COMPILE_DEADLINE_S,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )


class RingUnavailableError(Exception):
    """io_uring cannot be used here; the text says why."""


class _Ring:
    """One io_uring with its shared memory. Made by the thread that uses it."""

    def __init__(self, entries: int) -> None:
        parameters = np.zeros(30, np.uint32)
        self.fd = -1
        for flags in (SETUP_CLAMP | SETUP_SUBMIT_ALL | SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_CLAMP):
            parameters[:] = 0
            parameters[2] = flags
            try:
                self.fd = _call(SYS_SETUP, entries, parameters.ctypes.data)
                break
            except OSError as exception:
                error = exception
        if self.fd < 0:
            raise RingUnavailableError(f"the kernel or the container's policy refuses io_uring ({error.strerror})")
        try:
            self._map(parameters)
        except BaseException:
            os.close(self.fd)
            raise

    def _map(self, parameters: Any) -> None:
        sq_entries, cq_entries, features = int(parameters[0]), int(parameters[1]), int(parameters[5])
        needed = FEAT_SINGLE_MMAP | FEAT_NODROP | FEAT_EXT_ARG
        if features & needed != needed:
            raise RingUnavailableError("this kernel's io_uring is too old: Linux 5.11 or later is needed")
        sq, cq = parameters[10:20], parameters[20:30]
        size = max(int(sq[6]) + 4 * sq_entries, int(cq[5]) + 16 * cq_entries)
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.memory = mmap.mmap(self.fd, size, shared, offset=0)
        self.sqe_memory = mmap.mmap(self.fd, 64 * sq_entries, shared, offset=OFF_SQES)
        for memory in (self.memory, self.sqe_memory):
            # A forked child must not share the ring.
            memory.madvise(mmap.MADV_DONTFORK)
        words = np.frombuffer(self.memory, np.uint32, size // 4)
        base = words.ctypes.data
        array = int(sq[6]) // 4
        words[array : array + sq_entries] = np.arange(sq_entries)
        self.entries = sq_entries
        self.addresses = np.array(
            [base + int(sq[1]), base + int(cq[0]), base + int(cq[1]), words[int(cq[2]) // 4]], np.int64
        )
        self.sqes = np.frombuffer(self.sqe_memory, np.int64).reshape(sq_entries, 8)
        self.cqes = np.frombuffer(self.memory, np.int64, 2 * cq_entries, offset=int(cq[5])).reshape(cq_entries, 2)

    def supported(self) -> frozenset[int]:
        """Operations that the kernel knows."""
        probe = np.zeros(16 + 8 * 64, np.uint8)
        try:
            _call(SYS_REGISTER, self.fd, REGISTER_PROBE, probe.ctypes.data, 64)
        except OSError as exception:
            raise RingUnavailableError(
                f"this kernel does not tell what its io_uring can do ({exception.strerror})"
            ) from exception
        rows = probe[16:].reshape(64, 8)
        return frozenset(int(row[0]) for row in rows[: int(probe[1])] if row[2] & 1)

    def close(self) -> None:
        os.close(self.fd)


def why_not_here() -> str:
    """Empty where the ring may be tried, else why not."""
    if sys.platform != "linux":
        return f"io_uring needs Linux, this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"the ring's loop is used on x86-64 alone, this is {platform.machine()}"
    return ""


class RingIO(IOEngine):
    """Runs up to `iodepth` jobs at a time on one io_uring.

    Args:
        iodepth: most jobs that move data at a time, at most 1,024.
        write_share: part of the depth that waiting writes always get.
        open_lookahead: files opened, or being opened, for jobs whose turn to move data has not come; `iodepth` by default.
        transfer_bytes_max: most bytes that one operation moves.

    Attributes:
        registered_files: how many files the kernel keeps for the ring.
        registered_memory_bytes: bytes of memory that it does.

    Raises:
        RingUnavailableError: not here.
    """

    name = "ring"

    def __init__(
        self,
        *,
        iodepth: int = 16,
        write_share: float = 0.125,
        open_lookahead: int | None = None,
        transfer_bytes_max: int = 1 << 30,
        because: str = "asked for",
    ) -> None:
        ahead = iodepth if open_lookahead is None else open_lookahead
        if not 1 <= iodepth <= 1024 or not 1 <= ahead <= 1024 or not 0 < write_share < 1:
            raise ConfigError(
                f"iodepth is {iodepth}, open_lookahead {ahead}, write_share {write_share}: use 1 to 1024, 1 to 1024 and a fraction between 0 and 1"
            )
        why = why_not_here()
        if why:
            raise RingUnavailableError(why)
        _compile_beside()
        self.chosen_because = because
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = list(range(SLOTS - 1, -1, -1))
        self._held: list[Job | None] = [None] * SLOTS
        self._keep: list[Any] = [None] * SLOTS
        self._slot_of: dict[int, int] = {}
        self._overflow: deque[tuple[Job, tuple[Any, ...]]] = deque()
        self._control = np.zeros(CONTROL_WORDS, np.int64)
        self._submitted = np.zeros(SLOTS, np.int64)
        self._ended = np.zeros(SLOTS, np.int64)
        self._jobs = np.zeros((SLOTS, JOB_COLUMNS), np.int64)
        self._steps = np.zeros((SLOTS * STEPS_MAX, STEP_COLUMNS), np.int64)
        self._cancelled = np.zeros(SLOTS, np.uint8)
        self._deadlines = np.zeros(SLOTS, np.int64)
        self._jobs_bytes = self._jobs.data.cast("B")
        self._steps_bytes = self._steps.data.cast("B")
        self._submitted_words = self._submitted.data
        self._ended_words = self._ended.data
        self._control_words = self._control.data
        self._tail = 0
        self._head = 0
        self._files: dict[int, int] = {}
        self._file_places: list[int] = []
        self._memory: list[tuple[int, int, int]] = []
        self._memory_places = 0
        self._callbacks_failed = 0
        self._stopping = False
        self._broken = ""
        self._helper: ThreadIO | None = None
        self._iodepth = iodepth
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._done_fd = os.eventfd(0, os.EFD_CLOEXEC)
        own = self._own = np.zeros(VARIABLES, np.int64)
        own[V_DONE_FD], own[V_TRANSFER_MAX], own[V_IODEPTH] = self._done_fd, transfer_bytes_max, iodepth
        own[V_WRITE_CREDIT], own[V_CREDIT_A_START] = CREDIT_UNIT, int(CREDIT_UNIT * write_share / (1 - write_share))
        own[V_WRITE_MIN], own[V_RESERVE], own[V_OPEN_AHEAD] = max(1, int(iodepth * write_share)), iodepth // 4, ahead
        entries = 1 << (iodepth + ahead + 16).bit_length()
        self._supported: frozenset[int] = frozenset()
        started = threading.Event()
        failure: list[BaseException] = []
        self._thread = threading.Thread(
            target=self._life, args=(entries, started, failure), name="kvtier-disk-ring", daemon=True
        )
        self._thread.start()
        started.wait()
        if failure:
            self._thread.join()
            os.close(self._wake_fd)
            os.close(self._done_fd)
            raise failure[0]
        self._unsupported_ops = {int(op) for op, code in NAMES.items() if code not in self._supported}
        self._herald = threading.Thread(target=self._hand_over, name="kvtier-disk-herald", daemon=True)
        self._herald.start()

    # -- the ring thread

    def _life(self, entries: int, started: threading.Event, failure: list[BaseException]) -> None:
        ring = None
        try:
            ring = _Ring(entries)
            self._supported = ring.supported()
            missing = [code for code in REQUIRED if code not in self._supported]
            if missing:
                raise RingUnavailableError(f"this kernel's io_uring lacks operations {missing}")
            self._file_places = self._sparse(ring.fd, REGISTER_FILES2, 1024)
            self._memory_places = len(self._sparse(ring.fd, REGISTER_BUFFERS2, 512))
            self._own[V_ENTRIES], self._own[V_RING_FD] = ring.entries, ring.fd
            stats = np.zeros((SLOTS, 32), np.int64)
            words = np.zeros(16, np.int64)
            self._own[V_WAKE_FD], self._own[V_STATS_AT] = self._wake_fd, stats.ctypes.data
            lists = np.zeros((3, LISTS), np.int64)
            lists[:2] = -1
            arguments = (
                ring.addresses, self._own, self._control.ctypes.data, words, words.ctypes.data, self._submitted, self._ended, self._jobs,
                self._steps, stats, self._cancelled, self._deadlines, lists, np.zeros(LANES_COUNT, np.int64), np.zeros(SLOTS, np.int64),
                np.zeros((SLOTS, 2), np.int64), ring.sqes, ring.cqes,
            )  # fmt: skip
            # Compiled, or taken from the cache, before anybody waits for it.
            compile_loop()
        except RingUnavailableError as exception:
            failure.append(exception)
        except Exception as exception:  # noqa: BLE001 - told to the caller, who falls back
            failure.append(RingUnavailableError(f"the ring could not start ({type(exception).__name__}: {exception})"))
        started.set()
        if failure:
            if ring is not None:
                ring.close()
            return
        assert ring is not None
        error = _run(*arguments)
        if error:
            self._broken = f"the ring broke: {os.strerror(error)}"
        ring.close()
        self._control_words[C_STOP] = 2
        os.eventfd_write(self._done_fd, 1)

    def _sparse(self, ring_fd: int, opcode: int, count: int) -> list[int]:
        """Make an empty table for registered things; none where the kernel does not."""
        request = np.zeros(4, np.int64)
        request[0] = count | (RSRC_SPARSE << 32)
        try:
            _call(SYS_REGISTER, ring_fd, opcode, request.ctypes.data, 32)
        except OSError:
            return []
        return list(range(count - 1, -1, -1))

    # -- callers

    def submit(self, jobs: Sequence[Job], finished: Finished) -> None:
        for job in jobs:
            job.finished = finished
        refused = os.getpid() != self._pid
        if not refused:
            if self._unsupported_ops:
                jobs = self._give_to_helper(jobs, finished)
            with self._lock:
                # Under the lock, since `close` gives the descriptors back: their numbers may be other files' by now.
                refused = self._stopping or bool(self._broken)
                if not refused:
                    for job in jobs:
                        self._put(job, job.steps)
                    self._publish()
        if refused:
            for job in jobs:
                job.error = errno.ECANCELED
            if jobs:
                finished(list(jobs))

    def _give_to_helper(self, jobs: Sequence[Job], finished: Finished) -> Sequence[Job]:
        """What the kernel's ring cannot do goes to threads. Returns the rest."""
        for_threads = [job for job in jobs if any(int(step.op) in self._unsupported_ops for step in job.steps)]
        if for_threads:
            with self._lock:
                if self._helper is None:
                    self._helper = ThreadIO(
                        iodepth=self._iodepth, because="the kernel's ring lacks operations on names"
                    )
            self._helper.submit(for_threads, finished)
        return [job for job in jobs if job not in for_threads]

    def _put(self, job: Job, steps: tuple[Any, ...]) -> None:
        """Under the lock: the job into the tables, or in line for them."""
        if not self._free:
            self._overflow.append((job, steps))
            return
        if len(steps) > STEPS_MAX:
            raise ValueError(f"a job has {len(steps)} steps, the ring takes {STEPS_MAX}")
        slot = self._free.pop()
        self._held[slot] = job
        self._slot_of[id(job)] = slot
        self._cancelled[slot] = job.cancelled
        deadline = NO_DEADLINE if job.deadline_s is None else int(job.deadline_s * 1e9)
        _pack_job(
            self._jobs_bytes,
            slot * JOB_COLUMNS * 8,
            LANE_INDEX[id(job.lane)],
            deadline,
            len(steps),
            0,
            0,
            -1,
            0,
            -1,
            0,
            0,
            0,
            -1,
        )
        keep: list[Any] = []
        offset = slot * STEPS_MAX * STEP_COLUMNS * 8
        for step in steps:
            if isinstance(step, Step):
                self._pack(step, offset, keep)
            else:
                _pack_step(self._steps_bytes, offset, *step)
            offset += STEP_COLUMNS * 8
        self._keep[slot] = keep
        self._submitted_words[self._tail % SLOTS] = slot
        self._tail += 1

    def _pack(self, step: Step, offset: int, keep: list[Any]) -> None:
        length = step.length
        path = path_to = 0
        index = -1
        if step.buffer is not None:
            length = step.buffer.nbytes
            for first, last, place in self._memory:
                if first <= step.address and step.address + length <= last:
                    index = place
                    break
        if step.path:
            name = ctypes.c_char_p(step.path)
            path = ctypes.cast(name, ctypes.c_void_p).value or 0
            keep.append(name)
            if step.path_to:
                name = ctypes.c_char_p(step.path_to)
                path_to = ctypes.cast(name, ctypes.c_void_p).value or 0
                keep.append(name)
        tolerated = 0
        for error in step.tolerated:
            tolerated = tolerated << 16 | error
        flags = step.flags | os.O_CLOEXEC if step.op is Op.OPEN else step.flags
        _pack_step(
            self._steps_bytes, offset, step.op, step.fd, step.address, length, step.offset, flags, path, path_to, tolerated, step.always, index,
            self._files.get(step.fd, -1),
        )  # fmt: skip

    def _publish(self) -> None:
        self._control_words[C_SUBMITTED] = self._tail
        os.eventfd_write(self._wake_fd, 1)

    def cancel(self, jobs: Sequence[Job]) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            for job in jobs:
                job.cancelled = True
                slot = self._slot_of.get(id(job))
                if slot is not None:
                    self._cancelled[slot] = FLAG_CANCELLED
            self._control_words[C_CANCELS] += 1
            if not self._stopping:
                os.eventfd_write(self._wake_fd, 1)
            helper = self._helper
        if helper is not None:
            helper.cancel(jobs)

    def promote(self, jobs: Sequence[Job], lane: Lane, deadline_s: float | None) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            for job in jobs:
                slot = self._slot_of.get(id(job))
                if slot is None:
                    job.lane, job.deadline_s = lane, deadline_s
                elif not job.cancelled:
                    self._deadlines[slot] = NO_DEADLINE if deadline_s is None else int(deadline_s * 1e9)
                    self._cancelled[slot] = FLAG_PROMOTED + LANE_INDEX[id(lane)]
            self._control_words[C_CANCELS] += 1
            if not self._stopping:
                os.eventfd_write(self._wake_fd, 1)
            helper = self._helper
        if helper is not None:
            helper.promote(jobs, lane, deadline_s)

    def in_flight(self) -> int:
        return int(self._control_words[C_IN_FLIGHT]) + (self._helper.in_flight() if self._helper else 0)

    @property
    def passes(self) -> int:
        """How often the loop went round: what an idle engine does not do."""
        return int(self._control_words[C_PASSES])

    @property
    def registered_files(self) -> int:
        return len(self._files)

    @property
    def registered_memory_bytes(self) -> int:
        return sum(last - first for first, last, _ in self._memory)

    def register_file(self, fd: int) -> None:
        with self._lock:
            if not self._file_places or fd in self._files or self._stopping:
                return
            place = self._file_places.pop()
        if self._own_job((OP_FILES_UPDATE, -1, 0, 1, place), np.array([fd], np.int32)) == 0:
            with self._lock:
                self._files[fd] = place

    def forget_file(self, fd: int) -> None:
        with self._lock:
            place = self._files.pop(fd, None)
        if place is not None and self._own_job((OP_FILES_UPDATE, -1, 0, 1, place), np.array([-1], np.int32)) == 0:
            with self._lock:
                self._file_places.append(place)

    def register_memory(self, view: memoryview) -> str:
        from kvtier.tier.disk.io import address_of

        if not self._memory_places:
            return "this kernel's io_uring cannot register memory piecemeal"
        start, total = address_of(view), view.nbytes
        # The kernel takes pieces of up to 1 GiB.
        for first in range(start, start + total, 1 << 30):
            size = min(1 << 30, start + total - first)
            place = len(self._memory)
            if place >= self._memory_places:
                return f"only {self._memory_places} GiB can be registered"
            vector = np.array([first, size], np.int64)
            update = np.array([place, vector.ctypes.data, 0, 1], np.int64)
            error = self._own_job((OP_REGISTER, -1, 0, 32, 0, REGISTER_BUFFERS_UPDATE), update, vector)
            if error == errno.ENOMEM:
                return f"locking {total} bytes of memory is not allowed: raise RLIMIT_MEMLOCK (ulimit -l)"
            if error:
                return f"the kernel refused to register memory: {os.strerror(error)}"
            with self._lock:
                self._memory.append((first, first + size, place))
        return ""

    def _own_job(self, columns: tuple[int, ...], *arrays: Any) -> int:
        """A job of the engine's own, waited for. Its data is at the first array. Returns its errno."""
        row = [*columns, *[0] * (STEP_COLUMNS - len(columns))]
        row[S_ADDRESS] = arrays[0].ctypes.data
        row[S_BUFFER_INDEX] = row[S_FIXED] = -1
        ended = threading.Event()
        job = Job((), tag=arrays)
        job.finished = lambda jobs: ended.set()
        with self._lock:
            if self._stopping or self._broken:
                return errno.ECANCELED
            self._put(job, (tuple(row),))
            self._publish()
        return job.error if ended.wait(30.0) else errno.ETIMEDOUT

    # -- the herald

    def _hand_over(self) -> None:
        while True:
            os.eventfd_read(self._done_fd)
            batch = self._collect()
            if batch:
                hand_over(batch, self._count_failed_callback)
            if self._control_words[C_STOP] == 2:
                self._give_up_the_rest()
                return

    def _collect(self) -> list[Job]:
        batch = []
        with self._lock:
            tail = self._control_words[C_ENDED]
            while self._head != tail:
                slot = self._ended_words[self._head % SLOTS]
                self._head += 1
                job = self._held[slot]
                assert job is not None
                row = self._jobs[slot]
                job.error, job.failed_step, job.moved_bytes = int(row[J_ERROR]), int(row[J_FAILED]), int(row[J_MOVED])
                self._held[slot] = None
                self._keep[slot] = None
                del self._slot_of[id(job)]
                self._free.append(slot)
                batch.append(job)
            fed = False
            while self._overflow and self._free:
                job, steps = self._overflow.popleft()
                if job.cancelled or self._stopping:
                    job.error = errno.ECANCELED
                    batch.append(job)
                    continue
                self._put(job, steps)
                fed = True
            if fed:
                self._publish()
        return batch

    def _give_up_the_rest(self) -> None:
        """After the loop's end: what it never took, or had out when it broke, ends as cancelled."""
        with self._lock:
            rest = [job for job in self._held if job is not None] + [job for job, _ in self._overflow]
            self._held = [None] * SLOTS
            self._overflow.clear()
        for job in rest:
            job.error = errno.ECANCELED
        hand_over(rest, self._count_failed_callback)

    def _count_failed_callback(self) -> None:
        self._callbacks_failed += 1

    def close(self, deadline_s: float) -> bool:
        if os.getpid() != self._pid:
            return True
        until = time.monotonic() + deadline_s
        with self._lock:
            first = not self._stopping
            self._stopping = True
            if first:
                self._control_words[C_STOP] = 1
                os.eventfd_write(self._wake_fd, 1)
            helper = self._helper
        quiet = helper.close(deadline_s) if helper is not None else True
        for thread in (self._thread, self._herald):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
                quiet = quiet and not thread.is_alive()
        if quiet and first:
            os.close(self._wake_fd)
            os.close(self._done_fd)
        return quiet
