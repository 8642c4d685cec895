"""The URL of a tier below RAM.

::

    disk:///var/cache/kv?bytes=200GiB
    valkey://127.0.0.1:6379/0?write=off
    s3://bucket/prefix?endpoint=http://127.0.0.1:9000&hourly=10GiB
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from hybridkv.core import option_parsers
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import is_writable
from hybridkv.core.sizes import format_size, parse_size

TIMEOUT_SECONDS = 5.0
TIMEOUT_SECONDS_MAX = 60.0


class WritePolicy(StrEnum):
    """The time at which objects are written to a tier."""

    THROUGH = "through"  # As soon as they are stored.
    BACK = "back"  # When they are about to be evicted from RAM.
    OFF = "off"  # Never. The tier is only read.


class CodecName(StrEnum):
    """The compression of records on their way to a tier. Nothing is lost."""

    NONE = "none"
    ZPLANES = "zplanes"  # The bytes of numbers in planes, each compressed by zstd.


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """A tier, as its URL describes it."""

    kind: str  # The URL's scheme, and the tier's name in metrics and messages.
    location: str  # The URL without its query.
    max_bytes: int | None = None
    """`bytes`: the most that it may hold, where the kind has a bound. None = its own default."""
    write: WritePolicy = WritePolicy.THROUGH
    hourly_bytes: int | None = None
    """`hourly`: the most that is written in an hour. Objects without a read are left out first."""
    timeout_seconds: float = TIMEOUT_SECONDS
    """`timeout`: the limit of one call. After it the tier counts as failed."""
    codec: CodecName = CodecName.NONE
    """`codec`: how the records that this daemon writes are compressed."""
    key_path: str = ""  # `key`: the file with the key that encrypts records. Empty = none.
    class_path: str = ""
    """`class`: MODULE:CLASS, for a scheme that no installed package registers. Empty = none."""
    node: str = ""  # The name of this daemon among those that share the storage.
    options: Mapping[str, str] = field(default_factory=dict)  # The options that only this kind has.

    @property
    def shown(self) -> str:
        """The location without user and password, for messages."""
        before, at, rest = self.location.rpartition("@")
        return f"{before.partition('://')[0]}://{rest}" if at else self.location

    @property
    def settings(self) -> str:
        """The tier as its URL describes it, without a password."""
        hourly = self.hourly_bytes
        words = [self.shown, f"write {self.write}", f"timeout {self.timeout_seconds:g} s"]
        words += [] if hourly is None else [f"hourly {format_size(hourly)}"]
        words += [] if self.codec is CodecName.NONE else [f"codec {self.codec}"]
        words += ["encrypted"] if self.key_path else []
        return ", ".join(words)

    def known_options(self, *names: str, bounded_by: str = "") -> Mapping[str, str]:
        """Returns the kind's own options, which are `names`. Raises ConfigError for any other.

        `bounded_by` says what bounds the tier instead of `bytes`, which is an error then.
        """
        known = [*names, *(name for name in _COMMON if name != "bytes" or not bounded_by)]
        for name in self.options:
            if name not in names:
                what = f"tier {self.shown}: unknown option {name!r}"
                remedy = option_parsers.did_you_mean(name, known, f"{', '.join(known)} work")
                raise ConfigError(what, remedy)
        if bounded_by and self.max_bytes is not None:
            what = f"tier {self.shown}: bytes= is not taken, since {bounded_by} bound it"
            raise ConfigError(what, "a URL without bytes= works")
        return self.options


_KEY = "file:/etc/hybridkv/tier.key"


def parse_key(value: object, where: str) -> str:
    """Returns the path in "file:/path". Errors do not show `value`: it may be the key itself."""
    scheme, _, path = str(value).partition(":")
    if scheme != "file" or not path.startswith("/") or "\0" in path:
        what = f"{where}= must be file: and an absolute path"
        raise ConfigError(what, f"key={_KEY} works", _KEY)
    return path


_CLASS = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def parse_class(value: object, where: str) -> str:
    """Returns "package.module:Class"."""
    if not _CLASS.fullmatch(str(value)):
        what = f"{where}={value} must name a module and a class in it"
        raise ConfigError(what, "class=my_package.tier:MyTier works", "my_package.tier:MyTier")
    return str(value)


class CommonOption(NamedTuple):
    """An option of every kind of tier."""

    field_name: str  # The field of TierSpec that it fills.
    parse: option_parsers.Parser


_COMMON: Mapping[str, CommonOption] = {
    "write": CommonOption("write", option_parsers.choice(WritePolicy)),
    "timeout": CommonOption(
        "timeout_seconds", option_parsers.number(0.01, TIMEOUT_SECONDS_MAX, "5", what="seconds")
    ),
    "bytes": CommonOption("max_bytes", parse_size),
    "hourly": CommonOption("hourly_bytes", parse_size),
    "codec": CommonOption("codec", option_parsers.choice(CodecName)),
    "key": CommonOption("key_path", parse_key),
    "class": CommonOption("class_path", parse_class),
}
"""The options of every kind, by their names in a URL."""
_EXAMPLE = "disk:///var/cache/hybridkv?bytes=100GiB"


def parse_tier(url: str, where: str, node: str = "") -> TierSpec:
    """Returns the tier that a URL describes. Raises ConfigError where the URL is wrong.

    `node` is the name of this daemon among those that share the tier's storage.
    """
    if not is_writable(url):
        raise ConfigError(f"{where}: what is given is not UTF-8", value=_EXAMPLE)
    location, _, query = url.partition("?")
    try:
        parts = urlsplit(location)
    except ValueError:
        parts = urlsplit("")
    if not parts.scheme or not (parts.netloc or parts.path):
        # It is not shown, since a password may stand anywhere in it.
        raise ConfigError(f"{where}: that is not the URL of a tier", value=_EXAMPLE)
    if parts.scheme == "disk" and not location.startswith("disk:///"):
        what = f'{where}: "{location}" needs an absolute path'
        raise ConfigError(what, value="disk:///var/cache/hybridkv")
    given: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in given:
            raise ConfigError(f"{where}: {name} is given twice", "once works")
        given[name] = value
    common = {
        option.field_name: option.parse(given.pop(name), f"{where}: {name}")
        for name, option in _COMMON.items()
        if name in given
    }
    return TierSpec(kind=parts.scheme, location=location, node=node, options=given, **common)


def disk_url(path: str, size: str | int | None) -> str:
    """Returns the URL of a directory: ("/kv", "8GiB") -> "disk:///kv?bytes=8GiB"."""
    return f"disk://{path}" if size is None else f"disk://{path}?bytes={size}"
