"""Two GPUs of different kinds, as far as they can be pretended: what is kept is kept for each device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte import ops
from halfbyte.formats import get_format
from halfbyte.kernels import nvrtc

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def fake_call(device: torch.device, n: int, k: int) -> torch.Tensor:
    """The operator on tensors of a GPU that is not there: they have a device and shapes, and no memory."""
    with FakeTensorMode():
        parts = [
            torch.empty(part.shape, dtype=part.dtypes[0], device=device)
            for part in get_format("nf4").parts(n, k).values()
        ]
        x = torch.empty(2, k, device=device)
        return ops.linear_on_tensors(x, parts, None, "nf4-64", n, k)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_each_gpu_gets_a_plan_and_is_current_during_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GPU is current; the guard for the second is entered around its kernel, and around no other."""
    arches = {FIRST: "sm_90a", SECOND: "sm_75"}
    events: list[Any] = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            events.append(("enter", self.device))

        def __exit__(self, *error: object) -> None:
            events.append(("leave", self.device))

    def plan(problem: Any) -> SimpleNamespace:
        def run(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, out: torch.Tensor) -> None:
            events.append((f"run for {problem.arch}", x.device))
            assert x.device == weight.device == out.device

        events.append(("plan", problem.arch))
        return SimpleNamespace(kernel=SimpleNamespace(name="pretended", run=run, launch=None))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(ops, "arch_of", arches.__getitem__)
    monkeypatch.setattr(ops, "plan", plan)
    for device in (FIRST, SECOND, FIRST, SECOND):
        assert fake_call(device, 72, 192).device == device
    first = [("run for sm_90a", FIRST)]
    second = [("enter", SECOND), ("run for sm_75", SECOND), ("leave", SECOND)]
    assert [event for event in events if event[0] != "plan"] == [*first, *second, *first, *second]
    assert [event for event in events if event[0] == "plan"] == [("plan", "sm_90a"), ("plan", "sm_75")]


def test_a_compiled_kernel_is_loaded_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shared memory is granted on each, and asked for once."""
    driver = pytest.importorskip("cuda.bindings.driver")
    granted = []

    def grant(attribute: Any, value: int, kernel: Any, device: str) -> tuple[int]:
        granted.append((device, value))
        return (0,)

    loads = iter(range(10))
    monkeypatch.setattr(nvrtc, "compile", lambda *arguments: b"cubin")
    monkeypatch.setattr(nvrtc, "_kernels", {})
    monkeypatch.setattr(driver, "cuLibraryLoadData", lambda *arguments: (0, f"library {next(loads)}"))
    monkeypatch.setattr(driver, "cuLibraryGetKernel", lambda library, name: (0, f"kernel of {library}"))
    monkeypatch.setattr(driver, "cuDeviceGet", lambda index: (0, f"gpu {index}"))
    monkeypatch.setattr(driver, "cuKernelSetAttribute", grant)
    for index in (0, 1, 0, 1):
        assert nvrtc.load("codebook_mma", "sm_90a", {"A": 1}, index, 1000).startswith("kernel of library")
    assert granted == [("gpu 0", 1000), ("gpu 1", 1000)]
