"""Exceptions a user of the library may see and catch."""


class MetaAttentionError(Exception):
    """Base class of every error this library raises on purpose."""


class ConfigError(MetaAttentionError, ValueError):
    """A configuration value that cannot work, found before any tensor is built."""


class OtherBaseError(ConfigError):
    """An adapter for another base than the model at hand, where loading it can be allowed.

    Args:
        difference: What is not the same.
        remedy: What allows it; callers with flags in place of arguments name theirs.
    """

    def __init__(self, difference: str, remedy: str = "pass allow_other_base=True") -> None:
        super().__init__(difference, remedy)
        self.difference = difference

    def __str__(self) -> str:
        return "{}; load the base it was trained for, or {}".format(*self.args)


class ShapeError(MetaAttentionError, ValueError):
    """A tensor whose shape or dtype breaks the contract of the function that received it."""


class BackendUnavailableError(MetaAttentionError, RuntimeError):
    """A requested implementation that cannot run here."""


class DataError(MetaAttentionError, ValueError):
    """A corpus that is missing, unreadable or too small."""


class CacheError(MetaAttentionError, RuntimeError):
    """Something asked of a cache that what it holds cannot do."""
