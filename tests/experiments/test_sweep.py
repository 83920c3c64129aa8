"""Sweeps: every combination is the comparison of the same settings, what is done is never done again."""

import json
import re
import shutil
import tomllib
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
from pydantic import ValidationError

from fedshift.config.given_settings import read_settings
from fedshift.config.settings_file import read_run_settings
from fedshift.config.spec import CompareSpec, SweepSpec
from fedshift.engines.engine import Diverged
from fedshift.experiments.experiment import Experiment
from fedshift.experiments.settings import Settings
from fedshift.experiments.sweep import make_combinations, parse_swept, split_settings
from fedshift.experiments.trial import Trial
from fedshift.report.tables import seed_table
from fedshift.results.summary import read_summary
from fedshift.tasks import CLASSIFICATION, Regression
from fedshift.utils.errors import FedshiftError, UsageError

EXAMPLES = Path(__file__).parents[2] / "examples" / "sweeps"
LOCAL = ("epochs=1,batch_size=8", "epochs=1,batch_size=full", "epochs=2,batch_size=8", "epochs=2,batch_size=full")
RUNNING = ("--statistics", "running")


@pytest.fixture
def sweep(cli, tiny_folder):
    """Call the program for a sweep of the tiny clients."""

    def call(*arguments, methods="fedavg,fedbn", rounds=2):
        return cli("sweep", "--data", tiny_folder, "--methods", methods, "--rounds", rounds, *arguments)

    return call


@pytest.fixture
def pageless(monkeypatch, unpublished):
    """Leave out the sweep's tables, figures and page too."""
    monkeypatch.setattr("fedshift.report.sweep_report.publish_sweep", lambda *_: None)


# What is written


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["epochs=1,4,16"], {"epochs": ["1", "4", "16"]}),
        (["epochs=1, 4", "batch-size = 10,0"], {"epochs": ["1", "4"], "batch_size": ["10", "0"]}),
        (["epochs=1,4,batch_size=10,0"], {"epochs": ["1", "4"], "batch_size": ["10", "0"]}),
        (
            ["split=iid(clients=10),dirichlet(clients=10, alpha=0.1)"],
            {"split": ["iid(clients=10)", "dirichlet(clients=10, alpha=0.1)"]},
        ),
        (["domains=[ann,bob],cid"], {"domains": ["ann,bob", "cid"]}),
        (["loss=[[1,2]],[3]"], {"loss": ["[1,2]", "3"]}),
        (["split=only(clients='a,b'),repeat()"], {"split": ["only(clients='a,b')", "repeat()"]}),
    ],
)
def test_settings_and_their_values_are_read(written, meant):
    assert parse_swept(written) == meant
    assert parse_swept(split_settings(written)) == meant
    assert len(split_settings(written)) == len(meant)


def test_one_client_and_all_are_different_values():
    found = make_combinations(SweepSpec(data="digits", over=("participation=1,1.0,0.5,10",)))
    assert [combination.folder for combination in found] == [
        f"participation={text}" for text in ("1", "1.0", "0.5", "10")
    ]
    assert [type(combination.spec.participation) for combination in found] == [int, float, float, int]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ((), "a sweep needs settings and their values: over='epochs=1,4,16'"),
        (("epochs",), "over 'epochs': write a setting and its values"),
        (("epoch=1",), "unknown setting 'epoch': did you mean 'epochs'?"),
        (("epochs=",), "over 'epochs=': epochs has an empty value"),
        (("epochs=1,,4",), "over 'epochs=1,,4': epochs has an empty value"),
        (("epochs=1,4,1",), "epochs has 1 twice"),
        (("lr=0.1,0.10",), "over lr: 0.10 is the same as another value"),
        (("epochs=1", "epochs=4"), "over epochs: it is given twice"),
        (("split=iid(clients=3",), "a bracket or a quotation mark is not closed"),
        (("methods=fedbn",), "over methods: every combination compares all methods: list them with --methods"),
        (("log=wandb,none",), "over log: it changes no result: give a single value"),
        (("seeds=1,3",), "over seeds: a sweep compares all combinations by the same value"),
        (("split=iid(clients=3),iidd(clients=3)",), "split=iidd-clients=3: unknown split 'iidd': did you mean 'iid'?"),
        (("schedule=constant,cosine(flor=0.1)",), "schedule=cosine-flor=0.1: schedule 'cosine(flor=0.1)'"),
        (
            ("epochs=1,2", "batches=3"),
            "epochs=1,batches=3: epochs=1 and batches=3: give exactly one of epochs, batches, steps",
        ),
    ],
)
def test_what_cannot_be_is_named(over, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        make_combinations(SweepSpec(over=over))


def test_a_value_that_a_setting_does_not_take_is_named_on_the_command_line(sweep, tmp_path):
    with pytest.raises(ValidationError):
        make_combinations(SweepSpec(over=("epochs=1,many",)))
    outcome = sweep("--over", "epochs=1,many", "--out", "out")
    assert outcome.code == 2
    assert outcome.err.startswith("fedshift: --epochs many: should be a valid integer")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("reach", [0, -0.1])
def test_a_target_is_above_zero_and_of_a_share_at_most_one(reach):
    with pytest.raises(UsageError, match=f"target_metric={reach}: should be greater than 0"):
        Settings(target_metric=reach)
    with pytest.raises(UsageError, match=r"target_metric=1.5: accuracy is a share: give at most 1"):
        Settings(target_metric=1.5).for_task(CLASSIFICATION)
    assert Settings(target_metric=1.5).for_task(Regression()).target_metric == 1.5
    assert Settings(target_metric=1.0).for_task(CLASSIFICATION).target_metric == 1.0


def test_combinations_differ_in_the_swept_settings_alone():
    found = make_combinations(SweepSpec(lr=0.3, methods="fedavg", over=("epochs=1,2", "batch_size=8,0")))
    assert tuple(combination.folder for combination in found) == LOCAL
    assert [dict(combination.values) for combination in found] == [
        {"epochs": epochs, "batch_size": size} for epochs in (1, 2) for size in (8, 0)
    ]
    common = {"lr": 0.3, "methods": "fedavg"}
    assert [combination.spec for combination in found] == [
        CompareSpec(epochs=epochs, batch_size=size, **common) for epochs in (1, 2) for size in (8, 0)
    ]


def test_none_is_a_setting_that_is_not_given():
    found = make_combinations(SweepSpec(workers=3, over=("workers=none,2", "samples=none,20")))
    assert [(c.spec.workers, c.spec.samples) for c in found] == [(None, None), (None, 20), (2, None), (2, 20)]
    assert found[0].folder == "workers=none,samples=none"


def test_directories_differ_where_values_look_alike_in_them():
    found = make_combinations(SweepSpec(over=("root=a/b,a-b",)))
    assert [combination.folder for combination in found] == ["root=a-b", "root=a-b-2"]


def test_flags_and_toml_say_the_same(cli, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr("fedshift.cli.sweep.run_several", lambda parts, *_, **__: given.append(parts))
    monkeypatch.setattr("fedshift.experiments.sweep.check_combination", lambda *_: None)
    (tmp_path / "s.toml").write_text(
        'lr = 0.5\nover = ["epochs=1,4", "split=iid(clients=3),labels(clients=3, per_client=2)"]'
    )
    split = "split=iid(clients=3),labels(clients=3, per_client=2)"
    assert cli("sweep", "--config", "s.toml").code == 0
    assert cli("sweep", "--lr", 0.5, "--over", "epochs=1,4", "--over", split).code == 0
    first, second = ([part.settings for part in parts.values()] for parts in given)
    assert len(first) == 4
    assert first == second


def test_every_example_is_a_sweep_of_a_few_lines():
    found = sorted(EXAMPLES.glob("*.toml"))
    assert len(found) >= 7
    for path in found:
        settings = read_settings(path, list(asdict(SweepSpec())))
        assert len(make_combinations(SweepSpec(**settings))) >= 3, path.name
        assert len(tomllib.loads(path.read_text())) <= 15, path.name


# What is run


@pytest.mark.slow
def test_more_rounds_that_fail_leave_the_sweep_what_it_was(sweep, cli, tmp_path, pageless, monkeypatch):
    assert sweep("--over", "epochs=1,2", "--out", "out", methods="fedavg", rounds=1).code == 0
    before = (tmp_path / "out" / "config.toml").read_bytes()

    def fail(*_):
        raise FedshiftError("no engine")

    with monkeypatch.context() as patched:
        patched.setattr(Trial, "advance", fail)
        assert cli("sweep", "--resume", "out", "--rounds", 2).code == 1
    assert (tmp_path / "out" / "config.toml").read_bytes() == before
    assert cli("sweep", "--resume", "out", "--rounds", 2).code == 0
    assert read_run_settings(tmp_path / "out").values["rounds"] == 2


@pytest.mark.slow
def test_every_combination_is_the_comparison_of_the_same_settings_bit_for_bit(
    sweep, cli, tiny_folder, tmp_path, pageless, assert_same
):
    over = ("--over", "epochs=1,2", "--over", "batch_size=8,0")
    assert sweep(*over, "--out", "all").code == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir() if path.is_dir()) == sorted(LOCAL)
    for folder, (epochs, size) in zip(LOCAL, [(1, 8), (1, 0), (2, 8), (2, 0)], strict=True):
        alone = ("--epochs", epochs, "--batch-size", size, "--rounds", 2, "--methods", "fedavg,fedbn")
        assert cli("compare", "--data", tiny_folder, *alone, "--out", "one-" + folder).code == 0
        assert_same(tmp_path / "all" / folder, tmp_path / ("one-" + folder))
        kept = [read_run_settings(tmp_path / place).values for place in (Path("all") / folder, "one-" + folder)]
        assert kept[0] == kept[1]


@pytest.mark.slow
def test_stopped_after_every_round_and_resumed_equals_uninterrupted(
    sweep, cli, monkeypatch, tmp_path, pageless, assert_same
):
    over = ("--over", "epochs=1,2", "--over", "batch_size=8")
    assert sweep(*over, "--out", "whole").code == 0
    run, trained = Experiment.run, []

    def stopping(experiment, path, *, stop, callback, **options):
        def after(done):
            trained.append((path.name, done.round))
            stop.set()

        callback.on_round_end = after
        return run(experiment, path, stop=stop, callback=callback, **options)

    monkeypatch.setattr(Experiment, "run", stopping)
    outcome = sweep(*over, "--out", "stopped")
    assert outcome.code == 130
    assert "continue with: fedshift sweep --resume stopped" in outcome.out
    calls = 1
    while outcome.code == 130:
        outcome = cli("sweep", "--resume", "stopped")
        calls += 1
        assert calls < 20
    assert outcome.code == 0
    assert len(trained) == len(set(trained)) * 2 == 2 * 2 * 2  # each round of either method once
    for folder in LOCAL[::2]:
        assert_same(tmp_path / "whole" / folder, tmp_path / "stopped" / folder)
    assert (tmp_path / "whole" / "config.toml").read_text() == (tmp_path / "stopped" / "config.toml").read_text()


@pytest.mark.slow
def test_what_is_done_is_not_run_again_and_more_may_be_asked_for(sweep, cli, monkeypatch, tmp_path, pageless):
    assert sweep("--over", "epochs=1,2", "--out", "out").code == 0
    run, begun = Experiment.run, []

    def noted(experiment, path, **options):
        begun.append(path.name)
        return run(experiment, path, **options)

    monkeypatch.setattr(Experiment, "run", noted)
    outcome = cli("sweep", "--resume", "out")
    assert (outcome.code, begun) == (0, [])
    assert outcome.out.startswith("out: 2 combinations of epochs, 0 to run")
    assert cli("sweep", "--resume", "out", "--over", "epochs=1,2,3").code == 0
    assert begun == ["epochs=3"]
    assert cli("sweep", "--resume", "out", "--rounds", 3).code == 0
    assert begun == ["epochs=3", "epochs=1", "epochs=2", "epochs=3"]
    assert read_summary(tmp_path / "out" / "epochs=1").rows["round"].max() == 3


def test_nothing_is_run_where_one_combination_cannot_be(sweep, tmp_path):
    outcome = sweep("--over", "samples=5,1000", "--out", "out")
    assert outcome.code == 2
    assert outcome.err.startswith("fedshift: samples=1000: client 'ann' has 26 training samples, fewer than")
    outcome = sweep("--over", "model=small-cnn,fnn2", "--out", "out")
    assert outcome.code == 2
    assert outcome.err.startswith("fedshift: model=fnn2: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_other_settings_are_refused_for_what_was_begun(sweep, cli, tmp_path, pageless):
    assert sweep("--over", "epochs=1,2", "--out", "out", methods="fedavg", rounds=1).code == 0
    before = (tmp_path / "out" / "config.toml").read_text()
    outcome = cli("sweep", "--resume", "out", "--lr", 0.5)
    assert outcome.code == 2
    assert outcome.err.startswith("fedshift: epochs=1: this run was begun with another optimizer")
    assert (tmp_path / "out" / "config.toml").read_text() == before
    outcome = sweep("--over", "epochs=1,2", "--out", "out", methods="fedavg", rounds=1)
    assert (outcome.code, "out already holds a run: continue it (--resume out)" in outcome.err) == (2, True)
    for over in ((), ("--over", "epochs=1,2")):
        outcome = cli("sweep", "--resume", "out/epochs=1", *over)
        assert (outcome.code, "out/epochs=1 holds no sweep: give the directory of a sweep" in outcome.err) == (2, True)
    outcome = cli("sweep", "--resume", "out", "--out", "there")
    assert "--out there and --resume out: a resumed run stays in its directory" in outcome.err
    outcome = cli("compare", "--resume", "out")
    assert (outcome.code, outcome.err) == (2, "fedshift: out/config.toml has 'over': use it with `fedshift sweep`\n")


@pytest.mark.slow
def test_a_combination_that_diverges_keeps_the_others_from_nothing(sweep, cli, monkeypatch, tmp_path, pageless):
    run = Experiment.run

    def diverging(experiment, path, **options):
        finished = run(experiment, path, **options)
        if path.name == "epochs=1":
            raise Diverged("client 'ann', round 1, step 0: the loss is nan")
        return finished

    monkeypatch.setattr(Experiment, "run", diverging)
    outcome = sweep("--over", "epochs=1,2", "--out", "out", methods="fedavg", rounds=1)
    assert (outcome.code, outcome.err) == (1, "fedshift: epochs=1: client 'ann', round 1, step 0: the loss is nan\n")
    kept = [json.loads((tmp_path / "out" / folder / "done.json").read_text()) for folder in ("epochs=1", "epochs=2")]
    assert [("diverged" in each, each["rounds"]) for each in kept] == [(True, 1), (False, 1)]
    monkeypatch.setattr(Experiment, "run", None)  # it is said again, and not run again
    assert cli("sweep", "--resume", "out").err == outcome.err


# What is shown


@pytest.mark.slow
def test_a_sweep_shows_and_writes_one_table_figures_and_a_page(sweep, tmp_path, unpublished, vector_only):
    over = ("--over", "epochs=1,2", "--over", "batch_size=8,0")
    outcome = sweep(*over, "--seeds", 2, "--target-metric", 0.2, "--evaluate-every", 1, "--out", "out")
    assert (outcome.code, outcome.err) == (0, "")
    out = tmp_path / "out"
    for said in ("out: 4 combinations of epochs, batch_size, 4 to run", f"[4/4] {LOCAL[3]}", "Page: out/sweep.html"):
        assert said in outcome.out
    frame = pd.read_csv(out / "tables" / "sweep.csv")
    assert frame[["epochs", "batch_size", "method"]].to_numpy().tolist() == [
        [epochs, size, method] for epochs in (1, 2) for size in ("8", "full") for method in ("fedavg", "fedbn")
    ]
    markdown = (out / "tables" / "sweep.md").read_text().splitlines()
    assert markdown[0] == "| epochs | batch\\_size | fedavg | fedbn |"
    for number, folder in enumerate(LOCAL):
        macro = seed_table(read_summary(out / folder)).loc["macro"]
        for place, method in enumerate(("fedavg", "fedbn")):
            row = frame.iloc[2 * number + place]
            assert row["mean"] == pytest.approx(macro[method].mean(), rel=1e-5)
            assert row["std"] == pytest.approx(macro[method].std(), rel=1e-5)
            assert f"{100 * macro[method].mean():.2f} ({100 * macro[method].std():.2f})" in markdown[2 + number]
    assert {"rounds mean", "bytes mean", "reached"} <= set(frame.columns)
    for table in ("sweep", "rounds", "bytes"):
        assert all((out / "tables" / f"{table}.{kind}").stat().st_size for kind in ("md", "tex"))
    drawn = {path.name for path in (out / "figures").iterdir()}
    names = ("rounds", "training-loss", "over-epochs", "over-batch-size")
    assert drawn == {f"{name}.{kind}" for name in names for kind in ("pdf", "png", "svg")}
    page = (out / "sweep.html").read_text()
    assert page.count('role="img" aria-label="macro') + page.count('aria-label="training loss') == 4 * 2  # values
    assert "No combination is named best, since no validation data were held out" in page
    assert page.count('class="numbers heat"') == 2  # methods
    assert 'href="epochs%3D1%2Cbatch_size%3Dfull/report.html"' in page
    assert "<script" not in page


@pytest.mark.slow
def test_each_method_is_shown_where_its_validation_data_are_best(sweep, tmp_path, unpublished, undrawn):
    rates = ("0", "0.1", "0.001")
    outcome = sweep(
        "--over", f"lr={','.join(rates)}", "--validation", 0.4, "--seeds", 2, "--out", "out", *RUNNING, rounds=3
    )
    assert (outcome.code, outcome.err) == (0, "")
    cells = (tmp_path / "out" / "tables" / "chosen.md").read_text().splitlines()[2:]
    for line, method in zip(cells, ("fedavg", "fedbn"), strict=True):
        macro = {}
        for rate in rates:
            rows = read_summary(tmp_path / "out" / f"lr={rate}").rows
            rows = rows[(rows["method"] == method) & (rows["round"] == 3) & (rows["model"] == "personal")]
            rows = rows[rows["moment"] == "loaded"]
            rows = rows.assign(share=rows["hits"].map(sum) / rows["support"].map(sum))
            macro[rate] = rows.groupby("split")["share"].mean()  # each seed and client counts alike
        best = max(rates, key=lambda rate: macro[rate]["validation"])
        shown = line.strip("| ").split(" | ")
        assert shown[:2] == [method, best]
        for split, text in zip(("validation", "test"), shown[2:], strict=True):
            assert text.split()[0] == f"{100 * macro[best][split]:.2f}"
        at_the_end = [line for line in outcome.out.splitlines() if "best on validation data at the largest lr" in line]
        assert any(method in line.split(":")[0].split(", ") for line in at_the_end) == (best == "0.1")


@pytest.mark.slow
def test_a_report_of_a_sweep_is_the_sweeps_own_of_what_is_there(sweep, cli, monkeypatch, tmp_path, unpublished):
    made = []
    monkeypatch.setattr(
        "fedshift.report.sweep_report.publish_sweep", lambda grid, *rest: made.append((grid, rest[0], rest[2]))
    )
    over = ("--over", "epochs=1,2", "--over", "batch_size=8,[0]")
    assert sweep(*over, "--out", "out", methods="fedavg", rounds=1).code == 0
    shutil.rmtree(tmp_path / "out" / LOCAL[2] / "trials")  # as if killed before its first round
    shutil.rmtree(tmp_path / "out" / LOCAL[3])  # as if killed before it
    monkeypatch.setattr(Experiment, "run", None)
    for path in (Path("out"), tmp_path / "out"):
        assert cli("report", path).code == 0
    (whole, _, config), (part, path, again), _ = made
    assert (path, again) == (Path("out"), config)
    assert part.folders == whole.folders[:2] == LOCAL[:2]
    for one, other in zip(part.points, whole.points, strict=False):
        assert one.keys == other.keys
        pd.testing.assert_frame_equal(one.summary.rows, other.summary.rows)


@pytest.mark.slow
def test_the_table_has_a_column_for_each_method(sweep, tmp_path, unpublished, undrawn):
    assert sweep("--over", "samples=none,9", "--out", "out", rounds=1).code == 0
    lines = (tmp_path / "out" / "tables" / "sweep.md").read_text().splitlines()
    assert lines[0] == "| samples | fedavg | fedbn |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| none", "| 9"]
    assert "imply significance. Intervals on the page of each combination do not allow for" in lines[-1]


@pytest.mark.slow
def test_a_sweep_that_was_stopped_begins_with_the_line_that_says_where_it_is(
    sweep, cli, tmp_path, unpublished, monkeypatch
):
    over = ("--over", "epochs=1,2,3", "--validation", 0.4, "--target-metric", 0.999)
    monkeypatch.setattr("fedshift.report.sweep_report.sweep_figures", lambda _: {})
    real, rounds = Trial.advance, []

    def advance(trial, *given):
        if len(rounds) == 5:  # of which four are the first combination's
            raise KeyboardInterrupt
        rounds.append(1)
        return real(trial, *given)

    monkeypatch.setattr(Trial, "advance", advance)
    assert sweep(*over, "--evaluate-every", 1, "--out", "out").code == 130
    printed = cli("report", "out").out
    line = (
        "PARTIAL: epochs=2: 2 rounds were asked for, and so far fedavg has reached round 1, fedbn has not been "
        "evaluated. Methods are compared only where both have reached the same round. epochs=3: not evaluated yet."
    )
    assert printed.startswith(line)
    assert "where their validation data are best" not in printed
    assert "not yet" in printed
    for file in (tmp_path / "out" / "tables").iterdir():
        assert "PARTIAL: epochs=2" in file.read_text().splitlines()[0], file.name
    table = (tmp_path / "out" / "tables" / "sweep.md").read_text().splitlines()
    assert "**" not in next(row for row in table if row.startswith("| 2"))
    assert f'<p class="partial">{line}' in (tmp_path / "out" / "sweep.html").read_text()
