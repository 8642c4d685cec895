"""`python -m tests.server.describe_metrics [--write]`: docs/METRICS-daemon.md, made from server/catalog.py."""

import sys
from collections.abc import Iterable

from hybridkv.server.catalog import MADE, PARTS, PLAIN, PREFIX, TIER, Described, Kind
from tests.documents import DOCS, print_or_write, table

DOCUMENT = DOCS / "METRICS-daemon.md"
HEAD = """# The daemon's metrics

`http://127.0.0.1:9477/metrics` (`--metrics-port`; the same server shows the status page at `/`), in Prometheus' text
form, to be asked for by a loopback name. `python -m tests.server.describe_metrics --write` makes the tables here from
`server/catalog.py`.

Every user of the node can ask: what is shown are counts, the names of engines and models, the ids of requests and how
they fared, never prompts or passwords. `--metrics-port -1` serves no page at all.

Every counter starts at 0 with its daemon and never goes down before that ends; all of those without labels are there
from the first scrape on. A scrape never waits for the cache: where the daemon's loop does not answer within 5 s it says
`hybridkv_daemon_answering 0` and nothing else. Beside these there are the usual `process_*` of the daemon's process.
"""
PARTS_OF_PAGE = (
    ("Lookups, stores, and what RAM holds", "", PLAIN.items),
    ("By message, code, reason and tier", "", PARTS.values),
    ("Tiers below RAM", "tier_", TIER.items),
    ("The daemon itself, groups and engines", "", MADE.items),
)
TAIL = """
## The ceiling

`ceiling_hit_tokens_total`, `ceiling_tokens_total` and `ceiling_asked_tokens_total` count the same lookups: what was
hit, what a cache of unlimited size would have hit, and what was asked for. It is always hit <= ceiling <= asked.

- The unlimited cache has what was stored, or found below RAM, since the daemon began, and forgets nothing but what
  `hybridkv clear` or a proof of wrong bytes takes away. What a `cache_salt`'s quota kept out is in it: a larger quota
  would have kept it.
- What an engine did not store for want of a write slot never got a name, so it is in neither; `slots_short_total` grows
  then, and the true ceiling is higher.
- A gap without evictions is not for lack of room: tiers that were too slow, away or over a deadline give less than they
  have (`promotions_cut_total`, `deadlines_missed_total`).
- Names of `ceiling_chunks_max` chunks are remembered, some 150 bytes each. The chunk that was longest not asked for
  goes first; from `ceiling_chunks_forgotten_total` > 0 on the ceiling is that of a cache of so many chunks.
- The counting is done while nobody asks the daemon for anything. Lookups for which there was never time are in none of
  the three and in `ceiling_lookups_left_out_total`.
"""


def _rows(prefix: str, described: Iterable[tuple[str, Described]]) -> Iterable[list[str]]:
    """One for each metric."""
    for name, one in described:
        whole = f"{PREFIX}{prefix}{name}{'_total' if one.kind is Kind.COUNTER else ''}"
        yield [f"`{whole}`", str(one.kind), ", ".join(one.labels), one.help]


def document() -> str:
    """The whole page."""
    lines = [HEAD]
    for title, prefix, described in PARTS_OF_PAGE:
        lines += [f"## {title}\n", table(["metric", "type", "labels", "meaning"], _rows(prefix, described()))]
    return "\n".join(lines).rstrip("\n") + "\n" + TAIL


def main() -> int:
    """Print it, or write it."""
    return print_or_write(DOCUMENT, document(), __doc__)


if __name__ == "__main__":
    sys.exit(main())
