"""The wheel as a user gets it: built here, looked into, installed into an empty environment, and used from there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="not installed: c++, to build the library of CPU kernels"),
    pytest.mark.skipif(sys.platform != "linux", reason="the tag is checked as on Linux"),
]

MULTIPLY = """
import json
import torch
import halfbyte
from halfbyte import reference
from halfbyte.counters import counts
from halfbyte.kernels import Problem
from halfbyte.kernels.cpu import library
from halfbyte.plan import plan

generator = torch.Generator().manual_seed(1)
weight = halfbyte.quantize(torch.randn(96, 512, generator=generator), "nf4")
x = torch.randn(3, 512, generator=generator).bfloat16()
loaded = library()
out, y = halfbyte.linear(x, weight), reference.linear(x, weight)
reference.assert_within_contract(out, y, "the installed wheel")
try:
    reference.assert_within_contract(halfbyte.linear(x, reference.swap_nibbles(weight)), y)
except AssertionError:
    noticed = True
else:
    noticed = False
from halfbyte.kernels import _shortcut  # repeated calls go there
kernel = plan(Problem(weight.format, x.dtype, 3, 96, 512)).kernel.name
files = [halfbyte.__file__, str(loaded.path), _shortcut.__file__, torch.__file__]
calls = sum(counts.totals()[0]["linear"][kernel].values())
print(json.dumps([*files, kernel, calls, noticed]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    here = find_spec("scikit_build_core") is not None and shutil.which("cmake") is not None
    options = ["--no-build-isolation"] if here else []
    run(sys.executable, "-m", "pip", "wheel", SOURCES, "--no-deps", *options, "--wheel-dir", folder, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_one_wheel_serves_every_python_of_a_platform(wheel: Path) -> None:
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    assert re.fullmatch(rf"halfbyte-[\d.]+-py3-none-{platform}\.whl", wheel.name)


def test_the_library_is_in_and_its_sources_are_not(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    native = {"halfbyte/kernels/cpu/halfbyte_cpu.so", "halfbyte/kernels/_shortcut.abi3.so"}
    assert {name for name in names if name.endswith((".so", ".dylib"))} == native
    assert not [name for name in names if name.endswith((".cpp", ".hpp", ".pyc"))]
    package = SOURCES / "src"
    kinds = (".py", ".cu", ".cuh", ".json", ".html", ".css", ".js")
    tracked = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.suffix in kinds]
    assert set(tracked) <= set(names)
    assert "halfbyte/py.typed" in names
    assert not [name for name in names if not name.startswith("halfbyte")]


def test_an_installed_wheel_multiplies_with_its_own_kernels(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    install = ("install", "--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=tmp_path)
    (packages,) = environment.glob("lib/python*/site-packages")
    # torch and the rest as they are installed here, without their .pth files: no editable install of halfbyte
    (packages / "torch_of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    used, library, shortcut, torch_used, kernel, calls, noticed = json.loads(run(python, "-c", MULTIPLY, cwd=tmp_path))
    assert Path(used).is_relative_to(packages)
    assert Path(library).is_relative_to(packages)
    assert Path(shortcut).is_relative_to(packages)
    assert torch_used == torch.__file__
    assert kernel == "cpu_linear"
    assert calls == 2
    assert noticed
