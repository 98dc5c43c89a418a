"""LoRA adapters in the pass over the base weight: against the float64 definition and bit by bit."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte
from adapter_samples import DTYPES, K, N, allowed, base, make_adapter
from halfbyte import adapters, ops, reference
from halfbyte.adapters import Adapter, AdapterPool, linear_with_adapters, shrink
from halfbyte.counters import counts
from halfbyte.formats import quantize
from halfbyte.kernels import cpu_linear
from halfbyte.kernels.adapters import expand_on_cpu, expand_with_torch, shrink_on_cpu, shrink_with_torch
from halfbyte.kernels.cpu import library
from halfbyte.kernels.registry import Expand
from kernel_samples import KEYS, multiples, random_weight, seeded, strided
from test_cpu_linear import guarded

LOADED = library()
ISAS = list(LOADED.isas) if LOADED else []


@st.composite
def problems(draw):
    """A layer, adapters of unequal ranks, and rows that use any of them or none."""
    seed = draw(st.integers(0, 1 << 30))
    generator = seeded(seed)
    key = draw(st.sampled_from(["nf4-64", "nf4-64-nested", "fp4-128", "q4_0", "q4_1", "iq4_nl", "mxfp4"]))
    n, k = draw(st.sampled_from([(72, 128), (5, 64), (130, 192), (64, 32)]))
    x_dtype, a_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    ranks = draw(st.lists(st.sampled_from([1, 2, 3, 8, 16, 17, 40, 64, 256]), min_size=1, max_size=5))
    listed = [make_adapter(rank, generator, a_dtype, n, k) for rank in ranks]
    m = draw(st.sampled_from([1, 2, 3, 7, 16, 33, 64]))
    index = torch.tensor(draw(st.lists(st.integers(-1, len(ranks) - 1), min_size=m, max_size=m)))
    bias = draw(st.sampled_from([None, x_dtype, torch.float32]))
    bias = None if bias is None else torch.randn(n, generator=generator).to(bias)
    return strided(m, k, x_dtype, generator), random_weight(key, n, k, generator), bias, listed, index


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_any_mix_is_within_the_contract(problem):
    x, weight, bias, listed, index = problem
    out = linear_with_adapters(x, weight, bias, listed, index)
    y = reference.linear(x, weight, bias, listed, index)
    reference.assert_within_contract(out, y, slack=allowed(x, weight, listed))
    if (index >= 0).any():  # a control: another B, for one adapter of the rows, is noticed
        used = int(index.max())
        listed[used] = dataclasses.replace(listed[used], b=listed[used].b * 1.05)
        other = reference.linear(x, weight, bias, listed, index)
        if (other - y).norm() > 0.02 * y.norm():  # where A x is not next to nothing
            with pytest.raises(AssertionError, match="relative error"):
                reference.assert_within_contract(out, other, slack=allowed(x, weight, listed))


@settings(max_examples=40, deadline=None)
@given(problem=problems(), data=st.data())
def test_bits_belong_to_the_row(problem, data):
    """They follow the row through a permutation, are the same alone, and do not know what other rows use."""
    x, weight, bias, listed, index = problem
    out = linear_with_adapters(x, weight, bias, listed, index)
    order = torch.tensor(data.draw(st.permutations(range(len(index)))))
    assert torch.equal(linear_with_adapters(x[order], weight, bias, listed, index[order]), out[order])
    row = data.draw(st.integers(0, len(index) - 1))
    alone = linear_with_adapters(x[row : row + 1], weight, bias, listed, index[row : row + 1])
    assert torch.equal(alone, out[row : row + 1])
    others = torch.tensor(
        data.draw(st.lists(st.integers(-1, len(listed) - 1), min_size=len(index), max_size=len(index)))
    )
    others[row] = index[row]
    assert torch.equal(linear_with_adapters(x, weight, bias, listed, others)[row], out[row])


@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_none_is_the_base_and_one_is_the_single_adapter(problem):
    x, weight, bias, listed, index = problem
    plain = halfbyte.linear(x, weight, bias)
    none = torch.full_like(index, -1)
    assert torch.equal(linear_with_adapters(x, weight, bias, listed, none), plain)
    assert torch.equal(linear_with_adapters(x, weight, bias), plain)
    mixed = linear_with_adapters(x, weight, bias, listed, index)
    assert torch.equal(mixed[index < 0], plain[index < 0])
    for number, each in enumerate(listed):
        single = linear_with_adapters(x, weight, bias, each)
        assert torch.equal(linear_with_adapters(x, weight, bias, listed, torch.full_like(index, number)), single)
        assert torch.equal(mixed[index == number], single[index == number])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_more_exact_than_adding_in_16_bits(dtype):
    generator = seeded(3)
    weight, adapter = base("nf4-64", 256, 256), make_adapter(16, generator, dtype, 256, 256)
    x = torch.randn(32, 256, generator=generator).to(dtype)
    y = reference.linear(x, weight, None, [adapter])
    ours = reference.relative_error(linear_with_adapters(x, weight, None, adapter), y)
    added = halfbyte.linear(x, weight) + (x @ adapter.a.t() @ adapter.b.t()) * adapter.scaling
    assert ours < 1.01 * reference.rounding_limit(y, dtype)
    assert reference.relative_error(added, y) > 1.3 * ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(dtype):
    """Beyond the rows that the CPU kernels multiply themselves: the base's bits for -1, the contract for all."""
    generator = seeded(4)
    weight, listed = base("nf4-64", 96, 192), [make_adapter(r, generator, dtype, 96, 192) for r in (16, 5)]
    bias = torch.randn(96, generator=generator)
    x = torch.randn(150, 192, generator=generator).to(dtype)
    index = torch.arange(150) % 3 - 1
    out = linear_with_adapters(x, weight, bias, listed, index)
    reference.assert_within_contract(out, reference.linear(x, weight, bias, listed, index))
    plain = halfbyte.linear(x, weight, bias)
    assert torch.equal(out[index < 0], plain[index < 0])
    assert torch.equal(linear_with_adapters(x, weight, bias, listed, torch.full((150,), -1)), plain)
    other = torch.where(index == 1, 0, index)
    assert torch.equal(linear_with_adapters(x, weight, bias, listed, other)[index < 1], out[index < 1])


@pytest.mark.skipif(LOADED is None, reason="no library of CPU kernels here")
@pytest.mark.parametrize("isa", ISAS)
def test_sums_within_a_row_do_not_overflow(isa, monkeypatch):
    """x at the end of the range and an A whose halves cancel: fp32 sums of it would be infinity minus infinity."""
    monkeypatch.setattr(type(LOADED), "isa", LOADED.isas[isa])
    weight = quantize(torch.randn(N, K, generator=seeded(25)) * 1e-3, "nf4-64")
    a = torch.ones(2, K)
    a[:, 1::2] = -1
    a[1, 0] = 2
    adapter = Adapter(a, torch.full((N, 2), 0.01), 0.5)
    for dtype in (torch.float32, torch.bfloat16):
        for m in (1, 70):
            x = torch.full((m, K), 3e37).to(dtype)
            y = reference.linear(x, weight, None, [adapter])
            assert y.isfinite().all()
            reference.assert_within_contract(linear_with_adapters(x, weight, None, adapter), y)


def test_shapes_of_x_and_index():
    generator = seeded(5)
    weight, listed = base(), [make_adapter(4, generator), make_adapter(9, generator)]
    x = torch.randn(3, 5, K, generator=generator)
    by_row = torch.randint(-1, 2, (3, 5), generator=generator)
    flat = linear_with_adapters(x.view(15, K), weight, None, listed, by_row.view(15))
    assert torch.equal(linear_with_adapters(x, weight, None, listed, by_row), flat.view(3, 5, N))
    for dtype in (torch.int64, torch.int32, torch.int8):
        each = torch.tensor([1, -1, 0], dtype=dtype)
        out = linear_with_adapters(x, weight, None, listed, each)
        reference.assert_within_contract(out, reference.linear(x, weight, None, listed, each))
        assert torch.equal(out, linear_with_adapters(x, weight, None, listed, each[:, None].expand(3, 5)))
    assert linear_with_adapters(x[0, 0], weight, None, listed, torch.tensor(1)).shape == (N,)
    for empty in (x[:0], x[:, :0]):
        out = linear_with_adapters(empty, weight, None, listed, by_row[: empty.shape[0], : empty.shape[1]])
        assert out.shape == (*empty.shape[:-1], N)
    turned = torch.randn(K, 6, generator=generator).t()  # unit stride along the rows
    assert torch.equal(
        linear_with_adapters(turned, weight, None, listed),
        linear_with_adapters(turned.contiguous(), weight, None, listed),
    )


@pytest.mark.skipif(LOADED is None, reason="no library of CPU kernels here")
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_threads_and_torch(isa):
    """Both multiplies on every instruction set, with any number of threads the same bits, and torch's beside them."""
    generator = seeded(6)
    for a_dtype in DTYPES:
        pool = AdapterPool.random(200, {"q": 130, "v": 64}, [16, 1, 70, 33], dtype=a_dtype, seed=1)
        x = strided(66, 200, torch.bfloat16, generator)
        index = torch.randint(-1, 4, (66,), generator=generator, dtype=torch.int32)
        results = []
        for threads in (1, 3):
            out = torch.full((66, pool.width), torch.nan)
            shrink_on_cpu(LOADED, LOADED.isas[isa], x, pool.a, pool.spans, index, out, threads)
            results.append(out)
        assert torch.equal(*results)
        by_torch = torch.empty(66, pool.width)
        shrink_with_torch(x, pool.a, pool.spans, index, by_torch)
        exact = torch.zeros(66, pool.width, dtype=torch.float64)
        for row, slot in enumerate(index.tolist()):
            if slot >= 0:
                first, count = pool.spans[slot].tolist()
                exact[row, :count] = pool.a[first : first + count].double() @ x[row].double()
        for out in (results[0], by_torch):
            assert reference.relative_error(out, exact) < 5e-7
        for name, n in pool.out_features.items():
            layer = pool.layer(name)
            bias = torch.randn(n, generator=generator).half()
            expand = Expand(results[0], layer.b, layer.table, layer.scalings, index)
            outs = [expand_on_cpu(LOADED, LOADED.isas[isa], expand, bias, n, threads) for threads in (1, 3)]
            assert torch.equal(*outs)
            exact = bias.double().expand(66, n).clone()
            for row, slot in enumerate(index.tolist()):
                if slot >= 0:
                    column, rank, first, stride = layer.table[slot].tolist()
                    b = layer.b[first * n : (first + stride) * n].view(n, stride)[:, :rank].double()
                    exact[row] += float(layer.scalings[slot]) * (b @ results[0][row, column : column + rank].double())
            for out in (outs[0], expand_with_torch(expand, bias, n)):
                assert reference.relative_error(out, exact) < 5e-7


@pytest.mark.skipif(LOADED is None, reason="no library of CPU kernels here")
@pytest.mark.parametrize("isa", ISAS)
def test_a_bias_of_each_row_s_own(isa):
    """What adapters add reaches the base kernels as that: every format, path and instruction set, few and many rows."""
    generator = seeded(28)

    def call(x, weight, bias):
        out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype)
        cpu_linear.multiply(LOADED, LOADED.isas[isa], x, weight, bias, out)
        return out

    for number, key in enumerate(KEYS):
        columns = multiples(key)[1]
        n, k = (40, columns * -(-256 // columns)) if columns > 1 else ((9, 33) if number % 2 else (40, 192))
        weight = random_weight(key, n, k, generator)
        dtype = DTYPES[number % 3]
        for m in (1, 9, 70):
            x = strided(m, k, dtype, generator)
            bias = torch.randn(n, generator=generator)
            same = bias.expand(m, n).contiguous()
            if m < 65:
                assert torch.equal(call(x, weight, same), call(x, weight, bias)), (key, m)
            each = torch.randn(m, n, generator=generator) * 3
            y = x.double() @ weight.dequantize(torch.float64).t() + each.double()
            label = f"{key} {isa} {dtype} M={m}"
            reference.assert_within_contract(call(x, weight, each), y, label, allowed(x, weight, []))
    special = torch.zeros(2, 256)
    special[1, 3] = torch.inf  # rows with infinities take true weights
    weight, each = random_weight("q4_1", 8, 256, generator), torch.randn(2, 8, generator=generator)
    out = call(special, weight, each)
    assert torch.equal(out[0], each[0])
    assert not out[1].isnan().any()


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages as Linux has them")
@pytest.mark.parametrize("isa", ISAS)
def test_nothing_beyond_the_tensors_is_touched(isa):
    generator = seeded(29)
    for number, (n, k, ranks) in enumerate([(65, 37, [1, 7]), (1, 1, [3]), (130, 129, [16, 33, 2])]):
        for dtype in DTYPES:
            chosen = adapters.pack([make_adapter(rank, generator, dtype, n, k) for rank in ranks], n, k)
            x = torch.randn(5, k, generator=generator).to(DTYPES[number])
            index = torch.tensor([0, -1, len(ranks) - 1, 0, -1], dtype=torch.int32)
            h = guarded(torch.zeros(5, chosen.width))
            a, spans, table, scalings = (
                guarded(part) for part in (chosen.a, chosen.spans, chosen.table, chosen.scalings)
            )
            shrink_on_cpu(LOADED, LOADED.isas[isa], guarded(x), a, spans, guarded(index), h, 1)
            assert torch.equal(h, shrink(x, chosen, index)) or isa != LOADED.isa_name
            bias = guarded(torch.randn(n, generator=generator).to(dtype))
            expand = Expand(h, guarded(chosen.b), table, scalings, guarded(index))
            out = expand_on_cpu(LOADED, LOADED.isas[isa], expand, bias, n, 1)
            again = Expand(h.clone(), chosen.b, chosen.table, chosen.scalings, index)
            assert torch.equal(out, expand_on_cpu(LOADED, LOADED.isas[isa], again, bias.clone(), n, 1))


def folds_nothing(monkeypatch) -> None:
    """As if every kernel were one that has no place for adapters, as those of GPUs, and fp32 had another one."""
    planned = ops._kernel
    fallback = next(each for each in halfbyte.kernels.kernels() if each.name == "torch_dequantize")

    def bare(spec, dtype, m, device):
        kernel = fallback if dtype == torch.float32 else planned(spec, dtype, m, device)
        return dataclasses.replace(kernel, run_adapters=None)

    monkeypatch.setattr(ops, "_kernel", bare)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_composed_where_the_kernel_folds_no_adapters(dtype, monkeypatch):
    folds_nothing(monkeypatch)
    monkeypatch.setattr(halfbyte.adapter_ops, "library", lambda: None)  # shrink by torch, too
    counts.reset()
    generator = seeded(7)
    weight, listed = base(), [make_adapter(r, generator, torch.bfloat16) for r in (16, 3, 40)]
    x = torch.randn(20, K, generator=generator).to(dtype)
    bias = torch.randn(N, generator=generator)
    index = torch.arange(20) % 4 - 1
    out = linear_with_adapters(x, weight, bias, listed, index)
    reference.assert_within_contract(out, reference.linear(x, weight, bias, listed, index))
    assert torch.equal(out[index < 0], halfbyte.linear(x, weight, bias)[index < 0])
    order = torch.randperm(20, generator=generator)
    assert torch.equal(linear_with_adapters(x[order], weight, bias, listed, index[order]), out[order])
    out_of_range = torch.where(index < 0, 3, index)  # nobody may wait to see it: no adapter
    assert torch.equal(linear_with_adapters(x, weight, bias, listed, out_of_range), out)
    single = linear_with_adapters(x, weight, bias, listed[0])
    assert torch.equal(single[index == 0], out[index == 0])
    (label,) = counts.totals()[0]["linear_adapters"]
    assert "folds no adapters" in label
    halfbyte.kernels.adapters.GATHERED_VALUES, before = 1 << 10, halfbyte.kernels.adapters.GATHERED_VALUES
    try:
        assert torch.equal(linear_with_adapters(x, weight, bias, listed, index), out)  # in many chunks of rows
    finally:
        halfbyte.kernels.adapters.GATHERED_VALUES = before


def test_a_kernel_may_decline(monkeypatch):
    planned = ops._kernel
    reason = "ranks beyond 64"

    def picky(spec, dtype, m, device):
        kernel = dataclasses.replace(planned(spec, dtype, m, device), run_adapters=lambda *call: reason)
        marked = dataclasses.replace(kernel, run=lambda x, weight, bias, out: out.fill_(7))
        return marked if dtype == torch.bfloat16 else kernel

    monkeypatch.setattr(ops, "_kernel", picky)
    counts.reset()
    weight, adapter = base(), make_adapter(65, seeded(26))
    x = torch.randn(3, K, generator=seeded(27))
    out = linear_with_adapters(x, weight, None, adapter)
    reference.assert_within_contract(out, reference.linear(x, weight, None, [adapter]))
    (label,) = counts.totals()[0]["linear_adapters"]
    assert label.endswith(f"and torch ({reason})")
    index = torch.tensor([0, -1, 0])
    out = linear_with_adapters(x.bfloat16(), weight, None, adapter, index)
    assert (out[1] == 7).all()  # the planned kernel's own bits, and for the others the sum in fp32
    y = reference.linear(x.bfloat16(), weight, None, [adapter], index)
    reference.assert_within_contract(out[index == 0], y[index == 0])


def test_the_fallback_folds_adapters(monkeypatch):
    monkeypatch.setattr(cpu_linear, "supports", lambda problem: "not now")
    kernel = next(each for each in halfbyte.kernels.kernels() if each.name == "torch_dequantize")
    monkeypatch.setattr(ops, "_kernel", lambda *problem: kernel)
    generator = seeded(8)
    weight, listed = base("q4_1"), [make_adapter(r, generator) for r in (5, 16)]
    x = torch.randn(9, K, generator=generator).bfloat16()
    index = torch.arange(9) % 3 - 1
    out = linear_with_adapters(x, weight, None, listed, index)
    reference.assert_within_contract(out, reference.linear(x, weight, None, listed, index))
    assert torch.equal(out[index < 0], halfbyte.linear(x, weight)[index < 0])


# ---- gradients and compilation


def test_gradients_are_those_of_float64():
    """Of x, A and B of each adapter, and the bias; an adapter that no row uses gets zeros."""
    generator = seeded(9)
    weight = base()
    start = torch.randn(2, 7, K, generator=generator)
    shapes = [make_adapter(rank, generator) for rank in (4, 9, 2)]
    bias = torch.randn(N, generator=generator)
    index = torch.tensor([[0, -1, 1, 1, 0, 0, -1], [1, 1, 0, -1, -1, 0, 0]])
    upstream = torch.randn(2, 7, N, generator=generator)

    def leaves(dtype):
        tensors = [start, bias, *(part for each in shapes for part in (each.a, each.b))]
        return [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors]

    ours = leaves(torch.float32)
    x, used_bias, *parts = ours
    listed = [Adapter(parts[2 * i], parts[2 * i + 1], each.scaling) for i, each in enumerate(shapes)]
    linear_with_adapters(x, weight, used_bias, listed, index).backward(upstream)
    exact = leaves(torch.float64)
    x, used_bias, *parts = exact
    y = x @ weight.dequantize(torch.float64).t() + used_bias
    for i, each in enumerate(shapes):
        mine = (index == i)[..., None]
        y = y + mine * each.scaling * (x @ parts[2 * i].t() @ parts[2 * i + 1].t())
    y.backward(upstream.double())
    for one, other in zip(ours[:-2], exact[:-2], strict=True):
        assert reference.relative_error(one.grad, other.grad) < 2e-6
    assert all(not leaf.grad.any() for leaf in ours[-2:])
    assert all(leaf.grad.any() for leaf in ours[:-2])


def test_a_second_derivative_is_refused():
    weight, adapter = base(), make_adapter(4, seeded(30))
    x = torch.randn(2, K, requires_grad=True)
    (grad,) = torch.autograd.grad(linear_with_adapters(x, weight, None, adapter).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_trains():
    """A few steps of gradient descent through the operator fit an adapter to another one."""
    generator = seeded(10)
    weight, wanted = base(), make_adapter(4, generator)
    a = (torch.randn(4, K, generator=generator) / K**0.5).requires_grad_()
    b = torch.zeros(N, 4, requires_grad=True)
    optimizer = torch.optim.Adam([a, b], lr=0.03)
    x = torch.randn(64, K, generator=generator)
    target = reference.linear(x, weight, None, [wanted]).float()
    losses = []
    for _ in range(60):
        loss = (linear_with_adapters(x, weight, None, Adapter(a, b, wanted.scaling)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend):
    torch.compiler.reset()
    generator = seeded(11)
    weight = base()
    pool = AdapterPool(K, N, slots=2, ranks=32, max_rank=16)
    for _ in range(2):
        pool.add(make_adapter(12, generator, torch.bfloat16))
    layer = pool.layer()
    x = torch.randn(5, K, generator=generator).bfloat16()
    index = torch.tensor([0, 1, -1, 1, 0])

    def run(x, index):
        return linear_with_adapters(x, weight, None, layer, index) * 2

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(x, index), run(x, index))
        pool.replace(1, make_adapter(3, generator, torch.bfloat16))  # the graph sees it, as it reads the pool's tensors
        assert torch.equal(compiled(x, index), run(x, index))
        assert torch.equal(compiled(x, index.flip(0)), run(x, index.flip(0)))


def test_compiles_with_its_backward_pass():
    torch.compiler.reset()
    generator = seeded(24)
    weight, x = base(), torch.randn(5, K, generator=generator).bfloat16()
    adapter = make_adapter(4, generator)
    a, b = adapter.a.requires_grad_(), adapter.b.requires_grad_()

    def loss(x, a, b):
        return linear_with_adapters(x, weight, None, [Adapter(a, b, 0.5)]).float().square().sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(x, a, b).backward()
    grads, a.grad, b.grad = (a.grad, b.grad), None, None
    loss(x, a, b).backward()
    assert torch.allclose(grads[0], a.grad)
    assert torch.allclose(grads[1], b.grad)


def test_the_operators_keep_torch_s_rules():
    generator = seeded(12)
    weight, adapter = base(), make_adapter(4, generator)
    chosen = adapters.pack([adapter, adapter], N, K)
    x = torch.randn(3, K, generator=generator, requires_grad=True)
    index = torch.tensor([0, -1, 1], dtype=torch.int32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        halfbyte.adapter_ops.shrink_op, (x, chosen.a, chosen.spans, index, chosen.width), test_utils=checks
    )
    h = shrink(x, chosen, index).detach()
    problem = (x, list(weight.parts.values()), None, weight.format.key, N, K)
    rest = (chosen.b, chosen.table, chosen.scalings, index)
    torch.library.opcheck(halfbyte.adapter_ops.linear_adapters_op, (*problem, h, *rest), test_utils=checks)
    both = (*problem, chosen.a, chosen.spans, chosen.width, *rest)
    torch.library.opcheck(halfbyte.adapter_ops.linear_with_adapters_op, both, test_utils=checks)


@pytest.mark.parametrize("shape", [(3, K), (2, 3, K), (0, K), (K,)], ids=str)
def test_one_operator_is_both(shape):
    """Bits and gradients of `linear_with_adapters` are those of `shrink` and the rest."""
    generator = seeded(25)
    weight = base()
    listed = [make_adapter(4, generator), make_adapter(7, generator)]
    x = torch.randn(*shape, generator=generator).bfloat16()
    index = torch.randint(-1, 2, shape[:-1], generator=generator)
    bias = torch.randn(2 * N, generator=generator)[::2]  # which kernels get a copy of
    grads = []
    for shared in (False, True):
        leaves = [each.detach().requires_grad_() for each in (x, bias, listed[0].a, listed[1].b)]
        mine = [
            Adapter(leaves[2], listed[0].b, listed[0].scaling),
            Adapter(listed[1].a, leaves[3], listed[1].scaling),
        ]
        chosen = adapters.pack(mine, N, K)
        h = shrink(leaves[0], chosen, index) if shared else None
        out = linear_with_adapters(leaves[0], weight, leaves[1], chosen, index, shrunk=h)
        out.float().square().sum().backward()
        with torch.no_grad():
            assert torch.equal(out, linear_with_adapters(x, weight, bias, listed, index))
        grads.append([each.grad for each in leaves])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_autocast_casts_x_as_torch_s_linear_does():
    generator = seeded(13)
    weight, adapter = base(), make_adapter(4, generator)
    x, bias = torch.randn(3, K, generator=generator), torch.randn(N, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear_with_adapters(x, weight, bias, adapter)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, linear_with_adapters(x.bfloat16(), weight, bias, adapter))


# ---- errors


def test_errors_say_what_was_wrong():
    weight, generator = base(), seeded(19)
    x, adapter = torch.randn(4, K), make_adapter(8, generator)
    call = linear_with_adapters

    def raises(kind, text, *args, **words):
        with pytest.raises(kind, match=text):
            call(*args, **words)

    raises(TypeError, "weight must be a PackedWeight", x, torch.zeros(N, K))
    raises(TypeError, "adapter 0 must be a halfbyte.Adapter, got tuple", x, weight, None, [(1, 2)])
    raises(ValueError, r"A must be \[rank, 128\] and B \[72, rank\]", x, weight, None, Adapter(adapter.b, adapter.a))
    raises(TypeError, "B must be float32, bfloat16 or float16", x, weight, None, Adapter(adapter.a, adapter.b.double()))
    raises(ValueError, "rank must be from 1 to 256, got 300", x, weight, None, make_adapter(300, generator))
    raises(TypeError, "index must hold integers", x, weight, None, adapter, torch.zeros(4))
    raises(
        ValueError,
        r"leading dimensions \[4\] or of the first",
        x,
        weight,
        None,
        adapter,
        torch.zeros(3, dtype=torch.long),
    )
    raises(ValueError, "72 outputs, the weight", x, base(n=40), None, adapters.pack([adapter], N, K))
    raises(ValueError, "shrunk must have shape", x, weight, None, adapter, shrunk=torch.zeros(4, 3))
    raises(ValueError, "A is on meta but x is on cpu", x, weight, None, Adapter(adapter.a.to("meta"), adapter.b))
    raises(TypeError, "bias must be", x, weight, torch.zeros(N, dtype=torch.float16), adapter)
    raises(ValueError, r"A must have shape \[any, 64\]", x[:, :64], weight, None, adapter)
    if LOADED is not None:
        wrong = torch.tensor([0, 5, -1, 0])
        raises(
            IndexError, "index must be -1 or a slot below 1, got values from -1 to 5", x, weight, None, adapter, wrong
        )
        chosen = adapters.pack([adapter], N, K)
        outside = dataclasses.replace(chosen, spans=torch.tensor([[4, 8]], dtype=torch.int32))
        raises(IndexError, "places outside their tensors", x, weight, None, outside)
        outside = dataclasses.replace(chosen, table=torch.tensor([[0, 8, 1, 8]], dtype=torch.int32))
        raises(IndexError, "places outside their tensors", x, weight, None, outside)
