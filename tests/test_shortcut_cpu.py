"""The short way of repeated calls on a CPU: the long way's bits, without Python, and only where nothing differs."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from halfbyte import ops, reference
from halfbyte.counters import counts
from halfbyte.formats import PackedWeight, quantize
from halfbyte.kernels import cpu_linear
from halfbyte.kernels.cpu import library
from halfbyte.nn import QuantLinear
from shortcut_taken import in_python

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no library of CPU kernels here"),
    pytest.mark.skipif(ops._shortcut is None, reason="not built or not possible here: halfbyte.kernels._shortcut"),
]
N, K = 96, 256
BF16 = torch.bfloat16
op = torch.ops.halfbyte.linear.default


def make(key: str = "nf4-64", seed: int = 0, n: int = N, k: int = K) -> PackedWeight:
    return quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)), key)


def rand(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return op(x, list(weight.parts.values()), bias, weight.format.key, *weight.shape)


def long_way(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The kernel itself."""
    rows = x.reshape(-1, weight.shape[1])
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    cpu_linear.run(rows, weight, bias, out)
    return out.view(*x.shape[:-1], weight.shape[0])


def again(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> None:
    """A call that was made before: without Python, and with the kernel's bits."""
    call(x, weight, bias)
    assert not in_python(lambda: call(x, weight, bias))
    out = call(x, weight, bias)
    assert out.shape == (*x.shape[:-1], weight.shape[0])
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    assert torch.equal(out, long_way(x, weight, bias))


@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested", "fp4-128", "mxfp4", "q4_0", "q4_1", "iq4_nl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_repeated_calls(key: str, dtype: torch.dtype) -> None:
    weight = make(key)
    for m in (1, 3, 8, 64):
        x = rand(m, K, dtype=dtype, seed=m)
        for bias in (None, rand(N, dtype=dtype, seed=9), rand(N, dtype=torch.float32, seed=9)):
            again(x, weight, bias)
            reference.assert_within_contract(call(x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("shape", [(K,), (1, 1, K), (2, 3, K), (5, K)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    again(rand(*shape), make())


def test_views_of_x() -> None:
    weight, wide = make(), rand(6, 2 * K)
    again(wide[:, :K], weight)
    again(wide[::2, :K], weight)
    odd = wide.reshape(-1)[1 : 1 + 6 * K].view(6, K)
    again(odd, weight)
    for x in (wide[:, ::2], rand(K, 6).t(), rand(2, 3, K).transpose(0, 1)):  # no rows without a copy
        for _ in range(2):
            assert in_python(lambda: call(x, weight))  # noqa: B023
            assert torch.equal(call(x, weight), long_way(x.contiguous(), weight))


def test_more_rows_than_one_call_of_the_library_takes() -> None:
    weight, x = make(), rand(130, K, dtype=torch.float32)
    for _ in range(2):
        assert in_python(lambda: call(x, weight))
        reference.assert_within_contract(call(x, weight), reference.linear(x, weight))


def test_threads_are_torchs() -> None:
    """The number that torch has at each call, and the same bits with any."""
    weight, x = make(n=1536, k=576), rand(1, 576)
    outs, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            again(x, weight)
            outs.append(call(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_weight_that_changes_under_way() -> None:
    weight, fresh, x = make(), make(seed=1), rand(1, K)
    parts = list(weight.parts.values())
    again(x, weight)
    for part, new in zip(parts, fresh.parts.values(), strict=True):
        part.copy_(new)
    again(x, weight)
    assert torch.equal(call(x, weight), long_way(x, fresh))
    for part in parts:
        part.data = part.data.clone()  # other memory in the same objects, as Module.to does
    again(x, weight)
    parts[0].data = parts[0].data[1:]
    with pytest.raises(ValueError, match="must have shape"):
        call(x, weight)


def test_a_weight_goes_when_its_tensors_do() -> None:
    weight, x = make(), rand(1, K)
    again(x, weight)
    checked = ops.checked_weight(x, list(weight.parts.values()), "nf4-64", N, K)
    assert checked._handle is not None
    views = [weakref.ref(view) for view in checked.packed.parts.values()]
    del weight, checked
    gc.collect()
    assert not any(view() is not None for view in views), "the shortcut would keep their memory"


def test_memory_that_another_weight_gets() -> None:
    x = rand(1, K)
    for seed in range(8):
        weight = make(seed=seed)
        for _ in range(3):
            assert torch.equal(call(x, weight), long_way(x, weight))
        del weight


def test_calls_are_counted() -> None:
    weight = make()
    counts.reset()
    for m in (1, 1, 1, 4, 4):
        call(rand(m, K), weight)
    assert counts.totals()[0] == {"linear": {"cpu_linear": {"1": 3, "2-8": 2}}}
    checked = ops.checked_weight(rand(1, K), list(weight.parts.values()), "nf4-64", N, K)
    checked.multiply(rand(1, K), None, "gemv_4bit")
    assert counts.totals()[0]["gemv_4bit"] == {"cpu_linear": {"1": 1}}


def test_errors_are_those_of_python() -> None:
    weight, x = make(), rand(1, K)
    parts = list(weight.parts.values())
    again(x, weight, rand(N))
    for error, message, arguments in (
        (ValueError, "must have 256 columns", (rand(1, K - 1), parts, None, "nf4-64", N, K)),
        (TypeError, "x must be float32", (x.double(), parts, None, "nf4-64", N, K)),
        (ValueError, "bias must have shape", (x, parts, rand(N - 1), "nf4-64", N, K)),
        (TypeError, "bias must be", (x, parts, rand(N, dtype=torch.float16), "nf4-64", N, K)),
        (ValueError, "activations are on meta", (x.to("meta"), parts, None, "nf4-64", N, K)),
    ):
        with pytest.raises(error, match=message):
            op(*arguments)


def test_memory_that_runs_out() -> None:
    """What the library returns then reaches the caller as an exception, and the call is not counted."""
    weight, x = make(), rand(1, K)
    launch = cpu_linear.launch(weight, BF16, 1)
    assert launch is not None
    fails = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(lambda *call: 1)
    launch.record.linear = ctypes.cast(fails, ctypes.c_void_p).value
    handle = ops._shortcut.weight(tuple(weight.parts.values()), "nf4-64", N, K)
    counters = {"linear": counts.cell("linear", "cpu_linear", "1")}
    counts.reset()
    ops._shortcut.remember(handle, x, 1, ctypes.addressof(launch.record), True, launch, counters)
    with pytest.raises(MemoryError, match=r"a layer \[96, 256\] with M = 1"):
        ops._shortcut.multiply(handle, x, None, "linear")
    assert counts.totals()[0] == {}


def test_autocast_gradients_and_modes() -> None:
    """What the dispatcher would do with a call is done."""
    weight, x = make(), rand(2, K, dtype=torch.float32)
    again(x, weight)
    with torch.autocast("cpu", BF16):
        assert call(x, weight).dtype == BF16
    learning = x.clone().requires_grad_()
    call(learning, weight).sum().backward()
    assert learning.grad is not None
    with torch.inference_mode():
        assert call(x, weight).is_inference()
        assert not in_python(lambda: call(x, weight))
    with torch.no_grad():
        assert not call(learning, weight).requires_grad
    negated = torch.complex(x, -x).conj().imag  # holds x, and a bit that says to negate it
    assert negated.is_neg()
    assert torch.equal(call(negated, weight), call(negated.resolve_neg(), weight))


def test_compiled_code() -> None:
    weight, x = make(), rand(2, K)
    layer = QuantLinear.from_packed(weight)
    compiled = torch.compile(layer, fullgraph=True)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(compiled(x), long_way(x, weight))


def test_several_threads() -> None:
    weights = [make(seed=seed) for seed in range(3)]
    xs = [rand(m, K, seed=m) for m in (1, 2, 3, 4)]
    wanted = [[long_way(x, weight) for x in xs] for weight in weights]
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for turn in range(200):
                assert torch.equal(call(xs[turn % 4], weights[turn % 3]), wanted[turn % 3][turn % 4])
        except BaseException as error:
            wrong.append(error)

    counts.reset()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(counts.totals()[0]["linear"]["cpu_linear"].values()) == 800
