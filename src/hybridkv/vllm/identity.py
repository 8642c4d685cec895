"""The facts that must agree before bytes may be reused (requirements D15, D16)."""

import dataclasses
import hashlib
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from enum import Enum
from itertools import groupby
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec, iter_layer_specs

from hybridkv.core.copies import PAYLOAD_VERSION
from hybridkv.core.geometry import Geometry
from hybridkv.core.settings import Settings
from hybridkv.vllm.hashing import hash_facts
from hybridkv.vllm.layout import WorkerLayout
from hybridkv.vllm.unrelated import FIELDS, LIBRARY_VARIABLES, VARIABLES, names
from hybridkv.vllm.versions import minor_version

logger = logging.getLogger("vllm.hybridkv")

_DEPTH_MAX = 4  # Of objects inside objects that are no data classes.
_MEASURED = "online_quantization_time"  # Seconds that a quantization took, among its settings.


def identity_facts(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    geometry: Geometry,
    layouts: Mapping[int, WorkerLayout],
    settings: Settings,
) -> dict[str, object]:
    """Return every fact as JSON-able values, whose `core.keys.fingerprint` is the namespace.

    `layouts` are those of the workers by rank. With `settings.share_tp` the facts are the same
    whatever the number of ranks is. Raises GeometryError or ConfigError where a fact cannot be
    known.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    text = model.hf_text_config  # As a rule a part of `hf_config`, but not of every model.
    specs = [_spec_facts(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    parts = geometry.shards or geometry.ranks
    chunk = [geometry.chunk_tokens, geometry.hash_tokens, geometry.alignment_tokens, parts]
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    digests = [layout.weights for _, layout in sorted(layouts.items())]
    layers: list[list[object]] = []
    for rank, layout in sorted(layouts.items()):
        by_gid = [[gid, [*map(astuple, group)]] for gid, group in layout.layers.items()]
        layers.append([rank, layout.device, by_gid])
    configured = _settings(vllm_config)
    if settings.share_tp is not None:
        # Shards have one layout. Where ranks differ all the same, each of their layouts is a fact.
        layers = [layer for layer, _ in groupby(row[1:] for row in layers)]
        configured = _without_sizes(configured) | {"share_tp": settings.share_tp}
    return {
        "payload": PAYLOAD_VERSION,
        "abi": minor_version(),
        "hash": hash_facts(str(cache.prefix_caching_hash_algo)),
        "weights": weights_fact(settings, digests, digests),
        "config": _model(model.hf_config),
        "text_config": None if text is model.hf_config else _model(text),
        "draft_config": draft and _model(draft.hf_config),
        "files": _model_files(model),
        "environment": _environment(),
        "layout": str(kv_cache_config.kv_cache_layout),
        "groups": [[*astuple(group), *specs[group.gid]] for group in geometry.groups],
        "chunk": chunk,
        "layers": layers,
        **_kept_out(vllm_config, kv_cache_config),
        **configured,
    }


def _kept_out(vllm_config: Any, kv_cache_config: KVCacheConfig) -> dict[str, object]:
    """Return what vLLM's CPU kernels compute wrongly here, and older versions of this package kept.

    The fact keeps what these stored from being found. {} where there is no such kernel. See
    `vllm.batch_faults`, which asks the kernels themselves before anything is stored.
    """
    if not current_platform.is_cpu():
        return {}
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    layers = [layer for spec in specs for layer in iter_layer_specs(spec)]
    kinds = {layer.mamba_type for layer in layers if isinstance(layer, MambaSpec)}
    kept = ["base rows beside adapters"] if vllm_config.lora_config is not None else []
    kept += ["rotated heads"] if MambaAttentionBackendEnum.SHORT_CONV in kinds else []
    return {"kept_out": kept} if kept else {}


def _without_sizes(configured: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a VllmConfig without the only one that tensor parallelism changes."""
    parallel = configured["parallel_config"]
    assert isinstance(parallel, Mapping)
    kept = {name: value for name, value in parallel.items() if name != "tensor_parallel_size"}
    return {**configured, "parallel_config": kept}


def _spec_facts(spec: KVCacheSpec) -> list[object]:
    """Return a group's kind, and the shapes and dtypes of its recurrent states.

    States are registered as plain bytes, and their dims may be in either order
    (VLLM_SSM_CONV_STATE_LAYOUT).
    """
    layers = [layer for layer in iter_layer_specs(spec) if isinstance(layer, MambaSpec)]
    states = [[layer.shapes, [*map(str, layer.dtypes)]] for layer in layers]
    return [type(spec).__name__, *states]


def _settings(config: Any) -> dict[str, object]:
    """Return the fields of one of vLLM's configurations, at any depth, but for unrelated ones.

    A field that is not known here is a part of the identity, so a new one costs hits at most.
    """
    unrelated = names(FIELDS.get(type(config).__name__, {}))
    fields = (field.name for field in dataclasses.fields(config) if field.name not in unrelated)
    return {name: _plain(getattr(config, name)) for name in fields}


def _environment() -> dict[str, str]:
    """Return the variables that choose kernels, data types or layouts and that are set."""
    related = envs.environment_variables.keys() - names(VARIABLES)
    of_vllm = {name: str(getattr(envs, name)) for name in related & os.environ.keys()}
    libraries = LIBRARY_VARIABLES.split()
    return of_vllm | {name: os.environ[name] for name in libraries if name in os.environ}


def _model(hf_config: Any) -> object:
    """Return the model's own configuration, with the changes of `--hf-overrides`."""
    values = hf_config.to_dict().items()
    return _plain({key: value for key, value in values if key != "_name_or_path"})


def _model_files(model: Any) -> object:
    """Return the digests of the model's files that are neither weights nor configuration, by name.

    These are code, where it is trusted, and processors, which say how pixels and sounds become
    numbers. Where the files are not on this machine, returns the model's name and revisions, and
    for code something that no other engine has: the name does not say what the code is.
    """
    patterns = ["*.py"] if model.trust_remote_code else []
    patterns += ["*processor*.json"] if model.multimodal_config is not None else []
    if not patterns:
        return {}
    directory = Path(model.model)
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  # only for a hub's name

        config = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
        if not isinstance(config, str):
            named = [model.model, str(model.revision), str(model.code_revision)]
            return [*named, _unread("trust_remote_code")] if model.trust_remote_code else named
        directory = Path(config).parent
    found = sorted(path for pattern in patterns for path in directory.glob(pattern))
    return {path.name: hashlib.blake2b(path.read_bytes()).hexdigest()[:32] for path in found}


def weights_fact(settings: Settings, digests: Sequence[str], first: Sequence[str]) -> object:
    """Return the identity's fact of the weights with these `digests` by rank.

    Without `weights_identity` the fact is the digests. Else it is that name for the weights with
    which the engine started, whose digests are `first`, and [name, *digests] for later weights.
    """
    if settings.weights_identity is None:
        return [*digests]
    name = settings.weights_identity
    return name if [*digests] == [*first] else [name, *digests]


def _plain(value: object, depth: int = _DEPTH_MAX) -> object:
    """Return the value with JSON-able leaves that are the same in every process.

    Objects are taken apart, at most `depth` levels of them.
    """
    if isinstance(value, str | int | bool | None):
        return value
    if isinstance(value, PretrainedConfig):
        return _model(value)  # Some of these are data classes too.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _settings(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, depth) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(item, depth) for item in value]
    if isinstance(value, float | Enum | Path | torch.dtype):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    # The text of any other object may have its address in it.
    name, state = _plain(type(value)), _state(value)
    if state is None or (state and not depth):
        return [name, _unread(name)]
    return [name, _plain(state, depth - 1)]


def _unread(name: object) -> str:
    """Return a value that no other engine has, for what cannot be read, and warn of it."""
    logger.warning(
        "hybridkv: a setting of type %s cannot be read, so this engine shares with no other and "
        "with no later one",
        name,
    )
    return secrets.token_hex(16)


def _state(value: object) -> object:
    """Return what pickle would keep of an object, which knows of slots and of what C keeps.

    `Quantization(bits=4) -> {"bits": 4}`. Returns {} for an object without state, and None for one
    that says nothing of its state, as a lock, and for a tensor, which may be large or on a device.
    """
    if isinstance(value, torch.Tensor):
        return None
    try:
        reduced = value.__reduce_ex__(2)
        if isinstance(reduced, str):
            return reduced
        make, arguments, *rest = reduced
        state = rest[0] if rest else None
        items = [[*part] for part in rest[1:3] if part is not None]  # Of a list, and of a mapping.
    except Exception:  # noqa: BLE001  # It is any library's code.
        return None
    if items or len(arguments) != 1 or arguments[0] is not type(value):
        return [make, arguments, state, items]
    if isinstance(state, tuple):  # What is in the dictionary, and what is in slots.
        state = {name: own for part in state for name, own in (part or {}).items()}
    if isinstance(state, dict):
        state = {name: own for name, own in state.items() if name != _MEASURED}
    return state or {}
