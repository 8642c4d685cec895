"""The messages between an engine and the daemon. Every byte on the wire is one of these, in msgpack.

Requests carry an `id` that the reply repeats, messages without one are one-way; a refused one is answered by an Error
all the same, with `id` 0.  Who may say what, and what the reply is: wire.protocol.  Lists of fixed-size things
travel as packed little-endian arrays in byte strings, so a 128k-token lookup is one message of a few tens of KB.
"""

from typing import Annotated

from msgspec import Meta, Struct

from hybridkv.core.geometry import GROUPS_MAX, RANKS_MAX, Geometry, Group, Kind
from hybridkv.core.keys import HASH_BYTES

PROTOCOL_VERSION = 5
CHUNKS_MAX = 1 << 16
"""Chunks in one lookup."""
BATCH_MAX = 1 << 16
"""Slots in one message."""
CHANGES_MAX = 256
"""Slots that one message may change: each takes the daemon some 10 us, in which it answers nobody else."""
REMOVED_MAX = 1024
"""Objects in one Removed."""
MESSAGE_BYTES_MAX = 16 << 20
WAIT_MS_MAX = 30_000

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
TEXT_MAX = 256
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
FACT_MAX = 512
Fact = Annotated[str, Meta(max_length=FACT_MAX)]
Facts = Annotated[dict[Annotated[str, Meta(max_length=64)], Fact], Meta(max_length=64)]
"""Sentences for people, by name."""
Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Packed = Annotated[bytes, Meta(max_length=BATCH_MAX * 8)]
Hashes = Annotated[bytes, Meta(max_length=CHUNKS_MAX * HASH_BYTES)]
Changed = Annotated[bytes, Meta(max_length=CHANGES_MAX * 8)]
ChangedHashes = Annotated[bytes, Meta(max_length=CHANGES_MAX * HASH_BYTES)]


class WireGroup(Struct, frozen=True, array_like=True):
    """core.geometry.Group without what the daemon does not need."""

    gid: Annotated[int, Meta(ge=0, le=0xFFFF)]
    kind: Kind
    tokens_per_block: Annotated[int, Meta(gt=0, le=1 << 30)]
    block_bytes: Annotated[int, Meta(gt=0, le=1 << 40)]
    window_tokens: Annotated[int, Meta(ge=0, le=1 << 30)]
    extra_retained_tokens: Annotated[int, Meta(ge=0, le=1 << 30)]
    replicated: bool


class WireGeometry(Struct, frozen=True, array_like=True):
    """core.geometry.Geometry on the wire."""

    groups: Annotated[list[WireGroup], Meta(min_length=1, max_length=GROUPS_MAX)]
    chunk_tokens: Annotated[int, Meta(gt=0, le=1 << 30)]
    alignment_tokens: Annotated[int, Meta(gt=0, le=1 << 30)]
    hash_tokens: Annotated[int, Meta(gt=0, le=1 << 30)]
    ranks: Annotated[int, Meta(gt=0, le=RANKS_MAX)]


class WireModel(Struct, frozen=True, array_like=True):
    """What people want to know of an engine besides its geometry; the daemon only passes it on."""

    name: Text
    max_model_len: Count
    kv_dtype: Text
    layers: Annotated[list[Count], Meta(max_length=GROUPS_MAX)]
    """Layers of each group, in the order of the geometry's."""
    retention_tokens: Count | None
    """See core.states.StateRule, as `step_tokens`."""
    step_tokens: Count


class WireEngine(Struct, frozen=True, array_like=True):
    """One session of the daemon."""

    engine_id: Text
    namespace: Hash
    geometry: WireGeometry
    model: WireModel | None


class _Message(Struct, frozen=True, array_like=True, tag_field="type"):
    """Base of all messages; the tag is the class's name."""


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a connection. `role` engine opens a session, worker joins it, control only asks."""

    id: Count
    version: Count
    role: Annotated[str, Meta(pattern="^(engine|worker|control)$")]
    engine_id: Text = ""
    namespace: Hash | None = None
    geometry: WireGeometry | None = None
    model: WireModel | None = None
    session: Count = 0
    """Of an engine: counts its greetings, so that workers can tell which one their work belongs to."""


class Drained(_Message, frozen=True, tag="drained"):
    """Of a worker: it copies nothing any more that was planned before its engine's greeting number `session`."""

    session: Count


NEVER = 1 << 53
"""A greeting that no engine reaches: a worker that ends is drained for ever."""


class Greeting(_Message, frozen=True, tag="hello"):
    """What all versions of Hello have in common."""

    id: Count
    version: Count


class Identify(_Message, frozen=True, tag="identify"):
    """The session's bytes belong to another identity from here on, as after a weight update; answered by Done."""

    id: Count
    namespace: Hash


class Watch(_Message, frozen=True, tag="watch"):
    """From here on the session is told of objects of its identity that RAM has no more, by Removed."""


class Lookup(_Message, frozen=True, tag="lookup"):
    """The largest hit among chunks named by `hashes` (HASH_BYTES each, in prefix order); a hit opens `lease`.

    The answer may take `wait_ms` where tiers below RAM have more (0: only RAM is looked at); they are read as far as
    that is faster than computing `tokens_per_second` (0: not known, or not to be weighed).
    """

    id: Count
    lease: Count
    hashes: Hashes
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    tokens_per_second: Count = 0


class Release(_Message, frozen=True, tag="release"):
    """End a read lease; what was loaded under it is only counted."""

    lease: Count
    tokens: Count = 0
    loaded_bytes: Count = 0
    failed: bool = False


class Want(_Message, frozen=True, tag="want"):
    """Ask for write slots ahead of need: `count` slots of `parts` parts that have `part_bytes` bytes each."""

    id: Count
    part_bytes: Annotated[int, Meta(gt=0, le=1 << 40)]
    parts: Annotated[int, Meta(gt=0, le=RANKS_MAX)]
    count: Annotated[int, Meta(ge=0, le=BATCH_MAX)]


class Commit(_Message, frozen=True, tag="commit"):
    """Written slots become objects: the i-th of everything belong together.

    `parents` are the hashes of the chunks before them (zeros: there is none) and `interior` has a 1 for each that only
    a hit short of the prompt's end would need; both say what goes first where room is needed.  `tenants` says whose
    quota they count against (0: nobody's).  Each of the three may be left out.

    One number in `groups` or `tenants` is that of all objects.  One hash in `parents` is that before the first object,
    and each of the others comes after the one before it in `hashes`.
    """

    offsets: Changed
    generations: Changed
    groups: Changed
    hashes: ChangedHashes
    tokens: Count = 0
    parents: ChangedHashes = b""
    interior: Annotated[bytes, Meta(max_length=CHANGES_MAX)] = b""
    tenants: Changed = b""


class Abandon(_Message, frozen=True, tag="abandon"):
    """Give write slots back unused."""

    offsets: Changed
    generations: Changed


class Tell(_Message, frozen=True, tag="tell"):
    """What became of a request that ended."""

    request_id: Text
    facts: Facts


class Describe(_Message, frozen=True, tag="describe"):
    """What the session's identity is made of."""

    facts: Facts


class Explain(_Message, frozen=True, tag="explain"):
    """Ask what became of a request; "" = which requests there are."""

    id: Count
    request_id: Text


class Stats(_Message, frozen=True, tag="stats"):
    """Ask for the daemon's counters; with `status` the Report's `info` has what the status page shows, in JSON."""

    id: Count
    status: bool = False


class ListEngines(_Message, frozen=True, tag="list_engines"):
    """Ask who is connected."""

    id: Count


class Clear(_Message, frozen=True, tag="clear"):
    """Drop objects, at most CHANGES_MAX: said again until `count` is less. Those under a lease go when it ends.

    With `tiers` those below RAM are told to remove all that they have, and nobody waits for that.
    """

    id: Count
    tiers: bool = False


class Condemn(_Message, frozen=True, tag="condemn"):
    """Objects whose bytes were proven wrong: they are dropped, whatever leases they are under."""

    offsets: Changed
    generations: Changed


class Welcome(_Message, frozen=True, tag="welcome"):
    """The daemon's answer to Hello. `boot` differs in every life of a daemon."""

    id: Count
    version: Count
    boot: Text
    arena_path: Annotated[str, Meta(max_length=4096)]
    arena_bytes: Count
    """Of the whole file."""
    slots_bytes: Count
    """Of the part that slots may be in; the rest is the daemon's."""
    pid: Count


class Found(_Message, frozen=True, tag="found"):
    """Answer to Lookup: hit chunks, per group the presence mask, and slots of what the hit needs, group by group.

    Only the first BATCH_MAX // groups chunks are looked up; the masks tell how many.
    """

    id: Count
    lease: Count
    chunks: Count
    masks: Annotated[list[Annotated[bytes, Meta(max_length=CHUNKS_MAX)]], Meta(max_length=GROUPS_MAX)]
    offsets: Packed
    generations: Packed
    tiers: dict[Text, Count] = {}
    """Chunks of the hit that came up for it, by tier."""
    why: Fact = ""
    """Why no more of what tiers have was read, for people."""


class Pending(_Message, frozen=True, tag="pending"):
    """The answer to a Lookup takes longer, `wait_ms` at most, because tiers below RAM are read for it.

    It will be a hit of `chunks` at most; `masks` is what RAM has now, as in Found.
    """

    id: Count
    lease: Count
    wait_ms: Count
    chunks: Count
    masks: Annotated[list[Annotated[bytes, Meta(max_length=CHUNKS_MAX)]], Meta(max_length=GROUPS_MAX)]


class Granted(_Message, frozen=True, tag="granted"):
    """Answer to Want: maybe fewer slots than asked for, CHANGES_MAX at most. Pages below `reserved_bytes` exist."""

    id: Count
    part_bytes: Count
    parts: Count
    offsets: Changed
    generations: Changed
    reserved_bytes: Count


class Removed(_Message, frozen=True, tag="removed"):
    """Unasked, to a session that watches: RAM has no more of these objects, the i-th of both belong together.

    `groups` has a byte for each, the group's index.  An object may be there again by the time this is read, but none
    that was there before is gone without being told.  With `everything` more went than can be told: any may be gone.
    """

    id: Count
    """0."""
    hashes: Annotated[bytes, Meta(max_length=REMOVED_MAX * HASH_BYTES)]
    groups: Annotated[bytes, Meta(max_length=REMOVED_MAX)]
    everything: bool = False


class Report(_Message, frozen=True, tag="report"):
    """Answer to Stats."""

    id: Count
    values: dict[str, float]
    info: dict[str, str]


class Engines(_Message, frozen=True, tag="engines"):
    """Answer to ListEngines."""

    id: Count
    engines: list[WireEngine]


class Done(_Message, frozen=True, tag="done"):
    """Answer to Clear (how many objects were dropped) and to Identify."""

    id: Count
    count: Count


class Explained(_Message, frozen=True, tag="explained"):
    """Answer to Explain: facts (none = the request is not known) and the ids of the last requests, latest first."""

    id: Count
    facts: dict[str, str]
    latest: list[Text]


class Error(_Message, frozen=True, tag="error"):
    """A request that was refused; `code` is a word for programs, `message` a sentence for people."""

    id: Count
    code: Text
    message: Annotated[str, Meta(max_length=4096)]


Engine = Hello | Drained | Identify | Watch | Lookup | Release | Want | Commit | Abandon | Condemn | Tell | Describe
"""What an engine says; whoever asks with a control connection says the rest."""
Request = Engine | Stats | ListEngines | Clear | Explain
Reply = Welcome | Found | Pending | Granted | Removed | Report | Engines | Done | Explained | Error


def geometry_to_wire(geometry: Geometry) -> WireGeometry:
    """What the daemon needs of a geometry."""
    return WireGeometry(
        [
            WireGroup(
                group.gid,
                group.kind,
                group.tokens_per_block,
                group.block_bytes,
                group.window_tokens,
                group.extra_retained_tokens,
                group.replicated,
            )
            for group in geometry.groups
        ],
        geometry.chunk_tokens,
        geometry.alignment_tokens,
        geometry.hash_tokens,
        geometry.ranks,
    )


def geometry_from_wire(wire: WireGeometry) -> Geometry:
    """A Geometry with each group's layers summed up; raises ConfigError or GeometryError."""
    return Geometry(
        tuple(
            Group(
                group.gid,
                group.kind,
                group.tokens_per_block,
                (group.block_bytes,),
                group.window_tokens,
                group.extra_retained_tokens,
                group.replicated,
            )
            for group in wire.groups
        ),
        wire.chunk_tokens,
        wire.alignment_tokens,
        wire.hash_tokens,
        wire.ranks,
    )
