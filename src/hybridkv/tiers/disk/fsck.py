"""Prove every file of a directory tier, and repair damage, also while daemons use the directory.

Readers prove what they read in any case. fsck finds damage before a reader does, and frees the room
of files that no reader can use.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hybridkv.tiers.coding import PLAIN, Coding
from hybridkv.tiers.disk import files
from hybridkv.tiers.disk.files import FileDamage, FileName, FileProof, prove_file
from hybridkv.tiers.disk.writers import QUIET_SECONDS, TMP, clock, homes, silent_seconds

FINDINGS_MAX = 1000  # Damaged files that the report names.


class FileFinding(NamedTuple):
    """A damaged file, as the report names it."""

    path: str
    damage: FileDamage
    done: str  # The repair, for people. Empty = none.


@dataclass
class WriterReport:
    """The result of one writer's directory. Counts are of files."""

    name: str
    is_alive: bool
    whole: int = 0
    whole_bytes: int = 0  # Bytes that the whole records take.
    undecodable: int = 0  # With a sound header. The bytes after it cannot be proven.
    damaged: Counter[FileDamage] = field(default_factory=Counter)
    damaged_bytes: int = 0
    repaired: int = 0  # Damaged files that were repaired.
    foreign: int = 0  # Files that are not the tier's.
    leftovers: int = 0
    """Files in tmp, which a writer that lives is writing, and removed ones that NFS keeps."""
    leftovers_removed: int = 0

    def count_sound(self, proof: FileProof, taken_bytes: int) -> None:
        """Count a file in which no damage was found."""
        if proof.is_undecodable:
            self.undecodable += 1
        else:
            self.whole += 1
            self.whole_bytes += taken_bytes


@dataclass
class FsckReport:
    """All that was found and repaired in a directory of the tier."""

    writers: list[WriterReport] = field(default_factory=list)
    quarantined: int = 0
    quarantined_bytes: int = 0
    findings: list[FileFinding] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """The number of damaged files of all writers."""
        return sum(writer.damaged.total() for writer in self.writers)

    @property
    def repaired(self) -> int:
        """The number of damaged files that were repaired."""
        return sum(writer.repaired for writer in self.writers)


def list_files(root: Path) -> dict[Path, list[str]]:
    """Returns the paths of each writer's files, by its directory. Raises OSError."""
    found: dict[Path, list[str]] = {}
    for home in homes(root):
        folders = os.walk(home)
        paths = (os.path.join(at, name) for at, _, names in folders for name in sorted(names))
        found[home] = [path for path in paths if path != str(home / "alive")]
    return found


def fsck(
    root: Path,
    paths: dict[Path, list[str]],
    repair: bool,
    step: Callable[[], None],
    coding: Coding = PLAIN,
) -> FsckReport:
    """Prove the files of `list_files`, and call `step` after each. Raises OSError.

    `coding` has the key of encrypted files. A file that is gone meanwhile is no damage.
    """
    report = FsckReport()
    now = _files_clock(root)
    for home, own_paths in paths.items():
        silent = silent_seconds(home, now)
        if silent is not None:
            writer = WriterReport(home.name, silent < QUIET_SECONDS)
            report.writers.append(writer)
            check = _WriterCheck(
                root=root, home=home, writer=writer, report=report, repair=repair, coding=coding
            )
            check.check_all(own_paths, step)
    with contextlib.suppress(FileNotFoundError):
        # No damaged file was ever put aside, so the directory for them does not exist.
        for entry in os.scandir(root / "quarantine"):
            with contextlib.suppress(FileNotFoundError):
                # A running daemon removed the file that was put aside.
                report.quarantined_bytes += files.taken_bytes(entry.stat(follow_symlinks=False))
                report.quarantined += 1
    return report


def _files_clock(root: Path) -> float:
    """Returns the time by the files' clock, or by this node's where the files cannot be changed."""
    try:
        return clock(root)
    except OSError:
        return time.time()


class MisnamedFile(NamedTuple):
    """A whole record in a file of another name."""

    path: str  # Where it was found.
    name: FileName  # The name that it should have.
    aside: str  # The path where it is for now.


@dataclass
class _WriterCheck:
    """The check of one writer's directory."""

    root: Path
    home: Path
    writer: WriterReport
    report: FsckReport
    repair: bool
    coding: Coding
    misnamed: list[MisnamedFile] = field(default_factory=list)
    """Files that get their right names after all others were checked."""

    def check_all(self, paths: list[str], step: Callable[[], None]) -> None:
        """Check and repair the files, and call `step` after each."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                # A running daemon evicted the record before it could be proved.
                self._check(path)
            step()
        for file in self.misnamed:
            self._add_finding(file.path, FileDamage.MISNAMED, self._rename(file.name, file.aside))

    def _check(self, path: str) -> None:
        writer, may_move = self.writer, self.repair and not self.writer.is_alive
        taken_bytes = files.taken_bytes(os.stat(path, follow_symlinks=False))
        folder, base = os.path.split(os.path.relpath(path, self.home))
        name = files.parse_name(base)
        if folder.split(os.sep)[0] == TMP or files.is_silly_renamed(base):
            writer.leftovers += 1
            if may_move:
                with contextlib.suppress(OSError):
                    # A leftover that cannot be removed stays, and the report tells it from the
                    # removed ones.
                    os.unlink(path)
                    writer.leftovers_removed += 1
            return
        if name is None or len(folder) != 2 or os.path.islink(path):
            writer.foreign += 1
            return
        proof = prove_file(path, name, self.coding)
        if proof is None:
            return
        damage = proof.damage
        if damage is None and os.path.join(folder, base) != name.path:
            damage = FileDamage.MISNAMED
        if damage is None:
            writer.count_sound(proof, taken_bytes)
            return
        writer.damaged[damage] += 1
        writer.damaged_bytes += taken_bytes
        # A daemon that lives would neither know nor count a file that appears under another name.
        if may_move and damage is FileDamage.MISNAMED:
            assert proof.record is not None, "a whole record has a name"
            # Two files that have each other's names must both be out of the way first.
            aside = str(self.home / TMP / f"fsck-{len(self.misnamed)}")
            os.makedirs(self.home / TMP, mode=0o700, exist_ok=True)
            os.rename(path, aside)
            self.misnamed.append(MisnamedFile(path, files.name_of(proof.record), aside))
        else:
            self._add_finding(path, damage, self._set_aside(path) if self.repair else "")

    def _set_aside(self, path: str) -> str:
        try:
            files.set_aside(self.root, path)
        except OSError as error:
            return "it is gone" if isinstance(error, FileNotFoundError) else ""
        return "put aside"

    def _rename(self, name: FileName, aside: str) -> str:
        to = self.home / name.path
        done = f"renamed to {name.text}"
        try:
            to.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                os.link(aside, to)
            except OSError:
                if not os.path.lexists(to):
                    # The file system has no hard links. The silent writer makes no files meanwhile.
                    os.rename(aside, to)
                    return done
                done = "removed, for it is there already"
            os.unlink(aside)
        except OSError:
            return self._set_aside(aside)
        return done

    def _add_finding(self, path: str, damage: FileDamage, done: str) -> None:
        self.writer.repaired += bool(done)
        if len(self.report.findings) < FINDINGS_MAX:
            self.report.findings.append(FileFinding(path, damage, done))
