"""`hybridkv replay`: what caches of several sizes would have hit on a trace of prompts."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hybridkv.cli.arguments import (
    JSON,
    SOCKET,
    command,
    control_of,
    model_arguments,
    option,
    socket_of,
    switch,
)
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json, waiting
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
    *model_arguments(bundled_models(), "the engine of the running daemon"),
)
def run_replay(arguments: argparse.Namespace) -> int:
    """Print what each size of cache hits, next to what no cache could exceed."""
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
    trials = _Trials(prompts, sizes, eviction)
    ceiling = trials.unlimited(model)
    if not ceiling.stored_bytes:
        tokens = preview.geometry.chunk_tokens
        raise ConfigError(f"no prompt of the trace has a whole chunk of {tokens} tokens")
    whole = 1 << math.ceil(math.log2(ceiling.stored_bytes))
    trials.sizes = sorted(sizes or (max(1, whole >> halves) for halves in range(SIZES)))
    report = _Report(
        preview=preview,
        eviction=eviction,
        known_tokens=sum(replay.known_tokens(prompts, block_tokens)),
        ceiling=ceiling,
    )
    reads = replay.all_reads(model, prompts)
    for size in trials.sizes:
        hits = trials.hits(model, size, ceiling.stored_bytes)
        foresight = ForesightCache(model, size, reads)
        best = _served(foresight, prompts, "with foresight")
        report.sizes.append(_SizeHits(size, hits, best))
    if fine is not None:
        model = ReplayModel(fine, preview.states, block_tokens, with_tails=True)
        report.tails = _TailHits(fine.hash_tokens, trials.all_hits(model))
    for rule in _rules(preview, prompts) if arguments.retention else ():
        model = ReplayModel(preview.geometry, rule, block_tokens)
        report.rules.append(_RuleHits(rule, trials.all_hits(model)))
    if arguments.json:
        print_json(report.document())
    else:
        report.print()
    return 0


def _fine_geometry(preview: ConfigPreview, unit: int | None) -> Geometry | None:
    """The geometry with hits inside a block, at multiples of `unit`, or of the engine's own unit.

    None = all hits end at whole blocks. Raises ConfigError where `unit` is not possible.
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


class _UnlimitedHits(NamedTuple):
    """The hits of a cache without bound."""

    hits: ReplayHits
    stored_bytes: int  # Bytes of all objects that it stored.


class _AllHits(NamedTuple):
    """The hits of a cache without bound, and of each size."""

    unlimited: _UnlimitedHits
    of_sizes: list[ReplayHits]


class _SizeHits(NamedTuple):
    """The hits of one size of cache."""

    ram_bytes: int
    hits: ReplayHits
    foresight: ReplayHits  # Of a cache of this size that knows all later prompts.


class _TailHits(NamedTuple):
    """The hits with those that end inside a block."""

    unit_tokens: int
    hits: _AllHits


class _RuleHits(NamedTuple):
    """The hits where recurrent states are kept at other places."""

    rule: StateRule
    hits: _AllHits


@dataclass
class _Report:
    """The results of all caches, and how they are printed."""

    preview: ConfigPreview
    eviction: EvictionPolicy
    known_tokens: int  # Tokens that an earlier prompt had.
    ceiling: _UnlimitedHits
    sizes: list[_SizeHits] = field(default_factory=list)
    rules: list[_RuleHits] = field(default_factory=list)
    tails: _TailHits | None = None

    def document(self) -> dict[str, Any]:
        """Returns the object that --json prints."""
        ceiling = self.ceiling.hits
        document: dict[str, Any] = {
            "eviction": self.eviction,
            "model": self.preview.model,
            "prompts": ceiling.prompts,
            "tokens": ceiling.tokens,
            "known_tokens": self.known_tokens,
            "everything_bytes": self.ceiling.stored_bytes,
            "ceiling": self._rates(ceiling),
            "sizes": [
                {
                    "ram_bytes": row.ram_bytes,
                    **self._rates(row.hits),
                    "of_ceiling": self._share(row.hits),
                    "evicted": row.hits.evicted,
                    "foresight": self._rates(row.foresight),
                }
                for row in self.sizes
            ],
        }
        if self.tails is not None:
            unlimited, of_sizes = self.tails.hits
            document["sub_block_hits"] = {
                "unit_tokens": self.tails.unit_tokens,
                "everything_bytes": unlimited.stored_bytes,
                "ceiling": self._rates(unlimited.hits),
                "sizes": [
                    {"ram_bytes": row.ram_bytes, **self._rates(hits), "evicted": hits.evicted}
                    for row, hits in zip(self.sizes, of_sizes, strict=True)
                ],
            }
        if self.rules:
            document["retention"] = [
                {
                    "interval_tokens": rule.retention_tokens,
                    "where_prompts_part": rule.keeps_junctions,
                    "everything_bytes": unlimited.stored_bytes,
                    "ceiling": self._rates(unlimited.hits),
                    "sizes": [
                        {"ram_bytes": row.ram_bytes, **self._rates(hits)}
                        for row, hits in zip(self.sizes, of_sizes, strict=True)
                    ],
                }
                for rule, (unlimited, of_sizes) in self.rules
            ]
        return document

    def print(self) -> None:
        """Print a sentence on the trace, and a table for each question."""
        console, ceiling = PlainConsole(120), self.ceiling.hits
        console.print(
            f"{ceiling.prompts:,} prompts, {ceiling.tokens:,} tokens, of which an earlier prompt "
            f"had {self.known_tokens / ceiling.tokens:.1%}; all that {plain(self.preview.model)} "
            f"stores of them takes {format_size(self.ceiling.stored_bytes)}. A cache without bound "
            f"hits {ceiling.rate:.1%} of the tokens; {self._again(ceiling):.1%} are computed "
            "again.",
            highlight=False,
        )
        self._print_sizes(console)
        if self.tails is not None:
            self._print_tails(console, self.tails)
        if self.rules:
            self._print_rules(console)

    def _print_sizes(self, console: PlainConsole) -> None:
        columns = (
            "RAM",
            "tokens hit",
            "computed again",
            "of the ceiling",
            "with foresight",
            "prompts hit",
            "evicted",
        )
        table = new_table(columns, title=f"--eviction {self.eviction}")
        for row in self.sizes:
            table.add_row(
                format_size(row.ram_bytes),
                f"{row.hits.rate:.1%}",
                f"{self._again(row.hits):.1%}",
                f"{self._share(row.hits):.1%}",
                f"{row.foresight.rate:.1%}",
                f"{row.hits.prompts_hit:,}",
                f"{row.hits.evicted:,}",
            )
        console.print(table)

    def _print_rules(self, console: PlainConsole) -> None:
        sizes = [format_size(row.ram_bytes) for row in self.sizes]
        columns = ("tokens", *sizes, "without bound", "all objects")
        table = new_table(columns, title="tokens hit by --prefix-cache-retention-interval")
        for rule, (unlimited, of_sizes) in self.rules:
            name = "unset" if rule.retention_tokens is None else f"{rule.retention_tokens:,}"
            is_less = self.preview.states.keeps_junctions and not rule.keeps_junctions
            name += ", none where prompts part" if is_less else ""
            name += " (now)" if rule == self.preview.states else ""
            rates = [f"{hits.rate:.1%}" for hits in (*of_sizes, unlimited.hits)]
            table.add_row(name, *rates, format_size(unlimited.stored_bytes))
        console.print(table)

    def _print_tails(self, console: PlainConsole, tails: _TailHits) -> None:
        columns = ("RAM", "tokens hit", "computed again", "at whole blocks")
        title = f"hits inside a block, --prefix-match-unit {tails.unit_tokens}"
        table = new_table((*columns, "prompts hit", "evicted"), title=title)
        unlimited, of_sizes = tails.hits
        names = [*(format_size(row.ram_bytes) for row in self.sizes), "without bound"]
        whole_blocks = [*(row.hits for row in self.sizes), self.ceiling.hits]
        rows = zip(names, [*of_sizes, unlimited.hits], whole_blocks, strict=True)
        for name, hits, whole in rows:
            table.add_row(
                name,
                f"{hits.rate:.1%}",
                f"{self._again(hits):.1%}",
                f"{self._again(whole):.1%}",
                f"{hits.prompts_hit:,}",
                f"{hits.evicted:,}",
            )
        console.print(table)
        size = format_size(unlimited.stored_bytes)
        console.print(f"With them all that is stored takes {size}.", highlight=False)

    def _rates(self, hits: ReplayHits) -> dict[str, Any]:
        rates = {"tokens_hit": hits.tokens_hit, "prompts_hit": hits.prompts_hit, "rate": hits.rate}
        return {**rates, "computed_again": self._again(hits)}

    def _again(self, hits: ReplayHits) -> float:
        """The share of all tokens that are computed although an earlier prompt had them."""
        return max(0, self.known_tokens - hits.tokens_hit) / hits.tokens if hits.tokens else 0.0

    def _share(self, hits: ReplayHits) -> float:
        """The tokens hit as a share of those that a cache without bound hits."""
        ceiling = self.ceiling.hits
        return hits.tokens_hit / ceiling.tokens_hit if ceiling.tokens_hit else 1.0


def _rules(preview: ConfigPreview, prompts: Sequence[TracePrompt]) -> list[StateRule]:
    """The engine's rule and others that keep states at other places, the fewest states first."""
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
    # Period 0, only the last boundary of a prompt, has the fewest states.
    most = max(longest, *chosen)
    periods = sorted(chosen, key=lambda period: -(period or most + 1))
    at_ends = [StateRule(0, now.step_tokens)] if now.keeps_junctions else []
    return at_ends + [chosen[period] for period in periods]


@dataclass
class _Trials:
    """Runs a trace through caches of several sizes."""

    prompts: Sequence[TracePrompt]
    sizes: Sequence[int]
    eviction: EvictionPolicy

    def unlimited(self, model: ReplayModel) -> _UnlimitedHits:
        """The hits of a cache without bound."""
        cache = UnlimitedCache(model)
        hits = _served(cache, self.prompts, "without bound")
        return _UnlimitedHits(hits, cache.stored_bytes)

    def hits(self, model: ReplayModel, size: int, everything_bytes: int) -> ReplayHits:
        """The hits of a cache of `size` bytes, where all objects have `everything_bytes`."""
        # A cache that is larger than everything behaves as one that is as large.
        ram_bytes = max(1, min(size, 2 * everything_bytes))
        with TraceReplay(model, ram_bytes, self.eviction) as cache:
            return _served(cache, self.prompts, format_size(size))

    def all_hits(self, model: ReplayModel) -> _AllHits:
        """The hits of a cache without bound, and of each size."""
        unlimited = self.unlimited(model)
        of_sizes = [self.hits(model, size, unlimited.stored_bytes) for size in self.sizes]
        return _AllHits(unlimited, of_sizes)


def _served(
    cache: TraceReplay | UnlimitedCache | ForesightCache, prompts: Sequence[TracePrompt], what: str
) -> ReplayHits:
    """The hits of all prompts. The progress is printed to standard error from time to time."""
    total, printed_at = ReplayHits(), time.monotonic()
    for prompt in prompts:
        total += cache.serve(prompt)
        if time.monotonic() - printed_at > PROGRESS_SECONDS:
            printed_at = time.monotonic()
            print(f"{what}: {total.prompts:,} of {len(prompts):,} prompts", file=sys.stderr)
    return total


def _preview(arguments: argparse.Namespace) -> ConfigPreview:
    """The model that is named, or the one engine that the daemon knows."""
    if arguments.model is not None or arguments.vllm_arguments:
        report = inspect_model(arguments.model, arguments.vllm_arguments, waiting)
        if report.preview is None or report.preview.geometry is None:
            failures = [
                finding.sentence for finding in report.findings if finding.verdict is Verdict.FAIL
            ]
            raise HybridKVError("; ".join(failures) or "vLLM gave no KV cache groups")
        return report.preview
    with control_of(arguments) as control:
        engines = control.engines()
    if len(engines) != 1:
        connected = f"{len(engines)} engines are connected to {socket_of(arguments)}"
        raise HybridKVError(f"{connected}; --model DIR_OR_NAME says which")
    return preview_of(engines[0])
