"""Prove every file of a directory tier and put right what is wrong, also beside daemons that use it.

Nothing is right only because this has looked at it: readers prove what they read anyway.  It tells of damage before a
reader finds it, and gives back the room of what nobody will ever read.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hybridkv.storage.tiers.files import (
    QUIET_SECONDS,
    Damage,
    FileName,
    clock,
    homes,
    name_of,
    parse_name,
    prove_file,
    set_aside,
    silent_seconds,
    taken_bytes,
)

FINDINGS_MAX = 1000
"""Files that are told of by their names."""
_TMP = "tmp"


class Finding(NamedTuple):
    """A damaged file."""

    path: str
    damage: Damage
    done: str
    """What was done about it; empty = nothing."""


@dataclass
class WriterReport:
    """What was found in one writer's directory."""

    name: str
    is_alive: bool
    whole: int = 0
    whole_bytes: int = 0
    """That the whole records take."""
    damaged: Counter[Damage] = field(default_factory=Counter)
    damaged_bytes: int = 0
    repaired: int = 0
    """Of the damaged ones."""
    foreign: int = 0
    """Files that are not the tier's."""
    leftovers: int = 0
    """In tmp. Those of a writer that lives are being written."""
    leftovers_removed: int = 0


@dataclass
class Report:
    """What was found."""

    writers: list[WriterReport] = field(default_factory=list)
    quarantined: int = 0
    quarantined_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """Files, of all writers."""
        return sum(writer.damaged.total() for writer in self.writers)

    @property
    def repaired(self) -> int:
        """Of the damaged ones."""
        return sum(writer.repaired for writer in self.writers)


def list_files(root: Path) -> dict[Path, list[str]]:
    """The files of each writer, by its directory."""
    return {home: [path for path in _files(home) if path != str(home / "alive")] for home in homes(root)}


def fsck(root: Path, files: dict[Path, list[str]], repair: bool, step: Callable[[], None]) -> Report:
    """Prove `files`; `step` is called after each. What is gone meanwhile is nobody's fault. Raises OSError."""
    report = Report()
    now = clock(root) if repair else time.time()
    for home, paths in files.items():
        silent = silent_seconds(home, now)
        if silent is not None:
            writer = WriterReport(home.name, silent < QUIET_SECONDS)
            report.writers.append(writer)
            _Home(root, home, writer, report, repair).check(paths, step)
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(root / "quarantine"):
            with contextlib.suppress(FileNotFoundError):
                report.quarantined_bytes += taken_bytes(entry.stat(follow_symlinks=False))
                report.quarantined += 1
    return report


class _Home:
    """The check of one writer's directory."""

    def __init__(self, root: Path, home: Path, writer: WriterReport, report: Report, repair: bool) -> None:
        self._root = root
        self._home = home
        self._writer = writer
        self._report = report
        self._repair = repair
        self._moved: list[tuple[str, FileName, str]] = []
        """Whole records of another name: (where they were, their own name, where they are until all are there)."""

    def check(self, paths: list[str], step: Callable[[], None]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._check(path)
            step()
        for path, name, aside in self._moved:
            self._found(path, Damage.MISNAMED, self._place(name, aside))

    def _check(self, path: str) -> None:
        taken = taken_bytes(os.stat(path, follow_symlinks=False))
        folder, base = os.path.split(os.path.relpath(path, self._home))
        name = parse_name(base)
        if folder.split(os.sep)[0] == _TMP:
            self._leftover(path)
            return
        if name is None or len(folder) != 2 or os.path.islink(path):
            self._writer.foreign += 1
            return
        proof = prove_file(path, name)
        if proof is None:
            return
        damage = proof.damage
        if damage is None and os.path.join(folder, base) != name.path:
            damage = Damage.MISNAMED
        if damage is None:
            self._writer.whole += 1
            self._writer.whole_bytes += taken
            return
        self._writer.damaged[damage] += 1
        self._writer.damaged_bytes += taken
        if self._repair and damage is Damage.MISNAMED and not self._writer.is_alive:
            assert proof.record is not None, "a whole record has a name"
            # Two files that have each other's names must both be out of the way first.
            aside = str(self._home / _TMP / f"fsck-{len(self._moved)}")
            os.makedirs(self._home / _TMP, mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, aside)
                self._moved.append((path, name_of(proof.record), aside))
            return
        # A daemon that lives knows its files, and would not know, nor count, one that appears under another name.
        self._found(path, damage, self._set_aside(path) if self._repair else "")

    def _leftover(self, path: str) -> None:
        self._writer.leftovers += 1
        if self._repair and not self._writer.is_alive:
            with contextlib.suppress(OSError):
                os.unlink(path)
                self._writer.leftovers_removed += 1

    def _set_aside(self, path: str) -> str:
        try:
            set_aside(self._root, path)
        except FileNotFoundError:
            return "it is gone"
        except OSError:
            return ""
        return "put aside"

    def _place(self, name: FileName, aside: str) -> str:
        to = self._home / name.path
        try:
            to.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                os.link(aside, to)
            except FileExistsError:
                pass
            except OSError:
                # A file system without hard links; nobody else makes files here, for the writer is silent.
                if not os.path.lexists(to):
                    os.rename(aside, to)
                    return f"renamed to {name.text}"
            else:
                os.unlink(aside)
                return f"renamed to {name.text}"
            os.unlink(aside)
        except OSError:
            return self._set_aside(aside)
        return "removed, for it is there already"

    def _found(self, path: str, damage: Damage, done: str) -> None:
        self._writer.repaired += bool(done)
        if len(self._report.findings) < FINDINGS_MAX:
            self._report.findings.append(Finding(path, damage, done))


def _files(home: Path) -> Iterator[str]:
    for folder, _, names in os.walk(home):
        yield from (os.path.join(folder, name) for name in sorted(names))
