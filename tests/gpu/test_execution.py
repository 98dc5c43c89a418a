"""How every CUDA kernel behaves among other work: in graphs, on streams, after others' writes, on another GPU."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from walk import DEVICE, KERNELS, activations, apply, fitting, rows_of, some, weight_of

import halfbyte
from halfbyte import reference
from halfbyte.formats import PackedWeight
from halfbyte.kernels import Kernel

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="about CUDA")


def served(kernel: Kernel, key: str, n: int, k: int, *ms: int) -> list[int]:
    """Those of `ms` rows of x that the kernel takes in bf16, or others; some it must."""
    rows = rows_of(kernel, key, BF16, n, k, *ms)
    assert rows
    return rows


def refill(weight: PackedWeight, other: PackedWeight) -> None:
    """The bytes of another weight of the same format and shape, at the same addresses."""
    for name, part in weight.parts.items():
        part.copy_(other.parts[name])


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("name", "key"), some(4))
def test_graph_replays_with_new_inputs_at_the_same_addresses(name: str, key: str, offset: int) -> None:
    kernel, (n, k) = KERNELS[name], fitting(key, 1536, 2048)
    weight = weight_of(key, n, k)
    for m in served(kernel, key, n, k, 1, 3, 8, 17):
        wide = activations(m, k + offset, BF16)
        x, bias = wide[:, offset:], torch.randn(n, device=DEVICE, dtype=BF16)
        out = torch.empty(m, n, dtype=BF16, device=DEVICE)
        kernel.run(x, weight, bias, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                kernel.run(x, weight, bias, out)
        for seed in (5, 6):
            wide.copy_(activations(m, k + offset, BF16, seed))
            bias.normal_()
            refill(weight, weight_of(key, n, k, seed))
            out.fill_(torch.nan)
            graph.replay()
            y = reference.linear(x, weight, bias)
            reference.assert_within_contract(out, y, f"{name} {key} M={m}, replay {seed}")


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("name", "key"), some(4))
def test_inputs_written_just_before_are_seen(name: str, key: str, captured: bool) -> None:
    """x, weight and bias are each written by the kernel right before the launch, and x is overwritten right after."""
    kernel, (n, k) = KERNELS[name], fitting(key, 4096, 4096)
    sources = [weight_of(key, n, k, seed) for seed in (1, 2)]
    m = max(served(kernel, key, n, k, 1, 2))
    xs = [activations(m, k, BF16, seed) for seed in (1, 2)]
    biases = [torch.randn(n, device=DEVICE) for _ in range(2)]
    expected = [[apply(kernel, x, source, bias) for x, bias in zip(xs, biases, strict=True)] for source in sources]
    weight, x, bias = weight_of(key, n, k, 3), xs[0].clone(), biases[0].clone()
    orders = ((x, weight, bias), (bias, x, weight), (weight, bias, x))
    outs: list[Tensor] = []
    wanted: list[Tensor] = []

    def work() -> None:
        for turn in range(12):
            i, j = turn % 2, turn // 2 % 2
            for thing in orders[turn % 3]:
                if thing is weight:
                    refill(weight, sources[i])
                elif thing is x:
                    x.copy_(xs[j])
                else:
                    bias.copy_(biases[j])
            outs.append(apply(kernel, x, weight, bias))
            x.fill_(torch.nan)
            wanted.append(expected[i][j])

    work()  # warms up
    if captured:
        torch.cuda.synchronize()
        outs.clear()
        wanted.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
    for turn, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        assert torch.equal(out, want), f"{name} {key} turn {turn}"


@pytest.mark.parametrize(("name", "key"), some(4))
def test_layers_that_follow_each_other(name: str, key: str) -> None:
    """Each layer reads what the one before it has just written; launches that overlap must wait for that."""
    kernel, (n, k) = KERNELS[name], fitting(key, 1024, 1024)
    if n != k:
        pytest.skip(f"{key} has no square layer of this size")
    layers = [weight_of(key, n, k, seed) for seed in range(6)]
    fp32 = rows_of(kernel, key, torch.float32, n, k, 1)
    dtype, (m, *_) = (torch.float32, fp32) if fp32 else (BF16, served(kernel, key, n, k, 1))
    start = activations(m, k, dtype) * 0.03

    def forward(synchronised: bool) -> Tensor:
        x = start
        for layer in layers * 5:
            x = apply(kernel, x / x.norm(), layer)
            if synchronised:
                torch.cuda.synchronize()
        return x

    wanted = forward(True)
    assert torch.isfinite(wanted).all()
    for _ in range(5):
        assert torch.equal(forward(False), wanted)


@pytest.mark.parametrize(("name", "key"), some(4))
def test_two_streams_at_once(name: str, key: str) -> None:
    kernel, (n, k) = KERNELS[name], fitting(key, 4096, 4096)
    shared = weight_of(key, n, k, 3)
    weights = [weight_of(key, n, k, seed) for seed in (1, 2)]
    xs = [activations(served(kernel, key, n, k, 1)[0], k, BF16, seed) for seed in (1, 2)]
    expected = [[apply(kernel, x, each) for each in (weight, shared)] for x, weight in zip(xs, weights, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i] += [apply(kernel, xs[i], weights[i]), apply(kernel, xs[i], shared)]
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(out, expected[i][turn % 2]) for turn, out in enumerate(outs[i]))


@pytest.mark.parametrize(("name", "key"), some(2))
def test_capture_without_a_warm_up_works_or_says_what_to_do(name: str, key: str) -> None:
    """In a process and with a cache that have never seen the kernel."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "cold_capture.py"), name, key],
        capture_output=True,
        text=True,
        timeout=45,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "key"), some(2))
def test_another_gpu_is_made_current_for_the_call(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another one were current, on a machine that has one: the operator enters a guard for x's device."""
    n, k = fitting(key, 256, 512)
    weight, x = weight_of(key, n, k), activations(1, k, BF16)
    wanted = halfbyte.linear(x, weight_of(key, n, k))  # a call seen before would ask the driver, which is not pretended
    entered = []

    def guard(device: torch.device) -> nullcontext[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: x.device.index + 1)
    monkeypatch.setattr(torch.cuda, "device", guard)
    assert torch.equal(halfbyte.linear(x, weight), wanted)
    assert entered == [x.device]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("name", "key"), some(3))
def test_the_second_gpu_while_the_first_is_current(name: str, key: str) -> None:
    (n, k), second = fitting(key, 1000, 1536), torch.device("cuda:1")
    weight = weight_of(key, n, k)
    x = activations(3, k, BF16)
    wanted = halfbyte.linear(x, weight)
    there, x_there = weight.to(second), x.to(second)
    assert torch.cuda.current_device() == 0
    for _ in range(3):  # by turns, so that neither binds what the other uses
        out = halfbyte.linear(x_there, there)
        assert out.device == second
        assert torch.equal(out.cpu(), wanted.cpu())
        assert torch.equal(halfbyte.linear(x, weight), wanted)
    assert torch.cuda.current_device() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(second):
        with torch.cuda.graph(graph):
            out = halfbyte.linear(x_there, there)
        out.fill_(torch.nan)
        graph.replay()
    assert torch.equal(out.cpu(), wanted.cpu())
