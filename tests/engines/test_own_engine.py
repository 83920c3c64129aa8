"""An engine of the user's own, by ``package.module:Class``."""

import pytest

from fedshift.config.expressions import trust_only
from fedshift.engines import find_engine
from fedshift.engines.sequential import Sequential
from fedshift.experiments.settings import Settings
from fedshift.methods.fedbn import fedbn
from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.state import is_equal
from tests.laws.course import make_trial

HERE = "tests.engines.test_own_engine"


class Backwards(Sequential):
    """Trains the last client first."""

    def train(self, server, clients):
        for name in reversed(list(clients)):
            yield name, self.train_client(server, name, clients[name])


class Forgetful(Sequential):
    def train(self, server, clients):
        yield from list(super().train(server, clients))[1:]


class Picky(Sequential):
    @classmethod
    def refusal(cls, plan, data, augment=None):
        return f"does not like {plan.method.label}"


def test_an_own_engine_trains_a_trial_with_the_bits_of_the_one_that_it_extends():
    trials = [make_trial(fedbn(), engine) for engine in ("sequential", f"{HERE}:Backwards")]
    for _ in range(2):
        rows = [trial.advance().rows for trial in trials]
        assert rows[0] == rows[1]
    assert is_equal(*(trial.to_tensors()[0] for trial in trials))
    assert trials[1].engine_choice.engine == f"{HERE}:Backwards"


def test_a_client_that_an_engine_leaves_out_is_named():
    with pytest.raises(FedshiftError, match="Forgetful gave no result of 'a' in round 1"):
        make_trial(fedbn(), f"{HERE}:Forgetful").advance()


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("vectorised", "unknown engine 'vectorised'.*auto, identity"),
        (f"{HERE}:Fast", "has no 'Fast'"),
        (f"{HERE}:find_engine", "is no engine: give a subclass of fedshift.engines.engine.Engine"),
    ],
)
def test_what_is_no_engine_is_refused(engine, said):
    with pytest.raises(UsageError, match=said):
        Settings(engine=engine)


def test_an_own_engine_may_refuse_a_plan_and_needs_permission_in_files():
    with pytest.raises(UsageError, match="the picky engine does not like fedbn: use the sequential engine"):
        make_trial(fedbn(), f"{HERE}:Picky")
    with trust_only(()), pytest.raises(UsageError, match="nobody allowed"):
        find_engine(f"{HERE}:Picky")
