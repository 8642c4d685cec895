"""A connector that caches nothing: what a decode step costs by vLLM's own part of any connector."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base


class IdleConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Every hook that vLLM asks for does nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        """Return an empty plan."""
        return base.KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold no block of the request."""
        return False, None
