"""What the owner of a run should know, in a sentence each, with the cure.

Nothing here is only in a log: a run has these notes in `Run.warnings`, in its file `run.json`, in
what is printed at its end, and on its page. What depends on users' data and is no release begins
with "simulation only, not private".
"""

from collections.abc import Iterator, Sequence

from fedpriv.accounting.accountants import format_epsilon
from fedpriv.engine.task import running_norms
from fedpriv.experiment.build import Experiment
from fedpriv.report.tables import plural
from fedpriv.training.contributors import Contributors
from fedpriv.training.rounds import RoundResult, Stop

_FINE = 1e-4  # steps of updates that change no training to speak of
_EVALUATIONS = 10  # of which a trend can be told
_FALLING = 0.02  # by which share the loss falls in the last tenth of them, if it has not levelled


def of_run(
    experiment: Experiment,
    stop: Stop,
    counted: Contributors,
    results: Sequence[RoundResult],
    charged: float,
    loss: float | None,
) -> tuple[str, ...]:
    """All notes of a run that has ended, after these rounds, at a loss on held-out rows.

    `charged` is the ε of its ledger.
    """
    released = () if stop is Stop.TOO_FEW else _of_releases(experiment, counted, results)
    ended = _of_early_end(experiment, counted, results, charged) if stop is Stop.TOO_FEW else ()
    undone = _of_losses(experiment.initial_loss, loss)
    return (*ended, *experiment.notes, *of_settings(experiment), *undone, *released)


def _of_losses(before: float | None, after: float | None) -> Iterator[str]:
    """Whether a run made the model worse, by its loss on held-out rows."""
    if before is not None and after is not None and not after <= before:
        yield (
            f"the loss on held-out rows rose from {before:.4g} to {after:.4g}, so noise or long "
            "steps undid what was learnt: scale inputs to about 1, or choose a smaller clipping "
            "norm, a smaller learning rate or more users"
        )


def of_settings(experiment: Experiment) -> Iterator[str]:
    """What settings do to a run, known before its first round."""
    plan, sampling, task = experiment.plan, experiment.plan.sampling, experiment.task
    expected = sampling.expected_cohort_size
    if expected < 1.0 or sampling.population == 1:
        yield (
            f"a cohort has {expected:.2g} {plural(sampling.drawn)} on average; rounds of one "
            "release its update and noise, rounds of none noise alone, and each is charged"
        )
    if sampling.drawn is sampling.unit and experiment.budget.delta * sampling.population >= 1.0:
        yield (
            f"δ is {experiment.budget.delta:g} for {sampling.population} "
            f"{plural(sampling.unit)}: such a slack allows a release to show one of them as they "
            f"are; choose δ well below {1.0 / sampling.population:.2g}"
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
        without = "there is no noise, and no ε holds for this run"
        unlimited = "no budget limits this run"
        yield (f"unsafe_no_privacy is set; {unlimited if plan.noise_multiplier else without}")
    step = max(group.granularity for group in plan.groups)
    if plan.noise_multiplier == 0.0 and step > _FINE:
        yield (
            f"updates are rounded to whole multiples of {step:.2g}, as the clipping norm is large "
            "and there is no noise beside which that is little"
        )


def _of_early_end(
    experiment: Experiment,
    counted: Contributors,
    results: Sequence[RoundResult],
    charged: float,
) -> Iterator[str]:
    """Why a run ended, and what it guarantees if it could have gone on."""
    plan, budget, done = experiment.plan, experiment.budget, results[-1].round
    yield counted.why_ended(plural(plan.sampling.unit), done, plan.rounds)
    if done < plan.rounds:
        yield (
            f"the guarantee is the budget, ε = {format_epsilon(budget.epsilon)} at δ = "
            f"{budget.delta}, and not what the ledger's charges add up to, "
            f"{format_epsilon(charged)}, since the run ended because of what it released"
        )


def _of_releases(
    experiment: Experiment, counted: Contributors, results: Sequence[RoundResult]
) -> Iterator[str]:
    """What releases and figures of held-out rows show at the end."""
    sampling = experiment.plan.sampling
    if counted.far_off:
        cure = "look for users whose data are NaN or illegal, and for nodes that are absent"
        if sampling.drawn is not sampling.unit:
            cure = "give total_examples, by which averages are divided, a better estimate"
        units = plural(sampling.drawn)
        yield f"noised counts say that {counted} expected {units} counted in a round: {cure}"
    losses = [each.loss for each in results if each.loss is not None]
    last = len(losses) // _EVALUATIONS
    if last:
        before, after = (sum(some) / last for some in (losses[-2 * last : -last], losses[-last:]))
        if after < before - _FALLING * abs(before):
            yield (
                f"the loss on held-out rows still fell at the end, from {before:.4g} to "
                f"{after:.4g}: more rounds, planned before the first, or a larger learning rate "
                "may give a better model at the same ε"
            )
