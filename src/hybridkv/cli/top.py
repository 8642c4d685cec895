"""`hybridkv top`: the daemon's status page in a terminal, live. It asks over the control socket."""

import argparse
import contextlib
import os
import re
import select
import signal
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hybridkv.cli.arguments import SOCKET, command, control_of, option, socket_of, switch
from hybridkv.cli.terminal import PlainConsole, plain, print_json
from hybridkv.client.control import ControlClient, DaemonRefusedError, DaemonUnreachableError
from hybridkv.core.errors import ConfigError
from hybridkv.core.sizes import format_size
from hybridkv.wire.status import Outcome, Status

INTERVAL_SECONDS = 1.0
INTERVAL_SECONDS_MIN = 0.25
LOOK_SECONDS = 0.1  # A key or another size of the terminal is seen so soon.
ANSWER_SECONDS = 5.0
QUIT_KEYS = frozenset("qQ\x03\x1b")
WRAP_KEYS = frozenset("wW")
_SEQUENCE = re.compile(r"\x1b+(\[[0-?]*[ -/]*[@-~]?|O.|[^\x1b\[O])")
"""The sequences that a terminal sends for arrows, function keys, and keys with Alt."""
WIDTH_MIN = 40
BLOCKS = " ▁▂▃▄▅▆▇█"
LABEL_COLUMNS = 10
METER_COLUMNS = 24
COLOURS = {"bad": "bold red", "warn": "yellow", "note": "dim"}
OUTCOME_COLOURS = {Outcome.LOADED: "green", Outcome.FAILED: "red"}


@command(
    SOCKET,
    switch("--json", "print one JSON object, and end"),
    switch("--once", "print one frame, and end (as without a terminal)"),
    option("--interval SECONDS", "(default: %(default)s)", type=float, default=INTERVAL_SECONDS),
)
def run_top(arguments: argparse.Namespace) -> int:
    """Show the status until q or Ctrl-C, or print it once. The key w wraps lines, or cuts them."""
    if not arguments.interval >= INTERVAL_SECONDS_MIN:
        what = f"interval={arguments.interval} is shorter than {INTERVAL_SECONDS_MIN} s"
        raise ConfigError(what, "1 works")
    socket_path, console = socket_of(arguments), PlainConsole()
    if arguments.json or arguments.once or not (console.is_terminal and sys.stdin.isatty()):
        with control_of(arguments) as control:
            status = _ask(control)
        if arguments.json:
            print_json(msgspec.to_builtins(status))
        else:
            # A frame without a height has everything.
            text = frame(status, socket_path, console.width, 0, is_wrapped=True)
            console.print(text, soft_wrap=True, highlight=False)
        return 0
    with contextlib.suppress(KeyboardInterrupt), _keys():
        # Ctrl-C is how a user leaves the display.
        _watch(console, arguments)
    return 0


def _ask(control: ControlClient) -> Status:
    status = control.stats(status=True).status
    assert status is not None, "it was asked for"
    return status


def _watch(console: Console, arguments: argparse.Namespace) -> None:
    socket_path, interval = socket_of(arguments), arguments.interval
    with contextlib.ExitStack() as stack:
        # An error of the first answer is printed in the ordinary way.
        client = control_of(arguments, ANSWER_SECONDS)
        control: ControlClient | None = stack.enter_context(client)
        status, why, is_wrapped = _ask(client), "", False
        with Live(
            console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
        ) as live:
            while True:
                size = console.size
                height = size.height - bool(why)
                text = frame(status, socket_path, size.width, height, is_wrapped=is_wrapped)
                if why:
                    head = f"no answer, shown is the last one: {why}"[: size.width]
                    text = Text.assemble((head, "bold red"), "\n", text)
                live.update(text, refresh=True)
                until, keys = time.monotonic() + interval, set[str]()
                while time.monotonic() < until and console.size == size and not keys & WRAP_KEYS:
                    ready, _, _ = select.select([sys.stdin], [], [], LOOK_SECONDS)
                    keys = keys_in(os.read(sys.stdin.fileno(), 64)) if ready else set()
                    if keys & QUIT_KEYS:
                        return
                is_wrapped ^= bool(keys & WRAP_KEYS)
                if console.size != size or keys & WRAP_KEYS:
                    continue
                try:
                    if control is None:
                        control = stack.enter_context(control_of(arguments, interval))
                    status, why = _ask(control), ""
                except DaemonRefusedError:
                    raise
                except DaemonUnreachableError as error:
                    stack.close()
                    control, why = None, str(error)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys without Enter and without an echo. At the end the terminal is as it was."""
    attributes = termios.tcgetattr(sys.stdin)
    handlers = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, attributes)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def keys_in(sent: bytes) -> set[str]:
    """Returns the keys in what a terminal sent: b"a\\x1b[A" -> {"a"}, without the arrow key.

    Escape is a key unless it begins another key's sequence. A terminal that has ended sends b"",
    which is the key "q".
    """
    return set(_SEQUENCE.sub("", sent.decode(errors="replace"))) if sent else {"q"}


def frame(status: Status, place: str, width: int, height: int, *, is_wrapped: bool = False) -> Text:
    """Returns the page of the daemon at `place`, in lines of `width` columns.

    It has at most `height` lines, and with 0 as many as it needs. With `is_wrapped` a longer line
    goes on in the next, and else it is cut.
    """
    width = max(width, WIDTH_MIN)
    problems = [problem for problem in status.health if problem.level != "note"]
    state = ("all is well", "green")
    if problems:
        state = f"{len(problems)} problem{'s' * (len(problems) > 1)}", COLOURS[problems[0].level]
    up = f"  up {_time(status.uptime_seconds)}  "
    head = [Text.assemble(("hybridkv", "bold"), "  ", state, up, (plain(place), "dim"))]
    for problem in status.health[: 3 if height else 100]:
        # Its end has the cure, so it is wrapped and not cut.
        wrapped = textwrap.wrap(f"• {plain(problem.text)}", width, subsequent_indent="  ")
        head += [Text(line, COLOURS[problem.level]) for line in wrapped]
    head += [Text(), *_levels(status, width), Text()]
    parts = [part(status, width) for part in (_past, _groups, _engines, _decisions)]
    lines = [*head, *_fitted(parts, height - len(head) if height else None)]
    if is_wrapped:
        console = Console(width=width)
        lines = [part for line in lines for part in (line.wrap(console, width) or [line])]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines[:height] if height else lines)


def _fitted(parts: Sequence[list[Text]], room: int | None) -> Iterable[Text]:
    """The lines of the parts in order, at most `room` of them. None = no limit.

    Without room for all, each part gets a share, and the last one the rest.
    """
    for at, part in enumerate(parts):
        if room is None:
            yield from [*part, Text()]
        elif part and room >= 2:
            later = sum(min(4, len(following) + 1) for following in parts[at + 1 :] if following)
            lines = part[: max(2, room - later)]
            yield from lines
            room -= len(lines)
            if room > 2 and at < len(parts) - 1:
                yield Text()
                room -= 1


def _levels(status: Status, width: int) -> Iterable[Text]:
    """Lines on what the cache does now: its hit rate, memory, tiers and rates."""
    # A narrow terminal has room left for the figures.
    meter = min(METER_COLUMNS, (width - 20) * 2 // 5)
    values, rates = status.values, status.minute.per_second
    hit, ceiling = status.recent.hit, status.recent.ceiling
    yield _label("helping").append(status.help)
    line = _label("hit rate")
    if hit is None or ceiling is None:
        yield line.append("nothing was looked up in the last hour", "dim")
    else:
        line.append(_meter(hit, meter, ceiling)).append(f" {hit:.1%}")
        is_below = ceiling - hit >= 0.0005
        limit = f"{ceiling:.1%} that a cache of unlimited size had" if is_below else ""
        yield line.append(f" of {limit or 'as much as there was'}", "dim")
    line = _held("ram", values["bytes_committed"], values["bytes_arena"], meter)
    reserved = format_size(values["bytes_writing"])
    yield line.append(f"  {values['objects']:,.0f} objects, {reserved} reserved", "dim")
    for tier in status.tiers:
        state = Text("well", "green")
        if not tier.is_open or tier.is_hung:
            state = Text("hangs" if tier.is_open else "not open", COLOURS["bad"])
        elif tier.refusals or tier.is_shut:
            state = Text("refuses" if tier.refusals else "breaker open", COLOURS["bad"])
        speed = tier.values.get("bytes_per_second", 0.0)
        note = f", reads {format_size(speed)}/s" if speed else ""
        line = _held(tier.name, tier.values.get("bytes"), tier.values.get("bytes_max"), meter)
        yield line.append("  ").append(state).append(note, "dim")
    waiting = values.get("lookups_waiting", 0.0)
    yield _label("last min").append(
        f"{rates['lookups']:.3g} lookups/s, loaded {format_size(rates['bytes_loaded'])}/s, "
        f"stored {format_size(rates['bytes_stored'])}/s, evicted {rates['evicted']:.3g}/s"
        f"{f', {waiting:,.0f} wait for tiers' if waiting else ''}"
    )


class _Chart(NamedTuple):
    """A row of bars, one for each value."""

    label: str
    values: Sequence[float | None]
    text_of: Callable[[float], str]  # Makes the text of the last value.
    top: float | None = None  # The value of a full bar; None = the largest value.
    colour: str = "blue"


def _past(status: Status, width: int) -> list[Text]:
    """Lines with a chart each of the last minutes, as wide as there is room."""
    past, room = status.hour, width - LABEL_COLUMNS - 14
    shown = min(room, len(past.ages))
    if shown < 2:
        return []

    def speed(value: float) -> str:
        return f"{format_size(value)}/s"

    lines = [Text(f"the last {_time(shown * past.step_seconds)}", "dim")]
    for chart in (
        _Chart("hit rate", past.hit, "{:.0%}".format, top=1.0),
        _Chart("ceiling", past.ceiling, "{:.0%}".format, top=1.0, colour="yellow"),
        _Chart("loaded", past.loaded, speed),
        _Chart("stored", past.stored, speed),
        _Chart("lookups", past.lookups, "{:.3g}/s".format),
    ):
        tail = chart.values[-room:]
        known = [value for value in tail if value is not None]
        top = chart.top or max(known, default=0.0)
        line = _label(chart.label)
        line.append("".join(_block(value, top) for value in tail), chart.colour)
        lines.append(line.append(f" {chart.text_of(known[-1]) if known else '-'}"))
    return lines


def _groups(status: Status, width: int) -> list[Text]:
    """Lines with the objects in RAM of each group."""
    groups = [group for group in status.groups if group.objects]
    if not groups:
        return []
    largest_bytes = max(group.held_bytes for group in groups)
    lines = [Text("in ram, by group", "dim")]
    meter = METER_COLUMNS if width >= 100 else min(METER_COLUMNS, (width - 20) * 2 // 5) // 2
    room = width - meter - 46
    for group in groups:
        owner = os.path.basename(group.model.rstrip("/")) or group.identity or "all others"
        kind = f"{group.gid} {group.kind.replace('_', ' ')}" if group.identity else ""
        line = Text(f"{_cut(owner, room):<{max(room, 0)}} {kind:<16} ")
        held = f" {format_size(group.held_bytes):>9}  {group.objects:>7,} objects"
        lines.append(line.append(_meter(group.held_bytes / largest_bytes, meter)).append(held))
    return lines


def _engines(status: Status, width: int) -> list[Text]:
    """Lines with the engines and their loads."""
    lines = [Text(f"engines: {len(status.sessions)}", "dim")] if status.sessions else []
    name_columns = min(24, width // 6)
    room = max(width - name_columns - 49, 0)
    for session in status.sessions:
        state = "" if session.is_connected else "  gone, its workers may still copy"
        model = _cut(os.path.basename(session.model.rstrip("/")) or session.identity, room - 1)
        name = f"{_cut(session.engine_id, name_columns):<{name_columns + 1}}{model:<{room}}"
        load = f"{session.leases:>4} loads now {format_size(session.writing_bytes):>9} reserved"
        line = Text(f"{name}{load}  since {_time(session.since)}")
        lines.append(line.append(state, "yellow"))
    return lines


def _decisions(status: Status, _: int) -> list[Text]:
    """Lines with the last requests and what became of them."""
    lines = [Text("recent decisions", "dim")] if status.decisions else []
    for decision in status.decisions:
        name = f"{_cut(decision.request_id, 24):<25}{_cut(decision.prompt, 13):<14}"
        colour = OUTCOME_COLOURS.get(decision.outcome, "dim")
        text = f"{decision.outcome}: {plain(decision.text)}"
        line = Text(f"{_time(decision.age):>7}  {name}")
        lines.append(line.append(text, colour))
    return lines


def _held(name: str, used: float | None, bound: float | None, meter: int) -> Text:
    """A line with the `used` bytes of a tier, a bar of `meter` columns, and the tier's bound."""
    line = _label(name)
    if used is None:
        return line.append("not known", "dim")
    line.append(_meter(used / bound if bound else 0.0, meter)).append(f" {format_size(used)}")
    return line.append(f" of {format_size(bound)}" if bound else "", "dim")


def _label(name: str) -> Text:
    return Text(f"{_cut(name, LABEL_COLUMNS - 1):<{LABEL_COLUMNS}}")


def _meter(share: float, columns: int, ceiling: float | None = None) -> Text:
    """A bar that is full up to `share`, and shaded from there to `ceiling`."""
    share = min(1.0, max(0.0, share))
    full = round(share * columns)
    shaded = max(full, round(min(1.0, ceiling or 0.0) * columns)) - full
    empty = columns - full - shaded
    return Text.assemble(("█" * full, "blue"), ("▒" * shaded, "yellow"), ("·" * empty, "dim"))


def _block(value: float | None, top: float) -> str:
    """One bar of a chart: (4.0, 8.0) -> "▄"."""
    if value is None:
        return " "
    return BLOCKS[max(1, min(8, round(8 * value / top))) if top else 1]


def _cut(text: str, width: int) -> str:
    """The text in at most `width` columns: ("abcdef", 4) -> "abc…"."""
    shown = plain(text)
    return shown if len(shown) <= width else f"{shown[: max(width - 1, 0)]}…"


def _time(seconds: float) -> str:
    """A duration in one unit: 7200.0 -> "2 h"."""
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.95 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
