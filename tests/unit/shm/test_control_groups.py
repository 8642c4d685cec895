"""The memory limits of control groups, at every level, in trees of both versions."""

from pathlib import Path

import pytest

from hybridkv.shm.control_groups import DAEMON_BYTES, DAEMON_SHARE, MemoryGroup, memory_groups

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path("/")
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OWN_MOUNT = V2_MOUNT.replace(" / /sys", " /docker/c1 /sys")
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
)
NO_LIMIT_V1 = 9223372036854771712


class Tree:
    """A directory with a /proc and a /sys of its own."""

    def __init__(self, root: Path, mounts: str, groups: str) -> None:
        self.root = root
        self.write("proc/self/mountinfo", mounts)
        self.write("proc/self/cgroup", groups)
        self.write("proc/7/cgroup", groups)

    def write(self, path: str, text: object) -> None:
        (file := self.root / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def group(self, path: str, **files: object) -> None:
        """Write the files of a group. Their names have "_" in place of the first "."."""
        for name, value in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name.replace('_', '.', 1)}", value)

    def limits(self, process: str = "self") -> dict[str, int]:
        """Return each limit in MiB by the group's path below /sys/fs/cgroup, in order."""
        groups = memory_groups(process, self.root)
        top = Path("/sys/fs/cgroup")
        return {str(group.path.relative_to(top)): group.limit_bytes // MIB for group in groups}


def test_every_level_of_version_2_counts(tmp_path: Path) -> None:
    """As systemd's MemoryMax of a unit, or of the slice that it is in."""
    tree = Tree(tmp_path, V2_MOUNT, "0::/user.slice/app.slice/engine.service")
    tree.group("user.slice", memory_max="max", memory_high=300 * MIB, memory_current=0)
    tree.group("user.slice/app.slice", memory_max="max", memory_high="max", memory_current=0)
    unit = {"memory_max": 900 * MIB, "memory_high": "max", "memory_current": 700 * MIB}
    statistics = f"anon 9\nshmem {70 * MIB}\nactive_file {30 * MIB}\ninactive_file {20 * MIB}\n"
    tree.group("user.slice/app.slice/engine.service", **unit, memory_stat=statistics)
    expected = {"user.slice/app.slice/engine.service": 900, "user.slice": 300}
    assert tree.limits() == expected
    assert tree.limits("7") == expected, "another process is in the same groups"
    own = memory_groups(root=tmp_path)[0]
    assert own.used_bytes == 650 * MIB, "the kernel drops pages of files"
    assert own.shared_bytes == 70 * MIB


def test_every_level_of_version_1_counts(tmp_path: Path) -> None:
    """As Slurm has it. Version 1 also tells the least limit of all levels."""
    path = "memory/slurm/uid_0/job_1/step_0"
    tree = Tree(tmp_path, V1_MOUNTS, "9:name=systemd:/\n4:memory:/slurm/uid_0/job_1/step_0\n0::/")
    statistics = (
        f"shmem 1\ntotal_shmem {50 * MIB}\nhierarchical_memory_limit {400 * MIB}\n"
        f"active_file 1\ntotal_active_file {60 * MIB}\ntotal_inactive_file {40 * MIB}\n"
    )
    tree.group(
        path,
        memory_limit_in_bytes=NO_LIMIT_V1,
        memory_usage_in_bytes=300 * MIB,
        memory_stat=statistics,
    )
    tree.group(
        "memory/slurm/uid_0/job_1", memory_limit_in_bytes=500 * MIB, memory_usage_in_bytes=301 * MIB
    )
    tree.group("memory", memory_limit_in_bytes=NO_LIMIT_V1, memory_usage_in_bytes=9 * GIB)
    assert tree.limits() == {path: 400, "memory/slurm/uid_0/job_1": 500}
    own = memory_groups(root=tmp_path)[0]
    assert own.used_bytes == 200 * MIB
    assert own.shared_bytes == 50 * MIB


def test_a_machine_with_both_versions(tmp_path: Path) -> None:
    """The memory controller is in version 1 or in version 2. Each has a path of its own."""
    both = V1_MOUNTS + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    tree = Tree(tmp_path, both, "4:memory:/of/one\n3:cpu,cpuacct:/x\n0::/of/two")
    tree.group("memory/of/one", memory_limit_in_bytes=200 * MIB, memory_usage_in_bytes=0)
    tree.group("unified/of", memory_max=100 * MIB, memory_current=0)
    tree.group("unified/x", memory_max=1 * MIB, memory_current=0)
    assert tree.limits() == {"memory/of/one": 200, "unified/of": 100}


@pytest.mark.parametrize(
    ("mounts", "groups", "own"),
    [
        pytest.param(V2_MOUNT, "0::/", ".", id="a cgroup namespace of its own"),
        pytest.param(V2_MOUNT, "0::/../../b", ".", id="outside of the namespace"),
        pytest.param(
            V2_MOUNT.replace(" / /sys", " /docker/c1 /sys"),
            "0::/docker/c1",
            ".",
            id="its own alone",
        ),
        pytest.param(OWN_MOUNT, "0::/docker/c1/job", "job", id="below"),
        pytest.param(OWN_MOUNT, "0::/docker/c11", ".", id="another's"),
        pytest.param("", "", "memory", id="no list of mounts, version 1"),
        pytest.param("", "", ".", id="no list of mounts, version 2"),
    ],
)
def test_a_container_sees_a_part_of_the_levels(
    mounts: str, groups: str, own: str, tmp_path: Path
) -> None:
    tree = Tree(tmp_path, mounts, groups)
    tree.group(own, memory_max=64 * MIB, memory_current=0)
    assert tree.limits() == {own: 64}


def test_a_mount_elsewhere_whose_name_has_a_space(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", r"/mnt/my\040groups")
    tree = Tree(tmp_path, mount, "0::/a/b")
    tree.write("mnt/my groups/a/memory.max", 64 * MIB)
    (group,) = memory_groups(root=tmp_path)
    assert group == MemoryGroup(Path("/mnt/my groups/a"), 64 * MIB, 32 * MIB, 0)
    assert group.used_bytes == group.limit_bytes // 2, "an unknown usage is not none"


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert memory_groups(root=tmp_path) == []
    assert Tree(tmp_path, V2_MOUNT, "0::/a").limits() == {}


@pytest.mark.parametrize("others", [0, 50 * MIB, 3 * GIB, 900 * GIB])
@pytest.mark.parametrize("limit", [200 * MIB, 5 * GIB, 2 << 40])
def test_what_fits_grows_to_its_end(limit: int, others: int) -> None:
    """Beside what others use there is always room left, for them and for the daemon."""
    group = MemoryGroup(ROOT, limit, others, 0)
    ram = group.default_bytes
    if ram <= 0:
        assert group.needed_bytes(0) > limit
        return
    assert group.needed_bytes(ram) <= limit
    assert ram <= (limit - others) // 4
    daemon = ram // DAEMON_SHARE // 2 + DAEMON_BYTES // 2
    needed = group.needed_bytes(ram)
    full = MemoryGroup(ROOT, needed, others + daemon + ram - MIB, ram - MIB)
    assert full.allows_growth(ram - MIB, ram), "what needed_bytes says is enough"
    grown = MemoryGroup(ROOT, limit, limit - others // 5, limit - others)
    assert not grown.allows_growth(limit - others, limit - others + MIB)


def test_pages_that_another_group_has_are_not_taken_from_the_usage() -> None:
    """An arena that an earlier daemon left counts against that daemon's group."""
    group = MemoryGroup(ROOT, GIB, 600 * MIB, 100 * MIB)
    assert group.others_bytes(500 * MIB) == 500 * MIB
    assert group.others_bytes(50 * MIB) == 550 * MIB
