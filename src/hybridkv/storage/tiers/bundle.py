"""Many records as one file: a tar with a member per record, named like its file, and one that says that this is all.

Whoever reads one proves every record: what carried the file may have changed any byte of it.
"""

import io
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.storage.record import Record
from hybridkv.storage.tiers.files import Damage, Proof, name_of, parse_name, prove

LAST = "hybridkv-export"
"""The name of the last member; it says the version and how many records there are."""
VERSION = 1


class Bundle:
    """A bundle that is being written."""

    def __init__(self, file: BinaryIO) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.GNU_FORMAT)  # noqa: SIM115  # see `close`
        self.records = 0
        self.bytes = 0

    def add(self, record: Record, memory: memoryview) -> None:
        """One more record. Raises OSError."""
        self._add(name_of(record).text, memory)
        self.records += 1
        self.bytes += len(memory)

    def close(self) -> None:
        """That was all."""
        self._add(LAST, f"{VERSION} {self.records}\n".encode())
        self._tar.close()

    def _add(self, name: str, content: memoryview | bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        info.mode = 0o600
        self._tar.addfile(info, io.BytesIO(content))


class Member(NamedTuple):
    """What one member of a bundle was found to be."""

    name: str
    proof: Proof


def read_bundle(file: BinaryIO, setting: str) -> Iterator[Member]:
    """Every record, as soon as it was read; raises ConfigError where `file` is no bundle of this version.

    Where the end is missing the last one has no name, and is damaged.
    """
    works = "a file of hybridkv export works"
    records, is_over = 0, False
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            for info in tar:
                content = tar.extractfile(info) if info.isreg() and not info.issparse() else None
                if content is None:
                    yield Member(info.name, Proof(Damage.MISNAMED))
                elif info.name == LAST:
                    version, _, count = content.read(64).decode("ascii", "replace").strip().partition(" ")
                    if version != str(VERSION):
                        raise ConfigError(f"{setting} is of another version ({version[:8]!r}); {works}")
                    is_over = count == str(records)
                else:
                    records += 1
                    yield Member(info.name, prove(content, info.size, parse_name(info.name)))
    except (tarfile.TarError, EOFError) as error:
        if not records:
            raise ConfigError(f"{setting} is no bundle of records ({error}); {works}") from error
    if not is_over:
        yield Member("", Proof(Damage.LENGTH))
