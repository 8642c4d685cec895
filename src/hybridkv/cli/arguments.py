"""What a command is, and the arguments that several of them have."""

import argparse
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from hybridkv.core.paths import check_socket_path, default_socket


class Argument(NamedTuple):
    """One argument, with what `argparse` is told of it."""

    name: str
    keywords: dict[str, Any]


class Command(NamedTuple):
    """What `hybridkv NAME` does. Of a list of arguments one must be given, and no more."""

    arguments: tuple[Argument | list[Argument], ...]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status."""


def command(
    *arguments: Argument | list[Argument],
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Make a function the command that has these arguments."""
    return partial(Command, arguments)


def option(name: str, metavar: str | None, about: str | None, **keywords: Any) -> Argument:
    """An argument that has a value."""
    return Argument(name, {"metavar": metavar, "help": about, **keywords})


def switch(name: str, about: str) -> Argument:
    """An argument that is given or not."""
    return Argument(name, {"action": "store_true", "help": about})


JSON = switch("--json", "print one JSON object")
SOCKET = option("--socket", "PATH", None)


def model(
    bundled: Iterable[str],
    otherwise: str,
    what: str = "a model directory (its config.json is enough), a hub name",
    default: str | None = None,
) -> tuple[Argument, Argument]:
    """The model and vLLM's arguments; `otherwise` says what is meant without a model."""
    about = f"{what}, or a bundled tiny model: {', '.join(bundled)} (default: {otherwise})"
    words = option("vllm_arguments", "-- VLLM ARGS", "passed to vLLM as they are", nargs="*")
    return option("--model", "DIR_OR_NAME", about, default=default), words


def socket_of(arguments: argparse.Namespace) -> str:
    """The path of the daemon's socket; raises ConfigError where no socket can have it."""
    path = arguments.socket
    if path is None:
        path = default_socket(os.environ, os.geteuid())
    return check_socket_path(path, "socket")
