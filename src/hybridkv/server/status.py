"""What the status page and `hybridkv top` show, made from a snapshot: numbers, what they mean, and what is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec

from hybridkv import __version__
from hybridkv.core.series import Sample, rates, share_of, shares, since
from hybridkv.server.snapshot import Snapshot

MINUTE_SECONDS = 60.0
RECENT_SECONDS = 600.0
"""What went wrong within so long is still news."""
HOUR_SECONDS = 3600.0
SMOOTH_STEPS = 6
"""Shares are those of the last so many steps: in a single one there may be next to nothing."""
BRIEF_DECISIONS = 20
BRIEF_SAMPLES = 91
"""Of the hour, for a terminal."""
GAP_MIN = 0.02
"""A ceiling that is not higher than the hits by as much is no reason for more memory."""


@dataclass(frozen=True, slots=True)
class _Past:
    """Samples whose columns go by name."""

    columns: tuple[str, ...]
    samples: Sequence[Sample]
    step_seconds: float

    def rate(self, name: str) -> list[float]:
        return [_short(rate) for rate in rates(self.samples, self.columns.index(name))]

    def level(self, name: str) -> list[float]:
        column = self.columns.index(name)
        return [_short(sample.values[column]) for sample in self.samples[1:]]

    def share(self, part: str, whole: str) -> list[float | None]:
        index = self.columns.index
        told = shares(self.samples, index(part), index(whole), SMOOTH_STEPS * self.step_seconds)
        return [None if share is None else _short(share) for share in told]


class Status:
    """Makes the JSON; what is past is made only once."""

    def __init__(self, is_brief: bool = False) -> None:
        """Brief: no day, less of the hour, and fewer decisions."""
        self._is_brief = is_brief
        self._made: dict[str, tuple[float, msgspec.Raw]] = {}
        """By span: when its last sample was taken, and the JSON."""

    def encode(self, snapshot: Snapshot) -> bytes:
        """Everything, as JSON."""
        hour = snapshot.hour[-BRIEF_SAMPLES:] if self._is_brief else snapshot.hour
        spans: dict[str, Any] = {"hour": self._past("hour", snapshot, hour)}
        if not self._is_brief:
            spans["day"] = self._past("day", snapshot, snapshot.day)
        shown = replace(snapshot, decisions=snapshot.decisions[:BRIEF_DECISIONS]) if self._is_brief else snapshot
        return msgspec.json.encode(status(shown) | spans)

    def _past(self, span: str, snapshot: Snapshot, samples: Sequence[Sample]) -> msgspec.Raw:
        last = samples[-1].at if samples else 0.0
        at, made = self._made.get(span, (None, msgspec.Raw()))
        if at != last:
            made = msgspec.Raw(msgspec.json.encode(history(snapshot, samples)))
            self._made[span] = last, made
        return made


def status(snapshot: Snapshot) -> dict[str, Any]:
    """All but the past, as JSON takes it. Times are seconds before now."""
    values = snapshot.values
    samples = _with_now(snapshot)
    return {
        "version": __version__,
        "uptime_seconds": _short(snapshot.now - snapshot.started_at),
        "values": dict(values),
        "minute": _window(snapshot, samples, MINUTE_SECONDS),
        "recent": _window(snapshot, samples, HOUR_SECONDS),
        "health": health(snapshot),
        "verdict": verdict(snapshot),
        "tiers": [
            {
                "name": tier.name,
                "location": tier.location,
                "write": tier.write,
                "is_open": tier.is_open,
                "is_shut": tier.is_shut,
                "is_hung": tier.is_hung,
                "values": dict(tier.values),
            }
            for tier in snapshot.tiers
        ],
        "groups": [group._asdict() for group in snapshot.groups],
        "sessions": [
            {**session._asdict(), "since": _short(snapshot.now - session.since)} for session in snapshot.sessions
        ],
        "decisions": [
            {
                "request_id": decision.request_id,
                "identity": decision.identity.hex()[:12],
                "age": _short(max(0.0, snapshot.now - decision.told_at)),
                "facts": dict(decision.facts),
            }
            for decision in snapshot.decisions
        ],
    }


def history(snapshot: Snapshot, samples: Sequence[Sample]) -> dict[str, Any]:
    """What was, over time: one value for each interval between two samples; ages are before the last sample."""
    step = min((after.at - before.at for before, after in pairwise(samples)), default=0.0)
    past = _Past(snapshot.columns, samples, step)
    waits, waited = past.rate("lookup_wait_seconds"), past.rate("lookups_waited")
    tiers = [tier.name for tier in snapshot.tiers]
    return {
        "step_seconds": _short(step),
        "ages": [_short(samples[-1].at - sample.at) for sample in samples[1:]],
        "hit": past.share("ceiling_hit_tokens", "ceiling_asked_tokens"),
        "ceiling": past.share("ceiling_tokens", "ceiling_asked_tokens"),
        "lookups": past.rate("lookups"),
        "wait_seconds": [_short(wait / count) if count else None for wait, count in zip(waits, waited, strict=True)],
        "evicted": past.rate("evicted"),
        "loaded": past.rate("bytes_loaded"),
        "stored": past.rate("bytes_stored"),
        "sessions": past.level("sessions"),
        "bytes": {
            "ram": past.level("bytes_committed"),
            **{name: past.level(f"tier_{name}_bytes") for name in tiers},
        },
        "read": {name: past.rate(f"tier_{name}_bytes_read") for name in tiers},
        "written": {name: past.rate(f"tier_{name}_bytes_written") for name in tiers},
    }


def health(snapshot: Snapshot) -> list[dict[str, str]]:
    """What is not as it should be, the worst first: {"level": "bad" or "warn" or "note", "text": a sentence}."""
    found: list[tuple[str, str]] = []
    for tier in snapshot.tiers:
        where = f"{tier.name} ({tier.location})"
        if not tier.is_open:
            found.append(("bad", f"{where} cannot be used; it is opened again every few seconds"))
        elif tier.is_hung:
            found.append(("bad", f"{where} hangs; nothing is asked of it until it answers"))
        elif tier.is_shut:
            found.append(("bad", f"{where} fails; it is asked only now and then until it is well"))
        for name, what in (
            ("objects_damaged", "were damaged and were removed"),
            ("objects_refused", "found no room there"),
            ("objects_shed", "were not written because too many waited"),
        ):
            if count := tier.values.get(name, 0.0):
                found.append(("note", f"{where}: {count:,.0f} objects {what}, since the daemon began"))
    grown = _growth(snapshot, _with_now(snapshot), RECENT_SECONDS)
    for name, level, what in (
        ("loads_failed", "bad", "loads failed; the engines computed instead"),
        ("deadlines_missed", "warn", "lookups waited for tiers and were answered before all had come"),
        ("slots_short", "note", "write slots were wanted and not there; what would have been in them is not stored"),
    ):
        if count := grown(name):
            found.append((level, f"in the last 10 minutes {count:,.0f} {what}"))
    if count := snapshot.values.get("objects_condemned", 0.0):
        found.append(("warn", f"{count:,.0f} objects had wrong bytes in RAM and were dropped, since the daemon began"))
    if not snapshot.sessions:
        found.append(("note", "no engine is connected"))
    worst = ("bad", "warn", "note")
    return [{"level": level, "text": text} for level, text in sorted(found, key=lambda one: worst.index(one[0]))]


def verdict(snapshot: Snapshot) -> dict[str, Any]:
    """Whether more memory would help, by the last hour: {"hit", "ceiling", "text"}; None = nothing was asked."""
    samples = _with_now(snapshot)
    window = _window(snapshot, samples, HOUR_SECONDS)
    hit, ceiling = window["hit"], window["ceiling"]
    values = snapshot.values
    if hit is None or ceiling is None:
        return {"hit": None, "ceiling": None, "text": "Nothing was looked up in the last hour."}
    lacked_room = any(values.get(name, 0.0) for name in ("evicted", "over_quota", "slots_short"))
    if ceiling - hit < GAP_MIN:
        text = "More memory would not help: there is next to nothing to hit that was not hit."
    elif lacked_room:
        text = f"More memory may help: up to {ceiling - hit:.0%} of the tokens asked for were once here, and are not."
    else:
        text = "More memory would not help: nothing was lost for lack of room. The decisions below say what was."
    if values.get("ceiling_chunks_forgotten", 0.0):
        text += " The ceiling may be higher: not all chunks are remembered."
    elif values.get("slots_short", 0.0):
        text += " The ceiling does not count what engines found no room to store."
    return {"hit": hit, "ceiling": ceiling, "text": text}


def _with_now(snapshot: Snapshot) -> tuple[Sample, ...]:
    """The samples of the last hour, and one of this moment."""
    now = Sample(snapshot.now, tuple(snapshot.values.get(name, 0.0) for name in snapshot.columns))
    if snapshot.hour and snapshot.hour[-1].at >= snapshot.now:
        return snapshot.hour
    return (*snapshot.hour, now)


def _growth(snapshot: Snapshot, samples: Sequence[Sample], seconds: float) -> Callable[[str], float]:
    before, after = since(samples, snapshot.now - seconds), samples[-1]

    def grown(name: str) -> float:
        column = snapshot.columns.index(name)
        return after.values[column] - before.values[column]

    return grown


def _window(snapshot: Snapshot, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """What happened in the last so many seconds, or since the daemon began."""
    index = snapshot.columns.index
    before, after = since(samples, snapshot.now - seconds), samples[-1]
    grown = _growth(snapshot, samples, seconds)
    length = after.at - before.at
    waited = grown("lookups_waited")
    per_second = {
        name: _short(grown(name) / length) if length else 0.0
        for name in ("lookups", "bytes_loaded", "bytes_stored", "evicted")
    }
    asked = index("ceiling_asked_tokens")
    return {
        "seconds": _short(length),
        "hit": share_of(before, after, index("ceiling_hit_tokens"), asked),
        "ceiling": share_of(before, after, index("ceiling_tokens"), asked),
        "hit_tokens": grown("tokens_hit"),
        "asked_tokens": grown("tokens_asked"),
        "wait_seconds": _short(grown("lookup_wait_seconds") / waited) if waited else None,
        "per_second": per_second,
    }


def _short(value: float) -> float:
    """Four digits: more of a measurement are only longer."""
    return float(f"{value:.4g}") if abs(value) < 1e4 else float(round(value))
