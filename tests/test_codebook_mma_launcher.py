"""What the launcher of codebook_mma keeps with a weight, on a GPU that is pretended: bound kernels, early starts."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.formats import PackedWeight, quantize
from halfbyte.kernels import codebook, codebook_mma
from halfbyte.kernels.launch import Launcher


class Launches:
    """Stands for the device: one stream at a time, and what was bound and launched."""

    def __init__(self) -> None:
        self.stream, self.capturing = 7, False
        self.bound: list[tuple[torch.dtype, int, bool]] = []
        self.early: list[bool] = []
        self.rows: list[int] = []

    def bind(self, weight: PackedWeight, dtype: torch.dtype, m: int, strict: bool = False) -> Launches:
        self.bound.append((dtype, m, strict))
        return self

    def __call__(
        self, x: Tensor, bias: Tensor | None, out: Tensor, stream: int, early: bool = False, fields: object = None
    ) -> None:
        assert stream == self.stream
        assert x.data_ptr() % 16 == 0
        assert x.stride(1) == 1
        self.rows.append(x.shape[0])
        self.early.append(early)
        out.fill_(1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(codebook_mma, "bind", launches.bind)
    monkeypatch.setattr(Launcher, "_shared", OrderedDict())
    monkeypatch.setattr(codebook, "device_of", lambda index: ("sm_90a", 132))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: launches.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: launches.capturing)
    return launches


def weight_of(key: str = "nf4") -> PackedWeight:
    return quantize(torch.randn(64, 256), key)


def call(weight: PackedWeight, m: int = 1, x: Tensor | None = None, **options: Any) -> Tensor:
    x = torch.randn(m, 256, dtype=torch.bfloat16) if x is None else x
    out = torch.zeros(x.shape[0], 64, dtype=x.dtype)
    codebook_mma.run(x, weight, None, out, **options)
    assert (out == 1).all()
    return out


def test_a_kernel_is_bound_once_for_a_class_of_m(device: Launches) -> None:
    weight = weight_of()
    for m in (1, 1, 3, 4, 2, 1):
        call(weight, m)
    call(weight, 1, strict=True)
    assert [(m, strict) for _, m, strict in device.bound] == [(1, False), (3, False), (2, False), (1, True)]


def test_a_weight_made_anew_finds_its_kernel_and_one_with_other_memory_does_not(device: Launches) -> None:
    weight = weight_of()
    call(weight)
    call(PackedWeight(weight.format, weight.shape, weight.parts))
    assert len(device.bound) == 1
    weight.codes.set_(torch.zeros_like(weight.codes))  # the same tensor in other memory
    call(weight)
    assert len(device.bound) == 2


def test_it_starts_early_only_where_the_weight_has_stayed_as_it_was(device: Launches) -> None:
    weight = weight_of()
    for _ in range(2):
        call(weight)
    assert device.early == [False, True]
    weight.codes.copy_(weight_of().codes)
    call(weight)
    weight.parts["absmax"].mul_(2)
    call(weight)
    assert device.early[2:] == [False, False], "it has been written: by the kernel right before, for all one knows"
    device.stream = 8
    for _ in range(2):
        call(weight)
    assert device.early[4:] == [False, True], "another stream may not have waited for what wrote it"
    device.stream, device.capturing = 9, True
    call(weight)
    assert device.early[6:] == [True], "what writes it in a graph was captured, and would have been seen"


def test_more_rows_go_in_turn_and_the_later_ones_start_early(device: Launches) -> None:
    call(weight_of(), 37)
    assert device.rows == [16, 16, 5]
    assert device.early == [False, True, True]


def test_unaligned_rows_of_x_are_copied_and_an_unaligned_weight_goes_to_the_fallback(device: Launches) -> None:
    weight = weight_of()
    wide = torch.randn(4, 300, dtype=torch.bfloat16)
    call(weight, x=wide[:, 1:257])
    call(weight, x=wide[:1, :256])  # one row: its stride does not matter
    memory = torch.zeros(weight.codes.numel() + 1, dtype=torch.uint8)
    odd = PackedWeight(weight.format, weight.shape, {**weight.parts, "codes": memory[1:].copy_(weight.codes)})
    out = torch.zeros(4, 64)
    x = torch.randn(4, 256)
    codebook_mma.run(x, odd, None, out)
    torch.testing.assert_close(out, x @ weight.dequantize().t())
    assert device.rows == [4, 1]
