"""A vLLM engine driven step by step in this process, and what it says about each request.

`vllm.LLM` hides the steps. Tests need them: to abort during a load, to count how many prompt tokens came from the engine's own
prefix cache and how many from the connector, to let stores finish while no request runs.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IDLE_STEP_S = 0.001
CONNECTOR = "KVTierConnector"
CONNECTOR_MODULE = "kvtier.engine.vllm.connector"

# Before the first import of vLLM. Without TORCHDYNAMO_DISABLE the first request with logprobs compiles for many seconds. With OpenMP's
# usual waiting, by spinning, an engine whose cores others use too is 3 to 5 times slower, and no faster where they are its own.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "passive",
}


class EngineStuckError(AssertionError):
    """The engine did not finish what it was asked within its deadline."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's end.

    Attributes:
        token_ids: generated tokens.
        logprobs: for each of them the (token, logprob) pairs asked for, best first; empty when none were.
        prompt_tokens: length of the prompt.
        local_tokens: prompt tokens that the engine's own prefix cache gave.
        external_tokens: prompt tokens that the connector promised when the request was scheduled first.
        ttft_s: from submission to the first token.
        preemptions: how often the request was preempted.
        finish_reason: vLLM's word, "abort" for an aborted one.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    prompt_tokens: int
    local_tokens: int
    external_tokens: int
    ttft_s: float
    preemptions: int
    finish_reason: str


@dataclass
class _Pending:
    started_s: float
    prompt_tokens: int
    first_token_s: float | None = None
    local_tokens: int = 0
    external_tokens: int = 0


@dataclass
class Counters:
    """What the connector reported over the engine's life: counters summed up, gauges as they were last.

    Attributes:
        values: by metric name, with labels in braces where there are any.
    """

    values: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        """The sum over all labels of `name`; 0 when it was never reported."""
        return sum(value for key, value in self.values.items() if key.partition("{")[0] == name)


def kv_transfer_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for kvtier with these settings."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(settings),
    }


def import_vllm() -> None:
    """Import what an engine needs, with the environment that it wants. The slow part, to be done once before forking."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm.engine.arg_utils
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401


def fork_processes() -> None:
    """Let vLLM fork its engine core and its workers from this process, where it would start new interpreters that import all again.

    For a child of `kvtier.testing.forks`, which has one thread and nothing computed yet.
    """
    import multiprocessing

    import vllm.utils.system_utils
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor

    for module in (vllm.utils.system_utils, vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


class Engine:
    """One vLLM engine in this process (workers in processes of their own when tensor parallel).

    Args:
        model: directory of the checkpoint, or what else vLLM takes for a model.
        kvtier: settings of the connector; None runs the engine without one.
        settings: further arguments of `vllm.engine.arg_utils.EngineArgs`.

    Use as a context manager, or call `close`: an engine not closed leaves its workers behind.
    """

    def __init__(self, model: Path | str, *, kvtier: Mapping[str, Any] | None = None, **settings: Any) -> None:
        import_vllm()
        from kvtier.engine.vllm.startup import let_vllm_scan_llvmlite

        # Tests in this process may have loaded numba already.
        let_vllm_scan_llvmlite()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments: dict[str, Any] = {
            "model": str(model),
            "enforce_eager": True,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 2048,
            "seed": 0,
        }
        if kvtier is not None:
            arguments["kv_transfer_config"] = kv_transfer_config(kvtier)
        self.counters = Counters()
        self._pending: dict[str, _Pending] = {}
        self._answers: dict[str, Answer] = {}
        self._next_id = 0
        self._gauges = _gauge_names() if kvtier is not None else frozenset()
        self._engine = LLMEngine.from_engine_args(EngineArgs(**(arguments | settings)))
        self._core = self._engine.engine_core
        self._in_process = hasattr(self._core, "engine_core")
        self._core.get_output = self._tapped(self._core.get_output)
        if self._in_process:
            self._core.engine_core.step_fn = _yielding(self._core.engine_core)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(self) -> dict[str, Any]:
        """What was measured with an engine that has kvtier holds for: `kv_dtype`, `kv_bytes_per_token`, `gpu_model`, `vllm` (its version)."""
        import vllm
        from vllm.platforms import current_platform

        from kvtier.engine.vllm.startup import kv_type_names

        config = self._engine.vllm_config
        manager = self.scheduler.connector.connector_scheduler.manager
        return {
            "kv_dtype": kv_type_names(config)[0],
            "kv_bytes_per_token": round(manager.bytes_per_token * config.parallel_config.world_size),
            "gpu_model": str(current_platform.get_device_name()),
            "vllm": vllm.__version__,
        }

    @property
    def block_tokens(self) -> int:
        """Tokens in one block of the engine's KV cache, as configured after start."""
        return int(self._engine.vllm_config.cache_config.block_size)

    @property
    def block_count(self) -> int:
        """Blocks in the engine's KV cache."""
        return int(self._engine.vllm_config.cache_config.num_gpu_blocks)

    @property
    def free_block_count(self) -> int:
        """Blocks that no request holds now (engine core in this process only)."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler; only where the engine core runs in this process."""
        return self._core.engine_core.scheduler

    @property
    def worker(self) -> Any:
        """vLLM's worker; only where it runs in this process."""
        return self._core.engine_core.model_executor.driver_worker.worker

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        logprobs: int | None = None,
        cache_salt: str | None = None,
        lora: tuple[str, int, Path] | None = None,
        **sampling: Any,
    ) -> str:
        """Queue a request with greedy sampling; its id. `step` moves it forward.

        Requests with different `cache_salt` share no cache, neither the engine's own nor kvtier's. `lora` names an adapter: name, number, path.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True, detokenize=False, **sampling
        )
        inputs: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if cache_salt is not None:
            inputs["cache_salt"] = cache_salt
        started_s = time.perf_counter()
        adapter = None
        if lora is not None:
            from vllm.lora.request import LoRARequest

            adapter = LoRARequest(lora[0], lora[1], str(lora[2]))
        name = f"request-{self._next_id}"
        request_id: str = self._engine.add_request(name, inputs, parameters, lora_request=adapter)
        self._next_id += 1
        self._pending[request_id] = _Pending(started_s, len(prompt))
        return request_id

    def step(self) -> None:
        """One engine step: schedule, run, collect."""
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            completion = output.outputs[0]
            # vLLM answers under the name that was given, not under its own.
            request_id = next(key for key in self._pending if key.startswith(output.request_id))
            pending = self._pending[request_id]
            if pending.first_token_s is None and completion.token_ids:
                pending.first_token_s = now
            if output.finished:
                self._answers[request_id] = _answer(output, completion, pending)
                del self._pending[request_id]

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is."""
        self._engine.abort_request([request_id], internal=True)
        self._pending.pop(request_id, None)

    def computed_tokens(self, request_id: str) -> int:
        """Tokens of a request computed or restored so far; 0 before and after its life (engine core in this process only)."""
        request = self.scheduler.requests.get(request_id)
        return int(request.num_computed_tokens) if request is not None else 0

    def unfinished(self, request_id: str) -> bool:
        """Whether the request has not ended yet."""
        return request_id in self._pending

    def result(self, request_id: str, *, deadline_s: float = 90.0) -> Answer:
        """Step until the request has ended."""
        self.step_until(lambda: request_id in self._answers, deadline_s=deadline_s, what=f"the end of {request_id}")
        return self._answers.pop(request_id)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 16,
        logprobs: int | None = None,
        deadline_s: float = 90.0,
        **sampling: Any,
    ) -> list[Answer]:
        """Run all `prompts` together to their end."""
        ids = [self.submit(prompt, max_tokens=max_tokens, logprobs=logprobs, **sampling) for prompt in prompts]
        return [self.result(request_id, deadline_s=deadline_s) for request_id in ids]

    def ask(
        self, prompt: Sequence[int], *, max_tokens: int = 16, logprobs: int | None = None, **sampling: Any
    ) -> Answer:
        """Run one prompt alone."""
        return self.answer([prompt], max_tokens=max_tokens, logprobs=logprobs, **sampling)[0]

    def step_until(self, condition: Callable[[], bool], *, deadline_s: float, what: str) -> None:
        """Step until `condition`.

        Raises:
            EngineStuckError: not within `deadline_s` seconds.
        """
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                raise EngineStuckError(f"not within {deadline_s:.0f} s: {what}; unfinished: {list(self._pending)}")
            self.step()

    def settle(self, *, deadline_s: float = 30.0) -> None:
        """Step until neither a request nor the connector has anything left to do (engine core in this process only)."""
        self.step_until(lambda: not self.scheduler.has_requests(), deadline_s=deadline_s, what="an idle engine")

    def reset_prefix_cache(self, *, connector: bool = False, deadline_s: float = 30.0) -> None:
        """Forget the engine's own prefix cache, and what the connector keeps if asked to."""
        end = time.monotonic() + deadline_s
        while not self._engine.reset_prefix_cache(reset_connector=connector):
            if time.monotonic() > end:
                raise EngineStuckError(f"the prefix cache could not be reset within {deadline_s:.0f} s")
            if self._in_process:
                self.step()
            else:
                time.sleep(0.01)

    def reset_now(self, *, connector: bool = False) -> bool:
        """Try to reset once, with requests running; whether the engine's own cache could be."""
        return bool(self._engine.reset_prefix_cache(reset_connector=connector))

    def close(self) -> None:
        """Shut the engine down with its workers."""
        self._core.shutdown()

    def _tapped(self, get_output: Callable[[], Any]) -> Callable[[], Any]:
        """`get_output`, noting what `RequestOutput` leaves out: where cached tokens came from, and the connector's counters."""

        def tap() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                pending = self._pending.get(output.request_id)
                if pending is not None and output.prefill_stats is not None:
                    pending.local_tokens = output.prefill_stats.num_local_cached_tokens
                    pending.external_tokens = output.prefill_stats.num_external_cached_tokens
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                add_connector_stats(self.counters.values, stats.kv_connector_stats, self._gauges)
            return outputs

        return tap


def add_connector_stats(values: dict[str, float], stats: Mapping[str, Any], gauges: Collection[str]) -> None:
    """Add one step's connector statistics to `values`: the one place that knows the form in which vLLM carries them.

    That form is `{"data": {metric: {labels: number or list of observations}}}`. Gauges replace, all else adds up.
    """
    for metric, by_labels in stats.get("data", stats).items():
        for labels, value in by_labels.items():
            key = f"{metric}{{{','.join(labels)}}}" if labels else metric
            number = float(sum(value)) if isinstance(value, (list, tuple)) else float(value)
            values[key] = number if metric in gauges else values.get(key, 0.0) + number


def _yielding(core: Any) -> Callable[[], Any]:
    """The core's step, with the pause that the loop of a core in its own process makes: without it threads of workers starve."""
    step = core.step_fn

    def pausing() -> Any:
        outputs, model_executed = step()
        if not model_executed and core.scheduler.has_requests():
            time.sleep(IDLE_STEP_S)
        return outputs, model_executed

    return pausing


def _gauge_names() -> frozenset[str]:
    from vllm.v1.kv_offload.base import OffloadingGaugeMetadata

    from kvtier.engine.vllm.metrics import definitions

    return frozenset(name for name, metric in definitions().items() if isinstance(metric, OffloadingGaugeMetadata))


def _answer(output: Any, completion: Any, pending: _Pending) -> Answer:
    logprobs = tuple(
        tuple(
            sorted(((token, entry.logprob) for token, entry in position.items()), key=lambda pair: (-pair[1], pair[0]))
        )
        for position in completion.logprobs or ()
    )
    first_token_s = pending.first_token_s if pending.first_token_s is not None else time.perf_counter()
    return Answer(
        token_ids=tuple(completion.token_ids),
        logprobs=logprobs,
        prompt_tokens=pending.prompt_tokens,
        local_tokens=pending.local_tokens,
        external_tokens=pending.external_tokens,
        ttft_s=first_token_s - pending.started_s,
        preemptions=output.metrics.num_preemptions if output.metrics is not None else 0,
        finish_reason=str(completion.finish_reason),
    )
