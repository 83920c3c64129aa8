"""What the documents promise: every Python block runs, every command exists, every link leads somewhere.

Tutorials are followed from beginning to end in ``test_tutorials.py``.
"""

import inspect
import re
import shlex
import sys
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import torch

import fedshift
from fedshift.analysis.statistics import FEWEST_UNITS
from fedshift.cli import deployment
from fedshift.config.expressions import list_catalog
from fedshift.config.spec import CompareSpec
from fedshift.data.augmentation import AUGMENTATIONS
from fedshift.data.decoding import dicom, ranges
from fedshift.data.digits import digits
from fedshift.data.files import cache
from fedshift.data.sources import SPLIT_CHANGES
from fedshift.data.stores import LazyStore
from fedshift.diagnosis import shifts
from fedshift.engines import auto, stacked
from fedshift.evaluation import statistics_lag
from fedshift.evaluation.policy import list_policies
from fedshift.experiments import client_store, jobs
from fedshift.flower import internals, keys
from fedshift.flower.coordinator import link, rounds
from fedshift.flower.site import join, state
from fedshift.flower.site.policy import UPLOADS, SitePolicy
from fedshift.methods import METHODS
from fedshift.nn import deferred
from fedshift.report import tables as report_tables
from fedshift.results import trial_records
from fedshift.results.schema import PICTURED
from fedshift.tasks.classification import FEW_CLASSES
from fedshift.tasks.task import BATCH
from tests.nn.test_adapters import provide_peft

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
WORDS = {3: "three", 5: "five", 7: "seven", 10: "ten", 19: "Nineteen", 30: "Thirty"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [
        pytest.param(text, id=f"{document.name}-{number}")
        for document in DOCUMENTS
        if document.parent.name != "tutorials"
        for number, (kind, text) in enumerate(BLOCK.findall(document.read_text()))
        if kind == language
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("code", blocks("python"))
def test_every_python_block_runs(code, tmp_path, monkeypatch):
    """On every third of the digits, in few pixels, for two rounds."""

    def make_small(**given):
        return digits(**{"size": 8, **given}).map_splits(lambda all: all.take(torch.arange(0, len(all), 3)))

    monkeypatch.setattr(fedshift, "digits", make_small)
    monkeypatch.setattr(sys.modules[digits.__module__], "digits", make_small)  # data="digits"
    monkeypatch.chdir(tmp_path)
    if "adapter=" in code:
        provide_peft(monkeypatch)
    short = re.sub(r"\brounds=\d+", "rounds=2", code)
    exec(compile(short, "document", "exec"), {"__name__": "document"})


def test_the_notebooks_are_the_examples_of_their_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    wanted = import_module("make_notebooks").make_notebooks()
    assert {path: path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "notebooks").iterdir()} == wanted


def understanding(monkeypatch):
    """The command line's parser, which reads no settings files."""
    from fedshift.cli.app import app

    monkeypatch.setattr(app, "config", ())
    return app


def test_every_command_of_the_deployments_files_is_understood(monkeypatch):
    app = understanding(monkeypatch)
    texts = [path.read_text() for path in sorted((ROOT / "examples" / "deployment").iterdir())]
    said = re.findall(r"(?:command: |ExecStart=/.*/fedshift )((?:serve|join) .*)", "\n".join(texts))
    begun = re.search(r"exec fedshift (serve .*)'", "\n".join(texts))[1]
    said += [begun.replace('"$@"', words) for words in ("--resume runs/first", "experiment.toml --out runs/first")]
    assert len(said) == 7
    for words in said:
        app.parse_args(shlex.split(words), exit_on_error=False, print_error=False)


@pytest.mark.parametrize("commands", blocks("console"))
def test_every_fedshift_command_is_understood(commands, monkeypatch):
    """The parser takes each command of the block; settings files, plans and runs that it names need not exist."""
    app = understanding(monkeypatch)
    monkeypatch.setattr("fedshift.config.spec.read_plan", lambda _: ({"patch": "8"}, {}))
    spoken = [shlex.split(part, comments=True) for line in commands.splitlines() for part in line.split(" && ")]
    for words in spoken:
        if words and words[0] == "fedshift":
            command, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
            assert command.__module__.startswith("fedshift.cli.")
            known = "spec output directory model method what where name out json leave_out rates selection moment code"
            adapting = "run data clients policies policy rounds unlabeled save methods seeds device own client onnx"
            across = "address as_json config data host insecure key log path port tls"
            across += " resume since export"
            papers = "sources tls table seeds scale version samples layer"
            leaking = "profile batch_sizes image_size images iterations lr files masks"
            assert set(bound.arguments) <= {
                *known.split(),
                *adapting.split(),
                *across.split(),
                *papers.split(),
                *leaking.split(),
            }


@pytest.mark.slow
def test_the_method_of_the_contributing_guide_runs_composed_from_the_command_line(cli, tmp_path, monkeypatch, undrawn):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = next(body for kind, body in BLOCK.findall(text) if kind == "python")
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 20
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "my_methods.py").write_text(code)
    spoken = next(line for line in text.splitlines() if line.startswith("fedshift compare"))
    words = [*shlex.split(spoken)[1:], "--rounds", "1", "--samples", "40", "--image-size", "8", "--out", "run"]
    done = cli(*words)
    assert done.code == 0, done.err
    assert "fedbn+my_methods:lgfedavg" in done.out
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", document.read_text()):
        path = next(filter(None, target))
        if "://" not in path:
            assert (document.parent / path).exists(), path


def list_anchors(document):
    """Return the anchors of a page: its headings, as GitHub and the site spell them, and its own."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    titles = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    spelled = (re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.strip().lower())) for title in titles)
    return {*spelled, *re.findall(r'<a id="([^"]+)"', text)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_pages_lead_to_headings(document):
    for page, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", document.read_text()):
        target = document.parent / page if page else document
        assert target.suffix != ".md" or anchor in list_anchors(target), f"{page}#{anchor}"


def test_versions_agree():
    assert f"version: {fedshift.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {fedshift.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_news_are_fragments_that_a_release_puts_into_the_changelog():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = "|".join(each["directory"] for each in settings["type"])
    assert settings["start_string"] in (ROOT / settings["filename"]).read_text()
    for path in (ROOT / "news").iterdir():
        assert path.name == "README.md" or re.fullmatch(rf"\+[\w-]+\.({kinds})\.md", path.name), path.name
        assert path.read_text().strip(), path.name


def test_the_page_on_data_names_every_benchmark_split_and_augmentation():
    text = (ROOT / "docs" / "data.md").read_text()
    for name in (*list_catalog("data.datasets"), *SPLIT_CHANGES.entries, *AUGMENTATIONS.entries):
        assert re.search(rf"`{name}\b", text), name


GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def test_every_path_of_the_glossary_exists():
    named = re.findall(r"\| `([^`]+)` \|$", GLOSSARY, re.MULTILINE)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / "src" / "fedshift" / path).exists()] == []


def test_every_word_of_the_glossary_is_there_once():
    words = re.findall(r"^\| ([^|]+) \| [^|]+ \| `", GLOSSARY, re.MULTILINE)
    assert len(words) == len(set(words))


def test_every_path_of_the_architecture_page_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|toml))`", text))
    assert len(named) > 25
    assert [path for path in named if not any((ROOT / top / path).exists() for top in (".", "src/fedshift"))] == []


def test_expressions_beside_other_libraries_are_methods():
    text = (ROOT / "docs" / "which-fedavg.md").read_text()
    rows = [line.split("|")[-2] for line in text.splitlines() if line.startswith("| ")][1:]
    named = [each for row in rows for each in re.findall(r"`([^`]+)`", row) if each not in ("keep_local", "FedAvg")]
    assert len(named) >= 15
    assert all(METHODS.parse_all(each) for each in named)


def test_every_page_of_the_site_exists_and_every_page_is_on_it():
    text = (ROOT / "mkdocs.yml").read_text()
    pages = set(re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)$", text, re.MULTILINE))
    ours = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - ours == {"contributing.md", "changelog.md"}
    assert {page for page in ours - pages if not page.startswith("methods/")} == set()


def test_every_public_name_is_on_one_page_of_the_reference():
    documented = [
        line.removeprefix("::: fedshift.")
        for path in (ROOT / "docs" / "api").glob("*.md")
        for line in path.read_text().splitlines()
        if line.startswith("::: fedshift.")
    ]
    assert sorted(set(fedshift.__all__) - set(documented)) == []
    assert len(documented) == len(set(documented))


def test_every_public_name_has_an_example_in_the_reference():
    """Methods have theirs on their pages."""
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    examples = "\n".join(code for kind, code in BLOCK.findall(pages) if kind == "python")
    names = set(fedshift.__all__) - set(list_catalog("methods"))
    assert {name for name in names if not re.search(rf"\b{name}\b", examples)} == set()


@pytest.mark.parametrize(("page", "heading"), [("troubleshooting", "## Messages"), ("operators", "## Troubleshooting")])
def test_every_message_of_troubleshooting_is_one_of_the_package(page, heading):
    """Up to where it names a value."""
    lines = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r"""["']\s*\n\s*f?["']""", "", lines)  # texts that go on in the next line
    table = (ROOT / "docs" / f"{page}.md").read_text().split(heading)[1]
    messages = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(messages) >= 6
    for message in messages:
        words = re.split(r"'[^']*'|[\w.]*\d[\w.:]*|\.\.\.|\bfedbn\b|\bstacked\b|\w+\.example\.org", message)
        assert max(map(str.strip, words), key=len) in source, message


def test_the_home_page_has_the_table_of_the_readme():
    rows = [
        line for line in (ROOT / "docs" / "index.md").read_text().splitlines() if re.match(r"\| \w+ \| \*?\*?\d", line)
    ]
    assert len(rows) == 6
    assert set(rows) <= set((ROOT / "README.md").read_text().splitlines())


def test_the_readme_has_at_most_six_links_to_documentation():
    reading = (ROOT / "README.md").read_text().split("## Documentation")[1].split("\n\n")[1]
    assert 1 <= len(re.findall(r"^- \[", reading, re.MULTILINE)) <= 6


def describe_arguments(policy):
    """Return the arguments of a policy for new clients as its page writes them, with their defaults."""
    takes = inspect.signature(list_catalog("evaluation.policies")[policy]).parameters
    return ", ".join(f"`{name}={each.default!r}`" for name, each in takes.items())


def test_the_policy_of_a_site_on_the_page_is_one_with_every_limit():
    pages = (ROOT / "docs" / "operators.md").read_text()
    (limits,) = (tomllib.loads(body) for kind, body in BLOCK.findall(pages) if "sample_epsilon" in body)
    policy = SitePolicy.model_validate(limits)
    for part in (policy, policy.data, policy.told, policy.limits):
        assert part.model_fields_set == set(type(part).model_fields)
    default = SitePolicy().limits
    for name in ("least_samples", "least_steps", "evaluations", "descriptions"):
        assert getattr(policy.limits, name) == getattr(default, name), name
    assert policy.limits.uploads == 2 * policy.limits.rounds
    assert f"or {UPLOADS:,} without `rounds`" in " ".join(pages.split())


def list_stated_numbers():
    """Sentences of pages around the numbers of the code: ``(page, sentence)``."""
    defaults = {field.name: field.default for field in fields(CompareSpec)}
    served = {name: each.default for name, each in inspect.signature(deployment.serve).parameters.items()}
    low, high = ranges.PERCENTILES
    return [
        ("README.md", f"[{len(list_catalog('methods'))} methods]"),
        ("README.md", f"[{WORDS[len(list_catalog('data.datasets'))]} data sets]"),
        ("README.md", f"with {WORDS[len(list_policies())]} policies"),
        (
            "README.md",
            f"Python {tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['requires-python'][2:]} or",
        ),
        ("docs/data.md", f"(`--test-fraction`, {defaults['test_fraction']})"),
        ("docs/data.md", f"The cache is limited to {cache.LIMIT:g} GB"),
        ("docs/medical-images.md", f"its {low}th and {high}th percentiles become -1 and 1"),
        ("docs/medical-images.md", f"fills over {ranges.SPARSE:.0%} of".replace("%", " %")),
        ("docs/data.md", f"hold all but {ranges.EXCESS:.1%} of".replace("%", " %")),
        ("docs/medical-images.md", f"over {dicom.CLOSE:.0%} (and {dicom.ROUNDING:g} mm)".replace("%", " %")),
        ("docs/medical-images.md", f"more than {dicom.MOST_BYTES / 1e9:.1f} GB"),
        ("docs/data.md", f"fewer than {FEWEST_UNITS} test samples"),
        ("docs/data.md", f"p is at most {shifts.LEVEL:g}, corrected for both shifts (Bonferroni)"),
        ("docs/data.md", f"and the AUC at least {shifts.MATTERS:g};"),
        ("docs/data.md", f"excludes a strong one ({shifts.STRONG:g})"),
        ("docs/data.md", f"up to {shifts.MOST_IN_PAIRS} sites"),
        ("docs/data.md", f"to the smallest, named from {shifts.UNEQUAL:g} |"),
        ("docs/data.md", f"batches of {BATCH}"),
        ("docs/data.md", f"(and more than {FEW_CLASSES}) is an error"),
        ("docs/data.md", f"{LazyStore.probed} samples of each split"),
        ("docs/features.md", f"the first {PICTURED} are used"),
        ("docs/deployment.md", f"inbound port (TCP {served['port']})"),
        ("docs/operators.md", f"`--round-timeout` seconds ({served['round_timeout']:g})"),
        ("docs/operators.md", f"`--min-clients` sites ({served['min_clients']})"),
        ("docs/operators.md", f"tries again at least every {join.LONGEST_PAUSE:g} seconds"),
        ("docs/operators.md", f"has lost states of the last {WORDS[rounds.KEPT]} rounds"),
        ("docs/operators.md", f"the last {state.KEEP_ROUNDS} rounds of each method and seed"),
        ("docs/operators.md", f"more than {WORDS[round(served['update_bound'])]} times as long as the median"),
        ("docs/operators.md", f"Flower may be {' or '.join(internals.RELEASES)}"),
        ("docs/operators.md", f"`--days` the validity, {keys.DAYS}"),
        ("docs/operators.md", f"once a day for {WORDS[keys.NOTICE_DAYS].lower()} days"),
        ("docs/flower.md", f"({' or '.join(internals.RELEASES)})"),
        ("docs/guide.md", f"With more than {report_tables.ONE_BY_ONE} clients"),
        ("docs/guide.md", f"at most {statistics_lag.BATCHES * BATCH:,} training samples of each"),
        ("docs/guide.md", f"`trials/<method>-seed<k>/{trial_records.LAG}`"),
        ("docs/performance.md", f"Reports** of more than {report_tables.ONE_BY_ONE} clients"),
        (
            "docs/performance.md",
            f"chunks of {stacked.CACHE / 2**20:g} MiB of parameters and {stacked.ACTIVATIONS / 2**20:g} MiB",
        ),
        ("docs/performance.md", f"keeps up to {stacked.GATHERED / 2**20:g} MiB of them"),
        ("docs/performance.md", f"batches of up to {deferred.FEW} samples"),
        ("docs/performance.md", f"For less than {auto.LITTLE / 1e9:g} GFLOP in total"),
        ("docs/performance.md", f"the median of {WORDS[auto.TURNS]} turns"),
        ("docs/performance.md", f"for at least {auto.SHORT} s"),
        ("docs/performance.md", f"{auto.MANY} clients and about {auto.TIMED * auto.LITTLE / 1e9:g} GFLOP"),
        ("docs/performance.md", f"from {auto.LARGE / 1e9:g} GFLOP per step on, stacking gains nothing"),
        ("docs/performance.md", f"less than about {WORDS[round(jobs.WORTH)]} seconds of work"),
        ("docs/performance.md", f"in memory up to {client_store.MEMORY / 2**20:g} MiB, "),
        ("docs/performance.md", f"MiB, with {client_store.ENTRY / 2**10:g} KiB for each entry"),
        ("docs/security.md", f"more than {WORDS[round(served['update_bound'])]} times as long as the others'"),
        ("docs/security.md", f"one key's requests take {link.OF_KEY / 2**20:g} MiB at a time"),
        ("docs/architecture.md", f"**Checkpoints** (format {trial_records.FORMAT})"),
        ("docs/architecture.md", f"in memory up to {client_store.MEMORY / 2**20:g} MiB"),
        ("docs/new-clients.md", f"processed in batches of {BATCH}"),
        *(("docs/new-clients.md", f"| `{name}` | {describe_arguments(name)} |") for name in ("mixed", "tent")),
    ]


@pytest.mark.parametrize(("page", "sentence"), list_stated_numbers())
def test_pages_state_the_numbers_of_the_code(page, sentence):
    assert sentence in " ".join((ROOT / page).read_text().split())
