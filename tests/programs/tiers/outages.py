"""What a tier on a server does while that server is gone, hung, or back again."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from hybridkv.tiers.contract import ReadRequest, Tier, TierError
from tests.programs.tiers.servers import Server
from tests.tier_suite import SampleObject, pages, read, sample
from tests.waiting import DEADLINE_SECONDS, until

SLACK_SECONDS = DEADLINE_SECONDS


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


def assert_closing_wakes(
    tier: Tier, server: Server, sending: Callable[[threading.Event], AbstractContextManager[object]]
) -> None:
    """Close a tier of a stopped server while a put waits; `sending` sets the event when it does."""
    one = sample(1)
    tier.open()
    server.send(signal.SIGSTOP)
    started = threading.Event()
    errors: list[TierError | None] = []

    def work() -> None:
        errors.extend(tier.put([one.putting()]))

    with sending(started):
        thread = threading.Thread(target=work)
        thread.start()
        assert started.wait(DEADLINE_SECONDS)
        tier.close()
        thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [TierError]
    server.send(signal.SIGCONT)
    tier.close()
    assert [type(error) for error in tier.put([one.putting()])] == [TierError]
    with pytest.raises(TierError):
        tier.open()
    with pytest.raises(TierError):
        tier.find([one.key])


def assert_keeps_nobody_waiting(
    tier: Tier, server: Server, named: dict[str, Callable[[], object]], large: list[SampleObject]
) -> None:
    """Stop the server of a tier whose timeout is 0.3 s, and let it go on."""
    one = sample(1)
    # Under load a sound server also takes longer than the timeout, now and then.
    until(lambda: tier.put([one.putting()]) == [None], "a record is there")
    server.send(signal.SIGSTOP)
    assert_each_fails(named, 0.3 + SLACK_SECONDS)
    start = time.monotonic()
    errors = tier.put([one.putting() for one in large])
    assert [type(error) for error in errors] == [TierError] * len(large)
    assert time.monotonic() - start < 0.3 + SLACK_SECONDS
    server.send(signal.SIGCONT)

    def is_served() -> bool:
        with contextlib.suppress(TierError):
            tier.open()
            told = [read(tier, one), *tier.put([one.putting()]), read(tier, one)]
            return tier.find([one.key]) == [True] and told == [None] * 3
        return False

    until(is_served, "the server is used again")
