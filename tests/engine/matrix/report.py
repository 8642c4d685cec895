"""What the matrix says of each case, and what is wrong with it."""

from collections.abc import Iterator

import msgspec


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request, next to the one that it must equal."""

    cached_tokens: int
    loaded_tokens: int
    failed_loads: int
    same_tokens: bool
    same_logprobs: bool
    same_drafts: bool  # The drafts of each step, and how many of them were accepted.

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return self.same_tokens and self.same_logprobs and self.same_drafts


class Turn(msgspec.Struct, frozen=True):
    """A second turn, whose hit ends inside a block, and is compared with the own hit."""

    own_tokens: int  # Tokens of the engine's own hit.
    hit: Compared


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one engine's requests."""

    chunk_tokens: int
    groups: int
    drafted_tokens: int | None  # During the engine's own hit; None without a drafter.
    own_tokens: int  # Tokens of the prompt that the engine's own prefix cache has.
    hit: Compared  # From outside, next to the engine's own hit.
    blind: dict[int, Compared]
    """The same where one byte of a group's last object is wrong and signed, by gid."""
    detected: Compared  # Where such a byte is not signed, next to the computed answer.
    is_shared: bool  # Whether all weights were read, so that the next engine finds the same.
    turn: Turn | None = None


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a case, a line of the matrix."""

    case: str
    seconds: float
    served: Served | None = None
    skipped: str = ""  # Why this processor does not serve it.
    error: str = ""  # The traceback of what ended it.

    def faults(self) -> Iterator[str]:
        """A sentence for each thing that is wrong."""
        if self.error:
            yield self.error
        if self.served is None:
            return
        served, own = self.served, self.served.own_tokens
        if own < 2 * served.chunk_tokens:
            yield f"the engine's own hit of {own} tokens proves little"
        if served.drafted_tokens == 0:
            yield "the drafter drafted nothing"
        if not served.is_shared:
            yield "weights were not read, so that no other engine finds what this one stored"
        if not served.hit.is_same:
            yield f"the hit answers otherwise than the engine's own: {served.hit}"
        if not served.hit.cached_tokens == served.hit.loaded_tokens == own:
            yield f"{own} tokens should be loaded: {served.hit}"
        if len(served.blind) != served.groups:
            yield f"a byte of each of {served.groups} groups should be wrong once: {served.blind}"
        for gid, blind in served.blind.items():
            if blind.loaded_tokens != own or blind.failed_loads:
                yield f"the wrong byte of group {gid} should be loaded: {blind}"
            if blind.same_logprobs:
                yield f"the wrong byte of group {gid} changes no answer: {blind}"
        if not served.detected.failed_loads or served.detected.loaded_tokens:
            yield f"a byte that no signature has should not be loaded: {served.detected}"
        if not served.detected.is_same:
            yield f"after a failed load the answer is not the computed one: {served.detected}"
        if served.turn is not None:
            yield from _faults_of_turn(served.turn, served.chunk_tokens)


def _faults_of_turn(turn: Turn, chunk_tokens: int) -> Iterator[str]:
    if not turn.own_tokens % chunk_tokens:
        yield f"the engine's own hit of {turn.own_tokens} tokens does not end inside a block"
    if not turn.hit.cached_tokens == turn.hit.loaded_tokens == turn.own_tokens:
        yield f"{turn.own_tokens} tokens of a second turn should be loaded: {turn.hit}"
    if not turn.hit.is_same:
        yield f"the second turn answers otherwise than with the engine's own hit: {turn.hit}"
