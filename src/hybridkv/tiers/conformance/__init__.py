"""The conformance suite of tiers, for pytest: every tier below RAM passes it."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.samples", f"{__name__}.suite")
