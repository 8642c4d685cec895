"""What real file systems refuse for longer than a minute is said, with its cure, until it ends.

The clock is the test's, and the tier's jobs are done by hand.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridkv.cli.top import frame
from hybridkv.core.refusals import REFUSALS, Refusal
from hybridkv.observe.status import StatusReport, health
from tests.fault.fuse import FaultyFs, Op, mounted
from tests.fault.test_tier_faults import fill
from tests.unit.daemon.harness import engine
from tests.unit.daemon.tier_node import FULL, Node

STEP_SECONDS = 3.0


class Storage(NamedTuple):
    """A tier's directory, and what others do to it."""

    root: Path
    harm: Callable[[], object]  # Done before each object is stored.
    mend: Callable[[], object]


@contextlib.contextmanager
def full(place: Path) -> Iterator[Storage]:
    """Others fill the file system, and leave a little of it now and then."""
    with mounted("tmpfs", place / "small", "4m"):
        root, ballast = place / "small/tier", place / "small/ballast"
        root.mkdir()
        ballast.touch()
        yield Storage(root, lambda: fill(root), lambda: os.truncate(ballast, 0))


@contextlib.contextmanager
def read_only(place: Path) -> Iterator[Storage]:
    with mounted("tmpfs", place / "small", "4m") as remount:
        root = place / "small/tier"
        root.mkdir()
        yield Storage(root, lambda: remount("ro"), lambda: remount("rw"))


def failing(number: int, *ops: Op) -> Callable[[Path], contextlib.AbstractContextManager[Storage]]:
    """A file system that answers with an error number."""

    @contextlib.contextmanager
    def storage(place: Path) -> Iterator[Storage]:
        for name in ("backing", "shown"):
            (place / name).mkdir()
        with FaultyFs(place / "backing", place / "shown") as faulty:
            yield Storage(faulty.mountpoint, lambda: faulty.fail(number, *ops), faulty.heal)

    return storage


CASES = {
    "full": (Refusal.NO_SPACE, full),
    "read-only": (Refusal.READ_ONLY, read_only),
    "quota": (Refusal.QUOTA, failing(errno.EDQUOT, Op.WRITE)),
    "permission": (Refusal.PERMISSION, failing(errno.EACCES, Op.CREATE, Op.MKDIR)),
}


def store_for(node: Node, seconds: float, numbers: Iterator[int], harm: object = None) -> None:
    for _ in range(round(seconds / STEP_SECONDS)):
        if callable(harm):
            harm()
        node.store_if_room(FULL, [next(numbers)])
        node.tick(STEP_SECONDS)
        node.work()


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_is_said_until_it_ends(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal, make = CASES[case]
    numbers = iter(range(1, 250))
    with make(tmp_path) as storage:
        node = Node(f"disk://{storage.root}?bytes=1GiB")
        engine(node.daemon, 1, FULL)
        node.checks = False
        store_for(node, 6, numbers)
        (line,) = node.daemon.tiers
        assert line.counters["objects_written"]
        store_for(node, 75, numbers, storage.harm)
        assert line.refusals.keys() == {refusal}
        assert line.is_open, "what is there is read"
        snapshot = node.daemon.view.snapshot(node.now)
        (text,) = [problem.text for problem in health(snapshot) if problem.level == "bad"]
        assert text.endswith(f"{REFUSALS[refusal].cause}; {REFUSALS[refusal].cure}")
        page = frame(StatusReport().make(snapshot), "d.sock", 80, 24).plain
        assert page.startswith("hybridkv  1 problem")
        assert REFUSALS[refusal].cure in " ".join(page.split())
        assert "…" not in page.partition("helping")[0]
        assert "refuses" in page.partition("last min")[0]
        assert sum("refuses objects" in message for message in caplog.messages) == 1
        storage.mend()
        store_for(node, 75, numbers)
        assert not line.refusals
        assert sum("takes objects again" in message for message in caplog.messages) == 1
        assert line.counters["times_reopened"] == 0


def test_a_bound_below_an_object_is_said(tmp_path: Path) -> None:
    node = Node(f"disk://{tmp_path}?bytes=4KiB")
    engine(node.daemon, 1, FULL)
    store_for(node, 75, iter(range(1, 250)))
    assert node.daemon.tiers[0].refusals.keys() == {Refusal.BOUND}
