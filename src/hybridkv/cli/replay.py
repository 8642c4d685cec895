"""`hybridkv replay`: what a cache of some size would have hit on a trace of prompts."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from rich.table import Table

from hybridkv.cli.plain import plain, plain_console
from hybridkv.cli.plan import preview_of
from hybridkv.cli.preview import add_model_arguments, look_at_model
from hybridkv.client.control import Control
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.eviction import Policy
from hybridkv.core.findings import Verdict
from hybridkv.core.paths import check_socket_path, default_socket
from hybridkv.core.plan import Preview
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.storage.replay import Hits, Model, Prompt, Replay, Unlimited, served

BLOCK_TOKENS = 512
"""Of the public Mooncake traces."""
SIZES = 6
"""How many sizes are tried where none is named: the smallest power of two that holds everything, and halves of it."""
PROGRESS_SECONDS = 5.0


class _Line(msgspec.Struct):
    """A line of a trace, as far as it is read."""

    input_length: int
    hash_ids: list[Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `replay`."""
    parser.add_argument(
        "trace",
        type=Path,
        help="a JSON object a line: input_length (tokens) and hash_ids, a number for each block of the prompt that "
        "covers all blocks before it, as in the public Mooncake traces",
    )
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens that one of the hash_ids stands for (default: %(default)s)",
    )
    parser.add_argument("--socket", default=default_socket(os.environ, os.geteuid()), metavar="PATH")
    parser.add_argument(
        "--ram",
        action="append",
        metavar="SIZE",
        help='memory of the cache, like "8GiB"; may be named several times (default: some that are worth a look)',
    )
    parser.add_argument("--eviction", choices=[*Policy], default=Policy.TWO_QUEUES.value, help="as of `serve`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser, "the engine of the running daemon")


def run(arguments: argparse.Namespace) -> int:
    """Print what each size hits, next to what no cache could exceed."""
    sizes = [parse_size(size, "ram") for size in arguments.ram or ()]
    prompts = read_trace(arguments.trace, arguments.block_tokens)
    preview = _preview(arguments)
    assert preview.geometry is not None
    model = Model(preview.geometry, preview.states, arguments.block_tokens)
    unlimited = Unlimited(model)
    ceiling = _told(served(unlimited, prompts), "without bound", len(prompts))
    everything = unlimited.stored_bytes
    if not everything:
        raise ConfigError(f"no prompt of the trace has a whole chunk of {preview.geometry.chunk_tokens} tokens")
    rows: list[tuple[int, Hits]] = []
    for size in sorted(sizes or _worth_a_look(everything)):
        # What is larger than everything is not larger in any way that counts.
        with Replay(model, min(size, 2 * everything), Policy(arguments.eviction)) as cache:
            rows.append((size, _told(served(cache, prompts), format_size(size), len(prompts))))
    if arguments.json:
        print(json.dumps({"eviction": arguments.eviction, **_as_json(preview, rows, ceiling, everything)}, indent=2))
    else:
        _print(preview, rows, ceiling, everything, arguments.eviction)
    return 0


def read_trace(path: Path, block_tokens: int) -> list[Prompt]:
    """The prompts of a trace, in its order; raises ConfigError with the line that is none."""
    if block_tokens < 1:
        raise ConfigError(f"--block-tokens {block_tokens} is no number of tokens; {BLOCK_TOKENS} works")
    prompts: list[Prompt] = []
    decoder = msgspec.json.Decoder(_Line)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{plain(str(path))}: {error.strerror}; a file of JSON lines works") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{plain(str(path))}, line {number}: {error}") from error
        blocks = -(-said.input_length // block_tokens)
        if said.input_length < 0 or blocks > len(said.hash_ids):
            raise ConfigError(
                f"{plain(str(path))}, line {number}: {len(said.hash_ids)} hash_ids for input_length "
                f"{said.input_length}; one for every started block of --block-tokens {block_tokens} works"
            )
        prompts.append(Prompt(said.input_length, said.hash_ids[:blocks]))
    if not prompts:
        raise ConfigError(f"{plain(str(path))} has no prompt; a line for each works")
    return prompts


def _preview(arguments: argparse.Namespace) -> Preview:
    """Of the model that is named, or of the one engine that the daemon knows."""
    if arguments.model is not None or arguments.vllm_arguments:
        answer = look_at_model(arguments.model, arguments.vllm_arguments)
        if answer.preview is None or answer.preview.geometry is None:
            failed = [finding.sentence for finding in answer.findings if finding.verdict is Verdict.FAIL]
            raise HybridKVError("; ".join(failed) or "vLLM gave no KV cache groups")
        return answer.preview
    socket_path = check_socket_path(arguments.socket, "socket")
    with Control(socket_path) as control:
        engines = control.engines()
    if len(engines) != 1:
        raise HybridKVError(f"{len(engines)} engines are connected to {socket_path}; --model DIR_OR_NAME says which")
    return preview_of(engines[0])


def _worth_a_look(everything: int) -> list[int]:
    whole = 1 << math.ceil(math.log2(everything))
    return [max(1, whole >> halves) for halves in range(SIZES)]


def _told(progress: Iterable[Hits], what: str, prompts: int) -> Hits:
    """The last of the results; how far it is goes to standard error."""
    total = Hits()
    told = time.monotonic()
    for total in progress:
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            print(f"{what}: {total.prompts:,} of {prompts:,} prompts", file=sys.stderr)
    return total


def _as_json(preview: Preview, rows: Sequence[tuple[int, Hits]], ceiling: Hits, everything: int) -> dict[str, object]:
    return {
        "model": preview.model,
        "prompts": ceiling.prompts,
        "tokens": ceiling.tokens,
        "everything_bytes": everything,
        "ceiling": {"tokens_hit": ceiling.tokens_hit, "prompts_hit": ceiling.prompts_hit, "rate": ceiling.rate},
        "sizes": [
            {
                "ram_bytes": size,
                "tokens_hit": hits.tokens_hit,
                "prompts_hit": hits.prompts_hit,
                "rate": hits.rate,
                "of_ceiling": hits.tokens_hit / ceiling.tokens_hit if ceiling.tokens_hit else 1.0,
                "evicted": hits.evicted,
            }
            for size, hits in rows
        ],
    }


def _print(preview: Preview, rows: Sequence[tuple[int, Hits]], ceiling: Hits, everything: int, eviction: str) -> None:
    console = plain_console(120)
    console.print(
        f"{ceiling.prompts:,} prompts, {ceiling.tokens:,} tokens; all that {plain(preview.model)} stores of them takes "
        f"{format_size(everything)}. A cache without bound hits {ceiling.rate:.1%} of the tokens.",
        highlight=False,
    )
    table = Table(title=f"--eviction {eviction}", title_justify="left")
    for column in ("RAM", "tokens hit", "of the ceiling", "prompts hit", "evicted"):
        table.add_column(column, justify="right")
    for size, hits in rows:
        share = hits.tokens_hit / ceiling.tokens_hit if ceiling.tokens_hit else 1.0
        table.add_row(
            format_size(size), f"{hits.rate:.1%}", f"{share:.1%}", f"{hits.prompts_hit:,}", f"{hits.evicted:,}"
        )
    console.print(table)
