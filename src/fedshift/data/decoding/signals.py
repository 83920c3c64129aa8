"""Recordings of signals in files: WFDB (``.hea`` with ``.dat``) by wfdb, EDF and BDF by edfio (extra ``signals``).

A recording is ``[C, L]``: leads (channels) in a given order of their names, which do not distinguish capitals and
spaces, at L times. Voltages become millivolts; other units stay. Headers are checked before values are read: a record
has one rate, no segments and no gaps, its files are in its own folder and of the stated length, and their size is
bounded (:data:`~.dicom.MOST_BYTES`). Values have the checksums of a WFDB header, unless these are 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.files import require_regular
from ...utils.words import join_some
from .dicom import check_bytes, load_library
from .images import Unreadable, explain_unreadable

WFDB, EDF, BDF = ".hea", ".edf", ".bdf"
SIGNALS = (WFDB, EDF, BDF)
"""Suffixes of files that this module reads."""
VALUES = frozenset({".dat", ".mat", ".atr", ".qrs", ".xyz"})
"""Suffixes of files that belong to a WFDB header."""
UNCALIBRATED = "uncalibrated"
"""Unit of leads whose WFDB header gives no gain, or a gain of 0: nobody knows how much one of their numbers is."""
_GAIN = re.compile(r"-?[\d.]*[1-9]")  # not 0
_VOLTS = re.compile(r"(n|nano|u|micro|mc|\?|[^\x00-\x7f]+|m|milli|)\s?v(?:olts?|ol?)?\.?", re.IGNORECASE)
"""Spellings of voltages; no unit but the microvolt has a sign beyond ASCII, whose bytes differ between encodings."""
_MILLIVOLTS = {"n": 1e-6, "nano": 1e-6, "m": 1.0, "milli": 1.0, "": 1e3}
"""Millivolts in a unit, by its prefix; every other prefix is a spelling of micro."""
_MICRO = 1e-3
_ANNOTATIONS = {b"EDF Annotations", b"BDF Annotations"}


@dataclass(frozen=True, kw_only=True)
class SignalHeader:
    """Facts from a recording's header.

    Attributes:
        leads: Names of the leads in the file's order, in the form of :func:`name_lead`.
        units: Unit of each lead; ``mv`` for all voltages.
        scales: Factor of each lead's values, which makes voltages millivolts.
        rate: Samples in a second.
        length: Samples of each lead.

    """

    leads: tuple[str, ...]
    units: tuple[str, ...]
    scales: tuple[float, ...]
    rate: float
    length: int

    @property
    def by_lead(self) -> Mapping[str, str]:
        """The unit of each lead."""
        return dict(zip(self.leads, self.units, strict=True))


def name_lead(name: object) -> str:
    """Return the name of a lead without capitals and outer spaces, for matching leads of different files."""
    return " ".join(str(name).split()).casefold()


def read_signal_header(file: Path) -> SignalHeader:
    """Read the header of ``file``; raise :class:`Unreadable` if the recording cannot be used."""
    read = _read_wfdb_header if file.suffix.lower() == WFDB else _read_edf_header
    with explain_unreadable(file, _describe_kind(file)):
        found = read(file)
    twice = [lead for lead in found.leads if found.leads.count(lead) > 1 or not lead]
    if twice:
        raise Unreadable(f"has two leads called {twice[0]!r}, or leads without names: name each by itself")
    return found


def decode_signal(
    file: Path, leads: Sequence[str], units: Sequence[str] = (), rate: float = 0.0
) -> NDArray[np.float32]:
    """Return the values of ``leads`` in ``file``, ``[C, L]``.

    Raises :class:`Unreadable` if they cannot be used, or do not have these ``units`` or this ``rate`` (empty, 0: any).
    """
    header = read_signal_header(file)
    lacking = [lead for lead in leads if lead not in header.leads]
    if lacking:
        raise Unreadable(f"lacks the lead {lacking[0]!r} (it has {join_some(header.leads)})")
    for lead, unit in zip(leads, units, strict=False):
        if header.by_lead[lead] != unit:
            raise Unreadable(f"has the lead {lead!r} in {header.by_lead[lead] or 'no unit'}, not {unit or 'no unit'}")
    if rate not in (0, header.rate):
        raise Unreadable(f"has {header.rate:g} samples a second, not {rate:g}")
    with explain_unreadable(file, _describe_kind(file)):
        if file.suffix.lower() == WFDB:
            record = load_library("wfdb", file, "signals").rdrecord(str(file.with_suffix("")), physical=False)
            _check_sums(record)
            values = record.dac().T
        else:
            values = np.stack([signal.data for signal in _open_edf(file).signals])
    order = [header.leads.index(lead) for lead in leads]
    made: NDArray[np.float32] = (values * np.array(header.scales)[:, None])[order].astype(np.float32)
    if count := made.size - int(np.isfinite(made).sum()):
        raise Unreadable(f"has {count} values that are missing or infinite: cut gaps out, or fill them in")
    return made


def list_files(file: Path) -> list[Path]:
    """Return a WFDB header, and the files that it names for its signals."""
    lines = (line.split() for line in _read_lines(file)[1:])
    return [file, *(file.parent / name for name in dict.fromkeys(line[0] for line in lines))]


def _read_lines(header: Path) -> list[str]:
    """Return the lines of a WFDB header, its record's before its signals', without comments."""
    lines = _decode_text(header.read_bytes()).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _read_wfdb_header(file: Path) -> SignalHeader:
    require_regular(file)
    header = load_library("wfdb", file, "signals").rdheader(str(file.with_suffix("")))
    if getattr(header, "n_seg", None):
        raise Unreadable("is a record of several segments: write them to one, or to a record each")
    if not header.n_sig or not header.sig_len or not header.fs:
        raise Unreadable("does not give the number of leads, their length and rate: complete its header")
    if any(frame != 1 for frame in header.samps_per_frame or ()):
        raise Unreadable("has leads of several rates: resample them to one")
    for name in dict.fromkeys(header.file_name or ()):
        values = file.parent / str(name)
        if Path(str(name)).name != name or not values.is_file():
            raise Unreadable(f"has its values in {name}, which is not a file in its folder: put both together")
        require_regular(values)
    check_bytes(8 * header.n_sig * header.sig_len, f"{header.n_sig} leads of {header.sig_len} samples")
    lines = [line.split() for line in _read_lines(file)[1:]]
    columns = [(line[2] if len(line) > 2 else "").partition("/") for line in lines]
    units, scales = _convert_units(unit or "mV" for _, _, unit in columns)  # wfdb drops what is not ASCII
    units = tuple(unit if _GAIN.match(gain) else UNCALIBRATED for (gain, *_), unit in zip(columns, units, strict=True))
    leads = tuple(name_lead(name or "") for name in header.sig_name)
    return SignalHeader(leads=leads, units=units, scales=scales, rate=float(header.fs), length=int(header.sig_len))


def _check_sums(record: Any) -> None:
    """Raise :class:`Unreadable` if a lead's numbers do not have the sum in the header; 0: none was written."""
    for name, sum_, found in zip(record.sig_name, record.checksum or (), record.calc_checksum(), strict=False):
        if sum_ and (int(sum_) - int(found)) % 2**16:
            raise Unreadable(
                f"has the checksum {sum_} of lead {name_lead(name)!r} in its header, and its values have {found}: they "
                "were changed or damaged. Copy the record again, or set the checksum in the header to 0"
            )


def _open_edf(file: Path) -> Any:
    require_regular(file)
    check_bytes(4 * file.stat().st_size, "values in its length")
    _check_length(file)
    edfio = load_library("edfio", file, "signals")
    return edfio.read_bdf(file) if file.suffix.lower() == BDF else edfio.read_edf(file, lazy_load_data=True)


def _read_head(file: Path) -> tuple[bytes, bytes, int]:
    """Return the fixed and the leads' part of an EDF header, and the number of leads (Kemp et al. 1992)."""
    with file.open("rb") as stream:
        fixed = stream.read(256)
        leads = int(fixed[252:] or 0)
        part = stream.read(256 * leads)
    if len(part) != 256 * leads or not leads:
        raise EOFError
    return fixed, part, leads


def _check_length(file: Path) -> None:
    """Raise :class:`Unreadable` if the file has another length than its header gives."""
    fixed, part, leads = _read_head(file)
    records, head = int(fixed[236:244]), int(fixed[184:192])
    values = sum(int(part[at : at + 8]) for at in range(216 * leads, 224 * leads, 8))
    wanted = head + records * values * (3 if file.suffix.lower() == BDF else 2)
    if records < 1 or file.stat().st_size != wanted:
        raise Unreadable(
            f"has {file.stat().st_size} bytes, and {wanted} by its header, which gives {records} data records: "
            "it was cut short or not closed; copy it again, or correct its header"
        )


def _read_edf_header(file: Path) -> SignalHeader:
    opened = _open_edf(file)
    _, part, count = _read_head(file)
    labels = [part[at : at + 16].strip() for at in range(0, 16 * count, 16)]
    written = [_decode_text(part[at : at + 8]) for at in range(96 * count, 104 * count, 8)]  # edfio keeps only ASCII
    dimensions = [text for text, label in zip(written, labels, strict=True) if label not in _ANNOTATIONS]
    signals = opened.signals
    if not signals:
        raise Unreadable("has no signals, only annotations")
    if not opened.is_continuous:
        raise Unreadable("has gaps (EDF+D): write each part to its own file")
    for signal in signals:
        ranges = (signal.digital_range, signal.physical_range)
        if any(limits.min == limits.max for limits in ranges):
            digital, physical = (f"{limits.min:g} to {limits.max:g}" for limits in ranges)
            raise Unreadable(
                f"gives lead {name_lead(signal.label)!r} the digital range {digital} and the physical one {physical}: "
                "correct these"
            )
    rates = {signal.sampling_frequency for signal in signals}
    if len(rates) > 1:
        each = join_some(f"{rate:g}" for rate in sorted(rates))
        raise Unreadable(f"has leads of several rates ({each} Hz): resample them to one")
    units, scales = _convert_units(dimensions)
    length = int(opened.num_data_records * signals[0].samples_per_data_record)
    leads = tuple(name_lead(signal.label) for signal in signals)
    return SignalHeader(leads=leads, units=units, scales=scales, rate=float(rates.pop()), length=length)


def _convert_units(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the unit of each lead, and the factor for its values: voltages become millivolts."""
    units, scales = [], []
    for name in map(name_lead, names):
        volts = _VOLTS.fullmatch(name)
        units.append("mv" if volts else name)
        scales.append(_MILLIVOLTS.get(volts[1], _MICRO) if volts else 1.0)
    return tuple(units), tuple(scales)


def _decode_text(content: bytes) -> str:
    """Return text in UTF-8, or else in Latin-1, as older devices write it."""
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        return content.decode("latin-1").strip()


def _describe_kind(file: Path) -> str:
    return {WFDB: "a WFDB record", EDF: "an EDF file", BDF: "a BDF file"}[file.suffix.lower()]
