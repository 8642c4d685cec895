"""Knowledge of vLLM: layouts, identity, weights, what can be served, metrics."""
