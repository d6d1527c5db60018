"""A run on Flower nodes that hold enrolled users."""

import threading

from flwr.serverapp import Grid
from rich.console import Console

from fedpriv.errors import InvalidValueError
from fedpriv.experiment import Experiment
from fedpriv.federated.books import Books
from fedpriv.federated.transport import Transport
from fedpriv.flower import WELCOME
from fedpriv.sections import FederationSection

from .beginning import Beginning
from .grid import GridTransport, Headers, Nodes, welcome_header
from .grid_nodes import EnrolledNodes
from .simulation import Follow, carry_out
from .standing import prices, welcomes


def run_enrolled(
    beginning: Beginning,
    section: FederationSection,
    grid: Grid,
    stopping: threading.Event,
    console: Console,
    follow: Follow,
) -> None:
    """Run or resume an experiment on the SuperNodes of a grid, and print how it went.

    Of the section the keys are read that say where users are and how long nodes are waited for;
    how they connect is Flower's.

    Args:
        beginning: how it begins or goes on.
        section: where users are.
        grid: of the run.
        stopping: when it is set, the round that is collected is abandoned.
        console: where to print.
        follow: as for `carry_out`.

    Raises:
        FedprivError: something is wrong with the input, or the run cannot go on.
    """
    experiment, enrolment = beginning.on_nodes(section)
    if section.least_nodes > len(enrolment.nodes):
        raise InvalidValueError(
            f"federation.least_nodes is {section.least_nodes}; {len(enrolment.nodes)} nodes are "
            "enrolled"
        )
    welcome_of = welcomes(experiment.config, enrolment)

    def headers(node: str) -> Headers:
        return {WELCOME: welcome_header(welcome_of(node))}

    def hosted(experiment: Experiment, books: Books) -> Transport:
        present = EnrolledNodes(grid, enrolment, section.least_nodes, stopping)
        return GridTransport(
            grid,
            Nodes(enrolment.hosting, present, headers),
            prices(experiment.plan, books),
            section.deadline_seconds,
            stopping,
            fixed=section.fixed_length,
        )

    carry_out(beginning, experiment, hosted, console, follow, clock=None)
