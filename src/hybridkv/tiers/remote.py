"""What the tiers behind a network share: deadlines of calls, batches, copies, connections."""

import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence

NAME_LOOKUPS_MAX = 4
COPY_STEP_BYTES = 1 << 20
"""One copy is of so much, since other threads wait for the interpreter's lock meanwhile."""

_lookups = threading.BoundedSemaphore(NAME_LOOKUPS_MAX)


class Deadline:
    """When a call must be over."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, more than 0; raises TimeoutError where there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this call is over")
        return left


def batches(sizes: Sequence[int], bytes_max: int, count_max: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges that cover `sizes` in order, none empty, within both bounds if possible.

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


def copy_steps(pieces: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """(offset, part): the parts of the pieces in order, at most COPY_STEP_BYTES each."""
    offset = 0
    for piece in pieces:
        for start in range(0, len(piece), COPY_STEP_BYTES):
            part = piece[start : start + COPY_STEP_BYTES]
            yield offset, part
            offset += len(part)


def dial(host: str, port: int, deadline: Deadline) -> socket.socket:
    """A connection to the first address of `host` that answers; raises OSError."""
    error: OSError = ConnectionError("the name has no address")
    for family, address in _addresses(host, port, deadline):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.left())
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as failed:
            sock.close()
            error = failed
        else:
            return sock
    raise error


def _addresses(host: str, port: int, deadline: Deadline) -> list[tuple[int, tuple[str, int]]]:
    """What `host` resolves to.

    The system's resolver knows no timeout, so a thread asks it, which is left behind where that
    takes too long; there are no more than NAME_LOOKUPS_MAX of them.
    """
    try:
        return _ask_resolver(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    if not _lookups.acquire(timeout=deadline.left()):
        raise TimeoutError("the resolver does not answer")
    answers: queue.SimpleQueue[list[tuple[int, tuple[str, int]]] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_ask_resolver(host, port, 0))
        except OSError as error:
            answers.put(error)
        finally:
            _lookups.release()

    try:
        threading.Thread(target=ask, name="hybridkv-resolve", daemon=True).start()
    except RuntimeError as error:
        _lookups.release()
        raise OSError(f"the resolver cannot be asked: {error}") from None
    try:
        answer = answers.get(timeout=deadline.left())
    except queue.Empty:
        raise TimeoutError("the resolver does not answer") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _ask_resolver(host: str, port: int, flags: int) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise ConnectionError("this can be no name of a host") from None
    return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]
