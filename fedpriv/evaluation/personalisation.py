"""Personal models: a user trains a released model on its own examples and keeps the result.

Privacy: such a model is a function of the release and of its own user's examples. As long as it
stays with that user, others see only the release (joint differential privacy by the billboard lemma
of Hsu et al. 2014). Publishing the model or its scores would reveal more. So it is evaluated on
held-out users, who are not enrolled, or by `FederatedEvaluation`.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import torch

from fedpriv.data.population import HELD_OUT_USER, UserStore, offsets_of, spread_over
from fedpriv.engine.arithmetic import plain_arithmetic
from fedpriv.engine.examples import Chunk
from fedpriv.engine.leftovers import lazy_copy
from fedpriv.engine.roads import road_of
from fedpriv.engine.task import HeldOut, RoundParameters, Task, matching
from fedpriv.engine.trainer import Trainer
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.evaluation.held_out import Evaluation, evaluate
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, Tensors, flat
from fedpriv.support.checks import check_ranges, check_types, hold_numbers
from fedpriv.training.local import FedRecon
from fedpriv.training.request import LocalTraining, RoundRequest

_log = logging.getLogger(__name__)
_MEMORY = 2**28  # approximate limit in bytes for users who train together


@dataclass(frozen=True)
class Personalisation:
    """The way users personalise a released model, and the examples they use.

    >>> from fedpriv import SGD
    >>> Personalisation(SGD(0.1, steps=10), parameters=("head.*",)).share
    0.5
    """

    local: LocalTraining  # how a user trains, starting from the released model
    # Names or patterns of the parameters that users train; others stay as released. An empty tuple
    # stands for the task's personal parameters, or for all if it has none.
    parameters: tuple[str, ...] = ()
    share: float = 0.5  # of a held-out user's rows to train on, in (0, 1); the rest measure

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_types(local=(self.local, LocalTraining))
        if isinstance(self.local, FedRecon) or self.local.control is not None:
            kind = type(self.local).__name__
            raise InvalidValueError(f"personalisation.local is {kind}, which needs a server")
        _ = self.local.rate  # raises an error if it is a schedule, since there are no rounds
        check_ranges(self, " of personalisation", share="(0, 1)")

    def models(self, task: Task, model: Tensors, users: UserStore) -> dict[str, Tensors]:
        """Return the tensors that users train, by user id and name.

        `model` is the release, such as `Run.state.model`. Users without examples, or whose training
        raises an error, get its tensors unchanged. A user's tensors depend only on the model and on
        that user's examples; they have no noise, so publishing them reveals data of the user.
        """
        tuning = FineTuning(self, task, users, torch.device("cpu"), forgiving=True)
        models = sorted(tuning.models(model, users), key=itemgetter(0))
        return {users.id_of(user): tensors for user, tensors in models}


class FineTuning:
    """Trains users side by side, each from the same model."""

    def __init__(
        self,
        spec: Personalisation,
        task: Task,
        users: UserStore,
        device: torch.device,
        *,
        forgiving: bool = False,
    ) -> None:
        """Prepare to train any users with the fields of `users`.

        If `forgiving`, a user whose training raises an error keeps the model unchanged.
        """
        trainable = task.trainable()
        patterns = spec.parameters or task.personal or trainable
        personal = matching(patterns, trainable, "trainable parameter")
        model = lazy_copy(task.model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in personal)
        self._task = replace(task, model=model, personal=(), metrics={}, figures={})
        self._personal, self._device = personal, device
        self._forgiving = forgiving
        self._constants = task.constants(device)
        self._trainer = Trainer(self._task, users, None, device, _MEMORY, "float32")
        parameters = self._task.parameters()
        layout = Layout.of(parameters)
        clipping = Clipping(layout, flat(layout, 1.0))  # unused
        nobody = np.empty(0, np.int64)
        self._request = RoundRequest("", 1, 0, parameters, clipping, spec.local, nobody, bytes(32))
        with plain_arithmetic(device):  # not timed, so that repetitions give the same models
            limits = max(1, users.population), None
            self._road = road_of(self._trainer, self._request, "auto", *limits, timed=False)

    def models(self, model: Tensors, users: UserStore) -> Iterator[tuple[int, Tensors]]:
        """Yield the number of each user, in any order, and the tensors that it trained, by name."""
        device, everyone = self._device, np.arange(users.population)
        tensors = self._constants | {n: torch.tensor(t, device=device) for n, t in model.items()}
        initial = {name: tensors.pop(name) for name in self._personal}
        start = RoundParameters(initial, tensors)
        for user in np.flatnonzero(users.sizes == 0).tolist():
            yield user, {name: t.cpu().numpy() for name, t in initial.items()}
        for chunk in self._road.chunks(self._trainer, self._request.local, everyone, users.sizes):
            yield from self._tuned(start, chunk, users)

    def _tuned(
        self, start: RoundParameters, chunk: Chunk, users: UserStore
    ) -> Iterator[tuple[int, Tensors]]:
        """Yield the users of a chunk and their tensors; if forgiving, bisect a chunk that fails."""
        initial = start.parameters
        try:
            updates = self._trainer.sent(self._request, start, chunk, users)
        except Exception as error:
            if not self._forgiving:
                raise
            if len(chunk.users) > 1:
                for half in np.array_split(chunk.users, 2):
                    yield from self._tuned(start, replace(chunk, users=half), users)
                return
            # The message of the error may hold the user's data.
            _log.warning("a user keeps the model: training raised %s", type(error).__name__)
            updates = {name: torch.zeros_like(initial[name])[None] for name in self._personal}
        for lane, user in enumerate(chunk.users.tolist()):
            tensors = {n: initial[n] + updates[n][lane : lane + 1][0] for n in self._personal}
            yield user, {name: t.cpu().numpy() for name, t in tensors.items()}


class HeldOutUsers:
    """Held-out users, who personalise models on part of their rows and measure them on the rest."""

    def __init__(
        self, settings: Personalisation, task: Task, rows: HeldOut, device: torch.device
    ) -> None:
        """Split the rows [n] of each user, and try the initial model.

        InvalidValueError if rows have no users; ModelError if users cannot train the initial model.
        """
        if HELD_OUT_USER not in rows:
            raise InvalidValueError(
                "personalisation is given, and held-out rows have no users; give their ids as "
                f"held_out_users, the field {HELD_OUT_USER!r}"
            )
        ids, owners = np.unique(rows[HELD_OUT_USER], return_inverse=True)
        order = np.argsort(owners, kind="stable")
        sizes = np.bincount(owners, minlength=len(ids))
        in_training = spread_over(offsets_of(sizes), settings.share)
        training, measuring = order[in_training], order[~in_training]
        fields = {name: rows[name][training] for name in task.fields}
        counts = np.bincount(owners[training], minlength=len(ids))
        self.users, self._device, self._task = UserStore(fields, offsets_of(counts)), device, task
        # The rows to measure on, at least one of each user, and their positions by user.
        self.rows: HeldOut = {name: column[measuring] for name, column in rows.items()}
        self._of_users = np.split(np.arange(len(measuring)), np.cumsum(sizes - counts)[:-1])
        self._tuning = FineTuning(settings, task, self.users, device)
        try:  # before anything is spent
            loss = self.evaluate(task.parameters() | task.statistics()).loss
        except Exception as error:
            raise ModelError(f"held-out users cannot personalise the model: {error}") from error
        if not math.isfinite(loss):
            raise ModelError(
                f"the mean loss of held-out users' personal models is {loss} from the start; it "
                "must be finite, so lower the learning rate of personalisation, or leave out rows "
                "with NaN or infinite numbers"
            )

    def evaluate(self, model: Tensors, classes: Sequence[str] = ()) -> Evaluation:
        """Return figures of personal models on their users' rows, for all rows and by user.

        `classes` are as for `evaluate`.
        """
        models = self._tuning.models(model, self.users)
        personal = ((self._of_users[user], tensors) for user, tensors in models)
        return evaluate(self._task, self.rows, self._device, model, personal, classes)
