"""A tier with faults put in on purpose, to see what a slow or broken one costs.

``inject+disk:///path?rate=1MiB&latency=0.01&fail=0.1&lose=0.1&damage=0.01&seed=7``: bytes per
second of all calls together, seconds of each call, and the shares of items that fail, are missing,
or come back with a flipped bit.
"""

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hybridkv.core.option_parsers import number
from hybridkv.core.sizes import parse_size
from hybridkv.core.tier_urls import TierSpec
from hybridkv.tiers.contract import (
    FindRequest,
    MissingError,
    ReadRequest,
    RecordStart,
    Tier,
    TierError,
    WriteRequest,
)
from hybridkv.tiers.factory import make_plain_tier
from hybridkv.tiers.record import stored_bytes
from hybridkv.tiers.remote import sizes_of

PREFIX = "inject+"
OPTIONS = ("rate", "latency", "fail", "lose", "damage", "seed")


class InjectedTier(Tier):
    """Wraps a tier and injects faults into its calls."""

    def __init__(self, spec: TierSpec) -> None:
        """`spec` describes the whole URL. Raises ConfigError for options that are no numbers."""
        options = {name: value for name, value in spec.options.items() if name not in OPTIONS}
        kind, location = spec.kind.removeprefix(PREFIX), spec.location.removeprefix(PREFIX)
        self._tier = make_plain_tier(
            replace(spec, kind=kind, location=location, options=options, class_path="")
        )
        self.name = self._tier.name
        rate = spec.options.get("rate")
        self._rate = parse_size(rate, "tier: rate") if rate is not None else None
        self._latency, self._fail, self._lose, self._damage = (
            number(0, 3600, "0.1")(spec.options.get(name, 0), f"tier: {name}")
            for name in ("latency", "fail", "lose", "damage")
        )
        self._rng = random.Random(spec.options.get("seed"))
        self._lock = threading.Lock()
        self._free_at = 0.0
        """When all bytes so far have passed at the rate, by the monotonic clock."""

    def open(self) -> None:
        self._tier.open()

    def peek(self, key: bytes) -> bool | None:
        return self._tier.peek(key)

    def find(self, keys: Sequence[bytes]) -> Sequence[bool | None]:
        self._delay(0)
        return self._tier.find(keys)

    def has_other_writers(self) -> bool:
        return self._tier.has_other_writers()

    def find_again(self, wanted: Sequence[FindRequest]) -> Sequence[bool | None]:
        self._delay(0)
        return self._tier.find_again(wanted)

    def get(self, items: Sequence[ReadRequest]) -> list[TierError | None]:
        errors = self._tier.get(items)
        self._delay(sum(stored_bytes(item.pieces[0]) for item in items))
        for at, item in enumerate(items):
            if errors[at] is None and self._happens(self._lose):
                errors[at] = MissingError("lost on purpose")
            elif errors[at] is None and self._happens(self._fail):
                errors[at] = TierError("failed on purpose")
            elif errors[at] is None and self._happens(self._damage):
                piece = item.pieces[-1]
                piece[self._rng.randrange(len(piece))] ^= 1 << self._rng.randrange(8)
        return errors

    def read_starts(self, keys: Sequence[bytes]) -> list[RecordStart | TierError]:
        self._delay(0)
        failed = TierError("failed on purpose")
        return [
            failed if self._happens(self._fail) else start for start in self._tier.read_starts(keys)
        ]

    def put(self, items: Sequence[WriteRequest]) -> list[TierError | None]:
        self._delay(sum(sizes_of(items)))
        if self._happens(self._fail):
            return [TierError("failed on purpose")] * len(items)
        return self._tier.put(items)

    def discard(self, keys: Sequence[bytes], damaged: bool = False) -> None:
        self._tier.discard(keys, damaged)

    def erase(self, keys: Sequence[bytes]) -> list[TierError | None]:
        return self._tier.erase(keys)

    def empty_quarantine(self) -> None:
        self._tier.empty_quarantine()

    def keys(self) -> Iterator[bytes]:
        return self._tier.keys()

    def tend(self) -> None:
        self._tier.tend()

    def gauges(self) -> Mapping[str, float]:
        return self._tier.gauges()

    def close(self) -> None:
        self._tier.close()

    def _happens(self, share: float) -> bool:
        return bool(share) and self._rng.random() < share

    def _delay(self, size: int) -> None:
        """Sleep as long as `size` bytes take at the rate, and for the latency."""
        wait = self._latency
        if self._rate is not None:
            with self._lock:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + size / self._rate
                wait += self._free_at - now
        if wait:
            time.sleep(wait)
