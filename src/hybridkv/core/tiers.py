"""What a tier below RAM is asked to be: one URL.

::

    disk:///var/cache/kv?bytes=200GiB
    valkey://127.0.0.1:6379/0?write=off
    s3://bucket/prefix?endpoint=http://127.0.0.1:9000&hourly=10GiB
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import parse_qsl, urlsplit

from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import is_writable
from hybridkv.core.sizes import parse_size

TIMEOUT_SECONDS = 5.0
TIMEOUT_SECONDS_MAX = 60.0


class Write(StrEnum):
    """When objects are written to a tier."""

    THROUGH = "through"
    """As soon as they are stored."""
    BACK = "back"
    """When they are about to go from RAM."""
    OFF = "off"
    """Never; it is only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier."""

    kind: str
    """The URL's scheme."""
    location: str
    """The URL without its query."""
    max_bytes: int | None = None
    """`bytes`: the most it may take; None = the kind's own default."""
    write: Write = Write.THROUGH
    hourly_bytes: int | None = None
    """`hourly`: the most that is written in an hour; what nobody read a second time goes without first."""
    timeout_seconds: float = TIMEOUT_SECONDS
    """`timeout`: for one call; afterwards the tier is taken for sick."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What only this kind knows."""

    @property
    def name(self) -> str:
        """For metrics and sentences."""
        return self.kind

    @property
    def shown(self) -> str:
        """The location without a password."""
        before, at, rest = self.location.rpartition("@")
        return f"{before.partition('://')[0]}://{rest}" if at else self.location

    def known_options(self, *names: str) -> Mapping[str, str]:
        """The kind's own options; raises ConfigError where there is one that it does not know."""
        for name in self.options:
            if name not in names:
                near = difflib.get_close_matches(name, [*names, *_COMMON], n=1, cutoff=0.0)
                raise ConfigError(f"tier {self.shown}: unknown option {name!r}; did you mean {near[0]!r}?")
        return self.options


_COMMON = ("bytes", "write", "hourly", "timeout")


def parse_tier(url: str, where: str) -> TierSpec:
    """A tier's URL; raises ConfigError that says what in it is wrong, and what works."""
    if not is_writable(url):
        raise ConfigError(f'{where}: what is given is not UTF-8; "disk:///var/cache/hybridkv?bytes=100GiB" works')
    location, _, query = url.partition("?")
    try:
        parts = urlsplit(location)
    except ValueError:
        parts = urlsplit("")
    if not parts.scheme or not (parts.netloc or parts.path):
        # It is not shown: who can say where in it a password is?
        raise ConfigError(f'{where}: that is not the URL of a tier; "disk:///var/cache/hybridkv?bytes=100GiB" works')
    if parts.scheme == "disk" and not location.startswith("disk:///"):
        raise ConfigError(f'{where}: "{location}" needs an absolute path; "disk:///var/cache/hybridkv" works')
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise ConfigError(f"{where}: {name} is given twice; once works")
        options[name] = value
    write, timeout = options.pop("write", Write.THROUGH), options.pop("timeout", str(TIMEOUT_SECONDS))
    sizes = {name: options.pop(name, None) for name in ("bytes", "hourly")}
    if write not in tuple(Write):
        raise ConfigError(f'{where}: write={write!r} must be one of {", ".join(Write)}; "through" works')
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= TIMEOUT_SECONDS_MAX:
        raise ConfigError(f"{where}: timeout={timeout!r} must be seconds from 0.01 to {TIMEOUT_SECONDS_MAX:g}; 5 works")
    max_bytes, hourly_bytes = (
        None if text is None else parse_size(text, f"{where}: {name}") for name, text in sizes.items()
    )
    return TierSpec(
        kind=parts.scheme,
        location=location,
        max_bytes=max_bytes,
        write=Write(write),
        hourly_bytes=hourly_bytes,
        timeout_seconds=seconds,
        options=options,
    )


def disk_url(path: str, size: str | int | None) -> str:
    """The URL of a directory with the byte bound `size`."""
    return f"disk://{path}" if size is None else f"disk://{path}?bytes={size}"


class LoadPolicy(StrEnum):
    """Whether what is below RAM is loaded."""

    FASTER = "faster"
    """As far as that is faster than computing it, by what was measured."""
    ALWAYS = "always"
    NEVER = "never"
