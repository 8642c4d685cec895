"""What a command is, and the arguments that several of them have."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hybridkv.client.control import runtime_directory
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_socket_path, default_socket

Argument = tuple[str, dict[str, Any]]  # The name, and what else `argparse` is told.
Run = Callable[[argparse.Namespace], int]  # What a command does; returns its exit status.
Command = tuple[tuple[Argument | list[Argument], ...], Run]
"""Arguments, of which one of each list must be given, and no more; and what is done."""


def command(*arguments: Argument | list[Argument]) -> Callable[[Run], Command]:
    """Make a function the command that has these arguments."""
    return lambda run: (arguments, run)


def option(named: str, about: str | None = None, default: Any = None, **more: Any) -> Argument:
    """An argument that has a value; what follows its name in `named` is said to be the value."""
    name, _, metavar = named.partition(" ")
    # What has a default is never said to be missing.
    said = {} if default is None else {"default": default}
    return name, {"metavar": metavar or None, "help": about, **said, **more}


def switch(name: str, about: str) -> Argument:
    """An argument that is given or not."""
    return name, {"action": "store_true", "help": about}


JSON = switch("--json", "print one JSON object")
SOCKET_VARIABLE = "HYBRIDKV_SOCKET"
SOCKET = option(
    "--socket PATH",
    f"where the daemon listens (default: ${SOCKET_VARIABLE}, else hybridkv/daemon.sock in "
    "$XDG_RUNTIME_DIR, else /tmp/hybridkv-UID/daemon.sock)",
)


def model(
    bundled: Iterable[str],
    otherwise: str,
    what: str = "a model directory (its config.json is enough), a hub name",
    default: str | None = None,
) -> tuple[Argument, Argument]:
    """The model and vLLM's arguments; `otherwise` says what is meant without a model."""
    about = f"{what}, or a bundled tiny model: {', '.join(bundled)} (default: {otherwise})"
    words = option("vllm_arguments -- VLLM ARGS", "passed to vLLM as they are", nargs="*")
    return option("--model DIR_OR_NAME", about, default), words


def socket_of(arguments: argparse.Namespace) -> str:
    """The path of the daemon's socket; raises ConfigError where no socket can have it."""
    if arguments.socket is not None:
        return check_socket_path(arguments.socket, "socket")
    if path := os.environ.get(SOCKET_VARIABLE):
        return check_socket_path(path, SOCKET_VARIABLE)
    return check_socket_path(default_socket(runtime_directory(), os.geteuid()), "socket")


@contextlib.contextmanager
def or_refuse(what: str, works: str) -> Iterator[None]:
    """Raise a ConfigError, that `what` is wrong, for an OSError; `works` is the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} ({error.strerror})", works) from error
