"""Durations as people write them: "90s", "30min", "2h", "1d", "never"."""

import math
import re

from hybridkv.core.errors import ConfigError

DURATION_SECONDS_MAX = 366 * 86400.0
NEVER = "never"
_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")


def parse_duration(value: object, where: str) -> float:
    """Returns seconds: "30min" -> 1800.0, 5 -> 5.0, "never" -> infinity. Raises ConfigError."""
    if value == NEVER:
        return math.inf
    is_given = isinstance(value, str | int | float) and not isinstance(value, bool)
    match = _DURATION.fullmatch(str(value)) if is_given else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"{where}={value!r} is no duration", '"30min", "2h" and "never" work', "30min"
        )
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds > DURATION_SECONDS_MAX:
        raise ConfigError(f"{where}={value!r} is longer than a year", value="never")
    return seconds


def format_duration(seconds: float) -> str:
    """Returns a duration in its largest unit, with one decimal at most: 5400.0 -> "1.5h"."""
    if math.isinf(seconds):
        return NEVER
    for unit in ("d", "h", "min"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.1f}".removesuffix(".0") + unit
    return f"{seconds:.0f}s"
