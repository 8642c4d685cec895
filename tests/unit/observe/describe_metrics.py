"""`python -m tests.unit.observe.describe_metrics [--write]` makes docs/METRICS-daemon.md."""

import sys
from collections.abc import Iterable

from hybridkv.core.metrics import MetricFamily
from hybridkv.observe.catalog import (
    LABELLED,
    PLAIN,
    PREFIX,
    SNAPSHOT_METRICS,
    TIER,
    TIER_PREFIX,
    VALUES,
)
from tests.documents import DOCS, print_or_write, table

DOCUMENT = DOCS / "METRICS-daemon.md"
HEAD = """# The daemon's metrics

The daemon's metrics are at `http://127.0.0.1:9477/metrics` (`--metrics-port`), in Prometheus' text
form. Without `--metrics-token` a request must name a loopback host. The same server shows the
status page at `/`. The tables of this page are made from the code
(`python -m tests.unit.observe.describe_metrics --write`).

Every user of the node can ask. The answer has counts, the names of engines and models, and the ids
of requests with their outcomes, and never prompts or passwords. `--metrics-port -1` serves no page
at all.

Every counter starts at 0 with its daemon, and never goes down before the daemon ends. All metrics
without labels are there from the first scrape on. A scrape never waits for the cache: if the
daemon's loop does not answer within 5 s, the scrape says `hybridkv_daemon_answering 0` and nothing
else. The usual `process_*` metrics of the daemon's process are there too.
"""
PARTS_OF_PAGE = (
    ("Lookups, stores, and what RAM holds", "", PLAIN.items),
    ("By message, code, reason and tier", "", LABELLED.items),
    ("Tiers below RAM", TIER_PREFIX, TIER.items),
    ("The daemon itself, groups and engines", "", SNAPSHOT_METRICS.items),
)
TAIL = """
## The ceiling

`ceiling_hit_tokens_total`, `ceiling_tokens_total` and `ceiling_asked_tokens_total` count the same
lookups: what was hit, what a cache of unlimited size would have hit, and what was asked for. It is
always hit <= ceiling <= asked.

- The unlimited cache has everything that was stored, or found below RAM, since the daemon began. It
  forgets only what `hybridkv clear` or a proof of wrong bytes takes away. It also has what the
  quota of a `cache_salt` kept out, because a larger quota would have kept it.
- A hit is counted when the engine ends its lease. It is none if the answer was late or the hit
  could not be loaded: what was asked for then counts, and `lookups_unused_total` grows. Lookups
  that were withdrawn while tiers were read are in no sum: the request was aborted, or the engine
  had as much itself.
- What an engine did not store for want of a write slot has no name, so it is in neither number.
  `slots_short_total` grows then, and the true ceiling is higher.
- A gap without evictions is not for lack of room. Tiers that were too slow, away, or over a
  deadline give less than they have (`promotions_cut_total`, `deadlines_missed_total`).
- The names of `ceiling_chunks_max` chunks are remembered, some 150 bytes each. The chunk that was
  not asked for the longest is forgotten first. Once `ceiling_chunks_forgotten_total` is above 0,
  the ceiling is that of a cache of so many chunks.
- The counting is done while nobody asks the daemon for anything. Lookups for which there was never
  time are in none of the three numbers, and are counted in `ceiling_lookups_left_out_total`.
"""


def known() -> dict[str, MetricFamily]:
    """Returns every metric by its whole name, without the `_total` of counters."""
    return {
        f"{PREFIX}{name}": described for name, described in {**VALUES, **SNAPSHOT_METRICS}.items()
    }


def exposed() -> dict[str, MetricFamily]:
    """Returns every name that a query may contain, with its metric."""
    parts = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    return {
        f"{name}{part}": described
        for name, described in known().items()
        for part in parts[described.kind]
    }


def _rows(prefix: str, described: Iterable[tuple[str, MetricFamily]]) -> Iterable[list[str]]:
    """The row of each metric."""
    for name, family in described:
        whole = f"{PREFIX}{prefix}{name}{'_total' if family.kind == 'counter' else ''}"
        yield [f"`{whole}`", str(family.kind), ", ".join(family.labels), family.help]


def document() -> str:
    """Returns the page as it must be."""
    lines = [HEAD]
    for title, prefix, described in PARTS_OF_PAGE:
        lines += [
            f"## {title}\n",
            table(["metric", "type", "labels", "meaning"], _rows(prefix, described())),
        ]
    return "\n".join(lines).rstrip("\n") + "\n" + TAIL


def main() -> int:
    """Print the page, or write it with --write."""
    return print_or_write(DOCUMENT, document(), __doc__)


if __name__ == "__main__":
    sys.exit(main())
