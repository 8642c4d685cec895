"""The versions of vLLM that are served. It can be read where vLLM is not installed."""

PROVEN = {
    "0.30": "the engine tests on its CPU build, without LFM2 and n-gram drafts; the simulation",
    "0.31": "the engine tests on its CPU build, without LFM2; the simulation",
    "0.32": "all tests on its CPU build",
    "0.33": "the simulation; there is no CPU build of it yet",
}
"""What was run, by the minor version of vLLM. No other is served."""
TAILS_VERSION = "0.32"
"""The only version whose hits inside a block were proven with the connector."""
STAGED = ("0.32", "0.33")
"""The versions that were proven with several stages of a pipeline."""
SHARED_SIZES = ("0.32", "0.33")
"""The versions on which engines of other tensor parallel sizes may share (vllm.shards)."""
OLDEST = min(PROVEN)  # Those before it cannot report a load that failed.
