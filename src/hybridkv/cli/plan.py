"""`hybridkv plan`: what a model costs in the cache, and from which prompt on the cache can help."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console

from hybridkv.cli.arguments import add_json, add_model, add_socket, socket_of
from hybridkv.cli.terminal import STYLES, new_table, pairs, plain, plain_console, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import HybridKVError
from hybridkv.core.findings import Finding, Verdict
from hybridkv.core.geometry import length_finding
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.state_boundaries import state_findings
from hybridkv.lab.capacity import CapacityPlan, CapacityTotals, GroupPlan, make_plan, room_finding
from hybridkv.lab.configuration import inspect_model, preview_of
from hybridkv.lab.models import bundled_models
from hybridkv.shm.arena import default_ram_bytes
from hybridkv.shm.slots import slot_bytes

PlannedModel = tuple[CapacityPlan, list[Finding]]
_OF_THE_COMMAND = ("connector", "kv_role", "kv_load_failure_policy")
"""Checks of a `vllm serve` command line that a plan is not about."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `plan`."""
    add_socket(parser)
    parser.add_argument(
        "--ram", metavar="SIZE", help='memory for the cache, like "8GiB" (default: a quarter)'
    )
    add_json(parser)
    add_model(parser, bundled_models(), "every engine of the running daemon")


def run(arguments: argparse.Namespace) -> int:
    """Print every plan; 1 = something of it cannot be cached."""
    ram_bytes = None if arguments.ram is None else parse_size(arguments.ram, "ram")
    if arguments.model is None and not arguments.vllm_arguments:
        planned = list(_running(socket_of(arguments), ram_bytes))
    else:
        planned = [_previewed(arguments, ram_bytes or default_ram_bytes())]
    refused = any(one.verdict is Verdict.FAIL for _, findings in planned for one in findings)
    if arguments.json:
        shown = [
            {**asdict(plan), "findings": [asdict(finding) for finding in found]}
            for plan, found in planned
        ]
        print_json({"ok": not refused, "plans": shown})
    else:
        console = plain_console(140)
        for plan, findings in planned:
            _print_plan(console, plan, findings)
    return int(refused)


def _previewed(arguments: argparse.Namespace, ram_bytes: int) -> PlannedModel:
    """The plan of a configuration that nobody serves."""
    report = inspect_model(arguments.model, arguments.vllm_arguments)
    findings = [
        one
        for one in report.findings
        if one.check not in _OF_THE_COMMAND
        and (one.verdict is not Verdict.OK or one.check == "first hit")
    ]
    if report.preview is None:
        reasons = "; ".join(finding.sentence for finding in findings)
        raise HybridKVError(reasons or "vLLM gave no KV cache groups")
    plan = make_plan(report.preview, ram_bytes, slot_bytes)
    return plan, [*findings, *([room_finding(plan.totals)] if plan.totals else [])]


def _running(socket_path: str, ram_bytes: int | None) -> Iterator[PlannedModel]:
    """The plans of a daemon's engines, for its own memory unless another one is asked for."""
    with ControlClient(socket_path) as control:
        engines, arena_bytes = control.engines(), control.welcome.slots_bytes
    if not engines:
        raise HybridKVError(
            f"no engine is connected to {socket_path}; "
            "--model DIR_OR_NAME plans one that is not running"
        )
    for engine in engines:
        preview = preview_of(engine)
        geometry, length = preview.geometry, preview.max_model_len
        assert geometry is not None
        plan = make_plan(preview, ram_bytes or arena_bytes, slot_bytes)
        findings = [length_finding(geometry, length)] if length else []
        findings += state_findings(geometry, preview.states) if engine.model else []
        findings += [room_finding(plan.totals)] if plan.totals and length else []
        yield plan, findings


def _print_plan(console: Console, plan: CapacityPlan, findings: list[Finding]) -> None:
    """One engine's plan as a table, its totals, and what to do."""
    rank = " (of one rank)" if plan.ranks > 1 else ""
    columns = ("group", "kind", "tokens/block", "layers", "window", f"block{rank}")
    title = f"hybridkv plan {plain(plan.model)}: tensor parallel size {plan.ranks}"
    table = new_table((*columns, "bytes/token", "stored/token"), ("kind",), title)
    for group in plan.groups:
        style = "bold red" if group.refusal else None
        table.add_row(*_cells(group, plan.totals is not None), style=style)
    console.print(table)
    rows = [
        ("KV dtype", plain(plan.kv_dtype)),
        ("max_model_len", f"{plan.max_model_len:,}" if plan.max_model_len else "unknown"),
    ]
    if plan.totals:
        rows += _total_rows(plan, plan.totals)
    for line in pairs(rows):
        console.print(line, highlight=False)
    for finding in findings:
        line = f"{finding.verdict} {finding.check}: {finding.sentence}"
        console.print(line, style=STYLES[finding.verdict], highlight=False)


def _cells(group: GroupPlan, is_planned: bool) -> Iterator[str]:
    yield from (str(group.gid), group.kind, str(group.tokens_per_block))
    yield from (str(group.layers or "-"), str(group.window_tokens or "-"))
    yield format_size(group.block_bytes) if group.block_bytes else "-"
    yield f"{group.token_bytes:,.0f}" if group.block_bytes else "-"
    stored = f"{group.stored_token_bytes:,.0f}" if is_planned else "-"
    yield "refused" if group.refusal else stored


def _total_rows(plan: CapacityPlan, totals: CapacityTotals) -> Iterator[tuple[str, str]]:
    saved = 1 - totals.stored_token_bytes / totals.token_bytes
    ranks = f" over {plan.ranks} ranks" if plan.ranks > 1 else ""
    period = plan.state_period_tokens
    dense = "" if period is None else ", with a state at every boundary"
    yield (
        "stored per token",
        f"{totals.stored_token_bytes:,.0f} of {totals.token_bytes:,.0f} bytes{ranks}, "
        f"{saved:.0%} saved{dense}",
    )
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
