"""The figures of a run folder."""

from fedpriv.experiment import Experiment
from fedpriv.report.run_page import write_run_figures

from .folder import RunFolder
from .reading import released_rounds


def draw(folder: RunFolder, experiment: Experiment) -> None:
    """Write the figures of all rounds, the last attempt at each, into the folder of the run."""
    budget = experiment.budget
    rounds = released_rounds(folder)
    write_run_figures(rounds, experiment.plan.run, budget.delta, budget.epsilon, folder.path)
