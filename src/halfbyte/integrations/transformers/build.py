"""A transformers model from weights that are already in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ...checkpoints import CheckpointError
from ...formats import PackedWeight
from ...nn import QuantLinear
from .config import HalfbyteConfig


def build_model(
    path: Path,
    config: Any,
    packed: Mapping[str, PackedWeight],
    dense: Mapping[str, Tensor],
    dtype: torch.dtype | str,
    **options: Any,
) -> Any:
    """A causal language model with `packed` and `dense` weights, by the names that its checkpoints have.

    It goes through `from_pretrained`, as a saved model would: that ties weights, places them and sets the rest up.
    path: where the weights are from, for messages. Raises CheckpointError where the config is of another kind of model.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(path, "config", f"{config.model_type} is no causal language model of transformers")
    tensors = dict(dense)
    for name, weight in packed.items():
        state = QuantLinear.from_packed(weight).state_dict()
        tensors |= {name.removesuffix("weight") + key: tensor for key, tensor in state.items()}
    formats = Counter(weight.format.key for weight in packed.values())
    if formats:
        config.quantization_config = HalfbyteConfig(formats.most_common(1)[0][0]).own_dict()
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, **options)
    model.config.name_or_path = str(path)
    return model
