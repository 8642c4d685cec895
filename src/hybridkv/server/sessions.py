"""Who is connected, and what each engine holds."""

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from hybridkv.core.geometry import Geometry
from hybridkv.storage.store import Namespace, Slot
from hybridkv.wire.messages import WireModel
from hybridkv.wire.protocol import State

SESSIONS_MAX = 1024


class Process(NamedTuple):
    """A client's process; `started` tells it from a later one of the same id. pid 0: in another pid namespace."""

    pid: int
    started: int


class Copying(NamedTuple):
    """What a worker's process said last: over which connection, and the session before which it is drained."""

    connection: int
    drained: int


@dataclass(eq=False)
class Session:
    """One greeting of an engine, and what it holds."""

    engine_id: str
    geometry: Geometry
    namespace: Namespace
    engine_connection: int | None
    number: int = 0
    """Of the engine's greetings."""
    model: WireModel | None = None
    leases: dict[int, list[Slot]] = field(default_factory=dict)
    found: dict[int, tuple[float, int]] = field(default_factory=dict)
    """While spans are wanted, by lease: when it was given, and the number of its lookup's span."""
    writing: dict[int, Slot] = field(default_factory=dict)
    writing_bytes: int = 0
    """Bytes in `writing`."""
    since: float = 0.0
    """When it greeted, by the daemon's clock."""

    def unwritten(self, offset: int, generation: int) -> Slot | None:
        """The session's unwritten slot of that name, if it has one."""
        slot = self.writing.get(offset)
        return slot if slot is not None and slot.generation == generation else None

    def takes(self, slot: Slot, group: int) -> bool:
        """Whether the slot has the shape of an object of that group."""
        return group < len(self.namespace.shapes) and slot.shape in self.namespace.shapes[group]


@dataclass
class Connection:
    """One accepted socket, named by a number."""

    process: Process
    state: State = State.NEW
    engine_id: str = ""
    session: Session | None = None


@lru_cache(maxsize=SESSIONS_MAX)
def tag_of(engine_id: str) -> bytes:
    """An engine's name in the arena, HASH_BYTES."""
    return hashlib.sha256(engine_id.encode()).digest()


def session_of(connection: Connection) -> Session:
    """The session of an engine's connection."""
    assert connection.session is not None, "an engine's connection has a session"
    return connection.session


def model_of(session: Session) -> str:
    """The model's name, or nothing."""
    return session.model.name if session.model is not None else ""
