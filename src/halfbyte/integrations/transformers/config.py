"""HalfbyteConfig: what `from_pretrained(..., quantization_config=...)` takes and what config.json holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...formats import BlockFormat, get_format
from ...nn import BNB_FAMILIES

METHOD = "halfbyte"


@register_quantization_config(METHOD)
class HalfbyteConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Which layers to hold in 4 bits, and in which format.

    format: a family ("nf4", "fp4", "q4_0", "q4_1", "iq4_nl", "mxfp4") or a whole key ("nf4-128-nested").
    nested, blocksize: of nf4 and fp4. skip: layers to leave dense beside the output head and what is tied to the
    embeddings; names ("model.layers.0"), ends of names ("down_proj") or regular expressions. head: take the output
    head too, where it is not tied.

    Raises ValueError for an unknown format, or for `nested` or a blocksize with a format that has none.
    """

    def __init__(
        self,
        format: str = "nf4",
        nested: bool = False,
        blocksize: int = 64,
        skip: Sequence[str] | None = None,
        head: bool = False,
        **unused: Any,
    ) -> None:
        self.quant_method = METHOD
        if format in BNB_FAMILIES:
            format = f"{format}-{blocksize}" + ("-nested" if nested else "")
        elif nested or blocksize != 64:
            raise ValueError(f"'{format}' takes no `nested` or `blocksize`; only the families nf4 and fp4 do")
        self.format = get_format(format).key
        self.skip = [skip] if isinstance(skip, str) else list(skip or ())
        self.head = head
        # known once a model is loaded; a saved config tells bitsandbytes
        self.dense_modules: list[str] | None = None
        self.compute_dtype = "float32"

    @property
    def block_format(self) -> BlockFormat:
        return get_format(self.format)

    @classmethod
    def from_bitsandbytes(cls, config: Mapping[str, Any]) -> HalfbyteConfig:
        """For a checkpoint with bitsandbytes' quantization_config. Raises ValueError unless it is a 4-bit one."""
        family = config.get("bnb_4bit_quant_type", "fp4")
        if not config.get("load_in_4bit", False) or family not in BNB_FAMILIES:
            raise ValueError(
                f"a bitsandbytes checkpoint must be nf4 or fp4 (load_in_4bit), this one has {dict(config)}"
            )
        return cls(family, nested=bool(config.get("bnb_4bit_use_double_quant", False)))

    def own_dict(self) -> dict[str, Any]:
        """Everything, under transformers' name for this quantiser."""
        return {"quant_method": METHOD, "format": self.format, "skip": list(self.skip), "head": self.head}

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: bitsandbytes' config for nf4 and fp4, so that bitsandbytes loads the model too."""
        if self.block_format.name not in BNB_FAMILIES:
            return self.own_dict()
        config: dict[str, Any] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.block_format.name,
            bnb_4bit_use_double_quant=self.block_format.nested,
            bnb_4bit_compute_dtype=self.compute_dtype,
            llm_int8_skip_modules=self.dense_modules,
        ).to_dict()
        return config
