"""GReg is refused without shared statistics of BatchNorm."""

import pytest

from fedshift.methods.fedbn import fedbn
from fedshift.methods.gn import gn
from fedshift.methods.greg import greg
from fedshift.utils.errors import UsageError
from tests.methods.plain import trial


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: greg(lam=-1.0), "greg: lam=-1: give a finite strength, 0"),
        (lambda: trial(greg(fedbn())), "but fedbn keeps '1.num_batches_tracked' on clients: use one of the two"),
        (lambda: trial(greg(gn())), "GReg compares statistics of BatchNorm, which gn replaces"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
