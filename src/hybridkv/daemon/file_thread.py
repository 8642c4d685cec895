"""A thread that does the work on one of the daemon's files, so that the loop never waits for it."""

import queue
import threading
from collections.abc import Callable

import msgspec


class FileThread:
    """Does pieces of work, one after the other."""

    def __init__(self, name: str, on_failed: Callable[[str], None]) -> None:
        """`on_failed` is called by the thread with the reason why a piece of work failed."""
        self.error = ""  # Why the last work failed. Its owner empties it once all is put right.
        self._on_failed = on_failed
        self._begun = self._done = 0  # Pieces of work. Only the thread changes `_done`.
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Returns how many pieces of work have not begun."""
        return self._work.qsize()

    @property
    def is_settled(self) -> bool:
        """Returns whether all work is done, or has failed."""
        return self._done == self._begun

    def put_work(self, work: Callable[[], None]) -> None:
        """Have work done after all other. It may raise OSError and msgspec's errors."""
        self._begun += 1
        self._work.put(work)

    def close(self, seconds: float) -> None:
        """Do what there is to do, for so many seconds at most."""
        self._work.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except (OSError, msgspec.MsgspecError) as error:
                self.error = getattr(error, "strerror", None) or str(error)
                self._on_failed(self.error)
            self._done += 1
