"""What a tier on a server does while that server is gone, hung, or back again."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from hybridkv.tiers.conformance.samples import SampleObject, make_sample, pages, read
from hybridkv.tiers.contract import ReadRequest, Tier, TierError
from tests.programs.tiers.servers import Server
from tests.waiting import DEADLINE_SECONDS, until

SLACK_SECONDS = DEADLINE_SECONDS


def calls(tier: Tier) -> dict[str, Callable[[], object]]:
    """Each of the contract's calls that asks the server."""
    first, second = make_sample(1), make_sample(2)
    into = pages(len(first.memory))
    return {
        "find": lambda: tier.find([first.key, second.key]),
        "get": lambda: tier.get([ReadRequest(first.key, [into]), ReadRequest(second.key, [into])]),
        "put": lambda: tier.put([first.write_request(), second.write_request()]),
        "discard": lambda: tier.discard([first.key]),
        "damaged": lambda: tier.discard([first.key], damaged=True),
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
    samples = [make_sample(number, 1 << 20, 1) for number in range(objects)]
    rounds, again = threading.Event(), threading.Event()
    seen: list[TierError | None] = []

    def work() -> None:
        while not again.is_set():
            seen.extend(tier.put([sample.write_request() for sample in samples]))
            seen.extend(read(tier, sample) for sample in samples)
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
    assert tier.put([sample.write_request() for sample in samples]) == [None] * objects
    assert [read(tier, sample) for sample in samples] == [None] * objects


def assert_closing_wakes(
    tier: Tier, server: Server, sending: Callable[[threading.Event], AbstractContextManager[object]]
) -> None:
    """Close a tier of a stopped server while a put waits; `sending` sets the event when it does."""
    sample = make_sample(1)
    tier.open()
    server.send(signal.SIGSTOP)
    started = threading.Event()
    errors: list[TierError | None] = []

    def work() -> None:
        errors.extend(tier.put([sample.write_request()]))

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
    assert [type(error) for error in tier.put([sample.write_request()])] == [TierError]
    with pytest.raises(TierError):
        tier.find([sample.key])
    tier.open()
    assert tier.put([sample.write_request()]) == [None]
    tier.close()


def assert_keeps_nobody_waiting(
    tier: Tier, server: Server, named: dict[str, Callable[[], object]], large: list[SampleObject]
) -> None:
    """Stop the server of a tier whose timeout is 0.3 s, and let it go on."""
    sample = make_sample(1)
    # Under load a sound server also takes longer than the timeout, now and then.
    until(lambda: tier.put([sample.write_request()]) == [None], "a record is there")
    server.send(signal.SIGSTOP)
    assert_each_fails(named, 0.3 + SLACK_SECONDS)
    start = time.monotonic()
    errors = tier.put([sample.write_request() for sample in large])
    assert [type(error) for error in errors] == [TierError] * len(large)
    assert time.monotonic() - start < 0.3 + SLACK_SECONDS
    server.send(signal.SIGCONT)

    def is_served() -> bool:
        with contextlib.suppress(TierError):
            tier.open()
            answers = [read(tier, sample), *tier.put([sample.write_request()]), read(tier, sample)]
            return tier.find([sample.key]) == [True] and answers == [None] * 3
        return False

    until(is_served, "the server is used again")
