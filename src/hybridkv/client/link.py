"""A connection to the daemon that never blocks, so that hooks of the engine can use it."""

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable

import msgspec

from hybridkv.shm.access import is_trusted, peer_of
from hybridkv.wire.codec import Frames, WireError, append, decode_reply, encode
from hybridkv.wire.messages import PROTOCOL_VERSION, Error, Hello, Reply, Request, Welcome
from hybridkv.wire.protocol import ErrorCode

RECONNECT_SECONDS = 0.1
SEND_QUEUE_BYTES_MAX = 8 << 20  # A connection is ended where the daemon leaves more unread.
FLUSH_BYTES = 1 << 18  # A longer queue is sent without waiting for `flush`.
RECEIVE_BYTES = 1 << 18
HELLO_SECONDS = 2.0


class Link:
    """One connection, which is made again after a loss. Each `now` is seconds of one clock."""

    def __init__(
        self,
        socket_path: str,
        hello: Hello,
        on_loss: Callable[[str], None],
        group: int | None = None,
    ) -> None:
        """`on_loss` is called with the reason, in words, whenever the connection is lost.

        A daemon of another user is greeted if it is a member of `group`.
        """
        self.group = group
        self.welcome: Welcome | None = None
        """The daemon's answer to the greeting while the connection can be used, else None."""
        self.is_served = True  # False where nobody listened at the last attempt to connect.
        self.is_other_version = False  # True where the last refusal was for the protocol's version.
        self.refusal: str | None = None
        """The reason why the daemon refused the last greeting. The next one is HELLO_SECONDS later.
        """
        self._socket_path = socket_path
        self._hello = hello
        self._on_loss = on_loss
        self.greetings = hello.session
        """The number of the last greeting. The first one has `hello.session` + 1."""
        self.sock: socket.socket | None = None
        self._frames = Frames()
        self._in = memoryview(bytearray(RECEIVE_BYTES))
        """The buffer of every `poll`, so that no call allocates memory."""
        self._out = bytearray()
        self._retry_at = 0.0
        self._hello_deadline = 0.0

    @property
    def fd(self) -> int | None:
        """The descriptor to wait on, for callers that may wait (never the engine's hooks)."""
        return self.sock.fileno() if self.sock is not None else None

    def poll(self, now: float) -> list[Reply]:
        """Connect or receive, whichever is due. Returns the replies in order, without Welcome.

        Replies that came before the end of a connection are returned first, and the next call
        reports the loss, so that no reply of a lost connection seems to belong to a new one.
        """
        if self.sock is None:
            if now < self._retry_at:
                return []
            self._connect(now)
        replies: list[Reply] = []
        while self.sock is not None and self._receive(self.sock, replies, now):
            pass
        if self.sock is not None and self.welcome is None and now > self._hello_deadline:
            self._lose("the daemon does not greet", now)
        return replies if self.flush(now) else []

    def send(self, request: Request, now: float) -> bool:
        """Queue a message, and send as much of the queue as fits.

        Returns False where no connection is usable, or the queue is full.
        """
        return self.queue(request, now) and self.flush(now)

    @property
    def lock(self) -> int:
        """The byte of each arena that is locked while it is mapped. The hello names it."""
        return self._hello.lock

    @property
    def is_greeting(self) -> bool:
        """True while the daemon has a greeting that it has not answered."""
        return self.sock is not None and self.welcome is None

    @property
    def has_connection(self) -> bool:
        """True unless the daemon has closed the connection, also while replies are unread."""
        if self.sock is None:
            return False
        poller = select.poll()
        poller.register(self.sock, select.POLLHUP)
        return not poller.poll(0)

    def queue(self, request: Request, now: float) -> bool:
        """Queue a message as `send` does. It leaves with the next `flush` or `poll`."""
        if self.sock is None or self.welcome is None:
            return False
        append(self._out, request)
        if len(self._out) > FLUSH_BYTES:
            self.flush(now)
        if len(self._out) > SEND_QUEUE_BYTES_MAX and self.sock is not None:
            self._lose("the daemon does not read", now)
        return self.sock is not None

    @property
    def has_unsent(self) -> bool:
        """True while messages wait because the daemon did not read the ones before."""
        return bool(self._out)

    def flush(self, now: float) -> bool:
        """Send as much of the queue as fits. Returns False where the connection is lost."""
        try:
            while self._out and self.sock is not None:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                self._lose(f"connection broken: {error.strerror}", now)
            # After a reset the next poll still reads the daemon's last replies, then the end.
            self._out.clear()
        return self.sock is not None

    def greet_with(self, hello: Hello) -> None:
        """Use another hello from the next connection on.

        A connection that has no welcome yet is made anew at once.
        """
        self._hello = hello
        if self.sock is not None and self.welcome is None:
            # The daemon may still answer the old greeting.
            self.sock.close()
            self.sock = None
            self._retry_at = 0.0

    def drop_connection(self, why: str, now: float) -> None:
        """End the connection, if there is one. A later `poll` makes another."""
        if self.sock is not None:
            self._lose(why, now)

    def close(self, farewell: Request | None = None) -> None:
        """End the connection for good. `farewell` is sent if there is room for it."""
        if self.sock is not None:
            if farewell is not None and self.welcome is not None:
                with contextlib.suppress(OSError):
                    # The last message is sent only if the daemon is there and the buffer has room.
                    self.sock.send(bytes(self._out) + encode(farewell))
            self.sock.close()
            self.sock = None
        self.welcome = None
        self._retry_at = float("inf")

    def _receive(self, sock: socket.socket, replies: list[Reply], now: float) -> bool:
        """Append the next replies to `replies`. Returns True where there may be more."""
        received, why = 0, "connection closed by the daemon"
        try:
            received = sock.recv_into(self._in)
        except BlockingIOError:
            return False
        except OSError as error:
            why = f"connection broken: {error.strerror}"
        if not received:
            if not replies:
                self._lose(why, now)
            return False
        try:
            for body in self._frames.feed(self._in[:received]):
                self._take(decode_reply(body), replies, now)
                if self.sock is None:
                    break
        except WireError as error:
            self._lose(f"nonsense from the daemon: {error}", now)
        return received == RECEIVE_BYTES

    def _take(self, reply: Reply, replies: list[Reply], now: float) -> None:
        """Append a reply, or take the answer to the greeting."""
        if self.welcome is not None:
            replies.append(reply)
        elif isinstance(reply, Welcome) and reply.version == PROTOCOL_VERSION:
            self.welcome, self.refusal = reply, None
        elif self.sock is not None:
            unexpected = f"unexpected greeting {type(reply).__name__}"
            self.refusal = reply.message if isinstance(reply, Error) else unexpected
            self.is_other_version = isinstance(reply, Error) and reply.code == ErrorCode.VERSION
            self._lose(self.refusal, now)
            self._retry_at = now + HELLO_SECONDS

    def _connect(self, now: float) -> None:
        # A connection that lasted is made anew at once, and one that does not last is not.
        self._retry_at = now + RECONNECT_SECONDS
        sock: socket.socket | None = None
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        try:
            sock = socket.socket(socket.AF_UNIX, kind)
            sock.connect(self._socket_path)
        except OSError as error:
            self.is_served = error.errno not in (errno.ENOENT, errno.ECONNREFUSED)
            # EAGAIN is a full backlog: a Unix socket has no connection in progress to wait for.
            # Without a socket the process has no descriptor left at this moment.
            if sock is not None:
                sock.close()
            if error.errno in (errno.EACCES, errno.EPERM):
                self.refusal = _closed(self._socket_path)
            return
        self.is_served = True
        if not is_trusted(sock, self.group):
            sock.close()
            self.refusal = f"{self._socket_path} is served by another user"
            self._retry_at = now + HELLO_SECONDS
            return
        self.sock = sock
        self._frames = Frames()
        self.greetings += 1
        hello = msgspec.structs.replace(self._hello, session=self.greetings)
        self._out = bytearray(encode(hello))
        self._hello_deadline = now + HELLO_SECONDS
        self.flush(now)

    def _lose(self, why: str, now: float) -> None:
        assert self.sock is not None
        with contextlib.suppress(OSError):
            # The connection is lost already, and closing it may say so once more.
            self.sock.close()
        self.sock = None
        self.welcome = None
        self._out.clear()
        self._on_loss(why)


def _closed(path: str) -> str:
    """Return why a socket may not be connected to: the owner of what can be seen of its path."""
    seen = path
    while seen != "/" and not os.path.lexists(seen):
        seen = os.path.dirname(seen)
    owner, user = os.lstat(seen).st_uid, os.geteuid()
    if owner == user:
        return f"{path} is closed to you (see the modes of its directories)"
    return f"{path} belongs to user id {owner}, and you are user id {user}"


def peer_pid(socket_path: str) -> int:
    """Return the id of the process that listens at a socket, or -1 where none does.

    The id is 0 for a process of another pid namespace.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(socket_path)
        except OSError:
            return -1
        return peer_of(sock).pid
