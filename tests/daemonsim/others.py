"""Clients beside the engines: an operator, a seeker of what is in tiers, and a liar."""

from collections import deque
from collections.abc import Callable

from hybridkv.core.coverage import largest_hit, slot_shapes
from hybridkv.core.geometry import Geometry
from hybridkv.core.packed import pack_u64
from hybridkv.wire.codec import Frames, decode_reply, encode
from hybridkv.wire.messages import (
    NEVER,
    PROTOCOL_VERSION,
    Clear,
    Commit,
    Done,
    Drained,
    Engines,
    Explain,
    Explained,
    Found,
    Free,
    Hello,
    Identify,
    ListEngines,
    Lookup,
    Release,
    Report,
    ReportCorrupt,
    Request,
    Reserve,
    Stats,
    geometry_to_wire,
)
from tests.daemonsim.callers import Caller, Client, Ref, Scene, named, packed_of
from tests.daemonsim.oracle import PROMPTS, Copy, prompt_hashes, sizes
from tests.daemonsim.sockets import SimProcess, SimSocket
from tests.daemonsim.system import SOCKET_PATH


class Operator(Client):
    """Someone with `hybridkv stats`, `explain` and `clear`."""

    def __init__(self, scene: Scene, process: SimProcess, clears: bool) -> None:
        super().__init__(scene, process)
        self._clears = clears
        self.calls = Caller(scene, Hello(1, PROTOCOL_VERSION, "control"), lambda: None)

    def step(self) -> None:
        """Ask something."""
        self.calls.poll()
        if self.scene.calm or self.rng.random() < 0.8:
            return
        what = self.rng.randrange(8)
        if what < 2:
            self.calls.ask(Stats, Report)
        elif what < 4:
            self.calls.ask(ListEngines, Engines)
        elif what < 7 or not self._clears:
            self.calls.ask(
                lambda number: Explain(number, f"request {self.rng.randrange(9)}"), Explained
            )
        elif self.calls.ask(Clear, Done):
            self.scene.counts["clears"] += 1


class Seeker(Client):
    """An engine that comes when RAM is empty: all that is sound in tiers must be promoted."""

    TRIES = 14
    """Each puts aside what was damaged on the way."""

    def __init__(
        self,
        scene: Scene,
        process: SimProcess,
        geometry: Geometry,
        identities: list[bytes],
        expects: Callable[[Geometry, bytes, tuple[bytes, ...]], list[bytes]],
    ) -> None:
        """`expects` says what is sound in tiers now, as masks."""
        super().__init__(scene, process)
        self._geometry = geometry
        self._expects = expects
        self._todo = deque(
            (identity, prompt) for identity in identities for prompt in range(PROMPTS)
        )
        self._identity = identities[0]
        hello = Hello(
            1, PROTOCOL_VERSION, "engine", "seeker", self._identity, geometry_to_wire(geometry)
        )
        self._calls = Caller(scene, hello, lambda: None)
        self._lease = 0
        self._tries = 0
        self._has_no_room = False
        self._before: list[bytes] = []

    @property
    def is_done(self) -> bool:
        """Whether every prompt came up as far as it could."""
        return not self._todo

    def step(self) -> None:
        """Look up what comes next, or take the answer."""
        for reply in self._calls.poll():
            if isinstance(reply, Found):
                self._take(reply)
        if self._todo and self._calls.link.welcome is not None and not self._calls.waits:
            identity, prompt = self._todo[0]
            if identity != self._identity:
                self._identity = identity
                self._calls.ask(lambda number: Identify(number, identity), Done)
            self._before = self._expects(self._geometry, identity, prompt_hashes(prompt))
            self._lease += 1
            hashes = b"".join(prompt_hashes(prompt))
            self._calls.ask(lambda number: Lookup(number, self._lease, hashes, 20_000), Found)

    def _take(self, found: Found) -> None:
        identity, prompt = self._todo[0]
        hashes = prompt_hashes(prompt)
        books = self.scene.books
        books.found(self._geometry, identity, hashes, found.masks, found.chunks)
        welcome = self._calls.link.welcome
        assert welcome is not None
        file = self.scene.system.paths[welcome.arena_path]
        for ref, index, chunk in named(self._geometry, found):
            size, parts = sizes(self._geometry, index, chunk)
            name = identity, self._geometry.groups[index].gid, hashes[chunk]
            for part in range(parts):
                books.shown(Copy(file, *ref, name, part, parts, size, True, welcome.boot))
        self._calls.tell(Release(self._lease))
        after = self._expects(self._geometry, identity, hashes)
        both = [bytes(map(min, one, other)) for one, other in zip(self._before, after, strict=True)]
        expected = largest_hit(self._geometry, both, len(hashes))
        self.scene.counts["chunks_sought"] += sum(found.tiers.values())
        assert found.why != "it was not read in time", (
            "nothing goes on for a lookup that waits for others"
        )
        self._tries += 1
        self._has_no_room |= found.why.startswith("RAM has room for ")
        if found.chunks < expected and self._tries < self.TRIES:
            return
        if self._has_no_room and found.chunks < expected:
            # One lookup's room may be what another one had, in whichever try.
            self.scene.counts["seeks_without_room"] += 1
        else:
            assert found.chunks >= expected, (
                f"{found.chunks} of {expected} chunks come up: {found.why}"
            )
            self.scene.counts["seeks"] += 1
            self.scene.counts["chunks_expected"] += expected
        self._todo.popleft()
        self._tries, self._has_no_room = 0, False


class Liar(Client):
    """A client that says anything: true messages with false contents, and arbitrary bytes."""

    def __init__(
        self, scene: Scene, process: SimProcess, engine_ids: list[str], geometry: Geometry
    ) -> None:
        super().__init__(scene, process)
        self._engine_ids = engine_ids
        self._geometry = geometry
        self._sock: SimSocket | None = None
        self._frames = Frames()

    def step(self) -> None:
        """A lie."""
        system, rng = self.scene.system, self.rng
        if self._sock is None:
            if self.scene.calm:
                return
            sock = system.new_socket()
            try:
                sock.connect(str(SOCKET_PATH))
            except OSError:
                sock.close()
                return
            self._sock, self._frames = sock, Frames()
        raw = b"".join(encode(self._lie()) for _ in range(rng.randrange(1, 4)))
        if rng.random() < 0.1:
            raw = raw[: rng.randrange(len(raw))] + rng.randbytes(rng.randrange(1, 40))
        try:
            self._sock.send(raw)
            for body in self._frames.feed(self._sock.recv(1 << 16)):
                decode_reply(body)
            self.scene.counts["lies"] += 1
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()
        if self.scene.calm or rng.random() < 0.05:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _lie(self) -> Request:
        rng = self.rng
        engine_id = rng.choice((*self._engine_ids, "liar"))
        role = "engine" if engine_id == "liar" and rng.random() < 0.7 else "worker"
        geometry = geometry_to_wire(self._geometry)
        session = rng.choice((0, 1, 5, 1 << 40, NEVER))
        refs = [self._ref() for _ in range(rng.randrange(4))]
        offsets, generations = packed_of(refs)
        groups = pack_u64([rng.randrange(4) for _ in refs])
        hashes = b"".join(rng.choice(prompt_hashes(rng.randrange(PROMPTS))) for _ in refs)
        shape = rng.choice(
            [
                shape
                for group in self._geometry.groups
                for shape in slot_shapes(self._geometry, group)
            ]
        )
        return rng.choice(
            (
                Hello(1, PROTOCOL_VERSION, role, engine_id, b"liar" * 8, geometry, session=session),
                Hello(1, rng.randrange(3), "control"),
                Drained(session),
                Lookup(
                    2,
                    rng.randrange(3),
                    hashes[: rng.choice((None, 5))],
                    *rng.choice(((), (1, 1), (30_000, 0))),
                ),
                Reserve(3, *shape, rng.randrange(3)),
                Commit(offsets, generations, groups, hashes),
                Free(offsets, generations[: rng.choice((None, 5))]),
                Release(rng.randrange(3)),
                ReportCorrupt(*packed_of(refs[:1])) if rng.random() < 0.2 else Stats(4),
                Identify(5, b"rail" * 8),
            )
        )

    def _ref(self) -> Ref:
        """A slot of somebody, as it may have been overheard."""
        server = self.scene.system.server
        if server is None or not server.daemon.store.slots:
            return 0, 1
        slot = self.rng.choice(list(server.daemon.store.slots.values()))
        return slot.offset, slot.generation
