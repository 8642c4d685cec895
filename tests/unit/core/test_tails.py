"""Tails: which names are looked up, where they end, and what is a hit."""

import dataclasses

import pytest

from hybridkv.core.geometry import Geometry, Group, GroupKind
from hybridkv.core.tails import (
    TAIL_UNITS_MAX,
    first_tail_chunk,
    tail_chunk,
    tail_names,
    tail_tokens,
    why_no_tails,
)

CHUNK, UNIT = 16, 4


def geometry(unit: int = UNIT) -> Geometry:
    """One recurrent and one full group, with blocks of a chunk."""
    recurrent = Group(0, GroupKind.RECURRENT, CHUNK, (8,))
    full = Group(1, GroupKind.FULL, CHUNK, (8,))
    return Geometry((recurrent, full), CHUNK, unit, unit)


@pytest.mark.parametrize("prompt_tokens", [1, 4, 5, 16, 17, 18, 33, 45, 4 * TAIL_UNITS_MAX + 90])
def test_names_are_those_of_every_unit_inside_a_chunk(prompt_tokens: int) -> None:
    """A hash here says where it ends, so each name is compared with what its number means."""
    hashes = [end.to_bytes(4) for end in range(UNIT, prompt_tokens + 1, UNIT)]
    first = first_tail_chunk(geometry(), prompt_tokens)
    names = tail_names(geometry(), hashes, first, prompt_tokens)
    ends = [int.from_bytes(name) for name in names]
    assert ends == [
        end for end in range(UNIT, prompt_tokens, UNIT) if end % CHUNK and end > first * CHUNK
    ]
    assert ends == [tail_tokens(geometry(), first, number) for number in range(len(ends))]
    assert [end // CHUNK for end in ends] == [
        tail_chunk(geometry(), first, number) for number in range(len(ends))
    ]
    assert prompt_tokens - first * CHUNK <= UNIT * (TAIL_UNITS_MAX + 1)
    assert first == 0 or prompt_tokens > UNIT * TAIL_UNITS_MAX, "the bound is for long prompts"


def test_where_tails_cannot_be_served_the_reason_is_said() -> None:
    good = geometry()
    assert why_no_tails(good) == ""
    assert "multiples of 16 tokens" in why_no_tails(geometry(CHUNK))
    coarse = dataclasses.replace(good, alignment_tokens=CHUNK)
    assert "multiples of 16 tokens" in why_no_tails(coarse)
    assert "a chunk has 32" in why_no_tails(dataclasses.replace(good, chunk_tokens=32))
    assert "behind a hit" in why_no_tails(dataclasses.replace(good, lookahead_tokens=1))
    window = Group(2, GroupKind.SLIDING, CHUNK, (8,), 20)
    assert "sliding" in why_no_tails(dataclasses.replace(good, groups=(*good.groups, window)))
