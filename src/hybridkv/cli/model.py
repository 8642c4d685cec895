"""`hybridkv model`: something to serve where there is no model yet."""

import argparse
import importlib
import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from hybridkv.cli.arguments import JSON, command, option, or_refuse
from hybridkv.cli.terminal import print_json
from hybridkv.core.errors import ConfigError
from hybridkv.core.settings import TRANSFER

_SERVED_WITH = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
)
"""Arguments of vLLM for a small machine: without them its CPU build takes most of the memory."""


@command(option("DIR", "a new or empty directory"), JSON)
def run_model(arguments: argparse.Namespace) -> int:
    """Write a tiny model, and print the command that serves it."""
    directory = Path(arguments.DIR).absolute()
    if find_spec("transformers") is None:
        what = f"transformers is not installed for {sys.executable}, and this command needs it"
        raise ConfigError(what, "the environment of vLLM works")
    with or_refuse(f"DIR: {directory} cannot be written", "a new directory works"):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(f"DIR: {directory} is not empty", "a new directory works")
        importlib.import_module("hybridkv.lab.tiny_model").write_tiny_model(directory)
    words = ["vllm", "serve", str(directory), *_SERVED_WITH]
    words += ["--kv-transfer-config", json.dumps(TRANSFER)]
    if arguments.json:
        print_json({"directory": str(directory), "command": words})
    else:
        print(f"{directory} has a model with random weights. This serves it on a CPU or a GPU:")
        print(shlex.join(words))
    return 0
