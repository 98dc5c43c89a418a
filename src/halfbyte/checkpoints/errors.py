"""The one exception of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it is: names the file, the tensor (or the part of the file) and the cause."""

    def __init__(self, file: object, tensor: str, cause: str) -> None:
        super().__init__(str(file), tensor, cause)
        self.file = str(file)
        self.tensor = tensor
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor}: {self.cause}"
