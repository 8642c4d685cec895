"""The users of a daemon and its arena: one user, or a group of users that trust each other."""

import grp
import os
import socket
import struct
from typing import NamedTuple

from hybridkv.core.errors import ConfigError

_SO_PEERGROUPS = 59  # Linux's, which Python's socket module has no name for.
_CREDENTIALS = struct.Struct("3i")
_GROUPS_BYTES_MAX = 1024
"""Python reads no more. Of a process in over 256 groups only its own group counts."""


class Peer(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel knows it."""

    pid: int  # 0 for a process of another pid namespace.
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that connected to `sock`, or that listens at its other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer._make(_CREDENTIALS.unpack(raw))


def is_trusted(sock: socket.socket, group: int | None) -> bool:
    """Return True where the peer is of this process's user, or a member of `group`."""
    peer = peer_of(sock)
    return peer.uid == os.geteuid() or (group is not None and is_member(sock, peer, group))


def is_member(sock: socket.socket, peer: Peer, group: int) -> bool:
    """Return True where the peer belonged to `group` when it connected or began to listen.

    Its own group and its supplementary groups count.
    """
    if peer.gid == group:
        return True
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    except OSError:
        return False  # Of a kernel before 4.13, or of too many groups.
    return group in struct.unpack(f"{len(raw) // 4}I", raw)


def group_id(name: str | None) -> int | None:
    """Return the number of the group of that name, or None without a name.

    Raises ConfigError where this machine has no such group.
    """
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        what = f"group: there is no group {name!r} on this machine"
        raise ConfigError(what, "a name as in /etc/group works") from None
