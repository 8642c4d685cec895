"""The pages of an arena on a machine with several NUMA nodes."""

import ctypes
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridkv.shm import arena, numa
from hybridkv.shm.arena import Arena
from tests.arenas import unnamed_arena

SIZE = 1 << 20


@pytest.mark.parametrize(
    ("memory", "processors", "nodes"),
    [
        ("0\n", "0\n", [0]),
        ("0-1\n", "0-1\n", [0, 1]),
        ("0,2-4,70\n", "0-4,70\n", [0, 2, 3, 4, 70]),
        # A device's memory, or memory behind CXL.
        ("0-1,8\n", "0-1\n", [0, 1]),
        ("\n", "\n", []),
    ],
)
def test_nodes_that_have_memory_and_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, processors: str, nodes: list[int]
) -> None:
    monkeypatch.setattr(numa, "NODES_PATH", tmp_path)
    assert numa.memory_nodes() == []
    (tmp_path / "has_memory").write_text(memory)
    (tmp_path / "has_cpu").write_text(processors)
    assert numa.memory_nodes() == nodes


def test_an_arena_of_several_nodes_is_spread_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows it. This machine may have one node, so the test names that node twice."""
    nodes = numa.memory_nodes()
    if not nodes:
        pytest.skip("this kernel knows of no NUMA nodes")
    monkeypatch.setattr(arena, "memory_nodes", lambda: [*nodes, nodes[0]])
    with unnamed_arena(SIZE) as trial:
        if not numa.interleave(trial.address, SIZE, nodes):
            pytest.skip("this container may not set a memory policy")
    with unnamed_arena(SIZE) as spread:
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        (line,) = (line for line in maps if line.startswith(f"{spread.address:x} "))
        assert f" interleave:{nodes[0]}" in line


def test_a_policy_that_the_process_has_is_left_alone() -> None:
    """A thread's policy is its own, so a thread stands for a process under numactl."""
    nodes = numa.memory_nodes()
    number = {"x86_64": 238, "aarch64": 237}.get(platform.machine())
    if not nodes or number is None:
        pytest.skip("this kernel knows of no NUMA nodes")

    def interleave_with_policy(mapped: Arena) -> tuple[bool, bool]:
        mask = ctypes.c_ulong(1 << nodes[0])
        preferred = 1
        refused = ctypes.CDLL(None).syscall(number, preferred, ctypes.byref(mask), 64)
        return not refused, numa.interleave(mapped.address, SIZE, nodes)

    with unnamed_arena(SIZE) as fresh, ThreadPoolExecutor(1) as thread:
        is_set, is_spread = thread.submit(interleave_with_policy, fresh).result()
    if not is_set:
        pytest.skip("this container may not set a memory policy")
    assert not is_spread


def test_a_node_that_is_not_there_is_refused_quietly() -> None:
    with unnamed_arena(SIZE) as fresh:
        assert not numa.interleave(fresh.address, SIZE, [])
        assert not numa.interleave(fresh.address, SIZE, [1000])
