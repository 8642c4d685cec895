"""`hybridkv export`: the objects of a directory, or of a daemon's memory, as one file."""

import argparse
import contextlib
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hybridkv.cli.progress import progress
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.paths import check_socket_path
from hybridkv.core.sizes import format_size
from hybridkv.lab.bundle import Bundle
from hybridkv.shm.arena import attach_arena
from hybridkv.shm.slots import (
    HEADER_BYTES,
    SHORT_HASH_BYTES,
    SlotHeader,
    committed_slots,
    is_signed,
    slot_bytes,
    unpack_header,
)
from hybridkv.tiers.disk.files import FileName, prove_file, records
from hybridkv.tiers.disk.writers import check_root, homes
from hybridkv.tiers.record import Record, RecordName, head_bytes, write_head

EXIT_DAMAGED = 1
Wanted = Callable[[bytes], bool]
"""Whether the objects of an identity are exported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `export`."""
    parser.add_argument("file", metavar="FILE", help="what to write; it appears when it is whole")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--disk", metavar="DIRECTORY", help="of hybridkv serve; daemons may use it")
    source.add_argument("--socket", metavar="PATH", help="a daemon, for what it has in memory")
    parser.add_argument(
        "--identity",
        default="",
        metavar="HEX_PREFIX",
        help="only objects of this identity, as stats tells it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print; 1 if anything was wrong, and left out."""
    prefix = arguments.identity.lower()
    if prefix.strip("0123456789abcdef") or len(prefix) > 2 * HASH_BYTES:
        raise ConfigError(
            f"identity={arguments.identity!r} is not the beginning of an identity",
            'hexadecimal digits as "hybridkv stats" tells them work',
        )
    counts: Counter[str] = Counter()

    def wanted(identity: bytes) -> bool:
        return identity.hex().startswith(prefix)

    with _appears(Path(arguments.file)) as file:
        bundle = Bundle(file)
        if arguments.disk is not None:
            _from_disk(Path(arguments.disk), bundle, wanted, counts)
        else:
            _from_memory(check_socket_path(arguments.socket, "socket"), bundle, wanted, counts)
        bundle.close()
    wrong = counts["damaged"]
    if arguments.json:
        print(json.dumps({"objects": bundle.records, "bytes": bundle.bytes, **counts}, indent=2))
    else:
        print(f"exported {bundle.records} objects, {format_size(bundle.bytes)}")
        for why, count in sorted(counts.items()):
            print(f"left out {count}: {why}")
    return EXIT_DAMAGED if wrong else 0


@contextlib.contextmanager
def _appears(path: Path) -> Iterator[BinaryIO]:
    """The new file at `path`, which is there as a whole or not at all."""
    with contextlib.suppress(OSError):
        # To replace a pipe or a device would write to no reader of it.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(
                f"export: {path} is no file that could be replaced", "the name of a new one works"
            )
    part = path.with_name(f"{path.name}.part")
    try:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(part, flags, 0o600), "wb") as file:
                yield file
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"export: {path} cannot be written ({error.strerror})",
            "a file in a directory with room works",
        ) from error


def _from_disk(root: Path, bundle: Bundle, wanted: Wanted, counts: Counter[str]) -> None:
    check_root(root, "disk")
    found: list[tuple[float, str, FileName]] = []
    try:
        for home in homes(root):
            for path, name in records(home):
                if wanted(name.key[:HASH_BYTES]):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((os.stat(path).st_mtime, path, name))
    except OSError as error:
        raise ConfigError(
            f"disk: {root} cannot be read ({error.strerror})", "a directory that you may read works"
        ) from error
    # The oldest objects come first: an import takes the last ones for the youngest.
    found.sort()
    known: set[bytes] = set()
    with progress("exporting", len(found)) as step:
        for _, path, name in found:
            if name.key not in known:
                proof = prove_file(path, name)
                if proof is None:
                    pass  # a daemon removed it
                elif proof.damage is not None or proof.record is None:
                    counts["damaged"] += 1
                else:
                    bundle.add(proof.record, proof.memory)
                    known.add(name.key)
            step()


def _from_memory(socket_path: str, bundle: Bundle, wanted: Wanted, counts: Counter[str]) -> None:
    with ControlClient(socket_path) as control:
        prefixes = {
            (engine.namespace, group.gid)
            for engine in control.engines()
            for group in engine.geometry.groups
            if group.kind is GroupKind.FULL
        }
        arena = attach_arena(Path(control.welcome.arena_path), control.welcome.arena_bytes)
        try:
            values = control.stats().values
            memory = arena.memory[: int(values["bytes_reserved"])]
            with progress("exporting", int(values["objects"])) as step:
                for offset, header in committed_slots(memory):
                    if wanted(header.namespace):
                        is_prefix = (header.namespace, header.gid) in prefixes
                        result = _add_slot(memory, offset, header, is_prefix, bundle)
                        counts.update([result] if result else [])
                    step()
            memory.release()
        finally:
            arena.close()


def _add_slot(
    memory: memoryview, offset: int, header: SlotHeader, is_prefix: bool, bundle: Bundle
) -> str:
    """Add a slot of the memory that others change meanwhile; returns why not, or nothing."""
    size = slot_bytes(header.part_bytes, header.parts)
    if offset + size > len(memory):
        return "changed meanwhile"
    copy = memoryview(bytearray(memory[offset : offset + size]))
    if unpack_header(bytes(memory[offset : offset + HEADER_BYTES])) != header:
        return "changed meanwhile"
    signed = is_signed(copy, header.part_bytes, header.parts, header.generation)
    if signed is None:
        # An engine with `checksum: "off"` wrote it, so nobody can prove its bytes.
        return "not signed"
    if not signed:
        return "damaged"
    record = Record(
        RecordName(header.namespace, header.gid, header.chunk_hash),
        header.part_bytes,
        header.parts,
        header.generation,
        (header.parent_short if is_prefix else 0).to_bytes(SHORT_HASH_BYTES, "little"),
        header.tenant,
    )
    head = memoryview(bytearray(head_bytes(header.parts)))
    write_head(record, copy, head)
    copy[: len(head)] = head
    bundle.add(record, copy)
    return ""
