"""The connector's settings: one frozen value, every default once, unknown keys are errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hybridkv.core import option_parsers
from hybridkv.core.audit import AUDIT_SHARE
from hybridkv.core.daemon_settings import DAEMON_SETTINGS, DaemonSettings
from hybridkv.core.errors import ConfigError
from hybridkv.core.geometry import RANKS_MAX
from hybridkv.core.policies import LoadPolicy

LOAD_TIMEOUT_SECONDS_MAX = 30.0
TRANSFER = {"kv_connector": "HybridKVConnector", "kv_role": "kv_both"}
"""The `--kv-transfer-config` that works for every model, where vLLM loads this package's plugin."""
LONG_TRANSFER = {**TRANSFER, "kv_connector_module_path": "hybridkv.connector"}
"""The same without the plugin, as of a checkout that is not installed."""
_WHERE = "kv_connector_extra_config"


def _server(value: object, where: str) -> str:
    if value == "auto" or (isinstance(value, str) and value.startswith("unix:///")):
        return str(value)
    example = '"unix:///run/user/1000/hybridkv/daemon.sock"'
    raise ConfigError(f'{where}={value!r} must be "auto" or a socket like {example}', value="auto")


def _config(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.startswith("/"):
        what = f"{where}={value!r} must be the absolute path of a settings file"
        raise ConfigError(what, value="/etc/hybridkv.toml")
    return value


def _audit(value: object, where: str) -> float:
    shares = {"on": AUDIT_SHARE, "off": 0.0}
    if isinstance(value, str) and value in shares:
        return shares[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ConfigError(f'{where}={value!r} must be "on", "off" or a share up to 1', value="on")
    return float(value)


def _setting(default: Any, parse: option_parsers.Parser) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`kv_connector_extra_config` of HybridKVConnector.

    docs/configuration.md is made from the docstrings below. Settings of the daemon are keys of the
    extra config too, for a daemon that "auto" starts.
    """

    server: str = _setting("auto", _server)
    """The daemon to use. "auto" is your own daemon, which is started if none runs.
    "unix:///path" is the daemon that listens at that socket. It is not started. An engine on
    several nodes has a daemon on each, and `{node}` in the path is the number of the node."""
    nodes: int | None = _setting(
        None, option_parsers.number(1, RANKS_MAX, "2", kind=int, what="a whole number")
    )
    """The number of nodes over which the ranks of one engine are spread, each with as many and with
    a daemon of its own. By default it is what vLLM's `--nnodes` says. Set it if vLLM does not
    know (Ray), or if one machine has several daemons, one for each part of the ranks."""
    config: str | None = _setting(None, _config)
    """The settings file of a daemon that "auto" starts, as `hybridkv serve --config` takes it. By
    default it is that of the variable `HYBRIDKV_CONFIG`, or none."""
    daemon: DaemonSettings = DaemonSettings()
    daemon_options: tuple[str, ...] = ()  # Arguments of `serve` for what is given of `daemon`.
    load_policy: LoadPolicy = _setting(LoadPolicy.FASTER, option_parsers.choice(LoadPolicy))
    """Whether objects that only a tier below RAM has are loaded. "faster" loads as far as that is
    expected to be faster than computing. "always" and "never" do not weigh it."""
    hybrid_chunk_size: int | None = _setting(
        None, option_parsers.number(1, 1 << 24, "1024", kind=int, what="a whole number")
    )
    """The number of tokens in a chunk. It must be a common multiple of the block sizes of all
    groups. By default it is derived from the groups."""
    load_timeout_seconds: float = _setting(
        LOAD_TIMEOUT_SECONDS_MAX, option_parsers.number(0.001, LOAD_TIMEOUT_SECONDS_MAX, "10")
    )
    """The longest time that a request waits for tiers below RAM, 0.001 to 30 seconds. It is also
    an upper bound of `lookup_timeout_ms` (requirements B39, D18)."""
    lookup_timeout_ms: float = _setting(
        100.0, option_parsers.number(0.1, LOAD_TIMEOUT_SECONDS_MAX * 1e3, "100")
    )
    """The time that a request waits for the answer to its lookup, 0.1 to 30,000 milliseconds. A
    request that takes long to compute waits 1% of that time, if this is longer, and at most
    `load_timeout_seconds`. An answer that comes later is ignored. A request of which the engine has
    as much itself as any hit can have waits for no answer."""
    store_generated: bool = _setting(True, option_parsers.boolean)
    """Whether chunks that contain generated tokens are stored, and not only those of prompts."""
    sub_block_hits: bool | None = _setting(None, option_parsers.boolean_or_auto)
    """Whether hits may end inside a block, at a multiple of vLLM's `--prefix-match-unit`, so that a
    later turn computes less than a block of the earlier ones again. It is for models with recurrent
    layers on vLLM 0.32, and is not proven on other versions. By default ("auto") they may if that
    is served. With `true` a warning says why it is not."""
    checksum: str = _setting("on", option_parsers.choice(("on", "off", "paranoid")))
    """With "on", the bytes of an object are verified each time they are loaded. With "paranoid",
    the engine's blocks are read back and compared as well. With "off", neither is done."""
    audit: float = _setting(AUDIT_SHARE, _audit)
    """The live audit: the share of prompt tokens to recompute although they are cached, and to
    compare with the cached bytes. If the two differ, this engine no longer loads or stores under
    its identity. "on" is 0.001, "off" is 0. With "on" the first hit of every engine start, and
    after each change of weights, is audited in any case."""
    weights_identity: str | None = _setting(None, option_parsers.text)
    """A name that stands for the weights with which the engine starts. By default the identity has
    a digest of the weights in each worker's memory. Set it if the same model has other bytes in
    memory (another processor's packing), or cannot be read there (see the log), and should share.
    Weights that change while the engine serves have an identity of their own, with the name."""
    share_tp: int | None = _setting(
        None, option_parsers.number(1, RANKS_MAX, "2", kind=int, what="a whole number")
    )
    """The number of shards of KV heads in which attention layers are stored, so that engines of any
    tensor parallel size that divides it share. By default each rank stores one part, and engines of
    other sizes share nothing. Needs `weights_identity`, the same for all of them, since their ranks
    have other weights. The stored bytes are loaded bit for bit. What an engine of another size
    computes may differ in the last bits (rounding). Recurrent layers, pipelines, several nodes and
    speculation are refused, as are several shards for each rank of a GPU."""


_KEYS = {row.name: row.metadata["parse"] for row in fields(Settings) if row.metadata}
_OF_THE_DAEMON = {key: row for key, row in DAEMON_SETTINGS.items() if key != "socket"}
"""An engine's `server` says where its daemon listens."""


def parse_settings(extra: Mapping[str, object]) -> Settings:
    """Returns the settings in an extra config.

    Raises ConfigError, which names the key and a value that works.
    """
    known = {**_KEYS, **_OF_THE_DAEMON}
    for key in extra:
        if key == "load_weight":
            what = f"{_WHERE}.{key} is for a child of MultiConnector"
            raise ConfigError(what, "leaving it out works")
        if key not in known:
            what = f"kv_connector_extra_config: unknown key {key!r}"
            name, listed = key.removesuffix("_bytes"), "docs/configuration.md lists all keys"
            raise ConfigError(what, option_parsers.did_you_mean(name, known, listed))
    parsed = {
        key: parse(extra[key], f"{_WHERE}.{key}") for key, parse in _KEYS.items() if key in extra
    }
    daemon: dict[str, Any] = {}
    words = ["--config", parsed["config"]] if "config" in parsed else []
    for key, row in _OF_THE_DAEMON.items():
        if extra.get(key) is not None:
            daemon[row.field] = value = row.parse(extra[key], f"{_WHERE}.{key}")
            words += row.words(value)
    if "share_tp" in parsed and "weights_identity" not in parsed:
        what = f"{_WHERE}.share_tp={extra['share_tp']!r} needs a name for the weights"
        raise ConfigError(what, '"weights_identity": "my-model-v1" works')
    if "disk_bytes" in daemon and "disk" not in daemon:
        what = f"{_WHERE}.disk_bytes={extra['disk_bytes']!r} needs a directory"
        raise ConfigError(what, '"disk": "/var/cache/hybridkv" works')
    return Settings(**parsed, daemon=DaemonSettings(**daemon), daemon_options=tuple(words))
