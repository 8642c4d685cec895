"""`hybridkv forget`: objects are deleted from RAM and tiers, with a proof at the end."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from hybridkv.cli.arguments import JSON, SOCKET, command, control_of, switch
from hybridkv.cli.survey import SELECTION, Survey, Surveyor, selection_of
from hybridkv.cli.terminal import plain, print_json
from hybridkv.client.control import ControlClient
from hybridkv.core.errors import ConfigError
from hybridkv.core.selection import HeldObject, Selection
from hybridkv.core.sizes import format_size
from hybridkv.wire.messages import CHANGES_MAX, Forgotten

PASSES_MAX = 4  # Passes over all places, of which the last should find nothing.
STALLED_SECONDS = 60.0  # The command ends where nothing moved for so long.
READ_SECONDS = 10.0  # The same for objects that engines read.
POLL_SECONDS = 0.01
SHOW_SECONDS = 1.0  # How often progress is printed.


@dataclass
class PlaceDeletion:
    """What was deleted in one place, and what was not. Counts are of objects."""

    removed: int = 0
    failed: int = 0
    undecided: int = 0  # It is unknown whether they are meant.
    left: int = 0  # The last pass found them.
    error: str = ""


@dataclass
class Deletion:
    """The outcome of the whole command."""

    places: dict[str, PlaceDeletion]
    stored_since: int = 0  # Objects that an engine has stored since the command began.
    in_use: int = 0  # Objects of RAM that are still read or written. They go then.
    pending: int = 0  # Other work that did not end in time.
    wiping_bytes: int = 0  # The same, of RAM that was to be overwritten.
    unwritten_bytes: int = 0  # Of slots that engines have not written yet.

    @property
    def leaves_nothing(self) -> bool:
        """Returns whether the last pass found nothing, and nothing failed."""
        is_clean = all(
            not (place.failed or place.undecided or place.left or place.error)
            for place in self.places.values()
        )
        return is_clean and not (self.in_use or self.pending or self.wiping_bytes)


@dataclass
class FoundObjects:
    """The objects of one pass that are to be deleted, by place."""

    keys: list[dict[bytes, None]]
    survey: Survey


@dataclass
class DeletionRun:
    """One run of the command against one daemon."""

    control: ControlClient
    selection: Selection
    started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._shown_at = self.started_at
        self.surveyor = Surveyor(self.control, self._on_page)
        places = self.surveyor.places
        self.deletion = Deletion({name: PlaceDeletion() for name in places})
        self._seen: list[set[bytes]] = [set() for _ in places]
        """By place, what was found there by earlier passes."""
        self._new: set[bytes] = set()  # What engines have stored since the start.
        self._pass = 1

    def find_selected(self) -> FoundObjects:
        """Walk over all places. Returns what is to be deleted there."""
        keys: list[dict[bytes, None]] = [{} for _ in self.surveyor.places]

        def on_selected(place: int, held: HeldObject, family: str | None) -> None:
            if self._pass > 1 and self._is_new(place, held):
                self._new.add(held.key)
            else:
                keys[place][held.key] = None

        survey = self.surveyor.survey(self.selection, on_selected)
        for place, (deletion, found) in enumerate(
            zip(self.deletion.places.values(), keys, strict=True)
        ):
            deletion.undecided, deletion.left = survey.undecided[place], len(found)
            deletion.error = survey.errors.get(place, "")
            self._seen[place] |= found.keys()
        self.deletion.stored_since = len(self._new)
        self._pass += 1
        return FoundObjects(keys, survey)

    def delete_all(self, found: FoundObjects) -> None:
        """Delete what was found, and look again, until nothing is found or PASSES_MAX times."""
        for _ in range(PASSES_MAX):
            self.delete(found)
            found = self.find_selected()
            if not any(found.keys):
                return

    def delete(self, found: FoundObjects) -> None:
        """Delete what was found: in tiers first, so that no read brings it back, then in RAM."""
        names = self.surveyor.places
        for deletion in self.deletion.places.values():
            deletion.failed = 0
        in_ram = dict(found.keys[0])
        for place in range(1, len(names)):
            self._erase(place, list(found.keys[place]))
            if self.selection.unused_seconds is None:
                # Also what is being read from there. What is old there may be new in RAM.
                in_ram |= found.keys[place]
        ram = self.deletion.places[names[0]]
        for batch in _batches(in_ram):
            ram.removed += self.control.forget_objects(0, batch).count
            self._show(f"{names[0]}: {ram.removed:,} objects dropped")
        self._finish()

    def _finish(self) -> None:
        """Overwrite what is free in RAM, and wait for all that is still under way."""
        names = self.surveyor.places
        for place in range(1, len(names)):
            self.control.forget_objects(place, rest=True)
            self._await_tier(place)
        ram, deletion = self.deletion.places[names[0]], self.deletion
        answer = self.control.forget_objects(0, rest=True)
        last, moved_at = answer, time.monotonic()
        while answer.pending or answer.in_use or answer.wiping_bytes:
            self._show(
                f"{names[0]}: {format_size(answer.wiping_bytes)} to be overwritten,"
                f" {answer.in_use:,} objects in use"
            )
            time.sleep(POLL_SECONDS)
            answer = self.control.forget_objects(0)
            if answer != msgspec.structs.replace(last, id=answer.id):
                last, moved_at = answer, time.monotonic()
            is_only_read = answer.in_use and not (answer.pending or answer.wiping_bytes)
            patience = READ_SECONDS if is_only_read else STALLED_SECONDS
            if time.monotonic() > moved_at + patience:
                break
        deletion.in_use, deletion.pending = answer.in_use, answer.pending
        deletion.wiping_bytes = answer.wiping_bytes
        deletion.unwritten_bytes = answer.unwritten_bytes
        ram.error = ram.error or answer.error

    def _is_new(self, place: int, held: HeldObject) -> bool:
        """Returns whether an engine has stored an object since the command began.

        What was in any place before is not new in a tier: RAM may have written it there meanwhile.
        """
        if place == 0:
            age = held.written_seconds
            return age is not None and age < time.monotonic() - self.started_at
        return held.key in self._new or not any(held.key in seen for seen in self._seen)

    def _erase(self, place: int, keys: Iterable[bytes]) -> None:
        """Have a tier erase records, and wait for it."""
        for batch in _batches(keys):
            self._note(place, self.control.forget_objects(place, batch))
            if not self._await_tier(place):
                return

    def _await_tier(self, place: int) -> bool:
        """Wait until a tier has erased what it was asked for. Returns False if it stalls."""
        name = self.surveyor.places[place]
        deletion, until = self.deletion.places[name], time.monotonic() + STALLED_SECONDS
        while (answer := self.control.forget_objects(place)).pending:
            self._note(place, answer)
            if time.monotonic() > until:
                deletion.error = f"it does not answer within {STALLED_SECONDS:g} s"
                return False
            time.sleep(POLL_SECONDS)
        self._note(place, answer)
        self._show(f"{name}: {deletion.removed:,} objects removed")
        return True

    def _on_page(self, survey: Survey) -> None:
        self._show(f"pass {self._pass}: {survey.looked:,} objects looked at")

    def _show(self, sentence: str) -> None:
        """Print on standard error how far it is, now and then."""
        if time.monotonic() > self._shown_at + SHOW_SECONDS:
            self._shown_at = time.monotonic()
            print(sentence, file=sys.stderr)

    def _note(self, place: int, answer: Forgotten) -> None:
        deletion = self.deletion.places[self.surveyor.places[place]]
        deletion.removed += answer.count
        deletion.failed += answer.failed
        deletion.error = deletion.error or answer.error


def _batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields the keys in lists of at most CHANGES_MAX."""
    rest = list(keys)
    for at in range(0, len(rest), CHANGES_MAX):
        yield rest[at : at + CHANGES_MAX]


@command(
    *SELECTION,
    switch("--dry-run", "only say how many objects are meant, and delete none"),
    SOCKET,
    JSON,
)
def run_forget(arguments: argparse.Namespace) -> int:
    """Delete objects and prove it. Returns 1 where that is not proven."""
    selection = selection_of(arguments)
    if selection == Selection():
        what = "forget needs to know what: a salt, an identity, a family or an age"
        raise ConfigError(what, '"hybridkv forget --salt -" works, and "hybridkv clear" drops all')
    with control_of(arguments) as control:
        run = DeletionRun(control, selection)
        found = run.find_selected()
        if not arguments.dry_run:
            run.delete_all(found)
    deletion = run.deletion
    if arguments.json:
        print_json(_document(deletion, arguments.dry_run))
    else:
        print("\n".join(_sentences(deletion, arguments.dry_run)))
    if arguments.dry_run:
        return int(any(place.error or place.undecided for place in deletion.places.values()))
    return int(not deletion.leaves_nothing)


def _document(deletion: Deletion, is_dry: bool) -> dict[str, object]:
    places = {
        name: {
            "selected" if is_dry else "left": place.left,
            **({} if is_dry else {"removed": place.removed, "failed": place.failed}),
            "undecided": place.undecided,
            "error": place.error,
        }
        for name, place in deletion.places.items()
    }
    if is_dry:
        return {"places": places}
    return {
        "is_proven": deletion.leaves_nothing,
        "places": places,
        "stored_since": deletion.stored_since,
        "in_use": deletion.in_use,
        "pending": deletion.pending,
        "wiping_bytes": deletion.wiping_bytes,
        "unwritten_bytes": deletion.unwritten_bytes,
    }


def _sentences(deletion: Deletion, is_dry: bool) -> Iterator[str]:
    """Yields what became of it, for people."""
    for number, (name, place) in enumerate(deletion.places.items()):
        if is_dry:
            yield f"{name}: {place.left:,} objects would be deleted"
        elif number:
            yield f"{name}: {place.removed:,} objects were removed"
        else:
            yield f"{name}: {place.removed:,} objects were dropped"
        if place.failed:
            yield f"{name}: {place.failed:,} objects could not be removed"
        if place.undecided:
            yield f"{name}: of {place.undecided:,} objects it is unknown whether they are meant"
        if place.error:
            yield f"{name}: {plain(place.error)}"
    if is_dry:
        return
    if deletion.in_use:
        yield f"{deletion.in_use:,} objects are still read or written, and go when that ends"
    if deletion.pending or deletion.wiping_bytes:
        yield f"not all was done in time: {format_size(deletion.wiping_bytes)} are not overwritten"
    if deletion.stored_since:
        yield f"{deletion.stored_since:,} objects were stored since the command began, and stay"
    if deletion.unwritten_bytes:
        size = format_size(deletion.unwritten_bytes)
        yield f"slots of {size} that engines will write into have their old bytes until then"
    names = ", ".join(deletion.places)
    left = sum(place.left for place in deletion.places.values())
    if deletion.leaves_nothing:
        yield f"a last look at {names} found nothing of it; free memory is overwritten"
    elif left:
        yield f"a last look at {names} found {left:,} objects; this command may be run again"
    else:
        yield "it is not proven that nothing is left; this command may be run again"
