"""A link and a socket whose other end the test holds."""

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridkv.client.control import ControlClient, DaemonUnreachableError
from hybridkv.client.link import SEND_QUEUE_BYTES_MAX, Link
from hybridkv.wire.codec import Frames, decode_request, encode
from hybridkv.wire.messages import (
    PROTOCOL_VERSION,
    Error,
    Hello,
    Release,
    ReportRequest,
    RequestExplanation,
    Reserved,
)
from tests.unit.daemon.harness import make_welcome
from tests.waiting import DEADLINE_SECONDS

OLD = Hello(1, PROTOCOL_VERSION, "engine", "e", b"o" * 32)
NEW = Hello(1, PROTOCOL_VERSION, "engine", "e", b"n" * 32)
WELCOME = make_welcome(1)


@contextlib.contextmanager
def daemon_end(
    tmp_path: Path, on_loss: Callable[[str], None] = lambda why: None
) -> Iterator[tuple[Link, Callable[[], tuple[Hello, socket.socket]]]]:
    """A link, and a function that accepts its next connection and reads the greeting of it."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.settimeout(DEADLINE_SECONDS)
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def accept() -> tuple[Hello, socket.socket]:
            far = opened.enter_context(listener.accept()[0])
            far.settimeout(DEADLINE_SECONDS)
            (body,) = Frames().feed(far.recv(1 << 16))
            hello = decode_request(body)
            assert isinstance(hello, Hello)
            return hello, far

        link = Link(str(tmp_path / "s"), OLD, on_loss)
        opened.callback(link.close)
        yield link, accept


def test_an_identity_that_changes_before_the_welcome_is_the_one_that_is_greeted_with(
    tmp_path: Path,
) -> None:
    """Else the daemon would take lookups and stores of new weights for those of the old ones."""
    with daemon_end(tmp_path) as (link, accept):
        link.poll(0.0)
        assert accept()[0].namespace == OLD.namespace
        link.greet_with(NEW)
        link.poll(0.0)
        assert accept()[0].namespace == NEW.namespace


def test_what_a_lost_connection_said_last_comes_before_its_loss(tmp_path: Path) -> None:
    """Slots that a killed daemon granted must not be written after its engine lost them."""
    events: list[object] = []
    granted = Reserved(id=2, part_bytes=1, parts=1, slots=b"s" * 16, reserved_bytes=1)
    with daemon_end(tmp_path, events.append) as (link, accept):
        link.poll(0.0)
        _, far = accept()
        far.sendall(encode(WELCOME) + encode(granted))
        far.close()
        for _ in range(3):
            events += link.poll(0.0)
    assert events == [granted, "connection closed by the daemon"]


def test_what_is_queued_leaves_in_one_go_and_in_order(tmp_path: Path) -> None:
    with daemon_end(tmp_path) as (link, accept):
        assert not link.queue(Release(1), 0.0)
        link.poll(0.0)
        _, far = accept()
        far.sendall(encode(WELCOME))
        link.poll(0.0)
        for lease in (1, 2, 3):
            assert link.queue(Release(lease), 0.0)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        assert link.flush(0.0)
        bodies = Frames().feed(far.recv(1 << 16))
        assert [decode_request(body) for body in bodies] == [Release(1), Release(2), Release(3)]
        link.close()
        assert not link.flush(0.0)


def test_a_command_that_is_not_greeted_leaves_no_connection_behind(tmp_path: Path) -> None:
    socket_path = str(tmp_path / "d.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(socket_path)
        listening.listen()
        with pytest.raises(DaemonUnreachableError), ControlClient(socket_path, 0.05):
            pass
        accepted, _ = listening.accept()
        with accepted:
            accepted.settimeout(DEADLINE_SECONDS)
            while accepted.recv(4096):
                pass


def test_much_that_is_queued_in_one_go_is_no_sign_of_a_daemon_that_does_not_read(
    tmp_path: Path,
) -> None:
    """Thousands of requests may be aborted in one call."""
    lost: list[str] = []
    with daemon_end(tmp_path, lost.append) as (link, accept):
        link.poll(0.0)
        _, far = accept()
        far.sendall(encode(WELCOME))
        link.poll(0.0)
        far.setblocking(False)
        tell = ReportRequest(
            "r" * 100, RequestExplanation(1, 1, not_read="x" * 500, detail="y" * 400)
        )
        for _ in range(2 * SEND_QUEUE_BYTES_MAX // len(encode(tell))):
            assert link.queue(tell, 0.0)
            with contextlib.suppress(BlockingIOError):
                while far.recv(1 << 20):
                    pass
    assert not lost


def test_a_refusal_with_nonsense_behind_it_is_one_loss(tmp_path: Path) -> None:
    lost: list[str] = []
    with daemon_end(tmp_path, lost.append) as (link, accept):
        link.poll(0.0)
        _, far = accept()
        far.sendall(
            encode(Error(1, "version", "another version")) + struct.pack("<I", 3) + b"\xc1" * 3
        )
        assert link.poll(0.0) == []
        assert link.refusal == "another version"
    assert lost == ["another version"]


def test_no_descriptor_for_a_moment_is_no_fault(tmp_path: Path) -> None:
    """Else a role would be switched off for good after twenty hooks."""
    code = (
        "import os, resource, sys\n"
        "from hybridkv.client.link import Link\n"
        "from hybridkv.wire.messages import PROTOCOL_VERSION, Hello\n"
        "link = Link(sys.argv[1], Hello(1, PROTOCOL_VERSION, 'control'), print)\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))\n"
        "sys.exit(0 if link.poll(0.0) == [] else 3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_closed_connection_is_seen_before_what_it_said_last_is_read(tmp_path: Path) -> None:
    """A worker looks once it has locked the arena, since the daemon looks for the lock then."""
    with daemon_end(tmp_path) as (link, accept):
        assert not link.has_connection
        link.poll(0.0)
        _, far = accept()
        far.sendall(encode(WELCOME))
        link.poll(0.0)
        assert link.welcome is not None
        assert link.has_connection
        far.sendall(encode(Error(2, "internal", "")))
        far.close()
        assert not link.has_connection
        assert link.poll(0.0) == [Error(2, "internal", "")]
        link.close()
        assert not link.has_connection
