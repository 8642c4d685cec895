"""Errors that people read: a clause that says what is wrong, and one that says what works."""


class HybridKVError(Exception):
    """The base of all errors that this package raises on purpose."""


class RemediedError(HybridKVError, ValueError):
    """An error in two clauses: `what` is wrong, and its `remedy`, which may be empty."""

    def __init__(self, what: str, remedy: str = "", value: object = None) -> None:
        """`value` is what the remedy says to work. None = it names no value of the setting.

        Without a remedy in words: "auto" -> '"auto" works', True -> "true works".
        """
        if value is not None and not remedy:
            shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
            remedy = f"{shown} works"
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy
        self.value = value


class ConfigError(RemediedError):
    """A setting cannot work. `what` names the setting, `remedy` a value that works."""


class GeometryError(RemediedError):
    """A KV cache layout that is not understood: it is refused by name (requirements B11)."""
