"""What README.md shows of Python is what Python gives."""

import doctest

from conftest import ROOT


def test_examples(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text()
    examples = doctest.DocTestParser().get_doctest(text, {}, "README.md", "README.md", 0)
    assert len(examples.examples) >= 4
    said = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(examples, out=said.append)
    assert result.failed == 0, "".join(said)
