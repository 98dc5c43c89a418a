"""Layers of one input in one launch: which are found, what stays, and that nothing is handed to the wrong call."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import halfbyte
from halfbyte import reference
from halfbyte.integrations import bitsandbytes as switch
from halfbyte.integrations.join import Joined, JoinedLinear
from halfbyte.integrations.one_input import called_on_one
from halfbyte.kernels.cpu import library
from kernel_samples import random_weight

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no library of CPU kernels here"),
    pytest.mark.usefixtures("bitsandbytes_off"),
]
K = 128
SIZES = {"q_proj": 192, "k_proj": 64, "v_proj": 96}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Attention(nn.Module):
    def __init__(self, make, sizes=SIZES):
        super().__init__()
        for seed, (name, n) in enumerate(sizes.items()):
            setattr(self, name, make(n, K, seed))

    def forward(self, x):
        query = self.q_proj(x).relu()
        key = self.k_proj(x)
        return torch.cat([query, key, self.v_proj(x)], dim=-1)


class OneByOne(Attention):
    """The same, with an x of its own for each layer."""

    def forward(self, x):
        query, key, value = x.clone(), x.clone(), x.clone()
        return torch.cat([self.q_proj(query).relu(), self.k_proj(key), self.v_proj(value)], dim=-1)


def dense(n, k, seed, bias=True, dtype=torch.bfloat16):
    layer = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(rand(n, k, seed=seed))
        if bias:
            layer.bias.copy_(rand(n, seed=seed + 10))
    return layer.eval().requires_grad_(False)


def quantised(format="nf4", **options):
    return lambda n, k, seed: halfbyte.QuantLinear.from_linear(dense(n, k, seed, **options), format)


def of_bitsandbytes(nested=False, bias=False, dtype=torch.bfloat16):
    bnb = pytest.importorskip("bitsandbytes")

    def make(n, k, seed):
        layer = bnb.nn.LinearNF4(k, n, bias=bias, compute_dtype=dtype, compress_statistics=nested)
        layer.load_state_dict(dense(n, k, seed, bias).state_dict())
        return layer.to(dtype).to("cpu").eval()

    return make


def octets(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for name, t in model.state_dict().items()}


def memory(model: nn.Module) -> int:
    tensors = [part for layer in model.children() for part in layer.packed.parts.values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def joined(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Joined)]


def calls() -> int:
    count = switch.status().hits
    switch.reset_counters()
    return count


def exact(model, x):
    """The model in float64, rounded where a layer rounds."""
    parts = [reference.linear(x, layer.packed, layer.bias) for layer in model.children()]
    return parts[0].relu(), *parts[1:]


def check(model, x):
    """Every layer's output within the contract."""
    out = model(x).split(list(SIZES.values()), dim=-1)
    for got, wanted in zip(out, exact(model, x), strict=True):
        reference.assert_within_contract(got, wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", [quantised, of_bitsandbytes])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_launch_and_the_bytes_stay(make, bias, dtype):
    model = Attention(make(bias=bias, dtype=dtype))
    wanted, objects = octets(model), [*model.parameters(), *model.buffers()]
    kinds, small = (
        [type(layer) for layer in model.children()],
        memory(copy.deepcopy(model)) if make is quantised else None,
    )
    assert halfbyte.optimize(model) == 3
    assert joined(model) == list(SIZES)
    assert small in (None, memory(model)), "a second copy"
    assert model.k_proj.weight.untyped_storage().data_ptr() == model.q_proj.weight.untyped_storage().data_ptr()
    with torch.inference_mode():
        for m in (1, 3, 64):
            calls()
            check(model, rand(m, K, dtype=dtype, seed=m))
            assert calls() == 1, m
        check(model, rand(2, 5, K, dtype=dtype))
    assert octets(model) == wanted
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert halfbyte.optimize(model) == 3
    with torch.inference_mode():
        check(model, rand(2, K, dtype=dtype))
    assert halfbyte.restore(model) == 3
    assert [type(layer) for layer in model.children()] == kinds
    assert octets(model) == wanted
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert len({layer.weight.untyped_storage().data_ptr() for layer in model.children()}) == 3
    assert not any("_halfbyte_join" in vars(layer) for layer in model.children())


def of_format(key, k, n, seed):
    return halfbyte.QuantLinear.from_packed(random_weight(key, n, k, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("key", ["nf4-64", "fp4-128", "q4_0", "q4_1", "iq4_nl", "q4_k", "mxfp4"])
def test_formats(key):
    model = Attention(lambda n, _, seed: of_format(key, 512, n, seed))
    assert halfbyte.optimize(model) == 3
    with torch.inference_mode():
        calls()
        check(model, rand(2, 512, dtype=torch.bfloat16))
        assert calls() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda n, k, seed: of_format("gptq-32", K, n, seed),  # N lies within a row of words
        lambda n, k, seed: of_format("nf4-64", 100, n + 1, seed),  # blocks lie across the end of a weight
        lambda n, k, seed: of_format("nf4-64", K, n + seed, seed),  # bytes that kernels could not begin at
        lambda n, k, seed: of_format("nf4-64-nested", 512, n, seed),  # each has an offset of its own
        lambda n, k, seed: of_format(["nf4-64", "nf4-32", "fp4-64"][seed], K, n, seed),
        lambda n, k, seed: dense(n, k, seed),
    ],
    ids=["words", "blocks", "alignment", "nested", "different", "dense"],
)
def test_weights_that_stay_apart(make):
    model = Attention(make)
    before = octets(model)
    with pytest.raises(ValueError, match=r"nothing to do in this model: it has no .* of one input"):
        halfbyte.optimize(model)
    assert not joined(model)
    assert octets(model) == before


def test_nested_scales_of_one_offset():
    """Statistics that can be laid side by side: whole outer blocks, one offset, one table."""
    model = Attention(lambda n, k, seed: of_format("nf4-64-nested", 256 * 64, 32 * (seed + 1), seed))
    for layer in (model.k_proj, model.v_proj):
        layer.nested_offset.copy_(model.q_proj.nested_offset)
        layer.nested_quant_map.copy_(model.q_proj.nested_quant_map)
    wanted = octets(model)
    x = rand(2, 256 * 64, dtype=torch.bfloat16)
    assert halfbyte.optimize(model) == 3
    with torch.inference_mode():
        calls()
        for got, exactly in zip(model(x).split([32, 64, 96], dim=-1), exact(model, x), strict=True):
            reference.assert_within_contract(got, exactly)
        assert calls() == 1
    assert octets(model) == wanted


def test_those_alike_are_joined():
    model = Attention(lambda n, k, seed: of_format(["q4_0", "nf4", "nf4"][seed], K, n, seed))
    assert halfbyte.optimize(model) == 2
    assert joined(model) == ["k_proj", "v_proj"]
    with torch.inference_mode():
        check(model, rand(2, K, dtype=torch.bfloat16))


def test_separate_inputs_are_not_joined():
    model = OneByOne(quantised())
    with pytest.raises(ValueError, match="nothing to do"):
        halfbyte.optimize(model)


class Methods:
    def same(self, x):
        return self.a(x) + self.b(x)

    def others(self, x, y):
        a = self.a(x)
        return a + self.b(y), self.c(y)

    def assigned(self, x):
        a = self.a(x)
        x = x + 1
        return a + self.b(x)

    def in_place(self, x):
        a = self.a(x)
        x.add_(1)
        return a + self.b(x)

    def item(self, x):
        a = self.a(x)
        x[0] = 1
        return a + self.b(x)

    def twice(self, x):
        return self.a(x) + self.b(x) + self.a(x)

    def branches(self, x, wide):
        a = self.a(x)
        return a + self.b(x) if wide else a + self.c(x)

    def in_one_branch(self, x, wide):
        if wide:
            return self.a(x) + self.b(x)
        return self.c(x)

    def options(self, x):
        return self.a(x, 1) + self.b(x)

    def later(self, x):
        a, b = self.a(x), self.b(x)
        x = a + b
        return self.c(x)


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("same", ["ab"]), ("others", ["bc"]), ("assigned", []), ("in_place", []), ("item", []), ("twice", []),
        ("branches", []), ("in_one_branch", ["ab"]), ("options", []), ("later", []),
    ],
)  # fmt: skip
def test_what_is_called_on_one_variable(method, found):
    assert sorted("".join(sorted(names)) for names in called_on_one(getattr(Methods(), method))) == found


def test_what_has_no_source():
    scope: dict = {}
    exec("def forward(self, x):\n    return self.a(x) + self.b(x)", scope)
    assert called_on_one(scope["forward"]) == ()
    assert called_on_one(len) == ()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_go_to_calls_with_that_very_x(mode):
    model, apart = Attention(quantised()), Attention(quantised())
    halfbyte.optimize(model)
    x, other = rand(2, K, dtype=torch.bfloat16), rand(2, K, dtype=torch.bfloat16, seed=1)
    with mode():
        for _ in range(2):
            model.q_proj(x)
            for layer, twin in zip(model.children(), apart.children(), strict=True):
                assert torch.equal(layer(other), twin(other))
                assert torch.equal(layer(x), twin(x))
    with torch.no_grad():
        model.q_proj(x)
        x.mul_(2)
        assert torch.equal(model.k_proj(x), apart.k_proj(x)), "x was changed since"


def test_gradients_and_many_rows_run_one_by_one():
    model, apart = Attention(quantised()), Attention(quantised())
    halfbyte.optimize(model)
    x, twin = (rand(2, K, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    for each, tensor in ((model, x), (apart, twin)):
        each.k_proj.bias.requires_grad_()
        calls()
        each(tensor).sum().backward()
        assert calls() == 3
    assert torch.equal(x.grad, twin.grad)
    assert torch.equal(model.k_proj.bias.grad, apart.k_proj.bias.grad)
    with torch.no_grad():
        calls()
        model(rand(65, K, dtype=torch.bfloat16))
        assert calls() == 3


@pytest.mark.parametrize("make", [quantised, of_bitsandbytes])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_whole_and_once(make, backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    model, apart = Attention(make()), Attention(make())
    halfbyte.optimize(model)
    halfbyte.prepare(model, ms=(1, 2))
    with torch.inference_mode():
        model.q_proj(rand(2, K, dtype=torch.bfloat16))  # its result waits for calls that never come
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.inference_mode():
        for seed in range(3):
            x = rand(2, K, dtype=torch.bfloat16, seed=seed)
            calls()
            out = compiled(x)
            assert calls() == 1
            assert torch.equal(out, model(x))
        assert counter.frame_count == 1
        graph = counter.graphs[0].graph
        assert sum("halfbyte.linear" in str(node.target) for node in graph.nodes) == 1
        layer = model.k_proj
        if make is quantised:  # a merge puts another weight in its place: compiled anew
            layer.weight = nn.Parameter(layer.weight.data.flip(0), requires_grad=False)
            assert not joined(model)
            apart.k_proj.weight.data.copy_(layer.weight.data)
            calls()
            assert torch.equal(compiled(x), apart(x))
            assert counter.frame_count == 2


def test_compiled_code_takes_the_joined_weights_as_parameters():
    """A CUDA graph would copy other inputs for every replay."""
    from torch._dynamo.testing import EagerAndRecordGraphs

    torch.compiler.reset()
    backend = EagerAndRecordGraphs()
    model = Attention(quantised(bias=True))
    halfbyte.optimize(model)
    with torch.inference_mode():
        torch.compile(model, backend=backend, fullgraph=True)(rand(2, K, dtype=torch.bfloat16))
    static = [
        bool(node.meta["tensor_dict"].get("_dynamo_static_input_type"))
        for node in backend.graphs[0].graph.find_nodes(op="placeholder")
    ]
    assert sorted(static) == [False, True, True, True]  # x; codes, scales and bias


def test_moves_replacements_and_casts_set_them_apart():
    model = Attention(quantised())
    halfbyte.optimize(model)
    model.to("cpu")
    model.eval()
    assert len(joined(model)) == 3, "nothing moved"
    model.half()  # the bias moves
    assert not joined(model)
    with torch.inference_mode():
        check(model, rand(2, K, dtype=torch.float16))
    assert halfbyte.optimize(model) == 3
    model.v_proj.weight.data = model.v_proj.weight.data.flip(0)
    x = rand(2, K, dtype=torch.float16)
    with torch.inference_mode():
        check(model, x)
    assert not joined(model)
    halfbyte.optimize(model)
    model.load_state_dict(Attention(quantised(dtype=torch.float16)).state_dict(), assign=True)
    assert not joined(model)
    halfbyte.optimize(model)
    model.load_state_dict(Attention(quantised(dtype=torch.float16)).state_dict())  # copied into the buffer
    assert len(joined(model)) == 3
    with torch.inference_mode():
        calls()
        check(model, x)
        assert calls() == 1
    model.to("meta")
    assert not joined(model)


def test_copies_pickles_and_checkpoints(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = Attention(quantised())
    halfbyte.optimize(model)
    x = rand(2, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        wanted = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), wanted)
            twin.q_proj.absmax.zero_()
            twin.q_proj.bias.data.zero_()
            assert not twin(x)[:, : SIZES["q_proj"]].any(), "its own memory"
            assert torch.equal(model(x), wanted)
            assert halfbyte.optimize(twin) == 3
            assert not twin(x)[:, : SIZES["q_proj"]].any()
            assert halfbyte.restore(twin) == 3
            assert not joined(twin)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    for state in (torch.load(file), safetensors.load_file(tmp_path / "model.safetensors")):
        fresh = Attention(lambda n, k, seed: halfbyte.QuantLinear(k, n, format="nf4", dtype=torch.bfloat16))
        fresh.load_state_dict(state)
        with torch.inference_mode():
            assert torch.equal(fresh(x), wanted)


def test_models_on_the_memory_of_another():
    """As the benchmark's arms: what lies side by side already is joined where it is."""
    model = Attention(quantised())
    memo = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    halfbyte.optimize(model)
    twin = copy.deepcopy(model, memo)
    address = model.q_proj.weight.data_ptr()
    assert halfbyte.optimize(twin) == 3
    assert twin.q_proj.weight.data_ptr() == address
    assert len(joined(model)) == 3
    x = rand(2, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(model(x), twin(x))
        assert len(joined(model)) == 3


def test_threads():
    """Each call's result is that of its own x, whoever else calls."""
    model, apart = Attention(quantised()), Attention(quantised())
    halfbyte.optimize(model)
    xs = [rand(2, K, dtype=torch.bfloat16, seed=seed) for seed in range(4)]

    def work(x):
        with torch.inference_mode():
            wanted = apart(x)
            return all(torch.equal(model(x), wanted) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, xs))


def test_adapters():
    """A layer with LoRA has a call of its own, the others stay joined; a merged weight is seen."""
    peft = pytest.importorskip("peft")
    model = Attention(of_bitsandbytes())
    plain = copy.deepcopy(model)
    halfbyte.optimize(model)
    model.is_loaded_in_4bit = True  # as transformers says so, which PEFT asks
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model).eval()
    x = rand(2, K, dtype=torch.bfloat16)
    lora = adapted.q_proj
    delta = lora.lora_B["default"].weight @ lora.lora_A["default"].weight * lora.scaling["default"]

    def right():
        out = adapted(x).float()
        q, k, v = (reference.linear(x, layer.packed) for layer in plain_packed)
        wanted = torch.cat([(q + x.double() @ delta.double().t()).relu(), k, v], dim=-1)
        assert (out - wanted).norm() < 0.01 * wanted.norm()

    halfbyte.optimize(plain)
    plain_packed = list(plain.children())
    with torch.inference_mode():
        right()  # PEFT's own forward, over the joined base
        assert halfbyte.optimize(adapted) == 3
        assert joined(adapted) == ["k_proj", "v_proj"]
        switch.reset_counters()
        right()
        assert switch.status().hits == 2
        assert switch.status().served.keys() == {"linear", "linear_adapters"}
    lora.merge()
    with torch.inference_mode():
        q = reference.linear(x, lora.base_layer.packed).relu()
        reference.assert_within_contract(adapted(x)[:, : SIZES["q_proj"]], q)


def test_a_merge_below_a_join_sets_it_apart():
    peft = pytest.importorskip("peft")
    model = Attention(of_bitsandbytes())
    halfbyte.optimize(model)
    model.is_loaded_in_4bit = True  # as transformers says so, which PEFT asks
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model).eval()
    before = adapted.k_proj.weight.data_ptr()
    adapted.q_proj.merge()
    assert not joined(adapted)
    assert adapted.k_proj.weight.data_ptr() == before
    x = rand(2, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        q = reference.linear(x, adapted.q_proj.base_layer.packed).relu()
        reference.assert_within_contract(adapted(x)[:, : SIZES["q_proj"]], q)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_llama_generates_the_same(backend):
    """transformers' attention and MLP: four launches a layer instead of seven."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("transformers")
    from transformers import CompileConfig

    from halfbyte.lab import generate

    torch.compiler.reset()
    model = generate.build("tiny", torch.device("cpu"), torch.bfloat16, nested=False)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    if backend is not None:
        options["compile_config"] = CompileConfig(mode=None, backend=backend)
        options["compile_config"]._compile_all_devices = True
    ids = torch.arange(8).view(2, 4)
    tokens, counts = [], []
    for each in (generate.twin(model), generate.twin(model)):
        assert halfbyte.optimize(each) == 14
        if tokens:
            for layer in each.modules():
                if isinstance(layer, Joined):
                    layer.__dict__["_halfbyte_join"][0].split()
        calls()
        tokens.append(each.generate(ids, **options))
        counts.append(calls())
    assert torch.equal(*tokens)
    assert counts == [6 * 2 * 4, 6 * 2 * 7]
    assert not isinstance(each.model.layers[0].mlp.up_proj, JoinedLinear)
