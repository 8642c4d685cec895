"""KV cache groups, and every conversion between tokens, blocks, chunks and bytes.

A *group* is a set of layers that share one block table. The groups of a model have blocks of
different sizes (DeepSeek-V4: 256/64/64/4/8 tokens). A *chunk* is the unit of identity, and its size
is a multiple of all groups' blocks, so every conversion below is an exact division (requirements
A20, corrected by D8)::

    tokens   0                       chunk_tokens             2*chunk_tokens
    chunk    |----------- 0 -----------|----------- 1 -----------|
    group a  |--- 0 ---|--- 1 ---|--- ...                            blocks_per_chunk = 2 or more
    group b  |----------- 0 -----------|----------- 1 -----------|   blocks_per_chunk = 1
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from hybridkv.core.errors import ConfigError, GeometryError
from hybridkv.core.findings import Check, Finding, Verdict, fail, judge
from hybridkv.core.packed import SLOT_BYTES

CHUNK_TOKENS_MIN = 128
"""The fewest tokens of a derived chunk: smaller objects cost lookups more than they add to hits."""
GROUPS_MAX = 256
RANKS_MAX = 1024
PERIOD_MAX = 1024
"""The most chunks until the sizes of a chunked local group repeat. Llama 4 has 64."""


class GroupKind(StrEnum):
    """The tokens that a group keeps, which are those that a restore needs."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class Group:
    """One prefix-cacheable group. Scratch and ring groups are never a Group (requirements D7)."""

    gid: int
    kind: GroupKind
    tokens_per_block: int
    layer_bytes: tuple[int, ...]
    """Bytes of one block in each layer of the group, on one rank or in one shard of its heads
    (Geometry.shards), in layer order. Stages of a pipeline have other layers, and the same sum
    (vllm.stages)."""
    window_tokens: int = 0
    """The window (sliding), or the attention chunk (chunked local). 0 for other kinds."""
    extra_retained_tokens: int = 0
    """Tokens before the window that speculative modules read. 0 except for sliding groups."""
    replicated: bool = False
    """True if all tensor parallel ranks of a stage keep the same bytes (MLA): an object has one
    part for each stage (C5)."""

    def __post_init__(self) -> None:
        windowed = self.kind in (GroupKind.SLIDING, GroupKind.CHUNKED_LOCAL)
        extra, what = self.extra_retained_tokens, ""
        if self.tokens_per_block <= 0:
            what = f"tokens_per_block={self.tokens_per_block} must be positive (B5)"
        elif not self.layer_bytes or min(self.layer_bytes) <= 0:
            what = "every layer needs a positive block size in bytes"
        elif windowed != (self.window_tokens > 0):
            what = f"kind {self.kind} with window_tokens={self.window_tokens}"
        elif extra < 0 or (extra and self.kind is not GroupKind.SLIDING):
            what = f"extra_retained_tokens={extra}"
        if what:
            raise GeometryError(f"group {self.gid}: {what}")

    def __hash__(self) -> int:
        """Cheap, because rules are cached by group. Equality compares all fields."""
        return hash((self.gid, self.kind, self.tokens_per_block))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group, on one rank or in one shard."""
        return sum(self.layer_bytes)

    def skipped_tokens(self, boundary: int) -> int:
        """Returns the tokens at a prompt's start that computing token `boundary` does not read.

        The number never decreases with `boundary`.
        """
        kind = self.kind
        if kind is _FULL:
            return 0
        if kind is _SLIDING:
            return max(0, boundary - self.window_tokens + 1 - self.extra_retained_tokens)
        if kind is _CHUNKED_LOCAL:
            return boundary // self.window_tokens * self.window_tokens
        return max(0, boundary - 1)


# The engine's hooks call `skipped_tokens`, and for Python 3.11 every `GroupKind.FULL` is a call.
_FULL, _SLIDING, _CHUNKED_LOCAL = GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED_LOCAL


@dataclass(frozen=True, slots=True)
class Geometry:
    """All cacheable groups of a model, and the chunk size that suits them all."""

    groups: tuple[Group, ...]
    chunk_tokens: int
    alignment_tokens: int
    """The engine's scheduler block: a hit, local and external, is a multiple of it."""
    hash_tokens: int  # Tokens covered by one of the engine's block hashes.
    ranks: int = 1  # Worker ranks of the engine, those of all stages.
    lookahead_tokens: int = 0
    """Tokens after a chunk that its hash covers too: 1 where a drafter's KV depends on them."""
    stages: int = 1
    """Stages of a pipeline, each of which has some layers. Ranks 0 to ranks // stages - 1 are the
    first one."""
    nodes: int = 1
    """Nodes with a daemon each, over which the ranks are spread. Ranks 0 to ranks // nodes - 1 are
    on the first one."""
    shards: int = 0
    """Shards of the KV heads, each a part of an object, of which every rank has as many. The bytes
    of a group's layers are those of one shard. 0 = one shard for each rank (Settings.share_tp)."""

    def __post_init__(self) -> None:
        if not 0 < len(self.groups) <= GROUPS_MAX or not 0 < self.ranks <= RANKS_MAX:
            what = f"{len(self.groups)} cacheable groups on {self.ranks} ranks"
            raise GeometryError(f"{what} cannot be served")
        if not 0 < self.stages <= self.ranks or self.ranks % self.stages:
            raise GeometryError(f"{self.ranks} ranks are no {self.stages} stages of one size")
        self._check_nodes()
        if self.shards and (self.shards % self.ranks or self.stages > 1 or self.nodes > 1):
            what = f"{self.ranks} ranks of {self.stages} stages on {self.nodes} nodes"
            raise GeometryError(f"{what} cannot have {self.shards} shards of the KV heads")
        if self.lookahead_tokens not in (0, 1):
            what = f"chunk hashes that cover {self.lookahead_tokens} tokens behind a chunk"
            raise GeometryError(f"{what} cannot be made")
        if sorted({group.gid for group in self.groups}) != [group.gid for group in self.groups]:
            raise GeometryError("groups must be in the order of their gids, each once")
        chunk = self.chunk_tokens
        for group in self.groups:
            period = math.lcm(group.window_tokens, chunk) // max(1, chunk)
            if group.kind is GroupKind.CHUNKED_LOCAL and period > PERIOD_MAX:
                raise GeometryError(
                    f"group {group.gid}: chunks of {chunk} tokens meet attention chunks of "
                    f"{group.window_tokens} in {period} ways, at most {PERIOD_MAX} can be served"
                )
        for what, unit in (
            ("the engine's hit alignment", self.alignment_tokens),
            ("the engine's hash block", self.hash_tokens),
            *((f"group {group.gid}'s block", group.tokens_per_block) for group in self.groups),
        ):
            if unit <= 0 or chunk <= 0 or chunk % unit:
                lcm = common_block_tokens(self.groups, self.alignment_tokens, self.hash_tokens)
                raise ConfigError(
                    f"hybrid_chunk_size={chunk} is not a multiple of {what} of {unit} tokens",
                    f"{max(lcm, -(-chunk // lcm) * lcm)} works",
                )

    def _check_nodes(self) -> None:
        """Raises GeometryError where nodes would have other parts of an object than each other."""
        stage_ranks = self.ranks // self.stages
        node_ranks = self.ranks // self.nodes if self.nodes > 0 else 0
        is_even = node_ranks > 0 and self.ranks % self.nodes == 0
        if not is_even or (node_ranks % stage_ranks and stage_ranks % node_ranks):
            what = f"{self.ranks} ranks of {self.stages}"
            raise GeometryError(f"{what} stages are not spread evenly over {self.nodes} nodes")

    def __hash__(self) -> int:
        """Cheap, because rules are cached by geometry. Equality compares all fields."""
        return hash((self.chunk_tokens, self.hash_tokens, len(self.groups)))

    @property
    def node_ranks(self) -> int:
        """The number of ranks on each node."""
        return self.ranks // self.nodes

    @property
    def node_stages(self) -> int:
        """The stages of which a node has ranks."""
        return stages_of_node(self.stages, self.nodes)

    @property
    def node_shards(self) -> int:
        """The shards of the KV heads on each node."""
        return self.shards or self.node_ranks

    def parts(self, group: Group) -> int:
        """Parts of one object of `group` on one node.

        There is one for each shard of the heads, or one for each stage whose ranks share it.
        """
        return self.node_stages if group.replicated else self.node_shards

    def blocks_per_chunk(self, group: Group) -> int:
        """Blocks of `group` in one chunk."""
        return self.chunk_tokens // group.tokens_per_block

    @property
    def ticket_bytes(self) -> int:
        """Bytes of one ticket (core.packed)."""
        return self.nodes * SLOT_BYTES

    def whole_chunks(self, tokens: int) -> int:
        """Chunks wholly inside the first `tokens` tokens."""
        return max(0, tokens) // self.chunk_tokens

    def hash_index(self, chunk: int) -> int:
        """The place, in the engine's chained block hashes, of the hash of chunk number `chunk`."""
        return (chunk + 1) * self.chunk_tokens // self.hash_tokens - 1


def stages_of_node(stages: int, nodes: int) -> int:
    """The stages of which each node has ranks. Nodes have whole stages, or a part of one."""
    return max(1, stages // nodes)


def common_block_tokens(groups: tuple[Group, ...], alignment_tokens: int, hash_tokens: int) -> int:
    """The least common multiple of the engine's hit alignment, hash block and all blocks (D8)."""
    return math.lcm(alignment_tokens, hash_tokens, *(group.tokens_per_block for group in groups))


def derive_chunk_tokens(groups: tuple[Group, ...], alignment_tokens: int, hash_tokens: int) -> int:
    """The smallest multiple of the common block that has at least CHUNK_TOKENS_MIN tokens."""
    lcm = common_block_tokens(groups, alignment_tokens, hash_tokens)
    return -(-CHUNK_TOKENS_MIN // lcm) * lcm


def length_finding(geometry: Geometry, max_model_len: int) -> Finding:
    """Returns whether prompts can be long enough for a hit, and which group decides (B8, B9).

    With a FAIL the connector logs an error, and the engine serves without the cache.
    """
    chunk, groups, check = geometry.chunk_tokens, geometry.groups, Check.FIRST_HIT
    largest = max(groups, key=lambda group: group.tokens_per_block)
    why = f"group {largest.gid} ({largest.kind}) has blocks of {largest.tokens_per_block} tokens"
    common = common_block_tokens(groups, geometry.alignment_tokens, geometry.hash_tokens)
    derived = derive_chunk_tokens(groups, geometry.alignment_tokens, geometry.hash_tokens)
    if chunk > derived:
        why = f"hybrid_chunk_size asks for more than the groups' {derived}"
    elif common > largest.tokens_per_block:
        blocks = ", ".join(map(str, sorted({group.tokens_per_block for group in groups})))
        engine = f"the engine's {geometry.alignment_tokens}"
        why = f"the groups' blocks of {blocks} tokens and {engine} share no smaller one"
    fits = derived < chunk and derived + 1 < max_model_len
    times = 2 if chunk + 1 >= max_model_len else 4
    remedy = f"hybrid_chunk_size {derived}" if fits else f"--max-model-len {times * chunk}"
    if chunk + 1 >= max_model_len:
        what = (
            f"a chunk has {chunk} tokens ({why}) and max_model_len is {max_model_len}, so nothing "
            "can ever be stored and hit"
        )
        return fail(check, what, f"{remedy} works")
    text = f"prompts of {chunk + 1} tokens or more can hit; a chunk has {chunk} tokens: {why}"
    few = f"only {(max_model_len - 1) // chunk} of them fit into max_model_len {max_model_len}"
    is_good = 4 * chunk <= max_model_len
    return judge(
        check=check,
        is_good=is_good,
        good=text,
        what=f"{text}; {few}",
        remedy=f"{remedy} works",
        bad=Verdict.WARN,
    )
