"""Pickles of arrays: Python's and NumPy's every way of writing them, and traps, of which none is sprung."""

import io
import os
import pickle
import struct
from itertools import product
from typing import ClassVar

import numpy as np
import pytest

from fedshift.data.formats import load_pickle, read_pickle
from fedshift.utils.errors import UsageError

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (4, 3, 2), dtype=np.uint8)
ARRAYS = [
    IMAGES, np.asfortranarray(RANDOM.normal(size=(3, 4))), RANDOM.normal(size=5).astype(np.float32),
    np.arange(4, dtype=">i4"), np.array([True, False]), np.array(["mug", "projector"]), np.array([b"ab", b"c"]),
    np.zeros((0, 28, 28), np.uint8), np.array(7), np.arange(10)[::2], np.array(["a", None, 3], object),
]  # fmt: skip
SCALARS = [np.float32(1.5), np.int64(-3), True, None, 2.5, 1 + 2j, "ü", b"\xff\x00", bytearray(b"ab"), (IMAGES, [3, 1])]
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def load(content):
    return load_pickle(io.BytesIO(content), "data.pkl")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_and_plain_values_are_read_in_every_protocol(tmp_path, protocol):
    (tmp_path / "data.pkl").write_bytes(content := pickle.dumps({"arrays": ARRAYS, "scalars": SCALARS}, protocol))
    older = content.replace(b"numpy._core", b"numpy.core") if protocol < 4 else content  # the modules of NumPy 1
    for read in (read_pickle(tmp_path / "data.pkl"), load(older)):
        np.testing.assert_equal(read, {"arrays": ARRAYS, "scalars": SCALARS})
        assert [x.dtype for x in read["arrays"]] == [x.dtype for x in ARRAYS]
        assert list(map(type, read["scalars"])) == list(map(type, SCALARS))


class Python2(pickle._Pickler):
    """Writes text and bytes as Python 2 wrote its strings."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        value = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)

    dispatch[bytes] = dispatch[str] = save_string


def test_pickles_of_python_2_are_read_with_strings_as_text():
    Python2(file := io.BytesIO(), 2).dump({b"data": IMAGES, b"labels": [3, 1], b"filenames": [b"caf\xe9.png"]})
    read = load(file.getvalue().replace(b"numpy._core", b"numpy.core"))
    np.testing.assert_equal(read, {"data": IMAGES, "labels": [3, 1], "filenames": ["café.png"]})


class Calls:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_no_function_is_ever_called(tmp_path):
    trap = Calls(os.system, f"touch {tmp_path / 'ran'}")
    traps = [trap, (np.zeros(3), trap), {"data": [[trap]]}, np.array([trap], dtype=object), Calls(list, (trap,))]
    for protocol, value in product(PROTOCOLS, traps):
        with pytest.raises(UsageError, match=rf"^data\.pkl calls for {os.system.__module__}.system, which no array ne"):
            load(pickle.dumps(value, protocol))
    assert not (tmp_path / "ran").exists()


CALLED = """
builtins:eval __builtin__:eval builtins:getattr builtins:object os:system copyreg:_reconstructor functools:partial
torch.storage:_load_from_bytes numpy:load numpy.testing:rundocs numpy.core.multiarray:fromfile _codecs:lookup
numpy.core.multiarray:_reconstruct.__globals__ numpy.ma.core:_mareconstruct numpy.ctypeslib:load_library
"""


@pytest.mark.parametrize("called", CALLED.split())
def test_names_outside_the_list_are_refused_however_they_are_called_for(called):
    module, _, name = called.partition(":")
    for content in (
        f"c{module}\n{name}\n.".encode(),  # GLOBAL, called by nobody
        f"(S'echo'\ni{module}\n{name}\n.".encode(),  # INST, at once with its arguments
        b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93.",
    ):
        with pytest.raises(UsageError, match=f"calls for {module}.{name}, which no array needs and which may run code"):
            load(content)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"x_train,y_train", b"cnumpy\nndarray\n.", b"cnumpy\nndarray\n)\x81.",  # a class, and an array not filled
        b"cnumpy\ndtype\n(S'O8\\x00'\ntR.", b"cnumpy\ndtype\n(S'V8'\ntR.",
        b"c_codecs\nencode\n(S'a'\nS'zlib_codec'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(c__builtin__\ndict\n(I0\ntS'b'\ntR.",
        b"P7\n.", b"\x82\x01.", b"c__builtin__\nset\n)R.",  # a persistent identifier, an extension's code
        b"(lp0\ng0\na.",  # a list in itself
        pickle.dumps(np.zeros(2, dtype=[("a", "i4")])), pickle.dumps(np.datetime64("2020-01-01")),
        pickle.dumps(np.zeros((3, 5), np.uint8), 2).replace(b"K\x03K\x05", b"K\x03K\x06"),
    ],
)  # fmt: skip
def test_what_is_no_array_is_refused_by_name(content):
    with pytest.raises(UsageError, match=r"^data\.pkl "):
        load(content)


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_cut_anywhere_is_refused(protocol):
    content = pickle.dumps((np.arange(6, dtype=np.uint8), [1, 2]), protocol)
    for end in range(len(content)):
        with pytest.raises(UsageError, match="cut short, damaged or of another kind"):
            load(content[:end])


def test_a_pickle_cannot_change_how_the_next_is_read():
    with pytest.raises(UsageError):
        load(b"cnumpy.core.multiarray\n_reconstruct\n(N(dS'__defaults__'\n(I1\ntstb.")
    np.testing.assert_equal(load(pickle.dumps(ARRAYS)), ARRAYS)
