"""One seed: engines, a daemon and faults. An AssertionError is a lie, a stall or a leak."""

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.tier_urls import parse_tier
from hybridkv.daemon import loop
from hybridkv.shm import trailer
from hybridkv.shm.slots import HEADER_BYTES, SLOT_ALIGN, SlotState
from hybridkv.tiers.jobs import JobKind
from hybridkv.tiers.record import RecordName
from tests.daemonsim.callers import Client, Habits, Scene
from tests.daemonsim.clients import Scheduler, Worker
from tests.daemonsim.oracle import (
    GEOMETRIES,
    PROMPTS,
    Books,
    Name,
    Protocol,
    Retained,
    Waits,
    largest_slot,
    prompt_hashes,
    shape_of,
)
from tests.daemonsim.others import Liars, Operator, Seeker
from tests.daemonsim.prefetched import Prefetched
from tests.daemonsim.system import EPOCH_MS, SECOND, Delays, System
from tests.daemonsim.tiers import CALLS, ILLS, SimThreads, TierMaker, Vault, WrongError, make_record
from tests.invariants import check_daemon

FAULTS = {
    "kill": "the daemon is killed, between any two lines or within a header",
    "stop": "the daemon is stopped and started in good order",
    "bound": "it comes back with another bound, or fresh",
    "stall": "the daemon or a client does not run for a while",
    "cut": "a connection breaks with bytes in flight",
    "death": "an engine dies, its workers with it or later",
    "reuse": "process ids are given again",
    "foreign": "processes of other pid namespaces",
    "clock": "the time of day steps",
    "jump": "the machine sleeps",
    "flip": "bits of payload change",
    "header": "bits of headers change",
    "identity": "an engine takes other weights",
    "clear": "somebody clears the cache",
    "liar": "clients say anything, in messages and in bytes",
    "late": "commits of slots that are not one's own any more",
    "twice": "what was given back is given back again",
    "fail": "workers do not write",
    "full": "shared memory is used up",
    "rebirth": "an engine ends and another one of its name begins in its processes",
    **ILLS,
}
"""Every fault by its name. Those of tiers are drawn only in seeds that have tiers."""
FAULT_RATE = 0.25
OFTEN = {"kill": 0.5, "stall": 0.5, "tier_alone": 0.5, "tier_hang": 0.4}
"""Faults with another rate."""
PROCESSES_MAX = 64
CHECK_EVENTS = 25
QUIET_SECONDS = 40
"""The time in which all work must end once there are no faults any more."""


@dataclass
class Draw:
    """The random decisions of a seed before it begins."""

    faults: frozenset[str]
    seconds: float
    fault_seconds: float
    """The mean time between two faults."""
    engines: int
    pages: int
    tiers: int


class Logged(logging.Handler):
    """Keeps what the daemon logs as an error, because that is a fault although it goes on."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


class Engine:
    """A scheduler, its workers, and their processes."""

    def __init__(
        self, scene: Scene, engine_id: str, geometry_name: str, identity: bytes, together: bool
    ) -> None:
        self.scene = scene
        self.engine_id = engine_id
        self.geometry_name = geometry_name
        geometry = GEOMETRIES[geometry_name]
        system = scene.system
        head = system.spawn()
        self.processes = [head]
        if not together:
            self.processes += [system.spawn() for _ in range(geometry.ranks)]
        self._begin(identity)

    def _begin(self, identity: bytes) -> None:
        geometry = GEOMETRIES[self.geometry_name]
        target = self.scene.rng.randrange(1, 5)
        self.scheduler = Scheduler(
            self.scene,
            self.processes[0],
            engine_id=self.engine_id,
            geometry=geometry,
            identity=identity,
            target=target,
        )
        self.scheduler.workers = [
            Worker(
                self.scene,
                self.processes[min(rank + 1, len(self.processes) - 1)],
                self.scheduler,
                rank,
            )
            for rank in range(geometry.ranks)
        ]

    @property
    def is_alive(self) -> bool:
        """True while one of its processes lives."""
        return any(process.alive for process in self.processes)

    @property
    def is_whole(self) -> bool:
        """True while its scheduler and all its workers work."""
        return self.scheduler.is_alive and all(worker.is_alive for worker in self.scheduler.workers)

    def end(self) -> None:
        """Shut down in good order. The processes stay."""
        system = self.scene.system
        clients: list[Scheduler | Worker] = [self.scheduler, *self.scheduler.workers]
        for client in clients:
            if client.is_alive:
                before, system.current = system.current, client.process
                client.close()
                system.current = before

    def begin_again(self) -> None:
        """Start another engine of the same name in the same processes."""
        self._begin(self.scheduler.identity)


class World:
    """The machine, the clients and the faults of one seed."""

    def __init__(self, seed: int, faults: Iterable[str] = ()) -> None:
        """`faults` are those that it has instead of drawn ones."""
        self._system = system = System(seed)
        self._rng = rng = system.rng
        self._draw = draw = _draw(rng, frozenset(faults))
        self.counts: Counter[str] = Counter()
        self._books = Books(system)
        habits = Habits(
            steps=Delays(2_000, rng.choice((12_000, 40_000))),
            checksum=bool(draw.faults & {"flip", "header"}) or rng.random() < 0.5,
            pieces=rng.choice((1, 2, 4, 8)),
            loads=rng.choice((2, 4, 4, 40)),
            partial=rng.choice((0.0, 0.3)),
            waits_ms=rng.choice(((0, 50, 1000), (20, 300), (3000,), (0, 30_000)))
            if draw.tiers
            else (0,),
            misbehave=draw.faults & {"late", "twice", "fail"},
            # By the seed and not by a draw, so that other seeds stay what they were.
            audits=seed % 4 == 1,
            consumers=seed % 3 == 1,
            expects=seed % 5 in (0, 3),
            advises=seed % 5 == 2,
        )
        self._scene = Scene(system, self._books, habits, self.counts)
        models = rng.sample(sorted(GEOMETRIES), rng.choice((1, 1, 2, 3)))
        self._identities = {
            name: [
                f"{name}{number}".encode().ljust(HASH_BYTES, b".")
                for number in range(rng.choice((1, 2)))
            ]
            for name in models
        }
        largest = max(largest_slot(GEOMETRIES[name]) for name in models) // SLOT_ALIGN
        self._pages = max(draw.pages, 8 * largest)
        system.default_bytes = self._pages * SLOT_ALIGN
        system.latencies = rng.choice((Delays(5, 200), Delays(5, 3000), Delays(1000, 20_000)))
        system.capacity = rng.choice((600, 1 << 13, 1 << 16))
        system.reuses_pids = "reuse" in draw.faults
        system.has_foreign = "foreign" in draw.faults
        if "full" in draw.faults:
            system.pages_end = rng.randrange(largest * 2, self._pages) * SLOT_ALIGN
        system.on_death = self._daemon_died
        self._ends_at = system.now + int(draw.seconds * SECOND)
        self._engines: list[Engine] = []
        self._others: list[Client] = []
        self._names = 0
        self._restarting = False
        self._over = False
        self._logged = Logged()
        self._protocol = Protocol(system, self._books)
        system.on_start = self._protocol.attend
        self._waits = Waits(system)
        self._prefetched = Prefetched(system)
        self._retained = Retained(system)
        if habits.advises:
            system.on_start = self._attend_advice
        self._vaults: list[Vault] = []
        if draw.tiers:
            self._have_tiers()
            if seed % 6 == 4:
                # By the seed and not by a draw, so that other seeds stay what they were.
                system.after(SECOND // 10, SECOND, self._change_login)

    def _have_tiers(self) -> None:
        """Some tiers, sometimes two over the same records, with what another node stored there."""
        system, rng = self._system, self._rng
        for _ in range(rng.randrange(1, self._draw.tiers + 1)):
            bound = rng.choice((None, None, 1 << 16, 1 << 19))
            vault = Vault(system, self._books, rng.random() < 0.4, bound)
            vault.delays = rng.choice((Delays(1, 300), Delays(100, 20_000), Delays(5000, 100_000)))
            self._vaults.append(vault)
        urls = [
            f"sim://{rng.randrange(len(self._vaults))}"
            f"?write={rng.choice(('through', 'through', 'back', 'off'))}"
            f"&timeout={rng.choice((0.05, 0.5, 5))}{rng.choice(('', '', '', '&hourly=256KiB'))}"
            for _ in range(self._draw.tiers)
        ]
        system.tiers = tuple(parse_tier(url, "tiers") for url in urls)
        system.make_tier = TierMaker(self._vaults)
        system.make_threads = lambda tier, memory, done: SimThreads(
            system, tier, memory, done, self.counts
        )
        system.on_start, system.on_turn = self._attend, self._waits.on_turn
        if rng.random() < 0.5:
            self._do_tier_other()
        self.counts["seeds_with_tiers"] += 1

    def _attend(self, server: loop.DaemonServer) -> None:
        self._protocol.attend(server)
        self._waits.attend(server)
        self._prefetched.attend(server)
        self._retained.attend(server)

    def _attend_advice(self, server: loop.DaemonServer) -> None:
        self._protocol.attend(server)
        self._retained.attend(server)

    def run(self) -> dict[str, Any]:
        """Run the seed. Returns its counts, and the digest of all that happened."""
        reserve = 4 * SLOT_ALIGN * self._rng.choice((1, 4, 64))
        logger = logging.getLogger("hybridkv.daemon")
        logger.addHandler(self._logged)
        logger.propagate = False
        before = (loop.RESERVE_STEP_BYTES, loop.RESERVE_AHEAD_BYTES, trailer.PROCESSES_MAX)
        loop.RESERVE_STEP_BYTES, loop.RESERVE_AHEAD_BYTES, trailer.PROCESSES_MAX = (
            reserve,
            4 * reserve,
            PROCESSES_MAX,
        )
        try:
            with self._system.installed():
                self._live()
        finally:
            loop.RESERVE_STEP_BYTES, loop.RESERVE_AHEAD_BYTES, trailer.PROCESSES_MAX = before
            logger.removeHandler(self._logged)
            logger.propagate = True
            for strand in self._system.strands:
                strand.end()
        for counts in (
            self._waits.counts,
            self._retained.counts,
            *(vault.counts for vault in self._vaults),
        ):
            self.counts.update(counts)
        return {**self.counts, "lives": self._system.lives, "digest": self._system.digest()}

    # The course of a seed

    def _live(self) -> None:
        system = self._system
        self._start()
        for _ in range(self._draw.engines):
            self._add_engine()
        self._others.append(Operator(self._scene, system.spawn(), "clear" in self._draw.faults))
        if "liar" in self._draw.faults:
            names = [engine.engine_id for engine in self._engines]
            self._others.append(Liars(self._scene, system.spawn(), names))
        self._later(self._fault)
        self._go_on(lambda: system.now >= self._ends_at)
        self._calm()
        self._leave()
        if self._vaults:
            self._seek()

    def _go_on(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._system.step()
            self.counts["events"] += 1
            if self.counts["events"] % CHECK_EVENTS == 0:
                self._check()

    def _calm(self) -> None:
        """End all faults. All work that was begun ends, and every engine is served."""
        system = self._system
        self._over = self._scene.calm = True
        system.arm()
        for vault in self._vaults:
            vault.heal()
        system.awaken()
        for process in (*system.processes.values(), system.server_process):
            process.stopped_until = 0
        deadline = system.now + QUIET_SECONDS * SECOND

        def is_over() -> bool:
            assert system.now < deadline, (
                "STALL: a tier is not served again, or"
                f" {[engine.scheduler.describe() for engine in self._engines]}"
            )
            if system.server is None:
                return False
            if not all(line.is_open and line.tier.is_served for line in self._daemon().tiers):
                return False
            return all(engine.scheduler.is_settled for engine in self._engines if engine.is_whole)

        self._go_on(is_over)
        self._check()
        self.counts["objects_audited"] += self._books.audit()

    def _leave(self) -> None:
        """All clients end, each in its way: nothing is held."""
        system, rng = self._system, self._rng
        for engine in self._engines:
            if rng.random() < 0.5 and engine.is_whole:
                engine.end()
            for process in engine.processes:
                system.after(1, SECOND // 4, partial(system.kill, process))
        for client in self._others:
            system.after(1, SECOND // 4, partial(system.kill, client.process))
        # The end of a process of another namespace is found when the daemon looks at the locks.
        until = system.now + SECOND // 4 + int(2 * loop.FILES_SECONDS * SECOND)
        system.at(until, lambda: None)
        self._go_on(lambda: system.now >= until)
        self._settle()
        self._check()
        server = system.server
        assert server is not None
        values = server.daemon.view.metric_values().named()
        must_end = ("sessions", "leases", "connections", "watching", "bytes_writing", "bytes_held")
        left = {name: values[name] for name in must_end}
        assert not any(left.values()), f"LEAK: {left}"
        assert not server.processes.pidfds, "LEAK: processes are watched for nobody"
        assert not server.clients.connected
        assert not server.daemon.sessions.watched_processes()
        assert not server.trailer.processes(), "LEAK: dead processes are remembered"
        extents = server.daemon.store.extents
        assert extents.free_bytes == extents.limit_bytes - values["bytes_committed"]
        assert all(not slot.pins for slot in server.daemon.store.slots.values())
        assert not self._logged.records or not self._books.is_exclusive, self._logged.records
        self.counts["objects_left"] += self._books.audit()
        promotion, demotion = server.daemon.promotion, server.daemon.demotion
        held = (
            promotion.lookups,
            (promotion.prefetch,) if promotion.prefetch is not None else (),
            promotion.reads.running,
            promotion.waiters,
            promotion.questions,
            *promotion.turns.values(),
            +promotion.reads.running_bytes,
            demotion.writing,
            +demotion.held_bytes,
            *demotion.leaving,
        )
        assert not any(held), f"LEAK: {held}"
        self._audit_vaults()
        self._count_ends()

    def _count_ends(self) -> None:
        """Add what became of the prefetches, and of waits for room, of the daemon's life."""
        daemon = self._daemon()
        self.counts["room_waits_kept"] += daemon.promotion.room_waits.kept
        self.counts["room_waits_broken"] += daemon.promotion.room_waits.broken
        for state, number in daemon.prefetches.ended.items():
            self.counts[f"prefetches_{state}"] += number
        self.counts["prefetched_hit"] += daemon.store.expected_hit
        self.counts["prefetched_evicted"] += daemon.store.expected_evicted

    def _settle(self) -> None:
        """Wait until the tiers' threads have ended their jobs."""
        system = self._system
        deadline = system.now + QUIET_SECONDS * SECOND

        def is_over() -> bool:
            assert system.now < deadline, "STALL: a tier's thread does not end"
            lines = self._daemon().tiers if system.server is not None else ()
            is_running = system.server is not None and self._daemon().prefetches.running is not None
            return (
                system.server is not None
                and not is_running
                and all(job.kind is JobKind.TEND for line in lines for job in line.running)
            )

        self._go_on(is_over)

    def _audit_vaults(self) -> None:
        try:
            self.counts["records_audited"] += sum(vault.audit() for vault in self._vaults)
        except WrongError as wrong:
            raise AssertionError(str(wrong)) from wrong

    def _seek(self) -> None:
        """Lose RAM. The objects of tiers come up for an engine that waits."""
        system, rng = self._system, self._rng
        self._draw = dataclasses.replace(self._draw, faults=frozenset())
        system.has_quotas, system.pages_end = False, 1 << 60
        system.quotas.clear()
        self._ail("tier_shut", 1, 4 * SECOND)
        system.stop_server(keep_arena=False)
        deadline = system.now + QUIET_SECONDS * SECOND

        def is_open() -> bool:
            assert system.now < deadline, "STALL: a tier is not opened again"
            return system.server is not None and all(line.is_open for line in self._daemon().tiers)

        self._go_on(is_open)
        name = rng.choice(sorted(self._identities))
        seekers = [
            Seeker(
                self._scene, system.spawn(), GEOMETRIES[name], self._identities[name], self._sound
            )
            for _ in range(2)
        ]
        deadline = system.now + 10 * QUIET_SECONDS * SECOND

        def is_over() -> bool:
            assert system.now < deadline, "STALL: an engine that waits for tiers gets nowhere"
            return all(seeker.is_done for seeker in seekers)

        self._go_on(is_over)
        for seeker in seekers:
            system.kill(seeker.process)
        until = system.now + SECOND
        system.at(until, lambda: None)
        self._go_on(lambda: system.now >= until)
        self._settle()
        self._check()
        assert system.server is not None
        assert all(not slot.pins for slot in system.server.daemon.store.slots.values())
        self._count_ends()
        self._audit_vaults()

    def _sound(self, geometry: Geometry, identity: bytes, hashes: tuple[bytes, ...]) -> list[bytes]:
        """Return the objects of a prompt that a tier has whole: a mask of chunks for each group."""
        used = [
            self._vaults[int(spec.location.removeprefix("sim://"))] for spec in self._system.tiers
        ]
        return [
            bytes(
                any(
                    vault.sound(RecordName(identity, group.gid, chunk_hash).key) is not None
                    for vault in used
                )
                for chunk_hash in hashes
            )
            for group in geometry.groups
        ]

    # Always

    def _check(self) -> None:
        server = self._system.server
        for engine in self._engines:
            for worker in engine.scheduler.workers:
                if worker.is_alive:
                    worker.owns_all()
        if server is None:
            return
        daemon = server.daemon
        check_daemon(daemon)
        self._protocol.check()
        self._waits.check()
        self._prefetched.check()
        self._retained.check()
        self._books.jobs()
        store = daemon.store
        assert (
            store.writing_bytes + store.committed_bytes <= store.extents.limit_bytes <= len(store)
        )
        assert not self._logged.records or not self._books.is_exact, self._logged.records
        wrong = any(line.counters["objects_wrong_in_ram"] for line in daemon.tiers)
        assert not wrong or not self._books.is_exact, (
            "what is right in RAM is taken for wrong, and lost"
        )

    # The daemon

    def _start(self, fresh: bool = False, other_bound: bool = False) -> None:
        system, rng = self._system, self._rng
        self._restarting = False
        if other_bound:
            system.default_bytes = rng.randrange(self._pages, self._pages * 2) * SLOT_ALIGN
        if "kill" in self._draw.faults and not self._over and rng.random() < 0.2:
            self._arm(2000)
        ram = rng.choice((None, system.default_bytes))
        if system.start_server(ram, fresh):
            self.counts["starts"] += 1
            self.counts["objects_recovered"] += int(self._daemon().counters["objects_recovered"])
        else:
            self.counts["kills_while_starting"] += 1

    def _daemon(self) -> Any:
        assert self._system.server is not None
        return self._system.server.daemon

    def _daemon_died(self) -> None:
        if self._restarting:
            return
        self._restarting = True
        rng = self._rng
        unusual = "bound" in self._draw.faults and rng.random() < 0.5
        fresh, other_bound = unusual and rng.random() < 0.5, unusual and rng.random() < 0.5
        if "clock" in self._draw.faults and rng.random() < 0.5:
            self._step_clock()
        start = partial(self._start, fresh, other_bound)
        self._system.after(1000, rng.choice((5000, SECOND)), start)

    def _arm(self, lines: int) -> None:
        if self._rng.random() < 0.3:
            self._system.arm(writes=self._rng.randrange(1, 8))
        else:
            self._system.arm(lines=self._rng.randrange(1, lines))

    # Engines

    def _add_engine(self) -> None:
        rng = self._rng
        if self._over or sum(engine.is_alive for engine in self._engines) >= 4:
            return
        name = rng.choice(sorted(self._identities))
        self._names += 1
        engine_id = f"engine{self._names}"
        gone = [engine for engine in self._engines if not engine.scheduler.is_alive]
        if gone and rng.random() < 0.5:
            # Its workers may live on.
            engine_id = rng.choice(gone).engine_id
        if any(
            engine.engine_id == engine_id for engine in self._engines if engine.scheduler.is_alive
        ):
            return
        identity = rng.choice(self._identities[name])
        together = GEOMETRIES[name].ranks == 1 and rng.random() < 0.4
        self._engines.append(Engine(self._scene, engine_id, name, identity, together))
        self.counts["engines"] += 1

    # Faults

    def _later(self, action: Callable[[], None]) -> None:
        mean = int(self._draw.fault_seconds * SECOND)
        self._system.after(mean // 10, 2 * mean, action)

    def _fault(self) -> None:
        if self._over:
            return
        able = [name for name in sorted(self._draw.faults) if hasattr(self, f"_do_{name}")]
        if able:
            name = self._rng.choice(able)
            self._system.trace("fault", name)
            if getattr(self, f"_do_{name}")() is not False:
                self.counts[f"fault_{name}"] += 1
        self._later(self._fault)

    def _do_kill(self) -> bool:
        if self._system.server is None:
            return False
        if self._rng.random() < 0.2:
            self._system.kill_server()
        else:
            self._arm(600)
        return True

    def _do_stop(self) -> bool:
        system = self._system
        if system.server is None or system.now < system.server_process.stopped_until:
            return False
        system.stop_server("bound" not in self._draw.faults or self._rng.random() < 0.7)
        return True

    def _do_stall(self) -> None:
        system, rng = self._system, self._rng
        daemon = rng.random() < 0.3
        process = system.server_process if daemon else rng.choice(list(system.processes.values()))
        process.stopped_until = system.now + rng.randrange(1000, rng.choice((100_000, 3 * SECOND)))
        system.trace("stall", process.pid, process.stopped_until)

    def _do_cut(self) -> bool:
        sockets = [sock for sock in self._system.server_process.sockets if sock.inward is not None]
        if self._system.server is None or not sockets:
            return False
        self._rng.choice(sockets).cut()
        return True

    def _do_death(self) -> bool:
        system, rng = self._system, self._rng
        engines = [engine for engine in self._engines if engine.is_alive]
        if not engines:
            self._add_engine()
            return False
        engine = rng.choice(engines)
        lag = rng.choice((1, 1, 50_000, SECOND, 3 * SECOND))
        processes = list(engine.processes)
        if rng.random() < 0.2:
            rng.shuffle(processes)
        system.kill(processes[0])
        for process in processes[1:]:
            system.after(0, lag, partial(system.kill, process))
        system.after(1, 2 * SECOND, self._add_engine)
        return True

    def _do_clock(self) -> None:
        self._step_clock()

    def _step_clock(self) -> None:
        """Set the clock, often to just where an earlier life of the daemon began."""
        system, rng = self._system, self._rng
        if rng.random() < 0.6:
            system.wall_ms += (
                rng.choice(system.life_starts_ms) - system.time_ms() - rng.randrange(3)
            )
        else:
            system.wall_ms += rng.choice((-1, 1)) * rng.randrange(
                1, rng.choice((10, 10_000, EPOCH_MS // 2))
            )
        system.trace("clock", system.wall_ms)

    def _do_jump(self) -> None:
        self._system.now += self._rng.randrange(SECOND // 10, 10 * SECOND)

    def _do_flip(self) -> bool:
        slot = self._slot(SlotState.COMMITTED)
        if slot is None:
            return False
        start = slot.offset + HEADER_BYTES
        self._flip(start, slot.offset + slot.size_bytes)
        return True

    def _do_header(self) -> bool:
        state = SlotState.WRITING if self._rng.random() < 0.1 else SlotState.COMMITTED
        slot = self._slot(state)
        if slot is None:
            return False
        if state is SlotState.WRITING:
            self._books.is_exclusive = False
        self._flip(slot.offset, slot.offset + HEADER_BYTES)
        return True

    def _slot(self, state: SlotState) -> Any:
        if self._system.server is None:
            return None
        slots = [slot for slot in self._daemon().store.slots.values() if slot.state is state]
        return self._rng.choice(slots) if slots else None

    def _flip(self, start: int, stop: int) -> None:
        self._books.is_exact = False
        self._books.flipped_at = self._system.now
        file = self._system.arena
        assert file is not None
        file.bytes[self._rng.randrange(start, stop)] ^= 1 << self._rng.randrange(8)

    def _do_identity(self) -> bool:
        engines = [engine for engine in self._engines if engine.is_whole]
        if not engines:
            return False
        engine = self._rng.choice(engines)
        engine.scheduler.new_identity = self._rng.choice(self._identities[engine.geometry_name])
        return True

    def _do_rebirth(self) -> bool:
        engines = [engine for engine in self._engines if engine.is_whole]
        if not engines:
            return False
        engine = self._rng.choice(engines)
        if any(process.stopped_until > self._system.now for process in engine.processes):
            return False
        engine.end()
        engine.begin_again()
        return True

    # Faults of tiers

    def _ail(self, name: str, low: int, high: int) -> Vault:
        """Give a tier a fault for a random time: low <= microseconds < high."""
        vault = self._rng.choice(self._vaults)
        vault.ills[name] = self._system.now + self._rng.randrange(low, high)
        vault.sick_calls = self._rng.choice((CALLS, ("get",), ("get", "put"), ("find", "put")))
        return vault

    def _change_login(self) -> None:
        """Change a tier's login, which only `open` learns, and which no calm changes back."""
        self._rng.choice(self._vaults).login += 1
        self.counts["logins_changed"] += 1
        if not self._over:
            self._system.after(SECOND // 2, 2 * SECOND, self._change_login)

    def _do_tier_slow(self) -> None:
        delays = self._rng.choice((Delays(100, 20_000), Delays(10_000, 400_000)))
        self._ail("tier_slow", SECOND // 10, 3 * SECOND).delays = delays

    def _do_tier_hang(self) -> None:
        self._ail("tier_hang", SECOND // 10, 3 * SECOND)
        if self._rng.random() < 0.2:
            self._system.after(1000, SECOND, self._stop_meanwhile)

    def _stop_meanwhile(self) -> None:
        if not self._over:
            self._do_stop()

    def _do_tier_error(self) -> None:
        self._ail("tier_error", 1000, 2 * SECOND)

    def _do_tier_full(self) -> None:
        self._ail("tier_full", 1000, 2 * SECOND)

    def _do_tier_stale(self) -> None:
        self._ail("tier_stale", 1000, 2 * SECOND)

    def _do_tier_shut(self) -> None:
        self._ail("tier_shut", SECOND // 10, 3 * SECOND)

    def _do_tier_loss(self) -> None:
        self._rng.choice(self._vaults).lose()

    def _do_tier_damage(self) -> None:
        self._rng.choice(self._vaults).damage()

    def _do_tier_alone(self) -> bool:
        system = self._system
        if system.server is None:
            return False
        system.kill_server()
        for file in list(system.files):
            file.unlink()
        return True

    def _do_tier_other(self) -> None:
        """Store prompts as another node does, not always whole."""
        rng = self._rng
        vault = rng.choice(self._vaults)
        model = rng.choice(sorted(self._identities))
        identity, geometry = rng.choice(self._identities[model]), GEOMETRIES[model]
        rate = rng.choice((1.0, 0.9))
        for chunk_hash in {
            hash_: None for _ in range(3) for hash_ in prompt_hashes(rng.randrange(PROMPTS))
        }:
            chunk = next(
                chunks.index(chunk_hash)
                for chunks in map(prompt_hashes, range(PROMPTS))
                if chunk_hash in chunks
            )
            for index, group in enumerate(geometry.groups):
                size, parts = shape_of(geometry, index, chunk)
                if size and rng.random() < rate:
                    name = Name(identity, group.gid, chunk_hash)
                    self._books.written.add(name)
                    key = RecordName(name.identity, name.gid, name.chunk_hash).key
                    vault.records[key] = make_record(name, size, parts, rng.getrandbits(60))
                    self.counts["records_of_others"] += 1


def _draw(rng: random.Random, faults: frozenset[str]) -> Draw:
    tiers = rng.choice((0, 0, 0, 1, 2, 3))
    if faults & set(ILLS):
        tiers = max(1, tiers)
    able = [name for name in FAULTS if tiers or name not in ILLS]
    drawn = frozenset(name for name in able if rng.random() < OFTEN.get(name, FAULT_RATE))
    return Draw(
        faults=faults or drawn,
        seconds=rng.choice((0.7, 1.5, 3.0)),
        fault_seconds=rng.choice((0.05, 0.2, 0.6)),
        engines=rng.choice((1, 2, 2, 3)),
        pages=rng.choice((32, 48, 96, 160)),
        tiers=tiers,
    )
