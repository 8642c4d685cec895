"""`hybridkv ls`: what RAM and the tiers hold, by identity, tenant and family."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.cli.arguments import JSON, SOCKET, command, control_of, option, switch
from hybridkv.cli.survey import SELECTION, Survey, Surveyor, selection_of
from hybridkv.cli.terminal import PlainConsole, counting, new_table, plain, print_json
from hybridkv.core.durations import format_duration
from hybridkv.core.selection import HeldObject
from hybridkv.core.sizes import format_size

ROWS_MAX = 40
COLUMNS = ("objects", "bytes", "first write", "last write", "last use")


class ListedGroup(NamedTuple):
    """Objects that are shown together."""

    identity: bytes
    tenant: int | None
    family: str | None = None


@dataclass
class PlaceTotal:
    """The objects of one group in one place. Times are in seconds. None = nobody can tell."""

    objects: int = 0
    size_bytes: int = 0
    unsized: int = 0  # Objects whose bytes are unknown.
    oldest_write: float | None = None
    newest_write: float | None = None
    last_use: float | None = None

    def count_object(self, held: HeldObject) -> None:
        """Count an object."""
        self.objects += 1
        self.size_bytes += held.size_bytes or 0
        self.unsized += held.size_bytes is None
        if held.written_seconds is not None:
            self.oldest_write = max(self.oldest_write or 0.0, held.written_seconds)
            self.newest_write = _least(self.newest_write, held.written_seconds)
        if held.used_seconds is not None:
            self.last_use = _least(self.last_use, held.used_seconds)


def _least(known: float | None, seconds: float) -> float:
    return seconds if known is None else min(known, seconds)


class HeldTotals:
    """The totals of every group, by place."""

    def __init__(self) -> None:
        self.groups: dict[ListedGroup, dict[int, PlaceTotal]] = {}

    def count_at(self, place: int, held: HeldObject, family: str | None, by_family: bool) -> None:
        """Count an object."""
        group = ListedGroup(held.identity, held.tenant, family if by_family else "")
        self.groups.setdefault(group, {}).setdefault(place, PlaceTotal()).count_object(held)

    def largest_first(self) -> list[tuple[ListedGroup, dict[int, PlaceTotal]]]:
        """Returns all groups, that of the most bytes first."""
        return sorted(
            self.groups.items(),
            key=lambda item: sum(total.size_bytes for total in item[1].values()),
            reverse=True,
        )


@command(
    *SELECTION,
    switch("--families", "tell prompts apart that begin with other first chunks"),
    option("--rows COUNT", f"how many groups to print (default: {ROWS_MAX}; 0: all)", type=int),
    SOCKET,
    JSON,
)
def run_ls(arguments: argparse.Namespace) -> int:
    """Print what is held. Returns 1 where a place could not be listed whole."""
    selection, by_family = selection_of(arguments), arguments.families
    totals = HeldTotals()
    with control_of(arguments) as control, counting("objects looked at") as count:
        survey = Surveyor(control, lambda survey: count(survey.looked)).survey(
            selection,
            lambda place, held, family: totals.count_at(place, held, family, by_family),
            by_family,
        )
    rows = totals.largest_first()
    bound = ROWS_MAX if arguments.rows is None else arguments.rows
    shown = rows[: bound or None]
    if arguments.json:
        print_json(
            {
                "groups": [_document(survey, *row, by_family) for row in shown],
                "more": len(rows) - len(shown),
                "has_user_tenants": survey.has_user_tenants,
                "undecided": _by_place(survey, survey.undecided),
                "errors": _by_place(survey, survey.errors),
            }
        )
    else:
        _print_table(survey, shown, by_family)
        _print_notes(survey, len(rows) - len(shown))
    return int(bool(survey.errors))


def _by_place(survey: Survey, values: "dict[int, int] | dict[int, str]") -> dict[str, object]:
    return {survey.places[place]: value for place, value in values.items()}


def _document(
    survey: Survey, group: ListedGroup, places: dict[int, PlaceTotal], by_family: bool
) -> dict[str, object]:
    return {
        "identity": group.identity.hex(),
        "model": survey.models.get(group.identity),
        "tenant": None if group.tenant is None else f"{group.tenant:016x}",
        **({"family": group.family} if by_family else {}),
        "places": {
            survey.places[place]: {
                "objects": total.objects,
                "bytes": total.size_bytes,
                "unsized": total.unsized,
                "oldest_write_seconds": total.oldest_write,
                "newest_write_seconds": total.newest_write,
                "last_use_seconds": total.last_use,
            }
            for place, total in sorted(places.items())
        },
    }


def tenant_text(tenant: int | None) -> str:
    """Returns a tenant as commands show it: 16 digits, or words."""
    if tenant is None:
        return "unknown"
    return f"{tenant:016x}" if tenant else "no salt"


def _print_table(
    survey: Survey, rows: Iterable[tuple[ListedGroup, dict[int, PlaceTotal]]], by_family: bool
) -> None:
    tenant = "user" if survey.has_user_tenants else "tenant"
    names = ["identity", "model", tenant, *(["family"] if by_family else []), "where"]
    table = new_table([*names, *COLUMNS], left=names)
    for group, places in rows:
        cells = [
            group.identity.hex()[:12],
            plain(survey.models.get(group.identity, "")),
            tenant_text(group.tenant),
            *([(group.family or "unknown")[:16]] if by_family else []),
        ]
        for place, total in sorted(places.items()):
            table.add_row(*cells, survey.places[place], *_cells(total))
            cells = [""] * len(cells)
    PlainConsole(160).print(table)


def _cells(total: PlaceTotal) -> list[str]:
    size = format_size(total.size_bytes) if total.unsized < total.objects else "unknown"
    times = (total.oldest_write, total.newest_write, total.last_use)
    ages = ["unknown" if age is None else f"{format_duration(age)} ago" for age in times]
    is_part = 0 < total.unsized < total.objects
    return [f"{total.objects:,}", f"{size} or more" if is_part else size, *ages]


def _print_notes(survey: Survey, more: int) -> None:
    if more:
        print(f"{more:,} more groups (--rows 0 prints all)")
    if survey.has_user_tenants:
        print("a tenant here is the user whose engine stored an object (--user-quota), not a salt")
    for place, count in survey.undecided.items():
        print(f"{survey.places[place]}: of {count:,} objects it is unknown whether they are meant")
    for place, error in survey.errors.items():
        print(f"{survey.places[place]} was not listed whole: {plain(error)}")
