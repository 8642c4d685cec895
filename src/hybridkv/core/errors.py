"""Errors a person reads: one sentence that says what is wrong, which setting, and a value that works."""


class HybridKVError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(HybridKVError, ValueError):
    """A setting that cannot work; the message names the setting and a value that does."""


class GeometryError(HybridKVError, ValueError):
    """A KV cache layout that is not understood, refused by name and never guessed (requirements B11)."""
