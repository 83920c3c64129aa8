"""The command ``fedshift predict``: an exported model's predictions for files."""

from __future__ import annotations

from pathlib import Path

from ..console.printing import Console
from ..console.terminal import print_line, show_loading

SHOWN = 5
"""Number of files with a warning that are named."""
UNNOTICED = "files with another unit or scale are not noticed"


def predict(model: Path, *files: Path, out: Path, masks: Path | None = None) -> int:
    """Predict files with an exported model: masks on the grid of each image, and a table of all files.

    NIfTI files get NIfTI masks with their shape and affine, and PNG files get PNG masks. The table cases.csv has a row
    for each file. A file that cannot be read has a row with the reason, and the exit status is then 1. A warning names
    columns or channels whose values are far from the training data's, as in another unit.

    Args:
        model: Directory that `fedshift export` wrote.
        files: Images or directories of images; for a model of volumes, also folders of DICOM slices, one folder per
            image; for a model of tables, tables (.csv, .tsv, .parquet) with its columns.
        out: Directory to write, new or empty.
        masks: Directory of true masks with the names of the images, or 21_manual1 beside 21_training and so on; the
            table then has the mask, the Dice and the surface distances of each image.

    """
    from ..data.preparation import find_numeric
    from ..export.loading import load
    from ..export.prediction import predict_files, summarize

    console, loaded = Console(), load(model)
    with show_loading(console) as progress:
        found = predict_files(loaded, files, out, masks=masks, progress=progress)
    for file, far in list(found.far.items())[:SHOWN]:
        print_line(console, f"warning: {file}: {far}")
    if len(found.far) > SHOWN:
        print_line(console, f"warning: {len(found.far) - SHOWN:,} more such files: {found.table} lists them")
    if loaded.inputs.usual is None and (not loaded.inputs.columns or find_numeric(loaded.inputs.columns).any()):
        print_line(console, f"note: {model} does not state the usual values of its training data: {UNNOTICED}")
    for refused in found.failed:
        print_line(console, f"refused: {refused}")
    print_line(console, summarize(found))
    return 1 if found.failed else 0
