"""The ladder without a GPU: its format, its kernels run thread by thread on the CPU, its sweeps and figures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import cuda_on_cpu
from halfbyte import reference
from halfbyte.formats import quantize
from halfbyte.lab import ladder_figures, ladder_launch
from halfbyte.lab.cli import lab_app
from halfbyte.lab.ladder import L2_K, SHAPE_WEIGHTS, SIDES, Point, bench, points
from halfbyte.lab.ladder_figures import overtakes, read_rows
from halfbyte.lab.ladder_rungs import RUNGS, SOURCES, Rung, get_rung, source
from halfbyte.lab.ladder_weights import PlanarQ4, exact_dense, exact_q4, quantize_q4

CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# (N, K): a block or fewer for some threads, rows that leave a warp's pair alone, more than one round of every loop
SHAPES = ((5, 32), (3, 96), (37, 2080), (33, 4352))


def operands(n: int, k: int) -> tuple[Tensor, PlanarQ4, Tensor]:
    """fp16 weights [N, K], the same in planar Q4, x [K]; with an empty block and a large activation."""
    generator = torch.Generator().manual_seed(n * k)
    dense = torch.randn(n, k, generator=generator).half()
    dense[0, :32] = 0
    x = torch.randn(k, generator=generator).half()
    x[k // 3] = 300
    return dense, quantize_q4(dense), x


# ---- the format


def test_bytes_of_a_block_by_hand() -> None:
    block = torch.zeros(1, 32)
    block[0, :3] = torch.tensor([-8.0, 3.0, -1.0])
    weight = quantize_q4(block)
    assert weight.scales.tolist() == [[1.0]]
    assert weight.codes[0, :3].tolist() == [0xB0, 0x87, 0x88], "the first weight of a byte is its low nibble"
    assert weight.decode(slice(0, 1)).tolist() == block.double().tolist()
    assert weight.nbytes == 18


def test_quantising_is_as_near_as_q4_0() -> None:
    """GGUF's Q4_0 has the same scales and codes in another order; only the rounding of ties may differ."""
    dense, weight, _ = operands(16, 256)
    theirs = quantize(dense.float(), "q4_0").dequantize(torch.float64)
    ours = weight.decode(slice(0, 16))
    assert reference.relative_error(ours, dense) <= 1.01 * reference.relative_error(theirs, dense) < 0.2
    assert (ours == theirs).double().mean() > 0.98


def test_k_must_hold_whole_blocks() -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        quantize_q4(torch.zeros(2, 48))


# ---- the kernels, thread by thread on the CPU

Runner = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Rung, str], Runner]:
    if cuda_on_cpu.COMPILER is None:
        pytest.skip("needs g++")
    built: dict[tuple[str, str], Path] = {}

    def get(rung: Rung, text: str) -> Runner:
        key = (rung.stem, text)
        if key not in built:
            built[key] = _build(rung, text, tmp_path_factory.mktemp(rung.stem))
        return partial(_run, built[key])

    return get


def _build(rung: Rung, text: str, folder: Path) -> Path:
    (folder / "source.cu").write_text(text.replace("extern __shared__ uint4 x_shared[]", "DYNAMIC_SHARED(x_shared)"))
    macros = {**rung.macros, "KERNEL": rung.stem, "Q4": int(rung.q4)}
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    binary = folder / "run"
    cuda_on_cpu.build("run_ladder.cpp", binary, *defines, f"-I{folder}", f"-I{SOURCES}", checks=CHECKS)
    return binary


def _run(binary: Path, n: int, k: int, blocks: int, data: bytes, downwards: bool = False) -> tuple[Tensor, Tensor]:
    """y in fp16 and the C++ reference in float64; downwards: threads take their turns from the last to the first."""
    options = {"ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
    arguments = [str(argument) for argument in (n, k, blocks, int(downwards))]
    done = subprocess.run([binary, *arguments], input=data, capture_output=True, env=options)
    assert done.returncode == 0, done.stderr.decode()
    y = torch.frombuffer(bytearray(done.stdout[: 2 * n]), dtype=torch.float16)
    return y, torch.frombuffer(bytearray(done.stdout[2 * n :]), dtype=torch.float64)


def packed(*tensors: Tensor) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def grids(rung: Rung, n: int) -> tuple[int, ...]:
    """One block a row; or, where warps walk over the rows, too few blocks and as many as there are rows for."""
    return (1, -(-n // (rung.warps * rung.rows))) if rung.rows else (n,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.stem)
def test_kernels_and_references_agree(runner: Any, rung: Rung, shape: tuple[int, int]) -> None:
    n, k = shape
    dense, weight, x = operands(n, k)
    run = runner(rung, source(rung.stem))
    data = packed(weight.codes, weight.scales, x) if rung.q4 else packed(dense, x)
    expected = exact_q4(x, weight) if rung.q4 else exact_dense(x, dense)
    answers = []
    for blocks, downwards in product(grids(rung, n), (False, True)):
        y, exact = run(n, k, blocks, data, downwards)
        torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)
        reference.assert_within_contract(y, exact, rung.stem)
        answers.append(y)
    assert all(torch.equal(y, answers[0]) for y in answers), (
        "bits depend on the number of blocks or on the order of threads"
    )


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.q4], ids=lambda rung: rung.stem)
def test_swapped_nibbles_are_noticed(runner: Any, rung: Rung) -> None:
    _, weight, x = operands(37, 2080)
    swapped = PlanarQ4(weight.codes >> 4 | weight.codes << 4, weight.scales)
    data = packed(swapped.codes, swapped.scales, x)
    y, _ = runner(rung, source(rung.stem))(37, 2080, grids(rung, 37)[0], data)
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_within_contract(y, exact_q4(x, weight))


@pytest.mark.parametrize(
    ("name", "was", "becomes", "word"),
    [
        ("q4_bytes", "    __syncthreads();", "    if (threadIdx.x < 32) __syncthreads();", "barrier"),
        ("q4_bytes", "__shfl_down_sync(0xffffffff", "__shfl_down_sync(0x0000ffff", "shuffle"),
        ("q4_bytes", "    __syncthreads();", "", "relative error"),
        ("q4_wide", "b < blocks;", "b <= blocks;", "heap-buffer-overflow"),
        ("q4_rows", "    __syncthreads();\n\n    const int warp", "    const int warp", "outputs are NaN"),
        ("q4_rows", "x_shared[i % 4 * blocks + i / 4]", "x_shared[i % 4 * blocks + i / 4 + 1]", "beyond its ends"),
    ],
)
def test_a_broken_kernel_is_noticed(runner: Any, name: str, was: str, becomes: str, word: str) -> None:
    rung, (n, k) = get_rung(name), (2, 4096)
    text = source(rung.stem)
    assert text.count(was) == 1, "the test is out of date"
    _, weight, x = operands(n, k)

    def multiply(text: str) -> None:
        y, exact = runner(rung, text)(n, k, 2, packed(weight.codes, weight.scales, x))
        reference.assert_within_contract(y, exact)

    multiply(text)
    with pytest.raises(AssertionError, match=word):
        multiply(text.replace(was, becomes))


def test_a_missing_barrier_is_noticed_in_one_order_of_threads_or_the_other(runner: Any) -> None:
    """The last thread may sum without a barrier as long as it runs last."""
    text = source("ladder_q4_bytes").replace("    __syncthreads();", "").replace(".x == 0", ".x == THREADS - 1")
    _, weight, x = operands(2, 4096)
    run, data = runner(get_rung("q4_bytes"), text), packed(weight.codes, weight.scales, x)
    reference.assert_within_contract(*run(2, 4096, 2, data))
    y, exact = run(2, 4096, 2, data, downwards=True)
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_within_contract(y, exact)


# ---- launching


def test_operands_are_checked_before_a_launch() -> None:
    dense, weight, x = operands(4, 64)
    y = torch.empty(4, dtype=torch.float16)
    for rung, matrix, vector, out, error, word in [
        ("q4_wide", dense, x, y, TypeError, "planar Q4"),
        ("fp16", weight, x, y, TypeError, "fp16 matrix"),
        ("q4_wide", weight, x.float(), y, ValueError, "x must be torch.float16"),
        ("q4_wide", weight, x[:32], y, ValueError, r"x must be .*\[64\]"),
        ("q4_wide", weight, x, y[:3], ValueError, "y must be"),
        ("fp16", dense.float(), x, y, ValueError, "weight must be"),
        ("q4_wide", weight, x, y, ValueError, "CUDA device"),
    ]:
        with pytest.raises(error, match=word):
            ladder_launch._check(get_rung(rung), matrix, vector, out)


# ---- sweeps


def test_points_of_the_sweeps() -> None:
    l2 = 60 << 20
    chosen = points(("square", "l2", "shape"), l2)
    assert len(set(chosen)) == len(chosen)
    assert {(p.n, p.k) for p in chosen if p.sweep == "square" and p.cold} == {(side, side) for side in SIDES}
    assert {p.n * p.k for p in chosen if p.sweep == "shape"} == {SHAPE_WEIGHTS}
    sizes = sorted({2 * p.n * p.k for p in chosen if p.sweep == "l2"})
    assert all(p.k == L2_K for p in chosen if p.sweep == "l2")
    assert sizes[0] < l2 / 4 < 5 * l2 < sizes[-1]
    assert any(abs(size - l2) < l2 / 50 for size in sizes), "the boundary itself"
    for cold in (True, False):
        assert len([p for p in chosen if p.sweep == "l2" and p.cold == cold]) == len(sizes)
    assert {p.sweep for p in points(["shape"], l2)} == {"shape"}
    with pytest.raises(ValueError, match="'round'"):
        points(["square", "round"], l2)


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="--figures"):
        next(bench([Point("square", 32, 32, True)], torch.device("cpu")))


# ---- what rows say


def row(rung: str, n: int, us: float, sweep: str = "l2", cache: str = "cold", k: int = 4096) -> dict[str, Any]:
    size = n * k * (2.0 if rung in ("ladder_fp16", "cublas") else 0.5625)
    return {
        **{"suite": "ladder", "device": "NVIDIA H200", "commit": "0123456789ab", "kernel": rung, "rung": rung},
        **{"sweep": sweep, "cache": cache, "N": n, "K": k, "us": us, "tb_per_s": size / us / 1e6},
        **{"ceiling_tb_per_s": 4.2, "copy_tb_per_s": 3.9, "l2_bytes": 60 << 20, "error": 2e-4, "rounding_limit": 2e-4},
    }


def curve(rung: str, times: dict[int, float], **others: Any) -> list[dict[str, Any]]:
    return [row(rung, n, us, **others) for n, us in times.items()]


def test_overtaking_is_where_the_ratio_passes_one_for_good() -> None:
    base = curve("ladder_fp16", {1024: 10, 2048: 10, 4096: 10, 8192: 10})
    slow_fast = curve("ladder_q4_wide", {1024: 9, 2048: 20, 4096: 5, 8192: 4})
    size = overtakes(base + slow_fast, "l2", "cold", "ladder_q4_wide")
    assert size == pytest.approx(2 * 4096 * 2048 * 2**0.5), "halfway between 2048 and 4096 on a log scale"
    always = curve("ladder_q4_wide", {1024: 9, 2048: 9})
    assert overtakes(base + always, "l2", "cold", "ladder_q4_wide") == pytest.approx(2 * 4096 * 1024)
    never = curve("ladder_q4_wide", {1024: 9, 8192: 11})
    assert overtakes(base + never, "l2", "cold", "ladder_q4_wide") is None
    assert overtakes(base, "l2", "cold", "ladder_q4_wide") is None
    assert overtakes(base + always, "l2", "warm", "ladder_q4_wide") is None


def some_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rung, factor in (("ladder_fp16", 1.0), ("ladder_q4_bytes", 3.0), ("ladder_q4_wide", 0.5), ("library", 0.3)):
        rows += curve(rung, {n: factor * n / 100 for n in (1024, 8192, 65536)})
        rows += curve(rung, {n: factor * n / 120 for n in (1024, 8192, 65536)}, cache="warm")
        rows += [row(rung, side, factor * side / 100, "square", k=side) for side in (1024, 16384)]
        rows += [row(rung, (1 << 28) // k, factor * 130, "shape", k=k) for k in (2048, 131072)]
    return rows


def test_figures_are_drawn_from_rows_alone(tmp_path: Path) -> None:
    file = tmp_path / "h200-ladder.jsonl"
    lines = [{"suite": "linear"}, *some_rows()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(lab_app, ["ladder", "--figures", str(file), "--to", str(tmp_path / "figures")])
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    wanted = {
        f"h200-ladder-{what}.{suffix}" for what in ("rungs", "square", "l2", "shape") for suffix in ("svg", "png")
    }
    assert names == wanted
    svg = (tmp_path / "figures" / "h200-ladder-l2.svg").read_text()
    assert svg.count("<svg") == 1
    assert "q4_wide is faster than fp16: cold from 8 MiB" in result.output
    assert "q4_bytes is faster than fp16: cold at no size" in result.output


def test_figures_of_part_of_the_sweeps(tmp_path: Path) -> None:
    rows = [each for each in some_rows() if each["sweep"] == "shape"]
    assert {path.name for path in ladder_figures.draw(rows, tmp_path, "a")} == {"a-shape.svg", "a-shape.png"}


def test_rows_are_read_whole_and_of_one_device(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"suite": "linear"}) + "\n")
    with pytest.raises(ValueError, match="no rows"):
        read_rows(file)
    twice = [row("ladder_fp16", 1024, 10), row("ladder_fp16", 1024, 11)]
    file.write_text("".join(json.dumps(each) + "\n" for each in twice))
    assert [each["us"] for each in read_rows(file)] == [11], "the last of a point and kernel counts"
    with file.open("a") as handle:
        handle.write(json.dumps(row("cublas", 1024, 9) | {"device": "NVIDIA L4"}) + "\n")
    with pytest.raises(ValueError, match="several devices"):
        read_rows(file)


def test_cards_are_recognised_by_what_devices_call_themselves() -> None:
    names = {"NVIDIA H200": "H200 SXM", "NVIDIA GeForce RTX 5090": "GeForce RTX 5090", "NVIDIA A100-SXM4-80GB": "A100"}
    for device, name in names.items():
        card = ladder_figures.card_of_device(device)
        assert card is not None
        assert card.name.startswith(name)
    assert ladder_figures.card_of_device("NVIDIA T4000") is None
