"""Messages that refer to settings: arguments in Python, flags on the command line, names for a test."""

import pickle
from pathlib import Path

import pytest

from fedshift.utils.errors import FedshiftError, Ref, Sentence, UsageError, as_argument, as_flag

MESSAGES = [
    (
        UsageError("{} needs validation data: hold some out ({})", Ref(select="best"), Ref(validation=0.1)),
        "select='best' needs validation data: hold some out (validation=0.1)",
        "--select best needs validation data: hold some out (--validation 0.1)",
        ("select", "validation"),
    ),
    (
        UsageError("leave the client out, or allow it ({})", Ref(allow_single_class=True)),
        "leave the client out, or allow it (allow_single_class=True)",
        "leave the client out, or allow it (--allow-single-class)",
        ("allow_single_class",),
    ),
    (
        UsageError("{}: choose other ({})", UsageError("a run is there ({})", Ref(resume=Path("my run"))), Ref("out")),
        "a run is there (resume='my run'): choose other (out)",
        "a run is there (--resume 'my run'): choose other (--out)",
        ("resume", "out"),
    ),
    (
        FedshiftError(f"a folder named {'{}'} is damaged, or {{}}", Sentence("{}", Ref(lr=0.1, rounds=2))),
        "a folder named {} is damaged, or lr=0.1, rounds=2",
        "a folder named {} is damaged, or --lr 0.1, --rounds 2",
        ("lr", "rounds"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("error", "python", "command", "settings"), MESSAGES)
def test_a_message_speaks_python_and_flags(error, python, command, settings):
    assert (str(error), error.render(as_argument)) == (python, python)
    assert error.render(as_flag) == command
    assert error.settings == settings


@pytest.mark.parametrize("error", [error for error, *_ in MESSAGES])
def test_a_message_survives_the_way_to_another_process(error):
    copy = pickle.loads(pickle.dumps(error.about("model")))
    assert type(copy) is type(error)
    assert copy.render(as_flag) == error.render(as_flag)
    assert copy.settings == error.settings
    assert copy.settings[0] == "model"


def test_text_without_references_stays_as_it_is():
    assert str(UsageError("client {0} of {}: 100 %s {")) == "client {0} of {}: 100 %s {"
