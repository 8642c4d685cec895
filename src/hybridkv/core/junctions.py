"""Where prompts part from each other, and where a state is worth keeping.

An engine keeps the recurrent state at the end of a prompt. A later prompt that goes another way
finds all of the common prefix but a state::

    full attention  [1111111...]    an earlier prompt began with the same 7 chunks
    recurrent       [..1.......]    and kept no state after them
                       ^   ^
                     hit   junction

A state that this prompt leaves at the junction makes the hit of the next one. Windows inside a
prompt go first (core.eviction_classes), so the same holds for models with windows.
"""

from collections.abc import Callable, Iterable, Sequence

from hybridkv.core.coverage import largest_hit
from hybridkv.core.geometry import Geometry, GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.speed import Speed

JUNCTIONS_MAX = 4  # States that one prompt is asked for, beside the one at its end.
STEP_SECONDS = 0.01  # What a step costs beside its tokens, about.
BRANCHES_MAX = 1 << 14  # Boundaries that are remembered, of some 150 bytes each.


def has_junctions(geometry: Geometry) -> bool:
    """Returns True where groups of full attention tell how far prompts are equal, and others not.

    Of recurrent states and of windows the boundary itself may be missing.
    """
    return len({group.kind is GroupKind.FULL for group in geometry.groups}) == 2


def junction(geometry: Geometry, masks: Sequence[bytes], chunks_max: int) -> int:
    """Returns the most chunks, up to `chunks_max`, after which only states or windows are missing.

    0 = no earlier prompt shares a chunk beyond the hit of `masks` (as in `largest_hit`), or the
    geometry does not tell (`has_junctions`).
    """
    if not has_junctions(geometry):
        return 0
    pairs = zip(geometry.groups, masks, strict=True)
    assumed = [mask if group.kind is GroupKind.FULL else b"\1" * len(mask) for group, mask in pairs]
    deepest = largest_hit(geometry, assumed, chunks_max)
    return deepest if deepest > largest_hit(geometry, masks, chunks_max) else 0


class Branches:
    """Boundaries at which prompts were seen to part, by the hash of the chunk before each.

    The hash covers the tokens, the salt and the adapter, and not the identity: prompts part where
    they did before the weights changed. What was not met for the longest time is forgotten.
    """

    def __init__(self, most: int = BRANCHES_MAX) -> None:
        self._most = most
        self._times: dict[bytes, int] = {}  # How often, the latest last.

    def __len__(self) -> int:
        return len(self._times)

    def junctions(
        self,
        geometry: Geometry,
        masks: Sequence[bytes],
        hashes: bytes,
        hit_chunks: int,
        goes_on: Callable[[bytes], bool],
    ) -> list[int]:
        """Returns the chunks after which a prompt parts from others, ascending, JUNCTIONS_MAX.

        `masks` are the presence masks of its chunks, as in `largest_hit`, and `hashes` their names,
        HASH_BYTES each. Only what is beyond its hit of `hit_chunks` counts. `goes_on` returns False
        for a chunk after which no stored prompt goes on: there a prompt ended, and this one
        continues it, as a conversation does.
        """
        if not has_junctions(geometry):
            return []
        asked = len(hashes) // HASH_BYTES
        deepest = junction(geometry, masks, asked)
        # A prompt leaves a state at its end in any case.
        if hit_chunks < deepest < asked:
            last = hashes[(deepest - 1) * HASH_BYTES : deepest * HASH_BYTES]
            if goes_on(last):
                self.note(last)
        return self.boundaries(hashes, hit_chunks, JUNCTIONS_MAX)

    def note(self, chunk_hash: bytes) -> None:
        """A prompt parted from earlier ones after the chunk of this hash."""
        self._times[chunk_hash] = self._times.pop(chunk_hash, 0) + 1
        if len(self._times) > self._most:
            del self._times[next(iter(self._times))]

    def boundaries(self, hashes: bytes, beyond: int, most: int) -> list[int]:
        """Returns after how many chunks of a prompt others parted, ascending.

        `hashes` are those of the prompt's chunks, HASH_BYTES each. Only boundaries `beyond` that
        many chunks count, and of these the `most` at which prompts parted most often.
        """
        times = self._times
        if not times or most <= 0:
            return []
        starts = range(beyond * HASH_BYTES, len(hashes), HASH_BYTES)
        found = [at for at in starts if hashes[at : at + HASH_BYTES] in times]
        found.sort(key=lambda at: times[hashes[at : at + HASH_BYTES]], reverse=True)
        return sorted(at // HASH_BYTES + 1 for at in found[:most])


def tokens_of_cost(state_bytes: int, prefill: Speed, loading: Speed) -> float:
    """Returns the tokens that an engine computes in the time that a state costs.

    It is copied twice, for its store and for a load, and its step ends earlier. `prefill` is in
    tokens and `loading` in bytes a second. What is not measured yet costs nothing::

        76 MB, 10,000 tokens/s, 50 GB/s   ->   130 tokens
    """
    seconds = STEP_SECONDS
    if loading.per_second:
        seconds += 2 * state_bytes / loading.per_second
    return seconds * prefill.per_second


def worth_keeping(boundaries: Iterable[int], hit_tokens: int, cost_tokens: float) -> list[int]:
    """Returns the boundaries at which a state saves more than it costs. All are in tokens.

    A state saves the tokens after the hit or the state before it. `cost_tokens` are the tokens
    that are computed in the time that a state takes to be stored and loaded::

        hit 1000, boundaries 1100, 3000, 3200, cost 256   ->   3000
    """
    kept: list[int] = []
    before = hit_tokens
    for boundary in sorted(boundaries):
        if boundary - before > cost_tokens:
            kept.append(boundary)
            before = boundary
    return kept
