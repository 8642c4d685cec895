"""What tests and `hybridkv verify` need and the product does not: bundled models, wider random weights."""
