"""Where recurrent states exist: the engine keeps one only where a step ended and its retention setting says so.

::

    tokens    0      256     512     768     1024    1280   1500 = prompt      blocks of 256, steps of at most 600
    steps     |---------------|---------------|-------|------|
    states                    S               S       L                        S: with retention, L: always
"""

import math
from dataclasses import dataclass

from hybridkv.core.geometry import Geometry, Group, Kind


@dataclass(frozen=True, slots=True)
class StateRule:
    """The engine's settings as far as they decide where recurrent states stand."""

    retention_tokens: int | None = 0
    """vLLM's prefix_cache_retention_interval: 0 = only the last boundary of a prompt, None = wherever a step ends."""
    step_tokens: int = 0
    """The most tokens of one prompt in one step; 0 = the whole prompt."""

    def keeps(self, group: Group, boundary: int) -> bool:
        """Whether a state at `boundary` outlives its step for its position alone."""
        if self.retention_tokens == 0 or boundary % group.tokens_per_block:
            return False
        return boundary % max(group.tokens_per_block, self.retention_tokens or 0) == 0

    def period_tokens(self, group: Group) -> int:
        """Tokens between the states of a long prompt computed alone; 0 = only its last boundary has one."""
        if self.retention_tokens == 0 or self.step_tokens == 0:
            return 0
        block = group.tokens_per_block
        step = max(block, self.step_tokens // block * block)
        return math.lcm(step, max(block, self.retention_tokens or block))


def recurrent_groups(geometry: Geometry) -> tuple[Group, ...]:
    """The groups whose blocks are states."""
    return tuple(group for group in geometry.groups if group.kind is Kind.RECURRENT)


def state_ends(geometry: Geometry, group: Group, rule: StateRule, prompt_tokens: int) -> list[int]:
    """Boundaries at which a prompt leaves a state of `group` in the cache, ascending: those that are chunk ends."""
    unit, chunk, period = geometry.alignment_tokens, geometry.chunk_tokens, rule.period_tokens(group)
    ends = {max(0, prompt_tokens - 1) // unit * unit}
    if rule.keeps(group, prompt_tokens):
        ends.add(prompt_tokens)
    if period:
        every = math.lcm(period, chunk)
        ends.update(range(every, prompt_tokens + 1, every))
    return sorted(end for end in ends if end > 0 and end % chunk == 0)
