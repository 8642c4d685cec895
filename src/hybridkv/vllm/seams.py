"""Every place where this package touches what vLLM does not offer to connectors.

Each function is one such place. Its docstring says where vLLM has it, and what follows where a
version has it no more: never a fault, at worst an engine that shares its cache with no other one.
All of them were read in vLLM 0.32 and 0.33. Engines of 0.30 and 0.31 are tested before a release.
tests/unit/vllm/test_seams.py asks the installed version for each.

Not here: what is offered under another name in another version (`versions`), the shapes and
quantizations of layers, which are public attributes (`weight_sizes`), and what vLLM's base classes
give to their subclasses (`metrics`).
"""

import queue
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CellType
from typing import Any, NamedTuple

import torch
from vllm import _custom_ops
from vllm.model_executor import offloader
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.request import Request

Method = Callable[..., Any]

CHANGING_METHODS = (
    "load_model",
    "reload_weights",
    "reset_weights",
    "update_weights",
    "load_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "finish_weight_update",
    "apply_model",
    "sleep",
    "wake_up",
    "discard",
    "checkpoint_restore",
)
"""Methods of vLLM's workers, model runners and models that may change the weights.

Other code may change them too, so this list proves nothing. The weights are read anew at once after
these methods, also where the sentinel sees no change."""
MEMORY_TAGS = ("weights", "kv_cache")
"""What vLLM's sleep mode takes the memory of, unless it says which."""
DRAFTED_STATES_MODULE = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
"""The module of vLLM's CPU kernel for recurrent states of a step with drafts."""


# The model runner, the worker and the models


class Callers(NamedTuple):
    """The objects of vLLM that called a connector. None for one that is not among them."""

    runner: Any
    """The model runner, which has the model."""
    worker: Any
    """The worker, which has the model runner."""


def runner_and_worker_on_stack() -> Callers:
    """Return the model runner and the worker whose methods are on the call stack.

    A connector is never handed the model. A method of the worker calls a method of its
    `model_runner`, under which `register_kv_caches` is called. Both name their object `self`.
    Without a runner the weights are unread. Without a worker its methods are not followed.
    """
    runner, frame = None, sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if runner is None and runner_model(owner) is not None:
            runner = owner
        elif runner is not None and getattr(owner, "__dict__", {}).get("model_runner") is runner:
            return Callers(runner, owner)
        frame = frame.f_back  # type: ignore[assignment]
    return Callers(runner, None)


def runner_model(owner: Any) -> torch.nn.Module | None:
    """Return the attribute `model` of a model runner. None where `owner` is no model runner.

    All model runners have it. Without it the weights are unread.
    """
    attributes = getattr(owner, "__dict__", {})
    return None if isinstance(owner, torch.nn.Module) else unwrapped(attributes.get("model"))


def unwrapped(model: Any) -> torch.nn.Module | None:
    """Return a model without vLLM's wrappers around it, which replay CUDA graphs (`unwrap`).

    None where something else than a model is left: then the weights are unread.
    """
    for _ in range(4):
        if isinstance(model, torch.nn.Module) or model is None:
            return model
        unwrap = getattr(model, "unwrap", None)
        model = unwrap() if callable(unwrap) else None
    return None


def models_of(runner: Any) -> dict[str, torch.nn.Module]:
    """Return the model of a model runner and that of its drafter, by "model" and "drafter".

    The drafter is `drafter` of the V1 model runner, and `speculator` of the V2 model runner. Where
    it is neither, the identity lacks the drafter's weights.
    """
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    own, drafting = runner_model(runner), unwrapped(getattr(drafter, "model", None))
    models = {"model": own, "drafter": drafting}
    return {role: model for role, model in models.items() if model is not None}


def occupied_bytes(runner: Any) -> int:
    """Return the memory that loading the models took, `model_memory_usage` of a model runner.

    0 where the runner does not have it, and on a CPU, where the V2 model runner takes it from the
    memory of the whole machine: then nothing checks how much was read.
    """
    if current_platform.is_cpu():
        return 0
    occupied = getattr(runner, "model_memory_usage", 0)
    return occupied if isinstance(occupied, int) else 0


# The engine's loop


class EngineLoop:
    """The loop of an engine that waits for requests."""

    def __init__(self, core: Any, wake_up: Any) -> None:
        self._core, self._wake_up = core, wake_up

    def ask_for_step(self) -> None:
        """Have the loop look for work once more. Any thread may ask for it."""
        self._core.input_queue.put_nowait((self._wake_up, None))

    def is_sleeping(self) -> bool:
        """Return True while vLLM's sleep mode has the engine's memory."""
        executor = getattr(self._core, "model_executor", None)
        return bool(getattr(executor, "is_sleeping", False))


def engine_loop_on_stack() -> EngineLoop | None:
    """Return the loop of the engine core that makes a connector, whose `input_queue` it reads.

    `EngineCoreProc` has it, and wakes by `EngineCoreRequestType.WAKEUP`. None where the engine runs
    in its caller's thread, or has no such request: it publishes KV events while requests run only.
    """
    wake_up = getattr(EngineCoreRequestType, "WAKEUP", None)
    frame = sys._getframe(1) if wake_up is not None else None
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(getattr(owner, "__dict__", {}).get("input_queue"), queue.Queue):
            return EngineLoop(owner, wake_up)
        frame = frame.f_back
    return None


# Methods that change the weights or the memory


def follow_methods(
    owners: Iterable[object], names: Sequence[str], follow: Callable[[str, Method], Method]
) -> None:
    """Replace each owner's methods of these names by what `follow` makes of a name and a method.

    Only the owners themselves get them, not their classes. A method that an owner lacks is left
    out: the sentinel alone sees what changes the weights then.
    """
    for owner in owners:
        for name in names:
            method = getattr(owner, name, None)
            if callable(method):
                setattr(owner, name, follow(name, method))


def extension_methods(worker: Any) -> Iterator[str]:
    """Yield the methods of the worker's extension, such as a trainer's own updates.

    vLLM puts the class that `worker_extension_cls` names among the worker's base classes. Where it
    is not there, the extension's methods are not followed.
    """
    config = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    extension = getattr(config, "worker_extension_cls", None)
    for cls in type(worker).__mro__ if extension else ():
        if f"{cls.__module__}.{cls.__qualname__}" == extension:
            methods = (name for name, value in vars(cls).items() if callable(value))
            yield from (name for name in methods if not name.startswith("__"))


def released_memory(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collection[str]:
    """Return the tags of the memory that a call of a worker's method takes away.

    `discard(("kv_cache",))` -> ("kv_cache",); `sleep(level)` -> MEMORY_TAGS; any other call -> ().
    """
    if method == "sleep":
        return MEMORY_TAGS
    return _tags(args, kwargs) if method == "discard" else ()


def restored_memory(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collection[str]:
    """Return the tags of the memory that is there again after a call of a worker's method.

    `wake_up(["weights"])` -> ["weights"]; `wake_up()` -> MEMORY_TAGS; any other call -> ().
    """
    return _tags(args, kwargs) if method == "wake_up" else ()


def _tags(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collection[str]:
    """Return the argument `tags`, which may be the first one. MEMORY_TAGS where it is empty."""
    tags: Collection[str] = kwargs.get("tags", args[0] if args else None) or MEMORY_TAGS
    return tags


# Where layers keep their weights


class OffloadedWeight(NamedTuple):
    """A parameter whose bytes vLLM keeps elsewhere while the engine serves."""

    parameter: torch.nn.Parameter
    """A buffer on the device, which layers share."""
    holder: Any
    attribute: str
    """The attribute of `holder` that is the tensor with the bytes."""


def offloaded_weights() -> list[OffloadedWeight]:
    """Return the parameters whose bytes vLLM's offloader keeps elsewhere.

    UVAOffloader keeps them in the parameters, and PrefetchOffloader beside them. Raises an error
    where the offloader is of another class, or is not as in vLLM 0.30 to 0.33: then all weights are
    unread.
    """
    present = offloader.get_offloader()
    if type(present) not in (
        offloader.NoopOffloader,
        offloader.UVAOffloader,
        offloader.PrefetchOffloader,
    ):
        raise LookupError(type(present).__name__)
    return [
        OffloadedWeight(layer.module.get_parameter(name), kept, "_cpu_storage")
        for layer in getattr(present, "module_offloaders", ())
        for name, kept in vars(layer)["_param_offloaders"].items()
    ]


def has_static_buffers() -> bool:
    """Return True where vLLM's prefetch offloader is on: its parameters are no place to write to.

    Where another class does the same, `offloaded_weights` refuses it.
    """
    return isinstance(offloader.get_offloader(), offloader.PrefetchOffloader)


def is_split_over_replicas(module: torch.nn.Module) -> bool:
    """Return True for experts of which other data parallel replicas have a part.

    Each replica is an engine of its own, so no engine has all of these weights. `moe_config` says
    how many replicas there are. Where it does not, the identity lacks the weights of the others.
    """
    config = getattr(module, "moe_config", None)
    replicas = getattr(getattr(config, "moe_parallel_config", None), "dp_size", 1)
    return isinstance(replicas, int) and replicas > 1


def closure_cells(function: object) -> list[CellType]:
    """Return what a function keeps of the scope in which it was made, without empty cells.

    vLLM's CPU kernels empty a layer's parameter. The weight is then a variable of the function that
    the layer computes with (`cpu_linear`). Where no function keeps it, the module is unread.
    """
    cells = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            cell.cell_contents  # noqa: B018  # raises where nothing was assigned yet
        except ValueError:
            continue
        cells.append(cell)
    return cells


def is_packed_matrix(value: object) -> bool:
    """Return True for vLLM's object for a matrix that oneDNN keeps in memory of its own.

    Where vLLM has no such class, no matrix is packed, or the module that has it is unread.
    """
    handler = getattr(_custom_ops, "CPUDNNLGEMMHandler", None)
    return handler is not None and isinstance(value, handler)


def int8_kernel_config(holder: Any, attribute: object) -> Any:
    """Return the configuration of vLLM's INT8 kernel for CPUs that holds a packed matrix.

    The kernel keeps its matrix as `dnnl_handler`. None for any other holder or attribute: then the
    matrix is not read, and the module is unread.
    """
    return getattr(holder, "config", None) if attribute == "dnnl_handler" else None


def multiply_int8(
    matrix: Any,
    inputs: torch.Tensor,
    products: torch.Tensor,
    scales: torch.Tensor,
    zero_point: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply rows of integers by a packed INT8 matrix into `products`, and return these.

    `scales` and `zero_point` are those of the inputs. Raises AttributeError where vLLM's build has
    no oneDNN, and then the module is unread.
    """
    return _custom_ops.onednn_scaled_mm(
        dnnl_handler=matrix,
        x=inputs,
        output=products,
        input_scale=scales,
        input_zp=zero_point,
        input_zp_adj=None,
        bias=None,
    )


def attention_kernel(module: torch.nn.Module) -> Any:
    """Return the object that an attention layer computes with, its attribute `impl`, else None.

    That of MLA keeps halves of the weight of a layer beside it. Where it does not have them, that
    layer is unread.
    """
    return getattr(module, "impl", None)


def shared_partitions(tensor: torch.Tensor) -> Mapping[Any, torch.Tensor] | None:
    """Return the tensors that a SharedWeightParameter of vLLM consists of. None for other tensors.

    Without its `partitions` the parameter itself is read, which is empty.
    """
    partitions = getattr(tensor, "partitions", None)
    return partitions if isinstance(partitions, Mapping) else None


def quantization_method(module: torch.nn.Module) -> Any:
    """Return what vLLM computes a module's weights with, its `quant_method`. None = it has none.

    With LoRA that of experts is inside a wrapper (`old_quant_method`). Where a version hides it
    elsewhere, the module's weights count as those of an unquantized module.
    """
    method = getattr(module, "quant_method", None)
    return getattr(method, "old_quant_method", method)


def is_quantizing(method: object) -> bool:
    """Return True for a quantization method whose weights are not as the checkpoint has them.

    vLLM's methods for unquantized weights share nothing but the beginning of their names. Its
    methods for KV caches derive from BaseKVCacheMethod, and have no weights. One that is not
    recognised has fewer weights than expected at worst, and its module is unread.
    """
    names = [base.__name__ for base in type(method).__mro__]
    is_plain = any(name.startswith("Unquantized") for name in names)
    return method is not None and not is_plain and "BaseKVCacheMethod" not in names


def is_lora_wrapper(module: torch.nn.Module) -> bool:
    """Return True for vLLM's wrapper that puts LoRA adapters around a layer (`base_layer`).

    A wrapper that is not recognised counts as a layer without weights, and is unread.
    """
    return "base_layer" in module._modules


def loaded_loras(runner: Any) -> Mapping[int, Any]:
    """Return the LoRAModel of each adapter that a model runner has loaded, by lora_int_id.

    `list_adapters` of its LoRA manager's `_adapter_manager`, which leaves the order in which vLLM
    evicts. Empty where one of these is missing: then requests with adapters are only computed.
    """
    manager = getattr(runner, "lora_manager", None)
    adapters = getattr(manager, "_adapter_manager", None)
    loaded: Mapping[int, Any] = adapters.list_adapters() if adapters is not None else {}
    return loaded


# Recurrent states


def state_wish(request: Any) -> int:
    """Return the tokens after which the engine is to end a step of a request. 0 = nowhere.

    `shared_prefix_boundary` of vLLM's Request: the scheduler keeps the state there. It sets the
    field from the engine's own prefix cache just before it asks a connector about the request.
    """
    return getattr(request, "shared_prefix_boundary", 0)


def can_keep_states() -> bool:
    """Return True where vLLM's requests have the wish of `keep_state_at`."""
    return "shared_prefix_boundary" in Request.__init__.__code__.co_names


def keep_state_at(request: Any, tokens: int) -> None:
    """Ask the engine to end a step of a request after `tokens` tokens, and to keep the state there.

    It reads the wish for each step that it plans. Without the field no state is kept.
    """
    if hasattr(request, "shared_prefix_boundary"):
        request.shared_prefix_boundary = tokens


# Kernels that compute wrongly


def has_wrong_drafted_states() -> bool:
    """Return True where vLLM's own CPU kernel computes the recurrent states of a step with drafts.

    That of 0.32 is wrong where a step has fewer drafts than the most. Also True where the kernel
    was not imported. False where a plugin of vLLM has put another function in its place, as that of
    a checkout does for bundled models (`tests/cpu-shims`).
    """
    kernel = getattr(sys.modules.get(DRAFTED_STATES_MODULE), "_spec_forward", None)
    return kernel is None or kernel.__module__ == DRAFTED_STATES_MODULE


def adapts_base_rows() -> bool:
    """Return True where vLLM's CPU kernel for LoRA gives an adapter to requests without one.

    That of 0.32 indexes its slots by -1, "no adapter", which is the last slot, in a step that also
    has a request with an adapter. The kernel itself is asked, with two slots and two rows. Also
    True where it cannot be asked.
    """
    from vllm.lora.layers import LoRAMapping  # noqa: PLC0415  # only for engines with LoRA
    from vllm.lora.punica_wrapper import get_punica_wrapper  # noqa: PLC0415  # the same

    rows, slots, rank, size = 2, 2, 1, 4
    given = torch.zeros(rows, size)
    try:
        wrapper = get_punica_wrapper(rows, rows, "cpu", max_loras=slots, lora_config=None)
        mapping = LoRAMapping((1, 0), (1, 0), is_prefill=True)
        wrapper.update_metadata(mapping, [1, 2], slots, size)
        inward = torch.ones(slots, 1, rank, size)
        outward = torch.ones(slots, 1, size, rank)
        inputs = torch.ones(rows, size)
        wrapper.add_lora_linear(given, inputs, (inward,), (outward,), 1.0, (size,))
    except Exception:  # noqa: BLE001  # What cannot be asked is not trusted.
        return True
    with_adapter, without = given.abs().sum(1).tolist()
    return not with_adapter or bool(without)


def rotates_in_torch(vllm_config: Any) -> bool:
    """Return True where DeepSeek's own scaled rotary embedding is used, which has no CPU kernel.

    vLLM's DeepSeek-V2 and V3 use it for every kind of scaling (0.30 to 0.33).
    """
    model = vllm_config.model_config
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    is_scaled = parameters.get("rope_type", "default") != "default"
    own = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
    return is_scaled and any(name in own for name in model.architectures)


def mixes_heads(vllm_config: Any) -> bool:
    """Return True where an engine's rotary embedding reads one head of (tokens, heads, size).

    The CPU kernel of 0.30 to 0.33 then rotates rows of heads by the positions of other tokens, so
    that the KV of a token depends on its place in the step. The layer itself is asked, as the
    configuration chooses its kernel. Also True where it cannot be asked.
    """
    from vllm.config import set_current_vllm_config  # noqa: PLC0415  # only for some CPU engines
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: PLC0415  # the same

    tokens, heads, size = 4, 2, 8
    try:
        with set_current_vllm_config(vllm_config):
            rotate = RotaryEmbedding(size, size, tokens, 10000.0, True, torch.float32)
        values = torch.arange(float(tokens * heads * size)).view(tokens, -1)
        apart = values.view(tokens, heads, size)
        flat, _ = rotate(torch.arange(tokens), values.clone(), values.clone())
        rotated, _ = rotate(torch.arange(tokens), apart.clone(), apart.clone())
    except Exception:  # noqa: BLE001  # What cannot be asked is not trusted.
        return True
    return not torch.equal(rotated.reshape(tokens, -1), flat)
