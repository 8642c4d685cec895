"""The state of the daemon. The handlers change it, and the view reads it."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridkv.core.junctions import Branches
from hybridkv.daemon.advice import AdviceQueue
from hybridkv.daemon.forgetting import Forgetting
from hybridkv.daemon.inventory import Inventory
from hybridkv.daemon.pins import PinList
from hybridkv.daemon.quotas import Quotas
from hybridkv.daemon.recent_prompts import RecentPrompts
from hybridkv.daemon.sessions import Sessions
from hybridkv.daemon.subscriptions import OutgoingMessage, Subscriptions
from hybridkv.observe.ceiling import HitRateCeiling
from hybridkv.observe.history import Histogram, RequestHistory
from hybridkv.store.store import Store
from hybridkv.tiers.demotion import Demotion
from hybridkv.tiers.health import TierState
from hybridkv.tiers.prefetches import Prefetches
from hybridkv.tiers.promises import Promises
from hybridkv.tiers.promotion import Promotion
from hybridkv.wire.messages import Welcome
from hybridkv.wire.status import DaemonSetup

if TYPE_CHECKING:  # The module needs a library that is an extra.
    from hybridkv.observe.traces import SpanExporter


class DaemonState:
    """The daemon's parts and counters. `tiers` are those below RAM, the fastest first."""

    def __init__(self, store: Store, welcome: Welcome, tiers: Sequence[TierState]) -> None:
        self.store = store
        self.welcome = welcome  # The answer to each hello, but for the `id`.
        self.tiers = tiers
        self.counters: Counter[str] = Counter()  # Counts by the names of daemon.metrics.
        self.requests: Counter[str] = Counter()  # Messages of clients by their type.
        self.refused: Counter[str] = Counter()  # Messages and connections by the error's code.
        self.tier_chunks_hit: Counter[str] = Counter()  # Chunks of hits that came from each tier.
        self.computing_seconds_spared = 0.0
        """Seconds that computing would have taken of what was loaded, at each engine's measured
        speed. A load of an engine of unknown speed is left out, here and in the next sum."""
        self.loading_seconds = 0.0  # From each lookup to the end of its load.
        self.sessions = Sessions(store, self.counters)
        self.demotion = Demotion(store, tiers)
        self.advice = AdviceQueue(store, self.demotion)
        self.promises = Promises()
        self.promotion = Promotion(store, tiers, self.promises)
        self.prefetches = Prefetches(store, tiers, self.promotion)
        self.recent_prompts = RecentPrompts()
        self.subscriptions = Subscriptions(tiers, self.sessions)
        store.on_change = self.subscriptions.on_object_changed
        self.inventory = Inventory(store, self.sessions, tiers)
        self.quotas = Quotas(store)
        self.branches = Branches()
        self.history = RequestHistory()
        self.pins = PinList(store, self.sessions, self.history, self.advice)
        self.forgetting = Forgetting(
            store, self.sessions, self.demotion, self.promotion, self.subscriptions, self.history
        )
        self.ceiling = HitRateCeiling()
        self.waits = Histogram()  # Seconds that lookups waited for tiers.
        self.spans: SpanExporter | None = None  # None where no spans are exported.
        self.setup = DaemonSetup("", "", {})
        self.metrics_url = ""  # The URL of /metrics. Empty where no pages are served.
        self.outgoing: deque[OutgoingMessage] = deque()
        """Messages that are to be sent beside the replies to requests, in order."""

    @property
    def now(self) -> float:
        """The time of the last event, by the daemon's clock."""
        return self.store.now

    @now.setter
    def now(self, value: float) -> None:
        self.store.now = value
