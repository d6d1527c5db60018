from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    SHARE: _ClassVar[Stage]
    AGREE: _ClassVar[Stage]
    SIGN: _ClassVar[Stage]
    OPEN: _ClassVar[Stage]
STAGE_UNSPECIFIED: Stage
SHARE: Stage
AGREE: Stage
SIGN: Stage
OPEN: Stage

class Hello(_message.Message):
    __slots__ = ("node", "version", "users_sha256")
    NODE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    USERS_SHA256_FIELD_NUMBER: _ClassVar[int]
    node: str
    version: int
    users_sha256: bytes
    def __init__(self, node: _Optional[str] = ..., version: _Optional[int] = ..., users_sha256: _Optional[bytes] = ...) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("hello", "vote")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    vote: Vote
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ...) -> None: ...

class FromServer(_message.Message):
    __slots__ = ("welcome", "proposal", "offer")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    proposal: Proposal
    offer: Offer
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("population_name", "population", "users", "task", "purpose", "nodes")
    POPULATION_NAME_FIELD_NUMBER: _ClassVar[int]
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    population_name: str
    population: int
    users: _containers.RepeatedScalarFieldContainer[int]
    task: Task
    purpose: str
    nodes: _containers.RepeatedCompositeFieldContainer[EnrolledNode]
    def __init__(self, population_name: _Optional[str] = ..., population: _Optional[int] = ..., users: _Optional[_Iterable[int]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., purpose: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[EnrolledNode, _Mapping]]] = ...) -> None: ...

class EnrolledNode(_message.Message):
    __slots__ = ("name", "fingerprint", "users")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: bytes
    users: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., users: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("model", "options", "seed", "loss", "metrics", "inputs", "targets", "ignore_index", "personal", "trained", "frozen", "adapters")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PERSONAL_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    options: str
    seed: int
    loss: str
    metrics: _containers.RepeatedScalarFieldContainer[str]
    inputs: _containers.RepeatedScalarFieldContainer[str]
    targets: str
    ignore_index: int
    personal: _containers.RepeatedScalarFieldContainer[str]
    trained: _containers.RepeatedScalarFieldContainer[str]
    frozen: _containers.RepeatedScalarFieldContainer[str]
    adapters: str
    def __init__(self, model: _Optional[str] = ..., options: _Optional[str] = ..., seed: _Optional[int] = ..., loss: _Optional[str] = ..., metrics: _Optional[_Iterable[str]] = ..., inputs: _Optional[_Iterable[str]] = ..., targets: _Optional[str] = ..., ignore_index: _Optional[int] = ..., personal: _Optional[_Iterable[str]] = ..., trained: _Optional[_Iterable[str]] = ..., frozen: _Optional[_Iterable[str]] = ..., adapters: _Optional[str] = ...) -> None: ...

class RoundId(_message.Message):
    __slots__ = ("run", "round", "attempt", "nonce")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: int
    nonce: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., nonce: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("id", "clipping", "local", "metrics", "price", "head")
    ID_FIELD_NUMBER: _ClassVar[int]
    CLIPPING_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    id: RoundId
    clipping: Clipping
    local: LocalTraining
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    price: Price
    head: SignedHead
    def __init__(self, id: _Optional[_Union[RoundId, _Mapping]] = ..., clipping: _Optional[_Union[Clipping, _Mapping]] = ..., local: _Optional[_Union[LocalTraining, _Mapping]] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., price: _Optional[_Union[Price, _Mapping]] = ..., head: _Optional[_Union[SignedHead, _Mapping]] = ...) -> None: ...

class SignedHead(_message.Message):
    __slots__ = ("count", "hash", "certificate", "signature")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    count: int
    hash: str
    certificate: bytes
    signature: bytes
    def __init__(self, count: _Optional[int] = ..., hash: _Optional[str] = ..., certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("id", "objection", "countersignature")
    ID_FIELD_NUMBER: _ClassVar[int]
    OBJECTION_FIELD_NUMBER: _ClassVar[int]
    COUNTERSIGNATURE_FIELD_NUMBER: _ClassVar[int]
    id: RoundId
    objection: str
    countersignature: Countersignature
    def __init__(self, id: _Optional[_Union[RoundId, _Mapping]] = ..., objection: _Optional[str] = ..., countersignature: _Optional[_Union[Countersignature, _Mapping]] = ...) -> None: ...

class Countersignature(_message.Message):
    __slots__ = ("node", "key", "certificate", "signature", "head")
    NODE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    node: str
    key: bytes
    certificate: bytes
    signature: bytes
    head: SignedHead
    def __init__(self, node: _Optional[str] = ..., key: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., head: _Optional[_Union[SignedHead, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("id", "seconds", "users", "clipping", "local", "metrics", "local_key", "price", "roster", "fixed_length", "head")
    ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    CLIPPING_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_KEY_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    FIXED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    id: RoundId
    seconds: float
    users: _containers.RepeatedScalarFieldContainer[int]
    clipping: Clipping
    local: LocalTraining
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    local_key: bytes
    price: Price
    roster: _containers.RepeatedCompositeFieldContainer[Countersignature]
    fixed_length: bool
    head: SignedHead
    def __init__(self, id: _Optional[_Union[RoundId, _Mapping]] = ..., seconds: _Optional[float] = ..., users: _Optional[_Iterable[int]] = ..., clipping: _Optional[_Union[Clipping, _Mapping]] = ..., local: _Optional[_Union[LocalTraining, _Mapping]] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., local_key: _Optional[bytes] = ..., price: _Optional[_Union[Price, _Mapping]] = ..., roster: _Optional[_Iterable[_Union[Countersignature, _Mapping]]] = ..., fixed_length: bool = ..., head: _Optional[_Union[SignedHead, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("id", "stage", "nodes", "items")
    ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    id: RoundId
    stage: Stage
    nodes: _containers.RepeatedScalarFieldContainer[str]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, id: _Optional[_Union[RoundId, _Mapping]] = ..., stage: _Optional[_Union[Stage, str]] = ..., nodes: _Optional[_Iterable[str]] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("node", "content")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    node: str
    content: bytes
    def __init__(self, node: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class Price(_message.Message):
    __slots__ = ("epsilon_after", "delta", "charges", "event", "part", "seeded")
    EPSILON_AFTER_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    CHARGES_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SEEDED_FIELD_NUMBER: _ClassVar[int]
    epsilon_after: float
    delta: float
    charges: int
    event: str
    part: int
    seeded: bool
    def __init__(self, epsilon_after: _Optional[float] = ..., delta: _Optional[float] = ..., charges: _Optional[int] = ..., event: _Optional[str] = ..., part: _Optional[int] = ..., seeded: bool = ...) -> None: ...

class Clipping(_message.Message):
    __slots__ = ("layout", "groups", "indicator", "weighted", "weight_cap")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    INDICATOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_CAP_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    groups: _containers.RepeatedCompositeFieldContainer[VectorGroup]
    indicator: Indicator
    weighted: _containers.RepeatedScalarFieldContainer[str]
    weight_cap: int
    def __init__(self, layout: _Optional[_Union[Layout, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[VectorGroup, _Mapping]]] = ..., indicator: _Optional[_Union[Indicator, _Mapping]] = ..., weighted: _Optional[_Iterable[str]] = ..., weight_cap: _Optional[int] = ...) -> None: ...

class Indicator(_message.Message):
    __slots__ = ("tensor", "groups")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tensor: _Optional[str] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("names", "shapes")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    shapes: _containers.RepeatedCompositeFieldContainer[Shape]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., shapes: _Optional[_Iterable[_Union[Shape, _Mapping]]] = ...) -> None: ...

class Shape(_message.Message):
    __slots__ = ("sizes",)
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class VectorGroup(_message.Message):
    __slots__ = ("name", "tensors", "clipping_norm", "scales")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CLIPPING_NORM_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensors: _containers.RepeatedScalarFieldContainer[str]
    clipping_norm: float
    scales: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., tensors: _Optional[_Iterable[str]] = ..., clipping_norm: _Optional[float] = ..., scales: _Optional[_Iterable[float]] = ...) -> None: ...

class LocalTraining(_message.Message):
    __slots__ = ("algorithm", "options")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    options: str
    def __init__(self, algorithm: _Optional[str] = ..., options: _Optional[str] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "shape", "centre", "radius", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CENTRE_FIELD_NUMBER: _ClassVar[int]
    RADIUS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: Shape
    centre: float
    radius: float
    options: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Union[Shape, _Mapping]] = ..., centre: _Optional[float] = ..., radius: _Optional[float] = ..., options: _Optional[_Iterable[float]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("number", "data", "crc32")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    number: int
    data: bytes
    crc32: int
    def __init__(self, number: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class FilePart(_message.Message):
    __slots__ = ("size", "chunk", "unknown")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    size: int
    chunk: Chunk
    unknown: bool
    def __init__(self, size: _Optional[int] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., unknown: bool = ...) -> None: ...

class UploadPart(_message.Message):
    __slots__ = ("answer", "chunk")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    answer: Answer
    chunk: Chunk
    def __init__(self, answer: _Optional[_Union[Answer, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "sum", "decline")
    ID_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    id: RoundId
    sum: PartialSum
    decline: Decline
    def __init__(self, id: _Optional[_Union[RoundId, _Mapping]] = ..., sum: _Optional[_Union[PartialSum, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ...) -> None: ...

class PartialSum(_message.Message):
    __slots__ = ("users", "weight", "masked")
    USERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    users: int
    weight: int
    masked: bool
    def __init__(self, users: _Optional[int] = ..., weight: _Optional[int] = ..., masked: bool = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("accepted", "reason")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ("count", "hash")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    count: int
    hash: str
    def __init__(self, count: _Optional[int] = ..., hash: _Optional[str] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("run", "round", "rounds", "epsilon", "epsilon_limit", "delta", "nodes_enrolled", "nodes_connected", "users_enrolled", "state")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    EPSILON_LIMIT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    NODES_ENROLLED_FIELD_NUMBER: _ClassVar[int]
    NODES_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    USERS_ENROLLED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    rounds: int
    epsilon: float
    epsilon_limit: float
    delta: float
    nodes_enrolled: int
    nodes_connected: int
    users_enrolled: int
    state: str
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., rounds: _Optional[int] = ..., epsilon: _Optional[float] = ..., epsilon_limit: _Optional[float] = ..., delta: _Optional[float] = ..., nodes_enrolled: _Optional[int] = ..., nodes_connected: _Optional[int] = ..., users_enrolled: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...
