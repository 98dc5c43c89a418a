"""halfbyte in vLLM: `pip install halfbyte` in vLLM's environment is the whole set-up.

`register` is an entry point of the group `vllm.general_plugins`, which vLLM calls in each of its processes. It puts a
loader (`vllm_loader`) in the place of bitsandbytes' own, vLLM's up to 0.27 and vllm-bnb-plugin's from 0.28 on. When
that loads a model, halfbyte serves the operators of its 4-bit layers in that process (`vllm_layers`) and counts their
calls (`vllm_report`). Models that are not in bitsandbytes' format never meet it. HALFBYTE_DISABLE=1: none of this.
"""

from __future__ import annotations

import logging
import os
from typing import Any

VARIABLE = "HALFBYTE_DISABLE"  # "1": vLLM stays as it is
FORMAT = "bitsandbytes"  # vLLM's name of the load format

logger = logging.getLogger("vllm.halfbyte")  # below vLLM's own, so that its format and level hold


def register() -> None:
    """Have vLLM load bitsandbytes models through halfbyte. May be called any number of times, in any process.

    Where that cannot be, it says why in the log: vLLM serves many models that need nothing of this.
    """
    if os.environ.get(VARIABLE) == "1":
        logger.info("halfbyte is switched off by %s=1", VARIABLE)
        return
    try:
        base = _loader_of_vllm()
    except ImportError as error:
        logger.info("halfbyte has nothing to serve in this vLLM: %s", error)
        return
    from .vllm_loader import Loading

    if issubclass(base, Loading):
        return
    from vllm.model_executor import model_loader

    # vLLM's registry is asked what it would use, and told with the function it has for that, but for its warning that
    # a loader is replaced, which is the point.
    log = logging.getLogger(model_loader.__name__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        model_loader.register_model_loader(FORMAT)(type("HalfbyteModelLoader", (Loading, base), {}))
    finally:
        log.setLevel(level)


def _loader_of_vllm() -> Any:
    """The class that loads bitsandbytes models here and now. Raises ImportError where vLLM has none."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    try:
        import vllm_bnb_plugin
    except ImportError:
        pass
    else:
        vllm_bnb_plugin.register()  # it may be called before us or after, and does nothing the second time
    try:
        return type(get_model_loader(LoadConfig(load_format=FORMAT)))
    except ValueError as error:
        raise ImportError(f"{error} (from vLLM 0.28 on, vllm-bnb-plugin brings it)") from error
