"""Hugging Face checkpoints: a safetensors file, or a directory with one or with shards and their index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..formats import PackedWeight
from . import bitsandbytes, own, words
from .base import Checkpoint, Entry
from .errors import CheckpointError
from .mapped import read_json
from .safetensors_file import Record, SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Shards(Mapping[str, Tensor]):
    """The tensors of several safetensors files as one mapping, each mapped when asked for."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self.files = files
        self._home: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file:
                if name in self._home:
                    raise CheckpointError(file.path, name, f"is also in {self._home[name].path.name}")
                self._home[name] = file

    def __getitem__(self, name: str) -> Tensor:
        return self._home[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def file(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor."""
        return self._home[name]

    def record(self, name: str) -> Record:
        """Where a tensor lies in its file."""
        return self._home[name].records[name]


class HuggingFaceCheckpoint(Checkpoint):
    """See Checkpoint; opened by `open_checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        directory = path if path.is_dir() else path.parent
        self.tensors = Shards(_directory_files(path) if path.is_dir() else [SafetensorsFile(path)])
        self.metadata = self.tensors.files[0].metadata if self.tensors.files else {}
        self.config = read_json(directory / "config.json") if (directory / "config.json").exists() else None
        self._scheme: words.WordScheme | None = None
        self.kind = self._find_kind(directory)
        self._groups = self._find_groups()

    def entries(self) -> list[Entry]:
        return [self._entry(name) for name in self._groups]

    def load(self, name: str) -> PackedWeight | Tensor:
        if name not in self._groups:
            raise self.unknown(name)
        members = self._groups[name]
        where = str(self.tensors.file(members[0]).path)
        if members == [name]:
            return self.tensors[name]
        if name + own.LABEL in self.tensors:
            return own.unpack_own(self.tensors, name, where)
        if self._scheme is None:
            return bitsandbytes.unpack_state(self.tensors, name, where)
        layer = name.removesuffix(".weight")
        shape, key = self._describe_words(layer, where)
        return words.load_words(self.tensors, layer, key, shape, self._scheme, where)

    def release(self, name: str) -> None:
        for member in self._groups.get(name, ()):
            self.tensors.file(member).release(member)

    def _find_kind(self, directory: Path) -> str:
        """From config.json's quantization_config, or from the tensors' names where there is none."""
        quantization = (self.config or {}).get("quantization_config")
        if quantization is not None and not isinstance(quantization, dict):
            raise CheckpointError(directory / "config.json", "quantization_config", "must be an object")
        file = directory / "config.json"
        if quantization is None and (directory / "quantize_config.json").exists():  # AutoGPTQ before transformers
            file = directory / "quantize_config.json"
            quantization = {"quant_method": "gptq"} | read_json(file)
        method = (quantization or {}).get("quant_method")
        if quantization is not None and method in ("gptq", "awq"):
            self._scheme = words.parse_scheme(quantization, file)
            return str(method)
        if quantization is not None and method not in ("bitsandbytes", "halfbyte"):
            raise CheckpointError(
                file, "quantization_config", f"quant_method {method!r} is none of bitsandbytes, gptq, awq and halfbyte"
            )
        for name in self.tensors:
            if name.endswith((".SCB", ".weight_format")):
                raise CheckpointError(
                    self.tensors.file(name).path, name, "8-bit bitsandbytes weights are not supported"
                )
            if name.endswith(".qweight"):
                raise CheckpointError(
                    self.tensors.file(name).path,
                    name,
                    "GPTQ or AWQ words, but no quantization_config in a config.json beside them says how to read them",
                )
        if any(name.endswith(own.LABEL) for name in self.tensors):
            return "halfbyte"
        return "bitsandbytes" if any(bitsandbytes.STATE in name for name in self.tensors) else "dense"

    def _find_groups(self) -> dict[str, list[str]]:
        """Entry name -> the tensors that make it, in the order of the files."""
        groups: dict[str, list[str]] = {}
        for name in self.tensors:
            owner = self._owner(name)
            if owner != name and self._scheme is not None and owner in self.tensors:
                raise CheckpointError(
                    self.tensors.file(owner).path, owner, f"is there beside '{name}': which one counts?"
                )
            groups.setdefault(owner, []).append(name)
        return groups

    def _owner(self, name: str) -> str:
        """The entry that a tensor belongs to: itself, unless it is a side tensor of a quantised weight."""
        parent = name.rpartition(".")[0]
        if parent + own.LABEL in self.tensors and parent in self.tensors:
            return parent
        if self._scheme is not None:
            for suffix in words.SIDE_TENSORS:
                layer = name.removesuffix(suffix)
                if layer != name and f"{layer}.qweight" in self.tensors:
                    return f"{layer}.weight"
            return name
        for suffix in bitsandbytes.SIDE_TENSORS:
            owner = name.removesuffix(suffix)
            if owner != name and owner in self.tensors:
                return owner
        return name

    def _entry(self, name: str) -> Entry:
        members = self._groups[name]
        nbytes = sum(self.tensors.record(member).nbytes for member in members)
        if members == [name]:
            record = self.tensors.record(name)
            return Entry(name, record.format, record.shape, nbytes, packed=False)
        where = str(self.tensors.file(members[0]).path)
        if self._scheme is None:
            own_label = name + own.LABEL in self.tensors
            describe = own.describe_own if own_label else bitsandbytes.describe_state
            shape, format = describe(self.tensors, name, where)
            return Entry(name, format.key, shape, nbytes, packed=True)
        shape, key = self._describe_words(name.removesuffix(".weight"), where)
        return Entry(name, key, shape, nbytes, packed=True)

    def _describe_words(self, layer: str, where: str) -> tuple[tuple[int, int], str]:
        assert self._scheme is not None
        shapes = {
            layer + part: self.tensors.record(layer + part).shape
            for part in words.PARTS
            if layer + part in self.tensors
        }
        return words.describe_words(shapes, layer, self._scheme, where)


def _directory_files(directory: Path) -> list[SafetensorsFile]:
    index = directory / INDEX
    if index.exists():
        return _indexed_files(directory, index)
    if (directory / SINGLE).exists():
        return [SafetensorsFile(directory / SINGLE)]
    if any(directory.glob("*.gguf")):
        raise CheckpointError(directory, SINGLE, "not found; to read a GGUF model, give its .gguf file")
    if any(directory.glob("*.bin")):
        raise CheckpointError(
            directory, SINGLE, "not found; its .bin weights are Python pickles, which can run code and are never read: "
            "save the model as safetensors"
        )  # fmt: skip
    raise CheckpointError(directory, SINGLE, f"not found, and no {INDEX}; give a model directory or a file")


def _indexed_files(directory: Path, index: Path) -> list[SafetensorsFile]:
    """The shards an index names, checked to be files of this directory that hold what the index says."""
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "weight_map", "must be an object that maps tensors to files")
    for tensor, shard in weight_map.items():
        # a plain name: nothing that leaves the directory (the file itself may be a link, as in the hub's cache)
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(index, tensor, f"its file {str(shard)[:80]!r} is not a plain file name")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(index, tensor, f"its file {shard[:80]!r} is not a .safetensors file")
    files = {shard: SafetensorsFile(directory / shard) for shard in sorted(set(weight_map.values()))}
    for tensor, shard in weight_map.items():
        if tensor not in files[shard]:
            raise CheckpointError(index, tensor, f"is not in {shard}, where the index puts it")
    return list(files.values())
