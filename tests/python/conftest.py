import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def data() -> Path:
    return ROOT / "data"


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def run():
    """Runs the program that the wheel has put beside this Python, or another one of that environment."""

    def call(*words, cwd=None, check=True):
        program = os.path.join(sysconfig.get_path("scripts"), "replayssm")
        done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, cwd=cwd, timeout=300)
        assert not check or done.returncode == 0, done.stderr
        return done

    return call
