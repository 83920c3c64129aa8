"""Whatever a site does wrong, the round closes without it, it is named, and the model stays that of the others."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.common.constant import ErrorCode

from fedshift.core.states import ServerState, Update
from fedshift.flower.server.outliers import UpdateSizes
from fedshift.flower.transport.arrays import from_record, to_record
from fedshift.results.checkpoint import load_checkpoint
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for

NETWORK = "tests.flower.gated:network"
WEIGHT = "1.weight"
ROUND_OF = {"describe": None, "train": 1, "evaluate": 2}
"""What a question says of the round of which the answer is tampered with."""
PHOTO = 2
"""The node that does wrong, in round 2."""
ABSENT = {}
ALL, OTHERS = ("pen", "photo", "print"), ("pen", "print")


@pytest.fixture
def served(tmp_path, machine):
    """Run an experiment in which ``fault(question, answer)`` is what arrives from node PHOTO in round 2.

    ``after(done, grid)`` is called after each round; ``kind``: what is answered wrongly.
    """

    def run(fault=None, *, method="fedbn", kind="train", every=3, after=lambda done, grid: None, again=False, **order):
        spec = spec_for(method, model=NETWORK, rounds=3, evaluate_every=every)
        grid, heard = SiteGrid(sites_of(spec, tmp_path, code=frozenset({NETWORK}))), Heard()
        heard.after = lambda done: after(done, grid)

        def tamper(node, question, answer):
            due = node == PHOTO and (question.kind, question.facts.get("round")) == (kind, ROUND_OF[kind])
            return fault(question, answer) if fault and due else answer

        grid.tamper = tamper
        done = SimpleNamespace(grid=grid, heard=heard, spec=spec, folder=tmp_path, failure=None)
        try:
            assert coordinator(spec, grid, tmp_path / "served", heard, **{"clients": 2} | order).run()
        except FedshiftError as error:
            done.failure = str(error)
        done.took_part = [of_round.participants for of_round in heard.rounds]
        done.complaints = [text for text in heard.notices if re.search("left out|not measured|take part", text)]
        return done

    return run


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on only where someone sleeps."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += seconds

    monkeypatch.setattr(
        "fedshift.flower.server.nodes.time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    )
    monkeypatch.setattr("fedshift.flower.server.nodes.POLL", 0.25)
    return now


@pytest.fixture
def without(machine, tmp_path_factory):
    """What is left where node PHOTO was not connected in round 2; the same for all tests of a process."""
    if not ABSENT:
        folder, heard = tmp_path_factory.mktemp("without"), Heard()
        spec = spec_for(model=NETWORK, rounds=3, evaluate_every=3)
        grid = SiteGrid(sites_of(spec, folder, code=frozenset({NETWORK})))
        heard.after = lambda done: grid.away.add(PHOTO) if done.round == 1 else grid.away.clear()
        assert coordinator(spec, grid, folder / "served", heard, clients=2).run()
        ABSENT.update(left(folder))
    return ABSENT


def same(found, wanted):
    """Fail unless a run left what another did, bit for bit."""
    tensors = left(found.folder)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].equal(tensor), name
        assert tensor.isfinite().all(), name


def left(folder):
    """What the coordinator holds in the end, and each client's state that is current."""
    (place,) = (folder / "served" / "trials").iterdir()
    tensors, facts = load_checkpoint(place / "checkpoint.safetensors")
    assert facts["round"] == 3
    for client, base in facts["bases"].items():
        (file,) = folder.glob(f"{client}/*/{place.name}/state-{base}.safetensors")
        tensors |= {f"{client}/{name}": tensor for name, tensor in load_checkpoint(file)[0].items()}
    return tensors


def changed(record="shared", **entries):
    """Uploads in which each of ``entries`` is what its function makes of what the upload holds."""

    def fault(question, answer):
        state = from_record(answer.arrays[record])
        for name, change in entries.items():
            state[name] = change(state.get(name, torch.zeros(16)))
        kept = {name: tensor for name, tensor in state.items() if tensor is not None}
        return replace(answer, arrays={**answer.arrays, record: to_record(kept)})

    return fault


def claimed(**facts):
    return lambda question, answer: replace(answer, facts={**answer.facts, **facts})


def misdeclared(question, answer):
    """The bytes are of another shape than they say."""
    arrays = dict(answer.arrays["shared"])
    arrays[WEIGHT] = Array(arrays[WEIGHT].dtype, (2**30, 16), arrays[WEIGHT].stype, arrays[WEIGHT].data)
    return replace(answer, arrays={**answer.arrays, "shared": ArrayRecord(arrays)})


def truncated(question, answer):
    """Half of an entry's bytes are lost."""
    arrays = dict(answer.arrays["shared"])
    data = arrays[WEIGHT].data
    arrays[WEIGHT] = Array(arrays[WEIGHT].dtype, arrays[WEIGHT].shape, arrays[WEIGHT].stype, data[: len(data) // 2])
    return replace(answer, arrays={**answer.arrays, "shared": ArrayRecord(arrays)})


def beside(question, answer):
    """A record of arrays beside those of an upload."""
    arrays = {**answer.arrays, "more": to_record({"x": torch.zeros(4)})}
    return replace(answer, arrays=arrays)


def numbers_beside(question, answer):
    """A record of another kind beside those of an upload."""
    content = answer.content()
    content["numbers"] = MetricRecord({"x": [0.0] * 9})
    return content


def settings_beside(question, answer):
    """A long text beside the facts."""
    content = answer.content()
    content.config_records["config"]["more"] = "x" * 99
    return content


def long_facts(question, answer):
    return replace(answer, facts={**answer.facts, "name": "x" * 2**24})


UPLOADS = {
    "too much": (changed(**{WEIGHT: lambda x: torch.zeros(10**6)}), r"its upload has 4\d+ bytes, and .* at most \d+"),
    "a record more": (beside, "it sent an unexpected record 'more'"),
    "numbers more": (numbers_beside, "it has records that nobody asked for"),
    "settings more": (settings_beside, "it has records that nobody asked for"),
    "long facts": (long_facts, "its facts are not a text of at most 16777216 letters"),
    "NaN": (changed(**{WEIGHT: lambda x: x * torch.nan}), r"entry '1\.weight' of the upload holds NaN or infinity"),
    "infinity": (changed(**{WEIGHT: lambda x: x / 0}), "of the upload holds NaN or infinity"),
    "shape": (changed(**{WEIGHT: lambda x: x[:-1]}), r"shape \(15, \d+\) in place of \(16, \d+\)"),
    "truncated": (truncated, r"entry '1\.weight' .* takes 12288 bytes, but has \d+"),
    "false shape": (misdeclared, r"entry '1\.weight' is declared as float32 of shape \(1073741824, 16\)"),
    "dtype": (changed(**{WEIGHT: lambda x: x.half()}), r"type torch\.float16 in place of torch\.float32"),
    "lacking": (changed(**{WEIGHT: lambda x: None}), r"the upload lacks entry '1\.weight'"),
    "personal": (changed(**{"2.weight": lambda x: x}), r"has an entry '2\.weight', which does not belong there"),
    "huge weight": (claimed(weight=1e30), r"it reports 1e\+30 samples in 1 steps, but a round over its 24 has 24 in 1"),
    "weight NaN": (
        claimed(weight=float("nan")),
        "its report of training is malformed .'weight': Input should be a finite number",
    ),
    "no samples": (claimed(weight=0), "it reports 0 samples in 1 steps"),
    "huge steps": (claimed(steps=10**9), "it reports 24 samples in 1000000000 steps"),
    "steps in words": (claimed(steps="many"), "its report of training is malformed"),
    "loss": (
        claimed(loss_sum=float("inf")),
        "its report of training is malformed .'loss_sum': Input should be a finite number",
    ),
    "another's": (claimed(name="pen"), "it answered 'trained' as 'pen' for round 2 instead"),
    "of another round": (claimed(round=3), "it answered 'trained' as 'photo' for round 3 instead"),
    "empty": (lambda _, answer: replace(answer, arrays={}), "it sent no memory and no shared entries"),
    "something else": (lambda _, answer: replace(answer, kind="evaluated"), "it answered 'evaluated' as"),
    "a crash": (lambda *_: ErrorCode.CLIENT_APP_RAISED_EXCEPTION, r"its app failed \(made to order\)"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", UPLOADS)
def test_an_upload_that_cannot_be_is_refused_by_name_and_moves_nothing(fault, served, without):
    made, why = UPLOADS[fault]
    found = served(made)
    assert found.failure is None
    assert found.took_part == [ALL, OTHERS, ALL]
    (complaint,) = found.complaints
    assert re.match(f"round 2: photo is left out: .*{why}", complaint)
    same(found, without)


def test_what_rules_upload_is_checked_as_entries_are(served):
    def nan(question, answer):
        (first, *_) = answer.arrays["memory"]
        return changed("memory", **{first: lambda x: x * torch.nan})(question, answer)

    found = served(nan, method="scaffold")
    assert found.took_part == [ALL, OTHERS, ALL]
    (complaint,) = found.complaints
    assert re.match("round 2: photo is left out: entry .* of the upload's rule memory holds NaN", complaint)


POISON = {
    "huge": ("fedbn", "shared", lambda x: x + 1e30),
    "a hundredfold": ("fedavg", "shared", lambda x: x * 100),
    "in a rule's upload": ("scaffold", "memory", lambda x: x + 1e20),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", POISON)
def test_an_update_many_times_as_long_as_the_others_is_left_out_by_name(fault, served):
    method, record, change = POISON[fault]

    def poison(question, answer):
        names = [name for name, x in from_record(answer.arrays[record]).items() if x.is_floating_point()]
        return changed(record, **dict.fromkeys(names, change))(question, answer)

    found = served(poison, method=method)
    assert found.took_part == [ALL, OTHERS, ALL]
    (complaint,) = found.complaints
    assert re.match(
        "round 2: photo is left out: its update is .* times as long as the others', and the limit is 10", complaint
    )
    assert found.heard.alerts == [("left_out", complaint)]
    (place,) = (found.folder / "served" / "trials").iterdir()
    assert load_checkpoint(place / "checkpoint.safetensors")[1]["sizes"]["longest"].keys() == set(ALL)


def test_without_a_bound_every_finite_update_is_used(served):
    found = served(changed(**{WEIGHT: lambda x: x + 1e4}), method="fedavg", update_bound=0)
    assert found.took_part == [ALL] * 3
    assert not found.complaints


@pytest.mark.slow
def test_from_a_model_on_which_sites_diverge_the_way_back_is_without_the_suspect_and_the_rest_is_as_if_it_had_been_away(
    served, without
):
    found = served(changed(**{WEIGHT: lambda x: x + 1e30}), update_bound=0)
    assert found.failure is None, found.heard.notices
    assert found.took_part == [ALL, ALL, OTHERS, ALL]  # the second round twice
    (told,) = [text for text in found.heard.notices if "going back" in text]
    assert re.match(
        "too few sites can continue from the model of round 2: .* repeating the round without photo, whose update", told
    )
    assert ("diverged", told) in found.heard.alerts
    same(found, without)
    (place,) = (found.folder / "served" / "trials").iterdir()
    rounds = [json.loads(line) for line in (place / "rounds.jsonl").read_text().splitlines()]
    assert [(row["round"], tuple(row["participants"])) for row in rounds] == [(1, ALL), (2, OTHERS), (3, ALL)]
    kept = {path.name.split("-")[0] for path in (place / "history").iterdir()}
    assert kept == {"1", "2", "3"}


def test_a_site_that_trains_alone_is_measured_by_what_was_used_before():
    server = ServerState(round=1, shared={"w": torch.zeros(4), "n": torch.zeros(1, dtype=torch.int64)})

    def update(length, steps=1):
        return Update(
            shared={"w": torch.full((4,), length / 2), "n": torch.ones(1, dtype=torch.int64)}, weight=1.0, steps=steps
        )

    sizes = UpdateSizes(10.0)
    assert sizes.find_outliers(server, {"a": update(1.0)}) == {}
    assert sizes.find_outliers(server, {"a": update(9.0)}) == {}  # 9 times its own
    assert sizes.find_outliers(server, {"a": update(91.0)}) == {"a": pytest.approx(91 / 9)}
    other = UpdateSizes(10.0)
    other.restore(json.loads(json.dumps(sizes.facts())))
    assert other.longest == sizes.longest
    assert sizes.find_outliers(server, {"a": update(91.0), "b": update(8.0, 4), "c": update(2.0, 1)}) == {
        "a": pytest.approx(91 / 8)
    }
    assert sizes.find_outliers(server, {"a": update(91.0, 50), "b": update(8.0, 4), "c": update(2.0, 1)}) == {}
    tiny = {"a": update(2.0), "b": update(2.0), "c": update(1e-6)}  # which must not make the two others stand out
    assert sizes.find_outliers(server, tiny) == {}
    assert sizes.find_outliers(server, {**tiny, "c": update(99.0)}) == {"c": pytest.approx(99 / 2)}


def test_of_two_updates_the_longer_is_used_where_both_are_needed_and_it_is_not_too_long_for_what_others_sent_before():
    server = ServerState(round=1, shared={"w": torch.zeros(1)})

    def find(enough, **lengths):
        sizes, rounds = UpdateSizes(10.0), ({"a": 1.0, "b": 2.0, "c": 0.5}, lengths)
        first, second = (
            {name: Update(shared={"w": torch.tensor([x])}, weight=1.0, steps=1) for name, x in round.items()}
            for round in rounds
        )
        assert sizes.find_outliers(server, first, 2) == {}
        return set(sizes.find_outliers(server, second, enough))

    assert find(1, a=0.5, b=0.01) == {"a"}
    assert find(2, a=0.5, b=0.01) == set()  # as in the first round
    assert find(2, a=19.0, b=0.01) == set()  # b's longest was 2
    assert find(2, a=21.0, b=0.01) == {"a"}
    assert find(2, a=15.0, b=0.01, c=0.5) == {"a"}  # two others are enough
    assert find(3, a=15.0, b=0.01, c=0.5) == set()


def test_a_site_that_answers_nothing_is_waited_for_until_the_deadline_and_asked_again(served, clock, without):
    found = served(lambda *_: None)
    assert found.took_part == [ALL, OTHERS, ALL]
    assert found.complaints == ["round 2: photo is left out: it did not answer in time"]
    assert 5.0 <= clock.seconds <= 5.25  # the deadline of a round, and one look for answers
    same(found, without)


def test_an_answer_that_comes_a_round_late_is_refused_as_one_said_again_would_be(served, clock):
    late = []

    def instead(done, grid):
        before = grid.tamper
        grid.tamper = lambda node, question, answer: (
            late.pop() if (node, question.kind) == (PHOTO, "train") else before(node, question, answer)
        )

    found = served(
        lambda question, answer: late.append(answer),
        after=lambda done, grid: instead(done, grid) if done.round == 2 else None,
    )
    assert found.took_part == [ALL, OTHERS, OTHERS]
    assert found.complaints[1] == (
        "round 3: photo is left out: it answered 'trained' as 'photo' for round 2 instead of 'trained' as 'photo' "
        "for round 3"
    )
    assert not late


def test_a_site_that_dies_in_mid_round_holds_nobody_up_and_is_asked_again_when_it_is_back(served, clock, without):
    grids = []

    def back(done, grid):
        if done.round == 1:
            grids.append(grid)
        if done.round == 2:
            grid.away.clear()

    found = served(lambda *_: grids[0].away.add(PHOTO), after=back)
    assert found.took_part == [ALL, OTHERS, ALL]
    assert found.complaints == ["round 2: photo is left out: it has left"]
    assert "photo has left (2 connected)" in found.heard.notices
    assert clock.seconds < 2.0
    same(found, without)


def test_a_site_that_is_gone_is_not_asked(served, clock):
    found = served(after=lambda done, grid: grid.away.add(PHOTO))
    assert found.took_part == [ALL, OTHERS, OTHERS]
    asked = [question for node, question in found.grid.asked if node == PHOTO and question.kind != "describe"]
    assert [question.facts["round"] for question in asked] == [0]
    assert "round 3: photo is not measured, because it is away" in found.heard.notices
    assert found.heard.alerts == [("left_out", "photo is away: rounds continue without it")]
    assert clock.seconds < 2.0


def test_without_a_quorum_the_round_fails_the_model_stays_and_resume_goes_on(served, clock, tmp_path):
    found = served(changed(**{WEIGHT: lambda x: x * torch.nan}), clients=3)
    assert found.failure == (
        "round 2: only 2 of 3 clients sent a usable upload, and 3 must (--min-clients). The model of round 1 is kept: "
        "continue with --resume"
    )
    tensors, facts = load_checkpoint(next(tmp_path.glob("served/trials/*/checkpoint.safetensors")))
    assert facts["round"] == 1
    assert set(facts["bases"].values()) == {1}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert served(clients=3).failure is None
    same_as_in_process(found.spec, tmp_path / "served", tmp_path, tmp_path / "reference")


def test_with_too_few_sites_left_the_next_round_is_waited_for_no_longer_than_a_round(served, clock):
    found = served(after=lambda done, grid: grid.away.update({1, PHOTO}))
    assert re.search("2 sites must be connected .* after 5 seconds there are 1: print", found.failure)
    assert 5.0 <= clock.seconds < 7.0


@pytest.mark.parametrize("lost", ["all", "one byte"])
def test_a_site_that_lost_its_state_is_left_out_by_name_and_does_not_begin_anew(lost, served, tmp_path):
    def lose(done, grid):
        if done.round == 1:
            (file,) = tmp_path.glob("photo/*/*/state-1.safetensors")
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content) if lost == "one byte" else file.unlink()

    found = served(after=lose)
    assert found.took_part == [ALL, OTHERS, OTHERS]
    why = "client 'photo' has lost its state after round 1 " if lost == "all" else "the state of client 'photo' in "
    assert [complaint.split(": ")[:2] for complaint in found.complaints] == [
        ["round 2", "photo is left out"], ["round 3", "photo is left out"], ["round 3", "photo is not measured"],
        ["round 3", "photo is not measured with re-estimated statistics"],
    ]  # fmt: skip
    assert all(why in complaint for complaint in found.complaints)
    kept = [path.name for path in tmp_path.glob("photo/*/*/state-*")]
    assert kept == {"all": [], "one byte": ["state-1.safetensors"]}[lost]


MEASURED = {
    "another size": ({"samples": 7}, "its counts are impossible for its"),
    "too many hits": ({"hits": [1] * 11}, ".*'0.hits': List should have at most 10 items"),
    "NaN": ({"loss_sum": float("nan")}, ".*'0.loss_sum': Input should be a finite number"),
    "another model": ({"model": "best"}, ".*'0.model': Input should be 'personal' or 'global'"),
    "words": ({"support": "many"}, "its report of measurements is malformed"),
    "no such part": ({"split": "train 2"}, "it measured .* which was not requested"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", MEASURED)
def test_measurements_that_cannot_be_are_left_out_by_name(fault, served):
    wrong, why = MEASURED[fault]

    def measured(question, answer):
        return replace(answer, facts={**answer.facts, "rows": [row | wrong for row in answer.facts["rows"]]})

    found = served(measured, kind="evaluate", every=2)
    assert found.took_part == [ALL] * 3
    (complaint,) = found.complaints
    assert re.match(f"round 2: photo is not measured: {why}", complaint)
    (file,) = found.folder.glob("served/trials/*/metrics.jsonl")
    rows = map(json.loads, file.read_text().splitlines())
    assert {row["client"] for row in rows if (row["round"], row["split"]) == (2, "test")} == set(OTHERS)


def test_a_site_that_says_nonsense_of_itself_does_not_take_part(served, clock):
    found = served(lambda _, answer: replace(answer, facts=answer.facts | {"samples": {}}), kind="describe")
    assert found.failure is None
    assert found.took_part == [OTHERS] * 3
    (complaint,) = found.complaints
    assert complaint.startswith("a node (number 2) does not take part: site 'photo' reports {} samples")
