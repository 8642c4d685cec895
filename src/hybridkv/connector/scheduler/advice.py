"""Advice: what the daemon is told of requests with hints (`core.hints`), and of no others.

    lookup sent        RETAIN   the chunks of the prompt
    request ended,     RETAIN   these, those of its answer, and the tails that it had and has
    all is committed   or RELEASE, or DEMOTE, if it asks for that
                       PREFETCH the whole request, if it says when it goes on

A time begins with each of the two. Hints of priority need no message of their own.
"""

from collections.abc import Iterable
from typing import NamedTuple

from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener
from hybridkv.connector.scheduler.lookups import Lookups
from hybridkv.connector.scheduler.requests import RequestRegistry, TrackedRequest
from hybridkv.connector.scheduler.stores import StorePlanner
from hybridkv.core.hints import NO_HINTS
from hybridkv.core.policies import Advice
from hybridkv.wire.messages import Advise, Prefetch, Request


class EndedRequest(NamedTuple):
    """A request that has ended, and the messages that follow its last commit."""

    tracked: TrackedRequest
    messages: list[Request]


class RequestAdvice(Listener):
    """The advice of one engine about its requests. `now` is monotonic seconds."""

    def __init__(self, requests: RequestRegistry, lookups: Lookups, stores: StorePlanner) -> None:
        self._daemon = requests.daemon
        self._lookups, self._stores = lookups, stores
        self._ended: list[EndedRequest] = []  # Of each some object is being stored.

    def on_looked_up(self, asked: Iterable[TrackedRequest], now: float) -> None:
        """Retain what RAM has of prompts that were just looked up, and what it will have."""
        for tracked in asked:
            if tracked.hints.retain_seconds and tracked.lookup.hashes:
                self._daemon.queue_message(_retain(tracked, tracked.lookup.hashes), now)

    def on_ended(self, tracked: TrackedRequest) -> None:
        """Note what is to be said of a request that has ended, if anything is."""
        hints = tracked.hints
        messages: list[Request] = []
        if hints == NO_HINTS or not tracked.has_hashes():
            return
        names = self._lookups.request_names(tracked)
        hashes = names.hashes + tracked.lookup.tail_found() + self._stores.tail_name(tracked)
        if not hashes:
            return
        if hints.release or hints.demote:
            advice = Advice.RELEASE if hints.release else Advice.DEMOTE
            messages.append(Advise(advice, hashes, tracked.tenant))
        elif hints.retain_seconds:
            messages.append(_retain(tracked, hashes))
        if hints.prefetch_in_seconds is not None:
            in_ms = round(1e3 * hints.prefetch_in_seconds)
            messages.append(Prefetch(names.hashes, in_ms, names.tails, names.tails_from))
        if messages:
            self._ended.append(EndedRequest(tracked, messages))

    def send_ended(self, now: float) -> bool:
        """Tell the daemon of requests whose last objects are committed. True = there were some."""
        if not self._ended:
            return False
        storing, ended = self._stores.storing_requests(), self._ended
        self._ended = [each for each in ended if each.tracked in storing]
        for each in ended:
            for message in each.messages if each.tracked not in storing else ():
                self._daemon.queue_message(message, now)
        return len(self._ended) < len(ended)

    def on_new_identity(self, identity: EngineIdentity, now: float) -> None:
        """Forget what would be said of other names."""
        self._ended.clear()

    def on_connection_lost(self, now: float) -> None:
        self._ended.clear()


def _retain(tracked: TrackedRequest, hashes: bytes) -> Advise:
    ttl_ms = max(1, round(1e3 * tracked.hints.retain_seconds))  # 0 would end it.
    return Advise(Advice.RETAIN, hashes, tracked.tenant, ttl_ms)
