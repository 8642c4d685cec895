"""Faults in the code, and the tests that docs/REQUIREMENTS.md names as those that notice them."""
