"""`examples/leak.py`: what the server sees, and that it sees nothing else."""

import sys
from dataclasses import replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn

from fedshift.core.kernel import client_final, client_init, init_client, init_server, load_state
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.step import client_step_
from fedshift.methods import METHODS
from fedshift.models.digits import small_cnn
from fedshift.utils.random_streams import stream, torch_stream

SPEC = spec_from_file_location("leak", Path(__file__).parents[1] / "examples" / "leak.py")
leak = module_from_spec(SPEC)
SPEC.loader.exec_module(leak)
SHAPE = (3, 8, 8)
make_cnn = partial(small_cnn, SHAPE, 4, dense_norm=False)


def see(method, make=make_cnn, round=0, spoil=lambda job, plan: job):
    """Return plan, broadcast and upload after one step on an image, and the image with its label."""
    with torch_stream(0, "init"):
        plan = prepare(METHODS.parse(method), make().double(), optimizer=SGD(lr=0.05))
    x, y = torch.from_numpy(stream(0, "image").uniform(-1, 1, (1, *SHAPE))), torch.tensor([2])
    server = replace(init_server(plan), round=round)
    job, _ = client_step_(plan, client_init(plan, init_client(plan), server, planned_steps=1), x, y, leak.KEY)
    return plan, server, client_final(plan, spoil(job, plan))[1], x, y


def test_a_linear_layers_gradients_give_its_input_exactly():
    """Phong et al. 2017 (IACR ePrint 2017/715), section 3: dL/dW = dL/db x."""
    plan, server, update, x, _ = see("fedavg", lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
    gradients = leak.see_gradients(plan, server, update)
    for unit in range(4):
        assert (gradients["1.weight"][unit] / gradients["1.bias"][unit]).numpy() == pytest.approx(x.flatten().numpy())


def test_shared_statistics_give_mean_and_variance_of_an_image():
    plan, server, update, x, _ = see("fedavg")
    outputs = nn.functional.conv2d(x, plan.initial["conv1.weight"], plan.initial["conv1.bias"], padding=1)
    mean, variance = leak.see_statistics(plan, server, update)["bn1"]
    assert mean.numpy() == pytest.approx(outputs.mean(dim=(0, 2, 3)).numpy(), abs=1e-12)
    assert variance.numpy() == pytest.approx(outputs[0].flatten(1).var(dim=1).numpy(), abs=1e-12)
    for method, layers in (("fedbn(keep='affine')", ["bn1", "bn2"]), ("fedbn", []), ("silobn", []), ("gn", [])):
        assert list(leak.see_statistics(*see(method)[:3])) == layers


@pytest.mark.parametrize("method", ["fedavg", "silobn", "fedbn", "fixbn(switch=0)", "gn", "fedwon", "fedprox"])
def test_the_clients_own_image_explains_the_upload_completely(method):
    """The attacker's simulation is the client's step: surgery, clipping and frozen statistics included."""
    plan, server, update, x, y = see(method)
    job, inputs = load_state(plan, init_client(plan), server, planned_steps=1), leak.record_inputs(plan)
    simulated = leak.simulate(plan, job, job.params, x.clone().requires_grad_(), y)
    for name, gradient in leak.see_gradients(plan, server, update).items():
        assert simulated[name].detach().numpy() == pytest.approx(gradient.numpy(), abs=1e-9)
    for name, batch in leak.see_statistics(plan, server, update).items():
        assert leak.statistics_distance(inputs[name], *batch).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedper"])
def test_what_stays_on_a_client_changes_nothing_that_the_attacker_computes(method):
    def spoil(job, plan):
        kept = {
            name: tensor if name in plan.sent else torch.full_like(tensor, 7) for name, tensor in job.params.items()
        }
        return replace(job, params=kept)

    start, images = torch.from_numpy(stream(0, "start").standard_normal((1, *SHAPE))), []
    for change in (lambda job, _: job, spoil):
        plan, server, update, _, y = see(method, round=1, spoil=change)
        images.append(leak.invert(plan, server, update, y, start, 3))
    assert images[0].equal(images[1])
    assert not images[0].equal(start.clamp(-1, 1))


@pytest.mark.slow
def test_the_table_has_a_row_for_each_method(capsys, monkeypatch):
    words = "--methods fedbn,gn --rounds 0 --images 1 --seeds 2 --iterations 2"
    monkeypatch.setattr(sys, "argv", ["leak.py", *words.split()])
    leak.main()
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[0] for row in rows[1:]] == ["fedbn", "gn", "mean image"]
