"""The NFS server and its clients of the machine that machine.py boots, for the tests in inside.py.

The server and each client have a network of their own, so that each client has its own connection,
locks and caches, as the clients of several machines do.
"""

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.fault.nfs.machine import ROOT
from tests.waiting import has_ended, is_stopped, until

DISK = Path("/tmp/server")  # The server's file system.
MOUNT = Path("/tmp/nfs")  # Where every client has it.
NFSD = Path("/proc/fs/nfsd")
LEASE_SECONDS = 10  # The least that the server takes.
MOUNTS = {
    "v42": "vers=4.2",
    "v40": "vers=4.0",
    "v3": "vers=3,nolock,mountport=20048",
    "soft": "vers=4.2,soft,timeo=10,retrans=1",
}
"""The options of mount(8) that are tried, by their names here."""
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def tool(*words: str) -> None:
    """Run a tool of the server or of a client. Raises CalledProcessError."""
    libraries = f"{ROOT}/usr/lib/x86_64-linux-gnu:{ROOT}/lib/x86_64-linux-gnu"
    subprocess.run(words, env={**os.environ, "LD_LIBRARY_PATH": libraries}, check=True)


class Server:
    """Linux' own NFS server. There is one, which has the directory `path`."""

    def __init__(self) -> None:
        """Start it with an empty directory."""
        self.path = DISK / "export"
        self.path.mkdir()
        for name in ("nfsv4leasetime", "nfsv4gracetime"):
            (NFSD / name).write_text(str(LEASE_SECONDS))
        tool(f"{ROOT}/sbin/rpcbind")
        until(Path("/run/rpcbind.sock").exists, "rpcbind serves")
        self._export()
        tool(f"{ROOT}/usr/sbin/rpc.mountd", "--port", "20048")
        self.start()

    def start(self) -> None:
        """Serve."""
        tool(f"{ROOT}/usr/sbin/rpc.nfsd", "8")

    def stop(self) -> None:
        """Close all connections, and forget every client, as a server that ends."""
        tool(f"{ROOT}/usr/sbin/rpc.nfsd", "0")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Be away in the context, then come back."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def restore(self) -> None:
        """Serve a copy of all files, whose handles are others, as after a backup was restored."""
        self.stop()
        tool(f"{ROOT}/usr/sbin/exportfs", "-ua")
        shutil.copytree(self.path, DISK / "copy")
        shutil.rmtree(self.path)
        (DISK / "copy").rename(self.path)
        self._export()
        self.start()

    def empty(self) -> None:
        """Remove all files."""
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _export(self) -> None:
        options = "rw,no_root_squash,no_subtree_check,insecure,fsid=0"
        tool(f"{ROOT}/usr/sbin/exportfs", "-i", "-o", options, f"*:{self.path}")


class Client:
    """A process that has the server's directory at MOUNT, and calls functions there."""

    def __init__(self, number: int, options: str) -> None:
        """`options` are those of mount(8), like "vers=4.2,soft"."""
        self._options = options
        self._server, self._own = f"10.0.{number}.1", f"10.0.{number}.2"
        self._here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        self._here.recv()
        veth = f"to{number}"
        peer = ["peer", "name", "eth0", "netns", str(self._process.pid)]
        tool("ip", "link", "add", veth, "type", "veth", *peer)
        tool("ip", "address", "add", f"{self._server}/24", "dev", veth)
        tool("ip", "link", "set", veth, "up")
        self._here.send(None)
        self._here.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._here.close()
        self._process.join()

    def begin(self, do: Callable[..., Any], *args: object) -> None:
        """Call a function of a module there, whose result `result` returns."""
        self._here.send((do, args))

    def result(self) -> Any:  # it is what the function returns
        """Returns what the function returned. Raises what it raised."""
        value, error = self._here.recv()
        if error is not None:
            raise error
        return value

    def call(self, do: Callable[..., Any], *args: object) -> Any:
        """Returns what a function of a module returns there. Raises what it raises."""
        self.begin(do, *args)
        return self.result()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Do nothing in the context, so that what the server has can be counted."""
        pid = self._process.pid
        assert pid is not None
        stopped: list[int] = []
        try:
            # The process first, which starts and ends the others.
            for each in itertools.chain([pid], _others_with_mounts_of(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGSTOP)
                    stopped.append(each)
                until(partial(_does_nothing, each), "its calls are done", 60)
            yield
        finally:
            for each in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGCONT)

    def _serve(self, pipe: Connection) -> None:
        self._here.close()
        if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        tool("mount", "--make-rprivate", "/")
        # NFS 4 knows a client by its host name.
        name = f"client-{self._own}".encode()
        _libc.sethostname(name, len(name))
        pipe.send(None)
        pipe.recv()
        tool("ip", "link", "set", "lo", "up")
        tool("ip", "address", "add", f"{self._own}/24", "dev", "eth0")
        tool("ip", "link", "set", "eth0", "up")
        MOUNT.mkdir(exist_ok=True)
        source = DISK / "export" if "vers=3" in self._options else "/"
        tool(f"{ROOT}/sbin/mount.nfs", f"{self._server}:{source}", str(MOUNT), "-o", self._options)
        pipe.send(None)
        while True:
            try:
                do, args = pipe.recv()
            except EOFError:
                break
            try:
                pipe.send((do(*args), None))
            except Exception as error:  # noqa: BLE001  # raised where it was asked for
                error.add_note(traceback.format_exc())
                pipe.send((None, error))
        tool("umount", "-l", str(MOUNT))


def _does_nothing(pid: int) -> bool:
    return has_ended(pid) or is_stopped(pid)


def _others_with_mounts_of(pid: int) -> Iterator[int]:
    """The other processes that see the mounts of a process."""
    mounts = Path(f"/proc/{pid}/ns/mnt").readlink()
    for path in Path("/proc").glob("[0-9]*/ns/mnt"):
        with contextlib.suppress(FileNotFoundError):  # It has ended since.
            if path.readlink() == mounts and (other := int(path.parts[2])) != pid:
                yield other
