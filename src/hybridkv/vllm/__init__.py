"""What is known of vLLM apart from this cache: layouts, identity, what can be served, metrics."""
