"""Recordings in WFDB and EDF files: their values by lead, and which are refused."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedshift.config.spec import DataSpec
from fedshift.data.assembly import read_folder
from fedshift.data.decoding.images import Unreadable
from fedshift.data.decoding.signals import decode_signal, read_signal_header
from fedshift.data.preparation import Preparation
from fedshift.flower.site.data import load_local
from fedshift.utils.errors import UsageError

RATE, LENGTH = 50, 100


def draw(key):
    """Two leads of one recording in millivolts, II before V1, ``[L, C]``."""
    return np.random.default_rng(key).normal(size=(LENGTH, 2)).round(3)


def write_wfdb(folder, stem, values, *, names=("II", "V1"), units=("mV", "mV"), rate=RATE):
    wfdb = pytest.importorskip("wfdb")
    folder.mkdir(parents=True, exist_ok=True)
    wfdb.wrsamp(
        stem, fs=rate, units=list(units), sig_name=list(names), p_signal=values, fmt=["32", "32"],
        write_dir=str(folder),
    )  # fmt: skip


def write_edf(folder, stem, values, *, names=("v1", " ii"), unit="uV", rates=(RATE, RATE), kind="Edf"):
    """Write V1 before II, in microvolts."""
    edfio = pytest.importorskip("edfio")
    folder.mkdir(parents=True, exist_ok=True)
    signals = [
        getattr(edfio, f"{kind}Signal")(1000 * np.repeat(x, rate // RATE), rate, label=name, physical_dimension=unit)
        for x, name, rate in zip(values.T[::-1], names, rates, strict=True)
    ]
    getattr(edfio, kind)(signals).write(folder / f"{stem}.{kind.lower()}")


@pytest.fixture
def root(tmp_path):
    for client, write in (("north", write_wfdb), ("south", write_edf)):
        for number in range(8):
            write(tmp_path / "ecg" / client / ("af", "sinus")[number % 2], f"sub-{number // 2}_{number}", draw(number))
    return tmp_path / "ecg"


def test_leads_are_matched_by_name_and_voltages_in_one_unit(root):
    data = read_folder(root).check()
    assert data.class_names == ("af", "sinus")
    assert "leads in this order: ii, v1; 50 Hz, 100 samples, in mV" in data.notices
    assert not any("left out" in notice for notice in data.notices)  # the files with values
    for client in data.clients:
        assert client.train.shape == (2, LENGTH)
        assert not set(client.train.group.tolist()) & set(client.test.group.tolist())
        for row, x, y in zip(client.train.rows.tolist(), client.train.inputs(slice(None)), client.train.y, strict=True):
            number = int(client.files[row].rpartition("_")[2].partition(".")[0])
            np.testing.assert_allclose(x, draw(number).T, atol=2e-4)  # 16 bits of EDF
            assert y == number % 2
    kept = data.describe_client(data.clients[0]).preparation
    assert Preparation.from_json(kept.to_json()) == kept
    file = root / "south" / data.clients[1].files[0].partition("/")[2]
    assert torch.equal(kept.store(str(file))[0][0], data.clients[1].train.store.read(torch.tensor([0]))[0])
    again = read_folder(root / "north", schema=data.schema)
    assert [client.name for client in again.clients] == ["north"]
    kpa = replace(kept, decoding=replace(kept.decoding, units=("mv", "kpa")))
    with pytest.raises(UsageError, match="has the lead 'v1' in mv, and ecg in kpa: convert both to one unit"):
        read_folder(root / "north", schema=replace(data.schema, preparation=kpa))
    with pytest.raises(UsageError, match="has the lead 'v1' in mv, not kpa: give a file that the model takes"):
        kpa.store(str(file))
    other = replace(kept, decoding=replace(kept.decoding, leads=("i", "v1")))
    with pytest.raises(UsageError, match="has the leads ii, v1 at 50 Hz, and ecg i, v1 at 50 Hz"):
        read_folder(root / "north", schema=replace(data.schema, preparation=other))
    with pytest.raises(UsageError, match="holds recordings, whose leads sites do not compare"):
        load_local(str(root / "north"), None, DataSpec(), root.parent)


def spoil(write, **changes):
    return lambda place: write(place, "sub-0_0", changes.pop("values", draw(0)), **changes)


def cut(place):
    (place / "sub-0_0.dat").write_bytes(b"short")


def move_values(place):
    (place / "sub-0_0.dat").rename(place / "other.dat")


def two_rates(place):
    (place / "sub-0_0.hea").unlink()
    write_edf(place, "sub-0_0", draw(0), rates=(RATE, 2 * RATE))


def edit_edf(change):
    """Return a function that replaces a recording by an EDF file whose bytes were changed."""

    def spoil(place):
        (place / "sub-0_0.hea").unlink()
        write_edf(place, "sub-0_0", draw(0))
        content = bytearray((place / "sub-0_0.edf").read_bytes())
        (place / "sub-0_0.edf").write_bytes(change(content) or content)

    return spoil


def narrow(content):
    """Make the digital range of the first of two leads a single number."""
    at = 256 + 2 * (16 + 80 + 8 + 8 + 8)
    content[at : at + 8] = content[at + 16 : at + 24]


def lose_gain(place):
    header = place / "sub-0_0.hea"
    header.write_text(re.sub(r"\S+/mV", "0/mV", header.read_text()))


REFUSED = {
    "another rate": (spoil(write_wfdb, rate=40), "at 50 Hz, and .* at 40 Hz: give the same leads"),
    "another length": (spoil(write_wfdb, values=draw(0)[:60]), r"has 60 samples, .* has 100: cut all to one length"),
    "another lead": (spoil(write_wfdb, names=("II", "V2")), r"has the leads .* ii, v2 at .* \(only one has v1, v2\)"),
    "another unit": (spoil(write_wfdb, units=("mmHg", "mV")), "has the lead 'ii' in mv, and .* in mmhg: convert both"),
    "two of a name": (spoil(write_wfdb, names=("II", "ii")), "has two leads called 'ii'"),
    "values elsewhere": (move_values, r"has its values in sub-0_0\.dat, which is not a file in its folder"),
    "two rates": (two_rates, r"has leads of several rates \(50, 100 Hz\)"),
    "cut short": (edit_edf(lambda content: content[:-10]), "has 1158 bytes, and 1168 by its header"),
    "cut in its header": (edit_edf(lambda content: content[:300]), "is cut short"),
    "a range of one number": (edit_edf(narrow), "gives lead 'v1' the digital range 32767 to 32767 and the physical"),
    "no gain": (lose_gain, "has the lead 'ii' in mv, and .* in uncalibrated: convert both"),
    "no recording": (lambda place: (place / "sub-0_0.hea").write_text("hello"), "is not a WFDB record that can be"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_recordings_that_differ_or_are_damaged_are_refused_by_file(root, fault):
    change, message = REFUSED[fault]
    change(root / "north" / "af")
    with pytest.raises(UsageError, match=message) as refused:
        read_folder(root)
    assert "sub-0_0" in str(refused.value)


def test_gaps_and_values_that_are_cut_off_are_refused_when_they_are_read(root):
    values = draw(0)
    values[3:5, 1] = np.nan
    write_wfdb(root / "north" / "af", "sub-0_0", values)
    with pytest.raises(Unreadable, match="has 2 values that are missing or infinite: cut gaps out"):
        decode_signal(root / "north" / "af" / "sub-0_0.hea", ("ii", "v1"))
    with pytest.raises(UsageError, match=r"1 of 16 files cannot be read: .*sub-0_0\.hea: has 2 values that are miss"):
        read_folder(root)
    cut(root / "north" / "af")
    with pytest.raises(UsageError, match=r"sub-0_0\.hea: is not a WFDB record that can be read"):
        read_folder(root)


def test_values_that_do_not_fit_the_checksums_of_their_header_are_refused(root):
    place = root / "north" / "af"
    header = place / "sub-0_0.hea"
    header.write_text(header.read_text().replace("sub-0_0.dat", "sub-1_2.dat"))
    with pytest.raises(Unreadable, match=r"has the checksum \d+ of lead 'ii' in its header, and its values have \d+"):
        decode_signal(header, ("ii", "v1"))
    lines = [line.split() for line in header.read_text().splitlines()]
    header.write_text("\n".join(" ".join([*line[:6], "0", *line[7:]]) for line in lines))  # no checksum
    assert decode_signal(header, ("ii",)).shape == (1, LENGTH)


def test_bdf_files_are_read_as_edf_files_are(root):
    place = root / "south" / "af"
    write_edf(place, "sub-0_0", draw(0), kind="Bdf")
    np.testing.assert_allclose(decode_signal(place / "sub-0_0.bdf", ("ii", "v1")), draw(0).T, atol=1e-6)
    assert read_signal_header(place / "sub-0_0.bdf") == read_signal_header(place / "sub-0_0.edf")


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    for client in "ab":
        (tmp_path / client / "af").mkdir(parents=True)
        (tmp_path / client / "af" / "1.hea").write_text("1 1 50 100\n1.dat 16 200 16 0 0 0 0 II\n")
    monkeypatch.setitem(sys.modules, "wfdb", None)
    with pytest.raises(
        UsageError, match=r"1\.hea needs the package wfdb to be read: pip install 'fedshift\[signals\]'"
    ):
        read_folder(tmp_path)
    with pytest.raises(UsageError, match="needs the package wfdb"):
        read_signal_header(tmp_path / "a" / "af" / "1.hea")


VOLTAGES = {
    b"uV": 1e-3, b"\xb5V": 1e-3, "\u00b5V".encode(): 1e-3, "\u03bcV".encode(): 1e-3, b"\xe6V": 1e-3, b"microV": 1e-3,
    b"UV": 1e-3, b"?V": 1e-3, b"uVolt": 1e-3, b"mcV": 1e-3, b"mV": 1, b"millivol": 1, b"microvol": 1e-3,
    b"V": 1e3, b"nV": 1e-6, b"mmHg": None, b"\xb0C": None,
}  # fmt: skip
"""Spellings of units in files, and the millivolts of those that are voltages."""


@pytest.mark.parametrize("unit", VOLTAGES)
def test_every_spelling_of_a_voltage_becomes_millivolts(tmp_path, unit):
    values, factor = draw(0), VOLTAGES[unit]
    write_edf(tmp_path, "e", values, unit="uV")
    write_wfdb(tmp_path, "w", values * 1000, names=("ii", "v1"), units=("uV", "uV"))
    edf, header = tmp_path / "e.edf", tmp_path / "w.hea"
    edf.write_bytes(edf.read_bytes().replace(b"uV      ", unit.ljust(8)))
    header.write_bytes(header.read_bytes().replace(b"/uV", b"/" + unit))
    wanted = values.T * 1000 * (factor or 1)
    for file in (edf, header):
        assert (read_signal_header(file).by_lead["ii"] == "mv") == (factor is not None)
        np.testing.assert_allclose(decode_signal(file, ("ii", "v1")), wanted, rtol=1e-3, atol=2e-4 * wanted.max())
    assert read_signal_header(edf).units == read_signal_header(header).units
