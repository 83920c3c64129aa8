"""Survival: concordance and Cox's partial likelihood against independent loops and closed forms; tables; refusals."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

import fedshift
from fedshift.analysis.influence import find_influence, vary
from fedshift.core.loss import LOSSES, cox, make_loss
from fedshift.report.survival import list_survival_tables
from fedshift.results.schema import compute_metric, rows_to_frame
from fedshift.tasks import Survival
from fedshift.utils.errors import UsageError

SURVIVAL = Survival()


def draw(patients, seed, ties=True):
    """Draw risks ``[N, 1]`` and targets ``[N, 2]`` in float64, with ties in both where asked."""
    random = np.random.default_rng(seed)
    time, risk = random.exponential(5, patients) + 0.1, random.normal(size=patients)
    if ties:
        time, risk = np.ceil(time), np.round(risk, 1)
    event = random.random(patients) < 0.6
    event[0] = True
    return torch.tensor(risk)[:, None], torch.tensor(np.column_stack([time, event]), dtype=torch.float64)


def rank_by_loops(risk, y):
    """The pairs that are comparable, and those that are ranked correctly, as Harrell et al. 1982 count them."""
    comparable = concordant = 0.0
    for i in range(len(y)):
        for j in range(len(y)):
            (time, event), (other, other_event) = y[i].tolist(), y[j].tolist()
            if event and (time < other or (time == other and not other_event)):
                comparable += 1
                concordant += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return concordant, comparable


def likelihood_by_loops(risk, y, ties):
    """The negative log partial likelihood, event by event in the textbooks' sums."""
    time, event, risk = y[:, 0].tolist(), y[:, 1].tolist(), risk[:, 0].tolist()
    total = 0.0
    for t in sorted({each for each, died in zip(time, event, strict=True) if died}):
        tied = [i for i in range(len(time)) if time[i] == t and event[i]]
        at_risk = sum(math.exp(risk[i]) for i in range(len(time)) if time[i] >= t)
        own = sum(math.exp(risk[i]) for i in tied)
        for place, i in enumerate(tied):
            below = at_risk
            if ties == "efron":
                below -= place / len(tied) * own
            if ties == "order":
                below = sum(math.exp(risk[j]) for j in range(len(time)) if time[j] > t or (time[j] == t and j <= i))
            total += math.log(below) - risk[i]
    return total


@pytest.mark.parametrize("seed", range(4))
def test_concordance_counts_the_pairs_that_loops_count(seed, monkeypatch):
    monkeypatch.setattr("fedshift.tasks.survival.CHUNK", 7)
    risk, y = draw(60, seed)
    counts = SURVIVAL.count(risk, y, 1)
    assert (counts["concordant"], counts["comparable"]) == rank_by_loops(risk, y)
    assert SURVIVAL.is_possible(counts)
    assert not SURVIVAL.is_possible(counts | {"concordant": counts["comparable"] + 1})
    value = compute_metric(rows_to_frame([counts]), "c_index").iloc[0]
    assert value == counts["concordant"] / counts["comparable"]
    assert counts["loss_sum"] == pytest.approx(likelihood_by_loops(risk, y, "breslow"), rel=1e-12)


@pytest.mark.parametrize("ties", ["breslow", "efron", "order"])
def test_cox_is_the_textbooks_likelihood_and_works_side_by_side(ties):
    loss, several = make_loss(cox, ties=ties), [draw(25, seed) for seed in range(3)]
    values = [loss(risk, y) for risk, y in several]
    for value, (risk, y) in zip(values, several, strict=True):
        assert float(value) == pytest.approx(likelihood_by_loops(risk, y, ties) / len(y), rel=1e-12)
    stacked = torch.func.vmap(torch.func.grad(loss))(*map(torch.stack, zip(*several, strict=True)))
    for gradient, (risk, y) in zip(stacked, several, strict=True):
        free = risk.clone().requires_grad_()
        loss(free, y).backward()
        assert torch.allclose(gradient, free.grad, atol=1e-14)
        assert abs(float(gradient.sum())) < 1e-12  # a shift of all risks changes nothing


def test_without_ties_all_treatments_agree_and_without_events_the_loss_is_zero():
    risk, y = draw(40, 5, ties=False)
    values = {float(make_loss(cox, ties=ties)(risk, y)) for ties in ("breslow", "efron", "order")}
    assert max(values) - min(values) < 1e-14
    y[:, 1] = 0
    free = risk.clone().requires_grad_()
    make_loss(cox)(free, y).backward()
    assert float(make_loss(cox)(risk, y)) == 0
    assert not free.grad.any()
    assert math.isfinite(float(make_loss(cox)(1e4 * risk.float(), draw(40, 5)[1].float())))  # exponentials are not


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([-1.0, 0.0], "time is negative"),
        ([0.0, 1.0], "event is at time 0"),
        ([2.0, 2.0], r"neither 0 nor 1 \(as R codes it, 1 is censored and 2 is the event: subtract 1\)"),
        ([2.0, 3.0], r"neither 0 nor 1 \(codes of several kinds of events: write 1"),
        ([float("nan"), 1.0], "missing or infinite"),
    ],
)
def test_impossible_times_and_events_are_refused_by_sample(row, told):
    y = torch.tensor([[5.0, 1.0], row])
    with pytest.raises(UsageError, match=f"north: of sample 1 .*{told}"):
        SURVIVAL.check_targets(y, (3,), 1, "north")


def test_settings_that_mean_nothing_are_refused():
    assert LOSSES.parse("cox(ties='efron')") == make_loss(cox, ties="efron")
    with pytest.raises(UsageError, match="ties='exact' is unknown"):
        LOSSES.parse("cox(ties='exact')")
    censored, event = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    with pytest.raises(UsageError, match=r"no event among the training patients of north \(2 patients\), east \(2 pat"):
        SURVIVAL.check_outputs({"north": censored, "west": event, "east": censored}, 5)


@pytest.fixture(scope="module")
def clinics(tmp_path_factory):
    """Two tables of patients whose risk grows with their age, and with the dose in one clinic alone."""
    folder, random = tmp_path_factory.mktemp("clinics"), np.random.default_rng(0)
    for name, effect in (("north", 0.0), ("south", 1.0)):
        age, dose = random.normal(60, 10, 200), random.normal(size=200)
        death = random.exponential(1000 * np.exp(-(age - 60) / 8 - effect * dose))
        end = random.uniform(100, 3000, 200)
        rows = {"age": age, "dose": dose, "days": np.ceil(np.minimum(death, end)), "died": (death <= end).astype(int)}
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    return folder


@pytest.mark.slow
def test_a_linear_model_of_tables_learns_to_rank_patients(clinics, tmp_path):
    run = fedshift.compare(
        "single, fedavg", data=clinics, target="days, died", task="survival", model="linear", rounds=10, lr=0.1,
        out=tmp_path / "run",
    )  # fmt: skip
    table = run.table("c_index")
    curves = run.survival("fedavg")
    assert set(curves.index.get_level_values("third")) == {"low risk", "middle risk", "high risk"}
    assert curves.loc["low risk"]["share"].min() > curves.loc["high risk"]["share"].min()
    assert 70 < curves["at_risk"].groupby("third").max().sum() <= 80  # some leave before the first event
    assert (table.loc[["north", "south"]].xs("mean", axis=1, level=1) > 0.65).all(axis=None)
    page = run.report().read_text(encoding="utf-8")
    assert "concordance index" in page


def test_a_client_with_too_few_patients_for_thirds_is_named(clinics, tmp_path):
    for file in clinics.glob("*.csv"):
        rows = pd.read_csv(file)
        (rows.head(10) if file.stem == "north" else rows).to_csv(tmp_path / file.name, index=False)
    run = fedshift.compare(
        "fedavg", data=tmp_path, target="days, died", task="survival", model="linear", rounds=1, seeds=1,
    )  # fmt: skip
    (table,) = list_survival_tables(run.summary)
    assert table.text.note.endswith("Without north: no records, or fewer than 3 patients.")


def test_what_sees_one_patient_alone_is_refused_before_it_learns_nothing(clinics):
    settings = {"data": clinics, "target": "days, died", "task": "survival", "model": "linear", "rounds": 1}
    with pytest.raises(UsageError, match="compares the samples of a batch") as refused:
        fedshift.compare("fedavg", batch_size=1, **settings)
    assert "batch_size" in refused.value.settings
    with pytest.raises(UsageError, match="dp_sgd combines the gradients of single samples, but cox compares"):
        fedshift.compare("dp_sgd", **settings)


def test_patients_pairs_add_up_and_give_the_variance_of_the_jackknife():
    risk, y = draw(24, seed=9)
    made, counts = SURVIVAL.record(risk, y, 1), SURVIVAL.count(risk, y, 1)
    sums = [float(made[name].sum()) / 2 for name in ("concordant", "comparable")]
    assert sums == [counts["concordant"], counts["comparable"]]

    def index(kept):
        concordant, comparable = rank_by_loops(risk[kept], y[kept])
        return concordant / comparable

    left = [index(np.delete(np.arange(24), i)) for i in range(24)]
    jackknife = 23**2 / 24 * np.var(left, ddof=1)
    assert vary(find_influence(made, "c_index")) == pytest.approx(jackknife)
    few = {**made, "event": np.arange(24) < 4}
    assert np.isnan(find_influence(few, "c_index")).all()
