"""Room in the workers' staging, the device memory that stores pass through on their way to slots.

The engine may overwrite a block as soon as its step has copied it into the staging. The bytes stay
there until they are in their slot, which is when the workers report the store. The planner hears
of that one plan later, or two with asynchronous scheduling: a staging of fewer steps than that puts
stores off until the request generates.
"""

from hybridkv.core.copies import ObjectSpan
from hybridkv.core.geometry import Geometry


class StagingCredits:
    """The bytes of each rank's staging that are planned and not reported yet."""

    def __init__(self, geometry: Geometry, bytes_max: int | None) -> None:
        """`bytes_max`: what the smallest staging of all ranks holds; None = no bound."""
        self.bytes_max = bytes_max
        self._geometry = geometry
        self._taken = [0] * geometry.ranks

    def is_too_small(self, span: ObjectSpan) -> bool:
        """Whether not even an empty staging holds one object of the span."""
        return self.bytes_max is not None and self._part_bytes(span) > self.bytes_max

    def room(self, span: ObjectSpan) -> int:
        """How many objects of the span fit by now, from its first one on."""
        if self.bytes_max is None:
            return span.objects
        size, fitting = self._part_bytes(span), span.objects
        for first, step, taken in zip(*self._shares(span), self._taken, strict=True):
            fitting = min(fitting, first + (self.bytes_max - taken) // size * step)
        return fitting

    def take(self, span: ObjectSpan) -> None:
        """All of the span is planned; `room` has said that it fits."""
        self._add(span, 1)

    def give_back(self, span: ObjectSpan) -> None:
        """Every rank has reported all of the span."""
        self._add(span, -1)

    def _add(self, span: ObjectSpan, sign: int) -> None:
        if self.bytes_max is None:
            return
        size = sign * self._part_bytes(span)
        for rank, (first, step) in enumerate(zip(*self._shares(span), strict=True)):
            self._taken[rank] += size * len(range(first, span.objects, step))

    def _shares(self, span: ObjectSpan) -> tuple[list[int], list[int]]:
        """For each rank the first of the span's objects that it writes, and the step to its next.

        Ranks write all objects, or take turns with those that they share (PartLayout.writes).
        """
        ranks = self._geometry.ranks
        if not self._geometry.groups[span.group_index].replicated:
            return [0] * ranks, [1] * ranks
        return [(rank - span.first_chunk) % ranks for rank in range(ranks)], [ranks] * ranks

    def _part_bytes(self, span: ObjectSpan) -> int:
        return span.count * self._geometry.groups[span.group_index].block_bytes
