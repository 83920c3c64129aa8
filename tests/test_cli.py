"""The program as a person meets it: clear messages and exit codes, Ctrl-C, a full disk, help."""

import contextlib
import resource
import signal
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import torch

from fedshift import __version__
from fedshift.checkpoint import load_checkpoint
from fedshift.engines import loop
from fedshift.experiment import read_study
from fedshift.rundir import RunDirectory

CHECKPOINT = "trials/fedbn-seed0/checkpoint.safetensors"


def one_message(outcome, code):
    """The single line of an error, which shows no traceback."""
    assert outcome.code == code, outcome
    assert outcome.err.startswith("fedshift: ")
    assert outcome.err.count("\n") == 1
    assert "Traceback" not in outcome.out + outcome.err
    return outcome.err.removeprefix("fedshift: ").strip()


# Help


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["compare", "-h"], ["--version"], ["list", "--help"]]
)
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys, contextlib\nfrom fedshift.cli import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'sklearn', 'scipy', 'numpy', 'jinja2'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Usage: fedshift" in done.stdout) or (__version__ in done.stdout)


def test_the_program_is_installed_and_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fedshift", "rnu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith('fedshift: Unknown command "rnu". Did you mean "run"?')


# A run


def test_a_run_prints_tables_and_leaves_a_report(cli, tiny_folder, tmp_path):
    outcome = cli("compare", "--data", tiny_folder, "--methods", "fedavg,fedbn", "--rounds", 2, "--out", "results")
    assert (outcome.code, outcome.err) == (0, "")
    first, *_ = outcome.out.splitlines()
    assert first == "results: fedavg, fedbn on tiny (3 clients, 76 training samples, 3 classes), 2 rounds, 1 seed"
    for said in ("fedavg seed 0 round 1/2: loss ", "fedbn seed 0 round 2/2: loss ", "macro", "worst client", "Page: "):
        assert said in outcome.out
    assert outcome.out.count("note: client 'cid': the last batch would hold one sample, over which") == 1
    for name in ("report.html", "tables/accuracy.csv", "tables/accuracy.tex", "config.toml", CHECKPOINT):
        assert (tmp_path / "results" / name).stat().st_size > 0


def test_a_report_is_made_again_from_the_records(cli, monkeypatch, tiny_folder):
    with monkeypatch.context() as patched:
        patched.setattr("fedshift.report.publish.publish", lambda *_: None)
        cli("run", "--data", tiny_folder, "--rounds", 1, "--out", "results")
    outcome = cli("report", "results")
    assert (outcome.code, outcome.err) == (0, "")
    assert "macro" in outcome.out
    assert "Page: results/report.html" in outcome.out


def test_without_a_name_runs_get_directories_of_their_own(cli, unpublished, tiny_folder, tmp_path):
    for _ in range(2):
        assert cli("run", "--data", tiny_folder, "--rounds", 1).code == 0
    found = sorted((tmp_path / "runs").iterdir())
    assert len(found) == 2
    assert all((run / CHECKPOINT).exists() for run in found)


def test_the_settings_that_a_run_writes_down_reproduce_it(cli, unpublished, tiny_folder, tmp_path, assert_same):
    asked = (
        "--data", tiny_folder, "--method", "fedbn+fedprox(mu=0.3)", "--rounds", 3, "--batch-size", 8, "--lr", "0.03",
        "--momentum", 0.5, "--keep-optimizer", "--schedule", "cosine(floor=0.1)", "--domains", "cid,ann",
        "--samples", 20, "--validation", 0.2, "--select", "best", "--participation", 0.5, "--first-seed", 3,
        "--evaluate-every", 2,
    )  # fmt: skip
    assert cli("run", *asked, "--out", "one").code == 0
    assert cli("run", "--config", "one/config.toml", "--out", "two").code == 0
    assert_same(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one/config.toml").read_text() == (tmp_path / "two/config.toml").read_text()
    assert tomllib.loads((tmp_path / "one/config.toml").read_text())["schedule"] == "cosine(floor=0.1)"


def test_the_number_of_threads_is_set_and_written_down(cli, unpublished, tiny_folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert cli("run", "--data", tiny_folder, "--rounds", 1, "--out", "as-it-is").code == 0
    assert asked == []
    assert cli("run", "--data", tiny_folder, "--rounds", 1, "--threads", 3, "--out", "three").code == 0
    assert asked == [3]
    assert tomllib.loads((tmp_path / "three/config.toml").read_text())["threads"] == 3


def test_a_method_and_a_model_of_ones_own_are_found_where_the_program_is_started(
    cli, unpublished, monkeypatch, tiny_folder, tmp_path
):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "beside_the_program.py").write_text(
        "from torch import nn\nfrom fedshift import fedavg\n"
        "def method(*, strength): return fedavg()\n"
        "def model(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))\n"
    )
    own = ("--method", "beside_the_program:method(strength=2)", "--model", "beside_the_program:model")
    outcome = cli("run", "--data", tiny_folder, *own, "--rounds", 1)
    assert (outcome.code, outcome.err) == (0, "")
    assert "fedavg seed 0 round 1/1" in outcome.out


# What goes wrong


def label_out_of_range(rewrite):
    rewrite("bob", y_test=np.full(12, 7))


def nan_pixels(rewrite):
    x = np.zeros((17, 8, 8, 3), np.float32)
    x[5, 2, 2, 1] = np.nan
    rewrite("bob", x_train=x)


def an_empty_client(rewrite):
    rewrite("bob", x_train=np.zeros((0, 8, 8, 3), np.uint8), y_train=np.zeros(0, np.int64))


def a_client_of_one_class(rewrite):
    rewrite("bob", y_train=np.ones(17, np.int64))


def other_channels(rewrite):
    rewrite("bob", x_train=np.zeros((17, 8, 8, 4), np.uint8))


def other_features(rewrite):
    rewrite("bob", x_train=np.zeros((17, 5)))


def text_in_place_of_arrays(rewrite):
    rewrite("bob").write_text("x,y")


def objects(rewrite):
    rewrite("bob", y_train=np.array([None] * 17))


def no_test_labels(rewrite):
    rewrite("bob", y_test=None)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            label_out_of_range,
            "client 'bob', test data: label 7 is out of range; labels must be 0..2 (correct the labels",
        ),
        (nan_pixels, "client 'bob', train data: sample 5 has NaN or infinite values; remove or impute them"),
        (an_empty_client, "client 'bob', train data: empty; every client needs at least one sample in each split"),
        (
            a_client_of_one_class,
            "client 'bob' has only class 1 in its 17 training samples: leave the client out, or allow",
        ),
        (
            other_channels,
            "samples of shape (17, 8, 8, 4); images are [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3",
        ),
        (other_features, "client 'bob', train data: samples of shape (5,) where others are images (C, H, W)"),
        (text_in_place_of_arrays, "bob.npz is no .npz file, or is cut short: write it again with numpy.savez"),
        (objects, "bob.npz cannot be read without pickle (Object arrays cannot be loaded when allow_pickle=False)"),
        (no_test_labels, "bob.npz has no array 'y_test' (it has x_train, y_train, x_test): name the arrays"),
    ],
)
def test_bad_data_is_one_message_and_exit_code_2(cli, tiny_folder, rewrite, tmp_path, spoil, said):
    spoil(rewrite)
    assert said in one_message(cli("run", "--data", tiny_folder, "--out", "out"), 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run --method fedbm", "unknown method 'fedbm': did you mean 'fedbn'? allowed are"),
        ("run --model small-cn", "unknown model 'small-cn': did you mean 'small-cnn'?"),
        ("run --lr -1", "--lr -1: should be greater than or equal to 0"),
        ("run --data tiny --batch-size 1", "batch_size=1, but batch normalization in this model has no variance"),
        ("run --data tiny --image-size 3", "model small-cnn takes images of at least 4 x 4 pixels"),
        ("run --data tiny --select best", "select='best' needs validation data, which the clients lack: hold some out"),
        ("compare --data tiny --methods fedavg,fedavg", "method 'fedavg' is given twice"),
        ("run --data tiny --domains ann,bbo", "unknown domain 'bbo': did you mean 'bob'? allowed are ann, bob, cid"),
        ("run --out a --resume b", "no run to resume at b/config.toml"),
        ("run --resume tiny", "no run to resume at tiny/config.toml"),
        ("run --data tiny --out tiny", "tiny holds other files: choose a directory that is new or empty"),
        ("report tiny", "tiny holds no run: give a directory that `fedshift run` or `compare` wrote"),
        ("report nowhere", "nowhere holds no run"),
        ("report tiny/ann.npz", "tiny/ann.npz holds no run"),
        ("inspect --method fedavg,fedbn", "inspect takes one method, not 'fedavg,fedbn'"),
        ("inspect --shape 3x28x28", "shape '3x28x28': write whole numbers with commas, for example 3,28,28"),
        ("inspect --shape 0,28,28", "numbers of 1 or more"),
        ("inspect --shape 28,28", "small-cnn takes images of at least 4 x 4 pixels, not samples of shape (28, 28)"),
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
    said = one_message(cli("run", "--data", tiny_folder, "--method", "faulty:method"), 1)
    assert said.startswith("unexpected RuntimeError: no luck. This is a defect, of fedshift or of a function of yours")


def test_a_directory_in_use_and_one_occupied_are_refused(cli, unpublished, tiny_folder, tmp_path):
    assert cli("run", "--data", tiny_folder, "--rounds", 1, "--out", "out").code == 0
    said = one_message(cli("run", "--data", tiny_folder, "--out", "out"), 2)
    assert said == "out already holds a run: go on with it (--resume out), or choose another directory (--out)"
    said = one_message(cli("run", "--resume", "out", "--out", "out"), 2)
    assert said == "--out out and --resume out: a resumed run stays in its directory; give one of them"
    held = RunDirectory(tmp_path / "out", resume=True)
    assert "out is in use by process " in one_message(cli("run", "--resume", "out"), 1)
    held.close()
    said = one_message(cli("run", "--resume", "out", "--lr", 0.5), 2)
    assert said.startswith("this run was begun with another optimizer: then 'SGD(lr=0.01")
    assert cli("run", "--resume", "out").code == 0


@pytest.mark.parametrize("spoil", ["flip", "cut"])
def test_a_damaged_checkpoint_is_one_message_and_exit_code_1(cli, unpublished, tiny_folder, tmp_path, spoil):
    assert cli("run", "--data", tiny_folder, "--rounds", 1, "--out", "out").code == 0
    checkpoint = tmp_path / "out" / CHECKPOINT
    content = bytearray(checkpoint.read_bytes())
    content[-100] ^= 1
    checkpoint.write_bytes(content if spoil == "flip" else content[:-100])
    said = one_message(cli("run", "--resume", "out", "--rounds", 2), 1)
    assert said.startswith(f"checkpoint out/{CHECKPOINT} is corrupt")
    assert said.endswith("restore the file from a copy, or remove it to begin this run again from round 1")


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


def test_a_comparison_goes_on_without_the_method_that_diverged(cli, tiny_folder):
    methods = "fedprox(mu=1e30),fedavg"
    outcome = cli(
        "compare", "--data", tiny_folder, "--methods", methods, "--rounds", 2, "--batch-size", 8, "--out", "out"
    )
    assert one_message(outcome, 1).startswith("training diverged: client 'ann', round 1, step ")
    assert "note: fedprox(mu=1e+30), seed 0: training diverged" in outcome.out
    assert "fedavg seed 0 round 2/2" in outcome.out
    assert "Page: out/report.html" in outcome.out


# A full disk


def test_a_full_disk_keeps_what_was_saved_and_the_run_goes_on_later(
    cli, program, unpublished, tiny_folder, tmp_path, assert_same
):
    settings = ("run", "--data", tiny_folder, "--batch-size", 8)
    assert cli(*settings, "--rounds", 4, "--out", "whole").code == 0
    assert cli(*settings, "--rounds", 2, "--out", "full").code == 0
    checkpoint = tmp_path / "full" / CHECKPOINT
    before = checkpoint.read_bytes()
    room = len(before) - 1

    process = program(
        "run", "--resume", "full", "--rounds", 4, cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
    )  # fmt: skip
    _, err = process.communicate()
    assert process.returncode == 1
    assert err == (
        f"fedshift: cannot write full/{CHECKPOINT}: File too large. What was saved before is intact: free some space, "
        "then go on with --resume\n"
    )
    assert checkpoint.read_bytes() == before
    assert not list(checkpoint.parent.glob("*.tmp"))
    assert cli("run", "--resume", "full", "--rounds", 4).code == 0
    assert_same(tmp_path / "whole", tmp_path / "full")


# Ctrl-C


@pytest.fixture
def interrupt(monkeypatch):
    """Press Ctrl-C as the given local steps begin, counted over the whole run."""

    def at(*steps):
        count = iter(range(1, 10**6))

        def step_(*given):
            for _ in range(steps.count(next(count))):
                signal.raise_signal(signal.SIGINT)
            return loop_step(*given)

        loop_step = loop.step_
        monkeypatch.setattr(loop, "step_", step_)

    return at


def test_one_ctrl_c_finishes_the_round_reports_and_says_how_to_go_on(
    cli, interrupt, monkeypatch, tiny_folder, tmp_path, assert_same
):
    settings = ("run", "--data", tiny_folder, "--batch-size", 8, "--rounds", 5, "--evaluate-every", 1)
    real, handler = loop.step_, signal.getsignal(signal.SIGINT)
    interrupt(13)
    outcome = cli(*settings, "--out", "stopped run")
    assert (outcome.code, outcome.err) == (130, "")
    assert "Stopping after this round; press Ctrl-C again to stop at once." in outcome.out
    assert "round 2/5" in outcome.out
    assert "round 3/5" not in outcome.out
    last = outcome.out.splitlines()[-1]
    assert last == "Stopped. What was done is kept; go on with: fedshift run --resume 'stopped run'"
    assert (tmp_path / "stopped run/report.html").exists()
    assert load_checkpoint(tmp_path / "stopped run" / CHECKPOINT)[1]["round"] == 2
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(loop, "step_", real)
    monkeypatch.setattr("fedshift.report.publish.publish", lambda *_: None)
    assert cli("run", "--resume", "stopped run").code == 0
    assert cli(*settings, "--out", "whole").code == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped run")


def test_two_ctrl_c_stop_at_once(cli, interrupt, monkeypatch, tiny_folder, tmp_path, assert_same):
    settings = ("run", "--data", tiny_folder, "--batch-size", 8, "--rounds", 4)
    real = loop.step_
    interrupt(13, 15)
    outcome = cli(*settings, "--out", "stopped")
    assert (outcome.code, outcome.err) == (130, "")
    assert "Page:" not in outcome.out
    assert outcome.out.splitlines()[-1].endswith("go on with: fedshift run --resume stopped")
    assert load_checkpoint(tmp_path / "stopped" / CHECKPOINT)[1]["round"] == 1
    monkeypatch.setattr(loop, "step_", real)
    monkeypatch.setattr("fedshift.report.publish.publish", lambda *_: None)
    assert cli("run", "--resume", "stopped").code == 0
    assert cli(*settings, "--out", "whole").code == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_a_process_stopped_by_ctrl_c_ends_in_order(program, tiny_folder, tmp_path):
    process = program(
        "run", "--data", tiny_folder, "--rounds", 100000, "--evaluate-every", 1, "--out", "out", cwd=tmp_path
    )
    for line in process.stdout:
        if "round 2/100000" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate()
    assert (process.returncode, err) == (130, "")
    assert "Stopping after this round" in out
    assert "go on with: fedshift run --resume out" in out
    study = read_study(tmp_path / "out")
    assert load_checkpoint(tmp_path / "out" / CHECKPOINT)[1]["round"] == study.rows["round"].max()
    assert (tmp_path / "out/report.html").exists()


# Looking


def test_inspect_shows_every_entry_and_what_travels(cli):
    outcome = cli("inspect", "--method", "fedbn", "--model", "small-cnn", "--shape", "1,8,8", "--classes", 2)
    assert outcome.code == 0
    rows = {words[0]: words for words in map(str.split, outcome.out.splitlines()) if words}
    assert rows["bn1.running_mean"][-4:] == ["-", "-", "yes", "-"]
    assert rows["conv1.weight"][-4:] == ["yes", "yes", "-", "yes"]
    assert "no global model" in outcome.out


def test_list_names_all_there_is(cli):
    outcome = cli("list")
    assert outcome.code == 0
    for name in ("fedavg", "fedbn", "small-cnn", "digit-cnn-dropout", "digits"):
        assert f"{name} " in outcome.out
    assert "digits " not in cli("list", "methods").out


def test_a_report_of_a_run_without_rounds_says_so(cli, tiny_folder):
    with contextlib.suppress(SystemExit):
        cli("run", "--data", tiny_folder, "--lr", 1e30, "--batch-size", 8, "--out", "out")
    outcome = cli("report", "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert "No round was evaluated yet, so there is nothing to report." in outcome.out
