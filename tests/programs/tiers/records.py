"""What a tier on a server does with many records, and with those that somebody else has changed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hybridkv.tiers.conformance.samples import SampleObject, make_sample, pages
from hybridkv.tiers.contract import DamagedError, MissingError, ReadRequest, Tier, TierError
from tests.waiting import until

_Tier = TypeVar("_Tier", bound=Tier)


def each_opened(tier_of: Callable[[str], _Tier]) -> Iterator[Callable[[str], _Tier]]:
    """For a fixture: a function that makes open tiers from URLs, closed at the end."""
    tiers: list[_Tier] = []

    def opened(url: str) -> _Tier:
        tier = tier_of(url)
        tiers.append(tier)

        def is_open() -> bool:
            # Under load a sound server also takes longer than a short timeout.
            with contextlib.suppress(TierError):
                tier.open()
                return True
            return False

        until(is_open, f"{url} is open")
        return tier

    yield opened
    for tier in tiers:
        tier.close()


def get_all(
    tier: Tier, samples: Sequence[SampleObject]
) -> tuple[list[TierError | None], list[memoryview]]:
    """The error and the bytes of each, by one call."""
    into = [pages(len(sample.memory)) for sample in samples]
    requests = [
        ReadRequest(sample.key, [space]) for sample, space in zip(samples, into, strict=True)
    ]
    return tier.get(requests), into


def assert_other_lengths_are_damaged(
    tier: Tier, change: Callable[[SampleObject, bytes | None], None]
) -> list[SampleObject]:
    """`change` another client's way: the second is cut, the third grows, the fourth is removed."""
    samples = [make_sample(number) for number in range(5)]
    assert tier.put([sample.write_request() for sample in samples]) == [None] * 5
    change(samples[1], bytes(samples[1].memory[:-1]))
    change(samples[2], bytes(samples[2].memory) + bytes(300_000))
    change(samples[3], None)
    errors, into = get_all(tier, samples)
    kinds = [type(None), DamagedError, DamagedError, MissingError, type(None)]
    assert [type(error) for error in errors] == kinds
    assert (into[0], into[4]) == (samples[0].memory, samples[4].memory)
    return samples


def assert_many_in_one_call(tier: Tier, count: int) -> list[SampleObject]:
    """Put two thirds of so many records, and find, get and list all."""
    samples = [make_sample(number, 1000 + 9000 * (number % 5), 2) for number in range(count)]
    there = [sample for number, sample in enumerate(samples) if number % 3]
    assert tier.put([sample.write_request() for sample in there]) == [None] * len(there)
    assert tier.find([sample.key for sample in samples]) == [sample in there for sample in samples]
    errors, into = get_all(tier, samples)
    for sample, space, error in zip(samples, into, errors, strict=True):
        if sample in there:
            assert error is None
            assert space == sample.memory
        else:
            assert isinstance(error, MissingError)
    assert sorted(tier.keys()) == sorted(sample.key for sample in there)
    return samples
