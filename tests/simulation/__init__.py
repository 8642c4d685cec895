"""vLLM's scheduler and our connector and daemon on groups drawn from real layouts; `python -m tests.simulation`."""
