"""How the value of an option is read, in settings, in arguments of `serve` and in URLs of tiers.

A parser takes a value and the words that name its place. Its ConfigError says what works.
"""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from hybridkv.core.errors import ConfigError

Parser = Callable[[Any, str], Any]


def choice(values: Iterable[str]) -> Parser:
    """A parser of one of these values; the first one is said to work."""
    known = tuple(values)

    def parse(value: Any, where: str) -> str:
        if value not in known:
            what = f"{where}={value!r} must be one of {', '.join(known)}"
            raise ConfigError(what, f'"{known[0]}" works')
        return known[known.index(value)]

    return parse


def number(
    low: float, high: float, works: str, kind: type[float] = float, what: str = "a number"
) -> Parser:
    """A parser of a number from `low` to `high`, or of a text that is one.

    With kind=int a number with a fraction is refused.
    """

    def parse(value: Any, where: str) -> float:
        try:
            parsed = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            parsed = float("nan")
        if not low <= parsed <= high or kind(parsed) != parsed:
            wrong = f"{where}={value!r} must be {what} from {low:.9g} to {high:.9g}"
            raise ConfigError(wrong, f"{works} works")
        return kind(parsed)

    return parse


def boolean(value: object, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}={value!r} must be true or false", "true works")
    return value


def switch(value: object, where: str) -> bool:
    """True or false, or a text that is one of them, as a variable has it."""
    parsed = {"1": True, "true": True, "0": False, "false": False}.get(str(value).lower())
    if parsed is None:
        raise ConfigError(f"{where}={value!r} must be true or false", "true works")
    return parsed


def boolean_or_auto(value: object, where: str) -> bool | None:
    """True or false; None for "auto"."""
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ConfigError(f'{where}={value!r} must be true, false or "auto"', '"auto" works')
    return value


def text(value: object, where: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}={value!r} must be a non-empty text", '"my-model-v1" works')
    return value


def directory(value: object, where: str) -> str:
    """The absolute path of a directory."""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ConfigError(f"{where}={value!r} must be an absolute path", '"/dev/shm" works')
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The remedy for a name that nobody knows."""
    return f"did you mean {difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]!r}?"
