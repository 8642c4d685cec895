"""The connector in a worker: it carries out copy plans."""
