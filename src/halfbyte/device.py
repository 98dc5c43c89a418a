"""What this machine is: architecture, name, last-level cache."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch

DEFAULT_CACHE_BYTES = 32 << 20


@cache
def arch_of(device: torch.device) -> str:
    """What kernels are compiled and planned for.

    "cpu"; a CUDA architecture such as "sm_90a" ("a": Hopper's own); one of AMD's such as "gfx942", whose device torch
    calls "cuda", too; "xpu" for GPUs of Intel.
    """
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]  # then come features
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def name_of(device: torch.device) -> str:
    """What the device calls itself; for a CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return str(torch.xpu.get_device_name(device))
    name = "CPU"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} threads"


@cache
def cache_bytes(device: torch.device) -> int:
    """The last-level cache: L2 on a GPU; on a CPU the largest that the system reports, 32 MiB if it reports none."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [DEFAULT_CACHE_BYTES]
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes)
