"""Objects that commands have the daemon forget: in RAM at once, in tiers by their threads.

1. The command erases in tiers first, so that no later read brings an object back.
2. Then it drops from RAM, also what tiers had. An object that is being read from a tier is not
   kept, and what is being written to one is erased there afterwards.
3. Bytes in RAM are overwritten in steps, before their room is used again: at once, or when the last
   reader is done. At the end all free memory is overwritten, for what was evicted before.

What an engine stores afterwards is new, and stays.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES, KEY_BYTES
from hybridkv.daemon.inventory import RAM, ListedPlace
from hybridkv.daemon.sessions import ClientConnection, RequestError, Sessions
from hybridkv.daemon.subscriptions import Subscriptions
from hybridkv.daemon.token_book import ChunkName
from hybridkv.observe.history import RequestHistory
from hybridkv.store.store import Store
from hybridkv.tiers.demotion import Demotion
from hybridkv.tiers.jobs import JobKind, JobOutcome, TierJob
from hybridkv.tiers.promotion import Promotion
from hybridkv.wire import messages as wire
from hybridkv.wire.protocol import ErrorCode

WIPE_STEP_BYTES = 2 << 20  # Overwritten in one turn of the loop: some 0.3 ms.
ATTEMPTS_MAX = 16
"""To erase what was on its way to a tier. The last pass of the command finds what is left."""
OUT_OF_REACH = "it is out of reach"


class Erasure(NamedTuple):
    """Records that one tier is to erase. Without keys, what it put aside as damaged."""

    asked_by: ListedPlace | None  # None for the daemon itself.
    keys: Sequence[bytes]
    attempts: int = 1  # With this one.


@dataclass
class ErasedRecords:
    """What became of the records that one command had one tier erase, since its last answer."""

    count: int = 0
    failed: int = 0
    error: str = ""  # The first error.


@dataclass
class TierErasures:
    """The erasures of one tier."""

    waiting: deque[Erasure] = field(default_factory=deque)
    running: Erasure | None = None


class Forgetting:
    """What is being forgotten in RAM and in tiers."""

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        demotion: Demotion,
        promotion: Promotion,
        subscriptions: Subscriptions,
        history: RequestHistory,
    ) -> None:
        self._store, self._sessions = store, sessions
        self._demotion, self._promotion = demotion, promotion
        self._subscriptions, self._history = subscriptions, history
        self._tiers = demotion.tiers
        self._erasures = [TierErasures() for _ in self._tiers]
        self._erased: dict[ListedPlace, ErasedRecords] = {}
        self.objects = 0  # Objects that were dropped from RAM.
        self.book_is_settled: Callable[[], bool] = lambda: True
        """Tells whether the file of the token book is written, or has failed."""
        self.book_error: Callable[[], str] = lambda: ""

    def forget_keys(self, connection: ClientConnection, request: wire.Forget) -> wire.Forgotten:
        """Forget objects by their keys, and answer how far that is. Raises RequestError."""
        if request.place > len(self._tiers):
            raise RequestError(ErrorCode.PLACE)
        keys = [request.keys[at : at + KEY_BYTES] for at in range(0, len(request.keys), KEY_BYTES)]
        if keys and len(keys[-1]) < KEY_BYTES:
            raise RequestError(ErrorCode.HASHES, f"{len(request.keys)} bytes are no keys")
        if request.place == RAM:
            count = self._drop(keys)
            if request.rest:
                self._store.begin_wipe()
                self._subscriptions.finish_forgetting()
            return self._ram_answer(request.id, count)
        place = ListedPlace(connection.number, request.place)
        return self._erase(place, keys, request)

    def on_erased(self, job: TierJob, outcome: JobOutcome) -> None:
        """A thread of a tier has erased records, or failed to."""
        erasures = self._erasures[job.tier]
        erasure, erasures.running = erasures.running, None
        assert erasure is not None
        erased = self._erased.get(erasure.asked_by) if erasure.asked_by else None
        is_own = erasure.asked_by is None and bool(erasure.keys)
        if outcome.error is not None and is_own and erasure.attempts < ATTEMPTS_MAX:
            erasures.waiting.append(erasure._replace(attempts=erasure.attempts + 1))
        if erased is None:
            return
        errors = outcome.errors or [outcome.error] * max(1, len(erasure.keys))
        failures = [error for error in errors if error is not None]
        erased.failed += len(failures)
        erased.count += len(erasure.keys) - len(failures) if erasure.keys else 0
        erased.error = erased.error or (str(failures[0])[: wire.FACT_MAX] if failures else "")

    def on_disconnect(self, connection_id: int) -> None:
        """A connection has ended. What it asked for is done all the same."""
        for place in [place for place in self._erased if place.connection_id == connection_id]:
            del self._erased[place]

    def tick(self) -> None:
        """Overwrite the next part of RAM, and begin erasures for which there are threads."""
        if self._store.wiping_bytes:
            self._store.wipe(WIPE_STEP_BYTES)
        for tier, erasures, unwanted in zip(
            self._tiers, self._erasures, self._demotion.unwanted, strict=True
        ):
            if unwanted:
                erasures.waiting.append(Erasure(None, [*unwanted]))
                unwanted.clear()
            if erasures.waiting and tier.is_open and tier.has_thread(JobKind.ERASE):
                erasures.running = erasures.waiting.popleft()
                job = TierJob(JobKind.ERASE, tier.number, keys=erasures.running.keys)
                tier.submit_job(job, self._store.now)

    def wakes_at(self) -> float:
        """Return when `tick` has something to do, if no event comes before."""
        return 0.0 if self._store.wiping_bytes else float("inf")

    def _drop(self, keys: Sequence[bytes]) -> int:
        """Drop objects from RAM, and what describes their chunks. Returns how many there were."""
        chunks = set[ChunkName]()
        count, is_pinned = 0, False
        for key in keys:
            identity, chunk_hash = key[:HASH_BYTES], key[HASH_BYTES : 2 * HASH_BYTES]
            gid = int.from_bytes(key[2 * HASH_BYTES :], "big")
            chunks.add(ChunkName(identity, chunk_hash))
            self._promotion.reads.forget_read(key)
            namespace = self._sessions.namespaces.get(identity)
            if namespace is not None and gid in namespace.gids:
                slot = namespace.find_slot(chunk_hash, namespace.gids.index(gid))
                if slot is not None:
                    count += 1
                    is_pinned |= slot.pins > 0
                    self._store.forget_object(slot)
        if is_pinned:
            self._demotion.forget_leaving()
        for name in chunks:
            self._subscriptions.forget_description(name)
        if chunks:
            self._history.forget_chunks(chunks)
        self.objects += count
        return count

    def _ram_answer(self, request_id: int, count: int) -> wire.Forgotten:
        store = self._store
        reads = (read.slot for read in self._promotion.reads.running.values())
        in_use = Counter(slot.is_forgotten for slot in (*store.due_when_unpinned, *reads))[True]
        own = sum(
            len(erasure.keys)
            for erasures in self._erasures
            for erasure in (*erasures.waiting, erasures.running)
            if erasure is not None and erasure.asked_by is None
        )
        unwanted = sum(map(len, self._demotion.unwanted))
        return wire.Forgotten(
            id=request_id,
            count=count,
            error=self.book_error(),
            pending=own + unwanted + (not self.book_is_settled()),
            in_use=in_use,
            wiping_bytes=store.wiping_bytes,
            unwritten_bytes=store.writing_bytes,
        )

    def _erase(
        self, place: ListedPlace, keys: Sequence[bytes], request: wire.Forget
    ) -> wire.Forgotten:
        tier, erasures = self._tiers[place.place - 1], self._erasures[place.place - 1]
        erased = self._erased.setdefault(place, ErasedRecords())
        asked = [Erasure(place, keys)] if keys else []
        if request.rest:
            asked.append(Erasure(place, ()))
        if tier.is_open:
            erasures.waiting.extend(asked)
        else:
            # What waits is not begun before the tier is open again. The command has ended by then.
            ours = [erasure for erasure in erasures.waiting if erasure.asked_by == place]
            for erasure in ours:
                erasures.waiting.remove(erasure)
            if ours or asked:
                erased.failed += sum(len(erasure.keys) for erasure in (*ours, *asked))
                erased.error = erased.error or OUT_OF_REACH
        self._erased[place] = ErasedRecords()
        pending = sum(
            max(1, len(erasure.keys))
            for erasure in (*erasures.waiting, erasures.running)
            if erasure is not None and erasure.asked_by == place
        )
        return wire.Forgotten(
            id=request.id,
            count=erased.count,
            failed=erased.failed,
            error=erased.error,
            pending=pending,
        )
