"""The server of a tier, or all primaries of a cluster: each command goes to the one that has it.

1. Each node is asked by a thread of its own, so that one that hangs costs its own keys alone.
2. Whoever answers MOVED, ASK or READONLY, or is gone, is no longer the node to ask. The map of
   slots is read again, once in a call, and what can be asked elsewhere is sent again.
3. A node that failed three times in a row is left alone, until it answers `ask_each`, which the
   tier calls each second.
4. All of that is within the deadline of one call.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hybridkv.core.errors import ConfigError
from hybridkv.tiers.contract import MissingError, TierError
from hybridkv.tiers.remote import Deadline
from hybridkv.tiers.valkey.access import Access
from hybridkv.tiers.valkey.pool import IDLE_SECONDS_MAX, Answer, ConnectionPool, PendingCommand
from hybridkv.tiers.valkey.resp import RefusedCommand, command
from hybridkv.tiers.valkey.slots import Address, SlotMap, read_slots, redirect_of

logger = logging.getLogger("hybridkv.daemon")

ROUNDS_MAX = 5  # A slot that moves takes two, and may move again meanwhile.
THREADS_MAX = 16  # Nodes that one call asks at once.
MAP_TRIES_MAX = 3  # Nodes that are asked for the map, each for a share of the time.
_ELSEWHERE = ("READONLY", "NOAUTH")
"""Refusals of a connection that was sound once: a new one may lead to another server, or login."""
_DOWN = ("CLUSTERDOWN", "LOADING", "MASTERDOWN")  # Refusals of a node that serves nobody now.
_UNSERVED = (*_DOWN, "TRYAGAIN", "MOVED", "ASK")  # Refusals that say nothing of the command.
_SLOTS = PendingCommand(command(b"CLUSTER", b"SLOTS"))


class UnservedError(TierError):
    """The node of this key does not answer, or serves it to nobody now. Other nodes do.

    Nothing is proven of the record.
    """


class UnservedReadError(MissingError):
    """The same of a read, which is a miss: the tier is read as before, for other nodes' records."""


class Sending(NamedTuple):
    """Where a command is sent next."""

    address: Address
    asks: bool = False  # ASKING goes before it.


class Servers:
    """The servers that a URL leads to. Threads may use it at once."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._closed = True
        self._pools: dict[Address, ConnectionPool] = {}
        self._first = access.seeds[0]  # The server that answered `log_in`.
        self._slots: SlotMap | None = None  # None = the server is no cluster.

    def log_in(self, deadline: Deadline) -> None:
        """Log in anew to the first server that answers, of those in the URL and of the last map.

        Raises ConfigError where the settings can never work, else TierError.
        """
        self.close()
        self._access.read_files()
        known = () if self._slots is None else self._slots.primaries
        addresses = list(dict.fromkeys((*self._access.seeds, *known)))
        with self._lock:
            self._closed, self._pools = False, {}
        error: Exception | None = None
        for number, address in enumerate(addresses):
            try:
                self._log_in_at(address, _share(deadline, len(addresses) - number))
                return
            except (TierError, ConfigError, TimeoutError) as failed:
                error = error or failed
        if isinstance(error, TimeoutError):
            raise TierError(f"{self._access.place} does not answer") from None
        assert error is not None
        raise error

    def _log_in_at(self, address: Address, deadline: Deadline) -> None:
        """Log in to one server, and read the map of its cluster.

        Raises ConfigError, TierError and TimeoutError.
        """
        pool = self._pool(address)
        pool.connect(deadline)
        (info,) = pool.exchange([PendingCommand(command(b"INFO", b"cluster"))], deadline)
        if isinstance(info, RefusedCommand):
            raise self._access.refusal_error(pool.place, info)
        if isinstance(info, TierError):
            raise info
        self._first, self._slots = address, None
        if not isinstance(info, bytes) or b"cluster_enabled:1" not in info.split():
            return
        if not address.port:
            raise ConfigError(
                f"{pool.place}: this is a node of a cluster, which is reached over TCP",
                '"valkey://127.0.0.1:6379/0" works',
            )
        (answer,) = pool.exchange([_SLOTS], deadline)
        if isinstance(answer, RefusedCommand):
            raise self._access.refusal_error(pool.place, answer)
        self._slots = None if isinstance(answer, TierError) else read_slots(answer, address)
        if self._slots is None:
            raise TierError(f"{pool.place}: this node of a cluster knows no node with slots")

    def close(self) -> None:
        """Close all connections. Calls that use one fail."""
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    @property
    def is_cluster(self) -> bool:
        """True where the server that answered `log_in` is a node of a cluster."""
        return self._slots is not None

    @property
    def primaries(self) -> Sequence[Address]:
        """The server, or all primaries of the cluster."""
        slots = self._slots
        return [self._first] if slots is None else slots.primaries

    def ask_owners(self, asks: Sequence[PendingCommand], deadline: Deadline) -> list[Answer]:
        """Returns an answer or an error for each command, from the server of its slot.

        The error is an UnservedError where other nodes are well. Never raises.
        """
        answers: list[Answer] = [TierError("no node has this slot")] * len(asks)
        sendings = self._sendings(asks, range(len(asks)))
        for number in range(ROUNDS_MAX):
            for at, answer in self._send(asks, sendings, deadline):
                answers[at] = answer
            moved = self._redirects("MOVED", sendings, answers)
            asking = self._redirects("ASK", sendings, answers)
            lost = [at for at in sendings if number == 0 and _is_lost(answers[at])]
            if number == 0 and (moved or lost):
                self._read_map(deadline)
            self._note_moves({asks[at].slot: address for at, address in moved.items()})
            sendings = {
                at: sending
                for at, sending in self._sendings(asks, [*moved, *lost]).items()
                # Where nobody answered, the same node is not asked once more.
                if sending != sendings[at] or isinstance(answers[at], RefusedCommand)
            } | {at: Sending(address, asks=True) for at, address in asking.items()}
            if not sendings:
                break
        return self._explained(answers)

    def ask_each(self, asks: Sequence[PendingCommand], deadline: Deadline) -> list[list[Answer]]:
        """Returns the answers of each primary to commands without a key. Never raises.

        Nodes that were left alone are asked too. Connections that were idle for long are closed.
        """
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.drop_idle(IDLE_SECONDS_MAX)
        if any(self._pool(address).health.failures for address in self.primaries):
            self._read_map(deadline)

        def ask(address: Address) -> list[Answer]:
            return self.ask_at(address, asks, deadline, is_probe=True)

        return [self._explained(answers) for answers in _for_each(ask, self.primaries)]

    def permission_error(self, refusal: RefusedCommand) -> TierError | ConfigError:
        """Returns the error for a refusal at `open`."""
        return self._access.refusal_error(self._access.place, refusal)

    # Where commands go

    def _sendings(
        self, asks: Sequence[PendingCommand], chosen: Iterable[int]
    ) -> dict[int, Sending]:
        """Returns where each of the chosen commands goes. Those of a slot without a node lack."""
        slots = self._slots
        if slots is None:
            return dict.fromkeys(chosen, Sending(self._first))
        owners = {at: slots.owners[asks[at].slot] for at in chosen}
        return {at: Sending(owner) for at, owner in owners.items() if owner is not None}

    def _redirects(
        self, code: str, sendings: Mapping[int, Sending], answers: Sequence[Answer]
    ) -> dict[int, Address]:
        """Returns the node that each answer with `code` names."""
        redirects = {}
        for at, sending in sendings.items():
            answer = answers[at]
            if self.is_cluster and isinstance(answer, RefusedCommand) and answer.code == code:
                redirects[at] = redirect_of(answer, sending.address)
        return {at: address for at, address in redirects.items() if address is not None}

    def _note_moves(self, moves: Mapping[int, Address]) -> None:
        """Correct the map. It holds until the map is read again."""
        if moves and self._slots is not None:
            self._slots = self._slots.moved(moves)

    def _read_map(self, deadline: Deadline) -> None:
        """Ask nodes of a cluster for its map, those that are well first, until one has answered."""
        if not self.is_cluster:
            return
        pools = {address: self._pool(address) for address in self.primaries}
        for address in sorted(pools, key=lambda each: pools[each].health.failures)[:MAP_TRIES_MAX]:
            with contextlib.suppress(TimeoutError):  # The commands have errors, which count.
                share = _share(deadline, MAP_TRIES_MAX + 1)
                (answer,) = self.ask_at(address, [_SLOTS], share, is_probe=True)
                if not isinstance(answer, TierError) and (slots := read_slots(answer, address)):
                    self._slots = slots
                    return

    # Sending

    def _send(
        self, asks: Sequence[PendingCommand], sendings: Mapping[int, Sending], deadline: Deadline
    ) -> Iterator[tuple[int, Answer]]:
        """Send commands, each node its own. Yields the place and the answer of each."""
        by_node: dict[Address, list[int]] = {}
        for at, sending in sendings.items():
            by_node.setdefault(sending.address, []).append(at)

        def ask(address: Address) -> list[Answer]:
            pending = [
                asks[at]._replace(asks=True) if sendings[at].asks else asks[at]
                for at in by_node[address]
            ]
            return self.ask_at(address, pending, deadline)

        for places, answers in zip(by_node.values(), _for_each(ask, list(by_node)), strict=True):
            yield from zip(places, answers, strict=True)

    def ask_at(
        self,
        address: Address,
        asks: Sequence[PendingCommand],
        deadline: Deadline,
        is_probe: bool = False,
    ) -> list[Answer]:
        """Returns the answers of one server, and notes whether it is well. Never raises."""
        pool = self._pool(address)
        if self.is_cluster and pool.health.is_open and not is_probe:
            return [TierError(f"{pool.place} is left alone, since it fails")] * len(asks)
        try:
            deadline.seconds_left()
        except TimeoutError as error:
            return [TierError(str(error))] * len(asks)
        answers, health = pool.exchange(asks, deadline), pool.health
        is_well = not all(_is_down(answer) for answer in answers)
        pool.health = health.on_success() if is_well else health.on_failure(time.monotonic())
        if self.is_cluster and pool.health.is_open != health.is_open:
            text = "%s is left alone until it answers" if not is_well else "%s answers again"
            logger.warning(text, pool.place)
        return answers

    def _pool(self, address: Address) -> ConnectionPool:
        with self._lock:
            if address not in self._pools:
                self._pools[address] = ConnectionPool(self._access, address)
                if self._closed:
                    self._pools[address].close()
            return self._pools[address]

    def _explained(self, answers: list[Answer]) -> list[Answer]:
        """Returns the answers, with UnservedErrors where another node of the cluster is well."""
        pools = [self._pool(address) for address in self.primaries]
        if not self.is_cluster or all(pool.health.failures for pool in pools):
            return answers
        return [_explained(self._access.place, answer) for answer in answers]


def _explained(place: str, answer: Answer) -> Answer:
    if isinstance(answer, RefusedCommand) and answer.code in _UNSERVED:
        return UnservedError(f"{place}: a node refuses ({answer.code})")
    return UnservedError(str(answer)) if isinstance(answer, TierError) else answer


def _is_lost(answer: Answer) -> bool:
    """Returns whether another server, or another connection, may answer."""
    is_refused = isinstance(answer, RefusedCommand) and answer.code in (*_ELSEWHERE, *_DOWN)
    return is_refused or isinstance(answer, TierError)


def _is_down(answer: Answer) -> bool:
    is_refused = isinstance(answer, RefusedCommand) and answer.code in _DOWN
    return is_refused or isinstance(answer, TierError)


def _share(deadline: Deadline, parts: int) -> Deadline:
    """Returns the end of an equal part of the time that is left. Raises TimeoutError."""
    return Deadline(deadline.seconds_left() / parts)


def _for_each(
    ask: Callable[[Address], list[Answer]], addresses: Sequence[Address]
) -> list[list[Answer]]:
    """Returns what `ask` returns for each address, by a thread for each if there are several."""
    if len(addresses) < 2:
        return [ask(address) for address in addresses]
    try:
        with ThreadPoolExecutor(min(len(addresses), THREADS_MAX), "hybridkv-valkey") as threads:
            return list(threads.map(ask, addresses))
    except RuntimeError:  # No more threads can be started. Those that did have ended.
        return [ask(address) for address in addresses]
