"""transformers as the engine, as it is: importing this module registers halfbyte as one of its quantisers.

    AutoModelForCausalLM.from_pretrained(dense, quantization_config=HalfbyteConfig("nf4"))   # quantise on load
    model, tokenizer = load(path)                        # dense, bitsandbytes' 4-bit format, or a GGUF file
    model.save_pretrained(target)                        # nf4 and fp4: transformers + bitsandbytes load it too

What a saved nf4 or fp4 model has in config.json is bitsandbytes' own quantization_config. transformers therefore takes
such a directory for bitsandbytes' and refuses another class of `quantization_config` beside it; to run it on halfbyte,
use `load(path)`, or `from_pretrained(path, config=read_config(path))`. Other formats are saved as halfbyte's, and load
with plain `from_pretrained` wherever this module is imported.
"""

import transformers
from packaging.version import Version

OLDEST = "5.23.0"  # before it the loader casts a dense weight to the packed layer's uint8 before it can be quantised
if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(f"halfbyte needs transformers {OLDEST} or newer, found {transformers.__version__}; upgrade it")

from .config import HalfbyteConfig  # noqa: E402
from .loading import load, read_config  # noqa: E402
from .quantizer import HalfbyteQuantizer  # noqa: E402

__all__ = ["HalfbyteConfig", "HalfbyteQuantizer", "load", "read_config"]
