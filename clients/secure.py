"""A node's part in a secure sum: its users' coins, its noise, its masks, and what it checks.

The server need not be trusted. Everything that a node does depends on its own users, on public
terms, and on keys that other enrolled nodes have signed; see docs/secure-sums.md.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedpriv.clients.connection import Backoff, FederationStub, Identity, persist
from fedpriv.clients.ledger_check import DISBELIEF, OfferPolicy
from fedpriv.clients.worker import Worker
from fedpriv.errors import FedprivError
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.gaussian_mechanism import rounded_noise
from fedpriv.privacy.sampling import drawn_users
from fedpriv.secure_sums.parameters import Grid, SignedVector, share_stddevs
from fedpriv.secure_sums.protocol import KeyPair, Participant, Verify
from fedpriv.wire import RoundOffer, Stage, Step, Welcome, naming

_log = logging.getLogger(__name__)
_LEAST_MARGIN = 0.05  # share of the time until the upload's deadline that is kept for the upload


class VoidError(FedprivError):
    """The attempt ends without this node; the message says why, and nothing about users."""


@dataclass(eq=False)
class SecureSums:
    """A node's part in secure sums.

    Guarantees, for any server and up to t nodes that collude with it:
        * nothing but a masked sum leaves the node, once per attempt, after the journal has it;
        * its users are drawn by its own coins, and an upload follows in every attempt, with the
          noise share of the node, even if nobody was drawn or training failed;
        * the masks are for nodes of the pinned enrolment, at least n of them, whose keys are signed
          for this attempt;
        * it opens other nodes' masks only for one list of survivors, with a quorum's signatures,
          and with --verify-ledger only if the ledger has charged the attempt.
    """

    server: FederationStub
    worker: Worker
    policy: OfferPolicy
    identity: Identity
    backoff: Backoff
    _pairs: dict[bytes, KeyPair] = field(default_factory=dict, repr=False)  # of the last vote
    _stated: str = ""  # the last statement in the log

    def fresh_key(self, secure: SecureSum, binding: bytes) -> bytes:
        """Return the public part of a fresh key for an attempt; older keys are forgotten."""
        if (statement := str(secure)) != self._stated:
            self._stated = statement
            _log.info("(ε, δ): %s", statement)
        self._pairs = {binding: KeyPair.fresh()}
        return self._pairs[binding].public

    async def take_part(self, welcome: Welcome, offer: RoundOffer, deadline: float) -> None:
        """Take part in an attempt; `deadline` is that of the upload, on the event loop's clock.

        VoidError or another FedprivError: the node drops out; AioRpcError: the server ends it.
        """
        if (secure := offer.price.event.secure_sum) is None:
            raise VoidError("the server is trusted in this round")
        participant, verify = self._party(welcome, offer, secure)
        shared = await self._step(offer, Stage.SHARE, participant.sealed)
        total = await self._noised_sum(welcome, offer, deadline)
        masked, uploaded = participant.masked(total, shared.nodes, shared.items)
        if objection := self.policy.record(welcome, offer):
            raise VoidError(objection)
        receipt = await persist(lambda: self.server.upload_masked(offer.id, masked), self.backoff)
        if not receipt.accepted:
            raise VoidError(f"the server refuses the masked sum: {receipt.reason!r}")
        survivors = (await self._step(offer, Stage.AGREE)).nodes
        signature = naming.signed(self.identity.key, uploaded.statement(survivors))
        quorum = await self._step(offer, Stage.SIGN, {self.identity.node: signature})
        shares = uploaded.opened(survivors, quorum.items, verify)
        await self._check_charged(welcome, offer)
        await persist(
            lambda: self.server.exchange(Step(offer.id, Stage.OPEN, (), shares)), self.backoff
        )

    def _party(
        self, welcome: Welcome, offer: RoundOffer, secure: SecureSum
    ) -> tuple[Participant, Verify]:
        """Return this node among the others, and a function that checks their signatures.

        VoidError: a node is not enrolled, or has not signed its key for this attempt.
        """
        name, event = welcome.population_name, offer.price.event
        binding = naming.binding_of(name, offer.id, event, offer.head)
        enrolled = {node.name: node.fingerprint.hex() for node in welcome.nodes}
        certificates = self.policy.countersigned(welcome, offer)
        for node, certificate in certificates.items():
            if enrolled.get(node) != naming.fingerprint_of(certificate):
                raise VoidError("the roster has a node that is not enrolled with its certificate")
        if (pair := self._pairs.pop(binding, None)) is None:  # a key is for one roster
            raise VoidError("the node has no key of a vote on this attempt")
        roster = naming.roster_of(offer.roster, binding)
        participant = Participant.begin(roster, self.identity.node, pair, secure)

        def verify(node: str, statement: bytes, signature: bytes) -> bool:
            certificate = certificates.get(node)
            return certificate is not None and naming.has_signed(certificate, statement, signature)

        return participant, verify

    async def _noised_sum(
        self, welcome: Welcome, offer: RoundOffer, deadline: float
    ) -> SignedVector:
        """Return the sum of the users whom the node draws, plus its share of the noise: [D].

        The node downloads the model and measures the time whether or not anybody is drawn. If
        training fails, its users count as zero.
        """
        loop = asyncio.get_running_loop()
        began, event = loop.time(), offer.price.event
        model = offer.model(self.worker.built.statistics)
        tensors = await persist(lambda: self.server.download(offer.id, model), self.backoff)
        margin = max(4.0 * (loop.time() - began), _LEAST_MARGIN * (deadline - began))
        until = max(loop.time(), deadline - margin)
        coins = drawn_users(event.sampling, welcome.users.size, os.urandom(32))
        total = np.zeros(offer.clipping.layout.dimension, np.int64)
        if coins.size:
            request = replace(offer.request(tensors), users=welcome.users[coins])
            del tensors
            try:
                partial = await self.worker.train(request, until - loop.time())
                total = total if partial is None else partial.total
            except FedprivError as error:
                # The text of the error may contain users' data.
                _log.error("training failed: %s", type(error).__name__)
        if offer.fixed_length or self.policy.consent.fixed_length:
            await asyncio.sleep(until - loop.time())
        # Sensitivity: a user of this node changes the part of group g by whole numbers of steps a
        # with Σa² ≤ B_g, as in `GaussianQuery.noised_average`, and no other part of the total. The
        # variances of the shares of any n − t − d honest nodes add up to σ_g² at least, so that all
        # parts together change by at most 1/z in units of the total's noise. By the theorem of
        # `secure_sums.parameters`, rounded shares add up to one rounded Gaussian, up to δ′.
        nodes, clipping = len(offer.roster), offer.clipping
        noise = rounded_noise(lambda _: os.urandom(32), clipping, share_stddevs(event, nodes))
        return Grid.of(event, nodes).rounded(total + noise, clipping)

    async def _check_charged(self, welcome: Welcome, offer: RoundOffer) -> None:
        """Raise VoidError unless the ledger has charged the attempt.

        Without a verifier, the node believes the server.
        """
        try:
            examined = await self.policy.examined(welcome)
        except DISBELIEF as error:
            _log.error("the ledger cannot be believed: %.400s", error)
            raise VoidError("the ledger cannot be believed") from error
        if examined is None:
            return
        attempt = offer.id.run, offer.id.round, offer.id.attempt
        rows = [r for r in examined.ledger.rows if (r.run, r.round, r.attempt) == attempt]
        if [row.event for row in rows] != [offer.price.event]:
            raise VoidError("the ledger has not charged the attempt")

    async def _step(
        self, offer: RoundOffer, stage: Stage, items: Mapping[str, bytes] | None = None
    ) -> Step:
        """Take a step and return the server's answer; VoidError if it ends the attempt."""
        step = Step(offer.id, stage, (), items or {})
        answer = await persist(lambda: self.server.exchange(step), self.backoff)
        if (answer.id, answer.stage) != (offer.id, stage) or not answer.nodes:
            raise VoidError("too few nodes are left")
        return answer
