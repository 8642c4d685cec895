"""`python -m tests.engine.soak --minutes N [--model NAME] [--seed S]`: long eviction pressure.

A real engine drops its own prefix cache again and again. Its daemon's arena is a fraction of what
the requests share, so nearly every hit is of something that will soon be overwritten. Requests
come and are aborted at random. Some are probes: their answers must be those of an engine without a
connector that had a hit of the same length in its own cache. What the daemon and the engine hold
is sampled while no request runs, and must not grow:
the last third of the samples after a warm-up is compared with the first.
"""

import argparse
import gc
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hybridkv.client.control import ControlClient
from hybridkv.connector.metrics import DAEMON_LOSSES, LOADS_DONE, LOADS_FAILED
from hybridkv.core.metrics import Metric
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT, EngineProcess
from hybridkv.lab.judging import NOISE_FACTOR, NOISE_MIN, answer_deviation, answer_of
from hybridkv.lab.models import bundled_environment, bundled_models
from hybridkv.observe.history import REQUESTS_MAX
from hybridkv.vllm.hook_guard import FAULTS, SWITCHED_OFF
from hybridkv.wire.messages import ReportRequest
from tests.engine.support import arguments_of, engine
from tests.programs.daemon.holder import engine_hello
from tests.waiting import DEADLINE_SECONDS

RAM_BYTES = 32 << 20
SETTINGS = (
    "--no-async-scheduling",
    "--max-num-batched-tokens=256",
    "--max-num-seqs=6",
    "--max-model-len=2048",
    "--num-gpu-blocks-override=120",
)
"""So few blocks that their memory has all been touched when the warm-up ends."""
STEMS, STEM_CHUNKS = 12, 6
PROBES, PROBE_CHUNKS = 3, 3
PROBE_TOKENS = 8
BATCH = 6
"""Requests that run at once, one of them a probe."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""In a tiny model, threads cost more by waiting for each other than they save."""
FAILURES = (SWITCHED_OFF, LOADS_FAILED, DAEMON_LOSSES)
"""Counters that must be 0, as those of faults and of refusals."""
ROUNDS_BEFORE = 3
CONNECTIONS = 3
WARM_UP_SHARE = 0.5
SAMPLES_MIN = 9
OVERWRITTEN_MIN = 2.0
"""The least number of times that the whole arena must have been written."""
ENGINE_GROWTH_KB = 48 << 10
DAEMON_GROWTH_KB = 1 << 10
"""The median of the last third may be above that of the first by so much.

An engine without a connector grows as well: by 130 MB in the first 375 rounds, by less and less.
"""


@dataclass(frozen=True)
class Quantity:
    """Something that must stay as it is, in every sample."""

    name: str
    growth_max: float
    """The last third may be above the first by so much."""
    maximum: float = math.inf
    """No sample may be above it."""


class Footprint(NamedTuple):
    """The resources that a process has."""

    memory_kb: int
    """Resident kilobytes that are no shared memory."""
    descriptors: int
    threads: int


class Judgement(NamedTuple):
    """The samples of a quantity: medians of the first and last third, and the maximum."""

    first: float
    last: float
    maximum: float
    wrong: str
    """What is wrong; "" = nothing."""


class Reference(NamedTuple):
    """Probes with the answers of an engine without a connector."""

    probes: list["Probe"]
    tolerance: float
    """How far the answers of another batch may differ."""


QUANTITIES = (
    Quantity("daemon memory kB", DAEMON_GROWTH_KB),
    Quantity("daemon descriptors", 0),
    Quantity("daemon threads", 0),
    Quantity("engine memory kB", ENGINE_GROWTH_KB),
    Quantity("engine descriptors", 0),
    Quantity("engine threads", 0),
    Quantity("engine requests", 0, maximum=0),
    Quantity("leases", 0, maximum=0),
    Quantity("sessions", 0, maximum=1),
    Quantity("connections", 0, maximum=CONNECTIONS),
    Quantity("kB of write slots", RAM_BYTES >> 14, maximum=RAM_BYTES >> 12),
)
"""Connections: scheduler, worker and control. Write slots are asked for when half are used."""


@dataclass(frozen=True)
class Probe:
    """A prompt with its known answers, by the chunks that a hit of it has."""

    prompt: list[int]
    answers: list[dict[str, Any]]


def footprint(pid: int) -> Footprint:
    """Returns the resources of a process."""
    proc = Path(f"/proc/{pid}")
    lines = (line.split() for line in (proc / "status").read_text().splitlines())
    values = {
        words[0]: int(words[1])
        for words in lines
        if words[0] in ("VmRSS:", "RssShmem:", "Threads:")
    }
    return Footprint(
        memory_kb=values["VmRSS:"] - values["RssShmem:"],
        descriptors=len(list((proc / "fd").iterdir())),
        threads=values["Threads:"],
    )


def learn(
    starting: EngineProcess, rng: random.Random, chunk_tokens: int, count: int = PROBES
) -> Reference:
    """Ask an engine without a connector. Returns its answers, and how far batches differ."""
    with starting as plain:

        def alone(prompt: list[int], chunks: int) -> dict[str, Any]:
            plain.reset_caches()
            if chunks:
                plain.generate(prompt[: chunks * chunk_tokens + 5], max_tokens=1)
            (result,) = plain.generate(prompt, max_tokens=PROBE_TOKENS)
            assert result["cached_tokens"] == chunks * chunk_tokens, result["cached_tokens"]
            return result

        tail = chunk_tokens // 3
        prompts = [
            rng.choices(range(2, plain.info["vocab_size"]), k=PROBE_CHUNKS * chunk_tokens + tail)
            for _ in range(count)
        ]
        probes = [
            Probe(prompt, [alone(prompt, chunks) for chunks in range(PROBE_CHUNKS + 1)])
            for prompt in prompts
        ]
        plain.reset_caches()
        together = plain.generate(*prompts, max_tokens=PROBE_TOKENS)
    noise = max(
        answer_deviation(result, probe.answers[0])
        for result, probe in zip(together, probes, strict=True)
    )
    return Reference(probes, max(NOISE_MIN, NOISE_FACTOR * noise))


class Soak:
    """An engine in this process, and the daemon that it loads from."""

    def __init__(self, model: str, daemon: DaemonProcess, rng: random.Random) -> None:
        from hybridkv.lab.runner import LOGPROBS, make_engine

        self._logprobs = LOGPROBS
        self._rng = rng
        self._daemon = daemon
        self._engine = make_engine(arguments_of(model, daemon.socket_path, *SETTINGS))
        scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._connector = scheduler.connector
        self._vocabulary = self._engine.vllm_config.model_config.get_vocab_size()
        self.chunk_tokens = self._chunk_tokens()
        self._stems = [self._stem() for _ in range(STEMS)]
        self._probes: list[Probe] = []
        self._numbers = 0
        self.counts: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self.most_objects = 0.0
        self._patience_seconds = DEADLINE_SECONDS
        self.worst = 0.0

    def stats(self) -> dict[str, float]:
        """Returns the daemon's values."""
        with ControlClient(self._daemon.socket_path) as control:
            return control.stats().values

    def _chunk_tokens(self) -> int:
        with ControlClient(self._daemon.socket_path) as control:
            return control.engines()[0].geometry.chunk_tokens

    def run(self, seconds: float, probes: list[Probe]) -> None:
        """Run rounds of requests for so many seconds, and keep a sample after each.

        Samples of the warm-up are not kept.
        """
        self._probes = probes
        for _ in range(ROUNDS_BEFORE):
            self._round()
        self._fill_history()
        started = time.monotonic()
        warm_up = WARM_UP_SHARE * seconds
        while (elapsed := time.monotonic() - started) < seconds or len(self.samples) < SAMPLES_MIN:
            self._round()
            sample = self._sample()
            if elapsed >= warm_up:
                self.samples.append(sample)

    def wrong(self) -> list[str]:
        """Returns a line for each quantity and counter that is not as it must be."""
        return (
            [
                f"{quantity.name}: {judgement.wrong}"
                for quantity, judgement in self.judgements().items()
                if judgement.wrong
            ]
            + [
                f"{metric}: {value}"
                for metric, value in self._connector.counters.items()
                if value and (metric.family in (FAULTS, "daemon_refusals") or metric in FAILURES)
            ]
            + [
                f"{name}: {value}"
                for name, value in self.stats().items()
                if value and name.startswith(("refused_", "loads_failed"))
            ]
        )

    def judgements(self) -> dict[Quantity, Judgement]:
        """Returns the judgement of every quantity."""
        third = len(self.samples) // 3
        judgements = {}
        for quantity in QUANTITIES:
            series = [sample[quantity.name] for sample in self.samples]
            first, last = statistics.median(series[:third]), statistics.median(series[-third:])
            wrong = f"grew by {last - first:g}" if last - first > quantity.growth_max else ""
            if max(series) > quantity.maximum:
                wrong = f"was {max(series):g}"
            judgements[quantity] = Judgement(first, last, max(series), wrong)
        return judgements

    def _stem(self) -> list[int]:
        return self._rng.choices(range(2, self._vocabulary), k=STEM_CHUNKS * self.chunk_tokens)

    def _fill_history(self) -> None:
        """Fill the daemon's bounded history of requests before its memory is measured."""
        with ControlClient(
            self._daemon.socket_path, DEADLINE_SECONDS, engine_hello("history")
        ) as control:
            answers = [control.explain(name) for name in control.explain("").latest]
            explanations = [
                answer.explanation for answer in answers if answer.explanation is not None
            ]
            for number in range(REQUESTS_MAX):
                control.tell(
                    ReportRequest(f"before-{number}", explanations[number % len(explanations)])
                )
            control.stats()

    def _round(self) -> None:
        """Run some requests at once, to their end or until they are aborted."""
        rng = self._rng
        self._engine.reset_prefix_cache()
        if rng.random() < 0.3:
            self._stems[rng.randrange(STEMS)] = self._stem()
        running: set[str] = set()
        for _ in range(BATCH - 1):
            stem = rng.choice(self._stems)
            tail = rng.choices(range(2, self._vocabulary), k=rng.randrange(1, self.chunk_tokens))
            prompt = stem[: rng.randrange(self.chunk_tokens, len(stem) + 1)] + tail
            running.add(self._add(prompt, rng.randrange(1, 12)))
        probe = rng.choice(self._probes)
        probe_id = self._add(probe.prompt, PROBE_TOKENS)
        answer: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            if running and rng.random() < 0.05:
                victim = rng.choice(sorted(running))
                running.remove(victim)
                self._engine.abort_request([victim])
                self.counts["aborts"] += 1
            for output in self._engine.step():
                if output.request_id == probe_id:
                    answer = answer_of(output)
                if output.finished:
                    running.discard(output.request_id)
        self._judge(probe, answer)
        self.counts["rounds"] += 1

    def _add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self._numbers += 1
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=tokens,
            logprobs=self._logprobs,
        )
        name = f"soak-{self._numbers}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self.counts["requests"] += 1
        return name

    def _judge(self, probe: Probe, answer: dict[str, Any]) -> None:
        chunks = answer["cached_tokens"] // self.chunk_tokens
        deviation = answer_deviation(answer, probe.answers[chunks])
        self.worst = max(self.worst, deviation)
        self.counts["probes"] += 1
        self.counts["probes_hit"] += chunks > 0
        self.counts["probes_same_tokens"] += answer["tokens"] == probe.answers[chunks]["tokens"]

    def _sample(self) -> dict[str, float]:
        """Returns a sample, taken once the daemon has read the last requests' one-way messages."""
        # Answers to lookups of aborted requests are picked up by the engine's next step.
        self._add([2, 3, 4], 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        deadline = time.monotonic() + self._patience_seconds
        with ControlClient(self._daemon.socket_path) as control:
            values = control.stats().values
            while values["leases"] or values["connections"] > CONNECTIONS:
                if time.monotonic() > deadline:
                    # It is in the sample now, and will not go away in the next ones.
                    self._patience_seconds = 0.0
                    break
                values = control.stats().values
            gc.collect()
            sample = {name: values[name] for name in ("leases", "sessions", "connections")}
            sample["kB of write slots"] = values["bytes_writing"] / 1024
            sample["engine requests"] = len(self._connector.scheduler_role.requests.by_id)
            for whose, pid in (("daemon", control.welcome.pid), ("engine", os.getpid())):
                process = footprint(pid)
                sample[f"{whose} memory kB"] = process.memory_kb
                sample[f"{whose} descriptors"] = process.descriptors
                sample[f"{whose} threads"] = process.threads
        self.most_objects = max(self.most_objects, values["objects"])
        return sample

    def close(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def figures(self) -> dict[str, float]:
        """Returns the counts of the engine and of its daemon."""
        values = self.stats()
        counters: Mapping[Metric, int] = self._connector.counters
        return {
            **self.counts,
            "loads": counters[LOADS_DONE],
            "lookups": values["lookups"],
            "lookups_hit": values["lookups_hit"],
            "bytes_loaded": values["bytes_loaded"],
            "bytes_stored": values["bytes_stored"],
            "evicted": values["evicted"],
            "objects at most": self.most_objects,
            "arena written, times": values["bytes_stored"] / values["bytes_arena"],
        }


def main() -> int:
    """Run the soak. Returns 1 where something grew, was wrong, or did not happen."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default="gemma3", choices=sorted(bundled_models()))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    print(f"soak: {options.model}, {options.minutes:g} minutes, seed {options.seed}", flush=True)
    os.environ.update(
        {**ENGINE_ENVIRONMENT, **ONE_THREAD, **os.environ, **bundled_environment(options.model)}
    )
    rng = random.Random(options.seed)
    with (
        tempfile.TemporaryDirectory(prefix="hybridkv-soak-") as directory,
        DaemonProcess(str(Path(directory) / "daemon.sock"), str(RAM_BYTES)) as daemon,
    ):
        plain = engine(options.model, Path(directory) / "plain.log", None, *SETTINGS)
        try:
            soak = Soak(options.model, daemon, rng)
        except BaseException:
            plain.close()
            raise
        reference = learn(plain, rng, soak.chunk_tokens)
        soak.run(options.minutes * 60, reference.probes)
        figures, wrong = soak.figures(), soak.wrong()
        judgements = soak.judgements()
        soak.close()
    if soak.worst > reference.tolerance:
        wrong.append(
            f"a probe's answer is off by {soak.worst:.2g}; "
            "in another batch the engine itself differs by less"
        )
    for name in ("loads", "lookups_hit", "aborts", "probes_hit"):
        if not figures.get(name):
            wrong.append(f"{name}: none, so nothing was proven")
    if figures["arena written, times"] < OVERWRITTEN_MIN:
        wrong.append("the arena was hardly overwritten, so nothing was proven; more --minutes work")
    table = Table(title=f"{len(soak.samples)} samples")
    for column in ("", "first third", "last third", "at most", "verdict"):
        table.add_column(column, justify="left" if column in ("", "verdict") else "right")
    for quantity, judgement in judgements.items():
        numbers = (judgement.first, judgement.last, judgement.maximum)
        cells = [f"{number:,.0f}" for number in numbers]
        table.add_row(quantity.name, *cells, judgement.wrong or "flat")
    Console(file=sys.stdout, width=100).print(table)
    print(", ".join(f"{name} {value:,.6g}" for name, value in figures.items()))
    for name in ("daemon memory kB", "engine memory kB"):
        tenth = max(1, len(soak.samples) // 10)
        print(f"{name}:", *(f"{sample[name]:.0f}" for sample in soak.samples[::tenth]))
    print(f"worst deviation of a probe {soak.worst:.2g}, allowed {reference.tolerance:.2g}")
    for line in wrong:
        print(f"WRONG: {line}")
    if wrong:
        print(
            f"FAILED: python -m tests.engine.soak --minutes {options.minutes:g} "
            f"--model {options.model} ",
            end="",
        )
        print(f"--seed {options.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
