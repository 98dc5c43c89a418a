from collections.abc import Callable
from typing import Any

from torch import Tensor, dtype

def connect(
    exchange: object,
    linear: Callable[..., Tensor],
    empty_strided: Callable[..., Tensor],
    empty_strided_on_cpu: Callable[..., Tensor],
    uint8: dtype,
    threads: Callable[[], int],
    record_bytes: int,
    cpu_record_bytes: int,
    launch: int,
    context_device: int,
    is_capturing: int,
    /,
) -> None: ...
def weight(views: tuple[Tensor, ...], format: str, n: int, k: int, /) -> object: ...
def publish(weight: object, /) -> None: ...
def remember(
    weight: object, x: Tensor, m: int, record: int, on_cpu: bool, owner: Any, counters: dict[str, int], /
) -> None: ...
def multiply(weight: object, x: Tensor, bias: Tensor | None, operator: str, /) -> Tensor | None: ...
def linear(x: Tensor, parts: list[Tensor], bias: Tensor | None, format: str, n: int, k: int, /) -> Tensor: ...
def keys() -> bytes | None: ...
def lead(
    operator: Callable[..., Tensor],
    keys: tuple[bytes, ...],
    watching: tuple[Callable[[], bool], ...],
    types: tuple[type, ...],
    grad_enabled: Callable[[], bool],
    is_negated: Callable[[Tensor], bool],
    /,
) -> None: ...
def trust(kind: type, /) -> None: ...
def operate(*arguments: Any, **named: Any) -> Tensor: ...
