"""Clients beside the engines: an operator, a seeker of what is in tiers, and liars."""

from collections import deque
from collections.abc import Callable, Sequence

from hybridkv.core.coverage import largest_hit
from hybridkv.core.geometry import Geometry
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Clear,
    Done,
    Engines,
    Error,
    Explain,
    Explained,
    Found,
    Hello,
    Identify,
    ListEngines,
    Lookup,
    Release,
    Report,
    Stats,
    geometry_to_wire,
)
from hybridkv.wire.protocol import ConnectionState
from tests.daemonsim.callers import Caller, Client, Scene, named
from tests.daemonsim.oracle import PROMPTS, Copy, prompt_hashes, sizes
from tests.daemonsim.sockets import SimProcess
from tests.daemonsim.system import SOCKET_PATH
from tests.fuzz.liar import KINDS, Liar, Line

LIARS = 5
"""Liars of a seed, each of another kind."""
PIECES_MAX = 5
"""What a liar sends at once."""


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


class Liars(Client):
    """Clients in one process that say anything: those of `tests.fuzz.liar`."""

    def __init__(self, scene: Scene, process: SimProcess, engine_ids: Sequence[str]) -> None:
        """`engine_ids` are engines that do not lie."""
        super().__init__(scene, process)
        self._liar = Liar(self.rng, engine_ids)
        self._kinds = self.rng.sample(range(len(KINDS)), LIARS)
        self._lines: dict[int, Line] = {}
        """Open connections, by the index of their kind in KINDS."""

    def step(self) -> None:
        """A few pieces of bytes."""
        if self.scene.calm:
            for kind in list(self._lines):
                self._hang_up(kind)
            return
        server = self.scene.system.server
        if server is not None and server.daemon.store.slots:
            slot = self.rng.choice(list(server.daemon.store.slots.values()))
            self._liar.learn_slot(slot.offset, slot.generation)
        kind = self.rng.choice(self._kinds)
        line = self._lines.get(kind) or self._connect(kind)
        if line is not None:
            self._speak(line)
            # The rest of a broken frame would be taken from those that follow.
            hangs_up = 0.1 if line.out else 0.005 + line.peer.noise * 0.3
            if line.is_over or self.rng.random() < hangs_up:
                self._hang_up(kind)

    def _connect(self, kind: int) -> Line | None:
        sock = self.scene.system.new_socket()
        try:
            sock.connect(str(SOCKET_PATH))
        except OSError:
            sock.close()
            return None
        self._lines[kind] = Line(sock, self._liar.peer(kind))
        return self._lines[kind]

    def _speak(self, line: Line) -> None:
        if not line.out and not line.is_greeting:
            line.is_greeting = line.peer.state is ConnectionState.NEW
            for _ in range(1 if line.is_greeting else self.rng.randrange(1, PIECES_MAX + 1)):
                line.out += self._liar.piece(line.peer)
                self.scene.counts["lies"] += 1
        line.flush()
        for reply in line.receive():
            line.is_greeting = False
            self._liar.on_reply(line.peer, reply)
            what = reply.code if isinstance(reply, Error) else type(reply).__name__
            self.scene.counts[f"liar_heard_{what}"] += 1
            self.scene.counts["liar_hits"] += isinstance(reply, Found) and reply.chunks > 0

    def _hang_up(self, kind: int) -> None:
        self._lines.pop(kind).sock.close()
