"""Tests of the source's structure that neither ruff nor import-linter has."""
