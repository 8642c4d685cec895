"""Pure decisions: geometry, coverage, plans, keys, request states, eviction. No clock, file, socket or tensor."""
