"""Notes for the owner of a run: one sentence each, with a remedy.

Notes are in `Run.warnings`, in the file `run.json`, in the output at the end of the run, and on its
page. A note that depends on users' data and is not a release begins with "simulation only, not
private".
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, variance

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.engine.task import running_norms
from fedpriv.experiment.build import Experiment
from fedpriv.report.tables import plural
from fedpriv.support.checks import epsilon_up
from fedpriv.training.rounds import Contributors, RoundResult, Stop

_FINE = 1e-4  # steps of updates that hardly change training
_EVALUATIONS = 10  # fewest evaluations that can show a trend
_FALLING = 0.01  # share by which a loss that has not levelled off falls in the last fifth
_SURE = 2.0  # standard errors


def of_run(
    experiment: Experiment,
    stop: Stop,
    counted: Contributors,
    results: Sequence[RoundResult],
    charged: float,
    loss: float | None,
) -> Iterator[str]:
    """Yield all notes of a run that ended after these rounds, with a loss on held-out rows.

    `charged` is the ε of its ledger.
    """
    plan, budget = experiment.plan, experiment.budget
    if stop is Stop.TOO_FEW:
        round_number = results[-1].round
        yield counted.why_ended(plural(plan.sampling.unit), round_number, plan.rounds)
        if round_number < plan.rounds:
            yield (
                f"the guarantee is the budget, ε = {epsilon_up(budget.epsilon)} at δ = "
                f"{budget.delta}, and not the {epsilon_up(charged)} that the ledger's charges "
                "add up to, since the run ended because of what it released"
            )
    yield from experiment.notes
    yield from of_settings(experiment)
    initial_loss = experiment.initial_loss
    if initial_loss is not None and loss is not None and not loss <= initial_loss:
        yield (
            f"the loss on held-out rows rose from {initial_loss:.4g} to {loss:.4g}, so noise or "
            "long steps undid the training: scale inputs to about 1, or choose a smaller clipping "
            "norm, a smaller learning rate or more users"
        )
    if stop is not Stop.TOO_FEW:
        yield from _of_releases(experiment, counted, results)


def of_settings(experiment: Experiment) -> Iterator[str]:
    """Yield notes on the effects of settings, before the first round."""
    plan, sampling, task = experiment.plan, experiment.plan.sampling, experiment.task
    expected, budget = sampling.expected_cohort_size, experiment.budget
    enrolled = sampling.population
    if (larger := sampling.event().projection) is not None:
        accountant = experiment.config.privacy.accountant
        epsilon = epsilon_of([plan.event], budget.delta, accountant).epsilon
        yield (
            f"ε is a projection, as if {larger.population:,} {plural(sampling.unit)} were enrolled "
            f"and {expected * sampling.event().growth:,.6g} joined a round: for the "
            f"{enrolled:,} enrolled, {plan.rounds} rounds cost ε = {epsilon_up(epsilon)} at δ = "
            f"{budget.delta}"
        )
        enrolled = larger.population
    if expected < 1.0 or sampling.population == 1:
        yield (
            f"a cohort has {expected:.2g} {plural(sampling.drawn)} on average; rounds of one "
            "release its update and noise, rounds of none only noise, and each is charged"
        )
    if budget.delta * enrolled >= 1.0:
        yield (
            f"δ is {budget.delta} for {enrolled:,} {plural(sampling.unit)}: such a slack allows a "
            f"release to show one of them as they are; choose δ well below {1.0 / enrolled:.2g}"
        )
    if plan.statistics is None and running_norms(task.model):
        yield (
            "the running statistics of the model's batch normalisation stay as they are, which "
            "costs accuracy; a private metric moves them: metrics.report.batch-norm = "
            "{ bound = 4.0 }, in Python Mechanism.poisson(..., metrics={'batch-norm': "
            "{'bound': 4.0}})"
        )
    if task.personal and experiment.personalised is None and experiment.held_out:
        yield (
            "held-out rows are not evaluated, since the model's personal parameters are untrained; "
            "personalisation says how held-out users train them"
        )
    if experiment.config.privacy.unsafe_no_privacy:
        no_noise = "there is no noise, and no ε holds for this run"
        effect = "no budget limits this run" if plan.noise_multiplier else no_noise
        yield f"unsafe_no_privacy is set; {effect}"
    step = max(group.granularity for group in plan.groups)
    if plan.noise_multiplier == 0.0 and step > _FINE:
        yield (
            f"updates are rounded to whole multiples of {step:.2g}, since the clipping norm is "
            "large; without noise this rounding is not small"
        )


def _of_releases(
    experiment: Experiment, counted: Contributors, results: Sequence[RoundResult]
) -> Iterator[str]:
    """Yield notes on releases, and on figures of held-out rows, at the end of a run."""
    sampling = experiment.plan.sampling
    if counted.far_off:
        cure = "look for users whose data are NaN or invalid, and for nodes that are absent"
        if sampling.drawn is not sampling.unit:
            cure = "give total_examples, by which averages are divided, a better estimate"
        units = plural(sampling.drawn)
        yield f"noised counts say that {counted} expected {units} counted in a round: {cure}"
    losses = [result.loss for result in results if result.loss is not None]
    if fell := still_falling(losses):
        yield (
            f"the loss on held-out rows still fell at the end, from {fell[0]:.4g} to {fell[1]:.4g} "
            "between the last two fifths of its figures: a larger learning rate of the server, or "
            "more rounds, planned before the first, may give a better model; at the same ε, twice "
            "the rounds take about 1.4 times the noise"
        )


def still_falling(losses: Sequence[float]) -> tuple[float, float] | None:
    """Return the means of the last two fifths if the loss fell between them by more than noise.

    It must also have fallen from tenth to tenth: losses of successive rounds depend on each other,
    so their standard error is too small.
    """
    tenth = len(losses) // _EVALUATIONS
    if not tenth:
        return None
    tenths = [losses[len(losses) - k * tenth :][:tenth] for k in (4, 3, 2, 1)]
    fifths = [*tenths[0], *tenths[1]], [*tenths[2], *tenths[3]]
    mean_before, mean_after = map(fmean, fifths)
    error = math.sqrt(sum(map(variance, fifths)) / len(fifths[0]))
    has_fallen = mean_before - mean_after > max(_SURE * error, _FALLING * abs(mean_before))
    is_steady = all(fmean(b) < fmean(a) for a, b in pairwise(tenths))
    return (mean_before, mean_after) if has_fallen and is_steady else None
