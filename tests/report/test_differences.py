"""Differences from a reference, their intervals and what is printed of them, against the same arithmetic by hand."""

import io
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from scipy import stats

from fedshift.report.cases import _list_columns, tabulate_cases
from fedshift.report.differences import (
    MEAN,
    advise_seeds,
    compare_methods,
    count_verdicts,
    list_frames,
    list_pairs,
    list_references,
)
from fedshift.report.page import make_report
from fedshift.report.publication import print_parts
from fedshift.report.tables import accuracy_table
from fedshift.results.cases import Cases
from fedshift.tasks import Classification, Multilabel, Regression, Segmentation
from fedshift.utils.errors import UsageError

SIZES = {"gains": 200, "loses": 200, "same": 200, "small": 8}
RATES = {"single": (0.6, 0.8, 0.7, 0.5), "fedavg": (0.6, 0.8, 0.7, 0.5), "fedbn": (0.85, 0.5, 0.7, 0.9)}


def draw(seeds=5, rates=RATES, sizes=SIZES):
    """Which samples are right, by method and seed, of each client."""
    random = np.random.default_rng(0)
    return {
        (method, seed): [random.random(size) < rate for size, rate in zip(sizes.values(), shares, strict=True)]
        for method, shares in rates.items()
        for seed in range(seeds)
    }


@pytest.fixture
def profits(make_counted):
    """A study with the results of each sample, in which fedbn gains at one client and loses at another."""

    def make(right, *, groups=None, keep=True, **fields):
        methods, seeds = list(dict.fromkeys(m for m, _ in right)), len({s for _, s in right})
        sizes = [len(client) for client in next(iter(right.values()))]
        hits = np.array([[[client.sum() for client in right[m, s]] for s in range(seeds)] for m in methods])
        study = make_counted(hits, sizes)
        names = {f"method {place}": method for place, method in enumerate(methods)}
        clients = dict(zip(study.clients, SIZES, strict=False))
        group = {} if groups is None else {"group": groups}
        cases = {
            key: Cases(
                round=1,
                records={
                    (name, "personal"): {
                        "truth": np.zeros(len(r), np.uint8),
                        "chosen": (~r).astype(np.uint8),
                        "right": r,
                        "loss": 1.0 * ~r,
                        **group,
                    }
                    for name, r in zip(clients.values(), several, strict=True)
                },
            )
            for key, several in right.items()
        }
        return replace(
            study,
            rows=study.rows.replace({"method": names, "client": clients}),
            methods={names[name]: replace(method, name=names[name]) for name, method in study.methods.items()},
            clients={clients[name]: size for name, size in study.clients.items()},
            read_cases=lambda method, seed: cases.get((method, seed)) if keep else None,
            **fields,
        )

    return make


def by_hand(right, one, other, clients, comparisons):
    """The difference, its standard errors and its interval, from the samples of ``clients``."""
    gaps = [[right[one, s][c].astype(float) - right[other, s][c] for c in clients] for s in range(5)]
    means = np.array([np.mean([gap.mean() for gap in several]) for several in gaps])
    variance = 0.0
    for place, _ in enumerate(clients):
        d, weight = np.mean([several[place] for several in gaps], axis=0), 1 / len(clients)
        centered, mean = weight * (d - d.mean()), weight * means.mean()
        square = (centered**2).sum() + len(d) * mean**2 + weight**2  # half a sample more in each of McNemar's cells
        variance += (square - (len(d) * mean) ** 2 / (len(d) + 2)) / (len(d) + 2) ** 2
    seed_error, tail = means.std(ddof=1) / np.sqrt(5), 1 - 0.025 / comparisons
    freedom = sum(len(right[one, 0][c]) - 1 for c in clients)
    half = np.hypot(stats.t.ppf(tail, 4) * seed_error, stats.t.ppf(tail, freedom) * np.sqrt(variance))
    return means.mean(), seed_error, np.sqrt(variance), means.mean() - half, means.mean() + half


def test_a_difference_and_its_interval_by_hand(profits):
    right = draw()
    frame = compare_methods(profits(right), "fedavg")
    columns = ["difference", "seed_error", "sample_error", "low", "high"]
    for client in (0, 1, 2):
        row = frame.loc[("fedbn", list(SIZES)[client])]
        assert row[columns].tolist() == pytest.approx(by_hand(right, "fedbn", "fedavg", [client], 1))
        assert (row["seed_freedom"], row["sample_freedom"], row["units"], row["comparisons"]) == (4, 199, 200, 1)
    row = frame.loc[("fedbn", MEAN)]
    assert row[columns].tolist() == pytest.approx(by_hand(right, "fedbn", "fedavg", range(4), 3))
    assert row["comparisons"] == 3  # fedbn and single minus fedavg, and fedbn minus single
    small = frame.loc[("fedbn", "small")]
    assert np.isnan(small["low"])
    assert small["units"] == 8


def test_a_better_method_is_claimed_and_clients_are_counted(profits):
    study = profits(draw(), margin=0.4)
    counts = count_verdicts(compare_methods(study, "single"), lower=False, margin=0.4).loc["fedbn"]
    assert counts.tolist() == [1, 1, 2, 3, "loses"]  # of the small client nothing is known
    errors = replace(study, metric="loss")  # lower is better, and is 1 - accuracy
    assert count_verdicts(compare_methods(errors, "single"), lower=True).loc["fedbn", ["better", "worse"]].tolist() == [
        1, 1,
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    print_parts(console, make_report(study, whole=False).list_parts())
    printed = " ".join(console.file.getvalue().split())
    assert "hold together for all 3 comparisons (Bonferroni)" in printed
    assert "No verdict with fewer than 10 test units: small (8)." in printed
    assert "no loss above 40" in make_report(study, whole=False).tables[1].text.header
    (table,) = [each for each in make_report(study).tables if each.file == "minus-single-clients"]
    cells = {row[0].text: row[-1] for row in table.text.rows}
    assert [cells[name].best for name in SIZES] == [True, True, False, False]
    assert "(" not in cells["small"].text
    assert "one by one" in table.text.note


def test_images_of_one_patient_count_together(profits):
    sizes = {"gains": 200}
    right = {
        key: [np.repeat(r[:20], 10)] for key, (r,) in draw(rates=dict.fromkeys(RATES, (0.7,)), sizes=sizes).items()
    }
    apart, together = (
        compare_methods(profits(right, groups=groups), "fedavg").loc[("fedbn", "gains")]
        for groups in (None, np.arange(200) // 10)
    )
    assert (apart["units"], together["units"], together["sample_freedom"]) == (200, 20, 19)
    assert together["sample_error"] > 2.5 * apart["sample_error"]
    few = compare_methods(profits(right, groups=np.arange(200) // 29), "fedavg").loc[("fedbn", "gains")]
    assert (few["units"], np.isnan(few["high"])) == (7, True)


def test_clients_with_one_test_set_vary_together(profits):
    right = {key: [r[0], r[0], r[0]] for key, r in draw().items()}
    alone = compare_methods(profits({key: r[:1] for key, r in right.items()}), "fedavg").loc[("fedbn", MEAN)]
    apart = compare_methods(profits(right), "fedavg").loc[("fedbn", MEAN)]
    same = dict.fromkeys(("loses", "same"), "gains")
    together = compare_methods(profits(right, same_test=same), "fedavg").loc[("fedbn", MEAN)]
    assert together["sample_error"] == pytest.approx(alone["sample_error"])
    assert apart["sample_error"] == pytest.approx(alone["sample_error"] / np.sqrt(3))


def test_an_interval_that_cannot_decide_is_not_printed(profits):
    few = profits(draw(seeds=3))
    assert compare_methods(few)[["low", "high"]].isna().all(axis=None)
    notes = {table.text.note for table in make_report(few, whole=False).tables if table.section == "differences"}
    assert notes == {advise_seeds(few.methods, 3)}
    random = np.random.default_rng(3)  # seeds that fail at random: half of the interval is more than the metric's range
    wild = {key: [np.full(50, random.random() < 0.5) for _ in r] for key, r in draw().items()}
    frame = compare_methods(profits(wild), "fedavg")
    assert frame.loc[("fedbn", "gains"), "seed_error"] > 0.2
    assert not (frame["high"] - frame["low"] > 1).any()
    assert np.isnan(frame.loc[("fedbn", "gains"), "low"])


def test_without_single_samples_intervals_cover_seeds_alone_and_say_so(profits):
    study = profits(draw(), keep=False)
    row = compare_methods(study, "fedavg").loc[("fedbn", "gains")]
    half = stats.t.ppf(0.975, 4) * row["seed_error"]
    assert (row["low"], row["high"]) == pytest.approx((row["difference"] - half, row["difference"] + half))
    assert np.isnan(row["sample_error"])
    notes = [table.text.note for table in make_report(study, whole=False).tables if table.section == "differences"]
    assert all("over seeds alone, since results of single samples are not here" in note for note in notes)
    equal = {
        key: [np.arange(len(client)) < 10 * (1 + (key[0] == "fedbn")) for client in r] for key, r in draw().items()
    }
    frame = compare_methods(profits(equal, keep=False), "fedavg")
    assert frame["low"].isna().all()  # equal under each seed: nothing is known about their spread


def test_advice_on_seeds_counts_the_comparisons_of_the_report():
    six = ["fedavg", "fedprox", "fedbn", "silobn", "single", "fedwon"]
    assert len(list_pairs(six, list_references(six))) == 9
    assert advise_seeds(six, 5) == ""
    assert advise_seeds(six, 3) == (
        "3 seeds and 9 differences cannot decide which method is better, and have no intervals: 5 seeds can."
    )
    twelve = [*six, *"abcdef"]
    assert advise_seeds(twelve, 3).endswith("6 seeds can.")
    assert advise_seeds([*"abcdefghi", "single"], 5).endswith("6 seeds can, or 5 with --compare-with a.")
    assert advise_seeds(["fedavg"], 1) == ""
    assert list_references(six, "fedbn") == ["fedbn"]


def test_references_are_fedavg_and_single_or_the_one_that_was_chosen(profits):
    study = profits(draw())
    frames = list_frames(study)
    assert {name: [*frame.index.unique("method")] for name, frame in frames.items()} == {
        "fedavg": ["single", "fedbn"], "single": ["fedbn"],
    }  # fmt: skip
    chosen = replace(study, compare_with="fedbn")
    assert [*list_frames(chosen)] == ["fedbn"]
    assert compare_methods(chosen)["comparisons"].max() == 2
    with pytest.raises(UsageError, match="begun to compare with fedbn alone"):
        compare_methods(chosen, "single")
    with pytest.raises(UsageError, match="silo"):
        compare_methods(study, "silo")
    alone = replace(study, methods={"fedbn": study.methods["fedbn"]})
    assert compare_methods(alone).empty
    assert list_frames(alone) == {}


@pytest.mark.parametrize("seeds", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_of_95_percent_intervals_19_in_20_contain_the_truth(profits, seeds):
    """A sample has a difficulty that methods share, and a training a quality; the truth is over all of both."""
    random, hits, studies = np.random.default_rng(seeds), 0, 60
    truth = np.diff(stats.norm.cdf(np.array([0.9, 1.2]) / np.sqrt(1.04)))[0]
    for _ in range(studies):
        hard = [random.normal(size=100) for _ in range(2)]
        right = {
            (method, seed): [level + 0.2 * random.normal() > each + 0.0 * random.normal(size=100) for each in hard]
            for method, level in (("fedavg", 0.9), ("fedbn", 1.2))
            for seed in range(seeds)
        }
        row = compare_methods(profits(right), "fedavg").loc[("fedbn", MEAN)]
        hits += row["low"] <= truth <= row["high"]
    assert hits >= stats.binom.ppf(0.001, studies, 0.94)


def test_the_frame_of_all_references_has_a_file(profits, tmp_path):
    make_report(profits(draw()), whole=False).write_tables(tmp_path)
    frame = pd.read_csv(tmp_path / "differences.csv")
    assert [*frame.columns[:3]] == ["reference", "method", "client"]
    assert len(frame) == 3 * 5
    assert (tmp_path / "minus-fedavg.tex").exists()


def recompute(cases, one, other, comparisons):
    """The mean difference and its interval from a table of cases alone, as a statistician would."""
    cases = cases.assign(right=(cases["truth"] == cases["prediction"]).astype(float))
    right = cases.pivot(index=["client", "patient", "case"], columns=["method", "seed"], values="right")
    gap = right[one] - right[other]  # a row for each case, a column for each seed
    by_seed = gap.groupby("client").mean().mean()
    clients, variance, units = gap.mean(axis=1).groupby("client"), 0.0, 0
    for _, gaps in clients:
        weight, total, size = 1 / clients.ngroups, gaps.groupby("patient").sum(), gaps.groupby("patient").size()
        patients = len(total)
        without = (total.sum() - total) / (size.sum() - size)
        influence = weight * (patients - 1) * (gaps.mean() - without)
        square = ((influence - influence.mean()) ** 2).sum() + patients * (weight * by_seed.mean()) ** 2 + weight**2
        count = patients + 2
        variance += (square - (patients * weight * by_seed.mean()) ** 2 / count) / count**2
        units += patients - 1
    tail, seeds = 1 - 0.025 / comparisons, len(by_seed)
    over_seeds = stats.t.ppf(tail, seeds - 1) * by_seed.std() / np.sqrt(seeds)
    half = np.hypot(over_seeds, stats.t.ppf(tail, units) * np.sqrt(variance))
    return by_seed.mean(), by_seed.mean() - half, by_seed.mean() + half


def test_a_statistician_recomputes_each_mean_and_interval_from_the_cases(profits, tmp_path):
    sizes = {"gains": 120, "loses": 120, "same": 120}
    random = np.random.default_rng(7)
    groups = np.sort(random.integers(0, 30, 120))
    study = profits(draw(rates={m: rates[:3] for m, rates in RATES.items()}, sizes=sizes), groups=groups)
    tabulate_cases(study).to_csv(tmp_path / "cases.csv", index=False)
    cases, frame = pd.read_csv(tmp_path / "cases.csv"), compare_methods(study, "fedavg")
    values = accuracy_table(study)
    for client, own in [(MEAN, cases), *((name, cases[cases["client"] == name]) for name in sizes)]:
        found = recompute(own, "fedbn", "fedavg", 3 if client == MEAN else 1)
        assert frame.loc[("fedbn", client), ["difference", "low", "high"]].tolist() == pytest.approx(found), client
    right = cases[cases["method"] == "fedbn"].eval("truth == prediction").groupby(cases["client"]).mean()
    assert right.to_dict() == pytest.approx(values.loc[[*sizes], ("fedbn", "mean")].to_dict())


def test_cases_of_every_task_have_truth_and_prediction():
    y, labels = torch.tensor([0, 1, 2, 1]), torch.tensor([[1.0, 0, 1]] * 4)
    scores = torch.eye(3)[[0, 1, 1, 1]] * 4
    masks = torch.nn.functional.one_hot(y, 3).T.float()[None, :, :, None].repeat(2, 1, 1, 4)
    records = {
        "classification": Classification().record_all(scores, y, 3),
        "multilabel": Multilabel().record_all(scores - 2, labels, 3),
        "regression": Regression().record_all(scores, labels, 3),
        "segmentation": Segmentation().record_all(masks, masks.argmax(1), 3),
    }
    tables = {task: dict(_list_columns(each, ["a", "b", "c"])) for task, each in records.items()}
    assert tables["classification"]["truth"].tolist() == ["a", "b", "c", "b"]
    assert tables["classification"]["prediction"].tolist() == ["a", "b", "b", "b"]
    assert tables["multilabel"]["prediction b"].tolist() == [False, True, True, True]
    assert tables["regression"]["prediction a"].tolist() == [4, 0, 0, 0]
    assert tables["regression"]["truth c"].tolist() == [1] * 4
    assert tables["segmentation"]["truth b"].tolist() == tables["segmentation"]["prediction b"].tolist() == [8, 8]
