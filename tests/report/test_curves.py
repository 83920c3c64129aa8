"""Curves lie where the numbers are; rounds and bytes to a target are those of studies worked out by hand."""

import math

import pandas as pd
import pytest

from fedshift.report.curves import CurvePoint, make_round_panels, make_setting_panels, plot_by_round, plot_by_setting
from fedshift.report.html import embed_panel
from fedshift.report.publication import publish_summary
from fedshift.report.style import make_styles
from fedshift.report.target_metric import describe_target, find_best, find_reached, format_target_table, target_table
from fedshift.results.schema import rows_to_frame
from fedshift.utils.errors import UsageError


@pytest.fixture
def course(make_study):
    """A study of clients a and b, 100 test samples each: ``hits[method][seed][round] = (a, b)``, None: not evaluated.

    In round r, clients move 10 r bytes down and r bytes up.
    """

    def make(hits, **fields):
        rows, traffic = [], []
        for method, runs in hits.items():
            for seed, rounds in enumerate(runs):
                for number, found in enumerate(rounds, start=1):
                    traffic.append((method, seed, number, 10 * number, number))
                    for client, right in zip("ab", found or (), strict=False):
                        key = {"method": method, "seed": seed, "round": number, "client": client, "samples": 100}
                        loss = {"split": "train", "model": "personal", "moment": "trained", "loss_sum": 200 / number}
                        rows.append(key | loss)
                        if right is not None:
                            test = {"split": "test", "model": "personal", "moment": "loaded"}
                            counts = {"loss_sum": 100.0 - right, "hits": [right, 0], "support": [50, 50]}
                            rows.append(key | test | counts)
        longest = max(len(rounds) for runs in hits.values() for rounds in runs)
        moved = pd.DataFrame(traffic, columns=["method", "seed", "round", "down", "up"])
        none = {method: [{}] * len(runs) for method, runs in hits.items()}
        return make_study(
            none, rounds=longest, **{"rows": rows_to_frame(rows), "traffic": moved, "samples": {}} | fields
        )

    return make


CLIMB = [(40, 50), (60, 70), (80, 100), (70, 60)]  # macro 0.45, 0.65, 0.9, 0.65


# Targets


def test_a_target_is_reached_at_the_first_round_that_is_as_good(course):
    study = course({"fedavg": [CLIMB, [None, (64, 66), None, (95, 95)]], "fedbn": [CLIMB, [(90, 89)] * 4]})
    found = find_reached(study, 0.65)
    assert found["round"].to_dict() == {("fedavg", 0): 2, ("fedavg", 1): 2, ("fedbn", 0): 2, ("fedbn", 1): 1}
    found = find_reached(study, 0.9)
    assert found.loc[("fedavg", 0)].tolist() == [3, 11 * (1 + 2 + 3), 0.75]
    assert found.loc[("fedavg", 1)].tolist() == [4, 11 * (1 + 2 + 3 + 4), 1.0]
    assert found.loc[("fedbn", 1)].isna().all()


def test_the_metric_of_a_target_may_be_another_and_loss_is_reached_from_above(course):
    study = course({"fedavg": [CLIMB]})
    assert find_reached(study, 0.3, "balanced_accuracy")["round"].tolist() == [1]  # all hits are of one of two classes
    assert find_reached(study, 0.35, "loss")["round"].tolist() == [2]
    assert find_best(study, "loss").loc[("fedavg", 0)].tolist() == pytest.approx([0.1, 3])


def test_a_round_that_measured_fewer_clients_reaches_nothing(course):
    study = course({"fedbn": [[(99, None), (60, 60), (70, 70)]]})
    assert find_reached(study, 0.7)["round"].tolist() == [3]
    assert find_best(study).loc[("fedbn", 0)].tolist() == pytest.approx([0.7, 3])


def test_the_best_round_is_the_first_of_the_best_value_and_a_run_without_one_has_none(course):
    study = course({"fedavg": [CLIMB, [(90, 90), (95, 85), (50, 50), (60, 60)]], "fedbn": [CLIMB, [None] * 4]})
    found = find_best(study)
    assert found["value"].to_dict() == pytest.approx(
        {("fedavg", 0): 0.9, ("fedavg", 1): 0.9, ("fedbn", 0): 0.9, ("fedbn", 1): math.nan}, nan_ok=True
    )
    assert found["round"].tolist() == pytest.approx([3, 1, 3, math.nan], nan_ok=True)


def test_target_tables_say_never_and_of_how_many_seeds(course):
    lower = [(10, 10)] * 4
    study = course({"fedavg": [CLIMB, [(90, 90)] * 4, lower], "fedbn": [lower, lower, [None] * 4]})
    rows = [[cell.text for cell in row] for row in format_target_table(target_table(study, 0.9)).rows]
    assert rows == [["fedavg", "2.0 (1.4)", "38 B (39 B)", "2 of 3"], ["fedbn", "never", "never", "0 of 2"]]


def test_a_target_of_one_seed_has_no_deviation(course):
    table = target_table(course({"fedavg": [CLIMB]}), 0.9)
    assert [cell.text for cell in format_target_table(table).rows[0]] == ["fedavg", "3", "66 B", "1 of 1"]


def test_it_is_said_how_finely_a_target_was_looked_for(course):
    assert describe_target(course({"fedavg": [CLIMB]}), 0.9).endswith(
        "of 90 %, over seeds that reached it; evaluated every round"
    )
    every_two = course({"fedavg": [[None, (1, 1), None, (1, 1), (1, 1)]]})
    assert describe_target(every_two, 0.9).endswith("evaluated every 2 rounds, --evaluate-every 1 finds the exact one")


@pytest.mark.slow
def test_a_report_has_the_target_in_words_files_and_page(course, tmp_path, capsys, undrawn):
    from rich.console import Console

    publish_summary(course({"fedavg": [CLIMB], "fedbn": [[(1, 1)] * 4]}, target_metric=0.9), tmp_path, Console())
    said = capsys.readouterr().out
    assert "Rounds and bytes (all clients, down and up) to a macro test accuracy of 90 %" in " ".join(said.split())
    table = pd.read_csv(tmp_path / "tables" / "target.csv", index_col="method")
    assert table.loc["fedavg", ["rounds mean", "bytes mean", "reached"]].tolist() == [3, 66, 1]
    assert "| fedbn | never | never | 0 of 1 |" in (tmp_path / "tables" / "target.md").read_text()
    assert "never" in (tmp_path / "tables" / "target.tex").read_text()
    assert "<td>66 B</td>" in (tmp_path / "report.html").read_text()


# Curves


def drawn(axes):
    """The data of each line of a panel, without error bars' caps."""
    return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines if len(line.get_xdata())]


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].texts]


def test_curves_over_rounds_are_means_over_seeds_of_means_over_clients(course):
    study = course({"fedavg": [[(10, 20), (30, 50)], [(20, 30), (50, 70)]]})
    figure = plot_by_round([CurvePoint({}, study)], "accuracy")
    assert drawn(figure.axes[0]) == [([1, 2], pytest.approx([20, 50]))]
    low, high = figure.axes[0].collections[0].get_datalim(figure.axes[0].transData).intervaly
    assert (low, high) == pytest.approx((15, 60))
    assert legend_of(figure) == ["fedavg"]


@pytest.mark.parametrize(
    ("losses", "label"),
    [
        (["cross_entropy"], "training loss: cross-entropy (nats)"),
        (["dice"], "training loss: dice"),
        (["focal(gamma=2.0)"], "training loss: focal(gamma=2.0)"),
        (["dice", "focal"], "training loss"),
        (["fedavg: dice; fedbn: focal"], "training loss"),
    ],
)
def test_the_axis_of_the_training_loss_names_the_loss_that_was_trained(course, losses, label):
    studies = {loss: course({"fedavg": [CLIMB]}, resolved={"training loss": loss}) for loss in losses}
    figure = plot_by_round([CurvePoint({"loss": loss}, study) for loss, study in studies.items()], "train_loss")
    assert drawn(figure.axes[0])[0] == ([1, 2, 3, 4], pytest.approx([2, 1, 2 / 3, 0.5]))
    assert figure.axes[0].get_ylabel() == label


def test_lines_are_named_by_what_tells_them_apart_and_look_alike_in_all_panels(course):
    study = course({"fedavg": [CLIMB], "fedbn": [CLIMB]})
    points = [CurvePoint({"epochs": e, "batch_size": b, "lr": 0.1}, study) for e in (1, 4) for b in (10, 0)]
    figure = plot_by_round(points, "accuracy", panel="batch_size")
    assert legend_of(figure) == ["fedavg, epochs=1", "fedbn, epochs=1", "fedavg, epochs=4", "fedbn, epochs=4"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["batch_size: 10", "batch_size: full"]
    looks = [[(line.get_color(), line.get_linestyle()) for line in axes.lines] for axes in figure.axes]
    assert looks[0] == looks[1]
    (fedavg, solid), (fedbn, same), (again, dashed), (other, equal) = looks[0]
    assert (fedavg, fedbn, solid, dashed) == (again, other, same, equal)  # a color is a method's
    assert fedavg != fedbn
    assert solid != dashed
    assert [fedavg, fedbn] == [style.color for style in make_styles(study.methods).values()]


@pytest.mark.slow
def test_panels_of_a_page_are_the_figures_of_one_scale_and_answer_the_pointer(course):
    points = [
        CurvePoint({"epochs": 1}, course({"fedavg": [CLIMB]})),
        CurvePoint({"epochs": 4}, course({"fedavg": [[(10, 10)] * 4]})),
    ]
    one, other = make_round_panels(points, "accuracy", "rounds", panel="epochs")
    assert (one.name, other.name) == ("rounds-1", "rounds-2")
    assert one.figure.axes[0].get_ylim() == other.figure.axes[0].get_ylim()
    assert one.points[2] == (3, pytest.approx(90), "fedavg, round 3: 90.00")
    (panel,) = make_setting_panels(points, "epochs", "accuracy", "over")
    assert [text for *_, text in panel.points] == ["fedavg, epochs=1: 65.00", "fedavg, epochs=4: 10.00"]
    page = embed_panel(panel)
    assert page.count('class="point"') == 2
    assert "one seed" not in page.split(">", 1)[1]  # the page has the legend


def test_points_may_name_their_method_and_be_of_one_each(course):
    points = [CurvePoint({"method": name}, course({"fedavg": [CLIMB]})) for name in ("plain", "with momentum")]
    assert legend_of(plot_by_round(points, "accuracy")) == ["plain", "with momentum"]


def ends(course, key, values, runs=1):
    """Points whose last round has 10, 20, ... percent."""
    return [
        CurvePoint(
            {key: value}, course({"fedavg": [[(10 * place + seed, 10 * place) for _ in "12"] for seed in range(runs)]})
        )
        for place, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize(
    ("key", "values", "places", "labels"),
    [
        ("epochs", [16, 1, 4], [0, 2, 4], ["1", "4", "16"]),
        ("agc", [0.01, 0.02, 0.04], [math.log2(0.01) + n for n in range(3)], ["0.01", "0.02", "0.04"]),
        ("samples", [74, 371, 743], [math.log2(n) for n in (74, 371, 743)], ["74", "371", "743"]),
        ("lr", [0.1, 0.3, 0.5], [0.1, 0.3, 0.5], ["0.1", "0.3", "0.5"]),
        ("momentum", [0.0, 0.5, 0.9], [0.0, 0.5, 0.9], ["0", "0.5", "0.9"]),
        ("batch_size", [10, 50, 0], [10, 50, 90], ["10", "50", "full"]),
        ("batch_size", [0], [0], ["full"]),
    ],
)
def test_numbers_lie_where_they_belong(course, key, values, places, labels):
    axes = plot_by_setting(ends(course, key, values), key, "accuracy").axes[0]
    ordered = sorted(values, key=lambda value: (key == "batch_size" and value == 0, value))
    heights = [10 * (values.index(value) + 1) for value in ordered]
    assert drawn(axes)[0] == (pytest.approx(places), pytest.approx(heights))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == labels
    assert axes.get_xticks().tolist() == pytest.approx(places)


def test_words_stand_side_by_side_unconnected(course):
    axes = plot_by_setting(
        ends(course, "split", ["iid(clients=10)", "dirichlet(clients=10)"]), "split", "accuracy"
    ).axes[0]
    assert drawn(axes)[0] == ([0, 1], pytest.approx([10, 20]))
    assert axes.lines[0].get_linestyle() == "None"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["iid(clients=10)", "dirichle…nts=10)"]


def test_error_bars_are_one_deviation_over_seeds(course):
    figure = plot_by_setting(ends(course, "lr", [1.0], runs=3), "lr", "accuracy")
    (segment,) = figure.axes[0].collections[0].get_segments()
    assert segment[:, 1].tolist() == pytest.approx([10.5 - 0.5, 10.5 + 0.5])  # macro 10, 10.5, 11
    assert figure.legends[0].get_title().get_text() == "mean, line: ± std of 3 seeds"


def test_what_cannot_be_drawn_is_named(course):
    points = ends(course, "lr", [0.1, 0.2])
    with pytest.raises(UsageError, match="unknown key 'epochs': allowed are lr, method"):
        plot_by_setting(points, "epochs", "accuracy")
    with pytest.raises(UsageError, match="unknown key 'epochs'"):
        plot_by_round(points, "accuracy", panel="epochs")
    with pytest.raises(UsageError, match="unknown metric 'acuracy'"):
        plot_by_round(points, "acuracy")
    with pytest.raises(UsageError, match="no runs"):
        plot_by_round([], "accuracy")


@pytest.mark.parametrize(("best", "scale"), [(90, "linear"), (99.5, "log")])
def test_losses_far_apart_have_a_logarithmic_axis(course, best, scale):
    study = course({"fedavg": [[(0, 0), (best, best)]]})  # macro losses 1 and 1 - best / 100
    assert plot_by_round([CurvePoint({}, study)], "loss").axes[0].get_yscale() == scale
    assert plot_by_round([CurvePoint({}, study)], "accuracy").axes[0].get_yscale() == "linear"
