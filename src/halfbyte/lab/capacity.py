"""`halfbyte plan`: what a model needs, what fits where, and the speed that memory allows.

Bytes are exact counts of the formats' own layouts. A step (one token for each user) has to read the weights once, the
users' caches and the adapters in use: those bytes over the bandwidth is the least time a step can take, and what
arithmetic, launches and the network add comes on top.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from ..device import name_of
from ..formats import BlockFormat, get_format
from .capacity_model import Model, values_in
from .cards import CARDS, get_card
from .measure import read_ceiling

DENSE = {"bf16": 2, "fp16": 2, "fp32": 4}
KV_BITS = (16, 8, 4)
STORED = "as stored"
CHUNK = 2048  # tokens of a prompt that are worked on at once
UTILISATION = 0.9  # share of the memory that a server takes; the rest is for the driver, other programs, fragments


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's weights in a format.

    codes: of the 4-bit codes; in a 16-bit format and in a checkpoint as stored, all of the matrices. scales: with
    offsets and whatever else lies beside the codes. second_level: of nested statistics, tables included. unquantised:
    embeddings, head, norms, routers, and matrices whose shape the format cannot hold. experts: of all these, those of
    mixtures. gathered: an embedding of which a step reads only its tokens' rows.
    """

    format: str
    codes: int
    scales: int
    second_level: int
    unquantised: int
    experts: int
    gathered: int

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.second_level + self.unquantised

    def read(self, model: Model, users: int) -> float:
        """Bytes that a step of `users` tokens reads."""
        return self.total - self.gathered - self.experts * (1 - model.experts_read(users))


@dataclass(frozen=True)
class Place:
    """Where a model may run.

    memory: bytes. bandwidth: bytes a second. origin: "measured" (a plain read, here and now), "quoted" or "given".
    """

    name: str
    memory: int
    bandwidth: float
    origin: str


@dataclass(frozen=True)
class Load:
    """What is asked of it. context: tokens of each user's sequence. adapters: LoRA adapters kept ready, of one rank."""

    context: int
    users: int
    adapters: int = 0
    rank: int = 16


@dataclass(frozen=True)
class Fit:
    """A model in one format under one load in one place. Bytes; step in seconds.

    most_users: with this context; -1 where not even the weights fit. tokens_per_s: the bound for all users together.
    """

    weights: int
    kv: int
    adapters: int
    activations: int
    total: int
    fits: bool
    most_users: int
    step_bytes: float
    step_s: float
    tokens_per_s: float


def weight_bytes(model: Model, key: str) -> WeightBytes:
    """The model's weights in a format: a key such as "nf4-64-nested", "bf16", "fp16" or "fp32", or "as stored".

    Raises ValueError for an unknown format, or "as stored" without a checkpoint.
    """
    dense = (model.embedding + model.head + model.other) * 2
    gathered = model.embedding * 2 if model.head else 0
    if key == STORED:
        if model.stored is None:
            raise ValueError(f"'{STORED}' needs a checkpoint; {model.name} is a config")
        kept = model.stored
        label = f"{STORED} ({kept.format})"
        return WeightBytes(label, kept.packed, 0, 0, kept.total - kept.packed, kept.experts, kept.embedding)
    if key in DENSE:
        size = DENSE[key]
        experts = values_in(model.experts) * size
        codes = values_in(model.linears) * size + experts
        return WeightBytes(key, codes, 0, 0, dense * size // 2, experts, gathered * size // 2)
    format = get_format(key)
    of_experts = _packed(format, model.experts)
    both = _packed(format, model.linears) + of_experts
    return WeightBytes(
        format.key, both["codes"], both["scales"], both["second_level"], dense + both["unquantised"],
        of_experts.total(), gathered,
    )  # fmt: skip


def _packed(format: BlockFormat, matrices: Mapping[tuple[int, int], int]) -> Counter[str]:
    """Bytes of matrices by what they are; those of a shape that the format cannot hold stay in 16 bits."""
    found: Counter[str] = Counter()
    for (n, k), count in matrices.items():
        try:
            format.check_shape(n, k)
        except ValueError:
            found["unquantised"] += n * k * 2 * count
            continue
        parts = {name: math.prod(part.shape) * part.dtypes[0].itemsize for name, part in format.parts(n, k).items()}
        codes = -(-n * k // 2)
        second = sum(size for name, size in parts.items() if name.startswith("nested_"))
        found["codes"] += codes * count
        found["second_level"] += second * count
        found["scales"] += (sum(parts.values()) - codes - second) * count
    return found


def kv_bytes(model: Model, context: int, users: int, bits: int = 16) -> int:
    """Bytes of all users' caches: 2 · layers · kv_heads · head_dim · context · users · bytes, in each layer's window.

    bits: of a value. Scales that an engine keeps beside an 8- or 4-bit cache are not counted.
    """
    return model.cache.values(context) * users * bits // 8


def adapter_bytes(model: Model, rank: int) -> int:
    """One LoRA adapter in 16 bits on every linear layer (experts have none): rank · (N + K) values each."""
    return sum(rank * (n + k) * count for (n, k), count in model.linears.items()) * 2


def activation_bytes(model: Model, users: int) -> int:
    """An estimate of what a server works in: a chunk of a prompt in 16 bits, and every user's logits in fp32.

    The chunk's hidden state twice and its widest layer's output twice (a gate and an up projection, say).
    """
    widest = max((n for n, _ in (*model.linears, *model.experts)), default=model.hidden)
    return CHUNK * 2 * (model.hidden + widest) * 2 + users * model.vocabulary * 4


def fit(model: Model, weights: WeightBytes, place: Place, load: Load, bits: int = 16) -> Fit:
    """Whether it fits, and how fast memory allows it to be."""
    each = kv_bytes(model, load.context, 1, bits)
    one_adapter = adapter_bytes(model, load.rank) if load.adapters else 0
    adapters = one_adapter * load.adapters
    activations = activation_bytes(model, load.users)
    total = weights.total + each * load.users + adapters + activations
    room = place.memory * UTILISATION
    fixed = weights.total + adapters + activation_bytes(model, 0)
    per_user = each + model.vocabulary * 4
    most = int((room - fixed) // per_user) if room >= fixed else -1
    read = weights.read(model, load.users) + each * load.users + one_adapter * min(load.adapters, load.users)
    step = read / place.bandwidth
    return Fit(
        weights=weights.total,
        kv=each * load.users,
        adapters=adapters,
        activations=activations,
        total=total,
        fits=total <= room,
        most_users=most,
        step_bytes=read,
        step_s=step,
        tokens_per_s=load.users / step,
    )


def place_of(name: str, tb_per_s: float | None = None) -> Place:
    """A card of `lab.cards` by its key ("h200", "5090"), or "cpu": this machine.

    The bandwidth is measured where the place is this machine, and quoted from the vendor elsewhere, or `tb_per_s` if
    given. Raises ValueError for an unknown card.
    """
    if name == "cpu":
        place = _this_cpu() if tb_per_s is None else Place(name_of(torch.device("cpu")), _ram(), 0.0, "")
    else:
        place = _card(name, measure=tb_per_s is None)
    if tb_per_s is None:
        return place
    return Place(place.name, place.memory, tb_per_s * 1e12, "given")


def _card(key: str, measure: bool) -> Place:
    """The vendor's numbers, or this machine's where its first GPU is such a card."""
    card = get_card(key)
    key = next(known for known, each in CARDS.items() if each is card)
    if measure and torch.cuda.is_available():
        words = torch.cuda.get_device_name().replace("-", " ").upper().split()
        if key.upper() in words:
            device = torch.device("cuda")
            memory = torch.cuda.get_device_properties(device).total_memory
            return Place(name_of(device), memory, read_ceiling(device), "measured")
    return Place(card.name, card.memory_mib << 20, card.memory_tb_per_s * 1e12, "quoted")


@cache
def _this_cpu() -> Place:
    return Place(name_of(torch.device("cpu")), _ram(), read_ceiling(torch.device("cpu")), "measured")


def _ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
