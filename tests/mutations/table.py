"""Every fault. tests/REQUIREMENTS.md names those that show that an item is held by a test."""

from tests.mutations import copies, daemon, engine, identity
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (*engine.FAULTS, *identity.FAULTS, *copies.FAULTS, *daemon.FAULTS)
"""In the order of the subjects, which is that of the page."""
