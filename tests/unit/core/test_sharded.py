"""A dictionary in parts is a dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.core.sharded import ShardedDict


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["set", "delete", "get", "pop", "default", "take", "some"]),
            st.integers(0, 200),
        ),
        max_size=300,
    )
)
def test_it_is_a_dictionary(steps: list[tuple[str, int]]) -> None:
    plain: dict[int, int] = {}
    sharded = ShardedDict[int, int]()
    for number, (what, key) in enumerate(steps):
        if what == "set":
            plain[key] = sharded[key] = number
        elif what == "delete" and key in plain:
            del plain[key], sharded[key]
        elif what == "pop":
            assert sharded.pop(key, -1) == plain.pop(key, -1)
        elif what == "default":
            assert sharded.setdefault(key, number) == plain.setdefault(key, number)
        elif what == "take" and key < 20:
            parts = sharded.take_parts()
            assert {key: value for part in parts for key, value in part.items()} == plain
            plain.clear()
        elif what == "some":
            taken = sharded.take_keys(key // 20)
            assert len(taken) == min(key // 20, len(plain))
            for name in taken:
                del plain[name]
        assert sharded.get(key) == plain.get(key)
        assert (key in sharded) is (key in plain)
        assert len(sharded) == len(plain)
        assert sharded == plain
