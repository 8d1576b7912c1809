"""Remote back ends by name. Adding one is one file and one line here; it is imported when it is asked for."""

from concurrent.futures import Executor
from importlib import import_module
from typing import Any, cast

from kvtier.errors import ConfigError
from kvtier.tier.remote.connector import Connector

_CONNECTORS = {
    "MEMORY": "kvtier.tier.remote.memory:MemoryConnector",
}


def connector_names() -> tuple[str, ...]:
    """Names that `connector_class` knows, sorted."""
    return tuple(sorted(_CONNECTORS))


def connector_class(name: str) -> type[Connector[Any, Any]]:
    """The connector of a back end. Names are not case-sensitive. Raises ConfigError for an unknown one."""
    place = _CONNECTORS.get(name.upper())
    if place is None:
        raise ConfigError(f"remote back end {name!r} is not known: use one of {', '.join(connector_names())}")
    module, _, attribute = place.partition(":")
    return cast("type[Connector[Any, Any]]", getattr(import_module(module), attribute))


def make_connector(name: str, conn_id: str, executor: Executor, **kwargs: Any) -> Connector[Any, Any]:
    """A connector set up from environment variables, not yet open. Raises ConfigError."""
    return connector_class(name).from_envs(conn_id, executor, **kwargs)
