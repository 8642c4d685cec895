"""What people get wrong with containers: each has one sentence, where it is needed.

That the socket is shared and the memory is not is in tests.engine.test_apart.
"""

import copy
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.fuse import mounted
from tests.programs.containers.manifests import MANIFESTS, Container, containers, served
from tests.programs.containers.namespaces import Machine, RunningContainer
from tests.waiting import DEADLINE_SECONDS, until

SIDECAR = next(path for path in MANIFESTS if path.stem == "sidecar")
SOCKET = "/run/hybridkv/own/daemon.sock"
LIMIT = "/sys/fs/cgroup"  # Where a container has the limit of its memory.
REFUSED = 2  # The status of a command that says what works.


@pytest.fixture(autouse=True)
def is_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to act as another user")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine(tmp_path) as running:
        yield running


def a_daemon() -> Container:
    """Returns the sidecar of the manifest, which a test may change."""
    (found,) = containers(SIDECAR, "hybridkv")
    assert served(found.spec["args"]).socket == SOCKET
    return copy.deepcopy(found)


def start(machine: Machine, daemon: Container, ram: str = "16MiB") -> RunningContainer:
    """Start the daemon with less memory. It may end by itself."""
    words = [f"--ram={ram}" if word.startswith("--ram=") else word for word in daemon.spec["args"]]
    return machine.start(daemon, ["hybridkv", *words])


def serves(machine: Machine, daemon: Container, ram: str = "16MiB") -> RunningContainer:
    """Start a daemon, and wait until it answers the probe."""
    running = start(machine, daemon, ram)
    path = machine.volume(daemon, "socket") / "own" / "daemon.sock"
    until(lambda: running.has_ended or listens(path), "it listens")
    until(lambda: running.has_ended or not running.execute(daemon.probe).returncode, "it serves")
    assert not running.has_ended, running.log.read_text()
    return running


def listens(path: Path) -> bool:
    """Whether a daemon listens at a socket. A probe, which is a program, takes ten times as long.

    The name by way of a descriptor is short enough for a socket.
    """
    if not path.is_socket():
        return False
    directory = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(f"/proc/self/fd/{directory}/{path.name}") == 0
    finally:
        os.close(directory)


def idle(machine: Machine, container: Container) -> RunningContainer:
    """Start a container in which commands can be executed."""
    running = machine.start(container, ["sleep", "infinity"])
    command = Path(f"/proc/{running.pid}/comm")
    until(lambda: command.read_text() == "sleep\n", "its root and its user are there")
    return running


def refusal(running: RunningContainer) -> str:
    """Returns the last line of a daemon that does not start."""
    assert running.process.wait(DEADLINE_SECONDS) == REFUSED
    text = running.log.read_text()
    assert "Traceback" not in text
    return text.splitlines()[-1]


def arena_of(running: RunningContainer) -> str:
    """Returns the name of a daemon's arena."""
    done = running.execute(["hybridkv", "stats", "--json", "--socket", SOCKET])
    return Path(json.loads(done.stdout)["arena"]).name


def test_pods_with_one_directory_keep_their_own_memory(tmp_path: Path) -> None:
    """Both have the socket's path, each in a volume of its own. Either may end at any time."""
    shared, daemon = tmp_path / "shared", a_daemon()
    with mounted("tmpfs", shared, "1g"):
        shared.chmod(0o1777)
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        with (
            Machine(tmp_path / "a", given={"memory": shared}) as first_machine,
            Machine(tmp_path / "b", given={"memory": shared}) as second_machine,
        ):
            first, second = serves(first_machine, daemon), serves(second_machine, daemon)
            arenas = [arena_of(first), arena_of(second)]
            first.kill()
            second.kill()
            assert arena_of(serves(second_machine, daemon)) == arenas[1]
            assert sorted(path.name for path in shared.iterdir()) == sorted(arenas)
            assert arena_of(serves(first_machine, daemon)) == arenas[0]


def test_a_memory_without_a_place_is_taken_over(machine: Machine) -> None:
    """As an upgrade finds it: the version before wrote nothing into the lock's file."""
    daemon = a_daemon()
    (own := machine.volume(daemon, "socket") / "own").mkdir(mode=0o700)
    lock = own / "daemon.sock.lock"
    lock.touch(mode=0o600)
    for path in (own, lock):
        os.chown(path, daemon.user, daemon.user)
    first = serves(machine, daemon)
    arena = arena_of(first)
    first.kill()
    assert lock.read_bytes() == b""
    assert arena_of(serves(machine, daemon)) == arena


@pytest.mark.parametrize(("ram", "size"), [("128MiB", "65MiB"), ("65MiB", "65MiB")])
def test_a_volume_that_is_too_small(machine: Machine, ram: str, size: str) -> None:
    """The second has no room for the tables alone. The size that is named works."""
    daemon = a_daemon()
    message = refusal(start(machine, daemon, ram))
    assert f"ram={ram} with its tables is larger than the {size} free in /hybridkv" in message
    works = message.partition('; "')[2].partition('" works, or give the container more')[0]
    serves(machine, daemon, works)


def test_a_limit_of_memory_counts_the_cache(tmp_path: Path) -> None:
    """Shared memory counts against the limit of the container that touches it first."""
    (limit := tmp_path / "limit").mkdir()
    (limit / "memory.max").write_text(f"{200 << 20}\n")
    (limit / "memory.current").write_text(f"{16 << 20}\n")
    daemon = a_daemon()
    daemon.spec["volumeMounts"].append({"name": "limit", "mountPath": LIMIT})
    with Machine(tmp_path, given={"limit": limit}) as machine:
        message = refusal(start(machine, daemon, "300MiB"))
        assert f"ram=300MiB is larger than the memory limit of 200MiB of {LIMIT}" in message
        assert message.endswith('"46MiB" works')
        running = serves(machine, daemon, "60MiB")
        (line,) = [
            line for line in running.log.read_text().splitlines() if "leaves no room" in line
        ]
        assert f" WARNING ram=60MiB leaves no room in the memory limit of 200MiB of {LIMIT}" in line
        assert line.endswith("so the cache stays smaller; a limit of 208.9MiB works")


def test_another_user_is_told_which_one_works(machine: Machine) -> None:
    daemon = a_daemon()
    serves(machine, daemon)
    (engine,) = containers(SIDECAR, "vllm")
    engine.pod["securityContext"]["runAsUser"] = 1001
    engine_container = idle(machine, engine)
    done = engine_container.execute(["hybridkv", "ping", "--socket", SOCKET])
    assert done.returncode == REFUSED
    (message,) = done.stderr.splitlines()
    assert "belongs to user id 1000" in message
    assert "user id 1001" in message


@pytest.mark.parametrize("volume", ["socket", "memory"])
def test_a_volume_that_is_not_the_users(tmp_path: Path, volume: str) -> None:
    """As a hostPath that nobody gave to the user."""
    (roots := tmp_path / "roots").mkdir(mode=0o755)
    with mounted("tmpfs", roots, "1g"), Machine(tmp_path, given={volume: roots}) as machine:
        roots.chmod(0o755)
        message = refusal(start(machine, a_daemon()))
    assert {
        "socket": "socket: directory /run/hybridkv/own cannot be made (Permission denied)",
        "memory": "shm-dir: you may not make files in /hybridkv",
    }[volume] in message
    assert message.endswith("works")


def test_a_socket_of_a_dead_daemon(machine: Machine) -> None:
    daemon = a_daemon()
    first = serves(machine, daemon)
    (engine,) = containers(SIDECAR, "vllm")
    engine_container = idle(machine, engine)
    first.kill()
    assert (machine.volume(daemon, "socket") / "own" / "daemon.sock").is_socket()
    done = engine_container.execute(["hybridkv", "ping", "--socket", SOCKET])
    assert done.returncode == REFUSED
    assert "nothing listens there" in done.stderr
    serves(machine, daemon)
    assert not engine_container.execute(["hybridkv", "ping", "--socket", SOCKET]).returncode
