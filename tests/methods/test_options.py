"""Options of methods that make no sense are refused by name, value and what is allowed."""

import re

import pytest

from fedshift.methods import METHODS
from fedshift.utils.errors import UsageError

REFUSED = {
    "agc(clip=0.0)": "agc: clip=0: give a number above 0",
    "agc(clip=-1.0)": "agc: clip=-1: give a number above 0",
    "apfl(alpha=-0.1)": "apfl: alpha=-0.1: it must lie in [0, 1]",
    "apfl(alpha=1.5)": "apfl: alpha=1.5: it must lie in [0, 1]",
    "ditto(epochs=0)": "ditto: epochs=0: give 1 or more, or leave it out",
    "ditto(lam=-1)": "ditto: lam=-1 is negative",
    "fedadagrad(beta1=-0.1)": "beta1=-0.1: it must lie in [0, 1)",
    "fedadam(lr=0.0)": "server learning rate lr=0: it must be a number above 0",
    "fedadam(tau=0.0)": "tau=0: it must be above 0",
    "fedap(self_weight=-0.1)": "fedap: self_weight=-0.1: give a number in [0, 1]",
    "fedap(self_weight=1.5)": "fedap: self_weight=1.5: give a number in [0, 1]",
    "fedavgm(lr=0.0)": "server learning rate lr=0: it must be a number above 0",
    "fedavgm(beta=1.0)": "beta=1: it must lie in [0, 1)",
    "fedbn(keep='everything')": "unknown keep 'everything': ",
    "fedbn(also='9.*|')": "selection '9.*|': write batch_norm",
    "fedcac(tau=0.0)": "fedcac: tau=0 and beta=100: give a fraction in (0, 1]",
    "fedcac(beta=0)": "fedcac: tau=0.5 and beta=0: give a fraction",
    "feddecorr(beta=-1)": "feddecorr: beta=-1 is negative",
    "feddg_ga(step_size=0.0)": "feddg_ga: step_size=0 and rounds=None: give a number",
    "feddg_ga(step_size=1.5)": "feddg_ga: step_size=1.5 and rounds=None: give a number",
    "feddg_ga(rounds=0)": "feddg_ga: step_size=0.2 and rounds=0: give a number",
    "fedgma(threshold=-0.1)": "fedgma: threshold=-0.1: it must lie in [0, 1]",
    "fedgma(threshold=1.1)": "fedgma: threshold=1.1: it must lie in [0, 1]",
    "fedheal(threshold=1.0)": "fedheal: threshold=1 and beta=0.4: give numbers",
    "fedheal(threshold=-0.1)": "fedheal: threshold=-0.1 and beta=0.4: give numbers",
    "fedheal(beta=1.1)": "fedheal: threshold=0.3 and beta=1.1: give numbers",
    "fedlc(tau=-1)": "fedlc: tau=-1 is negative",
    "fedntd(beta=-1)": "fedntd: beta=-1 is negative",
    "fedntd(tau=0)": "fedntd: tau=0: give a temperature above 0",
    "fedper(layers=0)": "the last 0 layers: give 1 or more",
    "fedplvm(lam=-1.0)": "fedplvm: lam=-1 is negative",
    "fedplvm(alpha=2.0)": "fedplvm: alpha=2: give a power in (0, 1]",
    "fedplvm(samples=0)": "fedplvm: samples=0: give 1 or more",
    "fedproto(lam=-1.0)": "fedproto: lam=-1 is negative",
    "fedprox(mu=-1)": "mu=-1 is negative",
    "fedrep(head_epochs=3)": "head_epochs=3 and body_epochs=None: give 1 or more for each, or neither",
    "fedrep(head_epochs=0, body_epochs=1)": "head_epochs=0 and body_epochs=1: give 1 or more for each",
    "fedrep(head=2, head_epochs=2, body_epochs=1)": "head=2 and body=1 divide a round: leave them out",
    "fedrep(head=0)": "give 1 or more for each",
    "fedrep(body=0)": "give 1 or more for each",
    "fedyogi(beta2=1.0)": "beta2=1: it must lie in [0, 1)",
    "fpl(lam=-1.0)": "fpl: lam=-1 is negative",
    "fpl(tau=0.0)": "fpl: tau=0: give a temperature above 0",
    "geometric_median(steps=0)": "steps=0",
    "geometric_median(nu=0.0)": "nu=0",
    "krum(num_malicious=-1)": "num_malicious=-1",
    "moon(mu=-1.0)": "moon: mu=-1 is negative",
    "moon(tau=0.0)": "moon: tau=0: give a temperature above 0",
    "multi_krum(num_selected=0)": "num_selected=0",
    "trimmed_mean(trim=0)": "trim=0: give 1 or more; 0 would be the mean",
}


@pytest.mark.parametrize("text", REFUSED)
def test_options_without_sense_are_refused(text):
    with pytest.raises(UsageError, match=re.escape(REFUSED[text])):
        METHODS.parse(text)
