"""transformers as the engine, as it is: importing this module registers halfbyte as one of its quantisers.

    AutoModelForCausalLM.from_pretrained(dense, quantization_config=HalfbyteConfig("nf4"))   # quantise on load
    model, tokenizer = load(path)                        # dense, bitsandbytes' 4-bit format, or a GGUF file
    model.save_pretrained(target)                        # nf4 and fp4: transformers + bitsandbytes load it too

What a saved nf4 or fp4 model has in config.json is bitsandbytes' own quantization_config. transformers therefore takes
such a directory for bitsandbytes' and refuses another class of `quantization_config` beside it; to run it on halfbyte,
use `load(path)`, or `from_pretrained(path, config=read_config(path))`. Other formats are saved as halfbyte's, and load
with plain `from_pretrained` wherever this module is imported.
"""

from .config import HalfbyteConfig
from .loading import load, read_config
from .quantizer import HalfbyteQuantizer

__all__ = ["HalfbyteConfig", "HalfbyteQuantizer", "load", "read_config"]
