"""Repeated calls that are served in front of the dispatcher: everything that would see or change a call still does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte import ops, reference
from halfbyte.formats import PackedWeight, quantize
from halfbyte.kernels import shortcut
from pretended_gpu import PretendedGpu, connected, use

N, K = 64, 256
op = torch.ops.halfbyte.linear.default
Arguments = tuple[Tensor, list[Tensor], Tensor | None, str, int, int]


class Known:
    """A call that was seen before, and what it launches on."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu
        generator = torch.Generator().manual_seed(0)
        self.weight = quantize(torch.randn(N, K, generator=generator), "nf4-64")
        self.x = torch.randn(2, K, generator=generator).bfloat16()
        self.bias = torch.randn(N, generator=generator).bfloat16()
        self.parts = list(self.weight.parts.values())
        for _ in range(2):
            op(*self.arguments)
            op(*self.with_bias)

    @property
    def arguments(self) -> Arguments:
        return self.x, self.parts, None, self.weight.format.key, N, K

    @property
    def with_bias(self) -> Arguments:
        return self.x, self.parts, self.bias, self.weight.format.key, N, K

    def exact(self, x: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return reference.linear(self.x if x is None else x, self.weight, bias)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[Known]:
    gpu = PretendedGpu()
    use(gpu, monkeypatch)
    with connected(gpu, monkeypatch) as module:
        if module is None or op._op is not module.operate:
            pytest.skip("not built or not possible here: halfbyte.kernels._shortcut in front of the dispatcher")
        behind: list[int] = []

        def linear(*arguments: Any) -> Tensor:
            behind.append(1)
            result: Tensor = module.linear(*arguments)
            return result

        monkeypatch.setattr(ops, "_linear", linear)  # what the dispatcher gets to outside inference mode
        library = torch.library.Library("halfbyte", "IMPL")  # type: ignore[no-untyped-call]
        library.impl("linear", linear, "CPU")
        found = Known(gpu)
        found.behind = behind  # type: ignore[attr-defined]
        yield found
        library._destroy()


def passes_the_dispatcher(known: Any, call: Callable[[], object]) -> bool:
    before = len(known.behind)
    call()
    return len(known.behind) > before


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_known_call_does_not_pass_the_dispatcher(known: Known, mode: Callable[[], Any]) -> None:
    with mode():
        assert not passes_the_dispatcher(known, lambda: op(*known.arguments))
        assert not passes_the_dispatcher(known, lambda: op(*known.with_bias))
        out = op(*known.with_bias)
        assert out.is_inference() == torch.is_inference_mode_enabled()
        assert not out.requires_grad
        reference.assert_within_contract(out, known.exact(bias=known.bias))


def test_nor_does_it_in_another_thread(known: Known) -> None:
    passed: list[bool] = []
    thread = threading.Thread(target=lambda: passed.append(passes_the_dispatcher(known, lambda: op(*known.arguments))))
    thread.start()
    thread.join()
    assert passed == [False]


def test_named_and_wrong_arguments_go_to_the_dispatcher(known: Known) -> None:
    x, parts, bias, key, n, k = known.with_bias
    out = op(x, parts, bias=bias, format=key, N=n, K=k)
    reference.assert_within_contract(out, known.exact(bias=bias))
    assert torch.equal(op(x, tuple(parts), bias, key, n, k), out)
    for wrong in ((x, parts, bias, key, n), (x, parts, bias, key, n, k, 1), (x, parts, bias, key, n, "k")):
        with pytest.raises(RuntimeError, match=r"halfbyte::linear\(\)"):
            op(*wrong)
    with pytest.raises(RuntimeError, match="halfbyte::linear"):
        op(x, parts, bias, key, n, k, other=1)
    with pytest.raises(RuntimeError, match=r"halfbyte::linear\(\)"):
        op("x", parts, bias, key, n, k)


def test_modes_see_it(known: Known) -> None:
    seen: list[object] = []

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for mode in (Function, Dispatch):
        for context in (torch.inference_mode, torch.no_grad):
            with context(), mode():
                op(*known.arguments)
            assert op in seen, mode
            seen.clear()


def test_the_profiler_sees_it(known: Known) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        op(*known.arguments)
    assert "halfbyte::linear" in [event.key for event in profile.key_averages()]
    assert not passes_the_dispatcher(known, lambda: op(*known.arguments))


def test_autocast_casts(known: Known) -> None:
    with torch.autocast("cpu", torch.float16):
        assert op(*known.arguments).dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        x, *rest = known.arguments
        assert op(x.float(), *rest).dtype == torch.bfloat16
    assert op(*known.arguments).dtype == torch.bfloat16


def test_gradients_flow(known: Known) -> None:
    x, bias = known.x.clone().requires_grad_(), torch.nn.Parameter(known.bias.clone())
    for a, b in ((x, None), (known.x, bias), (x, bias)):
        _, parts, _, *rest = known.arguments
        with torch.no_grad():
            assert not passes_the_dispatcher(known, lambda: op(a, parts, b, *rest))  # noqa: B023
        out = op(a, parts, b, *rest)
        assert out.requires_grad
        out.sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full_like(bias, 4))


def test_negated_tensors_are_negated(known: Known) -> None:
    """A view that negates has the address, shape, dtype and type of what it negates."""
    x, parts, bias, *rest = known.with_bias
    assert bias is not None
    other = dict(zip(known.weight.parts, parts, strict=True)) | {"absmax": -parts[1]}
    for _ in range(2):
        out = op(torch._neg_view(x), parts, torch._neg_view(bias), *rest)  # type: ignore[attr-defined]
        reference.assert_within_contract(out, known.exact(-x, -bias))
        out = op(x, [parts[0], torch._neg_view(parts[1])], None, *rest)
        reference.assert_within_contract(out, reference.linear(x, PackedWeight(known.weight.format, (N, K), other)))
        reference.assert_within_contract(op(*known.arguments), known.exact())


def test_subclasses_have_their_say(known: Known) -> None:
    seen: list[object] = []

    class Marked(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    x, parts, bias, *rest = known.with_bias
    assert bias is not None
    marked = [part.as_subclass(Marked) for part in parts]
    for arguments in (
        (x.as_subclass(Marked), parts, bias),
        (x, [*parts[:-1], marked[-1]], bias),
        (x, parts, bias.as_subclass(Marked)),
    ):
        seen.clear()
        op(*arguments, *rest)
        assert op in seen


def test_a_trusted_subclass_is_ordinary(known: Known) -> None:
    """bitsandbytes' Params4bit, as `halfbyte.optimize` finds it in a model."""
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    import halfbyte.integrations.linear4bit  # noqa: F401 (trusts it)

    x, (codes, absmax), bias, *rest = known.with_bias
    codes = modules.Params4bit(codes, requires_grad=False, bnb_quantized=True)
    assert type(codes) is modules.Params4bit
    assert not passes_the_dispatcher(known, lambda: op(x, [codes, absmax], bias, *rest))
    reference.assert_within_contract(op(x, [codes, absmax], bias, *rest), known.exact(bias=bias))


def test_tracing_and_transforms_see_it(known: Known) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x, parts, bias, *rest = known.with_bias
    graph = make_fx(lambda x: op(x, parts, bias, *rest))(x)
    assert op in [node.target for node in graph.graph.nodes]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(op(*known.arguments)).__name__ == "FakeTensor"
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda x: op(x, parts, None, *rest))(x.unsqueeze(1))
    functional = torch.func.functionalize(lambda x: op(x, parts, bias, *rest))(x)
    reference.assert_within_contract(functional, known.exact(bias=bias))
    compiled = torch.compile(lambda x: op(x, parts, bias, *rest), fullgraph=True, backend="eager")
    for _ in range(2):
        reference.assert_within_contract(compiled(x), known.exact(bias=bias))


def test_nothing_leads_where_it_could_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No words to compare, or words that stay the same whatever is switched on: then all goes to the dispatcher."""
    _shortcut = pytest.importorskip("halfbyte.kernels._shortcut")
    for words in (None, b"0" * 16):
        monkeypatch.setattr(_shortcut, "keys", lambda: words)  # noqa: B023
        operator = SimpleNamespace(_op="its own")
        shortcut.lead(operator)
        assert operator._op == "its own"
    monkeypatch.undo()
    different = object()  # another torch may keep its implementation elsewhere
    shortcut.lead(different)


def test_the_operator_keeps_its_place_in_dicts() -> None:
    assert {op: 1}[torch.ops.halfbyte.linear.default] == 1
    assert op.name() == "halfbyte::linear"
