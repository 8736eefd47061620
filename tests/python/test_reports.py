"""The report page: what it shows, that its tables are the file's numbers, and that a browser finds nothing to say."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import h5py
import numpy as np
import pytest

import replayssm
from replayssm.reports.figures import pareto_front
from replayssm.reports.run import RunLayer, letter_of

POLICIES = [
    "eager(state=e4m3:row)",
    "replay(L=8, state=e4m3:row)",
    "replay(L=8, anchor=fp32, read=e4m3:row)",
    "replay(L=8, state=exact, order=sequential)",
]
OF_LAYERS = ["pareto", "heat", "growth", "half-lives", "text"]
OF_KL = ["pareto", "heat", "text"]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """The files and pages of a layer study and of a KL study."""
    folder = tmp_path_factory.mktemp("runs")
    tokens = replayssm.read_tokens(data / "sherlock.safetensors")[:, :300]
    replayssm.layers(data / "mamba2-5m", tokens[:, :160], POLICIES, attribution=False, output=folder / "layers.h5")
    replayssm.kl(data / "gdn-hybrid-8m", tokens, POLICIES, sequences=2, output=folder / "kl.h5")
    for name in ("layers", "kl"):
        replayssm.report(folder / f"{name}.h5", folder / f"{name}.html")
    return folder


class Page(HTMLParser):
    """Sections with their figures and the rows of their tables, ids, and everything that a page could load."""

    def __init__(self, text):
        super().__init__()
        self.sections, self.figures, self.rows = [], {}, {}
        self.ids, self.references, self.loads, self.tags = [], [], [], []
        self.now, self.row = None, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.tags.append(tag)
        if "id" in of:
            self.ids.append(of["id"])
        if tag == "section":
            self.now = of["id"]
            self.sections.append(self.now)
            self.rows[self.now] = []
        elif tag == "svg":
            self.figures[self.now] = of
        elif tag == "tr":
            self.row = []
        elif tag == "td":
            self.row.append("")
        for key in ("src", "href", "xlink:href", "data", "action"):
            if key in of:
                (self.references if of[key].startswith("#") else self.loads).append(of[key])
        self.references += re.findall(r"url\((#[^)]*)\)", " ".join(filter(None, of.values())))

    def handle_data(self, text):
        if self.row:
            self.row[-1] += text

    def handle_endtag(self, tag):
        if tag == "tr" and self.row:
            self.rows.setdefault(self.now, []).append(self.row)
        if tag == "tr":
            self.row = None


@pytest.mark.parametrize("name, expected", [("layers", OF_LAYERS), ("kl", OF_KL)])
def test_every_figure_is_there_with_its_table_and_nothing_is_loaded(runs, name, expected):
    text = (runs / f"{name}.html").read_text()
    page = Page(text)
    assert page.sections == [*expected, "tokens"]
    assert list(page.figures) == expected
    for section in expected:
        assert page.figures[section]["role"] == "img"
        assert page.figures[section]["aria-labelledby"] in page.ids
        assert page.rows[section], section
    # Beside the icon, which a browser would ask for, colour scales lie in the page.
    assert all(load == "data:," or load.startswith("data:image/png;base64,") for load in page.loads)
    assert "script" not in page.tags and not re.search(r"@import|url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert replayssm.report(runs / f"{name}.h5") == text


def test_tables_hold_the_numbers_of_the_file(runs):
    page = Page((runs / "layers.html").read_text())
    number = lambda x: "" if np.isnan(x) else "0" if x == 0 else f"{x:.3e}"  # noqa: E731
    with h5py.File(runs / "layers.h5") as file:
        policies = [file[f"policies/{k}"] for k in range(len(POLICIES))]
        moved = [p.attrs["bytes_moved_per_token"] for p in policies]
        for row in page.rows["pareto"]:
            k = ord(row[0]) - ord("A")
            finite = policies[k]["kl"][()]
            assert row[1] == policies[k].attrs["policy"]
            assert row[2] == f"{moved[k] / 1024:,.1f}"
            # The mean, from the tokens: two orders of one sum may differ in the last of four digits shown.
            assert float(row[3]) == pytest.approx(finite.mean(), rel=1e-3)
        assert page.rows["pareto"][-1][0] == "ABCD"[int(np.argmax(moved))]
        assert [r for r in page.rows["pareto"] if r[0] == "D"][0][3] == "0"
        assert page.rows["heat"] == [
            ["ABCD"[k], str(i), number(p["layers/y_rel_l2_local"][n]), number(p["layers/y_rel_l2_propagated"][n])]
            for k, p in enumerate(policies)
            for n, i in enumerate(p["layers/index"])
        ]
        layer = file["layers/03/policy_1"]
        heads = [r for r in page.rows["half-lives"] if r[:2] == ["B", "3"]]
        assert [r[4] for r in heads] == [number(x) for x in layer["measured_by_head"]]
        assert [r[5] for r in heads] == [number(x) for x in layer["predicted_by_head"]]
        grown = [r for r in page.rows["growth"] if r[:2] == ["B", "3"]]
        assert [r[3] for r in grown] == [number(x) for x in layer["state_local_by_sample"][0]]
        worst = [r for r in page.rows["tokens"]][0]  # of policy A
        kl = policies[0]["kl"][()]
        assert (int(worst[1]), worst[2]) == (int(kl.argmax()), number(kl.max()))


def test_the_front_is_what_none_beats_in_both():
    costs, errors = np.array([3.0, 1.0, 2.0, 4.0, 2.0]), np.array([1.0, 5.0, 2.0, 1.0, 3.0])
    assert pareto_front(costs, errors) == [1, 2, 0]
    assert pareto_front(np.array([1.0, 2.0]), np.array([np.nan, 1.0])) == [1]
    assert [letter_of(i) for i in (0, 25, 26, 27)] == ["A", "Z", "AA", "AB"]


def test_the_law_by_hand():
    none = np.zeros(1)

    def layer(decay):
        return RunLayer(0, 0, 2, np.array([decay]), none, np.array([3.0]), none, none, none, none)

    # A decay of 1/2 with L = 2: errors of n stores shrink by 2^-4 in their squares; 5 tokens hold 2 stores.
    np.testing.assert_allclose(layer(0.5).law(np.array([1.0, 2.0, 5.0])), [0, 3, 3 * np.sqrt(1 + 2.0**-4)], rtol=4e-16)
    np.testing.assert_allclose(layer(1.0).law(np.array([8.0])), [6.0], rtol=4e-16)  # none fades: sqrt(4) times


def test_what_a_run_is_called_cannot_become_markup(runs, tmp_path):
    shutil.copy(runs / "kl.h5", tmp_path / "run.h5")
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file["run"].attrs["model"] = "<script>alert(1)</script>"  # no such folder: ids stand for the text
        file["run"].attrs["tokens_file"] = '"><img src=x>'
    page = Page(replayssm.report(tmp_path / "run.h5"))
    assert "script" not in page.tags and "img" not in page.tags
    assert any(re.fullmatch(r"(?: \d+)+ → (?: \d+)?", row[3]) for row in page.rows["tokens"])


def test_bad_input_is_named(runs, tmp_path):
    with pytest.raises(replayssm.Error, match="none.h5: cannot be read"):
        replayssm.report(tmp_path / "none.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["something"] = 1
    with pytest.raises(replayssm.Error, match="other.h5: expected the groups run and policies.*found something"):
        replayssm.report(tmp_path / "other.h5")
    with pytest.raises(replayssm.Error, match="page.html: cannot be written"):
        replayssm.report(runs / "kl.h5", tmp_path / "no" / "page.html")
    shutil.copy(runs / "kl.h5", tmp_path / "old.h5")
    with h5py.File(tmp_path / "old.h5", "r+") as file:
        del file["policies/1"].attrs["kl_mean"]
    with pytest.raises(replayssm.Error, match="old.h5.*kl_mean"):
        replayssm.report(tmp_path / "old.h5")


def browse(page, picture):
    """Opens a page in headless Chromium; what its console says. Leaves a picture."""
    done = subprocess.run(
        [
            shutil.which("chromium"),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={picture.parent / 'chromium'}",
            "--window-size=500,4000",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here; packages/debian-ci.txt names it")
def test_a_browser_draws_it_and_its_console_is_silent(runs, tmp_path):
    from PIL import Image

    assert browse(runs / "layers.html", tmp_path / "page.png") == []
    seen = {colour for _, colour in Image.open(tmp_path / "page.png").convert("RGB").getcolors(1 << 24)}
    # The first policy's blue, and both ends of the heat maps' scale.
    assert {(0x00, 0x72, 0xB2), (0x00, 0x22, 0x4E), (0xFE, 0xE8, 0x38)} <= seen
    broken = tmp_path / "broken.html"
    broken.write_text((runs / "layers.html").read_text().replace("</h1>", '</h1><img src="https://example.org/x.png">'))
    assert browse(broken, tmp_path / "broken.png")  # were something loaded, it would be heard of
