"""Sites that validate only: they train nothing, change nothing, and are measured as clients that are held out."""

from dataclasses import replace

import pytest
from PIL import Image

import fedshift
from fedshift.experiments.factory import make_experiment
from fedshift.flower.server.registry import ClientRegistry
from fedshift.flower.server.served import load_served
from fedshift.flower.site.gate import Confirmation
from fedshift.flower.site.ledger import count_bytes_left, read_ledger
from fedshift.flower.site.policy import SitePolicy
from fedshift.flower.site.site import Site
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.summary import read_summary
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import SMALLEST, Heard, SiteGrid, coordinator, list_rows, sites_of, spec_for

TRAINING, HELD = ("pen", "photo", "print"), "worn"
FOUR = ",".join((*TRAINING, HELD))
PLACE = ["method", "seed", "round", "client", "split", "model", "moment"]


def grid_of(spec, folder, **named):
    """Sites of the clients that ``spec`` names, and of ``worn``, which validates only."""
    return SiteGrid(sites_of(spec, folder) | {9: Site("digits", HELD, folder / HELD, validates=True, **named)})


def serve(spec, grid, directory, clients=3):
    """Run to the end without ``domains``, by which the coordinator would admit no other; return what was told."""
    heard = Heard()
    assert coordinator(replace(spec, domains=None), grid, directory, heard, clients=clients).run()
    return heard


def read_sorted(directory):
    return read_summary(directory).rows.sort_values(PLACE, ignore_index=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "unseen"),
    [
        ("fedavg", "skip"), ("scaffold+fedadam", "average"), ("ditto", "reestimate"), ("silobn", "tent"),
        ("fedbn", "skip"),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in (("ditto", "skip"), ("ditto", "average"), ("silobn", "reestimate"))),
    ],
)  # fmt: skip
def test_a_site_that_validates_only_is_measured_as_a_client_that_is_held_out(method, unseen, tmp_path, machine):
    spec = spec_for(method, unseen=unseen, evaluate_every=1, validation=0.25)
    grid, said = grid_of(spec, tmp_path), []
    grid.tamper = lambda node, question, answer: said.append((node, question.kind, answer)) or answer
    heard = serve(spec, grid, tmp_path / "served")
    assert [done.participants for done in heard.rounds] == [TRAINING] * 2
    assert {kind for node, kind, _ in said if node == 9} <= {"describe", "evaluate", "end"}
    assert not any(answer.arrays for node, _, answer in said if node == 9)
    alone = replace(spec, domains=FOUR, newcomers=HELD, engine="sequential")
    make_experiment(alone).run(tmp_path / "reference")
    rows, reference = read_sorted(tmp_path / "served"), read_sorted(tmp_path / "reference")
    assert rows.drop(columns="loss_sum").equals(reference.drop(columns="loss_sum"))
    assert rows["loss_sum"].to_numpy() == pytest.approx(reference["loss_sum"].to_numpy())
    assert (HELD in set(rows["client"])) == ((method, unseen) != ("fedbn", "skip"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "unseen"), [("ditto", "average"), ("ditto", "finetune"), ("fedbn", "finetune_bn")])
def test_a_site_that_was_never_drawn_is_measured_as_in_one_process(method, unseen, tmp_path, machine):
    spec = spec_for(method, unseen=unseen, participation=1, evaluate_every=1)
    serve(spec, SiteGrid(sites_of(spec, tmp_path)), tmp_path / "served", clients=1)
    make_experiment(replace(spec, engine="sequential")).run(tmp_path / "reference")
    rows, reference = read_sorted(tmp_path / "served"), read_sorted(tmp_path / "reference")
    assert len(rows.query("round == 1 and model == 'personal' and split == 'test'")) == 3
    assert rows.drop(columns="loss_sum").equals(reference.drop(columns="loss_sum"))


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fedbn"])
def test_training_is_the_same_bits_with_and_without_it(method, tmp_path, machine):
    spec = spec_for(method, participation=0.67, loss="focal(weights='inverse_frequency')", rounds=3)
    kept, records = [], []
    for name, make in (
        ("without", lambda folder: SiteGrid(sites_of(spec, folder))),
        ("with", lambda f: grid_of(spec, f)),
    ):
        folder = tmp_path / name
        heard = serve(spec, make(folder), folder / "served", clients=2)
        assert not [text for text in heard.notices if "left out" in text or "not admitted" in text]
        kept.append(load_checkpoint(folder / "served" / "trials" / f"{method}-seed0" / "checkpoint.safetensors")[0])
        records.append(read_summary(folder / "served"))
    without, beside = kept
    assert without.keys() == beside.keys()
    assert all(without[name].equal(beside[name]) for name in without)
    assert set(list_rows(records[0])) <= set(list_rows(records[1]))
    assert records[1].clients[HELD].keys() >= {"test"}


def test_it_does_not_count_for_the_clients_that_a_round_needs(tmp_path, machine):
    spec = spec_for("fedavg", domains="pen,photo")
    grid = grid_of(spec, tmp_path)
    run = coordinator(replace(spec, domains=None), grid, tmp_path / "served", Heard(), clients=3, wait=0.0)
    with pytest.raises(FedshiftError, match=r"there are 2: pen, photo \(not counting worn, which validate only\)"):
        run.run()


@pytest.mark.slow
def test_it_may_come_late_is_known_again_and_keeps_its_role(tmp_path, machine):
    spec = spec_for("fedavg", rounds=4, evaluate_every=1)
    grid, heard = grid_of(spec, tmp_path), Heard()
    grid.away = {9}
    heard.after = lambda done: grid.away.clear() if done.round == 1 else (heard.stop.set(), heard.changed.set())
    run = coordinator(replace(spec, domains=None), grid, tmp_path / "served", heard, clients=3)
    while heard.stop.is_set() or not run.run():
        heard.stop.clear()
        heard.after = lambda done: None
    assert ClientRegistry.read(run.path).validating == (HELD,)
    rows = read_summary(tmp_path / "served").rows.query("client == 'worn'")
    assert max(rows["round"]) == 4
    assert 1 not in set(rows["round"])
    assert load_served(tmp_path / "served").settings.newcomers == (HELD,)  # so that its models can be restored
    grid.sites[9] = Site("digits", HELD, tmp_path / HELD)
    heard = serve(spec, grid, tmp_path / "served")
    assert "worn has reconnected with other data or in another role than before: refused" in heard.notices


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "unseen", "why"),
    [
        ("fedbn", "average", "takes entries that fedbn keeps at its clients, which never leave them: use a method wi"),
        ("fedbn", "reestimate", "takes entries that fedbn keeps at its clients, which never leave them: use a metho"),
        ("silobn", "average", "takes entries that silobn keeps at its clients, which never leave them: use 'reestim"),
        ("ditto", "finetune", "this site validates only, and unseen='finetune' trains: use unseen='average' or"),
        ("fedbn", "finetune_bn", "this site validates only, and unseen='finetune_bn' trains: use unseen='average' or"),
        ("ditto", "nearest", "leave them: use 'average', 'mixed', 'reestimate', 'sar' or 'tent'"),
    ],
)
def test_a_policy_that_it_cannot_follow_is_refused_by_name_and_the_others_train(method, unseen, why, tmp_path, machine):
    spec = spec_for(method, unseen=unseen, evaluate_every=2)
    heard = serve(spec, grid_of(spec, tmp_path), tmp_path / "served")
    (refusal,) = (text for text in heard.notices if "worn is not measured" in text)
    assert why in refusal
    assert any(f"by the policy unseen={unseen} where their sites can follow it: worn" in text for text in heard.notices)
    assert [done.participants for done in heard.rounds] == [TRAINING] * 2


def test_it_refuses_to_train_whoever_asks(tmp_path, machine):
    spec = spec_for("fedavg", rounds=1)
    grid = grid_of(spec, tmp_path)
    serve(spec, grid, tmp_path / "served")
    answer = grid.sites[9].answer(next(question for _, question in grid.asked if question.kind == "train"))
    assert (answer.kind, dict(answer.arrays)) == ("refused", {})
    assert "this site validates only (join --validate-only): it trains nothing" in answer.facts["why"]


@pytest.mark.slow
def test_ledger_and_confirmation_say_that_it_validates_only(tmp_path, machine, cli):
    limits = '[limits]\nkeep = ["*"]\nsites = 9\nepsilon = 1.0\nsample_epsilon = 1.0\nrounds = 2'
    (tmp_path / "policy.toml").write_text(limits)
    shown, spec = [], spec_for("fedavg")
    asks = Confirmation(lambda text, _: shown.append(text) or True)
    grid = grid_of(spec, tmp_path, policy=SitePolicy.read(tmp_path / "policy.toml"), confirmation=asks)
    heard = serve(spec, grid, tmp_path / "served")
    assert not [text for text in heard.notices if "not measured" in text]
    described, trial = shown
    assert "samples: 140 test" in described
    assert "this site validates only: nothing is trained here" in trial
    assert "leaves each round: nothing" in trial
    assert "privacy: nothing is trained on these data; counts are disclosed without noise" in trial
    entries = list(read_ledger(tmp_path / HELD))
    assert {entry.content["role"] for entry in entries if entry.content["event"] == "message"} == {"validates only"}
    assert not sum(map(count_bytes_left, entries))
    assert {entry.content["role"] for entry in read_ledger(tmp_path / "pen")} == {"trains"}
    assert "evaluated; no entries (validates only)" in cli("ledger", tmp_path / HELD).out


def test_the_command_line_makes_such_a_site(tmp_path, cli, monkeypatch):
    made = []
    monkeypatch.setattr("fedshift.flower.site.join.join", lambda link, site, *_: made.append(site) or 0)
    given = ("join", "localhost:1", "--data", tmp_path, "--insecure", "--state", tmp_path / "state")
    assert [cli(*given).code, cli(*given, "--validate-only").code] == [0, 0]
    assert [site.validates for site in made] == [False, True]


@pytest.mark.slow
def test_the_report_has_its_column(tmp_path, machine, cli):
    spec = spec_for("fedavg")
    serve(spec, grid_of(spec, tmp_path), tmp_path / "served")
    assert cli("report", tmp_path / "served").code == 0
    assert HELD in (tmp_path / "served" / "report.html").read_text()
    assert HELD in (tmp_path / "served" / "tables" / "accuracy.csv").read_text()


@pytest.fixture
def image_sites(tmp_path):
    """A site for each of four directories of class folders; ``worn`` validates only, and has test images alone."""
    for client in fedshift.digits().select_clients(FOUR.split(",")).limit_samples(16).clients:
        for part, split in client.splits.items():
            for number in range(0 if (part, client.name) == ("train", HELD) else min(40, len(split))):
                folder = tmp_path / "images" / client.name / part / str(int(split.y[number]))
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(split.x[number].permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    return {
        number: Site(
            str(tmp_path / "images" / name), name, tmp_path / "sites" / name, validates=name == HELD, policy=SMALLEST
        )
        for number, name in enumerate(FOUR.split(","))
    }


def spec_of_images(**changes):
    return spec_for("fedavg", samples=None, classes=10, image_size=None, on_data_error="ignore", **changes)


@pytest.mark.slow
def test_it_needs_no_training_samples(image_sites, tmp_path, machine):
    heard = serve(spec_of_images(validation=0.25), SiteGrid(image_sites), tmp_path / "served")
    assert any(text.startswith("worn is connected, validates only, on 40 test samples") for text in heard.notices)
    rows = read_summary(tmp_path / "served").rows.query("client == 'worn' and model == 'personal'")
    assert set(rows["samples"]) == {40}
    assert not [text for text in heard.notices if "not measured" in text]


@pytest.mark.slow
def test_its_model_can_be_exported_there(image_sites, tmp_path, machine):
    image_sites[3].export = tmp_path / "models"
    serve(spec_of_images(), SiteGrid(image_sites), tmp_path / "served")
    assert "worn" in (tmp_path / "models" / "fedavg-seed0" / "README.md").read_text()


@pytest.mark.slow
def test_what_follows_from_training_images_is_refused_where_there_are_none(image_sites, tmp_path, machine):
    heard = serve(spec_of_images(normalize="client"), SiteGrid(image_sites), tmp_path / "served")
    assert [text for text in heard.notices if "scales by training images, which this site lacks" in text]
    assert [done.participants for done in heard.rounds] == [TRAINING] * 2
