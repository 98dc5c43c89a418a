"""Damaged files give a CheckpointError or the right model, nothing else.

"The right model" is what an independent reader makes of the same bytes: safetensors' own for safetensors files, for
GGUF a check that each loaded tensor holds the bytes at the place that its description in the file gives. Every case
runs under a limit of time and memory, and is reproduced by its seed: `check_gguf(mutate(sample_gguf(), seed), path)`.
"""

from __future__ import annotations

import random
import resource
import signal
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from checkpoint_samples import sample_gguf, sample_safetensors, write
from halfbyte.checkpoints import CheckpointError, open_checkpoint, unpack_state
from halfbyte.formats import PackedWeight

MUTATIONS = 200
SECONDS = 5
MEMORY = 8 << 20  # beyond what the file itself (some 10 KB) can account for
INTERESTING = (0, 1, 2, 7, 31, 32, 127, 128, 255, 256, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63,
               2**64 - 32, 2**64 - 1)  # fmt: skip


def mutate(data: bytes, seed: int) -> bytes:
    """One to four changes: bits, bytes, integers that overflow, cuts, repeats, swaps; half of them in the header."""
    rng = random.Random(seed)
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = len(raw) if rng.random() < 0.5 else min(len(raw), 1500)
        at = rng.randrange(max(1, end))
        kind = rng.randrange(8)
        if kind == 0:
            raw[at : at + 1] = bytes([(raw[at] if at < len(raw) else 0) ^ (1 << rng.randrange(8))])
        elif kind == 1:
            raw[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            value = rng.choice(INTERESTING)
            size = rng.choice((4, 8))
            raw[at : at + size] = struct.pack("<Q", value)[:size]
        elif kind == 3:
            del raw[at : at + rng.choice((1, 8, 64, 1024))]
        elif kind == 4:
            raw[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        elif kind == 5:
            del raw[at:]
        elif kind == 6:
            size = rng.choice((4, 8, 32))
            other = rng.randrange(max(1, end))
            raw[at : at + size] = raw[other : other + size]
        else:
            raw[at : at + 8] = b"\xff" * 8
    return bytes(raw)


@contextmanager
def limits(label: str) -> Iterator[None]:
    """Fail a case that takes SECONDS, or allocates MEMORY in Python, or in the process as a whole."""

    def expired(signum: int, frame: object) -> None:
        raise AssertionError(f"{label}: still running after {SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, expired)
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS)  # pytest-timeout's own, put back below
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert peak < MEMORY, f"{label}: allocated {peak} bytes"
        assert grown < 4 * MEMORY, f"{label}: the process grew by {grown} bytes"
    finally:
        tracemalloc.stop()
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def load_all(path: Path) -> dict[str, PackedWeight | torch.Tensor] | None:
    """Everything in a checkpoint; None where any of it is refused."""
    try:
        checkpoint = open_checkpoint(path)
        entries = checkpoint.entries()
    except CheckpointError:
        return None
    loaded: dict[str, PackedWeight | torch.Tensor] = {}
    refused = False
    for entry in entries:
        try:
            loaded[entry.name] = value = checkpoint.load(entry.name)
        except CheckpointError:
            refused = True
            continue
        assert entry.packed == isinstance(value, PackedWeight)
        assert tuple(value.shape) == entry.shape
        if isinstance(value, PackedWeight):
            assert value.dequantize().shape == entry.shape
    return None if refused else loaded


# --- safetensors ------------------------------------------------------------------------------------------------------


def check_safetensors(data: bytes, path: Path) -> bool:
    """True where the file was read, as safetensors reads it too; False where it was refused."""
    loaded = load_all(write(path, data))
    if loaded is None:
        return False
    try:
        theirs = load_safetensors(data)
    except SafetensorError as error:
        raise AssertionError(f"accepted a file that safetensors refuses: {error}") from error
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype
            assert torch.equal(value.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8))
        else:
            again = unpack_state(theirs, name, "theirs")
            assert again.format == value.format
            assert all(torch.equal(again.parts[part], value.parts[part]) for part in value.parts)
    return True


def test_safetensors_mutations(tmp_path: Path) -> None:
    sample = sample_safetensors()
    assert check_safetensors(sample, tmp_path / "warm-up")
    outcomes = []
    for seed in range(MUTATIONS):
        with limits(f"safetensors seed {seed}"):
            outcomes.append(check_safetensors(mutate(sample, seed), tmp_path / "m"))
    assert 10 < sum(outcomes) < MUTATIONS - 50  # both outcomes are exercised


def test_safetensors_truncations(tmp_path: Path) -> None:
    """Cut at every byte of the length and header's start, at every tensor's ends, and just beside them."""
    sample = sample_safetensors()
    length = struct.unpack("<Q", sample[:8])[0]
    checkpoint = open_checkpoint(write(tmp_path / "whole", sample))
    edges = {8 + length, *range(64)}
    for record in checkpoint.tensors.files[0].records.values():  # type: ignore[attr-defined]
        edges |= {record.start, record.start + record.nbytes}
    cuts = sorted({cut + shift for cut in edges for shift in (-1, 0, 1) if 0 <= cut + shift < len(sample)})
    for cut in cuts:
        with limits(f"safetensors cut at {cut}"), pytest.raises(CheckpointError):
            open_checkpoint(write(tmp_path / "m", sample[:cut]))


# --- GGUF -------------------------------------------------------------------------------------------------------------


def described_bytes(data: bytes) -> dict[str, tuple[GGMLQuantizationType, tuple[int, ...], bytes]]:
    """An independent, trusting reader: name -> type, shape, bytes. Only called on files that were accepted."""
    at = 24
    alignment = 32

    def number(size: int) -> int:
        nonlocal at
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def string() -> bytes:
        nonlocal at
        size = number(8)
        at += size
        return data[at - size : at]

    def value(kind: int) -> int | None:
        nonlocal at
        if kind == 8:
            string()
        elif kind == 9:
            inner, count = number(4), number(8)
            for _ in range(count):
                value(inner)
        else:
            return number({0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind])
        return None

    tensor_count, pair_count = struct.unpack("<QQ", data[8:24])
    for _ in range(pair_count):
        key, kind = string(), number(4)
        read = value(kind)
        if key == b"general.alignment" and read is not None:
            alignment = read
    found = []
    for _ in range(tensor_count):
        name = string().decode()
        sizes = [number(8) for _ in range(number(4))]
        found.append((name, GGMLQuantizationType(number(4)), tuple(reversed(sizes)), number(8)))
    start = -(-at // alignment) * alignment
    out = {}
    for name, kind, shape, offset in found:
        block, size = GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(shape)) // block * size
        out[name] = (kind, shape, data[start + offset : start + offset + nbytes])
        assert len(out[name][2]) == nbytes
    return out


def check_gguf(data: bytes, path: Path) -> bool:
    """True where the file was read, with the bytes that it describes; False where it was refused."""
    loaded = load_all(write(path, data))
    if loaded is None:
        return False
    for name, (kind, shape, raw) in described_bytes(data).items():
        experts = [loaded.pop(f"{name}[{i}]") for i in range(shape[0])] if f"{name}[0]" in loaded else []
        values = experts or [loaded.pop(name)]
        if all(isinstance(value, PackedWeight) for value in values):
            assert b"".join(value.codes.numpy().tobytes() for value in values) == raw  # type: ignore[union-attr]
        elif kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
            (value,) = values
            assert isinstance(value, torch.Tensor)
            assert value.contiguous().view(torch.uint8).numpy().tobytes() == raw
    assert not loaded
    return True


def test_gguf_mutations(tmp_path: Path) -> None:
    sample = sample_gguf()
    assert check_gguf(sample, tmp_path / "warm-up")
    outcomes = []
    for seed in range(MUTATIONS):
        with limits(f"gguf seed {seed}"):
            outcomes.append(check_gguf(mutate(sample, seed), tmp_path / "m"))
    assert 10 < sum(outcomes) < MUTATIONS - 50  # both outcomes are exercised


def test_gguf_truncations(tmp_path: Path) -> None:
    """Cut at every byte of the header, and at both ends of every tensor."""
    sample = sample_gguf()
    raws = [raw for _, _, raw in described_bytes(sample).values()]
    edges = set(range(sample.index(raws[0])))
    for raw in raws:
        edges |= {sample.index(raw), sample.index(raw) + len(raw)}
    last = sample.index(raws[-1]) + len(raws[-1])
    for cut in sorted({cut + shift for cut in edges for shift in (-1, 0) if 0 <= cut + shift < last}):
        with limits(f"gguf cut at {cut}"), pytest.raises(CheckpointError):
            open_checkpoint(write(tmp_path / "m", sample[:cut]))


def test_mutations_are_reproducible() -> None:
    sample = sample_gguf()
    assert [mutate(sample, seed) for seed in range(20)] == [mutate(sample, seed) for seed in range(20)]
    assert len({mutate(sample, seed) for seed in range(MUTATIONS)}) > 0.9 * MUTATIONS
