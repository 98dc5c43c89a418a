"""Getting ready: every layer, every M, once."""

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.nn import QuantLinear


@pytest.fixture
def model():
    return nn.Sequential(
        QuantLinear.from_linear(nn.Linear(64, 32, bias=False), "nf4"),
        nn.ReLU(),
        QuantLinear.from_linear(nn.Linear(32, 48), "q4_0"),
    )


def test_every_layer_runs_once_for_every_m(model):
    seen = []
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.register_forward_hook(
                lambda layer, x, out: seen.append((layer.in_features, *x[0].shape, x[0].dtype))
            )
    steps = []
    assert halfbyte.prepare(model, ms=(1, 3), dtype=torch.bfloat16, progress=lambda *step: steps.append(step)) == 4
    assert seen == [(k, m, k, torch.bfloat16) for m in (1, 3) for k in (64, 32)]
    assert steps == [(i, 4) for i in (1, 2, 3, 4)]


def test_a_model_without_packed_layers_needs_nothing():
    assert halfbyte.prepare(nn.Linear(4, 4)) == 0


def test_rows_below_one_are_refused(model):
    with pytest.raises(ValueError, match="from 1 up"):
        halfbyte.prepare(model, ms=(0,))
