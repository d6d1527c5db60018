"""Callers of the service's methods, made of federation.proto, and what they get."""

from collections.abc import Iterable
from types import SimpleNamespace

import grpc
import numpy as np
from google.protobuf.message_factory import GetMessageClass

from fedpriv.privacy.layout import Layout
from fedpriv.wire import Assembler
from fedpriv.wire import federation_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Federation"]


class FederationStub(SimpleNamespace):
    """Has a method for each of the service's, such as `Connect`, that calls it on a channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__()
        for method in _SERVICE.methods:
            kinds = [
                "stream" if streams else "unary"
                for streams in (method.client_streaming, method.server_streaming)
            ]
            call = getattr(channel, "_".join(kinds))(
                f"/{_SERVICE.full_name}/{method.name}",
                GetMessageClass(method.input_type).SerializeToString,
                GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)


def received(layout: Layout, stream: Iterable[pb.Chunk], dtype: object = "<f4") -> dict:
    """The tensors in chunks."""
    size = np.dtype(dtype).itemsize * layout.dimension
    assembler = Assembler(size, size)
    for chunk in stream:
        assembler.add(chunk)
    vector = assembler.finish().view(dtype)
    return layout.unflatten(vector.astype(vector.dtype.newbyteorder("="), copy=False))
