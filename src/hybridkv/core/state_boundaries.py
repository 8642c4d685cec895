"""Where recurrent states exist: where a step ended and the engine's retention setting keeps one.

With blocks of 256 tokens and steps of at most 600 (S: with retention, L: always)::

    tokens    0      256     512     768     1024    1280   1500 = prompt
    steps     |---------------|---------------|-------|------|
    states                    S               S       L
"""

import math
from dataclasses import dataclass

from hybridkv.core.findings import Finding, Verdict, judge, ok, warn
from hybridkv.core.geometry import Geometry, Group, GroupKind


@dataclass(frozen=True, slots=True)
class StateRule:
    """The engine's settings that decide where recurrent states exist."""

    retention_tokens: int | None = 0  # vLLM's prefix_cache_retention_interval.
    """0 = only the last boundary of a prompt, None = wherever a step ends."""
    step_tokens: int = 0  # The most tokens of one prompt in one step. 0 = the whole prompt.
    keeps_junctions: bool = False
    """True where the engine keeps a state on request, where prompts part (core.junctions)."""

    def period_tokens(self, group: Group) -> int:
        """Tokens between the states of a long prompt computed alone. 0 = only its end has one."""
        if self.retention_tokens == 0 or self.step_tokens == 0:
            return 0
        block = group.tokens_per_block
        step = max(block, self.step_tokens // block * block)
        return math.lcm(step, max(block, self.retention_tokens or block))


def recurrent_groups(geometry: Geometry) -> tuple[Group, ...]:
    """Returns the groups whose blocks are recurrent states."""
    return tuple(group for group in geometry.groups if group.kind is GroupKind.RECURRENT)


def state_ends(geometry: Geometry, group: Group, rule: StateRule, prompt_tokens: int) -> list[int]:
    """Returns the chunk ends at which a prompt leaves a state of `group`, ascending in tokens."""
    chunk, block = geometry.chunk_tokens, group.tokens_per_block
    unit = math.lcm(geometry.alignment_tokens, block)
    last, step_end = max(0, prompt_tokens - 1) // unit * unit, prompt_tokens
    if geometry.lookahead_tokens:
        # vLLM plans steps by its own hits, which drop a block: the last state stands below that.
        last = step_end = max(0, prompt_tokens // unit * unit - unit)
        step = rule.step_tokens
        if step and -(-unit // step) * step < prompt_tokens - last:
            step_end = last + unit
    ends = {last}
    kept = max(block, rule.retention_tokens or 0)
    if rule.retention_tokens != 0 and last < step_end < prompt_tokens and step_end % kept == 0:
        ends.add(step_end)
    if rule.retention_tokens != 0 and prompt_tokens % block == prompt_tokens % kept == 0:
        # The setting keeps it for its position alone.
        ends.add(prompt_tokens)
    if period := rule.period_tokens(group):
        every = math.lcm(period, chunk)
        ends.update(range(every, step_end + 1, every))
    return sorted(end for end in ends if end > 0 and end % chunk == 0)


def state_findings(geometry: Geometry, rule: StateRule) -> list[Finding]:
    """Returns at which boundaries recurrent states exist, and which setting makes them denser.

    The list is empty where no group is recurrent.
    """
    groups = recurrent_groups(geometry)
    if not groups:
        return []
    check, block, chunk = "recurrent states", groups[0].tokens_per_block, geometry.chunk_tokens
    gids = ", ".join(str(group.gid) for group in groups)
    period = rule.period_tokens(groups[0])
    dense = StateRule(chunk, chunk).period_tokens(groups[0])
    if period == 0 and rule.keeps_junctions:
        found = [
            ok(
                check,
                f"groups {gids}: a state at the last boundary of a prompt, and where later prompts "
                "part from it, so the third prompt with a shared prefix has a hit",
            )
        ]
    elif period == 0:
        what = (
            f"groups {gids}: the engine keeps a state only at the last boundary of a prompt, so "
            "the first prompt that shares a shorter prefix has no hit"
        )
        remedy = f"--prefix-cache-retention-interval {chunk} works"
        every = StateRule(chunk, rule.step_tokens).period_tokens(groups[0])
        if rule.step_tokens == 0:
            remedy = f"--enable-chunked-prefill with {remedy}"
        elif every > chunk:
            with_steps = f"with --max-num-batched-tokens {chunk}, slower, one every {chunk}"
            remedy = f"{remedy} (a state every {every} tokens; {with_steps})"
        found = [warn(check, what, remedy)]
    else:
        text = f"groups {gids}: a state every {period} tokens of a prompt and at its last boundary"
        settings = f"steps of {rule.step_tokens} tokens, retention interval {rule.retention_tokens}"
        remedy = (
            f"--prefix-cache-retention-interval {chunk} with --max-num-batched-tokens {chunk} "
            f"gives one every {dense}, at the price of shorter steps"
        )
        is_good = math.lcm(period, chunk) <= dense
        found = [
            judge(
                check=check,
                is_good=is_good,
                good=text,
                what=f"{text} ({settings})",
                remedy=remedy,
                bad=Verdict.WARN,
            )
        ]
    if chunk > (common := math.lcm(block, geometry.alignment_tokens)):
        what = (
            f"a prompt's last boundary is a multiple of {block} tokens, and its state is stored "
            f"only where it is also one of the chunk of {chunk}"
        )
        found.append(warn(check, what, f"hybrid_chunk_size {common} works"))
    return found
