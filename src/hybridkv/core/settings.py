"""The connector's settings: one frozen value, every default once, unknown keys are errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hybridkv.core import options
from hybridkv.core.errors import ConfigError
from hybridkv.core.policies import EvictionPolicy, LoadPolicy
from hybridkv.core.sizes import parse_size
from hybridkv.core.tier_urls import disk_url, parse_tier

LOAD_TIMEOUT_SECONDS_MAX = 30.0
_WHERE = "kv_connector_extra_config"


def _server(value: object, where: str) -> str:
    if value == "auto" or (isinstance(value, str) and value.startswith("unix:///")):
        return str(value)
    example = '"unix:///run/user/1000/hybridkv/daemon.sock"'
    raise ConfigError(f'{where}={value!r} must be "auto" or a socket like {example}')


def _tiers(values: Mapping[str, object], where: str) -> tuple[str, ...]:
    """URLs of all tiers that the settings name, the directory first."""
    disk, size, more = values.get("disk"), values.get("disk_bytes"), values.get("tiers", [])
    urls: list[str] = []
    if disk is not None:
        if not isinstance(disk, str) or not disk.startswith("/") or "?" in disk:
            what = f"{where}.disk={disk!r} must be an absolute path without '?'"
            raise ConfigError(what, '"/var/cache/hybridkv" works')
        if size is not None:
            parse_size(str(size), f"{where}.disk_bytes")
        urls.append(disk_url(disk, None if size is None else str(size).replace(" ", "")))
    elif size is not None:
        raise ConfigError(
            f'{where}.disk_bytes={size!r} needs a directory: "disk": "/var/cache/hybridkv" works'
        )
    if not isinstance(more, list) or not all(isinstance(url, str) for url in more):
        what = f"{where}.tiers={more!r} must be a list of URLs"
        raise ConfigError(what, '["valkey://127.0.0.1:6379"] works')
    for url in more:
        parse_tier(url, f"{where}.tiers")
    return (*urls, *more)


def _setting(default: Any, parse: options.Parser, **serve: Any) -> Any:
    """A setting; with `serve`, which is argparse's, it is an argument of `hybridkv serve` too."""
    return field(default=default, metadata={"parse": parse, "serve": serve})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`kv_connector_extra_config` of HybridKVConnector.

    docs/configuration.md is made from the docstrings below. A paragraph that begins with a key
    describes that key; the others are named by their field.
    """

    server: str = _setting("auto", _server)
    """The daemon to use. "auto" is your own daemon, which is started if none runs.
    "unix:///path" is the daemon that listens at that socket; it is not started."""
    ram_bytes: int | None = _setting(
        None,
        parse_size,
        metavar="SIZE",
        help='memory for the cache, like "8GiB" '
        "(default: what an earlier daemon left, else a quarter)",
    )
    """`ram`: The size of the RAM tier of a daemon that "auto" starts, like "64GiB".
    By default it is a quarter of the machine's memory, or what an earlier daemon left."""
    eviction: EvictionPolicy = _setting(
        EvictionPolicy.TWO_QUEUES,
        options.choice(EvictionPolicy),
        choices=[str(policy) for policy in EvictionPolicy],
        help="what stays: with 2q prompts that nobody repeats do not push out what is read "
        "(default: %(default)s)",
    )
    """The order of eviction in a daemon that "auto" starts. With "2q", prompts that nobody repeats
    do not evict what is read. "lru" evicts what was used least recently."""
    salt_quota_bytes: int | None = _setting(
        None,
        parse_size,
        metavar="SIZE",
        help='the most that the prompts of one cache_salt may take, like "2GiB" '
        "(default: all of --ram)",
    )
    """`salt_quota`: The most RAM that the prompts of one `cache_salt` may take in a daemon that
    "auto" starts, like "2GiB". By default there is no bound but the RAM itself."""
    tiers: tuple[str, ...] = _setting((), _tiers)
    """`disk`: A directory, local or shared, that a daemon started by "auto" uses as its first tier
    below RAM. By default there is none.

    `disk_bytes`: The most that this node's daemon keeps in `disk`, like "500GiB". By default it is
    half of what is free there.

    `tiers`: A list of URLs of further tiers below RAM, the fastest first."""
    load_policy: LoadPolicy = _setting(LoadPolicy.FASTER, options.choice(LoadPolicy))
    """Whether objects that only a tier below RAM has are loaded. "faster" loads as far as that is
    expected to be faster than computing; "always" and "never" do not weigh it."""
    hybrid_chunk_size: int | None = _setting(
        None, options.number(1, 1 << 24, "1024", kind=int, what="a whole number")
    )
    """The number of tokens in a chunk. It must be a common multiple of the block sizes of all
    groups. By default it is derived from the groups."""
    load_timeout_seconds: float = _setting(
        LOAD_TIMEOUT_SECONDS_MAX, options.number(0.001, LOAD_TIMEOUT_SECONDS_MAX, "10")
    )
    """The longest time that a request waits for tiers below RAM, 0.001 to 30 seconds. It is also
    an upper bound of `lookup_timeout_ms` (requirements B39, D18)."""
    lookup_timeout_ms: float = _setting(
        100.0, options.number(0.1, LOAD_TIMEOUT_SECONDS_MAX * 1e3, "100")
    )
    """The longest time that a request waits for the answer to its lookup, 0.1 to 30,000
    milliseconds. An answer that comes later is ignored."""
    store_generated: bool = _setting(True, options.boolean)
    """Whether chunks that contain generated tokens are stored, and not only those of prompts."""
    checksum: str = _setting("on", options.choice(("on", "off", "paranoid")))
    """With "on", the bytes of an object are verified each time they are loaded. With "paranoid",
    the engine's blocks are read back and compared as well. With "off", neither is done."""
    weights_identity: str | None = _setting(None, options.text)
    """A name that stands for the weights with which the engine starts. By default the identity has
    a digest of the weights in each worker's memory. Set it where the same model has other bytes in
    memory (another processor's packing), or cannot be read there (see the log), and should share.
    Weights that change while the engine serves have an identity of their own, with the name."""

    def daemon_options(self) -> list[str]:
        """Arguments of `hybridkv serve`."""
        words = []
        for argument, setting in SERVE_SETTINGS.items():
            if (value := getattr(self, setting.name)) is not None:
                words += [f"--{argument}", str(value)]
        return [*words, *(word for url in self.tiers for word in ("--tier", url))]


_KEYS = {one.name.removesuffix("_bytes"): one for one in fields(Settings)}
SERVE_SETTINGS = {
    key.replace("_", "-"): setting for key, setting in _KEYS.items() if setting.metadata["serve"]
}
"""Settings of the daemon by the name of their argument of `serve`, without its dashes."""
_KEYS |= dict.fromkeys(("disk", "disk_bytes"), _KEYS["tiers"])


def parse_settings(extra: Mapping[str, object]) -> Settings:
    """Settings of an extra config; raises ConfigError that names the key and a value that works."""
    for key in extra:
        if key == "load_weight":
            what = f"{_WHERE}.{key} is for a child of MultiConnector"
            raise ConfigError(what, "leaving it out works")
        if key not in _KEYS:
            what = f"kv_connector_extra_config: unknown key {key!r}"
            raise ConfigError(what, options.did_you_mean(key.removesuffix("_bytes"), _KEYS))
    parsed = {}
    for key, value in extra.items():
        name = _KEYS[key].name
        given, where = (extra, _WHERE) if name == "tiers" else (value, f"{_WHERE}.{key}")
        parsed[name] = _KEYS[key].metadata["parse"](given, where)
    return Settings(**parsed)
