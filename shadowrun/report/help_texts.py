"""What each figure of a report means, in words: HTML shows it behind a ``?``. One table for all reports."""

from __future__ import annotations

from shadowrun.report.help_of_studies import HELP_OF_STUDIES

__all__ = ["HELP"]

HELP = {
    **HELP_OF_STUDIES,
    # Calls and operators
    "operator": "The operator as torch.library names it: namespace, name and overload, such as aten::add.Tensor.",
    "calls": "How often the operator was called while shadowrun recorded; views and other skipped calls are not in it.",
    "call": "The number of the call in the run, counted from 0.",
    "outcome": "Calls by verdict. match: the difference is rounding, or there is none. mismatch: beyond rounding. "
    "unsupported: the target has no kernel. fallback: the CPU computed it. error: the target raised and the reference "
    "did not. unverified: it could not be decided.",
    "status": "The verdict on the calls: match, mismatch, unsupported, fallback, error, unverified or skipped.",
    "kind": "What sort of finding it is: unsupported, error, mismatch, fallback or slow; in a campaign, whose issue.",
    "finding": "The kind of the finding: unsupported, error, mismatch, fallback or slow.",
    "nr": "The number of the finding: `--finding` of the commands takes it.",
    "line": "The line of your program that made the call; in backward, the line of the forward call.",
    "module": "The path of the innermost nn.Module whose forward made the call.",
    "modules": "Paths of the nn.Modules that made these calls.",
    "phase": "The part of a training step: forward, backward or optimizer.",
    "step": "The training step, counted from 0: what lies between two calls of run.step().",
    "inputs": "Dtypes and shapes of the arguments, in their order.",
    "dtypes": "Dtypes of the input tensors, in the order of their first call.",
    "shapes": "The first shapes of the input tensors.",
    "kernel to write": "The kernel that the target lacks; it may be another one than that of the operator called.",
    "needed by": "Operators whose calls failed because of this kernel.",
    # Differences
    "max abs": "The greatest absolute difference |actual - expected| of one element, over all calls.",
    "max rel": "The greatest relative difference |actual - expected| / |expected| of one element, over all calls.",
    "relative": "The root mean square of the differences divided by that of the reference's values.",
    "ULP": "Units in the last place: how many representable numbers lie between the two results, at most.",
    "bits": "How many leading bits of the mantissa agree in all elements, at least. float32 has 24, bfloat16 has 8.",
    "bits left": "How many leading bits of the mantissa agree in all elements, at least; float32 has 24.",
    "excess": "The error in units of the operator's own rounding error, measured against a result in float64.",
    "differs": "The worst difference of these calls. The error is given against float64 in units of the rounding error "
    "that the operator itself may have; a correct kernel stays near 1.",
    "passes": "The smallest tolerance with which torch.testing.assert_close would accept all these calls: either a "
    "relative one (rtol) or an absolute one (atol).",
    "worst at": "The operator with the greatest accumulated error in the step.",
    "accumulated error": "The difference between a chain of results in which the reference continues with its own "
    "results, and the same chain on the target: what the faults do to the model.",
    "isolated error": "The difference of one call whose inputs were the same on both platforms: what one kernel does.",
    "error rises by": "By how much the accumulated relative error rises at these calls, in a step on average: above "
    "all calls before them in the same step and phase. What a call only hands on is no rise. It is measured along the "
    "order of the calls, not along the data, so that it is a hint.",
    "gone": "The share of the loss's error within one step that is gone if each call of this operator before the loss "
    "runs on the reference, in a chain of the target's results. Shares do not add up: two errors may cancel.",
    "loss differs by": "The difference between the loss of the target's chain and the reference's within one step, "
    "from the same values at its start; an average over the steps measured.",
    "with it right": "The same difference with each call of this operator before the loss on the reference.",
    "steps measured": "Steps in which this operator was on the reference in a chain of its own, three at most.",
    "error reached": "The greatest accumulated relative error of a result of these calls.",
    "loss, relative": "The accumulated error of the last result before backward: root mean square of the differences, "
    "divided by that of the reference.",
    "loss, absolute": "The greatest absolute difference of the last result before backward, between the two chains.",
    "gradients, relative": "The greatest accumulated relative error of a call in backward.",
    "in the model": "What the model's author can do: a setting, another operator, or another dtype.",
    "in the kernel": "What the author of the target's kernel can do.",
    "share of error": "Of all elements beyond rounding, those in results of calls in the module and its children.",
    "share of time": "Of the time of all calls on the target, that of the module and its children.",
    # Times and coverage
    "ref": "Median time of a call on the reference, launch included. A hint, not a benchmark.",
    "target": "The platform under test. As a column: median time of a call on it, launch included; no benchmark.",
    "reference": "The platform that the target is compared with.",
    "overhead": "How much longer the program took because shadowrun ran each call twice.",
    "supported": "Calls that the target ran itself, or their share.",
    "first call": "The number of the first call of the run that has this finding.",
    # Causes
    "why": "The cause of the difference, and in parentheses the explanation that fits the values; then the evidence.",
    "cause": "The class of the cause, such as implementation, reduced precision or missing operator.",
    "do": "The recommended next step.",
    "script": "A command that writes a stand-alone script of plain torch: it shows the fault on the captured inputs.",
    "where": "Modules, phases and lines of the program that made these calls; in a campaign, the platforms.",
    "seen on": "The ranks, or runs of a combined file, that have this finding.",
    "missing": "The kernel that the target lacks, where it is another one than that of the operator called.",
    "reason": "Why the calls were skipped or excused.",
    "until": "The day on which the known issue expires, and fails the run again.",
    # Sweeps and support
    "full": "Operators all of whose cases pass; functions all of whose calls the target ran itself.",
    "partial": "Operators some of whose cases pass; functions some of whose calls the target ran itself.",
    "none": "Operators none of whose cases pass; functions none of whose calls the target ran itself.",
    "untested": "Operators that have no case that can be tested here.",
    "full, %": "Operators all of whose cases pass, as a share of those that were tested.",
    "cases": "Sample inputs of an operator, each run on both platforms.",
    "part": "What was tested: forward, backward, or a variant such as strided inputs.",
    "first reason": "The worst failure of the first platform that has one.",
    "pass": "Cases in which both platforms agree but for rounding.",
    "unsupported": "The target has no kernel.",
    "error": "The target raised, and the reference did not.",
    "mismatch": "The results differ by more than rounding.",
    "fallback": "The CPU computed the result for the target.",
    "crash": "The process ended, hung, or ran out of memory.",
    "unverified": "It could not be decided whether the target is right.",
    "not valid": "Calls that the reference refuses as well.",
    "harness": "Cases that failed before the comparison; they count for and against no platform.",
    # Classes
    "classes": "Groups of platforms whose results are identical in every bit.",
    "class": "The group of platforms with identical results, as a letter in the order of appearance.",
    "platform": "A device, or the CPU with settings, on which the program ran.",
    "platforms": "The devices and settings on which the program ran.",
    "agree to so many bits": "Leading bits of the mantissa that are the same on all platforms of the group.",
    # Campaigns
    "variants": "Programs that were made from a seed program by mutations, and run on all platforms.",
    "seed": "The number that all random draws start from: the same seed gives the same inputs.",
    "root causes": "Findings after equal ones were joined: one operator, one cause, one explanation.",
    "oracle": "A rule that calls two results equal or different.",
    "discrepancy rate": "Variants with a discrepancy by this rule, of those that ran on both platforms.",
    "false positives": "Results that the rule calls different though only rounding differs.",
    "false negatives": "Results with a planted fault that the rule calls equal.",
    "recipe": "The text that makes the variant again: seed program, mutations and random seed.",
    "mutator": "The change that makes a variant from a program.",
    # Slowdowns
    "times slower": "The fastest time on the target divided by the fastest time on the reference.",
    "lost per step": "The time that a step would save if the target were as fast as the reference here.",
}
"""Heading of a column, or label of a line, to its explanation."""
