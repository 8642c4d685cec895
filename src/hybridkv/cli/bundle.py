"""`hybridkv export`, `import` and `fsck`: the objects of a directory or a daemon.

An export is a tar with a member for each record, named like the record's file. The last member says
that the export is complete. A reader proves every record, as any byte may have changed on the way.
"""

import argparse
import contextlib
import io
import os
import stat
import tarfile
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hybridkv.cli.arguments import (
    JSON,
    command,
    control_of,
    ended_by_exception,
    group_of,
    option,
    or_refuse,
    switch,
)
from hybridkv.cli.terminal import PlainConsole, new_table, plain, print_json, progress
from hybridkv.core.errors import ConfigError
from hybridkv.core.geometry import GroupKind
from hybridkv.core.keys import HASH_BYTES
from hybridkv.core.sizes import format_size
from hybridkv.core.tier_urls import disk_url, parse_key, parse_tier
from hybridkv.shm.arena import arena_seen, attach_arena
from hybridkv.shm.slots import (
    HEADER_BYTES,
    SHORT_HASH_BYTES,
    SlotHeader,
    committed_slots,
    is_signed,
    part_digests,
    slot_bytes,
    unpack_header,
)
from hybridkv.tiers.coding import PLAIN, Coding
from hybridkv.tiers.contract import FullError, TierError, WriteRequest
from hybridkv.tiers.disk import files
from hybridkv.tiers.disk.files import FileDamage, FileName, FileProof
from hybridkv.tiers.disk.fsck import fsck, list_files
from hybridkv.tiers.disk.tier import DiskTier
from hybridkv.tiers.disk.writers import check_root, homes
from hybridkv.tiers.encoded import EncodedTier
from hybridkv.tiers.encryption import read_key
from hybridkv.tiers.record import Record, RecordName, head_bytes, write_head

TEND_SECONDS = 1.0
END_MEMBER = "hybridkv-export"
"""The name of the last member, which has the version and the number of records."""
VERSION = 1
_WORKS = "a file of hybridkv export works"


class LeftOut(StrEnum):
    """Why an object is not in an export, or not in the directory of an import."""

    CHANGED = "changed meanwhile"
    UNSIGNED = "not signed"  # An engine with `checksum: "off"` wrote it: nothing proves its bytes.
    DAMAGED = "damaged"
    CUT = "the file ends too early"
    THERE = "there already"
    NO_ROOM = "no room"
    UNWRITTEN = "not written"


class Bundle:
    """An export that is being written."""

    def __init__(self, file: BinaryIO) -> None:
        # A stream ("w|") writes when it is collected too, where its file is closed already.
        self._tar = tarfile.TarFile(fileobj=file, mode="w", format=tarfile.GNU_FORMAT)
        self.records = self.bytes = 0

    def write_record(self, record: Record, memory: memoryview) -> None:
        """Write one more record. Raises OSError."""
        self._add(files.name_of(record).text, memory)
        self.records += 1
        self.bytes += len(memory)

    def close(self) -> None:
        """Write the last member. Raises OSError."""
        self._add(END_MEMBER, f"{VERSION} {self.records}\n".encode())
        self._tar.close()

    def _add(self, name: str, content: memoryview | bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), 0o600
        self._tar.addfile(info, io.BytesIO(content))


_KEY = option("--key file:PATH", "the key of encrypted objects, as in a tier's URL")


def _coding(arguments: argparse.Namespace) -> Coding:
    """Returns how objects are decoded. Raises ConfigError where --key names no key."""
    if arguments.key is None:
        return PLAIN
    return Coding(key=read_key(parse_key(arguments.key, "--key"), "--key"), takes_plain=True)


class _Member(NamedTuple):
    """A member of an export that was read."""

    name: str  # Empty = the member that is missing at the end of a file that was cut.
    proof: FileProof


def _count_of_end(content: bytes, setting: str) -> str:
    """Returns the number of records that the last member says. Raises ConfigError (version)."""
    version, _, count = content.decode("ascii", "replace").strip().partition(" ")
    if version != str(VERSION):
        what = f"{setting} is of another version ({version[:8]!r})"
        raise ConfigError(what, "its own version of hybridkv works")
    return count


def _check_version(file: BinaryIO, setting: str) -> None:
    """Raise ConfigError where the last member of `file` has another version.

    A pipe has its last member at its end alone, and a file that was cut has none.
    """
    if not file.seekable():
        return
    block = tarfile.BLOCKSIZE
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, size_bytes - 2 * tarfile.RECORDSIZE) // block * block)
    blocks = iter(lambda: file.read(block), b"")
    for header in blocks:
        with contextlib.suppress(tarfile.HeaderError):
            # Most blocks at the end of a file are no headers of members.
            if tarfile.TarInfo.frombuf(header, "ascii", "replace").name == END_MEMBER:
                _count_of_end(next(blocks, b"")[:64].rstrip(b"\0"), setting)
    file.seek(0)


def _read(file: BinaryIO, setting: str, coding: Coding) -> Iterator[_Member]:
    """Yield every member with its proof, as soon as it is read.

    Raises ConfigError where `file` is no export of this version.
    """
    records, is_over = 0, False
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            for info in tar:
                content = tar.extractfile(info) if info.isreg() and not info.issparse() else None
                if content is None:
                    yield _Member(info.name, FileProof(FileDamage.MISNAMED))
                elif info.name == END_MEMBER:
                    is_over = _count_of_end(content.read(64), setting) == str(records)
                else:
                    records += 1
                    name = files.parse_name(info.name)
                    yield _Member(info.name, files.prove(content, info.size, name, coding))
    except (tarfile.TarError, EOFError) as error:
        if not records:
            raise ConfigError(f"{setting} is no bundle of records ({error})", _WORKS) from error
    if not is_over:
        yield _Member("", FileProof(FileDamage.LENGTH))


@command(
    option("file FILE", "what to write; it appears when it is whole"),
    [
        option("--disk DIRECTORY", "of hybridkv serve; daemons may use it"),
        option("--socket PATH", "a daemon, for what it has in memory"),
    ],
    option("--identity HEX_PREFIX", "only objects of this identity, as stats tells it", default=""),
    switch("--force", "replace FILE where it exists"),
    _KEY,
    JSON,
)
def run_export(arguments: argparse.Namespace) -> int:
    """Write the file and print. Returns 1 if an object was left out because it is wrong."""
    prefix = arguments.identity.lower()
    if prefix.strip("0123456789abcdef") or len(prefix) > 2 * HASH_BYTES:
        raise ConfigError(
            f"identity={arguments.identity!r} is not the beginning of an identity",
            'hexadecimal digits as "hybridkv stats" tells them work',
        )
    with _written_whole(Path(arguments.file), arguments.force) as file:
        bundle = Bundle(file)
        if arguments.disk is not None:
            left_out = Counter(_from_disk(Path(arguments.disk), bundle, prefix, _coding(arguments)))
        else:
            left_out = Counter(_from_memory(arguments, bundle, prefix))
        bundle.close()
    sentence = f"exported {bundle.records} objects, {format_size(bundle.bytes)}"
    _print(arguments, sentence, left_out, objects=bundle.records, bytes=bundle.bytes)
    return int(bool(set(left_out) - {LeftOut.CHANGED, LeftOut.UNSIGNED}))


@contextlib.contextmanager
def _written_whole(path: Path, replaces: bool) -> Iterator[BinaryIO]:
    """Yield a file to write, which appears at `path` when it is whole, or never.

    Raises ConfigError where `path` is no regular file, or is one and not `replaces`.
    """
    with contextlib.suppress(OSError):
        # To replace a pipe or a device would write to no reader of it.
        if not stat.S_ISREG(path.lstat().st_mode):
            what = f"export: {path} is no file that could be replaced"
            raise ConfigError(what, "the name of a new one works")
        if not replaces:
            raise _exists(path)
    with (
        ended_by_exception(),
        or_refuse(f"export: {path} cannot be written", "a file in a directory with room works"),
    ):
        descriptor, part = tempfile.mkstemp(prefix=".hybridkv-export-", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                yield file
            _give_name(part, path, replaces)
        finally:
            Path(part).unlink(missing_ok=True)


def _give_name(part: str, path: Path, replaces: bool) -> None:
    """Give a whole file its name. Raises ConfigError where another has it and not `replaces`."""
    if not replaces:
        try:
            try:
                os.link(part, path)
                return
            except OSError as error:
                if isinstance(error, FileExistsError):
                    raise
                # The file system has no hard links (FAT).
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            raise _exists(path) from None
    os.replace(part, path)


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"export: {path} exists", "--force replaces it")


class _FoundRecord(NamedTuple):
    """A file of a tier's directory. Files are sorted by `used_at`."""

    used_at: float  # The file's mtime.
    path: str
    name: FileName


def _from_disk(root: Path, bundle: Bundle, prefix: str, coding: Coding) -> Iterator[str]:
    """Add the records of a directory. Yields why, for each record that was left out.

    `coding` proves encrypted records.
    """
    check_root(root, "disk")
    found: list[_FoundRecord] = []
    with or_refuse(f"disk: {root} cannot be read", "a directory that you may read works"):
        for home in homes(root):
            for path, name in files.records(home):
                if name.key[:HASH_BYTES].hex().startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        # A running daemon evicted the record while the export listed it.
                        found.append(_FoundRecord(os.stat(path).st_mtime, path, name))
    # The oldest objects come first: an import takes the last ones for the youngest.
    found.sort()
    added_keys: set[bytes] = set()
    with progress("exporting", len(found)) as step:
        for _, path, name in found:
            # There is no proof of a file that a daemon removed.
            if (
                name.key not in added_keys
                and (proof := files.prove_file(path, name, coding)) is not None
            ):
                if proof.damage is not None or proof.record is None:
                    yield LeftOut.DAMAGED
                elif proof.undecodable:
                    yield proof.undecodable
                else:
                    bundle.write_record(proof.record, proof.memory)
                    added_keys.add(name.key)
            step()


def _from_memory(arguments: argparse.Namespace, bundle: Bundle, prefix: str) -> Iterator[str]:
    """Add the objects of a daemon's memory. Yields why, for each object that was left out."""
    with control_of(arguments) as control:
        groups_with_parents = {
            (engine.namespace, group.gid)
            for engine in control.engines()
            for group in engine.geometry.groups
            if group.kind is GroupKind.FULL
        }
        arena = attach_arena(
            arena_seen(control.welcome.arena_path),
            control.welcome.arena_bytes,
            group=group_of(arguments),
        )
        with contextlib.closing(arena):
            values = control.stats().values
            memory = arena.memory[: int(values["bytes_reserved"])]
            with progress("exporting", int(values["objects"])) as step:
                for offset, header in committed_slots(memory):
                    if header.namespace.hex().startswith(prefix):
                        has_parent = (header.namespace, header.gid) in groups_with_parents
                        reason = _add_slot(memory, offset, header, has_parent, bundle)
                        if reason is not None:
                            yield reason
                    step()
            memory.release()


def _add_slot(
    memory: memoryview, offset: int, header: SlotHeader, has_parent: bool, bundle: Bundle
) -> LeftOut | None:
    """Add the object of a slot, which its daemon may change meanwhile. Returns why it did not."""
    part_bytes, parts = header.part_bytes, header.parts
    size = slot_bytes(part_bytes, parts)
    copy = memoryview(bytearray(memory[offset : offset + size]))
    header_now = unpack_header(bytes(memory[offset : offset + HEADER_BYTES]))
    if offset + size > len(memory) or header_now != header:
        return LeftOut.CHANGED
    signed = is_signed(copy, part_digests(copy, part_bytes, parts), header.generation)
    if signed is None:
        return LeftOut.UNSIGNED
    if not signed:
        return LeftOut.DAMAGED
    parent_short = header.parent_short if has_parent else 0
    record = Record(
        RecordName(header.namespace, header.gid, header.chunk_hash),
        part_bytes,
        parts,
        seed=header.generation,
        parent=parent_short.to_bytes(SHORT_HASH_BYTES, "little"),
        tenant=header.tenant,
    )
    head = memoryview(bytearray(head_bytes(parts)))
    write_head(record, copy, head)
    copy[: len(head)] = head
    bundle.write_record(record, copy)
    return None


@command(
    option("file FILE", "of hybridkv export"),
    option(
        "--disk DIRECTORY",
        "as of hybridkv serve; its daemon reads the objects at once,"
        " and keeps them within its own bound",
        required=True,
    ),
    option("--disk-bytes SIZE", 'the most to import, like "20GiB" (default: half of what is free)'),
    _KEY,
    JSON,
)
def run_import(arguments: argparse.Namespace) -> int:
    """Write the proven records into the directory and print. Returns 1 if any was wrong."""
    url = disk_url(os.path.abspath(arguments.disk), arguments.disk_bytes)
    spec = parse_tier(url, "disk", node=f"import-{uuid.uuid4().hex[:8]}")
    setting = f"import: {arguments.file}"
    coding = _coding(arguments)
    with contextlib.ExitStack() as stack:
        with or_refuse(f"{setting} cannot be read", _WORKS):
            file = stack.enter_context(open(arguments.file, "rb"))
            _check_version(file, setting)
        members = _read(file, setting, coding)
        # What is refused leaves no directory.
        first = list(islice(members, 1))
        tier = DiskTier(spec, adopts=False)
        try:
            tier.open()
        except TierError as error:
            what = f"disk: {arguments.disk} cannot be used ({error})"
            raise ConfigError(what, "another directory works") from error
        try:
            reasons = Counter(_put_all(chain(first, members), tier, coding))
        finally:
            tier.close()
            with contextlib.suppress(OSError):
                # Where the import cannot be marked as ended, daemons take it over after a longer
                # silence.
                tier.release_files()
    imported = reasons.pop(None, 0)
    left_out = Counter({reason: count for reason, count in reasons.items() if reason is not None})
    kept, size = (int(tier.gauges()[name]) for name in ("objects", "bytes"))
    within = f"{kept} of them are within the bound, {format_size(size)}"
    sentence = f"imported {imported} objects; {within}"
    _print(arguments, sentence, left_out, objects=imported, kept=kept, bytes=size)
    return int(bool(set(left_out) - {LeftOut.THERE}))


def _put_all(members: Iterable[_Member], disk: DiskTier, coding: Coding) -> Iterator[str | None]:
    """Write each record of an export. Yields None, or why the record was left out.

    With a key, plain records are encrypted.
    """
    tier = EncodedTier(disk, coding)
    tend_at = time.monotonic() + TEND_SECONDS
    with progress("importing", None) as step:
        for member, proof in members:
            if time.monotonic() >= tend_at:
                # Without this sign of life a daemon would take over the imported files.
                tier.tend()
                tend_at = time.monotonic() + TEND_SECONDS
            record = proof.record
            if proof.damage is not None or record is None:
                yield LeftOut.DAMAGED if member else LeftOut.CUT
            elif proof.undecodable:
                yield proof.undecodable
            elif tier.peek(key := record.name.key):
                yield LeftOut.THERE
            else:
                request = WriteRequest(key, [proof.memory], record.parent, record.interior)
                (error,) = tier.put([request])
                unwritten = LeftOut.NO_ROOM if isinstance(error, FullError) else LeftOut.UNWRITTEN
                yield None if error is None else unwritten
            step()


def _print(
    arguments: argparse.Namespace, sentence: str, left_out: Counter[str], **totals: int
) -> None:
    if arguments.json:
        print_json({**totals, **left_out})
        return
    print(sentence)
    for reason, count in sorted(left_out.items()):
        print(f"left out {count}: {reason}")


@command(
    option("--disk DIRECTORY", "as of hybridkv serve; daemons may use it", required=True),
    switch(
        "--repair",
        "put damaged files into quarantine, give whole ones their own names,"
        " remove what dead writers began",
    ),
    _KEY,
    JSON,
)
def run_fsck(arguments: argparse.Namespace) -> int:
    """Prove every object and print. Returns 1 if anything is damaged and stays so."""
    root, coding = Path(arguments.disk), _coding(arguments)
    check_root(root, "disk")
    works = f"a directory that you may read{' and write to' if arguments.repair else ''} works"
    with or_refuse(f"disk: {root} cannot be checked", works):
        files = list_files(root)
        with progress("proving", sum(map(len, files.values()))) as step:
            report = fsck(root, files, arguments.repair, step, coding)
    status = int(report.damaged > report.repaired)
    if arguments.json:
        totals = ("damaged", "repaired", "quarantined", "quarantined_bytes")
        writers = [
            vars(writer) | {"damaged": {str(kind): n for kind, n in sorted(writer.damaged.items())}}
            for writer in report.writers
        ]
        found = [finding._asdict() for finding in report.findings]
        counts = {name: getattr(report, name) for name in totals}
        print_json({**counts, "writers": writers, "files": found})
        return status
    left = ("writer", "lives", "damaged")
    table = new_table(
        (
            "writer",
            "lives",
            "whole",
            "bytes",
            "undecodable",
            "damaged",
            "repaired",
            "foreign",
            "leftovers",
            "removed",
        ),
        left,
    )
    for writer in report.writers:
        damaged = ", ".join(f"{count} {kind}" for kind, count in sorted(writer.damaged.items()))
        table.add_row(
            plain(writer.name),
            "yes" if writer.is_alive else "no",
            str(writer.whole),
            format_size(writer.whole_bytes),
            str(writer.undecodable),
            damaged or "0",
            str(writer.repaired),
            str(writer.foreign),
            str(writer.leftovers),
            str(writer.leftovers_removed),
        )
    PlainConsole(120).print(table)
    for finding in report.findings:
        done = f"; {finding.done}" if finding.done else ""
        print(f"{plain(finding.path)}: {finding.damage}{done}")
    print(f"quarantine: {report.quarantined} files, {format_size(report.quarantined_bytes)}")
    return status
