"""The conformance suite of tiers, for pytest: every tier below RAM passes it.

`waiting` is used without pytest too.
"""

from importlib.util import find_spec

if find_spec("pytest") is not None:
    import pytest

    pytest.register_assert_rewrite(f"{__name__}.samples", f"{__name__}.suite")
