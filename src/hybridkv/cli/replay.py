"""`hybridkv replay`: what caches of several sizes would have hit on a trace of prompts."""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import add_json, add_model, add_socket, socket_of
from hybridkv.cli.terminal import new_table, plain, plain_console, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import HybridKVError
from hybridkv.core.findings import Verdict
from hybridkv.core.policies import EvictionPolicy
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.lab.capacity import ConfigPreview
from hybridkv.lab.configuration import inspect_model, preview_of
from hybridkv.lab.models import bundled_models
from hybridkv.lab.replay import BLOCK_TOKENS, ReplayHits, ReplayReport, read_trace, replay_trace

PROGRESS_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `replay`."""
    parser.add_argument(
        "trace",
        type=Path,
        help="a JSON object a line: input_length (tokens) and hash_ids, a number for each block of "
        "the prompt that covers all blocks before it, as in the public Mooncake traces",
    )
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens that one of the hash_ids stands for (default: %(default)s)",
    )
    add_socket(parser)
    parser.add_argument(
        "--ram",
        action="append",
        metavar="SIZE",
        help='memory of the cache, like "8GiB"; may be named several times (default: some that are '
        "worth a look)",
    )
    parser.add_argument(
        "--eviction",
        choices=[*EvictionPolicy],
        default=EvictionPolicy.TWO_QUEUES.value,
        help="as of `serve`",
    )
    add_json(parser)
    add_model(parser, bundled_models(), "the engine of the running daemon")


def run(arguments: argparse.Namespace) -> int:
    """Print what each size hits, next to what no cache could exceed."""
    sizes = [parse_size(size, "ram") for size in arguments.ram or ()]
    block_tokens, eviction = arguments.block_tokens, arguments.eviction
    prompts = read_trace(arguments.trace, block_tokens, plain(str(arguments.trace)))

    def last(sums: Iterable[ReplayHits], what: str) -> ReplayHits:
        """The last of the sums; from time to time standard error says how far it is."""
        total, told = ReplayHits(), time.monotonic()
        for total in sums:
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                print(f"{what}: {total.prompts:,} of {len(prompts):,} prompts", file=sys.stderr)
        return total

    preview = _preview(arguments)
    policy = EvictionPolicy(eviction)
    report = replay_trace(preview, prompts, block_tokens, sizes, policy, last)
    if arguments.json:
        print_json({"eviction": eviction, **_as_json(report)})
    else:
        _print(report, eviction)
    return 0


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


def _as_json(report: ReplayReport) -> dict[str, Any]:
    ceiling = report.ceiling
    return {
        "model": report.model,
        "prompts": ceiling.prompts,
        "tokens": ceiling.tokens,
        "everything_bytes": report.everything_bytes,
        "ceiling": _hits(ceiling),
        "sizes": [
            {
                "ram_bytes": size,
                **_hits(hits),
                "of_ceiling": report.of_ceiling(hits),
                "evicted": hits.evicted,
            }
            for size, hits in report.sizes
        ],
    }


def _hits(hits: ReplayHits) -> dict[str, Any]:
    return {"tokens_hit": hits.tokens_hit, "prompts_hit": hits.prompts_hit, "rate": hits.rate}


def _print(report: ReplayReport, eviction: str) -> None:
    console = plain_console(120)
    ceiling = report.ceiling
    console.print(
        f"{ceiling.prompts:,} prompts, {ceiling.tokens:,} tokens; all that {plain(report.model)} "
        f"stores of them takes {format_size(report.everything_bytes)}. A cache without bound hits "
        f"{ceiling.rate:.1%} of the tokens.",
        highlight=False,
    )
    columns = ("RAM", "tokens hit", "of the ceiling", "prompts hit", "evicted")
    table = new_table(columns, title=f"--eviction {eviction}")
    for size, hits in report.sizes:
        shares = (f"{share:.1%}" for share in (hits.rate, report.of_ceiling(hits)))
        counts = (f"{count:,}" for count in (hits.prompts_hit, hits.evicted))
        table.add_row(format_size(size), *shares, *counts)
    console.print(table)
