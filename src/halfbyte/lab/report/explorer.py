"""What the nibble explorer shows, read off the formats themselves.

An example weight is packed for each format, and the package's own functions are asked: which weights change with
which half of a byte (`PackedWeight.unpack`), which code each of the 256 bytes gives them, what a code is worth in a
block (`PackedWeight.dequantize`), how a block's scale and offset are read. The page looks these up.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...formats import FAMILIES, BlockFormat, PackedWeight, RecordLayout, WordLayout, get_format, quantize
from ...formats.codecs import AbsmaxScale, E4M3Scale, E8M0Scale, GroupScale, GroupZero, KQuant, NestedScale, RecordHalf

N, K = 8, 256  # of the example weight: every format can hold it
COLUMNS = 16  # of the words along N, whose blocks are long, so many k are shown
NAMES = {
    "nf4": "NF4", "fp4": "FP4", "q4_0": "Q4_0", "q4_1": "Q4_1", "iq4_nl": "IQ4_NL", "q4_k": "Q4_K",
    "mxfp4": "MXFP4", "mxfp4_gguf": "MXFP4 in GGUF", "nvfp4": "NVFP4", "gptq": "GPTQ", "gptq_v2": "GPTQ, version 2",
    "awq": "AWQ",
}  # fmt: skip


def families() -> dict[str, list[str]]:
    """Name for people -> its formats' keys, by blocksize where one can choose; the default one first."""
    sizes = {"nf4": (64, 32, 128, 256, 512, 1024, 2048, 4096), "gptq": (128, 64, 32)}
    sizes |= {"fp4": sizes["nf4"], "gptq_v2": sizes["gptq"], "awq": sizes["gptq"]}
    found = {}
    for family in FAMILIES:
        name = NAMES.get(family, family)
        found[name] = [f"{family}-{size}" for size in sizes[family]] if family in sizes else [family]
        if isinstance(get_format(family).scale, AbsmaxScale):
            found[f"{name}, nested"] = [f"{key}-nested" for key in found[name]]
    return found


@cache
def explorer_data() -> list[dict[str, Any]]:
    """A record for each family's default format; docs/report.md describes it."""
    return [describe(name, get_format(keys[0])) for name, keys in families().items()]


def describe(name: str, format: BlockFormat) -> dict[str, Any]:
    """All that the page shows of a format."""
    weight = example(format)
    places = _code_bytes(format)
    halves = {half: _touched(weight, places, mask) for half, mask in (("high", 0xF0), ("low", 0x0F))}
    blocks: dict[int, dict[str, Any]] = {}
    for i, place in enumerate(places):
        for n, k in (halves[half][i] for half in halves):
            if (block := (n * K + k) // format.blocksize) not in blocks:
                blocks[block] = _block(weight, block, place, (n, k))
    return {
        "key": format.key,
        "name": name,
        "blocksize": format.blocksize,
        "codebook": [_short(value) for value in format.codebook],
        "codes": _codes_of_bytes(weight, places[0], {half: where[0] for half, where in halves.items()}),
        "blocks": {str(block): blocks[block] for block in sorted(blocks)},
        "positions": [
            _position(weight, place, {half: halves[half][i] for half in halves}) for i, place in enumerate(places)
        ],
        "example": _origin(format),
    }


def example(format: BlockFormat) -> PackedWeight:
    """A weight [8, 256] in the format: seeded normal numbers quantised, or seeded bytes where there is no quantiser."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(N, K, generator=generator) * 0.02
    try:
        return quantize(dense, format)
    except ValueError:
        return PackedWeight(format, (N, K), _random_parts(format, generator))


def _origin(format: BlockFormat) -> str:
    try:
        quantize(torch.zeros(N, K), format)
    except ValueError:
        return "The example's bytes are random: halfbyte reads this format and does not write it."
    return "The example is seeded normal numbers, standard deviation 0.02, quantised by halfbyte."


def _random_parts(format: BlockFormat, generator: torch.Generator) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    for name, part in format.parts(N, K).items():
        dtype = part.dtypes[0]
        if dtype in (torch.int32, torch.uint8):
            width = torch.empty(0, dtype=dtype).element_size()
            octets = torch.randint(
                256, (*part.shape[:-1], part.shape[-1] * width), dtype=torch.uint8, generator=generator
            )
            parts[name] = octets.view(dtype)
        else:
            parts[name] = (torch.rand(part.shape, generator=generator) * 0.02 + 0.002).to(dtype)
    if isinstance(format.scale, E4M3Scale):
        parts["scales"] = (torch.rand(parts["scales"].shape, generator=generator) * 400 + 40).to(torch.float8_e4m3fn)
        parts["global_scale"] = torch.tensor(2.0**-14)
    if isinstance(format.scale, KQuant):
        records = parts["codes"].view(-1, format.scale.bytes)
        halves = torch.rand(records.shape[0], 2, generator=generator) * 2e-4 + 2e-5
        records[:, :4] = halves.half().view(torch.uint8)
    return parts


def _code_bytes(format: BlockFormat) -> list[int]:
    """Where in the part that holds the codes, in bytes, the first block's (or superblock's) codes are."""
    layout = format.layout
    if isinstance(layout, RecordLayout):
        records = max(1, format.blocksize // layout.elements)
        return [
            record * layout.bytes + layout.start + j for record in range(records) for j in range(layout.elements // 2)
        ]
    width = layout.shape(N, K)[1] * 4
    words = format.blocksize // 8 if layout.axis == "K" else COLUMNS
    return [word * width + j for word in range(words) for j in range(4)]


def _with_bytes(weight: PackedWeight, octets: Tensor) -> PackedWeight:
    """The weight with other bytes in the part that holds the codes."""
    codes = octets.view(weight.codes.dtype).view(weight.codes.shape)
    return PackedWeight(weight.format, weight.shape, {**weight.parts, weight.format.layout.part: codes})


def _octets(weight: PackedWeight) -> Tensor:
    """A copy of the codes' part as flat bytes."""
    return weight.codes.clone().view(torch.uint8).reshape(-1)


def _touched(weight: PackedWeight, places: list[int], mask: int) -> list[tuple[int, int]]:
    """(n, k) of the weight whose code is in the masked half of the byte at each place."""
    zero = torch.zeros_like(_octets(weight))
    found = []
    for place in places:
        octets = zero.clone()
        octets[place] = mask
        ((n, k),) = _with_bytes(weight, octets).unpack().nonzero().tolist()
        found.append((n, k))
    return found


def _codes_of_bytes(weight: PackedWeight, place: int, halves: dict[str, tuple[int, int]]) -> dict[str, str]:
    """For each half the codes that the 256 bytes give its weight, a hexadecimal digit each."""
    found = dict.fromkeys(halves, "")
    octets = _octets(weight)
    for byte in range(256):
        octets[place] = byte
        codes = _with_bytes(weight, octets).unpack(slice(0, N))
        for half, (n, k) in halves.items():
            found[half] += f"{int(codes[n, k]):x}"
    return found


def _position(weight: PackedWeight, place: int, halves: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """A byte of the example and its two weights, the first of the matrix first."""
    layout = weight.format.layout
    if isinstance(layout, WordLayout):
        row, column = divmod(place // 4, weight.codes.shape[1])
        name = f"byte {place % 4} of {layout.part}[{row}, {column}]"
    elif layout.elements > 2:
        name = f"byte {place % layout.bytes} of record {place // layout.bytes}"
    else:
        name = f"{layout.part}[{place}]"
    nibbles = []
    for half, (n, k) in sorted(halves.items(), key=lambda item: item[1]):
        shift = 4 if half == "high" else 0
        expression = "byte >> 4" if half == "high" else "byte & 0x0F"
        in_word = f"(word >> {8 * (place % 4) + shift}) & 0xF" if isinstance(layout, WordLayout) else None
        nibbles.append({"half": half, "expression": expression, "word": in_word, "n": n, "k": k,
                        "block": (n * K + k) // weight.format.blocksize})  # fmt: skip
    return {"name": name, "byte": int(_octets(weight)[place]), "nibbles": nibbles}


def _block(weight: PackedWeight, block: int, place: int, at: tuple[int, int]) -> dict[str, Any]:
    """A block's scale and offset, how they are read, and what its 16 codes are worth, rounded once to fp32.

    place: a byte that holds the code of the weight at `at`, which is of the block.
    """
    offsets = weight.offsets()
    n, k = at
    octets, values = _octets(weight), []
    for code in range(16):
        octets[place] = code * 17
        values.append(_short(float(_with_bytes(weight, octets).dequantize(torch.float32, slice(n, n + 1))[0, k])))
    found: dict[str, Any] = {
        "scale": _short(float(weight.scales()[block])),
        "offset": None if offsets is None else _short(float(offsets[block])),
        "scale_from": _steps(weight, weight.format.scale, block),
        "values": values,
    }
    if weight.format.offset is not None:
        found["offset_from"] = _steps(weight, weight.format.offset, block)
    return found


def _short(value: float) -> float:
    """The shortest decimal that is the same fp32 number."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))


def _steps(weight: PackedWeight, codec: object, block: int) -> list[str]:
    """How a codec comes to a block's number: fields, their bits, and what is done with them."""
    parts, size = weight.parts, weight.format.blocksize
    n, group = divmod(block, max(1, K // size))
    if isinstance(codec, AbsmaxScale):
        return [f"absmax[{block}], fp32"]
    if isinstance(codec, NestedScale):
        code = int(parts["absmax"][block])
        second, offset = (_short(float(parts[name].reshape(-1)[0])) for name in ("nested_absmax", "nested_offset"))
        entry = _short(float(parts["nested_quant_map"][code]))
        return [f"absmax[{block}] = {code}, uint8", f"nested_quant_map[{code}] = {entry:g}",
                f"{entry:g} × nested_absmax[{block >> 8}] {second:g} + nested_offset {offset:g}"]  # fmt: skip
    if isinstance(codec, RecordHalf):
        return [f"{_half(weight, block, codec.bytes, codec.start)}"]
    if isinstance(codec, KQuant):
        half = _half(weight, block // 8, codec.bytes, 2 if codec.minimum else 0)
        name = "m" if codec.minimum else "s"
        base = _value_of_half(weight, block // 8, codec.bytes, 2 if codec.minimum else 0)
        number = codec.read(parts, *weight.shape, size)[block]
        six = round(abs(float(number)) / base) if base else 0
        return [
            half,
            f"{name}[{block % 8}] = {six}, six of the bits of bytes 4 to 15",
            f"{'−' if codec.minimum else ''}{base:g} × {six}",
        ]
    if isinstance(codec, E8M0Scale):
        octets = (
            parts["codes"].reshape(-1, codec.record_bytes)[:, 0] if codec.record_bytes else parts["scales"].reshape(-1)
        )
        exponent = int(octets[block])
        field = f"byte 0 of record {block}" if codec.record_bytes else f"scales[{n}, {group}]"
        return [f"{field} = {exponent}, E8M0", f"2^({exponent} − 127)"]
    if isinstance(codec, E4M3Scale):
        scale = parts["scales"].reshape(-1)[block]
        bits = int(scale.view(torch.uint8))
        return [f"scales[{n}, {group}] = 0x{bits:02X}, E4M3: {float(scale):g}",
                f"× global_scale {float(parts['global_scale']):g}"]  # fmt: skip
    if isinstance(codec, GroupScale):
        return [f"scales[{group}, {n}], {str(parts['scales'].dtype).removeprefix('torch.')}"]
    if isinstance(codec, GroupZero):
        return _zero_steps(weight, codec, n, group)
    return []


def _zero_steps(weight: PackedWeight, codec: GroupZero, n: int, group: int) -> list[str]:
    word = int(weight.parts["qzeros"][group, n // 8]) & 0xFFFFFFFF
    shift = 4 * codec.order[n % 8]
    stored = (word >> shift) & 0xF
    more = " + 1" if codec.plus_one else ""
    return [f"qzeros[{group}, {n // 8}] = 0x{word:08X}", f"(word >> {shift}) & 0xF = {stored}",
            f"− scale × ({stored}{more})" if more else f"− scale × {stored}"]  # fmt: skip


def _value_of_half(weight: PackedWeight, record: int, size: int, start: int) -> float:
    octets = weight.codes.reshape(-1)[record * size + start : record * size + start + 2].clone()
    return _short(float(octets.view(torch.float16)[0]))


def _half(weight: PackedWeight, record: int, size: int, start: int) -> str:
    low, high = weight.codes.reshape(-1)[record * size + start : record * size + start + 2].tolist()
    value = _value_of_half(weight, record, size, start)
    return f"bytes {start} and {start + 1} of record {record} = 0x{high << 8 | low:04X}, fp16: {value:g}"
