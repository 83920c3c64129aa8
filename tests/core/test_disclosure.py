"""What leaves a client is what its plan declares: other uploads are stopped, and every text derives from one list."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fedshift.config.expressions import list_catalog
from fedshift.core.checks import check_upload, like_sends
from fedshift.core.declarations import GRAINS, Send
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.rule import Declared, Rule
from fedshift.evaluation.communication import describe_kept, list_disclosures
from fedshift.methods.fedavg import fedavg
from fedshift.results.disclosure import group_disclosures
from fedshift.utils.errors import UsageError
from tests.laws import course
from tests.laws.course import make_trial

METHODS = list_catalog("methods")
ONE = {"total": Send(shape=(2,), dtype=torch.float32, reveals="client")}


class Sending(Rule):
    """Declares ``declared``, and uploads tensors of these shapes and types; ``late``: only from round 3 on."""

    def __init__(self, declared, late=False, **sent):
        self.declared, self.late, self.sent = declared, late, sent

    def bind(self, plan):
        return Declared(self, sends=self.declared)

    def end(self, client):
        if self.late and client.round < 2:
            return {}, {name: torch.zeros(send.shape, dtype=send.dtype) for name, send in self.declared.items()}
        return {}, {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in self.sent.items()}


WRONG = {
    "uploads 'total' of shape (2,) and type float32 without declaring it": Sending({}, total=(2, torch.float32)),
    "uploads 'more' of shape (3,) and type bool without declaring it": Sending(
        ONE, total=(2, torch.float32), more=(3, torch.bool)
    ),
    "uploads 'total' of shape (3,) and type float32, declared as (2,) and float32": Sending(
        ONE, total=(3, torch.float32)
    ),
    "uploads 'total' of shape (2,) and type int32, declared as (2,) and float32": Sending(ONE, total=(2, torch.int32)),
    "declares 'total' but does not upload it": Sending(ONE),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_rule_that_uploads_other_than_it_declares_is_refused_before_anything_starts(why):
    with pytest.raises(UsageError) as error:
        prepare(fedavg().with_rule(WRONG[why]), nn.Linear(2, 2), optimizer=SGD(lr=0.1), sample=torch.zeros(1, 2))
    assert f"Sending {why}: the sends of its bind() must be exactly" in str(error.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["sequential", "stacked", "pool"])
def test_an_upload_that_becomes_another_later_is_stopped_on_every_engine(engine):
    running = make_trial(fedavg().with_rule(Sending(ONE, late=True, total=(3, torch.float32))), engine)
    running.advance()
    running.advance()
    with pytest.raises(UsageError, match="uploads 'total' of shape \\(3,\\) and type float32, declared as"):
        running.advance()
    running.close()


def test_a_grain_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="reveals='all': give one of 'update', 'client', 'class', 'image'"):
        Send(shape=(), dtype=torch.float32, reveals="all")


def test_entries_of_the_model_leave_exactly_as_the_scope_says():
    plan = prepare(fedavg(), nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    check_upload(plan, plan.initial, ())
    for shared in ({**plan.initial, "x": torch.zeros(2)}, {"weight": plan.initial["weight"]}):
        with pytest.raises(UsageError, match="the entries in its scope must be exactly that"):
            check_upload(plan, shared, ())


def of(name, **options):
    base = METHODS["gn"]() if name == "dp_sgd" else None
    return make_trial(METHODS[name](base, **options), model=network if options else course.network).plan


def network(shape, classes):
    """A network whose BatchNorm takes one sample."""
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, classes)).double()


REVEALED = {
    "scaffold": {"update": "all"}, "fedheal": {"update": "server"}, "feddg_ga": {"client": "server"},
    "harmofl": {"client": "all"}, "hbn": {"client": "all"}, "feddg_elcfs": {"image": "each"},
    "fedplvm": {"class": "each"}, "fedproto": {"class": "each"}, "fpl": {"class": "each"}, "fedrdn": {"client": "each"},
    "fedpac": {"class": "each", "client": "all"},
}  # fmt: skip
"""What the papers' rules send: what it reveals, and the widest that receive it; class counts are for the mean alone."""


@pytest.mark.parametrize("name", METHODS)
def test_each_method_says_what_it_reveals_and_to_whom(name):
    plan = of(name)
    entries = [each for each in list_disclosures(plan) if each.source == "the model"]
    sends = [each for each in list_disclosures(plan) if each.source != "the model"]
    sends.sort(key=lambda each: list(RECEIVING).index(each.receivers))
    found = {each.reveals: each.receivers for each in sends if not each.name.endswith("/counts")}
    assert found == REVEALED.get(name, {})
    assert {each.name for each in entries} == (set() if plan.method.pooled else plan.sent)
    for each in entries:
        written = each.name.endswith(("running_mean", "running_var", "running_std"))
        made = any(each.name in bound.sets for bound in plan.rules)
        assert (each.reveals == "client") == (written and not made), each.name
    assert sum(each.bytes for each in sends) == sum(x.nbytes for x in like_sends(plan).values())
    assert sum(map(len, (group.members for group in group_disclosures([*entries, *sends])))) == len(entries + sends)


@pytest.mark.parametrize("name", ["harmofl", "hbn", "fedrdn"])
def test_a_measurement_of_one_sample_reveals_it(name):
    assert {send.reveals for bound in of(name, samples=1).rules for send in bound.sends.values()} == {"image"}


@pytest.mark.slow
def test_who_is_handed_single_uploads_is_said():
    """The mean, its masks and its noise blend all uploads; others may hand out one client's values."""
    given = {name: {each.receivers for each in list_disclosures(of(name))} for name in METHODS}
    single = {name for name, receivers in given.items() if "each" in receivers}
    assert single == {
        "fedap", "krum", "multi_krum", "median", "trimmed_mean", "geometric_median", "fedheal", "feddg_ga",
        "feddg_elcfs", "fedcac", "fedpac", "fedplvm", "fedproto", "fpl", "fedrdn",
    }  # fmt: skip
    assert describe_kept(of("fedavg")) == "nothing of single clients"
    kept = "the uploads of the last round, one by one; what fedap remembers of each client that took part"
    assert describe_kept(of("fedap")) == kept
    assert describe_kept(of("fedheal")) == "what fedheal remembers of each client that took part"


SENDING_ROW = re.compile(r"^\| (\[\w+\]\(methods/\w+\.md\).*?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
RECEIVING = {
    "server": "coordinator",
    "all": r"coordinator; others in their \w+",
    "each": r"coordinator; others .*one site's.*",
}


@pytest.mark.slow
def test_the_page_on_security_names_what_each_method_sends_beside_entries():
    """Each method that sends has a row, with the most that it reveals and the widest that receive it."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    said = {}
    for names, _, reveals, received in SENDING_ROW.findall(page):
        for name in re.findall(r"\]\(methods/(\w+)\.md\)", names):
            said[name] = (reveals, received)
    found = {}
    for name in METHODS:
        if sends := [each for each in list_disclosures(of(name)) if each.source != "the model"]:
            grain = max((each.reveals for each in sends), key=GRAINS.index)
            found[name] = grain, max((each.receivers for each in sends), key=list(RECEIVING).index)
    assert said.keys() == found.keys()
    for name, (grain, receivers) in found.items():
        reveals, received = said[name]
        assert reveals == (f"{grain}; image with `samples=1`" if name in ("harmofl", "hbn", "fedrdn") else grain), name
        assert re.fullmatch(RECEIVING[receivers], received.replace("**", "")), name
