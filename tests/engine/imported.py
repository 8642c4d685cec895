"""What engines import, imported once, in a process that forks engines.

It is imported before torch and vLLM, which read some variables when they are imported.
"""

import atexit
import gc
import importlib
import os

from hybridkv.lab.engine_process import ENGINE_ENVIRONMENT
from hybridkv.lab.models import BUNDLED_ENVIRONMENT
from tests.avx2 import choose_cpu
from tests.seeds import ONE_THREAD

MODULES = (
    *("pytest", "hybridkv.lab.runner", "hybridkv.connector.connector", "vllm.v1.worker.cpu_worker"),
    *("vllm.model_executor.model_loader.dummy_loader", "vllm.model_executor.models.registry"),
)

choose_cpu()
# Tiny models gain nothing by threads, which wait for one another where others run.
for variable, value in {**ENGINE_ENVIRONMENT, **BUNDLED_ENVIRONMENT, **ONE_THREAD}.items():
    os.environ.setdefault(variable, value)
*_, registry = map(importlib.import_module, MODULES)
# A fork looks at its model's class itself, and not in a process that imports vLLM for that.
vars(registry)["_run_in_subprocess"] = lambda inspect: inspect()
# Nor does it look for garbage in what was imported.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
