"""Proofs, previews and measurements: real engines, bundled models, and the suite of every tier."""
