"""The file of the bounds that were set at run time, so that the next daemon has them too.

It is JSON, lies in the directory of a disk tier, or else in the user's directory of states, and is
replaced as a whole. A file that cannot be read bounds nobody, and keeps no daemon from serving.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from hybridkv.daemon.file_thread import FileThread

logger = logging.getLogger("hybridkv.daemon")

FILE_BYTES_MAX = 1 << 20
_UNUSABLE = "the file of quotas %s cannot be used (%s): quotas set at run time last until the end"


TenantDigits = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Bound = Annotated[int, msgspec.Meta(ge=0)]


class StoredQuotas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file. Sizes are in bytes, and None is no bound."""

    of_users: bool  # Whether a tenant is a user, and not a salt.
    own: dict[TenantDigits, Bound | None]  # By tenant.
    default: Bound | None = None
    has_default: bool = False  # False where the default is that of `serve`.


class QuotaFile:
    """Reads and writes the file in `thread`."""

    def __init__(self, path: Path, on_read: Callable[[StoredQuotas], None]) -> None:
        """`on_read` is called by the thread, at most once, with what the file had at the start."""
        self.path = path
        self._on_read = on_read
        self.thread = FileThread(
            "hybridkv-quotas", lambda error: logger.warning(_UNUSABLE, self.path, error)
        )
        self.thread.put_work(self._read)

    def save_quotas(self, quotas: StoredQuotas) -> None:
        """Replace the file."""
        self.thread.put_work(lambda: self._write(quotas))

    def _read(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        with os.fdopen(fd, "rb") as file:
            content = file.read(FILE_BYTES_MAX)
        self._on_read(msgspec.json.decode(content, type=StoredQuotas))

    def _write(self, quotas: StoredQuotas) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path.with_name(f"{self.path.name}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(quotas))
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, self.path)
        self.thread.error = ""
