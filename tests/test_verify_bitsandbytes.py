"""`halfbyte verify-bitsandbytes` on a small checkout of its own making."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.kernels.cpu import library

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels here")

TESTS = """
import bitsandbytes as bnb, pytest, torch
from bitsandbytes.functional import quantize_4bit
from tests.helpers import rows

def outputs():
    codes, state = quantize_4bit(torch.randn(64, 64, dtype=torch.bfloat16), quant_type="nf4")
    return bnb.matmul_4bit(rows(), codes.t(), state)

def test_gemm_4bit():
    assert hasattr(bnb, "__version__")  # the installed package, not the one beside these tests
    assert outputs().shape == (2, 64)

def test_4bit_fails_always():
    assert outputs() is None

def test_4bit_knows_halfbyte():
    from halfbyte.integrations import bitsandbytes as switch
    assert switch.status().enabled is WANTED

@pytest.mark.slow
def test_4bit_slow():
    raise AssertionError

@pytest.mark.skip
def test_4bit_skipped():
    pass

def test_other():
    raise AssertionError
"""


def checkout(path, wanted: bool):
    (path / "tests").mkdir(parents=True)
    (path / "tests" / "__init__.py").touch()
    (path / "tests" / "helpers.py").write_text("import torch\n\ndef rows():\n    return torch.ones(2, 64).bfloat16()\n")
    (path / "tests" / "test_some.py").write_text(TESTS.replace("WANTED", str(wanted)))
    (path / "tests" / "test_broken.py").write_text("import a_package_that_is_not_there\n")
    (path / "bitsandbytes").mkdir()
    (path / "bitsandbytes" / "__init__.py").write_text('raise ImportError\n__version__ = "0.1.2"\n')
    return path


def run(*words):
    return CliRunner().invoke(app, ["verify-bitsandbytes", *map(str, words)])


def test_side_by_side(tmp_path):
    result = run(checkout(tmp_path / "good", wanted=True), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["checkout_version"] == "0.1.2"
    assert report["installed_version"] == bnb.__version__
    common = {
        "tests/test_broken.py": "not collected",
        "tests/test_some.py::test_gemm_4bit": "passed",
        "tests/test_some.py::test_4bit_fails_always": "failed",
        "tests/test_some.py::test_4bit_skipped": "skipped",
    }
    knows = "tests/test_some.py::test_4bit_knows_halfbyte"
    assert report["without"] == common | {knows: "failed"}
    assert report["with_halfbyte"] == common | {knows: "passed"}
    assert report["different"] == {knows: ["failed", "passed"]}
    assert report["hits"] == 2
    assert not list((tmp_path / "good").rglob("__pycache__"))  # the checkout is left as it was


def test_a_test_that_halfbyte_breaks(tmp_path):
    result = run(checkout(tmp_path / "bad", wanted=False))
    assert result.exit_code == 1
    assert "passed -> failed: tests/test_some.py::test_4bit_knows_halfbyte" in result.stdout
    assert "NOT ok; 2 calls served" in result.stdout


def test_what_is_no_checkout(tmp_path):
    result = run(tmp_path)
    assert isinstance(result.exception, FileNotFoundError)
    assert "has no tests/test_*.py" in str(result.exception)
    path = checkout(tmp_path / "good", wanted=True)
    (path / "tests" / "test_broken.py").unlink()
    result = run(path, "--keyword", "no_such_test")
    assert isinstance(result.exception, ValueError)
    assert "matches 'no_such_test'" in str(result.exception)
