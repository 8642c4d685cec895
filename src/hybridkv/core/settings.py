"""The connector's settings: one frozen value, every default once, unknown keys are errors."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hybridkv.core.errors import ConfigError
from hybridkv.core.eviction import Policy
from hybridkv.core.sizes import parse_size
from hybridkv.core.tiers import LoadPolicy, disk_url, parse_tier

LOAD_TIMEOUT_SECONDS_MAX = 30.0
CHECKSUMS = ("on", "off", "paranoid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`kv_connector_extra_config` of HybridKVConnector."""

    server: str = "auto"
    """"auto": the user's daemon, started where none runs; "unix:///path": the daemon at that socket."""
    ram_bytes: int | None = None
    """`ram`: size of the arena of a daemon that "auto" starts; None = a quarter of the machine's memory."""
    eviction: Policy = Policy.TWO_QUEUES
    """Of a daemon that "auto" starts: "2q" keeps what is read from prompts that nobody repeats; "lru" does not."""
    salt_quota_bytes: int | None = None
    """`salt_quota`, of a daemon that "auto" starts: the most that the prompts of one cache_salt may take."""
    tiers: tuple[str, ...] = ()
    """`disk`, `disk_bytes` and `tiers`, of a daemon that "auto" starts: URLs of the tiers below RAM (core.tiers)."""
    load_policy: LoadPolicy = LoadPolicy.FASTER
    """Whether what only tiers below RAM have is loaded."""
    hybrid_chunk_size: int | None = None
    """Tokens per chunk; None = derived from the groups."""
    load_timeout_seconds: float = LOAD_TIMEOUT_SECONDS_MAX
    """The longest a request may wait for storage below RAM; it caps `lookup_timeout_ms` (requirements B39, D18)."""
    lookup_timeout_ms: float = 100.0
    """The longest a request may wait for the answer to its lookup; later answers are ignored."""
    store_generated: bool = True
    """Whether chunks with generated tokens are stored too."""
    checksum: str = "on"
    """"on": bytes of a slot are verified before they reach the engine; "paranoid": the engine's blocks are read
    back and compared as well; "off": neither."""
    weights_identity: str | None = None
    """Overrides the part of the identity that is read from the weights' files."""

    def daemon_options(self) -> list[str]:
        """Those for `hybridkv serve`."""
        options = ["--eviction", str(self.eviction)]
        for name, size in (("--ram", self.ram_bytes), ("--salt-quota", self.salt_quota_bytes)):
            options += [] if size is None else [name, str(size)]
        for url in self.tiers:
            options += ["--tier", url]
        return options


def parse_settings(extra: Mapping[str, object]) -> Settings:
    """Settings from the connector's extra config; raises ConfigError that names the key and a value that works."""
    values = dict(extra)
    known = {field.name: field for field in fields(Settings)}
    names = [*(name.removesuffix("_bytes") for name in known), "disk", "disk_bytes"]
    for key in values:
        if key == "load_weight":
            raise ConfigError(f"kv_connector_extra_config.{key} is for a child of MultiConnector; leaving it out works")
        if key not in names:
            near = difflib.get_close_matches(key.removesuffix("_bytes"), names, n=1, cutoff=0.0)
            raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}; did you mean {near[0]!r}?")
    parsed: dict[str, object] = {}
    for key, value in values.items():
        where = f"kv_connector_extra_config.{key}"
        match key:
            case "server":
                parsed[key] = _server(value, where)
            case "ram" | "salt_quota":
                if not isinstance(value, str | int) or isinstance(value, bool):
                    raise ConfigError(f'{where}={value!r} is not a size; write it like "1GiB"')
                parsed[f"{key}_bytes"] = parse_size(value, where)
            case "disk" | "disk_bytes" | "tiers":
                parsed["tiers"] = _tiers(values)
            case "load_policy":
                if value not in tuple(LoadPolicy):
                    raise ConfigError(f'{where}={value!r} must be one of {", ".join(LoadPolicy)}; "faster" works')
                parsed[key] = LoadPolicy(str(value))
            case "eviction":
                if not isinstance(value, str) or value not in tuple(Policy):
                    raise ConfigError(f'{where}={value!r} must be one of {", ".join(Policy)}; "2q" works')
                parsed[key] = Policy(value)
            case "hybrid_chunk_size":
                parsed[key] = int(_number(value, where, 1, 1 << 24, "1024"))
            case "load_timeout_seconds":
                parsed[key] = _number(value, where, 0.001, LOAD_TIMEOUT_SECONDS_MAX, "10")
            case "lookup_timeout_ms":
                parsed[key] = _number(value, where, 0.1, LOAD_TIMEOUT_SECONDS_MAX * 1e3, "100")
            case "store_generated":
                if not isinstance(value, bool):
                    raise ConfigError(f"{where}={value!r} must be true or false; true works")
                parsed[key] = value
            case "checksum":
                if value not in CHECKSUMS:
                    raise ConfigError(f'{where}={value!r} must be one of {", ".join(CHECKSUMS)}; "on" works')
                parsed[key] = value
            case "weights_identity":
                if not isinstance(value, str) or not value:
                    raise ConfigError(f'{where}={value!r} must be a non-empty text; "my-model-v1" works')
                parsed[key] = value
    return Settings(**parsed)  # type: ignore[arg-type]  # each value was checked above


def _tiers(values: Mapping[str, object]) -> tuple[str, ...]:
    """URLs of all tiers that the settings name, the directory first."""
    where = "kv_connector_extra_config"
    disk, size, more = values.get("disk"), values.get("disk_bytes"), values.get("tiers", [])
    urls: list[str] = []
    if disk is not None:
        if not isinstance(disk, str) or not disk.startswith("/") or "?" in disk:
            raise ConfigError(
                f"{where}.disk={disk!r} must be an absolute path without '?'; \"/var/cache/hybridkv\" works"
            )
        if size is not None:
            parse_size(str(size), f"{where}.disk_bytes")
        urls.append(disk_url(disk, str(size).replace(" ", "") if size is not None else None))
    elif size is not None:
        raise ConfigError(f'{where}.disk_bytes={size!r} needs a directory: "disk": "/var/cache/hybridkv" works')
    if not isinstance(more, list) or not all(isinstance(url, str) for url in more):
        raise ConfigError(f'{where}.tiers={more!r} must be a list of URLs; ["valkey://127.0.0.1:6379"] works')
    for url in more:
        parse_tier(url, f"{where}.tiers")
    return (*urls, *more)


def _server(value: object, where: str) -> str:
    if value == "auto" or (isinstance(value, str) and value.startswith("unix:///")):
        return str(value)
    raise ConfigError(f'{where}={value!r} must be "auto" or a socket like "unix:///run/user/1000/hybridkv/daemon.sock"')


def _number(value: object, where: str, low: float, high: float, works: str) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]  # checked by the try
    except (TypeError, ValueError):
        number = None
    if number is None or not low <= number <= high:
        raise ConfigError(f"{where}={value!r} must be a number from {low:g} to {high:g}; {works} works")
    return number
