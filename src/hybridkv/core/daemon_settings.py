"""The daemon's settings: one table, with each default once.

The options of `hybridkv serve`, the variables, the keys of a settings file and those of
`kv_connector_extra_config` are made from it, and so is the table of docs/configuration.md.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from hybridkv.core import option_parsers
from hybridkv.core.durations import parse_duration
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_node_name, check_socket_path
from hybridkv.core.sizes import parse_size
from hybridkv.core.tier_urls import disk_url, parse_tier

METRICS_PORT = 9477
LOG_LEVELS = ("info", "debug", "warning", "error")
VARIABLE_PREFIX = "HYBRIDKV_"
CONFIG_VARIABLE = f"{VARIABLE_PREFIX}CONFIG"  # It names the settings file.
_PORT_MAX = 65535
_TIER = "valkey://127.0.0.1:6379"
_TOKEN_FILE = "file:/"  # How a token is given, so that it is in no command line.


class LogFormat(StrEnum):
    """How a line of the daemon's log is written."""

    TEXT = "text"
    JSON = "json"


def _socket(value: object, where: str) -> str:
    return check_socket_path(str(value), where)


def _node(value: object, where: str) -> str:
    return check_node_name(str(value))


def _disk(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "?" in value:
        what = f"{where}={value!r} must be an absolute path without '?'"
        raise ConfigError(what, value="/var/cache/hybridkv")
    return value


def _tiers(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(url, str) for url in value):
        what = f"{where}={value!r} must be a list of URLs"
        raise ConfigError(what, f'["{_TIER}"] works', [_TIER])
    for url in value:
        parse_tier(url, where)
    return tuple(value)


def _traces(value: object, where: str) -> str:
    if not str(value).startswith(("http://", "https://")):
        what = f"{where}: {value!r} is no URL of a collector"
        raise ConfigError(what, value="http://127.0.0.1:4318/v1/traces")
    return str(value)


def _port(value: object, where: str) -> int:
    try:
        port = int(str(value))
    except ValueError:
        port = _PORT_MAX + 1
    if not -1 <= port <= _PORT_MAX:
        what = f"{where}={value} must be from 0 to {_PORT_MAX}, or -1 for none"
        raise ConfigError(what, value=METRICS_PORT)
    return port


def _host(value: object, where: str) -> str:
    try:
        return str(ipaddress.ip_address(str(value)))
    except ValueError:
        what = f"{where}={value!r} must be the address of an interface"
        raise ConfigError(what, '"127.0.0.1" works, or "0.0.0.0" for all', "127.0.0.1") from None


def _token_file(value: object, where: str) -> str:
    text = str(value)
    if not text.startswith(_TOKEN_FILE):
        # It is not shown, since it may be the token.
        what = f"{where}: what is given names no file by an absolute path"
        raise ConfigError(what, value="file:/etc/hybridkv/token")
    return text.removeprefix("file:")


def check_metrics(host: str, token_file: str | None) -> None:
    """Raise ConfigError where the pages could be read from the network without a token."""
    if token_file is None and not ipaddress.ip_address(host).is_loopback:
        what = f"metrics-host={host} is not on the loopback and needs a token"
        raise ConfigError(what, "--metrics-token file:/etc/hybridkv/token works")


def _setting(
    default: Any, parse: option_parsers.Parser, metavar: str, about: str, **argparse_options: Any
) -> Any:
    """Returns a dataclass field. `argparse_options` go to `add_argument`, except for `key`."""
    metadata = {"parse": parse, "metavar": metavar, "help": about, **argparse_options}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """The settings of one daemon, from wherever they were given."""

    socket: str | None = _setting(
        None,
        _socket,
        "PATH",
        "where the daemon listens (default: hybridkv/daemon.sock in $XDG_RUNTIME_DIR, else "
        "/tmp/hybridkv-UID/daemon.sock)",
    )
    ram_bytes: int | None = _setting(
        None,
        parse_size,
        "SIZE",
        'memory for the cache, like "8GiB" (default: what an earlier daemon left, else a quarter)',
        key="ram",
    )
    shm_dir: str | None = _setting(
        None,
        option_parsers.directory,
        "DIR",
        "the directory of that memory, on a tmpfs (default: /dev/shm)",
    )
    arena_ttl_seconds: float = _setting(
        3600.0,
        parse_duration,
        "TIME",
        'how long that memory is kept for the next daemon after the end of this one, like "30min" '
        'or "never" for no bound (default: 1h)',
        key="arena_ttl",
    )
    salt_quota_bytes: int | None = _setting(
        None,
        parse_size,
        "SIZE",
        'the most that the prompts of one cache_salt may take, like "2GiB" (default: all of --ram)',
        key="salt_quota",
    )
    user_quota_bytes: int | None = _setting(
        None,
        parse_size,
        "SIZE",
        'the most that the engines of one user may store, like "20GiB", for a daemon of a --group; '
        "not together with --salt-quota (default: all of --ram)",
        key="user_quota",
    )
    metrics_port: int | None = _setting(
        None, _port, "PORT", f"port of /metrics; -1: none (default: {METRICS_PORT}, or a free one)"
    )
    metrics_host: str = _setting(
        "127.0.0.1",
        _host,
        "ADDRESS",
        "the address at which /metrics is served; another one than the loopback's needs "
        "--metrics-token (default: 127.0.0.1)",
    )
    metrics_token_file: str | None = _setting(
        None,
        _token_file,
        "file:PATH",
        "a file with the token that whoever asks for /metrics or another page must send, as "
        '"Authorization: Bearer TOKEN" (default: none)',
        key="metrics_token",
    )
    fresh: bool = _setting(
        False,
        option_parsers.switch,
        "",
        "start empty, even if a daemon that ended left its cache in memory (default: no)",
        action="switch",
    )
    disk: str | None = _setting(
        None, _disk, "DIRECTORY", "keep objects there too, also over a reboot (default: no)"
    )
    disk_bytes: int | None = _setting(
        None,
        parse_size,
        "SIZE",
        'the most that may take, like "200GiB" (default: half of what is free)',
    )
    tiers: tuple[str, ...] = _setting(
        (),
        _tiers,
        "URL",
        "a tier below RAM, may be given several times, the fastest first: "
        "disk:///directory?bytes=200GiB, valkey://host:6379/0, s3://bucket/prefix, "
        "mooncake://host:50051; with &write=through|back|off, &hourly=SIZE to spare an SSD, "
        "&timeout=SECONDS (default: none)",
        action="append",
        option="tier",
    )
    node: str | None = _setting(
        None,
        _node,
        "NAME",
        "tells this daemon from others on one directory (default: host name and socket)",
    )
    traces: str | None = _setting(
        None,
        _traces,
        "URL",
        "send spans of lookups, loads and tiers to an OpenTelemetry collector, like "
        "http://127.0.0.1:4318/v1/traces (needs hybridkv[otel]; default: no)",
    )
    log_file: str | None = _setting(
        None,
        option_parsers.text,
        "FILE",
        'where to log; "auto": beside the socket (default: standard error, or "auto" with '
        "--detach)",
    )

    log_level: str = _setting(
        "info",
        option_parsers.choice(LOG_LEVELS),
        "",
        "the least that is logged (default: info)",
        choices=list(LOG_LEVELS),
    )
    log_format: LogFormat = _setting(
        LogFormat.TEXT,
        option_parsers.choice(LogFormat),
        "",
        "how a line of the log is written; json is one object a line (default: text)",
        choices=[str(log_format) for log_format in LogFormat],
    )

    group: str | None = _setting(
        None,
        option_parsers.text,
        "NAME",
        "serve all members of this group of users; each can read and change the cache of the "
        "others (default: your own user alone)",
    )

    def tier_urls(self) -> list[str]:
        """Every tier below RAM, the directory first."""
        bound = self.disk_bytes
        return [*([] if self.disk is None else [disk_url(self.disk, bound)]), *self.tiers]


class DaemonSetting:
    """One row of the table: a setting and its names in code, file, command line and variable."""

    def __init__(self, field_name: str, default: object, metadata: Mapping[str, Any]) -> None:
        self.field = field_name
        self.default = default
        self.key: str = metadata.get("key", field_name)  # In a file and in an engine's settings.
        self.option = f"--{metadata.get('option', self.key).replace('_', '-')}"
        self.variable = f"{VARIABLE_PREFIX}{self.key.upper()}"
        self.parse: option_parsers.Parser = metadata["parse"]
        self.help: str = metadata["help"]
        self.metavar: str = metadata["metavar"]
        self.choices: list[str] | None = metadata.get("choices")
        self.is_switch = metadata.get("action") == "switch"
        self.is_list = metadata.get("action") == "append"

    def words(self, value: Any) -> Iterator[str]:
        """Yields the words of the command line for a parsed value: "--ram", "8589934592"."""
        if self.is_switch:
            yield self.option if value else self.option.replace("--", "--no-", 1)
            return
        prefix = "file:" if self.parse is _token_file else ""
        for item in value if self.is_list else (value,):
            yield from (self.option, f"{prefix}{item}")


DAEMON_SETTINGS: Mapping[str, DaemonSetting] = {
    row.key: row
    for setting in fields(DaemonSettings)
    for row in [DaemonSetting(setting.name, setting.default, setting.metadata)]
}
"""Every setting of the daemon by its key."""


def resolve(
    words: Mapping[str, object],
    variables: Mapping[str, str],
    file: Mapping[str, object],
    file_name: str,
) -> DaemonSettings:
    """Returns a daemon's settings. The first of command line, variable, file and default counts.

    `words` has the options of the command line by key, `file` the keys of the file `file_name`.
    Raises ConfigError, which names the place and a value that works.
    """
    for key in file:
        if key not in DAEMON_SETTINGS:
            what = f"{file_name}: unknown key {key!r}"
            listed = '"hybridkv serve --help" lists all'
            raise ConfigError(what, option_parsers.did_you_mean(key, DAEMON_SETTINGS, listed))
    parsed = {}
    for key, row in DAEMON_SETTINGS.items():
        value = resolve_one(key, words, variables, file, file_name)
        if value is not None:
            parsed[row.field] = value
    settings = DaemonSettings(**parsed)
    if settings.disk_bytes is not None and settings.disk is None:
        raise ConfigError("disk-bytes: it needs a directory", "--disk /var/cache/hybridkv works")
    if settings.user_quota_bytes is not None and settings.salt_quota_bytes is not None:
        raise ConfigError("user-quota: it counts what --salt-quota counts", "one of the two works")
    check_metrics(settings.metrics_host, settings.metrics_token_file)
    return settings


def resolve_one(
    key: str,
    words: Mapping[str, object],
    variables: Mapping[str, str],
    file: Mapping[str, object],
    file_name: str,
) -> Any:
    """Returns the value of one key, as `resolve` finds it, or None where it is given nowhere."""
    row = DAEMON_SETTINGS[key]
    given = words.get(key)
    if given is not None:
        return row.parse(given, row.option.removeprefix("--"))
    # A variable that is empty is none, as in a shell.
    if text := variables.get(row.variable):
        return row.parse(text.split() if row.is_list else text, row.variable)
    if key in file:
        return row.parse(file[key], f"{file_name}: {key}")
    return None
