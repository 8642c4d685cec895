"""Room in the workers' staging, the device memory that stores pass through on their way to slots.

A step copies a block into the staging, and then the engine may overwrite the block. The bytes stay
in the staging until they are in their slot, which the workers report. The planner reads the report
one plan later, or two plans later with asynchronous scheduling. A staging that holds fewer steps
than that puts stores off until the request generates.
"""

from hybridkv.core.copies import ObjectSpan
from hybridkv.core.geometry import Geometry


class StagingCredits:
    """The bytes of each rank's staging that stores need which are planned and not reported yet."""

    def __init__(self, geometry: Geometry, bytes_max: int | None) -> None:
        """`bytes_max` is the size of the smallest staging of all ranks. None = no bound."""
        self.bytes_max = bytes_max
        self._geometry = geometry
        self.used_bytes = [0] * geometry.ranks

    def is_too_small(self, span: ObjectSpan) -> bool:
        """Return True if one object of the span is larger than the whole staging."""
        return self.bytes_max is not None and self._part_bytes(span) > self.bytes_max

    def room(self, span: ObjectSpan) -> int:
        """Return how many objects of the span fit now, counted from its first object."""
        if self.bytes_max is None:
            return span.objects
        size, fitting = self._part_bytes(span), span.objects
        for share, used_bytes in zip(self._shares(span), self.used_bytes, strict=True):
            fitting_here = (self.bytes_max - used_bytes) // size
            fitting = min(fitting, share.start + fitting_here * share.step)
        return fitting

    def count_span(self, span: ObjectSpan) -> None:
        """Count a span that is planned. The caller has asked `room` whether it fits."""
        self._add(span, 1)

    def give_back(self, span: ObjectSpan) -> None:
        """Count a span no longer, because every rank has reported it."""
        self._add(span, -1)

    def _add(self, span: ObjectSpan, sign: int) -> None:
        if self.bytes_max is None:
            return
        size = sign * self._part_bytes(span)
        for rank, share in enumerate(self._shares(span)):
            self.used_bytes[rank] += size * len(share)

    def _shares(self, span: ObjectSpan) -> list[range]:
        """Return the places in the span of the objects that each rank writes.

        Ranks write all objects, or take turns with objects that they share (PartLayout.writes).
        """
        ranks = self._geometry.ranks
        if not self._geometry.groups[span.group_index].replicated:
            return [range(span.objects)] * ranks
        sharers = self._geometry.node_ranks // self._geometry.node_stages
        first, stop = span.first_chunk, span.objects
        return [range((rank - first) % sharers, stop, sharers) for rank in range(ranks)]

    def _part_bytes(self, span: ObjectSpan) -> int:
        return span.count * self._geometry.groups[span.group_index].block_bytes
