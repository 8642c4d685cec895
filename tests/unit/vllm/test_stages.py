"""Parts of one size where the stages of a pipeline have other layers."""

import pytest
import torch

from hybridkv.core.errors import GeometryError
from hybridkv.vllm.blocks import physical
from hybridkv.vllm.stages import is_padding, padding_view, stage_padding

STAGES = [{0: 64, 1: 32, 3: 16}, {0: 96, 1: 0, 3: 16}]


def test_every_stage_is_padded_to_the_largest() -> None:
    assert stage_padding(STAGES[0], STAGES) == {0: 32}
    assert stage_padding(STAGES[1], STAGES) == {1: 32}


def test_a_stage_that_could_not_read_its_layers_is_named() -> None:
    with pytest.raises(GeometryError, match="stage 1 of the pipeline has no KV cache"):
        stage_padding(STAGES[0], [STAGES[0], None])


def test_all_blocks_of_padding_are_one() -> None:
    view = padding_view(48, 5, torch.device("cpu"))
    assert (view.shape, view.untyped_storage().nbytes()) == ((5, 48), 48)
    assert is_padding(view)
    assert is_padding(physical(view))
    assert not is_padding(torch.zeros(1, 48))
