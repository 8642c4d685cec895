"""The connector in the scheduler: lookups, loads and stores of every request."""
