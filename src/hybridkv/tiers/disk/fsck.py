"""Prove every file of a directory tier and repair what is wrong, also beside daemons that use it.

Readers prove what they read in any case.  This finds damage before a reader does, and gives back
the room of what nobody will ever read.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hybridkv.tiers.disk import files
from hybridkv.tiers.disk.files import FileDamage, FileName, prove_file
from hybridkv.tiers.disk.writers import QUIET_SECONDS, TMP, clock, homes, silent_seconds

FINDINGS_MAX = 1000
"""Damaged files that the report names."""


class FileFinding(NamedTuple):
    """A damaged file."""

    path: str
    damage: FileDamage
    done: str
    """What was done about it; empty = nothing."""


@dataclass
class WriterReport:
    """What was found in one writer's directory, in files."""

    name: str
    is_alive: bool
    whole: int = 0
    whole_bytes: int = 0
    """Bytes that the whole records take."""
    damaged: Counter[FileDamage] = field(default_factory=Counter)
    damaged_bytes: int = 0
    repaired: int = 0
    """How many of the damaged files were repaired."""
    foreign: int = 0
    """Files that are not the tier's."""
    leftovers: int = 0
    """Files in tmp; a writer that lives is writing them."""
    leftovers_removed: int = 0


@dataclass
class FsckReport:
    """What was found in a directory."""

    writers: list[WriterReport] = field(default_factory=list)
    quarantined: int = 0
    quarantined_bytes: int = 0
    findings: list[FileFinding] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """Damaged files of all writers."""
        return sum(writer.damaged.total() for writer in self.writers)

    @property
    def repaired(self) -> int:
        """How many of the damaged files were repaired."""
        return sum(writer.repaired for writer in self.writers)


def list_files(root: Path) -> dict[Path, list[str]]:
    """The files of each writer, by its directory. Raises OSError."""
    return {
        home: [path for path in _files(home) if path != str(home / "alive")] for home in homes(root)
    }


def fsck(
    root: Path, paths: dict[Path, list[str]], repair: bool, step: Callable[[], None]
) -> FsckReport:
    """Prove the files of `list_files`; `step` is called after each. Raises OSError.

    A file that is gone meanwhile is no damage.
    """
    report = FsckReport()
    now = clock(root) if repair else time.time()
    for home, some in paths.items():
        silent = silent_seconds(home, now)
        if silent is not None:
            writer = WriterReport(home.name, silent < QUIET_SECONDS)
            report.writers.append(writer)
            _WriterCheck(root, home, writer, report, repair).check(some, step)
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(root / "quarantine"):
            with contextlib.suppress(FileNotFoundError):
                report.quarantined_bytes += files.taken_bytes(entry.stat(follow_symlinks=False))
                report.quarantined += 1
    return report


class _WriterCheck:
    """The check of one writer's directory."""

    def __init__(
        self, root: Path, home: Path, writer: WriterReport, report: FsckReport, repair: bool
    ) -> None:
        self._root = root
        self._home = home
        self._writer = writer
        self._report = report
        self._repair = repair
        self._misnamed: list[tuple[str, FileName, str]] = []
        """Whole records of another name: the path, their own name, and where they are for now."""

    def check(self, paths: list[str], step: Callable[[], None]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._check(path)
            step()
        for path, name, aside in self._misnamed:
            self._found(path, FileDamage.MISNAMED, self._rename(name, aside))

    def _check(self, path: str) -> None:
        writer = self._writer
        taken = files.taken_bytes(os.stat(path, follow_symlinks=False))
        folder, base = os.path.split(os.path.relpath(path, self._home))
        name = files.parse_name(base)
        if folder.split(os.sep)[0] == TMP:
            self._leftover(path)
            return
        if name is None or len(folder) != 2 or os.path.islink(path):
            writer.foreign += 1
            return
        proof = prove_file(path, name)
        if proof is None:
            return
        damage = proof.damage
        if damage is None and os.path.join(folder, base) != name.path:
            damage = FileDamage.MISNAMED
        if damage is None:
            writer.whole += 1
            writer.whole_bytes += taken
            return
        writer.damaged[damage] += 1
        writer.damaged_bytes += taken
        # A daemon that lives would not know, nor count, a file that appears under another name.
        if self._repair and damage is FileDamage.MISNAMED and not writer.is_alive:
            assert proof.record is not None, "a whole record has a name"
            # Two files that have each other's names must both be out of the way first.
            aside = str(self._home / TMP / f"fsck-{len(self._misnamed)}")
            os.makedirs(self._home / TMP, mode=0o700, exist_ok=True)
            os.rename(path, aside)
            self._misnamed.append((path, files.name_of(proof.record), aside))
        else:
            self._found(path, damage, self._set_aside(path) if self._repair else "")

    def _leftover(self, path: str) -> None:
        self._writer.leftovers += 1
        if self._repair and not self._writer.is_alive:
            with contextlib.suppress(OSError):
                os.unlink(path)
                self._writer.leftovers_removed += 1

    def _set_aside(self, path: str) -> str:
        try:
            files.set_aside(self._root, path)
        except FileNotFoundError:
            return "it is gone"
        except OSError:
            return ""
        return "put aside"

    def _rename(self, name: FileName, aside: str) -> str:
        to = self._home / name.path
        done = "removed, for it is there already"
        try:
            to.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                os.link(aside, to)
                done = f"renamed to {name.text}"
            except FileExistsError:
                pass
            except OSError:
                # The file system has no hard links; the silent writer makes no files meanwhile.
                if not os.path.lexists(to):
                    os.rename(aside, to)
                    return f"renamed to {name.text}"
            os.unlink(aside)
        except OSError:
            return self._set_aside(aside)
        return done

    def _found(self, path: str, damage: FileDamage, done: str) -> None:
        self._writer.repaired += bool(done)
        if len(self._report.findings) < FINDINGS_MAX:
            self._report.findings.append(FileFinding(path, damage, done))


def _files(home: Path) -> Iterator[str]:
    for folder, _, names in os.walk(home):
        yield from (os.path.join(folder, name) for name in sorted(names))
