"""A directory that appears whole or not at all: written beside its final place, then renamed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import CheckpointError

LOCK = ".lock"


@contextmanager
def staged_directory(final: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """A new directory beside `final`, renamed to it when the block ends well and removed when it does not.

    What was at `final` (with `overwrite`, or an empty directory) stays until the new one is complete. Leftovers of
    runs that crashed are removed first. The block must not change the directory's name.

    Raises CheckpointError where `final` is a file, or a directory that is not empty without `overwrite`.
    """
    target = Path(final).absolute()
    check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target)
    stage = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    try:
        stage.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        with open(stage / LOCK, "w") as lock:
            _lock(lock)
            yield stage
        (stage / LOCK).unlink()
        _sync(stage)
        _swap(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError where a directory cannot be written to `target`."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(target, "destination", "is a file or a link; give a directory or a new name")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(target, "destination", "is not empty; give another directory, or ask to overwrite it")


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _swap(stage: Path, target: Path) -> None:
    if not target.exists():
        os.rename(stage, target)
        return
    old = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    os.rename(target, old)  # onto an empty directory, which POSIX replaces
    try:
        os.rename(stage, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Remove leftovers whose writer is gone: nobody holds their lock."""
    for left in target.parent.glob(_prefix(_escaped(target)) + "*"):
        try:
            with open(left / LOCK, "r+") as lock:
                if _lock(lock):
                    shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue  # without a lock file it is the old checkpoint of a swap that crashed: never removed


def _escaped(target: Path) -> Path:
    """The name with glob's special characters quoted."""
    return target.with_name("".join(f"[{c}]" if c in "*?[" else c for c in target.name))


def _lock(file: IO[str]) -> bool:
    """Try to lock a file for as long as it stays open; False where another process holds it."""
    if sys.platform == "win32":
        return False  # no advisory locks: leftovers stay
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(directory: Path) -> None:
    """Make the directory's entries durable before it gets its final name."""
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
