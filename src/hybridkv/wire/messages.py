"""The messages between an engine and the daemon, in msgpack.

A request has an `id` that its reply repeats. A message without one is one-way. Where a one-way
message is refused, an Error with `id` 0 answers it. wire.protocol has who may send a message, and
what the reply is. Lists of things of one size are packed little-endian arrays in byte strings, so
that a lookup of 128k tokens is one message of a few tens of KB.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from hybridkv.core.audit import AuditOutcome
from hybridkv.core.geometry import GROUPS_MAX, RANKS_MAX, Geometry, Group, GroupKind
from hybridkv.core.hints import NO_HINTS, Hints
from hybridkv.core.junctions import JUNCTIONS_MAX
from hybridkv.core.keys import HASH_BYTES, KEY_BYTES
from hybridkv.core.packed import SLOT_BYTES, U64
from hybridkv.core.policies import Advice
from hybridkv.core.selection import HeldObject
from hybridkv.wire.status import Status, TierStatus

PROTOCOL_VERSION = 14
CHUNKS_MAX = 1 << 16
"""The most chunks in one lookup."""
NO_PARENT = bytes(HASH_BYTES)
"""In place of the hash of the chunk before, for the first chunk of a prompt."""
IN_RAM, BELOW = 1, 2
"""In the masks of Announced: RAM has the object, or only a tier below it."""
BATCH_MAX = 1 << 16
"""The most slots in one message."""
CHANGES_MAX = 256
"""Slots that one message may change. Each takes the daemon some 10 us."""
SESSION_SHARE = 4
"""A session may hold 1/4 of the arena in unwritten slots, all sessions together half of it."""
REMOVED_MAX = 1024
"""The most objects in one Removed."""
DESCRIPTION_BYTES_MAX = 1 << 18
"""The most bytes of the description of one chunk."""
ANNOUNCED_BYTES_MAX = 1 << 20
"""The most bytes of descriptions in one message, unless there is only one."""
PREFETCH_MS_MAX = 3_600_000
"""The longest time ahead for which a prompt is expected."""
PREFETCHED_MAX = 64
"""The most prompts that one StartPrefetch prefetches."""
MESSAGE_BYTES_MAX = 16 << 20
WAIT_MS_MAX = 30_000
TENANTS_LISTED_MAX = 64
"""The most tenants in one Pinned."""
RETENTION_MS_MAX = 24 * 3600 * 1000
"""The longest time for which chunks are retained. A longer one is shortened."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
TEXT_MAX = 256
Tenant = Annotated[int, Meta(ge=0)]
"""As core.keys.tenant_of returns it: up to 2**64 - 1, which is more than msgspec can check."""
QUOTAS_MAX = 4096
"""The most tenants with a bound of their own."""
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
FACT_MAX = 512
Fact = Annotated[str, Meta(max_length=FACT_MAX)]
FACTS_MAX = 256
Facts = Annotated[dict[Text, Fact], Meta(max_length=FACTS_MAX)]
"""Short texts in JSON, by name."""
Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Slots = Annotated[bytes, Meta(max_length=BATCH_MAX * SLOT_BYTES)]
Hashes = Annotated[bytes, Meta(max_length=CHUNKS_MAX * HASH_BYTES)]
Changed = Annotated[bytes, Meta(max_length=CHANGES_MAX * U64)]
ChangedSlots = Annotated[bytes, Meta(max_length=CHANGES_MAX * SLOT_BYTES)]
ChangedHashes = Annotated[bytes, Meta(max_length=CHANGES_MAX * HASH_BYTES)]
ForgottenKeys = Annotated[bytes, Meta(max_length=CHANGES_MAX * KEY_BYTES)]
Description = Annotated[bytes, Meta(max_length=DESCRIPTION_BYTES_MAX)]
Descriptions = Annotated[list[Description], Meta(max_length=CHANGES_MAX)]
Mask = Annotated[bytes, Meta(max_length=CHUNKS_MAX)]
Masks = Annotated[list[Mask], Meta(max_length=GROUPS_MAX)]


class WireGroup(Struct, frozen=True, array_like=True):
    """The part of core.geometry.Group that the daemon needs. `block_bytes` is of all layers."""

    gid: Annotated[int, Meta(ge=0, le=0xFFFF)]
    kind: GroupKind
    tokens_per_block: Annotated[int, Meta(gt=0, le=1 << 30)]
    block_bytes: Annotated[int, Meta(gt=0, le=1 << 40)]
    window_tokens: Annotated[int, Meta(ge=0, le=1 << 30)]
    extra_retained_tokens: Annotated[int, Meta(ge=0, le=1 << 30)]
    replicated: bool


class WireGeometry(Struct, frozen=True, array_like=True):
    """The part of core.geometry.Geometry that a node's daemon needs.

    `ranks` are those on the node, or its shards of the KV heads.
    """

    groups: Annotated[list[WireGroup], Meta(min_length=1, max_length=GROUPS_MAX)]
    chunk_tokens: Annotated[int, Meta(gt=0, le=1 << 30)]
    alignment_tokens: Annotated[int, Meta(gt=0, le=1 << 30)]
    hash_tokens: Annotated[int, Meta(gt=0, le=1 << 30)]
    ranks: Annotated[int, Meta(gt=0, le=RANKS_MAX)]
    stages: Annotated[int, Meta(gt=0, le=RANKS_MAX)]


class WireModel(Struct, frozen=True, array_like=True):
    """Facts of an engine's model, besides its geometry, that the daemon passes on to commands."""

    name: Text
    max_model_len: Count
    kv_dtype: Text
    layers: Annotated[list[Count], Meta(max_length=GROUPS_MAX)]
    """The number of layers of each of the geometry's groups."""
    retention_tokens: Count | None
    """As in core.state_boundaries.StateRule, like `step_tokens` and `keeps_junctions`."""
    step_tokens: Count
    keeps_junctions: bool = False


class WireEngine(Struct, frozen=True, array_like=True):
    """One session of the daemon: the engine that opened it, its geometry and its model."""

    engine_id: Text
    namespace: Hash
    geometry: WireGeometry
    model: WireModel | None


class Decline(StrEnum):
    """The reason why nothing was loaded for a request. Metrics have its name as a label."""

    UNHASHABLE = "lookups_unhashable"
    ADAPTER = "lookups_adapter"
    LATE_ADAPTER = "lookups_late_adapter"
    TOO_SHORT = "lookups_too_short"
    UNWANTED = "lookups_unwanted"
    NO_DAEMON = "lookups_no_daemon"
    BREAKER_OPEN = "lookups_breaker_open"
    LATE_ANSWER = "lookups_late_answer"
    LATE_WORKERS = "lookups_late_workers"
    LATE_ROOM = "lookups_late_room"
    LOST = "lookups_lost"
    IDENTITY = "lookups_identity"
    LOAD_FAILED = "loads_failed"
    PLAN_FAILED = "plan_failed"
    AUDIT = "lookups_audit"


class GroupPresence(Struct, frozen=True, array_like=True):
    """The objects that RAM had of one group for a lookup. `lacks` is what a longer hit needs."""

    gid: Annotated[int, Meta(ge=0, le=0xFFFF)]
    kind: GroupKind
    objects: Count
    lacks: Count | None
    """The chunk whose object a longer hit needs. None where it lacks none of this group."""


class RequestExplanation(Struct, frozen=True, array_like=True):
    """The course of a request, for `hybridkv explain`."""

    prompt_tokens: Count
    stored_objects: Count
    chunk_tokens: Count = 0
    asked_chunks: Count = 0
    """The number of chunks of the last lookup, 0 where none was sent."""
    first_chunk: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""
    """The first chunk's hash, by which the prefix is found under other identities."""
    hit_chunks: Count | None = None
    """None where the lookup was not answered."""
    looked_chunks: Count = 0
    """Chunks that the daemon looked at."""
    groups: Annotated[list[GroupPresence], Meta(max_length=GROUPS_MAX)] = []
    tiers: Annotated[dict[Text, Count], Meta(max_length=64)] = {}
    """Chunks of the hit that came up for it, by tier."""
    not_read: Fact = ""
    """The `why` of Found."""
    local_tokens: Count | None = None
    """Tokens of the engine's own hit. None where it did not ask."""
    loaded_tokens: Count = 0
    loaded_bytes: Count = 0
    declined: Decline | None = None
    """The reason why nothing was loaded. None where nothing went wrong."""
    detail: Fact = ""
    """Further facts, for people."""
    audit: AuditOutcome | None = None
    """None where the request was not audited, or its audit has not ended."""
    audit_detail: Fact = ""
    """Facts of the audit, for people."""
    junctions: Annotated[list[Count], Meta(max_length=JUNCTIONS_MAX)] = []
    """The tokens after which other prompts part from it, and recurrent states were stored."""
    last_chunk: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""
    """The hash of the last whole chunk of the prompt, from which its others are found."""
    hints: Hints = NO_HINTS
    """What it asked of the cache."""


class IdentityDifference(Struct, frozen=True, array_like=True):
    """One fact in which two identities differ."""

    name: Text
    here: Fact
    there: Fact


class OtherIdentity(Struct, frozen=True, array_like=True):
    """An identity that has the first chunk of a request of another one."""

    identity: Hash
    differences: list[IdentityDifference]
    """Empty where no engine reported the facts of the two."""


class _Message(Struct, frozen=True, array_like=True, tag_field="type"):
    """Base of all messages. Each names its tag, which is the first item on the wire."""


class _Numbered(_Message, frozen=True):
    """A request that is answered, or an answer, which repeats the request's `id`."""

    id: Count


class Hello(_Numbered, frozen=True, tag="hello"):
    """The first message. The role engine opens a session, worker joins it, control only asks."""

    version: Count
    role: Annotated[str, Meta(pattern="^(engine|worker|control)$")]
    engine_id: Text = ""
    namespace: Hash | None = None
    geometry: WireGeometry | None = None
    model: WireModel | None = None
    session: Count = 0
    """The number of the engine's greeting. Drained names by it the work that it is about."""
    lock: Count = 0
    """The byte of the arena's file that the worker locks before it uses the arena."""
    is_producer: bool = False
    """The engine computes prompts for other engines, which may wait for what it stores."""


class Drained(_Message, frozen=True, tag="drained"):
    """The worker copies nothing more that was planned before its engine's greeting `session`."""

    session: Count


GREETING_NEVER = 1 << 53
"""The number of a greeting that no engine reaches. A worker that ends sends it in Drained."""


class ReportMapping(_Message, frozen=True, tag="report_mapping"):
    """Report whether the worker can map the arena. If not, its engine neither loads nor stores.

    A worker sends this after each attempt that fails, and after the first one that succeeds again.
    A worker that can copy nothing any more reports that it cannot map the arena.
    """

    is_mapped: bool


class ReportStale(_Message, frozen=True, tag="report_stale"):
    """Report whether the engine's own prefix cache has, or may have, blocks of other weights.

    If so, the engine neither loads nor stores until that cache is reset while no request runs.
    `unread` is the number of modules of all ranks whose weights cannot be read: with any, the
    engine shares with no other.
    """

    is_stale: bool
    unread: Count = 0


class Greeting(_Numbered, frozen=True, tag="hello"):
    """The part of Hello that all versions have in common."""

    version: Count


class Identify(_Numbered, frozen=True, tag="identify"):
    """Give the session's bytes another identity from here on, as after a weight update."""

    namespace: Hash


class Subscribe(_Message, frozen=True, tag="subscribe"):
    """Ask for Removed messages about the objects of the session's identity that leave RAM.

    From here on ReadAnnouncements begins again with everything that is there.
    """


class Describe(_Message, frozen=True, tag="describe"):
    """Describe chunks of the session's identity for its other engines that subscribe.

    The i-th item of every list belongs to the i-th chunk. `parents` are the hashes of the chunks
    before (zeros: there is none). Engines alone read `descriptions`, which have the token ids.
    """

    hashes: ChangedHashes
    parents: ChangedHashes
    descriptions: Descriptions


class ReadAnnouncements(_Message, frozen=True, tag="read_announcements"):
    """Ask for one Announced, as soon as there is something to announce.

    It has descriptions of `description_bytes` at most, or a single chunk. Each one is asked for,
    so that an engine gets no more than a step may take. Subscribe and Identify take back what was
    asked for before them. By `number` the engine knows what was sent before.
    """

    number: Count
    description_bytes: Annotated[int, Meta(gt=0, le=ANNOUNCED_BYTES_MAX)]


class Lookup(_Numbered, frozen=True, tag="lookup"):
    """Ask for the largest hit among `hashes`, HASH_BYTES each, in prefix order.

    A hit opens `lease`. The answer may take `wait_ms` where tiers below RAM have more (0: only RAM
    is looked at). Tiers are read as far as that is faster than computing `tokens_per_second` (0:
    the two are not weighed).

    `tails` are names of hits that end inside a chunk (core.tails), in prefix order from chunk
    `tails_from` on: one for each match unit that ends inside a chunk.

    With an `audit_lease` (0: none) the answer also names the objects that a live audit may compare.

    With `promises` the engine stores what it computes of the prompt, so that others may wait for it
    (tiers.promises). Where they may, the answer is `promised`.

    With `computed_elsewhere` another engine computes the prompt, perhaps on another node. So tiers
    that other nodes write to are asked again for what is missing (tiers.node_waits).

    With `is_scan` the hit does not count as a use of its objects, so they go as early as without.
    """

    lease: Count
    hashes: Hashes
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    tokens_per_second: Count = 0
    tails: Hashes = b""
    tails_from: Count = 0
    audit_lease: Count = 0
    promises: bool = False
    computed_elsewhere: bool = False
    is_scan: bool = False


class Release(_Message, frozen=True, tag="release"):
    """End a read lease. The tokens and bytes that were loaded under it are counted.

    With `unused` the engine computed what the hit has, because the answer was late or the hit could
    not be loaded. It is no hit then.
    """

    lease: Count
    tokens: Count = 0
    loaded_bytes: Count = 0
    failed: bool = False
    unused: bool = False


class Computing(_Message, frozen=True, tag="computing"):
    """The engine begins to compute what a `promised` answer lacked. `lease` is its lookup's."""

    lease: Count


class Computed(_Message, frozen=True, tag="computed"):
    """All that the engine stores of that is committed, or it computes it no more."""

    lease: Count


class Prefetch(_Message, frozen=True, tag="prefetch"):
    """A prompt of the session's identity is expected in `in_ms`: bring it from tiers into RAM.

    `hashes`, `tails` and `tails_from` are as in Lookup. A later message about the same prompt
    replaces an earlier one that waits. What is refused, such as more than PREFETCH_MS_MAX ahead, is
    counted. An end of the session cancels nothing.
    """

    hashes: Hashes
    in_ms: Count = 0
    tails: Hashes = b""
    tails_from: Count = 0


class PrefetchState(StrEnum):
    """The state of a prefetch. Metrics have the ends of those that were cut or refused."""

    WAITING = "waiting"
    READING = "reading"
    WHOLE = "whole"
    NEEDLESS = "needless"
    ABSENT = "absent"
    BOUND = "bound"
    PRESSURE = "pressure"
    LATE = "late"
    IDENTITY = "identity"
    TIERS_AWAY = "tiers_away"
    FAILED = "failed"
    NO_TIERS = "no_tiers"
    TOO_FAR = "too_far"
    TOO_MANY = "too_many"


class PrefetchStatus(Struct, frozen=True, array_like=True):
    """What became of a prefetch so far."""

    number: Count
    """By it ReadPrefetches asks for it. 0 where it was refused."""
    state: PrefetchState
    tokens: Count
    """Tokens of the prompt's chunks and tails that are named."""
    hit_tokens: Count = 0
    """Tokens that RAM alone hit at its end."""
    objects: Count = 0
    """Objects that were read for it."""
    read_bytes: Count = 0
    wait_ms: Count = 0
    """The time until its prompt is expected."""


class StartPrefetch(_Numbered, frozen=True, tag="start_prefetch"):
    """Prefetch the prompt of a request that ended, or all prompts of a family.

    A family are the latest prompts whose first chunk's hash begins with `family`. The daemon knows
    the prompts of the last lookups.
    """

    request_id: Text = ""
    family: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""
    in_ms: Count = 0


class ReadPrefetches(_Numbered, frozen=True, tag="read_prefetches"):
    """Ask what became of prefetches, by their numbers."""

    numbers: Annotated[list[Count], Meta(max_length=PREFETCHED_MAX)]


class Prefetching(_Numbered, frozen=True, tag="prefetching"):
    """The answer to StartPrefetch and ReadPrefetches. It leaves out numbers that are forgotten."""

    prefetches: list[PrefetchStatus]
    is_known: bool = True
    """False where the daemon knows no such request, or no prompt of the family."""


class Reserve(_Numbered, frozen=True, tag="reserve"):
    """Ask for write slots ahead of need: `count` slots of `parts` parts of `part_bytes` bytes."""

    part_bytes: Annotated[int, Meta(gt=0, le=1 << 40)]
    parts: Annotated[int, Meta(gt=0, le=RANKS_MAX)]
    count: Annotated[int, Meta(ge=0, le=BATCH_MAX)]


class Commit(_Message, frozen=True, tag="commit"):
    """Make objects of written slots. The i-th item of every list belongs to the i-th slot.

    `parents` are the hashes of the chunks before (zeros: there is none). `classes` has the
    core.policies.EvictionClass of each object, a byte each. Both decide what is evicted first.
    `tenants` are the tenants whose quota the objects count against (0: nobody's). Where users have
    quotas, it is that of the engine's user instead. All three may be left out. A single number in
    `groups` or `tenants` is that of all objects. A single hash in `parents` is that of the chunk
    before the first object, and each further object comes after the one before it in `hashes`.
    """

    slots: ChangedSlots
    groups: Changed
    hashes: ChangedHashes
    tokens: Count = 0
    parents: ChangedHashes = b""
    classes: Annotated[bytes, Meta(max_length=CHANGES_MAX)] = b""
    tenants: Changed = b""


class Advise(_Message, frozen=True, tag="advise"):
    """Tell the daemon how long chunks of the session's identity will be needed.

    `hashes` are the names of a prompt's chunks in prefix order, from its first chunk on, and then
    those of its tails. They may name chunks that are not committed yet.

    RETAIN keeps the objects of these chunks in RAM for `ttl_ms` from now on, also those that are
    committed meanwhile, within the shares of store.retention. With 0 it ends that. `tenant` is as
    in Commit. RELEASE and DEMOTE are about the chunks from the last one back to the first after
    which another prompt goes on. They are not retained any more, and are evicted first.
    """

    advice: Advice
    hashes: Hashes
    tenant: Tenant = 0
    ttl_ms: Count = 0


class Free(_Message, frozen=True, tag="free"):
    """Give write slots back that were granted and are not committed."""

    slots: ChangedSlots


class ReportRequest(_Message, frozen=True, tag="report_request"):
    """Report the course of a request that ended."""

    request_id: Text
    explanation: RequestExplanation


class ReportIdentity(_Message, frozen=True, tag="report_identity"):
    """Report the facts that the session's identity is made of."""

    facts: Facts


class ReportAudit(_Message, frozen=True, tag="report_audit"):
    """Report the outcome of a live audit of a request of the session's identity."""

    request_id: Text
    outcome: AuditOutcome
    detail: Fact = ""


class Explain(_Numbered, frozen=True, tag="explain"):
    """Ask for the course of a request. An empty `request_id` only asks which requests are known."""

    request_id: Text


class Stats(_Numbered, frozen=True, tag="stats"):
    """Ask for the daemon's values. With `status` also ask for what the status page shows."""

    status: bool = False
    debug: bool = True
    """Whether to answer debug values too, which nothing but `hybridkv stats --debug` shows."""


class ListEngines(_Numbered, frozen=True, tag="list_engines"):
    """Ask for every session of an engine."""


class Clear(_Numbered, frozen=True, tag="clear"):
    """Drop at most CHANGES_MAX objects. It is sent again until the reply's `count` is less.

    An object under a lease goes when the lease ends. With `tiers` the tiers below RAM remove their
    objects too.
    """

    tiers: bool = False


class Pin(_Numbered, frozen=True, tag="pin"):
    """Retain what RAM has now of a request, an identity or a tenant for `ttl_ms`, or end that (0).

    The answer comes at once, and the work is done after it. A Pin that names nothing changes
    nothing.
    """

    ttl_ms: Count = 0
    request_id: Text = ""
    """The prompt of this request. Alone."""
    identity: Annotated[str, Meta(max_length=2 * HASH_BYTES, pattern="^[0-9a-f]*$")] = ""
    """All that has an identity that begins with these digits, of the tenant if it is given."""
    tenant: Tenant | None = None

    @property
    def names_anything(self) -> bool:
        """True where it pins or unpins, and False where it only asks."""
        return bool(self.request_id or self.identity) or self.tenant is not None

    def names_same(self, other: "Pin") -> bool:
        """Return True where both name the same."""
        mine = self.request_id, self.identity, self.tenant
        return mine == (other.request_id, other.identity, other.tenant)


class WirePin(Struct, frozen=True, array_like=True):
    """One pin whose time is not over. The first three fields are those of its Pin."""

    request_id: Text
    identity: Text
    tenant: Tenant | None
    left_ms: Count
    chunks: Count
    """Chunks that RAM had, so far."""
    kept: Count
    """Those of them that were retained. The others were refused."""


class RetainedBytes(Struct, frozen=True, array_like=True):
    """The bytes that are retained for one tenant, for whatever reason."""

    tenant: Tenant
    charged_bytes: Count
    share_bytes: Count


class ListObjects(_Numbered, frozen=True, tag="list_objects"):
    """Ask for a page of the objects that one place holds: 0 is RAM, n the n-th tier below it.

    `cursor` 0 begins with the first page. Further pages are asked for with the cursor of the answer
    before, at most CHANGES_MAX objects each. A page of a tier that is not read yet is empty.
    """

    place: Count
    cursor: Count = 0


class Forget(_Numbered, frozen=True, tag="forget"):
    """Forget objects in one place (as in ListObjects) for ever, and ask how far that is.

    `keys` are KEY_BYTES each: identity, chunk hash, and the group's id, big-endian. In RAM they are
    dropped at once. Objects under leases, and those that a tier is reading or writing, go when that
    ends. With `rest` all free memory is overwritten as well, and a tier removes what it has put
    aside as damaged. Without either it only asks.
    """

    place: Count
    keys: ForgottenKeys = b""
    rest: bool = False


class ReadQuotas(_Numbered, frozen=True, tag="read_quotas"):
    """Ask for the bounds of tenants."""


class SetQuota(_Numbered, frozen=True, tag="set_quota"):
    """Change the bound of a tenant, or of all that have none of their own (`tenant` 0).

    `bound_bytes` None is no bound. With `is_default` the tenant has none of its own any more.
    """

    tenant: Tenant
    bound_bytes: Count | None = None
    is_default: bool = False


class ReportCorrupt(_Message, frozen=True, tag="report_corrupt"):
    """Drop objects whose bytes were proven wrong, also those under leases."""

    slots: ChangedSlots


class Welcome(_Numbered, frozen=True, tag="welcome"):
    """The answer to Hello. `boot` differs in every life of a daemon."""

    version: Count
    boot: Text
    arena_path: Annotated[str, Meta(max_length=4096)]
    arena_bytes: Count
    """The size of the whole file."""
    slots_bytes: Count
    """The size of the part that has the slots. The rest is the daemon's."""
    pid: Count


class AuditOffer(Struct, frozen=True, array_like=True):
    """Objects of one chunk that are stored, for an engine that computes the chunk.

    All slots below are under the lease `lease`.
    """

    lease: Count
    chunk: Count
    """The chunk that is computed: the hit's last, or the first after the hit."""
    slots: Slots
    """The slot of each group's object of the chunk, NO_SLOT where there is none."""
    shorter_slots: Slots = b""
    """The slots of the hit that ends before the chunk, as in Found. Empty unless the chunk is the
    hit's last."""


class Found(_Numbered, frozen=True, tag="found"):
    """The answer to Lookup: the hit, each group's presence mask, and the slots that the hit needs.

    Slots come group by group. Only the first BATCH_MAX // groups chunks are looked up, and the
    masks have as many bytes.
    """

    lease: Count
    depth: Count
    """As in core.coverage.Hit, like `tail` and `chunks`. 0 = a miss."""
    masks: Masks
    slots: Slots
    tiers: dict[Text, Count] = {}
    """Chunks of the hit that came up for it, by tier."""
    why: Fact = ""
    """The reason why tiers were not read further, for people."""
    tail: Count = 0
    """The number, counted from 1, of the tail in Lookup that the hit ends with. 0 = none. Its
    objects are the last of each group's slots."""
    audit: AuditOffer | None = None
    """The objects that a live audit may compare. None without an `audit_lease`, or without any."""
    junctions: Annotated[list[Count], Meta(max_length=JUNCTIONS_MAX)] = []
    """The chunks, ascending, after which the prompt parts from others, and a state or a window is
    missing (`core.junctions`). Objects that a tier below RAM has count."""
    promised: bool = False
    """True where others may wait for what the engine computes now. It says Computing as it begins,
    and Computed at the end, in any case."""

    @property
    def chunks(self) -> int:
        """The whole chunks of the hit. A tail is none of them."""
        return self.depth - bool(self.tail)


class Pending(_Numbered, frozen=True, tag="pending"):
    """The answer to a Lookup takes up to `wait_ms`: tiers are read, or another engine computes it.

    The hit will have `depth` at most. It and `masks`, what RAM has now, are as in Found.
    """

    lease: Count
    wait_ms: Count
    depth: Count
    masks: Masks


class Reserved(_Numbered, frozen=True, tag="reserved"):
    """The answer to Reserve: at most CHANGES_MAX slots, perhaps fewer than asked for.

    Pages of the arena below `reserved_bytes` exist.
    """

    part_bytes: Count
    parts: Count
    slots: ChangedSlots
    reserved_bytes: Count


class Removed(_Numbered, frozen=True, tag="removed"):
    """Sent unasked, with `id` 0, to a session that subscribed: RAM has these objects no more.

    `groups` has the group's index, a byte for each object. An object may be there again when this
    is read, but each removal is reported. With `everything` any object may be gone. `below` has a
    byte for each object as well, 1 where a tier below RAM has it. When no tier has such an object
    any more it is reported again, with 0.
    """

    hashes: Annotated[bytes, Meta(max_length=REMOVED_MAX * HASH_BYTES)]
    groups: Annotated[bytes, Meta(max_length=REMOVED_MAX)]
    everything: bool = False
    below: Annotated[bytes, Meta(max_length=REMOVED_MAX)] = b""


class Announced(_Numbered, frozen=True, tag="announced"):
    """Sent after ReadAnnouncements: described chunks of the session's identity.

    The `id` is the number of the ReadAnnouncements.
    The fields are as in Describe. A chunk comes after the chunk before it. `masks` has for each
    group a byte for each chunk: IN_RAM, BELOW, or 0 where neither has the object.
    A later Removed is about objects that a mask has. With `more` there are further chunks now.
    """

    hashes: ChangedHashes
    parents: ChangedHashes
    descriptions: Descriptions
    masks: Masks
    more: bool


class Report(_Numbered, frozen=True, tag="report"):
    """The answer to Stats: the daemon's values, and its status where it was asked for."""

    values: dict[str, float]
    """The daemon's counters and gauges, by one name each."""
    tiers: list[TierStatus]
    metrics_url: str
    """The URL of /metrics. Empty where the daemon serves no pages."""
    status: Status | None = None


class ObjectPage(_Numbered, frozen=True, tag="object_page"):
    """The answer to ListObjects. `cursor` asks for the next page. None = this was the last one."""

    objects: list[HeldObject]
    cursor: Count | None
    error: Fact = ""
    """The reason why the place cannot be listed further, for people."""
    models: dict[bytes, Text] = {}
    """With the first page: the model of each identity of which an engine named it."""
    has_user_tenants: bool = False
    """The tenant of an object is its engine's user, and not a salt."""
    up_seconds: float = 0.0
    """The time for which the daemon has run. What it found in RAM is older, if its age is None."""


class Forgotten(_Numbered, frozen=True, tag="forgotten"):
    """The answer to Forget."""

    count: Count
    """Objects that RAM has dropped by this message, or the tier has erased since the last one."""
    failed: Count = 0
    """Objects that the tier could not erase since the last answer."""
    error: Fact = ""
    """The first reason for that, or that the token book's file cannot be written, for people."""
    pending: Count = 0
    """What is asked for and not done."""
    in_use: Count = 0
    """Objects of RAM that are forgotten and still read or written. They go when that ends."""
    wiping_bytes: Count = 0
    """Bytes of RAM that are still to be looked through and overwritten."""
    unwritten_bytes: Count = 0
    """Bytes of slots that engines may write into. What was in them before is there until then."""


class TenantQuota(Struct, frozen=True, array_like=True):
    """The bound of one tenant in bytes, and what counts against it. None = no bound."""

    tenant: Tenant
    bound_bytes: Count | None
    held_bytes: Count
    is_own: bool = False


class QuotaReport(_Numbered, frozen=True, tag="quotas"):
    """The answer to ReadQuotas and SetQuota."""

    default: Count | None
    """The bound of tenants without one of their own."""
    served_default: Count | None
    """The one that `serve` was given, which counts again from the next start on."""
    quotas: list[TenantQuota]
    """All bounds of single tenants, and of others those that were found first."""
    has_user_tenants: bool = False
    is_settled: bool = True
    """False while objects are counted or evicted for a bound, or the file is written."""
    path: Annotated[str, Meta(max_length=4096)] = ""
    """The file that keeps what was set at run time."""
    error: Fact = ""
    """Why it cannot be used, for people."""


class Engines(_Numbered, frozen=True, tag="engines"):
    """The answer to ListEngines: a WireEngine for each session."""

    engines: list[WireEngine]


class Done(_Numbered, frozen=True, tag="done"):
    """The answer to Clear, with the number of objects dropped, and to Identify."""

    count: Count


class Pinned(_Numbered, frozen=True, tag="pinned"):
    """The answer to Pin: all pins, and the tenants for which most is retained."""

    pins: list[WirePin]
    tenants: list[RetainedBytes]
    is_busy: bool
    """True while pins, or advice of engines, wait to be done."""


class Explained(_Numbered, frozen=True, tag="explained"):
    """The answer to Explain. Without an `explanation` the request is not known."""

    latest: list[Text]
    """The ids of the last requests, the latest first."""
    identity: bytes = b""
    explanation: RequestExplanation | None = None
    others: list[OtherIdentity] = []
    """Identities under which the request's first chunk is in RAM as well."""


class Error(_Numbered, frozen=True, tag="error"):
    """The answer to a request that was refused. `message` is a sentence for people."""

    code: Text
    message: Annotated[str, Meta(max_length=4096)]


SessionMessage = Hello | Drained | ReportMapping | ReportStale | Identify
AnnouncingMessage = Subscribe | Describe | ReadAnnouncements
LookupMessage = Lookup | Release | Computing | Computed | Advise | Prefetch
SlotMessage = LookupMessage | Reserve | Commit | Free | ReportCorrupt
EngineMessage = (
    SessionMessage | AnnouncingMessage | SlotMessage | ReportRequest | ReportIdentity | ReportAudit
)
"""The messages of an engine's connections. Control connections send the rest."""
Request = (
    EngineMessage
    | Stats
    | ListEngines
    | Clear
    | Pin
    | Explain
    | StartPrefetch
    | ReadPrefetches
    | ListObjects
    | Forget
    | ReadQuotas
    | SetQuota
)
UnaskedReply = Removed | Announced
"""The messages that a session gets without a request of their own."""
Reply = (
    Welcome
    | Found
    | Pending
    | Reserved
    | UnaskedReply
    | Report
    | Engines
    | ObjectPage
    | Forgotten
    | QuotaReport
    | Done
    | Pinned
    | Explained
    | Prefetching
    | Error
)


def geometry_to_wire(geometry: Geometry) -> WireGeometry:
    """Return the part of a geometry that the daemon needs. The daemon checks it."""
    groups = [
        WireGroup(
            gid=group.gid,
            kind=group.kind,
            tokens_per_block=group.tokens_per_block,
            block_bytes=group.block_bytes,
            window_tokens=group.window_tokens,
            extra_retained_tokens=group.extra_retained_tokens,
            replicated=group.replicated,
        )
        for group in geometry.groups
    ]
    return WireGeometry(
        groups=groups,
        chunk_tokens=geometry.chunk_tokens,
        alignment_tokens=geometry.alignment_tokens,
        hash_tokens=geometry.hash_tokens,
        ranks=geometry.node_shards,
        stages=geometry.node_stages,
    )


def geometry_from_wire(wire: WireGeometry) -> Geometry:
    """Return a Geometry whose groups have one layer each. Raises ConfigError or GeometryError."""
    groups = tuple(
        Group(
            gid=group.gid,
            kind=group.kind,
            tokens_per_block=group.tokens_per_block,
            layer_bytes=(group.block_bytes,),
            window_tokens=group.window_tokens,
            extra_retained_tokens=group.extra_retained_tokens,
            replicated=group.replicated,
        )
        for group in wire.groups
    )
    return Geometry(
        groups=groups,
        chunk_tokens=wire.chunk_tokens,
        alignment_tokens=wire.alignment_tokens,
        hash_tokens=wire.hash_tokens,
        ranks=wire.ranks,
        stages=wire.stages,
    )


def describe_groups(groups: Iterable[Group | WireGroup]) -> str:
    """Return groups as gid:kind/tokens per block, for people: "0:full/16 1:sliding/16"."""
    return " ".join(f"{group.gid}:{group.kind}/{group.tokens_per_block}" for group in groups)
