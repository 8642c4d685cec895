"""Requests about slots: reserve, commit, free, report corrupt ones, and clear."""

from array import array
from collections.abc import Iterable
from itertools import islice

from hybridkv.core.keys import HASH_BYTES, unpack_hashes
from hybridkv.core.packed import NO_SLOT, SLOT, U64, SlotRef, unpack_slots, unpack_u64
from hybridkv.core.policies import EvictionClass
from hybridkv.daemon.sessions import ClientConnection, RequestError, owner_of
from hybridkv.daemon.state import DaemonState
from hybridkv.shm.slots import SlotState, slot_bytes
from hybridkv.store.index import NewObject, Slot
from hybridkv.wire import messages as wire
from hybridkv.wire.messages import CHANGES_MAX, NO_PARENT, SESSION_SHARE
from hybridkv.wire.protocol import ErrorCode

_NO_SLOT = SLOT.pack(*NO_SLOT)


def reserve(
    state: DaemonState, connection: ClientConnection, request: wire.Reserve
) -> wire.Reserved:
    """Grant write slots to a session, at most CHANGES_MAX. Raises RequestError.

    A session has a share of the arena, so there may be fewer than it asked for, or none.
    """
    session = connection.session
    shape = request.part_bytes, request.parts
    if not any(shape in shapes for shapes in session.namespace.shapes):
        parts = f"{request.parts} parts of {request.part_bytes} bytes"
        raise RequestError(ErrorCode.PART_BYTES, f"no group of this engine has objects of {parts}")
    size = slot_bytes(request.part_bytes, request.parts)
    room = min(
        state.welcome.slots_bytes // SESSION_SHARE - session.writing_bytes,
        state.welcome.slots_bytes // 2 - state.store.writing_bytes,
    )
    wanted = min(request.count, CHANGES_MAX)
    count = min(wanted, max(0, room) // size)
    owner = owner_of(session.engine_id)
    slots = state.store.grant(shape, count, owner)
    if len(slots) < count and not state.store.is_growing and state.promotion.give_way():
        slots += state.store.grant(shape, count - len(slots), owner)
    session.writing.update((slot.offset, slot) for slot in slots)
    session.writing_bytes += size * len(slots)
    state.counters["slots_granted"] += len(slots)
    state.counters["slots_short"] += wanted - len(slots)
    return wire.Reserved(
        id=request.id,
        part_bytes=request.part_bytes,
        parts=request.parts,
        slots=name_slots(slots),
        reserved_bytes=state.store.extents.limit_bytes,
    )


def commit(state: DaemonState, connection: ClientConnection, request: wire.Commit) -> None:
    """Make objects of written slots. Raises RequestError before anything is changed."""
    session = connection.session
    groups: list[int] = []
    hashes: list[bytes] = []
    for slot, new in _new_objects(connection, request):
        if slot is None or session.writing.pop(slot.offset, None) is None:
            state.counters["commits_unknown"] += 1
            is_stored = False
        else:
            groups.append(new.group_index)
            hashes.append(new.chunk_hash)
            session.writing_bytes -= slot.size_bytes
            is_stored = state.store.commit(slot, session.namespace, new)
            if is_stored:
                state.counters["objects_stored"] += 1
                state.counters["bytes_stored"] += slot.part_bytes * slot.parts
                is_promised = state.promises.is_promised(session.namespace, new.chunk_hash)
                is_first = session.is_producer or is_promised
                state.demotion.queue_stored((slot,), is_first)
        if not is_stored:
            state.subscriptions.on_not_stored(
                session.engine_connection, new.chunk_hash, new.group_index
            )
    state.counters["tokens_stored"] += request.tokens
    state.ceiling.on_stored(session.namespace.identity, groups, b"".join(hashes))


def _new_objects(
    connection: ClientConnection, request: wire.Commit
) -> list[tuple[Slot | None, NewObject]]:
    """Return the objects of a commit, each with its slot, after all of them were checked.

    The slot is None where the session does not hold it. Raises RequestError.
    """
    session = connection.session
    refs = _unpack_slots(request.slots)
    count, hashes = len(refs), request.hashes
    if count * HASH_BYTES != len(hashes):
        raise RequestError(ErrorCode.COMMIT, f"{count} slots with {len(hashes)} bytes of hashes")
    groups = _for_each(request.groups, count)
    tenants = _for_each(request.tenants or bytes(U64), count)
    if connection.tenant:
        tenants = array("Q", [connection.tenant] * count)
    try:
        classes = [EvictionClass(number) for number in request.classes or bytes(count)]
    except ValueError as error:
        raise RequestError(ErrorCode.COMMIT, f"there is no such class: {error}") from error
    parents = request.parents or bytes(len(hashes))
    if len(parents) == HASH_BYTES:
        parents = (parents + hashes)[: len(hashes)]
    if {len(groups), len(tenants), len(classes), len(parents) / HASH_BYTES} != {count}:
        message = f"{count} slots with more or less of what belongs to them"
        raise RequestError(ErrorCode.COMMIT, message)
    slots = [session.unwritten(offset, generation) for offset, generation in refs]
    shapes = session.namespace.shapes
    for slot, group in zip(slots, groups, strict=True):
        if slot is not None and (group >= len(shapes) or slot.shape not in shapes[group]):
            fault = f"a slot of (bytes, parts) {slot.shape} is no object of group {group}"
            raise RequestError(ErrorCode.COMMIT, fault)
    parent_hashes = [b"" if parent == NO_PARENT else parent for parent in unpack_hashes(parents)]
    fields = zip(groups, unpack_hashes(hashes), parent_hashes, classes, tenants, strict=True)
    return list(zip(slots, map(NewObject._make, fields), strict=True))


def free(state: DaemonState, connection: ClientConnection, request: wire.Free) -> None:
    """Take back the session's write slots that a client did not use. Others are passed over."""
    session = connection.session
    for offset, generation in _unpack_slots(request.slots):
        slot = session.unwritten(offset, generation)
        if slot is not None:
            del session.writing[offset]
            session.writing_bytes -= slot.size_bytes
            state.store.free_slot(slot)


def report_corrupt(state: DaemonState, _: ClientConnection, request: wire.ReportCorrupt) -> None:
    """Drop objects whose bytes were proven wrong."""
    for offset, generation in _unpack_slots(request.slots):
        slot = state.store.slot_at(offset, generation)
        if slot is not None and slot.state is SlotState.COMMITTED:
            if (entry := slot.entry) is not None:
                state.ceiling.on_lost(entry.namespace.identity, slot.group_index, entry.chunk_hash)
            state.store.drop(slot)
            state.counters["objects_condemned"] += 1


def clear(state: DaemonState, _: ClientConnection, request: wire.Clear) -> wire.Done:
    """Drop at most CHANGES_MAX objects, and have tiers below RAM remove theirs if asked to."""
    for tier in state.tiers if request.tiers else ():
        tier.remove_records(state.now)
    state.ceiling.on_cleared()
    slots = list(islice(state.sessions.stored_slots(), CHANGES_MAX))
    for slot in slots:
        state.store.drop(slot)
    return wire.Done(request.id, len(slots))


def name_slots(slots: Iterable[Slot | None]) -> bytes:
    """Return slots as messages name them (core.packed). None becomes NO_SLOT."""
    return b"".join([_NO_SLOT if slot is None else slot.packed for slot in slots])


def _for_each(packed: bytes, count: int) -> "array[int]":
    """Return the numbers of a packed list. A single one is repeated for all `count` objects."""
    try:
        numbers = unpack_u64(packed)
    except ValueError as error:
        raise RequestError(ErrorCode.PACKED, f"broken list of numbers: {error}") from error
    return numbers * count if len(numbers) == 1 else numbers


def _unpack_slots(slots: bytes) -> list[SlotRef]:
    """Return the slots that a message names. Raises RequestError."""
    try:
        return list(unpack_slots(slots))
    except ValueError as error:
        raise RequestError(ErrorCode.PACKED, f"broken list of slots: {error}") from error
