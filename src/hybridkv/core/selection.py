"""Objects as commands list and choose them: what is known of each, and the choice by that.

A *family* is all prompts that begin with the same first chunk. Its name is the first hexadecimal
digits of that chunk's hash. An object tells its chunk and the chunk before, so the first chunk is
found as long as one place holds every chunk between them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.core.keys import HASH_BYTES

_SHORT_BYTES = 8
_CHUNK_END = HASH_BYTES + _SHORT_BYTES


class HeldObject(NamedTuple):
    """What is known of an object in one place, which is RAM or a tier. None = it is not known."""

    key: bytes  # The identity, the chunk's hash, and the group's id in 2 bytes.
    size_bytes: int | None
    tenant: int | None  # 0 = no salt.
    parent: int | None
    """The first 8 bytes of the hash of the chunk before, little-endian. 0 = none is named."""
    written_seconds: float | None  # Seconds since it was written to this place.
    used_seconds: float | None  # Seconds since its last use here: a read, or else the write.

    @property
    def identity(self) -> bytes:
        """The identity under which it is stored."""
        return self.key[:HASH_BYTES]

    @property
    def chunk(self) -> bytes:
        """The identity and the start of the chunk's hash, which name its chunk here."""
        return self.key[:_CHUNK_END]

    @property
    def group(self) -> bytes:
        """The identity and the group's id."""
        return self.identity + self.key[-2:]


class Families:
    """The first chunk of each chunk that is held anywhere. All objects are added before."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}  # By chunk, the chunk before it.
        self._firsts: dict[bytes, bytes] = {}  # By chunk, the first chunk of its prompts.
        self._unnamed: dict[bytes, set[bytes]] = {}
        """By group, chunks whose object names no chunk before, in a place where not all do."""
        self._prefix_groups: set[bytes] = set()
        """Groups whose objects name the chunk before in such a place."""

    def learn_from(self, held: HeldObject, is_exact: bool) -> None:
        """Learn from an object. `is_exact`: if it names no chunk before, there is none."""
        if held.parent:
            parent = held.identity + held.parent.to_bytes(_SHORT_BYTES, "little")
            self._parents[held.chunk] = parent
            if not is_exact:
                self._prefix_groups.add(held.group)
        elif is_exact:
            self._firsts[held.chunk] = held.chunk
        elif held.parent is not None:
            self._unnamed.setdefault(held.group, set()).add(held.chunk)

    def family_of(self, held: HeldObject) -> str | None:
        """Returns the name of an object's family, 16 hexadecimal digits, or None."""
        for group in self._unnamed.keys() & self._prefix_groups:
            # In tiers, each object of such a group names the chunk before, if there is one.
            unnamed = self._unnamed.pop(group)
            self._firsts |= {chunk: chunk for chunk in unnamed if chunk not in self._parents}
        chunk: bytes | None = held.chunk
        passed: dict[bytes, None] = {}
        while chunk is not None and chunk not in self._firsts:
            passed[chunk] = None
            chunk = self._parents.get(chunk)
            if chunk in passed:  # Two short hashes are equal.
                return None
        if chunk is None:
            return None
        first = self._firsts[chunk]
        self._firsts |= dict.fromkeys(passed, first)
        return first[HASH_BYTES:].hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which objects a command is about: those of which all that is given holds."""

    tenant: int | None = None
    identity: str = ""  # The first hexadecimal digits.
    family: str = ""  # The same.
    unused_seconds: float | None = None  # They were not used for so long.

    def selects(
        self, held: HeldObject, family_of: Callable[[HeldObject], str | None]
    ) -> bool | None:
        """Returns whether an object is meant. None = what is known of it does not tell.

        `family_of` returns the name of its family, and is called if `family` is given.
        """
        if not held.identity.hex().startswith(self.identity):
            return False
        answers: list[bool | None] = []
        if self.tenant is not None:
            answers.append(None if held.tenant is None else held.tenant == self.tenant)
        if self.unused_seconds is not None:
            answers.append(_is_unused(held, self.unused_seconds))
        if self.family and False not in answers:
            name = family_of(held)
            answers.append(None if name is None else name.startswith(self.family))
        if False in answers:
            return False
        return None if None in answers else True


def _is_unused(held: HeldObject, seconds: float) -> bool | None:
    """Returns whether an object was not used for so long. None = it is not known."""
    if held.used_seconds is not None:
        return held.used_seconds >= seconds
    is_new = held.written_seconds is not None and held.written_seconds < seconds
    return False if is_new else None
