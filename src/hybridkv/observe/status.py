"""What people are shown: the status, for the page and `hybridkv top`, and requests in sentences.

The status has numbers, what they mean, and what is wrong. `hybridkv explain` has the sentences too.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hybridkv import __version__
from hybridkv.core.audit import AuditOutcome
from hybridkv.core.sizes import format_size
from hybridkv.observe.history import Past, Sample, Snapshot
from hybridkv.wire import status as wire
from hybridkv.wire.messages import Decline, Explained, RequestExplanation

MINUTE_SECONDS = 60.0
RECENT_SECONDS = 600.0  # Failures of so long ago are still shown.
HOUR_SECONDS = 3600.0
SMOOTH_STEPS = 6  # Shares are those of so many steps, because one may have next to nothing.
GROUPS_SHOWN_MAX = 64  # Groups of all identities; the smaller ones are summed up.
SESSIONS_SHOWN_MAX = 256
DECISIONS_SHOWN_MAX = 50
BRIEF_DECISIONS = 20
BRIEF_SAMPLES = 91  # Samples of the hour in a brief status.
GAP_MIN = 0.02  # A smaller difference of ceiling and hits is no reason for more memory.
LEVELS = ("bad", "warn", "note")  # The worst first.
TIER_NOTES = {
    "objects_damaged": "were damaged and were removed",
    "objects_refused": "found no room there",
    "objects_shed": "were not written: too many waited, or they had to go before",
    "objects_given_up": "were not written: that failed again and again",
}
NEWS = {
    "loads_failed": ("bad", "loads failed; the engines computed instead"),
    "deadlines_missed": ("warn", "lookups waited for tiers and were answered before all had come"),
    "reserves_failed": (
        "warn",
        "times the cache could not grow, because its directory is full; a larger volume or a "
        "smaller --ram works",
    ),
    "slots_short": (
        "note",
        "write slots were wanted and not there; what would have been in them is not stored",
    ),
}
DECLINES: Mapping[Decline, str] = {
    Decline.UNHASHABLE: "requests with prompt embeddings are not served: the engine's hashes do "
    "not name them",
    Decline.ADAPTER: "the LoRA adapter's weights are not known for sure",
    Decline.LATE_ADAPTER: "no step said in time whether the LoRA adapter is loaded",
    Decline.TOO_SHORT: "the prompt has no whole chunk before its last token",
    Decline.UNWANTED: "the request asked not to use cached prefixes",
    Decline.NO_DAEMON: "no daemon was connected",
    Decline.BREAKER_OPEN: "the daemon did not answer other requests in time and is left alone "
    "for a moment",
    Decline.LATE_ANSWER: "the daemon's answer was late (lookup_timeout_ms)",
    Decline.LATE_WORKERS: "the workers were not attached to the daemon yet",
    Decline.LATE_ROOM: "other loads left no room in the engine's block pool",
    Decline.LOST: "the connection to the daemon was lost meanwhile",
    Decline.IDENTITY: "the engine's weights changed meanwhile",
    Decline.LOAD_FAILED: "the load failed, and the request was computed",
    Decline.PLAN_FAILED: "the load could not be planned",
    Decline.AUDIT: "a live audit found that this engine computes other bytes than are stored",
}
"""Each reason in words."""
AUDITS: Mapping[AuditOutcome, str] = {
    AuditOutcome.PASSED: "passed: the engine computed what is stored",
    AuditOutcome.DIFFERED: "differed: the engine computed something else",
    AuditOutcome.UNMADE: "not made: nothing could be compared",
}
"""What came of an audit in words."""


class StatusReport:
    """Makes the status of snapshots; the past is computed once for each sample."""

    def __init__(self, is_brief: bool = False) -> None:
        """A brief status has no day, less of the hour, and fewer decisions."""
        self._is_brief = is_brief
        self._histories: dict[str, tuple[float, wire.StatusHistory]] = {}
        """By span: when its last sample was taken, and its history."""

    def make(self, snapshot: Snapshot) -> wire.Status:
        """Everything that is shown of the snapshot."""
        now = snapshot.now
        decisions = [
            wire.DecisionStatus(
                one.request_id,
                one.identity.hex()[:12],
                _short(max(0.0, now - one.told_at)),
                f"{one.explanation.prompt_tokens} tokens",
                *outcome_of(one.explanation),
                limit_of(one.explanation),
                sentences_of(one.explanation),
            )
            for one in snapshot.decisions[: BRIEF_DECISIONS if self._is_brief else None]
        ]
        hour = snapshot.hour[-BRIEF_SAMPLES if self._is_brief else 0 :]
        return wire.Status(
            __version__,
            snapshot.setup,
            _short(now - snapshot.started_at),
            snapshot.values.named(),
            _window(snapshot, MINUTE_SECONDS),
            _window(snapshot, HOUR_SECONDS),
            health(snapshot),
            help_of(snapshot),
            verdict(snapshot),
            [*snapshot.tiers],
            [*snapshot.groups],
            [*snapshot.sessions],
            decisions,
            self._past("hour", snapshot, hour),
            None if self._is_brief else self._past("day", snapshot, snapshot.day),
        )

    def _past(self, span: str, snapshot: Snapshot, samples: Sequence[Sample]) -> wire.StatusHistory:
        last = samples[-1].at if samples else 0.0
        if span not in self._histories or self._histories[span][0] != last:
            self._histories[span] = last, history(snapshot, samples)
        return self._histories[span][1]


def history(snapshot: Snapshot, samples: Sequence[Sample]) -> wire.StatusHistory:
    """The past, from samples of the snapshot's columns."""
    step = min((after.at - before.at for before, after in pairwise(samples)), default=0.0)
    past = Past(snapshot.columns, samples)
    names = [tier.name for tier in snapshot.tiers]

    def share(part: str) -> list[float | None]:
        told = past.shares(part, "ceiling_asked_tokens", SMOOTH_STEPS * step)
        return [None if share is None else _short(share) for share in told]

    def rates(metric: str, label: str = "") -> list[float]:
        return [_short(rate) for rate in past.rates(metric, label)]

    def levels(metric: str, label: str = "") -> list[float]:
        return [_short(level) for level in past.levels(metric, label)[1:]]

    held = {name: levels("tier_bytes", name) for name in names}
    waits, waited = rates("lookup_wait_seconds"), rates("lookups_waited")
    return wire.StatusHistory(
        step_seconds=_short(step),
        ages=[_short(samples[-1].at - sample.at) for sample in samples[1:]],
        hit=share("ceiling_hit_tokens"),
        ceiling=share("ceiling_tokens"),
        lookups=rates("lookups"),
        wait_seconds=[
            _short(wait / count) if count else None
            for wait, count in zip(waits, waited, strict=True)
        ],
        evicted=rates("evicted"),
        loaded=rates("bytes_loaded"),
        stored=rates("bytes_stored"),
        sessions=levels("sessions"),
        bytes={"ram": levels("bytes_committed")} | held,
        read={name: rates("tier_bytes_read", name) for name in names},
        written={name: rates("tier_bytes_written", name) for name in names},
    )


def health(snapshot: Snapshot) -> list[wire.Problem]:
    """Everything that is not as it should be, the worst first."""
    found: list[wire.Problem] = []
    for tier in snapshot.tiers:
        where = f"{tier.name} ({tier.location})"
        state = ""
        if not tier.is_open:
            state = "cannot be used; it is opened again every few seconds"
        elif tier.is_hung:
            state = "hangs; nothing is asked of it until it answers"
        elif tier.is_shut:
            state = "fails; it is asked only now and then until it is well"
        found += [wire.Problem("bad", f"{where} {state}")] if state else []
        found += [
            wire.Problem("note", f"{where}: {count:,.0f} objects {what}, since the daemon began")
            for name, what in TIER_NOTES.items()
            if (count := tier.values.get(name, 0.0))
        ]
    recent = snapshot.since(RECENT_SECONDS)
    found += [
        wire.Problem(level, f"in the last 10 minutes {count:,.0f} {what}")
        for name, (level, what) in NEWS.items()
        if (count := recent.growth(name))
    ]
    if count := snapshot.values.of("workers_unmapped"):
        text = f"{count:,.0f} workers cannot map the arena, or cannot copy"
        what = "so that nothing is loaded or stored; their engines' logs say why"
        found.append(wire.Problem("bad", f"{text}, {what}"))
    if count := snapshot.values.of("engines_stale"):
        text = f"{count:,.0f} engines serve nothing: their caches have blocks of other weights"
        cure = "reset_prefix_cache while no request runs ends it"
        found.append(wire.Problem("bad", f"{text}; {cure}"))
    if count := snapshot.values.of("audits_differed"):
        text = f"{count:,.0f} live audits found that an engine computes other bytes than are stored"
        what = "it neither loads nor stores under that identity any more; its log names the layer"
        found.append(wire.Problem("bad", f"{text}; {what}"))
    if count := snapshot.values.of("objects_condemned"):
        text = f"{count:,.0f} objects had wrong bytes in RAM and were dropped"
        found.append(wire.Problem("warn", f"{text}, since the daemon began"))
    if not snapshot.sessions:
        found.append(wire.Problem("note", "no engine is connected"))
    return sorted(found, key=lambda problem: LEVELS.index(problem.level))


def help_of(snapshot: Snapshot) -> str:
    """Whether the cache helps, in a sentence or two, by the last hour and the last requests."""
    window = _window(snapshot, HOUR_SECONDS)
    passed, differed = map(snapshot.values.of, ("audits_passed", "audits_differed"))
    audited = ""
    if passed or differed:
        audited = f" Audited {passed + differed:,.0f}, {differed:,.0f} differed."
    if not window.asked_tokens:
        return f"Nothing was looked up in the last hour.{audited}"
    text = "Nothing was loaded in the last hour."
    if window.loaded_tokens:
        part = window.loaded_tokens / window.asked_tokens
        text = f"In the last hour {window.loaded_tokens:,.0f} tokens were loaded, {part:.0%} of"
        text += " those asked for"
        if window.saved_seconds is None:
            text += "."
        elif window.saved_seconds >= 0:
            text += f", which saved {window.saved_seconds:.3g} s."
        else:
            text += f", which took {-window.saved_seconds:.3g} s longer than computing."
    text += audited
    words = Counter(str(outcome_of(one.explanation)[0]) for one in snapshot.decisions)
    told = ", ".join(f"{count} {word}" for word, count in words.most_common())
    return f"{text} The last requests: {told}." if told else text


def verdict(snapshot: Snapshot) -> wire.MemoryVerdict:
    """Whether more memory would help, by the last hour."""
    window = _window(snapshot, HOUR_SECONDS)
    hit, ceiling, values = window.hit, window.ceiling, snapshot.values
    if hit is None or ceiling is None:
        return wire.MemoryVerdict(None, None, "Nothing was looked up in the last hour.")
    gap = ceiling - hit
    if gap < GAP_MIN:
        text = "More memory would not help: there is next to nothing to hit that was not hit."
    elif any(map(values.of, ("evicted", "over_quota", "slots_short"))):
        text = (
            f"More memory may help: up to {gap:.0%} of the tokens asked for were once here, "
            "and are not."
        )
    else:
        text = (
            "More memory would not help: nothing was lost for lack of room. "
            "The decisions below say what was."
        )
    if values.of("ceiling_chunks_forgotten"):
        text += " The ceiling may be higher: not all chunks are remembered."
    elif values.of("slots_short"):
        text += " The ceiling does not count what engines found no room to store."
    return wire.MemoryVerdict(hit, ceiling, text)


def outcome_of(told: RequestExplanation) -> tuple[wire.Outcome, str]:
    """The outcome, and what was loaded or why nothing was."""
    if told.loaded_tokens:
        return wire.Outcome.LOADED, f"{told.loaded_tokens} tokens, {format_size(told.loaded_bytes)}"
    if told.declined is not None:
        is_failed = told.declined in (Decline.LOAD_FAILED, Decline.PLAN_FAILED)
        word = wire.Outcome.FAILED if is_failed else wire.Outcome.DECLINED
        return word, told.detail or DECLINES[told.declined]
    if told.hit_chunks is None:
        return wire.Outcome.DECLINED, "no lookup was answered before the request ended"
    if told.local_tokens and told.local_tokens >= told.hit_chunks * told.chunk_tokens:
        text = f"the engine's own cache had {told.local_tokens} tokens, and the daemon no more"
        return wire.Outcome.LOCAL, text
    if not told.hit_chunks:
        return wire.Outcome.MISS, "nothing was found"
    if told.audit is not None:
        return wire.Outcome.UNUSED, "its only chunk was computed for the live audit"
    return wire.Outcome.UNUSED, "the request ended before the hit was loaded"


def limit_of(told: RequestExplanation) -> str:
    """Why the hit was not longer; empty where it could not be."""
    return ", ".join(
        f"group {group.gid} ({group.kind}) lacks chunk {group.lacks}"
        for group in told.groups
        if group.lacks is not None
    )


def sentences_of(told: RequestExplanation) -> dict[str, str]:
    """Sentences by name, in the order in which things happened."""
    facts = {"prompt": f"{told.prompt_tokens} tokens"}
    if told.asked_chunks:
        facts["looked up"] = f"{told.asked_chunks} chunks of {told.chunk_tokens} tokens"
    if told.hit_chunks is not None:
        present = ", ".join(
            f"group {group.gid} ({group.kind}) {group.objects} of {told.looked_chunks}"
            for group in told.groups
        )
        facts["found"] = f"a hit of {told.hit_chunks} chunks; objects there: {present}"
    if told.tiers:
        given = (f"{count} chunks from {name}" for name, count in told.tiers.items())
        facts["came up"] = ", ".join(given)
    if told.not_read:
        facts["not read from below RAM because"] = told.not_read
    if limit := limit_of(told):
        facts["not more because"] = limit
    if told.local_tokens is not None:
        facts["engine's own cache"] = f"{told.local_tokens} tokens"
    outcome, text = outcome_of(told)
    if outcome is wire.Outcome.LOADED:
        facts["loaded"] = text
    elif told.declined is not None or told.hit_chunks is not None:
        facts["nothing loaded because"] = text
    if told.audit is not None:
        detail = f": {told.audit_detail}" if told.audit_detail else ""
        facts["live audit"] = AUDITS[told.audit] + detail
    return facts | {"stored": f"{told.stored_objects} objects"}


def sentences_of_reply(told: Explained) -> dict[str, str]:
    """As `sentences_of`, with the identity and where else the prefix is; empty if not known."""
    if told.explanation is None:
        return {}
    facts = sentences_of(told.explanation) | {"identity": told.identity.hex()}
    for other in told.others:
        differences = "; ".join(
            f"{one.name}: {one.here} here, {one.there} there" for one in other.differences
        )
        facts[f"also under {other.identity.hex()[:12]}"] = (
            differences or "in what they differ is not known, or not any more"
        )
    return facts


def _window(snapshot: Snapshot, seconds: float) -> wire.WindowStatus:
    """How counters grew in the last `seconds`, or since the daemon began."""
    past = snapshot.since(seconds)
    length = past.samples[-1].at - past.samples[0].at
    waited = past.growth("lookups_waited")
    return wire.WindowStatus(
        _short(length),
        past.share("ceiling_hit_tokens", "ceiling_asked_tokens"),
        past.share("ceiling_tokens", "ceiling_asked_tokens"),
        past.growth("tokens_hit"),
        past.growth("tokens_asked"),
        past.growth("tokens_loaded"),
        _short(past.growth("computing_seconds_spared") - past.growth("loading_seconds"))
        if past.growth("computing_seconds_spared")
        else None,
        _short(past.growth("lookup_wait_seconds") / waited) if waited else None,
        {
            name: _short(past.growth(name) / length) if length else 0.0
            for name in ("lookups", "bytes_loaded", "bytes_stored", "evicted")
        },
    )


def _short(value: float) -> float:
    """The value with four digits, because more of a measurement say nothing."""
    return float(f"{value:.4g}") if abs(value) < 1e4 else float(round(value))
