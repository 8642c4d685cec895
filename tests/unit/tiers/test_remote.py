"""Batches and deadlines."""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.tiers import remote
from hybridkv.tiers.remote import NAME_LOOKUPS_MAX, Deadline, batches, dial


@given(st.lists(st.integers(0, 50)), st.integers(1, 60), st.integers(1, 5))
def test_batches_cover_everything_once(sizes: list[int], bytes_max: int, count_max: int) -> None:
    at = 0
    for start, end in batches(sizes, bytes_max, count_max):
        assert start == at < end <= start + count_max
        assert end == start + 1 or sum(sizes[start:end]) <= bytes_max
        full = end - start == count_max or sum(sizes[start : end + 1]) > bytes_max
        assert end == len(sizes) or full
        at = end
    assert at == len(sizes)


def test_a_deadline_that_is_over_is_an_error() -> None:
    assert 0 < Deadline(60.0).seconds_left() <= 60.0
    with pytest.raises(TimeoutError):
        Deadline(0.0).seconds_left()


def test_a_name_that_nobody_knows_is_an_error_in_time() -> None:
    for host in ("no-such-name.invalid", "x" * 80 + ".invalid", "\udcff"):
        with pytest.raises(OSError):
            dial(host, 1, Deadline(5.0)).close()


def no_more_threads(thread: threading.Thread) -> None:
    """As where the user may have no more (ulimit -u), or a control group's bound is reached."""
    raise RuntimeError("can't start new thread")


def test_names_are_found_again_after_a_shortage_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "name_lookups", threading.BoundedSemaphore(NAME_LOOKUPS_MAX))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with monkeypatch.context() as shortage:
            shortage.setattr(threading.Thread, "start", no_more_threads)
            for _ in range(NAME_LOOKUPS_MAX):
                with pytest.raises(OSError, match="can't start new thread"):
                    dial("localhost", port, Deadline(5.0))
        dial("localhost", port, Deadline(5.0)).close()
