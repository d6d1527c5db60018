"""Personal models: a user makes a released model its own, and sends nothing of it.

Privacy: such a model is a function of what was released and of its own user's examples. As long as
it stays with that user, others see no more than what was released (joint differential privacy by
the billboard lemma of Hsu et al. 2014). Publishing it, or what it scores, is another matter:
held-out users belong to no enrolled population, and users can be asked by `FederatedEvaluation`.
"""

import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import torch

from fedpriv.data.population import HELD_OUT_USER, UserStore, offsets_of, spread_over
from fedpriv.engine.roads import road_of
from fedpriv.engine.task import HeldOut, RoundParameters, Task, matching
from fedpriv.engine.trainer import Chunk, Trainer
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.evaluation.held_out import Evaluation, evaluate
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, Tensors, flat
from fedpriv.support.checks import check_types, hold_numbers
from fedpriv.training.local import FedRecon
from fedpriv.training.request import LocalTraining, RoundRequest

_log = logging.getLogger(__name__)
_MEMORY = 2**28  # bytes that users who train together may take, roughly


@dataclass(frozen=True)
class Personalisation:
    """How users make a released model their own, and on which of their examples.

    >>> from fedpriv import SGD
    >>> Personalisation(SGD(0.1, steps=10), parameters=("head.*",)).share
    0.5
    """

    local: LocalTraining  # how each trains, from the released model
    # Names of what it trains, or patterns of them; the rest stays as released. Without any, the
    # personal parameters of the task, or all where it has none.
    parameters: tuple[str, ...] = ()
    # In (0, 1), of each held-out user's rows: on these it trains, and it is measured on the others.
    share: float = 0.5

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_types(local=(self.local, LocalTraining))
        if isinstance(self.local, FedRecon) or self.local.control is not None:
            kind = type(self.local).__name__
            raise InvalidValueError(f"personalisation.local is {kind}, which needs a server")
        _ = self.local.rate  # which must be a number, as there are no rounds
        if not 0.0 < self.share < 1.0:
            found = f"share of personalisation is {self.share}"
            raise InvalidValueError(f"{found}; it must be between 0 and 1")

    def models(self, task: Task, model: Tensors, users: UserStore) -> dict[str, Tensors]:
        """What users make of the tensors that they train, by user id and name of tensor.

        `model` is what was released, such as `Run.state.model`. A user without examples, or whose
        training raises, keeps it as it is. What a user gets depends on the model and its own
        examples alone: to publish it is to publish something of that user's, without noise.
        """
        tuning = FineTuning(self, task, users, torch.device("cpu"), forgiving=True)
        found = tuning.models(model, users)
        return {users.id_of(user): own for user, own in sorted(found, key=itemgetter(0))}


class FineTuning:
    """Trains users side by side, each from the same model."""

    def __init__(
        self,
        how: Personalisation,
        task: Task,
        users: UserStore,
        device: torch.device,
        *,
        forgiving: bool = False,
    ) -> None:
        """`users` have the fields of all to come; `forgiving`, one who fails keeps the model."""
        trainable = task.trainable()
        own = matching(
            how.parameters or task.personal or trainable, trainable, "trainable parameter"
        )
        tuned = copy.deepcopy(task.model)
        for name, parameter in tuned.named_parameters():
            parameter.requires_grad_(name in own)
        self._task = replace(task, model=tuned, personal=(), metrics={}, figures={})
        self._own, self._local, self._device = own, how.local, device
        self._forgiving = forgiving
        self._constants = task.constants(device)
        self._trainer = Trainer(self._task, users, None, device, _MEMORY, "float32")
        request = self._request()
        people = max(1, users.population)
        # No clock decides: models must be the same where they are made again.
        self._road = road_of(self._trainer, request, "auto", people, None, timed=False)

    def _request(self) -> RoundRequest:
        parameters = self._task.parameters()
        layout = Layout.of(parameters)
        clipping = Clipping(layout, flat(layout, 1.0))  # of which nothing is used
        nobody = np.empty(0, np.int64)
        return RoundRequest("", 1, 0, parameters, clipping, self._local, nobody, bytes(32))

    def models(self, model: Tensors, users: UserStore) -> Iterator[tuple[int, Tensors]]:
        """Users and what they have made of the tensors that they train; not in their order."""
        device, everyone = self._device, np.arange(users.population)
        tensors = self._constants | {n: torch.tensor(t, device=device) for n, t in model.items()}
        begun = {name: tensors.pop(name) for name in self._own}
        start, request = RoundParameters(begun, tensors), self._request()
        for user in np.flatnonzero(users.sizes == 0).tolist():
            yield user, {name: t.cpu().numpy() for name, t in begun.items()}
        for chunk in self._road.chunks(self._trainer, self._local, everyone, users.sizes):
            yield from self._tuned(request, start, chunk, users)

    def _tuned(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, users: UserStore
    ) -> Iterator[tuple[int, Tensors]]:
        """What users of a chunk make of it; of forgiven ones, who fails alone keeps it."""
        begun = start.parameters
        try:
            moved = self._trainer.moved(request, start, chunk, users)
        except Exception as error:
            if not self._forgiving:
                raise
            if len(chunk.users) > 1:
                for half in np.array_split(chunk.users, 2):
                    yield from self._tuned(request, start, replace(chunk, users=half), users)
                return
            # The text of the error may hold the user's data.
            _log.warning("a user keeps the model: training raised %s", type(error).__name__)
            moved = {name: torch.zeros_like(begun[name])[None] for name in self._own}
        for lane, user in enumerate(chunk.users.tolist()):
            own = {n: begun[n] + moved[n][lane : lane + 1][0] for n in self._own}
            yield user, {name: t.cpu().numpy() for name, t in own.items()}


class HeldOutUsers:
    """Held-out users, who make models their own on part of their rows, and measure them."""

    def __init__(
        self, how: Personalisation, task: Task, rows: HeldOut, device: torch.device
    ) -> None:
        """Refuse rows that do not say whose they are, and users who cannot train the initial model.

        InvalidValueError or ModelError.
        """
        if HELD_OUT_USER not in rows:
            raise InvalidValueError(
                "personalisation is given, and held-out rows have no users; give their ids as "
                f"held_out_users, the field {HELD_OUT_USER!r}"
            )
        ids, owners = np.unique(rows[HELD_OUT_USER], return_inverse=True)
        order = np.argsort(owners, kind="stable")
        sizes = np.bincount(owners, minlength=len(ids))
        trained = spread_over(offsets_of(sizes), how.share)
        own = {name: rows[name][order[trained]] for name in task.fields}
        counts = np.bincount(owners[order[trained]], minlength=len(ids))
        self.users, self._device, self._task = UserStore(own, offsets_of(counts)), device, task
        kept = order[~trained]  # at least one of each user
        # Rows that are measured, and by whom.
        self.rows: HeldOut = {name: column[kept] for name, column in rows.items()}
        self._of_users = np.split(np.arange(len(kept)), np.cumsum(sizes - counts)[:-1])
        self._tuning = FineTuning(how, task, self.users, device)
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

    def evaluate(self, model: Tensors) -> Evaluation:
        """Personal models on their users' rows: figures of all rows together, and by user."""
        models = self._tuning.models(model, self.users)
        personal = ((self._of_users[user], own) for user, own in models)
        return evaluate(self._task, self.rows, self._device, model, personal)
