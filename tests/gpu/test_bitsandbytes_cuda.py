"""bitsandbytes on halfbyte on a GPU: exact, counted, compiled, captured, trained through, and undone.

Everything is compared with float64 and with what bitsandbytes itself computes on the same tensors. transformers and
PEFT are used by one test each and may be missing.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from bitsandbytes_layers import training_step, weight_of
from halfbyte import reference
from halfbyte.integrations import bitsandbytes as switch

bnb = pytest.importorskip("bitsandbytes")
from halfbyte.integrations.linear4bit import QuantLinear4bit  # noqa: E402
from halfbyte.integrations.optimize import optimize, restore  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
N, K = 1024, 1536
ROWS = (1, 2, 3, 5, 8, 16, 33, 64)
TIME_LIMIT_S = 120.0  # of a test: some compile twice
operators = torch.ops.bitsandbytes


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    switch.disable()
    switch.reset_counters()
    torch.compiler.reset()
    yield
    switch.disable()


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def activations(m: int, k: int = K, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    x = rand(m, k, seed=seed)
    x[:, k // 3] *= 100  # as activations of real models have
    return x.to(dtype)


def layer_of(dtype=torch.bfloat16, nested=False, bias=False, family="nf4", n=N, k=K, storage=torch.uint8, seed=1):
    layer = bnb.nn.Linear4bit(
        k, n, bias=bias, compute_dtype=dtype, compress_statistics=nested, quant_type=family, quant_storage=storage
    )
    with torch.no_grad():
        layer.weight.data.copy_(rand(n, k, seed=seed) * 0.02)
        if bias:
            layer.bias.copy_(rand(n, seed=2))
    return layer.to(dtype).to(DEVICE).eval().requires_grad_(False)


def hits(operator: str = "gemm_4bit") -> int:
    return sum(count for rows in switch.status().served.get(operator, {}).values() for count in rows.values())


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_linear4bit(dtype, nested, bias):
    """Within the contract for every M, nearer to float64 than bitsandbytes, every call counted, then bits as before."""
    layer = layer_of(dtype, nested, bias)
    weight = weight_of(layer)
    with torch.inference_mode():
        inputs = [activations(m, dtype=dtype, seed=m) for m in ROWS]
        theirs = [layer(x) for x in inputs]
        with switch.enabled():
            ours = [layer(x) for x in inputs]
        for x, out, their_out in zip(inputs, ours, theirs, strict=True):
            exact = reference.linear(x, weight, layer.bias)
            reference.assert_within_contract(out, exact, f"M = {x.shape[0]}")
            error, their_error = (reference.relative_error(each, exact) for each in (out, their_out))
            assert error <= 1.001 * their_error, (x.shape[0], error, their_error)
        assert all(torch.equal(layer(x), out) for x, out in zip(inputs, theirs, strict=True))
    assert switch.status().fallbacks == {}
    assert hits() == len(ROWS)


@pytest.mark.parametrize("family", ["nf4", "fp4"])
def test_storages_shapes_and_views(family):
    for storage in (torch.uint8, torch.bfloat16, torch.float32):
        layer = layer_of(family=family, storage=storage, n=256, k=512)
        weight = weight_of(layer)
        with switch.enabled(), torch.inference_mode():
            for shape in ((512,), (1, 512), (2, 3, 512), (2, 1, 3, 512)):
                x = rand(*shape, dtype=torch.bfloat16)
                out = layer(x)
                assert out.shape == (*shape[:-1], 256)
                reference.assert_within_contract(out, reference.linear(x, weight))
            base = activations(4, 1024)
            for x in (
                base[:, :512],
                base[::2, 512:],
                base[:, ::2],
                base[:2, :512].t().contiguous().t(),
                base[:, 3:515],
            ):
                reference.assert_within_contract(layer(x), reference.linear(x, weight))
            assert layer(rand(0, 512, dtype=torch.bfloat16)).shape == (0, 256)
    assert switch.status().fallbacks == {}


def test_one_hot_rows_read_single_weights():
    layer = layer_of(n=192, k=256)
    weight = weight_of(layer)
    columns = range(0, 256, 5)
    with switch.enabled(), torch.inference_mode():
        assert reference.one_hot_probe(layer, weight, torch.bfloat16, columns).worst_ulp <= 1
        swapped = reference.swap_nibbles(weight)
        assert not reference.one_hot_probe(layer, swapped, torch.bfloat16, columns).within_contract(torch.bfloat16)
    assert hits() == 2


def test_gemv_and_dequantize():
    """gemv_4bit is served; dequantize_4bit stays bitsandbytes' on a GPU."""
    layer = layer_of()
    state, codes = layer.weight.quant_state, layer.weight.data
    before = bnb.functional.dequantize_4bit(codes, state)
    with switch.enabled():
        for m in (1, 4):
            x = activations(m)
            out = operators.gemv_4bit(x, codes, state.shape, state.absmax, state.code, state.blocksize)
            reference.assert_within_contract(out, reference.linear(x, weight_of(layer)))
        assert torch.equal(bnb.functional.dequantize_4bit(codes, state), before)
    assert hits("gemv_4bit") == 2
    assert "dequantize_4bit" not in switch.status().served


def test_many_rows_are_served_where_a_kernel_is_faster_than_decoding():
    """codebook_gemm is, for bf16 on Hopper; else bitsandbytes decodes the weight and multiplies."""
    for dtype in (torch.bfloat16, torch.float16):
        layer, x = layer_of(dtype=dtype), activations(65, dtype=dtype)
        fast = dtype == torch.bfloat16 and torch.cuda.get_device_capability() == (9, 0)
        switch.reset_counters()
        with torch.inference_mode():
            before = layer(x)
            with switch.enabled():
                out = layer(x)
        if fast:
            reference.assert_within_contract(out, reference.linear(x, weight_of(layer)))
            assert hits() == 1
            assert switch.status().fallbacks == {}
        else:
            assert torch.equal(out, before)
            assert hits() == 0
            assert sum(switch.status().fallbacks["gemm_4bit"].values()) == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("before", [False, True], ids=["compiled after", "compiled before"])
def test_compiled(mode, before):
    """`reduce-overhead` captures CUDA graphs, which keep the kernels that they were captured with."""
    layers = [layer_of(nested=True, bias=True, n=K, seed=seed) for seed in (1, 2)]
    model = nn.Sequential(layers[0], nn.GELU(), layers[1])
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.inference_mode():
        if before and mode == "default":
            compiled(activations(3))
            assert hits() == 0
        with switch.enabled():
            for seed in range(4):
                x = activations(3, seed=seed)
                out = compiled(x).clone()
                inner = nn.functional.gelu(reference.linear(x, weight_of(layers[0]), layers[0].bias))
                exact = reference.linear(inner.bfloat16(), weight_of(layers[1]), layers[1].bias)
                assert reference.relative_error(out, exact) < 4 * reference.rounding_limit(exact, torch.bfloat16)
        assert hits() >= 2
        assert switch.status().fallbacks == {}


def test_cuda_graph():
    """Replays see new inputs and weights changed in place; a weight changed right before a launch is not read early."""
    layer = layer_of(nested=True, bias=True, n=4096, k=4096)
    static = activations(4, 4096)
    with switch.enabled(), torch.inference_mode(False), torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                out = layer(static)
        assert hits() == 4
        for seed in (5, 6, 7):
            static.copy_(activations(4, 4096, seed=seed))
            if seed == 7:
                layer.weight.data.copy_(layer_of(nested=True, n=4096, k=4096, seed=9).weight.data)
            graph.replay()
            reference.assert_within_contract(
                out, reference.linear(static, weight_of(layer), layer.bias), f"seed {seed}"
            )
        for seed in range(6):  # eager, the copy right before the launch
            layer.weight.copy_(layer_of(nested=True, n=4096, k=4096, seed=10 + seed % 2).weight)
            eager = layer(static)
            reference.assert_within_contract(
                eager, reference.linear(static, weight_of(layer), layer.bias), f"turn {seed}"
            )
    assert switch.status().fallbacks == {}


def test_training_step():
    """Outputs exact; the gradients of x and of the bias are bitsandbytes' own, bit for bit."""
    layer = layer_of(nested=True, bias=True).train()
    layer.bias.requires_grad_()
    start, upstream = activations(24), rand(24, N, dtype=torch.bfloat16, seed=9)

    _, x_grad, bias_grad = training_step(layer, start, upstream)
    with switch.enabled():
        out, our_x_grad, our_bias_grad = training_step(layer, start, upstream)
    reference.assert_within_contract(out, reference.linear(start, weight_of(layer), layer.bias.detach()))
    assert torch.equal(our_x_grad, x_grad)
    assert torch.equal(our_bias_grad, bias_grad)
    assert hits() == 1


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_optimize_and_restore(nested):
    """No memory, the same objects; exact alone, beyond 64 rows too (whoever computes), compiled and captured."""
    layer = layer_of(nested=nested, bias=True)
    model, weight = nn.Sequential(layer), weight_of(layer)
    objects = (layer.weight, layer.bias, layer.weight.quant_state)
    with torch.inference_mode():
        model(activations(1))
        gc.collect()
        held = torch.cuda.memory_allocated()
        assert optimize(model) == 1
        assert torch.cuda.memory_allocated() == held
        for m in (*ROWS, 100):
            x = activations(m, seed=m)
            reference.assert_within_contract(model(x), reference.linear(x, weight, layer.bias), f"M = {m}")
        x = activations(2)
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            assert torch.equal(compiled(x).clone(), model(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        x.copy_(activations(2, seed=8))
        graph.replay()
        assert torch.equal(out, model(x))
    assert hits("linear") >= len(ROWS)
    assert isinstance(layer, QuantLinear4bit)
    assert restore(model) == 1
    assert type(layer) is bnb.nn.Linear4bit
    assert all(
        one is other for one, other in zip(objects, (layer.weight, layer.bias, layer.weight.quant_state), strict=True)
    )


def test_nothing_is_kept_of_a_model_that_goes():
    layer_of(nested=True)  # bitsandbytes keeps a table for itself from the first nested weight on
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(layer_of(nested=True, n=4096, k=4096), layer_of(n=4096, k=4096))
    optimize(model[1])
    with switch.enabled(), torch.inference_mode():
        out = model(activations(1, 4096))
        assert hits() == hits("linear") == 1
        del out
        model.to("cpu")
        gc.collect()
        assert torch.cuda.memory_allocated() <= before + 4096  # nested scales' map and such may stay with the state
        del model
        gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_bitsandbytes_available():
        pytest.skip("transformers does not see bitsandbytes (its metadata is missing)")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("dense")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def load(path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.bfloat16, device_map="auto"
    )


@pytest.mark.parametrize("optimized", [False, True], ids=["switch", "optimize"])
def test_transformers_generates(checkpoint, optimized):
    tokens = torch.tensor([[1, 2, 3, 4]], device=DEVICE)
    model = load(checkpoint)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with switch.enabled():
        if optimized:
            assert optimize(model) == 14
        eager = model.generate(tokens, **options)
        assert hits("linear" if optimized else "gemm_4bit") == 8 * 14
        compiled = model.generate(tokens, cache_implementation="static", **options)
    assert switch.status().fallbacks == {}
    assert eager.shape == compiled.shape == (1, 12)
    assert torch.equal(eager[:, :6], compiled[:, :6])  # later on logits of random weights may tie


def test_peft_adapters(checkpoint):
    """A QLoRA step has bitsandbytes' gradients nearly to rounding; outputs with an adapter are within its reach."""
    peft = pytest.importorskip("peft")
    tokens = torch.randint(512, (2, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(checkpoint), lora).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)

    def step():
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if "lora_" in name}

    loss, grads = step()
    with switch.enabled():
        our_loss, our_grads = step()
    assert hits() >= 14
    assert abs(our_loss - loss) < 0.02 * abs(loss)
    for name, grad in grads.items():
        assert reference.relative_error(our_grads[name], grad) < 0.1, name
    twin = copy.deepcopy(model).eval()
    with switch.enabled(), torch.inference_mode():
        assert optimize(twin) == 14
        assert reference.relative_error(twin(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits) < 0.02
