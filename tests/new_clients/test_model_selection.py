"""Model selection as DomainBed names it: each rule against plain loops, and the command that runs what they need."""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from fedshift.new_clients.model_selection import COLUMNS, format_selection, parse_rules, select_models, split_rate
from fedshift.utils.errors import UsageError

DOMAINS = ("art", "photo", "sketch")
RATES = (0.01, 0.1, 0.3)
METHODS = ("fedavg", "fedbn+fedprox(mu=0.1)")
POLICIES = ("average", "reestimate")


def named(method, rate):
    return f"{method}+tuned(lr={rate:g})"


def test_rates_are_told_from_methods():
    assert split_rate("fedbn+tuned(lr=0.03)") == ("fedbn", 0.03)
    assert split_rate("ditto+tuned(lr=1e-05)+fedbn") == ("ditto+fedbn", 1e-05)
    name, rate = split_rate("fedprox(mu=0.1)")
    assert (name, math.isnan(rate)) == ("fedprox(mu=0.1)", True)
    assert parse_rules("oracle, training") == ("oracle", "training")
    with pytest.raises(UsageError, match="unknown model selection 'orakel': did you mean 'oracle'"):
        parse_rules("orakel")


@pytest.mark.parametrize("metric", ["accuracy", "rmse"])
def test_each_rule_takes_the_rate_that_its_own_data_favor(metric):
    rng = np.random.default_rng(4)

    def draw(clients):
        rows = [(c, named(m, r), p, rng.random()) for c in clients for m in METHODS for r in RATES for p in POLICIES]
        return pd.DataFrame(rows, columns=COLUMNS)

    tested, validated = draw(DOMAINS), draw(DOMAINS)
    trained = {c: {named(m, r): rng.random() for m in METHODS for r in RATES} for c in DOMAINS}
    pairs = {frozenset(pair): draw(pair) for pair in combinations(DOMAINS, 2)}

    def value(frame, client, method, rate, policy):
        same = frame[(frame.client == client) & (frame.method == named(method, rate)) & (frame.policy == policy)]
        return float(same.value.iloc[0])

    def judge(rule, client, method, rate, policy):
        if rule == "training":
            return trained[client][named(method, rate)]
        if rule == "oracle":
            return value(validated, client, method, rate, policy)
        others = [other for other in DOMAINS if other != client]
        return np.mean([value(pairs[frozenset((client, o))], o, method, rate, policy) for o in others])

    best = min if metric == "rmse" else max
    for rule in ("training", "leave-one-out", "oracle"):
        chosen = select_models(rule, tested, validated, trained, pairs, metric, 3)
        assert len(chosen) == len(DOMAINS) * len(METHODS) * len(POLICIES)
        for _, row in chosen.iterrows():
            where = row["client"], row["method"], row["policy"]
            rate = best(RATES, key=lambda rate, where=where: judge(rule, *where[:2], rate, where[2]))
            assert row["rate"] == rate
            assert row["value"] == value(tested, *where[:2], rate, where[2])
    del pairs[frozenset(("art", "photo"))]
    lacking = select_models("leave-one-out", tested, validated, trained, pairs, metric, 3)
    assert set(lacking["client"]) == {"sketch"}  # the others lack a run
    cells = format_selection({"leave-one-out": lacking, "oracle": chosen}, DOMAINS, metric)
    assert [row[1].text for row in cells.rows[:2]] == [
        "leave-one-domain-out cross-validation", "test-domain validation (ORACLE)",
    ]  # fmt: skip
    assert [cell.text for cell in cells.rows[0][2:4]] == ["-", "-"]
    assert cells.rows[0][-1].text == "-"
    assert "upper bound, not a result" in cells.note


@pytest.mark.slow
def test_the_command_runs_what_the_rules_need_and_repeats_nothing(cli, tiny_folder, tmp_path, unpublished, monkeypatch):
    words = ("--methods", "fedavg", "--rates", "0.01,0.3", "--rounds", 1, "--batch-size", 8, "--validation", 0.2)
    told = ("compare", "--data", tiny_folder, *words, "--leave-out", "all")
    outcome = cli(*told, "--selection", "training,leave-one-out,oracle", "--out", "out")
    assert (outcome.code, outcome.err) == (0, "")
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert folders == [
        "pair-ann-and-bob", "pair-ann-and-cid", "pair-bob-and-cid", "tables",
        "without-ann", "without-bob", "without-cid",
    ]  # fmt: skip
    table = pd.read_csv(tmp_path / "out" / "tables" / "selection.csv")
    assert set(table["rule"]) == {"training", "leave-one-out", "oracle"}
    assert set(table["method"]) == {"fedavg"}
    assert set(table["rate"]) <= {0.01, 0.3}
    whole = pd.read_csv(tmp_path / "out" / "tables" / "accuracy.csv", index_col=0)
    for _, row in table.iterrows():
        column = f"fedavg+tuned(lr={row['rate']:g}): {row['policy']} mean"
        assert whole.loc[row["client"], column] == pytest.approx(row["value"], abs=1e-6)
    monkeypatch.setattr("fedshift.experiments.experiment.Experiment.run", None)
    again = cli("compare", "--resume", "out")
    assert (again.code, again.err) == (0, "")
    assert "ORACLE" in cli("report", "out").out


def test_rates_and_rules_without_what_they_need_are_refused(cli, tiny_folder):
    for words, said in (
        (("--rates", "0.1"), "--rates and --selection belong to --leave-out"),
        (("--leave-out", "all", "--rates", "0.1"), "--rates needs --selection"),
        (("--leave-out", "all", "--selection", "oracle"), "--selection chooses on validation data"),
        (
            ("--leave-out", "ann", "--selection", "leave-one-out", "--domains", "ann,bob", "--validation", 0.2),
            "leaves out two clients at a time",
        ),
    ):
        outcome = cli("compare", "--data", tiny_folder, *words)
        assert (outcome.code, said in outcome.err) == (2, True), outcome.err
