"""The model in an engine's greeting, for commands that ask a daemon about its engines."""

from hybridkv.wire.messages import WireModel


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
