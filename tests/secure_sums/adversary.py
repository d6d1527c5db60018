"""What the server and the nodes that collude with it can compute from all that they ever saw.

A mask is known if its secret is: a node's seed, or the masking key of one of a pair. A secret is
known if its node colludes, or if the shares of it that colluding neighbours received and honest
ones opened reach the threshold.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.noise import words
from fedpriv.secure_sums import protocol
from fedpriv.secure_sums.parameters import threshold_of
from fedpriv.secure_sums.protocol import Uploaded
from tests.secure_sums.world import Vector, World

Mask = tuple[str, ...]  # ("self", node) or ("pair", node, node), of one list of sharers
Opened = Mapping[str, Mapping[str, bytes]]  # shares by sender and owner


@dataclass(frozen=True)
class Upload:
    """An honest node's upload, and the masks in it with their signs."""

    node: str
    total: Vector
    upload: npt.NDArray[np.uint64]
    state: Uploaded

    @cached_property
    def masks(self) -> dict[tuple[Mask, tuple[str, ...]], int]:
        listed = self.state.sharers
        masks = {(("self", self.node), listed): 1}
        for other in self.state.shares:
            pair = ("pair", *sorted((self.node, other)))
            masks[pair, listed] = 1 if self.node < other else -1
        return masks


def uploads_of(
    at: World, totals: Mapping[str, Vector], shown: Mapping[str, Sequence[str]]
) -> dict[str, Upload]:
    """Uploads of nodes for the lists of sharers that the server shows them."""
    done = {}
    for node, sharers in shown.items():
        upload, state = at.masked(node, totals[node], sharers)
        done[node] = Upload(node, totals[node], upload, state)
    return done


@dataclass(frozen=True)
class Coalition:
    """The server with some nodes, and the shares that honest nodes opened to it."""

    at: World
    colluding: frozenset[str]
    opened: Opened

    def _secret(self, owner: str, *, masking: bool) -> bytes | None:
        """A masking key or a seed, by the code that the server has."""
        pair = self.at.pairs[owner]
        if owner in self.colluding:
            return pair.masking if masking else pair.seed
        return self._restored[owner, masking]

    @cached_property
    def _restored(self) -> dict[tuple[str, bool], bytes | None]:
        threshold = threshold_of(self.at.secure)
        secrets = {}
        for owner in set(self.at.names) - self.colluding:
            # Of each sender there may be a share of either secret; its length does not tell.
            received = {
                name: self.at.nodes[name]._text(owner, self.at.nodes[owner].sealed[name])
                for name in self.colluding & set(self.at.nodes[owner].sealed)
            }
            given = {name: shares[owner] for name, shares in self.opened.items() if owner in shares}
            for masking in (True, False):
                cut = slice(0, 33) if masking else slice(33, 66)
                shares = given | {name: text[cut] for name, text in received.items()}
                points = {self.at.roster.index(name) + 1: share for name, share in shares.items()}
                member = self.at.roster.member(owner)
                try:
                    found = protocol._restored(member, points, threshold, masking=masking)
                except InvalidValueError:
                    found = None
                secrets[owner, masking] = found
        return secrets

    def key(self, mask: Mask, sharers: tuple[str, ...]) -> bytes | None:
        """The key of a mask, None if the coalition lacks it."""
        roster = self.at.roster
        if mask[0] == "self":
            seed = self._secret(mask[1], masking=False)
            return seed and protocol._self_key(roster, protocol._digest(sharers), mask[1], seed)
        for node, other in (mask[1:], mask[:0:-1]):
            if masking := self._secret(node, masking=True):
                return protocol._pair_key(roster, protocol._digest(sharers), (node, masking), other)
        return None

    def stripped(self, upload: Upload) -> npt.NDArray[np.uint64]:
        """An upload without the masks that are known."""
        rest = upload.upload.copy()
        for (mask, sharers), sign in upload.masks.items():
            if key := self.key(mask, sharers):
                rest -= np.uint64(sign % 2**64) * words(key, rest.size)
        return rest

    def unknown(self, upload: Upload) -> dict[tuple[Mask, tuple[str, ...]], int]:
        """The masks that remain."""
        return {mask: sign for mask, sign in upload.masks.items() if self.key(*mask) is None}

    def read(self, uploads: Mapping[str, Upload]) -> set[frozenset[str]]:
        """Sets of honest nodes the sum of whose totals, or a difference of two, shows."""
        rests = {node: self.stripped(upload) for node, upload in uploads.items()}
        found = set()
        for chosen in subsets(uploads):
            signed = np.sum([rests[node] for node in chosen], axis=0, dtype=np.uint64)
            plain = np.sum([uploads[node].total for node in chosen], axis=0)
            if np.array_equal(signed.view(np.int64), plain):
                found.add(frozenset(chosen))
        return found

    def relations(self, uploads: Mapping[str, Upload]) -> list[dict[str, Fraction]]:
        """A basis of the linear combinations of uploads in which no unknown mask remains.

        All that the coalition gets of the totals are their combinations of this kind: the other
        masks are uniform and independent.
        """
        return relations({node: self.unknown(upload) for node, upload in uploads.items()})


def subsets(nodes: Iterable[str]) -> Iterable[tuple[str, ...]]:
    ordered = sorted(nodes)
    for size in range(1, len(ordered) + 1):
        yield from combinations(ordered, size)


def relations(rows: Mapping[str, Mapping[object, int]]) -> list[dict[str, Fraction]]:
    """A basis of the λ with Σ λ_i·row_i = 0, by Gaussian elimination in fractions."""
    kept: list[tuple[object, dict[object, Fraction], dict[str, Fraction]]] = []
    found = []
    for name, plain in rows.items():
        row = {column: Fraction(value) for column, value in plain.items() if value}
        made = {name: Fraction(1)}
        for pivot, other, other_made in kept:
            if factor := row.get(pivot, Fraction(0)) / other[pivot]:
                row, made = minus(row, factor, other), minus(made, factor, other_made)
        if row:
            kept.append((next(iter(row)), row, made))
        else:
            found.append(made)
    return found


def minus(row: Mapping, factor: Fraction, other: Mapping) -> dict:
    """row − factor·other, without zeros."""
    columns = {**row, **other}
    values = {c: row.get(c, Fraction(0)) - factor * other.get(c, Fraction(0)) for c in columns}
    return {column: value for column, value in values.items() if value}
