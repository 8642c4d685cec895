"""Helpers of the tiers on a network: deadlines of calls, batches, copies, connections."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from hybridkv.core.keys import KEY_BYTES
from hybridkv.tiers.contract import ReadRequest, TierError, WriteRequest

FIND_SHARE = 0.75
"""After this share of `timeout`, `find` returns what it knows, so that it is never late."""
NAME_LOOKUPS_MAX = 4
COPY_STEP_BYTES = 1 << 20
"""The most that is copied at once, since other threads wait for the interpreter's lock."""
KEY_DIGITS = f"[0-9a-f]{{{2 * KEY_BYTES}}}"  # The pattern of a key in hexadecimal digits.

Item = TypeVar("Item", ReadRequest, WriteRequest)

name_lookups = threading.BoundedSemaphore(NAME_LOOKUPS_MAX)


class Deadline:
    """The time by which a call must be over."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def seconds_left(self) -> float:
        """Returns the seconds that are left, more than 0. Raises TimeoutError where none are."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this call is over")
        return left


def sizes_of(items: Sequence[ReadRequest | WriteRequest]) -> list[int]:
    """Returns the bytes of each item's record."""
    return [sum(map(len, item.pieces)) for item in items]


def batches(sizes: Sequence[int], bytes_max: int, count_max: int) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges that cover `sizes` in order, within both bounds if possible.

    ::

        sizes      3   3   9   1   1        bytes_max 6
        ranges   [0       2)[2 3)[3     5)
    """
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and (total + size > bytes_max or at - start == count_max):
            yield start, at
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)


def in_batches(
    items: Sequence[Item],
    bytes_max: int,
    count_max: int,
    act: Callable[[Sequence[Item], Sequence[int]], Sequence[TierError | None]],
) -> list[TierError | None]:
    """Call `act` with the items and sizes of one batch at a time. Returns each item's error.

    Where `act` raises TierError, all items that are left have that error and are not tried.
    """
    sizes = sizes_of(items)
    results: list[TierError | None] = []
    for start, end in batches(sizes, bytes_max, count_max):
        try:
            results += act(items[start:end], sizes[start:end])
        except TierError as error:
            return results + [error] * (len(items) - len(results))
    return results


def copy_steps(
    pieces: Sequence[memoryview], memory: memoryview, offset: int = 0
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yields parts of the pieces, each with its part of `memory`, which begins at `offset`.

    A part has at most COPY_STEP_BYTES.
    """
    for piece in pieces:
        for start in range(0, len(piece), COPY_STEP_BYTES):
            part = piece[start : start + COPY_STEP_BYTES]
            yield part, memory[offset : offset + len(part)]
            offset += len(part)


def dial(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Returns a connection to the first address of `host` that answers. Raises OSError."""
    error: OSError = ConnectionError("the name has no address")
    for family, kind, protocol, _, address in _addresses(host, port, deadline):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(deadline.seconds_left())
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as failed:
            sock.close()
            error = failed
        else:
            return sock
    raise error


def _addresses(host: str, port: int, deadline: Deadline) -> list[tuple[Any, ...]]:
    """Returns what getaddrinfo returns for `host`. Raises OSError.

    The system's resolver has no timeout, so a thread calls it. A thread that takes too long is
    abandoned. At most NAME_LOOKUPS_MAX threads run at once.
    """
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        return resolve(flags=socket.AI_NUMERICHOST)
    except UnicodeError:
        raise ConnectionError("this can be no name of a host") from None
    except socket.gaierror:
        pass
    if not name_lookups.acquire(timeout=deadline.seconds_left()):
        raise TimeoutError("the resolver does not answer")
    answer: Future[list[tuple[Any, ...]]] = Future()

    def ask() -> None:
        try:
            answer.set_result(resolve())
        except OSError as error:
            answer.set_exception(error)
        finally:
            name_lookups.release()

    try:
        threading.Thread(target=ask, name="hybridkv-resolve", daemon=True).start()
    except RuntimeError as error:
        name_lookups.release()
        raise OSError(f"the resolver cannot be asked: {error}") from None
    try:
        return answer.result(deadline.seconds_left())
    except TimeoutError:
        raise TimeoutError("the resolver does not answer") from None
