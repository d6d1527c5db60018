"""What a node may send besides messages: how it is weighed, and when the node has to wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.server.gateway import Allowance, Frames
from tests.server.hostile_nodes import PREFACE, frame

MEBIBYTE = 2**20
CONTENT = st.binary(max_size=50)
KINDS = st.lists(st.tuples(st.integers(0, 9), CONTENT), max_size=20)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def weighed(pieces: list[bytes]) -> tuple[int, int]:
    frames = Frames()
    weights = [frames.weigh(piece) for piece in pieces]
    return sum(content for content, _ in weights), sum(cost for _, cost in weights)


@given(KINDS, st.integers(1, 40))
def test_content_is_what_data_frames_hold_however_the_bytes_are_cut(
    sent: list[tuple[int, bytes]], size: int
) -> None:
    whole = PREFACE + b"".join(frame(kind, 0, 1, payload) for kind, payload in sent)
    content, cost = weighed([whole[i : i + size] for i in range(0, len(whole), size)])
    assert content == sum(len(payload) for kind, payload in sent if kind == 0)
    assert (content, cost) == weighed([whole])
    assert cost >= len(whole) - content + 100 * len(sent)


def test_who_sends_what_is_read_never_waits() -> None:
    clock = Clock()
    allowance, frames = Allowance(clock), Frames()
    frames.weigh(PREFACE)
    for _ in range(1000):  # 250 MiB without a second passing
        for _ in range(16):
            allowance.received(*frames.weigh(frame(0, 0, 1, bytes(2**14))))
        assert allowance.pause() == 0.0
        allowance.read(2**18 - 5)


@pytest.mark.parametrize("kind", [1, 3, 4, 6, 8, 9])
def test_who_sends_frames_of_no_content_waits_until_time_has_passed(kind: int) -> None:
    clock = Clock()
    allowance, frames, seconds, sent = Allowance(clock), Frames(), 1000.0, 0
    frames.weigh(PREFACE)
    while clock.now < seconds:
        if pause := allowance.pause():
            clock.now += pause
        else:
            allowance.received(*frames.weigh(frame(kind, 0, 0, bytes(8))))
            sent += 1
    assert 5.0 < sent / seconds < 20.0


def test_content_that_nobody_reads_is_bounded_and_drains() -> None:
    clock = Clock()
    allowance = Allowance(clock)
    allowance.received(2 * MEBIBYTE, 0)
    assert allowance.pause() == 0.0
    allowance.received(MEBIBYTE, 0)
    pause = allowance.pause()
    assert pause > 10.0
    clock.now += pause / 2.0
    assert allowance.pause() == pytest.approx(pause / 2.0)
    clock.now += pause
    assert allowance.pause() == 0.0


def test_what_is_granted_is_not_saved_up() -> None:
    clock = Clock()
    saving, other = Allowance(clock), Allowance(clock)
    for _ in range(1000):
        saving.read(MEBIBYTE)
        saving.sent(MEBIBYTE)
        saving.called()
    clock.now += 3600.0
    for allowance in (saving, other):
        allowance.received(3 * MEBIBYTE, MEBIBYTE)
    assert saving.pause() == other.pause() > 0.0
