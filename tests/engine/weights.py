"""Engines whose weights come in all the ways there are, one after the other, all on one daemon.

Run as `python -m tests.engine.weights SOCKET DIRECTORY WAY`; prints a line of JSON for each answer:
what was asked, its tokens, how many of them were loaded, and how many engines the daemon shows as
stale (both null without a connector).
"""

import contextlib
import copy
import gc
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_empty
from vllm.model_executor.model_loader import register_model_loader, weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.transformers_utils import runai_utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from hybridkv.client.control import ControlClient
from hybridkv.connector import MultiConnector
from hybridkv.connector.metrics import TOKENS_LOADED
from hybridkv.lab.models import bundled_arguments, bundled_models
from hybridkv.lab.runner import make_engine
from hybridkv.vllm import weights_digest
from hybridkv.vllm.preflight import CONNECTOR, SEVERAL
from tests.engine import unhurried
from tests.engine.ready import await_write_slots
from tests.engine.support import LOOKUP_TIMEOUT_MS, prompt

CHUNK = 128
LENGTH = 3 * CHUNK + 20
REQUEST_SECONDS = 120.0
ARGUMENTS = [word for word in bundled_arguments("qwen3") if word != "--load-format=dummy"]


def write_model(directory: Path, seed: int) -> Path:
    """Write a qwen3 with weights of a seed. No other file of the directory depends on it."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(bundled_models()["qwen3"])
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            low, high = (-0.08, 0.08) if parameter.dim() > 1 else (1.0, 3.0)
            parameter.uniform_(low, high)
    model.save_pretrained(directory)
    return directory


class Served:
    """Runs one engine, as a context manager.

    With `is_multi` its connector is inside a MultiConnector.
    """

    def __init__(
        self,
        name: str,
        socket_path: str | None,
        *arguments: str,
        is_multi: bool = False,
        weights_identity: str = "",
    ) -> None:
        self._name, self._requests, self._socket_path = name, 0, socket_path
        extra: dict[str, object] = {"server": f"unix://{socket_path}", "audit": "off"}
        extra["lookup_timeout_ms"] = LOOKUP_TIMEOUT_MS
        extra |= {"weights_identity": weights_identity} if weights_identity else {}
        transfer: dict[str, Any] = {**CONNECTOR, "kv_connector_extra_config": extra}
        if is_multi:
            inside = {"connectors": [transfer]}
            transfer = {**transfer, "kv_connector": SEVERAL, "kv_connector_extra_config": inside}
            transfer["kv_connector_module_path"] = unhurried.__name__
        transfer_options = ["--kv-transfer-config", json.dumps(transfer)] if socket_path else []
        self.engine = make_engine([*ARGUMENTS, *arguments, *transfer_options])
        await_write_slots(self.engine)
        self.core: Any = self.engine.engine_core.engine_core

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.engine_core.shutdown()
        del self.engine, self.core
        cleanup_dist_env_and_memory()
        gc.collect()

    def loaded(self) -> int | None:
        """Returns how many tokens were loaded so far, or None without a connector."""
        connector = self.core.scheduler.connector
        if connector is None:
            return None
        if isinstance(connector, MultiConnector):
            connector = connector.children.all[0].connector
        return int(connector.counters.get(TOKENS_LOADED, 0))

    def stale(self) -> float | None:
        """Returns how many engines told the daemon that they serve nothing.

        Returns None without a connector.
        """
        if self._socket_path is None:
            return None
        with ControlClient(self._socket_path) as control:
            return control.stats().values["engines_stale"]

    def ask(self, what: str = "") -> None:
        """Answer the one prompt that all engines get, and print the answer."""
        self._requests += 1
        before, text = self.loaded(), {"prompt_token_ids": prompt(1, LENGTH)}
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=8)
        self.engine.add_request(f"r{self._requests}", text, sampling)
        deadline, tokens = time.monotonic() + REQUEST_SECONDS, []
        started = time.perf_counter()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens = list(output.outputs[0].token_ids)
            assert time.monotonic() < deadline, "the request is never answered"
        seconds = time.perf_counter() - started
        after = self.loaded()
        loaded = None if after is None or before is None else after - before
        line = {"name": f"{self._name} {what}".strip(), "tokens": tokens, "loaded": loaded}
        print(json.dumps({**line, "stale": self.stale(), "seconds": seconds}), flush=True)

    def change(self, factor: float) -> None:
        """Change the weights in place, as a trainer's own code does: nobody is told."""

        def multiply(worker: Any) -> None:
            with torch.no_grad():
                for name, parameter in worker.model_runner.model.named_parameters():
                    if "norm" in name:
                        parameter.mul_(factor)

        self.engine.collective_rpc(multiply)


def in_place(
    socket_path: str, directory: Path, *arguments: str, is_multi: bool = False, many: bool = True
) -> None:
    """Row 5: change weights in place, reset without telling connectors, and change them back."""
    model = f"--model={write_model(directory / 'model', 1)}"
    for name, server in (("plain", None), ("cached", socket_path)):
        with Served(name, server, model, *arguments, is_multi=is_multi) as served:
            served.ask("old")
            served.engine.reset_prefix_cache()
            served.ask("old, reset")
            served.change(2.0)
            served.engine.reset_prefix_cache()
            served.ask("new")
            served.engine.reset_prefix_cache(reset_connector=True)
            served.ask("new, reset")
            served.change(0.5)
            served.engine.reset_prefix_cache()
            served.ask("old again")
            if server and many:
                watched(served)
    if many:
        with Served("cached", socket_path, model, *arguments, is_multi=is_multi) as served:
            served.change(2.0)
            served.ask("new, updated before anything else")


def watched(served: Served) -> None:
    """Use vLLM's own ways to change weights, or to put them away."""
    for level in (1, 2):
        served.engine.sleep(level)
        served.engine.wake_up()
        served.ask(f"awake from {level}")
    served.core.pause_scheduler(mode="keep", clear_cache=True)
    served.change(2.0)
    served.core.resume_scheduler()
    served.ask("new, paused meanwhile")
    served.change(0.5)
    with contextlib.suppress(AttributeError, AssertionError, RuntimeError, ValueError):
        # There is no trainer. That weights may have changed is known before that is said.
        served.engine.collective_rpc("start_weight_update")
    served.ask("old, and blocks of the new")
    served.engine.reset_prefix_cache()
    served.ask("old once more")


def one_after_the_other(
    socket_path: str, ways: Callable[[Path], list[str]], models: list[Path]
) -> None:
    """Ask each model without a connector, then all with it, then the first again."""
    for model in models:
        with Served(f"plain {model.name}", None, *ways(model)) as served:
            served.ask()
            served.engine.reset_prefix_cache()
            served.ask("again")
    for model in (*models, models[0]):
        with Served(f"cached {model.name}", socket_path, *ways(model)) as served:
            served.ask()


def hub(socket_path: str, directory: Path) -> None:
    """Row 1: names of a hub. The config is in one cache, and the weights are in --download-dir."""
    models = [write_model(directory / "hub" / "org" / name, seed) for seed, name in enumerate("ab")]
    downloads = f"--download-dir={directory / 'downloads'}"
    with hub_of(directory / "hub"):
        one_after_the_other(
            socket_path, lambda model: [f"--model=org/{model.name}", downloads], models
        )


@contextlib.contextmanager
def hub_of(directory: Path) -> Iterator[None]:
    """A stand-in for Hugging Face's hub, of the models in a directory, at the endpoint that
    `main` has set before the hub's library was imported.
    """
    address = os.environ["HF_ENDPOINT"].removeprefix("http://").split(":")
    server = ThreadingHTTPServer((address[0], int(address[1])), partial(Hub, directory))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class Hub(BaseHTTPRequestHandler):
    """The few requests of the hub's protocol with which a model's files are found and fetched."""

    def __init__(self, directory: Path, *arguments: Any) -> None:
        self._directory = directory
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            words = path.removeprefix("/api/models/").split("/")
            files = sorted((self._directory / "/".join(words[:2])).iterdir())
            revision = hashlib.sha1("/".join(words[:2]).encode()).hexdigest()
            body: Any = {
                "id": "/".join(words[:2]),
                "sha": revision,
                "siblings": [{"rfilename": file.name} for file in files],
            }
            if words[2:3] == ["tree"]:
                body = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)}
                    for f in files
                ]
            self._answer(json.dumps(body).encode(), {"Content-Type": "application/json"})
            return
        organisation, name, _, _, file = path.strip("/").split("/", 4)
        found = self._directory / organisation / name / file
        if not found.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        revision = hashlib.sha1(f"{organisation}/{name}".encode()).hexdigest()
        self._answer(found.read_bytes(), {"ETag": f'"{_etag(found)}"', "X-Repo-Commit": revision})

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""

    def _answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def storage(socket_path: str, directory: Path) -> None:
    """Row 2: object storage. The model's directory holds only *.json, the URL names the weights.

    The stand-in for Run:ai's streamer has each bucket in a directory.
    """
    models = [
        write_model(directory / "s3" / "bucket" / name, seed) for seed, name in enumerate("ab")
    ]
    os.environ["VLLM_ASSETS_CACHE"] = str(directory / "assets")

    def path_of(url: str) -> Path:
        return directory / "s3" / url.removeprefix("s3://")

    def list_safetensors(url: str) -> list[str]:
        return [f"{url.rstrip('/')}/{f.name}" for f in path_of(url).glob("*.safetensors")]

    def pull_files(url: str, to: str, allow: list[str] | None, ignore: list[str] | None) -> None:
        for file in path_of(url).iterdir():
            wanted = allow is None or any(file.match(pattern) for pattern in allow)
            if wanted and not any(file.match(pattern) for pattern in ignore or ()):
                shutil.copy(file, to)

    class Streamer:
        def __enter__(self) -> "Streamer":
            self.files_to_tensors_metadata: dict[str, list[str]] = {}
            return self

        def __exit__(self, *exc: object) -> None:
            """Nothing is held."""

        def stream_files(self, urls: list[str], **options: object) -> None:
            self._tensors = {k: v for url in urls for k, v in load_file(path_of(url)).items()}

        def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from self._tensors.items()

    runai_utils.runai_list_safetensors, runai_utils.runai_pull_files = list_safetensors, pull_files
    weight_utils.SafetensorsStreamer = Streamer
    one_after_the_other(
        socket_path,
        lambda model: [f"--model=s3://bucket/{model.name}", "--load-format=runai_streamer"],
        models,
    )


@register_model_loader("elsewhere")
class ElsewhereLoader(DefaultModelLoader):
    """A loader as tensorizer's: its own config says where the weights are."""

    def __init__(self, load_config: Any) -> None:
        self._uri = load_config.model_loader_extra_config["uri"]
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        elsewhere = copy.copy(model_config)
        elsewhere.model = elsewhere.model_weights = self._uri
        super().load_weights(model, elsewhere)


def loader(socket_path: str, directory: Path) -> None:
    """Row 3: the model's directory has a config alone, and a custom loader knows the weights."""
    models = [write_model(directory / "loader" / name, seed) for seed, name in enumerate("ab")]

    def arguments(model: Path) -> list[str]:
        extra = json.dumps({"uri": str(model)})
        bare = f"--model={bundled_models()['qwen3']}"
        return [bare, "--load-format=elsewhere", f"--model-loader-extra-config={extra}"]

    one_after_the_other(socket_path, arguments, models)


def quantization(socket_path: str, directory: Path) -> None:
    """Row 4: one model under two quantization configs of one method."""
    model = write_model(directory / "quantized", 1)
    ignored = {"first": ["*.layers.0.*"], "last": ["*.layers.3.*"]}

    def arguments(which: Path) -> list[str]:
        config = json.dumps({"ignore": ignored[which.name]})
        method = ["--quantization=fp8_per_channel", f"--quantization-config={config}"]
        return [f"--model={model}", "--dtype=bfloat16", *method]

    one_after_the_other(socket_path, arguments, [Path(name) for name in ignored])


def int8(socket_path: str, directory: Path) -> None:
    """Two checkpoints with the same scales, of which each has the other's columns in another order:
    oneDNN keeps the integers, and what vLLM adds up over the columns is the same."""
    models = [write_model(directory / "int8" / name, 1) for name in "ab"]
    for seed, model in enumerate(models):
        weights = load_file(model / "model.safetensors")
        for name in [name for name in weights if name.endswith("_proj.weight")]:
            weight = weights.pop(name)
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights[name] = (weight / scale).round().to(torch.int8)[:, order].contiguous()
            weights[f"{name}_scale"] = scale
        save_file(weights, model / "model.safetensors", {"format": "pt"})
        config = json.loads((model / "config.json").read_text())
        integers = {"num_bits": 8, "type": "int", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": integers | {"dynamic": False, "strategy": "channel"},
            "input_activations": integers | {"dynamic": True, "strategy": "token"},
        }
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
        (model / "config.json").write_text(json.dumps(config))
    one_after_the_other(socket_path, lambda model: [f"--model={model}"], models)


def empty(socket_path: str, directory: Path) -> None:
    """Give every norm the empty parameter that Marlin gives to each linear layer on a GPU."""
    load_model = CPUModelRunner.load_model

    def load(runner: Any, *arguments: Any, **options: Any) -> None:
        load_model(runner, *arguments, **options)
        for module in runner.model.modules():
            if type(module).__name__ == "RMSNorm":
                module.w_zp = marlin_make_empty(torch.device("cpu"))

    CPUModelRunner.load_model = load
    stored_and_found(socket_path, directory)


def unread(socket_path: str, directory: Path) -> None:
    """Let nobody wait for what oneDNN keeps: it is this engine's own, or has a name."""
    weights_digest.PROBE_SECONDS_MAX = -1.0
    stored_and_found(socket_path, directory)
    stored_and_found(socket_path, directory, "these")


def stored_and_found(socket_path: str, directory: Path, identity: str = "") -> None:
    """An engine stores, resets its own cache and loads. So does the next one after it."""
    model = f"--model={write_model(directory / 'model', 1)}"
    for name in ("first", "second"):
        named = f"{name} {identity}".strip()
        with Served(named, socket_path, model, weights_identity=identity) as served:
            served.ask()
            served.engine.reset_prefix_cache()
            served.ask("reset")


def ranks(socket_path: str, directory: Path) -> None:
    """Row 5 with two ranks, each of which reads its own weights."""
    in_place(socket_path, directory, "--tensor-parallel-size=2", many=False)


def multi(socket_path: str, directory: Path) -> None:
    """Row 5 inside MultiConnector."""
    in_place(socket_path, directory, is_multi=True)


WAYS: dict[str, Callable[[str, Path], None]] = {
    "hub": hub,
    "storage": storage,
    "loader": loader,
    "quantization": quantization,
    "int8": int8,
    "empty": empty,
    "unread": unread,
    "in place": in_place,
    "ranks": ranks,
    "multi": multi,
}


def main() -> None:
    """Run one of WAYS."""
    socket_path, directory, way = sys.argv[1:]
    WAYS[way](socket_path, Path(directory))


if __name__ == "__main__":
    main()
