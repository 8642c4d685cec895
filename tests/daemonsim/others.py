"""Clients beside the engines: an operator, a seeker of objects in tiers, and liars."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hybridkv.core.coverage import largest_hit
from hybridkv.core.geometry import Geometry
from hybridkv.core.selection import HeldObject
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Clear,
    Done,
    Engines,
    Error,
    Explain,
    Explained,
    Forget,
    Forgotten,
    Found,
    Hello,
    Identify,
    ListEngines,
    ListObjects,
    Lookup,
    ObjectPage,
    Pin,
    Pinned,
    Prefetch,
    QuotaReport,
    Release,
    Report,
    SetQuota,
    Stats,
)
from hybridkv.wire.protocol import ConnectionState
from tests.daemonsim.callers import Caller, Client, Scene, needed_slots
from tests.daemonsim.oracle import PROMPTS, Copy, Name, prompt_hashes, shape_of
from tests.daemonsim.sockets import SimProcess
from tests.daemonsim.system import SOCKET_PATH
from tests.fuzz.liar import KINDS, Liar, Line
from tests.unit.daemon.harness import engine_hello

LIARS = 5
"""Liars of a seed, each of another kind."""
PIECES_MAX = 5
"""The most pieces that a liar sends at once."""


class Operator(Client):
    """A person with `hybridkv stats`, `explain`, `ls`, `forget` and `clear`."""

    def __init__(self, scene: Scene, process: SimProcess, clears: bool) -> None:
        super().__init__(scene, process)
        self._clears = clears
        self.calls = Caller(scene, Hello(1, PROTOCOL_VERSION, "control"), lambda: None)
        self._listed: tuple[HeldObject, ...] = ()

    def step(self) -> None:
        """Send a request, in some steps."""
        for reply in self.calls.poll():
            if isinstance(reply, ObjectPage) and reply.objects:
                self._listed = tuple(reply.objects)
        if self.scene.calm or self.rng.random() < 0.8:
            return
        choice = self.rng.randrange(9)
        if choice < 2:
            self.calls.ask(Stats, Report)
        elif choice < 4:
            self.calls.ask(ListEngines, Engines)
        elif choice < 5:
            self._list_or_forget()
        elif choice < 8 or not self._clears:
            self.calls.ask(
                lambda number: Explain(number, f"request {self.rng.randrange(9)}"), Explained
            )
        elif self.calls.ask(Clear, Done):
            self.scene.counts["clears"] += 1
        if self.scene.habits.advises and choice < 4:
            tenant, ttl_ms = self.rng.choice((None, 0, 1, 2)), self.rng.choice((0, 200, 2000, 2000))
            self.calls.ask(lambda number: Pin(number, ttl_ms, tenant=tenant), Pinned)

    def _list_or_forget(self) -> None:
        """Ask for a page of some place, have objects forgotten that were listed, or set a bound."""
        server = self.scene.system.server
        place = self.rng.randrange(1 + (len(server.daemon.tiers) if server is not None else 0))
        if self._clears and self.rng.random() < 0.3:
            bound = self.rng.choice((None, 1 << 14, 1 << 16, 1 << 30))
            tenant, is_default = self.rng.randrange(3), self.rng.random() < 0.2
            self.calls.ask(lambda number: SetQuota(number, tenant, bound, is_default), QuotaReport)
            return
        if not self._clears or not self._listed or self.rng.random() < 0.5:
            self.calls.ask(lambda number: ListObjects(number, place), ObjectPage)
            return
        keys = [held.key for held in self._listed if self.rng.random() < 0.2]
        rest = self.rng.random() < 0.3
        forget = partial(Forget, place=place, keys=b"".join(keys), rest=rest)
        if self.calls.ask(forget, Forgotten):
            self.scene.counts["forgets"] += 1


class Seeker(Client):
    """An engine that comes when RAM is empty: all sound objects of tiers must be promoted."""

    TRIES = 14
    """Each puts aside the damaged objects that it meets."""

    def __init__(
        self,
        scene: Scene,
        process: SimProcess,
        geometry: Geometry,
        identities: list[bytes],
        expects: Callable[[Geometry, bytes, tuple[bytes, ...]], list[bytes]],
    ) -> None:
        """`expects` returns the objects that are sound in tiers now, as masks."""
        super().__init__(scene, process)
        self._geometry = geometry
        self._expects = expects
        self._todo = deque(
            (identity, prompt) for identity in identities for prompt in range(PROMPTS)
        )
        self._identity = identities[0]
        hello = engine_hello(geometry, "seeker", self._identity)
        self._calls = Caller(scene, hello, lambda: None)
        self._lease = 0
        self._tries = 0
        self._has_no_room = False
        self._is_expected = False  # Whether the daemon expects the next prompt.
        self._before: list[bytes] = []

    @property
    def is_done(self) -> bool:
        """True once every prompt came up as far as it could."""
        return not self._todo

    def step(self) -> None:
        """Look up the next prompt, or take the answer."""
        for reply in self._calls.poll():
            if isinstance(reply, Found):
                self._take(reply)
        if self._todo and self._calls.link.welcome is not None and not self._calls.waits:
            identity, prompt = self._todo[0]
            if identity != self._identity:
                self._identity = identity
                self._calls.ask(lambda number: Identify(number, identity), Done)
            hashes = b"".join(prompt_hashes(prompt))
            if self.scene.habits.expects and self.rng.random() < 0.5:
                if not self._is_expected:
                    self._calls.tell(Prefetch(hashes))
                self._is_expected = True
                return
            self._is_expected = False
            self._before = self._expects(self._geometry, identity, prompt_hashes(prompt))
            self._lease += 1
            self._calls.ask(lambda number: Lookup(number, self._lease, hashes, 20_000), Found)

    def _take(self, found: Found) -> None:
        identity, prompt = self._todo[0]
        hashes = prompt_hashes(prompt)
        books = self.scene.books
        books.found(self._geometry, identity, hashes, found.masks, found.depth)
        welcome = self._calls.link.welcome
        assert welcome is not None
        file = self.scene.system.paths[welcome.arena_path]
        for ref, index, chunk in needed_slots(self._geometry, found):
            size, parts = shape_of(self._geometry, index, chunk)
            for part in range(parts):
                books.shown(
                    Copy(
                        file=file,
                        offset=ref.offset,
                        generation=ref.generation,
                        name=Name(identity, self._geometry.groups[index].gid, hashes[chunk]),
                        part=part,
                        parts=parts,
                        size=size,
                        checksum=True,
                        boot=welcome.boot,
                    )
                )
        self._calls.tell(Release(self._lease))
        now = self._expects(self._geometry, identity, hashes)
        masks = zip(self._before, now, strict=True)
        always = [bytes(map(min, before, after)) for before, after in masks]
        expected = largest_hit(self._geometry, always, len(hashes))
        self.scene.counts["chunks_sought"] += sum(found.tiers.values())
        assert found.why != "it was not read in time", (
            "nothing goes on for a lookup that waits for others"
        )
        self._tries += 1
        self._has_no_room |= found.why.startswith("RAM has room for ")
        if found.depth < expected and self._tries < self.TRIES:
            return
        if self._has_no_room and found.depth < expected:
            # One lookup's room may be at the cost of another one, in any try.
            self.scene.counts["seeks_without_room"] += 1
        else:
            assert found.depth >= expected, (
                f"{found.depth} of {expected} chunks come up: {found.why}"
            )
            self.scene.counts["seeks"] += 1
            self.scene.counts["chunks_expected"] += expected
        self._todo.popleft()
        self._tries, self._has_no_room = 0, False


class Liars(Client):
    """Clients in one process that send anything: those of `tests.fuzz.liar`."""

    def __init__(self, scene: Scene, process: SimProcess, engine_ids: Sequence[str]) -> None:
        """`engine_ids` are engines that do not lie."""
        super().__init__(scene, process)
        self._liar = Liar(self.rng, engine_ids)
        self._kinds = self.rng.sample(range(len(KINDS)), LIARS)
        self._lines: dict[int, Line] = {}
        """Open connections, by the index of their kind in KINDS."""

    def step(self) -> None:
        """Send a few pieces of bytes."""
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
            kind = reply.code if isinstance(reply, Error) else type(reply).__name__
            self.scene.counts[f"liar_heard_{kind}"] += 1
            self.scene.counts["liar_hits"] += isinstance(reply, Found) and reply.depth > 0

    def _hang_up(self, kind: int) -> None:
        self._lines.pop(kind).sock.close()
