"""Statistics of shifts against scikit-learn, SciPy and torch, and p-values against their distribution by chance."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import ks_2samp, norm
from sklearn.metrics import mutual_info_score
from torch.distributions import Normal, kl_divergence

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.diagnosis.advice import advise
from fedshift.diagnosis.concept_shift import bound_variation, concept_shift, predict_by_neighbors
from fedshift.diagnosis.feature_shift import feature_shift
from fedshift.diagnosis.shift_tests import (
    Evidence,
    Moments,
    assess,
    classify_strength,
    gini,
    label_skew,
    layer_shift,
    quantity_skew,
)
from fedshift.diagnosis.targets import target_skew
from fedshift.methods import METHODS
from fedshift.models.digits import small_cnn
from fedshift.models.mlp import abide_mlp

KINDS = ("label skew", "feature shift", "quantity skew", "concept shift")


def rng(key=0):
    return np.random.default_rng(key)


def clusters(key, clients=3, size=90, classes=3, width=6, gap=2.0):
    """Return vectors of well separated classes, their labels, and clients without any difference."""
    random = rng(key)
    y = random.integers(0, classes, clients * size)
    centers = gap * np.eye(classes, width)
    return centers[y] + random.normal(size=(len(y), width)), y, np.repeat(np.arange(clients), size)


def concepts(x, y, client, *, align=False, key=0, permutations=99):
    clients = int(client.max()) + 1
    return concept_shift(x, y, predict_by_neighbors(x, y), client, (0.5,) * clients, align, rng(key), permutations)


def test_label_divergence_is_the_mutual_information_of_client_and_label():
    counts = np.array([[30, 5, 0], [10, 10, 40]])
    found = label_skew(counts, rng(), 99)
    clients, labels = (np.repeat(place.ravel(), counts.ravel()) for place in np.indices(counts.shape))
    assert found.statistic == pytest.approx(mutual_info_score(clients, labels) / np.log(2))
    assert found.p == 0.01


def test_label_divergence_of_two_equal_clients_is_jensen_and_shannons():
    counts = np.array([[40, 10, 10], [10, 20, 30]])
    shares = counts / 60
    expected = jensenshannon(*shares, base=2) ** 2
    assert label_skew(counts, rng(), 99).statistic == pytest.approx(expected)


def test_the_distance_of_numbers_is_kolmogorov_and_smirnovs():
    random = rng(5)
    y, client = random.integers(0, 12, (90, 2)).astype(float), np.repeat([0, 1, 2], [20, 30, 40])
    y[client == 2, 1] += 3
    found = target_skew("regression", y, client, 3, rng(), 99)
    expected = [
        max(ks_2samp(y[client == c, k], y[client != c, k]).statistic for k in range(2)) for c in range(3)
    ]  # fmt: skip
    assert found.clients == pytest.approx(expected)
    assert found.statistic == pytest.approx(max(expected))
    assert found.p == 0.01


def test_labels_and_pixels_are_compared_in_bits():
    client = np.repeat([0, 1], 30)
    labels = np.stack([np.tile([0.0, 1], 30), (np.arange(60) % 10 < 3 + 5 * client)], axis=1)
    found = target_skew("multilabel", labels, client, 2, rng(), 99)
    assert found.statistic == pytest.approx(mutual_info_score(client, labels[:, 1]) / np.log(2))
    pixels = np.array([[9, 1, 0]] * 30 + [[2, 4, 4]] * 30, float)
    expected = jensenshannon([0.9, 0.1, 0], [0.2, 0.4, 0.4], base=2) ** 2
    assert target_skew("segmentation", pixels, client, 2, rng(), 99).statistic == pytest.approx(expected)


def test_p_values_of_numbers_of_random_parts_are_about_uniform():
    client = np.repeat([0, 1, 2], 20)
    p = [target_skew("regression", rng(key).normal(size=(60, 1)), client, 3, rng(key), 49).p for key in range(100)]
    assert 8 <= sum(value <= 0.2 for value in p) <= 34


def test_one_label_alone_cannot_be_skewed():
    found = label_skew([[5, 0], [7, 0]], rng(), 99)
    assert (found.statistic, found.p) == (None, None)
    assert "same label" in found.untestable_because


def test_label_p_values_of_random_parts_are_about_uniform():
    p = [label_skew(rng(key).multinomial(60, [0.5, 0.3, 0.2], 4), rng(key), 99).p for key in range(200)]
    assert 20 <= sum(value <= 0.2 for value in p) <= 60


def test_gini_by_hand():
    assert gini([3, 3, 3]) == 0
    assert gini([0, 0, 12]) == pytest.approx(2 / 3)
    assert gini([1, 2, 3]) == pytest.approx((2 * 1 + 2 * 2 + 2 * 1) / (2 * 9 * 2))
    assert quantity_skew([10, 10, 100], rng(), 99).clients == (0.25, 0.25, 2.5)


def test_sizes_are_judged_against_chance():
    assert quantity_skew([20, 180], rng(), 99).p == 0.01
    assert quantity_skew([98, 102], rng(), 99).p > 0.3


def test_what_was_not_tested_does_not_count_among_the_p_values():
    kinds = zip(KINDS, (0.04, 0.01, None, 0.03), strict=True)
    found = assess({kind: Evidence(statistic=0.9, p=p) for kind, p in kinds})
    assert [each.corrected for each in found] == pytest.approx([0.06, 0.03, None, 0.06], abs=1e-12)


def test_a_shift_is_named_if_it_is_both_significant_and_large_enough():
    def verdict(**evidence):
        return assess({"quantity skew": Evidence(**evidence)})[0]

    assert verdict(statistic=0.3, p=0.001).named
    assert not verdict(statistic=0.3, p=0.2).named
    assert not verdict(statistic=0.05, p=0.001).named
    assert not verdict(untestable_because="no reason").named


def test_label_skew_counts_above_chance():
    assert classify_strength("label skew", Evidence(statistic=0.12, chance=0.115)) == "negligible"
    assert classify_strength("label skew", Evidence(statistic=0.12, chance=0.01)) == "moderate"


def test_a_moved_client_is_told_apart_and_is_the_largest():
    x, y, client = clusters(1)
    x[client == 2, 5] += 8
    found = feature_shift(x, y, client, 3, rng(), 99)
    assert found.evidence.p == 0.01
    assert found.evidence.clients[2] == found.evidence.statistic > 0.99
    assert found.pairs[0][2] == found.pairs[2][0] > 0.99
    assert 0.35 < found.pairs[0][1] < 0.65
    assert found.pairs[1][1] is None


def test_a_shift_of_one_normal_has_the_auc_of_theory():
    random = rng(2)
    client = np.repeat([0, 1], 2000)
    x = random.normal(size=(4000, 1)) + client[:, None]
    auc = feature_shift(x, np.zeros(4000, dtype=int), client, 2, rng(), 99).evidence.statistic
    assert auc == pytest.approx(0.760, abs=0.02)  # Phi(1 / sqrt 2)


def test_a_shift_of_opposite_sign_in_two_classes_is_seen():
    x, y, client = clusters(3, classes=2)
    x[:, 4] += 4 * client * (2 * y - 1)
    assert feature_shift(x, y, client, 3, rng(), 99).evidence.statistic > 0.9


@pytest.mark.slow
def test_clients_that_differ_in_labels_alone_have_no_feature_shift():
    p = []
    for key in range(60):
        x, y, client = clusters(key, size=60)
        client = np.minimum(client + (y == 0) * (rng(key).random(len(y)) < 0.6), 2)
        p.append(feature_shift(x, y, client, 3, rng(key), 99).evidence.p)
    assert 4 <= sum(value <= 0.2 for value in p) <= 22  # 12 expected of 60
    assert sum(value <= 0.05 for value in p) <= 9


def test_classes_of_too_few_samples_are_left_out():
    x, y, client = clusters(4, clients=2, size=7, classes=2)
    found = feature_shift(x, y, client, 2, rng(), 99)
    assert (found.evidence.p, found.pairs) == (None, ())
    assert "8 samples" in found.evidence.untestable_because


def test_a_client_without_a_common_class_has_no_auc():
    x, y, client = clusters(5, classes=2)
    y[client == 2] = 2
    found = feature_shift(x, y, client, 3, rng(), 99)
    assert found.evidence.clients[2] is None
    assert found.pairs[0][2] is None
    assert found.pairs[0][1] is not None


def test_constant_features_tell_nothing():
    x, y, client = clusters(6)
    found = feature_shift(np.ones_like(x), y, client, 3, rng(), 99)
    assert (found.evidence.statistic, found.evidence.p) == (0.5, 1.0)


def test_layer_divergence_equals_torchs():
    random = rng(7)
    mean = random.normal(size=(60, 2)) + np.repeat([0, 3], 30)[:, None]
    client = np.repeat([0, 1], 30)
    found = layer_shift(
        Moments(layer="bn", mean=mean, square=mean**2), np.zeros(60, dtype=int), client, 2, rng(), 99
    )  # fmt: skip
    everything = Normal(torch.tensor(mean.mean(axis=0)), torch.tensor(mean.std(axis=0)))
    for own, value in zip((mean[:30], mean[30:]), found.clients, strict=True):
        gaussian = Normal(torch.tensor(own.mean(axis=0)), torch.tensor(own.std(axis=0)))
        both = (kl_divergence(gaussian, everything) + kl_divergence(everything, gaussian)) / 2
        assert value == pytest.approx(float(both.mean()), rel=1e-3)
    assert found.p == 0.01


def test_layer_divergence_that_labels_explain_is_chance():
    p = []
    for key in range(30):
        random = rng(key)
        y = np.repeat([0, 1], 60)
        client = np.where(random.random(120) < 0.8, y, 1 - y)
        mean = random.normal(size=(120, 3)) + 5 * y[:, None]
        moments = Moments(layer="bn", mean=mean, square=mean**2 + 1)
        p.append(layer_shift(moments, y, client, 2, rng(key), 99).p)
        assert layer_shift(moments, np.zeros_like(y), client, 2, rng(key), 99).p == 0.01
    assert sum(value <= 0.2 for value in p) <= 12  # 6 expected of 30


def test_swapped_labels_are_concept_shift():
    x, y, client = clusters(9)
    y = np.where((client == 1) & (y < 2), 1 - y, y)
    found = concepts(x, y, client)
    assert found.p == 0.01
    assert found.clients[1] == found.statistic > 0.3


def test_labels_that_agree_are_none():
    p = [concepts(*clusters(key, size=60), key=key, permutations=49).p for key in range(20)]
    assert sum(value <= 0.1 for value in p) <= 5


@pytest.mark.slow
def test_label_skew_is_no_concept_shift_even_where_classes_overlap():
    named = 0
    for key in range(12):
        x, y, client = clusters(key, size=150, gap=0.7)
        client = np.minimum(client + (y == 0) * (rng(key).random(len(y)) < 0.7), 2)
        found = concepts(x, y, client, key=key)
        named += found.p <= 0.05 and found.statistic >= 0.05
    assert named <= 2


def test_an_offset_is_no_concept_shift_once_clients_are_aligned():
    x, y, client = clusters(10, size=300, classes=2, gap=2.5)
    x[client == 0, 0] -= 1.6
    x[client == 0, 1] += 1.6  # toward the other class
    assert concepts(x, y, client).statistic > 0.08
    assert concepts(x, y, client, align=True).statistic < 0.05


def test_clients_that_do_not_overlap_are_not_judged():
    x, y, client = clusters(11)
    found = concept_shift(x, y, predict_by_neighbors(x, y), client, (0.99, 0.5, None), False, rng(), 99)
    assert (found.p, found.clients) == (None, (None, None, None))
    assert "overlap" in found.untestable_because
    x[client == 0] += 50
    assert concepts(x, y, client).clients[0] is None


@pytest.mark.parametrize("shift", [0.1, 0.5, 1.0, 2.0])
def test_what_looks_may_explain_is_no_less_than_the_total_variation_of_two_normals(shift):
    auc, variation = norm.cdf(shift / np.sqrt(2)), 2 * norm.cdf(shift / 2) - 1
    assert variation <= bound_variation(auc) <= 1.5 * variation


def test_what_looks_may_explain_at_its_ends():
    assert [bound_variation(auc) for auc in (None, 0.4, 0.5, 1.0)] == [0, 0, 0, 1]


def test_labels_that_differ_no_more_than_looks_may_explain_are_not_held_against_a_client():
    x, y, client = clusters(9, size=150, gap=4)
    y = np.where((client == 1) & (y < 2), 1 - y, y)
    alike, apart = (
        concept_shift(x, y, predict_by_neighbors(x, y), client, (auc, auc, auc), False, rng(), 99)
        for auc in (0.5, 0.85)
    )
    agreement = (alike.statistic - apart.statistic) / 0.7
    assert alike.p == 0.01
    assert 0.8 < agreement <= 1  # of these classes a client's own neighbors nearly always have the label
    assert (apart.p, apart.statistic < 0.05) == (1.0, True)


def test_the_class_is_predicted_by_vote_of_neighbors():
    x, y, _ = clusters(12, gap=8)
    wrong = y.copy()
    wrong[:5] = (y[:5] + 1) % 3
    assert (predict_by_neighbors(x, wrong) == y).all()


def findings(**strengths):
    sizes = {"weak": 0.6, "moderate": 0.66, "strong": 0.99}
    label = {"weak": 0.05, "moderate": 0.2, "strong": 0.5}
    effects = {"label": label, "feature": sizes, "quantity": label | {"strong": 0.7, "moderate": 0.3, "weak": 0.2},
               "concept": {"weak": 0.1, "moderate": 0.2, "strong": 0.6}}  # fmt: skip
    return assess({
        kind: Evidence(statistic=effects[kind.split()[0]][strengths[kind.split()[0]]], chance=0.0, p=0.001)
        if kind.split()[0] in strengths else Evidence(statistic=0.0, chance=0.0, p=1.0)
        for kind in KINDS
    })  # fmt: skip


def names(advice):
    return [each.method for each in advice.methods]


def test_advice_on_feature_shift_begins_with_fedbn_and_on_devices_does_not_have_it():
    found = findings(feature="strong")
    assert names(advise(found, clients=5, images=True))[:3] == ["fedavg", "fedbn", "fedwon"]
    many = advise(found, clients=100, images=True)
    assert names(many) == ["fedavg", "fedwon", "gn", "fedbabu"]
    assert "100 clients" in many.cautions[0]


def test_label_skew_puts_fedbn_behind_and_says_why():
    both = advise(findings(feature="strong", label="strong"), clients=5, images=True)
    assert names(both).index("fedwon") < names(both).index("fedbn")
    assert any("Beware of FedBN" in caution for caution in both.cautions)
    weak = advise(findings(feature="strong", label="weak"), clients=5, images=True)
    assert names(weak)[1] == "fedbn"


def test_advice_on_masks_speaks_of_shares_of_classes_and_says_from_where_its_numbers_are():
    found = findings(label="strong")
    masks = advise(found, clients=5, images=True, task="segmentation")
    reasons = " ".join(each.reason for each in masks.methods)
    assert "drift toward a client's own shares of classes" in reasons
    assert any("papers report classification" in caution for caution in masks.cautions)
    classes = advise(found, clients=5, images=True)
    assert "fedrod" in names(classes)
    assert "fedrod" not in names(masks)  # it counts one class a sample
    assert "own classes" in " ".join(each.reason for each in classes.methods)
    assert not any("papers report classification" in caution for caution in classes.cautions)


def test_vectors_get_no_fedwon_which_needs_convolutions():
    assert "fedwon" not in names(advise(findings(feature="strong"), clients=5, images=False))


def test_every_shift_is_answered_and_no_shift_is_too():
    advice = advise(
        findings(feature="strong", label="weak", quantity="moderate", concept="weak"), clients=5, images=True
    )
    assert {"fedbn", "fednova", "ditto", "gn"} & set(names(advice)) >= {"fedbn", "fednova"}
    assert len(names(advice)) <= 9
    assert names(advise(findings(), clients=5, images=True))[0] == "fedavg"
    assert any("weak" in caution for caution in advise(findings(concept="weak"), clients=5, images=True).cautions)


@pytest.mark.parametrize(("model", "shape"), [(small_cnn, (1, 8, 8)), (abide_mlp, (5,))])
def test_whatever_is_found_the_recommended_methods_fit_the_model(model, shape):
    recommended = set()
    for count in range(5):
        for kinds in combinations(("label", "feature", "quantity", "concept"), count):
            for clients in (5, 100):
                found = findings(**dict.fromkeys(kinds, "strong"))
                recommended |= set(names(advise(found, clients=clients, images=len(shape) == 3)))
    assert len(recommended) > 12
    for method in METHODS.parse_all(",".join(recommended)):
        plan = prepare(method, model(shape, 2), optimizer=SGD(lr=0.1), sample=torch.zeros(1, *shape))
        assert plan.trained
