"""`halfbyte prove`: what halfbyte claims, measured on the user's own checkpoint, as one document.

Three parts: every packed layer against float64 and the peers, each layer shape's speed, and the whole model. Layers
are walked one at a time; the state is kept after each, so that a run can be interrupted and resumed.
docs/prove.md describes the document.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import Checkpoint, Entry, open_checkpoint
from ..reference import FACTOR, FP32_LIMIT
from .linear import DTYPE_NAMES
from .measure import read_ceiling
from .peers import Peer
from .prove_adapters import AdapterFile, read_adapter
from .prove_layers import choose_peers, measure_speed, prove_layer
from .prove_model import PROMPTS, prove_model
from .prove_state import Journal
from .rows import Environment
from .verify import packed_layers, packed_names

SCHEMA = 1
SEED = 0
Progress = Callable[[str, int, int], None]  # stage, steps done, steps in all


@dataclass(frozen=True)
class Settings:
    """What to prove, on what.

    adapters: PEFT directories. against: peers by the names of AGAINST, None for the default ones. dtype: "bf16" or
    "fp16", of the comparison with peers, the speed and the model. rows, columns: of each layer's random activations,
    and how many columns one-hot rows read. only: layers whose name contains it; all without. ms: rows of x to time.
    seconds: on each candidate of a timing. warm: time with weights in the caches. text: a file to measure perplexity
    on. speed, model: whether to do those parts.
    """

    path: Path
    adapters: tuple[Path, ...] = ()
    against: tuple[str, ...] | None = None
    dtype: str = "bf16"
    device: str = "cpu"
    rows: int = 3
    columns: int = 16
    only: str = ""
    ms: tuple[int, ...] = (1, 16, 32)
    seconds: float = 0.5
    warm: bool = False
    text: Path | None = None
    text_tokens: int = 512
    prompts: tuple[str, ...] = PROMPTS
    tokens: int = 32
    speed: bool = True
    model: bool = True


def prove(
    settings: Settings, out: Path | None = None, resume: bool = False, progress: Progress = lambda *step: None
) -> dict[str, Any]:
    """Run what `settings` ask for and return the document; with `out` it is written there, and its state beside it.

    Raises ValueError for settings that contradict each other or the checkpoint, and what `open_checkpoint`,
    `read_adapter`, `choose_peers`, `Journal` and `prove_model` raise.
    """
    if settings.dtype not in ("bf16", "fp16"):
        raise ValueError(f"--dtype: proofs are made in bf16 or fp16 (and in fp32 beside it), got '{settings.dtype}'")
    device = torch.device(settings.device)
    checkpoint = open_checkpoint(settings.path)
    packed = {entry.name: entry for entry in checkpoint.entries() if entry.packed and settings.only in entry.name}
    if not packed:
        named = f" whose name contains '{settings.only}'" if settings.only else ""
        raise ValueError(f"{settings.path} holds no 4-bit weights that halfbyte knows{named}")
    peers, missing = choose_peers(settings.against, device)
    adapters = [read_adapter(folder) for folder in settings.adapters]
    _check_adapters(adapters, checkpoint)
    journal = Journal(out, _run(settings, checkpoint, device, peers), resume)
    document = journal.document
    document |= {
        "schema": SCHEMA,
        "model": {
            "path": str(settings.path),
            "kind": checkpoint.kind,
            "packed_layers": len(packed),
            "packed_bytes": sum(entry.nbytes for entry in packed.values()),
            "weights": sum(entry.shape[0] * entry.shape[1] for entry in packed.values()),
        },
        "environment": asdict(Environment.of(device)),
        "peers": [peer.name for peer in peers],
        "not_installed": missing,
    }
    _layers(settings, checkpoint, packed, peers, adapters, journal, progress)
    if settings.speed:
        _speed(settings, checkpoint, packed, peers, journal, progress)
    if settings.model and "end_to_end" not in document:
        document["end_to_end"] = _model(settings, checkpoint, progress)
    document["summary"] = summarise(document)
    return journal.finish()


def _check_adapters(adapters: Sequence[AdapterFile], checkpoint: Checkpoint) -> None:
    """Raise ValueError where an adapter touches none of the packed layers: it is of another model, or names differ."""
    names = packed_names(checkpoint)
    for adapter in adapters:
        if not adapter.layers.keys() & set(names):
            raise ValueError(
                f"--adapter {adapter.path}: none of its {len(adapter.layers)} layers (the first: "
                f"{next(iter(adapter.layers))}) is a packed layer of this checkpoint (the first: {names[0]})"
            )


def _run(settings: Settings, checkpoint: Checkpoint, device: torch.device, peers: Sequence[Peer]) -> dict[str, Any]:
    """What decides the numbers: a resumed run must agree with it."""
    where = asdict(Environment.of(device))
    where.pop("date")
    files = [checkpoint.path] if checkpoint.path.is_file() else _weight_files([checkpoint.path])
    files += _weight_files(settings.adapters)
    text = hashlib.sha256(settings.text.read_bytes()).hexdigest() if settings.text else None
    plain = replace(settings, path=settings.path.resolve())
    return {
        "settings": {key: _plain(value) for key, value in asdict(plain).items()},
        "files": [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "text_sha256": text,
        "environment": where,
        "peers": [peer.name for peer in peers],
    }


def _weight_files(folders: Iterable[Path]) -> list[Path]:
    return [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]


def _plain(value: Any) -> Any:
    """As JSON gives it back, so that it can be compared."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _layers(
    settings: Settings,
    checkpoint: Checkpoint,
    packed: dict[str, Entry],
    peers: Sequence[Peer],
    adapters: Sequence[AdapterFile],
    journal: Journal,
    progress: Progress,
) -> None:
    """A record for each packed layer that has none yet."""
    done: list[dict[str, Any]] = journal.document.setdefault("layers", [])
    seen = {record["name"] for record in done}
    seeds = {name: SEED + number for number, name in enumerate(packed_names(checkpoint))}
    progress("layers", len(done), len(packed))
    todo = [name for name in packed if name not in seen]
    for name, weight in packed_layers(checkpoint, todo, torch.device(settings.device)):
        touching = {str(adapter.path): adapter.layers[name] for adapter in adapters if name in adapter.layers}
        record = prove_layer(
            name, weight, peers, touching, settings.dtype, settings.rows, settings.columns, seeds[name]
        )
        done.append(record)
        journal.save()
        progress("layers", len(done), len(packed))


def _speed(
    settings: Settings,
    checkpoint: Checkpoint,
    packed: dict[str, Entry],
    peers: Sequence[Peer],
    journal: Journal,
    progress: Progress,
) -> None:
    """Timings of each layer shape and format that has none yet, on the first layer that has it."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for entry in packed.values():
        groups.setdefault((entry.format, entry.shape), []).append(entry.name)
    document = journal.document
    done: list[dict[str, Any]] = document.setdefault("speed", [])
    seen = {record["layer"] for record in done}
    progress("speed", len(done), len(groups))
    todo = {names[0]: len(names) for names in groups.values() if names[0] not in seen}
    ceiling = read_ceiling(torch.device(settings.device)) / 1e12 if todo else 0.0
    total = document["model"]["packed_bytes"]
    for name, weight in packed_layers(checkpoint, list(todo), torch.device(settings.device)):
        copies = 1 if settings.warm else -(-total // weight.nbytes)
        record = measure_speed(
            name, weight, todo[name], peers, settings.ms, settings.dtype, settings.seconds, copies, ceiling
        )
        done.append(record)
        journal.save()
        progress("speed", len(done), len(groups))


def _model(settings: Settings, checkpoint: Checkpoint, progress: Progress) -> dict[str, Any]:
    if settings.path.is_file() and checkpoint.kind != "gguf":
        raise ValueError(f"{settings.path} is no model by itself; give its directory, or --no-model")
    return prove_model(
        path=settings.path,
        kind=checkpoint.kind,
        dtype=DTYPE_NAMES[settings.dtype],
        device=settings.device,
        peers=("bitsandbytes", "dense") if settings.against is None else settings.against,
        text=settings.text.read_text(encoding="utf-8") if settings.text else None,
        text_tokens=settings.text_tokens,
        prompts=settings.prompts,
        tokens=settings.tokens,
        adapters=settings.adapters,
        progress=lambda done, total: progress("model", done, total),
    )


def summarise(document: dict[str, Any]) -> dict[str, Any]:
    """The document's few numbers that answer the question."""
    layers = document["layers"]
    theirs: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        for name, record in layer["peers"].items():
            theirs.setdefault(name, []).append(record)
    return {
        "all_within_contract": all(layer["ok"] for layer in layers),
        "outside": [layer["name"] for layer in layers if not layer["ok"]],
        "allowed": {"over_limit": FACTOR, "error_fp32": FP32_LIMIT},
        "halfbyte": _spread([layer["halfbyte"] for layer in layers]),
        "peers": {
            name: _spread(records) | {"difference": _middle([record["difference"] for record in records])}
            for name, records in theirs.items()
        },
        "swapped_nibbles_detected": _all_seen([layer["swap_detected"] for layer in layers]),
        "adapters": _adapters(layers),
        "step_us": _step(document.get("speed", [])),
        "greedy": _greedy(document.get("end_to_end")),
    }


def _spread(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    over = [max(record["over_limit"].values()) for record in records]
    fp32 = [record["error"]["fp32"] for record in records if "fp32" in record["error"]]
    return {
        "layers": len(records),
        "over_limit": _middle(over),
        "error_fp32": max(fp32, default=None),
        "equal": min(min(record["equal"].values()) for record in records),
        "worst_ulp": max(max(record["worst_ulp"].values()) for record in records),
    }


def _middle(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _all_seen(swaps: Sequence[bool | None]) -> bool:
    return True in swaps and False not in swaps


def _adapters(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each adapter: its effect, and that over the difference between ours and each peer in the same layer.

    "float64" stands for our error: the difference between ours and the exact result.
    """
    found: dict[str, Any] = {}
    for label in sorted({label for layer in layers for label in layer["adapters"]}):
        touched = [layer for layer in layers if label in layer["adapters"]]
        effects = [layer["adapters"][label]["effect"] for layer in touched]
        ratios: dict[str, list[float]] = {}
        for layer, effect in zip(touched, effects, strict=True):
            errors = {name: error for name, error in layer["halfbyte"]["error"].items() if name != "fp32"}
            differences = {name: peer["difference"] for name, peer in layer["peers"].items()}
            for name, difference in {"float64": max(errors.values()), **differences}.items():
                if difference:
                    ratios.setdefault(name, []).append(effect / difference)
        found[label] = {
            "layers": len(touched),
            "ranks": sorted({layer["adapters"][label]["rank"] for layer in touched}),
            "effect": _middle(effects),
            "over_difference": {name: _middle(values) for name, values in ratios.items()},
        }
    return found


def _step(speed: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Kernel -> M -> microseconds of all packed layers together; only kernels that were timed on every shape."""
    sums: dict[str, dict[str, float]] = {}
    counts: dict[tuple[str, str], int] = {}
    for shape in speed:
        for row in shape["rows"]:
            kernel = "halfbyte" if row["kernel"].startswith("halfbyte ") else row["kernel"]
            by_m = sums.setdefault(kernel, {})
            m = str(row["M"])
            by_m[m] = by_m.get(m, 0.0) + shape["layers"] * row["us"]
            counts[kernel, m] = counts.get((kernel, m), 0) + 1
    return {
        kernel: {m: us for m, us in by_m.items() if counts[kernel, m] == len(speed)} for kernel, by_m in sums.items()
    }


def _greedy(end_to_end: dict[str, Any] | None) -> list[dict[str, Any]]:
    """For each pair of systems how many answers differ, and the first token where any does."""
    if end_to_end is None:
        return []
    found = []
    for pair in end_to_end["greedy"]["pairs"]:
        places = [place for place in pair["first"] if place is not None]
        found.append(
            {
                "a": pair["a"],
                "b": pair["b"],
                "prompts": len(pair["first"]),
                "differ": len(places),
                "earliest": min(places, default=None),
            }
        )
    return found
