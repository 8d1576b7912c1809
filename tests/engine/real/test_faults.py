"""Faults on a real engine: whatever happens to stored data, disk or process, the tokens are right and the engine goes on."""

import os
import random
import shutil
import sqlite3
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.real.cases import (
    CASES,
    LLAMA,
    LOGPROBS,
    Case,
    assert_same,
    counters_of,
    kvtier_settings,
    text,
)
from tests.engine.real.conftest import Fork

from kvtier.errors import StoreUnavailableError
from kvtier.testing import forks
from kvtier.testing.vllm.driver import Answer, Engine

pytestmark = pytest.mark.engine

GEMMA = next(case for case in CASES if case.model == "gemma3")
GPTOSS = next(case for case in CASES if case.model == "gptoss")
FALCON = next(case for case in CASES if case.model == "falconh1")
PROMPTS = 12


def ask(engine: Engine, prompt: list[int]) -> Answer:
    return engine.ask(prompt, logprobs=LOGPROBS)


def ask_again(engine: Engine, prompt: list[int]) -> Answer:
    """Ask with nothing in the engine's own cache."""
    engine.settle()
    engine.reset_prefix_cache()
    return ask(engine, prompt)


def prompts_of(case: Case) -> list[list[int]]:
    return [text(100 + number, 3 * case.block_tokens + 7) for number in range(PROMPTS)]


# ---- what is right, and a disk full of good data, once for each model


@pytest.fixture(scope="module")
def plain(fork_module: Fork, checkpoint: Callable[[str], Path]) -> Callable[[Case], dict[str, Any]]:
    """A function that gives a model's answers without kvtier."""
    known: dict[str, dict[str, Any]] = {}

    def answers(case: Case) -> dict[str, Any]:
        model = checkpoint(case.model)

        def scenario() -> dict[str, Any]:
            with case.engine(model) as engine:
                return {"long": ask(engine, case.long), "many": [ask(engine, prompt) for prompt in prompts_of(case)]}

        if case.model not in known:
            known[case.model] = fork_module(scenario)
        return known[case.model]

    return answers


@pytest.fixture(scope="module")
def good_disk(
    fork_module: Fork, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Path]:
    """A function that gives a disk path on which an engine has left the long prompt."""
    known: dict[str, Path] = {}

    def disk(case: Case) -> Path:
        model = checkpoint(case.model)
        path = tmp_path_factory.getbasetemp() / f"good-disk-{case.model}"

        def scenario() -> None:
            with case.engine(model, kvtier=kvtier_settings(path)) as engine:
                ask(engine, case.long)
                engine.settle()
                assert counters_of(engine)["written_parts"] >= case.long_tokens // case.block_tokens

        if case.model not in known:
            path.mkdir()
            fork_module(scenario)
            known[case.model] = path
        return known[case.model]

    return disk


# ---- stored data


def segments(disk: Path) -> list[tuple[Path, int]]:
    """Files with parts in them, and the bytes of a slot in each."""
    return [(path, int(path.stem.rpartition("_")[2])) for path in sorted(disk.rglob("seg_*.kv"))]


def catalogs(disk: Path) -> list[Path]:
    return sorted(disk.rglob("catalog.sqlite*"))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def delete_segments(disk: Path) -> None:
    for path, _ in segments(disk):
        path.unlink()


def cut_segments(disk: Path) -> None:
    for path, slot in segments(disk):
        os.truncate(path, 5 * slot + 100)


def flip_a_bit(disk: Path) -> None:
    for path, slot in segments(disk):
        place = 3 * slot + slot // 2
        overwrite(path, place, bytes([read(path, place, 1)[0] ^ 0x10]))


def zero_a_head(disk: Path) -> None:
    for path, slot in segments(disk):
        overwrite(path, 2 * slot, bytes(4096))


def scramble_a_part(disk: Path) -> None:
    for path, slot in segments(disk):
        overwrite(path, 4 * slot, random.Random(1).randbytes(slot))


def flip_a_bit_in_every_part(disk: Path) -> None:
    """Of several groups a load needs but some parts, so that damage to one of them may rightly go unnoticed."""
    for path, slot in segments(disk):
        for start in range(0, path.stat().st_size, slot):
            byte = read(path, start + 100, 1)
            overwrite(path, start + 100, bytes([byte[0] ^ 8]))


def swap_two_parts(disk: Path) -> None:
    """Each is whole and carries a right checksum, but is another prefix's."""
    for path, slot in segments(disk):
        first, second = read(path, slot, slot), read(path, 2 * slot, slot)
        overwrite(path, slot, second)
        overwrite(path, 2 * slot, first)


def zero_everything(disk: Path) -> None:
    for path, slot in segments(disk):
        overwrite(path, 0, bytes(64 * slot))


def delete_catalog(disk: Path) -> None:
    for path in catalogs(disk):
        path.unlink()


def scramble_catalog(disk: Path) -> None:
    for path in catalogs(disk):
        path.write_bytes(random.Random(2).randbytes(max(path.stat().st_size, 4096)))


def delete_catalog_and_flip(disk: Path) -> None:
    delete_catalog(disk)
    flip_a_bit(disk)


DAMAGES = (
    delete_segments,
    cut_segments,
    flip_a_bit,
    zero_a_head,
    scramble_a_part,
    swap_two_parts,
    zero_everything,
    delete_catalog,
    scramble_catalog,
    delete_catalog_and_flip,
)
# A lost catalog is rebuilt from what the segments say about themselves.
HARMLESS = (delete_catalog, scramble_catalog)


@pytest.mark.parametrize(
    ("case", "damage"),
    [(LLAMA, damage) for damage in DAMAGES] + [(GEMMA, flip_a_bit_in_every_part), (GEMMA, cut_segments)],
    ids=lambda value: value.model if isinstance(value, Case) else value.__name__,
)
def test_damaged_data_is_recomputed(
    case: Case,
    damage: Callable[[Path], None],
    fork: Fork,
    checkpoint: Callable[[str], Path],
    plain: Callable[[Case], dict[str, Any]],
    good_disk: Callable[[Case], Path],
    tmp_path: Path,
) -> None:
    model, right = checkpoint(case.model), plain(case)["long"]
    disk = tmp_path / "disk"
    shutil.copytree(good_disk(case), disk)
    assert segments(disk) and catalogs(disk)
    damage(disk)

    def scenario() -> tuple[Answer, dict[str, float], Answer, dict[str, float]]:
        with case.engine(model, kvtier=kvtier_settings(disk)) as engine:
            first = ask(engine, case.long)
            engine.settle()
            counters = counters_of(engine)
            second = ask_again(engine, case.long)
            engine.settle()
            return first, counters, second, counters_of(engine)

    first, counters, second, after = fork(scenario)
    assert_same(first, right, "the damaged prompt")
    assert_same(second, right, "the prompt after it was stored again")
    whole = case.whole_blocks(case.long_tokens)
    failed = counters.get("load_failed", 0)
    if damage in HARMLESS:
        assert (failed, first.external_tokens) == (0, whole)
    else:
        assert failed == 1 or first.external_tokens < whole, "the damage was not noticed"
    if damage is flip_a_bit_in_every_part:
        # Each load finds out about those parts alone that it came to.
        return
    assert second.external_tokens == whole, "what was recomputed is stored again"
    assert after.get("load_failed", 0) == failed


def test_data_removed_under_a_living_engine(
    fork: Fork, checkpoint: Callable[[str], Path], plain: Callable[[Case], dict[str, Any]], tmp_path: Path
) -> None:
    model, right = checkpoint(LLAMA.model), plain(LLAMA)

    def scenario() -> list[Answer]:
        with LLAMA.engine(model, kvtier=kvtier_settings(tmp_path, dram_bytes="2MiB")) as engine:
            first = ask(engine, LLAMA.long)
            engine.settle()
            shutil.rmtree(next(path for path in tmp_path.iterdir() if path.is_dir()))
            second = ask_again(engine, LLAMA.long)
            return [first, second, *(ask_again(engine, prompt) for prompt in prompts_of(LLAMA))]

    answers = fork(scenario)
    for answer, reference in zip(answers, [right["long"], right["long"], *right["many"]], strict=True):
        assert_same(answer, reference, "after the files were removed")


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A filesystem too small for what is stored, and how it was had; kvtier's own limit where mounting is refused."""
    image, mounted = tmp_path / "image", tmp_path / "small"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    made = (
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], capture_output=True, check=False)
        if _has("mkfs.ext4")
        else None
    )
    for how, command in (
        ("loop", ["mount", "-o", "loop", str(image), str(mounted)]),
        ("tmpfs", ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mounted)]),
    ):
        if how == "loop" and (made is None or made.returncode):
            continue
        if not subprocess.run(command, capture_output=True, check=False).returncode:
            try:
                yield mounted, how
            finally:
                subprocess.run(["umount", "-l", str(mounted)], capture_output=True, check=False)
            return
    yield mounted, "limit"


def _has(command: str) -> bool:
    return shutil.which(command) is not None


def test_full_disk(
    small_disk: tuple[Path, str],
    fork: Fork,
    checkpoint: Callable[[str], Path],
    plain: Callable[[Case], dict[str, Any]],
) -> None:
    disk, how = small_disk
    warnings.warn(f"the disk was made full by a {how}", stacklevel=1)
    model, right = checkpoint(FALCON.model), plain(FALCON)
    limit = {"disk_bytes": "8MiB"} if how == "limit" else {}
    settings = kvtier_settings(disk, **limit)

    def fill() -> tuple[list[Answer], dict[str, float]]:
        with FALCON.engine(model, kvtier=settings) as engine:
            answers = [ask_again(engine, prompt) for prompt in prompts_of(FALCON)]
            answers.append(ask_again(engine, FALCON.long))
            engine.settle()
            return answers, counters_of(engine)

    def use() -> tuple[list[Answer], dict[str, float]]:
        with FALCON.engine(model, kvtier=settings) as engine:
            answers = [ask_again(engine, prompt) for prompt in prompts_of(FALCON)]
            engine.settle()
            return answers, counters_of(engine)

    answers, counters = fork(fill)
    for answer, reference in zip(answers, [*right["many"], right["long"]], strict=True):
        assert_same(answer, reference, "on a disk that fills")
    stopped = counters.get("write_refused_parts", 0) + counters.get("write_failed_parts", 0)
    assert stopped + counters.get("disk_evicted_parts", 0) > 0, f"the disk did not fill: {counters}"
    if how != "limit":
        assert shutil.disk_usage(disk).used <= 24 << 20
    answers, counters = fork(use)
    for answer, reference in zip(answers, right["many"], strict=True):
        assert_same(answer, reference, "from a full disk")


# ---- processes that die


def test_kill_during_stores(
    fork: Fork, checkpoint: Callable[[str], Path], plain: Callable[[Case], dict[str, Any]], tmp_path: Path
) -> None:
    """Killed at three moments of storing, on one disk path; what the next engine finds there is right."""
    model, right = checkpoint(LLAMA.model), plain(LLAMA)
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = kvtier_settings(disk)
    kills = 3

    def store() -> None:
        with LLAMA.engine(model, kvtier=settings) as engine:
            while True:
                for prompt in prompts_of(LLAMA):
                    ask_again(engine, prompt)
                engine.settle()
                engine.reset_prefix_cache(connector=True)

    def use() -> tuple[list[Answer], int]:
        with LLAMA.engine(model, kvtier=settings) as engine:
            first = [ask(engine, prompt) for prompt in prompts_of(LLAMA)]
            return first, sum(answer.external_tokens for answer in first)

    restored = 0
    for number in range(kills):
        child = forks.start(store, log=tmp_path / f"killed-{number}.log", timeout_s=60)
        forks.wait_for(lambda: rows_in(disk) > 2 + 9 * number, timeout_s=50, what="stored parts", child=child)  # noqa: B023
        forks.kill(child)
        answers, tokens = fork(use)
        restored += tokens
        for answer, reference in zip(answers, right["many"], strict=True):
            assert_same(answer, reference, f"after kill {number}")
    assert restored > 0, "nothing survived any kill"


def rows_in(disk: Path) -> int:
    """Parts published in the catalog, as another process sees them."""
    try:
        (path,) = disk.rglob("catalog.sqlite")
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0.1) as database:
            return int(database.execute("SELECT count(*) FROM parts").fetchone()[0])
    except (ValueError, sqlite3.Error):
        return 0


def test_shutdown_writes_what_was_taken(
    fork: Fork, checkpoint: Callable[[str], Path], plain: Callable[[Case], dict[str, Any]], tmp_path: Path
) -> None:
    """An engine closed right after its answer has its prompt on disk."""
    model, right = checkpoint(LLAMA.model), plain(LLAMA)["long"]

    def once() -> Answer:
        with LLAMA.engine(model, kvtier=kvtier_settings(tmp_path)) as engine:
            return ask(engine, LLAMA.long)

    assert_same(fork(once), right, "cold")
    second = fork(once)
    assert_same(second, right, "after the restart")
    # The last chunk's store begins with the step after the last token's.
    assert second.external_tokens >= LLAMA.whole_blocks(LLAMA.long_tokens) - LLAMA.block_tokens


def test_two_engines_on_one_path(fork: Fork, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The second is refused while the first lives, and served once it died, however it died."""
    model = checkpoint(LLAMA.model)
    disk = tmp_path / "disk"
    disk.mkdir()
    held, go_on = tmp_path / "held", tmp_path / "go-on"

    def hold() -> int:
        with LLAMA.engine(model, kvtier=kvtier_settings(disk)) as engine:
            ask(engine, LLAMA.long)
            engine.settle()
            held.touch()
            while not go_on.exists():
                time.sleep(0.01)
            return ask_again(engine, LLAMA.long).external_tokens

    def refused() -> str:
        try:
            with LLAMA.engine(model, kvtier=kvtier_settings(disk)):
                return ""
        except StoreUnavailableError as error:
            return str(error)

    def served() -> int:
        with LLAMA.engine(model, kvtier=kvtier_settings(disk)) as engine:
            return ask(engine, LLAMA.long).external_tokens

    first = forks.start(hold, log=tmp_path / "first.log", timeout_s=90)
    forks.wait_for(held.exists, timeout_s=60, what="the first engine", child=first)
    message = fork(refused)
    assert str(disk) in message and ("process" in message or "engine" in message), message
    go_on.touch()
    assert forks.join(first) > 0, "the first engine was disturbed"
    assert fork(served) > 0

    go_on.unlink()
    held.unlink()
    first = forks.start(hold, log=tmp_path / "first-again.log", timeout_s=90)
    forks.wait_for(held.exists, timeout_s=60, what="the first engine again", child=first)
    forks.kill(first)
    assert fork(served) > 0


# ---- errors inside the worker, aborts, resets


def failing(function: Callable[..., Any], failures: list[str], when: Callable[[int], bool]) -> Callable[..., Any]:
    """`function`, which raises at those of its calls for which `when` says so."""

    def call(*args: Any, **kwargs: Any) -> Any:
        failures.append("")
        if when(len(failures)):
            raise RuntimeError("injected by a test")
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("place", "counter"),
    [
        ("MemoryCopyEngine.to_engine", "load_failed"),
        ("MemoryCopyEngine.to_arena", "store_failed_parts"),
        ("DataPlane.submit_load", "load_failed"),
        ("DataPlane.submit_store", "store_failed_parts"),
        ("SegmentStore.submit_read", "load_failed"),
        ("SegmentStore.submit_write", "write_failed_parts"),
    ],
)
def test_an_exception_in_the_worker(
    place: str,
    counter: str,
    fork: Fork,
    checkpoint: Callable[[str], Path],
    plain: Callable[[Case], dict[str, Any]],
    good_disk: Callable[[Case], Path],
    tmp_path: Path,
) -> None:
    model, right = checkpoint(LLAMA.model), plain(LLAMA)
    disk = tmp_path / "disk"
    shutil.copytree(good_disk(LLAMA), disk)

    def scenario() -> tuple[list[Answer], dict[str, float], int]:
        import kvtier.engine.copying
        import kvtier.engine.dataplane
        import kvtier.tier.disk.segment_store

        owners = {
            "MemoryCopyEngine": kvtier.engine.copying.MemoryCopyEngine,
            "DataPlane": kvtier.engine.dataplane.DataPlane,
            "SegmentStore": kvtier.tier.disk.segment_store.SegmentStore,
        }
        name, _, method = place.partition(".")
        calls: list[str] = []
        with LLAMA.engine(model, kvtier=kvtier_settings(disk)) as engine:
            original = getattr(owners[name], method)
            setattr(owners[name], method, failing(original, calls, lambda count: count % 2 == 1))
            answers = [ask(engine, LLAMA.long)]
            answers += [ask_again(engine, prompt) for prompt in prompts_of(LLAMA)]
            setattr(owners[name], method, original)
            answers.append(ask_again(engine, LLAMA.long))
            answers.append(ask_again(engine, LLAMA.long))
            engine.settle()
            return answers, counters_of(engine), len(calls)

    answers, counters, calls = fork(scenario)
    assert calls > 0, "the place of the injected failure was never reached"
    for answer, reference in zip(answers, [right["long"], *right["many"], right["long"], right["long"]], strict=True):
        assert_same(answer, reference, f"{place} raises")
    assert counters[counter] > 0
    assert answers[-1].external_tokens > 0, "kvtier works again once the failures are over"


def test_abort_during_a_load(
    fork: Fork,
    checkpoint: Callable[[str], Path],
    plain: Callable[[Case], dict[str, Any]],
    good_disk: Callable[[Case], Path],
    tmp_path: Path,
) -> None:
    model, right = checkpoint(LLAMA.model), plain(LLAMA)
    disk = tmp_path / "disk"
    shutil.copytree(good_disk(LLAMA), disk)

    def scenario() -> tuple[list[Answer], int, int]:
        from kvtier.engine.copying import MemoryCopyEngine

        entered, go_on = threading.Event(), threading.Event()
        original = MemoryCopyEngine.to_engine

        def held(*args: Any) -> None:
            entered.set()
            assert go_on.wait(60)
            original(*args)

        with LLAMA.engine(model, kvtier=kvtier_settings(disk)) as engine:
            free_before = engine.free_block_count
            MemoryCopyEngine.to_engine = held  # type: ignore[method-assign]
            aborted = engine.submit(LLAMA.long, max_tokens=16)
            engine.step_until(entered.is_set, deadline_s=30, what="the load's first copy")
            engine.abort(aborted)
            engine.step()
            # Others are served while the load that nobody wants any more still copies.
            answers = [ask(engine, prompt) for prompt in prompts_of(LLAMA)[:2]]
            go_on.set()
            engine.settle()
            engine.reset_prefix_cache()
            free_after = engine.free_block_count
            answers.append(ask(engine, LLAMA.long))
            return answers, free_before, free_after

    answers, free_before, free_after = fork(scenario)
    for answer, reference in zip(answers, [*right["many"][:2], right["long"]], strict=True):
        assert_same(answer, reference, "beside and after an aborted load")
    assert free_after == free_before, "the aborted load kept blocks"
    assert answers[-1].external_tokens > 0


def test_reset(
    fork: Fork, checkpoint: Callable[[str], Path], plain: Callable[[Case], dict[str, Any]], tmp_path: Path
) -> None:
    """Without the connector only the engine's own cache is emptied; with it nothing is left, on no tier, after a restart neither."""
    model, right = checkpoint(LLAMA.model), plain(LLAMA)["long"]

    def scenario() -> list[Answer]:
        with LLAMA.engine(model, kvtier=kvtier_settings(tmp_path)) as engine:
            answers = [ask(engine, LLAMA.long), ask_again(engine, LLAMA.long)]
            engine.settle()
            engine.reset_prefix_cache(connector=True)
            answers.append(ask(engine, LLAMA.long))
            engine.settle()
            engine.reset_prefix_cache(connector=True)
            engine.settle()
            return answers

    def after() -> Answer:
        with LLAMA.engine(model, kvtier=kvtier_settings(tmp_path)) as engine:
            return ask(engine, LLAMA.long)

    answers = [*fork(scenario), fork(after)]
    for answer in answers:
        assert_same(answer, right, "around resets")
    whole = LLAMA.whole_blocks(LLAMA.long_tokens)
    assert [answer.external_tokens for answer in answers] == [0, whole, 0, 0]


def test_reset_while_loading_and_storing(
    fork: Fork, checkpoint: Callable[[str], Path], plain: Callable[[Case], dict[str, Any]], tmp_path: Path
) -> None:
    """Weights change under running requests: nothing of before the reset is found after it."""
    model, right = checkpoint(LLAMA.model), plain(LLAMA)

    def scenario() -> list[Answer]:
        with LLAMA.engine(model, kvtier=kvtier_settings(tmp_path)) as engine:
            ids = []
            for number, prompt in enumerate(prompts_of(LLAMA)):
                ids.append(engine.submit(prompt, max_tokens=16, logprobs=LOGPROBS))
                for _ in range(number):
                    engine.step()
                engine.reset_now(connector=True)
            answers = [engine.result(request_id) for request_id in ids]
            engine.settle()
            engine.reset_prefix_cache(connector=True)
            return [*answers, ask(engine, LLAMA.long), ask_again(engine, LLAMA.long)]

    answers = fork(scenario)
    for answer, reference in zip(answers, [*right["many"], right["long"], right["long"]], strict=True):
        assert answer.token_ids == reference.token_ids
    assert [answer.external_tokens for answer in answers[-2:]] == [0, LLAMA.whole_blocks(LLAMA.long_tokens)]


def test_resets_with_no_step_between_them(
    fork: Fork, checkpoint: Callable[[str], Path], plain: Callable[[Case], dict[str, Any]], tmp_path: Path
) -> None:
    """An engine that is paused makes no step: what it had under way at the first reset is still to be flushed at the next."""
    model, right = checkpoint(LLAMA.model), plain(LLAMA)["long"]

    def scenario() -> list[Answer]:
        with LLAMA.engine(model, kvtier=kvtier_settings(tmp_path)) as engine:
            scheduler = engine.scheduler.connector.connector_scheduler
            request_id = engine.submit(LLAMA.long, max_tokens=16, logprobs=LOGPROBS)
            engine.step_until(lambda: bool(scheduler._jobs), deadline_s=30, what="a store under way")
            under_way = set(scheduler._jobs)
            for _ in range(3):
                engine.reset_now(connector=True)
            assert under_way <= scheduler._current_batch_jobs_to_flush
            answers = [engine.result(request_id)]
            engine.settle()
            engine.reset_prefix_cache(connector=True)
            engine.reset_prefix_cache(connector=True)
            return [*answers, ask(engine, LLAMA.long), ask_again(engine, LLAMA.long)]

    answers = fork(scenario)
    for answer in answers:
        assert_same(answer, right, "around resets in a row")
    assert [answer.external_tokens for answer in answers] == [0, 0, LLAMA.whole_blocks(LLAMA.long_tokens)]


@pytest.mark.parametrize("case", [LLAMA, GEMMA, GPTOSS, FALCON], ids=lambda case: case.model)
def test_what_runs_at_a_reset_is_not_stored(
    case: Case, fork: Fork, checkpoint: Callable[[str], Path], plain: Callable[[Case], dict[str, Any]]
) -> None:
    """It was computed before, and the blocks that its windows have moved past are other requests' by now."""
    model, right = checkpoint(case.model), plain(case)["long"]

    def scenario() -> list[Answer]:
        with case.engine(model, kvtier=kvtier_settings(None)) as engine:
            running = engine.submit(case.long, max_tokens=16, logprobs=LOGPROBS)
            engine.step_until(
                lambda: engine.computed_tokens(running) > case.long_tokens, deadline_s=60, what="decoding"
            )
            for prompt in prompts_of(case)[:4]:
                engine.submit(prompt, max_tokens=1)
            for _ in range(8):
                engine.step()
            assert engine.unfinished(running)
            engine.reset_now(connector=True)
            answers = [engine.result(running)]
            engine.step_until(lambda: not engine._pending, deadline_s=60, what="the end of all")
            return [*answers, *(ask_again(engine, prompt) for prompt in (case.long, case.long, case.half_shared(2)))]

    def half() -> Answer:
        with case.engine(model) as engine:
            return ask(engine, case.half_shared(2))

    answers = fork(scenario)
    for answer, reference in zip(answers, [right, right, right, fork(half)], strict=True):
        assert answer.token_ids == reference.token_ids
    hit_tokens = [answer.external_tokens for answer in answers]
    assert hit_tokens[:3] == [0, 0, case.whole_blocks(case.long_tokens)] and hit_tokens[3] > 0
