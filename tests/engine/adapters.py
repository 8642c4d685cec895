"""Engines whose LoRA adapters change while nobody says so, one after the other, on one daemon.

Run as `python -m tests.engine.adapters SOCKET|- DIRECTORY WAY`; prints a line of JSON for each
answer: what was asked, the log-probabilities of its tokens, how many tokens were cached, and how
many objects the daemon has afterwards. All engines know the adapter by one name, one number and one
path: a link.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

from hybridkv.client.control import ControlClient
from hybridkv.lab.models import BUNDLED_MODEL_ENV, bundled_models
from hybridkv.lab.runner import make_engine
from hybridkv.vllm.preflight import CONNECTOR
from tests.engine.support import LOOKUP_TIMEOUT_MS, prompt
from tests.engine.weights import ARGUMENTS, LENGTH, write_model
from tests.waiting import until

LORA = ["--enable-lora", "--max-lora-rank=8", "--max-loras=2", "--max-cpu-loras=2"]
if STAGES := os.environ.get("HYBRIDKV_TEST_STAGES", ""):
    LORA += [f"--pipeline-parallel-size={STAGES}"]
    # vLLM's CPU build runs a pipeline with a shim, which is put in place for bundled models.
    os.environ[BUNDLED_MODEL_ENV] = "qwen3"
REQUEST_SECONDS = 120.0
SETTLE_SECONDS = 1.0
"""How long the daemon's objects stay as many as they are once an engine has stored all."""


def write_adapter(directory: Path, seed: int) -> str:
    """Random weights for every attention projection of the bundled qwen3."""
    config = json.loads((bundled_models()["qwen3"] / "config.json").read_text())
    hidden, heads, kv_heads = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    widths = {"q_proj": heads * config["head_dim"], "k_proj": kv_heads * config["head_dim"]}
    widths["v_proj"] = widths["k_proj"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.1
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": [*widths],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return str(directory)


class Versions:
    """A model, the versions of its adapter, and the link to the present one."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.link = directory, directory / "current"
        self.model = write_model(directory / "model", 1)
        for seed, name in enumerate(("old", "new")):
            write_adapter(directory / name, seed)

    def point_to(self, name: str) -> None:
        """Exchange the directory that the link names, at once, as a deployment does."""
        fresh = self.directory / "fresh"
        fresh.symlink_to(self.directory / name)
        os.rename(fresh, self.link)

    def request(self, *, in_place: bool = False) -> LoRARequest:
        """Returns the adapter as clients name it."""
        return LoRARequest("a", 1, str(self.link), load_inplace=in_place)


class Served:
    """Runs one engine, as a context manager. It may be in a process of its own."""

    def __init__(self, name: str, socket_path: str, model: Path) -> None:
        self._name, self._requests = name, 0
        self._socket_path = None if socket_path == "-" else socket_path
        arguments = [*ARGUMENTS, f"--model={model}", *LORA]
        if self._socket_path is not None:
            extra: dict[str, object] = {"server": f"unix://{socket_path}", "audit": "off"}
            extra["lookup_timeout_ms"] = LOOKUP_TIMEOUT_MS
            transfer = {**CONNECTOR, "kv_connector_extra_config": extra}
            arguments.append(f"--kv-transfer-config={json.dumps(transfer)}")
        self.engine: Any = make_engine(arguments)

    def __enter__(self) -> "Served":
        if self._socket_path is not None:
            stored = self._objects()
            until(lambda: self._has_stored(stored), "the engine stores")
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.engine_core.shutdown()
        del self.engine
        cleanup_dist_env_and_memory()
        gc.collect()

    def ask(self, what: str, lora: LoRARequest | None, number: int = 1) -> None:
        """Answer a prompt, and print the answer once all of it is stored."""
        output = self._answer(prompt(number, LENGTH), lora)
        self._settle()
        line: dict[str, object] = {
            "name": f"{self._name}, {what}",
            "cached": output.num_cached_tokens,
        }
        line["chances"] = [
            next(iter(place.values())).logprob for place in output.outputs[0].logprobs
        ]
        print(json.dumps({**line, "objects": self._objects()}), flush=True)

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.engine.reset_prefix_cache()

    def _answer(self, tokens: list[int], lora: LoRARequest | None) -> Any:
        self._requests += 1
        greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(max_tokens=8, logprobs=0, **greedy)
        text = {"prompt_token_ids": tokens}
        self.engine.add_request(f"r{self._requests}", text, sampling, lora_request=lora)
        deadline, outputs = time.monotonic() + REQUEST_SECONDS, []
        while self.engine.has_unfinished_requests():
            outputs += self.engine.step()
            assert time.monotonic() < deadline, "the request is never answered"
        return outputs[-1]

    def _has_stored(self, objects: float) -> bool:
        """Whether the daemon has more objects once a new prompt is answered."""
        self._answer(prompt(1000 + self._requests, LENGTH), None)
        self._settle()
        return self._objects() > objects

    def _objects(self) -> float:
        if self._socket_path is None:
            return 0.0
        with ControlClient(self._socket_path) as control:
            return control.stats().values["objects"]

    def _settle(self) -> None:
        core = getattr(self.engine.engine_core, "engine_core", None)
        while core is not None and (core.scheduler.has_requests() or core.batch_queue):
            self.engine.step()
        if core is None and self._socket_path is not None:
            # The engine steps on by itself.
            objects, since = self._objects(), time.monotonic()
            while time.monotonic() - since < SETTLE_SECONDS:
                time.sleep(SETTLE_SECONDS / 10)
                if self._objects() != objects:
                    objects, since = self._objects(), time.monotonic()


def exchanged(socket_path: str, versions: Versions) -> None:
    """Exchange the directory between `add_lora` and the first request."""
    for name, then in (("old", "new"), ("new", "new"), ("old", "old")):
        versions.point_to(name)
        with Served(f"{name}, then {then}", socket_path, versions.model) as served:
            assert served.engine.add_lora(versions.request())
            versions.point_to(then)
            served.ask("first", versions.request())
            served.forget()
            served.ask("again", versions.request())


def replaced(socket_path: str, versions: Versions) -> None:
    """Load other weights under the name of the old ones, in each way that vLLM has."""
    versions.point_to("old")
    with Served("one engine", socket_path, versions.model) as served:
        served.ask("old", versions.request())
        served.forget()
        served.ask("old, known", versions.request())
        versions.point_to("new")
        assert served.engine.add_lora(versions.request(in_place=True))
        served.ask("new over blocks of the old", versions.request())
        served.ask("new, another prompt", versions.request(), 2)
        served.forget()
        served.ask("new", versions.request())
        served.forget()
        served.ask("new, known", versions.request())
        assert served.engine.remove_lora(1)
        versions.point_to("old")
        assert served.engine.add_lora(versions.request())
        served.forget()
        served.ask("old, removed and added", versions.request())
        for number in (2, 3):
            path = write_adapter(versions.directory / str(number), number)
            served.ask(f"another adapter {number}", LoRARequest(str(number), number, path))
        served.forget()
        served.ask("old, evicted meanwhile", versions.request())
        served.forget()
        served.ask("old, once more", versions.request())
        served.forget()
        versions.point_to("new")
        served.ask("new, loaded in each step", versions.request(in_place=True))
        served.forget()
        served.ask("new, loaded in each step again", versions.request(in_place=True))
        served.forget()
        served.ask("new, loaded no more", versions.request())
        served.ask("no adapter", None)
    versions.point_to("new")
    with Served("next engine", socket_path, versions.model) as served:
        served.ask("new", versions.request())
        served.forget()
        served.ask("new, known", versions.request())


WAYS = {"exchanged": exchanged, "replaced": replaced}


def main() -> None:
    """Run one of WAYS, with the daemon at a socket or without one."""
    WAYS[sys.argv[3]](sys.argv[1], Versions(Path(sys.argv[2])))


if __name__ == "__main__":
    main()
