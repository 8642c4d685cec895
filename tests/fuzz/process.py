"""Lies over the real socket of a real daemon; a good client must notice nothing."""

import contextlib
import multiprocessing
import random
import select
import socket
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from hybridkv.client.control import ControlClient
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.packed import SLOT_BYTES, pack_u64, unpack_slots
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.shm.arena import attach_arena
from hybridkv.shm.slots import HEADER_BYTES, SlotState, unpack_header
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Error,
    Found,
    Hello,
    Lookup,
    Release,
    Reserve,
    Reserved,
    geometry_to_wire,
)
from hybridkv.wire.protocol import CLOSING
from tests.fuzz.liar import KINDS, Liar, Line
from tests.layouts import LAYOUTS
from tests.waiting import DEADLINE_SECONDS

GEOMETRY = LAYOUTS["qwen3"]
PART = GEOMETRY.groups[0].block_bytes
GOOD = Hello(
    id=1,
    version=PROTOCOL_VERSION,
    role="engine",
    engine_id="good",
    namespace=b"g" * HASH_BYTES,
    geometry=geometry_to_wire(GEOMETRY),
)
HELD = ("sessions", "leases", "bytes_writing", "connections")
"""The daemon's values of what clients hold."""


class ProcessFuzz:
    """Liars and a good client of one process. Raises AssertionError on the daemon's faults."""

    def __init__(self, seed: int, daemon: DaemonProcess) -> None:
        self._seed = seed
        self._daemon = daemon
        self.seen: Counter[str] = Counter()
        """How often each reply came, by its type, and each refusal, by its code."""

    def run(self, cases: int) -> None:
        """Send `cases` pieces of bytes, then ask as the good client."""
        with ControlClient(self._daemon.socket_path, DEADLINE_SECONDS, GOOD) as good:
            _store(good, 3, first=0)
            found = good.call(Lookup(2, 1, _hashes(0, 3)))
            assert isinstance(found, Found)
            assert found.chunks == 3
            granted = _grant(good, 2)
            before = good.stats().values
            # In a process of their own: what an engine's workers hold ends with their process.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
                self.seen += elsewhere.submit(
                    _lie, self._daemon.socket_path, self._seed, cases
                ).result()
            self._await_settled(good, before)
            self._check_held(good, found, SlotState.COMMITTED, SlotState.DROPPED)
            self._check_held(good, granted, SlotState.WRITING)
            good.tell(Release(1))
            good.tell(Commit(granted.slots, pack_u64([0, 0]), _hashes(100, 2)))
            again = good.call(Lookup(3, 2, _hashes(100, 2)))
            assert isinstance(again, Found)
            assert again.chunks == 2, "read your writes"
            assert again.slots == granted.slots
            values = good.stats().values
        assert "refused_internal" not in values
        assert self._daemon.process is not None
        assert self._daemon.process.poll() is None

    def _await_settled(self, good: ControlClient, before: dict[str, float]) -> None:
        """Wait until the daemon has read the end of every liar's connection."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        values = good.stats().values
        while any(values[name] != before[name] for name in HELD):
            assert time.monotonic() < deadline, {
                name: (before[name], values[name]) for name in HELD
            }
            values = good.stats().values

    def _check_held(self, good: ControlClient, names: Found | Reserved, *states: SlotState) -> None:
        """Check that each slot that the good client holds is in one of `states` in the arena.

        A leased object may be dropped.
        """
        arena = attach_arena(Path(good.welcome.arena_path), good.welcome.arena_bytes)
        for offset, generation in unpack_slots(names.slots):
            header = unpack_header(bytes(arena.memory[offset : offset + HEADER_BYTES]))
            assert header is not None
            assert header.state in states
            assert header.generation == generation
        arena.close()


def _lie(socket_path: str, seed: int, cases: int) -> Counter[str]:
    liars = _Liars(socket_path, seed)
    liars.lie(cases)
    return liars.seen


class _Liars:
    """Liars of every kind in KINDS, a connection each."""

    def __init__(self, socket_path: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._liar = Liar(self._rng)
        self._socket_path = socket_path
        self._ended: set[Line] = set()
        """Connections on which the daemon has sent a reply that closes them."""
        self.seen: Counter[str] = Counter()

    def lie(self, cases: int) -> None:
        """Send `cases` pieces of bytes."""
        with contextlib.ExitStack() as stack:
            lines = [self._open(kind, stack) for kind in range(len(KINDS))]
            for _ in range(cases):
                kind = self._rng.randrange(len(KINDS))
                line = lines[kind]
                is_gone = self._rng.random() < 0.002
                if not is_gone:
                    self._send(line, self._liar.piece(line.peer))
                    self._receive(line)
                    is_gone = line.is_over
                if is_gone or self._rng.random() < line.peer.noise * 0.05:
                    line.sock.close()
                    lines[kind] = self._open(kind, stack)

    def _open(self, kind: int, stack: contextlib.ExitStack) -> Line:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(self._socket_path)
        sock.setblocking(False)
        return Line(sock, self._liar.peer(kind))

    def _send(self, line: Line, piece: bytes) -> None:
        """Send the piece, or as much of it as the daemon takes before it closes."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        line.out += piece
        line.flush()
        while line.out:
            assert time.monotonic() < deadline, "the daemon does not read"
            select.select([line.sock], [line.sock], [], DEADLINE_SECONDS)
            line.flush()

    def _receive(self, line: Line) -> None:
        """Read the replies that are there. A closed connection needs a reason, which comes last."""
        for reply in line.receive():
            assert line not in self._ended, "an answer after the last word"
            code = reply.code if isinstance(reply, Error) else ""
            if code in CLOSING:
                self._ended.add(line)
            self.seen[code or type(reply).__name__] += 1
            self._liar.on_reply(line.peer, reply)
        assert line in self._ended or not line.is_over, "closed without a reason"


def _hashes(first: int, count: int) -> bytes:
    return b"".join(bytes([number]) * HASH_BYTES for number in range(first, first + count))


def _grant(good: ControlClient, count: int) -> Reserved:
    """Reserve `count` slots. A young daemon grants fewer while it reserves pages."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        granted = good.call(Reserve(4, PART, 1, count))
        assert isinstance(granted, Reserved)
        if len(granted.slots) // SLOT_BYTES == count:
            return granted
        assert time.monotonic() < deadline


def _store(good: ControlClient, count: int, first: int) -> None:
    granted = _grant(good, count)
    good.tell(Commit(granted.slots, pack_u64([0] * count), _hashes(first, count)))
