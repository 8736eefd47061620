"""The command `replayssm`: the C++ program of the package, with text input and the report page added."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np

from replayssm import _core

_EPILOGUE = """
With the Python package also:
  --text FILE          in the place of --tokens: a text, tokenised whole with MODEL's own tokenizer.json
  replayssm report RUN.h5 -o REPORT.html
                       one page of figures from what kl or layers wrote with --output
"""


def program() -> Path:
    """The C++ program that the package holds. Raises: replayssm.Error where it is not there."""
    path = Path(__file__).parent / "bin" / "replayssm"
    if not path.is_file():
        raise _core.Error(f"{path}: expected the program of the package, found no such file")
    return path


def main() -> int:
    """The command line. Raises: nothing; bad input is one line on standard error and the exit code 2."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["report"]:
            return _report(arguments[1:])
        if any(a == "--text" or a.startswith("--text=") for a in arguments):
            arguments = _tokenised(arguments)
        elif arguments in (["--help"], ["-h"]):
            import subprocess

            done = subprocess.run([program(), *arguments], check=False)
            print(_EPILOGUE, end="", flush=True)
            return done.returncode
        path = program()
    except _core.Error as error:
        print(f"replayssm: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    sys.stdout.flush()
    # In the place of this process: signals, terminal and exit code are the program's own.
    os.execv(path, [os.fspath(path), *arguments])


def _tokenised(arguments: list[str]) -> list[str]:
    """The arguments with `--text FILE` replaced by tokens, which the program reads from memory."""
    from replayssm.models import tokenize

    at = next(i for i, a in enumerate(arguments) if a == "--text" or a.startswith("--text="))
    name = arguments[at][len("--text=") :] if "=" in arguments[at] else "".join(arguments[at + 1 : at + 2])
    rest = arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]
    if not name:
        raise _core.Error("--text: expected the name of a file")
    if any(a == "--text" or a.startswith("--text=") for a in rest):
        raise _core.Error("--text: expected once")
    if any(a == "--tokens" or a.startswith("--tokens=") for a in rest):
        raise _core.Error("--text and --tokens: expected one of them")
    words = [a for before, a in zip(rest, rest[1:], strict=False) if before != "--draft"]
    models = [a for a in words if not a.startswith("-") and Path(a).is_dir()]
    if len(models) != 1:
        raise _core.Error(f"--text {name}: expected one MODEL, a folder, found {' and '.join(models) or 'none'}")
    try:
        text = Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _core.Error(f"{name}: cannot be read as text in UTF-8: {error}") from None
    ids = tokenize(models[0], text)
    memory = os.memfd_create("tokens")
    with os.fdopen(os.dup(memory), "w") as file:
        np.savetxt(file, ids, fmt="%d")
    os.set_inheritable(memory, True)
    return [*rest, "--tokens", f"/proc/self/fd/{memory}", "--tokens-source", name]


class _Parser(argparse.ArgumentParser):
    """One whose complaint is one line, as the program's is."""

    def error(self, message: str) -> NoReturn:
        raise _core.Error(f"{self.prog.split()[-1]}: {message} (see --help)")


def _report(arguments: list[str]) -> int:
    parser = _Parser(
        prog="replayssm report",
        description="One self-contained page of figures and tables from the "
        "HDF5 file that kl or layers wrote with --output",
    )
    parser.add_argument("run", metavar="RUN.h5", help="what `replayssm kl` or `replayssm layers --output` wrote")
    parser.add_argument("-o", "--output", required=True, metavar="REPORT.html", help="the page")
    options = parser.parse_args(arguments)
    from replayssm.reports import report

    report(options.run, options.output)
    return 0
