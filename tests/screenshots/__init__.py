"""Pictures of the status page and of `hybridkv top` under load; scripts/screenshots makes them."""
