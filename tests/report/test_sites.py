"""Who profits: each client's difference, its interval and verdict, against the same arithmetic by hand."""

import importlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedshift.analysis.sampling import class_values, difference_variance, mean_values
from fedshift.report import publication
from fedshift.report.formatting import to_latex
from fedshift.report.sites import Effect, compare_clients, describe_clients, list_client_tables, tabulate_clients
from fedshift.results.cases import Cases
from fedshift.results.schema import find_plain

METHODS, SEEDS = ("single", "fedavg", "fedbn"), 5
SIZES = {"gains": 200, "loses": 200, "same": 200, "small": 8}
RATES = {"single": (0.6, 0.8, 0.7, 0.5), "fedavg": (0.6, 0.8, 0.7, 0.5), "fedbn": (0.85, 0.5, 0.7, 0.9)}


def make_profits(make_counted, *, seeds=SEEDS, methods=METHODS, lower=False):
    """A study with the results of each sample, in which fedbn gains at one client and loses at another."""
    random = np.random.default_rng(0)
    right = {
        (method, seed): [random.random(size) < rate for size, rate in zip(SIZES.values(), RATES[method], strict=True)]
        for method in methods
        for seed in range(seeds)
    }
    hits = np.array([[[each.sum() for each in right[method, seed]] for seed in range(seeds)] for method in methods])
    study = make_counted(hits, list(SIZES.values()))
    names = {f"method {m}": method for m, method in enumerate(methods)}
    clients = {f"client {c}": name for c, name in enumerate(SIZES)}
    cases = {
        key: Cases(
            round=1,
            records={
                (name, "personal"): {"truth": np.zeros(len(r), np.uint8), "right": r, "loss": 1.0 * ~r}
                for name, r in zip(SIZES, each, strict=True)
            },
        )
        for key, each in right.items()
    }
    study = replace(
        study,
        rows=study.rows.replace({"method": names, "client": clients}),
        methods={names[name]: replace(method, name=names[name]) for name, method in study.methods.items()},
        clients={clients[name]: sizes for name, sizes in study.clients.items()},
        read_cases=lambda method, seed: cases.get((method, seed)),
        metric="loss" if lower else "accuracy",
    )
    return study, right


@pytest.fixture
def profits(make_counted):
    return make_profits(make_counted)


def test_each_client_has_students_interval_with_the_variance_over_its_samples_and_holms_correction(profits):
    study, right = profits
    found = compare_clients(study)
    assert [(each.reference, each.method) for each in found[::4]] == [
        ("single", "fedavg"), ("single", "fedbn"), ("fedavg", "fedbn"),
    ]  # fmt: skip
    own = found[4:8]
    d = np.mean([right["fedbn", s][0].astype(float) - right["single", s][0] for s in range(SEEDS)], axis=0)
    by_seed = [right["fedbn", s][0].mean() - right["single", s][0].mean() for s in range(SEEDS)]
    over_seeds = max(np.std(by_seed, ddof=1) / np.sqrt(SEEDS), np.sqrt(2 / 12) / 200)
    over_samples = np.sqrt((np.square(d).sum() + 1 - d.sum() ** 2 / 202) / 202**2)
    first = own[0].gap
    assert (first.mean, first.comparisons) == (pytest.approx(np.mean(by_seed)), 6)  # without the small client
    assert first.own_level in (1 - 0.05 / 6, 1 - 0.05 / 5)  # of the smallest p-value, or the next
    level = (1 + first.own_level) / 2
    half = np.hypot(stats.t.ppf(level, SEEDS - 1) * over_seeds, stats.t.ppf(level, 201) * over_samples)
    assert (first.low, first.high) == pytest.approx((first.mean - half, first.mean + half))
    assert [each.effect for each in own] == [Effect.GAINS, Effect.LOSES, Effect.UNDECIDED, Effect.UNDECIDED]
    assert own[3].reason == "8 test samples, of 10"
    assert np.isnan(own[3].gap.low)


def test_a_lower_loss_is_a_gain(make_counted):
    study, _ = make_profits(make_counted, lower=True)
    found = {each.client: each for each in compare_clients(study, "loss") if each.reference == "fedavg"}
    assert found["gains"].gap.mean < 0
    assert (found["gains"].effect, found["loses"].effect) == (Effect.GAINS, Effect.LOSES)


def test_a_loss_above_the_margin_is_excluded_by_the_interval_of_all_differences_together(profits, make_counted):
    study, _ = profits
    plain = {(each.method, each.client): each for each in compare_clients(study) if each.reference == "single"}
    first = plain["fedavg", "same"].gap
    quantile = 1 - 0.05 / 6 / 2
    half = np.hypot(
        stats.t.ppf(quantile, SEEDS - 1) * first.error,
        stats.t.ppf(quantile, first.sampled.freedom) * np.sqrt(first.sampled.variance),
    )
    assert plain["fedavg", "same"].least == pytest.approx(first.mean - half)
    assert not any(each.excluded for each in plain.values())
    edge = half - first.mean
    for margin, excluded in ((edge + 1e-6, True), (edge - 1e-6, False)):
        found = compare_clients(replace(study, margin=margin))
        at = next(each for each in found if (each.method, each.client) == ("fedavg", "same"))
        assert (at.excluded, at.gap) == (excluded, first)
    wide = replace(study, margin=0.25, config={"margin": 0.25})
    frame, table = list_client_tables(wide)[0].frame, list_client_tables(wide)[0].text
    cells = {row[0].text: row[4].text for row in table.rows}
    assert cells["same"].endswith("undecided, loss above 25 excluded")
    assert cells["gains"].endswith("gains")
    assert frame.loc[frame["method"] == "fedbn", "excluded"].tolist() == [True, False, True, False]
    assert any("is excluded at 2 of 4. Worst: loses" in line for line in describe_clients(wide))
    assert "when results were known" not in table.note
    assert "when results were known" in list_client_tables(replace(wide, config={}))[0].text.note
    loss, _ = make_profits(make_counted, lower=True)
    errors = {each.client: each for each in compare_clients(replace(loss, margin=0.25)) if each.reference == "fedavg"}
    assert [errors[client].excluded for client in ("gains", "loses")] == [True, False]
    few, _ = make_profits(make_counted, methods=("fedavg", "fedbn"), seeds=2)
    assert "No loss above 5 points (--margin) is excluded" in describe_clients(replace(few, margin=0.05))[0]


def test_terminal_latex_page_and_frame_say_the_same(profits, tmp_path, monkeypatch):
    study, _ = profits
    monkeypatch.setattr(publication, "save_figures", lambda *_: None)
    monkeypatch.setattr("fedshift.report.page.make_panels", lambda *_: [])
    console = Console(file=io.StringIO(), width=250)
    publication.publish_summary(study, tmp_path, console)
    said, frame = console.file.getvalue(), tabulate_clients(compare_clients(study))
    table = list_client_tables(study)[0]
    caption, shown, text = table.caption, table.frame, table.text
    assert caption == "Who profits: accuracy of each client minus single's, in points"
    assert frame[frame["reference"] == "single"].reset_index(drop=True).equals(shown)
    cell = text.rows[0][4].text
    assert cell.startswith(f"+{100 * shown['difference'][4]:.2f} (+")
    assert cell.endswith(") gains")
    assert cell in said
    assert (
        r"\textbf{" + cell.split()[0]
        in (tmp_path / "tables" / "clients-single.tex").read_text()
        == to_latex(text, caption, "tab:clients-single")
    )
    sentence = "fedbn against single: of 4 clients, 1 gains, 1 loses and 2 are undecided"
    assert sentence in said
    assert any(line.startswith(sentence) and "Worst: loses, " in line for line in describe_clients(study))


def test_without_single_a_sentence_says_how_to_have_it_and_few_seeds_decide_nothing(make_counted):
    study, _ = make_profits(make_counted, methods=("fedavg", "fedbn"), seeds=2)
    assert describe_clients(study) == ["To see which clients gain over training alone, add method single."]
    assert list_client_tables(study) == []
    assert {each.reason for each in compare_clients(study)} == {"2 seeds, of 3"}


@pytest.mark.parametrize(
    ("labels", "name", "found"),
    [
        (["fedbn", "Single()", "fedavg"], "single", "Single()"),
        (["single+tuned(lr=0.3)", "fedavg"], "single", "single+tuned(lr=0.3)"),
        (["fedavg+tuned(lr=1)", "fedavg"], "fedavg", "fedavg"),
        (["fedbn", "tuned(lr=0.3)"], "fedavg", "tuned(lr=0.3)"),
        (["single+fedprox(mu=0.1)+tuned(lr=1)", "tuned(lr=1)+fedbn"], "single", None),
    ],
)
def test_references_are_found_at_any_learning_rate(labels, name, found):
    assert find_plain(labels, name) == found


def test_where_sites_keep_the_results_of_single_samples_errors_count_as_independent(profits):
    study, _ = profits
    alone = replace(study, read_cases=lambda *_: None)
    paired, unpaired = (compare_clients(each)[4] for each in (study, alone))
    assert unpaired.gap.sampled.variance > paired.gap.sampled.variance
    assert unpaired.units == paired.units == 200
    assert "errors count as independent" in list_client_tables(alone)[0].text.note
    assert "independent" not in list_client_tables(study)[0].text.note


def test_groups_of_samples_are_counted_and_widen_intervals(profits):
    study, _ = profits

    def read(method, seed):
        cases = study.read_cases(method, seed)
        pairs = {key: {**each, "group": np.arange(len(each["right"])) // 5} for key, each in cases.records.items()}
        return replace(cases, records=pairs)

    grouped = replace(study, read_cases=read)
    table = list_client_tables(grouped)[0].text
    assert [cell.text for cell in table.rows[0][:2]] == ["gains", "40"]
    assert table.header[:2] == ("client", "groups")
    assert "cover seeds and test groups" in table.note
    assert {each.reason for each in compare_clients(grouped) if each.client == "small"} == {"2 test groups, of 10"}
    alone, together = (compare_clients(each)[4].gap.sampled for each in (study, grouped))
    assert together.variance >= alone.variance
    assert together.freedom == 39


def test_samples_of_one_patient_count_as_often_as_there_are_patients():
    random = np.random.default_rng(0)
    score, truth = random.normal(size=20), np.arange(20) % 2
    whole = np.repeat(np.arange(20), 3)
    alone = difference_variance(score, np.zeros(20, np.int64), np.ones(1))
    same = difference_variance(score[whole], np.zeros(60, np.int64), np.ones(1), None, whole)
    assert (same.variance, same.freedom) == (pytest.approx(alone.variance), 19)
    assert difference_variance(score[whole], np.zeros(60, np.int64), np.ones(1)).variance < alone.variance / 2
    classes = class_values(score[whole], truth[whole], mean=True)
    part = [score[truth == k] - score[truth == k].mean() for k in (0, 1)]
    expected = 20 / 19 * sum(np.square(each / 20).sum() for each in part)
    found = difference_variance(classes.x, classes.stratum, classes.weight, None, whole)
    assert found.variance == pytest.approx(expected)
    assert replace(mean_values(score[whole]), group=whole).units == 20


@pytest.fixture
def simulation(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("coverage_of_sites")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy of groups", "Dice", "AUC"])
def test_of_95_percent_intervals_at_one_client_19_in_20_contain_the_truth(simulation, name):
    assert simulation.measure_coverage(name, 20, 0.2, 400)[0] >= simulation.LEAST


@pytest.mark.slow
def test_few_studies_of_equal_methods_have_a_verdict(simulation):
    assert simulation.count_false_verdicts("mean score", 20, 0.2, 200) <= simulation.MOST


@pytest.mark.slow
@pytest.mark.parametrize(("name", "patients"), [("accuracy", 20), ("Dice", 20), ("AUC", 10)])
def test_few_studies_exclude_a_loss_above_the_one_there_is(simulation, name, patients):
    assert simulation.count_false_exclusions(name, patients, 0.2, 200) <= simulation.MOST
