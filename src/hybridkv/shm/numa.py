"""Memory of machines with several sockets: whose pages are on which node."""

import ctypes
import platform
from pathlib import Path

NODES_PATH = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
"""The numbers of mbind(2) and get_mempolicy(2), which the C library does not have."""
_INTERLEAVE = 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def memory_nodes() -> list[int]:
    """The nodes with memory and processors; empty where the kernel knows none.

    A node without processors is a device's memory, or one that is slower than the others.
    """
    return sorted(_nodes("has_memory") & _nodes("has_cpu"))


def interleave(address: int, size_bytes: int, nodes: list[int]) -> bool:
    """Take the pages of shared memory that is mapped here from all of `nodes` in turn.

    The policy belongs to the file, so it holds for pages that anybody allocates later. False where
    the caller has a policy of its own, as under numactl, or where the system refuses, as some
    containers do: pages are then where that policy says, or on the node of who allocates them.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not nodes or _has_policy():
        return False
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    where = ctypes.c_void_p(address), ctypes.c_ulong(size_bytes)
    # The kernel takes one bit less than it is told of.
    mask = words, ctypes.c_ulong(len(words) * _WORD_BITS + 1)
    return not ctypes.CDLL(None).syscall(number, *where, _INTERLEAVE, *mask, 0)


def _nodes(name: str) -> set[int]:
    """The nodes of one of the kernel's lists, such as "0,2-4"."""
    try:
        said = (NODES_PATH / name).read_text().strip()
    except OSError:
        return set()
    spans = (part.split("-") for part in said.split(",") if part)
    return {node for span in spans for node in range(int(span[0]), int(span[-1]) + 1)}


def _has_policy() -> bool:
    """Whether somebody has chosen nodes for the memory of this thread."""
    mode = ctypes.c_int(0)
    number = _GET_MEMPOLICY[platform.machine()]
    ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, ctypes.c_ulong(0), None, 0)
    return mode.value != 0
