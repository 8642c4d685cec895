"""What RAM and the tiers below hold, a page at a time, for commands."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.core.selection import HeldObject
from hybridkv.daemon.sessions import ClientConnection, RequestError, Sessions
from hybridkv.store.index import Slot
from hybridkv.store.store import Store
from hybridkv.tiers.health import TierState
from hybridkv.tiers.jobs import JobKind, JobOutcome, Listing, TierJob
from hybridkv.tiers.record import record_key
from hybridkv.wire import messages as wire
from hybridkv.wire.protocol import ErrorCode

RAM = 0  # The place before the tiers.
SCAN_BYTES = 1 << 30
"""The most of the arena that is looked through for one page: 1 MiB of its page table."""


class ListedPlace(NamedTuple):
    """A walk of one connection over one tier."""

    connection_id: int
    place: int


@dataclass(eq=False)
class TierPages:
    """The pages of one tier for one connection. The next one is read ahead."""

    listing: Listing = field(default_factory=Listing)
    cursor: int = 1  # That of the next page.
    job: TierJob | None = None  # It reads the next page.
    outcome: JobOutcome | None = None  # The next page, once it is read.


class Inventory:
    """The walks of commands over what is held."""

    def __init__(self, store: Store, sessions: Sessions, tiers: Sequence[TierState]) -> None:
        self._store, self._sessions, self._tiers = store, sessions, tiers
        self._walks: dict[ListedPlace, TierPages] = {}
        self.has_user_tenants = False
        """True where an object counts for its engine's user, and not for its salt."""
        self.started_at = 0.0  # By the daemon's clock.

    def read_page(self, connection: ClientConnection, request: wire.ListObjects) -> wire.ObjectPage:
        """Answer a page of RAM, or of a tier if a thread has read it. Raises RequestError."""
        if request.place > len(self._tiers):
            raise RequestError(ErrorCode.PLACE)
        if request.place == RAM:
            return self._ram_page(request)
        tier = self._tiers[request.place - 1]
        walk = ListedPlace(connection.number, request.place)
        if not request.cursor:
            self._walks[walk] = TierPages()
        pages = self._walks.get(walk)
        if pages is None or request.cursor not in (0, pages.cursor):
            raise RequestError(ErrorCode.PLACE, f"cursor {request.cursor} is not the next one")
        return self._tier_page(tier, walk, pages, request.id)

    def on_page_read(self, job: TierJob, outcome: JobOutcome) -> None:
        """A thread has read a page of a tier."""
        for pages in self._walks.values():
            if pages.job is job:
                pages.job, pages.outcome = None, outcome

    def on_disconnect(self, connection_id: int) -> None:
        """A connection has ended. A page that is being read for it is read by nobody."""
        for walk in [walk for walk in self._walks if walk.connection_id == connection_id]:
            del self._walks[walk]

    def _ram_page(self, request: wire.ListObjects) -> wire.ObjectPage:
        store, start = self._store, request.cursor
        limit = store.extents.limit_bytes
        end = min(start + SCAN_BYTES, limit)
        objects: list[HeldObject] = []
        for looked, (offset, size) in enumerate(store.trailer.slots(start, end)):
            if looked == wire.CHANGES_MAX:
                end = offset
                break
            slot = store.slots.get(offset)
            if slot is not None and slot.entry is not None:
                objects.append(self._held(slot, size))
        models = {
            identity: model.name for identity, model in self._sessions.models.items() if model.name
        }
        return wire.ObjectPage(
            id=request.id,
            objects=objects,
            cursor=end if end < limit else None,
            models={} if start else models,
            has_user_tenants=self.has_user_tenants,
            up_seconds=store.now - self.started_at,
        )

    def _held(self, slot: Slot, size: int) -> HeldObject:
        """Return what RAM knows of an object."""
        assert slot.entry is not None
        now, namespace = self._store.now, slot.entry.namespace
        gid = namespace.gids[slot.group_index]
        used_at = slot.written_at if slot.read_at is None else slot.read_at
        return HeldObject(
            key=record_key(namespace.identity, gid, slot.entry.chunk_hash),
            size_bytes=size,
            tenant=slot.tenant,
            parent=slot.parent_short,
            written_seconds=None if slot.written_at is None else now - slot.written_at,
            used_seconds=None if used_at is None else now - used_at,
        )

    def _tier_page(
        self, tier: TierState, walk: ListedPlace, pages: TierPages, request_id: int
    ) -> wire.ObjectPage:
        page: Sequence[HeldObject] = ()
        cursor, error = pages.cursor, ""
        if not tier.is_open:
            error = "it is out of reach"
        elif pages.outcome is not None:
            page, failure = pages.outcome.page, pages.outcome.error
            error = "" if failure is None else str(failure)[: wire.FACT_MAX]
            pages.cursor, pages.outcome = cursor + 1, None
        if error or (pages.cursor > cursor and not page):
            del self._walks[walk]
            return wire.ObjectPage(request_id, [], None, error)
        if pages.job is None and tier.has_thread(JobKind.LIST):
            pages.job = TierJob(JobKind.LIST, tier.number, listing=pages.listing)
            tier.submit_job(pages.job, self._store.now)
        return wire.ObjectPage(request_id, [*page], pages.cursor)
