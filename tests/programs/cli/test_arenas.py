"""`hybridkv stop` and `hybridkv arenas` over real daemons, and a /dev/shm of their own.

The arenas of a user are all in one directory, and those of other tests must stay.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.client.link import peer_pid
from hybridkv.core.sizes import parse_size
from tests.forked_daemon import run_forked
from tests.waiting import DEADLINE_SECONDS, has_ended, is_stopped, until

RAM = "16MiB"
HYBRIDKV = (sys.executable, "-m", "hybridkv")


class CommandResult(NamedTuple):
    """The exit status of a command, and what it has written."""

    status: int
    out: str
    err: str


def run(command: Sequence[object]) -> CommandResult:
    words = [str(word) for word in command]
    ended = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS
    )
    return CommandResult(ended.returncode, ended.stdout, ended.stderr)


def killed(pid: int) -> None:
    """End a daemon so that it leaves its memory."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: has_ended(pid), "the daemon is gone")


class Node:
    """Commands see a /dev/shm that nobody else has; `pid` is a process that has it too."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.shm_path = Path(f"/proc/{pid}/root/dev/shm")

    def run(self, *words: object) -> CommandResult:
        """Run one command of hybridkv."""
        ended = run_forked(words, namespaces=[f"/proc/{self._pid}/ns/mnt"])
        return CommandResult(ended.returncode, ended.stdout, ended.stderr)

    def json(self, *words: object) -> object:
        """Run one command with --json, which must succeed. Returns its document."""
        status, out, err = self.run(*words, "--json")
        assert status == 0, err
        return json.loads(out)

    def serve(self, socket_path: Path, *options: str) -> int:
        """Start a daemon. Returns its pid."""
        words = ["--ram", RAM, "--metrics-port", "-1", "--detach", *options]
        assert self.run("serve", "--socket", socket_path, *words) == (0, "", "")
        return peer_pid(str(socket_path))

    def arena_of(self, pid: int) -> str:
        """The name of the arena that a daemon has open."""
        links = []
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # A connection of a command may end meanwhile.
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(link))
        return next(Path(link).name for link in links if link.startswith("/dev/shm/hybridkv-"))

    def wait_for(self, arena: str) -> None:
        """Wait for the end of an arena's time, as the process does that a daemon leaves."""
        command = ["nsenter", f"--mount=/proc/{self._pid}/ns/mnt", "--", sys.executable]
        words = [*command, "-m", "hybridkv.daemon.orphan", arena]
        subprocess.run(words, check=True, timeout=DEADLINE_SECONDS)

    @property
    def shm(self) -> list[str]:
        """The names in the node's /dev/shm."""
        return sorted(path.name for path in self.shm_path.iterdir())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node without a daemon; those that a test leaves are ended."""
    command = "mount -t tmpfs none /dev/shm && echo ready && exec cat"
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation=private", "sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip("needs the right to mount")
        try:
            yield Node(process.pid)
        finally:
            for path in tmp_path.glob("*.sock"):
                if (pid := peer_pid(str(path))) > 0:
                    killed(pid)
            # Else a process waits for their end, and keeps the mount.
            for arena in Path(f"/proc/{process.pid}/root/dev/shm").iterdir():
                arena.unlink()
            process.stdin.close()


def test_stop_keeps_the_memory_for_the_next_daemon(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    pid = node.serve(path)
    arenas = node.shm
    status, out, err = node.run("stop", "--socket", path)
    assert (status, err) == (0, "")
    assert has_ended(pid), "it waits until the daemon has ended"
    assert out.startswith(f"the daemon (pid {pid}) ended; ")
    assert " of memory are kept for the next one, for " in out
    assert out.endswith("min at most\n")
    assert not path.exists()
    assert node.shm == arenas
    node.serve(path)
    assert node.shm == arenas, "the next daemon has taken it over"
    document = node.json("stop", "--socket", path)
    assert isinstance(document, dict)
    assert 0 < document["kept_bytes"] <= 2 * parse_size(RAM, "ram")


def test_stop_free_leaves_nothing(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    pid = node.serve(path)
    status, out, err = node.run("stop", "--free", "--socket", path)
    assert (status, out, err) == (
        0,
        f"the daemon (pid {pid}) ended; its memory is free again\n",
        "",
    )
    assert has_ended(pid)
    assert not path.exists()
    assert node.shm == []


def test_stop_where_there_is_no_daemon(node: Node, tmp_path: Path) -> None:
    """With --free it frees what one has left."""
    path = tmp_path / "daemon.sock"
    nobody = f"hybridkv: no daemon answers at {path} (nothing listens there)\n"
    for words in (["stop"], ["stop", "--free"]):
        assert node.run(*words, "--socket", path) == (2, "", nobody)
    node.serve(tmp_path / "other.sock")
    arenas = node.shm
    killed(node.serve(path))
    left = f'{nobody[:-1]}; "hybridkv stop --free --socket {path}" frees what the last one left\n'
    assert node.run("stop", "--socket", path) == (2, "", left)
    assert len(node.shm) == 2
    status, out, err = node.run("stop", "--free", "--socket", path)
    assert (status, out, err) == (0, "no daemon was there; its memory is free again\n", "")
    assert node.shm == arenas, "another socket's are not touched"
    assert not path.exists()


def test_a_daemon_that_hangs_is_named(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    pid = node.serve(path)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid), "it is stopped")
    status, out, err = node.run("stop", "--socket", path)
    assert (status, out) == (2, "")
    assert err.startswith(f"hybridkv: no daemon answers at {path} (the daemon does not greet); ")
    assert err.endswith(f'"kill -9 {pid}" ends it and keeps its memory for the next one\n')
    os.kill(pid, signal.SIGCONT)
    assert node.run("ping", "--socket", path)[0] == 0, "it was not told to end"


def test_another_users_daemon_goes_on(other_users_socket: str) -> None:
    pid = peer_pid(other_users_socket)
    for words in (["stop"], ["stop", "--free"]):
        ended = run_forked([*words, "--socket", other_users_socket])
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == f"hybridkv: {other_users_socket} is served by another user\n"
    assert peer_pid(other_users_socket) == pid


def test_a_daemon_of_another_pid_namespace_is_not_ended(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "daemon.sock"
    pid = node.serve(path)
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    status, out, err = run([*apart, *HYBRIDKV, "stop", "--socket", path])
    assert (status, out) == (2, "")
    assert err.startswith(f"hybridkv: the daemon at {path} is in another pid namespace; ")
    assert not has_ended(pid)


class ListedArena(NamedTuple):
    in_use: bool
    socket: str | None = None
    removed: bool = False


def test_arenas_are_listed_and_those_that_no_daemon_has_are_removed(
    node: Node, tmp_path: Path
) -> None:
    assert node.run("arenas") == (0, "there is no arena of yours in /dev/shm\n", "")
    left, used = tmp_path / "left.sock", tmp_path / "used.sock"
    killed(node.serve(left))
    pid = node.serve(used)
    notes = node.shm_path / f"hybridkv-{os.geteuid()}-notes"
    notes.write_text("mine")

    def listed(*words: str) -> list[ListedArena]:
        rows = node.json("arenas", *words)
        assert isinstance(rows, list)
        assert all(0 < row["held_bytes"] <= row["size_bytes"] for row in rows)
        return [ListedArena(row["in_use"], row["socket"], row["removed"]) for row in rows]

    running = ListedArena(in_use=True, socket=str(used))
    assert sorted(listed()) == [ListedArena(in_use=False), running]
    named = ListedArena(in_use=False, socket=str(left))
    assert named in listed("--socket", str(left)), "one that it is told of"
    status, out, err = node.run("arenas")
    assert (status, err) == (0, "")
    assert len(node.shm) == 3, "nothing was asked to be removed"
    shown = " ".join(out.split())
    assert all(name in shown for name in ("in use", "yes", "no"))
    assert sorted(listed("--prune")) == [ListedArena(in_use=False, removed=True), running]
    assert listed("--prune") == [running]
    assert node.run("ping", "--socket", used)[0] == 0
    assert not has_ended(pid)
    assert notes.exists(), "it is no arena"


def test_after_a_crash_the_next_daemon_removes_what_is_over(node: Node, tmp_path: Path) -> None:
    """Nobody is left to wait; a daemon of any socket removes it, and what another one has stays."""
    stays = tmp_path / "stays.sock"
    pids = [node.serve(tmp_path / "over.sock", "--arena-ttl", "0s"), node.serve(stays)]
    over, stay = (node.arena_of(pid) for pid in pids)
    node.wait_for(f"/dev/shm/{over}")
    assert set(node.shm) == {over, stay}, "a daemon has it"
    for pid in pids:
        killed(pid)
    assert set(node.shm) == {over, stay}
    third = node.arena_of(node.serve(tmp_path / "third.sock"))
    assert set(node.shm) == {stay, third}
