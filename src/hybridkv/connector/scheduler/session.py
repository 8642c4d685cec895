"""The scheduler role's session with the daemon: the link, the identity and the daemon's lives.

The link greets the daemon again whenever the connection was lost. A *life* of the daemon is one
process of it, named by `boot`.
"""

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hybridkv.client.link import Link
from hybridkv.client.start_daemon import start_detached
from hybridkv.connector.messages import StepReport
from hybridkv.connector.metrics import (
    ATTACH_FAILED,
    DAEMON_CONNECTS,
    DAEMON_LOSSES,
    SLOTS_CONDEMNED,
    daemon_unsent,
)
from hybridkv.connector.scheduler.listeners import EngineIdentity, Listener
from hybridkv.connector.scheduler.nodes import NodesLink
from hybridkv.connector.scheduler.requests import Outbox
from hybridkv.core.breaker import Breaker
from hybridkv.core.geometry import Geometry
from hybridkv.core.metrics import Metric
from hybridkv.core.packed import SLOT_BYTES, SlotRef, batches, pack_slots
from hybridkv.wire import messages as wire

logger = logging.getLogger("vllm.hybridkv")

RESPAWN_SECONDS = 5.0  # A daemon of our own that died is started again at most this often.


@dataclass(eq=False)
class DaemonSession(Listener, Outbox):
    """One engine's session. No method waits. `now` is monotonic seconds."""

    socket_path: str
    hello: wire.Hello
    facts: Mapping[str, object]  # The facts of the identity in `hello`.
    daemon_options: Sequence[str] | None
    """The options that start a daemon which died. None = another program starts it."""
    subscribes: bool  # True if the daemon is to report objects that RAM loses.
    counters: Counter[Metric]
    on_loss: Callable[[], None]  # Called whenever the connection is lost.
    geometry: Geometry
    group: int | None = None  # The daemon may be another user's, of this group.
    boot: str = ""  # The daemon's life that was greeted last; empty before the first greeting.
    reserved_bytes: int = 0  # Bytes of the arena whose pages exist, as that life has reported.
    attached_ranks: dict[str, int] | None = None
    """The number of ranks that map the arena, by the daemon's life. None until the first step has
    ended."""
    unmapped: str = ""
    """The daemon's last life whose arena some rank could not map in time, or cannot copy with.
    Empty once all ranks are attached."""
    breaker: Breaker = Breaker()
    subscribed: int = 0  # The last greeting after which Subscribe was sent.
    respawn_at: float = 0.0
    refusal: str = ""  # The last refusal of a greeting that was logged; empty after a greeting.
    is_loss_logged: bool = False
    """True once the loss was logged. Greetings that fail afterwards are not logged again."""

    def __post_init__(self) -> None:
        self.nodes: NodesLink | None = None
        """The link, where the engine's workers are on several nodes."""
        if self.geometry.nodes > 1:
            self.nodes = NodesLink(self.hello, self.geometry, self._on_lost)
        self.link: Link | NodesLink = self.nodes or Link(
            self.socket_path, self.hello, self._on_lost, self.group
        )

    @property
    def is_connected(self) -> bool:
        """True once the daemon has greeted this connection."""
        return self.link.welcome is not None

    def workers_attached(self) -> bool:
        """Return True if every rank maps the arena of its daemon's present life."""
        attached = self.attached_ranks or {}
        boots = (self.boot,) if self.nodes is None else self.nodes.boots
        ranks = [attached.get(boot) for boot in boots]
        return ranks == [self.geometry.node_ranks] * self.geometry.nodes

    def is_answer_due(self, lease: int) -> bool:
        """Return True if a lookup that was not answered could have been."""
        return self.nodes is None or self.nodes.is_answer_due(lease)

    def queue_message(self, message: wire.Request, now: float) -> bool:
        """Queue a message for the link's next flush. Returns False if it is lost, and counts it."""
        return self._count_unsent(message, self.link.queue(message, now))

    def _count_unsent(self, message: wire.Request, is_queued: bool) -> bool:
        if not is_queued:
            self.counters[daemon_unsent(type(message).__name__.lower())] += 1
        return is_queued

    def follow(self, now: float) -> bool:
        """Do what the connection's state asks for. Returns True for a new life of the daemon.

        Subscribe is sent before any other message, so that no removal is missed.
        """
        welcome = self.link.welcome
        refusal = self.link.refusal or ""
        if refusal and refusal != self.refusal:
            text = "hybridkv: the daemon does not serve this engine (%s); requests are computed"
            logger.warning(text, refusal)
        self.refusal = refusal
        if welcome is None:
            # A daemon that hangs, or is of another version, still serves the socket.
            is_gone = self.link.greetings and not self.link.is_served
            if is_gone and self.daemon_options is not None and now >= self.respawn_at:
                self.respawn_at = now + RESPAWN_SECONDS
                threading.Thread(target=self._respawn, name="hybridkv-respawn", daemon=True).start()
            return False
        self.is_loss_logged = False
        if self.subscribes and self.subscribed != self.link.greetings:
            self.subscribed = self.link.greetings
            self.queue_message(wire.Subscribe(), now)
        if welcome.boot == self.boot:
            return False
        self.boot, self.reserved_bytes, self.breaker = welcome.boot, 0, Breaker()
        self.counters[DAEMON_CONNECTS] += 1
        logger.info("hybridkv: connected to the daemon at %s", self.socket_path)
        return self.queue_message(wire.ReportIdentity(describe_facts(self.facts)), now)

    def on_report(self, report: StepReport, now: float) -> None:
        """Take which ranks map the arena, and report slots whose bytes were proven wrong."""
        if self.nodes is not None:
            self.nodes.on_report(report.number, report.answers)
        self.attached_ranks = report.boots
        if report.is_disabled or report.counters.get(ATTACH_FAILED):
            self.unmapped = self.boot
        elif self.workers_attached():
            self.unmapped = ""
        for node, slots in report.corrupt.items():
            self.counters[SLOTS_CONDEMNED] += len(slots)
            self._condemn_slots(node, slots, now)

    def _condemn_slots(self, node: int, slots: Iterable[SlotRef], now: float) -> None:
        """Report slots of a node whose bytes were proven wrong to the daemon there."""
        for batch in batches(pack_slots(sorted(slots)), wire.CHANGES_MAX * SLOT_BYTES):
            message = wire.ReportCorrupt(batch)
            if self.nodes is None:
                self.queue_message(message, now)
            else:
                self._count_unsent(message, self.nodes.queue_on(node, message))

    def on_new_identity(self, identity: EngineIdentity, now: float) -> None:
        """Give the engine another identity, which its bytes have from here on."""
        self.hello = msgspec.structs.replace(self.hello, namespace=identity.namespace)
        self.link.greet_with(self.hello)
        self.facts = identity.facts
        self.queue_message(wire.Identify(1, identity.namespace), now)
        self.queue_message(wire.ReportIdentity(describe_facts(identity.facts)), now)

    def _on_lost(self, why: str) -> None:
        self.counters[DAEMON_LOSSES] += 1
        if self.boot and not self.is_loss_logged:
            self.is_loss_logged = True
            text = "hybridkv: lost the daemon (%s); requests are computed until it is back"
            logger.warning(text, why)
        self.on_loss()

    def _respawn(self) -> None:
        assert self.daemon_options is not None
        try:
            start_detached(self.socket_path, self.daemon_options)
        except OSError:
            logger.exception("hybridkv: the daemon could not be started again")


def describe_facts(facts: Mapping[str, object]) -> dict[str, str]:
    """Return an identity's facts as short JSON texts by name, each setting of a mapping alone.

    `{"chunk": [1], "model": {"dtype": "a"}} -> {"chunk": "[1]", "model.dtype": '"a"'}`. Where
    these are too many for a message, with the fact that NodesLink adds, each mapping is one text.
    """
    texts: dict[str, str] = {}
    for name, fact in facts.items():
        settings = fact if isinstance(fact, Mapping) else {}
        texts |= {f"{name}.{key}"[: wire.TEXT_MAX]: _short(settings[key]) for key in settings}
        if not settings:
            texts[name] = _short(fact)
    if len(texts) >= wire.FACTS_MAX:
        return {name: _short(fact) for name, fact in facts.items()}
    return texts


def _short(fact: object) -> str:
    """Return a fact as JSON. A long text is cut, and ends with its hash.

    A text that is cut leaves out settings that are empty or off.
    """
    text = json.dumps(fact, sort_keys=True)
    if len(text) > wire.FACT_MAX:
        tail = f"... sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        text = json.dumps(_without_empty(fact))
        return text[: wire.FACT_MAX - len(tail)] + tail
    return text


def _without_empty(fact: object) -> object:
    """Return a fact without entries that are empty or off.

    `{"a": False, "b": {"c": ""}, "d": 1} -> {"d": 1}`
    """
    if not isinstance(fact, Mapping):
        return fact
    entries = {name: _without_empty(value) for name, value in sorted(fact.items())}
    return {name: value for name, value in entries.items() if value}
