"""Proofs, previews and measurements: real engines, bundled models, and replay of traces."""
