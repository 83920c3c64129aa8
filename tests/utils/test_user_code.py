"""Code of users: the place of a function, and of the error that arose in it."""

from functools import partial

import pytest
from torch import nn

from fedshift import fedbn
from fedshift.utils.user_code import (
    describe_error,
    describe_function,
    find_import_path,
    identify_function,
    locate_error,
)


def fail():
    return nn.Linear(2, 3)(None)  # raises inside torch, called from here


LINE = fail.__code__.co_firstlineno + 1


def test_an_error_is_located_in_the_innermost_code_that_is_no_librarys():
    with pytest.raises(TypeError) as raised:
        fail()
    assert locate_error(raised.value).endswith(f"test_user_code.py, line {LINE}, in fail")
    assert describe_error(raised.value).endswith(f"; in {locate_error(raised.value)}")
    with pytest.raises(KeyError) as raised:
        {}["a"]
    assert describe_error(raised.value).startswith("KeyError: 'a'; in ")
    assert (locate_error(ValueError("no")), describe_error(ValueError("no"))) == ("", "no")


def test_functions_are_named_with_their_place_and_in_every_process_alike():
    assert describe_function(fail).startswith("fail (")
    assert describe_function(fail).endswith(f"test_user_code.py, line {LINE - 1})")
    assert describe_function(partial(fail, 3, a="b")) == f"partial({describe_function(fail)}, 3, a='b')"
    assert describe_function(len) == "len (builtins)"
    assert describe_function(nn.ReLU()).startswith("ReLU (")
    assert identify_function(partial(fail, a=2)) == f"{__name__}:fail(a=2)"


def test_only_what_another_process_can_import_has_an_import_path(monkeypatch):
    assert find_import_path(fedbn) == "fedshift.methods.fedbn:fedbn"
    assert find_import_path(nn.Linear) == "torch.nn.modules.linear:Linear"
    assert find_import_path(lambda: None) is None
    assert find_import_path(partial(fail)) is None
    monkeypatch.setattr(fail, "__module__", "__main__")
    assert find_import_path(fail) is None
