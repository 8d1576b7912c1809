"""The one configuration object, where its values come from, and the refusal of what it does not know.

Sources, last wins: defaults, a TOML file (`KVTIER_CONFIG=/path`), the environment (`KVTIER_DRAM_BYTES=…`, and those
`AIBRIX_KV_CACHE_OL_…` names whose meaning kvtier has), then what the engine's own configuration passes
(`kv_connector_extra_config`; py-kvcache's names are accepted too). Sizes are bytes, as numbers or as "256MiB"; times are seconds.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.policy.admission import SEEN_MIN_MAX
from kvtier.policy.registry import policy_names

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
DURABILITIES = ("none", "flush", "sync")
SECONDS_MAX = 1_000_000
COUNT_MAX = 1 << 60
"""The most of anything that is counted, bytes or other: more would not fit where it is kept."""
IO_DEPTH_MAX = 1024


def parse_bytes(value: object) -> int:
    """A size in bytes out of 268435456, "256MiB", "1.5 GB". Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("write a number of bytes, or a size such as '256MiB'")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("write a number of bytes, or a size such as '256MiB'")
    unit = _UNITS[match[2].upper()]
    try:
        return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    except OverflowError:
        raise ValueError("no such size is to be had") from None


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("write true or false")


def _parse_int(value: object) -> int:
    if isinstance(value, (bool, float)):
        raise ValueError("write a whole number")
    return int(str(value))


def _number(what: str, least: float, most: float) -> Callable[[object], float]:
    def parse(value: object) -> float:
        if isinstance(value, bool):
            raise ValueError(f"write {what}")
        number = float(str(value))
        # NaN is refused here too.
        if not least <= number <= most:
            raise ValueError(f"write {what}, at most {most:,}")
        return number

    return parse


# A wait without an end is not to be had, and Python's own raise beyond 2**63 nanoseconds.
_parse_seconds = _number("a number of seconds", -SECONDS_MAX, SECONDS_MAX)
_parse_factor = _number("a number", -SECONDS_MAX, SECONDS_MAX)
_parse_gib = _number("a number of GiB, such as 4.0", 0, 1 << 20)


def _parse_path(value: object) -> Path | None:
    if value is not None and not isinstance(value, (str, Path)):
        raise ValueError("write a path as text, or nothing for none")
    text = str(value or "")
    if "\0" in text:
        raise ValueError("no path has a zero byte")
    try:
        return Path(text).expanduser() if text else None
    except RuntimeError:
        raise ValueError("nobody here has that home directory: write the whole path") from None


def _parse_text(value: object) -> str:
    # A name or number is text as well as any; nothing, a truth or a list in its place is a mistake.
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("write text")
    return str(value)


def _one_of(*names: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        # "none" is a name, and not what JSON's null means.
        text = value.strip().lower() if isinstance(value, str) else None
        if text not in names:
            raise ValueError(f"write one of {', '.join(name or 'nothing' for name in names)}")
        return text

    return parse


def _setting(
    default: Any,
    parse: Callable[[Any], Any],
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    if high is None and parse in (parse_bytes, _parse_int):
        high = COUNT_MAX
    return field(
        default=default, metadata={"parse": parse, "meaning": meaning, "low": low, "high": high, "aliases": aliases}
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of kvtier, in force. Build it with `load_config`; the meanings are printed by `kvtier config`."""

    dram_bytes: int = _setting(4 << 30, parse_bytes, "DRAM tier of this engine, shared equally by its ranks", low=1)
    disk_path: Path | None = _setting(None, _parse_path, "directory of the disk tier; empty for none")
    disk_bytes: int = _setting(64 << 30, parse_bytes, "disk tier of this engine, shared equally by its ranks", low=1)
    disk_free_bytes_min: int = _setting(
        1 << 30, parse_bytes, "floor of free space kept on the disk's filesystem", low=0
    )
    disk_durability: str = _setting(
        "flush", _one_of(*DURABILITIES), "what a published write survives: none, flush or sync"
    )
    disk_ingestion: str = _setting(
        "all",
        _one_of("all", "hot", "evicted"),
        "what DRAM holds is written when stored, when used again, or when evicted",
    )
    disk_inflight_bytes_max: int = _setting(1 << 30, parse_bytes, "writes in flight, in bytes of one rank", low=1)
    disk_inflight_tokens_max: int = _setting(
        0, _parse_int, "writes in flight, in tokens; 0 for no bound of its own", low=0
    )
    disk_admission_seen_min: int = _setting(
        1,
        _parse_int,
        "times that a part must have been asked for to be written: 1 for all, 2 keeps one-time prompts out",
        low=1,
        high=SEEN_MIN_MAX,
    )
    disk_admission_by_value: bool = _setting(
        False, _parse_bool, "write only what is worth no less than what would have to leave the disk for it"
    )
    disk_bytes_a_day: int = _setting(
        0, parse_bytes, "what the drive may be written in a day, shared equally by ranks; 0 for no limit", low=0
    )
    disk_io: str = _setting(
        "auto",
        _one_of("auto", "ring", "threads"),
        "I/O by io_uring or by threads; auto takes what works, and threads below 1 GiB of DRAM a rank",
    )
    io_depth: int = _setting(
        16,
        _parse_int,
        "reads and writes in flight on the disk, per rank",
        low=1,
        high=IO_DEPTH_MAX,
        aliases=("iodepth",),
    )
    dram_policy: str = _setting("lru", _one_of(*policy_names()), "who stays in DRAM")
    disk_policy: str = _setting("lru", _one_of(*policy_names()), "who stays on disk")
    store_decode_blocks: bool = _setting(True, _parse_bool, "store what was generated, not only prompts")
    verify_checksums: bool = _setting(True, _parse_bool, "check every part's checksum before the engine gets it")
    lookup_deadline_s: float = _setting(
        2.0, _parse_seconds, "longest wait of a request for parts that are being stored", low=0
    )
    load_deadline_s: float = _setting(
        30.0, _parse_seconds, "longest a load may take before its request is recomputed", low=0
    )
    write_deadline_s: float = _setting(
        60.0, _parse_seconds, "longest wait for a disk write before it counts as failed", low=0
    )
    close_deadline_s: float = _setting(10.0, _parse_seconds, "longest wait for unfinished writes at shutdown", low=0)
    shared_storage_path: Path | None = _setting(
        None, _parse_path, "directory on a filesystem that other engines share, in place of disk_path; empty for none"
    )
    shared_model_name: str = _setting(
        "", _parse_text, "directory of this model below shared_storage_path; by default the model's own name"
    )
    shared_trailer: str = _setting(
        "on",
        _one_of("on", "off"),
        "end shared files with an envelope that is checked at reads; off for py-kvcache's format to the byte",
    )
    shared_present_s: float = _setting(
        30.0, _parse_seconds, "how long a file seen on shared_storage_path is taken to be there", low=0
    )
    shared_absent_s: float = _setting(
        1.0, _parse_seconds, "how long a file not seen on shared_storage_path is taken not to be there", low=0
    )
    sync_on_store: bool = _setting(
        False, _parse_bool, "sync files and directories of shared_storage_path before they are published"
    )
    open_lookahead: int = _setting(
        0,
        _parse_int,
        "files of shared_storage_path opened ahead of their reads; 0 for io_depth",
        low=0,
        high=IO_DEPTH_MAX,
    )
    staging_mem: float = _setting(
        0.0, _parse_gib, "GiB of memory of each rank, in place of dram_bytes; 1 with shared_storage_path", low=0
    )
    staging_cache: str = _setting(
        "",
        _one_of("", "off", "lru", "arc"),
        "DRAM only stages (off), or is a cache of this policy, in place of dram_policy; off with shared_storage_path",
    )
    enable_preload: bool = _setting(False, _parse_bool, "read ahead from disk what the next waiting requests will load")
    preload_lookahead_requests: int = _setting(
        0, _parse_int, "waiting requests that are read ahead for at a time", low=0
    )
    preload_share_staging: bool = _setting(
        True, _parse_bool, "one read and one slot for all requests that wait for a part; false is not to be had"
    )
    trust_lora_paths: bool = _setting(
        False, _parse_bool, "LoRA adapters never change in place: their name and path say what they hold"
    )
    accept_unknown: bool = _setting(False, _parse_bool, "start with a vLLM or a model that is not known to work")
    trace_path: Path | None = _setting(
        None,
        _parse_path,
        "file for a line of each request, for kvtier simulate; hashes and lengths only; empty for none",
    )
    trace_bytes_max: int = _setting(
        1 << 30,
        parse_bytes,
        "of trace_path and the file before it together; the older requests are let go of",
        low=4096,
    )
    namespace_label: str = _setting("", _parse_text, "any text: engines with different labels share nothing")
    prefix_cache_break_even_path: Path | None = _setting(
        None, _parse_path, "file that says from which prefix length on loading pays; empty for none"
    )
    load_planner: str = _setting(
        "off",
        _one_of("off", "on"),
        "on: load, stage or recompute each prefix, whichever the file's curves say is fastest",
    )
    load_planner_defer_tolerance: float = _setting(
        2.0, _parse_factor, "how many times the predicted time of its staging a request waits for it", low=0
    )
    load_planner_defer_deadline_max_s: float = _setting(
        2.0, _parse_seconds, "longest that a request waits to be staged", low=0
    )

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk tier, of its own or shared."""
        return self.disk_path is not None or self.shared_storage_path is not None

    def rank_dram_bytes(self, rank_count: int) -> int:
        """Bytes of one rank's arena."""
        return int(self.staging_mem * 2**30) if self.staging_mem else self.dram_bytes // rank_count


ENV_PREFIX = "KVTIER_"
_OTHERS_ENV = frozenset(("KVTIER_CONFIG", "KVTIER_MEMORY_CAPACITY_BYTES", "KVTIER_MEMORY_EVICTION_POLICY"))
"""Names that begin alike and are no settings: the file's, and those of the MEMORY store."""
# Kubernetes gives every pod variables that say where services are: of one called kvtier, KVTIER_PORT and KVTIER_SERVICE_HOST among them.
_SERVICE_ENV = re.compile(
    r"KVTIER_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
# Names of AIBrix's framework with the same meaning here; the value is given per worker there, in GB of 2**30 bytes.
_AIBRIX_ENV: dict[str, tuple[str, Callable[[str], object]]] = {
    "AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": ("dram_bytes", lambda text: int(float(text) * 2**30)),
    "AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY": ("dram_policy", str.lower),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and for each setting the source of its value."""

    config: Config
    sources: Mapping[str, str]


def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for item in fields(Config):
        for name in (item.name, *item.metadata["aliases"]):
            names[name] = item.name
    return names


def load_config(
    extra: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str],
    extra_source: str = "kv_connector_extra_config",
) -> Loaded:
    """Put the sources together.

    Args:
        extra: settings with the last word.
        environ: the environment, `os.environ` in production.
        extra_source: how messages name `extra`.

    Raises:
        ConfigError: a name is unknown (the nearest one is named), or a value is malformed or out of bounds.
    """
    known = _names()
    values: dict[str, object] = {}
    sources = {item.name: "default" for item in fields(Config)}
    parsers = {item.name: item for item in fields(Config)}

    def take(name: str, value: object, source: str) -> None:
        target = known.get(name)
        if target is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" did you mean {near[0]!r}?" if near else f" known are {', '.join(sorted(known))}."
            raise ConfigError(f"{source}: setting {name!r} is not known;{hint}")
        meta = parsers[target].metadata
        try:
            parsed = meta["parse"](value)
        except ValueError as error:
            raise ConfigError(f"{source}: {name} is {value!r}: {error}") from None
        if meta["low"] is not None and parsed < meta["low"]:
            raise ConfigError(f"{source}: {name} is {value!r}: the least is {meta['low']}")
        if meta["high"] is not None and parsed > meta["high"]:
            raise ConfigError(f"{source}: {name} is {value!r}: the most is {meta['high']:,}")
        values[target] = parsed
        sources[target] = source

    config_file = environ.get(ENV_PREFIX + "CONFIG")
    if config_file:
        for name, value in _file_content(config_file).items():
            take(name, value, config_file)
    for name, text in environ.items():
        if name in _AIBRIX_ENV:
            target, convert = _AIBRIX_ENV[name]
            try:
                value = convert(text)
            except (ValueError, OverflowError) as error:
                raise ConfigError(f"{name} is {text!r}: {error}") from None
            take(target, value, name)
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and name not in _OTHERS_ENV and not _SERVICE_ENV.fullmatch(name):
            take(name.removeprefix(ENV_PREFIX).lower(), text, name)
    for name, value in (extra or {}).items():
        take(name, value, extra_source)
    _settle(values, sources)
    return Loaded(Config(**values), sources)  # type: ignore[arg-type]


def _file_content(name: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    # ValueError: no TOML, no text, or no path. RuntimeError: nobody's home, or nested without end.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{ENV_PREFIX}CONFIG is {name!r}: {error}") from None


def _settle(values: dict[str, object], sources: dict[str, str]) -> None:
    """Refuse settings that contradict each other, and give what depends on others its default. `values` holds what was set."""

    def refuse(one: str, other: str, way_out: str) -> None:
        if values.get(one) and values.get(other):
            raise ConfigError(f"{sources[one]}: {one} and {sources[other]}: {other} are both set: {way_out}")

    def default(name: str, value: object) -> None:
        values[name] = value
        sources[name] = "default with shared_storage_path"

    refuse("disk_path", "shared_storage_path", "an engine has one of them; set the other to empty")
    refuse(
        "staging_mem", "dram_bytes", "they are one memory; staging_mem is each rank's, dram_bytes all ranks' together"
    )
    refuse("staging_cache", "dram_policy", "they are one choice; leave one away")
    if values.get("shared_storage_path"):
        for name in ("disk_bytes", "disk_bytes_a_day"):
            if values.get(name):
                raise ConfigError(
                    f"{sources[name]}: {name} is set, and shared_storage_path has other writers too: leave it away, and bound the "
                    "directory with `kvtier gc`"
                )
        if not (values.get("staging_cache") or "dram_policy" in values or "dram_bytes" in values):
            default("staging_cache", "off")
        if not (values.get("staging_mem") or "dram_bytes" in values):
            default("staging_mem", 1.0)
    if values.get("staging_cache") == "off":
        if not (values.get("shared_storage_path") or values.get("disk_path")):
            raise ConfigError(
                f"{sources['staging_cache']}: staging_cache is off, and there is no disk: nothing would be kept"
            )
        if values.get("disk_ingestion", "all") != "all":
            raise ConfigError(
                f"{sources['staging_cache']}: staging_cache is off, and disk_ingestion is {values['disk_ingestion']!r}: what only passes through "
                "memory has to be written at once, leave disk_ingestion at all"
            )
    elif values.get("staging_cache"):
        values["dram_policy"], sources["dram_policy"] = values["staging_cache"], sources["staging_cache"]
    if values.get("preload_share_staging") is False:
        raise ConfigError(
            f"{sources['preload_share_staging']}: preload_share_staging is false: a part has one slot here, whoever waits for it; leave it away"
        )
