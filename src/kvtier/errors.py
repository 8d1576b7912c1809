"""Errors that a user can act on: each names the thing, its value and the way out."""


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigError(KVTierError, ValueError):
    """A setting is unknown, malformed or cannot work here."""


class StoreUnavailableError(KVTierError):
    """A tier's medium cannot be used: missing, not ours, of another version, or held by another process."""
