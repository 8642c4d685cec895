"""Every fault. tests/REQUIREMENTS.md names those that show that an item is held by a test."""

from tests.mutations import (
    adapters,
    audits,
    core,
    cuda,
    daemon,
    device,
    encoded,
    hooks,
    multi,
    scheduler,
    settings,
    stats,
    weights,
    worker,
)
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *core.FAULTS,
    *settings.FAULTS,
    *hooks.FAULTS,
    *scheduler.FAULTS,
    *audits.FAULTS,
    *worker.FAULTS,
    *weights.FAULTS,
    *adapters.FAULTS,
    *device.FAULTS,
    *cuda.FAULTS,
    *daemon.FAULTS,
    *encoded.FAULTS,
    *multi.FAULTS,
    *stats.FAULTS,
)
"""In the order of the subjects, which is that of the page."""
