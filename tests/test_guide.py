"""The guide of the methods: complete, true to the code, and its figures, links and commands lead somewhere."""

import ast
import inspect
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedshift.cli.app import app
from fedshift.config.expressions import list_catalog
from fedshift.evaluation.communication import Capabilities, find_capabilities
from fedshift.evaluation.policy import SKIP, list_policies
from fedshift.methods import METHODS as CATALOG
from fedshift.report.style import shorten
from fedshift.utils.errors import UsageError

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "methods"
METHODS = list_catalog("methods")
INDEX = (GUIDE / "README.md").read_text(encoding="utf-8")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(GUIDE.glob("*.md")) if path.stem != "README"}
DRAWN = tomllib.loads((ROOT / "examples" / "guide.toml").read_text(encoding="utf-8"))["methods"]
DRAWN = {re.split(r"\W", text)[0]: text for text in DRAWN}
SOURCE = re.compile(r"arXiv:\d{4}\.\d{5}|openreview\.net/forum\?id=\w+")

every_page = pytest.mark.parametrize("name", PAGES)


@cache
def capable(text: str) -> tuple[Capabilities, ...]:
    """What the methods of a list need and do; raises where one makes no sense on a network with BatchNorm."""
    made = CATALOG.parse_all(text)
    assert len({method.name for method in made}) == len(made), text
    return tuple(map(find_capabilities, made))


def test_every_method_has_a_page_a_figure_and_a_line_of_the_index():
    assert PAGES.keys() == METHODS.keys()
    assert DRAWN.keys() == METHODS.keys()
    assert {path.name for path in (GUIDE / "images").iterdir()} == {f"{name}.svg" for name in METHODS}
    assert set(re.findall(r"\]\((\w+)\.md\)", INDEX.split("## ")[0])) == METHODS.keys()


@every_page
def test_a_page_has_all_sections_in_order(name):
    sections = (
        "# ", "```math", "**Use it when** ", "**Not when** ", "```console", "**What travels.** ",
        f"](images/{name}.svg)", f"drawn by `python examples/guide.py {name}`.*", "**Deviations.** ",
        "**Reference.** ",
    )  # fmt: skip
    page = " ".join(PAGES[name].split())
    places = [page.find(section) for section in sections]
    assert min(places) == 0, sections[places.index(min(places))]
    assert places == sorted(places)
    assert PAGES[name].count("\n") <= 52


@every_page
def test_a_page_says_the_real_defaults_and_where_they_come_from(name):
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", PAGES[name], re.MULTILINE)
    real = {p.name: p.default for p in inspect.signature(METHODS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY}
    said = [(argument, ast.literal_eval(default)) for argument, default, _ in rows]
    assert [(*pair, type(pair[1])) for pair in said] == [(*pair, type(pair[1])) for pair in real.items()]
    assert bool(real) != ("It takes no arguments." in PAGES[name])


@every_page
def test_a_page_cites_what_its_module_cites(name):
    sources = set(SOURCE.findall(inspect.getdoc(inspect.getmodule(METHODS[name]))))
    cited = set(SOURCE.findall(PAGES[name]))
    assert sources <= cited
    assert cited
    linked = re.findall(r"\[(arXiv:[\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", PAGES[name])
    assert linked or re.search(r"\[(openreview\.net/forum\?id=\w+)\]\(https://\1\)", PAGES[name])
    assert all(shown == f"arXiv:{number}" for shown, number in linked)


@every_page
def test_a_page_says_of_traffic_and_state_what_the_program_lists(name):
    (facts,) = capable(name)
    assert (
        f"**What travels.** A client sends {facts.sent} ({facts.up:.2f} x FedAvg's upload) and keeps "
        f"{facts.state or 'nothing'}; the server holds {'a' if facts.has_global else 'no'} whole model."
    ) in " ".join(PAGES[name].split())


@every_page
def test_a_figure_is_small_and_of_the_method_as_the_page_says(name):
    figure = GUIDE / "images" / f"{name}.svg"
    shown = {text.text for text in ElementTree.parse(figure).iter("{http://www.w3.org/2000/svg}text")}
    assert figure.stat().st_size < 60_000
    assert {"fedavg", shorten(CATALOG.parse_all(DRAWN[name])[0].label, 44)} <= shown  # legends cut longer names
    assert DRAWN[name] == name or f"`{DRAWN[name]}`" in PAGES[name]


@pytest.mark.parametrize("name", ["README", *PAGES])
def test_links_and_their_anchors_lead_somewhere(name):
    here = GUIDE / f"{name}.md"
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", here.read_text(encoding="utf-8")):
        if "://" not in target:
            there = here.parent / target if target else here
            assert there.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", ["README", *PAGES])
def test_commands_are_understood_and_their_methods_make_sense(name, monkeypatch):
    monkeypatch.setattr(app, "config", ())
    blocks = re.findall(r"^```console\n(.*?)^```", (GUIDE / f"{name}.md").read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "fedshift"
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        spec = bound.arguments.get("spec")
        text = getattr(spec, "methods", None) or getattr(spec, "method", None) or bound.arguments["method"]
        assert name == "README" or re.search(rf"\b{name}\b", line)
        capable(text)


ANSWERS = INDEX.partition("| message |")[2].partition("\n\n")[0]
REFUSALS = re.findall(r"^\| `(.+?)` \| (.+) \|$", ANSWERS, re.MULTILINE)


@pytest.mark.parametrize(("asked", "answer"), REFUSALS, ids=[asked for asked, _ in REFUSALS])
def test_the_program_refuses_in_the_words_of_the_index(asked, answer):
    with pytest.raises(UsageError) as refused:
        capable(asked)
    assert str(refused.value) == answer


def test_the_index_knows_the_policies_for_clients_that_never_trained():
    assert len(REFUSALS) >= 5
    table = INDEX.partition("| `--unseen` |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == (SKIP, *list_policies())
