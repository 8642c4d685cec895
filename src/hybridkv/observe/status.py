"""Makes what people are shown: the status of a daemon, and what became of a request in sentences.

The status has numbers, their meaning, and what is wrong. The page and `hybridkv top` show it.
`hybridkv explain` shows the sentences of a request.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hybridkv import __version__
from hybridkv.core.audit import AuditOutcome
from hybridkv.core.hints import Hints
from hybridkv.core.refusals import describe_refusal
from hybridkv.core.sizes import format_size
from hybridkv.observe.history import Past, RequestOutcome, Sample, Snapshot
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
UNREAD = (
    "engines share with no other and with no later one, because their weights cannot be read in "
    "memory; their logs name the modules, and weights_identity can name the weights"
)
TIER_NOTES = {
    "objects_damaged": "were damaged and were removed",
    "objects_refused": "found no room there",
    "objects_shed": "were not written: too many waited, or they had to go before",
    "objects_given_up": "were not written: that failed again and again",
}


class CountedProblem(NamedTuple):
    """A counter whose growth is a problem."""

    level: str
    text: str  # What was counted; the number stands before it.


RECENT_PROBLEMS = {
    "loads_failed": CountedProblem("bad", "loads failed; the engines computed instead"),
    "deadlines_missed": CountedProblem(
        "warn", "lookups waited for tiers and were answered before all had come"
    ),
    "lookups_unused": CountedProblem(
        "warn",
        "prompts were computed although they were looked up: the answer was late, or what was "
        "found could not be loaded; the decisions below say why",
    ),
    "reserves_failed": CountedProblem(
        "warn",
        "times the cache could not grow, because its directory or control group is full; a "
        "larger volume or limit, or a smaller --ram, works",
    ),
    "slots_short": CountedProblem(
        "note", "write slots were wanted and not there; what would have been in them is not stored"
    ),
}
"""Counters that are shown where they grew in the last RECENT_SECONDS."""
DECLINES: Mapping[Decline, str] = {
    Decline.UNHASHABLE: "requests with prompt embeddings are not served: the engine's hashes do "
    "not name them",
    Decline.ADAPTER: "the LoRA adapter's weights are not known for sure",
    Decline.LATE_ADAPTER: "no step said in time whether the LoRA adapter is loaded",
    Decline.TOO_SHORT: "the prompt has no whole chunk before its last token",
    Decline.UNWANTED: "the request, or all of this engine, needs each token of a prompt to be "
    "computed, or asked not to use cached prefixes",
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
    AuditOutcome.INCONCLUSIVE: "not made: nothing could be compared",
}
"""Each outcome of a live audit in words."""


class StatusReport:
    """Makes the status of snapshots. The past is computed once for each sample."""

    def __init__(self, samples_max: int = 0, decisions_max: int = DECISIONS_SHOWN_MAX) -> None:
        """It has the last `samples_max` samples. 0 = all."""
        self._samples_max = samples_max
        self._decisions_max = decisions_max
        self._last_sample_at = -math.inf
        self._past: wire.StatusHistory

    def make(self, snapshot: Snapshot) -> wire.Status:
        """Returns everything that is shown of the snapshot."""
        now = snapshot.now
        samples = snapshot.hour[-self._samples_max :]
        last_at = samples[-1].at if samples else 0.0
        if last_at != self._last_sample_at:
            self._last_sample_at, self._past = last_at, history(snapshot, samples)
        decisions = snapshot.decisions[: self._decisions_max]
        return wire.Status(
            version=__version__,
            setup=snapshot.setup,
            uptime_seconds=_short(now - snapshot.started_at),
            values=snapshot.values.named(),
            minute=_window(snapshot, MINUTE_SECONDS),
            recent=_window(snapshot, HOUR_SECONDS),
            health=health(snapshot),
            help=help_of(snapshot),
            verdict=verdict(snapshot),
            tiers=[*snapshot.tiers],
            groups=[*snapshot.groups],
            sessions=[*snapshot.sessions],
            decisions=[_decision(outcome, now) for outcome in decisions],
            hour=self._past,
        )


def _decision(request: RequestOutcome, now: float) -> wire.DecisionStatus:
    explanation = request.explanation
    outcome, text = outcome_of(explanation)
    return wire.DecisionStatus(
        request_id=request.request_id,
        identity=request.identity.hex()[:12],
        age=_short(max(0.0, now - request.reported_at)),
        prompt=f"{explanation.prompt_tokens} tokens",
        outcome=outcome,
        text=text,
        limit=limit_of(explanation),
        facts=sentences_of(explanation),
    )


def history(snapshot: Snapshot, samples: Sequence[Sample]) -> wire.StatusHistory:
    """Returns the past, from samples of the snapshot's columns."""
    step = min((after.at - before.at for before, after in pairwise(samples)), default=0.0)
    past = Past(snapshot.columns, samples)
    names = [tier.name for tier in snapshot.tiers]

    def share(part: str) -> list[float | None]:
        shares = past.shares(part, "ceiling_asked_tokens", SMOOTH_STEPS * step)
        return [None if share is None else _short(share) for share in shares]

    def rates(metric: str, *labels: str) -> list[float]:
        return [_short(rate) for rate in past.rates(metric, *labels)]

    def levels(metric: str, *labels: str) -> list[float]:
        return [_short(level) for level in past.levels(metric, *labels)[1:]]

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
    """Returns everything that is not as it should be, the worst first."""
    found: list[wire.Problem] = []
    for tier in snapshot.tiers:
        where = f"{tier.name} ({tier.location})"
        state = ""
        if not tier.is_open:
            state = "cannot be used; it is opened again every few seconds"
        elif tier.is_hung:
            state = "hangs; nothing is asked of it until it answers"
        elif tier.is_shut and not tier.refusals:
            state = "fails; it is asked only now and then until it is well"
        found += [wire.Problem("bad", f"{where} {state}")] if state else []
        for refusal in tier.refusals:
            minutes = f"{refusal.seconds / MINUTE_SECONDS:,.0f} min"
            text = f"has refused objects for {minutes}: {describe_refusal(refusal.reason)}"
            found.append(wire.Problem("bad", f"{where} {text}"))
        found += [
            wire.Problem("note", f"{where}: {count:,.0f} objects {what}, since the daemon began")
            for name, what in TIER_NOTES.items()
            if (count := tier.values.get(name, 0.0))
        ]
    recent = snapshot.last_seconds(RECENT_SECONDS)
    found += [
        wire.Problem(problem.level, f"in the last 10 minutes {count:,.0f} {problem.text}")
        for name, problem in RECENT_PROBLEMS.items()
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
    if count := snapshot.values.of("engines_unread"):
        found.append(wire.Problem("warn", f"{count:,.0f} {UNREAD}"))
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
    """Returns a sentence or two on whether the cache helped in the last hour and requests."""
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
    outcomes = Counter(outcome_of(request.explanation).outcome for request in snapshot.decisions)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return f"{text} The last requests: {counts}." if counts else text


def verdict(snapshot: Snapshot) -> wire.MemoryVerdict:
    """Returns whether more memory would help, by the last hour."""
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


class OutcomeText(NamedTuple):
    """The outcome of a request, and what was loaded or why nothing was."""

    outcome: wire.Outcome
    text: str


def outcome_of(explanation: RequestExplanation) -> OutcomeText:
    """Returns the outcome of a request, with its reason in words."""
    loaded, declined = explanation.loaded_tokens, explanation.declined
    local_tokens, hit_chunks = explanation.local_tokens, explanation.hit_chunks
    asked_tokens = explanation.asked_chunks * explanation.chunk_tokens
    if loaded:
        size = format_size(explanation.loaded_bytes)
        return OutcomeText(wire.Outcome.LOADED, f"{loaded} tokens, {size}")
    if declined is not None:
        is_failed = declined in (Decline.LOAD_FAILED, Decline.PLAN_FAILED)
        outcome = wire.Outcome.FAILED if is_failed else wire.Outcome.DECLINED
        return OutcomeText(outcome, explanation.detail or DECLINES[declined])
    if hit_chunks is None and 0 < asked_tokens <= (local_tokens or 0):
        text = f"the engine's own cache had {local_tokens} tokens, and no hit can have more"
        return OutcomeText(wire.Outcome.LOCAL, text)
    if hit_chunks is None:
        text = "no lookup was answered before the request ended"
        return OutcomeText(wire.Outcome.DECLINED, text)
    if local_tokens and local_tokens >= hit_chunks * explanation.chunk_tokens:
        text = f"vLLM's own prefix cache had {local_tokens} tokens; the daemon had no longer hit"
        return OutcomeText(wire.Outcome.LOCAL, text)
    if not hit_chunks:
        return OutcomeText(wire.Outcome.MISS, "nothing was found")
    if explanation.audit is not None:
        text = "its only chunk was computed for the live audit"
        return OutcomeText(wire.Outcome.UNUSED, text)
    return OutcomeText(wire.Outcome.UNUSED, "the request ended before the hit was loaded")


def describe_hints(hints: Hints) -> str:
    """Returns what a request asked of the cache, in words. "" where it asked nothing.

    >>> describe_hints(Hints(retain_seconds=600.0, low_priority=True))
    'retain it for 600 s, low priority'
    """
    in_seconds = hints.prefetch_in_seconds or 0.0
    words = {
        "no_read": "load nothing",
        "no_write": "store nothing",
        "retain": f"retain it for {hints.retain_seconds:g} s",
        "release": "release it at its end",
        "demote": "demote it at its end",
        "low_priority": "low priority",
        "prefetch": f"prefetch it in {in_seconds:g} s",
    }
    return ", ".join(words[name] for name in hints.asked_names())


def limit_of(explanation: RequestExplanation) -> str:
    """Returns why the hit was not longer. "" where it could not be."""
    return ", ".join(
        f"group {group.gid} ({group.kind}) lacks chunk {group.lacks}"
        for group in explanation.groups
        if group.lacks is not None
    )


def sentences_of(explanation: RequestExplanation) -> dict[str, str]:
    """Returns what became of a request: sentences by name, in the order of the events."""
    facts = {"prompt": f"{explanation.prompt_tokens} tokens"}
    if asked := describe_hints(explanation.hints):
        facts["asked of the cache"] = asked
    if explanation.asked_chunks:
        facts["looked up"] = (
            f"{explanation.asked_chunks} chunks of {explanation.chunk_tokens} tokens"
        )
    if explanation.hit_chunks is not None:
        present = ", ".join(
            f"group {group.gid} ({group.kind}) {group.objects} of {explanation.looked_chunks}"
            for group in explanation.groups
        )
        facts["found"] = f"a hit of {explanation.hit_chunks} chunks; objects there: {present}"
    if explanation.tiers:
        given = (f"{count} chunks from {name}" for name, count in explanation.tiers.items())
        facts["came up"] = ", ".join(given)
    if explanation.not_read:
        facts["not read from below RAM because"] = explanation.not_read
    if limit := limit_of(explanation):
        facts["not more because"] = limit
    if explanation.local_tokens is not None:
        facts["engine's own cache"] = f"{explanation.local_tokens} tokens"
    outcome, text = outcome_of(explanation)
    if outcome is wire.Outcome.LOADED:
        facts["loaded"] = text
    elif explanation.declined is not None or explanation.hit_chunks is not None:
        facts["nothing loaded because"] = text
    if explanation.audit is not None:
        detail = f": {explanation.audit_detail}" if explanation.audit_detail else ""
        facts["live audit"] = AUDITS[explanation.audit] + detail
    facts["stored"] = f"{explanation.stored_objects} objects"
    if explanation.junctions:
        ends = ", ".join(f"{tokens:,}" for tokens in explanation.junctions)
        facts["stored states at"] = f"{ends} tokens: other prompts part from this one there"
    return facts


def sentences_of_reply(reply: Explained) -> dict[str, str]:
    """Returns `sentences_of` the request, its identity, and where else its prefix is.

    Empty where the daemon does not know the request.
    """
    if reply.explanation is None:
        return {}
    facts = sentences_of(reply.explanation) | {"identity": reply.identity.hex()}
    for elsewhere in reply.others:
        differences = "; ".join(
            f"{difference.name}: {difference.here} here, {difference.there} there"
            for difference in elsewhere.differences
        )
        facts[f"also under {elsewhere.identity.hex()[:12]}"] = (
            differences or "in what they differ is not known, or not any more"
        )
    return facts


def _window(snapshot: Snapshot, seconds: float) -> wire.WindowStatus:
    """Returns how counters grew in the last `seconds`, or since the daemon began."""
    past = snapshot.last_seconds(seconds)
    length = past.samples[-1].at - past.samples[0].at
    waits = past.growth("lookups_waited")
    spared = past.growth("computing_seconds_spared")
    return wire.WindowStatus(
        seconds=_short(length),
        hit=past.share("ceiling_hit_tokens", "ceiling_asked_tokens"),
        ceiling=past.share("ceiling_tokens", "ceiling_asked_tokens"),
        hit_tokens=past.growth("tokens_hit"),
        asked_tokens=past.growth("tokens_asked"),
        loaded_tokens=past.growth("tokens_loaded"),
        saved_seconds=_short(spared - past.growth("loading_seconds")) if spared else None,
        wait_seconds=_short(past.growth("lookup_wait_seconds") / waits) if waits else None,
        per_second={
            name: _short(past.growth(name) / length) if length else 0.0
            for name in ("lookups", "bytes_loaded", "bytes_stored", "evicted")
        },
    )


def _short(value: float) -> float:
    """The value with four digits, as further digits of a measurement say nothing."""
    return float(f"{value:.4g}") if abs(value) < 1e4 else float(round(value))
