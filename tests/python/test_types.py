"""Types and docstrings of everything public."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replayssm
import stubs
from conftest import ROOT


def public():
    """Every public function, class, method and property, by its name."""
    for module in (replayssm, replayssm.results):
        for name, value in vars(module).items():
            if name.startswith("_") or name not in module.__all__ or inspect.ismodule(value):
                continue
            yield name, value
            if inspect.isclass(value) and value is not replayssm.Error:
                for part, member in vars(value).items():
                    if not part.startswith("_") and (callable(member) or isinstance(member, (property, staticmethod))):
                        yield f"{name}.{part}", member


NAMES = dict(public())


def test_the_stub_is_what_the_module_says():
    # After a change of bindings/*.cpp: python tests/python/stubs.py
    assert stubs.STUB.read_text() == stubs.stub()


def test_types_hold():
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_say_what_is_taken_and_what_is_raised(name):
    value = NAMES[name]
    text = value.__doc__
    assert text and re.match(r"[A-Z\[`\dxQ].*?[.:](\s|$)", text, re.S), "one sentence first"
    called = value.__func__ if isinstance(value, staticmethod) else value
    if inspect.isfunction(called):
        for parameter in inspect.signature(called).parameters:
            assert parameter == "self" or f"`{parameter}`" in text, f"says nothing of `{parameter}`"
        if not name.endswith(("covers", "bytes")):
            assert "Raises: " in text or "KeyboardInterrupt" in text
    elif inspect.isclass(value) and not dataclasses.is_dataclass(value) and not issubclass(value, (tuple, Exception)):
        assert "Raises: " in text or name == "Inputs"


def test_every_public_name_is_typed():
    for name, value in NAMES.items():
        called = (
            value.fget if isinstance(value, property) else value.__func__ if isinstance(value, staticmethod) else value
        )
        if inspect.isfunction(called):
            hints = set(called.__annotations__) | {"self"}
            assert set(inspect.signature(called).parameters) | {"return"} <= hints, name
    assert Path(replayssm.__file__).with_name("py.typed").is_file()
