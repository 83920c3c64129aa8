"""Seeded faults: which tests notice that a line of the package is wrong, one line after another.

Each fault is a mistake that a careful engineer might make: a text in a function, and what would stand there by mistake.
It is put into a scratch worktree of a commit, and the tests that may notice it run until the first fails. Mutation
analysis is DeMillo, Lipton and Sayward 1978 ("Hints on Test Data Selection", Computer 11(4)); here faults are chosen by
hand, where an error would go unseen in results.

    python benchmarks/mutations.py                 # all, on HEAD; what is in the results is not run again
    python benchmarks/mutations.py --only dp-      # those whose name contains this
    python benchmarks/mutations.py --check         # only whether every fault still finds its line and its tests

A fault is known by the function, wherever that is now, and the text in it: when code moves, correct the fault's line.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A text ``old`` in ``function`` (a qualified name) of ``file`` that becomes ``new``, and tests that may notice."""

    name: str
    file: str
    function: str
    old: str
    new: str
    tests: str


CORE = (
    Fault("merged-sums-forget-their-weight", "core/means.py", "StreamingMean.merge",
          "self._total += other._total", "pass", "tests/core/test_means.py"),
    Fault("merged-deviations-from-another-start", "core/means.py", "StreamingMean.merge",
          "total += (other._first[name] - self._first[name]) * other._total", "pass",
          "tests/core/test_means.py"),
    Fault("counters-truncated", "core/means.py", "cast_to", "values.round()", "values",
          "tests/core/test_means.py"),
    Fault("trimmed-at-one-end", "core/means.py", "compute_trimmed_mean",
          "slice(trim, len(states) - trim)", "slice(trim, None)", "tests/methods/test_robust.py"),
    Fault("shares-of-participants-alone", "core/server_round.py", "receive",
          "sizes.total", "sum(sizes.effective[name] for name, _ in updates)",
          "tests/methods/test_scaffold.py"),
    Fault("a-claim-decides-alone", "core/means.py", "bound_shares", "min(each, level)", "each",
          "tests/core/test_means.py"),
    Fault("summed-in-order-of-arrival", "core/server_round.py", "StreamingAggregator.__init__",
          "sorted(names, reverse=True)", "list(names)[::-1]", "tests/laws/test_methods.py"),
    Fault("frozen-a-round-late", "core/kernel.py", "_assemble", "server.round >= plan.freeze_from",
          "server.round > plan.freeze_from", "tests/methods/test_fixbn.py"),
    Fault("statistics-move-when-frozen", "core/step.py", "compute_objective",
          "training=True, frozen=job.frozen,", "training=True, frozen=False,",
          "tests/methods/test_fixbn.py"),
    Fault("next-rounds-learning-rate", "core/kernel.py", "load_state", "find_lr(server.round)",
          "find_lr(server.round + 1)", "tests/engines/test_plain_loop.py"),
    Fault("adopted-again-after-training", "core/kernel.py", "personal_entries",
          "client.personal if client.steps else client.personal | pick(server.shared, plan.adopted)",
          "client.personal | pick(server.shared, plan.adopted)", "tests/methods/test_hbn.py"),
    Fault("momentum-kept-between-rounds", "core/kernel.py", "client_final",
          "job.optimizer if plan.optimizer.keep else {}", "job.optimizer",
          "tests/engines/test_plain_loop.py"),
    Fault("upload-not-checked", "core/kernel.py", "client_final", "check_sends(plan, index, sent)",
          "pass", "tests/core/test_disclosure.py"),
    Fault("rules-not-tried", "core/dry_run.py", "check_run",
          "_run_rounds(replace(plan, rules=watched, optimizer=steady), x, y)", "pass",
          "tests/core/test_dry_run.py"),
    Fault("memory-of-a-rule-not-compared", "core/dry_run.py", "_list_compared",
          '[(bound.memory, returned[0], "keep", "Declared.memory")]', "[]", "tests/core/test_dry_run.py"),
    Fault("numbers-not-finite-pass", "core/dry_run.py", "_is_finite", "bool(tensor.isfinite().all())", "True",
          "tests/core/test_dry_run.py"),
    Fault("the-loss-is-dropped", "core/dry_run.py", "_find_lost_loss", "slope is None or not slope", "False",
          "tests/core/test_dry_run.py"),
    Fault("a-model-completed-by-the-one-in-training", "core/rule.py", "Batch.run",
          "self.network.params.keys() - entries.keys()", "entries.keys() - entries.keys()",
          "tests/core/test_dry_run.py"),
    Fault("a-teacher-in-training", "core/rule.py", "Step.start", "self.loaded | self._job.personal",
          "{**self.params, **self.buffers, **self.loaded}", "tests/methods/test_local_losses.py"),
    Fault("last-batch-dropped", "core/work.py", "_bounds", "[*range(0, samples, size), samples]",
          "[*range(0, samples - samples % size + 1, size)]", "tests/core/test_work.py"),
    Fault("a-group-of-batches-runs-into-the-next-pass", "core/work.py", "Work.steps_of_round",
          "min(done + self.batches, (done // per_pass + 1) * per_pass)", "done + self.batches",
          "tests/core/test_work.py"),
    Fault("all-clients-in-one-order", "core/work.py", "_draw_order", 'stream(seed, "order", client, number)',
          'stream(seed, "order", number)', "tests/core/test_work.py"),
    Fault("every-pass-in-one-order", "core/work.py", "_draw_order", 'stream(seed, "order", client, number)',
          'stream(seed, "order", client)', "tests/core/test_work.py"),
    Fault("names-of-clients-collide", "utils/state.py", "_escape", '.replace("/", "%2F")', "",
          "tests/utils/test_utils.py"),
    Fault("a-second-rate-is-dropped", "experiments/factory.py", "make_optimizer",
          "text or name in given", "False", "tests/test_api.py"),
    Fault("a-rate-fixed-by-a-tape", "engines/stepper.py", "Stepper._compute", "counter=steps, lr=lr)",
          "counter=steps)", "tests/engines/test_stacked.py"),
    Fault("range-of-float16-not-said", "engines/half_precision.py", "_find_overflow", "output == inf", "False",
          "tests/engines/test_precision.py"),
    Fault("folds-in-the-order-of-writing", "core/plan.py", "Plan.folds",
          "rules[index].moves - rules[index].aggregates", "0", "tests/core/test_server_optimizer.py"),
    Fault("server-momentum-damped", "methods/fedavgm.py", "Momentum.fold", "+ change for",
          "+ (1 - self.beta) * change for", "tests/core/test_server_optimizer.py"),
    Fault("weight-decay-without-the-rate", "core/optimizer.py", "AdamW.update_", "1 - lr * self.weight_decay",
          "1 - self.weight_decay", "tests/core/test_optimizer.py"),
)  # fmt: skip

BUFFERS = (
    Fault("buffers-averaged", "core/network.py", "Network.whole", "if entry.kind in WHOLE", "if False",
          "tests/core/test_buffers.py"),
    Fault("state-of-the-last-client", "core/server_round.py", "StreamingAggregator._take_whole",
          "weight > self._largest", "True", "tests/laws/test_networks.py"),
    Fault("state-loaded-every-round", "core/buffers.py", "list_kept", 'entry.kind == "state"', "False",
          "tests/core/test_buffers.py"),
    Fault("vectors-of-another-weight", "core/buffers.py", "fit_spectral_norms",
          "isinstance(step, _SpectralNorm) and own", "False", "tests/core/test_buffers.py"),
    Fault("batch-norm-by-class-alone", "core/buffers.py", "_observe", "counts or entry.name in kinds", "False",
          "tests/core/test_buffers.py"),
    Fault("running-sums-averaged", "core/buffers.py", "_find_averages", "< 1 - CLOSE / 10", "< 2",
          "tests/core/test_buffers.py"),
    Fault("infinite-constants-diverge", "engines/engine.py", "Engine.refuse_divergence",
          "state.keys() - self.plan.whole", "state", "tests/core/test_buffers.py"),
    Fault("frozen-statistics-estimated", "evaluation/batch_norm.py", "list_batch_norms", "and entry.moves", "",
          "tests/core/test_buffers.py"),
    Fault("uncalled-layers-estimated", "evaluation/batch_norm.py", "reestimate_statistics", "not moments.count",
          "False", "tests/evaluation/test_policies.py"),
    Fault("permutations-averaged", "aggregation/__init__.py", "_has_mean", "first.ndim == 0 and", "",
          "tests/aggregation/test_aggregation.py"),
)  # fmt: skip

METHODS = (
    Fault("dp-noise-on-the-mean", "methods/dp.py", "PrivateMean.fold", " / len(received) if", " if",
          "tests/methods/test_dp.py"),
    Fault("dp-noise-of-every-round-alike", "methods/dp.py", "PrivateMean._draw_noise",
          "server.network.text, server.before.round,", "server.network.text,", "tests/methods/test_dp.py"),
    Fault("dp-sgd-clips-each-layer", "methods/dp_sgd.py", "PrivateGradients.combine_samples",
          "torch.stack(squares).sum(dim=0)", "torch.stack(squares).amax(dim=0)", "tests/methods/test_dp_sgd.py"),
    Fault("dp-sgd-noise-without-the-clip", "methods/dp_sgd.py", "PrivateGradients.combine_samples",
          "self.noise_multiplier * self.clipping_norm", "self.noise_multiplier", "tests/methods/test_dp_sgd.py"),
    Fault("krum-one-neighbor-fewer", "methods/krum.py", "Krum.fold", "clients - self.num_malicious - 1]",
          "clients - self.num_malicious - 2]", "tests/methods/test_robust.py"),
    Fault("scaffold-counts-clients-equally", "methods/scaffold.py", "ControlVariates.fold",
          "c + each.share * upload[name]", "c + upload[name] / len(server.received)", "tests/methods/test_scaffold.py"),
    Fault("fednova-shares-not-normalized", "methods/fednova.py", "NormalizedAveraging.fold",
          "[each.size / total for each in received]", "[each.size for each in received]",
          "tests/methods/test_fednova.py"),
    Fault("fednova-mean-length-unweighted", "methods/fednova.py", "NormalizedAveraging.fold",
          "sum(share * length for share, length in zip(shares, lengths, strict=True))", "sum(lengths) / len(lengths)",
          "tests/methods/test_fednova.py"),
    Fault("feddyn-forgets-who-sat-out", "methods/feddyn.py", "GradientMemory.fold", "self.alpha * share * changes",
          "self.alpha * changes", "tests/methods/test_feddyn.py"),
    Fault("fedfa-variance-of-samples", "methods/fedfa.py", "SharedVariances.fold", ".var(dim=0, correction=0)",
          ".var(dim=0)", "tests/methods/test_fedfa.py"),
    Fault("fedrdn-one-client-a-batch", "methods/fedrdn.py", "ClientStatistics.batch",
          "draw_bits(step.key, 0, len(x))", "draw_bits(step.key, 0, 1).expand(len(x))",
          "tests/methods/test_fedrdn.py"),
    Fault("fedpac-variance-not-of-the-mean", "methods/fedpac.py", "AlignedFeatures.end",
          '.clamp(min=0) / client.memory["samples"]', ".clamp(min=0)", "tests/methods/test_fedpac.py"),
    Fault("fedpac-absent-classes-keep-their-share", "methods/fedpac.py", "AlignedFeatures.end",
          " * (counts_K > 0)", "", "tests/methods/test_fedpac.py"),
    Fault("fedpac-features-start-as-loaded", "methods/fedpac.py", "AlignedFeatures.loss",
          '(now == buffers["start"])', "torch.stack([(step.params[n] == step.loaded[n]).all() for n in self.body])",
          "tests/methods/test_fedpac.py"),
    Fault("gperxan-guided-by-the-local-classifier", "methods/gperxan.py", "Guidance.loss", "step.loaded[name]",
          "step.params[name]", "tests/methods/test_gperxan.py"),
    Fault("rules-draw-under-one-key", "core/rule.py", "Step.key", "derive_key(self._batch.key, self.bound.name)",
          'derive_key(self._batch.key, "rule")', "tests/laws/test_rules.py"),
    Fault("layers-draw-alike", "nn/dropout.py", "take_draws", "islice(draws.numbers, numbers)",
          "islice(count(), numbers)", "tests/laws/test_rules.py"),
    Fault("amplitudes-exchanged-and-overwritten", "methods/feddg_elcfs.py", "SentAmplitudes.bind",
          "any(isinstance(entry.owner, AmplitudeNorm) for entry in network.entries)", "False",
          "tests/methods/test_feddg_elcfs.py"),
    Fault("fn-before-what-replaces-the-classifier", "core/method.py", "_place_surgery",
          'getattr(change, "stage", 1)', "1", "tests/methods/test_fn.py"),
    Fault("fn-unit-length", "methods/fn.py", "FeatureScaling.forward", " * sqrt(z.shape[-1])", "",
          "tests/methods/test_fn.py"),
    Fault("clipping-in-the-order-of-writing", "core/method.py", "_place_rule", "if changes else", "if False else",
          "tests/methods/test_composition.py"),
    Fault("modifiers-in-the-order-of-writing", "core/method.py", "_join_titles", "each[0]", "0",
          "tests/methods/test_composition.py"),
    Fault("a-weighting-that-nothing-reads", "core/method.py", "Method.resolve_weighting", "if rule.weighs else",
          "if True else", "tests/methods/test_composition.py"),
    Fault("statistics-that-nothing-reads", "core/checks.py", "_list_unread", "if kept and not reads_model",
          "if False", "tests/methods/test_composition.py"),
    Fault("entries-kept-that-nothing-trains", "core/checks.py", "_list_unread", "if kept and not any",
          "if False and not any", "tests/methods/test_composition.py"),
    Fault("refused-for-a-lost-batch-norm", "core/checks.py", "select_entries",
          "if replacing and", "if False and", "tests/methods/test_composition.py"),
    Fault("outputs-changed-for-one-network-alone", "core/rule.py", "Step.loss_at",
          "batch.change_outputs(passed, {**batch.params, **batch.job.rest, **entries})", "passed[0]",
          "tests/methods/test_composition.py"),
)  # fmt: skip

ENGINES = (
    Fault("values-in-place-of-the-networks-own", "core/network.py", "compute_features",
          "_placed(network, state, in_place=in_place)", "_placed(network, state, in_place=False)",
          "tests/laws/test_networks.py"),
    Fault("unused-layers-decay", "engines/stepper.py", "_differentiate", "allow_unused=True", "materialize_grads=True",
          "tests/laws/test_networks.py"),
    Fault("state-outside-of-entries-passes", "core/probe.py", "probe_network",
          "not probe.repeats(first)", "False", "tests/laws/test_networks.py"),
    Fault("late-counters-pass", "core/probe.py", "probe_network", "FAR - 1 if", "counter.value if",
          "tests/laws/test_networks.py"),
    Fault("late-lists-pass", "nn/attributes.py", "_resize", "min(length, LONGEST)", "0",
          "tests/laws/test_networks.py"),
    Fault("lanes-not-tried", "engines/stacked.py", "_try_lanes",
          "find_difference(plan, job.state, entries, reference)", "None", "tests/laws/test_networks.py"),
    Fault("evaluation-writes-into-the-server", "core/network.py", "forward",
          "state if training or not network.traits.writes_in_evaluation else clone(state)", "state",
          "tests/laws/test_networks.py"),
    Fault("restarted-lanes-share-what-they-loaded", "engines/stacked.py", "Stacked._restart",
          "clone(lane.params), clone(lane.rest)", "lane.params, lane.rest", "tests/laws/test_pairs.py"),
    Fault("channels-last-groups-under-torch-func", "nn/lanes.py", "MergedLanes.__torch_function__",
          "args[0].contiguous(), *args[1:]", "args", "tests/laws/test_pairs.py"),
    Fault("stacked-weighs-by-samples-always", "engines/stacked.py", "Stacked._finish_together",
          "list(map(self._weigh, lanes))",
          "[float(sum(lane.sizes)) for lane in lanes]",
          "tests/laws/test_engines.py"),
    Fault("stacked-forgets-the-steps-planned", "engines/stacked.py", "Stacked._group_steps",
          "len(lanes[number].batches) if self.plan.phases_need_step_count else 0", "0",
          "tests/laws/test_engines.py"),
    Fault("keys-copied-in-each-step", "engines/stacked.py", "_Samples.take",
          "self._keys_SK[at]", "self._keys_SK[at].cpu().to(self.device)",
          "tests/engines/test_fake_gpu.py"),
    Fault("identity-weights-add-up-to-more", "engines/identity.py", "Identity.train", "/ sum(raw)", "/ max(raw)",
          "tests/engines/test_identity.py"),
    Fault("draws-alike-each-round", "engines/sequential.py", "Sequential._train",
          'seed_generators(self.seed, "torch", name, client.steps)', 'seed_generators(self.seed, "torch", name)',
          "tests/laws/test_networks.py"),
    Fault("python-draws-of-the-process", "utils/random_streams.py", "seed_generators",
          "random.seed(bits % 2**32)\n    ", "", "tests/laws/test_networks.py"),
    Fault("checkpoint-draws-another-mask", "nn/dropout.py", "take_draws", "if not again:", "if True:",
          "tests/nn/test_dropout.py"),
    Fault("shared-layers-trained", "models/__init__.py", "_returns_new",
          "{*network.modules(), *network.parameters()}.isdisjoint({*other.modules(), *other.parameters()})",
          "network is not other", "tests/laws/test_networks.py"),
    Fault("overridden-parameters-trained", "core/checks.py", "_list_unsupported_entries",
          "!= {*map(id, parameters.values())}", "== set()", "tests/laws/test_networks.py"),
    Fault("features-of-limited-weights", "engines/frozen.py", "_is_sound", "(plan.initial, far)", "(plan.initial,)",
          "tests/engines/test_frozen.py"),
    Fault("features-of-draws", "engines/frozen.py", "_agrees", "not draws and ", "", "tests/engines/test_frozen.py"),
    Fault("hidden-buffers-not-exported", "utils/state.py", "load_entries", "*network.named_buffers()", "",
          "tests/laws/test_networks.py"),
    Fault("a-client-gets-no-mix", "engines/sequential.py", "Sequential._train",
          "plan, server = self.plan, broadcast(server, name)", "plan = self.plan",
          "tests/methods/test_fedap.py"),
    Fault("pool-returns-memory-of-the-next-client", "utils/execution/shared_memory.py", "SharedMemoryBuffer.take",
          "self._view(starts[number], dtype, shape).clone()", "self._view(starts[number], dtype, shape)",
          "tests/engines/test_plain_loop.py tests/utils/test_shared_memory.py"),
    Fault("dropout-of-all-clients-alike", "engines/engine.py", "Engine.draw_keys", '"dropout", name, step',
          '"dropout", step',
          "tests/engines/test_plain_loop.py"),
    Fault("augmented-alike-each-step", "engines/engine.py", "Engine.load_batch", '"augment", name, step',
          '"augment", name',
          "tests/engines/test_plain_loop.py tests/experiments/test_losses_and_augmentation.py"),
    Fault("masks-move-otherwise", "engines/engine.py", "Engine.load_batch", "augment_masks(augment, y, stream(*key))",
          'augment_masks(augment, y, stream(*key, "masks"))',
          "tests/engines/test_plain_loop.py tests/experiments/test_losses_and_augmentation.py"),
    Fault("features-of-other-entries", "engines/frozen.py", "Inputs.fit",
          "all(torch.equal(server.shared[name], plan.initial[name]) for name in fixed)", "True",
          "tests/engines/test_frozen.py"),
    Fault("features-of-a-batch", "engines/frozen.py", "_agrees",
          "equal and not draws and torch.allclose(alone, features[:1], rtol=1e-4, atol=1e-5)", "equal and not draws",
          "tests/engines/test_frozen.py"),
)  # fmt: skip

DATA = (
    Fault("frames-as-stored", "data/decoding/dicom.py", "read_values", "order or range(frames)", "range(frames)",
          "tests/data/decoding/test_dicom_values.py"),
    Fault("slope-of-the-first-frame", "data/decoding/dicom.py", "read_values", "stored[frame], frame",
          "stored[frame], 0", "tests/data/decoding/test_dicom_values.py"),
    Fault("white-is-0-not-inverted", "data/decoding/images.py", "_find_stored_numbers", "lambda x: top - x",
          "lambda x: x", "tests/data/decoding/test_pictures.py"),
    Fault("microvolts-are-volts", "data/decoding/signals.py", "_convert_units", "_MICRO)", "1e3)",
          "tests/data/files/test_signals.py"),
    Fault("slices-left-is-right", "data/decoding/dicom.py", "read_series", "affine[:3] *= _LPS_TO_RAS[:, None]", "pass",
          "tests/data/files/test_dicom.py"),
    Fault("slices-turned-by-file-names", "data/decoding/dicom.py", "stack_slices", "return np.stack(values)",
          "return np.stack(values)[np.argsort([file.name for file in series.files])]",
          "tests/data/files/test_dicom.py"),
    Fault("validation-samples-in-training", "data/federation.py", "Federation.hold_out",
          "train=client.train.take(index[held:])", "train=client.train.take(index)", "tests/data/test_federation.py"),
    Fault("drawn-test-rows-in-training", "data/partition.py", "split_stratified",
          "return np.flatnonzero(~drawn), np.flatnonzero(drawn)", "return np.arange(len(y)), np.flatnonzero(drawn)",
          "tests/data/test_partition.py tests/data/datasets/test_heart_disease.py tests/data/files"),
    Fault("test-rows-fit-the-scale", "data/readers/tables.py", "_prepare_clients",
          "np.flatnonzero(training), columns", "np.arange(len(x)), columns", "tests/data/files/test_tables.py"),
    Fault("labels-numbered-by-each-client", "data/readers/folders.py", "read",
          "labels[file.category] for file in own.images",
          "sorted({f.category for f in own.images}).index(file.category) for file in own.images",
          "tests/data/files/test_images.py tests/data/files"),
    Fault("labels-mapped-backwards", "data/joining.py", "match_labels", "number[split.y]", "number.argsort()[split.y]",
          "tests/data/test_agreement.py tests/data/test_objects.py tests/new_clients/test_site_data.py"),
    Fault("classes-not-shuffled", "data/partition.py", "_cut", "rng.permutation(index)", "index",
          "tests/data/test_partition.py"),
    Fault("joined-stores-start-at-0", "data/samples.py", "number_rows", "starts[part.store, key] + part.rows",
          "part.rows", "tests/data/test_lazy_datasets.py tests/data/test_stores.py tests/data/test_samples.py"),
    Fault("missing-category-is-none-of-them", "data/readers/tables.py", "spread",
          "np.where(np.isnan(values)[:, None], np.nan, ", "np.where(False, np.nan, ",
          "tests/data/files/test_tables.py"),
)  # fmt: skip

JUDGMENTS = (
    Fault("usual-values-of-newcomers", "data/far_values.py", "measure_training",
          "client.name not in newcomers and ", "", "tests/data/test_far_values.py"),
    Fault("usual-values-told-under-noise", "export/source.py", "make_model", " and not hidden", "",
          "tests/export/test_export.py"),
    Fault("units-judged-by-means-alone", "data/usual_values.py", "UsualValues.list_apart", "& (not few)", "& False",
          "tests/data/test_far_values.py"),
    Fault("far-values-judged-after-scaling", "data/readers/tables.py", "prepare_rows",
          "find_outlying(values[:, 0])", "find_outlying(values[:, 0] * 0)",
          "tests/data/checks/test_quality.py"),
    Fault("codes-for-missing-values-are-numbers", "data/readers/tables.py", "_describe_numerals",
          "if text.lower() in CODES", "if text in ()", "tests/data/files/test_tables.py"),
    Fault("a-point-is-always-decimal", "data/columns.py", "_find_point", '"?" if re', '"." if re',
          "tests/data/files/test_table_texts.py"),
    Fault("names-that-occur-once-are-leaks", "data/checks/label_leaks.py", "_tally_classes", "(sizes == 1).sum()",
          "0.0", "tests/data/checks/test_quality.py"),
)  # fmt: skip

FLOWER = (
    Fault("what-wraps-a-strategy-unheeded", "flower/apps/strategy.py", "MethodStrategy._adopt",
          "shared=shared)", "shared=like)", "tests/flower/test_apps.py"),
    Fault("mods-inside-keep-local", "flower/apps/mod.py", "keep_local", "raise UsageError(", "print(",
          "tests/flower/test_apps.py"),
    Fault("first-values-of-the-clients-own-net", "flower/apps/mod.py", "_read_first",
          "store.initial | whole | (load(packed) if isinstance(packed, bytes) else {})", "store.initial",
          "tests/flower/test_local.py"),
    Fault("site-sends-unchecked", "flower/site/trial.py", "SiteTrial.train",
          "check_upload(plan, update.shared, update.memory)", "pass", "tests/flower/test_site.py"),
    Fault("counts-may-be-impossible", "flower/coordinator/answers.py", "RowReader._check",
          " or not self.task.plausible(counts)", "", "tests/flower/test_faults.py"),
    Fault("site-says-its-own-weight", "flower/coordinator/remote_engine.py", "RemoteEngine._read_upload",
          "(report.weight, report.steps) != (used, len(steps))", "report.steps != len(steps)",
          "tests/flower/test_faults.py"),
    Fault("measured-on-what-is-not-disclosed", "flower/coordinator/remote_engine.py", "RemoteEngine._list_splits",
          " if split in self.nodes.known[name].measures", "", "tests/flower/test_coordinator.py"),
    Fault("weights-bounded-by-default", "flower/coordinator/remote_engine.py", "RoundOptions",
          "max_share: float = 1.0", "max_share: float = 0.5", "tests/flower/test_faults.py tests/flower/test_serve.py"),
    Fault("an-outlier-is-remembered", "flower/coordinator/rounds.py", "UpdateLengths.find_outliers",
          " if name not in outliers", "", "tests/flower/test_faults.py"),
    Fault("trained-though-too-few-agree", "flower/coordinator/coordinator.py", "Coordinator._review", ") < enough:",
          ") < 0:", "tests/flower/test_coordinator.py"),
    Fault("sites-hear-no-reason", "flower/coordinator/nodes.py", "Nodes.say", "if address:", "if False:",
          "tests/flower/test_nodes.py"),
    Fault("an-answer-counts-each-time", "flower/coordinator/nodes.py", "Nodes.ask", "if name not in missing:",
          "if False:", "tests/flower/test_nodes.py"),
    Fault("a-stop-waits-without-a-word", "flower/coordinator/nodes.py", "Nodes.ask", "missing and self.stop.is_set()",
          "False", "tests/flower/test_nodes.py tests/flower/test_serve.py"),
    Fault("a-name-without-its-key", "flower/coordinator/nodes.py", "Nodes._check_description",
          "not self._holds_key(name, address)", "False", "tests/flower/test_nodes.py"),
    Fault("requests-of-unknown-keys", "flower/coordinator/link.py", "KnownNodes._refuse", "not is_signed(key, headers)",
          "False", "tests/flower/test_link.py"),
    Fault("one-stranger-takes-all-connections", "flower/coordinator/link.py", "Connections.admits",
          "OF_ADDRESS", "10**9", "tests/flower/test_link.py"),
    Fault("record-without-chain", "flower/site/record.py", "Record.append", "_digest(before, row)", '_digest("", row)',
          "tests/flower/test_gate.py"),
    Fault("kind-that-declares-nothing-answered", "flower/site/gate.py", "Gate.admit",
          "QUESTIONS.get(question.kind)", 'QUESTIONS.get(question.kind, QUESTIONS["tell"])',
          "tests/flower/test_gate.py"),
    Fault("answer-beyond-its-kind-leaves", "flower/site/gate.py", "Gate.release",
          "if beyond or answer.kind != asks.answer:", "if answer.kind != asks.answer:", "tests/flower/test_gate.py"),
    Fault("rounds-go-on", "flower/site/gate.py", "Gate.check", "settings.rounds - uploads", "10**9",
          "tests/flower/test_gate.py"),
    Fault("an-answer-about-other-data-is-the-same", "flower/site/gate.py", "Gate._identify",
          '"data": trial.data.fingerprint, ', "", "tests/flower/test_gate.py"),
    Fault("another-experiment-is-not-counted", "flower/site/record.py", "Record.count", "trial, without",
          'trial or "nothing", without', "tests/flower/test_gate.py"),
    Fault("samples-of-an-upload-counted-twice", "flower/site/review.py", "count_distinct", "step // len(bounds)", "0",
          "tests/flower/test_gate.py"),
    Fault("privacy-spent-before-forgotten", "flower/site/policy.py", "Limits._check_epsilon",
          "before + uses / mechanism", "uses / mechanism", "tests/flower/test_review.py"),
    Fault("labels-of-sites-in-their-own-order", "flower/coordinator/descriptions.py", "_make_client",
          "[names.index(name) for name in described.class_names] or range(described.classes)",
          "range(described.classes)", "tests/flower/test_descriptions.py"),
    Fault("a-state-of-another-past", "flower/site/state.py", "SiteState.load_after",
          'upload and facts.get("upload", upload) != upload', "False", "tests/flower/test_remote_engine.py"),
)  # fmt: skip

EVALUATION = (
    Fault("global-rows-of-personal-models", "evaluation/metrics.py", "evaluate_clients",
          "shared is not None and not plan.personalizes", "shared is not None",
          "tests/evaluation/test_metrics.py"),
    Fault("clients-averaged-equally-for-newcomers", "evaluation/unseen_clients.py",
          "PolicyContext._average", "weight or 1.0", "1.0", "tests/evaluation/test_unseen_clients.py"),
    Fault("errors-of-joining-clients-untold", "new_clients/site_data.py", "load_site",
          "check_data(made, spec.on_data_error)", "made", "tests/cli/test_data_errors.py"),
    Fault("tuned-on-test-samples", "experiments/trial.py", "Trial._running_state", "client.name, client.train, augment",
          "client.name, client.test, augment", "tests/methods/test_fedbabu.py"),
    Fault("mixed-with-the-other-share", "evaluation/policies/mixed.py", "mixed",
          "prior / (prior + len(train))", "len(train) / (prior + len(train))",
          "tests/evaluation/test_policies.py"),
    Fault("variances-biased", "evaluation/input_adaptation.py", "Moments.variance", "max(1, self.count - 1)",
          "max(1, self.count)", "tests/evaluation/test_policies.py"),
    Fault("statistics-said-to-reveal-an-update", "evaluation/communication.py", "_find_grain",
          'return "client" if written else "update"', 'return "update"',
          "tests/core/test_disclosure.py tests/evaluation/test_communication.py"),
    Fault("ties-count-as-right", "tasks/classification.py", "_areas", "(below_KN + upto_KN + 1).double() / 2",
          "upto_KN.double()", "tests/evaluation/test_metrics.py"),
)  # fmt: skip

FAULTS = (*CORE, *BUFFERS, *METHODS, *ENGINES, *DATA, *JUDGMENTS, *FLOWER, *EVALUATION)


def find_function(source: str, name: str) -> tuple[int, int] | None:
    """Return where the function with the qualified ``name`` starts and ends in ``source``, in characters."""
    body: list[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for part in name.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            return None
        body = found.body  # type: ignore[attr-defined]
    assert found is not None
    starts = [0, *(match.end() for match in re.finditer("\n", source)), len(source)]
    return starts[found.lineno - 1], starts[found.end_lineno or found.lineno]


def apply_fault(root: Path, fault: Fault) -> tuple[Path, str, str] | str:
    """Return file, content and content with ``fault`` in the tree ``root``; in words why, where its line is not there.

    The function is searched for in the whole package where it is no longer in its file.
    """
    package = root / "src" / "fedshift"
    for path in (package / fault.file, *sorted(package.rglob("*.py"))):
        if not path.exists():
            continue
        source = path.read_text(encoding="utf-8")
        place = find_function(source, fault.function) if fault.function.rpartition(".")[2] in source else None
        if place and (count := source[slice(*place)].count(fault.old)):
            if count > 1:
                return f"{fault.old!r} occurs {count} times in {fault.function}"
            start, stop = place
            return path, source, source[:start] + source[start:stop].replace(fault.old, fault.new) + source[stop:]
    return f"there is no {fault.old!r} in a function {fault.function}"


def run_tests(root: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """Return ``caught``, ``missed`` or ``unclear`` in tree ``root``, and the first test that fails, with its error."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "caught", f"a test does not end within {seconds:g} seconds"
    if done.returncode == 0:
        return "missed", " ".join(tests)
    failed = re.search(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    return ("caught" if failed else "unclear"), failed[1][:160] if failed else (done.stdout + done.stderr)[-160:]


def read_results(file: Path, commit: str) -> dict[str, dict[str, str]]:
    """Return what is known of each fault at ``commit``."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {line["fault"]: line for line in map(json.loads, lines) if line["commit"] == commit}


def main() -> None:
    """Run the faults that have no result yet, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", default="HEAD", help="commit to which faults are added")
    parser.add_argument("--only", default="", help="part of the names of faults to run")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "fedshift-mutations.jsonl")
    parser.add_argument("--seconds", type=float, default=900.0, help="the longest that the tests of a fault may take")
    parser.add_argument("--check", action="store_true", help="only look for each fault's line and tests, in this tree")
    asked = parser.parse_args()
    faults = [fault for fault in FAULTS if asked.only in fault.name]
    if asked.check:
        lost = {fault.name: apply_fault(ROOT, fault) for fault in faults}
        gone = {f.name: t for f in faults for t in f.tests.split() if not (ROOT / t.partition("::")[0]).exists()}
        for name, why in {**{n: w for n, w in lost.items() if isinstance(w, str)}, **gone}.items():
            print(f"{name}: {why}")
        sys.exit(bool(gone) or any(isinstance(why, str) for why in lost.values()))
    commit = _git("rev-parse", "--short=10", asked.commit)
    known = read_results(asked.results, commit)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            for fault in faults:
                line = known.get(fault.name) or _try(tree, fault, commit, asked.seconds)
                if fault.name not in known:
                    with asked.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                print(f"{line['result']:8}{fault.name}: {line['by']}", flush=True)
                known[fault.name] = line
        finally:
            _git("worktree", "remove", "--force", str(tree))
    results = [known[fault.name]["result"] for fault in faults]
    print(", ".join(f"{results.count(kind)} {kind}" for kind in dict.fromkeys(results)) + f" at {commit}")


def _try(tree: Path, fault: Fault, commit: str, seconds: float) -> dict[str, str]:
    found = apply_fault(tree, fault)
    result, by = ("lost", found) if isinstance(found, str) else ("", "")
    if not isinstance(found, str):
        path, before, after = found
        path.write_text(after, encoding="utf-8")
        try:
            result, by = run_tests(tree, fault.tests.split(), seconds)
        finally:
            path.write_text(before, encoding="utf-8")
    return {"fault": fault.name, "commit": commit, "result": result, "by": by}


def _git(*command: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *command], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
