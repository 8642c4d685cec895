"""LoRA adapters: which weights a request's adapter has, read from its files beside the steps.

The engine's hashes name an adapter by its name and path. Bytes may be reused only with the same
weights, so the hashes of an adapter's chunks also cover its files. The files tell what the engine
has loaded only while nobody changes them. Requests with adapters that changed after the engine
started are computed and never stored, and objects are committed only after the files were seen to
be the same once more.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hybridkv.core.keys import HASH_BYTES

ADAPTERS_MAX = 1024
RECHECK_SECONDS = 1.0
_PIECE_BYTES = 1 << 20
_CHANGED = "the adapter's files changed after the engine started"
_SUFFIXES = (".json", ".safetensors", ".bin", ".pt", ".model")
_Files = tuple[tuple[str, int, int, int, int], ...]
"""(name, size, time of modification, time of change, inode), in the order of the names."""


@dataclass(eq=False, slots=True)
class Adapter:
    """One adapter of this engine: read, being read (neither is set), or refused."""

    directory: str = ""
    identity: bytes | None = None
    """Hash of its files, HASH_BYTES long; None while it is unknown and after a refusal."""
    refused: str = ""  # Why it is not served.
    checked_at: float = 0.0  # When its files were read, or compared with what was read, last.
    proven_at: float = 0.0  # When the last comparison began that found nothing changed.
    files: _Files = ()

    def refuse(self, why: str) -> None:
        """Serve it no more, which also holds for requests that are under way."""
        self.refused, self.identity = why, None

    def is_proven(self, since: float, now: float) -> bool:
        """Whether the files were still the same at some time after `since`.

        The engine may load an adapter anew in any step, so that what a step computed is known to be
        of these weights only afterwards. Begins to compare where nobody has since then.
        """
        if self.checked_at < since:
            self.check(now)
        return self.proven_at >= since

    def check(self, now: float) -> None:
        """Begin to compare the files with those that were read."""
        self.checked_at = now

        def compare() -> None:
            if _files(Path(self.directory)) != self.files:
                self.refuse(f"{_CHANGED}, which may load them again")
            else:
                self.proven_at = max(self.proven_at, now)

        self.begin(compare)

    def begin(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread; the adapter is refused if it raises."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  # the adapter says it
                self.refuse(f"the adapter's files cannot be read: {error}")

        threading.Thread(target=run, name="hybridkv-adapter", daemon=True).start()


class Adapters:
    """All adapters that requests named. Only threads touch files, as a file system may hang."""

    def __init__(self, started_ns: int) -> None:
        """`started_ns`: the engine's start, in nanoseconds since the epoch."""
        self._started_ns = started_ns
        self._known: dict[tuple[object, ...], Adapter] = {}
        self._replaced: set[int] = set()

    def of(self, request: Any, now: float) -> Adapter:
        """The adapter of a vLLM LoRARequest at `now` (monotonic seconds); begins to read it."""
        if request.load_inplace:
            self._replaced.add(request.lora_int_id)
            for key, known in self._known.items():
                if key[0] == request.lora_int_id:
                    known.refuse("another adapter was loaded in place of it")
        if request.lora_int_id in self._replaced:
            why = "the adapter was loaded in place of another, so its name says nothing"
            return Adapter(refused=why)
        key = (request.lora_int_id, request.lora_name, request.lora_path, request.is_3d_lora_weight)
        adapter = self._known.get(key)
        if adapter is None:
            if len(self._known) >= ADAPTERS_MAX:
                del self._known[next(iter(self._known))]
            adapter = self._known[key] = Adapter(request.lora_path, checked_at=now)
            adapter.begin(partial(self._read, adapter))
        elif adapter.identity is not None and now - adapter.checked_at > RECHECK_SECONDS:
            adapter.check(now)
        return adapter

    def _read(self, adapter: Adapter) -> None:
        directory = Path(adapter.directory)
        files = _files(directory)
        if not files:
            adapter.refuse("the adapter's path is no directory with its files")
            return
        if max(max(modified, changed) for _, _, modified, changed, _ in files) >= self._started_ns:
            adapter.refuse(f"{_CHANGED}, which may have loaded others")
            return
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        for name, size, *_ in files:
            digest.update(f"{name}:{size}\n".encode())
            with (directory / name).open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
        if _files(directory) != files:
            adapter.refuse(f"{_CHANGED}, which may load them again")
        else:
            adapter.files, adapter.identity = files, digest.digest()


def _files(directory: Path) -> _Files:
    found = []
    for file in sorted(directory.iterdir()):
        if file.suffix in _SUFFIXES and file.is_file():
            status = file.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            found.append((file.name, status.st_size, *times, status.st_ino))
    return tuple(found)
