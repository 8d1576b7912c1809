"""kvtier's own metrics, beside those that vLLM's offloading already reports."""

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

_COUNTERS = {
    "load_dram_parts": "Parts that loads took from DRAM",
    "load_disk_parts": "Parts that loads took from disk",
    "load_failed": "Loads that failed; their requests were recomputed",
    "lookup_late": "Lookups that stopped waiting for parts being stored",
    "store_parts": "Parts that were given a slot to be stored in",
    "store_deferred": "Times that a store had to wait for room",
    "store_refused_parts": "Parts not stored because all of them could never fit",
    "store_failed_parts": "Parts that could not be copied out of the engine",
    "promote_refused_parts": "Parts loaded from disk that found no room in DRAM",
    "written_parts": "Parts published on disk",
    "write_refused_parts": "Parts not written because disk had no room or was suspended",
    "write_failed_parts": "Parts that could not be written",
    "write_late": "Writes that took longer than their deadline",
    "dram_evicted_parts": "Parts evicted from DRAM",
    "disk_evicted_parts": "Parts evicted from disk",
    "disk_lost_parts": "Parts on disk that were missing, short or wrong when read",
    "disk_written_bytes": "Bytes written to disks, by all ranks",
    "disk_read_bytes": "Bytes read from disks, by all ranks",
    "disk_corrupt_parts": "Parts that a disk gave back otherwise than they were written",
    "disk_found_parts": "Parts that another engine had stored on a shared disk before this one did",
    "preload_parts": "Parts read ahead from disk",
    "preload_used_parts": "Parts read ahead that a load then took",
    "preload_refused_parts": "Parts not read ahead for want of room",
    "disk_over_budget_bytes": "Bytes not written because of disk_bytes_a_day",
    "gate_declined": "Requests whose stored prefix was below the break-even, and was recomputed",
    "gate_withheld": "Requests that ended below the break-even, and of which nothing was stored",
    "planner_admitted": "Requests whose stored prefix the planner had loaded",
    "planner_deferred": "Requests that the planner had wait while their prefix was staged",
    "planner_declined": "Requests whose stored prefix the planner had recomputed",
    "planner_late": "Deferred requests that were loaded at their deadline, not staged in time",
    "resets": "Times that everything was dropped",
}
_BY_REASON = {
    "load_failed": "Loads that failed, by reason",
    "write_failed": "Writes that failed, by reason",
}
_GAUGES = {
    "dram_used_bytes": "Bytes of slots taken in one rank's DRAM tier",
    "dram_parts": "Parts in the DRAM tier",
    "disk_used_bytes": "Bytes taken in one rank's disk tier, writes in flight included",
    "disk_limit_bytes": "Bytes that one rank's disk tier may take now",
    "disk_parts": "Parts in the disk tier",
    "writes_in_flight": "Batches of parts being written",
    "loads_in_flight": "Loads being carried out",
    "preloads_in_flight": "Batches of parts being read ahead",
    "preload_used_bytes": "Bytes of one rank's DRAM tier that hold what was read ahead and waits for its load",
}

_ADVICE = "estimated_hit_rate"


def counter_name(counter: str) -> str:
    """Prometheus name of a counter of the store; the client adds `_total`.

    Under vLLM's own prefix, since vLLM unregisters by it when a second engine starts in one process.
    """
    return f"vllm:kvtier_{counter}"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """All metrics that `stats_of` may report."""
    result: dict[str, OffloadingMetricMetadata] = {}
    for name, text in _COUNTERS.items():
        result[counter_name(name)] = OffloadingCounterMetadata(documentation=text)
    for name, text in _BY_REASON.items():
        result[counter_name(f"{name}_by_reason")] = OffloadingCounterMetadata(
            documentation=text, labelnames=("reason",)
        )
    for name, text in _GAUGES.items():
        result[counter_name(name)] = OffloadingGaugeMetadata(documentation=text)
    result[counter_name(_ADVICE)] = OffloadingGaugeMetadata(
        documentation="Estimated hit rate of a tier at a multiple of its capacity",
        labelnames=("tier", "capacity_factor"),
    )
    return result


def stats_of(
    counters: Mapping[str, int],
    before: dict[str, int],
    gauges: Mapping[str, int],
    advice: Mapping[tuple[str, float], float] | None = None,
) -> OffloadingConnectorStats:
    """What changed since `before`, which is brought up to date, what is held now, and advice on sizes where it was asked for."""
    stats = OffloadingConnectorStats()
    for name, value in counters.items():
        change = value - before.get(name, 0)
        if not change:
            continue
        before[name] = value
        base, _, reason = name.partition(":")
        if reason and base in _BY_REASON:
            stats.increase_counter(counter_name(f"{base}_by_reason"), change, (reason,))
        elif base in _COUNTERS:
            stats.increase_counter(counter_name(base), change)
    for name, value in gauges.items():
        stats.set_gauge(counter_name(name), value)
    for (tier, factor), rate in (advice or {}).items():
        stats.set_gauge(counter_name(_ADVICE), rate, (tier, f"{factor:g}"))
    return stats
