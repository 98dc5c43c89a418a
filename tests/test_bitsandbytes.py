"""bitsandbytes' operators on halfbyte: right, counted, trainable, compilable, and undone exactly."""

from __future__ import annotations

import copy
import gc
import logging
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from bitsandbytes_layers import packed_of, training_step, weight_of
from halfbyte import reference
from halfbyte.integrations import bitsandbytes as switch
from halfbyte.kernels import kernels
from halfbyte.kernels.cpu import library

bnb = pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.skipif(library() is None, reason="no library of CPU kernels here"),
    pytest.mark.usefixtures("bitsandbytes_off"),
]
functional = bnb.functional
operators = torch.ops.bitsandbytes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=[True, False], ids=["repacking", "not repacking"])
def repacking(request, monkeypatch):
    """Whether Linear4bit believes to be on a CPU for which it repacks its weight in eval."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: request.param)
    return request.param


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(n=96, k=128, family="nf4", blocksize=64, nested=False, storage=torch.uint8, dtype=torch.bfloat16):
    return functional.quantize_4bit(
        rand(n, k, dtype=dtype), blocksize=blocksize, compress_statistics=nested, quant_type=family,
        quant_storage=storage,
    )  # fmt: skip


def layer_of(n=96, k=128, bias=True, dtype=torch.bfloat16, nested=True, family="nf4", storage=torch.uint8):
    layer = bnb.nn.Linear4bit(
        k, n, bias=bias, compute_dtype=dtype, compress_statistics=nested, quant_type=family, quant_storage=storage
    )
    with torch.no_grad():
        layer.weight.data.copy_(rand(n, k, seed=1))
        if bias:
            layer.bias.copy_(rand(n, seed=2))
    return layer.to(dtype).to("cpu")


def gemm(x: Tensor, codes: Tensor, state, bias: Tensor | None = None) -> Tensor:
    scales = (state.state2.absmax, state.absmax, state.state2.code, state.offset) if state.nested else (state.absmax,)
    return operators.gemm_4bit(x, codes, state.shape, scales[0], state.blocksize, state.quant_type, bias, *scales[1:])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize(("family", "nested"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_linear4bit_in_eval(repacking, family, nested, storage):
    """The checkpoint's bytes stay and the outputs are exact, also where bitsandbytes would repack."""
    for dtype in DTYPES:
        layer = layer_of(dtype=dtype, nested=nested, family=family, storage=storage).eval()
        weight, before = weight_of(layer), layer.weight.data.clone()
        with switch.enabled(), torch.inference_mode():
            for m in (1, 8, 64):
                x = rand(m, 128, dtype=dtype, seed=m)
                reference.assert_within_contract(layer(x), reference.linear(x, weight, layer.bias), f"M = {m}")
        assert layer.weight.data.dtype == storage
        assert torch.equal(layer.weight.data.view(torch.uint8), before.view(torch.uint8))
    result = switch.status()
    assert not result.fallbacks
    assert result.served == {"gemm_4bit": {"cpu_linear": {"1": 3, "2-8": 3, "9-64": 3}}}


@pytest.mark.parametrize("nested", [False, True])
def test_weights_repacked_before(nested):
    """What bitsandbytes repacked is put back once, and repacking it again after `disable` gives the same outputs."""
    layer = layer_of(bias=False, nested=nested).eval()
    layer.support_avx512bf16_for_cpu = True
    codes = layer.weight.data.clone()
    x = rand(4, 128, dtype=torch.bfloat16)
    layer.weight.data, state = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    repacked, scales = layer.weight.data.clone(), state.absmax.clone()
    switch.enable()
    assert torch.equal(layer.weight.data, codes)
    with torch.inference_mode():
        out = layer(x)
    reference.assert_within_contract(out, reference.linear(x, packed_of(codes, layer.weight.quant_state)))
    assert layer.state_dict()["weight.absmax"].shape == (96 * 128 // 64,)
    switch.disable()
    assert layer.support_avx512bf16_for_cpu is True
    again, state = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(again, repacked)
    assert torch.equal(state.absmax, scales)


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize(("family", "nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)])
def test_gemm_over_formats(family, nested, blocksize):
    codes, state = quantized(96, 128, family, blocksize, nested)
    weight = packed_of(codes, state)
    with switch.enabled():
        for dtype in DTYPES:
            x, bias = rand(3, 128, dtype=dtype), rand(96, dtype=dtype, seed=5)
            reference.assert_within_contract(gemm(x, codes, state, bias), reference.linear(x, weight, bias))
            columns = range(32, 96)  # as many as halfbyte takes rows of x
            probe = reference.one_hot_probe(lambda x: gemm(x, codes, state), weight, dtype, columns)
            assert probe.within_contract(dtype)
            swapped = reference.swap_nibbles(weight)
            probe = reference.one_hot_probe(lambda x: gemm(x, codes, state), swapped, dtype, columns)
            assert not probe.within_contract(dtype)
    assert switch.status().misses == 0


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 64), (33, 61), (8, 3420), (40, 3420), (7, 2)])
@pytest.mark.parametrize("nested", [False, True])
def test_odd_shapes(n, k, nested):
    codes, state = quantized(n, k, nested=nested, dtype=torch.float32)
    weight = packed_of(codes, state)
    with switch.enabled():
        for m in (1, 5):
            x = rand(m, k, seed=m)
            slack = 1e-6 * float(x.norm())  # a single output may cancel
            reference.assert_within_contract(gemm(x, codes, state), reference.linear(x, weight), slack=slack)
        plain = functional.dequantize_4bit(codes, state)
    assert torch.equal(plain, functional.dequantize_4bit(codes, state))
    assert switch.status().misses == 0


@pytest.mark.parametrize("shape", [(128,), (0, 128), (1, 128), (3, 0, 128), (2, 3, 128), (2, 1, 3, 128)])
def test_shapes_of_x(shape):
    codes, state = quantized(nested=True)
    weight, x = packed_of(codes, state), rand(*shape, dtype=torch.bfloat16)
    table = state.code
    scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    with switch.enabled():
        outputs = [gemm(x, codes, state), operators.gemv_4bit(x, codes, state.shape, scales, table, 64)]
        outputs.append(bnb.matmul_4bit(x, codes.t(), state))
        for out in outputs:
            assert out.shape == (*shape[:-1], 96)
            reference.assert_within_contract(out, reference.linear(x, weight))
    assert switch.status().misses == 0
    assert switch.status().served["gemv_4bit"]["cpu_linear"]


def test_views_and_the_shapes_of_codes():
    codes, state = quantized()
    weight = packed_of(codes, state)
    base = rand(128, 6, dtype=torch.bfloat16)
    with switch.enabled():
        for x in (base.t(), rand(6, 256, dtype=torch.bfloat16)[:, ::2], rand(12, 128, dtype=torch.bfloat16)[::2]):
            for stored in (codes, codes.t(), codes.view(-1), codes.view(96, 64)):
                reference.assert_within_contract(gemm(x, stored, state), reference.linear(x, weight))
    assert switch.status().misses == 0


def test_scales_after_a_model_wide_cast():
    """16-bit absmax and a nested offset that is not fp32 are widened, which is exact."""
    codes, state = quantized(nested=True)
    x = rand(3, 128, dtype=torch.bfloat16)
    state.offset = state.offset.to(torch.bfloat16)
    state.state2.absmax = state.state2.absmax.to(torch.bfloat16)
    wide = copy.copy(state)
    wide.state2 = copy.copy(state.state2)
    wide.state2.absmax = state.state2.absmax.float()
    with switch.enabled():
        reference.assert_within_contract(gemm(x, codes, state), reference.linear(x, packed_of(codes, wide)))
        codes, state = quantized()
        narrow = copy.copy(state)
        narrow.absmax = state.absmax.half()
        state.absmax = narrow.absmax.float()
        reference.assert_within_contract(gemm(x, codes, narrow), reference.linear(x, packed_of(codes, state)))
    assert switch.status().misses == 0


@pytest.mark.parametrize("family", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_gives_the_same_bits(family, dtype):
    cases = [(64, 64, 64), (33, 61, 32), (24, 3420, 64), (64, 128, 4096)]
    for n, k, blocksize in cases:
        codes, state = quantized(n, k, family, blocksize, dtype=dtype)
        arguments = (codes, state.absmax, blocksize, family, [n, k], dtype)
        theirs = operators.dequantize_4bit(*arguments)
        with switch.enabled():
            ours = operators.dequantize_4bit(*arguments)
        assert torch.equal(ours, theirs), (n, k, blocksize)
    served = switch.status().served["dequantize_4bit"]["cpu_decode"]["weight"]
    assert served == (4 if dtype == torch.float32 else 2)  # the others are faster in bitsandbytes
    assert switch.status().misses == 4 - served


def test_errors_are_those_of_bitsandbytes():
    codes, state = quantized()
    x = rand(2, 128, dtype=torch.bfloat16)
    calls = [
        lambda: operators.gemm_4bit(x[:, :64], codes, state.shape, state.absmax, 64, "nf4"),
        lambda: operators.gemm_4bit(x, codes, state.shape, state.absmax, 64, "int4"),
        lambda: operators.gemm_4bit(x, codes, state.shape, state.absmax, 64, "nf4", rand(96)),
        lambda: operators.gemm_4bit(x, codes[:100], state.shape, state.absmax, 64, "nf4"),
        lambda: operators.dequantize_4bit(codes, state.absmax, 64, "int4", [96, 128], torch.float32),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(Exception) as theirs:  # noqa: PT011 (whatever it is)
            call()
        with switch.enabled(), pytest.raises(theirs.type) as ours:
            call()
        assert str(ours.value) == str(theirs.value), number
    assert switch.status().hits == 0
    assert switch.status().misses >= len(calls)


def test_fallbacks_are_served_and_counted():
    codes, state = quantized()
    table = torch.linspace(-1, 1, 16)
    with switch.enabled():
        flat = operators.dequantize_4bit(codes, state.absmax, 64, "nf4", [96 * 128], torch.float32)
        operators.gemv_4bit(rand(2, 128, dtype=torch.bfloat16), codes, state.shape, state.absmax, table, 64)
    assert flat.numel() == 96 * 128
    fallbacks = switch.status().fallbacks
    assert fallbacks["dequantize_4bit"]["a shape of fewer than two dimensions"] == 1
    assert fallbacks["gemv_4bit"] == {"a codebook that is neither NF4's nor FP4's": 1}
    assert "a codebook" in str(switch.status())


def test_many_rows_go_where_they_are_faster():
    """Beyond 64 rows a CPU multiplies a decoded weight: bitsandbytes is faster at that, large fp32 layers apart."""
    for n, dtype, served in ((96, torch.bfloat16, False), (96, torch.float32, False), (65536, torch.float32, True)):
        codes, state = quantized(n, dtype=dtype)
        x = rand(65, 128, dtype=dtype)
        expected = gemm(x, codes, state)
        switch.reset_counters()
        with switch.enabled():
            out = gemm(x, codes, state)
            assert gemm(x[:64], codes, state).shape == (64, n)
        rows = switch.status().served["gemm_4bit"]["cpu_linear"]
        assert rows == ({"65+": 1, "9-64": 1} if served else {"9-64": 1})
        if served:
            reference.assert_within_contract(out, reference.linear(x, packed_of(codes, state)))
        else:
            assert torch.equal(out, expected)
            reason = f"M 65+ in {dtype}: bitsandbytes decodes the weight and multiplies, which is faster"
            assert switch.status().fallbacks["gemm_4bit"] == {reason: 1}


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_change_under_way(nested):
    """Tensors are known again from call to call: changes in place, other memory and other scales must be noticed."""
    codes, state = quantized(nested=nested)
    other, other_state = functional.quantize_4bit(rand(96, 128, seed=8), compress_statistics=nested, quant_type="nf4")
    x = rand(3, 128, dtype=torch.bfloat16)
    with switch.enabled():
        for change in range(5):
            if change == 1:
                codes.copy_(other)
            elif change == 2:
                codes.data = codes.data.flip(0).contiguous()
            elif change == 3:
                state.absmax.copy_(other_state.absmax)
            elif change == 4:
                state.absmax = state.absmax.flip(0).contiguous()
            reference.assert_within_contract(gemm(x, codes, state), reference.linear(x, packed_of(codes, state)))
            if not nested:
                again = operators.gemv_4bit(x, codes, state.shape, state.absmax, state.code, 64)
                assert torch.equal(again, gemm(x, codes, state))
    assert switch.status().misses == 0


def test_no_weight_is_kept():
    codes, state = quantized(nested=True)
    with switch.enabled():
        gc.collect()
        before = len(switch._layers._entries)
        gemm(rand(3, 128, dtype=torch.bfloat16), codes, state)
        assert len(switch._layers._entries) == before + 1
        del codes, state
        gc.collect()
        assert len(switch._layers._entries) == before


def test_without_a_kernel_the_result_is_that_of_bitsandbytes(monkeypatch):
    fallback = next(kernel for kernel in kernels() if kernel.backend == "torch")
    codes, state = quantized(nested=True)
    x = rand(3, 128, dtype=torch.bfloat16)
    expected = gemm(x, codes, state)
    monkeypatch.setattr(switch.CheckedWeight, "kernel", lambda *problem: fallback)
    with switch.enabled():
        assert torch.equal(gemm(x, codes, state), expected)
    reason = "no kernel for nf4-64-nested with x in torch.bfloat16, M 2-8, on cpu"
    assert switch.status().fallbacks["gemm_4bit"] == {reason: 1}
    assert switch.status().hits == 0


@pytest.mark.parametrize("nested", [False, True])
def test_training_step(nested):
    """Outputs within the contract; the gradient of x is what bitsandbytes' own backward computes."""
    layer = layer_of(nested=nested).train()
    weight = weight_of(layer)
    start, upstream = rand(5, 128, dtype=torch.bfloat16), rand(5, 96, dtype=torch.bfloat16, seed=9)

    _, x_grad, bias_grad = training_step(layer, start, upstream)
    with switch.enabled():
        out, our_x_grad, our_bias_grad = training_step(layer, start, upstream)
    reference.assert_within_contract(out, reference.linear(start, weight, layer.bias.detach()))
    assert torch.equal(our_x_grad, x_grad)
    assert torch.equal(our_bias_grad, bias_grad)
    assert switch.status().served["gemm_4bit"] == {"cpu_linear": {"2-8": 1}}


def test_autograd_and_autocast_on_the_bare_operator():
    """What torch does around the call is the same with and without halfbyte."""
    codes, state = quantized(dtype=torch.float32)
    x = rand(3, 128).requires_grad_()

    def facts():
        out = gemm(x, codes, state)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = gemm(x.detach(), codes, state)
        return out.requires_grad, cast.dtype

    theirs = facts()
    with switch.enabled():
        assert facts() == theirs


def test_a_round_trip_restores_every_bit():
    codes, state = quantized(nested=True)
    layer = layer_of().train()
    x = rand(4, 128, dtype=torch.bfloat16)
    layers = type(layer).__dict__

    def outputs():
        with torch.no_grad():
            return [gemm(x, codes, state), layer(x), functional.dequantize_4bit(codes, state)]

    before, attributes = outputs(), set(layers)
    for _ in range(3):
        switch.enable()
        switch.enable()
        hits = switch.status().hits
        outputs()
        assert switch.status().hits > hits
        switch.disable()
        switch.disable()
        hits = switch.status().hits
        for one, other in zip(outputs(), before, strict=True):
            assert torch.equal(one, other)
        assert switch.status().hits == hits
    assert set(layers) == attributes
    assert layer.support_avx512bf16_for_cpu == functional.has_avx512bf16()


def test_nested_contexts_and_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with switch.enabled():
            with switch.enabled():
                pass
            assert switch.status().enabled
    assert not switch.status().enabled


def in_threads(work, times: int = 4):
    """Run `work` in several threads at once; raises what one of them raised."""
    with ThreadPoolExecutor(times) as pool:
        for future in [pool.submit(work) for _ in range(times)]:
            future.result()


def test_threads():
    """Four threads call while a fifth switches on and off: right results, and no call lost by the counters."""
    codes, state = quantized()
    weight, x = packed_of(codes, state), rand(2, 128, dtype=torch.bfloat16)
    exact, done = reference.linear(x, weight), threading.Event()

    def work():
        for _ in range(150):
            assert reference.relative_error(gemm(x, codes, state), exact) < 0.01

    def toggle():
        while True:
            switch.enable()
            switch.disable()
            if done.is_set():
                break

    with ThreadPoolExecutor(1) as toggling:
        toggled = toggling.submit(toggle)
        try:
            in_threads(work)
        finally:
            done.set()
        toggled.result()
    switch.reset_counters()
    in_threads(toggle)  # one turn each
    assert not switch.status().enabled
    switch.enable()
    in_threads(work)
    assert switch.status().served == {"gemm_4bit": {"cpu_linear": {"2-8": 600}}}


def test_replacing_under_calls():
    """An implementation is taken back while calls that have looked it up wait to enter it: they still can.

    torch alone frees it then. Threads change often here, so that some changes meet such a call.
    """
    defined = torch.library.Library("halfbyte_test", "DEF")
    defined.define("twice(Tensor x) -> Tensor")
    defined.impl("twice", lambda x: x + x, "CPU")
    done, x = threading.Event(), torch.ones(())

    def toggle():
        while not done.is_set():
            library = torch.library.Library("halfbyte_test", "IMPL")
            switch.replace(library, "twice", "CPU", lambda keys, x: 2 * x)
            library._destroy()

    def work():
        for _ in range(2500):
            assert torch.ops.halfbyte_test.twice(x) == 2

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as toggling:
            toggled = toggling.submit(toggle)
            try:
                in_threads(work)
            finally:
                done.set()
            toggled.result()
    finally:
        sys.setswitchinterval(interval)
        defined._destroy()


def test_log_line_at_the_first_call(caplog):
    codes, state = quantized()
    with caplog.at_level(logging.INFO, "halfbyte"), switch.enabled():
        for _ in range(3):
            gemm(rand(1, 128, dtype=torch.bfloat16), codes, state)
    assert [record.message for record in caplog.records] == ["gemm_4bit is served by halfbyte's cpu_linear"]
