"""What an offer tells users to do, as messages: clip, train and measure."""

from fedpriv.errors import WireError
from fedpriv.federated.transport import LocalTraining
from fedpriv.privacy.contribution import Clipping, Indicator
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.metrics import Metric
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.limits import (
    MAX_DIMENSIONS,
    MAX_OPTIONS,
    MAX_TENSORS,
    at_most,
    check_names,
    refusing,
)
from fedpriv.wire.tensors import decode_layout, encode_layout


def encode_clipping(clipping: Clipping) -> pb.Clipping:
    """The message of a clipping.

    Raises:
        WireError: it passes a limit.
    """
    asked = clipping.indicator
    with refusing("a clipping"):
        indicator = pb.Indicator(tensor=asked.tensor, groups=asked.groups) if asked else None
        message = pb.Clipping(
            layout=encode_layout(clipping.layout),
            groups=[
                pb.VectorGroup(
                    name=group.name,
                    tensors=group.tensors,
                    clipping_norm=group.clipping_norm,
                    scales=group.scales,
                )
                for group in clipping.groups
            ],
            indicator=indicator,
            weighted=clipping.weighted,
            weight_cap=clipping.weight_cap,
        )
    _check_clipping(message)
    return message


def decode_clipping(message: pb.Clipping) -> Clipping:
    """The clipping of a message; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    layout = decode_layout(message.layout)
    _check_clipping(message)
    with refusing("a clipping"):
        groups = tuple(
            VectorGroup(g.name, tuple(g.tensors), g.clipping_norm, tuple(g.scales))
            for g in message.groups
        )
        asked = message.indicator
        indicator = Indicator(asked.tensor, tuple(asked.groups))
        given = indicator if message.HasField("indicator") else None
        weighted, cap = tuple(message.weighted), message.weight_cap
        return Clipping(layout, groups, given, weighted, cap)


def _check_clipping(message: pb.Clipping) -> None:
    groups, tensors = len(message.groups), len(message.layout.names)
    at_most("vector groups", groups, MAX_TENSORS)
    grouped = sum(len(group.tensors) for group in message.groups)
    if grouped != tensors:
        raise WireError(f"vector groups hold {grouped} tensors; it must be all {tensors}, once")
    at_most("groups with weights", len(message.weighted), groups)
    at_most("groups of an indicator", len(message.indicator.groups), groups)
    check_names("vector group", (group.name for group in message.groups))


def encode_local(local: LocalTraining) -> pb.LocalTraining:
    """The message of local training.

    Raises:
        WireError: a number passes 32 bits.
    """
    with refusing("local training"):
        return pb.LocalTraining(
            learning_rate=local.learning_rate,
            batch_size=local.batch_size or 0,
            epochs=local.epochs or 0,
            steps=local.steps or 0,
            momentum=local.momentum,
            proximal=local.proximal,
            max_examples=local.max_examples or 0,
        )


def decode_local(message: pb.LocalTraining) -> LocalTraining:
    """The local training of a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("local training"):
        return LocalTraining(
            learning_rate=message.learning_rate,
            batch_size=message.batch_size or None,
            epochs=message.epochs or None,
            steps=message.steps or None,
            momentum=message.momentum,
            proximal=message.proximal,
            max_examples=message.max_examples or None,
        )


def encode_metric(metric: Metric) -> pb.Metric:
    """The message of a metric.

    Raises:
        WireError: it passes a limit.
    """
    with refusing("a metric"):
        message = pb.Metric(
            name=metric.name,
            shape=pb.Shape(sizes=metric.shape),
            centre=metric.centre,
            radius=metric.radius,
            options=metric.options,
        )
    _check_metric(message)
    return message


def decode_metric(message: pb.Metric) -> Metric:
    """The metric of a message; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    _check_metric(message)
    with refusing("a metric"):
        return Metric(
            message.name,
            tuple(message.shape.sizes),
            message.centre,
            message.radius,
            tuple(message.options),
        )


def _check_metric(message: pb.Metric) -> None:
    check_names("metric", [message.name])
    at_most("dimensions of a metric", len(message.shape.sizes), MAX_DIMENSIONS)
    at_most("options of a metric", len(message.options), MAX_OPTIONS)
