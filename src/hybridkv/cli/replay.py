"""`hybridkv replay`: what caches of several sizes would have hit on a trace of prompts."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
from hybridkv.cli.tier_findings import PREFILL, describe_need, prefill_of
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Verdict
from hybridkv.core.geometry import Geometry
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.lab import replay
from hybridkv.lab.capacity import ConfigPreview
from hybridkv.lab.configuration import inspect_model, preview_of
from hybridkv.lab.models import bundled_models
from hybridkv.lab.replay import ReplayHits, ReplayModel, TracePrompt, TraceReplay, UnlimitedCache
from hybridkv.lab.tier_requirements import ReadCost, needed_speed, read_cost
from hybridkv.shm.slots import slot_bytes

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
    PREFILL,
    JSON,
    *model_arguments(bundled_models(), "the engine of the running daemon"),
)
def run_replay(arguments: argparse.Namespace) -> int:
    """Print what each size of cache hits, next to what no cache could exceed."""
    sizes = [parse_size(size, "ram") for size in arguments.ram or ()]
    block_tokens = arguments.block_tokens
    prompts = replay.read_trace(arguments.trace, block_tokens, plain(str(arguments.trace)))
    preview = _preview(arguments)
    assert preview.geometry is not None
    model = ReplayModel(preview.geometry, preview.states, block_tokens)
    unlimited = UnlimitedCache(model)
    ceilings = _served(unlimited, prompts, "without bound")
    if not unlimited.stored_bytes:
        tokens = preview.geometry.chunk_tokens
        raise ConfigError(f"no prompt of the trace has a whole chunk of {tokens} tokens")
    whole = 1 << math.ceil(math.log2(unlimited.stored_bytes))
    report = _Report(
        model=preview.model,
        known_tokens=sum(replay.known_tokens(prompts, block_tokens)),
        ceiling=sum(ceilings, ReplayHits()),
        everything_bytes=unlimited.stored_bytes,
        prefill=prefill_of(arguments),
    )
    for size in sorted(sizes or (max(1, whole >> halves) for halves in range(SIZES))):
        # A cache that is larger than everything behaves as one that is as large.
        ram_bytes = max(1, min(size, 2 * unlimited.stored_bytes))
        with TraceReplay(model, ram_bytes) as cache:
            hits = _served(cache, prompts, format_size(size))
        report.sizes[size] = sum(hits, ReplayHits())
        report.below[size] = _read_below(model.geometry, ceilings, hits)
    if arguments.json:
        print_json(report.document())
    else:
        report.print()
    return 0


@dataclass
class _Report:
    """The results of all caches, and how they are printed."""

    model: str
    known_tokens: int  # Tokens that an earlier prompt had.
    ceiling: ReplayHits  # Of a cache without bound.
    everything_bytes: int  # Bytes of all objects that it stored.
    prefill: float | None  # Tokens a second. None = nobody said it.
    sizes: dict[int, ReplayHits] = field(default_factory=dict)  # By the cache's bytes.
    below: dict[int, ReadCost] = field(default_factory=dict)
    """By the cache's bytes: what is read from a tier below it that has everything."""

    def document(self) -> dict[str, Any]:
        """Returns the object that --json prints."""
        return {
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
                    "tier_read": asdict(self.below[ram_bytes]),
                    "needed_speed": None
                    if self.prefill is None
                    else asdict(needed_speed(self.below[ram_bytes], self.prefill)),
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
            "from a tier",
        )
        table = new_table(columns)
        for ram_bytes, hits in self.sizes.items():
            table.add_row(
                format_size(ram_bytes),
                f"{hits.rate:.1%}",
                f"{self._again(hits):.1%}",
                f"{self._share(hits):.1%}",
                f"{hits.prompts_hit:,}",
                f"{hits.evicted:,}",
                format_size(self.below[ram_bytes].bytes),
            )
        console.print(table)
        below = sum(self.below.values(), ReadCost())
        if below.tokens:
            console.print(
                f"A tier below that has everything ({format_size(self.everything_bytes)}) pays "
                f"above {describe_need(below, self.prefill)}.",
                highlight=False,
            )

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
) -> list[ReplayHits]:
    """The hits of each prompt. The progress is printed to standard error from time to time."""
    hits, printed_at = list[ReplayHits](), time.monotonic()
    for prompt in prompts:
        hits.append(cache.serve(prompt))
        if time.monotonic() - printed_at > PROGRESS_SECONDS:
            printed_at = time.monotonic()
            print(f"{what}: {len(hits):,} of {len(prompts):,} prompts", file=sys.stderr)
    return hits


def _read_below(
    geometry: Geometry, ceilings: Sequence[ReplayHits], in_ram: Sequence[ReplayHits]
) -> ReadCost:
    """What a tier that has everything is read for, where RAM has shorter hits."""
    costs = (
        read_cost(geometry, whole.tokens_hit, hits.tokens_hit, slot_bytes)
        for whole, hits in zip(ceilings, in_ram, strict=True)
    )
    return sum(costs, ReadCost())


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
