"""The relay of a node: it passes messages between the scheduler role and the node's daemon.

Where an engine's workers are on several nodes, the first worker of each node has one. Messages come
in the plans of steps, and answers leave in the reports (scheduler.nodes). No method waits.
"""

from msgspec.structs import replace

from hybridkv.client.link import Link
from hybridkv.connector.messages import Answers, Mail
from hybridkv.wire.messages import Reply, Request, Welcome


class Relay:
    """One node's connection to its daemon, as the scheduler role asks for it.

    A connection that is lost, or could not be made, is reported, and the scheduler role asks for
    another. Each `now` is monotonic seconds.
    """

    def __init__(self, socket_path: str, engine_id: str, group: int | None) -> None:
        self._socket_path = socket_path
        self._engine_id = engine_id
        self._group = group
        self.link: Link | None = None
        """The connection that the scheduler role asked for last. None once it has ended."""
        self._greeting = 0
        self._next_mail = 0
        self._answered = 0  # Answers of this connection that were taken.
        self.replies: list[Reply] = []
        self._welcome: Welcome | None = None  # Until it is reported.
        self._lost = ""
        self._has_news = False

    def deliver(self, mail: Mail, now: float) -> None:
        """Send the messages of a plan to the daemon. A later connection ends the one before."""
        if mail.greeting != self._greeting:
            self._begin(mail)
        if self._lost or (mail.hello is None and not mail.number):
            return
        if mail.number != self._next_mail:
            self._lose("messages of a step did not reach the worker")
            return
        if mail.hello is not None:
            # The workers of the node have its id of the engine, by which they join the session.
            hello = replace(mail.hello, engine_id=self._engine_id, session=mail.greeting - 1)
            self.link = Link(self._socket_path, hello, self._on_lost, self._group)
        self._send(mail.messages, now)
        self.receive(now)
        # After a fault above the next mail is not the expected one, which ends the connection.
        self._next_mail += 1

    def take_answers(self, now: float) -> Answers | None:
        """Return what the daemon has answered since the last call. None = there is no news."""
        self.receive(now)
        if not self._has_news:
            return None
        answers = Answers(
            greeting=self._greeting,
            number=self._answered,
            welcome=self._welcome,
            replies=tuple(self.replies),
            lost=self._lost,
        )
        self._answered += 1
        self.replies, self._welcome, self._has_news = [], None, False
        return answers

    def close(self) -> None:
        """End the connection, and with it the session of the engine at this daemon."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def _begin(self, mail: Mail) -> None:
        self.close()
        self._greeting, self._next_mail, self._answered = mail.greeting, 0, 0
        self.replies, self._welcome, self._has_news = [], None, False
        self._lost = ""

    def _send(self, messages: tuple[Request, ...], now: float) -> None:
        link = self.link
        if link is not None and all(link.queue(message, now) for message in messages):
            link.flush(now)

    def receive(self, now: float) -> None:
        """Take what the daemon has sent, and notice the end of the connection."""
        link = self.link
        if link is None:
            return
        was_welcome = link.welcome is not None
        replies = link.poll(now)
        self.replies += replies
        if link.welcome is not None and not was_welcome:
            self._welcome = link.welcome
        self._has_news |= bool(replies or self._welcome)
        if self._lost or link.fd is None:
            self._lose(self._lost or link.refusal or "no daemon listens at its socket")

    def _on_lost(self, why: str) -> None:
        self._lost = why

    def _lose(self, why: str) -> None:
        self._lost, self._has_news = why, True
        self.close()
