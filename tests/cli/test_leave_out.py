"""``fedshift compare --leave-out``: a comparison without each client in turn, stopped, gone on with, and its table."""

import json
import os
import re
import shutil
import signal
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest

from fedshift.cli import run
from fedshift.config.settings_file import read_run_settings
from fedshift.evaluation.policy import parse_policies
from fedshift.experiments.experiment import Experiment
from fedshift.report.tables import accuracy_table
from fedshift.results.summary import read_facts, read_summary
from fedshift.results.trial_records import load_facts

WORDS = ("--methods", "fedavg,fedbn", "--rounds", 2, "--batch-size", 8, "--lr", 0.05)


WITHOUT_STATE = ("global model", "mixed", "reestimate", "tent", "finetune", "finetune_bn")
"""Policies for a method whose clients keep nothing."""


@pytest.fixture(autouse=True)
def _no_pages(unpublished):
    """Pages of the comparisons within take most of the time, and are tested elsewhere."""


def written(path):
    return {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file() and file.name != ".owner"}


@pytest.mark.slow
def test_each_client_is_left_out_in_turn_as_newcomers_does_it_bit_for_bit(cli, tiny_folder, tmp_path, assert_same):
    outcome = cli("compare", "--data", tiny_folder, *WORDS, "--seeds", 2, "--leave-out", "all", "--out", "all")
    assert (outcome.code, outcome.err) == (0, "")
    for name in ("ann", "bob", "cid"):
        cli("compare", "--data", tiny_folder, *WORDS, "--seeds", 2, "--newcomers", name, "--out", name)
        assert_same(tmp_path / "all" / f"without-{name}", tmp_path / name)
        both = tmp_path / "all" / f"without-{name}", tmp_path / name
        first, second = (read_run_settings(folder).values for folder in both)
        assert first == second
        described, alone = ({**read_facts(folder), "trained": None} for folder in both)  # but when it was trained
        assert described == alone
    table = pd.read_csv(tmp_path / "all" / "tables" / "accuracy.csv", index_col=0)
    assert list(table.index) == ["ann", "bob", "cid", "macro"]
    titles = [name.removesuffix(" mean") for name in table if name.endswith(" mean")]
    assert titles == [
        *(f"fedavg: {name}" for name in WITHOUT_STATE),
        *(f"fedbn: {policy}" for policy in parse_policies(None)),
    ]
    for name in ("ann", "bob", "cid"):
        known = accuracy_table(read_summary(tmp_path / name))  # with the same BatchNorm statistics
        expected = known.loc[name, ("fedavg", "mean")]
        assert table.loc[name, "fedavg: global model mean"] == pytest.approx(expected, abs=1e-6)
    macro = table.loc[["ann", "bob", "cid"], "fedbn: average mean"].mean()
    assert table.loc["macro", "fedbn: average mean"] == pytest.approx(macro, abs=1e-6)
    for kind in ("md", "tex", "csv"):
        for file in ("accuracy", "differences"):
            assert (tmp_path / "all" / "tables" / f"{file}.{kind}").stat().st_size > 0
    assert "Minus fedavg: global model, in points, paired over clients" in outcome.out
    assert "never" not in outcome.out  # no notice says of who is left out that nobody measures it
    made = {file.name: file.read_bytes() for file in (tmp_path / "all" / "tables").iterdir()}
    shutil.rmtree(tmp_path / "all" / "tables")
    again = cli("report", "all")
    assert (again.code, again.err) == (0, "")
    assert again.out.splitlines()[-5:] == outcome.out.splitlines()[-5:]
    assert {file.name: file.read_bytes() for file in (tmp_path / "all" / "tables").iterdir()} == made
    first = (tmp_path / "all" / "tables" / "accuracy.md").read_text().splitlines()[0]
    assert [cell.strip() for cell in first.replace("\\_", "_").strip("|").split("|")] == ["client", *titles]


@pytest.mark.slow
def test_stopped_by_ctrl_c_it_goes_on_where_it_was_and_does_nothing_again(
    cli, tiny_folder, tmp_path, assert_same, monkeypatch, Listener
):
    told = ("compare", "--data", tiny_folder, *WORDS, "--leave-out", "c*,ann")
    assert cli(*told, "--out", "whole").code == 0
    heard = []

    def interrupt(done):
        heard.append(done.round)
        if len(heard) == 6:  # fedavg of the second comparison is under way: 4 rounds of the first are done
            os.kill(os.getpid(), signal.SIGINT)

    @contextmanager
    def listening(console, own=()):
        yield Listener(interrupt)

    monkeypatch.setattr(run, "show_progress", listening)
    outcome = cli(*told, "--out", "stopped")
    assert (outcome.code, len(heard)) == (130, 6)
    assert "continue with: fedshift compare --resume stopped" in outcome.out
    assert "\nPARTIAL: without-ann has not ended under these settings: it is not in the table" in outcome.out
    partly = pd.read_csv(tmp_path / "stopped" / "tables" / "accuracy.csv", index_col=0, comment="#")
    assert list(partly.index) == ["cid", "macro"]
    first = written(tmp_path / "stopped" / "without-cid" / "trials")
    steps = {file: load_facts(file)["round"] for file in first if file.suffix == ".safetensors"}
    assert set(steps.values()) == {2}
    assert cli("compare", "--resume", "stopped").code == 0
    assert len(heard) == 8
    for name in ("cid", "ann"):
        assert_same(tmp_path / "stopped" / f"without-{name}", tmp_path / "whole" / f"without-{name}")
    tables = [(tmp_path / run / "tables" / "accuracy.csv").read_text() for run in ("stopped", "whole")]
    assert tables[0] == tables[1]
    monkeypatch.setattr(Experiment, "run", None)
    assert cli("compare", "--resume", "stopped").code == 0
    other = cli("compare", "--resume", "stopped", "--lr", 0.5)
    assert (other.code, "without-cid: this run was begun with another optimizer" in other.err) == (2, True)


def test_one_client_pairs_seeds_and_one_seed_pairs_nothing(cli, tiny_folder, tmp_path):
    outcome = cli("compare", "--data", tiny_folder, *WORDS, "--leave-out", "bob", "--out", "one")
    assert "1 seed and 1 difference cannot decide" in outcome.out
    table = pd.read_csv(tmp_path / "one" / "tables" / "differences.csv", index_col=0)
    assert set(table["pairs"]) == {1}
    assert table["low"].isna().all()


def test_numbers_are_scaled_without_the_client_that_is_left_out(cli, tmp_path, assert_same):
    (tmp_path / "sites").mkdir()
    for place, name in enumerate(("ann", "bob", "cid")):
        x = np.random.default_rng(place).normal(size=(20, 3))
        y = 10**place * x[:, 0]
        np.savez(tmp_path / "sites" / f"{name}.npz", x_train=x[:14], y_train=y[:14], x_test=x[14:], y_test=y[14:])
    words = ("--data", "sites", "--task", "regression", "--methods", "fedavg", "--rounds", 1, "--lr", 0.05)
    outcome = cli("compare", *words, "--leave-out", "all", "--out", "all")
    assert (outcome.code, outcome.err) == (0, "")
    assert cli("compare", *words, "--newcomers", "cid", "--out", "cid").code == 0
    assert_same(tmp_path / "all" / "without-cid", tmp_path / "cid")
    found = cli("report", "all")
    assert "Test RMSE in units of the target of the client that was left out" in found.out


def test_where_one_diverges_the_others_are_done_and_the_exit_code_says_so(cli, tiny_folder, tmp_path):
    words = ("--methods", "fedavg+nonorm,fedavg", "--rounds", 2, "--lr", 1e18, "--leave-out", "ann,bob", "--out", "d")
    outcome = cli("compare", "--data", tiny_folder, *words)
    assert outcome.code == 1
    assert "training diverged" in outcome.err
    assert {path.name for path in (tmp_path / "d").glob("without-*")} == {"without-ann", "without-bob"}
    assert "note: without bob: " in outcome.out
    assert cli("compare", "--resume", "d").err == outcome.err


def test_a_settings_file_may_say_it_and_belongs_to_compare(cli, tiny_folder, tmp_path):
    (tmp_path / "s.toml").write_text(f"data = {json.dumps(str(tiny_folder))}\nleave-out = ['ann', 'bob']\nrounds = 1\n")
    assert cli("compare", "--config", "s.toml", "--out", "out", "--methods", "fedavg").code == 0
    assert {path.name for path in (tmp_path / "out").glob("without-*")} == {"without-ann", "without-bob"}
    assert "s.toml has 'leave_out': use it with `fedshift compare`" in cli("run", "--config", "s.toml").err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--leave-out", "all", "--newcomers", "ann"), "leave out --newcomers ann"),
        (("--leave-out", "all", "--profile"), "--profile times one comparison, and --leave-out makes several"),
        (("--leave-out", "dan"), "unknown client 'dan': did you mean"),
        (("--leave-out", ""), "unknown client '': allowed are ann, bob, cid"),
        (("--leave-out", "all", "--domains", "ann"), "tiny has one client: without it none is left to train"),
        (("--leave-out", "all", "--participation", 3), "participation=3: only 2 clients train"),
        (
            ("--leave-out", "ann", "--unseen", "reestimate", "--methods", "fedper+gn"),
            "there are no BatchNorm statistics",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(cli, tiny_folder, tmp_path, words, said):
    outcome = cli("compare", "--data", tiny_folder, "--out", "out", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert not (tmp_path / "out").exists()


def test_one_comparison_is_not_gone_on_with_as_many(cli, tiny_folder):
    assert cli("compare", "--data", tiny_folder, *WORDS, "--out", "plain").code == 0
    outcome = cli("compare", "--resume", "plain", "--leave-out", "ann")
    assert (outcome.code, "plain holds one comparison" in outcome.err) == (2, True)
    assert "fedbn" in re.sub(r"\s+", " ", cli("compare", "--resume", "plain").out)
