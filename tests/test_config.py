"""Where settings come from, who wins, and what is refused."""

from dataclasses import Field, fields
from pathlib import Path

import pytest

from kvtier.config import _SERVICE_ENV, Config, load_config, parse_bytes
from kvtier.errors import ConfigError
from kvtier.tier.remote.memory import CAPACITY_ENV, POLICY_ENV


@pytest.mark.parametrize(
    ("text", "count"),
    [(4096, 4096), ("4096", 4096), ("256MiB", 256 << 20), ("1.5 GiB", 3 << 29), ("2gb", 2 * 10**9), ("1 KB", 1000)],
)
def test_sizes(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 XiB", None, True, [1], "1e9"])
def test_sizes_that_are_none(text: object) -> None:
    with pytest.raises(ValueError, match="256MiB"):
        parse_bytes(text)


def test_later_sources_win_and_are_named(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('dram_bytes = "1GiB"\nio_depth = 4\ndisk_bytes = 1000\n')
    environ = {
        "KVTIER_CONFIG": str(file),
        "KVTIER_IO_DEPTH": "8",
        "KVTIER_DISK_BYTES": "2000",
        "AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": "2",
        "PATH": "/bin",
    }
    loaded = load_config({"disk_bytes": 3000}, environ=environ)
    assert loaded.config.dram_bytes == 2 << 30
    assert (loaded.config.io_depth, loaded.config.disk_bytes) == (8, 3000)
    assert loaded.sources["dram_bytes"] == "AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB"
    assert loaded.sources["io_depth"] == "KVTIER_IO_DEPTH"
    assert loaded.sources["disk_bytes"] == "kv_connector_extra_config"
    assert loaded.sources["dram_policy"] == "default"


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config: setting 'dram_byte' .* 'dram_bytes'"):
        load_config({"dram_byte": 1}, environ={})
    with pytest.raises(ConfigError, match="KVTIER_DISK_PAHT.*disk_path"):
        load_config(environ={"KVTIER_DISK_PAHT": "/x"})


@pytest.mark.parametrize("service", ["KVTIER", "KVTIER_CACHE"])
def test_what_kubernetes_says_of_services_is_no_setting(service: str) -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP"]
    names += [f"PORT_8000_TCP_{what}" for what in ("PROTO", "PORT", "ADDR")]
    assert load_config(environ={f"{service}_{name}": "x" for name in names}).config == load_config(environ={}).config
    assert not any(_SERVICE_ENV.fullmatch(f"KVTIER_{item.name.upper()}") for item in fields(Config))
    with pytest.raises(ConfigError, match="ports"):
        load_config(environ={f"{service}_PORTS": "x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dram_bytes", "lots"),
        ("dram_bytes", 0),
        ("io_depth", 0),
        ("io_depth", 1.5),
        ("store_decode_blocks", "maybe"),
        ("disk_durability", "paranoid"),
        ("dram_policy", "magic"),
        ("load_deadline_s", -1),
        # A deadline that never comes would be an endless wait, and one too far off makes Python's own waits raise.
        ("load_deadline_s", "nan"),
        ("write_deadline_s", "inf"),
        ("close_deadline_s", 1e12),
    ],
)
def test_a_bad_value_names_setting_value_and_way_out(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        load_config({name: value}, environ={})
    assert repr(value) in str(caught.value)


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KVTIER_CONFIG"):
        load_config(environ={"KVTIER_CONFIG": str(tmp_path / "no.toml")})
    (tmp_path / "bad.toml").write_text("= nonsense")
    with pytest.raises(ConfigError, match="KVTIER_CONFIG"):
        load_config(environ={"KVTIER_CONFIG": str(tmp_path / "bad.toml")})


def test_py_kvcache_names_are_taken() -> None:
    assert load_config({"iodepth": 3}, environ={}).config.io_depth == 3


def test_every_setting_has_a_meaning_and_its_default_passes_its_own_check() -> None:
    for item in fields(Config):
        assert item.metadata["meaning"]
        load_config({item.name: item.default}, environ={})


def test_py_kvcache_s_settings_work_under_their_names_with_their_defaults() -> None:
    plain = load_config({"shared_storage_path": "/mnt/kv-cache"}, environ={}).config
    assert (plain.io_depth, plain.staging_mem, plain.staging_cache, plain.sync_on_store) == (16, 1.0, "off", False)
    assert (plain.enable_preload, plain.preload_lookahead_requests, plain.preload_share_staging) == (False, 0, True)
    assert plain.rank_dram_bytes(4) == 1 << 30, "staging memory is each worker's"
    full = load_config(
        {
            "shared_storage_path": "/mnt/kv-cache",
            "iodepth": 8,
            "staging_mem": 4.0,
            "sync_on_store": False,
            "enable_preload": True,
            "preload_lookahead_requests": 16,
            "preload_share_staging": True,
            "open_lookahead": 16,
            "staging_cache": "arc",
        },
        environ={},
    ).config
    assert (full.io_depth, full.open_lookahead, full.dram_policy) == (8, 16, "arc")
    assert full.rank_dram_bytes(2) == 4 << 30


def test_our_own_names_make_dram_a_cache_above_a_shared_disk() -> None:
    loaded = load_config({"shared_storage_path": "/s", "dram_bytes": "8GiB"}, environ={})
    assert (loaded.config.staging_cache, loaded.config.rank_dram_bytes(2)) == ("", 4 << 30)
    loaded = load_config({"shared_storage_path": "/s", "dram_policy": "reuse"}, environ={})
    assert (loaded.config.staging_cache, loaded.config.dram_policy, loaded.config.staging_mem) == ("", "reuse", 1.0)
    assert loaded.sources["staging_mem"] == "default with shared_storage_path"
    assert load_config({"disk_path": "/d"}, environ={}).config.staging_cache == ""


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"shared_storage_path": "/s", "disk_path": "/d"}, "an engine has one of them"),
        ({"staging_mem": 2, "dram_bytes": "1GiB"}, "they are one memory"),
        ({"disk_path": "/d", "staging_cache": "lru", "dram_policy": "arc"}, "they are one choice"),
        ({"shared_storage_path": "/s", "disk_bytes": "1TB"}, "kvtier gc"),
        ({"shared_storage_path": "/s", "disk_bytes_a_day": "1TB"}, "kvtier gc"),
        ({"staging_cache": "off"}, "nothing would be kept"),
        ({"shared_storage_path": "/s", "disk_ingestion": "hot"}, "leave disk_ingestion at all"),
        ({"shared_storage_path": "/s", "preload_share_staging": False}, "one slot"),
        ({"shared_storage_path": "/s", "staging_cache": "fifo"}, "write one of nothing, off, lru, arc"),
        ({"staging_mem": -1}, "GiB"),
        ({"staging_mem": "nan"}, "GiB"),
        ({"shared_storage_path": "/s", "shared_trailer": "maybe"}, "on, off"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(settings, environ={})


@pytest.mark.parametrize("field", fields(Config), ids=lambda field: field.name)
@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -1, 0, 16, 1 << 70, 1e300, float("inf"), float("nan"), [], ["a"], {"a": 1}),
        *("", "~nobody-here/x", "a\0b", "9" * 400 + ".0", "9" * 5000, "null", "None"),
    ],
    ids=lambda value: repr(value)[:16],
)
def test_whatever_is_written_is_taken_or_refused_by_name(field: Field[object], value: object) -> None:
    try:
        taken = getattr(load_config({field.name: value}, environ={}).config, field.name)
    except ConfigError as error:
        assert field.name in str(error)
        assert len(str(error).splitlines()) == 1
        return
    default = field.default
    assert isinstance(taken, type(default) if default is not None else Path | None)
    if value is None:
        assert taken is None, "nothing is no value but where there may be none"
    if isinstance(taken, Path):
        assert isinstance(value, str), "only text is a path"
    elif not isinstance(taken, (str, type(None))):
        assert taken <= 1 << 60, "what is larger fits nowhere"


@pytest.mark.parametrize(
    ("name", "most"),
    [("io_depth", 1024), ("iodepth", 1024), ("open_lookahead", 1024), ("disk_admission_seen_min", 15)],
)
def test_what_would_end_the_start_later_is_refused_at_once(name: str, most: int) -> None:
    load_config({name: most}, environ={})
    with pytest.raises(ConfigError, match=f"{name} is {most + 1}: the most is"):
        load_config({name: most + 1}, environ={})


@pytest.mark.parametrize("content", [b'disk_path = "\xff"\n', b"a = " + b"[" * 100_000], ids=["no text", "deep"])
def test_a_file_with_odd_content_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "odd.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="KVTIER_CONFIG is"):
        load_config(environ={"KVTIER_CONFIG": str(file)})


@pytest.mark.parametrize("path", ["~nobody-here/x.toml", "a\0b"])
def test_an_odd_path_of_the_file_is_refused_by_name(path: str) -> None:
    with pytest.raises(ConfigError, match="KVTIER_CONFIG is"):
        load_config(environ={"KVTIER_CONFIG": path})


@pytest.mark.parametrize("text", ["inf", "nan", "0", "-1", "lots", "1e300"])
def test_a_bad_size_by_aibrix_s_name_is_refused_once(text: str) -> None:
    name = "AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB"
    with pytest.raises(ConfigError, match=name) as caught:
        load_config(environ={name: text})
    assert str(caught.value).count(name) == 1


def test_the_memory_store_s_environment_is_not_taken_for_settings() -> None:
    environ = {CAPACITY_ENV: "1000", POLICY_ENV: "LRU"}
    assert set(load_config(environ=environ).sources.values()) == {"default"}
