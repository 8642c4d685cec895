"""`hybridkv replay`: what caches of several sizes would have hit on a trace of prompts."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import (
    JSON,
    SOCKET,
    command,
    control_of,
    model_arguments,
    option,
    socket_of,
)
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json, waiting
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Verdict
from hybridkv.core.policies import EvictionPolicy
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.lab import replay
from hybridkv.lab.capacity import ConfigPreview
from hybridkv.lab.configuration import inspect_model, preview_of
from hybridkv.lab.models import bundled_models
from hybridkv.lab.replay import ReplayHits, ReplayModel, TracePrompt, TraceReplay, UnlimitedCache

_EVICTION = EvictionPolicy.TWO_QUEUES.value
PROGRESS_SECONDS = 5.0
SIZES = 6  # The number of sizes that are tried where none is named.


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
    SOCKET,
    option(
        "--ram SIZE",
        'memory of the cache, like "8GiB"; may be named several times (default: some that are '
        "worth a look)",
        action="append",
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
    preview = _preview(arguments)
    assert preview.geometry is not None
    model = ReplayModel(preview.geometry, preview.states, block_tokens)
    unlimited = UnlimitedCache(model)
    ceiling = _served(unlimited, prompts, "without bound")
    if not unlimited.stored_bytes:
        tokens = preview.geometry.chunk_tokens
        raise ConfigError(f"no prompt of the trace has a whole chunk of {tokens} tokens")
    whole = 1 << math.ceil(math.log2(unlimited.stored_bytes))
    report = _Report(
        model=preview.model,
        eviction=eviction,
        known_tokens=sum(replay.known_tokens(prompts, block_tokens)),
        ceiling=ceiling,
        everything_bytes=unlimited.stored_bytes,
    )
    for size in sorted(sizes or (max(1, whole >> halves) for halves in range(SIZES))):
        # A cache that is larger than everything behaves as one that is as large.
        ram_bytes = max(1, min(size, 2 * unlimited.stored_bytes))
        with TraceReplay(model, ram_bytes, eviction) as cache:
            report.sizes[size] = _served(cache, prompts, format_size(size))
    if arguments.json:
        print_json(report.document())
    else:
        report.print()
    return 0


@dataclass
class _Report:
    """The results of all caches, and how they are printed."""

    model: str
    eviction: EvictionPolicy
    known_tokens: int  # Tokens that an earlier prompt had.
    ceiling: ReplayHits  # Of a cache without bound.
    everything_bytes: int  # Bytes of all objects that it stored.
    sizes: dict[int, ReplayHits] = field(default_factory=dict)  # By the cache's bytes.

    def document(self) -> dict[str, Any]:
        """Returns the object that --json prints."""
        return {
            "eviction": self.eviction,
            "model": self.model,
            "prompts": self.ceiling.prompts,
            "tokens": self.ceiling.tokens,
            "known_tokens": self.known_tokens,
            "everything_bytes": self.everything_bytes,
            "ceiling": self._rates(self.ceiling),
            "sizes": [
                {
                    "ram_bytes": ram_bytes,
                    **self._rates(hits),
                    "of_ceiling": self._share(hits),
                    "evicted": hits.evicted,
                }
                for ram_bytes, hits in self.sizes.items()
            ],
        }

    def print(self) -> None:
        """Print a sentence on the trace, and a row for each size."""
        console, ceiling = PlainConsole(120), self.ceiling
        console.print(
            f"{ceiling.prompts:,} prompts, {ceiling.tokens:,} tokens, of which an earlier prompt "
            f"had {self.known_tokens / ceiling.tokens:.1%}; all that {plain(self.model)} stores of "
            f"them takes {format_size(self.everything_bytes)}. A cache without bound hits "
            f"{ceiling.rate:.1%} of the tokens; {self._again(ceiling):.1%} are computed again.",
            highlight=False,
        )
        columns = (
            "RAM",
            "tokens hit",
            "computed again",
            "of the ceiling",
            "prompts hit",
            "evicted",
        )
        table = new_table(columns, title=f"--eviction {self.eviction}")
        for ram_bytes, hits in self.sizes.items():
            table.add_row(
                format_size(ram_bytes),
                f"{hits.rate:.1%}",
                f"{self._again(hits):.1%}",
                f"{self._share(hits):.1%}",
                f"{hits.prompts_hit:,}",
                f"{hits.evicted:,}",
            )
        console.print(table)

    def _rates(self, hits: ReplayHits) -> dict[str, Any]:
        rates = {"tokens_hit": hits.tokens_hit, "prompts_hit": hits.prompts_hit, "rate": hits.rate}
        return {**rates, "computed_again": self._again(hits)}

    def _again(self, hits: ReplayHits) -> float:
        """The share of all tokens that are computed although an earlier prompt had them."""
        return max(0, self.known_tokens - hits.tokens_hit) / hits.tokens if hits.tokens else 0.0

    def _share(self, hits: ReplayHits) -> float:
        """The tokens hit as a share of those that a cache without bound hits."""
        most = self.ceiling.tokens_hit
        return hits.tokens_hit / most if most else 1.0


def _served(
    cache: TraceReplay | UnlimitedCache, prompts: Sequence[TracePrompt], what: str
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
