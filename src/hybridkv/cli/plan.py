"""`hybridkv plan` and `doctor`: what the cache costs, and what it needs."""

import argparse
import contextlib
import os
import pwd
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from hybridkv.cli.arguments import (
    JSON,
    SOCKET,
    command,
    control_of,
    model_arguments,
    option,
    settings_file,
    socket_of,
)
from hybridkv.cli.terminal import STYLES, PlainConsole, new_table, pairs, plain, print_json, waiting
from hybridkv.cli.tier_findings import PREFILL, describe_need, prefill_of, tier_finding
from hybridkv.client.control import (
    ControlClient,
    DaemonRefusedError,
    DaemonUnreachableError,
    runtime_directory,
)
from hybridkv.client.link import peer_pid
from hybridkv.core.daemon_settings import DAEMON_SETTINGS, DaemonSettings, resolve
from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.findings import Check, Finding, Verdict, fail, failure, ok, warn
from hybridkv.core.geometry import length_finding
from hybridkv.core.paths import socket_of_server
from hybridkv.core.settings import Settings
from hybridkv.core.sizes import format_size, parse_size
from hybridkv.core.state_boundaries import state_findings
from hybridkv.core.tier_urls import parse_tier
from hybridkv.daemon.filesystem import check_private_directory
from hybridkv.lab import capacity, configuration
from hybridkv.lab.capacity import CapacityPlan, CapacityTotals
from hybridkv.lab.configuration import ConfigReport, inspect_model, preview_of
from hybridkv.lab.models import bundled_models
from hybridkv.lab.pairs import EngineOfPair, pair_findings
from hybridkv.lab.tier_requirements import describe_cost, needed_speed
from hybridkv.observe.status import UNREAD
from hybridkv.shm import arena
from hybridkv.shm.access import group_id
from hybridkv.shm.control_groups import memory_groups
from hybridkv.shm.slots import slot_bytes
from hybridkv.wire.messages import PROTOCOL_VERSION, Welcome

_COMMAND_CHECKS = frozenset((Check.CONNECTOR, Check.KV_ROLE))
"""Checks of a `vllm serve` command line that a plan is not about."""
_SHOWN_CHECKS = frozenset((Check.FIRST_HIT, Check.SPECULATIVE_DECODING))
"""Checks that a plan shows even where nothing is wrong."""
DAEMON_SECONDS = 2.0
PAIR = 2
LINGERING = Path("/var/lib/systemd/linger")  # It has a file for each user that lingers.
SYSTEM_UIDS_END = 1000  # systemd keeps what users with lower numbers have.
_VLLM_ARGUMENTS = (
    'a whole "vllm serve MODEL ..." command line, or its arguments; after another "--", that of an '
    "engine that is to share with it (default: this environment and machine are checked)"
)


class PlannedModel(NamedTuple):
    """A model's plan, and the findings about it."""

    plan: CapacityPlan
    findings: list[Finding]

    @property
    def is_refused(self) -> bool:
        """True if something of the model cannot be cached."""
        return any(finding.verdict is Verdict.FAIL for finding in self.findings)


@command(
    SOCKET,
    option("--ram SIZE", 'memory for the cache, like "8GiB" (default: a quarter)'),
    PREFILL,
    JSON,
    *model_arguments(bundled_models(), "every engine of the running daemon"),
)
def run_plan(arguments: argparse.Namespace) -> int:
    """Print every plan. Returns 1 where something of a model cannot be cached."""
    ram_bytes = None if arguments.ram is None else parse_size(arguments.ram, "ram")
    prefill = prefill_of(arguments)
    if arguments.model is None and not arguments.vllm_arguments:
        models = list(_running(arguments, ram_bytes))
    else:
        models = [
            _previewed(arguments, ram_bytes or arena.default_ram_bytes(arena.shm_directory()))
        ]
    is_refused = any(model.is_refused for model in models)
    if arguments.json:
        plans = [
            {
                **asdict(model.plan),
                "needed_speed": None
                if prefill is None or model.plan.totals is None
                else asdict(needed_speed(model.plan.totals.tier_read, prefill)),
                "findings": [*map(asdict, model.findings)],
            }
            for model in models
        ]
        print_json({"ok": not is_refused, "plans": plans})
    else:
        console = PlainConsole(140)
        for model in models:
            _print_plan(console, model.plan, model.findings, prefill)
    return int(is_refused)


def _previewed(arguments: argparse.Namespace, ram_bytes: int) -> PlannedModel:
    """The plan of a configuration that nobody serves."""
    report = inspect_model(arguments.model, arguments.vllm_arguments, waiting)
    findings = [
        finding
        for finding in report.findings
        if finding.check not in _COMMAND_CHECKS
        and (finding.verdict is not Verdict.OK or finding.check in _SHOWN_CHECKS)
    ]
    if report.preview is None:
        reasons = "; ".join(finding.sentence for finding in findings)
        raise HybridKVError(reasons or "vLLM gave no KV cache groups")
    plan = capacity.make_plan(report.preview, ram_bytes, slot_bytes)
    findings += [capacity.room_finding(plan.totals)] if plan.totals else []
    return PlannedModel(plan, findings)


def _running(arguments: argparse.Namespace, ram_bytes: int | None) -> Iterator[PlannedModel]:
    """The plans of a daemon's engines, for its own memory unless another one is asked for."""
    with control_of(arguments) as control:
        engines, arena_bytes = control.engines(), control.welcome.slots_bytes
    if not engines:
        works = "--model DIR_OR_NAME plans one that is not running"
        raise HybridKVError(f"no engine is connected to {socket_of(arguments)}; {works}")
    for engine in engines:
        preview = preview_of(engine)
        geometry, length = preview.geometry, preview.max_model_len
        assert geometry is not None
        plan = capacity.make_plan(preview, ram_bytes or arena_bytes, slot_bytes)
        findings = [length_finding(geometry, length)] if length else []
        findings += state_findings(geometry, preview.states) if engine.model else []
        findings += [capacity.room_finding(plan.totals)] if plan.totals and length else []
        yield PlannedModel(plan, findings)


def _print_plan(
    console: PlainConsole, plan: CapacityPlan, findings: list[Finding], prefill: float | None
) -> None:
    """Print a plan: a table of its groups, its totals, and the findings."""
    part = " (of one rank)" if plan.ranks > 1 else ""
    part = " (of one shard)" if plan.shards > 1 else part
    columns = ("group", "kind", "tokens/block", "layers", "window", f"block{part}")
    stages = f", {plan.stages} pipeline stages" if plan.stages > 1 else ""
    size = plan.ranks // plan.stages
    title = f"hybridkv plan {plain(plan.model)}: tensor parallel size {size}{stages}"
    table = new_table((*columns, "bytes/token", "stored/token"), ("kind",), title)
    for group in plan.groups:
        stored = f"{group.stored_token_bytes:,.0f}" if plan.totals is not None else "-"
        table.add_row(
            str(group.gid),
            group.kind,
            str(group.tokens_per_block),
            str(group.layers or "-"),
            str(group.window_tokens or "-"),
            format_size(group.block_bytes) if group.block_bytes else "-",
            f"{group.token_bytes:,.0f}" if group.block_bytes else "-",
            "refused" if group.refusal else stored,
            style="bold red" if group.refusal else None,
        )
    console.print(table)
    length = f"{plan.max_model_len:,}" if plan.max_model_len else "unknown"
    rows = [("KV dtype", plain(plan.kv_dtype)), ("max_model_len", length)]
    for line in pairs([*rows, *(_total_rows(plan, plan.totals, prefill) if plan.totals else ())]):
        console.print(line, highlight=False)
    for finding in findings:
        line = f"{finding.verdict} {finding.check}: {finding.sentence}"
        console.print(line, style=STYLES.get(finding.verdict), highlight=False)


def _total_rows(
    plan: CapacityPlan, totals: CapacityTotals, prefill: float | None
) -> Iterator[tuple[str, str]]:
    """The rows (name, value) below the table of groups."""
    saved = 1 - totals.stored_token_bytes / totals.token_bytes
    ranks = f" over {plan.ranks} ranks" if plan.ranks > 1 else ""
    if plan.nodes > 1:
        ranks = f" on each of {plan.nodes} nodes"
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
    if totals.tier_read.tokens:
        yield "its hit in a tier", describe_cost(totals.tier_read)
        yield "a tier pays above", describe_need(totals.tier_read, prefill)


@command(
    option(
        "--tier URL",
        "a tier below RAM, as of serve, that is measured: objects are written, read and removed; "
        "may be given several times",
        action="append",
    ),
    PREFILL,
    JSON,
    option("vllm_arguments -- VLLM ARGS", _VLLM_ARGUMENTS, nargs="*"),
)
def run_doctor(arguments: argparse.Namespace) -> int:
    """Run every check and print. Returns 1 if an engine would not start, or not use the cache.

    Without a command line, the environment and this machine are checked. Of two, also whether the
    engines would find each other's KV.
    """
    lines = split_pair(arguments.vllm_arguments)
    specs = [parse_tier(url, "--tier") for url in arguments.tier or ()]
    prefill = prefill_of(arguments)
    checked = [_check_line(line) for line in lines]
    preview = checked[0].report.preview
    checked[0].findings.extend(tier_finding(spec, preview, prefill) for spec in specs)
    findings = [finding for engine in checked for finding in engine.findings]
    pair: list[Finding] = []
    if len(checked) == PAIR:
        first, second = (EngineOfPair(each.report, each.socket_path) for each in checked)
        pair = [*pair_findings(first, second)]
    counts = Counter(finding.verdict for finding in [*findings, *pair])
    failed = counts[Verdict.FAIL]
    if arguments.json:
        values = {"ok": not failed, **checked[0].to_json()}
        if pair:
            values |= {"second": checked[1].to_json(), "pair": [*map(asdict, pair)]}
        print_json(values)
        return int(failed > 0)
    titles = ["hybridkv doctor"]
    if pair:
        titles = [f"hybridkv doctor: the {which} engine" for which in ("first", "second")]
    for title, engine in zip(titles, checked, strict=True):
        _print_checks(title, engine.findings, engine.report)
    if pair:
        _print_checks("hybridkv doctor: both of them", pair)
    print(f"{failed} failed, {counts[Verdict.WARN]} warnings, {counts[Verdict.OK]} ok")
    return int(failed > 0)


class CheckedLine(NamedTuple):
    """A command line, and what is wrong with it."""

    report: ConfigReport
    findings: list[Finding]
    socket_path: str  # Of its daemon. "" = none can be.

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        identity = {"identity": self.report.identity, "identity_facts": self.report.facts}
        return {"checks": [*map(asdict, self.findings)], **identity}


def split_pair(words: Sequence[str]) -> list[list[str]]:
    """Return one or two command lines. ["a", "--", "b", "c"] -> [["a"], ["b", "c"]]

    Raises ConfigError for more, and for an empty one of two.
    """
    lines: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            lines.append([])
        else:
            lines[-1].append(word)
    if len(lines) > 1 and (len(lines) > PAIR or not all(lines)):
        what = f"{len(lines)} command lines, each after --, are not a pair of engines"
        raise ConfigError(what, '"-- vllm serve MODEL ... -- vllm serve MODEL ..." works')
    return lines


def _check_line(words: Sequence[str]) -> CheckedLine:
    serving = configuration.serve_command(words)
    before = dict(os.environ)
    # The checks of this machine read the same variables as vLLM would.
    os.environ.update(serving.variables)
    try:
        report = configuration.inspect_arguments(
            serving.arguments, waiting=waiting, with_environment=True
        )
        findings = [*report.findings, *host_findings(report)]
        socket_path = ""
        with contextlib.suppress(ConfigError):  # The finding on the socket says why.
            socket_path = socket_of_server(
                report.settings.server, runtime_directory(), os.geteuid()
            )
    finally:
        os.environ.clear()
        os.environ.update(before)
    return CheckedLine(report, findings, socket_path)


def _print_checks(
    title: str, findings: Sequence[Finding], report: ConfigReport | None = None
) -> None:
    """Print a table of findings, a remedy for each on one line, and the identity of an engine."""
    columns = ("check", "state", "what")
    table = new_table(columns, columns, title)
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        style = STYLES.get(finding.verdict)
        table.add_row(finding.check, str(finding.verdict), finding.what, style=style)
    console = PlainConsole(160)
    console.print(table)
    for finding in findings:
        if finding.remedy:
            # One line each, however long, so that it can be copied.
            console.print(f"{finding.check}: {finding.remedy}", highlight=False, soft_wrap=True)
    if report is not None and report.identity:
        without = "" if report.settings.weights_identity else " without the weights"
        console.print(f"identity{without} {report.identity}", highlight=False)
        for name, value in report.facts.items():
            console.print(f"  {name}: {value}", highlight=False)


def host_findings(report: ConfigReport) -> Iterator[Finding]:
    """Check the socket, the daemon, the memory and the room for prompts. Nothing is started."""
    settings = report.settings
    socket_path = ""
    try:
        socket_path = socket_of_server(settings.server, runtime_directory(), os.geteuid())
        group = group_id(settings.daemon.group)
        if group is None:
            check_private_directory(Path(socket_path).parent, "server")
        yield logout_finding(socket_path, os.geteuid()) or ok("socket", socket_path)
    except ConfigError as error:
        yield failure("socket", error)
        if not socket_path:
            return
        group = None
    arena_bytes: int | None = None
    try:
        with ControlClient(socket_path, DAEMON_SECONDS, group=group) as control:
            welcome = control.welcome
            arena_bytes, pid = welcome.slots_bytes, welcome.pid
            mapping = _mapping(settings, welcome, group)
            unread = control.stats().values.get("engines_unread", 0)
    except DaemonRefusedError as error:
        works = 'another "server" works' if settings.server == "auto" else '"auto" works'
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
        if unread:
            yield warn("daemon's engines", f"{unread:,.0f} {UNREAD}")
    try:
        wanted = _daemon_settings(settings)
    except ConfigError as error:
        yield failure("daemon's settings", error)
        return
    try:
        directory = arena.shm_directory(wanted.shm_dir)
    except ConfigError as error:
        yield failure("memory", error)
        return
    yield _memory(wanted, arena_bytes, peer_pid(socket_path), directory)
    if report.preview is not None:
        ram_bytes = arena_bytes or wanted.ram_bytes or arena.default_ram_bytes(directory)
        totals = capacity.make_plan(report.preview, ram_bytes, slot_bytes).totals
        if totals is not None:
            yield capacity.room_finding(totals)


def logout_finding(socket_path: str, uid: int, lingering: Path = LINGERING) -> Finding | None:
    """A warning where systemd removes the socket, and the memory, at the user's last logout.

    `lingering` is the directory with a file for each user for whom it does not.
    """
    place = f"/run/user/{uid}/"
    if uid < SYSTEM_UIDS_END or not socket_path.startswith(place):
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    if (lingering / user).exists():
        return None
    what = f"{socket_path}: systemd removes {place} and your memory at your last logout"
    return warn("socket", what, f'"loginctl enable-linger {user}" keeps them')


def _daemon_settings(settings: Settings) -> DaemonSettings:
    """The settings of a daemon that vLLM would start, with this environment and settings file."""
    if settings.server != "auto":
        return settings.daemon
    given = {
        row.key: list(value) if row.is_list else value
        for row in DAEMON_SETTINGS.values()
        if (value := getattr(settings.daemon, row.field)) != row.default
    }
    file = settings_file(argparse.Namespace(config=settings.config))
    return resolve(given, os.environ, file.keys, file.path)


def _mapping(settings: Settings, welcome: Welcome, group: int | None) -> Finding:
    """Returns the finding on whether a process like this one can map the daemon's arena."""
    try:
        path = arena.arena_seen(welcome.arena_path, settings.daemon.shm_dir)
        arena.attach_arena(path, welcome.arena_bytes, pid=welcome.pid, group=group).close()
    except HybridKVError as error:
        directory = Path(welcome.arena_path).parent
        works = f"one {directory} for engine and daemon works (docker run --ipc, or one volume)"
        return fail("arena", f"nothing can be loaded or stored: {error}", works)
    return ok("arena", f"{path} can be mapped")


def _memory(
    settings: DaemonSettings, arena_bytes: int | None, pid: int, directory: Path
) -> Finding:
    """Returns the finding on whether there is the memory that a daemon has, or would take.

    `arena_bytes` is the size of the arena of a running daemon, whose process id is `pid` where it
    can be seen.
    """
    machine, free = map(
        format_size, (arena.machine_memory_bytes(), arena.shm_free_bytes(directory))
    )
    may = f"of {machine} that this process may use (machine or control group)"
    room = f"{may}, {free} free in {directory}"
    if arena_bytes is None:
        wanted = settings.ram_bytes or arena.default_ram_bytes(directory)
        try:
            arena.check_ram(wanted, "kv_connector_extra_config.ram", directory)
        except ConfigError as error:
            return failure("memory", error)
        is_less = settings.ram_bytes is None and memory_groups()
        less = ", and less where the engine leaves less in its control group" if is_less else ""
        good = ok("memory", f"{format_size(wanted)} {room}{less}")
        return arena.limit_finding(wanted) or good
    has = format_size(arena_bytes)
    if settings.ram_bytes is None or settings.ram_bytes == arena_bytes:
        warning = arena.limit_finding(arena_bytes, arena_bytes, f"{pid}") if pid > 0 else None
        return warning or ok("memory", f"the daemon has {has} {room}")
    ram = format_size(settings.ram_bytes)
    what = f"ram={ram} is asked for, and the running daemon has {has}"
    return warn("memory", what, "ending that daemon before serving works")
