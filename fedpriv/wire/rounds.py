"""Which round, and what it costs: values and messages."""

from dataclasses import dataclass

from fedpriv.errors import InvalidValueError
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.limits import MAX_NAME, refusing


@dataclass(frozen=True)
class RoundId:
    """One attempt at a round of a run.

    Attributes:
        run: name of the run, from 1 to 1024 characters.
        round: number of the round, from 0.
        attempt: number of the attempt at this round, from 0.
        nonce: random, in 64 bits: tells apart two attempts of one number, of which the first was
            abandoned without a charge.

    Raises:
        InvalidValueError: the name is empty or too long, or a number has too many bits.
    """

    run: str
    round: int
    attempt: int
    nonce: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.run) <= MAX_NAME:
            raise InvalidValueError(
                f"run has {len(self.run)} characters; legal are 1 to {MAX_NAME}"
            )
        for name, number in (("round", self.round), ("attempt", self.attempt)):
            if not 0 <= number < 2**32:
                raise InvalidValueError(f"{name} is {number}; it must be from 0 to 2^32 - 1")
        if not 0 <= self.nonce < 2**64:
            raise InvalidValueError(f"nonce is {self.nonce}; it must be from 0 to 2^64 - 1")


@dataclass(frozen=True)
class Price:
    """What a round costs the users, for a node to consent to or not.

    Attributes:
        sampling_probability: q in (0, 1].
        population: N, the number of enrolled users, at least 1.
        noise_multiplier: z ≥ 0 of the whole round.
        epsilon_after: ε ≥ 0 at `delta` of all charges of the ledger and this round; may be inf.
        delta: δ in [0, 1).

    Raises:
        InvalidValueError: a number is out of range.
    """

    sampling_probability: float
    population: int
    noise_multiplier: float
    epsilon_after: float
    delta: float

    def __post_init__(self) -> None:
        if not 0.0 < self.sampling_probability <= 1.0:
            raise InvalidValueError(
                f"sampling_probability is {self.sampling_probability}; it must be in (0, 1]"
            )
        if not 1 <= self.population < 2**63:
            raise InvalidValueError(f"population is {self.population}; it must be at least 1")
        if not 0.0 <= self.noise_multiplier < float("inf"):
            raise InvalidValueError(
                f"noise_multiplier is {self.noise_multiplier}; it must be finite and not negative"
            )
        if not self.epsilon_after >= 0.0:
            raise InvalidValueError(
                f"epsilon_after is {self.epsilon_after}; it must not be negative"
            )
        if not 0.0 <= self.delta < 1.0:
            raise InvalidValueError(f"delta is {self.delta}; it must be in [0, 1)")


def encode_round_id(round_id: RoundId) -> pb.RoundId:
    """The message of a round's identity.

    Raises:
        WireError: the name is no Unicode.
    """
    with refusing("the name of a round"):
        return pb.RoundId(**vars(round_id))


def decode_round_id(message: pb.RoundId) -> RoundId:
    """The round's identity in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("the name of a round"):
        return RoundId(message.run, message.round, message.attempt, message.nonce)


def encode_price(price: Price) -> pb.Price:
    """The message of a price."""
    return pb.Price(
        sampling_probability=price.sampling_probability,
        population=price.population,
        noise_multiplier=price.noise_multiplier,
        epsilon_after=price.epsilon_after,
        delta=price.delta,
    )


def decode_price(message: pb.Price) -> Price:
    """The price in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("a price"):
        return Price(
            message.sampling_probability,
            message.population,
            message.noise_multiplier,
            message.epsilon_after,
            message.delta,
        )
