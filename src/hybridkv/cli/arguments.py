"""The types of a command and its arguments, and the arguments that several commands have."""

import argparse
import contextlib
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridkv.client.control import ControlClient, runtime_directory
from hybridkv.core.daemon_settings import CONFIG_VARIABLE, resolve_one
from hybridkv.core.errors import ConfigError
from hybridkv.core.paths import check_socket_path, default_socket
from hybridkv.shm.access import group_id
from hybridkv.shm.arena import shm_directory

Run = Callable[[argparse.Namespace], int]  # Runs a command and returns its exit status.


class Argument(NamedTuple):
    """An argument of a command, as `argparse` takes it."""

    name: str
    keywords: dict[str, Any]


class Command(NamedTuple):
    """A command: its arguments, and the function that runs it.

    Of each list of arguments exactly one must be given.
    """

    arguments: tuple[Argument | list[Argument], ...]
    run: Run


def command(*arguments: Argument | list[Argument]) -> Callable[[Run], Command]:
    """Make a function the command that has these arguments."""
    return lambda run: Command(arguments, run)


def option(named: str, about: str | None = None, default: Any = None, **keywords: Any) -> Argument:
    """Returns an argument that has a value: `named` is its name, a space, and its metavar."""
    name, _, metavar = named.partition(" ")
    # argparse never says that an argument with a default is missing.
    defaults = {} if default is None else {"default": default}
    return Argument(name, {"metavar": metavar or None, "help": about, **defaults, **keywords})


def switch(name: str, about: str) -> Argument:
    """Returns an argument without a value."""
    return Argument(name, {"action": "store_true", "help": about})


JSON = switch("--json", "print one JSON object")
SOCKET = option(
    "--socket PATH",
    "where the daemon listens (default: $HYBRIDKV_SOCKET, else hybridkv/daemon.sock in "
    "$XDG_RUNTIME_DIR, else /tmp/hybridkv-UID/daemon.sock)",
)
SHM_DIR = option(
    "--shm-dir DIR", "look for memory there too, beside /dev/shm (default: $HYBRIDKV_SHM_DIR)"
)
CONFIG = option(
    "--config FILE",
    "a TOML file with settings, over which options and variables win "
    f"(default: ${CONFIG_VARIABLE})",
)


def model_arguments(
    bundled: Iterable[str],
    otherwise: str,
    what: str = "a model directory (its config.json is enough), a hub name",
    default: str | None = None,
) -> tuple[Argument, Argument]:
    """Returns the arguments for a model and for vLLM.

    `otherwise` says what is meant without a model.
    """
    about = f"{what}, or a bundled tiny model: {', '.join(bundled)} (default: {otherwise})"
    passed_on = option("vllm_arguments -- VLLM ARGS", "passed to vLLM as they are", nargs="*")
    return option("--model DIR_OR_NAME", about, default), passed_on


def setting_of(arguments: argparse.Namespace, key: str) -> Any:
    """Returns a setting of the daemon that a command needs too. None = it was not given."""
    file = settings_file(arguments)
    return resolve_one(key, vars(arguments), os.environ, file.keys, file.path)


class SettingsFile(NamedTuple):
    """A settings file that was read."""

    keys: Mapping[str, object]
    path: str  # "" = there is no file, and so there are no keys.


def settings_file(arguments: argparse.Namespace) -> SettingsFile:
    """Returns the settings file that an option or the variable names.

    Raises ConfigError where it cannot be read, or is no TOML.
    """
    named = getattr(arguments, "config", None)
    where = CONFIG_VARIABLE if named is None else "config"
    path = os.path.abspath(named) if named else os.environ.get(CONFIG_VARIABLE, "")
    if not path:
        return SettingsFile({}, "")
    if not path.startswith("/"):
        what = f"{where}={path!r} must be the absolute path of a settings file"
        raise ConfigError(what, '"/etc/hybridkv.toml" works')
    works = "a TOML file that you may read works"
    if os.path.exists(path) and not os.path.isfile(path):
        # A FIFO would wait for its writer.
        raise ConfigError(f"{where}: {path} is no regular file", works)
    try:
        # Editors of other systems begin a file with a byte order mark.
        text = Path(path).read_text(encoding="utf-8-sig")
        return SettingsFile(tomllib.loads(text), path)
    except OSError as error:
        what = f"{where}: {path} cannot be read ({error.strerror})"
        raise ConfigError(what, works) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = f"{where}: {path} is no TOML ({error})"
        raise ConfigError(what, "a line like 'ram = \"8GiB\"' works") from error


def socket_of(arguments: argparse.Namespace) -> str:
    """Returns the path of the daemon's socket. Raises ConfigError where no socket can have it."""
    given = setting_of(arguments, "socket")
    if given is not None:
        return str(given)
    return check_socket_path(default_socket(runtime_directory(), os.geteuid()), "socket")


def control_of(arguments: argparse.Namespace, timeout_seconds: float = 5.0) -> ControlClient:
    """Connect to the daemon, which may be another user's that serves a group of this user.

    Raises ConfigError where there is no such group.
    """
    group = group_id(setting_of(arguments, "group"))
    return ControlClient(socket_of(arguments), timeout_seconds, group=group)


def shm_dir_of(arguments: argparse.Namespace) -> Path:
    """Returns the directory of arenas. Raises ConfigError where there is none."""
    return shm_directory(setting_of(arguments, "shm_dir"))


@contextlib.contextmanager
def or_refuse(what: str, works: str) -> Iterator[None]:
    """Raise a ConfigError for an OSError: `what` is wrong, and `works` is the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} ({error.strerror})", works) from error


@contextlib.contextmanager
def ended_by_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that it removes what it began."""

    def on_signal(number: int, _: object) -> None:
        sys.exit(128 + number)

    # nohup ignores SIGHUP, and it stays so.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
