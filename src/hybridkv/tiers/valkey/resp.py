"""RESP2, the protocol of Valkey and Redis, on one connection.

Values go straight between the socket and the caller's memory.  A client library makes a `bytes` of
each, and every other thread of the daemon waits for the interpreter's lock meanwhile
(docs/decisions/0006).
"""

import contextlib
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from hybridkv.tiers.remote import Deadline

BUFFER_BYTES = 64 << 10
LINE_BYTES_MAX = 16 << 10
BULK_BYTES_MAX = 64 << 20
"""The size of a bulk string that is no value: of INFO, or of SCAN's keys."""
ELEMENTS_MAX = 1 << 20
DEPTH_MAX = 2
_END = b"\r\n"


class ProtocolError(Exception):
    """The answer is not RESP; nothing that follows on this connection can be trusted."""


class RefusedCommand(NamedTuple):
    """The server's own error for one command; the connection is as good as before."""

    code: str
    """The error's first word, as OOM. The rest is not kept: it may repeat a password."""


Reply: TypeAlias = "int | bytes | RefusedCommand | list[Reply] | None"


def command(*words: bytes) -> bytes:
    """The bytes of a command."""
    return b"*%d\r\n" % len(words) + b"".join(
        b"$%d\r\n%b\r\n" % (len(word), word) for word in words
    )


def command_head(words: Sequence[bytes], last_bytes: int) -> bytes:
    """The bytes of a command before its last argument of `last_bytes`, which CRLF follows."""
    head = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n%b$%d\r\n" % (len(words) + 1, head, last_bytes)


class RespConnection:
    """One connection, used by one thread at a time; `abort` may come from any other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        """What was received and not yet taken is [start, end) of the buffer."""

    def send(self, buffers: Iterable[bytes | memoryview], deadline: Deadline) -> None:
        """Send everything; raises OSError."""
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                self._sock.settimeout(deadline.left())
                rest = rest[self._sock.send(rest) :]

    def reply(self, deadline: Deadline, depth: int = 0) -> Reply:
        """The next answer; raises OSError and ProtocolError."""
        kind, rest = self._head(deadline)
        if kind == b"+":
            return rest
        if kind == b"-":
            return _refusal(rest)
        if kind == b":":
            return _number(rest)
        if kind == b"$" and (length := _number(rest)) <= BULK_BYTES_MAX:
            if length < 0:
                return None
            bulk = bytearray(length)
            self._land([memoryview(bulk)], deadline)
            self._take_end(deadline)
            return bytes(bulk)
        if kind == b"*" and (count := _number(rest)) <= ELEMENTS_MAX and depth < DEPTH_MAX:
            return None if count < 0 else [self.reply(deadline, depth + 1) for _ in range(count)]
        raise ProtocolError("an answer of no known kind")

    def value(self, into: Sequence[memoryview], deadline: Deadline) -> int | RefusedCommand | None:
        """The length of the next answer, a value, or None where there is none.

        Its bytes go to `into` if that is as long, else nowhere. Raises as `reply` does.
        """
        kind, rest = self._head(deadline)
        if kind == b"-":
            return _refusal(rest)
        if kind != b"$":
            raise ProtocolError("an answer that is no value")
        if (length := _number(rest)) < 0:
            return None
        if length == sum(map(len, into)):
            self._land(into, deadline)
        else:
            self._skip(length, deadline)
        self._take_end(deadline)
        return length

    def abort(self) -> None:
        """End the connection now; a thread that waits for it is woken by an error."""
        with contextlib.suppress(OSError):  # it may have ended already
            # A TLS socket's own method would forget the cipher under a thread that is reading.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; only the thread that uses it may."""
        self._sock.close()

    def _head(self, deadline: Deadline) -> tuple[bytes, bytes]:
        while (at := self._buffer.find(_END, self._start, self._end)) < 0:
            if self._end - self._start >= LINE_BYTES_MAX:
                raise ProtocolError("a line without end")
            self._more(deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + len(_END)
        return line[:1], line[1:]

    def _more(self, deadline: Deadline) -> None:
        waiting = self._end - self._start
        if self._start:
            self._view[:waiting] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, waiting
        self._end += self._receive(self._view[self._end :], deadline)

    def _receive(self, into: memoryview, deadline: Deadline) -> int:
        self._sock.settimeout(deadline.left())
        count = self._sock.recv_into(into)
        if not count:
            raise ConnectionResetError("the server has closed the connection")
        return count

    def _land(self, into: Sequence[memoryview], deadline: Deadline) -> None:
        for rest in into:
            while rest:
                if count := min(self._end - self._start, len(rest)):
                    rest[:count] = self._view[self._start : self._start + count]
                    self._start += count
                else:
                    count = self._receive(rest, deadline)
                rest = rest[count:]

    def _skip(self, length: int, deadline: Deadline) -> None:
        while length:
            if self._start == self._end:
                self._start = self._end = 0
                self._more(deadline)
            count = min(self._end - self._start, length)
            self._start += count
            length -= count

    def _take_end(self, deadline: Deadline) -> None:
        end = bytearray(len(_END))
        self._land([memoryview(end)], deadline)
        if end != _END:
            raise ProtocolError("a bulk string without end")


def _refusal(line: bytes) -> RefusedCommand:
    if line.startswith(b"ERR max number of clients"):
        return RefusedCommand("MAXCLIENTS")  # the only general error that passes
    word = line.split(b" ", 1)[0].decode("ascii", "replace")
    return RefusedCommand(word if word.isalnum() else "ERR")


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError("no number") from None
