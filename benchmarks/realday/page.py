"""What a run says in the documents: tables in Markdown, and the picture's place."""

import statistics
import textwrap
from collections.abc import Iterator, Sequence

from tests.documents import COLUMNS, table
from tests.engine.server import Streamed

from benchmarks.realday.results import (
    COMPUTED,
    FROM_DISK,
    LMCACHE,
    NATIVE,
    OWN_HIT,
    RESTARTED,
    WAYS,
    Cost,
    ModelDay,
    Prompt,
    Run,
)
from hybridkv.core.sizes import format_size

PICTURE = "images/realday.svg"
_COST_MOST = 1.02  # The ratio that the project allows where nothing hits.


def text_of(run: Run) -> str:
    """Return the section's text: the machine, the picture, and the tables of each model."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    paragraphs = [
        f"{run.date}, on {run.machine}; {versions}. The load was {run.load:.1f} before the run.",
        f"![seconds to the first token over the length of the prompt]({PICTURE})",
    ]
    for day in run.days:
        paragraphs += _model(day)
    prose = (
        each if each.startswith(("|", "!", "#")) else textwrap.fill(each, COLUMNS)
        for each in paragraphs
    )
    return "\n\n".join(each.rstrip() for each in prose) + "\n"


def _model(day: ModelDay) -> Iterator[str]:
    yield f"### {day.model}"
    yield (
        f"{day.dtype}; groups {day.groups}; chunks of {day.chunk_tokens} tokens; "
        f"{format_size(round(day.stored_token_bytes))} of KV stored for each token. The whole day "
        f"took {day.seconds / 60:.1f} minutes. Seconds to the first token; in brackets the tokens "
        "that were not computed:"
    )
    peers = [peer for peer in (NATIVE, LMCACHE) if peer in day.prompts[0].answers]
    yield table(
        ["tokens", *WAYS, *peers],
        [
            [
                f"{prompt.tokens:,}",
                *(_seconds(prompt.answers[way], way != COMPUTED) for way in (*WAYS, *peers)),
            ]
            for prompt in day.prompts
        ],
    )
    yield " ".join(f"{peer}: {what.rstrip('.')}." for peer, what in day.peers.items())
    yield table(["", "measured"], [[name, value] for name, value in _rows(day)])


def _seconds(answer: Streamed, has_hit: bool) -> str:
    digits = 1 if answer.first_seconds >= 10 else 2
    cached = f" ({answer.cached_tokens:,})" if has_hit else ""
    return f"{answer.first_seconds:.{digits}f}{cached}"


def _rows(day: ModelDay) -> Iterator[tuple[str, str]]:
    """Yield what else was measured, and its figures."""
    ways = [way for way in day.prompts[0].answers if way != COMPUTED]
    yield "the same tokens as computed", "; ".join(_equal(day, way) for way in ways)
    users, many = day.users, len(day.users)
    yield (
        f"{many} users at once, {users[0].tokens:,} tokens each, the slowest",
        "; ".join(f"{way} {_slowest(users, way):.2f} s" for way in users[0].answers),
    )
    if (turns := day.turns) is not None:
        last, at = turns.with_cache[-1].prompt_tokens, turns.restarted_before
        pairs = [*zip(turns.with_cache, turns.without, strict=True)]
        same = sum(ours.tokens == theirs.tokens for ours, theirs in pairs)
        ours, theirs = (
            f"{each[at].first_seconds:.2f} s ({each[at].cached_tokens:,} cached)"
            for each in (turns.with_cache, turns.without)
        )
        yield (
            f"a conversation of {len(pairs)} turns up to {last:,} tokens, the first turn after "
            "a restart of the engine",
            f"{ours}, without hybridkv {theirs}; {same} of {len(pairs)} answers the same",
        )
    if (killed := day.killed) is not None:
        yield (
            f"the daemon killed during a hit on {killed.during.prompt_tokens:,} tokens",
            f"{_seconds(killed.during, True)} s; with the next daemon "
            f"{_seconds(killed.afterwards, True)} s; answers "
            f"{'the same' if killed.is_same else 'DIFFERENT'}",
        )
    if day.cost is not None:
        yield from _cost(day.cost)
    ratios = "; ".join(f"{codec['dtype']} {codec['ratio']}" for codec in day.codecs)
    yield "ratio of the codec `zplanes` on this KV", ratios
    counts = ", ".join(f"{name} {count:,}" for name, count in day.lookups.items())
    yield "load or compute, RAM empty (`load_policy` faster)", counts


def _equal(day: ModelDay, way: str) -> str:
    prompts = [prompt for prompt in (*day.prompts, *day.users) if way in prompt.answers]
    return f"{way} {sum(prompt.is_same(way) for prompt in prompts)} of {len(prompts)}"


def _slowest(users: Sequence[Prompt], way: str) -> float:
    return max(user.answers[way].first_seconds for user in users)


def _cost(cost: Cost) -> Iterator[tuple[str, str]]:
    for name, starts, size in (
        ("prefill", [each.prefill for each in cost.starts], f"{cost.prompt_tokens:,} tokens"),
        ("decode", [each.decode for each in cost.starts], f"{cost.decoded_tokens} tokens"),
    ):
        yield (
            f"cost of {name} where nothing hits, {size}, {len(starts[0])} pairs in turns with each "
            f"of {len(starts)} starts of the other engine",
            f"ratios {'; '.join(map(_spread, starts))}",
        )


def _spread(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} (quartiles {low:.3f} to {high:.3f})"


def faults_of(run: Run) -> list[str]:
    """Return what of a run is not as promised. Empty = all is."""
    faults = []
    for day in run.days:
        for prompt in (*day.prompts, *day.users):
            own = prompt.answers[OWN_HIT]
            for way in (RESTARTED, FROM_DISK):
                if not prompt.is_same(way) and prompt.answers[way].tokens != own.tokens:
                    faults.append(f"{day.model}: {prompt.tokens} tokens, {way}: another answer")
        if day.killed is not None and not day.killed.is_same:
            faults.append(f"{day.model}: another answer when the daemon was killed")
        if (cost := day.cost) is not None:
            for name, starts in (
                ("prefill", [each.prefill for each in cost.starts]),
                ("decode", [each.decode for each in cost.starts]),
            ):
                # Two equal processes differ, and so do pairs of them, by more than the bound. What
                # costs more is slower than both of them in three pairs of four.
                if (ratio := min(statistics.quantiles(each)[0] for each in starts)) > _COST_MOST:
                    faults.append(f"{day.model}: {name} costs {ratio:.3f}, above {_COST_MOST}")
    return faults
