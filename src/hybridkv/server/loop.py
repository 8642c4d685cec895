"""The daemon's one loop: sockets in, `Daemon.handle`, sockets out. Everything that blocks is elsewhere."""

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import struct
import threading
import uuid
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.sizes import format_size
from hybridkv.server.daemon import Daemon
from hybridkv.server.metrics import serve_metrics
from hybridkv.server.place import arena_path, listen, make_private_directory, remove_stale_arenas, take_lock
from hybridkv.shm.arena import Arena, check_ram, create_arena, is_no_space
from hybridkv.storage.store import Store
from hybridkv.wire.codec import Frames, WireError, decode_request, encode
from hybridkv.wire.messages import Reply, Report

logger = logging.getLogger("hybridkv.daemon")

CONNECTIONS_MAX = 4096
RECEIVE_BYTES = 1 << 14
"""Taken from one client before the next one's turn: many small requests are also work."""
SEND_QUEUE_BYTES_MAX = 64 << 20
"""A client that lets this much pile up is disconnected."""
GENERATION_BITS = 32
"""Room for the slots of one life; the bits above are random, so that no two lives give the same generation."""
VALUES_TIMEOUT_SECONDS = 5.0
RESERVE_STEP_BYTES = 32 << 20
RESERVE_AHEAD_BYTES = 256 << 20
"""Pages are made to exist this far ahead of the used part of the arena."""


class ServeOptions(NamedTuple):
    """What `hybridkv serve` was asked for."""

    socket_path: Path
    ram_bytes: int
    metrics_port: int


class _Peer:
    """One accepted socket and its buffers."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number
        self.frames = Frames()
        self.out = bytearray()
        self.closing = False


class Server:
    """Owns the sockets and the arena; runs until `stop`."""

    def __init__(self, options: ServeOptions) -> None:
        check_ram(options.ram_bytes, "ram")
        make_private_directory(options.socket_path.parent, "socket")
        self._lock_fd = take_lock(options.socket_path)
        self._socket_path = options.socket_path
        self._listener = listen(options.socket_path, "socket")
        remove_stale_arenas(options.socket_path)
        boot = uuid.uuid4().hex
        path = arena_path(options.socket_path, boot)
        size = options.ram_bytes >> 12 << 12
        self._arena: Arena = create_arena(path, size)
        store = Store(self._arena.memory, first_generation=secrets.randbits(62 - GENERATION_BITS) << GENERATION_BITS)
        self.daemon = Daemon(store, boot, str(path), size, os.getpid())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}
        self._numbers = 0
        self._asked: deque[Future[dict[str, float]]] = deque()
        self._running = True
        self._reserved = 0
        self._reserve_failed = False
        self._reserve_wanted = threading.Condition()
        self._reserve_goal = min(RESERVE_AHEAD_BYTES, size)
        self._reserver = threading.Thread(target=self._reserve, name="reserve", daemon=True)
        self._reserver.start()
        self.metrics_url = ""
        if options.metrics_port >= 0:
            self.metrics_url = serve_metrics(self._values, options.metrics_port)
        logger.info("serving %s, ram %s, metrics %s", options.socket_path, format_size(size), self.metrics_url)

    def run(self) -> None:
        """Serve until `stop`; then remove the socket and the arena."""
        try:
            while self._running:
                for key, events in self._selector.select():
                    self._serve(key.fileobj, events)
                self._adopt_reserved()
                while self._asked:
                    self._asked.popleft().set_result(self.daemon.values())
        finally:
            self._close()

    def stop(self) -> None:
        """End `run`; safe from signal handlers and other threads."""
        self._running = False
        self._wake()

    def _serve(self, fileobj: object, events: int) -> None:
        if fileobj is self._listener:
            self._accept()
        elif fileobj is self._wake_read:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        else:
            peer = self._peers.get(fileobj)  # type: ignore[call-overload]  # a socket, as registered
            if peer is None:
                return
            if events & selectors.EVENT_READ:
                self._receive(peer)
            if events & selectors.EVENT_WRITE and peer.sock in self._peers:
                self._flush(peer)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", raw)[1]
        self._numbers += 1
        peer = _Peer(sock, self._numbers)
        self._peers[sock] = peer
        self._selector.register(sock, selectors.EVENT_READ)
        self.daemon.connect(peer.number)
        if uid != os.geteuid():
            message = f"this daemon belongs to user id {os.geteuid()} and serves nobody else; start your own"
            self._send(peer, self.daemon.refuse(0, "other_user", message), last=True)
        elif len(self._peers) > CONNECTIONS_MAX:
            message = f"there are {CONNECTIONS_MAX} connections already"
            self._send(peer, self.daemon.refuse(0, "connections", message), last=True)

    def _receive(self, peer: _Peer) -> None:
        try:
            received = peer.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._drop(peer)
            return
        if peer.closing:
            return
        try:
            for body in peer.frames.feed(received):
                if peer.sock not in self._peers:
                    return  # It was dropped while it was answered.
                reply = self.daemon.handle(peer.number, decode_request(body))
                if isinstance(reply, Report):
                    reply.info["metrics"] = self.metrics_url
                if reply is not None:
                    self._send(peer, reply)
        except WireError as error:
            self._send(peer, self.daemon.refuse(0, "wire", str(error)), last=True)
        except Exception:  # the supervised boundary: one client's fault must not end the others'
            logger.exception("a request failed inside the daemon; its connection is closed")
            self._send(peer, self.daemon.refuse(0, "internal", "the daemon failed on this request"), last=True)

    def _send(self, peer: _Peer, reply: Reply, last: bool = False) -> None:
        peer.out += encode(reply)
        peer.closing = peer.closing or last
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            sent = peer.sock.send(peer.out) if peer.out else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(peer)
            return
        del peer.out[:sent]
        if len(peer.out) > SEND_QUEUE_BYTES_MAX or (peer.closing and not peer.out):
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        self._selector.modify(peer.sock, events)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock, None) is None:
            return
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self.daemon.disconnect(peer.number)

    def _values(self) -> dict[str, float]:
        """The daemon's values, taken by the loop on behalf of the metrics thread."""
        asked: Future[dict[str, float]] = Future()
        self._asked.append(asked)
        self._wake()
        return asked.result(VALUES_TIMEOUT_SECONDS)

    # Pages of the arena are made to exist by a thread, since zeroing them takes milliseconds.

    def _reserve(self) -> None:
        while self._running:
            with self._reserve_wanted:
                self._reserve_wanted.wait_for(lambda: self._reserved < self._reserve_goal or not self._running)
            if not self._running:
                return
            stop = min(self._reserved + RESERVE_STEP_BYTES, self._arena.size_bytes)
            try:
                self._arena.reserve(self._reserved, stop)
            except OSError as error:
                kind = "shared memory is used up" if is_no_space(error) else str(error)
                logger.warning("arena stays at %s: %s", format_size(self._reserved), kind)
                self._reserve_failed = True
                self._wake()
                return
            self._reserved = stop
            self._wake()

    def _adopt_reserved(self) -> None:
        extents = self.daemon.store.extents
        if self._reserved > extents.limit_bytes:
            extents.grow(self._reserved)
        if self._reserve_failed:
            self.daemon.store.bound_bytes = extents.limit_bytes
        used = extents.limit_bytes - extents.free_bytes
        goal = min(used + RESERVE_AHEAD_BYTES, self._arena.size_bytes)
        if goal > self._reserve_goal:
            with self._reserve_wanted:
                self._reserve_goal = goal
                self._reserve_wanted.notify()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def _close(self) -> None:
        self._running = False
        with self._reserve_wanted:
            self._reserve_wanted.notify()
        self._reserver.join()
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()
        self._listener.close()
        self._wake_read.close()
        self._wake_write.close()
        with contextlib.suppress(FileNotFoundError):
            self._socket_path.unlink()
        self._arena.unlink()
        self._arena.close()
        os.close(self._lock_fd)


def serve(options: ServeOptions) -> None:
    """Run a daemon until SIGTERM or SIGINT."""
    server = Server(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.run()
