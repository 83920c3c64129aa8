"""The exchange before round 1 across machines: what sites are shown, what they refuse, and what the server does."""

import re

import pytest
import torch
from rich.text import Text

from fedshift.cli.inspection import describe_method
from fedshift.evaluation.communication import summarize_method
from fedshift.flower.site.account import Book
from fedshift.flower.site.ledger import count_bytes_left, read_ledger
from fedshift.flower.site.policy import Limits
from fedshift.flower.site.review import TrialReview
from fedshift.flower.transport.arrays import RefusedMessage, to_record
from fedshift.flower.transport.exchange import Exchange
from fedshift.methods.fedbn import fedbn
from fedshift.report.page import _leaving_table
from fedshift.results.checkpoint import load_checkpoint
from fedshift.utils.errors import FedshiftError
from tests.flower.mutations import PHOTO
from tests.flower.sites import Heard, SiteGrid, coordinator, sites_of, spec_for
from tests.methods import plain
from tests.methods.others import styles

OWN = "tests.methods.others:styles"
SENT = "1 entry of others, 16 bytes, which reveals statistics of the client's data; received by the server; other "


def review(**changes):
    given = {"plan": plain.trial(styles()).plan, "model": "cnn", "seed": 0, "rounds": 2, "sites": 3}
    return TrialReview(**given | changes)


@pytest.fixture
def served(tmp_path, machine):
    """Run two rounds; return the sites' folder, what was said, and the bank that the server holds at the end."""

    def run(tamper=None, **order):
        spec = spec_for(f"{OWN}+fedbn", samples=16, rounds=2, evaluate_every=2)
        grid, heard = SiteGrid(sites_of(spec, tmp_path, code=frozenset({OWN}))), Heard()
        grid.tamper = tamper or grid.tamper
        assert coordinator(spec, grid, tmp_path / "served", heard, **order).run()
        (trial,) = (tmp_path / "served" / "trials").iterdir()
        return tmp_path, heard, load_checkpoint(trial / "checkpoint.safetensors")[0]["server/memory/styles/bank"], grid

    return run


def test_consent_and_inspect_and_page_say_that_it_leaves_once():
    lines = review().describe().splitlines()
    assert [line for line in lines if line.startswith(f"leaves once, before round 1: {SENT}")]
    texts = describe_method("small-cnn", OWN, (1, 8, 8), 3)
    shown = "\n".join(text.plain for text in texts if isinstance(text, Text))
    assert "Leaves a client once, before round 1:\n1 entry of others, 8 bytes" in shown
    cells = [[cell.text for cell in row] for row in _leaving_table(summarize_method(review().plan)).rows]
    assert cells[-1][:3] == ["styles/style (once, before round 1)", "others", "16"]


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ({"reveals": "update"}, "'styles/style' of others reveals statistics of the client's data"),
        ({"passed_on": False}, "'styles/style' of others is received by the server; other clients also as one client"),
        ({"keep": ["styles/*"]}, "entry 'styles/style' does not leave"),
    ],
)
def test_policies_limit_it(limit, why):
    with pytest.raises(RefusedMessage, match=re.escape(why)):
        Limits(**{"keep": ["*running*"]} | limit).check(review(plan=plain.trial(styles(fedbn())).plan), Book())


def test_the_ledger_holds_it_with_its_bytes(served):
    folder, _, bank, grid = served()
    assert bank.shape == (3, 2)
    asked = [question.kind for node, question in grid.asked if node == PHOTO]
    assert asked[:3] == ["describe", "introduce", "train"]
    assert asked.count("introduce") == 1
    lines = {entry.content["asked"]: entry for entry in read_ledger(folder / "photo")}
    line = lines["introduce"]
    assert line.content["answered"] == "introduced"
    assert line.content["round"] == 0
    assert line.content["left"]["memory"]["names"] == ["styles/style"]
    assert count_bytes_left(line) == 8
    assert [each.startswith("1 entry of others, 8 bytes") for each in line.content["discloses"]] == [True]
    assert not any("others" in each for each in lines["train"].content["discloses"])


def test_asking_again_reveals_nothing_more(served):
    folder, _, _, grid = served()
    (question,) = [each for node, each in grid.asked if (node, each.kind) == (PHOTO, "introduce")]
    digests = {grid.sites[PHOTO].answer(question).arrays["memory"]["styles/style"].data for _ in range(2)}
    entries = [entry.content for entry in read_ledger(folder / "photo")]
    lines = [entry["left"]["memory"] for entry in entries if entry.get("asked") == "introduce"]
    assert len(lines) == 3
    assert len(digests) == 1
    assert len({line["digest"] for line in lines}) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"styles/style": torch.zeros(3)}, "has shape (3,) in place of (2,)"),
        ({"styles/style": torch.full((2,), torch.nan)}, "holds NaN or infinity"),
        ({}, "lacks entry 'styles/style'"),
        ({"styles/style": torch.zeros(2), "more": torch.zeros(1)}, "has an entry 'more'"),
    ],
)
def test_an_answer_that_is_not_what_was_declared_is_left_out(served, change, why):
    def tamper(node, question, answer):
        if (node, question.kind) != (PHOTO, "introduce"):
            return answer
        return Exchange(kind=answer.kind, facts=answer.facts, arrays={"memory": to_record(change)})

    _, heard, bank, _ = served(tamper, clients=2)
    assert bank.shape == (2, 2)
    assert [text for text in heard.notices if text.startswith("before round 1: photo is left out") and why in text]
    assert all("photo" in done.participants for done in heard.rounds)


def test_too_few_answers_end_it_before_any_training(served):
    def tamper(node, question, answer):
        return None if question.kind == "introduce" and node == PHOTO else answer

    with pytest.raises(FedshiftError, match="before round 1: only 2 of 3 clients sent a usable upload"):
        served(tamper, seconds=0.5)
