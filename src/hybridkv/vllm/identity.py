"""The facts that must agree before bytes may be reused (requirements D15, D16)."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.kv_cache_interface import KVCacheConfig

from hybridkv.core.copies import PAYLOAD_VERSION
from hybridkv.core.geometry import Geometry
from hybridkv.core.settings import Settings
from hybridkv.vllm.hashing import hash_facts
from hybridkv.vllm.layout import WorkerLayout

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_BLOB = re.compile("[0-9a-f]{64}")  # Name of a large file in a hub's cache.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".json")


def identity_facts(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    geometry: Geometry,
    layouts: Mapping[int, WorkerLayout],
    settings: Settings,
) -> dict[str, object]:
    """Every fact as JSON-able values; `core.keys.fingerprint` of them is the namespace."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, hf_config = vllm_config.parallel_config, model.hf_config.to_dict()
    # RoPE may depend on the served length (dynamic, longrope, yarn scaling).
    rope = [getattr(model.hf_config, name, None) for name in ("rope_scaling", "rope_parameters")]
    specs = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    chunk = [geometry.chunk_tokens, geometry.hash_tokens, geometry.alignment_tokens, geometry.ranks]
    layers = []
    for rank, layout in sorted(layouts.items()):
        by_gid = [[gid, [*map(astuple, one)]] for gid, one in layout.layers.items()]
        layers.append([rank, layout.device, by_gid])
    return {
        "payload": PAYLOAD_VERSION,
        "abi": ".".join(vllm.__version__.split(".")[:2]),
        "hash": hash_facts(str(cache.prefix_caching_hash_algo)),
        "weights": settings.weights_identity or weights_identity(vllm_config),
        "config": _plain({key: hf_config[key] for key in hf_config if key != "_name_or_path"}),
        "overrides": _plain(getattr(model, "hf_overrides", None)),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_dtype": [str(cache.cache_dtype), str(getattr(cache, "mamba_cache_dtype", ""))],
        "ssm_dtype": str(getattr(cache, "mamba_ssm_cache_dtype", "")),
        "max_model_len": model.max_model_len if any(rope) else 0,
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            getattr(parallel, "decode_context_parallel_size", 1),
            bool(getattr(parallel, "enable_expert_parallel", False)),
        ],
        "attention": _plain(getattr(vllm_config, "attention_config", None)),
        "lora": vllm_config.lora_config is not None,
        "layout": str(kv_cache_config.kv_cache_layout),
        "speculative": getattr(vllm_config.speculative_config, "method", None),
        "groups": [[*astuple(group), specs[group.gid]] for group in geometry.groups],
        "chunk": chunk,
        "layers": layers,
    }


def weights_identity(vllm_config: Any) -> str:
    """What tells these weights from others: the content of their files, where they are here."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        return f"dummy:{model.seed}:{os.environ.get('HYBRIDKV_WIDEN', '')}"
    directory = Path(model.model)
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  # only for a hub's name

        config = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
        if not isinstance(config, str):
            return f"name:{model.model}:{model.revision}:{load.load_format}"
        directory = Path(config).parent
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted(directory.rglob("*")):
        if path.suffix in _WEIGHT_SUFFIXES and path.is_file():
            digest.update(f"{path.relative_to(directory)}:{path.stat().st_size}\n".encode())
            digest.update(_content(path))
    return f"files:{digest.hexdigest()}:{load.load_format}"


def _content(path: Path) -> bytes:
    """What stands for a file's content.

    It is the name of a hub's blob, which is a hash, or all bytes of a small file. Of a large file
    it is evenly spread pieces and the time of the last change, because a fine-tune may have changed
    only bytes between the pieces.
    """
    blob = path.resolve().name
    if path.is_symlink() and _BLOB.fullmatch(blob):
        return blob.encode()
    status = path.stat()
    size = status.st_size
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            return file.read()
        pieces = [str(status.st_mtime_ns).encode()]
        for at in (*range(0, size - _SAMPLE_BYTES, size // _SAMPLES), size - _SAMPLE_BYTES):
            file.seek(at)
            pieces.append(file.read(_SAMPLE_BYTES))
    return b"".join(pieces)


def _plain(value: object) -> object:
    """The value with JSON-able leaves: containers stay, everything else becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return value if isinstance(value, str | int | bool | None) else str(value)
