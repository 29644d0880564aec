"""Inject defects one at a time and see that the oracle tests notice; exit with 1 if a mutant survives.

Each mutant is one exact replacement in one file. It runs only the tests that should catch it, in a copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

KERNELS = {
    path.name
    for path in (ROOT / "src").rglob("*.py")
    if "\nfrom numba" in path.read_text() or "\nfrom lrrn.kernels.cpu.compiled" in path.read_text()
}


@dataclass(frozen=True)
class Mutant:
    """One defect and the tests that must fail with it."""

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTANTS = [
    Mutant("drop the 1/2", "energy/lifted.py", "total + 0.5 * a * regression", "total + a * regression", "test_energy.py"),
    Mutant("drop beta", "energy/lifted.py", "0.5 * a * self.beta[k] * rec", "0.5 * a * rec", "test_energy.py"),
    Mutant(
        "flip the sign of the coupling",
        "energy/lifted.py",
        "self.weights[k].detach() * (-self.discounts[k]",
        "self.weights[k].detach() * (self.discounts[k]",
        "test_energy.py",
    ),
    Mutant(
        "forget the pull of the layer above",
        "energy/lifted.py",
        "block = symmetrised(torch.addmm(self._own_block(k), above.mT, above, alpha=a))",
        "block = self._own_block(k).clone()",
        "test_energy.py",
    ),
    Mutant(
        "keep the eliminated output in H",
        "energy/lifted.py",
        "return self._hessian(self.n_free, False)",
        "return self._hessian(self.n_free, self.eliminated)",
        "test_energy.py",
    ),
    Mutant("wrong discount", "energy/lifted.py", "self.gamma**k for k", "self.gamma ** max(k - 1, 0) for k", "test_energy.py"),
    Mutant(
        "skip the last unit",
        "kernels/cpu/coordinate_descent.py",
        "for j in range(place.shape[0]):\n        m = place[j]\n        zs[m, s] = z[i, j]",
        "for j in range(place.shape[0] - 1):\n        m = place[j]\n        zs[m, s] = z[i, j]",
        "test_solver_contract.py",
    ),
    Mutant(
        "skip the clip",
        "kernels/cpu/vector_sweep.py",
        "after = v.smaller(v.larger(after, v.load(v.address(lo.data, place))), v.load(v.address(hi.data, place)))",
        "after = v.larger(after, v.load(v.address(lo.data, place)))",
        "test_solver_contract.py",
    ),
    Mutant(
        "wrong neighbour block",
        "kernels/cpu/coordinate_descent.py",
        "row = below[j0 + i]",
        "row = below[(j0 + i + 1) % below.shape[0]]",
        "test_solver_contract.py",
    ),
    Mutant(
        "stale gradient inside a panel",
        "kernels/cpu/vector_sweep.py",
        "local[k] = v.multiply_add(entry, step, local[k])",
        "local[k] = v.multiply_add(entry, v.zero, local[k])",
        "test_solver_choice.py",
    ),
    Mutant(
        "trust the kernel's residual",
        "solvers/loop.py",
        "g, residual = stepper.check(qp, z)",
        "residual = 0.5 * want",
        "test_solver_contract.py",
    ),
    Mutant(
        "one-sided residual",
        "qp/box_qp.py",
        "((z <= lo) & (g > 0)).logical_or_((z >= hi) & (g < 0))",
        "((z <= lo) & (g > 0)).logical_or_(z >= hi)",
        "test_solver_contract.py",
    ),
    Mutant(
        "call non-finite samples converged",
        "solvers/loop.py",
        "missed = ~(self.residual <= self.must) | ~finite",
        "missed = self.residual > self.must",
        "test_solver_contract.py",
    ),
    Mutant(
        "let fixed units move with conjugate gradients",
        "solvers/accelerated.py",
        "left = free * -g",
        "left = -g",
        "test_accelerated.py",
    ),
    Mutant(
        "forget the last direction of conjugate gradients",
        "solvers/accelerated.py",
        "direction.mul_(now / torch.where(before > 0, before, 1)).addcmul_(left, self._weight)",
        "direction.zero_().addcmul_(left, self._weight)",
        "test_accelerated.py",
    ),
    Mutant(
        "count the slope of a wide layer once",
        "energy/derivatives.py",
        ".addmm_(w.mT, z @ weight, alpha=a * beta)",
        "",
        "test_derivatives.py",
    ),
    Mutant(
        "momentum in the wrong direction",
        "kernels/cpu/momentum.py",
        "new + weight * (new - here[i, j])",
        "new - weight * (new - here[i, j])",
        "test_solver_choice.py test_solver_contract.py test_oracle.py",
    ),
    Mutant(
        "Newton forgets the binding units",
        "solvers/newton.py",
        "self._h.restricted(~binding)",
        "self._h.restricted(torch.ones_like(binding))",
        "test_solver_choice.py",
    ),
    Mutant(
        "adjoint frees units on a bound",
        "energy/lifted.py",
        "(z <= lo) | (z >= hi), 0)",
        "(z < lo) | (z > hi), 0)",
        "test_gradients.py",
    ),
    Mutant("gradient of the wrong sign", "network/implicit.py", "slope.neg_()", "slope", "test_gradients.py"),
    Mutant(
        "unscaled adjoint", "network/implicit.py", "unit = v / torch.where(size > 0, size, 1)", "unit = v", "test_gradients.py"
    ),
    Mutant(
        "singular values of an expanding layer from a thin SVD",
        "bounds/layerwise.py",
        "    if rows > columns:\n        return 0.0, highest\n",
        "    if rows > columns:\n        w, columns = w.mT, rows\n",
        "test_bounds.py",
    ),
    Mutant(
        "leave the error of a matrix out of a proof",
        "linalg/verified.py",
        "return _allowance(h, shift) + error",
        "return _allowance(h, shift)",
        "test_verified.py",
    ),
    Mutant(
        "believe a factorisation whatever it leaves",
        "linalg/verified.py",
        "bool(factor.ok) and factor.defect(shifted) + rounding < _allowance(h, shift)",
        "bool(factor.ok)",
        "test_portable.py",
    ),
    Mutant(
        "lose squares that underflow",
        "linalg/verified.py",
        "error + (UNDERFLOW if bool(w.any()) else 0.0)",
        "error",
        "test_portable.py",
    ),
    Mutant(
        "Hessians as symmetric as a product happens to be",
        "linalg/blocks.py",
        "return torch.add(block, block.mT).mul_(0.5)",
        "return block.clone()",
        "test_portable.py",
    ),
    Mutant(
        "let the structure be changed under a snapshot",
        "network/module.py",
        "if name in STRUCTURE and name in self.__dict__:",
        "if False:",
        "test_network.py",
    ),
    Mutant(
        "warn where an error was asked for", "network/module.py", 'if on_failure == "raise":', "if False:", "test_network.py"
    ),
    Mutant(
        "name any of several equal outputs",
        "certificates/radius.py",
        "best, runner_up = top_two(y)",
        "runner_up, best = top_two(y)",
        "test_certify.py::test_equal_outputs_have_one_label_everywhere",
    ),
    Mutant(
        "error of a margin by the computed runner-up alone",
        "certificates/radius.py",
        "error = (doubt - (second - y)).scatter(1, best[:, None], -math.inf).amax(-1)",
        "error = doubt.gather(1, runner_up[:, None])[:, 0]",
        "test_certify.py::test_the_error_bound_covers_every_output_that_may_be_second",
    ),
    Mutant(
        "fade the barrier far from the central path",
        "certificates/local.py",
        "if decrement < NEAR * weight:",
        "if decrement < 60 * weight:",
        "test_local.py::test_local_radii_are_what_an_independent_solver_makes_of_the_same_dual",
    ),
    Mutant(
        "leave conditions out although they are violated",
        "certificates/local.py",
        "new = (violation > 0) & ~self.active",
        "new = (violation > 1e9) & ~self.active",
        "test_local.py::test_local_radii_are_what_an_independent_solver_makes_of_the_same_dual",
    ),
    Mutant(
        "claim without proof",
        "linalg/verified.py",
        "if is_positive_definite(h, -candidate, error):",
        "if True:",
        "test_verified.py",
    ),
    Mutant(
        "ignore that float32 rounds the bounds",
        "qp/box_qp.py",
        "feasible = torch.where(z == self.lo.to(z.dtype), self.lo, given)",
        "feasible = given",
        "test_error_bound.py",
    ),
    Mutant(
        "error bound without the residual",
        "qp/box_qp.py",
        "(self.residual(feasible) + slack) / mu",
        "slack / mu",
        "test_error_bound.py",
    ),
    Mutant("reuse a stale Hessian", "network/module.py", "not _same(self._frozen[0], now)", "False", "test_network.py"),
    Mutant(
        "weight decay without the factor 2",
        "learning/step.py",
        "alpha=2 * self._settings.weight_decay",
        "alpha=self._settings.weight_decay",
        "test_trainer.py::test_a_step_of_sgd_by_hand",
    ),
    Mutant(
        "shift every image the same way",
        "learning/augment.py",
        "_mixed(rows + moment * 0x5851F42D)",
        "_mixed(0 * rows + moment * 0x5851F42D)",
        "test_augment.py::test_every_result_is_one_of_the_shifts_and_all_of_them_occur",
    ),
    Mutant(
        "let what leaves an image come in again",
        "learning/augment.py",
        "* inside.flatten(1)",
        "* 1",
        "test_augment.py::test_every_result_is_one_of_the_shifts_and_all_of_them_occur",
    ),
    Mutant(
        "a margin that stays where it begins",
        "learning/objectives.py",
        "return begin + (end - begin) * progress",
        "return begin",
        "test_objectives.py::test_a_margin_and_a_temperature_can_change_as_training_goes_on",
    ),
    Mutant(
        "an adversary that moves inputs downhill",
        "learning/objectives.py",
        "x=torch.addcmul(batch.x, slope, step)",
        "x=torch.addcmul(batch.x, slope, -step)",
        "test_objectives.py::test_adversarial_margin_loss_is_that_of_inputs_moved_uphill",
    ),
    Mutant(
        "an adversary that attacks a loss of another temperature",
        "learning/objectives.py",
        "logits = self._logits(energy.output(x, z), batch)",
        "logits = Margin(self.margin, 1.0)._logits(energy.output(x, z), batch)",
        "test_objectives.py::test_adversarial_margin_loss_is_that_of_inputs_moved_uphill",
    ),
    Mutant(
        "an adversary whose slope vanishes with the loss",
        "learning/objectives.py",
        "(slope,) = torch.autograd.grad(lead.sum(), x)",
        "(slope,) = torch.autograd.grad(functional.softplus(lead).sum(), x)",
        "test_objectives.py::test_adversaries_move_inputs_that_are_far_on_the_right_side",
    ),
    Mutant(
        "frozen parameters, no slope in x",
        "network/implicit.py",
        "        return d_x, *(None for _ in ctx.needs_input_grad[6:])",
        "        return torch.zeros_like(d_x), *(None for _ in ctx.needs_input_grad[6:])",
        "test_gradients.py::test_gradients_in_x_of_a_network_whose_parameters_are_frozen",
    ),
    Mutant(
        "the same batches in every epoch",
        "learning/trainer.py",
        "(self.settings.seed * 1_000_003 + self.position.epoch)",
        "(self.settings.seed * 1_000_003)",
        "test_mutation_gaps.py::test_every_epoch_sees_all_samples_in_an_order_of_its_own",
    ),
    Mutant(
        "resume at the start of the epoch",
        "learning/trainer.py",
        "for rows in batches[position.step :]:",
        "for rows in batches:",
        "test_trainer.py::test_ctrl_c_leaves_a_checkpoint_that_resumes_to_the_same_bits",
    ),
    Mutant(
        "resume without the optimiser's state",
        "learning/checkpoint.py",
        'load_state_dict({"state": state,',
        'load_state_dict({"state": {},',
        "test_trainer.py::test_a_resumed_run_ends_with_the_same_bits",
    ),
    Mutant(
        "believe every prediction in self-training",
        "learning/objectives.py",
        "sure = ~known & (lead[:, 0] - lead[:, 1] > self.confidence)",
        "sure = ~known",
        "test_objectives.py::test_self_training_counts_confident_samples_only",
    ),
    Mutant(
        "constants of the two phases with the bias on the wrong side",
        "learning/objectives.py",
        "(target if b is None else target - b)",
        "(target if b is None else target + b)",
        "test_objectives.py::test_values_are_energies",
    ),
    Mutant(
        "keep a compiled step that did not converge",
        "learning/steps/compiled_cpu.py",
        "if not all(converged):",
        "if not converged:",
        "test_fused.py::test_slow_batches_go_the_general_way_and_training_is_the_same",
    ),
    Mutant(
        "derivatives of one part of a cut batch only",
        "learning/steps/compiled_cpu.py",
        "add_up(others, self._gradient)",
        "add_up(others[1:], self._gradient)",
        "test_fused.py::test_losses_and_derivatives_are_those_of_the_general_path",
    ),
    Mutant(
        "compiled step adds the free phase's moments",
        "kernels/cpu/energy.py",
        "with_moved[j] = ab * (scale * seconds[j])",
        "with_moved[j] = -ab * (scale * seconds[j])",
        "test_fused.py::test_losses_and_derivatives_are_those_of_the_general_path",
    ),
    Mutant(
        "compiled adjoint lets units at their bounds move",
        "kernels/cpu/small_batch.py",
        "reach = np.inf if lo[0, j] < z[i, j] and z[i, j] < hi[0, j] else 0.0",
        "reach = np.inf",
        "test_compact.py::test_minimiser_and_derivatives_are_those_of_the_general_way",
    ),
    Mutant(
        "compiled pass takes any residual",
        "kernels/cpu/small_batch.py",
        "if not norms[i] <= limit * scale[i]:",
        "if not norms[i] <= np.inf:",
        "test_compact.py::test_a_residual_above_the_tolerance_is_not_converged",
    ),
    Mutant(
        "compiled pass keeps its own result",
        "network/small_batch.py",
        "        return Minimum(report.solution(z, converged),",
        "        self.kept = z\n        return Minimum(report.solution(z, converged),",
        "test_compact.py::test_nothing_is_kept_once_the_output_is_gone",
    ),
    Mutant(
        "derivative of c of the wrong sign",
        "energy/derivatives.py",
        "d_c = torch.mv(w.mT, total).mul_(-a * beta)",
        "d_c = torch.mv(w.mT, total).mul_(a * beta)",
        "test_derivatives.py",
    ),
    Mutant(
        "half of a slope's product rule",
        "energy/derivatives.py",
        ".addmm_(w_above.mT, reconstruction, alpha=a * beta)",
        "",
        "test_derivatives.py",
    ),
    Mutant(
        "radius without the error at x",
        "certificates/radius.py",
        "doubt = scale * errors.here[:, None] + rounding",
        "doubt = rounding",
        "test_mutation_gaps.py::test_a_radius_from_a_loose_solve_is_no_larger_than_the_exact_minimiser_allows",
    ),
    Mutant(
        "radius without the error of the next solve",
        "certificates/radius.py",
        "doubt = doubt + scale * errors.later[:, None] + rounding",
        "doubt = doubt + rounding",
        "test_mutation_gaps.py::test_the_radius_allows_for_what_the_next_solve_may_leave",
    ),
    Mutant(
        "errors do not grow with the perturbation",
        "certificates/errors.py",
        "slope = (tol * growth + rounding.z",
        "slope = (rounding.z",
        "test_mutation_gaps.py::test_the_radius_allows_for_what_the_next_solve_may_leave",
    ),
    Mutant(
        "radius where the solve did not converge",
        "certificates/radius.py",
        "solution.converged & radius.isfinite()",
        "radius.isfinite()",
        "test_mutation_gaps.py::test_no_radius_without_convergence_however_small_the_error",
    ),
    Mutant(
        "differences of clipped outputs as if not clipped",
        "certificates/outputs.py",
        "pairs = torch.maximum(pairs, torch.maximum(_lengths(w)[:, None], _lengths(w)))",
        "pass",
        "test_mutation_gaps.py::test_a_clipped_output_stands_still_while_its_equal_moves",
    ),
    Mutant(
        "interval without the error of the next solve",
        "certificates/intervals.py",
        "reach = reach + constants.error * (errors.later + errors.slope * eps)[:, None] + constants",
        "reach = reach + constants",
        "test_mutation_gaps.py::test_the_interval_allows_for_what_the_next_solve_may_leave",
    ),
    Mutant(
        "six digits of an interval's ends",
        "persistence/serialization.py",
        "[repr(i.lo), repr(i.hi)] for i",
        '[f"{i.lo:g}", f"{i.hi:g}"] for i',
        "test_serialization.py::test_a_network_comes_back_to_the_bit",
    ),
    Mutant(
        "a file may set any attribute",
        "persistence/serialization.py",
        "| {*attributes} - {*ATTRIBUTES, *ATTRIBUTES_OUT}",
        "",
        "test_serialization.py::test_no_other_attribute_can_be_set",
    ),
    Mutant(
        "attacks believe themselves",
        "attacks/perturbations.py",
        "success = walker.fooled(found, label) & (distance <= reach)",
        "success = distance <= reach",
        "test_attacks.py",
    ),
    Mutant(
        "attacks leave the ball",
        "attacks/walker.py",
        "return delta * (INSIDE * reach /",
        "return delta * (1.1 * reach /",
        "test_attacks.py",
    ),
    Mutant(
        "attacks climb down",
        "attacks/walker.py",
        "functional.one_hot(rival, k) - functional.one_hot(label, k)",
        "functional.one_hot(label, k) - functional.one_hot(rival, k)",
        "test_attacks.py",
    ),
    Mutant(
        "slopes forget the reconstruction",
        "attacks/slopes.py",
        "(energy.discounts[0] * (1 + energy.beta[0]))",
        "energy.discounts[0]",
        "test_attacks.py",
    ),
    Mutant(
        "attacked distances stay in the network's units",
        "reports/audit.py",
        "perturbed = x * model.scale_in_ + model.offset_in_",
        "perturbed = x + model.offset_in_",
        "test_attacks.py",
    ),
    Mutant(
        "forget that slack stands in the way",
        "certificates/complementarity.py",
        "return Sample(low, high, g[..., u], low_error",
        "return Sample(low, high, 0 * g[..., u], low_error",
        "test_local.py",
    ),
    Mutant(
        "forget the floor in the dual's value",
        "certificates/complementarity.py",
        "ends = self.floor * sample.low + self.ceiling * sample.room",
        "ends = self.ceiling * sample.room",
        "test_local.py",
    ),
    Mutant(
        "take the dual beyond where it is proven",
        "certificates/local.py",
        "matrix[-1, -1] = terms.constant(self.sample, self._lead) - square",
        "matrix[-1, -1] = terms.constant(self.sample, self._lead)",
        "test_local.py",
    ),
    Mutant(
        "allow multipliers of the wrong sign",
        "certificates/local.py",
        "if not bool((theta >= 0).all()):",
        "if False:",
        "test_local.py",
    ),
    Mutant(
        "let a unit with an upper bound have a sign of its slack",
        "certificates/local.py",
        "for which in (sides | True, sides, ~sides))",
        "for which in (sides | True, sides, sides | True))",
        "test_local.py",
    ),
    Mutant(
        "leave errors of the data out of a local proof",
        "certificates/complementarity.py",
        "return error + 8 * (len(problem.h) + 8) * verified.EPS * size",
        "return 8 * (len(problem.h) + 8) * verified.EPS * size",
        "test_local.py",
    ),
    Mutant(
        "believe multipliers of the wrong sign where samples share a solve",
        "certificates/shared.py",
        "(lam * sample.slack - of_v).clamp(min=0.0),",
        "lam * sample.slack - of_v,",
        "test_shared.py",
    ),
    Mutant(
        "believe that a minimiser was found exactly",
        "certificates/shared.py",
        "bound = value - rounding * far - error * (far.square() + 1) - steep.square() / (4 * firm)",
        "bound = value",
        "test_shared.py",
    ),
    Mutant(
        "take a form for positive definite without a proof",
        "certificates/shared.py",
        "firm = self.floor - error",
        "firm = torch.full_like(error, 1e-3)",
        "test_shared.py",
    ),
    Mutant(
        "forget what later solves may be off by where samples share a solve",
        "certificates/complementarity.py",
        "return most, torch.where(free, lead, lead - extra * most)",
        "return most, lead * 1.05",
        "test_local.py",
    ),
    Mutant(
        "take the pairs of one label for those of another",
        "certificates/shared.py",
        "return (label - self.labels.start) * len(self.problem.c) + rival",
        "return rival + 0 * label",
        "test_shared.py",
    ),
    Mutant(
        "look at the nearest rival only",
        "certificates/shared.py",
        "        if len(rows) == 0:\n            break",
        "        if k > 0:\n            break",
        "test_local.py",
    ),
    Mutant(
        "look at a unit bounded from above as if from below",
        "certificates/complementarity.py",
        "z, g = z.to(self.device) * self.sign, g.to(self.device) * self.sign",
        "z, g = z.to(self.device), g.to(self.device)",
        "test_local.py",
    ),
    Mutant(
        "believe any file of the right name",
        "datasets/catalogue.py",
        "            _check_digest(path, name, file)\n",
        "            pass\n",
        "test_datasets.py",
    ),
    Mutant(
        "believe that trained layers have norm one",
        "studies/record/baselines/sorting.py",
        "* (math.prod(self.norms[:-1]) * _UP)",
        "* 1.0",
        "test_record.py::test_no_attack_on_a_sorting_network_lies_inside_a_radius",
    ),
    Mutant(
        "believe the scores of a sorting network",
        "studies/record/baselines/sorting.py",
        " - 2 * math.sqrt(2) * (still + growing * _norms(x))[:, None]",
        "",
        "test_record.py::test_rounding_is_inside_the_radius",
    ),
    Mutant(
        "believe the nearest rival to be the worst",
        "studies/record/baselines/prototypes.py",
        "radii = (lead / (2 * apart)).amin(-1)",
        "radii = hope.gather(1, chosen) / 2",
        "test_record.py::test_radii_of_prototypes_are_below_the_exact_ones_and_near",
    ),
    Mutant(
        "measure on test images while choosing recipes",
        "studies/record/rows.py",
        "    if extent.validation:\n        kept",
        "    if False:\n        kept",
        "test_record.py::test_validation_does_without_test_images",
    ),
    Mutant(
        "begin an interrupted stage anew",
        "studies/record/stages.py",
        "    values, facts = kept(folder, name)\n    chunk",
        '    values, facts = np.zeros(0), {"seconds": 0.0}\n    chunk',
        "test_record.py::test_an_interrupted_stage_continues_where_it_was",
    ),
    Mutant(
        "overlook attacks inside a radius",
        "studies/record/scores.py",
        "int((good & (found < radius)).sum())",
        "0",
        "test_record.py::test_a_contradiction_would_be_noticed",
    ),
    Mutant(
        "lose rows whose work folders are gone",
        "studies/record/record.py",
        "here[row] or before.get(row)",
        "here[row]",
        "test_record.py::test_a_report_keeps_rows_whose_work_folders_are_gone",
    ),
    Mutant(
        "believe figures of an earlier report",
        "studies/record/earlier.py",
        "                _check(row, result)\n",
        "",
        "test_record.py::test_damaged_results_are_refused_before_any_work",
    ),
    Mutant(
        "replace the report of another record",
        "studies/record/earlier.py",
        "if about[1].quick is True:",
        "if True:",
        "test_record.py::test_another_record_is_neither_mixed_in_nor_replaced_unless_it_is_a_smoke_run",
    ),
    Mutant(
        "call every row met", "studies/common/sections.py", "abs(difference) <= self.within + 1e-12", "True", "test_paper.py"
    ),
    Mutant(
        "read Table 1 as printed",
        "studies/paper/table1.py",
        "return PRINTED[test][TESTS.index(trained_on)]",
        "return PRINTED[trained_on][TESTS.index(test)]",
        "test_paper.py",
    ),
    Mutant(
        "reconstruct outside the sets",
        "energy/lifted.py",
        "below = below.clamp(self.intervals[k - 1].lo, self.intervals[k - 1].hi)",
        "below = below.clone()",
        "test_energy.py",
    ),
    Mutant(
        "press an attack the wrong way",
        "attacks/walker.py",
        "            size = 0.5 * (1 + math.cos(math.pi * step / steps))",
        "            size = -0.5 * (1 + math.cos(math.pi * step / steps))",
        "test_attacks.py",
    ),
    Mutant(
        "answer whatever host is asked for",
        "explore/server.py",
        "if len(hosts) != 1 or not self._is_ours(hosts[0]):",
        "if len(hosts) != 1:",
        "test_explore.py",
    ),
    Mutant(
        "show attacks beyond their norm",
        "explore/session.py",
        "allowed = sizes <= norms[:, None] * (1 + 1e-12)",
        "allowed = sizes[None].expand(len(norms), -1) >= 0",
        "test_explore.py",
    ),
    Mutant(
        "every rank takes the whole batch",
        "learning/trainer.py",
        "mine = rows[self._ranks.part(n)] if self._ranks.connected else rows",
        "mine = rows",
        "test_ranks.py::test_two_ranks_compute_the_gradient_of_one",
    ),
    Mutant(
        "ranks do not hear of each other's activations",
        "learning/data_parallel.py",
        "activations[rows] = values",
        "activations[rows] = activations[rows]",
        "test_ranks.py::test_the_same_seed_gives_the_same_bits_and_so_does_resuming",
    ),
    Mutant(
        "ranks started anew find what the dead left",
        "runtime/ranks.py",
        'dist.PrefixStore(f"lrrn/{told}", store)',
        'dist.PrefixStore("lrrn", store)',
        "test_ranks.py::test_ranks_started_anew_do_not_take_the_dead_for_the_living",
    ),
    Mutant(
        "pages of a map stay in memory",
        "datasets/rows/base.py",
        "source.madvise(mmap.MADV_DONTNEED)",
        "pass",
        "test_rows.py::test_an_estimator_does_not_pull_a_map_into_memory",
    ),
    Mutant(
        "begin with the row group, not with the row",
        "datasets/rows/parquet.py",
        "low, high = max(start - at, 0),",
        "low, high = 0,",
        "test_rows.py::test_every_file_gives_the_same_rows_in_any_pieces",
    ),
    Mutant(
        "every chunk draws the same Gaussian",
        "reports/evaluation.py",
        ".jumped(chunk)",
        ".jumped(0)",
        "test_rows.py::test_the_gaussian_has_the_moments_of_the_samples",
    ),
    Mutant(
        "continue with parts of another run",
        "reports/scoring.py",
        "if record.is_file() and self._recorded",
        "if False and self._recorded",
        "test_rows.py::test_an_interrupted_run_continues_with_what_is_missing",
    ),
    Mutant(
        "take another run's result for this one's",
        "studies/common/runs.py",
        'return result if result["run"] == asdict(run) else None',
        "return result",
        "test_paper.py",
    ),
    Mutant(
        "trust a residual that is all rounding",
        "network/judging.py",
        "solved = solved.doubted(",
        "solved.doubted(",
        "test_flags.py",
    ),
    Mutant(
        "let float32 have the last word",
        "network/judging.py",
        "    if exact is energy:",
        "    if True:",
        "test_flags.py",
    ),
    Mutant(
        "judge float32 answers by bounds it cannot hold",
        "network/judging.py",
        "BoxQP(phase.hessian, phase.q, qp.lo.to(torch.float64), qp.hi.to(torch.float64))",
        "phase",
        "test_flags.py",
    ),
    Mutant(
        "let an overflowing output pass",
        "network/module.py",
        "solved = solved.flagged_unless(z.isfinite().all(-1))",
        "pass",
        "test_flags.py",
    ),
    Mutant(
        "let an overflow hide behind a bound",
        "solvers/loop.py",
        "missed = ~(self.residual <= self.must) | ~finite",
        "missed = ~(self.residual <= self.must)",
        "test_flags.py",
    ),
    Mutant(
        "let the norm of q overflow",
        "qp/box_qp.py",
        "return torch.where(norms.isfinite(), norms, torch.linalg.vector_norm(v * 1e-160, dim=-1) * 1e160)",
        "return norms",
        "test_flags.py",
    ),
    Mutant(
        "forget that a box may keep away from zero",
        "solvers/newton.py",
        "size = torch.maximum(row_norms(q), row_norms(self._h.matmul(nearest))).clamp(min=1e-300)[:, None]",
        "size = row_norms(q).clamp(min=1e-300)[:, None]",
        "test_flags.py",
    ),
    Mutant(
        "let a forked child wait for the threads of its parent",
        "runtime/threads.py",
        "    torch.set_num_threads(1)\n\n\nif hasattr",
        "\n\nif hasattr",
        "test_threads.py",
    ),
    Mutant(
        "let the first to leave lift the limit of the others",
        "runtime/threads.py",
        "if held.blas_holders == 0 and held.keeper is not None:",
        "if held.keeper is not None:",
        "test_threads.py",
    ),
    Mutant(
        "let every thread that enters remember the limit",
        "runtime/threads.py",
        "        if held.blas_holders == 0:\n            # one",
        "        if held.blas_holders >= 0:\n            # one",
        "test_threads.py",
    ),
    Mutant(
        "let a new thread keep the limit of another",
        "runtime/threads.py",
        "before = held.torch_before",
        "pass",
        "test_threads.py",
    ),
    Mutant(
        "put a file in the place of a device",
        "runtime/storage.py",
        "return os.path.exists(path) and (stream or not (os.path.isfile(path) or os.path.isdir(path)))",
        "return False",
        "test_disk_faults.py::test_devices_and_streams_are_written_to_and_never_replaced",
    ),
    Mutant(
        "leave half a file behind on a full disk",
        "runtime/storage.py",
        "            Path(part).unlink(missing_ok=True)\n\n\ndef _behind",
        "            pass\n\n\ndef _behind",
        "test_disk_faults.py::test_saving_to_a_full_disk_names_the_file_and_keeps_the_old_one",
    ),
    Mutant(
        "write a file in place",
        "runtime/storage.py",
        "        os.replace(part, target)",
        "        target.write_bytes(content)",
        "test_disk_faults.py test_serialization.py",
    ),
    Mutant(
        "restore what broadcasts",
        "learning/checkpoint.py",
        "if stored is None or stored.shape != t.shape or",
        "if stored is None or",
        "test_disk_faults.py::test_a_checkpoint_with_something_wrong_inside_is_refused_whole",
    ),
    Mutant(
        "restore half a checkpoint before looking at the rest",
        "learning/checkpoint.py",
        "            pairs.append((t, stored))",
        "            t.copy_(stored)",
        "test_disk_faults.py::test_a_checkpoint_with_something_wrong_inside_is_refused_whole",
    ),
    Mutant(
        "fail where Numba has no folder",
        "kernels/cpu/compiled.py",
        "    except RuntimeError as error:  # Numba found no folder for its cache",
        "    except ZeroDivisionError as error:",
        "test_disk_faults.py::test_kernels_work_where_no_folder_can_be_written",
    ),
    Mutant(
        "read tensors that are views of the file",
        "runtime/storage.py",
        "file.get_tensor(name).clone()",
        "file.get_tensor(name)",
        "test_hostile_files.py",
    ),
    Mutant(
        "believe the directory of an archive",
        "datasets/rows/files.py",
        "if not _plausible(info, path.stat().st_size):",
        "if False:",
        "test_hostile_files.py",
    ),
    Mutant(
        "make room for nothing in too many places",
        "datasets/idx.py",
        "if expected > most or room > MAX_BYTES:",
        "if expected > most:",
        "test_hostile_files.py",
    ),
    Mutant(
        "show a traceback for what is wrong with a part of scores",
        "reports/scoring.py",
        "except (ValueError, AttributeError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:",
        "except ZeroDivisionError as error:",
        "test_disk_faults.py::test_results_of_samples_on_a_full_disk_are_kept_part_by_part_and_damaged_parts_are_told",
    ),
    Mutant(
        "take any correction in float32",
        "kernels/cpu/coordinate_descent.py",
        "if corrects and residual[s] <= 1:",
        "if corrects:",
        "test_single_precision.py",
    ),
    Mutant(
        "correct by units that the bounds do not share",
        "kernels/cpu/coordinate_descent.py",
        "his[m, s] = (hi[row, j] - z[i, j]) * scale",
        "his[m, s] = hi[row, j] - z[i, j]",
        "test_single_precision.py",
    ),
    Mutant(
        "correct in float32 whatever the Hessian",
        "solvers/coordinate_descent.py",
        "if not (np.all(inverse > SMALLEST) and np.all(inverse < 1 / SMALLEST)):",
        "if False:",
        "test_single_precision.py",
    ),
]


def survives(mutant: Mutant) -> tuple[bool, str]:
    """Apply one mutant in a copy of the tree and run its tests; return whether all passed, and their last line."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        # compiled kernels go along and save their compilation, unless a kernel changes: callers would keep the old one
        stale = "__pycache__" if mutant.file.rpartition("/")[2] in KERNELS else "*.pyc"
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(stale))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "src" / "lrrn" / mutant.file
        text = target.read_text()
        if text.count(mutant.before) != 1:
            raise SystemExit(f"mutant {mutant.name!r}: its text stands {text.count(mutant.before)} times in {mutant.file}")
        target.write_text(text.replace(mutant.before, mutant.after))
        tests = [f"tests/{name}" for name in mutant.tests.split()]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            return False, "ran past its time"
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))] or done.stdout.splitlines()
        if done.returncode not in (0, 1):
            raise SystemExit(f"mutant {mutant.name!r}: pytest could not run\n{done.stdout}\n{done.stderr}")
        return done.returncode == 0, lines[0] if lines else ""


def main() -> int:
    """Run all mutants, or those whose name or file contains one of some words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", default=[""], help="only mutants whose name or file contains one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many to run at once")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if any(word in f"{mutant.name} {mutant.file}" for word in options.words)]
    start = time.monotonic()
    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, (alive, line) in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVED' if alive else 'caught':9}{mutant.name}: {line[:150]}", flush=True)
            survivors += [mutant.name] * alive
    print(f"{len(chosen)} mutants, {len(survivors)} survived, {time.monotonic() - start:.0f} s", *survivors, sep="\nSURVIVED ")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
