"""Driving the daemon's core without a socket."""

from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import pack_u64, unpack_u64
from hybridkv.core.policies import EvictionClass
from hybridkv.daemon.handlers import Daemon
from hybridkv.store.store import Store
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Found,
    Hello,
    Lookup,
    Reply,
    Reserve,
    Reserved,
    Welcome,
    geometry_to_wire,
)

ARENA = 1 << 20


def make_daemon(arena_bytes: int = ARENA) -> Daemon:
    memory = memoryview(bytearray(arena_bytes))
    store = Store(memory, first_generation=1 << 32)
    store.extents.grow(arena_bytes)
    return Daemon(
        store, Welcome(0, PROTOCOL_VERSION, "boot", "/nowhere", arena_bytes, arena_bytes, 1)
    )


def hashes(*numbers: int) -> bytes:
    return b"".join(bytes([number]) * HASH_BYTES for number in numbers)


def engine(
    daemon: Daemon,
    connection: int,
    geometry: Geometry,
    name: str = "e",
    identity: bytes = b"n" * 32,
) -> Reply | None:
    daemon.sessions.connect(connection)
    return daemon.handle(
        connection, Hello(1, PROTOCOL_VERSION, "engine", name, identity, geometry_to_wire(geometry))
    )


def grant(
    daemon: Daemon, connection: int, part_bytes: int, count: int, parts: int = 1
) -> list[tuple[int, int]]:
    granted = daemon.handle(connection, Reserve(9, part_bytes, parts, count))
    assert isinstance(granted, Reserved), granted
    return list(zip(unpack_u64(granted.offsets), unpack_u64(granted.generations), strict=True))


def commit(
    daemon: Daemon,
    connection: int,
    slots: list[tuple[int, int]],
    group: int,
    numbers: list[int],
    *,
    eviction_class: EvictionClass = EvictionClass.PROMPT,
) -> Reply | None:
    return daemon.handle(
        connection,
        Commit(
            pack_u64([offset for offset, _ in slots]),
            pack_u64([generation for _, generation in slots]),
            pack_u64([group] * len(slots)),
            hashes(*numbers),
            classes=bytes([eviction_class] * len(slots)),
        ),
    )


def lookup(daemon: Daemon, connection: int, lease: int, *numbers: int) -> Found:
    found = daemon.handle(connection, Lookup(5, lease, hashes(*numbers)))
    assert isinstance(found, Found), found
    return found
