"""The page as text: whole, self-contained, escaped, and the same bytes for the same study."""

import html
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from fedshift.report import write_page
from fedshift.report.html import embed_svg, encode_strip
from fedshift.report.page import render_page
from fedshift.results.schema import PICTURED
from tests.report.conftest import in_errors

VOID = {"meta", "link", "img", "wbr", "br", "path", "use", "rect"}


class Reader(HTMLParser):
    """Collects ids and checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.references, self.headings = [], [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.references += [values[name] for name in ("src", "href") if name in values]
        self.headings += [tag] if re.fullmatch(r"h[1-6]", tag) else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.sampled(2)
def test_edge_cases_give_a_well_formed_page(shown):
    reader = read(shown.page)
    assert len(reader.ids) == len(set(reader.ids))
    assert reader.headings[0] == "h1"
    assert reader.headings.count("h1") == 1


def test_nothing_is_loaded_from_anywhere(plain):
    text = plain.page
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text
    reader = read(text)
    targets = {f"#{name}" for name in reader.ids}
    assert all(link.startswith("data:") or link in targets for link in reader.references)
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= targets


def test_numbers_and_best_in_bold(study, undrawn):
    text = render_page(study)
    assert "<strong>63.00 (3.00)</strong>" in text
    assert "<strong>fedbn with 73.00 (3.00)</strong>" in text
    assert "|fedbn|+6.00|0|0|2|" in re.sub(r"(<[^>]*>)+", "|", text)
    assert "3 seeds and 1 difference cannot decide" in text
    assert "1 shared (432 B), 2 kept local (24 B)" in text
    assert "Accuracy, global model" in text
    assert "AUC" not in text


@pytest.mark.slow
def test_errors_are_in_the_unit_of_the_target_and_the_lowest_leads(study, undrawn):
    page = re.sub(r"(?s)<(style|script)\b.*?</\1>", "", render_page(in_errors(study)))
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert "Lowest macro RMSE: fedavg with 14.90 (0.40) units of the target" in text
    assert "minus fedavgmacro RMSE, units of the target" in text
    assert "1 target\n" in text
    assert "mean loss, squared units of the targets' spread" in text
    loss = html.unescape(render_page(replace(in_errors(study), metric="loss")))
    assert "Test loss of the personal model in squared units of the targets' spread" in loss
    assert "nats" not in loss
    for wrong in ("percent", " classes", "nats", "points", "with test samples"):
        assert wrong not in text


@pytest.mark.slow
def test_methods_over_unequal_clients_are_compared_over_those_that_they_share(make_study, undrawn):
    text = render_page(make_study(keep=lambda row: (row["method"], row["client"]) != ("fedbn", "a")))
    assert "Highest macro accuracy: <strong>fedbn with 83.00 (3.00)</strong>" in text
    assert "Aggregates of every method are over the same 1 of 2 clients" in text
    assert "No round has been evaluated yet" in render_page(make_study(keep=lambda row: False))


@pytest.mark.slow
def test_of_many_clients_the_page_says_how_they_are_distributed_and_stays_small(make_crowd):
    text = render_page(make_crowd(1234, seeds=2))
    reader = read(text)
    assert "<b>1,234 clients</b>: more than 50 are not named one by one" in text
    assert re.search(r'<th scope="row"><span>95 % quantile</span></th>\s*<td>', text)
    assert re.search(r'<th scope="row"><span>largest</span></th>\s*<td>1,243</td><td>100</td>', text)
    assert "client 40" not in text
    assert sum(link.startswith("data:image") for link in reader.references) == PICTURED
    assert "Images of the first 24 clients" in text
    assert len(text) < 400_000


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("runs", "said"), [(1, "1 seed and 1 difference cannot decide"), (5, "intervals over")])
def test_what_may_not_be_claimed_is_said(make_study, undrawn, runs, said):
    text = re.sub(r"(<[^>]*>)+", "|", render_page(make_study({name: [{"a": 50, "b": 240}] * runs for name in "xy"})))
    assert "|y|0.00|" in text
    assert said in text


def test_values_answer_the_pointer_where_they_are_drawn(study, plain):
    """The last value of fedbn in the macro panel: its text, at the marker's place in the panel's own coordinates."""
    panel = plain.page[plain.page.index('aria-label="Mean over clients') :]
    panel = panel[: panel.index("</svg>")]
    x, y = map(
        float,
        re.search(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="6"/><text[^>]*>fedbn, round 2: 73.00<', panel).groups(),
    )
    markers = [tuple(map(float, place)) for place in re.findall(r'<use href="#[^"]*" x="([\d.]+)" y="([\d.]+)"', panel)]
    assert min(abs(x - left) + abs(y - top) for left, top in markers) < 0.2


def test_all_figures_share_one_legend(study, plain):
    assert plain.page.count('class="legend"') == 1
    assert len(re.findall(r"<li><svg.*?</svg>\s*fed(?:avg|bn)</li>", plain.page, re.DOTALL)) == 2
    assert 'id="accuracy-macro-legend_1"' not in plain.page


def test_everything_is_escaped(make_study, blank):
    bad = "<img src=x onerror=alert(1)>"
    text = render_page(
        make_study(
            names={"a": bad, "b": '"b"'}, name=bad, note=bad, notices=(bad,), config={bad: bad}, environment={bad: bad}
        )
    )
    assert bad not in text
    assert text.count("&lt;img src=x") >= 6
    read(text)


@pytest.mark.slow
def test_write_is_repeatable_and_leaves_nothing_else(study, plain, tmp_path):
    path = tmp_path / "new" / "report.html"
    assert write_page(study, path) == path
    assert path.read_bytes() == plain.page.encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_page(study, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("fedshift.report.page.render_page", lambda *_: "\ud800")
    with pytest.raises(UnicodeEncodeError):
        write_page(study, path)
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("report.html", "old")]


def test_contact_strip_reduces_large_images():
    url, width, height = encode_strip(np.zeros((3, 28, 20, 1), np.uint8))
    assert (width, height) == (3 * 20 + 2 * 2, 28)
    assert url.startswith("data:image/png;base64,")
    assert encode_strip(np.zeros((2, 224, 100, 3), np.uint8))[1:] == (2 * 33 + 2, 74)


def test_inline_svg_prefixes_ids_and_follows_the_page_colors():
    source = '<?xml?><svg width="1pt" height="2pt" xmlns="x"><path id="m" style="fill: #1f2733; stroke:#fefefe"/></svg>'
    path = '<path id="p-m" style="fill: currentColor; stroke:var(--card)"/>'
    expected = f'<svg role="img" aria-label="a &lt; b" width="1pt" height="2pt">{path}</svg>'
    assert embed_svg(source, "p", "a < b") == expected
