"""Parsers of the values of options: of settings, arguments of `serve`, and URLs of tiers.

A parser takes a value and `where`, the words that name the option for people. It returns the parsed
value, or raises ConfigError with a value that works.
"""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from hybridkv.core.errors import ConfigError

Parser = Callable[[Any, str], Any]


def choice(values: Iterable[str]) -> Parser:
    """Returns a parser of these values. Its error names the first as one that works."""
    known = tuple(values)

    def parse(value: Any, where: str) -> str:
        if value not in known:
            what = f"{where}={value!r} must be one of {', '.join(known)}"
            raise ConfigError(what, value=known[0])
        return known[known.index(value)]

    return parse


def number(
    low: float, high: float, works: str, kind: type[float] = float, what: str = "a number"
) -> Parser:
    """Returns a parser of a number from `low` to `high`, or of a text like "5".

    With kind=int a number with a fraction is refused.
    """

    def parse(value: Any, where: str) -> float:
        try:
            parsed = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            parsed = float("nan")
        if not low <= parsed <= high or kind(parsed) != parsed:
            wrong = f"{where}={value!r} must be {what} from {low:.9g} to {high:.9g}"
            raise ConfigError(wrong, f"{works} works", kind(works))
        return kind(parsed)

    return parse


def boolean(value: object, where: str) -> bool:
    """Returns a value that is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}={value!r} must be true or false", value=True)
    return value


def switch(value: object, where: str) -> bool:
    """Returns the truth of a value, or of a text as a variable has it: "true", "1", "0"."""
    parsed = {"1": True, "true": True, "0": False, "false": False}.get(str(value).lower())
    if parsed is None:
        raise ConfigError(f"{where}={value!r} must be true or false", value=True)
    return parsed


def boolean_or_auto(value: object, where: str) -> bool | None:
    """Returns a value that is true or false, or None for "auto"."""
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ConfigError(f'{where}={value!r} must be true, false or "auto"', value="auto")
    return value


def text(value: object, where: str) -> str:
    """Returns a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}={value!r} must be a non-empty text", value="my-model-v1")
    return value


def directory(value: object, where: str) -> str:
    """Returns the absolute path of a directory, which need not exist."""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ConfigError(f"{where}={value!r} must be an absolute path", value="/dev/shm")
    return value


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Returns the remedy for an unknown name: "did you mean 'write'?".

    It is `otherwise` where no known name is alike.
    """
    alike = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {alike[0]!r}?" if alike else otherwise
