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
    """Return the nodes with both memory and processors, or [] where the kernel lists none.

    A node without processors is a device's memory, or one that is slower than the others.
    """
    return sorted(_nodes("has_memory") & _nodes("has_cpu"))


def interleave(address: int, size_bytes: int, nodes: list[int]) -> bool:
    """Take the pages of mapped shared memory from all of `nodes` in turn. Returns True if so.

    The policy belongs to the file, so it holds for pages that any process allocates later. The
    result is False where the caller has a policy of its own (numactl), or where the system refuses,
    as in some containers. Pages are then where that policy says, or on the node that allocates.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not nodes or _has_policy():
        return False
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    failure: int = ctypes.CDLL(None).syscall(
        number,
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        _INTERLEAVE,
        words,
        # The kernel uses one bit less than this length.
        ctypes.c_ulong(len(words) * _WORD_BITS + 1),
        0,
    )
    return failure == 0


def _nodes(name: str) -> set[int]:
    """Return the nodes of one of the kernel's lists: "0,2-4" -> {0, 2, 3, 4}."""
    try:
        node_list = (NODES_PATH / name).read_text().strip()
    except OSError:
        return set()
    spans = (part.split("-") for part in node_list.split(",") if part)
    return {node for span in spans for node in range(int(span[0]), int(span[-1]) + 1)}


def _has_policy() -> bool:
    """Return True where nodes were chosen for the memory of this thread, as numactl does."""
    mode = ctypes.c_int(0)
    number = _GET_MEMPOLICY[platform.machine()]
    no_nodes, no_address = ctypes.c_ulong(0), None
    ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, no_nodes, no_address, 0)
    return mode.value != 0
