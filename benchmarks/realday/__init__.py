"""A day with real models: seconds to the first token, with and without the cache, published."""
