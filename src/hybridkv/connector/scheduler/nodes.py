"""The scheduler role's link to the daemons of several nodes, one daemon each.

Nothing of this package listens at the network. Messages travel in the plans of steps, which vLLM
hands to every worker. The relay of a node (worker.relay) gives them to the daemon there, and its
answers come back in the workers' report::

    plan n ->  relay -> daemon of the node -> relay  -> report of step n, or of a later one

A slot of this link is a slot on each node. The scheduler role has a ticket for them (core.packed).
A hit is what every node has.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_

from msgspec import structs

from hybridkv.client.link import RECONNECT_SECONDS
from hybridkv.connector.messages import Answers, Mail, NodePlans, NodeShare, StepPlan
from hybridkv.core.coverage import SlotShape
from hybridkv.core.geometry import Geometry
from hybridkv.core.junctions import JUNCTIONS_MAX
from hybridkv.core.keys import HASH_BYTES, fingerprint
from hybridkv.core.packed import join_nodes, on_node, unpack_slots
from hybridkv.core.tails import tail_tokens
from hybridkv.wire import messages as wire

ROUNDS_MAX = 4
"""A lookup whose nodes have hits of several lengths is asked again with the least of them, so often
at most. Then it is a miss."""
RETRY_SECONDS = 0.5
"""Where a node's daemon is away, its neighbours are greeted in vain no more often than this."""
REPORTS_OF_AN_ANSWER = 2
"""An answer is late no earlier than with this report from that of the step on that asked for it."""


def node_identity(namespace: bytes, node: int, nodes: int) -> bytes:
    """Return the identity at a node's daemon. No node has the parts of another one."""
    return fingerprint({"identity": namespace.hex(), "node": [node, nodes]})


@dataclass
class _Node:
    """One node, as far as it is known here."""

    hello: wire.Hello | None  # Until it leaves with a plan.
    messages: list[wire.Request] = field(default_factory=list)  # They leave with the next plan.
    mails: int = 0
    answers: int = 0
    welcome: wire.Welcome | None = None
    reserved_bytes: int = 0
    granted: dict[SlotShape, deque[wire.Reserved]] = field(default_factory=dict)
    """Grants that another node has not answered yet, by the shape of their slots."""


@dataclass(eq=False)
class _NodesLookup:
    """A lookup that every node is asked, and what each has answered."""

    lookup: wire.Lookup  # The scheduler role's.
    leases: list[int]  # Each node's lease of its last round.
    answers: list[wire.Found | None]  # The last answer of each node.
    masks: list[bytes] = field(default_factory=list)  # What every node had in the first round.
    junctions: list[int] = field(default_factory=list)  # Of all nodes, of the first round.
    rounds: int = 1
    removed: list[wire.Removed] = field(default_factory=list)
    """What nodes have lost since the first answer, whose masks may name it."""
    why: str = ""  # The hits of the first round, for people, where they differ.
    plan_number: int | None = None  # The plan with which the last round left; None = it has not.


@dataclass(frozen=True)
class _Question:
    """A node's part of a lookup that it has not answered yet."""

    lookup: _NodesLookup
    node: int


class NodesLink:
    """The connection of an engine to the daemons of its nodes. It is used as client.link.Link is.

    It is one connection: where a node's daemon is lost, all are ended, and made again together.
    Each `now` is seconds of one clock.
    """

    fd = None
    """There is no descriptor to wait on: answers come with the steps of the engine."""

    def __init__(
        self, hello: wire.Hello, geometry: Geometry, on_loss: Callable[[str], None]
    ) -> None:
        """`on_loss` is called with the reason, in words, whenever the connection is lost."""
        self._hello = hello
        self._geometry = geometry
        self._on_loss = on_loss
        self.welcome: wire.Welcome | None = None
        """The first node's greeting while the connection can be used, else None. Its `boot` is
        those of all nodes."""
        self.is_served = True
        self.refusal: str | None = None
        """The reason why there is no connection. None once there is one, or was."""
        self.greetings = hello.session
        self.boots: tuple[str, ...] = ()
        """The lives of the nodes' daemons that were greeted last."""
        self._nodes: list[_Node] = []  # Empty while there is no connection.
        self._inbox: list[Mapping[int, Answers]] = []
        self._retry_at = 0.0
        self._is_closed = False
        self._last_lease = 0
        self.leases: dict[int, list[int]] = {}
        """Each node's lease, by the number of the scheduler role's. 0 = the node has none."""
        self.questions: dict[int, _Question] = {}  # By the node's lease.
        self.lookups: dict[int, _NodesLookup] = {}  # Unanswered, by the scheduler role's lease.
        self._reports = 0  # The number of the last plan whose report has come.

    # As client.link.Link

    def poll(self, now: float) -> list[wire.Reply]:
        """Take what reports have brought. Returns the replies in order, joined over the nodes."""
        if not self._nodes and not self._is_closed and now >= self._retry_at:
            self._greet(now)
        inbox, self._inbox = self._inbox, []
        replies: list[wire.Reply] = []
        for report in inbox:
            for node, answers in sorted(report.items()):
                if answers.greeting != self.greetings or not self._nodes:
                    continue
                replies += self._take_answers(node, answers, now)
        # The replies of a connection that was lost since belong to no one.
        return replies if self.welcome is not None else []

    def queue(self, request: wire.Request, now: float) -> bool:
        """Queue a message for all nodes whose daemons it is for. It leaves with the next plan."""
        if self.welcome is None:
            return False
        if isinstance(request, wire.Lookup):
            self._ask(_NodesLookup(request, [], []), request, range(len(self._nodes)))
        elif isinstance(request, wire.Release):
            self._release(request)
        elif isinstance(request, wire.Commit | wire.Free | wire.ReportCorrupt):
            for node, state in enumerate(self._nodes):
                slots = on_node(request.slots, node, len(self._nodes))
                state.messages.append(structs.replace(request, slots=slots))
        elif isinstance(request, wire.Identify):
            for node, state in enumerate(self._nodes):
                state.messages.append(
                    structs.replace(request, namespace=self._identity(request.namespace, node))
                )
        elif isinstance(request, wire.ReportIdentity):
            for node, state in enumerate(self._nodes):
                facts = {**request.facts, "node": f"[{node}, {len(self._nodes)}]"}
                state.messages.append(wire.ReportIdentity(facts))
        elif isinstance(request, wire.ReportRequest | wire.ReportAudit):
            self._nodes[0].messages.append(request)
        else:
            for state in self._nodes:
                state.messages.append(request)
        return True

    def send(self, request: wire.Request, now: float) -> bool:
        """Queue a message."""
        return self.queue(request, now)

    @property
    def is_greeting(self) -> bool:
        """True while the daemons are greeted, or are about to be after a loss."""
        return self.welcome is None and self.refusal is None and not self._is_closed

    @property
    def has_unsent(self) -> bool:
        """True while messages wait for the next plan."""
        return any(state.messages for state in self._nodes)

    def flush(self, now: float) -> bool:
        """Return True if there is a connection. What is queued leaves with the next plan."""
        return self.welcome is not None

    def greet_with(self, hello: wire.Hello) -> None:
        """Use another hello from the next connection on.

        A connection that has no welcome yet is made anew at once.
        """
        self._hello = hello
        if self.welcome is None:
            self._forget()
            self._retry_at = 0.0

    def drop_connection(self, why: str, now: float) -> None:
        """End the connection, if there is one. A later `poll` makes another."""
        if self.welcome is not None:
            self._lose(why, now)
        self._forget()

    def close(self, farewell: wire.Request | None = None) -> None:
        """End the connection for good. The next plans tell the relays so."""
        self._forget()
        self._is_closed = True

    # Plans and reports

    def plan_nodes(self, plan: StepPlan) -> NodePlans:
        """Return a step's plan for each node. It is called once for each plan, which must leave."""
        for lookup in self.lookups.values():
            if lookup.plan_number is None:
                lookup.plan_number = plan.number
        mails = [self._take_mail(node) for node in range(self._geometry.nodes)]
        if self.welcome is None:
            return NodePlans(plan, "", tuple(NodeShare("", 0, mail) for mail in mails))
        reserved = [state.reserved_bytes for state in self._nodes]
        shares = map(NodeShare, self.boots, reserved, mails)
        return NodePlans(plan, self.welcome.boot, tuple(shares))

    def on_report(self, number: int, answers: Mapping[int, Answers]) -> None:
        """Keep the answers in the report of a plan. `poll` takes them."""
        self._reports = max(self._reports, number)
        if answers:
            self._inbox.append(answers)

    def is_answer_due(self, lease: int) -> bool:
        """Return True if the answer to a lookup had its time: the reports that could bring it came.

        The time of a step is not the daemon's delay.
        """
        lookup = self.lookups.get(lease)
        if lookup is None:
            return True
        number = lookup.plan_number
        return number is not None and self._reports >= number + REPORTS_OF_AN_ANSWER - 1

    def queue_on(self, node: int, message: wire.Request) -> bool:
        """Queue a message, which names the node's own slots, for one node's daemon.

        Returns False where there is no connection.
        """
        if self.welcome is None:
            return False
        self._nodes[node].messages.append(message)
        return True

    def _take_mail(self, node: int) -> Mail | None:
        """Return the node's messages. Every plan has mail, so that the next shows a lost one."""
        if self._is_closed:
            return Mail(self.greetings + 1, 0, None, ())
        if not self._nodes:
            return None
        state = self._nodes[node]
        mail = Mail(self.greetings, state.mails, state.hello, tuple(state.messages))
        state.hello, state.messages = None, []
        state.mails += 1
        return mail

    # Connection

    def _greet(self, now: float) -> None:
        self.greetings += 1
        self._retry_at = now + RECONNECT_SECONDS
        namespace = self._hello.namespace
        assert namespace is not None, "an engine's hello has it"
        self._nodes = [
            _Node(structs.replace(self._hello, namespace=self._identity(namespace, node)))
            for node in range(self._geometry.nodes)
        ]

    def _identity(self, namespace: bytes, node: int) -> bytes:
        return node_identity(namespace, node, self._geometry.nodes)

    def _take_answers(self, node: int, answers: Answers, now: float) -> list[wire.Reply]:
        """Return the replies of one node's news that are complete with them."""
        state = self._nodes[node]
        if answers.number < state.answers:
            return []  # The report came twice.
        if answers.number > state.answers:
            self._lose(f"answers of node {node} were lost", now)
            return []
        state.answers += 1
        if answers.lost:
            self._lose(f"node {node}: {answers.lost}", now)
            return []
        if answers.welcome is not None:
            state.welcome = answers.welcome
            self._on_welcome(now)
        replies: list[wire.Reply] = []
        for reply in answers.replies:
            replies += self._join(node, reply)
        return replies

    def _on_welcome(self, now: float) -> None:
        """Begin to use the connection once every node's daemon has greeted it."""
        welcomes = [state.welcome for state in self._nodes if state.welcome is not None]
        if len(welcomes) < len(self._nodes):
            return
        boots = tuple(welcome.boot for welcome in welcomes)
        if len(set(boots)) < len(boots):
            self._lose("several nodes have one daemon, and each needs its own", now)
            return
        self.boots, self.refusal = boots, None
        slots_bytes = min(welcome.slots_bytes for welcome in welcomes)
        boot = "+".join(boots)
        self.welcome = structs.replace(welcomes[0], boot=boot, slots_bytes=slots_bytes)

    def _lose(self, why: str, now: float) -> None:
        """End the connection, or the attempt to make one."""
        was_connected = self.welcome is not None
        self._forget()
        if was_connected:
            self._on_loss(why)
        else:
            self._retry_at = now + RETRY_SECONDS
            self.refusal = why

    def _forget(self) -> None:
        """Forget the connection, and with it all leases and slots."""
        self.welcome = None
        self._nodes = []
        for container in (self.leases, self.questions, self.lookups):
            container.clear()

    # Messages

    def _new_lease(self) -> int:
        self._last_lease += 1
        return self._last_lease

    def _ask(self, lookup: _NodesLookup, message: wire.Lookup, nodes: Iterable[int]) -> None:
        """Ask nodes for a hit. The leases of an earlier round end after the new ones began."""
        count = len(self._nodes)
        before = lookup.leases or [0] * count
        lookup.leases, lookup.plan_number = [*before], None
        lookup.answers = lookup.answers or [None] * count
        self.leases[lookup.lookup.lease] = lookup.leases
        self.lookups[lookup.lookup.lease] = lookup
        for node in nodes:
            lease = lookup.leases[node] = self._new_lease()
            audit = self._new_lease() if message.audit_lease else 0
            lookup.answers[node] = None
            self.questions[lease] = _Question(lookup, node)
            asked = structs.replace(message, id=lease, lease=lease, audit_lease=audit)
            self._nodes[node].messages.append(asked)
            if before[node]:
                self._nodes[node].messages.append(wire.Release(before[node]))

    def _release(self, release: wire.Release) -> None:
        lookup = self.lookups.pop(release.lease, None)
        if lookup is not None:
            self._drop_audits(lookup)
        leases = self.leases.pop(release.lease, ())
        for node, lease in enumerate(leases):
            self.questions.pop(lease, None)
            if lease:
                share = release.loaded_bytes // len(leases)
                ended = structs.replace(release, lease=lease, loaded_bytes=share)
                self._nodes[node].messages.append(ended)

    def _join(self, node: int, reply: wire.Reply) -> list[wire.Reply]:
        """Return the replies to the scheduler role that are complete with one node's reply."""
        if isinstance(reply, wire.Found):
            return self._on_found(node, reply)
        if isinstance(reply, wire.Pending):
            question = self.questions.get(reply.lease)
            if question is None:
                return []
            # What one node has in RAM another one may lack. So it is stored again.
            masks = [bytes(len(mask)) for mask in reply.masks]
            lease = question.lookup.lookup.lease
            return [structs.replace(reply, id=lease, lease=lease, masks=masks)]
        if isinstance(reply, wire.Reserved):
            return self._on_reserved(node, reply)
        if isinstance(reply, wire.Removed):
            # What one node has lost is not hit, wherever it is on the others.
            removed = structs.replace(reply, below=b"")
            for lookup in self.lookups.values():
                if any(lookup.answers):
                    lookup.removed.append(removed)
            return [removed]
        return [reply] if isinstance(reply, wire.Error) or not node else []

    def _on_reserved(self, node: int, reply: wire.Reserved) -> list[wire.Reply]:
        """Join the grants of all nodes. Slots that a node granted beyond the others go back."""
        shape, state = (reply.part_bytes, reply.parts), self._nodes[node]
        state.granted.setdefault(shape, deque()).append(reply)
        state.reserved_bytes = max(state.reserved_bytes, reply.reserved_bytes)
        if not all(state.granted.get(shape) for state in self._nodes):
            return []
        grants = [state.granted[shape].popleft() for state in self._nodes]
        size = min(len(grant.slots) for grant in grants)
        for state, grant in zip(self._nodes, grants, strict=True):
            if len(grant.slots) > size:
                state.messages.append(wire.Free(grant.slots[size:]))
        tickets = join_nodes([grant.slots[:size] for grant in grants])
        return [structs.replace(grants[0], slots=tickets)]

    # Lookups

    def _on_found(self, node: int, found: wire.Found) -> list[wire.Reply]:
        question = self.questions.pop(found.lease, None)
        if question is None:
            # The scheduler role does not wait for it any more.
            self._release_found(node, found)
            return []
        lookup = question.lookup
        lookup.answers[node] = found
        if not found.depth:
            lookup.leases[node] = 0  # A miss opens no lease.
        answers = [answer for answer in lookup.answers if answer is not None]
        if len(answers) < len(self._nodes):
            return []
        if lookup.rounds == 1:
            masks = zip(*(answer.masks for answer in answers), strict=False)
            lookup.masks = [_common_mask(of_nodes) for of_nodes in masks]
            lookup.junctions = sorted({at for answer in answers for at in answer.junctions})
        ends = [self._hit_tokens(lookup, answer) for answer in answers]
        least = min(ends)
        if len(set(ends)) > 1 and lookup.rounds == 1:
            hits = ", ".join(f"{end} on node {node}" for node, end in enumerate(ends))
            lookup.why = f"nodes have hits of several lengths, in tokens: {hits}"
        if least and len(set(ends)) > 1 and lookup.rounds < ROUNDS_MAX:
            longer = [node for node, end in enumerate(ends) if end > least]
            self._drop_audits(lookup)
            lookup.rounds += 1
            self._ask(lookup, self._shortened(lookup.lookup, least), longer)
            return []
        joined = self._joined(lookup, answers, is_hit=bool(least) and len(set(ends)) == 1)
        # Whoever reads the masks hears of these losses again.
        return [joined, *lookup.removed]

    def _joined(
        self, lookup: _NodesLookup, answers: Sequence[wire.Found], *, is_hit: bool
    ) -> wire.Found:
        """Return the answer of all nodes: their common hit, or a miss."""
        asked = lookup.lookup
        del self.lookups[asked.lease]
        is_hit = is_hit and len({len(answer.slots) for answer in answers}) == 1
        if not is_hit:
            # Objects of one node alone are no hit, so no audit compares them either.
            self._drop_audits(lookup)
            for node, lease in enumerate(self.leases.pop(asked.lease, ())):
                if lease:
                    self._nodes[node].messages.append(wire.Release(lease))
            why = lookup.why[: wire.FACT_MAX]
            return wire.Found(
                id=asked.id,
                lease=asked.lease,
                depth=0,
                masks=lookup.masks,
                slots=b"",
                why=why,
                junctions=lookup.junctions[:JUNCTIONS_MAX],
            )
        slowest = max(answers, key=lambda answer: sum(answer.tiers.values()))
        whys = [f"node {node}: {answer.why}" for node, answer in enumerate(answers) if answer.why]
        why = "; ".join([lookup.why, *whys] if lookup.why else whys)
        return structs.replace(
            answers[0],
            id=asked.id,
            lease=asked.lease,
            masks=lookup.masks,
            slots=join_nodes([answer.slots for answer in answers]),
            tiers=slowest.tiers,
            why=why[: wire.FACT_MAX],
            junctions=lookup.junctions[:JUNCTIONS_MAX],
            audit=self._joined_audit(lookup, answers),
        )

    def _joined_audit(
        self, lookup: _NodesLookup, answers: Sequence[wire.Found]
    ) -> wire.AuditOffer | None:
        """Return what every node offers to audit. None where they differ, or nothing is offered."""
        offers = [answer.audit for answer in answers if answer.audit is not None]
        if not offers:
            return None
        present = {
            tuple(bool(slot.generation) for slot in unpack_slots(offer.slots)) for offer in offers
        }
        kinds = {(offer.chunk, len(offer.shorter_slots)) for offer in offers}
        is_alike = len(kinds) == 1 == len(present)
        if not is_alike or len(offers) < len(answers):
            self._drop_audits(lookup)
            return None
        self.leases[lookup.lookup.audit_lease] = [offer.lease for offer in offers]
        return structs.replace(
            offers[0],
            lease=lookup.lookup.audit_lease,
            slots=join_nodes([offer.slots for offer in offers]),
            shorter_slots=join_nodes([offer.shorter_slots for offer in offers]),
        )

    def _drop_audits(self, lookup: _NodesLookup) -> None:
        """End the leases of what nodes offered to audit."""
        for node, answer in enumerate(lookup.answers):
            if answer is not None and answer.audit is not None:
                self._nodes[node].messages.append(wire.Release(answer.audit.lease))
                lookup.answers[node] = structs.replace(answer, audit=None)

    def _release_found(self, node: int, found: wire.Found) -> None:
        """End the leases of an answer that nobody waits for."""
        if found.depth:
            self._nodes[node].messages.append(wire.Release(found.lease))
        if found.audit is not None:
            self._nodes[node].messages.append(wire.Release(found.audit.lease))

    def _hit_tokens(self, lookup: _NodesLookup, found: wire.Found) -> int:
        if found.tail:
            return tail_tokens(self._geometry, lookup.lookup.tails_from, found.tail - 1)
        return found.chunks * self._geometry.chunk_tokens

    def _shortened(self, lookup: wire.Lookup, tokens: int) -> wire.Lookup:
        """Return the lookup of hits of at most `tokens` tokens."""
        tails = 0
        while tails * HASH_BYTES < len(lookup.tails):
            if tail_tokens(self._geometry, lookup.tails_from, tails) > tokens:
                break
            tails += 1
        return structs.replace(
            lookup,
            hashes=lookup.hashes[: self._geometry.whole_chunks(tokens) * HASH_BYTES],
            tails=lookup.tails[: tails * HASH_BYTES],
            audit_lease=0,
        )


def _common_mask(masks: Sequence[bytes]) -> bytes:
    """Return what all nodes have: `(b"\\1\\1\\0", b"\\1\\0") -> b"\\1\\0\\0"`."""
    common = reduce(and_, (int.from_bytes(mask, "little") for mask in masks))
    return common.to_bytes(max(map(len, masks)), "little")
