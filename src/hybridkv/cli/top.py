"""`hybridkv top`: the daemon's status page in a terminal, live. It asks over the control socket."""

import argparse
import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hybridkv.cli.arguments import SOCKET, command, option, socket_of, switch
from hybridkv.cli.terminal import PlainConsole, print_json
from hybridkv.cli.top_frame import frame
from hybridkv.client.control import ControlClient, DaemonRefusedError, DaemonUnreachableError
from hybridkv.core.errors import ConfigError
from hybridkv.wire.status import Status

INTERVAL_SECONDS = 1.0
INTERVAL_SECONDS_MIN = 0.25
LOOK_SECONDS = 0.1
"""A key or another size of the terminal is seen so soon."""
ANSWER_SECONDS = 5.0
QUIT = frozenset("qQ\x03\x1b")
_SEQUENCE = re.compile(r"\x1b+(\[[0-?]*[ -/]*[@-~]?|O.|[^\x1b\[O])")
"""What a terminal sends for arrows, function keys, and keys with Alt."""


@command(
    SOCKET,
    switch("--json", "print one JSON object, and end"),
    switch("--once", "print one frame, and end (as without a terminal)"),
    option("--interval SECONDS", "(default: %(default)s)", type=float, default=INTERVAL_SECONDS),
)
def run_top(arguments: argparse.Namespace) -> int:
    """Show until q or Ctrl-C."""
    if not arguments.interval >= INTERVAL_SECONDS_MIN:
        what = f"interval={arguments.interval} is shorter than {INTERVAL_SECONDS_MIN} s"
        raise ConfigError(what, "1 works")
    socket_path = socket_of(arguments)
    console = PlainConsole()
    if arguments.json or arguments.once or not (console.is_terminal and sys.stdin.isatty()):
        with ControlClient(socket_path) as control:
            status = _ask(control)
        if arguments.json:
            print_json(msgspec.to_builtins(status))
        else:
            # A frame without a height has everything.
            text = frame(status, socket_path, console.width, 0)
            console.print(text, soft_wrap=True, highlight=False)
        return 0
    with contextlib.suppress(KeyboardInterrupt), _keys():
        _watch(console, socket_path, arguments.interval)
    return 0


def _ask(control: ControlClient) -> Status:
    """What the daemon has to show. Raises DaemonUnreachableError."""
    status = control.stats(status=True).status
    assert status is not None, "it was asked for"
    return status


def _watch(console: Console, socket_path: str, interval: float) -> None:
    with contextlib.ExitStack() as stack:
        # An error of the first answer is printed in the ordinary way.
        client = ControlClient(socket_path, ANSWER_SECONDS)
        control: ControlClient | None = stack.enter_context(client)
        status, why = _ask(client), ""
        live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
        with live:
            while True:
                size = console.size
                text = Text()
                if why:
                    text.append(
                        f"no answer, shown is the last one: {why}"[: size.width], "bold red"
                    )
                    text.append("\n")
                text.append(frame(status, socket_path, size.width, size.height - bool(why)))
                live.update(text, refresh=True)
                until = time.monotonic() + interval
                while time.monotonic() < until and console.size == size:
                    ready, _, _ = select.select([sys.stdin], [], [], LOOK_SECONDS)
                    if ready and heard(os.read(sys.stdin.fileno(), 64)) & QUIT:
                        return
                if console.size != size:
                    continue
                try:
                    if control is None:
                        control = stack.enter_context(ControlClient(socket_path, interval))
                    status, why = _ask(control), ""
                except DaemonRefusedError:
                    raise
                except DaemonUnreachableError as error:
                    stack.close()
                    control, why = None, str(error)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys without Enter and without an echo; afterwards the terminal is as it was."""
    before = termios.tcgetattr(sys.stdin)
    numbers = signal.SIGINT, signal.SIGTERM
    handlers = [signal.signal(number, signal.default_int_handler) for number in numbers]
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def heard(said: bytes) -> set[str]:
    """The keys in what a terminal sent; Escape is one unless it begins another key's sequence."""
    if not said:
        # The terminal has ended.
        return {"q"}
    return set(_SEQUENCE.sub("", said.decode(errors="replace")))
