"""`python -m tests.unit.vllm.describe_reasons [--write]`: tables of docs/supported.md.

They say what is done where vLLM does not use its own prefix cache, and where a hit skips more than
KV. What is between `<!-- table: NAME -->` and `<!-- end -->` is made here.
"""

import sys
from collections.abc import Callable, Mapping

from hybridkv.vllm.prefix_caching import REASONS
from hybridkv.vllm.proven import OLDEST
from hybridkv.vllm.step_outputs import OUTPUTS
from tests.documents import DOCS, filled, print_or_write, table

DOCUMENT = DOCS / "supported.md"


def document() -> str:
    """Returns docs/supported.md as it should be."""
    return filled(DOCUMENT.read_text(), TABLES)


def _places() -> str:
    rows = [
        [
            f"`{reason.module}`, `{reason.function}`"
            + (f" (since {reason.since})" if reason.since != OLDEST else ""),
            reason.reason,
            reason.answer,
            reason.why,
        ]
        for reason in REASONS
    ]
    return table(["place in vLLM", "reason", "what is done", "why"], rows)


def _outputs() -> str:
    rows = [
        [
            ", ".join(f"`{name}`" for name in output.fields.split()),
            output.case or "all",
            output.answer,
            output.why,
        ]
        for output in OUTPUTS
    ]
    return table(["field of `ModelRunnerOutput`", "which", "what is done", "why"], rows)


TABLES: Mapping[str, Callable[[], str]] = {"places": _places, "outputs": _outputs}


if __name__ == "__main__":
    sys.exit(print_or_write(DOCUMENT, document(), __doc__))
