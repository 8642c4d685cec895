"""Checks of the code's structure, and the table that compares it with other projects."""
