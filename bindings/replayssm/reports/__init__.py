"""One page of figures from a run: what a policy costs and what it changes, where, and when."""

from __future__ import annotations

import os
from pathlib import Path

from replayssm import _core
from replayssm.models import PathLike


def report(run: PathLike, output: PathLike | None = None) -> str:
    """One self-contained HTML page of figures and tables from the file that kl() or layers() wrote as `output`.

    `run` is such an HDF5 file, or one that the program wrote with --output. What it holds is shown: KL against bytes
    moved, errors of layers and KL over the text of any run; of a layer study growth of errors beside the predicted law
    and half-lives of heads too. `output` is the page's file, which is replaced by a whole one or not at all; None
    writes none. Returns the page. It has no script and loads nothing. Every figure has its numbers as a table; they
    are the file's, in the units that it gives, rounded for reading alone. Where the model's folder is still there, its
    tokenizer.json gives the text, else token ids stand for it. The same file gives the same page.

    Raises: replayssm.Error naming a file that is no such run or a page that cannot be written.
    """
    # matplotlib and HDF5 are loaded when a page is asked for: they take longer than the rest of the package.
    from replayssm.reports.page import page
    from replayssm.reports.run import Run

    html = page(Run.read(run))
    if output is not None:
        part = Path(f"{os.fspath(output)}.part")
        try:
            part.write_text(html, "utf-8")
            part.replace(output)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _core.Error(f"{os.fspath(output)}: cannot be written: {error.strerror}") from None
    return html
