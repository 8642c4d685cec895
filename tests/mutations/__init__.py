"""Faults in the code, and the tests that tests/REQUIREMENTS.md names as those that notice them."""
