"""Answering one offer: object or train, and say so to the server before its deadline."""

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc

from fedpriv.errors import FedprivError, InvalidValueError, WireError
from fedpriv.federated.transport import PartialSum
from fedpriv.wire import Decline, Receipt, RoundOffer, Welcome

from .backoff import Backoff, persist
from .diary import Diary
from .exchange import download, upload
from .screening import Screening
from .worker import Worker

_LEAST_MARGIN = 0.05  # of the time that an offer leaves, for the upload
_LONGEST_REASON = 400  # characters; a reason may hold the name of a run
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answering:
    """How a node answers offers.

    Guarantees:
        * Nobody trains before the offer was found acceptable and is written down in the diary.
        * A connection that is lost is waited for until the deadline of the offer, not longer.
        * Nothing that the server sends, and no failure of training, raises here.
        * What is said to the server and logged says nothing of users.

    Attributes:
        channel: to the server.
        worker: trains; prepared for the welcome.
        screening: what the node asks of an offer.
        diary: where the node writes down what it takes part in.
        backoff: for a connection that was lost.
    """

    channel: grpc.aio.Channel
    worker: Worker
    screening: Screening
    diary: Diary
    backoff: Backoff

    async def answer(self, welcome: Welcome, offer: RoundOffer, deadline: float) -> None:
        """Answer an offer, and log in one line what came of it.

        Args:
            welcome: what the server said before it.
            offer: what it offers.
            deadline: of the offer, on the clock of the event loop.
        """
        what = f"round {offer.id.round} of run {offer.id.run!r}"
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._answer(welcome, offer, deadline)
                receipt = await self._sent(offer, answer)
                if not receipt.accepted:
                    # One that is not told so would wait for another answer until the deadline.
                    await self._sent(offer, Decline("the answer was refused"))
        except asyncio.CancelledError:
            _log.info("%s: left unfinished", what)
            raise
        except TimeoutError:
            _log.warning("%s: not answered, its deadline has passed", what)
        except grpc.aio.AioRpcError as error:
            _log.warning("%s: not answered: %s (%r)", what, error.code().name, error.details())
        except WireError as error:
            _log.warning("%s: not answered: %s", what, error)
        else:
            seconds = asyncio.get_running_loop().time() - began
            if not receipt.accepted:
                _log.warning("%s: the server refuses the answer: %r", what, receipt.reason)
            elif isinstance(answer, Decline):
                _log.info("%s: declined: %s", what, answer.reason)
            else:
                _log.info("%s: answered after %.1f s", what, seconds)

    async def _sent(self, offer: RoundOffer, answer: PartialSum | Decline) -> Receipt:
        return await persist(lambda: upload(self.channel, offer.id, answer), self.backoff)

    async def _answer(
        self, welcome: Welcome, offer: RoundOffer, deadline: float
    ) -> PartialSum | Decline:
        try:
            objection = await self.screening.objection(welcome, offer)
            if objection is not None:
                return Decline(objection[:_LONGEST_REASON])
            self.diary.record(welcome.population_name, offer, datetime.now(UTC))
        except InvalidValueError as error:
            _log.error("the offer cannot be checked, or not written down: %.400s", error)
            return Decline("the node cannot check the offer, or not write it down")
        return await self._trained(offer, deadline)

    async def _trained(self, offer: RoundOffer, deadline: float) -> PartialSum | Decline:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            tensors = await persist(lambda: download(self.channel, offer), self.backoff)
        except WireError as error:
            _log.error("the model did not arrive as it was declared: %s", error)
            return Decline("the model did not arrive as it was declared")
        except grpc.aio.AioRpcError as error:
            # Without an answer, the round would last until its deadline.
            _log.error("the model cannot be fetched: %s (%r)", error.code().name, error.details())
            return Decline("the model cannot be fetched")
        now = loop.time()
        # A sum has up to twice the bytes of the model, and the way up is often the slower one.
        margin = max(4.0 * (now - began), _LEAST_MARGIN * (deadline - began))
        seconds = max(0.5 * (deadline - now), deadline - now - margin)
        try:
            request = offer.request(tensors)
            del tensors
            trained = await self.worker.train(request, seconds)
        except FedprivError as error:
            # Its text may hold users' data.
            _log.error("training failed: %s", type(error).__name__)
            trained = None
        return Decline("training failed") if trained is None else trained
