"""Tables as text: what papers print, in Markdown, LaTeX, CSV and on the terminal."""

import math
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from fedshift.report import accuracy_table
from fedshift.report.formatting import (
    difference_unit,
    escape_latex,
    fit_width,
    flatten_settings,
    format_bytes,
    format_mean,
    format_metric_table,
    format_p_value,
    format_signed,
    make_table,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)
from fedshift.report.page import make_report

MINUS = "\N{MINUS SIGN}"
LAST = {
    "fedavg": [{"a": 50, "b": 240}, {"a": 52, "b": 246}, {"a": 54, "b": 252}],
    "fedbn": [{"a": 60, "b": 240}, {"a": 63, "b": 249}, {"a": 66, "b": 258}],
}


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def best(table):
    return {row[0].text: [cell.text for cell in row if cell.best] for row in table.rows}


def test_values_in_percent_with_deviation(study):
    table = format_metric_table(accuracy_table(study))
    assert table.header == ("client", "fedavg", "fedbn")
    assert texts(table)[0] == ["a", "52.00 (2.00)", "63.00 (3.00)"]
    assert table.rule == 2


def test_best_of_each_row(make_study):
    study = make_study(
        {"fedavg": [{"a": 50, "b": 240}], "fedbn": [{"a": 60, "b": 240}], "fedprox": [{"a": 40, "b": 90}]}
    )
    found = best(format_metric_table(accuracy_table(study)))
    assert found["a"] == ["60.00"]
    assert found["b"] == ["80.00", "80.00"]
    lowest = best(format_metric_table(accuracy_table(study, "loss"), "loss"))
    assert lowest["a"] == ["0.400"]


def test_without_clients_one_by_one_the_aggregates_are_as_they_were(make_crowd):
    frame = accuracy_table(make_crowd(60, seeds=2))
    whole, short = format_metric_table(frame), format_metric_table(frame, one_by_one=False)
    assert short.rows == whole.rows[whole.rule :]
    assert (short.header, short.rule) == (("60 clients", "fedavg", "fedbn"), 0)


def test_a_single_method_is_never_best(make_study):
    table = format_metric_table(accuracy_table(make_study({"fedavg": [{"a": 50, "b": 240}]})))
    assert not any(cell.best for row in table.rows for cell in row)


def test_a_table_without_methods_has_only_names(make_study):
    table = format_metric_table(accuracy_table(make_study({"fedbn": [{"a": 50, "b": 240}]}), model="global"))
    assert table.header == ("client",)
    assert table.values == []


def test_missing_values_are_dashes(make_study):
    study = make_study(keep=lambda row: row["method"] != "fedbn")
    assert {row[2] for row in texts(format_metric_table(accuracy_table(study)))} == {"-"}


def test_aggregates_are_over_the_clients_that_all_methods_have_and_the_best_of_them_is_marked(make_study):
    lacks = ("fedbn", "a", 1)
    table = format_metric_table(
        accuracy_table(make_study(keep=lambda row: (row["method"], row["client"], row["seed"]) != lacks))
    )
    rows = {row[0]: row for row in texts(table)}
    assert rows["a"] == ["a", "52.00 (2.00)", "63.00 (4.24)"]
    assert rows["macro"] == ["macro", "72.00 (8.89)", "76.33 (6.51)"]  # seeds 65, 82, 69 and 70, 83, 76
    assert best(table)["macro"] == ["76.33 (6.51)"]
    assert best(table)["a"] == ["63.00 (4.24)"]


def test_a_client_that_no_method_has_changes_nothing_of_the_others(make_study):
    table = format_metric_table(accuracy_table(make_study(keep=lambda row: row["client"] != "a")))
    assert best(table)["macro"] == ["83.00 (3.00)"]


def test_every_form_of_a_table_says_what_its_spread_covers(study):
    console, table = Console(width=200), format_metric_table(accuracy_table(study))
    assert "initialization and order of samples, not the test samples and not the split" in table.note
    assert table.note in to_markdown(table)
    assert "initialization and order of samples, not the test samples and not the split" in to_latex(table)
    with console.capture() as capture:
        console.print(to_terminal(table))
    assert table.note in " ".join(capture.get().split())


def test_one_seed_shows_no_spread(make_study):
    note = format_metric_table(accuracy_table(make_study({"fedbn": [{"a": 50, "b": 240}]}))).note
    assert note == (
        "One seed shows no spread, neither of initialization and order of samples nor of the test samples or the split."
    )


def test_markdown_has_one_width_and_bold(study):
    *lines, blank, _ = to_markdown(format_metric_table(accuracy_table(study))).splitlines()
    assert not blank
    assert lines[0] == "| client | fedavg | fedbn |"
    assert lines[2] == "| a | 52.00 (2.00) | **63.00 (3.00)** |"
    assert len({line.count("|") for line in lines}) == 1


def test_markdown_and_latex_escape_names(make_study):
    study = make_study(names={"a": "x|y_*", "b": r"50% & #1 \ {z} $ ~ ^"})
    table = format_metric_table(accuracy_table(study))
    assert r"| x\|y\_\* |" in to_markdown(table)
    assert r"50\% \& \#1 \textbackslash{} \{z\} \$ \textasciitilde{} \textasciicircum{} &" in to_latex(table)
    assert escape_latex("R$^2$, \u03b1=0.1 ≥ ±2µ, Δx₁² < 5°") == (
        r"R\$\textasciicircum{}2\$, $\alpha$=0.1 $\geq$ $\pm$2$\mu$, $\Delta$x$_{1}$$^{2}$ $<$ 5$^\circ$"
    )
    assert escape_latex("Mu\u0308nchen, Łódź 北") == "München, Łódź U+5317"


def test_latex_is_balanced(edge_case):
    table = format_metric_table(accuracy_table(edge_case))
    source = to_latex(table)
    bare = re.sub(r"\\[{}&$%#_]", "", source)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    body = [line for line in bare.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in body} == {len(table.header) - 1}
    assert [source.count(rf"\{rule}") for rule in ("toprule", "bottomrule", "begin", "end")] == [1, 1, 1, 1]


def test_bold_and_deviations_mean_the_same_in_every_form_and_advice_is_not_in_latex(study):
    table = make_report(study, whole=False).tables[0].text
    table = replace(table, note=f"{table.note} Train for more rounds.", advice="Train for more rounds.")
    with (console := Console(width=200, force_terminal=True)).capture() as capture:
        console.print(to_terminal(table))
    marked = best(table)
    for name in ("a", "macro"):
        (text,) = marked[name]
        mean, std = text.rstrip(")").split(" (")
        assert rf"{name} & $" in (source := to_latex(table, "R$^2$", "tab:x"))
        assert rf"$\mathbf{{{mean}}} \pm {std}$" in source
        assert f"**{text}**" in to_markdown(table)
        assert f"\x1b[1m{text}" in capture.get()
    assert [form.count("Train for more") for form in (source, to_markdown(table), capture.get())] == [0, 1, 1]
    assert [form.count("Bold marks the best mean as printed") for form in (source, to_markdown(table))] == [1, 1]
    assert r"\caption{R\$\textasciicircum{}2\$.}" in source
    assert r"\label{tab:x}" in source
    assert source.count(r"\begin{table}") == source.count(r"\end{table}") == 1
    assert r"a & $52 \pm 2$ &" in to_latex(format_metric_table(accuracy_table(study), digits=0))


def test_negative_and_tiny_numbers_have_one_form(study):
    frame = accuracy_table(study)
    frame.loc["a", :] = [-0.86, 0.0213, 3, 9.74e-05, 1.2e-06, 3]
    frame.loc["b", :] = [-1.25e-11, 2e-13, 3, -0.0, math.nan, 1]
    table = format_metric_table(frame, "r2")
    assert texts(table)[0][1:] == [f"{MINUS}0.860000 (0.021300)", "0.000097 (0.000001)"]
    assert texts(table)[1][1:] == [f"{MINUS}1.25e-11 (2.00e-13)", "0.00e+00"]
    source = to_latex(table)
    assert r"$-0.860000 \pm 0.021300$" in source
    assert r"$-1.25 \cdot 10^{-11} \pm 2.00 \cdot 10^{-13}$" in source
    assert "(" not in "".join(line for line in source.splitlines() if line.startswith(("a ", "b ")))


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (9.74e-05, 1.23e-06, "0.0000974 (0.0000012)"), (-0.0003, 0.02, "0.000 (0.020)"), (0.8634, math.nan, "0.863"),
        (12345.6, 123.4, "12346 (123)"), (12.3456, 0.0123, "12.346 (0.012)"), (1.5, 1e-8, "1.50000 (0.00000)"),
        (1.5, 2e-16, "1.500 (0.000)"),
        (0.0, 0.0, "0.000 (0.000)"), (math.nan, 1.0, "-"), (math.inf, math.nan, "-"), (-2.5, math.nan, f"{MINUS}2.500"),
        (12345.678, math.nan, "12345.7"), (9.7e-5, math.nan, "0.0000970"),
    ],
)  # fmt: skip
def test_digits_follow_the_deviation(mean, std, text):
    assert format_mean(mean, std) == text


def test_differences_have_the_digits_of_their_interval():
    errors, shares = difference_unit("rmse"), difference_unit("accuracy")
    assert errors.format_difference(-1.2e-5, -3.1e-5, 7e-6) == f"{MINUS}0.000012 ({MINUS}0.000031 to +0.000007)"
    assert errors.format_difference(0.05, math.nan, math.nan) == "+0.0500"
    assert errors.format_interval(2.0, 12.0) == "+2.0 to +12.0"
    assert shares.format_difference(0.0123, 0.0, 0.0246) == "+1.23 (0.00 to +2.46)"
    assert shares.format_difference(0.0, 0.0, 0.0) == "0.00 (level)"
    assert [shares.format_interval(math.nan, math.nan), shares.format(0.5, 0.01)] == ["-", "50.00 (1.00)"]


def test_csv_keeps_numbers(study):
    frame = accuracy_table(study)
    lines = to_csv(frame).splitlines()
    assert lines[0] == "client,fedavg mean,fedavg std,fedavg seeds,fedbn mean,fedbn std,fedbn seeds"
    assert lines[1] == "a,0.52,0.02,3,0.63,0.03,3"
    frame.loc["a", ("fedavg", "std")] = 1 / 3
    assert to_csv(frame).splitlines()[1].split(",")[2] == "0.333333333333333"


def test_terminal_never_reads_names_as_markup(make_study):
    study = make_study(names={"a": "[red]a[/red]", "b": "b"})
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(to_terminal(format_metric_table(accuracy_table(study))))
    assert "[red]a[/red]" in capture.get()
    assert "63.00 (3.00)" in capture.get()


def test_small_texts():
    assert [format_signed(1.234), format_signed(-1.234), format_signed(math.nan)] == ["+1.23", f"{MINUS}1.23", "-"]
    assert [format_signed(0.004), format_signed(-0.004), format_signed(0, 3)] == ["0.00", "0.00", "0.000"]
    assert [format_p_value(0.04999), format_p_value(0.0001), format_p_value(math.nan)] == ["0.050", "<0.001", "-"]
    sizes = [0, 999, 999.6, 12_345, 999_800, 2.5e13, 1.5e15, math.nan]
    assert [*map(format_bytes, sizes)] == ["0 B", "999 B", "1 kB", "12.3 kB", "1 MB", "25 TB", "1,500 TB", "-"]


@pytest.mark.parametrize(
    ("tree", "pairs"),
    [
        ({"a": {"b": 1, "c": None}}, [("a.b", "1"), ("a.c", "-")]),
        ({"a": [1, 2], "b": []}, [("a", "1, 2"), ("b", "-")]),
        ({"a": [{"b": 1}, {"b": {}}]}, [("a[0].b", "1"), ("a[1].b", "-")]),
    ],
)
def test_flatten(tree, pairs):
    assert flatten_settings(tree) == pairs


def test_a_table_that_is_too_wide_is_turned_or_cut():
    """Nothing is lost, the line fits, and the note is at the end."""
    methods = [f"method-{number}" for number in range(8)]
    for clients, tables in ((2, 1), (7, 2)):
        rows = [[f"c{place}", *(f"{number}{place}.00 (0.10)" for number in range(8))] for place in range(clients)]
        table = replace(make_table(("client", *methods), rows, note="note"), corner="method")
        blocks = fit_width(table, 80)
        assert len(blocks) == tables
        assert [block.note for block in blocks] == [""] * (tables - 1) + ["note"]
        assert sorted(text for block in blocks for text in block.values) == sorted(table.values)
        for block in blocks:
            console = Console(file=(written := StringIO()), width=80)
            console.print(to_terminal(replace(block, note="")))
            lines = [line for line in written.getvalue().splitlines() if line.strip(" ─")]
            assert len(lines) == len(block.rows) + 1
    assert fit_width(table, 200) == [table]
    assert fit_width(replace(table, corner=""), 80) == [replace(table, corner="")]
    names = [f"fedbn+fedprox(mu=0.{number})+tuned(lr=0.03)" for number in range(3)]
    table = make_table(
        ("method", "interval", "new"), [(name, *["\N{MINUS SIGN}60.00 to +60.00"] * 2) for name in names]
    )
    console = Console(file=(written := StringIO()), width=60)
    console.print(to_terminal(*fit_width(table, 60)))
    first = [line[:18].strip() for line in written.getvalue().splitlines()[3:] if line.strip()]
    assert first[:3] == ["fedbn+", "fedprox(mu=0.0)+", "tuned(lr=0.03)"]
