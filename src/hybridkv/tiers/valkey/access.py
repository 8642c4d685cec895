"""What a tier's URL says of its servers: where they are, and how one logs in."""

import re
import ssl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers.contract import TierError
from hybridkv.tiers.valkey.resp import RefusedCommand
from hybridkv.tiers.valkey.slots import Address

PREFIX = "hybridkv:1:"
PORT = 6379
_NEEDED = "GET SET EXISTS UNLINK GETRANGE STRLEN SELECT SCAN DBSIZE INFO"
_NEEDED_BY_CLUSTERS = "CLUSTER|SLOTS ASKING"


class Access:
    """The addresses in a URL, and the login to all servers that are found there."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError where the URL names no server. Its text shows no password."""
        is_unix = spec.kind == "valkey+unix"
        rest, own = ("/run/valkey.sock?db=0", "db") if is_unix else (f"127.0.0.1:{PORT}/0", "ca")
        works = f'"{spec.kind}://{rest}" works'
        parts = _split(spec, works)
        # The last @ ends the login, so nothing secret follows it.
        hosts = parts.netloc.rpartition("@")[2]
        self.place = f"{spec.kind}://{hosts}{parts.path}"
        """The URL for people: without user and password."""
        self._scheme, self._path = spec.kind, parts.path
        bounds = "the server's maxmemory and maxmemory-policy"
        shown = replace(spec, location=self.place)
        options = shown.known_options("prefix", "password_file", own, bounded_by=bounds)
        self.prefix = options.get("prefix", PREFIX)  # How the names of its values begin.
        self.seeds: Sequence[Address] = [Address(unquote(parts.path), 0)]
        """The servers that the URL names."""
        if not is_unix:
            self.seeds = _addresses(hosts)
        self.database = options.get("db", "0") if is_unix else parts.path.strip("/") or "0"
        self.timeout_seconds = spec.timeout_seconds  # Of a call.
        self.login = [unquote(word) for word in (parts.username, parts.password) if word]
        """The words of AUTH, as of the last time that the file with the password was read."""
        self.tls: ssl.SSLContext | None = None
        self.wants_tls = spec.kind in ("valkeys", "rediss")
        self._authority = options.get("ca")
        self._users = int(bool(parts.username))  # Words of the login before the password.
        self._password_file = options.get("password_file", "")
        """A file with the password. "" = it is in the URL."""
        if not all(seed.host for seed in self.seeds):
            raise ConfigError(f"tier {self.place} names no server", works)
        if not re.fullmatch("[0-9]+", self.database):
            what = f"tier {self.place}: database {self.database!r} is no number"
            raise ConfigError(what, works)
        if not self.prefix:
            raise ConfigError(f"tier {self.place}: prefix is empty", f"prefix={PREFIX} works")
        self._check_login(parts)

    def place_of(self, address: Address) -> str:
        """Returns the URL of one server, for people."""
        return f"{self._scheme}://{address}{self._path}" if address.port else self.place

    def read_files(self) -> None:
        """Read the files of certificates and of the password. Raises ConfigError."""
        if self.wants_tls:
            try:
                self.tls = ssl.create_default_context(cafile=self._authority)
            except OSError:
                raise ConfigError(
                    f"{self.place}: ca={self._authority!r} is no readable file of certificates",
                    "ca=/etc/ssl/certs/ca-certificates.crt works",
                ) from None
        if self._password_file:
            self.login = [*self.login[: self._users], self._read_password()]

    def renew_password(self, refused: Sequence[str]) -> bool:
        """Read the password again, as a server refuses the login `refused`.

        Returns whether there is another one. Raises ConfigError where it cannot be read.
        """
        if self._password_file:
            self.login = [*self.login[: self._users], self._read_password()]
        return list(refused) != self.login

    def works(self, login: str = "") -> str:
        """Returns the URL with another login, for a message."""
        scheme, _, rest = self.place.partition("://")
        return f'"{scheme}://{login}{rest}"'

    def refusal_error(
        self, place: str, refusal: RefusedCommand, step: str = ""
    ) -> TierError | ConfigError:
        """Returns the error for a refusal at `open`. `step` is the command of the login, or ""."""
        login = f"{self.works('USER:PASSWORD@')} with those that it knows"
        if self._password_file:
            login = f"the password that it knows in password_file={self._password_file!r}"
        wrong_login = ("the server refuses this user or password", login)
        needed = f"{_NEEDED} on ~{self.prefix}*, and of a cluster {_NEEDED_BY_CLUSTERS}"
        meanings = {
            "NOAUTH": ("the server wants a password", self.works(":PASSWORD@")),
            "WRONGPASS": wrong_login,
            "AUTH ERR": wrong_login,
            "NOPERM": ("the user may not do what a cache needs", f"one with {needed}"),
            "DENIED": ("the server is in protected mode", "one with a password"),
            "SELECT ERR": (f"the server refuses database {self.database}", "0"),
        }
        meaning = meanings.get(f"{step} {refusal.code}") or meanings.get(refusal.code)
        if meaning is None:
            return TierError(f"{place} refuses ({refusal.code})")
        what, remedy = meaning
        return ConfigError(f"{place}: {what}", f"{remedy} works")

    def _check_login(self, parts: SplitResult) -> None:
        """Raise ConfigError unless there is one password, or neither user nor password."""
        if parts.password and self._password_file:
            what = f"tier {self.place}: the password is given twice, in the URL and password_file"
            raise ConfigError(what, f"{self.works()} with password_file works")
        if parts.username and not (parts.password or self._password_file):
            raise ConfigError(
                f"tier {self.place}: there is a user without a password",
                f"{self.works('USER:PASSWORD@')} works",
            )

    def _read_password(self) -> str:
        try:
            return Path(self._password_file).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            what = f"{self.place}: password_file={self._password_file!r} cannot be read ({why})"
            raise ConfigError(what, "a file of yours with the password alone works") from None


def _addresses(hosts: str) -> list[Address]:
    """Returns the addresses in "a:6379,b". Raises ValueError where a port is none."""
    parts = [urlsplit(f"//{host}") for host in hosts.split(",")]
    return [
        Address(part.hostname or "", PORT if part.port is None else part.port) for part in parts
    ]


def _split(spec: TierSpec, works: str) -> SplitResult:
    """Returns the parts of the URL. Errors show none of it: any part may be a password."""
    try:
        parts = urlsplit(spec.location)
        is_sound = all(seed.port for seed in _addresses(parts.netloc.rpartition("@")[2]))
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
