"""The model that the tests serve, and how far a server's answers are from those in float64."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from bitsandbytes_samples import in_float64, load_4bit

ADAPTERS = ("a", "b")
RANK = 8
LINEARS = 7  # of a layer; vLLM merges them into MERGED
MERGED, LAYERS = 4, 2
VOCABULARY = 320
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_checkpoint(target: Path) -> None:
    """A Llama of random weights with a byte tokenizer; head size 64, as vLLM's attention on CPUs has no smaller."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=1, pad_token_id=2, initializer_range=0.06,
    )  # fmt: skip
    dense = target / "dense"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(dense)
    load_4bit(dense, nested=True).save_pretrained(target)
    make_tokenizer(target)


def make_experts(target: Path) -> None:
    """A dense mixture of experts, for vLLM to quantise."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    make_tokenizer(target)


def make_tokenizer(target: Path) -> None:
    """Of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the quick brown fox"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(target)


def make_adapters(target: Path) -> None:
    """Adapters that change answers a lot, on every linear layer."""
    base = load(target)
    for seed, name in enumerate(ADAPTERS, start=1):
        torch.manual_seed(seed)
        lora = LoraConfig(
            r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        wrapped = get_peft_model(base, lora)
        wrapped.save_pretrained(target / name)
        base = wrapped.unload()


def load(target: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, device_map="cpu")


class Answers:
    """What base and adapters answer in float64."""

    def __init__(self, target: Path) -> None:
        self.models = {"base": in_float64(load(target))}
        for name in ADAPTERS:
            self.models[name] = in_float64(PeftModel.from_pretrained(load(target), target / name))

    def distance(self, name: str, prompt: list[int], tokens: list[int], logprobs: list[float]) -> float:
        """Root mean square by which a server's logprobs of its own tokens differ from the model's of that name."""
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            table = self.models[name](ids).logits[0].log_softmax(-1)
        exact = table[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]
        return float((torch.tensor(logprobs, dtype=torch.float64) - exact).square().mean().sqrt())
