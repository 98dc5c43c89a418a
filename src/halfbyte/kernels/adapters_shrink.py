"""Launcher of cuda/adapters_shrink.cu: h = A x, each row of x with its own adapter, on a GPU.

A launch is made for a class of calls (dtypes, K, how many rows and slots there may be) and kept; a call fills in its
tensors. Nothing looks at the index from the host, so a CUDA graph of it may be replayed with any mix.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from . import nvrtc
from .codebook import ALIGNMENT, X_TYPES, device_of
from .launch import Launch

STEM = "adapters_shrink"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")  # it compiles for
SEEN_RIGHT = ("sm_90a",)  # its answers were checked on; elsewhere torch serves until they are
CLUSTERS = ("sm_90a", "sm_100")
CHUNK = 64  # as in the kernel
PORTABLE = 8  # blocks of a cluster, without asking for more
BLOCKS = 512  # that share the items of a chunk, at most: a multiprocessor's registers hold six


@dataclass(frozen=True)
class Config:
    """The kernel's macros; adapters_shrink.cu says what each means."""

    X_TYPE: int
    A_TYPE: int
    GROUPS: int
    RANKS: int
    CLUSTER: int
    WARPS: int
    WIDE: int
    OVERLAP: int
    LATE: int


class _Problem(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("m", ctypes.c_int),
        ("bias_is_fp32", ctypes.c_int),
        ("a", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("k", ctypes.c_int),
        ("a_rows", ctypes.c_int),
        ("width", ctypes.c_int),
        ("slots", ctypes.c_int),
        ("clusters", ctypes.c_int),
    )


@lru_cache(maxsize=4096)
def configure(x_dtype: torch.dtype, a_dtype: torch.dtype, m: int, k: int, wide: bool, arch: str) -> Config:
    """The configuration for m rows of x. How many blocks share K does not depend on M: it decides the order of sums.

    LATE for as many rows as codebook_wgmma takes, which begins with laying x out: that can be done at the same time.
    """
    cluster = min(16, 1 << max(0, -(-k // 256) - 1).bit_length()) if arch in CLUSTERS else 1
    return Config(
        X_TYPE=X_TYPES[x_dtype],
        A_TYPE=X_TYPES[a_dtype],
        GROUPS=1 if m <= 8 else 2 if m <= 16 else 4,
        RANKS=16 if k <= 8192 else 8,
        CLUSTER=cluster,
        WARPS=2 if arch in CLUSTERS else 4,
        WIDE=int(wide),
        OVERLAP=int(arch in CLUSTERS),
        LATE=int(arch in CLUSTERS and m > 8),
    )


def clusters_for(config: Config, m: int, slots: int, width: int) -> int:
    """Clusters that share the items of a chunk of rows: no more than there can be items."""
    items = min(m, CHUNK, slots + 1) * -(-width // config.RANKS)
    return max(1, min(items, BLOCKS // config.CLUSTER))


@lru_cache(maxsize=1024)
def _launch(config: Config, chunks: int, clusters: int, arch: str, device: int) -> Launch:
    kernel = nvrtc.load(STEM, arch, asdict(config), device, 0)
    if config.CLUSTER > PORTABLE:
        from cuda.bindings import driver

        allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        nvrtc.check(driver.cuKernelSetAttribute(allowed, 1, kernel, nvrtc.check(driver.cuDeviceGet(device))))
    return Launch(
        kernel,
        (_Problem(clusters=clusters),),
        blocks=chunks * clusters * config.CLUSTER,
        threads=32 * config.WARPS,
        shared_bytes=0,
        early=bool(config.OVERLAP),
        alignment=1,
        rows=CHUNK * chunks,
        name=f"{STEM} {config}",
    )


def reason_against(x: Tensor) -> str | None:
    """Why this kernel cannot serve x, or None."""
    if x.device.type != "cuda":
        return f"is for CUDA, not for {x.device.type}"
    return _reason_against(x.device.index)


@cache
def _reason_against(device: int) -> str | None:
    arch = device_of(device)[0]
    if torch.version.hip is not None or arch not in SEEN_RIGHT:
        return f"has been held against the reference on {', '.join(SEEN_RIGHT)} only, not on {arch}"
    return nvrtc.missing()


def run(x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, out: Tensor) -> None:
    """As `adapters.shrink_on_cpu`, where `reason_against` has none. An index out of range counts as none.

    x [M, K] of unit stride along K, in any of the three dtypes, as A [rows, K]. out: fp32 [M, width], contiguous.
    """
    m, k = x.shape
    if not m or not out.shape[1]:
        return
    size = x.element_size()
    row = x.stride(0) * size if m > 1 else 0
    wide = (x.data_ptr() | row | a.data_ptr() | k * size) % ALIGNMENT == 0
    index_of_device = x.device.index
    arch = device_of(index_of_device)[0]
    config = configure(x.dtype, a.dtype, m, k, wide, arch)
    clusters = clusters_for(config, m, spans.shape[0], out.shape[1])
    launch = _launch(config, -(-m // CHUNK), clusters, arch, index_of_device)
    fields = {
        "a": a.data_ptr(),
        "spans": spans.data_ptr(),
        "index": None if index is None else index.data_ptr(),
        "k": k,
        "a_rows": a.shape[0],
        "width": out.shape[1],
        "slots": spans.shape[0],
    }
    stream = int(torch._C._cuda_getCurrentRawStream(index_of_device))
    launch(x, None, out, stream, True, fields)
