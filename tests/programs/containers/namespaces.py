"""Containers of the manifests as what they are to the kernel: namespaces, users and mounts.

A container has a root of its own, whose /run, /home and /dev/shm are empty, and its volumes; the
rest is the machine's, in place of an image. It has process ids of its own unless its pod shares
them, and if asked for, a user namespace of its own.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
import pytest

import hybridkv
from hybridkv.core.sizes import parse_size
from tests.fault.fuse import mounted
from tests.forked_daemon import COMMAND, run_forked
from tests.programs.containers.manifests import ROOT, Container, image_variables
from tests.waiting import DEADLINE_SECONDS, has_ended, until

SCALE = 1024
"""How many times smaller volumes and caches are than in the manifests."""
HOME = "/run/home"
_BIN = Path(sys.executable).parent
_PACKAGE = "/run/package"
_PACKAGES = str(Path(msgspec.__file__).parents[1])
_IMAGE = {
    **{path: path for path in sorted({str(ROOT), sys.prefix, sys.base_prefix, _PACKAGES})},
    str(Path(hybridkv.__file__).parents[1]): _PACKAGE,
}
"""The machine's directories that stand for the image, each with its place in the container.

A container's user may not be permitted to read the directories above them.
"""
_FIRST = f"""
set -e
PATH=$PATH:/usr/sbin:/sbin
cd /mnt
mount -t tmpfs -o mode=755 tmpfs .
cd /mnt
for entry in /*; do
  if [ -L "$entry" ]; then cp -P "$entry" .; continue; fi
  [ -d "$entry" ] || continue
  mkdir ".$entry"
  case "$entry" in
    /run | /mnt | /root | /home) ;;
    *) mount --rbind "$entry" ".$entry" ;;
  esac
done
mkdir -m 1777 .{HOME}
mount -t tmpfs -o mode=1777,size=64m tmpfs ./dev/shm
while [ "$1" != -- ]; do
  mkdir -p ".$2"
  mount --bind "$1" ".$2"
  shift 2
done
shift
mkdir .before
pivot_root . .before
umount -l /.before
exec "$@"
"""
"""A shell script that makes the root: `REAL PLACE` of each volume, then `--` and the command."""


class RunningContainer:
    """A container whose command was started."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", has_own_pids: bool, user: int, log: Path
    ) -> None:
        self.process = process
        self.log = log
        self._has_own_pids = has_own_pids
        self._user = user
        self._children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if has_own_pids:
            until(lambda: bool(self._child()) or self.has_ended, "its first process is there")
        self.pid = self._child() if has_own_pids else process.pid
        """The number of the container's first process on the machine."""

    def _child(self) -> int:
        with contextlib.suppress(OSError):
            return int(self._children.read_text() or "0")
        return 0

    @property
    def has_ended(self) -> bool:
        """Whether the container's command has ended."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End the container with -9."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_SECONDS)
        until(lambda: has_ended(self.pid), "it is gone")

    def execute(self, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command of hybridkv in the container, as `kubectl exec` and probes do."""
        assert words[0] == "hybridkv"
        kinds = ["mnt", *(["pid"] if self._has_own_pids else [])]
        return run_forked(
            words[1:],
            f"import os; os.setgroups([]); os.setgid({self._user}); os.setuid({self._user})\n"
            f"os.chdir('/')\n{COMMAND}",
            variables(),
            [f"/proc/{self.pid}/ns/{kind}" for kind in reversed(kinds)],
        )


def variables(extra_variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a container of the image."""
    kept = {name: text for name, text in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    path = {"PATH": f"{_BIN}:{os.environ['PATH']}", "PYTHONPATH": f"{_PACKAGE}:{ROOT}"}
    home = {"HOME": HOME, "TMPDIR": HOME}
    return {
        **kept,
        **path,
        **home,
        **image_variables(),
        "NODE_NAME": "node-1",
        **(extra_variables or {}),
    }


class Machine:
    """A node whose pods have real volumes, as a context manager."""

    def __init__(
        self,
        directory: Path,
        has_own_pids: bool = True,
        has_own_users: bool = False,
        given: Mapping[str, Path] | None = None,
    ) -> None:
        """Give pods process ids or users of their own, or not. Skips where that is forbidden.

        `given` are volumes by name that differ from those of the manifest.
        """
        self._given = given or {}
        self._directory = directory
        self._unshare = ["unshare", "--mount", "--propagation=private", "--ipc"]
        if has_own_pids:
            self._unshare += ["--pid", "--fork", "--kill-child", "--mount-proc"]
        self._users = ["unshare", "--user"] if has_own_users else []
        tried = [*self._unshare, *self._users, "true"]
        if subprocess.run(tried, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to make namespaces")
        self._has_own_pids = has_own_pids
        self.ends = contextlib.ExitStack()  # Called when the machine ends.
        self._volumes: dict[Path, None] = {}

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.ends.close()

    def volume(self, container: Container, name: str) -> Path:
        """Returns the directory of a volume. A new one is made as the kubelet makes it."""
        if name in self._given:
            return self._given[name]
        (spec,) = (volume for volume in container.pod["volumes"] if volume["name"] == name)
        if "hostPath" in spec:
            return self._of_node(Path(spec["hostPath"]["path"]), spec["hostPath"]["type"])
        path = self._directory / "pod" / name
        if path not in self._volumes:
            self._volumes[path] = None
            path.mkdir(parents=True)
            empty = spec["emptyDir"]
            if empty.get("medium") == "Memory":
                size = parse_size(f"{empty['sizeLimit']}B", "size") // SCALE
                self.ends.enter_context(mounted("tmpfs", path, str(size)))
            group = container.pod["securityContext"]["fsGroup"]
            os.chown(path, 0, group)
            path.chmod(0o2777)
        return path

    def _of_node(self, path: Path, kind: str) -> Path:
        memory = self._directory / "node" / "shm"
        if memory not in self._volumes:
            self._volumes[memory] = None
            memory.mkdir(parents=True)
            self.ends.enter_context(mounted("tmpfs", memory, "1g"))
        is_shm = path.is_relative_to("/dev/shm")
        real = (
            memory / path.relative_to("/dev/shm")
            if is_shm
            else self._directory / "node" / path.relative_to("/")
        )
        if kind == "DirectoryOrCreate":
            real.mkdir(parents=True, exist_ok=True)
        assert real.is_dir(), f"the manifest asks for {path}"
        return real

    def log_path(self, name: str) -> Path:
        """Returns the log of the containers of that name."""
        return self._directory / f"{name}.log"

    def command(self, container: Container, words: Sequence[str]) -> list[str]:
        """Returns the command line by which `words` are a container's first process."""
        volumes = [word for mount in _IMAGE.items() for word in mount]
        for place, name in container.mounts.items():
            volumes += str(self.volume(container, name)), place
        user = container.user
        ids = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        mapped = [f"--map-user={user}", f"--map-group={user}"] if self._users else []
        first = ["sh", "-c", _FIRST, "sh", *volumes, "--", "setpriv", *ids]
        return [*self._unshare, *first, *self._users, *mapped, *words]

    def start(
        self,
        container: Container,
        words: Sequence[str],
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        stdout: IO[bytes] | int | None = None,
    ) -> RunningContainer:
        """Start a container with a command, whose output goes to its log or to `stdout`."""
        log = self.log_path(container.spec["name"])
        with log.open("ab") as log_file:
            process = subprocess.Popen(
                self.command(container, words),
                stdin=stdin,
                stdout=log_file if stdout is None else stdout,
                stderr=log_file,
                env=variables(),
            )
        return self.adopt(container, process, log)

    def adopt(
        self, container: Container, process: "subprocess.Popen[bytes]", log: Path
    ) -> RunningContainer:
        """Returns the container of a `process` that was started with a `command`.

        It ends with the machine.
        """
        running = RunningContainer(process, self._has_own_pids, container.user, log)
        self.ends.enter_context(process)
        self.ends.callback(running.kill)
        return running

    def run(self, container: Container, words: Sequence[str]) -> None:
        """Run a container that ends by itself, as those do that are started first."""
        running = self.start(container, words)
        assert running.process.wait(DEADLINE_SECONDS) == 0, running.log.read_text()
