"""FedBABU equals a plain loop: the federation moves bodies alone; each client's model is the global one, trained."""

import pytest
import torch

from fedshift.core.optimizer import SGD
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbabu import fedbabu
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fedrep import fedrep
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.methods.plain import SHARES, SIZES, copied, largest_difference, loaded_with, mean, train, trial


@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_it_equals_a_plain_loop(base):
    running, local = trial(fedbabu(base, rounds=2)), ("1.",) if base.name == "fedbn" else ()
    server = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    own = {client: {name: x for name, x in server.items() if name.startswith(local or "-")} for client in SIZES}
    for number in range(2):
        running.advance()
        uploads = [copied(train(loaded_with(server | own[client]), client, number, still=["4."])) for client in SIZES]
        own = {
            client: {name: upload[name] for name in own[client]} for client, upload in zip(SIZES, uploads, strict=True)
        }
        server = mean(uploads, list(SHARES.values()))
    found = running.server.shared
    assert largest_difference(found, {name: server[name] for name in found}) <= 1e-9
    assert all(torch.equal(found[name], running.plan.initial[name]) for name in ("4.weight", "4.bias"))
    for client in SIZES:
        tuned = loaded_with(server | own[client])
        for number in range(2):  # its batches are those of a client's first rounds
            train(tuned, client, number)
        assert largest_difference(running.model_state(client), tuned.state_dict()) <= 1e-9
        assert not torch.equal(running.model_state(client)["4.weight"], running.plan.initial["4.weight"])


def test_fine_tuning_leaves_the_federation_as_it_is_and_no_rounds_leave_the_global_model():
    tuned, plain = trial(fedbabu(), evaluate_every=1), trial(fedbabu(rounds=0), evaluate_every=1)
    for _ in range(2):
        rows, without = tuned.advance().rows, plain.advance().rows
    assert is_equal(tuned.server.shared, plain.server.shared)
    assert is_equal(plain.model_state("a"), plain.model_state())

    def losses(found, model):
        return [
            row["loss_sum"] for row in found if (row["model"], row["moment"], row["split"]) == (model, "loaded", "test")
        ]

    assert losses(rows, "global") == losses(without, "global") == losses(without, "personal")
    assert all(a < b for a, b in zip(losses(rows, "personal"), losses(rows, "global"), strict=True))


def test_other_rules_hold_in_fine_tuning_too():
    moved = []
    for mu in (0.0, 20.0):
        running = trial(fedprox(fedbabu(rounds=1), mu=mu), optimizer=SGD(lr=0.02))
        running.advance()
        state, start = running.model_state("a"), running.model_state()
        moved.append(sum(float((state[name] - start[name]).square().sum()) for name in running.plan.trained))
    assert 0 < moved[1] < moved[0]


def test_a_client_that_never_trained_is_fine_tuned_with_its_head():
    running = trial(fedbabu(), newcomers=("b",), unseen="finetune")
    running.advance()
    assert not torch.equal(running.model_state("b")["4.weight"], running.plan.initial["4.weight"])


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match=r"fedrep has a phase that trains '.*', which fedbabu leaves untrained"):
        trial(fedrep(fedbabu()))
    with pytest.raises(UsageError, match="trains no parameter of the model"):
        trial(fedbabu(layers="*"))
