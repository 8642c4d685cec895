"""The RAM tier: slots, index, free space, eviction and tenants of one arena."""
