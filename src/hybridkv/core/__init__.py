"""Pure decisions, from geometry to eviction: no clock, file, socket or tensor is used here."""
