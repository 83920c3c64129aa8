"""Wrong input: one clear message, the right exit code, and nothing computed is lost."""

import ctypes
import io
import os
import re
import resource
import struct
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from PIL import Image

import fedshift
from fedshift.config.settings_file import format_settings, read_run_settings
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.run_directory import RunDirectory

CHECKPOINT = "trials/fedbn-seed0/checkpoint.safetensors"


def one_message(outcome, code):
    """The single line of an error, which shows no traceback."""
    assert outcome.code == code, outcome
    assert outcome.err.startswith("fedshift: ")
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.out + outcome.err
    return outcome.err.removeprefix("fedshift: ").strip()


def label_out_of_range(rewrite):
    rewrite("bob", y_test=np.full(12, 7))


def an_empty_client(rewrite):
    rewrite("bob", x_train=np.zeros((0, 8, 8, 3), np.uint8), y_train=np.zeros(0, np.int64))


def other_channels(rewrite):
    rewrite("bob", x_train=np.zeros((17, 8, 8, 4), np.uint8))


def text_in_place_of_arrays(rewrite):
    rewrite("bob").write_text("x,y")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (label_out_of_range, "client 'bob', test data: label 7 is out of range; labels must be 0..2 (correct"),
        (an_empty_client, "client 'bob' has no sample for train among its 12: its parts must give it some"),
        (other_channels, "samples of shape (17, 8, 8, 4); images are [N, H, W], [N, H, W, C] with 1 or 3 channels or"),
        (text_in_place_of_arrays, "bob.npz cannot be read as arrays of numbers, without pickle (File is not"),
    ],
)  # fmt: skip
def test_bad_data_is_one_message(cli, tiny_folder, rewrite, tmp_path, spoil, said):
    spoil(rewrite)
    assert said in one_message(cli("compare", "--data", tiny_folder, "--out", "out"), 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"lr": -1, "validation": 2}, ("lr", "validation")),
        ({"participation": 9}, ("participation",)),
        ({"target_metric": 90}, ("target_metric",)),
        ({"methods": "fedavg,fedavg"}, ("methods",)),
        ({"methods": "fedprox(mu=a)"}, ("methods",)),
        ({"methods": "fedprox(nu=1)"}, ("methods",)),
        ({"methods": ""}, ("methods",)),
        ({"methods": "nowhere:method"}, ("methods",)),
        ({"model": "torch.nn:Linear"}, ("model",)),
        ({"optimizer": "adamw(beta3=1)"}, ("optimizer",)),
        ({"optimizer": "adamw(beta1=2)"}, ("optimizer",)),
        ({"optimizer": "sgd(nesterov=True)"}, ("optimizer",)),
        ({"loss": "focal(gamma=-1)"}, ("loss",)),
        ({"loss": "focal(weights=(1.0, 2.0))"}, ("loss",)),
        ({"loss": "operator:add"}, ("loss",)),
        ({"engine": "identity"}, ("engine",)),
        ({"moments": "loaded,later"}, ("moments",)),
        ({"epochs": 1, "batches": 1}, ("epochs", "batches")),
        ({"data": "digit"}, ("data",)),
        ({"data": "digits", "target": "y"}, ("target",)),
        ({"data": "tiny", "batch_size": 1}, ("batch_size",)),
        ({"data": "tiny", "image_size": 3}, ("model",)),
        ({"data": "tiny", "select": "best"}, ("select",)),
        ({"data": "tiny", "samples": 20}, ("samples",)),
        ({"data": "tiny", "validation": 0.99}, ("validation",)),
        ({"data": "tiny", "out": "tiny"}, ("out",)),
        ({"data": "tiny", "newcomers": "*"}, ("newcomers",)),
    ],
)  # fmt: skip
def test_a_refusal_is_about_the_settings_whose_values_it_refuses(tiny_folder, monkeypatch, settings, about):
    """As in ``config/test_spec.py``, which refuses one value of every setting."""
    monkeypatch.chdir(tiny_folder.parent)
    given = {"methods": "fedavg,fedbn", "data": "digits"} | settings
    with pytest.raises(fedshift.UsageError) as refused:
        fedshift.compare(given.pop("methods"), **given)
    assert set(about) <= {*refused.value.settings}


@pytest.mark.parametrize(
    ("settings", "in_python", "on_the_command_line"),
    [
        ({"lr": -1}, "lr=-1: should be greater than or equal to 0", "--lr -1: should be greater than or equal to 0"),
        ({"data": "tiny", "select": "best"}, "hold some out (validation=0.1)", "hold some out (--validation 0.1)"),
        ({"methods": "fedbm"}, "method 'fedbm': did you mean 'fedbn'?", "method 'fedbm': did you mean 'fedbn'?"),
        ({"data": "digits", "target": "y"}, "target is for arrays, tables", "--target is for arrays, tables"),
        ({"data": "tiny", "out": "tiny"}, "new or empty (out)", "directory that is new or empty (--out)"),
    ],
)  # fmt: skip
def test_a_message_speaks_python_or_flags(cli, tiny_folder, settings, in_python, on_the_command_line):
    given = {"methods": "fedavg,fedbn", "data": "digits"} | settings
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    assert on_the_command_line in one_message(cli("compare", *words), 2)
    with pytest.raises(fedshift.UsageError) as refused:
        fedshift.compare(given.pop("methods"), **given)
    assert in_python in str(refused.value)


@pytest.mark.parametrize(("name", "value", "allowed"), [
    ("select", "bets", ("best", "last")),
    ("precision", "float8", ("float32", "bfloat16", "float16", "float64")),
    ("normalize", "whole", ("half", "imagenet", "unit", "client")),
    ("unseen", "none", ("skip", "average")),
])  # fmt: skip
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(cli, name, value, allowed):
    said = one_message(cli("compare", f"--{name}", value), 2)
    assert all(word in said for word in (name, value, *allowed))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run --out a --resume b", "no run to resume at b/config.toml"),
        ("run --resume tiny", "no run to resume at tiny/config.toml"),
        ("report tiny", "tiny holds no run: give a directory that `fedshift run`, `compare`, `sweep`, `advise` or"),
        ("report nowhere", "nowhere holds no run"),
        ("report tiny/ann.npz", "tiny/ann.npz holds no run"),
        ("inspect --method fedavg,fedbn", "inspect takes one method, not 'fedavg,fedbn'"),
        ("inspect --shape 3x28x28", "shape '3x28x28': write whole numbers with commas, for example 3,28,28"),
        ("inspect --shape 0,28,28", "numbers of 1 or more"),
        ("inspect --shape 28,28", "small-cnn takes images (C, H, W) of at least 4 x 4 pixels, not samples of shape"),
        ("inspect --model torch.nn:Linear", "the model cannot be made for samples of shape (3, 28, 28) and 10 classes"),
        ("list methds", 'Invalid value "methds"'),
        ("rnu", 'Unknown command "rnu". Did you mean "run"?'),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_message_and_exit_code_2(cli, tiny_folder, arguments, said):
    assert said in one_message(cli(*arguments.split()), 2)


def test_debug_shows_where_an_error_arose(cli):
    outcome = cli("run", "--method", "fedbm", "--debug")
    assert outcome.code == 2
    assert "Traceback" in outcome.err
    assert "unknown method 'fedbm'" in outcome.err


def test_an_error_of_a_plug_in_is_one_message_too(cli, tiny_folder, tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text("def method():\n    raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = one_message(cli("run", "--data", tiny_folder, "--method", "faulty:method"), 2)
    assert said == "method 'faulty.method': no luck; in faulty.py, line 2, in method; faulty.method takes no arguments"


def test_an_error_of_a_network_in_training_names_its_line(cli, tiny_folder, tmp_path, monkeypatch):
    (tmp_path / "later.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(192, classes))\n"
        "    def forward(self, x):\n"
        "        assert len(x) < 12\n"
        "        return super().forward(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("run", "--data", tiny_folder, "--model", "later:Net", "--method", "fedavg", "--rounds", 1)
    said = one_message(cli(*words), 1)
    why = "a user-defined function failed with AssertionError (later.py, line 6, in forward): correct it"
    assert said.startswith(why)
    assert "--debug shows how it was called" in said


def images_with_a_pipe(folder):
    write_images(folder)
    os.mkfifo(folder / "ann" / "cat" / "f.png")
    return "1 of 9 files cannot be read: {folder}/ann/cat/f.png: is a pipe, not a regular file; repair or remove them"


def masks_with_a_pipe(folder):
    write_images(folder, kinds=("images", "masks"), value=1)
    (folder / "ann" / "masks" / "0.png").unlink()
    os.mkfifo(folder / "ann" / "masks" / "0.png")
    return "1 of 8 files cannot be read: {folder}/ann/masks/0.png: is a pipe, not a regular file; repair or remove them"


def a_table_that_is_a_pipe(folder):
    os.mkfifo(folder / "ann.csv")
    return "{folder}/ann.csv cannot be read as a table (it is a pipe, not a regular file)"


def arrays_that_are_a_pipe(folder):
    os.mkfifo(folder / "ann.npz")
    return "{folder}/ann.npz cannot be read as arrays of numbers, without pickle (it is a pipe, not a regular file)"


def arrays_that_fill_memory(folder):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (3 * 2**30,)})
    with (
        ZipFile(folder / "ann.npz", "w", ZIP_DEFLATED) as packed,
        packed.open("x_train.npy", "w", force_zip64=True) as entry,
    ):
        entry.write(header.getvalue())
        for _ in range(3 * 2**4):
            entry.write(bytes(2**26))
    return "{folder}/ann.npz would unpack to 3.2 GB"


def arrays_that_declare_more_than_they_hold(folder):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12, 10)})
    with ZipFile(folder / "ann.npz", "w") as packed:
        packed.writestr("x_train.npy", header.getvalue() + bytes(80))
    return "array 'x_train' is declared as float64 of shape (1000000000000, 10), 80000000000000 bytes, but has 80"


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A user's module, whose functions write down that they were called."""
    (tmp_path / "ours.py").write_text(
        "from pathlib import Path\n"
        "def method():\n    Path('called').touch()\n    raise RuntimeError('no luck')\n"
        "model = loss = method\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "line", "kind", "name"),
    [
        ("run", 'method = "ours:method"', "method", "ours.method"),
        ("run", "method = \"fedbn(os:system(command='touch called'))\"", "method", "os.system"),
        ("run", 'model = "ours:model"', "model", "ours:model"),
        ("run", 'loss = "ours:loss"', "loss", "ours.loss"),
        ("run", 'augment = "ours:method"', "augmentation", "ours.method"),
        ("compare", 'methods = ["fedavg", "ours.method()"]', "method", "ours.method"),
        ("sweep", 'over = ["loss=ours:loss,focal"]', "loss", "ours.loss"),
    ],
)
def test_a_function_that_a_settings_file_names_is_not_called(cli, own_code, command, line, kind, name):
    Path("given.toml").write_text(f'{line}\nrounds = 1\ndata = "digits"\nsamples = 20\n')
    function = ":".join(re.split("[.:]", name))
    said = one_message(cli(command, "--config", "given.toml"), 2)
    refused = f"given.toml: {kind} {function!r} is a function of this machine that nobody allowed"
    assert said.endswith(f"{refused}: allow it (--code {function})")
    assert not Path("called").exists()


def test_a_function_that_is_allowed_or_typed_is_called(cli, own_code):
    Path("given.toml").write_text('method = "ours:method"\n')
    for words in (("--code", "ours:method"), ("--method", "ours:method")):
        assert "no luck" in one_message(cli("run", "--config", "given.toml", *words), 2)
        Path("called").unlink()
    assert "nobody allowed" in one_message(cli("run", "--config", "given.toml", "--code", "ours:model"), 2)


@pytest.fixture
def run_of_others(cli, own_code, tiny_folder, unpublished):
    """A run directory from elsewhere, whose settings name a function of this machine, and which fits its checksum."""
    assert cli("run", "--data", "tiny", "--rounds", 1, "--out", "run").code == 0
    elsewhere = own_code / "elsewhere"
    elsewhere.mkdir()
    kept = read_run_settings(Path("run"))
    with pytest.MonkeyPatch.context() as patched:
        Path("run/config.toml").unlink()
        patched.chdir(elsewhere)
        text = format_settings({**kept.values, "method": "ours:method"}, own_code / "run")
    Path("run/config.toml").write_text(text)
    return elsewhere


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--resume", "run"), ("adapt", "run", "--data", "tiny"), ("features", "run"),
        ("export", "run", "--out", "out"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_function_that_a_run_directory_names_is_not_called(cli, run_of_others, words):
    said = one_message(cli(*words), 2)
    assert said.endswith("method 'ours:method' is a function of this machine that nobody allowed: allow it "
                         "(--code ours:method)")  # fmt: skip
    assert said.startswith("run/config.toml: ")
    assert not Path("called").exists()
    assert str(run_of_others) not in sys.path  # where packages that a command looks for could lie
    assert "no luck" in one_message(cli(*words, "--code", "ours:method"), 2)
    assert Path("called").exists()
    sys.path.remove(str(run_of_others))


def test_a_function_that_a_sweeps_directory_names_is_not_called_for_its_report(cli, own_code):
    Path("run").mkdir()
    settings = {"over": ["lr=0.1,0.2"], "methods": "ours:method"}
    Path("run/config.toml").write_text(format_settings(settings, Path("run")))
    assert "nobody allowed: allow it (--code ours:method)" in one_message(cli("report", "run"), 2)
    assert not Path("called").exists()
    assert "no luck" in one_message(cli("report", "run", "--code", "ours:method"), 2)


def test_a_function_that_a_run_directory_names_is_called_in_python_only_where_it_is_allowed(run_of_others):
    with pytest.raises(fedshift.UsageError, match=r"nobody allowed: allow it \(code='ours:method'\)"):
        fedshift.read_run("run").model("ours")
    assert not Path("called").exists()
    assert fedshift.read_run("run", methods="fedbn").model("fedbn", client="ann").bn1
    for allowed in ({"code": "ours:method"}, {"methods": "fedavg, ours:method"}):
        with pytest.raises(fedshift.UsageError, match="no luck"):
            fedshift.read_run("run", **allowed).model("ours")
    sys.path.remove(str(run_of_others))


def test_a_settings_file_cannot_allow_its_own_functions(cli, own_code):
    Path("given.toml").write_text('method = "ours:method"\ncode = "ours:method"\n')
    assert "given.toml: unknown setting 'code'" in one_message(cli("run", "--config", "given.toml"), 2)


def write_images(folder, kinds=("cat", "dog"), value=0):
    for kind in kinds:
        (folder / "ann" / kind).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), value * number % 2).save(folder / "ann" / kind / f"{number}.png")


@pytest.mark.parametrize(
    "make",
    [
        images_with_a_pipe, masks_with_a_pipe, a_table_that_is_a_pipe, arrays_that_are_a_pipe,
        arrays_that_declare_more_than_they_hold, pytest.param(arrays_that_fill_memory, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_file_that_hangs_or_fills_memory_is_one_message(cli, tmp_path, make):
    folder = tmp_path / "found"
    folder.mkdir()
    said = make(folder).format(folder=folder)
    words = ("--target", "y") if make is a_table_that_is_a_pipe else ()
    assert said in one_message(cli("run", "--data", folder, *words), 2)


def test_images_that_are_pipes_can_be_left_out_too(cli, tmp_path):
    images_with_a_pipe(tmp_path / "found")
    outcome = cli("data", "check", tmp_path / "found", "--on-data-error", "warn")
    assert outcome.code == 0
    assert "1 of 9 files cannot be read, left out (ann/cat/f.png: is a pipe, not a regular file)" in " ".join(
        outcome.out.split()
    )


@pytest.fixture
def sealed(tmp_path_factory):
    """A folder that this user cannot write.

    The superuser gives up the right to write everywhere (CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, bits 1 and 2), but
    stays who it is: another user could not import what lies in the superuser's home.
    """
    folder = tmp_path_factory.mktemp("sealed")
    folder.chmod(0o555)
    if os.geteuid():
        yield folder
    else:
        libc, version_3 = ctypes.CDLL(None, use_errno=True), struct.pack("Ii", 0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable capabilities, twice 32 bits
        assert libc.capget(version_3, sets) == 0
        held, sets[0] = sets[0], sets[0] & ~0b110
        assert libc.capset(version_3, sets) == 0
        yield folder
        sets[0] = held
        assert libc.capset(version_3, sets) == 0
    folder.chmod(0o755)


@pytest.mark.parametrize("command", [
    "run --out", "compare --leave-out all --out", "sweep --over epochs=1,2 --out", "serve a.toml --insecure --out",
    "join a:1 --data digits --name pen --insecure --state", "data show digits --out", "diagnose digits --out",
    "adapt runs --data digits --save", "export runs --out", "features runs --out", "reproduce fedbn/table1 --out",
])  # fmt: skip
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(cli, sealed, command):
    said = one_message(cli(*command.split(), sealed / "new"), 2)
    assert said == f"cannot write {sealed}/new: {sealed} is not writable; make it so, or choose another directory"


def test_in_python_too_a_folder_that_cannot_be_written_is_refused_before_any_work(sealed):
    with pytest.raises(fedshift.UsageError, match="is not writable; make it so, or choose another directory"):
        fedshift.compare("fedbn", data="nowhere", out=sealed / "new")


def test_a_directory_in_use_and_one_occupied_are_refused(cli, unpublished, tiny_folder, tmp_path):
    assert cli("run", "--data", tiny_folder, "--rounds", 1, "--out", "out").code == 0
    said = one_message(cli("run", "--data", tiny_folder, "--out", "out"), 2)
    assert said == "out already holds a run: continue it (--resume out), or choose another directory (--out)"
    said = one_message(cli("run", "--resume", "out", "--out", "out"), 2)
    assert said == "--out out and --resume out: a resumed run stays in its directory; give one of them"
    held = RunDirectory(tmp_path / "out", resume=True)
    assert "out is in use by process " in one_message(cli("run", "--resume", "out"), 1)
    held.close()
    said = one_message(cli("run", "--resume", "out", "--lr", 0.5), 2)
    assert said.startswith("this run was begun with another optimizer: then 'SGD(lr=0.01")
    assert cli("run", "--resume", "out").code == 0


def test_a_damaged_checkpoint_is_one_message_and_exit_code_1(cli, unpublished, tiny_folder, tmp_path):
    assert cli("run", "--data", tiny_folder, "--rounds", 1, "--out", "out").code == 0
    checkpoint = tmp_path / "out" / CHECKPOINT
    content = checkpoint.read_bytes()
    for spoiled in (content[:-100], content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]):
        checkpoint.write_bytes(spoiled)
        said = one_message(cli("run", "--resume", "out", "--rounds", 2), 1)
        assert said.startswith(f"checkpoint out/{CHECKPOINT} is corrupt")
        assert said.endswith("from a copy, or remove its folder to begin this trial again from round 1")


def test_a_diverging_run_says_where_keeps_the_last_good_round_and_exits_with_1(cli, unpublished, tiny_folder, tmp_path):
    settings = ("--data", tiny_folder, "--method", "fedbn", "--batches", 1, "--batch-size", 16, "--lr", 1e8)
    outcome = cli("run", *settings, "--rounds", 9, "--out", "out")
    said = one_message(outcome, 1)
    assert said.startswith("training diverged: client 'ann', round 3, step 1 of 1: loss nan. Lower the learning rate")
    assert cli("run", *settings, "--rounds", 2, "--out", "before").code == 0
    kept, before = (load_checkpoint(tmp_path / run / CHECKPOINT) for run in ("out", "before"))
    assert kept[1] == before[1]
    assert all(tensor.equal(before[0][name]) for name, tensor in kept[0].items())
    assert all(tensor.isfinite().all() for tensor in kept[0].values())


def test_a_comparison_goes_on_without_the_method_that_diverged(cli, undrawn, tiny_folder):
    methods = "fedprox(mu=1e30),fedavg"
    outcome = cli(
        "compare", "--data", tiny_folder, "--methods", methods, "--rounds", 2, "--batch-size", 8, "--out", "out"
    )
    assert one_message(outcome, 1).startswith("training diverged: client 'ann', round 1, step ")
    assert "note: fedprox(mu=1e30), seed 0: training diverged" in outcome.out
    assert "fedavg seed 0 round 2/2" in outcome.out
    assert "Page: out/report.html" in outcome.out


# A full disk


def test_a_full_disk_keeps_what_was_saved_and_the_run_goes_on_later(
    cli, unpublished, tiny_folder, tmp_path, assert_same
):
    settings = ("run", "--data", tiny_folder, "--batch-size", 8)
    assert cli(*settings, "--rounds", 4, "--out", "whole").code == 0
    assert cli(*settings, "--rounds", 2, "--out", "full").code == 0
    checkpoint = tmp_path / "full" / CHECKPOINT
    before = checkpoint.read_bytes()
    room = len(before) - 1

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        outcome = cli("run", "--resume", "full", "--rounds", 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.code == 1
    assert outcome.err == (
        f"fedshift: cannot write full/{CHECKPOINT}: File too large. What was saved before is intact: free some space, "
        "then repeat the command (a run continues with --resume)\n"
    )
    assert checkpoint.read_bytes() == before
    assert not list(checkpoint.parent.glob("*.tmp"))
    assert cli("run", "--resume", "full", "--rounds", 4).code == 0
    assert_same(tmp_path / "whole", tmp_path / "full")
