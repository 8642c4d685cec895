"""The daemon's core against a plain model: what may be found, granted and evicted.

The model is a dictionary of objects, who reads them, and what each session holds. Every answer is
foretold, but for the offsets of slots, and which of the unread objects are evicted where room is
needed: see tests/unit/store.
"""

import functools
import hashlib
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.core.coverage import SlotShape, slot_shapes
from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.packed import SlotRef, pack_slots, pack_u64, unpack_slots
from hybridkv.core.policies import EvictionClass, EvictionPolicy
from hybridkv.daemon.handlers import Daemon
from hybridkv.daemon.sessions import RemovedObject
from hybridkv.shm.slots import SLOT_ALIGN, committed_slots, slot_bytes
from hybridkv.shm.trailer import Trailer, trailer_bytes
from hybridkv.store.store import Store
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Clear,
    Commit,
    Done,
    Drained,
    Error,
    Found,
    Free,
    Hello,
    Identify,
    Lookup,
    Release,
    Removed,
    ReportCorrupt,
    Reserve,
    Reserved,
    Stats,
    Subscribe,
    Welcome,
)
from tests.chance import examples
from tests.invariants import check_daemon
from tests.layouts import LAYOUTS, wide
from tests.unit.daemon.harness import engine_hello, make_welcome

PAGES = 48
ARENA = PAGES * SLOT_ALIGN
PROMPTS = 4
CHUNKS = 5
ENGINES = ("a", "b", "c")


class Name(NamedTuple):
    """The name of an object."""

    identity: bytes
    gid: int
    chunk_hash: bytes


class Written(NamedTuple):
    """A slot, and the object that it is to become."""

    ref: SlotRef
    group_index: int
    chunk_hash: bytes


class FreeRun(NamedTuple):
    """Free space: [start, end)."""

    start: int
    end: int


GEOMETRIES = {
    "gemma3": wide(LAYOUTS["gemma3"], 1, 1, 14),
    "qwen3next": wide(LAYOUTS["qwen3next"], 1, 20, 5),
    "odd_window": wide(LAYOUTS["odd_window"], 7, 30, 1),
    "two_ranks_mla": wide(LAYOUTS["two_ranks_mla"], 9, 9),
}
IDENTITIES = {
    bytes([number]) * 32: name for number, name in enumerate(("gemma3", "gemma3", *GEOMETRIES), 1)
}
"""Two identities have one geometry. Each other identity has a geometry of its own."""


def prompt_hashes(prompt: int, chunks: int) -> list[bytes]:
    """Prompts share their first two chunks."""
    return [
        hashlib.sha256(f"{prompt if at >= 2 else 0} {at}".encode()).digest() for at in range(chunks)
    ]


def batched(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 32] for at in range(0, len(hashes), 32)]


PARENTS = {
    chunk: before
    for prompt in range(PROMPTS)
    for before, chunk in zip(
        (bytes(32), *prompt_hashes(prompt, CHUNKS)), prompt_hashes(prompt, CHUNKS), strict=False
    )
}
"""The chunk before each."""


@functools.cache
def read_by(geometry: Geometry, group: Group, chunks: int) -> tuple[int, ...]:
    """Chunks with a block that the token after `chunks` chunks reads, from what each kind means."""
    boundary = chunks * geometry.chunk_tokens
    read = set()
    for start in range(0, boundary, group.tokens_per_block):
        end = start + group.tokens_per_block
        match group.kind:
            case GroupKind.FULL:
                wanted = True
            case GroupKind.SLIDING:
                wanted = any(boundary - token < group.window_tokens for token in range(start, end))
            case GroupKind.CHUNKED_LOCAL:
                window = boundary // group.window_tokens
                wanted = any(token // group.window_tokens == window for token in range(start, end))
            case GroupKind.RECURRENT:
                wanted = end == boundary
        if wanted:
            read.add(start // geometry.chunk_tokens)
    return tuple(sorted(read))


@dataclass(eq=False)
class Object:
    """A slot with an object. `name` is None once only readers keep it."""

    ref: SlotRef
    size: int
    name: Name | None
    readers: int = 0


@dataclass(eq=False)
class Held:
    """One greeting of an engine, and what it holds."""

    engine: str
    identity: bytes
    geometry: Geometry
    leases: dict[int, list[Object]] = field(default_factory=dict)
    writing: dict[SlotRef, SlotShape] = field(default_factory=dict)
    """Shape of each slot that is granted and not committed."""
    believed: set[RemovedObject] | None = None
    """The objects that an engine believes to be there, if it watches."""

    @property
    def writing_bytes(self) -> int:
        return sum(shape_bytes(shape) for shape in self.writing.values())


def shape_bytes(shape: SlotShape) -> int:
    part_bytes, parts = shape
    return slot_bytes(part_bytes, parts)


@dataclass
class Line:
    """A connection."""

    engine: str = ""
    held: Held | None = None
    is_worker: bool = False
    drained: int = 0


class DaemonMachine(RuleBasedStateMachine):
    """Engines come, store, find, load, lie and crash, in any order."""

    @initialize(
        reserved=st.sampled_from((PAGES, PAGES, PAGES // 2)),
        identities=st.lists(
            st.sampled_from(sorted(IDENTITIES)), min_size=1, max_size=3, unique=True
        ),
        policy=st.sampled_from(EvictionPolicy),
        quota=st.sampled_from((None, ARENA // 3, 2 * SLOT_ALIGN)),
    )
    def start(
        self, reserved: int, identities: list[bytes], policy: EvictionPolicy, quota: int | None
    ) -> None:
        self.memory = memoryview(bytearray(ARENA))
        self.trailer = Trailer(memoryview(bytearray(trailer_bytes(ARENA))), ARENA)
        self.trailer.write_fresh()
        self.policy, self.quota = policy, quota
        self.clock = 1 << 40
        self.daemon = self.started()
        self.limit = reserved * SLOT_ALIGN
        self.daemon.store.grow_arena(self.limit)
        self.lines: dict[int, Line] = {}
        self.numbers = 0
        self.sessions: list[Held] = []
        self.index: dict[Name, Object] = {}
        self.unread: dict[SlotRef, Object] = {}
        """Named objects that nobody reads."""
        self.leaving: set[Object] = set()
        """Nameless objects that a session still reads."""
        self.retired: list[SlotRef] = []
        self.generations: set[int] = set()
        self.known: set[bytes] = set()
        self.identities = identities
        for at, name in enumerate(ENGINES):
            self.engine(name, at, at)

    # The daemon's lives

    def started(self) -> Daemon:
        store = Store(self.memory, self.clock, self.trailer, self.policy, self.quota)
        return Daemon(store, make_welcome(ARENA))

    @precondition(lambda self: len(self.index) > 4)
    @rule(step=st.sampled_from((-(1 << 38), -1, 0, 1, 1 << 30)))
    def restart(self, step: int) -> None:
        """Kill the daemon and start it, by a clock that may step back. Its objects stay."""
        self.clock += step
        self.daemon = self.started()
        self.daemon.sessions.recover_sessions(())
        self.retired += [thing.ref for thing in self.leaving]
        self.retired += [ref for held in self.sessions for ref in held.writing]
        self.leaving.clear()
        self.sessions.clear()
        self.lines.clear()
        self.known.clear()
        for thing in self.index.values():
            thing.readers = 0
            self.unread[thing.ref] = thing
        assert self.daemon.view.metric_values().named()["objects_recovered"] == len(self.index)
        for at, name in enumerate(ENGINES):
            self.engine(name, at, at)

    # Connections

    def greet(self, hello: Hello) -> tuple[int, object]:
        self.numbers += 1
        self.lines[self.numbers] = Line()
        self.daemon.sessions.on_connect(self.numbers)
        return self.numbers, self.daemon.handle(self.numbers, hello)

    @rule(name=st.sampled_from(ENGINES), pick=st.integers(0, 2), workers=st.integers(0, 2))
    def engine(self, name: str, pick: int, workers: int) -> None:
        identity = self.identities[pick % len(self.identities)]
        geometry = GEOMETRIES[IDENTITIES[identity]]
        number, reply = self.greet(engine_hello(geometry, name, identity))
        assert isinstance(reply, Welcome)
        held = Held(name, identity, geometry)
        self.sessions.append(held)
        self.known.add(identity)
        self.lines[number] = Line(name, held)
        for _ in range(workers):
            self.connect_client("worker", name)

    @rule(role=st.sampled_from(("worker", "control")), name=st.sampled_from(ENGINES))
    def connect_client(self, role: str, name: str) -> None:
        number, reply = self.greet(Hello(1, PROTOCOL_VERSION, role, name))
        assert isinstance(reply, Welcome)
        self.lines[number].engine = name
        self.lines[number].is_worker = role == "worker"
        refused = self.daemon.handle(number, Lookup(3, 1, b""))
        assert isinstance(refused, Error)
        assert refused.code == "role"

    @rule(pick=st.integers(0, 99), name=st.sampled_from(sorted(GEOMETRIES)))
    def stranger(self, pick: int, name: str) -> None:
        """An identity that is in use is refused to an engine whose objects look otherwise."""
        identity = self.identities[pick % len(self.identities)]
        if identity in self.known and name != IDENTITIES[identity]:
            number, refused = self.greet(engine_hello(GEOMETRIES[name], "stranger", identity))
            assert isinstance(refused, Error)
            assert refused.code == "identity"
            self.close(number)

    @precondition(lambda self: len(self.lines) > 4)
    @rule(pick=st.integers(0, 99))
    def crash(self, pick: int) -> None:
        self.close(sorted(self.lines)[pick % len(self.lines)])

    def close(self, number: int) -> None:
        self.daemon.on_disconnect(number)
        name = self.lines.pop(number).engine
        self.retire(name)

    def retire(self, name: str) -> None:
        """A session without a connection ends when no worker of the engine can copy for it."""
        lines = [line for line in self.lines.values() if line.engine == name]
        if any(line.is_worker and not line.drained for line in lines):
            return
        open_ones = [line.held for line in lines]
        for held in [
            held for held in self.sessions if held.engine == name and held not in open_ones
        ]:
            for lease in list(held.leases):
                self.end_lease(held, lease)
            self.retired += held.writing
            self.sessions.remove(held)

    @rule(pick=st.integers(0, 99))
    def drain(self, pick: int) -> None:
        """A worker copies nothing any more that was planned before. Greetings have number 0."""
        workers = [number for number, line in sorted(self.lines.items()) if line.is_worker]
        if workers:
            number = workers[pick % len(workers)]
            assert self.daemon.handle(number, Drained(1)) is None
            self.lines[number].drained = 1
            self.retire(self.lines[number].engine)

    def pick_engine(self, pick: int) -> tuple[int, Held] | None:
        engines = [
            (number, line.held)
            for number, line in sorted(self.lines.items())
            if line.held is not None
        ]
        return engines[pick % len(engines)] if engines else None

    # Stores

    def ranges(self) -> dict[int, int]:
        """Sizes of slots by offset, as far as the model knows them."""
        objects = [*self.index.values(), *self.leaving]
        sizes = {thing.ref.offset: thing.size for thing in objects}
        for held in self.sessions:
            sizes |= {ref.offset: shape_bytes(shape) for ref, shape in held.writing.items()}
        return sizes

    def free_runs(self) -> list[FreeRun]:
        runs, at = [], 0
        for offset, size in [*sorted(self.ranges().items()), (self.limit, 0)]:
            assert at <= offset, "two slots at one place"
            if offset > at:
                runs.append(FreeRun(at, offset))
            at = offset + size
        return runs

    def want(self, number: int, held: Held, shape: SlotShape, count: int) -> list[SlotRef]:
        part_bytes, parts = shape
        size = slot_bytes(part_bytes, parts)
        bound = min(
            ARENA // 4 - held.writing_bytes,
            ARENA // 2 - sum(session.writing_bytes for session in self.sessions),
        )
        allowed = min(count, max(0, bound) // size)
        fits = sum((end - start) // size for start, end in self.free_runs())
        evicted = self.daemon.store.evicted
        granted = self.daemon.handle(number, Reserve(9, part_bytes, parts, count))
        assert isinstance(granted, Reserved)
        assert granted.reserved_bytes == self.limit
        evicted = self.daemon.store.evicted - evicted
        refs = [*unpack_slots(granted.slots)]
        if fits >= allowed or self.limit < ARENA:
            assert (len(refs), evicted) == (min(fits, allowed), 0), (
                "evicted without need, or granted too little"
            )
        assert len(refs) <= allowed
        assert evicted <= len(self.unread), "what is read or written was evicted"
        gone = self.lose_what_went()
        assert len(gone) == evicted
        free = self.free_runs()
        if len(refs) < allowed and self.limit == ARENA:
            longest = max((end - start for start, end in free), default=0) if not refs else 0
            assert longest < size, "granted too little"
            in_the_way = len(self.ranges()) - len(self.unread)
            assert in_the_way or not self.unread, "more could have been evicted"
        for ref in refs:
            assert ref.generation not in self.generations, "a generation is given once"
            self.generations.add(ref.generation)
            end = ref.offset + size
            assert any(run.start <= ref.offset and end <= run.end for run in free), (
                "a slot that is in use"
            )
            held.writing[ref] = shape
        self.free_runs()
        return refs

    @rule(pick=st.integers(0, 99), shape=st.integers(0, 99), count=st.integers(0, 30))
    def ask_for_slots(self, pick: int, shape: int, count: int) -> None:
        chosen = self.pick_engine(pick)
        if chosen is None:
            return
        number, held = chosen
        shapes = [
            shape for group in held.geometry.groups for shape in slot_shapes(held.geometry, group)
        ]
        self.want(number, held, shapes[shape % len(shapes)], count)
        refused = self.daemon.handle(number, Reserve(9, 12345, 1, 1))
        assert isinstance(refused, Error)
        assert refused.code == "part_bytes"

    def lose_what_went(self) -> list[Object]:
        """Find the unread objects that the daemon evicted, and take their names away."""
        there = {(offset, header.generation) for offset, header in committed_slots(self.memory)}
        gone = [thing for ref, thing in self.unread.items() if ref not in there]
        for thing in gone:
            self.lose_name(thing)
        return gone

    def commit(self, number: int, held: Held, batch: list[Written], mix: random.Random) -> None:
        """A batch is committed in order. With one wrong group nothing of it is done."""
        parents = [
            mix.choice((PARENTS[written.chunk_hash],) * 60 + tuple(PARENTS)) for written in batch
        ]
        tenants = [mix.choice((0, 0, 1, 2)) for _ in batch]
        indices = [written.group_index for written in batch]
        if len(set(indices)) == 1 and mix.random() < 0.5:
            # A connector sends once what all objects have in common.
            indices, tenants = indices[:1], tenants[:1]
            parents = parents[:1]
        packed = pack_slots(written.ref for written in batch)
        has_parents, has_classes = mix.random() < 0.9, mix.random() < 0.5
        classes = mix.choices(list(EvictionClass), k=len(batch)) if has_classes else []
        reply = self.daemon.handle(
            number,
            Commit(
                slots=packed,
                groups=pack_u64(indices),
                hashes=b"".join(written.chunk_hash for written in batch),
                parents=b"".join(parents) if has_parents else b"",
                classes=bytes(classes),
                tenants=pack_u64(tenants) if any(tenants) else b"",
            ),
        )
        if held.believed is not None:
            held.believed |= {
                RemovedObject(chunk, at) for _, at, chunk in batch if at < len(held.geometry.groups)
            }
        groups = held.geometry.groups
        if any(
            ref in held.writing
            and (
                at >= len(groups) or held.writing[ref] not in slot_shapes(held.geometry, groups[at])
            )
            for ref, at, _ in batch
        ):
            assert isinstance(reply, Error)
            assert reply.code == "commit"
            if held.believed is not None:
                held.believed.clear()
            return
        assert reply is None
        names_before = set(self.index)
        bounded = self.quota is not None and any(tenants)
        assert not self.lose_what_went() or bounded, (
            "only a quota makes others go when something becomes an object"
        )
        there = {(offset, header.generation) for offset, header in committed_slots(self.memory)}
        kept: set[Name] = set()
        for ref, at, chunk in batch:
            shape = held.writing.pop(ref, None)
            if shape is None:
                continue
            name = Name(held.identity, groups[at].gid, chunk)
            if ref in there:
                assert name not in self.index, "one name, two objects"
                self.unread[ref] = self.index[name] = Object(ref, shape_bytes(shape), name)
            else:
                assert bounded or name in self.index, (
                    "only a quota, or what is there already, keeps an object out"
                )
                assert bounded or name in names_before | kept
                self.retired.append(ref)
            kept.add(name)

    @rule(
        pick=st.integers(0, 99),
        prompt=st.integers(0, PROMPTS - 1),
        chunks=st.integers(1, CHUNKS),
        mix=st.randoms(use_true_random=False),
        leave_out=st.sampled_from((0, 0, 0, 1, 3)),
    )
    def store_prompt(
        self, pick: int, prompt: int, chunks: int, mix: random.Random, leave_out: int
    ) -> None:
        """Reserve slots, write them and commit them in any order, as a connector does."""
        chosen = self.pick_engine(pick)
        if chosen is None:
            return
        number, held = chosen
        batch: list[Written] = []
        for at, group in enumerate(held.geometry.groups):
            shapes = slot_shapes(held.geometry, group)
            for kind, shape in enumerate(shapes):
                hashes = prompt_hashes(prompt, chunks)[kind :: len(shapes)]
                used = [ref for ref, _, _ in batch]
                spare = [
                    ref for ref, its in held.writing.items() if its == shape and ref not in used
                ]
                refs = spare + self.want(number, held, shape, max(0, len(hashes) - len(spare)))
                batch += [Written(ref, at, chunk) for ref, chunk in zip(refs, hashes, strict=False)]
        mix.shuffle(batch)
        self.commit(number, held, batch[leave_out:], mix)

    def any_ref(self, mix: random.Random) -> SlotRef:
        """A slot of anybody, of an earlier life, or of nobody."""
        everything = [
            *(ref for held in self.sessions for ref in held.writing),
            *(thing.ref for thing in self.index.values()),
            *self.retired[-5:],
        ]
        if not everything or mix.random() < 0.1:
            return SlotRef(mix.randrange(PAGES) * SLOT_ALIGN, mix.randrange(1 << 33))
        offset, generation = mix.choice(everything)
        return SlotRef(offset, generation + mix.choice((0, 0, 0, 1)))

    @rule(pick=st.integers(0, 99), mix=st.randoms(use_true_random=False), size=st.integers(0, 6))
    def commit_anything(self, pick: int, mix: random.Random, size: int) -> None:
        """Commit foreign, stale and invented slots, twice: only an own slot becomes an object."""
        chosen = self.pick_engine(pick)
        if chosen is None:
            return
        number, held = chosen
        batch = [
            Written(
                self.any_ref(mix),
                mix.randrange(len(held.geometry.groups) + 1),
                mix.choice(prompt_hashes(mix.randrange(PROMPTS), CHUNKS)),
            )
            for _ in range(size)
        ]
        self.commit(number, held, batch + batch[:1], mix)

    @rule(pick=st.integers(0, 99), mix=st.randoms(use_true_random=False), size=st.integers(0, 6))
    def abandon(self, pick: int, mix: random.Random, size: int) -> None:
        chosen = self.pick_engine(pick)
        if chosen is None:
            return
        number, held = chosen
        refs = [self.any_ref(mix) for _ in range(size)] + list(held.writing)[:2]
        packed = pack_slots(refs)
        self.daemon.handle(number, Free(packed))
        for ref in refs:
            if held.writing.pop(ref, None) is not None:
                self.retired.append(ref)

    # Loads

    @rule(
        pick=st.integers(0, 99),
        prompt=st.integers(0, PROMPTS - 1),
        chunks=st.integers(0, CHUNKS),
        lease=st.integers(1, 5),
    )
    def lookup(self, pick: int, prompt: int, chunks: int, lease: int) -> None:
        chosen = self.pick_engine(pick)
        if chosen is None:
            return
        number, held = chosen
        hashes = prompt_hashes(prompt, chunks)
        found = self.daemon.handle(number, Lookup(5, lease, b"".join(hashes)))
        if lease in held.leases:
            assert isinstance(found, Error)
            assert found.code == "lease"
            return
        assert isinstance(found, Found)
        geometry, identity = held.geometry, held.identity
        there = {(name.gid, name.chunk_hash) for name in self.index if name.identity == identity}
        masks = [
            bytes((group.gid, chunk) in there for chunk in hashes) for group in geometry.groups
        ]
        assert found.masks == masks, "what is there is what was committed and not lost"
        if held.believed is not None:
            held.believed |= {
                RemovedObject(chunk, at)
                for at, mask in enumerate(masks)
                for chunk, is_there in zip(hashes, mask, strict=True)
                if is_there
            }
        hit = 0
        for boundary in range(chunks, 0, -1):
            needs = [read_by(geometry, group, boundary) for group in geometry.groups]
            if all(mask[at] for mask, need in zip(masks, needs, strict=True) for at in need):
                hit = boundary
                break
        assert found.chunks == hit, "the largest boundary at which nothing is missing"
        names = [
            Name(identity, group.gid, hashes[at])
            for group in geometry.groups
            for at in (read_by(geometry, group, hit) if hit else ())
        ]
        objects = [self.index[name] for name in names]
        refs = [*unpack_slots(found.slots)]
        assert refs == [thing.ref for thing in objects]
        if hit:
            held.leases[lease] = objects
            for thing in objects:
                thing.readers += 1
                self.unread.pop(thing.ref, None)

    @rule(pick=st.integers(0, 99), lease=st.integers(1, 5))
    def release(self, pick: int, lease: int) -> None:
        chosen = self.pick_engine(pick)
        if chosen is None:
            return
        number, held = chosen
        assert self.daemon.handle(number, Release(lease)) is None
        self.end_lease(held, lease)

    def end_lease(self, held: Held, lease: int) -> None:
        for thing in reversed(held.leases.pop(lease, [])):
            thing.readers -= 1
            if not thing.readers and thing.name is not None:
                self.unread[thing.ref] = thing
            elif not thing.readers:
                self.leaving.remove(thing)
                self.retired.append(thing.ref)

    @rule(
        picks=st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, PROMPTS - 1), st.integers(1, 5)), max_size=8
        ),
        mix=st.randoms(use_true_random=False),
    )
    def requests(self, picks: list[tuple[int, int, int]], mix: random.Random) -> None:
        """Requests that look up, store and release. With lease 5 the lease stays."""
        for pick, prompt, lease in picks:
            self.lookup(pick, prompt, CHUNKS, lease)
            self.store_prompt(pick, prompt, CHUNKS, mix, 0)
            if lease != 5:
                self.release(pick, lease)

    # Losses

    def lose_name(self, thing: Object) -> None:
        assert thing.name is not None
        del self.index[thing.name]
        thing.name = None
        self.unread.pop(thing.ref, None)
        if thing.readers:
            self.leaving.add(thing)
        else:
            self.retired.append(thing.ref)

    @rule(pick=st.integers(0, 99), mix=st.randoms(use_true_random=False), size=st.integers(0, 3))
    def condemn(self, pick: int, mix: random.Random, size: int) -> None:
        chosen = self.pick_engine(pick)
        if chosen is None:
            return
        refs = [self.any_ref(mix) for _ in range(size)]
        packed = pack_slots(refs)
        self.daemon.handle(chosen[0], ReportCorrupt(packed))
        for thing in [thing for thing in self.index.values() if thing.ref in refs]:
            self.lose_name(thing)

    @precondition(
        lambda self: any(line.engine for line in self.lines.values()) and len(self.index) > 12
    )
    @rule(pick=st.integers(0, 99))
    def clear(self, pick: int) -> None:
        greeted = [number for number, line in sorted(self.lines.items()) if line.engine]
        assert self.daemon.handle(greeted[pick % len(greeted)], Clear(4)) == Done(
            4, len(self.index)
        )
        for thing in list(self.index.values()):
            self.lose_name(thing)

    @rule(pick=st.integers(0, 99), to=st.integers(0, 99))
    def identify(self, pick: int, to: int) -> None:
        chosen = self.pick_engine(pick)
        if chosen is None:
            return
        number, held = chosen
        identity = self.identities[to % len(self.identities)]
        fits = GEOMETRIES[IDENTITIES[identity]] == held.geometry
        if not fits and identity not in self.known:
            return
        reply = self.daemon.handle(number, Identify(4, identity))
        if not fits:
            assert isinstance(reply, Error)
            assert reply.code == "identify"
            self.close(number)
        else:
            assert reply == Done(4, 0)
            self.known.add(identity)
            held.identity = identity
            if held.believed is not None:
                held.believed.clear()

    @rule(pages=st.integers(1, PAGES))
    def reserve(self, pages: int) -> None:
        """More pages exist. Their number never shrinks."""
        self.limit = max(self.limit, pages * SLOT_ALIGN)
        self.daemon.store.grow_arena(self.limit)

    # Reports of removed objects

    @rule(pick=st.integers(0, 99))
    def watch(self, pick: int) -> None:
        chosen = self.pick_engine(pick)
        if chosen is not None:
            assert self.daemon.handle(chosen[0], Subscribe()) is None
            chosen[1].believed = set()

    @rule()
    def tick(self) -> None:
        """The end of one of the loop's turns."""
        self.daemon.tick(0.0)
        while self.daemon.outgoing:
            number, removed = self.daemon.outgoing.popleft()
            assert isinstance(removed, Removed)
            held = self.lines[number].held if number in self.lines else None
            if held is not None:
                assert held.believed is not None, "who does not watch is told nothing"
                held.believed -= set(
                    map(
                        RemovedObject._make,
                        zip(batched(removed.hashes), removed.groups, strict=True),
                    )
                )

    @rule(pick=st.integers(0, 99))
    def hear(self, pick: int) -> None:
        """An engine that has all Removed messages expects no object that is not there."""
        chosen = self.pick_engine(pick)
        if chosen is None or chosen[1].believed is None:
            return
        number, held = chosen
        self.daemon.handle(number, Stats(4))
        self.tick()
        groups = {group.gid: at for at, group in enumerate(held.geometry.groups)}
        there = {
            RemovedObject(name.chunk_hash, groups[name.gid])
            for name in self.index
            if name.identity == held.identity
        }
        assert held.believed is not None
        assert held.believed <= there

    # Always

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "daemon"):
            return
        check_daemon(self.daemon)
        values = self.daemon.view.metric_values().named()
        assert values["sessions"] == len(self.sessions)
        assert values["leases"] == sum(len(held.leases) for held in self.sessions)
        assert values["connections"] == len(self.lines)
        assert (
            values["bytes_writing"]
            == sum(held.writing_bytes for held in self.sessions)
            <= ARENA // 2
        )
        assert all(held.writing_bytes <= ARENA // 4 for held in self.sessions)
        kept = [*self.index.values(), *self.leaving]
        assert values["bytes_committed"] == sum(thing.size for thing in kept)
        assert values["objects"] == len(kept)
        assert len(self.leaving) + len(self.unread) + sum(
            t.readers > 0 for t in self.index.values()
        ) == len(kept)
        walked = {
            (offset, header.generation): header for offset, header in committed_slots(self.memory)
        }
        assert set(walked) == {thing.ref for thing in self.index.values()}
        for (identity, gid, chunk), thing in self.index.items():
            header = walked[thing.ref]
            assert (header.namespace, header.gid, header.chunk_hash) == (identity, gid, chunk)

    def teardown(self) -> None:
        """All connections end. Nothing is held, and all stored objects are still there."""
        if not hasattr(self, "daemon"):
            return
        for pick in range(len(self.lines)):
            self.hear(pick)
        for number in sorted(self.lines):
            self.close(number)
        self.holds()
        values = self.daemon.view.metric_values().named()
        assert not any(
            values[name] for name in ("sessions", "leases", "connections", "bytes_writing")
        )
        assert not self.leaving
        free = self.daemon.store.extents.free_bytes
        assert free == self.limit - sum(thing.size for thing in self.index.values())
        for at in range(len(self.identities)):
            self.engine("late", at, 0)
            for prompt in range(PROMPTS):
                self.lookup(len(self.sessions) - 1, prompt, CHUNKS, prompt + 1)


DaemonMachine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=80)
TestDaemon = DaemonMachine.TestCase
