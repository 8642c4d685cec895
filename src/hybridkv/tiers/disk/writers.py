"""The writers of a directory tier: who may write where, who lives, who takes over lost files.

A daemon writes below its own directory only, and reads the records in all of them. It touches its
file `alive` every ALIVE_SECONDS, and keeps it locked (disk.alive). A writer is lost that has not
touched it for LOST_SECONDS, or whose process is proven to be dead. Another daemon renames its
directory, which only one daemon can do. It moves the records to its own directory, as far as its
bound allows. What there is no room for stays, until its writer has been silent for LOST_SECONDS.

A daemon that starts takes over at once what a dead writer left, because it may be that writer under
a new name, and then the bound holds over both lives. A daemon that runs waits for QUIET_SECONDS, in
which a writer may come back under its own name.
"""

import contextlib
import logging
import math
import os
import tempfile
import time
import uuid
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.core.refusals import Refusal
from hybridkv.core.sizes import format_size
from hybridkv.tiers.contract import FindRequest, TierError
from hybridkv.tiers.disk.alive import Claim, Life, proven_life
from hybridkv.tiers.disk.files import (
    FileErrors,
    FileName,
    file_status,
    open_regular,
    parse_name,
    read_regular,
    records,
    shard_records,
    shards,
)
from hybridkv.tiers.disk.index import FULL_ERRORS, FileIndex

logger = logging.getLogger("hybridkv.daemon")

LAYOUT = "1\n"
LAYOUT_FILE = "hybridkv-tier"
ALIVE_SECONDS = 30.0  # How often a writer touches its `alive`.
QUIET_SECONDS = 10 * ALIVE_SECONDS
"""A writer that has been silent for so long writes nothing at the moment."""
LOST_SECONDS = 3600.0  # A writer that has been silent for so long never comes back.
SAMPLE_FILES = 256  # Files of a silent writer whose sizes stand for those of all.
LOOK_SHARE = 50  # At most 1/50 of the time is spent on looking for records of others.
TMP = "tmp"
TMP_DIRECTORIES = 8
"""New files begin in these in turn, because threads in one directory wait for each other."""
_LOST = ".lost-"  # In the name of a writer's directory that is being taken over.


def home_of(root: Path, writer: str) -> Path:
    """Returns the directory of a writer."""
    return root / "objects" / writer


def book_of(root: Path, writer: str) -> Path:
    """Returns the file of a writer's token book."""
    return root / "books" / writer


def homes(root: Path) -> list[Path]:
    """Returns every writer's directory, sorted."""
    with contextlib.suppress(FileNotFoundError):  # The root has no directory of writers yet.
        entries = os.scandir(root / "objects")
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def check_root(root: Path) -> None:
    """Raise ConfigError unless `root` is a tier's directory of this version."""
    works = "the directory of a daemon's --disk works"
    try:
        layout = read_regular(root / LAYOUT_FILE)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            what = f"is no directory of records (it has no {LAYOUT_FILE})"
        raise ConfigError(f"disk: {root} {what}", works) from error
    _check_layout(layout, f"disk: {root}", "its own version of hybridkv works")


def _check_layout(layout: str, what: str, works: str) -> None:
    if layout not in (LAYOUT, ""):
        raise ConfigError(f"{what} has another version's layout", works)


def clock(root: Path) -> float:
    """Returns the time by the files' clock, seconds since the epoch. Makes and removes a file."""
    with tempfile.NamedTemporaryFile(prefix="clock-", dir=root) as file:
        return os.fstat(file.fileno()).st_mtime


def silent_seconds(home: Path, now: float) -> float | None:
    """Returns the seconds since a writer touched `alive`, or None where its directory is gone.

    Before the first touch, the age of its directory counts.
    """
    with contextlib.suppress(OSError), open(open_regular(home / "alive")) as file:
        # An NFS client asks the server at an open, and otherwise says what it knew minutes ago.
        return now - os.fstat(file.fileno()).st_mtime
    for path in (home / "alive", home):
        with contextlib.suppress(FileNotFoundError):
            # Without the file that shows life, the directory's own time is used, then None.
            return now - path.stat().st_mtime
    return None


class ShardLook(NamedTuple):
    """How a shard of another writer was listed last."""

    changed_ns: int = 0  # Its time of change then.
    looks: int = 0  # Further looks at it that found the same time of change.


class Writers:
    """This daemon among the writers of one directory. Its methods raise OSError."""

    def __init__(self, root: Path, writer: str, index: FileIndex) -> None:
        """`writer` names this daemon."""
        self.root = root
        self.home = home_of(root, writer)
        self.alive = self.home / "alive"
        self._index = index
        self.claim: Claim | None = None  # None before `make_directories`.
        self._patient_since = -math.inf
        """When this daemon came, or came back, to a file system on a network, by the files' clock.
        """
        self.alive_due_at = 0.0  # When `alive` is touched next.
        self.look_due_at = 0.0  # When `tend` looks at the other writers next.
        self.has_others = False  # Whether the directory has other writers, as of the last look.
        self._shards: dict[str, ShardLook] = {}  # By path, those of all other writers.
        self._reported: set[Path] = set()  # Directories of silent writers that the log names.

    def make_directories(self) -> None:
        """Make this daemon's directories, and remove files that it never finished."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        # From here on nobody takes the directory over.
        self.claim = Claim(self.alive)
        came_at = self._read_clock()
        if not self.claim.is_locked:
            self._patient_since = came_at
        for number in range(TMP_DIRECTORIES):
            (self.home / TMP / str(number)).mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.root / "quarantine").mkdir(mode=0o700, exist_ok=True)
        layout = self.root / LAYOUT_FILE
        with contextlib.suppress(FileExistsError), layout.open("x") as file:
            # Another daemon wrote the layout's file first; its content is checked next.
            file.write(LAYOUT)
        _check_layout(read_regular(layout), f"disk: {self.root}", "a new directory works")
        errors = FileErrors()
        for directory, _, files in os.walk(self.home / TMP):
            for name in files:
                with errors:
                    os.unlink(os.path.join(directory, name))
        self._index.count_failed(errors)

    def write_token(self) -> None:
        """Say that the directory is this daemon's, and not that of another of the same name."""
        assert self.claim is not None, "make_directories comes first"
        self.claim.put_token()

    def give_up_home(self) -> None:
        """Give up this daemon's directory, so that others may take over what is in it."""
        if self.claim is not None:
            self.claim.release()

    def index_own(self) -> None:
        """Index this daemon's records anew. The caller calls `look` next."""
        self._index.index_directory(self.home)
        self._shards.clear()

    def show_alive(self, now: float) -> bool:
        """Touch `alive` where that is due. Returns False where the directory is gone.

        Raises TierError where another daemon writes to it.
        """
        if now < self.alive_due_at:
            return True
        try:
            if self.claim is None or read_regular(self.alive) != self.claim.token:
                works = "give each node its own name (--node), or directory"
                what = f"another daemon writes to {self.home}; {works}"
                raise TierError(what, Refusal.TAKEN)
            # It is touched and not written: on a full file system it would be empty afterwards.
            seen_at = self.alive.stat().st_mtime
            os.utime(self.alive)
            came_at = self._read_clock()
            if came_at - seen_at > QUIET_SECONDS:
                self._patient_since = came_at
        except FileNotFoundError:
            return False
        self.alive_due_at = now + ALIVE_SECONDS
        return True

    def _read_clock(self) -> float:
        """Returns the time at which `alive` was touched just now, by the files' clock."""
        touched_at = self.alive.stat().st_mtime
        self._index.clock_ahead_seconds = touched_at - time.time()
        return touched_at

    def look_when_due(self, now: float) -> None:
        """Look for other writers' records if it is due, and adopt those of lost writers."""
        if now >= self.look_due_at:
            self.index_others()
            for home, silent in self.adopt_lost(QUIET_SECONDS).items():
                self._report_silent(home, silent)
            self.look_due_at = time.monotonic() + LOOK_SHARE * (time.monotonic() - now)

    def index_others(self) -> None:
        """Index the records that other writers have put and removed since the last look."""
        shards_to_list = self._index.take_shards_to_list()
        for path in self._shards:
            if os.path.basename(path) in shards_to_list:
                self._shards[path] = ShardLook()
        gone, others = set(self._shards), self._others()
        self.has_others = bool(others)
        for shard in chain.from_iterable(map(shards, others)):
            gone.discard(shard)
            with contextlib.suppress(FileNotFoundError):
                # The other writer's directory was removed while it was looked at.
                changed = os.stat(shard).st_mtime_ns
                last = self._shards.get(shard, ShardLook())
                is_same = last.changed_ns == changed
                # A directory's clock may be coarse: a second look sees files of the same tick.
                if not is_same or last.looks <= 1:
                    self._shards[shard] = ShardLook(changed, last.looks + 1 if is_same else 0)
                    self._index.replace(shard, [name for _, name in shard_records(shard)])
        self._forget(gone)

    def index_wanted(self, wanted: Iterable[FindRequest]) -> None:
        """Index those of these records that other writers have put since the last look.

        Their files are looked for by name, so that no directory is listed.
        """
        missing = [request for request in wanted if self._index.row_of(request.key) is None]
        others = self._others() if missing else []
        for key, parent in missing:
            names = [FileName(key, parent, interior) for interior in (False, True)]
            for home, name in product(others, names):
                if os.path.lexists(home / name.path):
                    self._index.add_other(str(home), name)
                    break

    def _forget(self, shards: Iterable[str]) -> None:
        for shard in shards:
            del self._shards[shard]
            self._index.replace(shard, [])

    def _others(self) -> list[Path]:
        return [home for home in homes(self.root) if home != self.home]

    def adopt_lost(self, patience_seconds: float = -math.inf) -> dict[Path, float]:
        """Take over what lost writers left, the last that wrote first.

        Whether a writer is dead is asked after `patience_seconds` of its silence. What it left
        without a proof is taken over after LOST_SECONDS, but not while a server is back so lately
        that its other clients may not be. Returns the directories of writers of which it is unknown
        whether they are dead, and the seconds of their silence.
        """
        unknown: dict[Path, float] = {}
        now = self.alive.stat().st_mtime
        is_settled = now - self._patient_since >= QUIET_SECONDS
        silences = [(silent_seconds(home, now), home) for home in self._others()]
        for silent, home in sorted(
            (silent, home) for silent, home in silences if silent is not None
        ):
            if silent >= min(patience_seconds, LOST_SECONDS):
                is_lost = is_settled and silent >= LOST_SECONDS
                with proven_life(home / "alive") as life:
                    if is_lost or life is Life.DEAD:
                        self._take_over(home, drops=is_lost)
                    elif life is Life.UNKNOWN:
                        unknown[home] = silent
        return unknown

    def _report_silent(self, home: Path, silent: float) -> None:
        """Log once what a writer that may be dead has beside this daemon's bound."""
        if home in self._reported:
            return
        self._reported.add(home)
        with self._index.lock:
            count = sum(1 for _ in self._index.paths_of(home))
            step = max(1, count // SAMPLE_FILES)
            sample = list(islice(self._index.paths_of(home), 0, None, step))
        text = (
            "disk: the writer %s of %s has been silent for %d seconds and may be dead: about %s in"
            " %d objects stay beside the bound until it has been silent for %d seconds; a name that"
            " lasts (--node) lets a daemon find its own objects again"
        )
        size = format_size(_mean_bytes(sample) * count)
        logger.warning(text, home.name, self.root, silent, size, count, LOST_SECONDS)

    def _take_over(self, home: Path, drops: bool) -> None:
        """Move a lost writer's records here. `drops`: those without room here are removed."""
        # A writer that comes back under the old name finds nothing half removed.
        lost = home.with_name(f"{home.name.partition(_LOST)[0]}{_LOST}{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(FileNotFoundError):
            # Another daemon renamed the directory first, and takes it over alone.
            os.rename(home, lost)
            self._forget([path for path in self._shards if os.path.dirname(path) == str(home)])
            errors = FileErrors()
            self._adopt_files(lost, home.name, errors, drops)
            for directory, _, files in os.walk(lost, topdown=False):
                for file in files:
                    # A record that could not be taken over is read where it is.
                    if parse_name(file) is None:
                        with contextlib.suppress(FileNotFoundError), errors:
                            # What the lost writer left in the directory is gone already.
                            os.unlink(os.path.join(directory, file))
                with contextlib.suppress(OSError):
                    # A directory that is not empty stays, and is taken over again later.
                    os.rmdir(directory)
            self._index.count_failed(errors)

    def _adopt_files(self, lost: Path, writer: str, errors: FileErrors, drops: bool) -> None:
        """Move the newest records here, as many as the bound allows; `drops` removes the others.

        There may be millions, so nothing of a record is kept but its status.
        """
        index = self._index
        changed, sizes = array("d"), array("Q")
        uncounted = FileErrors()  # The loop below meets them again.
        for path, name in records(lost):
            with contextlib.suppress(FileNotFoundError), uncounted:
                # The record was removed before it could be taken over.
                status = file_status(path)
                if index.own_row_of(name.key) is None:
                    changed.append(status.changed)
                    sizes.append(status.taken_bytes)
        with index.lock:
            room = index.max_bytes - index.held_bytes
        oldest_changed = _oldest_within(room, changed, sizes)
        adopted, rest_count = array("I"), 0
        for path, name in chain.from_iterable([*shard_records(shard)] for shard in shards(lost)):
            try:
                with errors:
                    if file_status(path).changed >= oldest_changed:
                        row = self._adopt_file(path, name)
                        if row is not None:
                            adopted.append(row)
                            continue
                    is_double = index.own_row_of(name.key) is not None
                    rest_count += not is_double
                    if drops or is_double:
                        os.unlink(path)
            except FileNotFoundError:
                continue  # Somebody else removed it.
        with index.lock:
            index.enqueue_all(adopted)
        text = "disk: took over %d objects that %s left; %d %s for lack of room"
        done = "were dropped" if drops else "stay where they are"
        logger.info(text, len(adopted), writer, rest_count, done)

    def _adopt_file(self, path: str, name: FileName) -> int | None:
        """Move a record here. Returns its row, or None where it has no room. Raises OSError."""
        index, to = self._index, str(self.home / name.path)
        try:
            os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
            with index.lock:
                status = file_status(path)
                room = index.max_bytes - index.held_bytes
                if index.own_row_of(name.key) is None and status.taken_bytes <= room:
                    os.rename(path, to)
                    return index.enter_file(name, status.taken_bytes, status.changed)
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
        return None


def _oldest_within(room: int, changed: Sequence[float], sizes: Sequence[int]) -> float:
    """Returns the time of change of the oldest of the newest files that have `room` together.

    Returns infinity where no file has room.
    """
    oldest = math.inf
    for number in sorted(range(len(changed)), key=changed.__getitem__, reverse=True):
        room -= sizes[number]
        if room < 0:
            break
        oldest = changed[number]
    return oldest


def _mean_bytes(paths: Iterable[str]) -> int:
    """Returns the mean of the bytes that the files take."""
    sizes = []
    for path in paths:
        with contextlib.suppress(OSError):
            # The size of one file of a sample is not needed: the log says about how much there is.
            sizes.append(file_status(path).taken_bytes)
    return sum(sizes) // max(1, len(sizes))
