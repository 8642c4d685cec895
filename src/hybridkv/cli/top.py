"""`hybridkv top`: the daemon's status page in a terminal, live. It asks over the control socket."""

import argparse
import contextlib
import json
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

from hybridkv.cli.terminal import PlainConsole
from hybridkv.cli.top_frame import frame
from hybridkv.client.control import ControlClient, DaemonRefusedError, DaemonUnreachableError
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_socket_path, default_socket
from hybridkv.wire.status import Status

INTERVAL_SECONDS = 1.0
INTERVAL_SECONDS_MIN = 0.25
LOOK_SECONDS = 0.1
"""A key or another size of the terminal is seen so soon."""
ANSWER_SECONDS = 5.0
QUIT = frozenset("qQ\x03\x1b")
_SEQUENCE = re.compile(r"\x1b+(\[[0-?]*[ -/]*[@-~]?|O.|[^\x1b\[O])")
"""What a terminal sends for arrows, function keys, and keys with Alt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `top`."""
    parser.add_argument(
        "--socket", default=default_socket(os.environ, os.geteuid()), metavar="PATH"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, and end")
    parser.add_argument(
        "--once", action="store_true", help="print one frame, and end (as without a terminal)"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=INTERVAL_SECONDS,
        metavar="SECONDS",
        help="(default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show until q or Ctrl-C."""
    if not arguments.interval >= INTERVAL_SECONDS_MIN:
        raise ConfigError(
            f"interval={arguments.interval} is shorter than {INTERVAL_SECONDS_MIN} s", "1 works"
        )
    socket_path = check_socket_path(arguments.socket, "socket")
    console = PlainConsole()
    if arguments.json or arguments.once or not (console.is_terminal and sys.stdin.isatty()):
        with ControlClient(socket_path) as control:
            status = ask(control)
        if arguments.json:
            print(json.dumps(msgspec.to_builtins(status), indent=2))
        else:
            # A frame without a height has everything.
            text = frame(status, socket_path, console.width, 0)
            console.print(text, soft_wrap=True, highlight=False)
        return 0
    with contextlib.suppress(KeyboardInterrupt), _keys():
        _watch(console, socket_path, arguments.interval)
    return 0


def ask(control: ControlClient) -> Status:
    """What the daemon has to show. Raises DaemonUnreachableError."""
    status = control.stats(status=True).status
    assert status is not None, "it was asked for"
    return status


def _watch(console: Console, socket_path: str, interval: float) -> None:
    with contextlib.ExitStack() as stack:
        # An error of the first answer is printed in the ordinary way.
        control: ControlClient | None = stack.enter_context(
            ControlClient(socket_path, ANSWER_SECONDS)
        )
        assert control is not None
        status, why = ask(control), ""
        with Live(
            console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
        ) as live:
            while True:
                size = console.size
                live.update(_shown(status, socket_path, size.width, size.height, why), refresh=True)
                until = time.monotonic() + interval
                while time.monotonic() < until and console.size == size:
                    if _pressed() & QUIT:
                        return
                if console.size != size:
                    continue
                try:
                    if control is None:
                        control = stack.enter_context(ControlClient(socket_path, interval))
                    status, why = ask(control), ""
                except DaemonRefusedError:
                    raise
                except DaemonUnreachableError as error:
                    stack.close()
                    control, why = None, str(error)


def _shown(status: Status, socket_path: str, width: int, height: int, why: str) -> Text:
    if not why:
        return frame(status, socket_path, width, height)
    head = f"no answer, shown is the last one: {why}"[:width]
    lines = frame(status, socket_path, width, height - 1)
    return Text.assemble((head, "bold red"), "\n", lines)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys without Enter and without an echo; afterwards the terminal is as it was."""
    before = termios.tcgetattr(sys.stdin)
    handlers = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _pressed() -> set[str]:
    """The keys that are pressed within LOOK_SECONDS."""
    ready, _, _ = select.select([sys.stdin], [], [], LOOK_SECONDS)
    return heard(os.read(sys.stdin.fileno(), 64)) if ready else set()


def heard(said: bytes) -> set[str]:
    """The keys in what a terminal sent; Escape is one unless it begins another key's sequence."""
    if not said:
        # The terminal has ended.
        return {"q"}
    return set(_SEQUENCE.sub("", said.decode(errors="replace")))
