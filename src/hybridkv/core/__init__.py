"""Pure decisions, from geometry to tier URLs: no clock, file, socket or tensor is used here."""
