"""Run in vLLM's environment: a model on two tensor-parallel ranks. Prints JSON: completions, and each rank's weights.

usage: ranks.py MODEL PROMPTS ADAPTER OPTIONS

PROMPTS: a JSON list of lists of token ids, asked with and without the adapter. OPTIONS: JSON, more arguments for `LLM`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any


def shares(worker: Any) -> dict[str, Any]:
    """A digest of the fp32 values of every shard of every 4-bit layer of this rank, and what was served."""
    from halfbyte.integrations import bitsandbytes as switch
    from halfbyte.integrations.vllm_layers import layer_of

    layers = {}
    for name, parameter in worker.get_model().named_parameters():
        if hasattr(parameter, "bnb_quant_state"):
            (shard,) = layer_of(parameter, parameter.bnb_shard_offsets).shards
            states = parameter.bnb_quant_state  # in the order of the file
            parts = shard.weight.packed.dequantize().cpu().split([states[i].shape[0] for i in range(len(states))])
            layers[name.replace(".base_layer", "")] = [
                hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest() for part in parts
            ]
    status = switch.status()
    return {"layers": layers, "served": status.hits, "passed": status.misses}


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model, prompts, adapter, options = sys.argv[1:]
    lora = LoRARequest("a", 1, adapter)
    llm = LLM(
        model=model, dtype="bfloat16", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64,
        tensor_parallel_size=2, enable_lora=True, max_loras=1, max_lora_rank=8, **json.loads(options),
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=1, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    chosen = [*(None for _ in asked), *(lora for _ in asked)]
    outputs = llm.generate(asked * 2, sampling, lora_request=chosen, use_tqdm=False)
    completions = []
    for output in outputs:
        choice = output.outputs[0]
        logprobs = [table[token].logprob for token, table in zip(choice.token_ids, choice.logprobs, strict=True)]
        completions.append({"tokens": list(choice.token_ids), "logprobs": logprobs})
    print("RESULT", json.dumps({"completions": completions, "ranks": llm.collective_rpc(shares)}), flush=True)


if __name__ == "__main__":
    main()
