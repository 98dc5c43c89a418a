"""The demo's model for tests: converted once and kept where the demo keeps it."""

from __future__ import annotations

import pytest

from halfbyte import demo


def demo_files() -> demo.Files:
    """SmolLM2 in bf16 and in NF4; skips the test where the package that wraps the model is not installed."""
    try:
        demo.model_file()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    files = demo.Files(demo.cache_root())
    demo.prepare(files)
    return files
