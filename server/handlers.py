"""How calls reach the service: messages are bounded before protobuf reads them."""

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from fedpriv.errors import WireError
from fedpriv.wire import SERVER_RECEIVES_BYTES, parse
from fedpriv.wire import federation_pb2 as pb

from .guard import Behaviour, Context, RefusedCallError
from .service import Service

SERVICE = "fedpriv.v1.Federation"
_SMALL = 8192  # bytes of a message without tensors
Kind = TypeVar("Kind", bound=Message)


def generic_handler(service: Service) -> grpc.GenericRpcHandler:
    """The methods of federation.proto; a message that is too long or none ends its call."""
    methods = {
        "Connect": grpc.unary_stream_rpc_method_handler(
            _reading(pb.Hello, service.connect), None, _written
        ),
        "Download": grpc.unary_stream_rpc_method_handler(
            _reading(pb.RoundId, service.download)  # writes what was serialised before
        ),
        "Upload": grpc.stream_unary_rpc_method_handler(service.upload, _part, _written),
        "FetchLedger": grpc.unary_stream_rpc_method_handler(
            _reading(pb.LedgerRequest, service.fetch_ledger), None, _written
        ),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            _reading(pb.StatusRequest, service.get_status), None, _written
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _reading(kind: type[Kind], method: Callable[[Kind, Context], Awaitable[object]]) -> Behaviour:
    """The method, behind a parser; gRPC's own way would log a traceback for each malformed one."""

    async def read(data: object, context: Context) -> object:
        try:
            request = parse(kind, cast(bytes, data), _SMALL)
        except WireError as error:
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        return await method(request, context)

    return read


def _part(data: bytes) -> pb.UploadPart:
    """A part of an answer; raises WireError where the answer is read."""
    return parse(pb.UploadPart, data, SERVER_RECEIVES_BYTES)


def _written(message: Message) -> bytes:
    return bytes(message.SerializeToString())
