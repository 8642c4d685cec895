"""Live faults, and the tests that docs/REQUIREMENTS.md names for them; `python -m tests.mutations` sees them red."""
