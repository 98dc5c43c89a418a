"""Launcher of cuda/adapters_shrink.cu: h = A x, each row of x with its own adapter, on a GPU.

A launch is made for a class of calls (dtypes, K, how many rows and slots there may be) and kept; a call fills in its
tensors. Nothing looks at the index from the host, so a CUDA graph of it may be replayed with any mix.

`run` is for itself. A `Shrink` is launched by the kernel that adds the adapters to its outputs, right before its own
launch, so that it need not wait for h with its multiply.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import nvrtc
from .codebook import ALIGNMENT, TEAM, UNIT, X_TYPES, device_of
from .launch import Launch

STEM = "adapters_shrink"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")  # it compiles for
SEEN_RIGHT = ("sm_90a",)  # its answers were checked on; elsewhere torch serves until they are
CLUSTERS = ("sm_90a", "sm_100")
CHUNK = 64  # as in the kernel
PORTABLE = 8  # blocks of a cluster, without asking for more
ROWS = 8  # of x, of an item
BLOCKS = 512  # that share the items of a chunk, at most: a multiprocessor's registers hold eight
SIGNALS = 256  # words by which a launch may signal
# Each launch that signals has a tag of its own, so that what memory held before is not taken for it.
_tags = itertools.count(secrets.randbits(46))


@dataclass(frozen=True)
class Config:
    """The kernel's macros; adapters_shrink.cu says what each means."""

    X_TYPE: int
    A_TYPE: int
    RANKS: int
    CLUSTER: int
    WARPS: int
    WIDE: int
    OVERLAP: int
    COLUMNS: int = 0
    BLOCK: int = 0


class Signal(NamedTuple):
    """How a launch tells the one behind it that it need not wait: the address of so many words, and their tag."""

    address: int | None
    tag: int
    words: int


NO_SIGNAL = Signal(None, 0, 0)


@dataclass(frozen=True)
class Image:
    """Where x is also laid out for codebook_wgmma, `columns` rows of it, for blocks of `block` weights.

    counters: how many behind it are to be set to 0.
    """

    address: int
    columns: int
    block: int
    counters: int


class _Problem(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("bias_is_fp32", ctypes.c_int),
        ("a", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("k", ctypes.c_int),
        ("a_rows", ctypes.c_int),
        ("slots", ctypes.c_int),
        ("clusters", ctypes.c_int),
        ("signal", ctypes.c_void_p),
        ("tag", ctypes.c_ulonglong),
        ("image", ctypes.c_void_p),
        ("image_blocks", ctypes.c_int),
        ("counters", ctypes.c_int),
    )


@lru_cache(maxsize=4096)
def configure(
    x_dtype: torch.dtype, a_dtype: torch.dtype, k: int, wide: bool, arch: str, columns: int = 0, block: int = 0
) -> Config:
    """The configuration; columns, block: of an image of x that it is to lay out, too.

    How many blocks share K depends on K alone: it decides the order of sums.
    """
    clusters = arch in CLUSTERS
    return Config(
        X_TYPE=X_TYPES[x_dtype],
        A_TYPE=X_TYPES[a_dtype],
        RANKS=16 if k <= 8192 else 8,
        CLUSTER=min(16, 1 << max(0, -(-k // 256) - 1).bit_length()) if clusters else 1,
        WARPS=2 if clusters else 4,
        WIDE=int(wide),
        OVERLAP=int(clusters),
        COLUMNS=columns,
        BLOCK=block,
    )


def clusters_for(config: Config, m: int, slots: int, width: int) -> int:
    """Clusters that share the items of a chunk of rows: no more than there can be items."""
    rows = min(m, CHUNK)
    kinds = min(rows, slots + 1)
    items = min(rows, (rows + (ROWS - 1) * kinds) // ROWS) * -(-width // config.RANKS)
    return max(1, min(items, BLOCKS // config.CLUSTER))


def image_blocks_for(config: Config, k: int, multiprocessors: int) -> int:
    """Blocks that lay x out, in whole clusters: a unit each, as far as there are multiprocessors."""
    if not config.COLUMNS:
        return 0
    blocks = min(multiprocessors, SIGNALS - config.CLUSTER, -(-k // (TEAM * UNIT)) * TEAM)
    return -(-blocks // config.CLUSTER) * config.CLUSTER


@lru_cache(maxsize=1024)
def _launch(config: Config, chunks: int, clusters: int, image_blocks: int, arch: str, device: int) -> Launch:
    kernel = nvrtc.load(STEM, arch, asdict(config), device, 0)
    if config.CLUSTER > PORTABLE:
        from cuda.bindings import driver

        allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        nvrtc.check(driver.cuKernelSetAttribute(allowed, 1, kernel, nvrtc.check(driver.cuDeviceGet(device))))
    return Launch(
        kernel,
        (_Problem(clusters=clusters, image_blocks=image_blocks),),
        blocks=image_blocks + chunks * clusters * config.CLUSTER,
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


@dataclass(frozen=True)
class Shrink:
    """A launch that has not been made: it writes `out`, fp32 [M, width]. See `run` for the others.

    Behind `out` in its memory are words by which it signals.
    """

    x: Tensor
    a: Tensor
    spans: Tensor
    index: Tensor | None
    out: Tensor

    @classmethod
    def of(cls, x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, width: int) -> Shrink:
        """Where `reason_against` x has none; with memory for h."""
        m = x.shape[0]
        memory = torch.empty(_signal_at(m, width) // 4 + 2 * SIGNALS, dtype=torch.float32, device=x.device)
        return cls(x, a, spans, index, memory[: m * width].view(m, width))

    def launch(self, image: Image | None = None) -> Signal:
        """Make it; a kernel that is given what it returns must be launched right behind it, and need not wait for it.

        image: lay x out, too, which then lies at 16-byte addresses and has two bytes an element; the signal says that
        it is there. Without, the signal says that x is.
        """
        return _run(self.x, self.a, self.spans, self.index, self.out, signals=True, image=image)


def _signal_at(m: int, width: int) -> int:
    """Bytes to the words, which lie at a multiple of eight."""
    return -(-m * width // 2) * 8


def run(x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, out: Tensor) -> None:
    """As `adapters.shrink_on_cpu`, where `reason_against` has none. An index out of range counts as none.

    x [M, K] of unit stride along K, in any of the three dtypes, as A [rows, K]. out: fp32 [M, width], contiguous.
    """
    _run(x, a, spans, index, out)


def _run(
    x: Tensor,
    a: Tensor,
    spans: Tensor,
    index: Tensor | None,
    out: Tensor,
    signals: bool = False,
    image: Image | None = None,
) -> Signal:
    """signals: whether words for them lie behind `out`, see `Shrink`."""
    m, k = x.shape
    if not m or not out.shape[1]:
        return NO_SIGNAL
    size = x.element_size()
    row = x.stride(0) * size if m > 1 else 0
    wide = (x.data_ptr() | row | a.data_ptr() | k * size) % ALIGNMENT == 0
    index_of_device = x.device.index
    arch, multiprocessors = device_of(index_of_device)
    config = configure(x.dtype, a.dtype, k, wide, arch, *((image.columns, image.block) if image else ()))
    clusters = clusters_for(config, m, spans.shape[0], out.shape[1])
    image_blocks = image_blocks_for(config, k, multiprocessors)
    launch = _launch(config, -(-m // CHUNK), clusters, image_blocks, arch, index_of_device)
    signal = NO_SIGNAL
    if signals and config.OVERLAP:
        signal = Signal(out.data_ptr() + _signal_at(*out.shape), next(_tags), image_blocks or 1)
    fields = {
        "a": a.data_ptr(),
        "spans": spans.data_ptr(),
        "index": None if index is None else index.data_ptr(),
        "k": k,
        "a_rows": a.shape[0],
        "n": out.shape[1],
        "slots": spans.shape[0],
        "signal": signal.address,
        "tag": signal.tag,
        "image": image.address if image else None,
        "counters": image.counters if image else 0,
    }
    stream = int(torch._C._cuda_getCurrentRawStream(index_of_device))
    launch(x, None, out, stream, True, fields)
    return signal
