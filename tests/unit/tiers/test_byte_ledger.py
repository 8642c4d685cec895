"""What is written never exceeds the bound, whatever is written, removed, confirmed or not."""

import random

from hybridkv.tiers.byte_ledger import ByteLedger, UsageQuestion, WriteBudget

BYTES_MAX = 100


def test_the_oldest_goes_first_and_what_is_being_written_stays() -> None:
    ledger = ByteLedger(10)
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
        ledger, there, writing = ByteLedger(BYTES_MAX), dict[str, int](), list[str]()
        listing: list[tuple[str, int]] | None = None
        for _ in range(rng.randrange(1, 80)):
            what = rng.random()
            if what < 0.5:
                wanted = [
                    (rng.choice("abcdefghij"), rng.randrange(1, 60))
                    for _ in range(rng.randrange(1, 4))
                ]
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


def test_a_server_never_gets_more_than_the_bound(rng: random.Random) -> None:
    """Writes end with and without an answer while others ask how much the server uses."""
    for _ in range(200):
        budget, now, used = WriteBudget(BYTES_MAX, doubt_seconds=10.0), 0.0, 0
        asked: list[tuple[UsageQuestion, int]] = []
        writing: list[int] = []
        late: list[tuple[float, int]] = []
        """When the server takes what it has not confirmed, and the bytes."""
        for _ in range(rng.randrange(1, 80)):
            now += rng.random()
            used += sum(size for at, size in late if at <= now)
            late = [(at, size) for at, size in late if at > now]
            what = rng.random()
            if what < 0.3:
                asked.append((budget.ask(now), used))
            elif what < 0.6 and asked:
                sizes = [rng.randrange(1, 30) for _ in range(3)]
                fits = budget.admit(*asked.pop(rng.randrange(len(asked))), sizes, now)
                writing += [size for size, fit in zip(sizes, fits, strict=True) if fit]
            elif what < 0.8 and writing:
                size = writing.pop(rng.randrange(len(writing)))
                used += size
                budget.ended(size, 0)
            elif writing:
                size = writing.pop(rng.randrange(len(writing)))
                late.append((now + 10 * rng.random(), size))
                budget.ended(0, size)
            assert used + sum(writing) + sum(size for _, size in late) <= BYTES_MAX


def test_what_was_not_confirmed_counts_for_a_time_after_an_answer() -> None:
    budget = WriteBudget(10, doubt_seconds=5.0)
    assert budget.admit(budget.ask(0.0), 0, [8], 0.0) == [True]
    budget.ended(0, 8)
    assert budget.admit(budget.ask(100.0), 0, [8], 100.0) == [False], "nothing answered before"
    assert budget.admit(budget.ask(104.0), 0, [8], 104.0) == [False]
    assert budget.admit(budget.ask(106.0), 0, [8, 8], 106.0) == [True, False]
