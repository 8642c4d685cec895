"""The ledger against the truth: whatever is written and removed, what is there never exceeds the bound."""

import random

from hybridkv.storage.tiers.ledger import Ledger

BYTES_MAX = 100


def test_the_oldest_goes_first_and_what_is_being_written_stays() -> None:
    ledger = Ledger(10)
    for name in "abc":
        assert ledger.plan([(name, 3)]) == ([True], [])
        ledger.admit(name, 3)
    ledger.written("b")
    ledger.written("c")
    assert ledger.plan([("d", 4)]) == ([True], ["b"])
    assert ledger.plan([("d", 8)]) == ([False], [])
    assert ledger.plan([("d", 7), ("e", 1)]) == ([True, False], ["b", "c"])
    assert ledger.plan([("b", 4)]) == ([True], [])
    assert ledger.plan([("b", 6)]) == ([True], ["c"])


def test_nothing_exceeds_the_bound(rng: random.Random) -> None:
    for _ in range(200):
        ledger, there, writing = Ledger(BYTES_MAX), dict[str, int](), list[str]()
        listing: list[tuple[str, int]] | None = None
        for _ in range(rng.randrange(1, 80)):
            what = rng.random()
            if what < 0.5:
                wanted = [(rng.choice("abcdefghij"), rng.randrange(1, 60)) for _ in range(rng.randrange(1, 4))]
                plan = ledger.plan(wanted)
                assert not {name for name in plan.victims if name in writing}
                for name in plan.victims:
                    there.pop(name, None)
                ledger.gone(plan.victims)
                for (name, size), admitted in zip(wanted, plan.admitted, strict=True):
                    if admitted:
                        ledger.admit(name, size)
                        writing.append(name)
                        there[name] = max(size, there.get(name, 0))
            elif what < 0.7 and writing:
                ledger.written(writing.pop(rng.randrange(len(writing))))
            elif what < 0.8:
                name = rng.choice("abcdefghij")
                if name not in writing:  # else the one that writes may come after
                    there.pop(name, None)
                ledger.gone([name])
            elif what < 0.9:
                ledger.begin()
                listing = list(there.items())
                rng.shuffle(listing)
            elif listing is not None:
                ledger.listed(listing)
                listing = None
                victims = ledger.plan([]).victims
                for name in victims:
                    there.pop(name, None)
                ledger.gone(victims)
            ledger.check()
            assert sum(there.values()) <= BYTES_MAX
            assert sum(there.values()) <= ledger.bytes <= BYTES_MAX
