"""A tier of another package, wrapped so that its faults are a tier's and not the daemon's.

The daemon's loop calls none of its code, because a `peek` that waits would keep every engine
waiting. What a call returns is taken only if there is one answer of the right type for each item.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any

from hybridkv.core.errors import ConfigError
from hybridkv.tiers.contract import (
    FindRequest,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    WriteRequest,
)

GAUGES = ("bytes", "bytes_max", "objects")
_NAME = re.compile(r"[a-z0-9+-]+")


class ForeignTier(Tier):
    """Wraps a tier of another package. Its threads ask for its gauges when it is tended."""

    def __init__(self, tier: Tier) -> None:
        """Raises ConfigError where the tier has no name for metrics."""
        self.name = str(getattr(tier, "name", ""))
        self._class = f"{type(tier).__module__}:{type(tier).__qualname__}"  # For messages.
        if not _NAME.fullmatch(self.name):
            what = f"the name {self.name!r} of {self._class} has to be of a-z, 0-9, + and -"
            raise ConfigError(what, "self.name = spec.kind works")
        self._tier = tier
        self._gauges: Mapping[str, float] = {}

    def open(self) -> None:
        self._tier.open()
        self._read_gauges()

    def find(self, keys: Sequence[bytes]) -> list[bool | None]:
        return self._checked(self._tier.find(keys), len(keys), bool | None)

    def find_again(self, wanted: Sequence[FindRequest]) -> list[bool | None]:
        return self._checked(self._tier.find_again(wanted), len(wanted), bool | None)

    def use(self, keys: Sequence[bytes]) -> list[bool | None]:
        return self._checked(self._tier.use(keys), len(keys), bool | None)

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        return self._checked(self._tier.get(items), len(items), TierError | None)

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        starts = self._tier.read_starts(keys)
        return self._checked(starts, len(keys), RecordStart | TierError)

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        return self._checked(self._tier.put(items), len(items), TierError | None)

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        self._tier.discard(keys, damaged)

    def erase(self, keys: Sequence[bytes]) -> list[TierError | None]:
        return self._checked(self._tier.erase(keys), len(keys), TierError | None)

    def empty_quarantine(self) -> None:
        self._tier.empty_quarantine()

    def keys(self) -> Iterator[bytes]:
        return iter(self._tier.keys())

    def tend(self) -> None:
        self._tier.tend()
        self._read_gauges()

    def gauges(self) -> Mapping[str, float]:
        """Returns the numbers that the tier gave when it was opened or tended last."""
        return self._gauges

    def close(self) -> None:
        self._tier.close()

    def _checked(self, answers: Sequence[Any], count: int, kind: type | UnionType) -> list[Any]:
        """Returns the answers of a call about `count` items. Raises TierError for any others."""
        if len(answers) != count:
            raise TierError(f"{self._class} gives {len(answers)} answers for {count} items")
        for answer in answers:
            if not isinstance(answer, kind):
                raise TierError(f"{self._class} answers with a {type(answer).__name__}")
        return list(answers)

    def _read_gauges(self) -> None:
        gauges = self._tier.gauges()
        known = {name: gauges.get(name) for name in GAUGES}
        self._gauges = {
            name: float(value)
            for name, value in known.items()
            if isinstance(value, int | float) and math.isfinite(value) and value >= 0
        }
