"""User-level privacy for a Flower app: a strategy for its ServerApp, and a mod for its ClientApp.

    strategy = PrivateStrategy(mechanism, connected(grid, 50), "clinics", "/data/ledger.sqlite")
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=20)

If each node is one user, such as a patient's phone or a clinic that is protected as a whole, the
ClientApp needs no change. With `clipping_mod`, a node can host many users, each of whom is
protected, and the server gets only the sum of their contributions.
"""

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.experiment.mechanism import Mechanism, PoissonExamples
from fedpriv.flower import messages as flower_messages
from fedpriv.ledger.participation import record_path
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS, Averaging
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import PartialSum, PrivacyRecords
from fedpriv.support.checks import check_fields, check_range, check_types, epsilon_up, is_whole
from fedpriv.support.importing import raised_at
from fedpriv.support.logs import one_line
from fedpriv.training.local import SGD
from fedpriv.training.optimizers import FedAvg, Parameters, ServerOptimizer, try_out
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import RoundRequest, Transport
from fedpriv.training.rounds import Contributors, RoundResult, Stop, initial_state, train

_log = logging.getLogger("flwr")  # its handler shows our lines among Flower's own
_ARRAYS, _CONFIG = "arrays", "config"  # records, as Flower's own strategies name them
_NODES_CHECK_SECONDS = 2.0
_OWN_TRAINING = SGD(learning_rate=1.0, steps=1)  # never read: ClientApps train in their own way

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def connected(grid: Grid, nodes: int, users: int = 1) -> dict[int, int]:
    """Wait until `nodes` nodes are connected; return the number of users of each, `users`, by id.

    This is for simulations, and to see the ids of a deployment. If nodes come and go, list the
    registered nodes instead. InvalidValueError: more than `nodes` nodes are connected.
    """
    while len(ids := sorted(grid.get_node_ids())) < nodes:
        _log.info("waiting for %d nodes; %d are connected", nodes, len(ids))
        time.sleep(_NODES_CHECK_SECONDS)
    if len(ids) > nodes:
        raise InvalidValueError(f"nodes is {nodes}, but {len(ids)} are connected; name them by id")
    return dict.fromkeys(ids, users)


@dataclass(frozen=True, eq=False)
class PrivateStrategy(Strategy):
    """Federated averaging that draws users, clips and sums their updates, and adds noise once.

    Guarantees, in addition to those of `fedpriv.privacy.round.private_round`:

    * the mechanism's policy draws cohorts from the users of all nodes in `nodes`, whether they are
      connected or not, and other nodes are never asked;
    * whatever a node returns, it changes the sum by at most the clipping norms times the number of
      its users who were drawn; a reply that is late, absent, malformed, not finite or an error
      counts as zero;
    * the average is over the expected number of users, which is fixed.

    If the policy charges a pass or a series of rounds at once, each call of `start` begins a new
    one.

    A node's id must stay the same throughout a run. It does with SuperNode authentication, and in a
    simulation; otherwise a node that reconnects is unknown and counts as zero.
    """

    mechanism: Mechanism  # with noise, from `Mechanism.calibrate` or `Mechanism.with_noise`
    nodes: Mapping[int, int]  # number of users by node id; more than one requires the mod
    population: str  # name in the ledger, the same in every run on these users
    ledger: Path | str  # charged by every run on these users; created if it does not exist
    server: ServerOptimizer = FedAvg()  # noqa: RUF009 - frozen, so sharing it is safe
    # Patterns of floating-point arrays that are sent but not trained, such as frozen layers and the
    # running statistics of batch normalisations. Arrays of other types are never trained.
    frozen: Sequence[str] = ()
    name: str = "flower"  # prefix of the name of each run in the ledger

    def __post_init__(self) -> None:
        check_fields(self)
        for pattern in self.frozen:
            check_types(**{"a pattern of frozen": (pattern, str)})
        if self.mechanism.noise_multiplier is None:
            raise InvalidValueError("the mechanism has no noise_multiplier; calibrate it first")
        if self.mechanism.unit != "user":
            fault = f"the mechanism's unit is {str(self.mechanism.unit)!r}"
            raise InvalidValueError(f"{fault}; with Flower it must be 'user'")
        if isinstance(self.mechanism.sampling, PoissonExamples):
            fault = f"the mechanism samples {self.mechanism.sampling.examples_per_user} examples"
            raise InvalidValueError(f"{fault} of each user; with Flower users must be sampled")
        if self.mechanism.metrics or self.mechanism.averaging != Averaging():
            rule = "metrics must be empty, and averaging plain"
            raise InvalidValueError(f"the mechanism has metrics or weights; with Flower {rule}")
        if not self.nodes:
            raise InvalidValueError("there are 0 nodes; there must be at least one")
        for node, users in self.nodes.items():
            if not (is_whole(node) and is_whole(users)):
                fault = f"node {node!r} brings {users!r} users"
                raise InvalidValueError(f"{fault}; both must be whole numbers of at least 1")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
        *,
        keep_going: bool = False,
    ) -> Result:
        """Run `num_rounds` private rounds, or fewer if the budget ends; return the releases.

        Each round waits at most `timeout` seconds for replies. The train metrics of a round are its
        released numbers, including `privacy/epsilon`, the ε of all charges of the ledger so far.
        Unless `keep_going` is true, the rounds end with an error in the log if noised counts show
        that too few users count; the guarantee is then the budget, not the cost of the charges.
        BudgetExceededError: the first round does not fit into the budget. LedgerError: the ledger
        belongs to another population, fails its checks, or cannot be written.
        """
        check_types(
            initial_arrays=(initial_arrays, ArrayRecord),
            train_config=(train_config, ConfigRecord | None),
        )
        if evaluate_config is not None:
            unsafe = "users' figures would be released without noise"
            raise InvalidValueError(f"evaluate_config is given; {unsafe}, so give evaluate_fn")
        check_range("timeout", timeout, "(0, inf)")
        model = TrainedModel.of(initial_arrays, self.frozen)
        plan, budget = self._plan(model, num_rounds), self.mechanism.budget
        nodes, config = dict(self.nodes), train_config or ConfigRecord()
        transport = NodesTransport(grid, nodes, model, config, timeout)
        try_out(plan.optimizer, model.trained)
        state, result = initial_state(plan, model.trained), Result(initial_arrays)
        ledger = Path(self.ledger)
        with PrivacyRecords.open(ledger, record_path(ledger), self.population, budget) as records:
            records.refuse_if_beyond(plan.mechanism.event, f"run {plan.run}, round 1")
            self.summary()
            _evaluate(evaluate_fn, 0, result)
            rounds = train(plan, state, transport, records, OperatingSystemEntropy())
            contributors = Contributors()
            for state, released in rounds:
                result.arrays = model.record(state.parameters)
                result.train_metrics_clientapp[state.round] = _figures(released)
                _evaluate(evaluate_fn, state.round, result)
                contributors = contributors.with_round(released, plan.sampling.event())
                if contributors.too_few and not keep_going:
                    reason = contributors.why_ended("users", state.round, num_rounds)
                    _log.error("%s; the guarantee is the budget of ε = %s", reason, budget.epsilon)
                    return result
        if state.round < num_rounds:
            _log.warning("stopped after %d of %d rounds: %s", state.round, num_rounds, Stop.BUDGET)
        return result

    def summary(self) -> None:
        """Log the number of users, the mechanism and its privacy budget."""
        users = sum(self.nodes.values())
        mechanism = self.mechanism.for_users(users)
        budget = f"ε = {mechanism.epsilon} at δ = {mechanism.delta}"
        details = mechanism.sampling, mechanism.clipping, mechanism.noise_multiplier, budget
        text = "%d users at %d nodes, %s, %s, z = %.4g, budget %s"
        _log.info(text, users, len(self.nodes), *details)

    def _plan(self, model: "TrainedModel", rounds: int) -> TrainingPlan:
        users, layout = sum(self.nodes.values()), Layout.of(model.trained)
        mechanism = self.mechanism.for_users(users)
        grouping = mechanism.clipping.grouping(layout, mechanism.allocation)
        sampling = mechanism.sampling.of(users, mechanism.unit)
        if sampling.event().projection:
            sentence = "a projection protects nobody at nodes; it must be another policy"
            raise InvalidValueError(f"mechanism.sampling is {mechanism.sampling}; {sentence}")
        plan = TrainingPlan(
            run=f"{self.name}-{os.urandom(4).hex()}",
            population=self.population,
            rounds=rounds,
            layout=layout,
            groups=grouping.groups,
            noise_shares=grouping.shares,
            noise_multiplier=mechanism.noise_multiplier or 0.0,
            sampling=sampling,
            local=_OWN_TRAINING,
            optimizer=self.server,
            adaptive=mechanism.adaptive,
            contributors_share=mechanism.contributors_share,
            strategy=mechanism.noise.strategy(sampling.event()),
        )
        return plan.within(mechanism.budget) if mechanism.rounds == rounds else plan

    def _in_pieces(self, *_arguments: object, **_keywords: object) -> NoReturn:
        reason = "a private round is drawn, charged and noised as one"
        raise InvalidValueError(f"{reason}; call start, and wrap this strategy in no other")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _in_pieces


def _figures(released: RoundResult) -> MetricRecord:
    spent = f"ε {epsilon_up(released.epsilon)} at δ {released.delta}"
    _log.info("round %d of %d released, %s", released.round, released.rounds, spent)
    return MetricRecord({**released.scalars, "privacy/delta": released.delta})


def _evaluate(evaluate_fn: Evaluate | None, number: int, result: Result) -> None:
    if evaluate_fn and (figures := evaluate_fn(number, result.arrays)) is not None:
        _log.info("after round %d: %s", number, figures)
        result.evaluate_metrics_serverapp[number] = figures


@dataclass(frozen=True)
class TrainedModel:
    """The initial arrays of a model, and the trained ones among them."""

    arrays: Mapping[str, Array]  # initial values of all arrays
    trained: Parameters  # initial values of the trained arrays, in float32

    @classmethod
    def of(cls, arrays: ArrayRecord, frozen: Sequence[str]) -> Self:
        """Return the model of these arrays; those that match a pattern of `frozen` are not trained.

        InvalidValueError: a pattern matches no array, no array is trained, or a trained array is
        not finite in float32.
        """
        frozen_names = {name for name in arrays for pattern in frozen if fnmatchcase(name, pattern)}
        for pattern in frozen:
            if not any(fnmatchcase(name, pattern) for name in frozen_names):
                raise InvalidValueError(f"frozen has {pattern!r}; no array is named so")
        values = {name: array.numpy() for name, array in arrays.items() if name not in frozen_names}
        with np.errstate(over="ignore"):  # refused below
            floating = {n: a.astype(np.float32) for n, a in values.items() if a.dtype.kind == "f"}
        if not floating:
            raise InvalidValueError(f"no array of {list(arrays)} is of floating point, not frozen")
        if invalid := [name for name, array in floating.items() if not np.isfinite(array).all()]:
            fault = f"arrays {invalid} hold NaN, infinity or numbers that float32 does not hold"
            raise InvalidValueError(f"{fault}; what is trained must be finite")
        return cls(dict(arrays), floating)

    def sent(self, parameters: Parameters) -> Tensors:
        """Return the trained arrays as nodes receive them, in their original types."""
        with np.errstate(over="ignore"):
            return {name: p.astype(self.arrays[name].dtype) for name, p in parameters.items()}

    def record(self, parameters: Parameters) -> ArrayRecord:
        """Return all arrays in their original order, with these values of the trained ones."""
        replaced = {name: Array(np.asarray(value)) for name, value in self.sent(parameters).items()}
        return ArrayRecord({name: replaced.get(name, array) for name, array in self.arrays.items()})


@dataclass(frozen=True, eq=False)
class NodesTransport(Transport):
    """Asks the nodes of the drawn users for updates, or for sums if the nodes have the mod."""

    grid: Grid
    nodes: Mapping[int, int]  # number of users by node id, in the order of users' positions
    model: TrainedModel
    config: ConfigRecord  # passed to ClientApps
    seconds: float  # from the first message to the deadline

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sum of each node that has drawn users, as replies arrive."""
        clipping, users_of = request.clipping, self._drawn(request.users)
        arrays, tensors = self.model.record(request.parameters), self.model.sent(request.parameters)
        config = ConfigRecord({**self.config, "server-round": request.round})

        def messages() -> Iterator[Message]:
            for node, users in users_of.items():
                content = flower_messages.asking(clipping, users)
                content[_ARRAYS], content[_CONFIG] = arrays, config
                yield Message(content, node, MessageType.TRAIN, ttl=self.seconds)

        deadline, no_stop = time.monotonic() + self.seconds, threading.Event()
        with closing(flower_messages.exchange(self.grid, messages(), deadline, no_stop)) as replies:
            for node, reply in replies:
                try:
                    total = self._total(clipping, tensors, node, reply)
                except WireError as error:  # that a node was drawn is secret: it is not named
                    _log.warning("a reply counts as zero: %s", one_line(str(error)))
                    continue
                users = users_of[node].size
                yield PartialSum(str(node), users, total, users * clipping.weight_cap)

    def _drawn(self, users: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.int64]]:
        """Return the drawn users of each node by its id, numbered from 0 within the node."""
        ids, counts = list(self.nodes), np.array(list(self.nodes.values()))
        ends = np.cumsum(counts)
        hosts = np.searchsorted(ends, users, side="right")
        numbers_in_node = users - (ends - counts)[hosts]
        return {ids[host]: numbers_in_node[hosts == host] for host in np.unique(hosts).tolist()}

    def _total(
        self, clipping: Clipping, tensors: Tensors, node: int, reply: Message | str
    ) -> IntegerVector:
        """Return a node's term of the sum, [D] integers; WireError if the reply counts as zero.

        If k of the node's users were drawn, the norm of group g is at most k·S_g, whatever the node
        returns: a single user's update is clipped here, and `add_up` holds a sum to the bound for k
        users. If a node is one user, adding or removing that user changes the sum only by the
        user's contribution, so by at most S_g, since nothing else in the sum depends on the user.
        If a node hosts many users, its mod clips the update of each, and removing one removes that
        user's contribution, again at most S_g. A plain update of a node with many users is refused:
        without one of them, clipping would return another vector, up to 2·S_g away.
        """
        if isinstance(reply, str):
            raise WireError(reply)
        if flower_messages.ARRAY in reply.content:
            return flower_messages.sum_in(reply.content, clipping.layout.dimension)
        if self.nodes[node] > 1:
            raise WireError("its node brings several users, but has no clipping_mod")
        return contribution(clipping, tensors, self.model.arrays.keys(), reply.content)


def contribution(
    clipping: Clipping, sent: Tensors, names: Iterable[str], content: RecordDict
) -> IntegerVector:
    """Return a user's term of the sum: the clipped difference of returned and sent parameters.

    The result is [D] integers with the guarantees of `Clipping.contribution`. `content` must hold
    one record of arrays with exactly these names; any other content counts as zero. Never raises.
    """
    layout = Layout.of(sent)
    try:
        (returned,) = content.array_records.values()
        if set(returned) != set(names):
            raise InvalidValueError("its arrays have other names than the sent ones")
        tensors = {name: returned[name].numpy() for name in sent}
        with np.errstate(all="ignore"):  # numbers that are not finite are zeroed below
            update = layout.unflatten(layout.flatten(tensors) - layout.flatten(sent))
    except Exception:  # bytes may be anything instead of arrays; the text may hold data
        _log.warning("an update counts as zero: its arrays have other names, shapes or types")
        return np.zeros(clipping.layout.dimension, np.int64)
    indicator = {CONTRIBUTORS.tensor: np.ones(())} if CONTRIBUTORS.tensor in clipping.spans else {}
    return clipping.contribution({**update, **indicator})


def clipping_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Train each drawn user of the node separately, and send only the sum of clipped updates.

    Use it as `ClientApp(mods=[clipping_mod])`. It must be the first mod, so that nothing bypasses
    it. The app is called once for each user, with the user's number at the node, from 0, as `user`
    in its config, with an empty state and its own copies of the configs. It must train only on that
    user's data and carry nothing over to the next user: no cache, and no random number generator
    whose state depends on the data.

    Guarantees: training sends nothing else from the node; a user whose training raises or returns
    anything malformed counts as zero and changes nothing for other users. Messages that do not ask
    for training pass unchanged. WireError: the message is not from a `PrivateStrategy`, and the app
    is not called.
    """
    if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    clipping, users = flower_messages.asked(message.content)
    arrays, config = message.content.array_records[_ARRAYS], message.content.config_records[_CONFIG]
    names = [tensor for group in clipping.sent for tensor in group.tensors]
    tensors = {name: arrays[name].numpy() for name in names if name != CONTRIBUTORS.tensor}
    total = np.zeros(clipping.layout.dimension, np.int64)
    for user in users.tolist():
        request, sandbox = copy.copy(message), copy.copy(context)
        settings = ConfigRecord({**copy.deepcopy(dict(config)), "user": user})  # it may hold lists
        request.content = RecordDict({_ARRAYS: ArrayRecord(dict(arrays)), _CONFIG: settings})
        sandbox.state = RecordDict()
        sandbox.node_config, sandbox.run_config = {**context.node_config}, {**context.run_config}
        try:
            content = call_next(request, sandbox).content
        except Exception as error:  # its text may hold the user's data
            _log.warning("a user counts as zero: %s", raised_at(error))
            continue
        total += contribution(clipping, tensors, arrays.keys(), content)
    return Message(flower_messages.summed(total), reply_to=message)
