"""The scheduler role's session with the daemon: the link, the identity and the daemon's lives."""

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hybridkv.client.link import Link
from hybridkv.client.start_daemon import start_detached
from hybridkv.core.breaker import Breaker
from hybridkv.wire import messages as wire

logger = logging.getLogger("vllm.hybridkv")

RESPAWN_SECONDS = 5.0  # A daemon of our own that died is started again at most this often.


@dataclass(eq=False)
class DaemonSession:
    """One engine's session. No method waits; `now` is monotonic seconds."""

    socket_path: str
    hello: wire.Hello
    facts: Mapping[str, object]
    daemon_options: Sequence[str] | None
    """They start a daemon that died; None: somebody else starts it."""
    subscribes: bool  # Whether the daemon is asked to tell which objects RAM has no more.
    counters: Counter[str]
    on_loss: Callable[[], None]  # Called whenever the connection is lost.
    group: int | None = None  # The daemon may be another user's, of this group.
    boot: str = ""  # The daemon's life that was greeted last; empty before the first greeting.
    reserved_bytes: int = 0  # Bytes of the arena whose pages exist, as far as that life has said.
    attached_ranks: dict[str, int] | None = None
    """Ranks by the daemon's life that they map; None until the first step has ended."""
    unmapped: str = ""
    """The daemon's last life whose arena some rank could not map, or can copy nothing to and from;
    empty once all ranks are attached."""
    breaker: Breaker = Breaker()
    subscribed: int = 0  # The greeting after which Subscribe was sent last.
    respawn_at: float = 0.0
    refusal: str = ""  # The last refusal of a greeting that the log has; empty after a greeting.
    is_told: bool = False  # Whether the log has the loss; a daemon may be greeted in vain for long.

    def __post_init__(self) -> None:
        self.link = Link(self.socket_path, self.hello, self._lost, self.group)

    @property
    def is_connected(self) -> bool:
        """Whether the daemon has greeted this connection."""
        return self.link.welcome is not None

    def workers_attached(self) -> bool:
        """Whether every rank maps the arena of the daemon's present life."""
        geometry, attached = self.hello.geometry, self.attached_ranks or {}
        return geometry is not None and attached.get(self.boot) == geometry.ranks

    def send(self, message: wire.Request, now: float) -> bool:
        """Queue a message for the link's next flush; False where it is lost, which is counted."""
        sent = self.link.queue(message, now)
        if not sent:
            self.counters[f"unsent_{type(message).__name__.lower()}"] += 1
        return sent

    def follow(self, now: float) -> bool:
        """Do what the connection's state asks for; True for another life of the daemon.

        Subscribe is sent before anything else, so that no removal goes untold.
        """
        welcome = self.link.welcome
        refusal = self.link.refusal or ""
        if refusal and refusal != self.refusal:
            text = "hybridkv: the daemon does not serve this engine (%s); requests are computed"
            logger.warning(text, refusal)
        self.refusal = refusal
        if welcome is None:
            # One that hangs, or is of another version, still serves the socket.
            is_gone = self.link.greetings and not self.link.is_served
            if is_gone and self.daemon_options is not None and now >= self.respawn_at:
                self.respawn_at = now + RESPAWN_SECONDS
                threading.Thread(target=self._respawn, name="hybridkv-respawn", daemon=True).start()
            return False
        self.is_told = False
        if self.subscribes and self.subscribed != self.link.greetings:
            self.subscribed = self.link.greetings
            self.send(wire.Subscribe(), now)
        if welcome.boot == self.boot:
            return False
        self.boot, self.reserved_bytes, self.breaker = welcome.boot, 0, Breaker()
        self.counters["connects"] += 1
        logger.info("hybridkv: connected to the daemon at %s", self.socket_path)
        return self.send(wire.ReportIdentity(_described(self.facts)), now)

    def identify(self, namespace: bytes, facts: Mapping[str, object], now: float) -> None:
        """The engine's bytes belong to another identity from here on."""
        self.hello = msgspec.structs.replace(self.hello, namespace=namespace)
        self.link.greet_with(self.hello)
        self.facts = facts
        self.send(wire.Identify(1, namespace), now)
        self.send(wire.ReportIdentity(_described(facts)), now)

    def _lost(self, why: str) -> None:
        self.counters["losses"] += 1
        if self.boot and not self.is_told:
            self.is_told = True
            text = "hybridkv: lost the daemon (%s); requests are computed until it is back"
            logger.warning(text, why)
        self.on_loss()

    def _respawn(self) -> None:
        assert self.daemon_options is not None
        try:
            start_detached(self.socket_path, self.daemon_options)
        except OSError:
            logger.exception("hybridkv: the daemon could not be started again")


def _described(facts: Mapping[str, object]) -> dict[str, str]:
    """An identity's facts as short JSON texts; a long one is cut, and ends with its hash."""
    texts = {name: json.dumps(fact, sort_keys=True) for name, fact in facts.items()}
    for name, text in texts.items():
        if len(text) > wire.FACT_MAX:
            tail = f"... sha256:{hashlib.sha256(text.encode()).hexdigest()}"
            texts[name] = json.dumps(_said(facts[name]))[: wire.FACT_MAX - len(tail)] + tail
    return texts


def _said(fact: object) -> object:
    """What somebody set of a fact: the entries that are neither empty nor off."""
    if not isinstance(fact, Mapping):
        return fact
    said = {name: _said(value) for name, value in sorted(fact.items())}
    return {name: value for name, value in said.items() if value}
