"""The daemon's sockets: bytes in, `Daemon.handle`, bytes out. Clients have turns, in order."""

import errno
import logging
import math
import os
import selectors
import socket
import time
from collections import deque
from pathlib import Path

from hybridkv.core.keys import tenant_of_user
from hybridkv.core.sizes import format_size
from hybridkv.daemon.handlers import Daemon
from hybridkv.daemon.sessions import Process
from hybridkv.shm.access import is_trusted, peer_of
from hybridkv.wire.codec import Frames, WireError, decode_request, encode
from hybridkv.wire.messages import Error, Reply
from hybridkv.wire.protocol import CLOSING, ErrorCode

logger = logging.getLogger("hybridkv.daemon")

CONNECTIONS_MAX = 4096
DRAIN_BYTES_MAX = 4 << 20
"""The most that is read from a connection after its process ended. A socket's buffer holds less."""
RECEIVE_BYTES = 1 << 16  # Read from one client before the next one's turn: most lookups are less.
TURN_SECONDS = 0.002  # The length of one client's turn, because many small requests are also work.
SEND_QUEUE_BYTES_MAX = 64 << 20  # A client that leaves this much unread is disconnected.
LISTEN_AGAIN_SECONDS = 0.2  # The pause after a failed accept, unless a connection ends before.
SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
"""Errors of a machine that is short of descriptors or memory for the moment."""


class ClientSocket:
    """One accepted socket and its buffers."""

    def __init__(self, sock: socket.socket, number: int, process: Process | None) -> None:
        self.sock = sock
        self.number = number
        self.process = process
        self.frames = Frames()
        self.received: deque[bytes] = deque()
        """Messages that wait for the client's turn. Nothing more is read before that."""
        self.unsent = bytearray()
        self.is_closing = False  # True once the connection ends when `unsent` is empty.


class ProcessWatcher:
    """Processes of clients, each with a descriptor at the selector, whose data is the Process.

    A closed socket does not prove that its process copies no more.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.pidfds: dict[Process, int] = {}

    def watch(self, process: Process) -> bool:
        """Watch for the end of a process. Returns False where it has ended already.

        Raises OSError on a shortage.
        """
        if process in self.pidfds:
            return True
        try:
            fd = os.pidfd_open(process.pid)
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            return False
        is_same = False
        try:
            is_same = process_of(process.pid) == process
        finally:
            if not is_same:
                os.close(fd)
        if is_same:
            self.pidfds[process] = fd
            self.selector.register(fd, selectors.EVENT_READ, process)
        return is_same


class ClientSockets:
    """The listener and every accepted socket."""

    def __init__(
        self,
        daemon: Daemon,
        processes: ProcessWatcher,
        listener: socket.socket,
        group: int | None = None,
        has_user_quotas: bool = False,
    ) -> None:
        self._daemon = daemon
        self._group = group  # Its members are served too.
        self._counts_users = has_user_quotas  # True where users have quotas.
        self._selector = processes.selector
        self._processes = processes
        self.listener = listener
        self._listen_at = math.inf
        """While no client can be accepted: when to try again, in monotonic seconds."""
        self._is_short = False  # True where descriptors were lacking for the last client.
        self.connected: dict[int, ClientSocket] = {}  # By number.
        self._last_number = 0
        self.waiting: dict[ClientSocket, None] = {}
        """Clients whose messages wait for their next turn, in order."""
        self._selector.register(listener, selectors.EVENT_READ, self.accept)

    def handle_events(self, client: ClientSocket, events: int) -> None:
        """Handle the events that the selector reports for a client: read, write, or both."""
        is_readable = events & selectors.EVENT_READ and not client.received
        if is_readable and client.number in self.connected:
            self._receive(client, TURN_SECONDS)
        if events & selectors.EVENT_WRITE and client.number in self.connected:
            self._flush(client)

    def listens_at(self, now: float) -> float:
        """Return when clients are accepted again, or infinity while they are accepted."""
        if self._listen_at <= now:
            self._listen()
        return self._listen_at

    def handle_messages(self, client: ClientSocket, seconds: float) -> None:
        """Handle a client's messages for at most `seconds`. The rest waits for its next turn."""
        self.waiting.pop(client, None)
        until = time.monotonic() + seconds
        try:
            while client.received and not client.is_closing and client.number in self.connected:
                if time.monotonic() > until:
                    self.waiting[client] = None
                    return
                request = decode_request(client.received.popleft())
                reply = self._daemon.handle(client.number, request, time.monotonic())
                if reply is not None:
                    client.is_closing = isinstance(reply, Error) and reply.code in CLOSING
                    self.queue_reply(client, reply)
        except WireError as error:
            self._refuse(client, ErrorCode.WIRE, str(error))
        except Exception:  # the supervised boundary: one client's fault must not end the others'
            logger.exception("a request failed inside the daemon; its connection is closed")
            self._refuse(client, ErrorCode.INTERNAL, "the daemon failed on this request")
        client.received.clear()

    def queue_reply(self, client: ClientSocket, reply: Reply) -> None:
        """Queue a message, and send as much of the queue as fits."""
        try:
            frame = encode(reply)
        except WireError as error:
            frame = encode(self._daemon.refuse(reply.id, ErrorCode.TOO_LARGE, str(error)))
        client.unsent += frame
        self._flush(client)

    def disconnect(self, client: ClientSocket) -> None:
        """Close a client's connection. Nothing is done where it is closed already."""
        if self.connected.pop(client.number, None) is None:
            return
        self.waiting.pop(client, None)
        self._selector.unregister(client.sock)
        client.sock.close()
        self._listen()
        self._daemon.on_disconnect(client.number)
        if client.process is not None:
            self._unwatch(client.process)

    def on_process_ended(self, process: Process, fd: int) -> None:
        """The process that descriptor `fd` watches has ended."""
        if self._processes.pidfds.get(process) != fd:
            # Another event of this turn ended the watch, and the descriptor may be reused.
            return
        for client in self._clients_of(process):
            # Its last messages, such as a commit, may still be in the socket.
            self.handle_messages(client, math.inf)
            for _ in range(DRAIN_BYTES_MAX // RECEIVE_BYTES):
                if client.number not in self.connected or not self._receive(client, math.inf):
                    break
            self.disconnect(client)
        self._daemon.sessions.on_process_ended(process)
        self._unwatch(process)

    def accept(self) -> None:
        """Accept the next client of the listener's queue."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:
            if error.errno in SHORTAGES:
                # Clients stay in the listener's queue, which would wake the loop again and again.
                self._selector.unregister(self.listener)
                self._listen_at = time.monotonic() + LISTEN_AGAIN_SECONDS
                self._warn_of_shortage(error)
            return
        sock.setblocking(False)
        peer = peer_of(sock)
        self._last_number += 1
        process, shortage = None, None
        try:
            process = process_of(peer.pid)
            if process is not None and not self._processes.watch(process):
                process = None
        except OSError as error:
            shortage = error
        client = self.connected[self._last_number] = ClientSocket(sock, self._last_number, process)
        self._selector.register(sock, selectors.EVENT_READ, client)
        tenant = tenant_of_user(peer.uid) if self._counts_users else 0
        self._daemon.sessions.on_connect(client.number, process, tenant)
        code, message = ErrorCode.CONNECTIONS, ""
        if not is_trusted(sock, self._group):
            code, owner = ErrorCode.OTHER_USER, f"user id {os.geteuid()}"
            if self._group is not None:
                owner += f" and group id {self._group}"
            message = f"this daemon belongs to {owner} and serves nobody else; start your own"
        elif len(self.connected) > CONNECTIONS_MAX:
            message = f"there are {CONNECTIONS_MAX} connections already"
        elif shortage is not None:
            # At the end of its connection it would count as gone, and it might still be copying.
            fault = f"process {peer.pid} cannot be watched ({shortage.strerror})"
            message = f"{fault}; a higher limit (ulimit -n) works"
            self._warn_of_shortage(shortage)
        else:
            self._is_short = False
        if message:
            self._refuse(client, code, message)

    def _warn_of_shortage(self, error: OSError) -> None:
        if not self._is_short:
            message = "no more clients can be served: %s; a higher limit (ulimit -n) works"
            logger.warning(message, error.strerror)
        self._is_short = True

    def listen_at(self, listener: socket.socket) -> None:
        """Accept clients of another listener, because no client can reach the old one."""
        if self._listen_at == math.inf:
            self._selector.unregister(self.listener)
        self.listener.close()
        self.listener, self._listen_at = listener, 0.0
        self._listen()

    def _listen(self) -> None:
        """Accept clients again, if that was paused."""
        if self._listen_at < math.inf:
            self._listen_at = math.inf
            self._selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def _receive(self, client: ClientSocket, seconds: float) -> bool:
        """Read from a client, and handle its messages for at most `seconds`.

        Returns False where there was nothing to read, or the connection has ended.
        """
        try:
            received = client.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if not received:
            self.disconnect(client)
            return False
        if client.is_closing:
            return True
        try:
            client.received += client.frames.feed(received)
        except WireError as error:
            self._refuse(client, ErrorCode.WIRE, str(error))
            return True
        self.handle_messages(client, seconds)
        return True

    def _refuse(self, client: ClientSocket, code: ErrorCode, message: str) -> None:
        """Refuse a connection, or bytes that are no request, by an Error with `id` 0."""
        client.is_closing = code.closes
        self.queue_reply(client, self._daemon.refuse(0, code, message))

    def _flush(self, client: ClientSocket) -> None:
        """Send as much of a client's queue as fits. Disconnect a client that does not read."""
        try:
            sent = client.sock.send(client.unsent) if client.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self.disconnect(client)
            return
        del client.unsent[:sent]
        is_full = len(client.unsent) > SEND_QUEUE_BYTES_MAX
        if is_full:
            unread = format_size(len(client.unsent))
            text = "client %d leaves %s of answers unread and is disconnected"
            logger.warning(text, client.number, unread)
        if is_full or (client.is_closing and not client.unsent):
            self.disconnect(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.sock, events, client)

    def _unwatch(self, process: Process) -> None:
        """Stop watching a process, unless it has a connection or may copy for an engine."""
        watched = self._daemon.sessions.watched_processes()
        if not self._clients_of(process) and process not in watched:
            fd = self._processes.pidfds.pop(process, None)
            if fd is not None:
                self._selector.unregister(fd)
                os.close(fd)

    def _clients_of(self, process: Process) -> list[ClientSocket]:
        return [client for client in self.connected.values() if client.process == process]


def process_of(pid: int) -> Process | None:
    """Return a process of this pid namespace, with its start in clock ticks since boot.

    None where it has ended. Raises OSError on a shortage.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return None
    return Process(pid, int(stat.rpartition(")")[2].split()[19]))
