"""Many records as one file: a tar with a member per record, named like its file, and a last one.

The last member says that the file is complete.  A reader proves every record, since what carried
the file may have changed any byte of it.
"""

import io
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.tiers.disk.files import FileDamage, FileProof, name_of, parse_name, prove
from hybridkv.tiers.record import Record

LAST = "hybridkv-export"
"""The name of the last member, which says the version and how many records there are."""
VERSION = 1


class Bundle:
    """A bundle that is being written."""

    def __init__(self, file: BinaryIO) -> None:
        self._tar = tarfile.TarFile.open(fileobj=file, mode="w|", format=tarfile.GNU_FORMAT)
        self.records = 0
        self.bytes = 0

    def add(self, record: Record, memory: memoryview) -> None:
        """Write one more record. Raises OSError."""
        self._add(name_of(record).text, memory)
        self.records += 1
        self.bytes += len(memory)

    def close(self) -> None:
        """Write the last member. Raises OSError."""
        self._add(LAST, f"{VERSION} {self.records}\n".encode())
        self._tar.close()

    def _add(self, name: str, content: memoryview | bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        info.mode = 0o600
        self._tar.addfile(info, io.BytesIO(content))


class BundleMember(NamedTuple):
    """One member of a bundle, read and proved."""

    name: str
    proof: FileProof


def read_bundle(file: BinaryIO, setting: str) -> Iterator[BundleMember]:
    """Every record, as soon as it is read; where the end is missing the last has no name.

    Raises ConfigError where `file` is no bundle of this version.
    """
    works = "a file of hybridkv export works"
    records, is_over = 0, False
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            for info in tar:
                content = tar.extractfile(info) if info.isreg() and not info.issparse() else None
                if content is None:
                    yield BundleMember(info.name, FileProof(FileDamage.MISNAMED))
                elif info.name == LAST:
                    text = content.read(64).decode("ascii", "replace")
                    version, _, count = text.strip().partition(" ")
                    if version != str(VERSION):
                        what = f"{setting} is of another version ({version[:8]!r})"
                        raise ConfigError(what, works)
                    is_over = count == str(records)
                else:
                    records += 1
                    yield BundleMember(info.name, prove(content, info.size, parse_name(info.name)))
    except (tarfile.TarError, EOFError) as error:
        if not records:
            raise ConfigError(f"{setting} is no bundle of records ({error})", works) from error
    if not is_over:
        yield BundleMember("", FileProof(FileDamage.LENGTH))
