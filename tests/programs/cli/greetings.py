"""The greeting of an engine, for commands that ask a daemon about its engines."""

from hybridkv.core.geometry import Geometry
from hybridkv.wire.messages import PROTOCOL_VERSION, Hello, WireModel, geometry_to_wire


def engine_hello(geometry: Geometry, engine_id: str = "e", model: WireModel | None = None) -> Hello:
    return Hello(
        id=1,
        version=PROTOCOL_VERSION,
        role="engine",
        engine_id=engine_id,
        namespace=b"n" * 32,
        geometry=geometry_to_wire(geometry),
        model=model,
    )


def wire_model(
    name: str,
    *,
    layers: list[int],
    step_tokens: int,
    max_model_len: int = 8192,
    kv_dtype: str = "auto",
    retention_tokens: int | None = 0,
) -> WireModel:
    return WireModel(
        name=name,
        max_model_len=max_model_len,
        kv_dtype=kv_dtype,
        layers=layers,
        retention_tokens=retention_tokens,
        step_tokens=step_tokens,
    )
