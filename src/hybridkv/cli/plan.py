"""`hybridkv plan`: what a model costs in the cache, and from which prompt on the cache can help."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from hybridkv.cli.plain import plain, plain_console
from hybridkv.cli.preview import add_model_arguments, look_at_model
from hybridkv.client.control import Control
from hybridkv.core.errors import HybridKVError
from hybridkv.core.findings import Finding, Verdict
from hybridkv.core.paths import check_socket_path, default_socket
from hybridkv.core.plan import (
    GroupPreview,
    Plan,
    Preview,
    Totals,
    length_finding,
    make_plan,
    room_finding,
    state_findings,
)
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.states import StateRule
from hybridkv.shm.arena import default_ram_bytes
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import WireEngine, geometry_from_wire

_OF_THE_COMMAND = ("connector", "kv_role", "kv_load_failure_policy")
"""Checks of a `vllm serve` command line that a plan is not about."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `plan`."""
    parser.add_argument("--socket", default=default_socket(os.environ, os.geteuid()), metavar="PATH")
    parser.add_argument("--ram", metavar="SIZE", help='memory for the cache, like "8GiB" (default: a quarter)')
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser, "every engine of the running daemon")


def run(arguments: argparse.Namespace) -> int:
    """Print every plan; 1 = something of it cannot be cached."""
    if arguments.model is None and not arguments.vllm_arguments:
        ram_bytes = None if arguments.ram is None else parse_size(arguments.ram, "ram")
        planned = list(_running(check_socket_path(arguments.socket, "socket"), ram_bytes))
    else:
        ram_bytes = default_ram_bytes() if arguments.ram is None else parse_size(arguments.ram, "ram")
        planned = [_previewed(arguments, ram_bytes)]
    refused = any(finding.verdict is Verdict.FAIL for _, findings in planned for finding in findings)
    if arguments.json:
        shown = [{**asdict(plan), "findings": [asdict(finding) for finding in found]} for plan, found in planned]
        print(json.dumps({"ok": not refused, "plans": shown}, indent=2))
    else:
        console = plain_console(140)
        for plan, findings in planned:
            print_plan(console, plan, findings)
    return int(refused)


def _previewed(arguments: argparse.Namespace, ram_bytes: int) -> tuple[Plan, list[Finding]]:
    """The plan of a configuration that nobody serves."""
    answer = look_at_model(arguments.model, arguments.vllm_arguments)
    findings = [
        finding
        for finding in answer.findings
        if finding.check not in _OF_THE_COMMAND and (finding.verdict is not Verdict.OK or finding.check == "first hit")
    ]
    if answer.preview is None:
        raise HybridKVError("; ".join(finding.sentence for finding in findings) or "vLLM gave no KV cache groups")
    plan = make_plan(answer.preview, ram_bytes, slot_bytes)
    return plan, [*findings, *([room_finding(plan.totals)] if plan.totals else [])]


def _running(socket_path: str, ram_bytes: int | None) -> Iterator[tuple[Plan, list[Finding]]]:
    """The plans of a daemon's engines, for its own memory unless another one is asked for."""
    with Control(socket_path) as control:
        engines, arena_bytes = control.engines(), control.welcome.slots_bytes
    if not engines:
        raise HybridKVError(
            f"no engine is connected to {socket_path}; --model DIR_OR_NAME plans one that is not running"
        )
    for engine in engines:
        preview = preview_of(engine)
        assert preview.geometry is not None
        plan = make_plan(preview, ram_bytes or arena_bytes, slot_bytes)
        findings = [length_finding(preview.geometry, preview.max_model_len)] if preview.max_model_len else []
        findings += state_findings(preview.geometry, preview.states) if engine.model else []
        yield plan, [*findings, *([room_finding(plan.totals)] if plan.totals and preview.max_model_len else [])]


def preview_of(engine: WireEngine) -> Preview:
    """What the daemon knows of an engine."""
    geometry, model = geometry_from_wire(engine.geometry), engine.model
    layers = model.layers if model else []
    return Preview(
        model.name if model else engine.engine_id,
        model.max_model_len if model else 0,
        model.kv_dtype if model else "unknown",
        geometry.ranks,
        tuple(
            GroupPreview(
                group.gid,
                str(group.kind),
                group.tokens_per_block,
                layers[index] if index < len(layers) else 0,
                group.block_bytes,
                group.window_tokens,
            )
            for index, group in enumerate(geometry.groups)
        ),
        geometry,
        StateRule(model.retention_tokens, model.step_tokens) if model else StateRule(),
    )


def print_plan(console: Console, plan: Plan, findings: list[Finding]) -> None:
    """One engine's plan as a table, its totals, and what to do."""
    rank = " (of one rank)" if plan.ranks > 1 else ""
    table = Table(title=f"hybridkv plan {plain(plan.model)}: tensor parallel size {plan.ranks}", title_justify="left")
    for column in ("group", "kind", "tokens/block", "layers", "window", f"block{rank}", "bytes/token", "stored/token"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for group in plan.groups:
        table.add_row(
            str(group.gid),
            group.kind,
            str(group.tokens_per_block),
            str(group.layers or "-"),
            str(group.window_tokens or "-"),
            format_size(group.block_bytes) if group.block_bytes else "-",
            f"{group.token_bytes:,.0f}" if group.block_bytes else "-",
            "refused" if group.refusal else f"{group.stored_token_bytes:,.0f}" if plan.totals else "-",
            style="bold red" if group.refusal else None,
        )
    console.print(table)
    rows = [
        ("KV dtype", plain(plan.kv_dtype)),
        ("max_model_len", f"{plan.max_model_len:,}" if plan.max_model_len else "unknown"),
    ]
    if plan.totals:
        rows += _total_rows(plan, plan.totals)
    width = max(len(name) for name, _ in rows)
    for name, shown in rows:
        console.print(f"{name:<{width}}  {shown}", highlight=False)
    for finding in findings:
        style = {Verdict.OK: None, Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}[finding.verdict]
        console.print(f"{finding.verdict} {finding.check}: {finding.sentence}", style=style, highlight=False)


def _total_rows(plan: Plan, totals: Totals) -> list[tuple[str, str]]:
    saved = 1 - totals.stored_token_bytes / totals.token_bytes
    ranks = f" over {plan.ranks} ranks" if plan.ranks > 1 else ""
    dense = "" if plan.state_period_tokens is None else ", with a state at every boundary"
    rows = [
        (
            "stored per token",
            f"{totals.stored_token_bytes:,.0f} of {totals.token_bytes:,.0f} bytes{ranks}, {saved:.0%} saved{dense}",
        ),
        ("chunk", f"{totals.chunk_tokens:,} tokens"),
        ("hit alignment", f"{totals.alignment_tokens:,} tokens"),
        ("hash block", f"{totals.hash_tokens:,} tokens"),
        ("first storable", f"{totals.first_storable_tokens:,} tokens"),
        ("first possible hit", f"a prompt of {totals.first_hit_tokens:,} tokens"),
    ]
    if plan.state_period_tokens is not None:
        period = plan.state_period_tokens
        rows.append(("recurrent states", f"every {period:,} tokens" if period else "the last boundary of a prompt"))
    if totals.prompt_tokens:
        rows.append(
            (
                "one full prompt",
                f"{format_size(totals.prompt_bytes)} of memory for {totals.prompt_tokens:,} tokens{ranks}",
            )
        )
    return rows
