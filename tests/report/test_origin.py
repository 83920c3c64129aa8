"""What a page says of the run behind its numbers."""

import pandas as pd

from fedshift.report.origin import describe_run, find_changed, format_duration
from fedshift.report.page import render_page

SESSIONS = [
    {"started": "2026-11-20T10:15:07+00:00", "command": "fedshift compare --rounds 2"},
    {"started": "2026-11-21T08:00:00+00:00", "command": ""},
]
RESOLVED = {"network": "small-cnn", "training loss": "focal(gamma=2.0)"}


def traffic(engines=("stacked", "stacked")):
    return pd.DataFrame(
        {
            "method": ["fedavg", "fedbn"], "seed": 0, "round": 1, "down": 10, "up": 5, "seconds": 1.0,
            "elapsed": [60.0, 65.0], "ended": ["2026-11-21T08:01:00+00:00", "2026-11-21T08:02:05+00:00"],
            "engine": engines,
        }
    )  # fmt: skip


def test_what_was_trained_is_said_as_resolved_with_engine_times_and_commands(make_study):
    environment = {"packages": {"fedshift": "0.1.0", "torch": "2.7", "numpy": "2"}, "sessions": SESSIONS}
    study = make_study(resolved=RESOLVED, traffic=traffic(), environment=environment)
    assert describe_run(study) == RESOLVED | {
        "engine": "stacked",
        "started": "2026-11-20 10:15 UTC",
        "last round ended": "2026-11-21 08:02 UTC",
        "duration of all rounds": "2 min 05 s",
        "command": "fedshift compare --rounds 2",
        "resumed with (1)": "from Python",
        "versions": "fedshift 0.1.0, torch 2.7",
    }
    other = make_study(traffic=traffic(("stacked", "pool")), environment={})
    assert describe_run(other)["engine"] == "fedavg: stacked; fedbn: pool"


def test_durations_are_read_at_a_glance():
    assert [format_duration(seconds) for seconds in (0.04, 59.9, 65, 7384)] == [
        "0.0 s", "59.9 s", "1 min 05 s", "2 h 03 min",
    ]  # fmt: skip


def test_settings_other_than_the_defaults_are_those(make_study):
    config = {"data": "digits", "methods": "fedavg,fedbn", "rounds": 20, "lr": 0.3, "model": "auto", "own": 1}
    assert find_changed(config) == {"data": "digits", "methods": "fedavg,fedbn", "lr": 0.3, "own": 1}


def test_the_page_begins_with_what_was_trained_and_folds_the_list_of_settings(make_study, undrawn):
    config = {"data": "digits", "rounds": 20, "lr": 0.3, "model": "auto"}
    page = render_page(make_study(resolved=RESOLVED, traffic=traffic(), config=config))
    section = page[page.index('<h2 id="run">What was trained</h2>') :]
    what, others, everything = (
        section.index(text) for text in ("small-cnn", "other than the defaults", "All settings")
    )
    assert what < others < everything
    assert section.rindex("<details", 0, everything) == everything - len('<details class="further"><summary>')
    assert "0.3" in section[others:everything]
    assert "auto" not in section[:everything]
    assert "auto" in section[everything:]
