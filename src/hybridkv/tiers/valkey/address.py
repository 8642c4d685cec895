"""Where a Valkey or Redis server is, from the URL of its tier."""

from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, unquote, urlsplit

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import TierSpec

PREFIX = "hybridkv:1:"
PORT = 6379
_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True, "valkey+unix": False}
"""Whether the scheme means TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """A server, a database in it, and how to log in."""

    place: str
    """The URL for people: without user and password."""
    prefix: bytes
    """The beginning of the names of this tier's values."""
    host: str
    port: int
    path: str
    """The path of its Unix socket, or empty."""
    tls: bool
    authority: str | None
    """A file with the certificate of who signed the server's."""
    database: int
    user: str = field(repr=False)
    password: str = field(repr=False)

    def works(self, login: str = "") -> str:
        """A URL like this one, for a message."""
        scheme, _, rest = self.place.partition("://")
        return f'"{scheme}://{login}{rest}"'


def parse_address(spec: TierSpec) -> ServerAddress:
    """The server of a tier's URL; raises ConfigError, whose message has no password."""
    is_unix = spec.kind == "valkey+unix"
    rest = "/run/valkey.sock?db=0" if is_unix else f"127.0.0.1:{PORT}/0"
    works = f'"{spec.kind}://{rest}" works'
    parts = _split(spec, works)
    # The last @ ends the login, so nothing secret is behind it.
    place = f"{spec.kind}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    options = replace(spec, location=place).known_options("prefix", "db" if is_unix else "ca")
    if is_unix:
        host, path, database = "", unquote(parts.path), options.get("db", "0")
    else:
        host, path, database = parts.hostname or "", "", parts.path.strip("/") or "0"
    prefix = options.get("prefix", PREFIX)
    user, password = (unquote(word or "") for word in (parts.username, parts.password))
    if not (host or path):
        raise ConfigError(f"tier {place} names no server", works)
    if not (database.isascii() and database.isdigit()):
        raise ConfigError(f"tier {place}: database {database!r} is no number", works)
    if not prefix:
        raise ConfigError(f"tier {place}: prefix is empty", f"prefix={PREFIX} works")
    server = ServerAddress(
        place=place,
        prefix=prefix.encode(),
        host=host,
        port=parts.port or PORT,
        path=path,
        tls=_SCHEMES[spec.kind],
        authority=options.get("ca"),
        database=int(database),
        user=user,
        password=password,
    )
    if user and not password:
        raise ConfigError(
            f"tier {place}: there is a user without a password",
            f"{server.works('USER:PASSWORD@')} works",
        )
    return server


def _split(spec: TierSpec, works: str) -> SplitResult:
    """The URL's parts; the errors print none of it, since any of it may be a password."""
    try:
        parts = urlsplit(spec.location)
        is_sound = parts.port is None or parts.port > 0
    except ValueError:
        is_sound = False
    _, at, host = spec.location.partition("://")[2].rpartition("@")
    if at and not (is_sound and parts.netloc.endswith("@" + host.partition("/")[0])):
        raise ConfigError(
            f"tier {spec.kind}: in the URL's user and password / ? # @ are written %2F %3F %23 %40",
            works.replace("://", "://USER:PASSWORD@"),
        )
    if not is_sound:
        raise ConfigError(f"tier {spec.kind}: the URL names no server", works)
    return parts
