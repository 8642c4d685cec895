"""The tiers below RAM: their contract, health and threads, promotion into RAM and demotion."""
