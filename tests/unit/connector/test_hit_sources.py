"""Tokens by tier: nothing is counted twice, nothing is left out."""

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connector.scheduler.loads import RAM, tokens_by_tier


@given(
    loaded=st.integers(0, 20_000),
    chunk=st.integers(1, 640),
    came_up=st.dictionaries(
        st.sampled_from(("disk", "disk2", "valkey", "s3", RAM)), st.integers(0, 50)
    ),
)
def test_the_tiers_make_up_the_load(loaded: int, chunk: int, came_up: dict[str, int]) -> None:
    tokens = tokens_by_tier(loaded, chunk, came_up)
    assert sum(tokens.values()) == loaded
    assert all(part > 0 for part in tokens.values())
    for tier, part in tokens.items():
        assert tier == RAM or part <= came_up[tier] * chunk


def test_what_came_up_is_the_end_of_the_hit() -> None:
    """Ten chunks of 100 tokens: RAM has six, a disk three, s3 one; the engine has 250 tokens."""
    assert tokens_by_tier(750, 100, {"disk": 3, "s3": 1}) == {"s3": 100, "disk": 300, RAM: 350}
    assert tokens_by_tier(250, 100, {"disk": 3, "s3": 1}) == {"s3": 100, "disk": 150}
    assert tokens_by_tier(250, 100, {}) == {RAM: 250}
    assert tokens_by_tier(0, 100, {"disk": 3}) == {}
