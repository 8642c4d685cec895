"""Hints: what a request asks of the cache. Policies read these values; `vllm.hints` has the forms.

A hint is a wish. It changes what is kept and for how long, and never what a request is answered.
"""

from typing import NamedTuple

RETAIN_SECONDS_MAX = 86_400.0
"""A request that asks to be retained longer is retained for a day."""
PREFETCH_SECONDS_MAX = 3_600.0
"""A prefix that is announced for later is announced for an hour from now."""


class Hints(NamedTuple):
    """What a request asks of the cache."""

    reads: bool = True  # False = nothing is loaded for it.
    writes: bool = True  # False = nothing of it is stored.
    retain_seconds: float = 0.0
    """How long RAM is to keep the request's prefix, from its last use. 0 = it does not ask."""
    release: bool = False  # The prefix is not needed any more once the request has ended.
    demote: bool = False  # Tiers below RAM are enough for the prefix once the request has ended.
    low_priority: bool = False  # What the request stores is evicted before anything else.
    prefetch_in_seconds: float | None = None
    """In how many seconds after the request's end its prefix is needed in RAM. None = not said."""

    def asked_names(self) -> list[str]:
        """Return the names of the hints that the request has, as metrics have them.

        >>> Hints(writes=False, retain_seconds=600.0).asked_names()
        ['no_write', 'retain']
        """
        asked = {
            "no_read": not self.reads,
            "no_write": not self.writes,
            "retain": self.retain_seconds > 0,
            "release": self.release,
            "demote": self.demote,
            "low_priority": self.low_priority,
            "prefetch": self.prefetch_in_seconds is not None,
        }
        return [name for name, is_asked in asked.items() if is_asked]


NO_HINTS = Hints()
