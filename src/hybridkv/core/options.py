"""How the value of an option is read, in settings, in arguments of `serve` and in URLs of tiers.

A parser takes a value and the words that name its place. Its ConfigError says what works.
"""

from collections.abc import Callable, Iterable
from typing import Any

from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import parse_size

Parser = Callable[[Any, str], Any]


def size(value: object, where: str) -> int:
    """Bytes of a text like "1GiB" or of a whole number."""
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ConfigError(f"{where}={value!r} is not a size", 'write it like "1GiB"')
    return parse_size(value, where)


def choice(values: Iterable[str]) -> Parser:
    """A parser of one of these values; the first one is said to work."""
    known = tuple(values)

    def parse(value: object, where: str) -> str:
        for one in known:
            if value == one:
                return one
        what = f"{where}={value!r} must be one of {', '.join(known)}"
        raise ConfigError(what, f'"{known[0]}" works')

    return parse


def number(
    low: float, high: float, works: str, kind: type[float] = float, what: str = "a number"
) -> Parser:
    """A parser of a number from `low` to `high`, or of a text that is one."""

    def parse(value: Any, where: str) -> float:
        try:
            parsed = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            parsed = float("nan")
        if not low <= parsed <= high:
            wrong = f"{where}={value!r} must be {what} from {low:g} to {high:g}"
            raise ConfigError(wrong, f"{works} works")
        return kind(parsed)

    return parse


def boolean(value: object, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}={value!r} must be true or false", "true works")
    return value


def text(value: object, where: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}={value!r} must be a non-empty text", '"my-model-v1" works')
    return value
