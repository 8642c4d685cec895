"""Prefetches: prompts that are expected, and that are read from tiers into RAM before their turn.

    asked ── waits for its time ── runs (Promotion reads, as for a lookup) ── ended
      refused: too far, too many      at most one at a time

1. A prefetch is a lookup that no engine waits for. Its reads are shared with lookups, which go
   first (tiers.promotion).
2. Until its time it holds nothing but the names of its chunks. The time is that at which the prompt
   is expected, less what reading it should take.
3. It evicts nothing that is protected. What all of them have brought, unread, and what they read,
   takes at most a share of RAM (tiers.shared_reads). Where lookups or stores need the room that it
   holds, it ends.
4. What it brings is an object like any other that nobody has read. What RAM has already of a prompt
   becomes the latest used of its kind, and is not protected by that: a hint is no use.
5. It belongs to an identity, and not to the session that asked for it.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.core.coverage import needed_chunks, object_shapes, whole_hit
from hybridkv.core.geometry import Geometry
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.speed import Speed
from hybridkv.core.tails import tail_hit
from hybridkv.shm.slots import slot_bytes
from hybridkv.store.index import Namespace
from hybridkv.store.store import Store
from hybridkv.tiers.health import TierState
from hybridkv.tiers.object_search import LookupRequest, ObjectSearch
from hybridkv.tiers.promotion import Promotion, ShortfallKind, WaitingLookup
from hybridkv.tiers.resident import resident_of
from hybridkv.wire.messages import PREFETCH_MS_MAX, PrefetchState, PrefetchStatus

PREFETCHES_MAX = 1024  # Prefetches that wait. More are refused.
PREFETCHES_OF_ASKER_MAX = 256  # Of one connection.
NAMES_BYTES_MAX = 32 << 20  # Bytes of the names of all that wait.
ENDED_MAX = 1024  # Prefetches that ended and are remembered.
MARGIN_SECONDS = 1.0  # A prefetch begins so long before it would have to.
UNKNOWN_SECONDS = 4.0  # The time that reading takes where no tier's speed is known.
LATE_SECONDS = 10.0
"""After this time without an end a prefetch is cut: the prompt's own lookup reads the rest."""
NO_CONNECTION = -1  # In place of a connection's number in the request of a prefetch.
CUT_BY: Mapping[ShortfallKind, PrefetchState] = {
    ShortfallKind.TIERS_AWAY: PrefetchState.TIERS_AWAY,
    ShortfallKind.SILENT: PrefetchState.TIERS_AWAY,
    ShortfallKind.PARTLY_SILENT: PrefetchState.TIERS_AWAY,
    ShortfallKind.NO_ROOM: PrefetchState.BOUND,
    ShortfallKind.PRESSURE: PrefetchState.PRESSURE,
    ShortfallKind.FAILED: PrefetchState.FAILED,
}
"""Why a prefetch was cut, by why it got less. All others are late."""


class PromptKey(NamedTuple):
    """The name of a prompt: two prompts of an identity with the same last name are the same."""

    namespace: Namespace
    last_name: bytes  # That of the last chunk or tail.


@dataclass(frozen=True, slots=True)
class PromptNames:
    """The names of a prompt's chunks and tails, as in wire.Lookup, under an identity."""

    namespace: Namespace
    geometry: Geometry
    hashes: bytes
    tails: bytes = b""
    tails_from: int = 0

    @property
    def key(self) -> PromptKey:
        """The name of the prompt."""
        return PromptKey(self.namespace, (self.tails or self.hashes)[-HASH_BYTES:])

    @property
    def size_bytes(self) -> int:
        """Bytes of all names."""
        return len(self.hashes) + len(self.tails)

    @property
    def chunks(self) -> int:
        """The number of whole chunks."""
        return len(self.hashes) // HASH_BYTES

    def begins_with(self, shorter: "PromptNames") -> bool:
        """Return whether the prompt has all chunks of another one, and more or as many."""
        return self.namespace is shorter.namespace and self.hashes.startswith(shorter.hashes)

    @property
    def named_tokens(self) -> int:
        """Tokens of the hit that has all chunks and the last tail."""
        if self.tails:
            tails = len(self.tails) // HASH_BYTES
            return tail_hit(self.geometry, self.tails_from, tails).tokens
        return whole_hit(self.geometry, self.chunks).tokens

    @property
    def read_bytes(self) -> int:
        """Bytes that a hit of all chunks takes, about."""
        total = 0.0
        for group in self.geometry.groups:
            shapes = object_shapes(self.geometry, group)
            period_bytes = sum(slot_bytes(part, parts) for part, parts in shapes if part)
            needed = len(needed_chunks(self.geometry, group, self.chunks))
            total += needed * period_bytes / len(shapes)
        return round(total)


@dataclass(eq=False)
class ExpectedPrompt:
    """A prompt that is expected. Prefetches alone changes it. Times are as of the loop's clock."""

    number: int
    asker: int  # The number of the connection that asked.
    prompt: PromptNames | None  # None once it has ended.
    tokens: int
    due_at: float  # When the prompt is expected.
    starts_at: float  # When reading begins.
    state: PrefetchState = PrefetchState.WAITING
    started_at: float = 0.0
    hit_tokens: int = 0  # The hit of RAM when it began, and at its end.
    objects: int = 0
    read_bytes: int = 0

    def report_state(self, now: float) -> PrefetchStatus:
        """Return what became of it so far."""
        return PrefetchStatus(
            number=self.number,
            state=self.state,
            tokens=self.tokens,
            hit_tokens=self.hit_tokens,
            objects=self.objects,
            read_bytes=self.read_bytes,
            wait_ms=max(0, round(1e3 * (self.due_at - now))),
        )


class Prefetches:
    """All prefetches that wait, the one that runs, and the last ones that ended."""

    def __init__(self, store: Store, tiers: Sequence[TierState], promotion: Promotion) -> None:
        self._store = store
        self._tiers = tiers
        self._promotion = promotion
        self.waiting: dict[int, ExpectedPrompt] = {}  # By number.
        self.by_prompt: dict[PromptKey, ExpectedPrompt] = {}  # Those that wait.
        self.running: ExpectedPrompt | None = None
        self._ended: OrderedDict[int, ExpectedPrompt] = OrderedDict()
        self._next: ExpectedPrompt | None = None  # The one of `waiting` that begins first.
        self.names_bytes = 0  # Bytes of the names of all that wait.
        self._askers: Counter[int] = Counter()  # Of those that wait, by connection.
        self._speed = Speed()  # Bytes per second that prefetches saw.
        self.asked = 0
        self.begun = 0
        self.ended: Counter[PrefetchState] = Counter()  # Without those that were refused.
        self.refused: Counter[PrefetchState] = Counter()

    def __len__(self) -> int:
        return len(self.waiting)

    def ask(self, prompt: PromptNames, asker: int, in_ms: int, now: float) -> PrefetchStatus:
        """Expect a prompt in `in_ms`. Returns the state: it waits, or was refused.

        One that waits for the same prompt is replaced.
        """
        self.asked += 1
        same = self.by_prompt.get(prompt.key)
        if same is not None:
            self._leave(same)
        refusal = self._refusal(prompt, asker, in_ms)
        if refusal is not None:
            self.refused[refusal] += 1
            return PrefetchStatus(0, refusal, prompt.named_tokens)
        due_at = now + in_ms / 1e3
        number = self.asked
        starts_at = max(now, due_at - self._lead_seconds(prompt))
        prefetch = ExpectedPrompt(number, asker, prompt, prompt.named_tokens, due_at, starts_at)
        self.waiting[number] = self.by_prompt[prompt.key] = prefetch
        self.names_bytes += prompt.size_bytes
        self._askers[asker] += 1
        if self._next is None or starts_at < self._next.starts_at:
            self._next = prefetch
        return prefetch.report_state(now)

    def status_of(self, number: int, now: float) -> PrefetchStatus | None:
        """Return what became of a prefetch. None where it is not known, or not any more."""
        running = self.running
        if running is not None and running.number == number:
            return running.report_state(now)
        prefetch = self.waiting.get(number) or self._ended.get(number)
        return prefetch.report_state(now) if prefetch is not None else None

    def wakes_at(self) -> float:
        """Return when `tick` has something to do, if no prefetch ends before."""
        is_free = self.running is None and self._next is not None
        return self._next.starts_at if is_free and self._next is not None else float("inf")

    def tick(self, now: float) -> None:
        """Begin the next prefetch if it is due and none runs. At most one in a turn."""
        prefetch = self._next
        if prefetch is None or self.running is not None or prefetch.starts_at > now:
            return
        prompt = prefetch.prompt
        assert prompt is not None
        self._leave(prefetch)
        self.begun += 1
        self.running, prefetch.started_at = prefetch, now
        prefetch.state = PrefetchState.READING
        if not prompt.namespace.is_current:
            self._end(prefetch, PrefetchState.IDENTITY)
            return
        request = LookupRequest(
            connection_id=NO_CONNECTION,
            id=prefetch.number,
            lease=prefetch.number,
            namespace=prompt.namespace,
            geometry=prompt.geometry,
            hashes=prompt.hashes,
            asked_at=now,
            deadline=max(now, prefetch.due_at) + LATE_SECONDS,
            tokens_per_second=0,
            resident=whole_hit(prompt.geometry, 0),
            tails=prompt.tails,
            tails_from=prompt.tails_from,
            is_prefetch=True,
        )
        resident = resident_of(request)
        request = request._replace(resident=resident.hit)
        prefetch.hit_tokens = resident.hit.tokens
        self._store.renew_objects(resident.needed_slots())
        if resident.hit.tokens >= prefetch.tokens:
            self._end(prefetch, PrefetchState.NEEDLESS)
            return
        waiting = WaitingLookup(request, ObjectSearch(request, resident.masks))
        if not self._promotion.begin_prefetch(waiting, now):
            self.on_prefetch_read(waiting, now)

    def on_prefetch_read(self, waiting: WaitingLookup, now: float) -> None:
        """The prefetch that runs has read what it could. What it held is unpinned."""
        prefetch = self.running
        assert prefetch is not None
        had_tokens = prefetch.hit_tokens
        hit = resident_of(waiting.request).hit
        prefetch.hit_tokens = hit.tokens
        self._store.unpin(waiting.held)
        waiting.held = []
        prefetch.objects = waiting.objects_read
        prefetch.read_bytes = sum(waiting.read_bytes.values())
        if prefetch.read_bytes:
            self._speed = self._speed.measured(prefetch.read_bytes, now - prefetch.started_at, now)
        state = PrefetchState.WHOLE
        if hit.tokens == had_tokens:
            # Nobody may have stored the tails that the prompt's engine named.
            is_there = hit.chunks == waiting.request.chunks
            state = PrefetchState.NEEDLESS if is_there else PrefetchState.ABSENT
        if waiting.shortfalls:
            state = CUT_BY.get(waiting.shortfalls[-1].kind, PrefetchState.LATE)
        if not waiting.request.namespace.is_current:
            state = PrefetchState.IDENTITY
        self._end(prefetch, state)

    def _refusal(self, prompt: PromptNames, asker: int, in_ms: int) -> PrefetchState | None:
        """Return why a prompt is not expected. None where it is."""
        is_full = len(self.waiting) >= PREFETCHES_MAX
        is_full |= self._askers[asker] >= PREFETCHES_OF_ASKER_MAX
        if not self._tiers:
            return PrefetchState.NO_TIERS
        if in_ms > PREFETCH_MS_MAX:
            return PrefetchState.TOO_FAR
        if is_full or self.names_bytes + prompt.size_bytes > NAMES_BYTES_MAX:
            return PrefetchState.TOO_MANY
        return None

    def _lead_seconds(self, prompt: PromptNames) -> float:
        """Return how long before the prompt its reading begins.

        The speed is that which prefetches saw, or else that of the slowest tier. It is taken as it
        was measured, however long ago: a prefetch that begins early costs little.
        """
        known = [tier.speed.per_second for tier in self._tiers if tier.speed.per_second]
        speed = self._speed.per_second or min(known, default=0.0)
        seconds = prompt.read_bytes / speed if speed else UNKNOWN_SECONDS
        return MARGIN_SECONDS + seconds

    def _leave(self, prefetch: ExpectedPrompt) -> None:
        """Let the prefetch wait no more."""
        prompt = prefetch.prompt
        assert prompt is not None
        del self.waiting[prefetch.number], self.by_prompt[prompt.key]
        self.names_bytes -= prompt.size_bytes
        self._askers -= Counter((prefetch.asker,))  # Connections without any are left out.
        if self._next is prefetch:
            self._next = min(self.waiting.values(), key=lambda it: it.starts_at, default=None)

    def _end(self, prefetch: ExpectedPrompt, state: PrefetchState) -> None:
        prefetch.state, prefetch.prompt, self.running = state, None, None
        self.ended[state] += 1
        self._ended[prefetch.number] = prefetch
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
