"""Driving the daemon's core without a socket."""

from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64, unpack_slots
from hybridkv.core.policies import EvictionClass
from hybridkv.daemon.handlers import Daemon
from hybridkv.store.store import Store
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Error,
    Found,
    Hello,
    Lookup,
    Reply,
    Reserve,
    Reserved,
    Welcome,
    WireModel,
    geometry_to_wire,
)

ARENA = 1 << 20


def make_daemon(arena_bytes: int = ARENA) -> Daemon:
    memory = memoryview(bytearray(arena_bytes))
    store = Store(memory, first_generation=1 << 32)
    store.extents.grow(arena_bytes)
    return Daemon(store, make_welcome(arena_bytes))


def make_welcome(arena_bytes: int) -> Welcome:
    """The greeting of a daemon over an arena without a file, all of whose bytes are slots."""
    return Welcome(
        id=0,
        version=PROTOCOL_VERSION,
        boot="boot",
        arena_path="/nowhere",
        arena_bytes=arena_bytes,
        slots_bytes=arena_bytes,
        pid=1,
    )


def engine_hello(
    geometry: Geometry,
    name: str = "e",
    identity: bytes = b"n" * HASH_BYTES,
    session: int = 0,
    model: WireModel | None = None,
    *,
    is_producer: bool = False,
) -> Hello:
    """The greeting of an engine."""
    return Hello(
        id=1,
        version=PROTOCOL_VERSION,
        role="engine",
        engine_id=name,
        namespace=identity,
        geometry=geometry_to_wire(geometry),
        session=session,
        model=model,
        is_producer=is_producer,
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
    daemon.sessions.on_connect(connection)
    return daemon.handle(connection, engine_hello(geometry, name, identity))


def command(daemon: Daemon, connection: int, tenant: int = 0) -> None:
    """Connect a command, as which nothing is stored."""
    daemon.sessions.on_connect(connection, tenant=tenant)
    daemon.handle(connection, Hello(1, PROTOCOL_VERSION, "control"))


def refusal_of(reply: Reply | None) -> str:
    """Return the code of a reply that is an Error."""
    assert isinstance(reply, Error), reply
    return reply.code


def grant(
    daemon: Daemon, connection: int, part_bytes: int, count: int, parts: int = 1
) -> list[SlotRef]:
    granted = daemon.handle(connection, Reserve(9, part_bytes, parts, count))
    assert isinstance(granted, Reserved), granted
    return [*unpack_slots(granted.slots)]


def commit(
    daemon: Daemon,
    connection: int,
    slots: list[SlotRef],
    group: int,
    numbers: list[int],
    *,
    eviction_class: EvictionClass = EvictionClass.PROMPT,
) -> Reply | None:
    packed = pack_slots(slots)
    return daemon.handle(
        connection,
        Commit(
            slots=packed,
            groups=pack_u64([group] * len(slots)),
            hashes=hashes(*numbers),
            classes=bytes([eviction_class] * len(slots)),
        ),
    )


def lookup(daemon: Daemon, connection: int, lease: int, *numbers: int) -> Found:
    found = daemon.handle(connection, Lookup(5, lease, hashes(*numbers)))
    assert isinstance(found, Found), found
    return found
