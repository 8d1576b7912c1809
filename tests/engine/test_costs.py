"""Which break-even file the settings name, and what is refused before an engine starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import load_config
from kvtier.engine.costs import FILE_BYTES_MAX, read_break_even
from kvtier.errors import ConfigError
from kvtier.plan.break_even import BreakEven

VERSION_1 = {"model_name": "m", "break_even_ssd_tokens": 559, "break_even_mem_tokens": 481}


def read(**extra: Any) -> BreakEven | None:
    return read_break_even(load_config(extra, environ={}).config, models=["m"], kv_dtypes=["auto"])


def test_no_path_is_no_gate() -> None:
    assert read() is None


def test_the_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps(VERSION_1))
    assert read(prefix_cache_break_even_path=str(path)) == BreakEven(559, 481)


def test_the_planner_needs_curves_and_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_planner is on and prefix_cache_break_even_path is not set.*version 2"):
        read(load_planner="on")
    path = tmp_path / "b.json"
    path.write_text(json.dumps(VERSION_1))
    with pytest.raises(ConfigError, match=r"load_planner is on and .*b\.json has no curves.*version 2"):
        read(load_planner="on", prefix_cache_break_even_path=path)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for spoil in (
        Path.mkdir,
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.write_bytes(b" " * (FILE_BYTES_MAX + 1)),
    ):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        spoil(path)
        with pytest.raises(ConfigError, match=rf"prefix_cache_break_even_path is '{path}'"):
            read(prefix_cache_break_even_path=path)
    with pytest.raises(ConfigError, match="none.json.*No such file.*leave it empty"):
        read(prefix_cache_break_even_path=tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_planner", "maybe"),
        ("load_planner_defer_tolerance", -1),
        ("load_planner_defer_tolerance", "nan"),
        ("load_planner_defer_tolerance", True),
        ("load_planner_defer_deadline_max_s", -0.5),
        ("load_planner_defer_deadline_max_s", "inf"),
    ],
)
def test_settings_out_of_bounds_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config({name: value}, environ={})


def test_defaults_are_the_documents() -> None:
    config = load_config(environ={}).config
    assert config.prefix_cache_break_even_path is None and config.load_planner == "off"
    assert (config.load_planner_defer_tolerance, config.load_planner_defer_deadline_max_s) == (2.0, 2.0)
