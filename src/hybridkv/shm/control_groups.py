"""Control groups (cgroups): every memory limit that counts against a process, v1 and v2.

A process counts against its own group and against each group above. The kernel ends some process of
a group whose memory is over the limit, which may be the engine. A page of a tmpfs counts against
the group of the process that touched it first. For an arena this is the daemon, and a daemon that
`"auto"` started is in the engine's group.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hybridkv.core.sizes import format_size

LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""A group over `memory.high` is slowed down until it is below, so that is a limit too."""
USAGE_FILES = ("memory.current", "memory.usage_in_bytes")
DAEMON_BYTES, DAEMON_SHARE = 128 << 20, 64
"""The memory of a daemon beside its arena: these bytes, and 1/64 of the arena for its index."""
KEPT_BYTES, KEPT_SHARE = 32 << 20, 4
"""What a growing arena leaves free: these bytes, and 1/4 of what is in use beside it. An engine has
taken most of its memory when it begins to serve, and takes some later."""
UNLIMITED_BYTES = 1 << 60  # Version 1 has a number near 2**63 for "none".
_TOPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
"""Where a container has its own group, also where its list of mounts does not say so."""
_MOUNT = re.compile(
    r"\S+ \S+ \S+ (?P<top>\S+) (?P<place>\S+) .*- (?P<system>cgroup2?) \S+ (?P<options>\S+)"
)
"""A line of mountinfo: `31 23 0:28 /top /place rw shared:9 - cgroup2 cgroup2 rw` (proc(5))."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a memory limit. All sizes are in bytes."""

    path: Path
    limit_bytes: int
    used_bytes: int  # Without the pages of files, which the kernel drops where it needs memory.
    shared_bytes: int  # Those of `used_bytes` that are on a tmpfs.

    @property
    def limit(self) -> str:
        """The limit for people: "the memory limit of 1GiB of /sys/fs/cgroup/engine.service"."""
        return f"the memory limit of {format_size(self.limit_bytes)} of {self.path}"

    def others_bytes(self, arena_bytes: int) -> int:
        """Return what is in use beside the first `arena_bytes` of an arena, whose pages exist.

        The pages of an arena that another daemon left may count against another group.
        """
        return self.used_bytes - min(arena_bytes, self.shared_bytes)

    def needed_bytes(self, ram_bytes: int, arena_bytes: int = 0) -> int:
        """Return the limit that has room for an arena of `ram_bytes`, the daemon and all others.

        The first `arena_bytes` of the arena have pages already.
        """
        others = self.others_bytes(arena_bytes)
        return ram_bytes + ram_bytes // DAEMON_SHARE + DAEMON_BYTES + others + others // KEPT_SHARE

    @property
    def default_bytes(self) -> int:
        """The default size of an arena: a quarter of what the limit leaves, or less where that
        does not fit (needed_bytes). Zero or less where nothing fits."""
        fitting = (self.limit_bytes - self.needed_bytes(0)) * DAEMON_SHARE // (DAEMON_SHARE + 1)
        return min(fitting, (self.limit_bytes - self.used_bytes) // 4)

    def allows_growth(self, start: int, stop: int) -> bool:
        """Return True where an arena may grow. It has pages below `start`, and wants [start, stop).

        An arena for which `needed_bytes` fits in the limit grows to its end.
        """
        kept = KEPT_BYTES + self.others_bytes(start) // KEPT_SHARE
        return self.used_bytes + stop - start + kept <= self.limit_bytes


def memory_groups(process: str = "self", root: Path = Path("/")) -> list[MemoryGroup]:
    """Return the groups with a limit that a process of /proc counts against, its own first.

    The groups above a container's own cannot be seen there, but version 1 tells the least of their
    limits. Without control groups the list is empty. `root` is the directory of /proc and /sys.
    """
    directories = dict.fromkeys(_directories(process, root))
    return [group for path in directories if (group := _group_at(path, root)) is not None]


def _directories(process: str, root: Path) -> Iterator[Path]:
    """Yield the directories of a process's groups, each before those above it."""
    paths = {}
    for line in _lines(root / "proc" / process / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        mount = _MOUNT.match(line)
        if mount is None or mount["system"] not in paths:
            continue
        if mount["system"] == "cgroup2" or "memory" in mount["options"].split(","):
            place = root / _unescaped(mount["place"]).lstrip("/")
            own = place / _below(paths[mount["system"]], _unescaped(mount["top"]))
            yield own
            yield from (above for above in own.parents if above.is_relative_to(place))
    yield from (root / top.relative_to("/") for top in _TOPS)


def _below(path: PurePosixPath, top: str) -> PurePosixPath:
    """Return a group's path below that of a mount: ("/a/b", "/a") -> "b".

    It is "." where the mount does not show the group, as in a container that sees its own alone.
    """
    is_below = path.is_relative_to(top) and ".." not in path.parts
    return path.relative_to(top) if is_below else PurePosixPath()


def _group_at(path: Path, root: Path) -> MemoryGroup | None:
    """Return the group of a directory, or None where it has no limit."""
    fields = (line.partition(" ") for line in _lines(path / "memory.stat"))
    statistics = {name: int(value) for name, _, value in fields if value.isdigit()}
    limits = [_number(path / name) for name in LIMIT_FILES]
    # In version 1 this is the least limit of this group and of those above.
    limits.append(statistics.get("hierarchical_memory_limit"))
    limit = min((limit for limit in limits if limit is not None), default=UNLIMITED_BYTES)
    if limit >= UNLIMITED_BYTES:
        return None

    def counted(name: str) -> int:
        """Return a statistic of this group and of those below, in either version."""
        return statistics.get(f"total_{name}", statistics.get(name, 0))

    usages = [usage for name in USAGE_FILES if (usage := _number(path / name)) is not None]
    # An unknown usage is not none.
    used = usages[0] - counted("active_file") - counted("inactive_file") if usages else limit // 2
    return MemoryGroup(
        path=Path("/") / path.relative_to(root),
        limit_bytes=limit,
        used_bytes=max(0, used),
        shared_bytes=counted("shmem"),
    )


def _number(path: Path) -> int | None:
    """Return the number in a file, or None where it has none ("max") or is not there."""
    with contextlib.suppress(OSError, ValueError):  # The control group has no such limit.
        return int(path.read_text())
    return None


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, none where it is not there."""
    with contextlib.suppress(OSError):
        # This machine has no such control group, or the process has ended.
        return path.read_text(errors="replace").splitlines()
    return []


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, which has octal escapes: `a\\040b` -> "a b"."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)
