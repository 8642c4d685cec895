"""Puts records into a tier again and again until it is killed, and says so after each.

    python -m hybridkv.tiers.conformance.writer URL

What takes time is the writing, so that a kill finds a record half written in most tiers that allow
one to be seen.
"""

import itertools
import sys

from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.conformance.samples import SampleObject, make_sample
from hybridkv.tiers.factory import make_tier

COUNT = 8
PART_BYTES = 1 << 20  # A record has two parts.


def written_samples() -> list[SampleObject]:
    """Returns the records, in the order in which they are put."""
    return [make_sample(number, PART_BYTES) for number in range(COUNT)]


def main(url: str) -> None:
    """Put the records for ever, and print a line after each. Each is removed before the next."""
    samples = written_samples()
    tier = make_tier(parse_tier(url, "tier"), "killed")
    tier.open()
    for sample in itertools.cycle(samples):
        tier.discard([sample.key])
        tier.put([sample.write_request()])
        print("put", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
