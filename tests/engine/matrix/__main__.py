"""`python -m tests.engine.matrix [CASE...]`: see tests.engine.matrix.arms."""

import importlib
import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    importlib.import_module("tests.engine.imported")
    sys.exit(importlib.import_module("tests.engine.matrix.arms").main())
