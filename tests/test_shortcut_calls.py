"""The short way of repeated calls on a GPU: it does what the long way does, and leaves to it what it has not seen."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from halfbyte import ops, reference
from halfbyte.counters import counts
from halfbyte.formats import PackedWeight, quantize
from halfbyte.kernels import kernels
from halfbyte.nn import QuantLinear
from pretended_gpu import PretendedGpu, connected, use

N, K = 64, 256
BF16 = torch.bfloat16
op = torch.ops.halfbyte.linear.default


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    gpu = PretendedGpu()
    use(gpu, monkeypatch)
    return gpu


class Shortcut:
    """The module, and how often it sent a call to Python."""

    def __init__(self, module: Any) -> None:
        self.module, self.in_python = module, 0


def behind_the_dispatcher() -> AbstractContextManager[object]:
    """Nothing is negated here, so this changes no result; but it is not as in a thread where nothing is switched on."""
    guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.Negative))
    return guard


@pytest.fixture(params=[nullcontext, behind_the_dispatcher])
def short(request: pytest.FixtureRequest, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shortcut]:
    long = ops.linear_on_tensors

    def counted(*arguments: Any) -> Tensor:
        short.in_python += 1
        return long(*arguments)

    monkeypatch.setattr(ops, "linear_on_tensors", counted)
    with connected(gpu, monkeypatch) as module:
        if module is None:
            pytest.skip("not built or not possible here: halfbyte.kernels._shortcut")
        short = Shortcut(module)
        library = torch.library.Library("halfbyte", "IMPL")  # type: ignore[no-untyped-call]
        library.impl("linear", module.linear, "CPU")
        with request.param():
            yield short
        library._destroy()


def make(key: str = "nf4-64", seed: int = 0) -> PackedWeight:
    return quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(seed)), key)


def rand(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return op(x, list(weight.parts.values()), bias, weight.format.key, N, K)


def twice(short: Shortcut, call: Callable[[], Tensor], expected: Tensor) -> None:
    """The second call must be right and not go through Python."""
    first = call()
    before = short.in_python
    second = call()
    assert short.in_python == before, "the shortcut did not know it"
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    assert second.is_contiguous()
    reference.assert_within_contract(second, expected)


@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested", "fp4-128", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_repeated_calls_are_right_and_do_not_reach_python(short: Shortcut, key: str, dtype: torch.dtype) -> None:
    weight = make(key)
    for m in (1, 3, 8):
        x = rand(m, K, dtype=dtype, seed=m)
        for bias in (None, rand(N, dtype=dtype, seed=9), rand(N, dtype=torch.float32, seed=9)):
            twice(short, lambda: call(x, weight, bias), reference.linear(x, weight, bias))  # noqa: B023


@pytest.fixture
def by_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that takes two launches, also for layers as small as these."""
    chosen = next(kernel for kernel in kernels() if kernel.name == "codebook_wgmma")
    monkeypatch.setattr(ops, "plan", lambda problem: SimpleNamespace(kernel=chosen))


@pytest.mark.usefixtures("by_wgmma")
@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested", "fp4-128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_launches(short: Shortcut, gpu: PretendedGpu, key: str, dtype: torch.dtype) -> None:
    """Of more rows of x: a kernel that lays them out for the one that multiplies."""
    weight = make(key)
    counts.reset()
    for m in (9, 16, 17, 32):
        x = rand(m, K, dtype=dtype, seed=m)
        for bias in (None, rand(N, dtype=torch.float32, seed=9)):
            twice(short, lambda: call(x, weight, bias), reference.linear(x, weight, bias))  # noqa: B023
    assert counts.totals()[0] == {"linear": {"codebook_wgmma": {"9-64": 16}}}
    assert len(gpu.images) == len(gpu.launches) == 16
    assert all(image.early for image in gpu.images), "it reads nothing that is written right before, but x, and waits"
    assert [launch.early for launch in gpu.launches] == [False] + [True] * 15
    wide = rand(9, K + 8, dtype=dtype)[:, :K]
    twice(short, lambda: call(wide, weight), reference.linear(wide.contiguous(), weight))


@pytest.mark.usefixtures("by_wgmma")
def test_two_launches_on_odd_addresses_and_with_errors(short: Shortcut, gpu: PretendedGpu) -> None:
    weight, x = make(), rand(16, K)
    call(x, weight)
    shifted = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    before = short.in_python
    reference.assert_within_contract(call(shifted, weight), reference.linear(x, weight))
    assert short.in_python == before + 1
    for errors in ([1], [1, 0]):  # of the first, and of the second launch; the last is the next
        gpu.errors = list(errors)
        with pytest.raises(RuntimeError, match=r"codebook_wgmma Config.*launch failed with CUDA_ERROR_INVALID_VALUE"):
            call(x, weight)
        assert gpu.errors == []
    twice(short, lambda: call(x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("shape", [(K,), (1, 1, K), (2, 3, K), (5, K)])
def test_any_leading_dimensions(short: Shortcut, shape: tuple[int, ...]) -> None:
    weight, x = make(), rand(*shape)
    twice(short, lambda: call(x, weight), reference.linear(x, weight))
    assert call(x, weight).shape == (*shape[:-1], N)


def test_rows_apart_and_a_column_of_codes(short: Shortcut) -> None:
    weight, wide = make(), rand(4, 2 * K)
    twice(short, lambda: call(wide[:, :K], weight), reference.linear(wide[:, :K].contiguous(), weight))
    codes, absmax = weight.parts.values()
    column = codes.view(-1, 1)
    x = rand(1, K)
    twice(short, lambda: op(x, [column, absmax], None, "nf4-64", N, K), reference.linear(x, weight))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "unaligned rows": lambda x: torch.cat([x, x[:, :1]], 1)[:, :K],
    "every other column": lambda x: torch.stack([x, -x], -1).reshape(x.shape[0], -1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "permuted leading dimensions": lambda x: x.view(3, 2, K).transpose(0, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_other_views_of_x_go_to_python(short: Shortcut, name: str) -> None:
    weight = make()
    x = VIEWS[name](rand(6, K))
    call(x.contiguous(), weight)
    before = short.in_python
    for _ in range(2):
        reference.assert_within_contract(call(x, weight), reference.linear(x.contiguous(), weight))
    assert short.in_python == before + 2


def test_a_strided_bias_and_a_bias_in_other_memory(short: Shortcut) -> None:
    weight, x, wide = make(), rand(1, K), rand(2 * N)
    for bias in (wide[:N], wide[N:], wide[::2], wide.float()[N:]):
        for _ in range(2):
            reference.assert_within_contract(call(x, weight, bias), reference.linear(x, weight, bias))


def test_another_current_device_goes_to_python(short: Shortcut, gpu: PretendedGpu) -> None:
    weight, x = make(), rand(1, K)
    call(x, weight)
    gpu.current_device = 1
    before = short.in_python
    call(x, weight)
    assert short.in_python == before + 1


def test_errors_are_those_of_python(short: Shortcut, gpu: PretendedGpu) -> None:
    weight, x = make(), rand(1, K)
    codes, absmax = weight.parts.values()
    for _ in range(2):
        call(x, weight, rand(N))
    refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, "must have 256 columns", (rand(1, K - 1), [codes, absmax], None, "nf4-64", N, K)),
        (TypeError, "x must be float32", (x.double(), [codes, absmax], None, "nf4-64", N, K)),
        (ValueError, "'codes'.*shape", (x, [codes[:-1], absmax], None, "nf4-64", N, K)),
        (TypeError, "'codes'.*uint8", (x, [codes.view(torch.int8), absmax], None, "nf4-64", N, K)),
        (ValueError, "'codes'.*shape", (x, [codes.view(N, -1), absmax], None, "nf4-64", N, K)),
        (
            ValueError,
            "'absmax'.*not contiguous",
            (x, [codes, absmax.as_strided((N * K // 64,), (0,))], None, "nf4-64", N, K),
        ),
        (ValueError, "'codes'.*shape", (x, [codes, absmax], None, "nf4-64", N - 1, K)),
        (ValueError, "2 parts", (x, [codes], None, "nf4-64", N, K)),
        (ValueError, "bias must have shape", (x, [codes, absmax], rand(N - 1), "nf4-64", N, K)),
        (TypeError, "bias must be", (x, [codes, absmax], rand(N, dtype=torch.float16), "nf4-64", N, K)),
        (ValueError, "unknown 4-bit format", (x, [codes, absmax], None, "nf5", N, K)),
        (ValueError, "columns", (x, [codes, absmax], None, "nf4-64", K, N)),
    ]
    for error, message, arguments in refused:
        with pytest.raises(error, match=message):
            op(*arguments)
    call(x, weight, rand(N))
    gpu.errors.append(1)
    before = short.in_python
    with pytest.raises(RuntimeError, match=r"codebook_mma Config.*launch failed with CUDA_ERROR_INVALID_VALUE"):
        call(x, weight, rand(N))
    assert short.in_python == before, "that was the shortcut's launch"


def test_a_weight_that_changes_under_way(short: Shortcut) -> None:
    weight, fresh, x = make(), make(seed=1), rand(1, K)
    parts = list(weight.parts.values())
    wanted = reference.linear(x, fresh)
    for _ in range(2):
        reference.assert_within_contract(call(x, weight), reference.linear(x, weight))
    for part, new in zip(parts, fresh.parts.values(), strict=True):
        part.copy_(new)
    reference.assert_within_contract(call(x, weight), wanted)
    for part in parts:
        part.data = part.data.clone()  # other memory in the same objects, as Module.to does
    twice(short, lambda: call(x, weight), wanted)
    parts[0].data = parts[0].data[1:]
    with pytest.raises(ValueError, match="must have shape"):
        call(x, weight)


def test_the_same_codes_under_two_descriptions(short: Shortcut) -> None:
    """The one with other scales is another weight, and each call is what it says."""
    weight, x = make(), rand(1, K)
    codes, absmax = weight.parts.values()
    doubled = PackedWeight(weight.format, weight.shape, {"codes": codes, "absmax": 2 * absmax})
    for _ in range(3):
        reference.assert_within_contract(call(x, doubled), reference.linear(x, doubled))
        reference.assert_within_contract(call(x, weight), reference.linear(x, weight))
    x_wide = rand(1, 2 * K)
    wide = PackedWeight(weight.format, (N // 2, 2 * K), weight.parts)
    for _ in range(2):
        out = op(x_wide, [codes, absmax], None, "nf4-64", N // 2, 2 * K)
        reference.assert_within_contract(out, reference.linear(x_wide, wide))
    reference.assert_within_contract(call(x, weight), reference.linear(x, weight))


def test_a_weight_goes_when_its_tensors_do(short: Shortcut, gpu: PretendedGpu) -> None:
    weight, x = make(), rand(1, K)
    call(x, weight)
    checked = ops.checked_weight(x, list(weight.parts.values()), "nf4-64", N, K)
    assert checked._handle is not None
    views = [weakref.ref(view) for view in checked.packed.parts.values()]
    gpu.weights.clear()
    del weight, checked
    gc.collect()
    assert not any(view() is not None for view in views), "the shortcut would keep their memory"


def test_it_starts_early_only_where_the_weight_has_stayed_as_it_was(short: Shortcut, gpu: PretendedGpu) -> None:
    """The rule of launch.Launcher.settled, for launches of the shortcut; the first goes through Python, and counts."""
    weight, x = make(), rand(1, K)
    for _ in range(4):
        call(x, weight)
    assert [launch.early for launch in gpu.launches] == [False, True, True, True]
    weight.codes.copy_(make(seed=1).codes)
    call(x, weight)
    weight.parts["absmax"].mul_(2)
    call(x, weight)
    call(x, weight)
    assert [launch.early for launch in gpu.launches[4:]] == [False, False, True]
    gpu.stream = 8
    call(x, weight)
    call(x, weight)
    assert [launch.early for launch in gpu.launches[7:]] == [False, True], "it may not have waited for what wrote it"
    gpu.stream, gpu.capturing = 9, True
    call(x, weight)
    assert gpu.launches[9].early, "what writes it in a graph was captured, and would have been seen"
    assert [launch.stream for launch in gpu.launches[6:]] == [0, 8, 8, 9]
    assert short.in_python == 1


def test_a_weight_of_inference_tensors_never_starts_early(short: Shortcut, gpu: PretendedGpu) -> None:
    with torch.inference_mode():
        weight = make()
        x = rand(1, K)
        for _ in range(4):
            out = call(x, weight)
    assert short.in_python == 1
    assert out.is_inference()
    assert not any(launch.early for launch in gpu.launches)


def test_calls_are_counted_in_both_ways(short: Shortcut) -> None:
    weight = make()
    counts.reset()
    for m in (1, 1, 1, 4, 4):
        call(rand(m, K), weight)
    assert counts.totals()[0] == {"linear": {"codebook_mma": {"1": 3, "2-8": 2}}}
    counts.reset()
    assert counts.totals()[0] == {}
    call(rand(1, K), weight)
    assert counts.totals()[0] == {"linear": {"codebook_mma": {"1": 1}}}


def test_calls_are_counted_under_the_operator_that_they_came_by(short: Shortcut) -> None:
    weight, x = make(), rand(1, K)
    call(x, weight)
    checked = ops.checked_weight(x, list(weight.parts.values()), "nf4-64", N, K)
    counts.reset()
    for operator, calls in (("gemm_4bit", 3), ("gemv_4bit", 2), ("linear", 1), ("another", 1)):
        for _ in range(calls):
            reference.assert_within_contract(checked.multiply(x, None, operator), reference.linear(x, weight))
    served = {"gemm_4bit": 3, "gemv_4bit": 2, "linear": 1, "another": 1}
    assert counts.totals()[0] == {name: {"codebook_mma": {"1": calls}} for name, calls in served.items()}


def test_gradients_go_their_way(short: Shortcut) -> None:
    weight = make()
    x = rand(2, K, dtype=torch.float32).requires_grad_()
    bias = torch.nn.Parameter(rand(N, dtype=torch.float32))
    with torch.no_grad():
        twice(short, lambda: call(x, weight, bias), reference.linear(x.detach(), weight, bias.detach()))
        assert not call(x, weight).requires_grad
    out = call(x, weight)
    out.sum().backward()
    assert x.grad is not None
    exact = torch.ones(2, N, dtype=torch.float64) @ weight.dequantize(torch.float64)
    assert reference.relative_error(x.grad, exact) < reference.FP32_LIMIT


def test_several_threads(short: Shortcut) -> None:
    weights = [make(seed=seed) for seed in range(3)]
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(60):
                weight, x = weights[turn % 3], rand(1 + turn % 4, K, seed=seed * 100 + turn)
                reference.assert_within_contract(call(x, weight), reference.linear(x, weight))
        except BaseException as error:
            wrong.append(error)

    counts.reset()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(counts.totals()[0]["linear"]["codebook_mma"].values()) == 240


def python_calls(work: Callable[[], object]) -> list[str]:
    """The functions written in Python that run, all but the innermost of this test."""
    seen: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen[1:]


def test_the_path_of_a_repeated_call_stays_thin(short: Shortcut, gpu: PretendedGpu) -> None:
    """Python that runs in a call: a microsecond is eight calls of functions. The pretended driver's own is left out."""
    weight, x = make("nf4-64-nested"), rand(1, K)
    parts, layer = list(weight.parts.values()), QuantLinear.from_packed(weight)
    limits: list[tuple[Callable[[], object], int]] = [
        (lambda: op(x, parts, None, "nf4-64-nested", N, K), 1),
        (lambda: ops.linear(x, weight), 3),
        (lambda: layer(x), 6),
    ]
    with torch.inference_mode():
        for work, limit in limits:
            for _ in range(3):
                work()
            before = len(gpu.launches)
            calls = python_calls(work)
            first = next(i for i, name in enumerate(calls) if "_device" in name)
            assert len(gpu.launches) == before + 1
            assert first <= limit, calls[:first]
