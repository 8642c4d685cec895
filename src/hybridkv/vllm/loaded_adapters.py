"""The LoRA adapters that a worker has loaded, each with a digest of its tensors.

vLLM keeps every loaded adapter as an object in host memory, and copies its tensors into the slots
that layers compute with. It merges, packs and pins them while it adds the object, and does not
change them afterwards. What is loaded anew, or in place of another, is another object. A digest is
therefore taken once for each object, in the first step that has it. That reads the tensors once,
of the several times that vLLM does to load them, in the same step or before it.

Files are not looked at: they tell what the engine has loaded only while nobody changes them.
"""

import hashlib
import logging
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash

from hybridkv.core.keys import HASH_BYTES
from hybridkv.vllm import seams
from hybridkv.vllm.weights_digest import tensor_bytes

logger = logging.getLogger("vllm.hybridkv")

DEPTH_MAX = 8
"""How deep tensors may be nested in an adapter. Those of vLLM 0.32 are four levels deep."""
_SCALARS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


class _ReadAdapter(NamedTuple):
    """An adapter whose digest was taken."""

    model: "weakref.ref[Any]"  # The LoRAModel of vLLM.
    digest: bytes


class LoadedAdapters:
    """The adapters of one worker. All methods belong to the worker's thread, which loads them."""

    def __init__(self, runner: Any) -> None:
        """`runner` is vLLM's model runner, which has no adapters if LoRA is off."""
        self._runner = runner
        self._read: dict[int, _ReadAdapter] = {}  # The adapters of the last look, by lora_int_id.
        self._is_unread = False  # True once the log has that some adapter cannot be read.

    def digests_now(self) -> dict[int, bytes]:
        """Return the digest, HASH_BYTES long, of each adapter that is loaded now, by lora_int_id.

        An adapter that cannot be read has random bytes, which stay the same until it is loaded
        anew.
        """
        read: dict[int, _ReadAdapter] = {}
        for number, model in seams.loaded_loras(self._runner).items():
            known = self._read.get(number)
            if known is None or known.model() is not model:
                known = _ReadAdapter(weakref.ref(model), self._digest(number, model))
            read[number] = known
        self._read = read
        return {number: known.digest for number, known in read.items()}

    def _digest(self, number: int, model: Any) -> bytes:
        started = time.perf_counter()
        try:
            digest = digest_adapter(model)
        except Exception as error:  # noqa: BLE001  # the log says it
            if not self._is_unread:
                self._is_unread = True
                text = (
                    "hybridkv: LoRA adapter %d cannot be read in memory, so what it computes is "
                    "shared with no other engine and with no later one: %s"
                )
                logger.warning(text, number, error)
            return secrets.token_bytes(HASH_BYTES)
        seconds = time.perf_counter() - started
        logger.debug("hybridkv: LoRA adapter %d was read in %.3f s", number, seconds)
        return digest


def digest_adapter(model: object) -> bytes:
    """Return HASH_BYTES over the tensors and scalars of a LoRAModel, but for its lora_int_id.

    Two adapters have the same digest if their values have the same places, shapes, dtypes and
    bytes. Raises TypeError where a value is neither a tensor nor a scalar nor made of those.
    """
    whole = hashlib.blake2b(digest_size=HASH_BYTES)
    parts = {name: value for name, value in vars(model).items() if name != "id"}
    for path, value in _leaves((), parts):
        if isinstance(value, torch.Tensor):
            content = xxhash.xxh3_128(tensor_bytes(value)).hexdigest()
            text = f"{path} {value.dtype} {tuple(value.shape)} {content}\n"
        else:
            text = f"{path} {type(value).__name__} {value!r}\n"
        # `repr` quotes and escapes texts, so no two adapters have the same lines.
        whole.update(text.encode())
    return whole.digest()


def _leaves(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) of tensors and scalars below `value`, in an order that paths decide."""
    if isinstance(value, (torch.Tensor, *_SCALARS)):
        yield path, value
        return
    if len(path) >= DEPTH_MAX:
        raise TypeError(f"values deeper than {DEPTH_MAX} levels: {path}")
    if isinstance(value, list | tuple):
        children = {str(place): child for place, child in enumerate(value)}
    elif isinstance(value, Mapping):
        children = {repr(name): value[name] for name in sorted(value, key=repr)}
    elif hasattr(value, "__dict__"):
        children = dict(sorted(vars(value).items()))
    else:
        raise TypeError(f"a value of type {type(value).__name__} at {path}")
    for name, child in children.items():
        yield from _leaves((*path, name), child)
