"""A client of a daemon with tiers, which stores and reads objects as an engine does."""

import contextlib
import hashlib
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.client.link import Link
from hybridkv.core.coverage import needed_chunks, part_bytes
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64, unpack_slots
from hybridkv.shm.arena import Arena, attach_arena
from hybridkv.shm.slots import is_signed, part_digests, payload_offset, sign, slot_bytes
from hybridkv.tiers.conformance.samples import FEW_VALUES
from hybridkv.wire.messages import (
    Commit,
    Found,
    Free,
    Lookup,
    Pending,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    Stats,
)
from tests.unit.daemon.harness import engine_hello
from tests.waiting import DEADLINE_SECONDS

GEOMETRY = Geometry(
    (
        Group(0, GroupKind.FULL, 128, (9000,)),
        Group(1, GroupKind.SLIDING, 128, (30_000,), 128),
        Group(2, GroupKind.FULL, 128, (1000,)),
    ),
    128,
    128,
    128,
)
"""Objects of three, eight and one page."""
IDENTITY = b"f" * HASH_BYTES
DISK = "tier_disk_"


class Answer(NamedTuple):
    """The answer to a lookup, and how long it took."""

    found: Found
    seconds: float


def hashes(prompt: int, chunks: int) -> list[bytes]:
    """The names of a prompt's chunks."""
    return [hashlib.sha256(f"{prompt} {chunk}".encode()).digest() for chunk in range(chunks)]


def content(chunk_hash: bytes, group_index: int, size: int) -> bytes:
    """The bytes of the object of a name: half bytes, so that a codec can make them fewer."""
    digest = hashlib.shake_128(chunk_hash + bytes([group_index])).digest(size)
    return digest.translate(FEW_VALUES)


class Client:
    """An engine and its worker in one process. A context manager."""

    def __init__(
        self,
        socket_path: str,
        geometry: Geometry = GEOMETRY,
        name: str = "client",
        identity: bytes = IDENTITY,
    ) -> None:
        self.geometry = geometry
        self.link = Link(socket_path, engine_hello(geometry, name, identity), lambda why: None)
        self._replies: list[Reply] = []
        self._ids = 0
        self._arena: Arena | None = None

    def __enter__(self) -> "Client":
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.link.welcome is None:
            self._replies += self.link.poll(time.monotonic())
            if time.monotonic() > deadline:
                raise DaemonUnreachableError("the daemon does not greet")
            self._wait(0.05)
        welcome = self.link.welcome
        self._arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes)
        return self

    def __exit__(self, *exc: object) -> None:
        self.link.close()
        if self._arena is not None:
            self._arena.close()

    @property
    def arena(self) -> Arena:
        """The daemon's memory."""
        assert self._arena is not None
        return self._arena

    def values(self) -> dict[str, float]:
        """The daemon's counters."""
        reply = self._call(Stats(self.new_id()))
        return getattr(reply, "values", {})

    def store(
        self, prompt: int, chunks: int, patience: float = DEADLINE_SECONDS, tenant: int = 0
    ) -> int:
        """Store a prompt. Returns the bytes of its objects. Fails without room in time."""
        names = hashes(prompt, chunks)
        stored = 0
        for index, group in enumerate(self.geometry.groups):
            for chunk, name in enumerate(names):
                size, parts = part_bytes(self.geometry, group, chunk), self.geometry.parts(group)
                if not size:
                    continue
                slot = self.wait_slot(size, parts, patience)
                self.fill(slot, index, name, size, parts)
                packed = pack_slots([slot])
                self.tell(
                    Commit(
                        slots=packed,
                        groups=pack_u64([index]),
                        hashes=name,
                        parents=names[chunk - 1] if chunk else bytes(HASH_BYTES),
                        tenants=pack_u64([tenant]),
                    )
                )
                stored += slot_bytes(size, parts)
        return stored

    def fill(self, ref: SlotRef, index: int, name: bytes, size: int, parts: int) -> None:
        """Write an object into its slot."""
        slot = self.arena.memory[ref.offset : ref.offset + slot_bytes(size, parts)]
        start = payload_offset(parts)
        slot[start : start + size * parts] = content(name, index, size * parts)
        sign(slot, part_digests(slot, size, parts), ref.generation)

    def want(self, size: int, parts: int, count: int) -> list[SlotRef]:
        """Ask for write slots, and return those that are granted."""
        granted = self._call(Reserve(self.new_id(), size, parts, count))
        assert isinstance(granted, Reserved), granted
        return [*unpack_slots(granted.slots)]

    def abandon(self, slots: Sequence[SlotRef]) -> None:
        """Give write slots back unused."""
        packed = pack_slots(slots)
        self.tell(Free(packed))

    def ask(self, prompt: int, chunks: int, wait_ms: int = 0, rate: int = 0) -> int:
        """Send a lookup. Returns its id, which is also that of its lease."""
        number = self.new_id()
        self.tell(Lookup(number, number, b"".join(hashes(prompt, chunks)), wait_ms, rate))
        return number

    def answer(self, number: int, seconds: float = DEADLINE_SECONDS) -> Found:
        """Wait for the last answer to a lookup, and return it."""
        deadline = time.monotonic() + seconds
        while True:
            reply = self._reply(number, deadline)
            if not isinstance(reply, Pending):
                assert isinstance(reply, Found), reply
                return reply

    def look_up(self, prompt: int, chunks: int, wait_ms: int = 0) -> Answer:
        """Do a lookup, prove every byte of its hit, and release its lease."""
        started = time.monotonic()
        number = self.ask(prompt, chunks, wait_ms)
        found = self.answer(number)
        seconds = time.monotonic() - started
        self.prove(found, prompt)
        self.release(number)
        return Answer(found, seconds)

    def release(self, lease: int) -> None:
        """End a lease."""
        self.tell(Release(lease))

    def prove(self, found: Found, prompt: int) -> None:
        """Every slot of an answer has the bytes of its name, signed. Raises AssertionError."""
        names = hashes(prompt, found.depth)
        slots = [*unpack_slots(found.slots)]
        for index, group in enumerate(self.geometry.groups):
            for chunk in needed_chunks(self.geometry, group, found.depth) if found.depth else ():
                offset, generation = slots.pop(0)
                size, parts = part_bytes(self.geometry, group, chunk), self.geometry.parts(group)
                slot = self.arena.memory[offset : offset + slot_bytes(size, parts)]
                where = f"prompt {prompt} chunk {chunk} group {index}"
                start = payload_offset(parts)
                right = slot[start : start + size * parts] == content(
                    names[chunk], index, size * parts
                )
                assert right, f"{where} has wrong bytes"
                assert is_signed(slot, part_digests(slot, size, parts), generation), (
                    f"{where} is not signed"
                )
        assert not slots, "an answer has just the slots that it needs"

    def wait_slot(self, size: int, parts: int, patience: float) -> SlotRef:
        """Return a write slot. Fails where none is granted in `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            slots = self.want(size, parts, 1)
            if slots:
                return slots[0]
            assert time.monotonic() < deadline, "no write slot"

    def new_id(self) -> int:
        """Return a number for a message."""
        self._ids += 1
        return self._ids

    def _call(self, request: Request) -> Reply:
        self.tell(request)
        return self._reply(getattr(request, "id", 0), time.monotonic() + DEADLINE_SECONDS)

    def tell(self, request: Request) -> None:
        if not self.link.send(request, time.monotonic()):
            raise DaemonUnreachableError("the daemon is gone")

    def _reply(self, number: int, deadline: float) -> Reply:
        while True:
            for at, reply in enumerate(self._replies):
                if reply.id == number:
                    return self._replies.pop(at)
            self._replies += self.link.poll(time.monotonic())
            if self.link.fd is None and not self._replies:
                raise DaemonUnreachableError("the daemon is gone")
            if not any(reply.id == number for reply in self._replies):
                assert time.monotonic() < deadline, "no answer in time"
                self._wait(0.02)

    def _wait(self, seconds: float) -> None:
        fds = [self.link.fd] if self.link.fd is not None else []
        select.select(fds, [], [], seconds)


def stats(socket_path: str) -> dict[str, float]:
    """A daemon's counters."""
    with ControlClient(socket_path) as control:
        return control.stats().values


def is_written(socket_path: str) -> bool:
    """Return True where every stored object is written to the directory, or refused by it."""
    with contextlib.suppress(DaemonUnreachableError):
        values = stats(socket_path)
        done = sum(values.get(f"{DISK}objects_{what}", 0.0) for what in ("written", "refused"))
        return not values["writes_waiting"] and done >= values.get("objects_stored", 0.0)
    return False


def object_files(root: Path) -> list[Path]:
    """The records of a directory."""
    return sorted(root.glob("objects/*/??/*"))


def real_bytes(root: Path) -> int:
    """The bytes that the objects of a directory take, also those that are being written."""
    blocks = 0
    for path in [*root.glob("objects/*/??/*"), *root.glob("objects/*/tmp/*/*")]:
        with contextlib.suppress(FileNotFoundError):
            blocks += path.stat().st_blocks
    return blocks * 512
