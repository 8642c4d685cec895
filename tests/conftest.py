"""Fixtures: a real daemon process on a socket of its own."""

import gc
import logging
import os
import random
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from hybridkv.lab.daemon_process import DaemonProcess
from tests.avx2 import choose_cpu
from tests.chance import is_fixed, seed_of
from tests.forked_daemon import Fork, ForkedDaemon
from tests.waiting import DEADLINE_SECONDS, until

# Their assertions say what the two sides are.
pytest.register_assert_rewrite("tests.programs.tiers")

# Before a test module imports torch.
choose_cpu()

# What is collected stays, so the garbage collector need not look at it again and again.
gc.disable()

# A run in the background of a shell ignores these, and so would the programs that tests interrupt.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# An example may take long where the machine does something else.
hypothesis.settings.register_profile(
    "hybridkv",
    deadline=None,
    derandomize=is_fixed(),
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("hybridkv")


def pytest_collection_finish() -> None:
    """Modules and tests live until the end, so the garbage collector never looks at them."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # pytest gives each logger that does not propagate its handlers, in each phase of each test, and
    # torch has many. Their records reach the same handlers by way of the root.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test ends every daemon in its directory, also one that a connector has started."""
    directory = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if directory is not None:
        left = [pid for pid in _daemons_in(directory) if not _ends(pid)]
        for pid in left:
            os.kill(pid, signal.SIGINT)
        assert not left, "a daemon is left"


def _ends(pid: int) -> bool:
    """Whether a daemon ends in time, told to or not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(fd) as process:
        return bool(select.select([process], [], [], DEADLINE_SECONDS)[0])


def _daemons_in(directory: Path) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and any(word.startswith(bytes(directory) + b"/") for word in words):
            pids.append(int(path.parent.name))
    return pids


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A running daemon with 64 MiB."""
    with ForkedDaemon(str(tmp_path / "daemon.sock"), "64MiB", metrics_port=0) as running:
        yield running


@pytest.fixture
def other_users_socket() -> Iterator[str]:
    """The socket of a daemon that user 65534 runs. Skips where this user is not root."""
    if os.geteuid() != 0:
        pytest.skip("needs root to act as another user")
    place = Path("/tmp") / f"hybridkv-test-{os.getpid()}"
    code = (
        "import os, sys; from hybridkv.cli import serve; from hybridkv.cli.main import main;"
        " os.setuid(65534);"
        " sys.exit(main(['serve', '--socket', sys.argv[1], '--ram', '16MiB',"
        " '--metrics-port', '-1']))"
    )
    process = Fork([f"{place}/daemon.sock"], [1, 2], code)

    def listens() -> bool:
        """The file is there a moment before."""
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(f"{place}/daemon.sock") == 0

    try:
        until(lambda: listens() or process.poll() is not None, "the other user's daemon")
        assert process.poll() is None, "the other user's daemon ended"
        yield f"{place}/daemon.sock"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_SECONDS)
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(autouse=True)
def torch_draws_alike(request: pytest.FixtureRequest) -> None:
    """What torch draws in a test does not depend on the tests before it."""
    if "torch" in sys.modules:
        torch, seed = sys.modules["torch"], seed_of(request.node.nodeid)
        if torch.cuda.is_initialized():
            torch.manual_seed(seed)
        else:
            # It asks no kind of device, which takes milliseconds.
            torch.default_generator.manual_seed(seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """A random generator with the test's own seed, which is printed with a failure."""
    seed = seed_of(request.node.nodeid)
    print(f"{request.node.nodeid}: seed {seed}")
    return random.Random(seed)
