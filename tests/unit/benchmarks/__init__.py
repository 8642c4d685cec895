"""Tests of what benchmarks publish."""
