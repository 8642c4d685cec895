"""Records in Mooncake Store, the memory of many nodes behind one master.

::

    mooncake://MASTER:50051?bytes=64GiB&local_hostname=10.0.0.7

| option | default | |
|---|---|---|
| `bytes` | none | memory that this node gives to the store, from 16MiB; without it the node only uses the others' |
| `local_hostname` | 127.0.0.1 | this node's address as the others reach it: needed with `bytes`, but on one node |
| `protocol` | tcp | or rdma |
| `device` | | RDMA devices, separated by commas |
| `metadata` | P2PHANDSHAKE | Mooncake's metadata server, if there is one |
| `admin` | 9003 | PORT or HOST:PORT of the master's HTTP server (`--metrics_port`): only `keys` asks there |
| `buffer` | 512MiB | memory shared with the client, touched as far as needed; a quarter is the largest record |
| `log` | | a file for what Mooncake's library prints |

A record is the object `hybridkv-1-<hex of its key>`.  It lives in the memory that some node gave, and goes with that
node, with the master, which remembers nothing, or when the master makes room.  So `close` takes this node's memory, and
what is in it, out of the store.

Mooncake's client is a C++ library, and lives in child processes (mooncake_child).  Measured with 0.3.13, in one's own
process: a put after a failed setup, or any call after `close`, is a segmentation fault; a setup takes 90 s without a
master, and had not returned after 100 s with a port that never answers; any call takes 30 s where the master or another
node stops; `close` holds the interpreter's lock for seconds.  It also listens on all of the machine's addresses,
whatever it is told.  Here a call that has not returned within the tier's `timeout` costs its child, and `tend` starts
another.

There are two children where there is `bytes`: the *keeper*, which has the memory given to the store and is asked
nothing, so that it is never ended for being slow, and the *client*, which has nothing to lose.

A reader's lease keeps an object from being removed for a time (`--default_kv_lease_ttl`, 10 s; a lookup takes one too).
What was discarded is missing here at once; for others when its lease ended and `tend` came by.  Damaged records are
removed in spite of leases: nobody can want their bytes.
"""

import contextlib
import http.client
import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.tiers import TierSpec
from hybridkv.shm.slots import SLOT_ALIGN
from hybridkv.storage.record import KEY_BYTES
from hybridkv.storage.tiers.base import DamagedError, FullError, Getting, MissingError, Putting, Tier, TierError
from hybridkv.storage.tiers.mooncake_calls import KEYS_MAX, Find, Get, Put, Remove
from hybridkv.storage.tiers.mooncake_process import Child, DeadChildError, Lane
from hybridkv.storage.tiers.remote import Deadline, dial

SEGMENT_BYTES_MIN = 16 << 20
BUFFER_BYTES = 512 << 20
BUFFER_BYTES_MIN = 4 << 20
LANES = 4
GROUP_BYTES = 8 << 20
"""Of records in one call to the client, unless a single one is larger."""
COPY_STEP_BYTES = 1 << 20
"""So that no other thread waits longer for the interpreter's lock than a copy of as much takes."""
MASTER_PORT = 50051
ADMIN_PORT = 9003
DISCARDED_MAX = 1 << 16
"""Discarded records that could not be removed yet; the oldest of more are forgotten, and may be found again."""
LISTING_BYTES_MAX = 1 << 30
STOP_SECONDS_MAX = 3.0
PATIENCE = 0.4
"""The share of `timeout` after which the library is to give up by itself, so that it need not be ended."""

Item = TypeVar("Item", Getting, Putting)

_PREFIX = "hybridkv-1-"
_OURS = re.compile(rf"{_PREFIX}([0-9a-f]{{{2 * KEY_BYTES}}})")
_PROTOCOLS = ("tcp", "rdma")
_OPTIONS = ("local_hostname", "protocol", "device", "metadata", "admin", "buffer", "log")

_FULL = -200
_NOT_FOUND = -704
_EXISTS = -705
_LEASED = -706
_ABSENT = {_NOT_FOUND, -703, -710, -712}  # not there, not whole yet, its bytes went
_NOBODY = {-900, -901}  # the master is not there, does not answer
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


class MooncakeTier(Tier):
    """A client of one Mooncake master, and its share of the store's memory."""

    def __init__(self, spec: TierSpec) -> None:
        """Raises ConfigError for settings that can never work."""
        self.name = spec.name
        self._timeout_seconds = spec.timeout_seconds
        self._master = _address(spec.location)
        options = spec.known_options(*_OPTIONS)
        self._admin = _admin(options.get("admin", ""), self._master[0])
        self._log = options.get("log", "")
        self._segment_bytes = spec.max_bytes or 0
        if 0 < self._segment_bytes < SEGMENT_BYTES_MIN:
            raise ConfigError(f"tier {spec.location}: Mooncake takes no less than bytes=16MiB; bytes=1GiB works")
        buffer = parse_size(options.get("buffer", BUFFER_BYTES), f"tier {spec.location}: buffer")
        if buffer < BUFFER_BYTES_MIN:
            raise ConfigError(f"tier {spec.location}: buffer={options['buffer']!r} is below 4MiB; 512MiB works")
        self._lane_bytes = buffer // LANES // SLOT_ALIGN * SLOT_ALIGN
        protocol = options.get("protocol", "tcp")
        if protocol not in _PROTOCOLS:
            raise ConfigError(
                f"tier {spec.location}: protocol={protocol!r} is none of {', '.join(_PROTOCOLS)}; tcp works"
            )
        self._config = {
            "local_hostname": options.get("local_hostname", "127.0.0.1"),
            "metadata_server": options.get("metadata", "P2PHANDSHAKE"),
            "protocol": protocol,
            "rdma_devices": options.get("device", ""),
            "master_server_addr": "{}:{}".format(*self._master),
            "global_segment_size": "0",
            "local_buffer_size": "0",
        }
        self._opening = threading.Lock()
        self._client: Child | None = None
        self._keeper: Child | None = None
        self._starts = 0
        self._sick = False
        """Nobody answered the last call: the client is to show that it works, or be made anew."""
        self._closed = False
        self._discarded: dict[bytes, bool] = {}
        """What is to be removed as soon as that is possible, and whether in spite of a lease."""
        self._discarded_lock = threading.Lock()

    def open(self) -> None:
        """Start the child processes, or prove that they work; takes about `timeout` at most, and their loading."""
        with self._opening:
            if self._closed:
                raise TierError("the tier is closed")
            self._knock()
            if self._segment_bytes and not (self._keeper and self._keeper.alive):
                self._keeper = self._started(lanes=1, lane_bytes=SLOT_ALIGN, segment_bytes=self._segment_bytes)
            if self._client and self._client.alive and not self._works(self._client):
                self._client.kill()
            if not (self._client and self._client.alive):
                self._client = self._started(LANES, self._lane_bytes, segment_bytes=0)
            self._sick = False
            if self._closed:  # meanwhile, and whoever did it may not have seen these children
                self.close()
                raise TierError("the tier is closed")

    def peek(self, key: bytes) -> bool | None:
        """Nothing is known without asking the master, but for what was discarded here."""
        return False if key in self._discarded else None

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the master."""
        deadline, found = self._deadline(), list[bool]()
        for start in range(0, len(keys), KEYS_MAX):
            group = keys[start : start + KEYS_MAX]
            with self._lane(deadline) as lane:
                codes = lane.call(Find([_name(key) for key in group]), deadline)
            if all(code in _NOBODY for code in codes):
                raise self._error(codes[0])
            found += [code == 1 and key not in self._discarded for key, code in zip(group, codes, strict=True)]
        return found

    def get(self, items: Sequence[Getting]) -> list[TierError | None]:
        """Read from whichever nodes have the records."""
        discarded = MissingError("it was discarded")
        return self._in_groups(items, self._get_group, lambda item: discarded if item.key in self._discarded else None)

    def put(self, items: Sequence[Putting]) -> list[TierError | None]:
        """Write to a node of the master's choice; what is there already is kept."""
        refused: dict[bytes, TierError] = {}
        with self._discarded_lock:
            again = {item.key: self._discarded[item.key] for item in items if item.key in self._discarded}
            for key, damaged in again.items():
                if not damaged:  # then it is the same object that is still there
                    del self._discarded[key]
        damaged_keys = [key for key, damaged in again.items() if damaged]
        if damaged_keys:
            with contextlib.suppress(TierError):
                self._remove(damaged_keys, self._deadline())
            refused = {
                key: TierError("a damaged one is in its place") for key in damaged_keys if key in self._discarded
            }
        return self._in_groups(items, self._put_group, lambda item: refused.get(item.key))

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        """Remove; missing here at once, whatever becomes of it at the master. Raises TierError where nobody answers."""
        with self._discarded_lock:
            for key in keys:
                self._discarded[key] = damaged or self._discarded.get(key, False)
            for key in list(itertools.islice(self._discarded, max(len(self._discarded) - DISCARDED_MAX, 0))):
                del self._discarded[key]
        self._remove(keys, self._deadline())

    def keys(self) -> Iterator[bytes]:
        """From the master's HTTP port; raises TierError where that does not answer."""
        for line in self._listing().splitlines():
            match = _OURS.fullmatch(line)
            if match and (key := bytes.fromhex(match[1])) not in self._discarded:
                yield key

    def tend(self) -> None:
        """Start again what has ended, and remove what could not be removed before."""
        keeps = not self._segment_bytes or (self._keeper is not None and self._keeper.alive)
        if self._sick or not keeps or self._client is None or not self._client.alive:
            self.open()
        with self._discarded_lock:
            waiting = list(self._discarded)
        if waiting:
            self._remove(waiting, self._deadline())

    def gauges(self) -> Mapping[str, float]:
        """What this node gives; how full the store is only its master knows."""
        return {
            "bytes_max": self._segment_bytes,
            "discards_waiting": len(self._discarded),
            "client_starts": self._starts,
        }

    def close(self) -> None:
        """End the children; the memory that this node gave leaves the store, in order where that is quick."""
        self._closed = True
        if self._client:
            self._client.kill()
        if self._keeper:
            self._keeper.stop(min(self._timeout_seconds, STOP_SECONDS_MAX))

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_seconds

    def _knock(self) -> None:
        """Raise TierError where no master listens: no reason to start a process."""
        try:
            dial(*self._master, Deadline(self._timeout_seconds * PATIENCE)).close()
        except OSError as error:
            raise TierError("no Mooncake master at {}:{}: {}".format(*self._master, error)) from error

    def _started(self, lanes: int, lane_bytes: int, segment_bytes: int) -> Child:
        patience = self._timeout_seconds * PATIENCE
        environment = {
            "MC_RPC_TIMEOUT_MS": str(max(1, int(1000 * patience))),
            "MC_RPC_CONNECT_TIMEOUT_MS": str(max(1, int(1000 * patience))),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(patience)),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(math.ceil(patience)),
        }
        config = self._config | {"global_segment_size": str(segment_bytes)}
        try:
            child = Child(config, environment, self._log, lanes, lane_bytes)
        except (OSError, RuntimeError) as error:
            raise TierError(f"Mooncake's client does not start: {error}") from error
        self._starts += 1
        child.connect(self._timeout_seconds)
        return child

    def _works(self, client: Child) -> bool:
        if not self._sick:
            return True
        deadline = self._deadline()
        try:
            with client.lane(deadline) as lane:
                return lane.call(Find([_name(bytes(KEY_BYTES))]), deadline)[0] not in _NOBODY
        except TierError:
            return False

    @contextlib.contextmanager
    def _lane(self, deadline: float) -> Iterator[Lane]:
        client = self._client
        if client is None or self._closed:
            raise TierError("not connected to Mooncake")
        try:
            with client.lane(deadline) as lane:
                yield lane
        except DeadChildError:
            self._sick = True
            raise

    def _in_groups(
        self,
        items: Sequence[Item],
        act: Callable[[Sequence[Item], float], list[TierError | None]],
        refuse: Callable[[Item], TierError | None],
    ) -> list[TierError | None]:
        """What `act` says of the items, a few at a time; what went wrong for all of some is so for those after them."""
        deadline = self._deadline()
        sizes = [_size(item) for item in items]
        errors = [refuse(item) or self._too_large(size) for item, size in zip(items, sizes, strict=True)]
        wanted = [index for index, error in enumerate(errors) if error is None]
        over: TierError | None = None
        for group in _groups(wanted, sizes, min(GROUP_BYTES, self._lane_bytes)):
            said: list[TierError | None] = [over] * len(group)
            if over is None:
                try:
                    said = act([items[index] for index in group], deadline)
                except TierError as failure:
                    over, said = failure, [failure] * len(group)
            for index, error in zip(group, said, strict=True):
                errors[index] = error
        return errors

    def _too_large(self, size: int) -> TierError | None:
        if size <= self._lane_bytes:
            return None
        need = format_size(LANES * size)
        return TierError(f"a record of {size} bytes is over a quarter of the option buffer; buffer={need} works")

    def _get_group(self, items: Sequence[Getting], deadline: float) -> list[TierError | None]:
        keys, sizes = [_name(item.key) for item in items], [_size(item) for item in items]
        with self._lane(deadline) as lane:
            codes = lane.call(Get(keys, _offsets(lane, sizes), sizes), deadline)
            at, errors = 0, list[TierError | None]()
            for item, size, code in zip(items, sizes, codes, strict=True):
                if code == size:
                    for part in _parts(item):
                        part[:] = lane.memory[at : at + len(part)]
                        at += len(part)
                    errors.append(None)
                    continue
                at += size
                if code >= 0:
                    errors.append(DamagedError(f"it has {code} bytes, not {size}"))
                else:
                    errors.append(self._error(code))
        return self._unless_nobody(codes, errors)

    def _put_group(self, items: Sequence[Putting], deadline: float) -> list[TierError | None]:
        keys, sizes = [_name(item.key) for item in items], [_size(item) for item in items]
        with self._lane(deadline) as lane:
            at = 0
            for item in items:
                for part in _parts(item):
                    lane.memory[at : at + len(part)] = part
                    at += len(part)
            codes = lane.call(Put(keys, _offsets(lane, sizes), sizes), deadline)
        return self._unless_nobody(codes, [None if code in (0, _EXISTS) else self._error(code) for code in codes])

    def _unless_nobody(self, codes: Sequence[int], errors: list[TierError | None]) -> list[TierError | None]:
        """The errors; raises TierError where nobody answered, for then nobody need be asked about those after them."""
        if all(code in _NOBODY for code in codes):
            raise self._error(codes[0])
        return errors

    def _remove(self, keys: Sequence[bytes], deadline: float) -> None:
        """Remove what is among the discarded, and forget about what is gone."""
        for force in (False, True):
            with self._discarded_lock:
                chosen = [key for key in dict.fromkeys(keys) if self._discarded.get(key) is force]
            for start in range(0, len(chosen), KEYS_MAX):
                group = chosen[start : start + KEYS_MAX]
                with self._lane(deadline) as lane:
                    codes = lane.call(Remove([_name(key) for key in group], force), deadline)
                with self._discarded_lock:
                    for key, code in zip(group, codes, strict=True):
                        if code in (0, _NOT_FOUND):
                            self._discarded.pop(key, None)
                if all(code in _NOBODY for code in codes):
                    raise self._error(codes[0])

    def _error(self, code: int) -> TierError:
        if code in _NOBODY:
            self._sick = True
        words = f"Mooncake: {_WORDS.get(code, 'error')} ({code})"
        if code in _ABSENT:
            return MissingError(words)
        return FullError(words) if code == _FULL else TierError(words)

    def _listing(self) -> str:
        deadline = self._deadline()
        connection = http.client.HTTPConnection(*self._admin, timeout=self._timeout_seconds)
        try:
            connection.sock = dial(*self._admin, Deadline(self._timeout_seconds))
            connection.request("GET", "/get_all_keys")
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise TierError(f"Mooncake's master answers {response.status} where its keys should be (option admin)")
            body = bytearray()
            while piece := response.read1(1 << 20):
                body += piece
                if len(body) > LISTING_BYTES_MAX or time.monotonic() > deadline:
                    raise TierError("the list of Mooncake's keys is too long")
            return body.decode("ascii", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise TierError(
                "Mooncake's master does not list its keys at {}:{}: ".format(*self._admin) + repr(error)
            ) from error
        finally:
            connection.close()


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()


def _size(item: Getting | Putting) -> int:
    return sum(len(piece) for piece in item.pieces)


def _parts(item: Getting | Putting) -> Iterator[memoryview]:
    """The pieces in order, so much at a time as is copied in one step."""
    for piece in item.pieces:
        for start in range(0, len(piece), COPY_STEP_BYTES):
            yield piece[start : start + COPY_STEP_BYTES]


def _groups(indices: Sequence[int], sizes: Sequence[int], bytes_max: int) -> Iterator[list[int]]:
    """The indices in order, so many at a time that they are one call."""
    group: list[int] = []
    size = 0
    for index in indices:
        if group and (size + sizes[index] > bytes_max or len(group) == KEYS_MAX):
            yield group
            group, size = [], 0
        group.append(index)
        size += sizes[index]
    if group:
        yield group


def _offsets(lane: Lane, sizes: Sequence[int]) -> list[int]:
    offsets, at = [], lane.start
    for size in sizes:
        offsets.append(at)
        at += size
    return offsets


def _address(location: str) -> tuple[str, int]:
    """Host and port of the master."""
    parts = urlsplit(location)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("a mooncake tier has no users; mooncake://HOST:50051 works")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.path.strip("/") or ":" in host:
        raise ConfigError(f"tier {location} must name the master and no path; mooncake://127.0.0.1:50051 works")
    return host, port or MASTER_PORT


def _admin(option: str, master: str) -> tuple[str, int]:
    host, _, port = option.rpartition(":")
    if option and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"admin={option!r} must be the master's --metrics_port, or HOST:PORT; {ADMIN_PORT} works")
    return host or master, int(port or ADMIN_PORT)
