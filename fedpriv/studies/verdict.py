"""What a study says, in sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.studies.intervals import CONFIDENCE, Interval
from fedpriv.studies.study import Study
from fedpriv.studies.summary import ArmSummary

_FEW = 3  # arms that a sentence names; tables have the rest


@dataclass(frozen=True)
class _Standing:
    """An arm beside the baseline, in accuracy or, if targets are no classes, in loss.

    Attributes:
        arm: its name.
        in_points: whether this is accuracy.
        end: mean over seeds.
        difference: from the baseline; None of the baseline, and where nothing can be said.
    """

    arm: str
    in_points: bool
    end: Interval
    difference: Interval | None

    @property
    def goodness(self) -> float:
        """The larger the better."""
        return self.end.mean if self.in_points else -self.end.mean

    @property
    def told(self) -> str:
        """How it stands; nothing is told of an interval that is not finite, as if diverged."""
        if self.difference is None:
            return ""
        gain = self.difference.mean if self.in_points else -self.difference.mean
        if abs(gain) > (self.difference.half_width or 0.0):
            return "better" if gain > 0.0 else "worse"
        return "not told apart"

    def gap(self, sign: str = "") -> str:
        """The difference with its interval; without a sign, its size."""
        if self.difference is None:
            return ""
        mean, half = self.difference.mean, self.difference.half_width or 0.0
        mean = mean if sign else abs(mean)
        if self.in_points:
            return f"{100.0 * mean:{sign}.2f} ± {100.0 * half:.2f} points"
        return f"{mean:{sign}.4f} ± {half:.4f}"


def verdict(study: Study, arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    """For each target, which arm is best, and which arms are better or worse than the baseline.

    They are where the interval of their paired differences leaves zero out. Arms that cannot be
    told, as they share one seed with the baseline or none, are left out, and so are targets with
    no others. Each interval is for one arm alone: among twenty arms that are all alike, one is
    expected to leave zero out.
    """
    said = []
    for target in study.targets:
        standings = _standings(study, [arm for arm in arms if arm.target == target])
        if any(each.difference for each in standings):
            said.append(f"At ε = {target.epsilon:g}, {_sentences(standings, study.baseline)}")
    return tuple(said)


def _standings(study: Study, arms: Sequence[ArmSummary]) -> list[_Standing]:
    """The baseline, and the arms that can be compared with it."""
    in_points = any(arm.accuracy_difference for arm in arms)
    found = []
    for arm in arms:
        difference = arm.accuracy_difference if in_points else arm.loss_difference
        end = arm.accuracy if in_points else arm.loss
        known = difference is not None and difference.half_width is not None
        if end is not None and (known or arm.arm == study.baseline):
            found.append(_Standing(arm.arm, in_points, end, difference))
    return found


def _sentences(standings: Sequence[_Standing], baseline: str) -> str:
    finite = [each for each in standings if math.isfinite(each.goodness)]
    best = max(finite, key=lambda each: each.goodness, default=None)
    said = [_best(best, baseline) if best else "no arm has a finite loss."]
    others = [each for each in standings if each is not best and each.difference]
    parts = [
        f"{word}: {_listed([each for each in others if each.told == word])}"
        for word in ("better", "worse", "not told apart")
        if any(each.told == word for each in others)
    ]
    if parts:
        said.append(f"Against {baseline}, with {CONFIDENCE:.0%} intervals, {'; '.join(parts)}.")
    return " ".join(said)


def _best(best: _Standing, baseline: str) -> str:
    if best.in_points:
        end = f"has the highest accuracy, {best.end.mean:.2%}"
    else:
        end = f"has the lowest loss, {best.end.mean:.4g}"
    if best.difference is None:
        return f"{best.arm}, the baseline, {end}."
    if best.told == "not told apart":
        told = f"but cannot be told from {baseline}: {best.gap('+')}"
    else:
        told = f"{best.told} than {baseline} by {best.gap()}"
    certainty = f"a {CONFIDENCE:.0%} interval over {best.difference.count} seeds"
    return f"{best.arm} {end}, {told} ({certainty})."


def _listed(standings: Sequence[_Standing]) -> str:
    """The best of some arms with their differences, and how many more there are."""
    ordered = sorted(standings, key=lambda each: -each.goodness)
    named = [f"{each.arm} ({each.gap('+')})" for each in ordered[:_FEW]]
    more = f" and {len(ordered) - _FEW} more" if len(ordered) > _FEW else ""
    return f"{', '.join(named)}{more}"
