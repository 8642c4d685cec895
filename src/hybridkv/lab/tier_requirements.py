"""What a tier below RAM must deliver, so that reading a hit from it is sooner than computing it.

A hit of some tokens is a number of objects and bytes. Computing them takes tokens / prefill speed.
So the tier has to deliver the bytes and the objects within that time, and the latency of one call
beside it. Nothing is assumed of the tier, and nothing of how busy it is.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.core.coverage import SlotShape, needed_chunks, stored_counts
from hybridkv.core.geometry import Geometry
from hybridkv.core.sizes import format_size

SlotBytes = Callable[[int, int], int]  # Bytes of an object from (bytes of one part, parts).


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What is read from a tier for hits, or for one."""

    tokens: int = 0  # That need not be computed.
    objects: int = 0
    bytes: int = 0

    def __add__(self, other: "ReadCost") -> "ReadCost":
        """Returns the cost of both."""
        return ReadCost(
            self.tokens + other.tokens, self.objects + other.objects, self.bytes + other.bytes
        )


@dataclass(frozen=True, slots=True)
class NeededSpeed:
    """The least that a tier must deliver to pay against computing."""

    bytes_per_second: float
    objects_per_second: float
    seconds: float  # In which the hit would be computed.

    @property
    def speed_text(self) -> str:
        """The speed for people: "0.43 GB/s and 190 objects/s"."""
        return (
            f"{self.bytes_per_second / 1e9:.3g} GB/s and {self.objects_per_second:,.0f} objects/s"
        )


def hit_shapes(geometry: Geometry, chunks: int, chunks_in_ram: int = 0) -> Counter[SlotShape]:
    """Returns the objects, by shape, that a hit of `chunks` chunks needs and RAM lacks.

    RAM has just the hit of `chunks_in_ram` chunks.
    """
    shapes: Counter[SlotShape] = Counter()
    for group in geometry.groups:
        counts, parts = stored_counts(geometry, group), geometry.parts(group)
        first = needed_chunks(geometry, group, chunks).start
        # Of each group RAM has what lies before its hit's end, as far back as any longer hit needs.
        for chunk in range(max(first, chunks_in_ram), chunks):
            if count := counts[chunk % len(counts)]:
                shapes[count * group.block_bytes, parts] += 1
    return shapes


def read_cost(
    geometry: Geometry, tokens: int, tokens_in_ram: int, slot_bytes: SlotBytes
) -> ReadCost:
    """Returns what a hit of `tokens` reads from a tier if RAM has a hit of `tokens_in_ram`.

    Both are rounded down to whole chunks. Bytes are those of all ranks of a node.
    """
    chunks, in_ram = geometry.whole_chunks(tokens), geometry.whole_chunks(tokens_in_ram)
    if chunks <= in_ram:
        return ReadCost()
    shapes = hit_shapes(geometry, chunks, in_ram)
    size = sum(slot_bytes(*shape) * count for shape, count in shapes.items())
    return ReadCost((chunks - in_ram) * geometry.chunk_tokens, shapes.total(), size)


def needed_speed(cost: ReadCost, prefill_per_second: float) -> NeededSpeed:
    """Returns what a tier must deliver if prefill computes so many tokens a second."""
    seconds = cost.tokens / prefill_per_second
    if not seconds:
        return NeededSpeed(0.0, 0.0, 0.0)
    return NeededSpeed(cost.bytes / seconds, cost.objects / seconds, seconds)


def break_even_prefill(cost: ReadCost, bytes_per_second: float, latency_seconds: float) -> float:
    """Returns the tokens a second of prefill below which a tier of this speed pays.

    `ReadCost(32768, 256, 1 << 30)` at 1 GiB/s without latency is sooner than a prefill of fewer
    than 32,768 tokens a second.
    """
    seconds = cost.bytes / bytes_per_second + latency_seconds
    return cost.tokens / seconds if seconds else 0.0


def describe_cost(cost: ReadCost) -> str:
    """Returns the cost in words: "512MiB in 256 objects"."""
    return f"{format_size(cost.bytes)} in {cost.objects:,} objects"
