"""`hybridkv plan`, `replay` and `doctor`: what the cache costs, would hit, and needs."""

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridkv.cli.arguments import JSON, SOCKET, command, model, option, socket_of
from hybridkv.cli.terminal import STYLES, PlainConsole, new_table, pairs, plain, print_json
from hybridkv.client.control import (
    ControlClient,
    DaemonRefusedError,
    DaemonUnreachableError,
    runtime_directory,
)
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Finding, Verdict, fail, failure, ok, warn
from hybridkv.core.geometry import length_finding
from hybridkv.core.paths import socket_of_server
from hybridkv.core.policies import EvictionPolicy
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.state_boundaries import state_findings
from hybridkv.daemon.filesystem import check_private_directory
from hybridkv.lab import capacity, configuration, replay
from hybridkv.lab.capacity import CapacityPlan, CapacityTotals, ConfigPreview
from hybridkv.lab.configuration import ConfigReport, inspect_model, preview_of
from hybridkv.lab.models import bundled_models
from hybridkv.lab.replay import ForesightCache, ReplayHits, TraceReplay, UnlimitedCache
from hybridkv.shm import arena
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import PROTOCOL_VERSION

PlannedModel = tuple[CapacityPlan, list[Finding]]
_OF_THE_COMMAND = ("connector", "kv_role", "kv_load_failure_policy")
"""Checks of a `vllm serve` command line that a plan is not about."""
_TOLD = ("first hit", "speculative decoding")
"""Checks that a plan shows whatever they found."""
_EVICTION = EvictionPolicy.TWO_QUEUES.value
PROGRESS_SECONDS = 5.0
DAEMON_SECONDS = 2.0
_WORDS = 'a whole "vllm serve MODEL ..." command line, or its arguments'
SIZES = 6  # The number of sizes that are tried where none is named.


@command(
    SOCKET,
    option("--ram SIZE", 'memory for the cache, like "8GiB" (default: a quarter)'),
    JSON,
    *model(bundled_models(), "every engine of the running daemon"),
)
def run_plan(arguments: argparse.Namespace) -> int:
    """Print every plan; 1 = something of it cannot be cached."""
    ram_bytes = None if arguments.ram is None else parse_size(arguments.ram, "ram")
    if arguments.model is None and not arguments.vllm_arguments:
        planned = list(_running(socket_of(arguments), ram_bytes))
    else:
        planned = [_previewed(arguments, ram_bytes or arena.default_ram_bytes())]
    refused = any(one.verdict is Verdict.FAIL for _, findings in planned for one in findings)
    if arguments.json:
        shown = [{**asdict(plan), "findings": [*map(asdict, found)]} for plan, found in planned]
        print_json({"ok": not refused, "plans": shown})
    else:
        console = PlainConsole(140)
        for plan, findings in planned:
            _print_plan(console, plan, findings)
    return int(refused)


def _previewed(arguments: argparse.Namespace, ram_bytes: int) -> PlannedModel:
    """The plan of a configuration that nobody serves."""
    report = inspect_model(arguments.model, arguments.vllm_arguments, _waiting)
    about = [one for one in report.findings if one.check not in _OF_THE_COMMAND]
    findings = [one for one in about if one.verdict is not Verdict.OK or one.check in _TOLD]
    if report.preview is None:
        reasons = "; ".join(finding.sentence for finding in findings)
        raise HybridKVError(reasons or "vLLM gave no KV cache groups")
    plan = capacity.make_plan(report.preview, ram_bytes, slot_bytes)
    return plan, [*findings, *([capacity.room_finding(plan.totals)] if plan.totals else [])]


def _running(socket_path: str, ram_bytes: int | None) -> Iterator[PlannedModel]:
    """The plans of a daemon's engines, for its own memory unless another one is asked for."""
    with ControlClient(socket_path) as control:
        engines, arena_bytes = control.engines(), control.welcome.slots_bytes
    if not engines:
        works = "--model DIR_OR_NAME plans one that is not running"
        raise HybridKVError(f"no engine is connected to {socket_path}; {works}")
    for engine in engines:
        preview = preview_of(engine)
        geometry, length = preview.geometry, preview.max_model_len
        assert geometry is not None
        plan = capacity.make_plan(preview, ram_bytes or arena_bytes, slot_bytes)
        findings = [length_finding(geometry, length)] if length else []
        findings += state_findings(geometry, preview.states) if engine.model else []
        findings += [capacity.room_finding(plan.totals)] if plan.totals and length else []
        yield plan, findings


def _waiting(seconds: float) -> None:
    """Standard error says that vLLM is at work, which takes half a minute or more."""
    print(f"vLLM reads the configuration, since {seconds:.0f} s", file=sys.stderr)


def _print_plan(console: PlainConsole, plan: CapacityPlan, findings: list[Finding]) -> None:
    """One engine's plan as a table, its totals, and what to do."""
    rank = " (of one rank)" if plan.ranks > 1 else ""
    columns = ("group", "kind", "tokens/block", "layers", "window", f"block{rank}")
    title = f"hybridkv plan {plain(plan.model)}: tensor parallel size {plan.ranks}"
    table = new_table((*columns, "bytes/token", "stored/token"), ("kind",), title)
    for group in plan.groups:
        stored = f"{group.stored_token_bytes:,.0f}" if plan.totals is not None else "-"
        table.add_row(
            *(str(group.gid), group.kind, str(group.tokens_per_block)),
            *(str(group.layers or "-"), str(group.window_tokens or "-")),
            format_size(group.block_bytes) if group.block_bytes else "-",
            f"{group.token_bytes:,.0f}" if group.block_bytes else "-",
            "refused" if group.refusal else stored,
            style="bold red" if group.refusal else None,
        )
    console.print(table)
    length = f"{plan.max_model_len:,}" if plan.max_model_len else "unknown"
    rows = [("KV dtype", plain(plan.kv_dtype)), ("max_model_len", length)]
    for line in pairs([*rows, *(_total_rows(plan, plan.totals) if plan.totals else ())]):
        console.print(line, highlight=False)
    for finding in findings:
        line = f"{finding.verdict} {finding.check}: {finding.sentence}"
        console.print(line, style=STYLES.get(finding.verdict), highlight=False)


def _total_rows(plan: CapacityPlan, totals: CapacityTotals) -> Iterator[tuple[str, str]]:
    saved = 1 - totals.stored_token_bytes / totals.token_bytes
    ranks = f" over {plan.ranks} ranks" if plan.ranks > 1 else ""
    period = plan.state_period_tokens
    dense = "" if period is None else ", with a state at every boundary"
    stored = f"{totals.stored_token_bytes:,.0f} of {totals.token_bytes:,.0f} bytes{ranks}"
    yield "stored per token", f"{stored}, {saved:.0%} saved{dense}"
    yield "chunk", f"{totals.chunk_tokens:,} tokens"
    yield "hit alignment", f"{totals.alignment_tokens:,} tokens"
    yield "hash block", f"{totals.hash_tokens:,} tokens"
    yield "first storable", f"{totals.first_storable_tokens:,} tokens"
    yield "first possible hit", f"a prompt of {totals.first_hit_tokens:,} tokens"
    if period is not None:
        every = f"every {period:,} tokens" if period else "the last boundary of a prompt"
        yield "recurrent states", every
    if totals.prompt_tokens:
        memory = f"{format_size(totals.prompt_bytes)} of memory"
        yield "one full prompt", f"{memory} for {totals.prompt_tokens:,} tokens{ranks}"


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
    reads = replay.all_reads(model, prompts)
    rows: list[tuple[int, ReplayHits, ReplayHits, float]] = []
    for size in sorted(sizes or (max(1, whole >> halves) for halves in range(SIZES))):
        # A cache that is larger than everything behaves as one that is as large.
        with TraceReplay(model, min(size, 2 * everything), eviction) as cache:
            hits = _served(cache, prompts, format_size(size))
        of_ceiling = hits.tokens_hit / ceiling.tokens_hit if ceiling.tokens_hit else 1.0
        best = _served(ForesightCache(model, size, reads), prompts, "with foresight")
        rows.append((size, hits, best, of_ceiling))
    if arguments.json:
        totals = {"model": preview.model, "prompts": ceiling.prompts, "tokens": ceiling.tokens}
        totals |= {"everything_bytes": everything, "ceiling": _told(ceiling)}
        shown = [
            {"ram_bytes": size, **_told(hits), "of_ceiling": share, "evicted": hits.evicted}
            | {"foresight": _told(best)}
            for size, hits, best, share in rows
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
    columns = ("RAM", "tokens hit", "of the ceiling", "with foresight", "prompts hit", "evicted")
    table = new_table(columns, title=f"--eviction {eviction}")
    for size, hits, best, share in rows:
        counts = (f"{count:,}" for count in (hits.prompts_hit, hits.evicted))
        rates = f"{hits.rate:.1%}", f"{share:.1%}", f"{best.rate:.1%}"
        table.add_row(format_size(size), *rates, *counts)
    console.print(table)
    return 0


def _told(hits: ReplayHits) -> dict[str, Any]:
    return {"tokens_hit": hits.tokens_hit, "prompts_hit": hits.prompts_hit, "rate": hits.rate}


def _served(
    cache: TraceReplay | UnlimitedCache | ForesightCache,
    prompts: Sequence[replay.TracePrompt],
    what: str,
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
        report = inspect_model(arguments.model, arguments.vllm_arguments, _waiting)
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


@command(JSON, option("vllm_arguments -- VLLM ARGS", _WORDS, nargs="*"))
def run_doctor(arguments: argparse.Namespace) -> int:
    """Run every check and print; 1 = the engine would not start, or not use the cache."""
    serving = configuration.serve_arguments(arguments.vllm_arguments)
    if not serving:
        raise ConfigError("doctor: what to check is missing", '"-- vllm serve MODEL ..." works')
    report = configuration.inspect_arguments(serving, waiting=_waiting)
    findings = [*report.findings, *host_findings(report)]
    count = Counter(finding.verdict for finding in findings)
    failed = count[Verdict.FAIL]
    if arguments.json:
        identity = {"identity": report.identity, "identity_facts": report.facts}
        print_json({"ok": not failed, "checks": [*map(asdict, findings)], **identity})
        return int(failed > 0)
    columns = ("check", "state", "what", "remedy")
    table = new_table(columns, columns, "hybridkv doctor")
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        words = (finding.check, str(finding.verdict), finding.what, finding.remedy)
        table.add_row(*words, style=STYLES.get(finding.verdict))
    console = PlainConsole(160)
    console.print(table)
    if report.identity:
        without = "" if report.settings.weights_identity else " without the weights"
        console.print(f"identity{without} {report.identity}", highlight=False)
        for name, value in report.facts.items():
            console.print(f"  {name}: {value}", highlight=False)
    print(f"{failed} failed, {count[Verdict.WARN]} warnings, {count[Verdict.OK]} ok")
    return int(failed > 0)


def host_findings(report: ConfigReport) -> Iterator[Finding]:
    """The socket, the daemon, the memory and the room for prompts; nothing is started."""
    settings = report.settings
    socket_path = ""
    try:
        socket_path = socket_of_server(settings.server, runtime_directory(), os.geteuid())
        check_private_directory(Path(socket_path).parent, "server")
        yield ok("socket", socket_path)
    except ConfigError as error:
        yield failure("socket", error)
        if not socket_path:
            return
    arena_bytes: int | None = None
    try:
        with ControlClient(socket_path, DAEMON_SECONDS) as control:
            welcome = control.welcome
            arena_bytes, pid = welcome.slots_bytes, welcome.pid
            mapping = _mapping(Path(welcome.arena_path), welcome.arena_bytes, pid)
    except DaemonRefusedError as error:
        works = 'another "server" works, like "unix:///tmp/hybridkv/daemon.sock"'
        yield fail("daemon", str(error), works)
    except DaemonUnreachableError as error:
        if settings.server == "auto":
            yield ok("daemon", f"none runs at {socket_path}; vLLM will start one")
        else:
            yield warn("daemon", error.what, error.remedy)
    else:
        what = f"process {pid} of this user at {socket_path}, protocol {PROTOCOL_VERSION}"
        yield ok("daemon", f"{what}, {format_size(arena_bytes)} of memory")
        yield mapping
    yield _memory(settings, arena_bytes)
    if report.preview is not None:
        ram_bytes = arena_bytes or settings.ram_bytes or arena.default_ram_bytes()
        totals = capacity.make_plan(report.preview, ram_bytes, slot_bytes).totals
        if totals is not None:
            yield capacity.room_finding(totals)


def _mapping(path: Path, size_bytes: int, pid: int) -> Finding:
    """Whether a process that runs where this one does can map the daemon's arena."""
    try:
        arena.attach_arena(path, size_bytes, pid=pid).close()
    except arena.ArenaGoneError as error:
        works = f"one {arena.SHM_DIR} for engine and daemon works (docker run --ipc, or one volume)"
        return fail("arena", f"nothing can be loaded or stored: {error}", works)
    return ok("arena", f"{path} can be mapped")


def _memory(settings: Settings, arena_bytes: int | None) -> Finding:
    """Whether the machine has the memory that a daemon to be started would take."""
    machine, free = map(format_size, (arena.machine_memory_bytes(), arena.shm_free_bytes()))
    may = f"of {machine} that this process may use (machine or control group)"
    room = f"{may}, {free} free in {arena.SHM_DIR}"
    if arena_bytes is None:
        wanted = settings.ram_bytes or arena.default_ram_bytes()
        try:
            arena.check_ram(wanted, "kv_connector_extra_config.ram")
        except ConfigError as error:
            return failure("memory", error)
        return ok("memory", f"{format_size(wanted)} {room}")
    has = format_size(arena_bytes)
    if settings.ram_bytes is None or settings.ram_bytes == arena_bytes:
        return ok("memory", f"the daemon has {has} {room}")
    ram = format_size(settings.ram_bytes)
    what = f"ram={ram} is asked for, and the running daemon has {has}"
    return warn("memory", what, "ending that daemon before serving works")
