"""vLLM's scheduler, our connector and the daemon on real layouts: `python -m tests.simulation`."""
