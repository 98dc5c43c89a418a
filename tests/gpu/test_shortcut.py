"""The short way of repeated calls on a real device: streams, graphs, threads, memory that others get."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from walk import DEVICE, weight_of

from halfbyte import ops, reference
from halfbyte.device import arch_of
from halfbyte.formats import PackedWeight
from halfbyte.kernels import codebook_wgmma, kernels
from shortcut_taken import in_python

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cuda", reason="about CUDA"),
    pytest.mark.skipif(ops._shortcut is None, reason="not built or not possible here: halfbyte.kernels._shortcut"),
]
N, K = 512, 1024
KEYS = ("nf4-64", "nf4-64-nested", "q4_0", "nvfp4")


def rand(m: int, seed: int = 0) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def check(x: Tensor, weight: PackedWeight) -> Tensor:
    out = ops.linear(x, weight)
    reference.assert_within_contract(out, reference.linear(x, weight), f"{weight.format.key} M = {x.shape[0]}")
    return out


def test_the_dispatcher_is_not_passed() -> None:
    weight, x = weight_of("nf4-64", N, K), rand(1)
    check(x, weight)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        check(x, weight)
    assert "halfbyte::linear" in [event.key for event in profile.key_averages()]
    parts = list(weight.parts.values())
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            out = ops.linear_op._op(x, parts, None, weight.format.key, N, K)
            assert out.is_inference() == torch.is_inference_mode_enabled()
        reference.assert_within_contract(out, reference.linear(x, weight))
    with torch.autocast("cuda", torch.float16):
        assert ops.linear(x, weight).dtype == torch.float16


@pytest.mark.parametrize("key", KEYS)
def test_repeated_calls(key: str) -> None:
    weight = weight_of(key, N, K)
    for m in (1, 3, 8):
        x = rand(m, m)
        first = check(x, weight)
        assert not in_python(lambda: ops.linear(x, weight))  # noqa: B023
        assert torch.equal(check(x, weight), first)


def test_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """codebook_wgmma lays x out first: by a launch of its own, which the shortcut does as well."""
    if arch_of(DEVICE) != codebook_wgmma.ARCH:
        pytest.skip(f"codebook_wgmma is for {codebook_wgmma.ARCH}")
    chosen = next(kernel for kernel in kernels() if kernel.name == codebook_wgmma.STEM)
    ops._kernel.cache_clear()
    monkeypatch.setattr(ops, "plan", lambda problem: SimpleNamespace(kernel=chosen))
    try:
        for key in ("nf4-64", "nf4-64-nested"):
            weight = weight_of(key, N, K)
            for m in (9, 16, 32):
                xs = [rand(m, seed) for seed in range(3)]
                first = [check(x, weight) for x in xs]
                assert not in_python(lambda: ops.linear(xs[0], weight))  # noqa: B023
                for _ in range(20):  # the image of one call must not be written over by that of the next
                    assert all(torch.equal(ops.linear(x, weight), out) for x, out in zip(xs, first, strict=True))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    outs = [ops.linear(x, weight) for x in xs]
                for _ in range(2):
                    graph.replay()
                    assert all(torch.equal(*pair) for pair in zip(outs, first, strict=True))
    finally:
        ops._kernel.cache_clear()


def test_streams_and_weights_written_right_before() -> None:
    """A launch that starts early must not read what the kernel before it on its stream still writes."""
    weights = [weight_of("nf4-64", N, K, seed) for seed in range(2)]
    target, x = weight_of("nf4-64", N, K, 2), rand(1)
    wanted = [ops.linear(x, weight) for weight in weights]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for turn in range(50):
                for part, source in zip(target.parts.values(), weights[turn % 2].parts.values(), strict=True):
                    part.copy_(source)
                outs = [ops.linear(x, target) for _ in range(3)]
                assert all(torch.equal(out, wanted[turn % 2]) for out in outs)
        torch.cuda.synchronize()


def test_graphs() -> None:
    weight, x = weight_of("nf4-64-nested", N, K), rand(4)
    for _ in range(2):
        check(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [ops.linear(x, weight) for _ in range(3)]
    for seed in (5, 6):
        x.copy_(rand(4, seed))
        graph.replay()
        for out in outs:
            reference.assert_within_contract(out, reference.linear(x, weight), f"replay {seed}")


def test_threads_on_streams_of_their_own() -> None:
    weights = [weight_of(key, N, K) for key in KEYS]
    xs = [rand(m, m) for m in (1, 2, 8)]
    wanted = [[ops.linear(x, weight) for x in xs] for weight in weights]
    torch.cuda.synchronize()
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(100):
                    for weight, row in zip(weights, wanted, strict=True):
                        for x, expected in zip(xs, row, strict=True):
                            assert torch.equal(ops.linear(x, weight), expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_that_another_weight_gets() -> None:
    """A weight goes, and its memory is given to one with other bytes: what was known of the first must not matter."""
    x = rand(1)
    for seed in range(6):
        weight = weight_of("nf4-64", N, K, seed)
        for _ in range(3):
            check(x, weight)
        del weight
