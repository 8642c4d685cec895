"""Wishes for recurrent states where prompts part: which boundary a request's steps next end at.

The engine has room for one wish of a request. It ends a step there, keeps the state, and offers it
to be stored as any other. The next wish takes its place with the plan of that step::

    wishes 2816, 5632      steps  |-------2816|-------5632|---7000 = prompt
                           wish    2816        5632        -
"""

from collections.abc import Sequence

from hybridkv.connector.scheduler.listeners import Listener, Step
from hybridkv.connector.scheduler.requests import RequestRegistry, TrackedRequest
from hybridkv.core.junctions import tokens_of_cost, worth_keeping
from hybridkv.core.speed import Speed
from hybridkv.core.state_boundaries import recurrent_groups
from hybridkv.vllm.seams import keep_state_at, state_wish


class Junctions(Listener):
    """The wishes of all requests that have some."""

    def __init__(self, requests: RequestRegistry) -> None:
        geometry = requests.geometry
        self._requests = requests
        self._chunk_tokens = geometry.chunk_tokens
        states = recurrent_groups(geometry)
        sizes = [group.block_bytes * geometry.parts(group) for group in states]
        self._state_bytes = sum(sizes) * geometry.nodes
        self._boundaries: dict[str, Sequence[int]] = {}
        """The boundaries of a request that its steps have not passed, in tokens, ascending."""

    def on_offer(self, tracked: TrackedRequest, start: int, prefill: Speed, loading: Speed) -> None:
        """The engine is about to plan a request from its token `start` on.

        It has just set the wish to what its own prefix cache knows, which is one more boundary.
        The speeds are those of computing, in tokens, and of loads, in bytes.
        """
        answer, request = tracked.lookup.answer, tracked.request
        if answer is None or not answer.junctions or not self._state_bytes:
            return
        cost = tokens_of_cost(self._state_bytes, prefill, loading)
        ours = [chunks * self._chunk_tokens for chunks in answer.junctions]
        ours = worth_keeping([at for at in ours if at > start], start, cost)
        self._boundaries[request.request_id] = sorted({*ours, state_wish(request)})
        self._wish(tracked, start)

    def on_step_planned(self, step: Step, now: float) -> None:
        """Move the wishes of requests whose steps have passed theirs."""
        scheduled = step.output.num_scheduled_tokens
        for request_id in [*self._boundaries]:
            tracked, tokens = self._requests.by_id.get(request_id), scheduled.get(request_id, 0)
            if tracked is None:
                del self._boundaries[request_id]
            elif tokens:
                self._wish(tracked, tracked.request.num_computed_tokens + tokens)

    def _wish(self, tracked: TrackedRequest, computed: int) -> None:
        request_id = tracked.request.request_id
        ahead = [at for at in self._boundaries[request_id] if at > computed]
        if ahead:
            self._boundaries[request_id] = ahead
            keep_state_at(tracked.request, ahead[0])
        else:
            del self._boundaries[request_id]
