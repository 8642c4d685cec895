"""How long a prompt may wait for tiers below RAM: no longer than computing it takes (D18)."""

from hybridkv.core.policies import LoadPolicy
from hybridkv.core.speed import Speed

UNKNOWN_SECONDS = 2.0
UNKNOWN_SECONDS_PER_KI_TOKEN = 0.1
"""What computing a prompt is taken to cost while the speed of prefill is not known."""
PREFILL_TOKENS_MIN = 64
"""A step of fewer tokens is not used to measure the speed of prefill."""


class Patience:
    """The speed of prefill, measured step by step, and the waits that follow from it."""

    def __init__(self, policy: LoadPolicy, load_timeout_seconds: float) -> None:
        self._policy = policy
        self._most_seconds = load_timeout_seconds
        self.prefill = Speed()
        """In tokens per second."""
        self._step = 0, 0.0
        """Tokens of the step that is being measured, or 0; and when it was planned."""

    def step_planned(self, tokens: int, now: float) -> None:
        """A step of `tokens` tokens begins, unless one is being measured already."""
        if not self._step[0] and tokens >= PREFILL_TOKENS_MIN:
            self._step = tokens, now

    def step_ended(self, now: float) -> None:
        """The workers reported a step."""
        tokens, since = self._step
        if tokens:
            self.prefill = self.prefill.measured(tokens, now - since, now)
            self._step = 0, now

    def of(self, tokens: int) -> tuple[float, int]:
        """(seconds that a prompt of `tokens` tokens may wait, tokens per second of prefill).

        Tiers are judged by that speed; 0 = it is not known, or they are not to be judged.
        """
        if self._policy is LoadPolicy.NEVER:
            return 0.0, 0
        if self._policy is LoadPolicy.ALWAYS:
            return self._most_seconds, 0
        rate = self.prefill.per_second
        unknown = UNKNOWN_SECONDS + UNKNOWN_SECONDS_PER_KI_TOKEN * tokens / 1024
        return min(self._most_seconds, tokens / rate if rate else unknown), int(rate)
