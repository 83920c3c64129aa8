"""Texts in CSV files are no formulas, numbers stay numbers, and the rule can be reversed."""

import csv
import io

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshift.report.formatting import to_csv
from fedshift.utils.csv_cells import escape_cell, unescape_cell

HOSTILE = "=cmd|' /C calc'!A0"


@pytest.mark.parametrize("text", [HOSTILE, "+1+1", "-2+3", "@SUM(A1)", "\tx", "\rx", "'=1"])
def test_what_begins_as_a_formula_gets_an_apostrophe(text):
    assert escape_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "north", "-1.5", "+3", "1e-3", "-inf", "o'neil", "'quoted'"])
def test_other_texts_and_numbers_stay(text):
    assert escape_cell(text) == text


@given(st.text(alphabet="'=+-@\t\r1a."))
def test_every_text_comes_back(text):
    assert unescape_cell(escape_cell(text)) == text


def test_a_report_s_table_holds_no_formula_wherever_the_name_stands():
    frame = pd.DataFrame({("fedavg", "mean"): [-1.5, 2.0], (HOSTILE, ""): [HOSTILE, "plain"]}, index=[HOSTILE, "b"])
    frame.index.name = "@client"
    rows = list(csv.reader(io.StringIO(to_csv(frame))))
    assert rows == [
        ["'@client", "fedavg mean", f"'{HOSTILE}"], [f"'{HOSTILE}", "-1.5", f"'{HOSTILE}"], ["b", "2", "plain"],
    ]  # fmt: skip
