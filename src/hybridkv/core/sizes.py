"""Byte sizes as people write them: "1GiB", "512 MiB", "1.5GB"."""

import re

from hybridkv.core.errors import ConfigError

SIZE_BYTES_MAX = 1 << 62  # More than any file can have.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, _letter: 1024**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: object, setting: str) -> int:
    """Returns bytes: "1GiB" -> 1073741824, 512 -> 512. Raises ConfigError that names `setting`."""
    match = _SIZE.fullmatch(str(value)) if isinstance(value, str | int) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{setting}={value!r} is not a size", 'write it like "1GiB" or "512MiB"', "1GiB"
        )
    size = float(match[1]) * unit
    if size > SIZE_BYTES_MAX:
        raise ConfigError(f"{setting}={value!r} is larger than any memory", value="1GiB")
    if size < 1:
        raise ConfigError(f"{setting}={value!r} must be larger than zero", value="1GiB")
    return int(size)


def format_size(size_bytes: float) -> str:
    """Returns a size in its largest binary unit, with one decimal at most: 1536 -> "1.5KiB"."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}".removesuffix(".0") + name
    return f"{size_bytes:.0f}B"
