"""Real engines with the connector, for prompts of a known length."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridkv.lab.engine_process import CONNECTOR, EngineProcess
from hybridkv.lab.models import bundled_arguments, bundled_environment, bundled_models


def connected_engine(
    model: str,
    socket_path: str,
    directory: Path,
    *options: str,
    settings: Mapping[str, object],
    role: str = "kv_both",
    log: str = "engine.log",
    **shape: Any,
) -> EngineProcess:
    """Returns an engine of a bundled model, not started yet, whose log is in the directory, as
    `log`.

    `options` are further ones of vLLM's command line, `settings` those of the connector, and
    `shape` fields of the model's configuration. Its prompts have `max_position_embeddings` tokens.
    """
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "hybridkv.connector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "server": f"unix://{socket_path}",
            "audit": "off",
            "lookup_timeout_ms": 20_000,
            **settings,
        },
    }
    arguments = [
        f"--model={bundled_models()[model]}",
        *bundled_arguments(model),
        f"--max-model-len={shape['max_position_embeddings']}",
        f"--hf-overrides={json.dumps(shape)}",
        f"--kv-transfer-config={json.dumps(transfer)}",
        *options,
    ]
    log_path, environment = directory / log, bundled_environment(model)
    return EngineProcess(arguments, log_path, lambda text: None, environment)
