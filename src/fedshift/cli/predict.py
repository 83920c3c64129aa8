"""The command ``fedshift predict``: an exported model's predictions for files."""

from __future__ import annotations

from pathlib import Path

from ..console.printing import Console
from ..console.terminal import print_line, show_loading


def predict(model: Path, *files: Path, out: Path, masks: Path | None = None) -> int:
    """Predict files with an exported model: masks on the grid of each image, and a table of all files.

    NIfTI files get NIfTI masks with their shape and affine, and PNG files get PNG masks. The table cases.csv has a row
    for each file. A file that cannot be read has a row with the reason, and the exit status is then 1.

    Args:
        model: Directory that `fedshift export` wrote.
        files: Images or directories of images; for a model of volumes, also folders of DICOM slices, one folder per
            image; for a model of tables, tables (.csv, .tsv, .parquet) with its columns.
        out: Directory to write, new or empty.
        masks: Directory of true masks with the names of the images, or 21_manual1 beside 21_training and so on; the
            table then has the mask, the Dice and the surface distances of each image.

    """
    from ..export.loading import load
    from ..export.prediction import predict_files, summarize

    console = Console()
    with show_loading(console) as progress:
        found = predict_files(load(model), files, out, masks=masks, progress=progress)
    for refused in found.failed:
        print_line(console, f"refused: {refused}")
    print_line(console, summarize(found))
    return 1 if found.failed else 0
