"""The operators: right, differentiable, compilable, and clear about what they refuse."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfbyte import ops, reference
from halfbyte.formats import PackedWeight, get_format, quantize
from halfbyte.kernels import Problem
from halfbyte.kernels.cpu import library
from halfbyte.nn import QuantLinear
from halfbyte.ops import linear
from halfbyte.plan import plan

FORMATS = ("nf4", "nf4-64-nested", "fp4-128", "q4_0", "q4_1", "iq4_nl", "mxfp4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
N, K = 48, 160  # large enough for the planner to take a real kernel, and blocks of 64 cross rows
op = torch.ops.halfbyte.linear.default
grad_op = torch.ops.halfbyte.linear_grad.default


def make(format: str = "nf4", n: int = N, k: int = K) -> PackedWeight:
    return quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)), format)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_contract(format: str, dtype: torch.dtype) -> None:
    weight, bias = make(format), rand(N, dtype=dtype, seed=1)
    for m in (1, 5, 70):
        x = rand(m, K, dtype=dtype, seed=m)
        reference.assert_within_contract(linear(x, weight, bias), reference.linear(x, weight, bias), f"M = {m}")


def test_the_problems_here_are_for_the_real_kernel() -> None:
    """The torch fallback takes any strides: tests on it would prove little."""
    if library() is None:
        pytest.skip("no library of CPU kernels here")
    for format in FORMATS:
        assert plan(Problem(get_format(format), torch.float32, 1, N, K)).kernel.name == "cpu_linear"


@pytest.mark.parametrize("shape", [(K,), (0, K), (1, K), (3, 0, K), (2, 3, K), (2, 1, 3, K)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    weight, x = make(), rand(*shape)
    out = linear(x, weight)
    assert out.shape == (*shape[:-1], N)
    reference.assert_within_contract(out, reference.linear(x, weight))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, -x], -1).reshape(x.shape[0], -1)[:, ::2],
    "unaligned": lambda x: torch.cat([x[:1, :1].reshape(-1), x.reshape(-1)])[1:].view(x.shape),
    "inside a wider matrix": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "permuted leading dimensions": lambda x: x.view(3, 2, -1).transpose(0, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_x(name: str) -> None:
    view = VIEWS[name](rand(6, K))
    weight = make()
    assert torch.equal(linear(view, weight), linear(view.contiguous(), weight))
    reference.assert_within_contract(linear(view, weight), reference.linear(view, weight))


def test_an_expanded_row_and_a_strided_bias() -> None:
    weight, x, bias = make(), rand(1, K).expand(4, K), rand(2 * N)[::2]
    out = linear(x, weight, bias)
    reference.assert_within_contract(out, reference.linear(x, weight, bias))
    assert torch.equal(out[0], out[3])


@pytest.mark.parametrize(("n", "k"), [(1, 64), (5, 1), (1, 1), (7, 3420), (3, 3421)])
def test_sizes_of_one_and_blocks_across_rows(n: int, k: int) -> None:
    """3,420 is no multiple of 64: a layer that users of bitsandbytes meet."""
    for format in ("nf4", "nf4-64-nested"):
        weight, x = make(format, n, k), rand(4, k)
        slack = 1e-6 * float(weight.scales().max())
        reference.assert_within_contract(linear(x, weight), reference.linear(x, weight), slack=slack)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_in_fp32_is_added_before_rounding(dtype: torch.dtype) -> None:
    weight, x, bias = make(), rand(3, K, dtype=dtype), rand(N) + 1 / 3
    out = linear(x, weight, bias)
    assert out.dtype == dtype
    reference.assert_within_contract(out, reference.linear(x, weight, bias))


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_against_float64(format: str) -> None:
    weight = make(format)
    x, bias = rand(2, 5, K).requires_grad_(), rand(N, seed=1).requires_grad_()
    exact_x, exact_bias = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    linear(x, weight, bias).pow(2).sum().backward()
    (exact_x @ weight.dequantize(torch.float64).t() + exact_bias).pow(2).sum().backward()
    for got, exact in ((x.grad, exact_x.grad), (bias.grad, exact_bias.grad)):
        assert got is not None
        assert exact is not None
        assert reference.relative_error(got, exact) < reference.FP32_LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_x_is_rounded_once(dtype: torch.dtype) -> None:
    weight, x = make(n=400, k=64), rand(3, 64, dtype=dtype).requires_grad_()
    grad = rand(3, 400, dtype=dtype, seed=2)
    linear(x, weight).backward(grad)
    exact = grad.double() @ weight.dequantize(torch.float64)
    assert x.grad is not None
    reference.assert_within_contract(x.grad, exact)


def test_second_order_gradient() -> None:
    weight, x = make(), rand(2, K).requires_grad_()
    dense = weight.dequantize()
    (first,) = torch.autograd.grad(linear(x, weight).pow(3).sum(), x, create_graph=True)
    first.pow(2).sum().backward()
    exact = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad((exact @ dense.double().t()).pow(3).sum(), exact, create_graph=True)
    first.pow(2).sum().backward()
    assert x.grad is not None
    assert exact.grad is not None
    assert reference.relative_error(x.grad, exact.grad) < 1e-5


def test_no_gradient_where_none_is_wanted() -> None:
    weight, bias = make(), rand(N).requires_grad_()
    linear(rand(2, K), weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((N,), 2.0))
    with torch.no_grad():
        assert not linear(rand(2, K).requires_grad_(), weight, bias).requires_grad
    with torch.inference_mode():
        assert linear(rand(2, K), weight).is_inference()


@pytest.mark.parametrize("format", ["nf4-64-nested", "q4_1"])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(format: str, grad: bool) -> None:
    weight = make(format)
    parts, bias = list(weight.parts.values()), rand(N).requires_grad_(grad)
    for x in (rand(3, K), rand(2, 3, K, dtype=torch.bfloat16), rand(K, 4).t(), rand(K)):
        torch.library.opcheck(op, (x.requires_grad_(grad), parts, bias, weight.format.key, N, K))
    torch.library.opcheck(grad_op, (rand(2, 3, N).requires_grad_(grad), parts, weight.format.key, N, K))


def test_compiles_whole_with_any_number_of_rows() -> None:
    weight, bias = make("nf4-64-nested"), rand(N).requires_grad_()

    def step(x: Tensor) -> Tensor:
        return torch.relu(linear(x, weight, bias))

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 2, 9):
        x, same = rand(m, K).requires_grad_(), rand(m, K).requires_grad_()
        out, eager = compiled(x), step(same)
        assert torch.equal(out, eager)
        out.sum().backward()
        eager.sum().backward()
        assert torch.equal(x.grad, same.grad)


def test_compiles_with_inductor() -> None:
    weight = make()
    compiled = torch.compile(lambda x: linear(x * 2, weight) + 1, fullgraph=True)
    with torch.no_grad():
        for x in (rand(3, K), rand(3, 2 * K)[:, :K]):
            assert torch.allclose(compiled(x), linear(x * 2, weight) + 1, rtol=1e-6)


def test_fake_and_meta_tensors() -> None:
    weight = make()
    out = linear(rand(2, 3, K).to("meta"), weight.to("meta"))
    assert (out.shape, out.device.type) == ((2, 3, N), "meta")
    with torch._subclasses.FakeTensorMode() as mode:
        parts = [mode.from_tensor(part) for part in weight.parts.values()]
        fake = op(torch.empty(2, K, dtype=torch.bfloat16), parts, None, weight.format.key, N, K)
    assert isinstance(fake, torch._subclasses.FakeTensor)
    assert (fake.shape, fake.dtype) == ((2, N), torch.bfloat16)


def test_more_weights_than_int32_counts() -> None:
    n = k = 1 << 17
    parts = [
        torch.empty(part.shape, dtype=part.dtypes[0], device="meta") for part in get_format("nf4").parts(n, k).values()
    ]
    assert op(torch.empty(2, k, device="meta"), parts, None, "nf4", n, k).shape == (2, n)


def test_lazily_negated_activations() -> None:
    """`.imag` of a conjugate is a view with a negation that its memory does not show."""
    x = torch.view_as_complex(rand(3, K, 2)).conj().imag
    assert x.is_neg()
    weight = make()
    for wanted in (x, x.detach().requires_grad_()):
        assert torch.equal(linear(wanted, weight), linear(x.resolve_neg().clone(), weight))


def test_autocast_casts_x_as_torch_does() -> None:
    weight, x, bias = make(), rand(3, K).requires_grad_(), rand(N).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    reference.assert_within_contract(out.detach(), reference.linear(x.detach().bfloat16(), weight, bias.detach()))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_vmap_is_refused() -> None:
    weight = make()
    with pytest.raises(NotImplementedError, match=r"torch\.vmap.*any leading dimensions"):
        torch.vmap(lambda x: linear(x, weight))(rand(3, K))


def replace(index: int, part: Tensor) -> list[Tensor]:
    parts = list(make().parts.values())
    parts[index] = part
    return parts


CODES, ABSMAX = make().parts.values()
REFUSED: dict[str, tuple[type[Exception], str, Tensor, list[Tensor], Tensor | None]] = {
    "x in float64": (TypeError, r"x must be float32.*float64.*cast", rand(2, K).double(), [CODES, ABSMAX], None),
    "x of integers": (TypeError, r"x must be", torch.ones(2, K, dtype=torch.int32), [CODES, ABSMAX], None),
    "x too narrow": (ValueError, r"x must have 160 columns.*\[2, 159\]", rand(2, K - 1), [CODES, ABSMAX], None),
    "x without dimensions": (ValueError, r"x must have 160 columns.*\[\]", torch.tensor(1.0), [CODES, ABSMAX], None),
    "a part missing": (ValueError, r"2 parts \['codes', 'absmax'\], got 1", rand(2, K), [CODES], None),
    "codes too short": (ValueError, r"'codes'.*shape \[3840\], got \[3839\]", rand(2, K), replace(0, CODES[1:]), None),
    "codes as a matrix": (ValueError, r"'codes'.*shape", rand(2, K), replace(0, CODES.view(N, -1)), None),
    "absmax as a column": (ValueError, r"'absmax'.*shape", rand(2, K), replace(1, ABSMAX.view(-1, 1)), None),
    "absmax in bf16": (
        TypeError, r"'absmax' of a nf4-64.*float32, got torch\.bfloat16.*cannot be undone",
        rand(2, K), replace(1, ABSMAX.bfloat16()), None,
    ),
    "absmax strided": (
        ValueError, r"'absmax'.*not contiguous.*\.contiguous\(\)",
        rand(2, K), replace(1, ABSMAX.repeat_interleave(2)[::2]), None,
    ),
    "absmax elsewhere": (ValueError, r"'absmax'.*meta.*cpu.*move", rand(2, K), replace(1, ABSMAX.to("meta")), None),
    "x elsewhere": (ValueError, r"'codes'.*cpu.*meta", rand(2, K).to("meta"), [CODES, ABSMAX], None),
    "bias too short": (
        ValueError, r"bias must have shape \[48\], got \[47\]", rand(2, K), [CODES, ABSMAX], rand(N - 1)
    ),
    "bias as a matrix": (ValueError, r"bias must have shape", rand(2, K), [CODES, ABSMAX], rand(1, N)),
    "bias in bf16 beside fp32": (
        TypeError, r"bias must be torch\.float32", rand(2, K), [CODES, ABSMAX], rand(N, dtype=torch.bfloat16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_argument_named(case: str) -> None:
    error, message, x, parts, bias = REFUSED[case]
    with pytest.raises(error, match=message):
        op(x, parts, bias, "nf4-64", N, K)


def test_refused_formats_and_weights() -> None:
    parts = [CODES, ABSMAX]
    with pytest.raises(ValueError, match="unknown 4-bit format 'nf5'"):
        op(rand(2, K), parts, None, "nf5", N, K)
    with pytest.raises(ValueError, match="at least 1"):
        op(rand(2, K), parts, None, "nf4-64", 0, K)
    with pytest.raises(ValueError, match="K must be a multiple of 32"):
        op(rand(2, 33), parts, None, "q4_0", N, 33)
    with pytest.raises(TypeError, match=r"PackedWeight, got Tensor; halfbyte\.quantize"):
        linear(rand(2, K), rand(N, K))
    with pytest.raises(ValueError, match=r"grad must have 48 columns.*\[2, 49\]"):
        grad_op(rand(2, N + 1), parts, "nf4-64", N, K)


def test_errors_reach_the_user_of_compile() -> None:
    weight = make()
    compiled = torch.compile(lambda x: linear(x, weight), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="x must have 160 columns"):
        compiled(rand(2, K + 1))


def test_parts_of_a_view_at_an_odd_byte() -> None:
    weight = make()
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), weight.codes])[1:]
    view = PackedWeight(weight.format, weight.shape, {**weight.parts, "codes": shifted})
    x = rand(3, K)
    assert torch.equal(linear(x, view), linear(x, weight))


def test_formats_by_any_of_their_keys() -> None:
    parts, x = [CODES, ABSMAX], rand(2, K)
    assert torch.equal(op(x, parts, None, "nf4", N, K), op(x, parts, None, get_format("nf4").key, N, K))


def test_the_result_is_fresh() -> None:
    weight, x = make(), rand(2, K)
    first = linear(x, weight)
    kept = first.clone()
    linear(rand(2, K, seed=9), weight)
    assert torch.equal(first, kept)


def other(weight: PackedWeight) -> PackedWeight:
    """A weight of the same format and shape with other numbers."""
    return quantize(torch.randn(weight.shape, generator=torch.Generator().manual_seed(99)), weight.format.key)


@pytest.mark.parametrize("format", ["nf4", "nf4-64-nested", "q4_0"])
def test_a_weight_that_changes_under_way(format: str) -> None:
    """Checked tensors are known again by object, address and shape: none of these changes may go unnoticed."""
    weight, x = make(format), rand(2, K)
    parts, fresh = list(weight.parts.values()), list(other(weight).parts.values())
    before, wanted = op(x, parts, None, format, N, K), op(x, fresh, None, format, N, K)
    assert not torch.equal(before, wanted)
    for part, new in zip(parts, fresh, strict=True):
        part.copy_(new)
    assert torch.equal(op(x, parts, None, format, N, K), wanted)
    for part in parts:
        part.data = part.data.clone()  # other memory in the same objects, as Module.to does
    fresh[0].copy_(weight.codes)
    assert torch.equal(op(x, parts, None, format, N, K), wanted)
    parts[0].data = parts[0].data[1:]
    with pytest.raises(ValueError, match="must have shape"):
        op(x, parts, None, format, N, K)


def test_the_same_tensors_under_another_description() -> None:
    """Two shapes with as many bytes, and a format with the same parts: each call is checked as it is meant."""
    weight, x = make("nf4", 64, 64), rand(2, 64)
    parts = list(weight.parts.values())
    op(x, parts, None, "nf4-64", 64, 64)
    for format, n, k in (("nf4-64", 32, 128), ("fp4-64", 64, 64), ("nf4-64", 64, 64)):
        y = reference.linear(rand(2, k), PackedWeight(get_format(format), (n, k), weight.parts))
        reference.assert_within_contract(op(rand(2, k), parts, None, format, n, k), y)
    with pytest.raises(ValueError, match=r"'absmax'.*shape"):
        op(x, parts, None, "nf4-128", 64, 64)


@pytest.mark.parametrize("format", ["nf4", "nf4-64-nested", "q4_0"])
def test_no_memory_is_kept(format: str) -> None:
    """What is remembered of a weight goes with it, and `Module.to` leaves nothing behind."""
    entries = ops._weights._entries
    gc.collect()
    before = len(entries)
    weight = make(format)
    linear(rand(2, K), weight)
    assert len(entries) == before + 1
    del weight
    gc.collect()
    assert len(entries) == before
    layer = QuantLinear.from_packed(make(format))
    layer(rand(2, K))
    assert len(entries) == before + 1
    layer.to("meta")
    assert len(entries) == before


def test_a_change_in_place_shows_in_the_version_that_kernels_see() -> None:
    """codebook_mma starts early where a weight's versions have not changed: the views it is given must share them."""
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode, torch._C._AutoDispatchBelowAutograd):
        parts = list(make("nf4-64-nested").parts.values())
        with mode():
            op(rand(2, K), parts, None, "nf4-64-nested", N, K)
        checked = ops._weights.find(parts)
        assert checked is not None
        for part, seen in zip(parts, checked.packed.parts.values(), strict=True):
            assert seen is not part
            part.add_(0)
            assert seen._version == part._version == 1
        assert ops._weights.find(parts) is checked
