"""The frozen first layer of a run: principal components of its inputs, asked for once.

The query is one more charge on the ledger of the run, before its first round (Abadi et al. 2016,
arXiv:1607.00133, section 4). The directions are released, so the folder of the run keeps them.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from fedpriv.accounting.accountants import format_epsilon
from fedpriv.analytics import PrincipalComponents, SecondMoments, Survey, ask
from fedpriv.build import Experiment, Method, check_budget, method_of, on_population, records_of
from fedpriv.config import Config, ProjectionSection
from fedpriv.data.files import read_npz
from fedpriv.data.population import Population
from fedpriv.disk import with_room, write_atomically
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import DataError, InvalidValueError, hold_plain_numbers, is_whole, require
from fedpriv.ledger.events import RoundEvent, Unit, check_query
from fedpriv.ledger.participation import beside
from fedpriv.models import Projected
from fedpriv.privacy.clipping import FloatMatrix
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.run import RunSetup

_INPUTS = "x"  # the field that models read
_QUESTION = "projection"


@dataclass(frozen=True)
class Projection:
    """Inputs along their k private principal components, as a frozen first layer of the model.

    One query, with a noise multiplier of its own, finds them before the first round. It is asked of
    each record with the sampling probability, and spends from the budget of the run.
    """

    components: int  # k ≥ 1
    noise_multiplier: float  # z > 0
    sampling_probability: float = 1.0  # in (0, 1]

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        legal = "a whole number of at least 1"
        require(is_whole(self.components), f"components is {self.components!r}; it must be {legal}")
        check_query(self.noise_multiplier, self.sampling_probability)


def planned(
    config: Config,
    run: str,
    population: Population,
    spent: Sequence[RoundEvent],
    method: Method | None = None,
) -> tuple[Survey, Experiment]:
    """The query of a configuration's projection, and the experiment after it; nothing is spent.

    The experiment has any directions, and noise for what the query leaves of the budget.
    """
    section, inputs = _section(config), _inputs(population)
    method = method or method_of(config)
    mechanism = method.mechanism
    survey = _survey(section, run, records_of(population, mechanism), mechanism.unit)
    budget, before = mechanism.budget, [*spent, survey.event]
    if not budget.admits(before):
        raise InvalidValueError(
            f"with the projection the ledger would hold ε = "
            f"{format_epsilon(budget.epsilon_of(before))} at delta {budget.delta}; privacy.epsilon "
            f"is {budget.epsilon} and must be larger, or projection.noise_multiplier must be"
        )
    method = _projected(method, np.eye(inputs)[:, : section.components])
    experiment, _ = on_population(config, run, population, before, method)
    check_budget(experiment, before)
    return survey, experiment


def projected(
    setup: RunSetup, population: Population, console: Console, method: Method | None = None
) -> tuple[Experiment, InProcessTransport]:
    """The experiment whose model sees projected inputs; a run that is not resumed asks first.

    What can be refused is refused before users are asked. A run that ends between the query and its
    first round asks, and pays, again when it is started again.
    """
    config, path = setup.config, setup.folder.projection
    method = method or method_of(config)
    if not setup.resuming:
        setup.refuse_taken_name()
        survey, experiment = planned(config, setup.run, population, setup.spent, method)
        setup.folder.create()
        files = setup.ledger, beside(setup.ledger)
        asked = records_of(population, method.mechanism)
        with setup.folder.held():
            setup.folder.refuse_run()  # which another process may have begun
            with PrivacyRecords.open(*files, asked.name, experiment.budget) as records:
                answers = ask(survey, asked.users, records, experiment.entropy)
            found = PrincipalComponents.of(answers[_QUESTION], _section(config).components)
            content = io.BytesIO()
            np.savez(content, directions=found.directions, moments=found.moments)
            with_room(lambda: write_atomically(path, content.getvalue()))
        inputs, components = found.directions.shape
        console.print(
            f"projection: {components} of {inputs} directions, charge {answers.charge_hash[:12]}; "
            f"the last has a mean square of {found.moments[-1]:.2g}, noise alone up to "
            f"{found.noise_norm:.2g}",
            highlight=False,
        )
    method = _projected(method, _read(path))
    return on_population(config, setup.run, population, setup.spent, method)


def _section(config: Config) -> ProjectionSection:
    if config.projection is None:
        raise InvalidValueError("key projection is absent; it says how inputs are projected")
    return config.projection


def _inputs(population: Population) -> int:
    """Numbers of an input."""
    fields = population.users.fields
    if _INPUTS not in fields:
        raise DataError(f"projection needs the field {_INPUTS!r}; users have {sorted(fields)}")
    return math.prod(fields[_INPUTS].shape[1:])


def _survey(section: ProjectionSection, run: str, population: Population, unit: Unit) -> Survey:
    """The query, refused if it does not fit the users."""
    users, inputs = population.users, _inputs(population)
    if section.components > inputs:
        legal = f"at most {inputs}, the length of an input"
        raise InvalidValueError(
            f"projection.components is {section.components}; it must be {legal}"
        )
    sampling = PoissonSampling(users.population, section.sampling_probability, unit)
    question = SecondMoments(_QUESTION, _INPUTS, inputs)
    survey = Survey(run, (question,), sampling, section.noise_multiplier, round=0)
    survey.check(users)
    return survey


def _projected(method: Method, directions: FloatMatrix) -> Method:
    if method.task.inputs != _INPUTS:
        raise InvalidValueError(
            f"model.inputs is {method.task.inputs!r}; with a projection it must be {_INPUTS!r}"
        )
    model = Projected(directions, method.task.model)
    return replace(method, task=replace(method.task, model=model))


def _read(path: Path) -> FloatMatrix:
    directions = read_npz(path).get("directions")
    if directions is None or directions.ndim != 2:
        raise DataError(f"{path} holds no matrix named directions; restore it from a backup")
    return directions.astype(np.float64)
