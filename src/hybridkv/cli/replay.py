"""`hybridkv replay`: what caches of several sizes would have hit on a trace of prompts."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import JSON, SOCKET, command, model, option, socket_of
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.capacity import ConfigPreview
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Verdict
from hybridkv.core.policies import EvictionPolicy
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.lab import replay
from hybridkv.lab.configuration import inspect_model, preview_of
from hybridkv.lab.models import bundled_models
from hybridkv.lab.replay import ReplayHits, TraceReplay, UnlimitedCache

_EVICTION = EvictionPolicy.TWO_QUEUES.value
PROGRESS_SECONDS = 5.0
SIZES = 6
"""The number of sizes that are tried where none is named."""


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
    *model(bundled_models(), "the engine of the running daemon"),
)
def run_replay(arguments: argparse.Namespace) -> int:
    """Print what each size hits, next to what no cache could exceed."""
    sizes = [parse_size(size, "ram") for size in arguments.ram or ()]
    block_tokens, eviction = arguments.block_tokens, EvictionPolicy(arguments.eviction)
    prompts = replay.read_trace(arguments.trace, block_tokens, plain(str(arguments.trace)))
    preview = _preview(arguments)
    assert preview.geometry is not None
    model = replay.ReplayModel(preview.geometry, preview.states, block_tokens)
    unlimited = UnlimitedCache(model)
    ceiling = _served(unlimited, prompts, "without bound")
    everything = unlimited.stored_bytes
    if not everything:
        tokens = preview.geometry.chunk_tokens
        raise ConfigError(f"no prompt of the trace has a whole chunk of {tokens} tokens")
    whole = 1 << math.ceil(math.log2(everything))
    rows: list[tuple[int, ReplayHits, float]] = []
    for size in sorted(sizes or (max(1, whole >> halves) for halves in range(SIZES))):
        # A cache that is larger than everything behaves as one that is as large.
        with TraceReplay(model, min(size, 2 * everything), eviction) as cache:
            hits = _served(cache, prompts, format_size(size))
        of_ceiling = hits.tokens_hit / ceiling.tokens_hit if ceiling.tokens_hit else 1.0
        rows.append((size, hits, of_ceiling))
    if arguments.json:
        totals = {"model": preview.model, "prompts": ceiling.prompts, "tokens": ceiling.tokens}
        totals |= {"everything_bytes": everything, "ceiling": _told(ceiling)}
        shown = [
            {"ram_bytes": size, **_told(hits), "of_ceiling": share, "evicted": hits.evicted}
            for size, hits, share in rows
        ]
        print_json({"eviction": eviction, **totals, "sizes": shown})
        return 0
    console = PlainConsole(120)
    console.print(
        f"{ceiling.prompts:,} prompts, {ceiling.tokens:,} tokens; all that {plain(preview.model)} "
        f"stores of them takes {format_size(everything)}. A cache without bound hits "
        f"{ceiling.rate:.1%} of the tokens.",
        highlight=False,
    )
    columns = ("RAM", "tokens hit", "of the ceiling", "prompts hit", "evicted")
    table = new_table(columns, title=f"--eviction {eviction}")
    for size, hits, share in rows:
        counts = (f"{count:,}" for count in (hits.prompts_hit, hits.evicted))
        table.add_row(format_size(size), f"{hits.rate:.1%}", f"{share:.1%}", *counts)
    console.print(table)
    return 0


def _told(hits: ReplayHits) -> dict[str, Any]:
    return {"tokens_hit": hits.tokens_hit, "prompts_hit": hits.prompts_hit, "rate": hits.rate}


def _served(
    cache: TraceReplay | UnlimitedCache, prompts: Sequence[replay.TracePrompt], what: str
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
        report = inspect_model(arguments.model, arguments.vllm_arguments)
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
