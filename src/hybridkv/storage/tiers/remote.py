"""What the tiers behind a network share: one deadline for a call, however many steps it takes, and bounded batches."""

import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence

NAME_LOOKUPS_MAX = 4

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
    """Half-open ranges that cover `sizes` in order, each of at most `count_max` and `bytes_max`, but never empty.

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


def dial(host: str, port: int, deadline: Deadline) -> socket.socket:
    """A connection to the first address of `host` that answers; raises OSError, which TimeoutError is one of."""
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

    The system's resolver knows no timeout, so it is asked by a thread of its own that is left behind where it takes too
    long; no more than NAME_LOOKUPS_MAX of them at once.
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
