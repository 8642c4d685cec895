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
    *("vllm.envs", "vllm.platforms"),
)

choose_cpu()
# Tiny models gain nothing by threads, which wait for one another where others run.
for variable, value in {**ENGINE_ENVIRONMENT, **BUNDLED_ENVIRONMENT, **ONE_THREAD}.items():
    os.environ.setdefault(variable, value)
*_, registry, envs, platforms = map(importlib.import_module, MODULES)
# A fork looks at its model's class itself, and not in a process that imports vLLM for that.
vars(registry)["_run_in_subprocess"] = lambda inspect: inspect()
platform = platforms.current_platform
if platform.is_cpu():
    # An engine's core and its workers are forks too, where vLLM would import itself in each.
    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
if hasattr(platform, "register_triton_kernel_overrides"):
    # Every worker looks at all names of all modules for kernels to replace, for more than a second.
    # Here that is done once.
    platform.register_triton_kernel_overrides()
    type(platform).register_triton_kernel_overrides = classmethod(lambda _: None)
# Nor does it look for garbage in what was imported. An engine that ends would thaw that, and each
# of the collections after it would take a second.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
vars(gc)["freeze"] = vars(gc)["unfreeze"] = lambda: None
