"""Sites that validate only: they train nothing, change nothing, and are measured as clients that are held out."""

from dataclasses import replace

import pytest
from PIL import Image

import fedshift
from fedshift.flower.coordinator.descriptions import ClientRegistry
from fedshift.flower.coordinator.served import load_served
from fedshift.flower.site.policy import SitePolicy
from fedshift.flower.site.record import Record
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.summary import read_summary
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import ALL, Heard, SiteGrid, in_process, list_rows, make_site, serve, sites_of, spec_for

pytestmark = pytest.mark.usefixtures("machine")
HELD = "worn"
FOUR = ",".join((*ALL, HELD))
PLACE = ["method", "seed", "round", "client", "split", "model", "moment"]


def grid_of(spec, folder, **named):
    """Sites of the clients that ``spec`` names, and of ``worn``, which validates only."""
    return SiteGrid(sites_of(spec, folder) | {9: make_site("digits", HELD, folder, validates=True, **named)})


def serve_all(spec, folder, grid=None, clients=3, **options):
    """Run without ``domains``, by which the coordinator would admit no other; return what was told."""
    return serve(replace(spec, domains=None), folder, grid or grid_of(spec, folder), clients=clients, **options)


def read_sorted(directory):
    return read_summary(directory).rows.sort_values(PLACE, ignore_index=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "unseen"),
    [
        ("fedavg", "skip"), ("scaffold+fedadam", "average"), ("ditto", "reestimate"), ("silobn", "tent"),
        ("fedbn", "skip"), ("ditto", "skip"), ("ditto", "average"), ("silobn", "reestimate"),
    ],
)  # fmt: skip
def test_a_site_that_validates_only_is_measured_as_a_client_that_is_held_out(method, unseen, tmp_path):
    spec, said = spec_for(method, unseen=unseen, evaluate_every=1, validation=0.25), []
    heard = serve_all(
        spec, tmp_path, tamper=lambda node, asked, answer: said.append((node, asked.kind, answer)) or answer
    )
    assert heard.took_part == [ALL] * 2
    assert {kind for node, kind, _ in said if node == 9} <= {"describe", "review", "evaluate", "tell"}
    assert not any(answer.arrays for node, _, answer in said if node == 9)
    in_process(replace(spec, domains=FOUR, newcomers=HELD), tmp_path / "reference")
    rows, reference = read_sorted(tmp_path / "served"), read_sorted(tmp_path / "reference")
    assert rows.drop(columns="loss_sum").equals(reference.drop(columns="loss_sum"))
    assert rows["loss_sum"].to_numpy() == pytest.approx(reference["loss_sum"].to_numpy())
    assert (HELD in set(rows["client"])) == ((method, unseen) != ("fedbn", "skip"))
    train = next(question for _, question in heard.grid.asked if question.kind == "train")
    answer = heard.grid.sites[9].answer(train)  # it refuses to train whoever asks
    assert (answer.kind, dict(answer.arrays)) == ("refused", {})
    assert "this site validates only (join --validate-only): it trains nothing" in answer.facts["why"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "unseen"), [("ditto", "average"), ("ditto", "finetune"), ("fedbn", "finetune_bn")])
def test_a_site_that_was_never_drawn_is_measured_as_in_one_process(method, unseen, tmp_path):
    spec = spec_for(method, unseen=unseen, participation=1, evaluate_every=1)
    serve_all(spec, tmp_path, SiteGrid(sites_of(spec, tmp_path)), clients=1)
    in_process(spec, tmp_path / "reference")
    rows, reference = read_sorted(tmp_path / "served"), read_sorted(tmp_path / "reference")
    assert len(rows.query("round == 1 and model == 'personal' and split == 'test'")) == 3
    assert rows.drop(columns="loss_sum").equals(reference.drop(columns="loss_sum"))


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fedbn"])
def test_training_is_the_same_bits_with_and_without_it(method, tmp_path):
    spec = spec_for(method, participation=0.67, loss="focal(weights='inverse_frequency')")
    serve_all(spec, tmp_path / "without", SiteGrid(sites_of(spec, tmp_path / "without")), clients=2)
    heard = serve_all(spec, tmp_path / "with", clients=2)
    assert not [text for text in heard.notices if "left out" in text or "not admitted" in text]
    places = [tmp_path / name / "served" for name in ("without", "with")]
    without, beside = (load_checkpoint(next(place.glob("trials/*/checkpoint.*")))[0] for place in places)
    assert without.keys() == beside.keys()
    assert all(without[name].equal(beside[name]) for name in without)
    alone, both = map(read_summary, places)
    assert set(list_rows(alone)) <= set(list_rows(both))
    assert both.clients[HELD].keys() >= {"test"}


def test_it_does_not_count_for_the_clients_that_a_round_needs(tmp_path):
    with pytest.raises(FedshiftError, match=r"there are 2: pen, photo \(not counting worn, which validate only\)"):
        serve_all(spec_for("fedavg", domains="pen,photo"), tmp_path, clients=3, wait=0.0)


@pytest.mark.slow
def test_it_may_come_late_is_known_again_and_keeps_its_role(tmp_path):
    spec, served = spec_for("fedavg", rounds=4, evaluate_every=1), tmp_path / "served"
    grid, heard = grid_of(spec, tmp_path), Heard()
    grid.away = {9}
    after = lambda done: grid.away.clear() if done.round == 1 else (heard.stop.set(), heard.changed.set())  # noqa: E731
    serve_all(spec, tmp_path, grid, heard=heard, after=after, ends=False)
    serve_all(spec, tmp_path, grid)
    people = ClientRegistry.read(served / "machines" / "population.json").clients
    assert [client.name for client in people if client.validates] == [HELD]
    rows = read_summary(served).rows.query("client == 'worn'")
    assert max(rows["round"]) == 4
    assert 1 not in set(rows["round"])
    assert load_served(served).settings.newcomers == (HELD,)  # so that its models can be restored
    grid.sites[9] = make_site("digits", HELD, tmp_path)
    heard = serve_all(spec, tmp_path, grid)
    assert any("'worn' has reconnected with other data or in another role than before" in t for t in heard.notices)


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
def test_a_policy_that_it_cannot_follow_is_refused_by_name_and_the_others_train(method, unseen, why, tmp_path):
    heard = serve_all(spec_for(method, unseen=unseen, evaluate_every=2), tmp_path)
    (refusal,) = (text for text in heard.notices if "worn is not measured" in text)
    assert why in refusal
    assert any(f"by the policy unseen={unseen} where their sites can follow it: worn" in text for text in heard.notices)
    assert heard.took_part == [ALL] * 2


def test_record_and_confirmation_say_that_it_validates_only(tmp_path):
    limits = '[limits]\nkeep = ["*"]\nsites = 9\nepsilon = 1.0\nsample_epsilon = 1.0\nrounds = 2'
    (tmp_path / "policy.toml").write_text(limits)
    shown, spec, account = [], spec_for("fedavg", evaluate_every=2), tmp_path / "worn.db"

    def asks(text, _):
        return shown.append(text) or True

    policy = SitePolicy.read(tmp_path / "policy.toml")
    grid = grid_of(spec, tmp_path, policy=policy, confirm=asks, account=account)
    assert not [text for text in serve_all(spec, tmp_path, grid).notices if "not measured" in text]
    described, trial = shown
    assert "samples: 140 test" in described
    assert "this site validates only: nothing is trained here" in trial
    assert "leaves each round: nothing" in trial
    assert "privacy: nothing is trained on these data; counts are disclosed without noise" in trial
    entries = list(Record(account).read())
    assert [entry.event for entry in entries] == ["agreed", "describe", "agreed", "evaluate"]
    assert not any("left" in entry.content for entry in entries)
    (total,) = Record(account).list_totals()
    assert total.endswith(": 0 uploads, 1 evaluations, 1 descriptions in all")


@pytest.fixture
def image_grid(tmp_path):
    """A site for each of four directories of class folders; ``worn`` validates only, and has test images alone."""
    for client in fedshift.digits().select_clients(FOUR.split(",")).limit_samples(16).clients:
        for part, split in client.splits.items():
            for number in range(0 if (part, client.name) == ("train", HELD) else min(40, len(split))):
                folder = tmp_path / "images" / client.name / part / str(int(split.y[number]))
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(split.x[number].permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    sites = {
        number: make_site(tmp_path / "images" / name, name, tmp_path / "sites", validates=name == HELD)
        for number, name in enumerate(FOUR.split(","))
    }
    return SiteGrid(sites)


def spec_of_images(**changes):
    return spec_for("fedavg", samples=None, classes=10, image_size=None, on_data_error="ignore", **changes)


@pytest.mark.slow
def test_it_needs_no_training_samples_and_has_its_column_and_its_model(image_grid, tmp_path, cli):
    image_grid.sites[3].export, served = tmp_path / "models", tmp_path / "served"
    heard = serve_all(spec_of_images(validation=0.25), tmp_path, image_grid)
    assert any(text.startswith("worn is connected, validates only, on 40 test samples") for text in heard.notices)
    rows = read_summary(served).rows.query("client == 'worn' and model == 'personal'")
    assert set(rows["samples"]) == {40}
    assert not [text for text in heard.notices if "not measured" in text]
    assert HELD in (tmp_path / "models" / "fedavg-seed0" / "README.md").read_text()
    assert cli("report", served).code == 0
    assert all(HELD in (served / name).read_text() for name in ("report.html", "tables/accuracy.csv"))


@pytest.mark.slow
def test_what_follows_from_training_images_is_refused_where_there_are_none(image_grid, tmp_path):
    heard = serve_all(spec_of_images(normalize="client"), tmp_path, image_grid)
    assert [text for text in heard.notices if "scales by training images, which this site lacks" in text]
    assert heard.took_part == [ALL] * 2
