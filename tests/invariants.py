"""What always holds in the daemon's state: derived again, and compared with what is kept.

Every function raises AssertionError where the two differ.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import chain
from typing import NamedTuple, TypeVar

from hybridkv.core.packed import pack_slots
from hybridkv.daemon.handlers import Daemon
from hybridkv.daemon.sessions import Sessions
from hybridkv.shm.slots import SLOT_ALIGN, SlotState
from hybridkv.store.eviction import PROTECTED, EvictionQueue
from hybridkv.store.extents import Extents
from hybridkv.store.index import IndexEntry, Namespace, RetainedChunk, Slot
from hybridkv.store.retention import RAM_SHARE, TENANT_SHARE
from hybridkv.store.store import Store
from hybridkv.tiers.demotion import HELD_SHARE, Demotion
from hybridkv.tiers.disk.files import BLOCK_BYTES
from hybridkv.tiers.disk.index import FileIndex
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.disk.writers import TMP
from hybridkv.tiers.prefetches import NAMES_BYTES_MAX, PREFETCHES_MAX, Prefetches
from hybridkv.tiers.promises import Promises
from hybridkv.tiers.promotion import Promotion, Wait
from hybridkv.tiers.room_waits import ROOM_WAITS_MAX

T = TypeVar("T", bound=Hashable)


def check_daemon(daemon: Daemon) -> None:
    """Check the store, the sessions, and the pins of every reader and writer."""
    check_store(daemon.store)
    pins, writing = check_sessions(daemon.sessions)
    check_promotion(daemon.promotion, daemon.store)
    check_room_waits(daemon.promotion)
    check_promises(daemon.promises)
    for waits in (daemon.promises, daemon.promotion.node_waits, daemon.promotion.room_waits):
        assert waits.doubts.keys() <= daemon.sessions.connections.keys()
    pins.update(slot for lookup in daemon.promotion.lookups.values() for slot in lookup.held)
    prefetch = daemon.promotion.prefetch
    pins.update(prefetch.held if prefetch is not None else ())
    check_prefetches(daemon.prefetches, daemon.promotion, daemon.store)
    pins.update(check_demotion(daemon.demotion, len(daemon.store)))
    assert all(slot.pins == count for slot, count in pins.items())
    writing |= {read.slot for read in daemon.promotion.reads.running.values()}
    writing |= {slot for slot in daemon.store.to_wipe if slot.state is SlotState.WRITING}
    assert sum(slot.size_bytes for slot in writing) == daemon.store.writing_bytes


def check_promotion(promotion: Promotion, store: Store) -> None:
    """Check that what each lookup waits for is on its way, so that no story stands still."""
    turns = chain.from_iterable(promotion.turns.values())
    asked = Counter([*turns, *(question.lookup for question in promotion.questions.values())])
    waiters = chain.from_iterable(promotion.waiters.values())
    reads = Counter(waiter.lookup for waiter in waiters)
    assert promotion.waiters.keys() == promotion.reads.running.keys()
    for lookup in promotion.lookups.values():
        assert (lookup.finds, lookup.reads) == (asked[lookup], reads[lookup])
        match lookup.story[-1]:
            case Wait.ANSWERS:
                assert lookup.finds, lookup.story
            case Wait.TIER:
                assert lookup.needs[0].tier.running, lookup.story
            case Wait.ROOM:
                assert lookup.room_until is not None
                assert lookup.room_until <= lookup.request.deadline
            case Wait.SLOT:
                assert lookup.reads or store.is_growing, lookup.story
            case Wait.OBJECTS:
                assert lookup.reads, lookup.story
            case Wait.PROMISE:
                assert lookup.promised is not None
                assert lookup.promised.ends_at() <= lookup.request.deadline
            case Wait.NODES:
                assert lookup.node_wait is not None
                assert lookup.node_wait.over_at() <= lookup.request.deadline


def check_room_waits(promotion: Promotion) -> None:
    """Check what admitted hits have claimed, and what lookups hold that wait for room."""
    waits, lookups = promotion.room_waits, promotion.lookups.values()
    admitted = [need for lookup in lookups if lookup.is_admitted for need in lookup.needs]
    claimed = {need.key: need.record.size_bytes for need in admitted}
    assert waits.claimed.total == sum(claimed.values())
    assert all(key in waits.claimed for key in claimed)
    waiting = [lookup for lookup in lookups if lookup.story[-1] is Wait.ROOM]
    assert waits.waiting == len(waiting) <= ROOM_WAITS_MAX
    assert all(lookup.is_admitted or not waits.is_free(lookup.needed_bytes) for lookup in waiting)
    held = {slot for lookup in waiting for slot in lookup.held}
    assert waits.held.total == sum(slot.size_bytes for slot in held)


def check_prefetches(prefetches: Prefetches, promotion: Promotion, store: Store) -> None:
    """Check the counts of prefetches that wait, and that the one that runs does not stand still."""
    waiting = prefetches.waiting.values()
    prompts = [prefetch.prompt for prefetch in waiting if prefetch.prompt is not None]
    assert len(prompts) == len(waiting) <= PREFETCHES_MAX
    assert prefetches.names_bytes == sum(prompt.size_bytes for prompt in prompts)
    assert prefetches.names_bytes <= NAMES_BYTES_MAX
    assert {prompt.key for prompt in prompts} == prefetches.by_prompt.keys()
    assert promotion.reads.expected_room_bytes >= 0
    running = promotion.prefetch
    assert (running is None) is (prefetches.running is None)
    if running is None or running.shortfalls:
        return
    finds = [question.lookup for question in promotion.questions.values()]
    finds += chain.from_iterable(promotion.turns.values())
    assert running.finds == finds.count(running)
    waits_for_lookups = bool(promotion.lookups)
    match running.story[-1]:
        case Wait.ANSWERS:
            assert running.finds or waits_for_lookups
        case Wait.TIER:
            assert running.needs[0].tier.running or waits_for_lookups
        case Wait.SLOT:
            assert running.reads or store.is_growing
        case wait:
            assert wait is Wait.OBJECTS
            assert running.reads


def check_promises(promises: Promises) -> None:
    """Check that only open promises are waited for, and that each is reached by its own names."""
    for namespace, by_name in promises.by_name.items():
        assert by_name
        for name, promise in by_name.items():
            assert promise.is_open
            own = promises.by_connection[promise.key.connection_id]
            assert own[promise.key] is promise
            assert promise.namespace is namespace
            assert name in promise.names


def check_demotion(demotion: Demotion, arena_bytes: int) -> list[Slot]:
    """Check that each tier holds at most its share of the arena, or one object.

    Returns the slots that are held for tiers.
    """
    all_held: list[Slot] = []
    for tier, leaving in zip(demotion.tiers, demotion.leaving, strict=True):
        writing = (job.items for job in demotion.writing if job.tier == tier.number)
        items = [*leaving, *chain.from_iterable(writing)]
        held = sum(item.record.size_bytes for item in items)
        assert held == demotion.held_bytes[tier]
        assert held <= arena_bytes // HELD_SHARE or len(items) == 1
        all_held += [item.slot for item in items if item.slot is not None]
    return all_held


class SessionSlots(NamedTuple):
    """The slots that sessions hold."""

    pins: Counter[Slot]
    """How many leases keep each slot."""
    writing: set[Slot]
    """The slots that are being written."""


def check_sessions(sessions: Sessions) -> SessionSlots:
    """Check the books of all sessions; returns the slots that they hold."""
    pins: Counter[Slot] = Counter()
    writing: list[Slot] = []
    for session in sessions.all:
        pins.update(slot for lease in session.leases.values() for slot in lease.slots)
        own = session.writing.values()
        assert session.writing_bytes == sum(slot.size_bytes for slot in own)
        writing += own
    writing += chain.from_iterable(sessions.held.values())
    assert len(set(writing)) == len(writing), "a slot has one writer"
    return SessionSlots(pins, set(writing))


def check_store(store: Store) -> None:
    """Check every counter, the tiling of the arena, the index, and the order of eviction."""
    _check_slots(store)
    entries = {slot: slot.entry for slot in store.slots.values() if slot.entry is not None}
    namespaces = {entry.namespace for entry in entries.values()}
    for namespace in namespaces:
        _check_namespace(namespace)
    assert set(entries) == {slot for namespace in namespaces for slot in namespace.slots_by_chunk()}
    check_queue(store.queue, Slot.is_evictable, entries)
    stays = [slot for slot in store.slots.values() if slot.pins or slot.is_retained]
    assert store.kept_bytes == sum(slot.size_bytes for slot in stays)
    assert store.expected <= entries.keys()
    assert store.expected_bytes == sum(slot.size_bytes for slot in store.expected)
    assert not any(slot.is_read for slot in store.expected)
    for tenant, queue in store.tenant_queues.items():
        counted = [slot for slot in entries if slot.is_counted and slot.tenant == tenant]
        check_queue(queue, Slot.is_evictable, counted)
        theirs = [s for s in store.slots.values() if s.is_counted and s.tenant == tenant]
        assert (
            store.has_quota_work
            or store.quota_of(tenant) is None
            or len(theirs)
            == sum(
                slot.tenant == tenant
                and slot.state is SlotState.COMMITTED
                and (slot.entry is not None or slot.is_counted)
                for slot in store.slots.values()
            )
        )
        assert 0 < store.tenants[tenant] == sum(slot.size_bytes for slot in theirs)
    check_retention(store, entries)


def check_retention(store: Store, slots: Iterable[Slot]) -> None:
    """Check that the shares bound what is retained, with all that stays because of that."""
    retention = store.retention
    chunks = {chunk for _, _, chunk in retention.due if chunk.is_remembered()}
    for chunk in list(chunks):
        while chunk.before is not None and chunk.before.is_remembered():
            chunk = chunk.before
            chunks.add(chunk)
    assert len(chunks) == len(retention)
    assert retention.stale == sum(number != chunk.entry for _, number, chunk in retention.due)
    charged, followers = Counter[int](), Counter(chunk.before for chunk in chunks)
    for chunk in chunks:
        charged[chunk.tenant] += chunk.charged_bytes
        assert chunk.followers >= followers[chunk]
        assert chunk.entry or chunk.followers
        _check_retained(chunk)
    assert +charged == retention.charged
    # The shares are of what RAM and quotas had then. RAM may have less by now, for want of shared
    # memory, and a quota may have been lowered.
    assert charged.total() == retention.charged_bytes <= len(store) // RAM_SHARE
    assert all(size <= len(store) // TENANT_SHARE for size in charged.values())
    if store.bound_bytes == len(store) and not store.own_quotas:
        assert all(size <= retention.share_bytes(tenant) for tenant, size in charged.items())
    retained = [slot for slot in slots if slot.is_retained]
    assert store.queue.retained_bytes == sum(slot.size_bytes for slot in retained)
    assert store.queue.retained_bytes <= retention.charged_bytes
    for slot in retained:
        assert slot.entry is not None
        assert slot.entry.namespace.retained[slot.entry.chunk_hash].is_kept


def _check_retained(chunk: RetainedChunk) -> None:
    entry = chunk.namespace.entries.get(chunk.chunk_hash)
    slots = [slot for slot in entry.slots if slot is not None] if entry is not None else []
    if not chunk.is_kept:
        assert not chunk.charged_bytes
        assert not any(slot.is_retained for slot in slots)
        return
    others = [slot.size_bytes for slot in slots if slot.is_retained and not slot.is_prefix]
    assert chunk.charged_bytes == chunk.namespace.prefix_bytes + sum(others)
    assert all(slot.is_retained for slot in slots if slot.is_prefix)


def _check_slots(store: Store) -> None:
    slots = store.slots.values()
    extents_taken = sorted((slot.offset, slot.size_bytes) for slot in slots)
    check_extents(store.extents, extents_taken)
    assert list(store.trailer.slots()) == extents_taken
    assert [*store.slots] == [slot.offset for slot in slots]
    assert store.by_end == {slot.offset + slot.size_bytes: slot for slot in slots}
    held, states = Counter[SlotState](), Counter(slot.state for slot in slots)
    for slot in slots:
        held[slot.state] += slot.size_bytes
        assert slot.pins >= 0
        assert slot.packed == pack_slots([(slot.offset, slot.generation)])
        is_dropped = slot.state is SlotState.COMMITTED and slot.entry is None
        assert not is_dropped or slot in store.due_when_unpinned or slot in store.to_wipe
    assert all(slot.is_forgotten and not slot.pins for slot in store.to_wipe)
    assert store.to_wipe_bytes == sum(slot.size_bytes for slot in store.to_wipe)
    assert all(slot.pins for slot in store.due_when_unpinned)
    assert held[SlotState.WRITING] == store.writing_bytes
    assert held[SlotState.COMMITTED] == store.committed_bytes
    assert states[SlotState.COMMITTED] == store.objects


def _check_namespace(namespace: Namespace) -> None:
    children = Counter(entry.parent for entry in namespace.entries.values())
    for entry in namespace.entries.values():
        _check_entry(entry, children[entry])
    for index in range(len(namespace.gids)):
        sizes = [
            slot.size_bytes for slot in namespace.slots_by_chunk() if slot.group_index == index
        ]
        held = namespace.held_objects[index], namespace.held_bytes[index]
        assert held == (len(sizes), sum(sizes))


def _check_entry(entry: IndexEntry, children: int) -> None:
    slots = list(filter(None, entry.slots))
    assert entry.presence == bytes(slot is not None for slot in entry.slots)
    assert {slot.state for slot in slots} == {SlotState.COMMITTED}
    assert all(slot.entry is entry and entry.slots[slot.group_index] is slot for slot in slots)
    assert entry.namespace.entries[entry.chunk_hash] is entry
    assert entry.children == children
    assert entry.prefixes == sum(slot.is_prefix for slot in slots)
    if entry.parent is not None:
        assert entry.prefixes
        assert entry.parent.number < entry.number


def check_queue(
    queue: EvictionQueue[T], is_evictable: Callable[[T], bool], wanted: Collection[T]
) -> None:
    """Check that the items are `wanted`, that what may go is offered, and all counts."""
    assert queue.items.keys() == set(wanted)
    offered = {entry for heap in queue.heaps for _, entry, _ in heap}
    for item, queued in queue.items.items():
        assert queued.entry in offered or (not queued.entry and not is_evictable(item))
    items = queue.items.values()
    protected = [queued.size for queued in items if queued.stage == PROTECTED]
    assert sum(protected) == queue.protected_bytes
    assert queue.stale == len(offered) - sum(1 for queued in items if queued.entry)
    assert sum(queue.ghosts.values()) == queue.ghost_bytes <= queue.bound_bytes


def check_extents(extents: Extents, extents_taken: Iterable[tuple[int, int]]) -> None:
    """Check every count against the extents that are taken."""
    free = free_runs(extents)
    assert all(offset not in extents.start_of_end for offset in extents.size_at), "runs touch"
    end = 0
    for offset, size in sorted([*extents_taken, *free]):
        assert offset == end, "what is taken and free runs must tile the arena"
        assert size > 0
        assert offset % SLOT_ALIGN == 0 == size % SLOT_ALIGN
        end = offset + size
    assert end == extents.limit_bytes
    assert sum(extents.size_at.values()) == extents.free_bytes
    assert extents.by_size == sorted((size, offset) for offset, size in free)
    assert extents.start_of_end == {offset + size: offset for offset, size in free}


class FreeRun(NamedTuple):
    """A run of free bytes of an arena."""

    offset: int
    size: int


def free_runs(extents: Extents) -> list[FreeRun]:
    """Returns every free run, by offset."""
    return [FreeRun(offset, size) for offset, size in sorted(extents.size_at.items())]


def check_disk(tier: DiskTier) -> None:
    """Check the index against the files of a directory tier that nobody uses meanwhile."""
    index = tier.index
    with index.lock:
        _check_files(index)
        home = tier.writers.home
        files = *home.glob("??/*"), *home.glob(f"{TMP}/*/*")
        real = sum(path.stat().st_blocks * BLOCK_BYTES for path in files)
        assert real <= index.held_bytes


def _check_files(index: FileIndex) -> None:
    index.check_index()
    assert index.taken_bytes <= index.max_bytes
    assert not index.writing_bytes
