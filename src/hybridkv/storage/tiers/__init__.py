"""Tiers below RAM: base.py is the contract, a module for each kind."""
