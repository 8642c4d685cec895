"""A walk over all that RAM and the tiers hold, for the commands that list, choose or forget it."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hybridkv.cli.arguments import option
from hybridkv.client.control import ControlClient
from hybridkv.core.durations import parse_duration
from hybridkv.core.errors import ConfigError
from hybridkv.core.keys import tenant_of
from hybridkv.core.selection import Families, HeldObject, Selection

RAM = "RAM"
SALT = option(
    "--salt SALT",
    "only what was stored with this cache_salt; - reads it from standard input, so that no list of "
    "processes shows it",
)
IDENTITY = option("--identity HEX", "only what has this identity, of which ls shows the beginning")
FAMILY = option(
    "--family HEX", "only prompts that begin with this first chunk, as ls --families shows it"
)
OLDER = option(
    "--older-than TIME", 'only what was not used for so long, like "30d"', dest="older_than"
)
SELECTION = SALT, IDENTITY, FAMILY, OLDER
"""The options that choose objects. What is chosen has all that is given."""

OnSelected = Callable[[int, HeldObject, str | None], None]
"""Called with the place's number, an object, and its family if that is asked for and known."""


def selection_of(arguments: argparse.Namespace) -> Selection:
    """Returns the choice that the options of SELECTION make. Raises ConfigError."""
    salt, older = read_salt(arguments.salt), arguments.older_than
    return Selection(
        tenant=None if salt is None else tenant_of(salt),
        identity=read_digits(arguments.identity, "identity"),
        family=read_digits(arguments.family, "family"),
        unused_seconds=None if older is None else parse_duration(older, "older-than"),
    )


def read_salt(given: str | None) -> str | None:
    """Returns the salt that --salt names, from standard input for "-". Raises ConfigError."""
    salt = sys.stdin.readline().rstrip("\r\n") if given == "-" else given
    if salt == "":
        raise ConfigError("salt: it is empty", "the cache_salt of a tenant's requests works")
    return salt


def read_digits(text: str | None, name: str) -> str:
    """Returns the beginning of a name, "" where none is given. Raises ConfigError."""
    if text is not None and not re.fullmatch("[0-9a-f]{1,64}", text.lower()):
        what = f"{name}={text!r} is not 1 to 64 hexadecimal digits"
        raise ConfigError(what, '"ab12" works')
    return "" if text is None else text.lower()


@dataclass
class Survey:
    """What a walk over all places has found beside the objects. Counts are of objects."""

    places: list[str]  # Their names, RAM first.
    models: dict[bytes, str] = field(default_factory=dict)  # By identity.
    has_user_tenants: bool = False  # As in wire.ObjectPage.
    errors: dict[int, str] = field(default_factory=dict)  # By place, why it was not walked whole.
    undecided: Counter[int] = field(default_factory=Counter)
    """By place, objects of which it is unknown whether they are selected."""
    looked: int = 0  # Objects of all places.


class Surveyor:
    """Walks over all places of one daemon."""

    def __init__(self, control: ControlClient, on_page: Callable[[Survey], None]) -> None:
        """`on_page` is called now and then, to show how far the walk is."""
        self._control, self._on_page = control, on_page
        self.places = [RAM, *(tier.name for tier in control.stats().tiers)]

    def survey(
        self, selection: Selection, on_selected: OnSelected, names_families: bool = False
    ) -> Survey:
        """Walk over all places, and call `on_selected` with each object that is selected.

        Raises ConfigError where a salt is given and the daemon tells users apart instead.
        """
        survey, family_of = Survey(self.places), _no_family
        found: Iterable[tuple[int, HeldObject]] = self._walk(survey, selection)
        if names_families or selection.family:
            # An object's first chunk is known once all chunks are.
            families, found = Families(), list(found)
            for place, held in found:
                families.learn_from(held, is_exact=place == 0)
            family_of = families.family_of
        for place, held in found:
            match selection.selects(held, family_of):
                case None:
                    survey.undecided[place] += 1
                case True:
                    on_selected(place, held, family_of(held))
        return survey

    def _walk(self, survey: Survey, selection: Selection) -> Iterator[tuple[int, HeldObject]]:
        """Yields every object, with the number of the place that holds it before it."""
        for place in range(len(self.places)):
            for page in self._control.list_objects(place):
                survey.models |= page.models
                if page.has_user_tenants:
                    survey.has_user_tenants = True
                    _refuse_salt(selection)
                for held in page.objects:
                    survey.looked += 1
                    # What RAM held when the daemon started was used before.
                    is_older = held.used_seconds is None and place == 0
                    yield (
                        place,
                        held._replace(used_seconds=page.up_seconds)
                        if (
                            is_older
                            and page.up_seconds >= (selection.unused_seconds or float("inf"))
                        )
                        else held,
                    )
                if page.error:
                    survey.errors[place] = page.error
                self._on_page(survey)


def _refuse_salt(selection: Selection) -> None:
    if selection.tenant is not None:
        raise ConfigError(
            "salt: with --user-quota the daemon knows whose engine stored an object, and not its"
            " salt",
            "--identity, --family and --older-than work",
        )


def _no_family(held: HeldObject) -> str | None:
    return None
