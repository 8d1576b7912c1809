"""`make demo`: a prompt's KV cache outlives the engine that computed it.

Real vLLM serves a real model with kvtier. The engine computes a long prompt and is stopped: its process is gone. A new one on the
same disk path gets the same prompt, then a second prompt that shares only the first half. What came back, how fast, and whether the
generated tokens are the same, is printed and written to `work/demo/summary.json`. Exit code 1 if any token differs.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtier.testing.vllm.driver import Answer
from kvtier.testing.vllm.process import EngineProcess, EngineProcessError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.model import NAME, ModelError, smollm2

WORK = Path(__file__).resolve().parents[1] / "work"
# Prefill runs in chunks of this many tokens, and a hit ends where a chunk did: so cold and restored compute the same sums in the
# same order, and equal tokens are no luck.
CHUNK_TOKENS = 2_048
SHARED_TOKENS = CHUNK_TOKENS + 40
PROMPT_TOKENS = 2 * CHUNK_TOKENS + 100
ANSWER_TOKENS = 32
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 8_192,
    "max_num_batched_tokens": CHUNK_TOKENS,
    "kv_cache_memory_bytes": 512 << 20,
}
KVTIER = {"dram_bytes": "512MiB", "disk_bytes": "4GiB", "disk_free_bytes_min": "256MiB"}
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
MIB = 1 << 20


@dataclass(frozen=True)
class Prompts:
    """Token ids: `second` shares its first `SHARED_TOKENS` with `first`."""

    first: list[int]
    second: list[int]
    opening: str


@dataclass(frozen=True)
class Measured:
    """What the two engines said."""

    cold: Answer
    disk: Answer
    half: Answer
    dram: Answer
    half_cold: Answer
    stored_payload_bytes: int
    disk_bytes: int
    disk_load_bytes: int
    half_load_bytes: int
    dram_load_bytes: int
    disk_parts: int
    dram_parts: int
    page_cache: str

    @property
    def token_ids_equal(self) -> bool:
        return self.cold.token_ids == self.disk.token_ids == self.dram.token_ids and (
            self.half.token_ids == self.half_cold.token_ids
        )


def real_text() -> str:
    """Prose that every Python brings along: its language reference, as `help()` shows it."""
    from pydoc_data.topics import topics

    named = [name for name in ("execmodel", "attribute-access", "assignment", "import", "naming") if name in topics]
    rest = sorted(name for name in topics if name not in named)
    return "\n\n".join(topics[name].strip() for name in named + rest)


def make_prompts(model: Path) -> Prompts:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = tokenizer.encode(real_text()).ids
    if len(text) < 2 * PROMPT_TOKENS:
        raise ModelError(f"the text at hand has {len(text):,} tokens: the demo needs {2 * PROMPT_TOKENS:,}")
    first = text[:PROMPT_TOKENS]
    second = first[:SHARED_TOKENS] + text[PROMPT_TOKENS : 2 * PROMPT_TOKENS - SHARED_TOKENS]
    return Prompts(first, second, _opening(tokenizer.decode(first[:80])))


def _opening(text: str) -> str:
    """The first words, without the lines that underline headings."""
    lines = [line for line in text.splitlines() if line.strip() and not set(line.strip()) <= set("*=-~")]
    return " ".join(" ".join(lines).split())[:70].rsplit(" ", 1)[0]


def drop_page_cache(directories: list[Path]) -> str:
    """Let the kernel forget the files, as far as this user may; what was done, in words."""
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                with contextlib.suppress(OSError):
                    descriptor = os.open(path, os.O_RDONLY)
                    try:
                        os.fsync(descriptor)
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(descriptor)
    try:
        os.sync()
        DROP_CACHES.write_text("3")
    except OSError:
        return "dropped for the files of model and cache (the whole page cache needs root)"
    return "dropped, all of it"


class Stage:
    """The long steps, each with a bar: filled by tokens where there are any to count, else moving."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✔[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=14),
            TextColumn("{task.fields[note]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> "Stage":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def step(self, text: str, *, total: int | None = None) -> Iterator[Callable[..., None]]:
        """A step under way; the function given changes its `done` count or its `note`."""
        task: TaskID = self._progress.add_task(text, total=total, note="")

        def show(done: int | None = None, note: str | None = None) -> None:
            changes: dict[str, Any] = {}
            if done is not None:
                changes["completed"] = done
            if note is not None:
                changes["note"] = note
            self._progress.update(task, **changes)

        yield show
        self._progress.update(task, total=total or 1, completed=total or 1)

    def ask(self, engine: EngineProcess, text: str, prompt: list[int], **more: Any) -> Answer:
        with self.step(text, total=len(prompt)) as show:
            answer = engine.ask(
                prompt,
                max_tokens=ANSWER_TOKENS,
                progress=lambda tokens: show(done=tokens, note=f"{tokens:,}/{len(prompt):,} tokens"),
                **more,
            )
            show(note=f"first token {answer.ttft_s:.2f} s")
        return answer


def start(engine: EngineProcess) -> None:
    """Load the engine and let it answer once, so that no measured prompt pays for what it builds at its first step."""
    engine.start()
    # Shorter than a block: nothing of it is kept.
    engine.ask([1] * (PROMPT_TOKENS % CHUNK_TOKENS), max_tokens=2)


def run(model: Path, prompts: Prompts, demo: Path, stage: Stage) -> Measured:
    """Two engines, one after the other, on one disk path."""
    disk = demo / "kv"
    kvtier = KVTIER | {"disk_path": str(disk)}
    with EngineProcess(model, kvtier=kvtier, log=demo / "engine-1.log", **ENGINE) as engine:
        with stage.step("Starting vLLM with kvtier") as show:
            start(engine)
            show(note=f"process {engine.pid}")
        cold = stage.ask(engine, "Prompt, computed", prompts.first)
        with stage.step("Stopping it") as show:
            stored = engine.settle()
            engine.stop()
            show(note=f"process {engine.pid} is gone")
    page_cache = drop_page_cache([disk, model])
    with EngineProcess(model, kvtier=kvtier, log=demo / "engine-2.log", **ENGINE) as engine:
        with stage.step("Starting vLLM again") as show:
            start(engine)
            show(note=f"process {engine.pid}")
        answers: list[Answer] = []
        counters: list[dict[str, float]] = []
        for text, prompt in (
            ("Same prompt, from disk", prompts.first),
            ("Second prompt, half shared", prompts.second),
            ("First prompt, from DRAM", prompts.first),
        ):
            answers.append(stage.ask(engine, text, prompt))
            counters.append(engine.settle())
            # vLLM's own prefix cache would answer the next one.
            engine.reset_prefix_cache()
        half_cold = stage.ask(engine, "Second prompt, computed", prompts.second, cache_salt="compare")
        with stage.step("Stopping it"):
            engine.stop()

    def count(place: int, name: str) -> int:
        before = counters[place - 1].get(name, 0) if place else 0
        return int(counters[place].get(name, 0) - before)

    loaded = [count(place, "vllm:kv_offload_load_bytes") for place in range(3)]
    return Measured(
        cold=cold,
        disk=answers[0],
        half=answers[1],
        dram=answers[2],
        half_cold=half_cold,
        stored_payload_bytes=int(stored.get("vllm:kv_offload_store_bytes", 0)),
        disk_bytes=int(stored.get("vllm:kvtier_disk_used_bytes", 0)),
        disk_load_bytes=loaded[0],
        half_load_bytes=loaded[1],
        dram_load_bytes=loaded[2],
        disk_parts=count(0, "vllm:kvtier_load_disk_parts"),
        dram_parts=count(2, "vllm:kvtier_load_dram_parts"),
        page_cache=page_cache,
    )


def summary_of(measured: Measured) -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt_tokens": measured.cold.prompt_tokens,
        "cold_ttft_s": round(measured.cold.ttft_s, 4),
        "disk_ttft_s": round(measured.disk.ttft_s, 4),
        "dram_ttft_s": round(measured.dram.ttft_s, 4),
        "disk_restored_tokens": measured.disk.external_tokens,
        "dram_restored_tokens": measured.dram.external_tokens,
        "half_prefix_restored_tokens": measured.half.external_tokens,
        "bytes_stored": measured.disk_bytes,
        "token_ids_equal": measured.token_ids_equal,
    }


def table_of(measured: Measured) -> Table:
    table = Table(box=box.ROUNDED, title=f"{NAME}: {measured.cold.prompt_tokens:,} tokens", title_style="bold")
    table.add_column("KV cache")
    table.add_column("First token", justify="right")
    table.add_column("Faster", justify="right")
    table.add_column("Restored", justify="right")
    table.add_column("Moved", justify="right")
    table.add_column("Tokens", justify="center")

    def row(name: str, answer: Answer, reference: Answer, moved: str, style: str = "") -> None:
        speed = reference.ttft_s / answer.ttft_s
        same = answer.token_ids == reference.token_ids
        table.add_row(
            name,
            f"{answer.ttft_s:.3f} s",
            f"{speed:.1f}×" if answer is not reference else "",
            f"{answer.external_tokens:,}/{answer.prompt_tokens:,}",
            moved,
            "—" if answer is reference else "[green]equal[/]" if same else "[bold red]DIFFERENT[/]",
            style=style,
        )

    row("computed", measured.cold, measured.cold, f"{measured.stored_payload_bytes / MIB:.0f} MiB out")
    row("disk, new process", measured.disk, measured.cold, f"{measured.disk_load_bytes / MIB:.0f} MiB in", "bold")
    row("DRAM", measured.dram, measured.cold, f"{measured.dram_load_bytes / MIB:.0f} MiB in", "bold")
    table.add_section()
    row("2nd prompt", measured.half_cold, measured.half_cold, "")
    row("2nd, half restored", measured.half, measured.half_cold, f"{measured.half_load_bytes / MIB:.0f} MiB in")
    return table


def main() -> int:
    console = Console()
    started_s = time.monotonic()
    demo = WORK / "demo"
    shutil.rmtree(demo, ignore_errors=True)
    (demo / "kv").mkdir(parents=True)
    console.print(Panel.fit("[bold]kvtier[/]: the KV cache of a prompt outlives the engine that computed it"))
    try:
        with Stage(console) as stage:
            with stage.step(f"Model {NAME}") as show:
                model = smollm2(step=lambda what: show(note=what))
                prompts = make_prompts(model)
                show(note="")
            measured = run(model, prompts, demo, stage)
    except (EngineProcessError, ModelError) as error:
        console.print(f"[bold red]The demo failed:[/] {type(error).__name__}", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        return 1
    summary = summary_of(measured)
    (demo / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print()
    console.print(table_of(measured))
    console.print(f"The prompt is Python's language reference: “{prompts.opening} …”", style="dim", highlight=False)
    console.print(
        f"{measured.disk_bytes / MIB:.0f} MiB kept on disk in {measured.disk_parts} parts; page cache before the restart: "
        f"{measured.page_cache}. All of it took {time.monotonic() - started_s:.0f} s; logs and summary.json are in "
        f"{demo.relative_to(WORK.parent)}.",
        style="dim",
        highlight=False,
    )
    if not measured.token_ids_equal:
        console.print("[bold red]Generated tokens differ: that is a fault, please report it.[/]")
        return 1
    if not (measured.disk_parts and measured.dram_parts):
        console.print("[bold red]Nothing was restored, see the logs.[/]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
