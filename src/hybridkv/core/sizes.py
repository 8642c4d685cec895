"""Byte sizes as people write them: "1GiB", "512 MiB", "2e9"."""

import re

from hybridkv.core.errors import ConfigError

SIZE_BYTES_MAX = 1 << 62
"""More than any file can have."""
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int, setting: str) -> int:
    """Bytes of a size such as "1GiB"; raises ConfigError that names `setting`."""
    match = _SIZE.fullmatch(str(text))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{setting}={text!r} is not a size", 'write it like "1GiB" or "512MiB"')
    amount = float(match[1]) * unit
    if amount > SIZE_BYTES_MAX:
        raise ConfigError(f"{setting}={text!r} is larger than any memory", '"1GiB" works')
    size = int(amount)
    if size <= 0:
        raise ConfigError(f"{setting}={text!r} must be larger than zero", '"1GiB" works')
    return size


def format_size(size_bytes: float) -> str:
    """The largest binary unit in which the size is at least 1, with at most one decimal."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}".removesuffix(".0") + name
    return f"{size_bytes:.0f}B"
