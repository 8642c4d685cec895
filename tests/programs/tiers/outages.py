"""What a tier on a server does while that server is gone, hung, or back again."""

import threading
import time
from collections.abc import Callable

import pytest

from hybridkv.tiers.contract import ReadRequest, Tier, TierError
from tests.programs.tiers.servers import DEADLINE_SECONDS, Server
from tests.tier_suite import pages, read, sample

SLACK_SECONDS = 4.0


def calls(tier: Tier) -> dict[str, Callable[[], object]]:
    """Each of the contract's calls that asks the server."""
    one, other = sample(1), sample(2)
    into = pages(len(one.memory))
    return {
        "find": lambda: tier.find([one.key, other.key]),
        "get": lambda: tier.get([ReadRequest(one.key, [into]), ReadRequest(other.key, [into])]),
        "put": lambda: tier.put([one.putting(), other.putting()]),
        "discard": lambda: tier.discard([one.key]),
        "damaged": lambda: tier.discard([one.key], damaged=True),
        "keys": lambda: list(tier.keys()),
        "open": tier.open,
    }


def assert_each_fails(named: dict[str, Callable[[], object]], seconds: float) -> None:
    """Every call says TierError, for every item, in time."""
    for name, call in named.items():
        start = time.monotonic()
        if name in ("get", "put"):
            errors = call()
            assert isinstance(errors, list)
            assert len(errors) == 2
            assert all(type(error) is TierError for error in errors), (name, errors)
        else:
            with pytest.raises(TierError) as caught:
                call()
            assert caught.type is TierError, (name, caught.value)
        assert time.monotonic() - start < seconds, name


def assert_survives_a_kill(
    tier: Tier, server: Server, objects: int, back: Callable[[], None] = lambda: None
) -> None:
    """Kill the server while a thread writes and reads, start it again, and call `back`."""
    samples = [sample(number, 1 << 20, 1) for number in range(objects)]
    rounds, again = threading.Event(), threading.Event()
    seen: list[TierError | None] = []

    def work() -> None:
        while not again.is_set():
            seen.extend(tier.put([one.putting() for one in samples]))
            seen.extend(read(tier, one) for one in samples)
            rounds.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert rounds.wait(DEADLINE_SECONDS)
    server.kill()
    rounds.clear()
    assert rounds.wait(DEADLINE_SECONDS)
    server.start()
    back()
    rounds.clear()
    assert rounds.wait(DEADLINE_SECONDS)
    again.set()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert any(type(error) is TierError for error in seen)
    assert tier.put([one.putting() for one in samples]) == [None] * objects
    assert [read(tier, one) for one in samples] == [None] * objects
