"""Records in Mooncake Store, the memory of many nodes with one master.

::

    mooncake://MASTER:50051?bytes=64GiB&local_hostname=10.0.0.7

docs/tiers.md has all options.

A record is the object `hybridkv-1-<hex of its key>`. It lives in memory that a node has given to
the store. It is lost with that node, with the master, which remembers nothing, or when the master
makes room. `close` takes this node's memory, and the records in it, out of the store.

Mooncake's client is a C++ library in child processes (tiers.isolated). Measured with 0.3.13 in one
process with it: a put after a failed setup, or any call after `close`, is a segmentation fault. A
setup takes 90 s without a master, and over 100 s with a port that never answers. A call takes 30 s
where the master or another node stops. `close` holds the interpreter's lock for seconds. The
library also listens on all of the machine's addresses. Here a call that has not returned within the
tier's `timeout` costs its child, and `tend` starts another.

With `bytes` there are two children. The *keeper* has the memory given to the store. It is asked
nothing, so it is never ended for being slow. The *client* has nothing to lose.

A reader's lease keeps an object from being removed for a time (`--default_kv_lease_ttl`, 10 s). A
lookup takes a lease too. A discarded record is missing here at once, and for other nodes after its
lease, when `tend` removes it. Damaged records are removed in spite of leases. The records that are
still to be removed are remembered here, since the list must outlive the client.
"""

import contextlib
import http.client
import itertools
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import KEY_BYTES
from hybridkv.core.option_parsers import choice
from hybridkv.core.refusals import Refusal
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.tier_urls import TierSpec
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.tiers import contract
from hybridkv.tiers.contract import ReadRequest, RecordStart, Tier, TierError, WriteRequest
from hybridkv.tiers.isolated import ITEMS_MAX, DeadChildError, IsolatedProcess, Lane, LaneSizes
from hybridkv.tiers.remote import KEY_DIGITS, Deadline, Item, copy_steps, dial, in_batches, sizes_of

LIBRARY = "hybridkv.tiers.mooncake.library:MooncakeLibrary"
SEGMENT_BYTES_MIN = 16 << 20
BUFFER_BYTES = 512 << 20
BUFFER_BYTES_MIN = 4 << 20
LANES = 4
GROUP_BYTES = 8 << 20  # Bytes of records in one call to the client, unless one record has more.
MASTER_PORT = 50051
ADMIN_PORT = 9003
DISCARDED_MAX = 1 << 16
"""Discarded records that are still to be removed. Beyond that, the oldest are forgotten."""
LISTING_BYTES_MAX = 1 << 30
STOP_SECONDS_MAX = 3.0
PATIENCE = 0.4
"""After this share of `timeout` the library gives up, so that its child need not be killed."""

_PREFIX = "hybridkv-1-"
_OURS = re.compile(f"{_PREFIX}({KEY_DIGITS})")
_PROTOCOLS = ("tcp", "rdma")
_OPTIONS = ("local_hostname", "protocol", "device", "metadata", "admin", "buffer", "log")

_FULL = -200
_NOT_FOUND = -704
_LEASED = -706
_ABSENT = {_NOT_FOUND, -703, -710, -712}  # Not there, not whole yet, its bytes are lost.
_NOBODY = {-900, -901}  # The master is not there, or does not answer.
_WORDS = {
    -1: "internal error",
    -101: "no segment",
    _FULL: "no room",
    -600: "invalid parameters",
    _LEASED: "it has a lease",
    -707: "the lease ended before the bytes were there",
    -800: "the node that has it does not answer",
    -900: "the master is not there",
    -901: "the master does not answer",
}


class HostPort(NamedTuple):
    """The address of a server, written as `host:port`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class MooncakeTier(Tier):
    """A client of one Mooncake master, and this node's share of the store's memory."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError for settings that can never work."""
        self.name = spec.kind
        self._timeout_seconds = spec.timeout_seconds
        self._master = _address(spec.location)
        options = spec.known_options(*_OPTIONS)
        self._admin = _admin(options.get("admin", ""), self._master.host)
        self._log = options.get("log", "")
        self._segment_bytes = spec.max_bytes or 0
        where = f"tier {spec.location}"
        if 0 < self._segment_bytes < SEGMENT_BYTES_MIN:
            raise ConfigError(
                f"{where}: Mooncake takes no less than bytes=16MiB", "bytes=1GiB works"
            )
        buffer = parse_size(options.get("buffer", BUFFER_BYTES), f"{where}: buffer")
        if buffer < BUFFER_BYTES_MIN:
            raise ConfigError(
                f"{where}: buffer={options['buffer']!r} is below 4MiB", "512MiB works"
            )
        self._lane_bytes = buffer // LANES // SLOT_ALIGN * SLOT_ALIGN
        protocol = choice(_PROTOCOLS)(options.get("protocol", "tcp"), f"{where}: protocol")
        self._config = {
            "local_hostname": options.get("local_hostname", "127.0.0.1"),
            "metadata_server": options.get("metadata", "P2PHANDSHAKE"),
            "protocol": protocol,
            "rdma_devices": options.get("device", ""),
            "master_server_addr": str(self._master),
            "local_buffer_size": "0",
        }
        self._opening = threading.Lock()
        self.client: IsolatedProcess | None = None
        self.keeper: IsolatedProcess | None = None
        self._starts = 0
        self._forgotten = 0
        self._is_sick = False
        """The last call had no answer: the client has to show that it works, or is replaced."""
        self._closed = False
        self._discarded: dict[bytes, bool] = {}
        """Keys that are still to be removed. True = in spite of a lease."""
        self._discarded_lock = threading.Lock()

    def open(self) -> None:
        """Start the children, or prove that they work. Takes `timeout` and their start."""
        self._closed = False
        self._connect()

    def _connect(self) -> None:
        """Start the children that do not work, unless the tier is closed."""
        with self._opening:
            if self._closed:
                raise TierError("the tier is closed")
            try:  # Where no master listens, no process need be started.
                deadline = Deadline(self._timeout_seconds * PATIENCE)
                dial(self._master.host, self._master.port, deadline).close()
            except OSError as error:
                raise TierError(f"no Mooncake master at {self._master}: {error}") from error
            if self._segment_bytes and not (self.keeper and self.keeper.can_answer):
                self.keeper = self._start_child(LaneSizes(1, SLOT_ALIGN), self._segment_bytes)
            if self._is_sick and self.client:
                try:
                    self.find([bytes(KEY_BYTES)])
                except TierError:
                    self.client.kill_child()
            if not (self.client and self.client.can_answer):
                lanes = LaneSizes(LANES, self._lane_bytes)
                self.client = self._start_child(lanes, segment_bytes=0)
            self._is_sick = False
            if self._closed:  # Another thread closed it, and may not have seen these children.
                self.close()
                raise TierError("the tier is closed")

    def peek(self, key: bytes) -> bool | None:
        """Returns False for a record that was discarded here. Only the master knows of others."""
        return False if key in self._discarded else None

    def find(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Ask the master, in groups. What it does not answer in time is not known.

        Raises TierError where it answers nothing.
        """
        deadline = self._deadline()
        found: list[bool | None] = []
        while len(found) < len(keys):
            # A child that is asked with too little time left would be killed as late.
            if found and deadline - time.monotonic() < PATIENCE * self._timeout_seconds:
                break
            group = keys[len(found) : len(found) + ITEMS_MAX]
            try:
                codes = list(self._codes(deadline, "find_objects", group))
            except TierError:
                if not found:
                    raise
                break
            found += [code == 1 and key not in self._discarded for key, code in codes]
        return found + [None] * (len(keys) - len(found))

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        """Read records from the nodes that have them."""
        refused: dict[bytes, TierError] = {
            item.key: contract.MissingError("it was discarded")
            for item in items
            if item.key in self._discarded
        }
        return self._transfer("get_objects", items, refused)

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        """Read whole records, one at a time: the library reads no part of one."""
        deadline = self._deadline()
        return [self._read_start(key, deadline) for key in keys]

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        """Write to a node of the master's choice. A record that is there already is kept."""
        damaged: list[bytes] = []
        with self._discarded_lock:
            for key in {item.key for item in items} & self._discarded.keys():
                if self._discarded[key]:
                    damaged.append(key)
                else:  # The object that is still there is the same one.
                    del self._discarded[key]
        if damaged:
            with contextlib.suppress(TierError):
                # Where a damaged record cannot be removed first, the write of its key is refused.
                self.remove_keys(damaged, self._deadline())
        refused = {
            key: TierError("a damaged one is in its place")
            for key in damaged
            if key in self._discarded
        }
        return self._transfer("put_objects", items, refused)

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        """Remove records. They are missing here at once. Raises TierError without an answer."""
        with self._discarded_lock:
            for key in keys:
                self._discarded[key] = damaged or self._discarded.get(key, False)
            excess = max(len(self._discarded) - DISCARDED_MAX, 0)
            for key in list(itertools.islice(self._discarded, excess)):
                del self._discarded[key]
            self._forgotten += excess
        self.remove_keys(keys, self._deadline())

    def erase(self, keys: Sequence[bytes]) -> list[TierError | None]:
        """Remove records, in spite of readers' leases. Raises TierError without an answer."""
        self.discard(keys, damaged=True)
        kept = TierError("Mooncake's master has not removed it yet")
        return [kept if key in self._discarded else None for key in keys]

    def keys(self) -> Iterator[bytes]:
        """Yields the keys that the master lists on its HTTP port. Raises TierError."""
        for line in self._listing().splitlines():
            match = _OURS.fullmatch(line)
            if match and (key := bytes.fromhex(match[1])) not in self._discarded:
                yield key

    def tend(self) -> None:
        """Start children that have ended, and remove records that could not be removed before."""
        keeps = not self._segment_bytes or (self.keeper is not None and self.keeper.can_answer)
        if self._is_sick or not keeps or self.client is None or not self.client.can_answer:
            self._connect()
        with self._discarded_lock:
            discarded = list(self._discarded)
        if discarded:
            self.remove_keys(discarded, self._deadline())

    def gauges(self) -> Mapping[str, float]:
        """Returns this node's share. Only the master knows how full the store is."""
        return {
            "bytes_max": self._segment_bytes,
            "discards_waiting": len(self._discarded),
            "client_starts": self._starts,
            "discards_forgotten": self._forgotten,
        }

    def close(self) -> None:
        """End the children. This node's memory leaves the store, in order where that is quick."""
        self._closed = True
        if self.client:
            self.client.kill_child()
        if self.keeper:
            self.keeper.close_or_kill(min(self._timeout_seconds, STOP_SECONDS_MAX))

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_seconds

    def _start_child(self, lanes: LaneSizes, segment_bytes: int) -> IsolatedProcess:
        """Returns a child that is connected. Raises ConfigError and TierError."""
        patience = self._timeout_seconds * PATIENCE
        milliseconds, seconds = str(max(1, int(1000 * patience))), str(math.ceil(patience))
        environment = {
            "MC_RPC_TIMEOUT_MS": milliseconds,
            "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
            "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        }
        try:
            child = IsolatedProcess("Mooncake's client", LIBRARY, lanes, environment, self._log)
        except (OSError, RuntimeError) as error:
            raise TierError(f"Mooncake's client does not start: {error}") from error
        self._starts += 1
        config = self._config | {"global_segment_size": str(segment_bytes)}
        try:
            (code,) = child.load_library(self._timeout_seconds, config)
        except ImportError as error:
            raise ConfigError(
                "the mooncake tier needs the package mooncake-transfer-engine-non-cuda"
                " (extra: hybridkv[mooncake]) and the system's libibverbs1 and libnuma1:"
                f" {error}"
            ) from error
        if code:
            child.kill_child()
            raise TierError(
                f"Mooncake's client cannot be set up: {code}; the option log=PATH has its reasons"
            )
        return child

    @contextlib.contextmanager
    def _lane(self, deadline: float) -> Iterator[Lane]:
        client = self.client
        if client is None or self._closed:
            raise TierError("not connected to Mooncake")
        try:
            with client.lane(deadline) as lane:
                yield lane
        except DeadChildError:
            self._is_sick = True
            raise

    def _call(self, lane: Lane, deadline: float, method: str, *arguments: object) -> list[int]:
        """Returns the code of each item. Raises TierError where the master answered for none."""
        codes = lane.call_method(deadline, method, *arguments)
        if all(code in _NOBODY for code in codes):
            raise self._error(codes[0])
        return codes

    def _codes(
        self, deadline: float, method: str, keys: Sequence[bytes], *arguments: object
    ) -> Iterator[tuple[bytes, int]]:
        """Yields (key, code) for each key. Raises TierError."""
        for start in range(0, len(keys), ITEMS_MAX):
            group = keys[start : start + ITEMS_MAX]
            with self._lane(deadline) as lane:
                codes = self._call(lane, deadline, method, [*map(_name, group)], *arguments)
            yield from zip(group, codes, strict=True)

    def _transfer(
        self, method: str, items: Sequence[Item], refused: Mapping[bytes, TierError]
    ) -> list[TierError | None]:
        """Get or put the records that are neither refused nor too large, in groups."""
        errors = [refused.get(item.key) for item in items]
        for at, size in enumerate(sizes_of(items)):
            if errors[at] is None and size > self._lane_bytes:
                # A put that does not fit is not the server's failure, and is not tried again.
                kind = contract.FullError if method == "put_objects" else TierError
                what = (
                    f"a record of {size} bytes is over a quarter of the option buffer;"
                    f" buffer={format_size(LANES * size)} works"
                )
                errors[at] = kind(what, Refusal.TOO_LARGE)
        wanted = [item for item, error in zip(items, errors, strict=True) if error is None]
        act = partial(self._transfer_group, method, self._deadline())
        results = iter(in_batches(wanted, min(GROUP_BYTES, self._lane_bytes), ITEMS_MAX, act))
        return [next(results) if error is None else error for error in errors]

    def _transfer_group(
        self, method: str, deadline: float, items: Sequence[Item], sizes: Sequence[int]
    ) -> list[TierError | None]:
        """Get or put records, which lie in a lane's memory one after the other."""
        offsets = list(itertools.accumulate(sizes[:-1], initial=0))
        names = [_name(item.key) for item in items]
        with self._lane(deadline) as lane:
            if method == "put_objects":
                for item, offset in zip(items, offsets, strict=True):
                    for part, shared in copy_steps(item.pieces, lane.memory, offset):
                        shared[:] = part
            starts = [lane.start + offset for offset in offsets]
            codes = self._call(lane, deadline, method, names, starts, sizes)
            is_done = [
                code == size or (method == "get_objects" and contract.is_length(code, size))
                for size, code in zip(sizes, codes, strict=True)
            ]
            for at, item in enumerate(items if method == "get_objects" else ()):
                if is_done[at]:
                    record = contract.first_bytes(item.pieces, codes[at])
                    for part, shared in copy_steps(record, lane.memory, offsets[at]):
                        part[:] = shared
                    contract.zero_after(item.pieces, codes[at])
        return [
            None if done else self._error(code, size)
            for done, size, code in zip(is_done, sizes, codes, strict=True)
        ]

    def _read_start(self, key: bytes, deadline: float) -> RecordStart | TierError:
        if key in self._discarded:
            return contract.MissingError("it was discarded")
        try:
            with self._lane(deadline) as lane:
                names, sizes = [_name(key)], [self._lane_bytes]
                (code,) = self._call(lane, deadline, "get_objects", names, [lane.start], sizes)
                start = bytes(lane.memory[: contract.START_BYTES])
        except TierError as error:
            return error
        return RecordStart(start, code) if 0 < code <= self._lane_bytes else self._error(code)

    def remove_keys(self, keys: Sequence[bytes], deadline: float) -> None:
        """Remove those of `keys` that are discarded. Forget the keys that are removed."""
        for force in (False, True):
            with self._discarded_lock:
                chosen = [key for key in dict.fromkeys(keys) if self._discarded.get(key) is force]
            for key, code in self._codes(deadline, "remove_objects", chosen, force):
                if code in (0, _NOT_FOUND):
                    with self._discarded_lock:
                        self._discarded.pop(key, None)

    def _error(self, code: int, size: int = 0) -> TierError:
        if code >= 0:
            return contract.DamagedError(f"it has {code} bytes, not {size}")
        if code in _NOBODY:
            self._is_sick = True
        words = f"Mooncake: {_WORDS.get(code, 'error')} ({code})"
        if code in _ABSENT:
            return contract.MissingError(words)
        return contract.FullError(words, Refusal.MEMORY) if code == _FULL else TierError(words)

    def _listing(self) -> str:
        deadline, body = Deadline(self._timeout_seconds), bytearray()
        connection = http.client.HTTPConnection(self._admin.host, self._admin.port)
        try:
            connection.sock = dial(self._admin.host, self._admin.port, deadline)
            connection.request("GET", "/get_all_keys")
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise TierError(
                    f"Mooncake's master answers {response.status} where its keys should be"
                    " (option admin)"
                )
            while (piece := response.read1(1 << 20)) and deadline.seconds_left():
                body += piece
                if len(body) > LISTING_BYTES_MAX:
                    raise TierError("the list of Mooncake's keys is too long")
        except (OSError, http.client.HTTPException) as error:
            what = f"Mooncake's master does not list its keys at {self._admin}: {error!r}"
            raise TierError(what) from error
        finally:
            connection.close()
        return body.decode("ascii", "replace")


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()


def _address(location: str) -> HostPort:
    """Returns the master's address. Raises ConfigError."""
    parts = urlsplit(location)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("a mooncake tier has no users", "mooncake://HOST:50051 works")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.path.strip("/") or ":" in host:
        raise ConfigError(
            f"tier {location} must name the master and no path", "mooncake://127.0.0.1:50051 works"
        )
    return HostPort(host, port or MASTER_PORT)


def _admin(option: str, master: str) -> HostPort:
    """Returns the address of the master's HTTP port: ("9003", "kv1") -> kv1:9003."""
    host, _, port = option.rpartition(":")
    if option and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"admin={option!r} must be the master's --metrics_port, or HOST:PORT",
            f"{ADMIN_PORT} works",
        )
    return HostPort(host or master, int(port or ADMIN_PORT))
