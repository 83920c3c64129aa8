"""Pickles of arrays: Python's and NumPy's every way of writing them, and traps, of which none is sprung."""

import io
import os
import pickle
import struct
from typing import ClassVar

import numpy as np
import pytest

from fedshift.data.formats import load_pickle, read_pickle
from fedshift.utils.errors import UsageError

RANDOM = np.random.default_rng(0)
ARRAYS = {
    "uint8 images": RANDOM.integers(0, 256, (4, 3, 2), dtype=np.uint8),
    "by columns": np.asfortranarray(RANDOM.normal(size=(3, 4))),
    "float32": RANDOM.normal(size=5).astype(np.float32),
    "big endian": np.arange(4, dtype=">i4"),
    "bool": np.array([True, False]),
    "text": np.array(["mug", "projector"]),
    "bytes": np.array([b"ab", b"c"]),
    "empty": np.zeros((0, 28, 28), np.uint8),
    "of no dimension": np.array(7),
    "every second": np.arange(10)[::2],
}


def equal(left, right):
    if isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right)
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in right)
    if isinstance(right, list | tuple):
        return type(left) is type(right) and all(equal(*pair) for pair in zip(left, right, strict=True))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_plain_values_are_read_in_every_protocol(tmp_path, protocol):
    value = {
        "arrays": list(ARRAYS.values()),
        "pair": (ARRAYS["uint8 images"], [3, 1]),
        "scalars": [np.float32(1.5), np.int64(-3), True, None, 2.5, 1 + 2j, "ü", b"\xff\x00", bytearray(b"ab")],
    }
    file = tmp_path / "data.pkl"
    file.write_bytes(pickle.dumps(value, protocol))
    read = read_pickle(file)
    assert equal(read, value)


def test_numpy_1_called_its_modules_otherwise():
    content = pickle.dumps(ARRAYS, 2)
    older = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert older != content
    assert equal(load_pickle(io.BytesIO(older), "data"), ARRAYS)


class Python2(pickle._Pickler):
    """Writes text and bytes as Python 2 wrote its strings."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        value = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)

    dispatch[bytes] = dispatch[str] = save_string


def test_pickles_of_python_2_are_read_with_strings_as_text():
    file = io.BytesIO()
    Python2(file, 2).dump({b"data": ARRAYS["uint8 images"], b"labels": [3, 1], b"filenames": [b"caf\xe9.png"]})
    content = file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    read = load_pickle(io.BytesIO(content), "data_batch_1")
    assert equal(read, {"data": ARRAYS["uint8 images"], "labels": [3, 1], "filenames": ["café.png"]})


def test_an_array_of_objects_is_read_where_they_are_plain():
    words = np.array(["a", None, 3], dtype=object)
    read = load_pickle(io.BytesIO(pickle.dumps(words)), "data")
    assert read.dtype == object
    assert read.tolist() == ["a", None, 3]


class Calls:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def ran(path):
    path.touch()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "around",
    [
        lambda trap: trap,
        lambda trap: (np.zeros(3), trap),
        lambda trap: {"data": [[trap]]},
        lambda trap: np.array([trap], dtype=object),
        lambda trap: Calls(list, (trap,)),
    ],
    ids=["bare", "beside an array", "deep", "in an array", "as an argument"],
)
def test_no_function_is_ever_called(tmp_path, protocol, around):
    file, trace = tmp_path / "train_part0.pkl", tmp_path / "ran"
    file.write_bytes(pickle.dumps(around(Calls(os.system, f"touch {trace}")), protocol))
    with pytest.raises(UsageError) as refused:
        read_pickle(file)
    assert str(refused.value).startswith(f"{file} calls for {os.system.__module__}.system, which no array needs")
    assert not trace.exists()


CALLED = """
builtins:eval __builtin__:eval builtins:getattr builtins:__import__ builtins:object os:system subprocess:Popen
copyreg:_reconstructor functools:partial torch.storage:_load_from_bytes numpy:load numpy:fromfile numpy:memmap
numpy.testing:rundocs numpy.testing._private.utils:runstring numpy.f2py:compile numpy.f2py.diagnose:run_command
numpy.core.multiarray:fromfile numpy.core.multiarray:_reconstruct.__globals__ numpy.ma.core:_mareconstruct
numpy.ctypeslib:load_library _codecs:lookup
"""


@pytest.mark.parametrize("called", CALLED.split())
def test_names_outside_the_list_are_refused_however_they_are_called_for(called):
    module, _, name = called.partition(":")
    for content in (
        f"c{module}\n{name}\n.".encode(),  # GLOBAL, called by nobody
        f"(S'echo'\ni{module}\n{name}\n.".encode(),  # INST, at once with its arguments
        b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93.",
    ):
        with pytest.raises(UsageError) as refused:
            load_pickle(io.BytesIO(content), "test.pkl")
        assert f"test.pkl calls for {module}.{name}, which no array needs and which may run code" in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x_train,y_train",
        b"cnumpy\nndarray\n.",  # the class of arrays, as a value
        b"cnumpy\nndarray\n)\x81.",  # an array never filled
        b"cnumpy\ndtype\n(S'O8\\x00'\ntR.",
        b"cnumpy\ndtype\n(S'V8'\ntR.",
        b"c_codecs\nencode\n(S'a'\nS'zlib_codec'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(c__builtin__\ndict\n(I0\ntS'b'\ntR.",
        b"P7\n.",  # a persistent identifier
        b"\x82\x01.",  # an extension's code
        b"c__builtin__\nset\n)R.",
        b"(lp0\ng0\na.",  # a list in itself
        pickle.dumps(np.zeros(2, dtype=[("a", "i4")])),
        pickle.dumps(np.datetime64("2020-01-01")),
    ],
)
def test_what_is_no_array_is_refused_by_name(content):
    with pytest.raises(UsageError, match=r"^data\.pkl "):
        load_pickle(io.BytesIO(content), "data.pkl")


def test_numbers_that_do_not_fill_their_shape_are_refused():
    content = pickle.dumps(np.zeros((3, 5), np.uint8), 2)
    with pytest.raises(UsageError, match="cannot be read as a pickle of arrays"):
        load_pickle(io.BytesIO(content.replace(b"K\x03K\x05", b"K\x03K\x06")), "data.pkl")


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_cut_anywhere_is_refused(protocol):
    content = pickle.dumps((np.arange(6, dtype=np.uint8), [1, 2]), protocol)
    for end in range(len(content)):
        with pytest.raises(UsageError, match="cut short, damaged or of another kind"):
            load_pickle(io.BytesIO(content[:end]), "data.pkl")


def test_a_pickle_cannot_change_how_the_next_is_read():
    changed = b"cnumpy.core.multiarray\n_reconstruct\n(N(dS'__defaults__'\n(I1\ntstb."
    with pytest.raises(UsageError):
        load_pickle(io.BytesIO(changed), "data.pkl")
    assert equal(load_pickle(io.BytesIO(pickle.dumps(ARRAYS)), "data.pkl"), ARRAYS)
