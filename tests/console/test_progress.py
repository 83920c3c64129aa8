"""Progress of a run: plain lines in a pipe, a live table on a terminal."""

import io
import json
import re
from threading import Event

import pytest
from rich.console import Console

from fedshift.config.spec import CompareSpec
from fedshift.console.progress import LiveDisplay, PlainLines, _format_duration
from fedshift.console.terminal import show_progress
from fedshift.experiments.callbacks import Callback
from fedshift.experiments.factory import make_experiment
from fedshift.experiments.trial import RoundResult

TESTED = {"split": "test", "model": "personal", "moment": "loaded"}


@pytest.fixture
def experiment(tiny_folder):
    return make_experiment(
        CompareSpec(data=str(tiny_folder), methods="fedbn,centralized", rounds=4, evaluate_every=2, batch_size=8)
    )


@pytest.mark.slow
def test_plain_lines_are_one_for_each_evaluated_round(experiment, tmp_path):
    console = Console(file=io.StringIO(), width=60)
    experiment.run(tmp_path / "run", callback=PlainLines(console))
    lines = console.file.getvalue().splitlines()
    rounds = [line for line in lines if not line.startswith("note: ")]
    assert len(rounds) == 4
    pattern = (
        r"(fedbn|centralized) seed 0 round [24]/4: loss \d\.\d{4}, "
        r"accuracy \d+\.\d\d % \(ann \d+\.\d bob \d+\.\d cid \d+\.\d\), "
        r"elapsed \d+:\d\d, left \d+:\d\d"
    )
    assert all(re.fullmatch(pattern, line) for line in rounds), rounds
    assert rounds[-1].endswith(", left 0:00")
    notes = [line for line in lines if line.startswith("note: ")]  # one line each, however narrow the console
    assert sum(note.endswith("it joins the batch before it") for note in notes) == 2
    engines = [note for note in notes if ", runs on the sequential engine on one thread (" in note]  # once for both
    assert len(engines) == 1
    assert len(notes) == 3


def test_the_accuracy_shown_is_the_macro_accuracy_of_the_personal_models(experiment, tmp_path):
    class Remembers(PlainLines):
        done: RoundResult

        def on_round_end(self, done):
            super().on_round_end(done)
            self.done = done

    console = Console(file=io.StringIO(), width=200)
    watch = Remembers(console)
    experiment.run(tmp_path / "run", callback=watch)
    tested = [row for row in watch.done.rows if (row["split"], row["model"]) == ("test", "personal")]
    macro = sum(100 * sum(row["hits"]) / row["samples"] for row in tested) / 3
    trained = [row for row in watch.done.rows if row["split"] == "train"]
    last = console.file.getvalue().splitlines()[-1]
    assert f"accuracy {macro:.2f} %" in last
    assert f"loss {trained[0]['loss_sum'] / trained[0]['samples']:.4f}" in last


@pytest.mark.parametrize(("metric", "said"), [("balanced_accuracy", "balanced accuracy 75.00"), ("auc", "AUC 90.00")])
def test_the_metric_of_the_tables_is_shown_of_the_clients_that_define_it(metric, said):
    row = {**TESTED, "samples": 4, "hits": [3, 0], "support": [3, 1], "auc": 0.9}
    rows = [{**row, "client": "a"}, {**row, "client": "b", "hits": [2, 2], "support": [2, 2], "auc": None}]
    console, screen = Console(file=io.StringIO(), width=200), terminal()
    with LiveDisplay(screen) as display:
        for watch in (PlainLines(console), display):
            watch.on_run_begin(["m"], [0], 1, ["a", "b"], metric)
            watch.on_trial_begin("m", 0, 0)
            watch.on_round_end(RoundResult(round=1, participants=("a", "b"), down=0, up=0, seconds=0.1, rows=rows))
        frame = terminal()
        frame.print(display.live.renderable)
    assert f"{said} % (a " in console.file.getvalue()
    assert ("b 100.0" in console.file.getvalue()) == (metric != "auc")
    assert f"test {said.rpartition(' ')[0]}" in frame.file.getvalue()


def test_names_are_shown_as_they_are(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    lines = PlainLines(console)
    lines.on_run_begin(["m"], [0], 1, ["[red]"], "accuracy")
    lines.on_trial_begin("[bold]m", 0, 0)
    lines.on_client_end("[red]", 0.5)
    row = {"client": "[red]", **TESTED, "hits": [1, 0], "support": [1, 1], "samples": 2}
    others = [
        {**row, "model": "global", "hits": [2, 0]}, {**row, "split": "validation", "hits": [0, 0]},
        {**row, "moment": "trained", "hits": [0, 0]},
    ]  # fmt: skip
    lines.on_round_end(RoundResult(round=1, participants=("[red]",), down=0, up=0, seconds=0.1, rows=[row, *others]))
    lines.on_notice("[link]x")
    assert (
        "[bold]m seed 0 round 1/1: loss 0.5000, accuracy 50.00 % ([red] 50.0), elapsed 0:00, left 0:00"
        in console.file.getvalue()
    )
    assert "note: [link]x" in console.file.getvalue()


def test_a_round_in_which_nobody_has_a_model_yet_is_a_line_too():
    console = Console(file=io.StringIO(), width=200)
    lines = PlainLines(console)
    lines.on_run_begin(["m"], [0], 2, ["a"], "accuracy")
    lines.on_trial_begin("m", 0, 0)
    lines.on_client_end("a", 0.5)
    lines.on_round_end(
        RoundResult(
            round=1,
            participants=("a",),
            down=0,
            up=0,
            seconds=0.1,
            rows=[{**TESTED, "split": "train", "moment": "trained"}],
        )
    )
    assert console.file.getvalue() == ""


def test_of_many_clients_a_line_says_the_mean_and_the_worst():
    console = Console(file=io.StringIO(), width=400)
    lines = PlainLines(console)
    names = [f"client{number}" for number in range(21)]
    lines.on_run_begin(["m"], [0], 1, names, "accuracy")
    lines.on_trial_begin("m", 0, 0)
    for name in names:
        lines.on_client_end(name, 0.5)
    tested = {**TESTED, "samples": 4, "support": [2, 2]}
    rows = [{**tested, "client": name, "hits": [2, 1 if number == 7 else 2]} for number, name in enumerate(names)]
    lines.on_round_end(RoundResult(round=1, participants=tuple(names), down=0, up=0, seconds=0.1, rows=rows))
    (said,) = console.file.getvalue().splitlines()
    assert said.startswith("m seed 0 round 1/1: loss 0.5000, accuracy 98.81 % (worst: client7 75.0), elapsed ")


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=40, color_system=None)


@pytest.mark.slow
def test_the_live_display_shows_each_client_and_leaves_the_terminal_clean(experiment, tmp_path):
    console = terminal()
    with LiveDisplay(console) as display:
        experiment.run(tmp_path / "run", callback=display)
        frame = terminal()
        frame.print(display.live.renderable)
    shown = frame.file.getvalue()
    for said in (
        "centralized seed 0 round 4",
        "8/8",
        "client",
        "training loss",
        "test accuracy",
        "ann",
        "bob",
        "cid",
        "pooled",
    ):
        assert said in shown
    assert len(re.findall(r"\d+\.\d\d %", shown)) == 2 + 3
    assert "note: client 'bob': the last batch" in console.file.getvalue()
    assert not display.live.is_started


def test_the_macro_metric_of_every_method_stays_on_the_screen():
    row = {**TESTED, "samples": 100, "support": [100]}

    def evaluated(round, *hits):
        return [{**row, "client": str(place), "round": round, "hits": [each]} for place, each in enumerate(hits)]

    def done(round, *hits):
        rows = evaluated(round, *hits)
        return RoundResult(round=round, participants=("0", "1"), down=0, up=0, seconds=0.1, rows=rows)

    with LiveDisplay(terminal()) as display:
        display.on_run_begin(["[red]", "fedbn"], [0, 1], 4, ["0", "1"], "accuracy")
        display.on_trial_begin("[red]", 0, 4)
        display.on_recorded(evaluated(4, 50, 60))  # of an earlier session
        display.on_trial_begin("fedbn", 0, 2)
        display.on_recorded(evaluated(2, 10, 20))
        display.on_round_end(done(4, 70, 81))
        display.on_trial_begin("[red]", 1, 0)
        display.on_round_end(done(2, 30, 31))
        display.on_trial_begin("fedbn", 1, 0)
        frame = terminal()
        frame.print(display.live.renderable)
    lines = [line.split() for line in frame.file.getvalue().splitlines()]
    assert ["[red]", "1", "of", "2", "55.00", "%", "30.50", "%", "in", "round", "2"] in lines
    assert ["fedbn", "1", "of", "2", "75.50", "%"] in lines


def test_of_trials_side_by_side_each_keeps_its_figures():
    def done(name, round, hits):
        row = {**TESTED, "client": name, "samples": 100, "support": [100], "hits": [hits], "round": round}
        return RoundResult(round=round, participants=(name,), down=0, up=0, seconds=0.1, rows=[row])

    console = Console(file=io.StringIO(), width=200)
    lines = PlainLines(console)
    with LiveDisplay(terminal()) as display:
        for watch in (lines, display):
            watch.on_run_begin(["fedavg", "fedbn"], [0], 3, ["ann"], "accuracy")
            watch.on_trial_begin("fedavg", 0, 0)
            watch.on_client_end("ann", 0.25)
            watch.on_trial_begin("fedbn", 0, 0)
            watch.on_client_end("ann", 0.75)
            watch.on_turn("fedavg", 0)
            watch.on_round_end(done("ann", 1, 40))
            watch.on_turn("fedbn", 0)
            watch.on_round_end(done("ann", 1, 60))
        frame = terminal()
        frame.print(display.live.renderable)
    said = console.file.getvalue().splitlines()
    assert said[0].startswith("fedavg seed 0 round 1/3: loss 0.2500, accuracy 40.00 % (ann 40.0)")
    assert said[1].startswith("fedbn seed 0 round 1/3: loss 0.7500, accuracy 60.00 % (ann 60.0)")
    shown = frame.file.getvalue()
    assert "fedavg seed 0 round 1, fedbn seed 0 round 1" in " ".join(shown.split())
    found = [line.split() for line in shown.splitlines()]
    assert ["ann", "0.2500", "40.00", "%"] in found  # of the trial that began first
    assert ["fedavg", "0", "of", "1", "40.00", "%", "in", "round", "1"] in found
    assert ["fedbn", "0", "of", "1", "60.00", "%", "in", "round", "1"] in found


def test_a_trial_may_end_after_another_began():
    row = {**TESTED, "client": "ann", "samples": 100, "support": [100], "hits": [40], "round": 1}
    console = Console(file=io.StringIO(), width=200)
    lines = PlainLines(console)
    lines.on_run_begin(["fedavg", "fedbn", "gn"], [0], 1, ["ann"], "accuracy")
    lines.on_trial_begin("fedavg", 0, 0)
    lines.on_round_end(RoundResult(round=1, participants=("ann",), down=0, up=0, seconds=0.1, rows=[row]))
    lines.on_trial_begin("fedbn", 0, 0)
    lines.on_turn("fedavg", 0)
    lines.on_notice("said at the end of fedavg")
    lines.on_trial_end("")
    lines.on_trial_begin("gn", 0, 0)
    lines.on_turn("fedbn", 0)
    lines.on_round_end(RoundResult(round=1, participants=("ann",), down=0, up=0, seconds=0.1, rows=[row]))
    lines.on_trial_end("")
    said = console.file.getvalue().splitlines()
    assert said[1] == "note: said at the end of fedavg"
    assert said[2].startswith("fedbn seed 0 round 1/1")
    assert lines.left == 1  # rounds, of gn alone


@pytest.mark.slow
def test_a_resumed_run_shows_the_macro_metrics_of_what_was_done_before(experiment, tmp_path):
    stop = Event()

    class Stopper(Callback):
        def on_round_end(self, done):
            if done.rows[0]["method"] == "centralized" and done.round == 3:
                stop.set()

    experiment.run(tmp_path / "run", callback=Stopper(), stop=stop)
    stop.set()  # nothing more is trained
    with LiveDisplay(terminal()) as display:
        experiment.run(tmp_path / "run", resume=True, callback=display, stop=stop)
    for method, number in (("fedbn", 4), ("centralized", 2)):
        lines = (tmp_path / "run" / "trials" / f"{method}-seed0" / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["round"] == number and row["split"] == "test"]
        shares = [sum(row["hits"]) / sum(row["support"]) for row in rows if row["model"] == "personal"]
        assert display.macros[method] == {0: (number, pytest.approx(100 * sum(shares) / 3))}


def test_the_live_display_of_many_clients_stays_on_one_screen():
    with LiveDisplay(terminal()) as display:
        names = [f"client{number}" for number in range(500)]
        display.on_run_begin(["m"], [0], 3, names, "accuracy")
        display.on_trial_begin("m", 0, 0)
        for number, name in enumerate(names, start=1):
            display.on_client_end(name, number)
        frame = terminal()
        frame.print(display.live.renderable)
    shown = frame.file.getvalue()
    assert "and 480 more" in shown
    assert re.search(r"mean of all +250\.5000", shown)
    assert shown.count("\n") < 30
    assert re.search(r"client19 +20\.0000", shown)
    assert "client20" not in shown


def test_a_resumed_trial_starts_where_it_stopped():
    with LiveDisplay(terminal()) as display:
        display.on_run_begin(["m"], [0], 5, ["a"], "accuracy")
        display.on_trial_begin("m", 0, 3)
        assert display.bar.tasks[0].completed == 3
        assert display.bar.tasks[0].total == 5


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0:00"), (59.7, "1:00"), (61, "1:01"), (3599, "59:59"), (7384, "2:03:04")]
)
def test_time_is_written_as_a_clock(seconds, text):
    assert _format_duration(seconds) == text


@pytest.mark.parametrize(("widgets", "shown"), [(True, LiveDisplay), (False, PlainLines)])
def test_a_notebook_has_a_live_display_where_it_can_show_one(monkeypatch, widgets, shown):
    monkeypatch.setattr("fedshift.console.terminal.find_spec", lambda name: (name == "ipywidgets" and widgets) or None)
    monkeypatch.setattr(LiveDisplay, "__enter__", lambda self: self)
    monkeypatch.setattr(LiveDisplay, "__exit__", lambda *_: None)
    with show_progress(Console(force_jupyter=True)) as callback:
        assert type(callback) is shown
