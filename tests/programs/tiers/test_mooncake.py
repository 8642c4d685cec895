"""The Mooncake tier over a real master; all nodes are this machine."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hybridkv.core.errors import ConfigError
from hybridkv.core.tier_urls import parse_tier
from hybridkv.tiers.conformance.samples import SampleObject, make_sample, pages, read
from hybridkv.tiers.conformance.suite import TierSuite
from hybridkv.tiers.contract import FullError, MissingError, ReadRequest, TierError, WriteRequest
from hybridkv.tiers.isolated import IsolatedProcess
from hybridkv.tiers.mooncake.tier import MooncakeTier
from tests.programs.tiers.master import (
    DEADLINE_SECONDS,
    TIMEOUT_SECONDS,
    Master,
    free_port,
    needs_mooncake,
)
from tests.waiting import state_of, until

HASTY_SECONDS = 2.0
hasty = pytest.mark.parametrize("timeout", [HASTY_SECONDS])
"""For tests in which a tier waits in vain."""
LATE_SECONDS = DEADLINE_SECONDS
"""How long after its timeout a call may return on a busy machine."""
NODE_BYTES = 128 << 20


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Master]]:
    """Starts a master; its argument is how long leases are."""
    with contextlib.ExitStack() as masters:

        def started(lease: str) -> Master:
            master = Master(tmp_path / "master.log", lease)
            masters.callback(master.kill)
            return master

        yield started


@pytest.fixture
def master(start: Callable[[str], Master]) -> Master:
    return start("300ms")


@pytest.fixture
def timeout() -> float:
    """That of both nodes, in seconds; generous, as the machine may be loaded."""
    return TIMEOUT_SECONDS


def opened(tier: MooncakeTier) -> MooncakeTier:
    """The tier, once it could be opened."""

    def is_open() -> bool:
        with contextlib.suppress(TierError):
            tier.open()
            return True
        return False

    until(is_open, "the tier opens")
    return tier


@pytest.fixture
def node(master: Master, timeout: float) -> Iterator[MooncakeTier]:
    """Another node, which gives the memory."""
    with contextlib.closing(master.tier(size=NODE_BYTES, timeout=timeout)) as tier:
        yield opened(tier)
        keeper(tier).kill_child()  # which is quicker than to leave in order


@pytest.fixture
def tier(master: Master, node: MooncakeTier, timeout: float) -> Iterator[MooncakeTier]:
    """This node: it gives nothing, and asks."""
    with contextlib.closing(master.tier(timeout=timeout)) as tier:
        yield opened(tier)


def client(tier: MooncakeTier) -> IsolatedProcess:
    assert tier.client
    return tier.client


def keeper(tier: MooncakeTier) -> IsolatedProcess:
    assert tier.keeper
    return tier.keeper


def put(tier: MooncakeTier, samples: list[SampleObject]) -> list[TierError | None]:
    return tier.put([sample.write_request() for sample in samples])


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """A call that ends when the tier's timeout is over, whoever does not answer."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < TIMEOUT_SECONDS + LATE_SECONDS


def nobody_answers(tier: MooncakeTier, there: SampleObject) -> None:
    """Every call fails for each of its items, and in time."""
    large = [make_sample(n, 5 << 20) for n in range(100, 104)]
    with in_time():
        errors = put(tier, large)
    assert all(isinstance(error, TierError) for error in errors)
    into = [pages(len(there.memory)) for _ in range(3)]
    with in_time():
        errors = tier.get([ReadRequest(there.key, [memory]) for memory in into])
    assert all(
        isinstance(error, TierError) and not isinstance(error, MissingError) for error in errors
    )
    with in_time(), pytest.raises(TierError):
        tier.find([there.key] * 1500)
    with in_time(), pytest.raises(TierError):
        tier.discard([make_sample(99).key])
    assert tier.peek(there.key) is None


def work_again(*tiers: MooncakeTier) -> None:
    """What the daemon does until a tier works again, and the proof that it does."""
    samples = [make_sample(n) for n in range(200, 210)]

    def works() -> bool:
        for tier in tiers:
            with contextlib.suppress(TierError):
                tier.tend()
        if put(tiers[0], samples) != [None] * len(samples):
            return False
        # On a loaded machine a lease may end before the bytes are there, which is an error too.
        return [read(tiers[0], sample) for sample in samples] == [None] * len(samples)

    def quietly() -> bool:
        with contextlib.suppress(TierError):
            return works()
        return False

    until(quietly, "a tier that works again")


@needs_mooncake
@pytest.mark.soak
class TestMooncake(TierSuite):
    """The conformance suite over a real master, of which each test starts one.

    What the tests below ask of records is the gate's.
    """

    discards_for_all = False

    @pytest.fixture(autouse=True)
    def storage(self, master: Master, node: MooncakeTier) -> None:
        self.master = master

    def make_tier(self) -> MooncakeTier:
        return self.master.tier()

    def make_away(self) -> MooncakeTier:
        return MooncakeTier(parse_tier(f"mooncake://127.0.0.1:{free_port()}", "tier"))


@needs_mooncake
def test_what_was_discarded_goes_when_its_lease_has_ended(
    master: Master, tier: MooncakeTier
) -> None:
    second_tier = master.tier()
    second_tier.open()
    sample = make_sample(1)
    assert put(tier, [sample]) == [None]
    assert read(second_tier, sample) is None
    tier.discard([sample.key])
    assert tier.peek(sample.key) is False
    assert tier.find([sample.key]) == [False]
    assert isinstance(read(tier, sample), MissingError)
    assert list(tier.keys()) == []
    assert list(second_tier.keys()) == [sample.key]

    def gone() -> bool:
        tier.tend()
        return not tier.gauges()["discards_waiting"]

    until(gone, "the end of the lease")
    assert isinstance(read(second_tier, sample), MissingError)
    assert list(second_tier.keys()) == []
    second_tier.close()


@needs_mooncake
def test_a_damaged_record_is_replaced_in_spite_of_its_lease(start: Callable[[str], Master]) -> None:
    master = start("1h")
    node = master.tier(size=NODE_BYTES)
    node.open()
    sample, wrong = make_sample(1), pages(len(make_sample(1).memory))
    assert node.put([WriteRequest(sample.key, [wrong])]) == [None]
    assert node.find([sample.key]) == [True]
    node.discard([sample.key], damaged=True)
    assert put(node, [sample]) == [None]
    assert read(node, sample) is None
    node.discard([sample.key])
    assert node.gauges()["discards_waiting"] == 1
    assert put(node, [sample]) == [None]
    assert node.gauges()["discards_waiting"] == 0
    assert read(node, sample) is None
    node.close()


@needs_mooncake
def test_a_damaged_record_that_could_not_be_removed_is_not_taken_for_the_new_one(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, wrong = make_sample(1), pages(len(make_sample(1).memory))
    assert tier.put([WriteRequest(sample.key, [wrong])]) == [None]

    def nobody(*_: object) -> None:
        raise TierError("the master does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(tier, "remove_keys", nobody)
        with pytest.raises(TierError):
            tier.discard([sample.key], damaged=True)
        errors = put(tier, [sample, make_sample(2)])
    assert isinstance(errors[0], TierError)
    assert errors[1] is None
    assert put(tier, [sample]) == [None]
    assert read(tier, sample) is None


@needs_mooncake
def test_records_go_with_the_node_that_gave_the_memory(master: Master) -> None:
    giver, taker = master.tier(size=NODE_BYTES), master.tier()
    giver.open()
    taker.open()
    sample = make_sample(1)
    assert put(taker, [sample]) == [None]
    assert read(giver, sample) is None
    giver.close()
    until(lambda: taker.find([sample.key]) == [False], "the end of what that node gave")
    assert isinstance(read(taker, sample), MissingError)
    assert isinstance(put(taker, [sample])[0], FullError)
    taker.close()


@needs_mooncake
def test_a_full_store_says_so(start: Callable[[str], Master]) -> None:
    master = start("1h")  # so that nothing can be evicted
    node = master.tier(size=16 << 20)
    node.open()
    samples = [make_sample(n, 1 << 20, 1) for n in range(20)]
    errors: list[TierError | None] = []
    for sample in samples:
        errors += put(node, [sample])
        node.find([sample.key])
    assert errors[0] is None
    assert isinstance(errors[-1], FullError)
    assert {type(error) for error in errors} == {type(None), FullError}
    assert read(node, samples[0]) is None
    node.close()


@needs_mooncake
@hasty
def test_a_killed_master_is_an_error_in_time_and_its_successor_works(
    master: Master, node: MooncakeTier, tier: MooncakeTier
) -> None:
    sample = make_sample(1)
    assert put(tier, [sample]) == [None]
    master.kill()
    nobody_answers(tier, sample)
    with in_time(), pytest.raises(TierError):
        tier.tend()
    with in_time(), pytest.raises(TierError):
        list(tier.keys())
    master.restart()
    work_again(tier, node)
    assert isinstance(read(tier, sample), MissingError)


@needs_mooncake
@hasty
@pytest.mark.soak
def test_a_stopped_master_holds_nobody_up(
    master: Master, node: MooncakeTier, tier: MooncakeTier
) -> None:
    sample = make_sample(1)
    assert put(tier, [sample]) == [None]
    master.process.send_signal(signal.SIGSTOP)
    nobody_answers(tier, sample)
    with in_time(), pytest.raises(TierError):
        list(tier.keys())
    assert client(tier).can_answer, "it was not the client that did not answer"
    with in_time(), pytest.raises(TierError):
        tier.tend()
    assert not client(tier).can_answer, "it might have been the client after all"
    second_tier = master.tier(timeout=HASTY_SECONDS)
    with in_time(), pytest.raises(TierError):
        second_tier.open()
    with in_time():
        second_tier.close()
    master.process.send_signal(signal.SIGCONT)
    work_again(tier, node)


@needs_mooncake
@hasty
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_client_that_ends_or_hangs_is_replaced(end: signal.Signals, tier: MooncakeTier) -> None:
    sample = make_sample(1)
    assert put(tier, [sample]) == [None]
    before = client(tier)
    os.kill(before.process.pid, end)
    nobody_answers(tier, sample)
    assert before.process.wait(DEADLINE_SECONDS) == -(
        signal.SIGKILL if end == signal.SIGSTOP else end
    )
    tier.tend()
    assert read(tier, sample) is None
    assert client(tier).process.pid != before.process.pid
    assert tier.gauges()["client_starts"] == 2
    os.kill(client(tier).process.pid, signal.SIGKILL)
    until(lambda: not client(tier).can_answer, "the end of the client")
    tier.tend()
    assert read(tier, sample) is None


@needs_mooncake
def test_the_children_end_with_their_parent(master: Master) -> None:
    code = (
        "import sys; from hybridkv.core.tier_urls import parse_tier;"
        " from hybridkv.tiers.mooncake.tier import MooncakeTier;"
        " tier = MooncakeTier(parse_tier(sys.argv[1], 'tier')); tier.open();"
        " print(tier.client.process.pid, tier.keeper.process.pid, flush=True); sys.stdin.read()"
    )
    url = f"mooncake://127.0.0.1:{master.port}?bytes=16MiB"
    command = [sys.executable, "-c", code, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)  # not even one that is stopped stays, once it goes on
        parent.kill()
    os.kill(pids[1], signal.SIGCONT)
    until(lambda: not any(_runs(pid) for pid in pids), "the end of the children")


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return state_of(Path(f"/proc/{pid}/stat")) != "Z"
    return False


@needs_mooncake
def test_no_master_is_an_error_in_time() -> None:
    port = free_port()
    tier = MooncakeTier(parse_tier(f"mooncake://127.0.0.1:{port}?timeout={HASTY_SECONDS}", "tier"))
    with in_time(), pytest.raises(TierError, match="no Mooncake master"):
        tier.open()
    assert tier.gauges()["client_starts"] == 0
    for call in (lambda: tier.find([make_sample(1).key]), tier.tend):
        with pytest.raises(TierError):
            call()
    assert isinstance(read(tier, make_sample(1)), TierError)
    tier.close()


class Started(subprocess.Popen[bytes]):
    """Remembers every child that was started."""

    all: ClassVar[list["Started"]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.all.append(self)


def no_more_threads(thread: threading.Thread) -> None:
    """As where the user may have no more (ulimit -u), or a control group's bound is reached."""
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("lacking", ["log", "memory", "interpreter", "thread"])
def test_a_child_that_cannot_be_started_leaves_nothing_open(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(Started, "all", [])
    options = "buffer=4MiB"
    if lacking == "log":
        options += "&log=/no/such/directory/log"
    elif lacking == "memory":
        options = "buffer=1000000TiB"
    elif lacking == "interpreter":
        monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    else:
        monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    with socket.create_server(("127.0.0.1", 0)) as server:
        tier = MooncakeTier(
            parse_tier(f"mooncake://127.0.0.1:{server.getsockname()[1]}?{options}", "tier")
        )
        gc.collect()
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(TierError, match="does not start") as caught:
                tier.tend()
            assert caught.value.__cause__, (
                "it holds on to the frames, so nothing is closed for being forgotten"
            )
            assert set(os.listdir("/proc/self/fd")) <= before
    assert [process.returncode for process in Started.all] == [-signal.SIGKILL] * (
        3 if lacking == "thread" else 0
    )


def test_a_library_that_is_not_there_is_a_setting_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open it')"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    with socket.create_server(("127.0.0.1", 0)) as server:
        tier = MooncakeTier(parse_tier(f"mooncake://127.0.0.1:{server.getsockname()[1]}", "tier"))
        with pytest.raises(ConfigError, match=r"hybridkv\[mooncake\].*libibverbs1.*cannot open it"):
            tier.open()
        tier.close()


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("mooncake://127.0.0.1:50051/path", "no path"),
        ("mooncake://127.0.0.1:port", "must name the master"),
        ("mooncake://me:secret@127.0.0.1:50051", "no users"),
        ("mooncake://127.0.0.1?bytes=1MiB", "16MiB"),
        ("mooncake://127.0.0.1?buffer=1MiB", "buffer"),
        ("mooncake://127.0.0.1?protocol=carrier", "protocol"),
        ("mooncake://127.0.0.1?admin=port", "admin"),
        ("mooncake://127.0.0.1?devise=mlx5_0", "did you mean 'device'"),
    ],
)
def test_settings_that_cannot_work(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        MooncakeTier(parse_tier(url, "tier"))
    assert "secret" not in str(caught.value)
