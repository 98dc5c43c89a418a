"""triton_linear without a GPU: its answers under Triton's interpreter, its compilation for GPUs, when it is chosen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.device import arch_of
from halfbyte.formats import WordLayout, get_format
from halfbyte.formats.codecs import GroupZero, RecordHalf
from halfbyte.formats.table import AWQ_ORDER
from halfbyte.kernels import Problem, codebook_gemv, codebook_mma, kernels, triton_linear
from halfbyte.plan import plan
from kernel_samples import KEYS, multiples

TESTS = Path(__file__).parent
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TARGETS = {
    "sm_75": ("cuda", 75, 32),
    "sm_90a": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which has wheels for Linux x86_64")


# ---- its answers


@needs_triton
def test_under_the_interpreter() -> None:
    """triton_interpreted.py in a process of its own: the interpreter must be asked for before triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton_interpreted.py"],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 80
    assert "skipped" not in done.stdout


# ---- its compilation


def compiled(key: str, dtype: torch.dtype, m: int, arch: str) -> dict[str, Any]:
    """What Triton makes of the kernel for a layer [4096, K] with bias and an architecture: all stages, by name."""
    triton = import_module("triton")
    target = import_module("triton.backends.compiler").GPUTarget(*TARGETS[arch])
    format, n, k = get_format(key), 4096, 4096 // multiples(key)[1] * multiples(key)[1]
    config = triton_linear.configure(format, m, n, k)
    function = getattr(import_module("halfbyte.kernels.triton_linear_kernels"), config.kernel)
    names = {FP32: "*fp32", FP16: "*fp16", BF16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32"}
    names[torch.float8_e4m3fn] = "*u8"  # as launched
    parts = {name: names[part.dtypes[0]] for name, part in format.parts(n, k).items()}
    types = {
        **dict.fromkeys(("x", "bias", "out"), names[dtype]),
        **{"codes": parts[format.layout.part], "table": "*fp32", "m": "i32", "n": "i32", "x_stride": "i32"},
        **{"scales": parts.get("absmax", parts.get("scales")), "zeros": parts.get("qzeros")},
        **{"outer": parts.get("nested_absmax"), "map": parts.get("nested_quant_map")},
        "constant": parts.get("nested_offset", parts.get("global_scale")),
    }
    absent = {name: None for name, type in types.items() if type is None}
    constants = {**config.constants, **absent}
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(function, signature, places)
    result: dict[str, Any] = triton.compile(source, target=target, options=config.options).asm
    return result


@needs_triton
@pytest.mark.skipif(triton_linear.interpreted(), reason="TRITON_INTERPRET=1 leaves nothing to compile")
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels on every architecture; each reader of codes and scales on one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cases = [("nf4-64-nested", BF16, 16), ("q4_1", FP16, 65)]
    if arch == "sm_90a":
        cases += [("q4_k", FP32, 1), ("nvfp4", BF16, 4), ("awq-128", FP16, 65)]
    if arch == "gfx942":
        cases += [("mxfp4", FP16, 2), ("mxfp4_gguf", BF16, 1), ("gptq-128", FP16, 8)]
    for key, dtype, m in cases:
        stages = compiled(key, dtype, m, arch)
        assert len(stages["cubin" if arch.startswith("sm") else "hsaco"]) > 1000


@needs_triton
@pytest.mark.skipif(triton_linear.interpreted(), reason="TRITON_INTERPRET=1 leaves nothing to compile")
def test_nothing_is_fused_that_formats_round_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused multiply-adds are those of the sums alone: 8 rows of W times 128 columns, over 128 threads."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled("nf4-64-nested", BF16, 1, "sm_90a")["ptx"]
    assert len(re.findall(r"\bfma\.rn\.f32", code)) == 8
    assert len(re.findall(r"\bmul\.(?:rn\.)?f32", code)) >= 2  # by the outer scale, by the codebook's entry


# ---- when it is chosen


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton is there, or pretended to be: to plan, that is enough."""
    monkeypatch.setattr(triton_linear, "installed", lambda: True)
    plan.cache_clear()
    yield
    plan.cache_clear()


def problem(key: str = "nf4", m: int = 1, arch: str = "gfx942", n: int = 4096, k: int = 4096) -> Problem:
    return Problem(get_format(key), BF16, m, n, k, arch)


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "xpu"])
@pytest.mark.parametrize("key", KEYS)
def test_it_is_the_choice_on_other_gpus(key: str, arch: str) -> None:
    for m in (1, 16, 17, 64, 65, 4096):
        for n, k in ((64, multiples(key)[1]), (4096, 4 * multiples(key)[1]), (4096, 10240), (65536, 5120)):
            assert plan(problem(key, m, arch, n, k)).kernel.name == "triton_linear"


@pytest.mark.usefixtures("with_triton")
@pytest.mark.skipif(codebook_gemv.nvrtc.missing() is not None, reason=str(codebook_gemv.nvrtc.missing()))
@pytest.mark.parametrize("arch", ["sm_75", "sm_89", "sm_90a", "sm_120"])
def test_on_nvidia_it_comes_after_the_cuda_kernels_and_before_the_fallback(arch: str) -> None:
    for key in ("nf4", "q4_k", "gptq-128"):
        for m in (1, 2, 8, 9, 16, 17, 32, 64):
            for n, k in ((64, 256), (4096, 4096), (65536, 5120)):
                found = plan(problem(key, m, arch, n, k))
                assert found.kernel.backend == "cuda"
                ranked = [name for name, reason in found.others if reason.startswith("predicted")]
                assert ranked[-2:] == ["triton_linear", "torch_dequantize"]


@pytest.mark.usefixtures("with_triton")
def test_on_nvidia_it_serves_where_the_cuda_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (codebook_gemv, codebook_mma):
        monkeypatch.setattr(module.nvrtc, "missing", lambda: "needs cuda-core")
    assert plan(problem(arch="sm_120")).kernel.name == "triton_linear"


def test_what_it_does_not_serve_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_linear, "installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton_linear.reason_against(problem()) is None
    assert triton_linear.reason_against(problem(arch="cpu")) == "is for GPUs, not for cpu"
    assert "NVIDIA, AMD and Intel, not for mps" in str(triton_linear.reason_against(problem(arch="mps")))
    assert "beyond M = 64, got 65" in str(triton_linear.reason_against(problem(m=65, arch="sm_90a")))
    assert "N = 2147483648" in str(triton_linear.reason_against(problem(n=1 << 31)))
    monkeypatch.setattr(triton_linear, "installed", lambda: False)
    assert "pip install 'halfbyte[triton]'" in str(triton_linear.reason_against(problem()))


def test_a_format_that_it_cannot_read_is_refused() -> None:
    """One whose scales or whose order of nibbles the kernel does not have."""
    strange = replace(get_format("q4_0"), key="strange", scale=RecordHalf(18, 4))
    swapped = replace(get_format("gptq"), key="swapped", layout=WordLayout("K", AWQ_ORDER))
    mixed = replace(get_format("awq"), key="mixed", offset=GroupZero())
    for format in (strange, swapped, mixed):
        assert format.key in str(triton_linear.reason_against(Problem(format, BF16, 1, 64, 128, "gfx942")))
        with pytest.raises(ValueError, match=format.key):
            triton_linear.configure(format, 1, 64, 128)


def test_its_configuration_in_words() -> None:
    kernel = next(each for each in kernels() if each.name == "triton_linear")
    assert kernel.describe is not None
    assert kernel.describe(problem(m=17)) == "few_rows, 1024 programs of 8 warps, tiles of 16 × 8 × 128"
    assert kernel.describe(problem(m=200)) == "many_rows, 256 programs of 4 warps, tiles of 64 × 64 × 32"


def test_halfbyte_does_not_import_triton() -> None:
    """It is optional, and importing it takes its time."""
    code = """
import sys
import torch
already = "triton" in sys.modules
import halfbyte.kernels
assert ("triton" in sys.modules) == already
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- what a GPU is called


@pytest.mark.parametrize(("hip", "arch"), [("7.1.0", "gfx942"), (None, "sm_90a")])
def test_gpus_that_torch_calls_cuda(hip: str | None, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert arch_of.__wrapped__(torch.device("cuda", 0)) == arch


def test_architectures_of_other_devices() -> None:
    assert arch_of(torch.device("cpu")) == "cpu"
    assert arch_of(torch.device("xpu", 0)) == "xpu"
