"""Reads the break-even file that the settings name."""

from collections.abc import Sequence

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.plan.break_even import BreakEven, parse_break_even

FILE_BYTES_MAX = 16 << 20


def read_break_even(config: Config, *, models: Sequence[str], kv_dtypes: Sequence[str]) -> BreakEven | None:
    """The file at `prefix_cache_break_even_path`; None where none is set.

    Args:
        config: the settings.
        models: names of the model that is served, the one to show first.
        kv_dtypes: names of the type of its KV cache, likewise; "auto" among them where it is the model's own.

    Raises:
        ConfigError: it cannot be read, is malformed, belongs to another model, or has no curves although the planner is on.
    """
    path = config.prefix_cache_break_even_path
    if path is None:
        if config.load_planner == "on":
            raise ConfigError(
                "load_planner is on and prefix_cache_break_even_path is not set: the planner needs the curves of a break-even file of "
                "version 2; set the path, or load_planner to off"
            )
        return None
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prefix_cache_break_even_path is {str(path)!r}: {error}; name a break-even file, or leave it empty for none"
        ) from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(
            f"prefix_cache_break_even_path is {str(path)!r}: no break-even file is larger than {FILE_BYTES_MAX:,} bytes"
        )
    costs = parse_break_even(text, name=str(path), models=models, kv_dtypes=kv_dtypes)
    if config.load_planner == "on" and costs.curves is None:
        raise ConfigError(
            f"load_planner is on and {path} has no curves: set prefix_cache_break_even_path to a file of version 2, or load_planner to off"
        )
    return costs
