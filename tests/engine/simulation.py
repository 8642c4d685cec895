"""The real vLLM scheduler, block pool and connector on a forward pass that we understand.

Everything is the real engine's (scheduler, KV cache manager, tensors, connector, daemon), except
the model. Instead of computing, a step *checks* that every byte a real model would read is what
this request's tokens demand, and *writes* what the step's own tokens demand
(tests/simulation/oracle.py). `tests.simulation` does the same with less of the engine, for far
more layouts and seeds.

Run as `python -m tests.engine.simulation MODEL SOCKET SEED...`; prints one JSON line per seed.
"""

import json
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from hybridkv.client.control import ControlClient
from hybridkv.connector.metrics import TOKENS_LOADED
from hybridkv.core.geometry import GroupKind
from hybridkv.lab.daemon_process import DaemonProcess
from hybridkv.lab.models import bundled_arguments, bundled_models
from hybridkv.lab.runner import make_engine
from hybridkv.shm.arena import attach_arena
from hybridkv.shm.slots import committed_slots, payload_offset
from hybridkv.vllm.layout import group_geometry
from tests.simulation.oracle import (
    Content,
    GroupWords,
    Oracle,
    StatePlace,
    StateSpan,
    StateStep,
    Words,
)

REQUESTS = 30
STEPS_MAX = 6000
STALL_SECONDS = 60.0


@dataclass
class Traced:
    """A request and its tokens' content."""

    request: Request
    content: Content


class Simulation:
    """A real engine with an oracle instead of a model. `run` is one seed."""

    def __init__(self, model: str, daemon: DaemonProcess, arguments: list[str]) -> None:
        self.daemon = daemon
        self.engine = make_engine(
            [f"--model={bundled_models()[model]}", *bundled_arguments(model), *arguments]
        )
        self.core: Any = self.engine.engine_core.engine_core
        self.config = self.engine.vllm_config
        self.scheduler = self.core.scheduler
        kv_config = self.scheduler.kv_cache_config
        groups = []
        worker = get_kv_transfer_group().worker_role
        for gid, views in zip(
            kv_config.prefix_cacheable_group_ids, worker.factory.shards[0].groups, strict=True
        ):
            spec = kv_config.kv_cache_groups[gid].kv_cache_spec
            own = [*iter_layer_specs(spec)]
            layers = [
                _first_words(view, layer_spec)
                for view, layer_spec in zip(views, own * len(views), strict=False)
            ]
            groups.append(GroupWords(group_geometry(gid, spec, (1,)), layers))
        self.oracle = Oracle(groups)
        self.numbers = 0

    def run(self, seed: int) -> dict[str, Any]:
        """Run random requests, aborts and faults until all requests are answered.

        Raises AssertionError where wrong bytes are read, or where requests wait for ever.
        """
        rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.traced: dict[str, Traced] = {}
        stems = [rng.choices(range(2, 2000), k=rng.randrange(100, 1500)) for _ in range(4)]
        to_add = REQUESTS
        stopped_until = 0
        progress, progress_at = 0, time.monotonic()
        for step in range(STEPS_MAX):
            if to_add and rng.random() < 0.5:
                to_add -= 1
                self._add(rng, stems)
            if rng.random() < 0.03 and self.traced:
                self.counts["aborts"] += 1
                victim = rng.choice(sorted(self.traced))
                self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
                del self.traced[victim]
            if stopped_until and step >= stopped_until:
                stopped_until = 0
                self._signal(signal.SIGCONT)
            if not stopped_until and rng.random() < 0.02:
                stopped_until = self._fault(rng, step)
            self._step()
            done = self.counts["finished"] + self.counts["aborts"] + self.counts["tokens"]
            if done > progress:
                progress, progress_at = done, time.monotonic()
            assert time.monotonic() - progress_at < STALL_SECONDS, "requests wait for ever"
            if not to_add and not self.traced and not self.scheduler.has_requests():
                break
        if stopped_until:
            self._signal(signal.SIGCONT)
        assert not self.traced, f"{len(self.traced)} requests were never answered"
        self._signal(None)
        for _ in range(3):
            self._step()
        with ControlClient(self.daemon.socket_path) as control:
            values = control.stats().values
        assert values["leases"] == 0, "every lease is let go"
        return {
            "seed": seed,
            "ok": True,
            "steps": step,
            **self.counts,
            "loaded": int(self.scheduler.connector.counters.get(TOKENS_LOADED, 0)),
        }

    def _add(self, rng: random.Random, stems: list[list[int]]) -> None:
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] if rng.random() < 0.5 else list(stem)
        prompt += rng.choices(range(2, 2000), k=rng.choice((0, 1, 5, 130)))
        self.numbers += 1
        request = Request(
            f"r{self.numbers}",
            prompt,
            SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=rng.choice((1, 3, 20, 150, 400))
            ),
            None,
            block_hasher=self.core.request_block_hasher,
        )
        self.traced[request.request_id] = Traced(request, Content(request.all_token_ids))
        self.scheduler.add_request(request)
        self.counts["requests"] += 1

    def _fault(self, rng: random.Random, step: int) -> int:
        """Do one fault. Returns the step at which a stopped daemon goes on, or 0."""
        what = rng.choice(("reset", "clear", "kill", "stop", "flip", "flip"))
        self.counts[what] += 1
        if what == "reset":
            self.scheduler.reset_prefix_cache()
        elif what == "clear":
            with ControlClient(self.daemon.socket_path) as control:
                control.clear_objects()
        elif what == "kill":
            self.daemon.kill()
            self.daemon.start()
        elif what == "stop":
            self._signal(signal.SIGSTOP)
            return step + rng.randrange(1, 40)
        else:
            self._flip(rng)
        return 0

    def _flip(self, rng: random.Random) -> None:
        with ControlClient(self.daemon.socket_path) as control:
            welcome = control.welcome
        arena = attach_arena(Path(welcome.arena_path), welcome.arena_bytes)
        slots = list(committed_slots(arena.memory))
        for offset, header in rng.sample(slots, min(3, len(slots))):
            at = offset + payload_offset(header.parts) + rng.randrange(header.part_bytes)
            arena.memory[at] ^= 1 << rng.randrange(8)
        arena.close()

    def _signal(self, number: signal.Signals | None) -> None:
        assert self.daemon.process is not None
        if number is not None:
            self.daemon.process.send_signal(number)

    def _step(self) -> None:
        output = self.scheduler.schedule()
        tables = {
            name: self.scheduler.kv_cache_manager.get_block_ids(name)
            for name in output.num_scheduled_tokens
        }
        # schedule() has already counted this step's tokens as computed.
        starts = {
            name: self.traced[name].request.num_computed_tokens - count
            for name, count in output.num_scheduled_tokens.items()
        }
        groups = [words.group for words in self.oracle.groups]
        sizes = [group.tokens_per_block for group in groups if group.kind is GroupKind.RECURRENT]
        states = {
            name: StatePlace().step(
                StateSpan(starts[name], starts[name] + count, drafts=0, accepted=0),
                max(sizes, default=1),
            )
            for name, count in output.num_scheduled_tokens.items()
        }
        sampled: dict[str, list[int]] = {}
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output) as connector_output,
        ):
            for copy in output.kv_cache_block_copies or ():
                for words in self.oracle.groups:
                    for view in words.layers:
                        view[copy.dst_block_id] = view[copy.src_block_id]
            # A layer writes the keys and values of all the step's tokens before any token reads.
            # So a request may share blocks that another request fills in this very step.
            # Recurrent state is read first, then written.
            for name, step in states.items():
                self.oracle.check(name, self.traced[name].content, starts[name], tables[name], step)
            for name, step in states.items():
                sampled[name] = self._write(self.traced[name], starts[name], step, tables[name])
            for name in states:
                self.oracle.check(name, self.traced[name].content, starts[name], tables[name])
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=connector_output,
        )
        self.scheduler.update_from_output(output, result)
        self.counts["tokens"] += sum(len(tokens) for tokens in sampled.values())
        self.counts["failed_loads"] += len(connector_output.failed_recving)
        for name in names:
            request = self.traced[name].request
            if RequestStatus.is_finished(request.status):
                assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED, request.status
                self.counts["finished"] += 1
                self.counts["preemptions"] += request.num_preemptions
                del self.traced[name]

    def _write(
        self, traced: Traced, start: int, step: StateStep, table: tuple[list[int], ...]
    ) -> list[int]:
        end = step.end
        self.oracle.write(traced.content, range(start, end), table, step)
        return (
            [int(traced.content.upto(end)[-1]) % 1998 + 2]
            if end >= traced.request.num_tokens
            else []
        )


def _first_words(view: torch.Tensor, spec: Any) -> Words:
    """[blocks, tokens, 1, 1]: one 64-bit word per token and layer (per state if recurrent).

    `view` is physical: on a CPU a block is one run, by head and then by token.
    """
    is_state = isinstance(spec, MambaSpec)
    heads, tokens = (1, 1) if is_state else (spec.num_kv_heads, spec.block_size)
    shaped = view.view(len(view), heads, tokens, -1).narrow(-1, 0, 8 // view.element_size())
    words: Words = shaped.view(torch.int64)[:, 0, :, None, :1].numpy()
    return words


def main() -> None:
    """Run every seed on one engine."""
    model, socket_path, ram, *rest = sys.argv[1:]
    arguments = [argument for argument in rest if argument.startswith("--")]
    seeds = [int(seed) for seed in rest if not seed.startswith("--")]
    transfer = {
        "kv_connector": "HybridKVConnector",
        "kv_connector_module_path": "hybridkv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "server": f"unix://{socket_path}",
            "lookup_timeout_ms": 50,
            "audit": "off",
        },
    }
    with DaemonProcess(socket_path, ram) as daemon:
        simulation = Simulation(
            model, daemon, ["--kv-transfer-config", json.dumps(transfer), *arguments]
        )
        for seed in seeds:
            print(json.dumps(simulation.run(seed)), flush=True)


if __name__ == "__main__":
    main()
