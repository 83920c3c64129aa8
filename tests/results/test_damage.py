"""Every file of a run, changed, cut or removed: the same result, or one refusal that names the file and a way out."""

import re
from pathlib import Path
from threading import Event

import pytest
from torch import nn

from fedshift.config.settings_file import format_settings
from fedshift.config.spec import RunSpec
from fedshift.experiments.factory import make_experiment
from fedshift.experiments.restoration import load_experiment, load_spec, restore_trial
from fedshift.experiments.run_queue import DONE, read_outcome
from fedshift.flower.coordinator.descriptions import ClientRegistry
from fedshift.results.summary import read_summary
from fedshift.results.trial_records import read_rounds
from fedshift.utils.checked_json import write_checked
from fedshift.utils.errors import FedshiftError
from fedshift.utils.random_streams import stream
from tests.conftest import ARRAYS, left_behind, write_npz

TRIAL = "trials/fedbn-seed1"
STATES = {"checkpoint.safetensors", "best.safetensors", "clients-2.states", "clients-3.states"}
RECORDS = ("cases.npz", "cases-validation.npz", "worst-cases.npz", "statistics.json")
FILES = sorted(
    {"config.toml", "study.json", "environment.json", "notices.json", "samples.npz", "split.csv"}
    | {f"{TRIAL}/{name}" for name in {"metrics.jsonl", "rounds.jsonl", *RECORDS} | STATES}
)
ASIDE = tuple(f"{TRIAL}/{name}" for name in RECORDS)
WAYS_OUT = "restore|removed?|again|resume=|another directory"


CODE = (f"{__name__}:network",)


def network(shape, classes):
    return nn.Sequential(nn.Conv2d(shape[0], 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, classes))


class FinishedRun:
    """A run of three rounds of which the second is the best, and the results of commands on it."""

    def __init__(self, folder: Path) -> None:
        (folder / "data").mkdir()
        for name, arrays in ARRAYS.items():
            parts = dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True))
            write_npz(folder / "data" / f"{name}.npz", **parts)
        self.path = folder / "run"
        spec = RunSpec(
            data=str(folder / "data"), model=f"{__name__}:network", split="only(clients='*')", rounds=3, lr=0.3,
            evaluate_every=1, batch_size=8, batches=2, select="best", validation=0.3, seeds="1,", engine="sequential",
        )  # fmt: skip
        make_experiment(spec).run(self.path)
        self.whole, self.cases, self.pictures, self.again = self.read(), {}, [], ()
        self.expected = {command: command(self) for command in FLIPS}

    def read(self) -> dict[str, bytes]:
        return {name: path.read_bytes() for name in FILES if (path := self.path / name).exists()}

    def restore(self) -> None:
        for name, content in self.whole.items():
            (self.path / name).write_bytes(content)

    def report(self) -> object:
        found = read_summary(self.path)
        tables = found.rows.to_json(), found.traffic.to_json()
        if not found.unmeasured:  # otherwise a report says that re-estimated statistics are not known
            again = found.lag.to_json(), found.moves.to_json()
            assert self.again in ((), again)
            self.again = again
        images = {name: images.tolist() for name, images in found.samples.items()}
        for read in (found.read_cases, found.read_validation):
            if (cases := read("fedbn", 1)) is not None:  # without them, a table says that pairs are not known
                records = {key: {name: x.tolist() for name, x in each.items()} for key, each in cases.records.items()}
                known = self.cases.setdefault(read is found.read_cases, (cases.round, records))
                assert known == (cases.round, records)
        pictures = [(each.client, each.row, each.image.tolist()) for each in found.read_pictures("fedbn", 2) or ()]
        assert pictures in ([], self.pictures or pictures)
        self.pictures = self.pictures or pictures
        named = {"lag", "moves", "unmeasured", "rows", "traffic", "samples", "environment", "notices"}
        named |= {"read_cases", "read_validation", "read_pictures"}
        rest = {name: value for name, value in vars(found).items() if name not in named}
        return tables, images, repr(rest), found.environment, found.notices

    def adapt(self) -> object:
        _, experiment = load_experiment(self.path, code=CODE)
        trial = restore_trial(experiment, self.path, "fedbn", 1)
        models = {client: trial.model_state(client) for client in experiment.data.names}
        return {client: {name: x.tolist() for name, x in state.items()} for client, state in models.items()}

    def resume(self) -> object:
        make_experiment(load_spec(self.path, code=CODE)).run(self.path, resume=True)
        # what a client keeps is read, and checked, when that client is needed
        read_later = (".states", "statistics.json")
        trials = {name: left for name, left in left_behind(self.path).items() if not name.endswith(read_later)}
        *same, environment, notices = self.report()
        lost = [notice for notice in notices if notice.startswith("environment.json was damaged or removed: ")]
        return trials, same, None if lost else environment["sessions"]


FLIPS = {FinishedRun.report: 25, FinishedRun.adapt: 5, FinishedRun.resume: 2}
"""Commands, and how many bytes of each file are changed before them."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return FinishedRun(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def assert_told(finished):
    """Fail unless a command on the damaged run gives the result of the whole one, or is refused in a helpful way."""

    def check(command, name: str, content: bytes | None) -> bool:
        path = finished.path / name
        path.write_bytes(content) if content is not None else path.unlink()
        try:
            found = command(finished)
        except FedshiftError as error:
            text = str(error)
            assert str(path) in text
            assert "\n" not in text
            assert re.search(WAYS_OUT, text), text
            if command is FinishedRun.resume:  # nothing is dropped, nothing resumed over it
                left = finished.read()
                assert {key for key, value in finished.whole.items() if left.get(key) != value} == {name}
            return False
        finally:
            finished.restore()
        if command is FinishedRun.resume and name == "environment.json":  # that it is lost is said in a notice
            assert (found[:2], found[2]) == (finished.expected[command][:2], None)
        else:
            assert found == finished.expected[command]
        return True

    return check


def test_the_run_has_every_kind_of_file(finished):
    assert sorted(finished.whole) == FILES
    found = {str(path.relative_to(finished.path)) for path in finished.path.rglob("*") if path.is_file()}
    assert found - {".lock", ".owner"} == set(FILES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_changes_no_result_in_silence(finished, assert_told, name):
    whole = finished.whole[name]
    draws = stream(0, "flips", name)
    for command, count in FLIPS.items():
        for place, bit in zip(draws.integers(len(whole), size=count), draws.integers(8, size=count), strict=True):
            flipped = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            assert_told(command, name, flipped)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("command", FLIPS, ids=lambda command: command.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_changes_no_result_in_silence(finished, assert_told, name, command):
    whole = finished.whole[name]
    lines = whole.rfind(b"\n", 0, -1) + 1
    for kept in {len(whole) // 2, lines} if command is FinishedRun.report else {lines or len(whole) // 2}:
        assert_told(command, name, whole[:kept])


@pytest.mark.slow
def test_which_files_each_command_can_do_without(finished, assert_told):
    unneeded = {command.__name__: {name for name in FILES if assert_told(command, name, None)} for command in FLIPS}
    assert unneeded == {
        "report": {"config.toml", "split.csv", *ASIDE, *(f"{TRIAL}/{name}" for name in STATES)},
        "adapt": {
            "environment.json", "notices.json", "samples.npz", "split.csv", f"{TRIAL}/metrics.jsonl",
            f"{TRIAL}/rounds.jsonl", f"{TRIAL}/checkpoint.safetensors", f"{TRIAL}/clients-3.states",
            *ASIDE,
        },
        "resume": {
            "study.json", "environment.json", "notices.json", "samples.npz", "split.csv", *ASIDE,
        },
    }  # fmt: skip


@pytest.mark.parametrize("file", ["metrics.jsonl", "rounds.jsonl"])
def test_a_damaged_line_is_named_by_its_number_and_nothing_is_dropped(cli, unpublished, tiny_folder, tmp_path, file):
    words = ("run", "--data", tiny_folder, "--rounds", 3, "--evaluate-every", 1, "--batches", 1, "--out", "out")
    assert cli(*words).code == 0
    path = tmp_path / "out" / "trials" / "fedbn-seed0" / file
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"round": 1', b'"round": 2').replace(b'"round": 2, "p', b'"round": 1, "p')
    path.write_bytes(b"".join(lines))
    for command in (["report", "out"], ["run", "--resume", "out"], ["run", "--resume", "out", "--rounds", 5]):
        outcome = cli(*command)
        assert (outcome.code, outcome.err.count("\n")) == (1, 1)
        assert (
            f"{file}, line 2 is damaged (its checksum does not match): restore the file from a copy, or" in outcome.err
        )
    assert path.read_bytes() == b"".join(lines)
    assert "rounds = 3\n" in (tmp_path / "out" / "config.toml").read_text()


def test_records_of_an_earlier_version_are_refused_as_such(tmp_path):
    (tmp_path / "rounds.jsonl").write_text('{"round": 1, "down": 5}\n')
    with pytest.raises(FedshiftError, match=r"rounds.jsonl, line 1 is damaged \(it has no checksum\)"):
        read_rounds(tmp_path)


def test_what_says_that_a_run_of_several_ended_is_checked(tmp_path):
    settings = {"lr": 0.1, "methods": "fedavg"}
    write_checked(tmp_path / DONE, {**settings, "diverged": "seed 0"})
    assert read_outcome(tmp_path, settings) == "seed 0"
    whole = (tmp_path / DONE).read_bytes()
    for place in range(len(whole) - 1):
        (tmp_path / DONE).write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(FedshiftError, match=r"done.json is damaged \(.*remove it and go on \(resume=True\)"):
            read_outcome(tmp_path, settings)


def test_what_a_coordinator_knows_of_sites_is_checked(tmp_path):
    path = tmp_path / "population.json"
    ClientRegistry().write(path)
    whole = path.read_bytes()
    for content in (whole[:-9], whole.replace(b'"clients": []', b'"clients": {}')):
        path.write_bytes(content)
        with pytest.raises(
            FedshiftError, match=r"population.json is damaged .*: restore it from a copy, or start a new"
        ):
            ClientRegistry.read(path)
    path.unlink()
    with pytest.raises(FedshiftError, match=r"population.json is missing: restore it"):
        ClientRegistry.read(path)


def test_a_run_that_has_not_ended_is_refused_where_it_lacks_a_round_that_its_checkpoint_has(make, tmp_path, Listener):
    stop = Event()
    make(rounds=4).run(tmp_path / "run", stop=stop, callback=Listener(lambda done: done.round == 2 and stop.set()))
    assert read_summary(tmp_path / "run").traffic["round"].tolist() == [1, 2]
    folder = tmp_path / "run" / "trials" / "fedbn-seed0"
    whole = {name: (folder / name).read_bytes() for name in ("rounds.jsonl", "metrics.jsonl", "checkpoint.safetensors")}
    first = whole["rounds.jsonl"].splitlines(keepends=True)[0]
    for name, content, said in (
        ("rounds.jsonl", first, "rounds.jsonl ends with round 1, but round 2 was done: restore"),
        ("rounds.jsonl", None, "rounds.jsonl holds no round, but round 2 was done: restore"),
        ("metrics.jsonl", None, "metrics.jsonl holds 0 of "),
        ("metrics.jsonl", whole["metrics.jsonl"].rsplit(b"\n", 2)[0] + b"\n", "lines of round 2: restore"),
        ("checkpoint.safetensors", whole["checkpoint.safetensors"][:99], "is corrupt or truncated"),
    ):
        (folder / name).write_bytes(content) if content else (folder / name).unlink()
        for command in (read_summary, lambda path: make(rounds=4).run(path, resume=True)):
            with pytest.raises(FedshiftError) as refused:
                command(tmp_path / "run")
            assert said in str(refused.value)
        (folder / name).write_bytes(whole[name])
    make(rounds=4).run(tmp_path / "run", resume=True)


def test_the_settings_of_a_deployment_that_goes_on_are_checked(cli, tmp_path):
    (tmp_path / "served").mkdir()
    settings = format_settings({"method": "fedbn", "rounds": 3}, tmp_path / "served")
    (tmp_path / "served" / "config.toml").write_text(settings.replace("rounds = 3", "rounds = 2"))
    outcome = cli("serve", "--resume", "served", "--insecure")
    assert (outcome.code, "config.toml was edited or is damaged" in outcome.err) == (1, True)
