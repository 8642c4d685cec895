"""The reasons why a lookup gets less than tiers have, as people read them."""

import pytest

from hybridkv.tiers.lookups import ShortfallKind


@pytest.mark.parametrize(
    ("kind", "facts", "sentence"),
    [
        (ShortfallKind.SILENT, {"tier": "disk"}, "disk does not answer"),
        (ShortfallKind.FAILED, {"tier": "disk", "error": "{no} answer"}, "disk: {no} answer"),
        (
            ShortfallKind.NO_ROOM,
            {"fits": 2048, "tokens": 4096},
            "RAM has room for 2048 of 4096 tokens",
        ),
        (
            ShortfallKind.SLOWER,
            {"tokens": 4096, "read_seconds": 1.234, "compute_seconds": 0.0567},
            "reading 4096 tokens would take 1.2 s, computing them 0.057 s",
        ),
    ],
)
def test_a_reason_is_told_with_its_facts(
    kind: ShortfallKind, facts: dict[str, str | float], sentence: str
) -> None:
    assert kind.sentence.format(**facts) == sentence
