"""`hybridkv replay`: what caches of several sizes would have hit on a trace of prompts."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import JSON, SOCKET, command, model, option, socket_of, switch
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json, waiting
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Verdict
from hybridkv.core.geometry import Geometry
from hybridkv.core.policies import EvictionPolicy
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.state_boundaries import StateRule, recurrent_groups
from hybridkv.core.tails import why_no_tails
from hybridkv.lab import replay
from hybridkv.lab.capacity import ConfigPreview
from hybridkv.lab.configuration import inspect_model, preview_of
from hybridkv.lab.models import bundled_models
from hybridkv.lab.replay import (
    ForesightCache,
    ReplayHits,
    ReplayModel,
    TracePrompt,
    TraceReplay,
    UnlimitedCache,
)

_EVICTION = EvictionPolicy.TWO_QUEUES.value
PROGRESS_SECONDS = 5.0
SIZES = 6  # The number of sizes that are tried where none is named.
INTERVALS_MAX = 6  # The number of retention intervals that are tried.


@command(
    option(
        "trace",
        "a JSON object a line: input_length (tokens) and hash_ids, a number for each block of "
        "the prompt that covers all blocks before it, as in the public Mooncake traces",
        type=Path,
    ),
    option(
        "--block-tokens N",
        "tokens that one of the hash_ids stands for (default: %(default)s)",
        replay.BLOCK_TOKENS,
        type=int,
    ),
    option(
        "--sessions TURNS",
        "take the lengths of the trace's requests for sessions of so many turns, in which a "
        "prompt is all that was said before and what is new (default: the prompts as they are)",
        type=int,
    ),
    option(
        "--prefix-match-unit N",
        "for recurrent models: also say what hits inside a block would give, at multiples of N "
        "tokens (default: the engine's own unit, if it has one)",
        type=int,
    ),
    switch(
        "--retention",
        "for recurrent models: also say what other values of vLLM's "
        "--prefix-cache-retention-interval would hit",
    ),
    SOCKET,
    option(
        "--ram SIZE",
        'memory of the cache, like "8GiB"; may be named several times (default: some that are '
        "worth a look)",
        action="append",
    ),
    switch(
        "--answers",
        "the answers are stored too, as by engines with store_generated (their lengths are the "
        "trace's output_length)",
    ),
    option("--eviction", "as of `serve`", _EVICTION, choices=[*EvictionPolicy]),
    JSON,
    *model(bundled_models(), "the engine of the running daemon"),
)
def run_replay(arguments: argparse.Namespace) -> int:
    """Print what each size hits, next to what no cache could exceed."""
    sizes = [parse_size(size, "ram") for size in arguments.ram or ()]
    block_tokens, eviction = arguments.block_tokens, EvictionPolicy(arguments.eviction)
    prompts = replay.read_trace(arguments.trace, block_tokens, plain(str(arguments.trace)))
    if arguments.sessions is not None:
        prompts = replay.as_sessions(prompts, arguments.sessions, block_tokens)
    if arguments.answers:
        prompts = list(replay.answered(prompts, block_tokens))
    else:
        prompts = list(replay.unanswered(prompts))
    preview = _preview(arguments)
    assert preview.geometry is not None
    if arguments.retention and not recurrent_groups(preview.geometry):
        raise ConfigError(
            f"--retention: no group of {plain(preview.model)} is recurrent", "leaving it out works"
        )
    fine = _fine_geometry(preview, arguments.prefix_match_unit)
    model = ReplayModel(preview.geometry, preview.states, block_tokens)
    unlimited = UnlimitedCache(model)
    ceiling = _served(unlimited, prompts, "without bound")
    everything = unlimited.stored_bytes
    if not everything:
        tokens = preview.geometry.chunk_tokens
        raise ConfigError(f"no prompt of the trace has a whole chunk of {tokens} tokens")
    whole = 1 << math.ceil(math.log2(everything))
    sizes = sorted(sizes or (max(1, whole >> halves) for halves in range(SIZES)))
    reads = replay.all_reads(model, prompts)
    known = sum(replay.known_tokens(prompts, block_tokens))
    told = _Told(preview, eviction, known, everything, ceiling)
    for size in sizes:
        hits = _hits(model, prompts, size, everything, eviction)
        best = _served(ForesightCache(model, size, reads), prompts, "with foresight")
        told.rows.append((size, hits, best))
    if fine is not None:
        model = ReplayModel(fine, preview.states, block_tokens, with_tails=True)
        told.tails = _Tails(fine.hash_tokens, *_all_hits(model, prompts, sizes, eviction))
    for rule in _rules(preview, prompts) if arguments.retention else ():
        model = ReplayModel(preview.geometry, rule, block_tokens)
        told.others.append((rule, *_all_hits(model, prompts, sizes, eviction)))
    if arguments.json:
        print_json(told.document())
    else:
        told.print()
    return 0


def _fine_geometry(preview: ConfigPreview, unit: int | None) -> Geometry | None:
    """The groups with hits inside a block, at `unit` or the engine's own unit; None = whole blocks.

    Raises ConfigError where `unit` cannot be.
    """
    geometry = preview.geometry
    assert geometry is not None
    if unit is None:
        return None if why_no_tails(geometry) else geometry
    chunk = geometry.chunk_tokens
    if not 0 < unit < chunk or chunk % unit:
        what = f"--prefix-match-unit {unit} does not divide a chunk of {chunk} tokens"
        works = next(size for size in range(max(1, chunk // 8), chunk + 1) if chunk % size == 0)
        raise ConfigError(what, f"{works} works")
    geometry = replace(geometry, hash_tokens=unit, alignment_tokens=unit)
    if why := why_no_tails(geometry):
        raise ConfigError(f"--prefix-match-unit {unit}: {why}", "leaving it out works")
    if not recurrent_groups(geometry):
        what = f"--prefix-match-unit: no group of {plain(preview.model)} is recurrent"
        raise ConfigError(what, "leaving it out works")
    return geometry


@dataclass(frozen=True)
class _Tails:
    """What hits inside a block give."""

    unit_tokens: int
    stored_bytes: int
    ceiling: ReplayHits
    hits: list[ReplayHits]  # Of each size.


@dataclass
class _Told:
    """What the command found out."""

    preview: ConfigPreview
    eviction: EvictionPolicy
    known: int
    """Tokens that an earlier prompt had."""
    everything: int
    ceiling: ReplayHits
    rows: list[tuple[int, ReplayHits, ReplayHits]] = field(default_factory=list)
    """(bytes of RAM, hits, hits with foresight)"""
    others: list[tuple[StateRule, int, ReplayHits, list[ReplayHits]]] = field(default_factory=list)
    """(rule, bytes of all objects, hits without bound, hits of each size)"""
    tails: _Tails | None = None

    def document(self) -> dict[str, Any]:
        """What --json prints."""
        document: dict[str, Any] = {
            "eviction": self.eviction,
            "model": self.preview.model,
            "prompts": self.ceiling.prompts,
            "tokens": self.ceiling.tokens,
            "known_tokens": self.known,
            "everything_bytes": self.everything,
            "ceiling": self._rates(self.ceiling),
            "sizes": [
                {
                    "ram_bytes": size,
                    **self._rates(hits),
                    "of_ceiling": self._share(hits),
                    "evicted": hits.evicted,
                    "foresight": self._rates(best),
                }
                for size, hits, best in self.rows
            ],
        }
        if self.tails is not None:
            document["sub_block_hits"] = {
                "unit_tokens": self.tails.unit_tokens,
                "everything_bytes": self.tails.stored_bytes,
                "ceiling": self._rates(self.tails.ceiling),
                "sizes": [
                    {"ram_bytes": row[0], **self._rates(hits), "evicted": hits.evicted}
                    for row, hits in zip(self.rows, self.tails.hits, strict=True)
                ],
            }
        if self.others:
            document["retention"] = [
                {
                    "interval_tokens": rule.retention_tokens,
                    "everything_bytes": stored,
                    "ceiling": self._rates(most),
                    "sizes": [
                        {"ram_bytes": row[0], **self._rates(one)}
                        for row, one in zip(self.rows, each, strict=True)
                    ],
                }
                for rule, stored, most, each in self.others
            ]
        return document

    def print(self) -> None:
        """Print sentences and tables."""
        console, ceiling = PlainConsole(120), self.ceiling
        console.print(
            f"{ceiling.prompts:,} prompts, {ceiling.tokens:,} tokens, of which an earlier prompt "
            f"had {self.known / ceiling.tokens:.1%}; all that {plain(self.preview.model)} stores "
            f"of them takes {format_size(self.everything)}. A cache without bound hits "
            f"{ceiling.rate:.1%} of the tokens; {self._again(ceiling):.1%} are computed again.",
            highlight=False,
        )
        columns = (
            *("RAM", "tokens hit", "computed again", "of the ceiling", "with foresight"),
            *("prompts hit", "evicted"),
        )
        table = new_table(columns, title=f"--eviction {self.eviction}")
        for size, hits, best in self.rows:
            rates = hits.rate, self._again(hits), self._share(hits), best.rate
            counts = (f"{count:,}" for count in (hits.prompts_hit, hits.evicted))
            table.add_row(format_size(size), *(f"{rate:.1%}" for rate in rates), *counts)
        console.print(table)
        if self.tails is not None:
            self._print_tails(console, self.tails)
        if not self.others:
            return
        sizes = [format_size(size) for size, _, _ in self.rows]
        heads = ("tokens", *sizes, "without bound", "all objects")
        table = new_table(heads, title="tokens hit by --prefix-cache-retention-interval")
        for rule, stored, most, each in self.others:
            name = "unset" if rule.retention_tokens is None else f"{rule.retention_tokens:,}"
            name += " (now)" if rule == self.preview.states else ""
            table.add_row(name, *(f"{one.rate:.1%}" for one in (*each, most)), format_size(stored))
        console.print(table)

    def _print_tails(self, console: PlainConsole, tails: _Tails) -> None:
        heads = "RAM", "tokens hit", "computed again", "at whole blocks", "prompts hit", "evicted"
        title = f"hits inside a block, --prefix-match-unit {tails.unit_tokens}"
        table = new_table(heads, title=title)
        bounded = [(format_size(size), whole) for size, whole, _ in self.rows]
        every, own = [*bounded, ("without bound", self.ceiling)], [*tails.hits, tails.ceiling]
        for (size, whole), hits in zip(every, own, strict=True):
            rates = hits.rate, self._again(hits), self._again(whole)
            counts = (f"{count:,}" for count in (hits.prompts_hit, hits.evicted))
            table.add_row(size, *(f"{rate:.1%}" for rate in rates), *counts)
        console.print(table)
        size = format_size(tails.stored_bytes)
        console.print(f"With them all that is stored takes {size}.", highlight=False)

    def _rates(self, hits: ReplayHits) -> dict[str, Any]:
        rates = {"tokens_hit": hits.tokens_hit, "prompts_hit": hits.prompts_hit, "rate": hits.rate}
        return {**rates, "computed_again": self._again(hits)}

    def _again(self, hits: ReplayHits) -> float:
        """The share of all tokens that are computed although an earlier prompt had them."""
        return max(0, self.known - hits.tokens_hit) / hits.tokens if hits.tokens else 0.0

    def _share(self, hits: ReplayHits) -> float:
        return hits.tokens_hit / self.ceiling.tokens_hit if self.ceiling.tokens_hit else 1.0


def _rules(preview: ConfigPreview, prompts: Sequence[TracePrompt]) -> list[StateRule]:
    """The engine's rule, and others that keep states at other places, the fewest states first."""
    geometry, now = preview.geometry, preview.states
    assert geometry is not None
    longest = max(prompt.tokens for prompt in prompts)
    group = recurrent_groups(geometry)[0]
    rules: dict[int, StateRule] = {}
    interval = geometry.chunk_tokens
    while interval <= longest:
        rule = replace(now, retention_tokens=interval)
        rules.setdefault(rule.period_tokens(group), rule)
        interval *= 2
    chosen = {0: replace(now, retention_tokens=0)}
    chosen |= dict(sorted(rules.items())[:INTERVALS_MAX])
    chosen[now.period_tokens(group)] = now
    most = max(longest, *chosen)
    return [rule for _, rule in sorted(chosen.items(), key=lambda one: -(one[0] or most + 1))]


def _all_hits(
    model: ReplayModel,
    prompts: Sequence[TracePrompt],
    sizes: Sequence[int],
    eviction: EvictionPolicy,
) -> tuple[int, ReplayHits, list[ReplayHits]]:
    """(bytes of all objects, hits without bound, hits of each size)"""
    unlimited = UnlimitedCache(model)
    most = _served(unlimited, prompts, "without bound")
    stored = unlimited.stored_bytes
    return stored, most, [_hits(model, prompts, size, stored, eviction) for size in sizes]


def _hits(
    model: ReplayModel,
    prompts: Sequence[TracePrompt],
    size: int,
    everything: int,
    eviction: EvictionPolicy,
) -> ReplayHits:
    # A cache that is larger than everything behaves as one that is as large.
    with TraceReplay(model, max(1, min(size, 2 * everything)), eviction) as cache:
        return _served(cache, prompts, format_size(size))


def _served(
    cache: TraceReplay | UnlimitedCache | ForesightCache, prompts: Sequence[TracePrompt], what: str
) -> ReplayHits:
    """All hits; from time to time standard error says how far it is."""
    total, told = ReplayHits(), time.monotonic()
    for prompt in prompts:
        total += cache.serve(prompt)
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            print(f"{what}: {total.prompts:,} of {len(prompts):,} prompts", file=sys.stderr)
    return total


def _preview(arguments: argparse.Namespace) -> ConfigPreview:
    """The model that is named, or the one engine that the daemon knows."""
    if arguments.model is not None or arguments.vllm_arguments:
        report = inspect_model(arguments.model, arguments.vllm_arguments, waiting)
        if report.preview is None or report.preview.geometry is None:
            failed = [one.sentence for one in report.findings if one.verdict is Verdict.FAIL]
            raise HybridKVError("; ".join(failed) or "vLLM gave no KV cache groups")
        return report.preview
    socket_path = socket_of(arguments)
    with ControlClient(socket_path) as control:
        engines = control.engines()
    if len(engines) != 1:
        connected = f"{len(engines)} engines are connected to {socket_path}"
        raise HybridKVError(f"{connected}; --model DIR_OR_NAME says which")
    return preview_of(engines[0])
