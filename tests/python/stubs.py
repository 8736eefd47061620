"""What bindings/replayssm/_core.pyi has to say: `python tests/python/stubs.py` writes it anew from the module."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parents[2] / "bindings" / "replayssm" / "_core.pyi"


def stub() -> str:
    """The types of the extension module that is installed, as pybind11-stubgen reads them."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pybind11_stubgen", "replayssm._core", "-o", folder], check=True, capture_output=True
        )
        text = Path(folder, "replayssm", "_core.pyi").read_text()
    # What converts to a number: pybind11 names the protocols, in words that its versions do not share.
    text = re.sub(r"typing\.SupportsInt( \| typing\.SupportsIndex)?", "int", text)
    text = re.sub(r"typing\.SupportsFloat( \| typing\.SupportsIndex)?", "float", text)
    # Arrays are of any type; the functions that take them say which they want.
    text = text.replace("numpy.ndarray", "numpy.typing.NDArray[typing.Any]")
    text = text.replace("import numpy\n", "import numpy.typing\n")
    return text.replace("-> tuple:", "-> tuple[typing.Any, ...]:")


if __name__ == "__main__":
    STUB.write_text(stub())
