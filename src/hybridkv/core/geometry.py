"""KV cache groups, and every conversion between tokens, blocks, chunks and bytes.

A *group* is a set of layers that share one block table; groups of one model differ in block size in both
directions (DeepSeek-V4: 256/64/64/4/8 tokens).  A *chunk* is our unit of identity and a common multiple of all
groups' blocks, so every conversion below is an exact division (requirements A20, corrected by D8)::

    tokens   0                       chunk_tokens             2*chunk_tokens
    chunk    |----------- 0 -----------|----------- 1 -----------|
    group a  |--- 0 ---|--- 1 ---|--- ...                            blocks_per_chunk = 2 or more
    group b  |----------- 0 -----------|----------- 1 -----------|   blocks_per_chunk = 1
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from hybridkv.core.errors import ConfigError, GeometryError

CHUNK_TOKENS_MIN = 128
"""A derived chunk has at least this many tokens: smaller objects cost more in lookups than they give in hits."""

GROUPS_MAX = 256
RANKS_MAX = 1024
PERIOD_MAX = 1024
"""Chunks after which a chunked local group's objects must begin to repeat; 64 with Llama 4 and chunks of 128."""


class Kind(StrEnum):
    """What a group keeps per token, and so what a restore needs of it."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class Group:
    """One prefix-cacheable group. Scratch and ring groups never become a Group (requirements D7)."""

    gid: int
    kind: Kind
    tokens_per_block: int
    layer_bytes: tuple[int, ...]
    """Bytes of one block in each layer of the group, on one rank, in layer order."""
    window_tokens: int = 0
    """Sliding: the window; chunked local: the attention chunk; otherwise 0."""
    extra_retained_tokens: int = 0
    """Sliding only: tokens kept below the window for speculative modules."""
    replicated: bool = False
    """Whether all tensor parallel ranks keep the same bytes (MLA), so that one part of an object is all of it (C5)."""

    def __post_init__(self) -> None:
        if self.tokens_per_block <= 0:
            raise GeometryError(f"group {self.gid}: tokens_per_block={self.tokens_per_block} must be positive (B5)")
        if not self.layer_bytes or min(self.layer_bytes) <= 0:
            raise GeometryError(f"group {self.gid}: every layer needs a positive block size in bytes")
        windowed = self.kind in (Kind.SLIDING, Kind.CHUNKED_LOCAL)
        if windowed != (self.window_tokens > 0):
            raise GeometryError(f"group {self.gid}: kind {self.kind} with window_tokens={self.window_tokens}")
        if self.extra_retained_tokens < 0 or (self.extra_retained_tokens and self.kind is not Kind.SLIDING):
            raise GeometryError(f"group {self.gid}: extra_retained_tokens={self.extra_retained_tokens}")

    def __hash__(self) -> int:
        """Cheap, because rules are cached by group; equality compares everything."""
        return hash((self.gid, self.kind, self.tokens_per_block))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group, on one rank."""
        return sum(self.layer_bytes)

    def skipped_tokens(self, boundary: int) -> int:
        """Tokens before `boundary` that computing token `boundary` never reads; non-decreasing in `boundary`."""
        kind = self.kind
        if kind is _FULL:
            return 0
        if kind is _SLIDING:
            return max(0, boundary - self.window_tokens + 1 - self.extra_retained_tokens)
        if kind is _CHUNKED_LOCAL:
            return boundary // self.window_tokens * self.window_tokens
        return max(0, boundary - 1)


# The engine's hooks ask for `skipped_tokens`, and to Python 3.11 every `Kind.FULL` is a call.
_FULL, _SLIDING, _CHUNKED_LOCAL = Kind.FULL, Kind.SLIDING, Kind.CHUNKED_LOCAL


@dataclass(frozen=True, slots=True)
class Geometry:
    """All cacheable groups of a model and the one chunk size they agree on."""

    groups: tuple[Group, ...]
    chunk_tokens: int
    alignment_tokens: int
    """The engine's scheduler block: local + external hit must be a multiple of it."""
    hash_tokens: int
    """Tokens covered by one of the engine's block hashes."""
    ranks: int = 1
    """Worker ranks of the engine."""

    def __post_init__(self) -> None:
        if not 0 < len(self.groups) <= GROUPS_MAX or not 0 < self.ranks <= RANKS_MAX:
            raise GeometryError(f"{len(self.groups)} cacheable groups on {self.ranks} ranks cannot be served")
        if sorted({group.gid for group in self.groups}) != [group.gid for group in self.groups]:
            raise GeometryError("groups must be in the order of their gids, each once")
        for group in self.groups:
            period = math.lcm(group.window_tokens, self.chunk_tokens) // max(1, self.chunk_tokens)
            if group.kind is Kind.CHUNKED_LOCAL and period > PERIOD_MAX:
                raise GeometryError(
                    f"group {group.gid}: chunks of {self.chunk_tokens} tokens meet attention chunks of "
                    f"{group.window_tokens} in {period} ways, at most {PERIOD_MAX} can be served"
                )
        for what, unit in (
            ("the engine's hit alignment", self.alignment_tokens),
            ("the engine's hash block", self.hash_tokens),
            *((f"group {group.gid}'s block", group.tokens_per_block) for group in self.groups),
        ):
            if unit <= 0 or self.chunk_tokens <= 0 or self.chunk_tokens % unit:
                lcm = common_block_tokens(self.groups, self.alignment_tokens, self.hash_tokens)
                raise ConfigError(
                    f"hybrid_chunk_size={self.chunk_tokens} is not a multiple of {what} of {unit} tokens; "
                    f"{max(lcm, -(-self.chunk_tokens // lcm) * lcm)} works"
                )

    def __hash__(self) -> int:
        """Cheap, because rules are cached by geometry; equality compares everything."""
        return hash((self.chunk_tokens, self.hash_tokens, len(self.groups)))

    def parts(self, group: Group) -> int:
        """Parts that make up one object of `group`: one per rank, or a single one that all ranks share."""
        return 1 if group.replicated else self.ranks

    def blocks_per_chunk(self, group: Group) -> int:
        """Blocks of `group` in one chunk."""
        return self.chunk_tokens // group.tokens_per_block

    def chunk_blocks(self, group: Group, chunk: int) -> range:
        """Block positions of `group` that cover chunk number `chunk`."""
        per_chunk = self.blocks_per_chunk(group)
        return range(chunk * per_chunk, (chunk + 1) * per_chunk)

    def whole_chunks(self, tokens: int) -> int:
        """Chunks wholly inside the first `tokens` tokens."""
        return max(0, tokens) // self.chunk_tokens

    def hash_index(self, chunk: int) -> int:
        """Which of the engine's chained block hashes names the prefix that ends with `chunk`."""
        return (chunk + 1) * self.chunk_tokens // self.hash_tokens - 1


def common_block_tokens(groups: tuple[Group, ...], alignment_tokens: int, hash_tokens: int) -> int:
    """Least common multiple of the engine's hit alignment, its hash block and every group's block (D8)."""
    return math.lcm(alignment_tokens, hash_tokens, *(group.tokens_per_block for group in groups))


def derive_chunk_tokens(groups: tuple[Group, ...], alignment_tokens: int, hash_tokens: int) -> int:
    """The smallest multiple of the common block that has at least CHUNK_TOKENS_MIN tokens."""
    lcm = common_block_tokens(groups, alignment_tokens, hash_tokens)
    return -(-CHUNK_TOKENS_MIN // lcm) * lcm
