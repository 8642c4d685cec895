"""RESP2, the protocol of Valkey and Redis, on one connection.

Values go straight between the socket and the caller's memory. A client library would make a `bytes`
of each, and every other thread of the daemon would wait for the interpreter's lock meanwhile
(docs/decisions/0006).
"""

import contextlib
import io
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from hybridkv.tiers.contract import first_bytes
from hybridkv.tiers.remote import Deadline

BUFFER_BYTES = 64 << 10
LINE_BYTES_MAX = 16 << 10
BULK_BYTES_MAX = 64 << 20  # Of a bulk string that is no value, as of INFO, or SCAN's keys.
ELEMENTS_MAX = 1 << 20
DEPTH_MAX = 4  # Of CLUSTER SLOTS: ranges, nodes, and what is known of a node.
_OF_COMMANDS = frozenset(("OOM", "WRONGTYPE", "NOPERM", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"))
"""Refusals that say nothing of the connection. After any other, as READONLY of a server that became
a replica, the connection is left, because another one may lead to another server or login."""
_END = b"\r\n"


class ProtocolError(Exception):
    """The answer is not RESP. Nothing that follows on this connection can be trusted."""


class RefusedCommand(NamedTuple):
    """The server's error for one command. The connection can still be used."""

    code: str  # The error's first word, as OOM. The rest is not kept: it may repeat a password.
    target: str = ""  # Of MOVED and ASK: the node to ask instead, as 10.0.0.1:6379.


Reply: TypeAlias = "int | bytes | RefusedCommand | list[Reply] | None"


def command(*words: bytes, value: Sequence[memoryview] | None = None) -> list[bytes | memoryview]:
    """Returns the buffers of a command. The pieces of `value` are its last argument."""
    head = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    if value is None:
        return [b"*%d\r\n%b" % (len(words), head)]
    return [b"*%d\r\n%b$%d\r\n" % (len(words) + 1, head, sum(map(len, value))), *value, _END]


class RespConnection(io.RawIOBase):
    """One connection, for one thread at a time. Any other thread may call `abort`."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self.deadline = deadline  # Of the call that uses it now.
        self.used_at = 0.0  # When the last call ended, by the monotonic clock.
        self.is_refused = False  # The server refused something that another connection may get.
        self._buffered = io.BufferedReader(self, BUFFER_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        """Receive into memory. Only the buffer calls it, and passes large reads through."""
        self._sock.settimeout(self.deadline.seconds_left())
        count = self._sock.recv_into(into)
        if not count:
            raise ConnectionResetError("the server has closed the connection")
        return count

    def send_all(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Send all bytes of the buffers. Raises OSError."""
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                self._sock.settimeout(self.deadline.seconds_left())
                rest = rest[self._sock.send(rest) :]

    def reply(self, into: Sequence[memoryview] | None = None, depth: int = 0) -> Reply:
        """Returns the next answer. Raises OSError and ProtocolError.

        With `into` it is the answer of GET. The value's bytes go there if they fit, else they are
        dropped. Its length is returned.
        """
        line = self._buffered.readline(LINE_BYTES_MAX)
        if not line.endswith(_END):
            raise ProtocolError("a line without end")
        kind, rest = line[:1], line[1 : -len(_END)]
        if kind == b"-":
            refusal = _refusal(rest)
            self.is_refused = self.is_refused or refusal.code not in _OF_COMMANDS
            return refusal
        if into is not None and kind != b"$":
            raise ProtocolError("an answer that is no value")
        if kind == b"+":
            return rest
        if kind not in (b":", b"$", b"*"):
            raise ProtocolError("an answer of no known kind")
        try:
            number = int(rest)
        except ValueError:
            raise ProtocolError("no number") from None
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"$":
            return self._bulk(number, into)
        if number > ELEMENTS_MAX or depth == DEPTH_MAX:
            raise ProtocolError("a list that is too long or too deep")
        return [self.reply(None, depth + 1) for _ in range(number)]

    def _bulk(self, length: int, into: Sequence[memoryview] | None) -> bytes | int:
        answer: bytes | int = length
        if into is None:
            if length > BULK_BYTES_MAX:
                raise ProtocolError("a bulk string that is too long")
            answer = self._buffered.read(length)
        elif length <= sum(map(len, into)):
            for piece in first_bytes(into, length):
                self._buffered.readinto(piece)
        else:
            rest = length
            while rest:
                rest -= len(self._buffered.read1(min(rest, BUFFER_BYTES)))
        if self._buffered.read(len(_END)) != _END:
            raise ProtocolError("a bulk string without end")
        return answer

    def abort(self) -> None:
        """End the connection now. An error wakes a thread that waits for it."""
        with contextlib.suppress(OSError):  # It may have ended already.
            # A TLS socket's own method would forget the cipher under a thread that is reading.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Only the thread that uses it may call this."""
        super().close()
        self._sock.close()


def _refusal(line: bytes) -> RefusedCommand:
    if line.startswith(b"ERR max number of clients"):
        return RefusedCommand("MAXCLIENTS")  # the only general error that passes
    words = line.decode("ascii", "replace").split(" ")
    if words[0] in ("MOVED", "ASK") and len(words) == 3:
        return RefusedCommand(words[0], words[2])
    return RefusedCommand(words[0] if words[0].isalnum() else "ERR")
