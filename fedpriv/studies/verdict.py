"""What a study says, in sentences."""

from collections.abc import Sequence

from fedpriv.studies.intervals import CONFIDENCE, Interval
from fedpriv.studies.study import Study
from fedpriv.studies.summary import ArmSummary


def verdict(study: Study, arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    """One sentence for each target: which arms are better or worse than the baseline.

    They are where the interval of their paired differences leaves zero out; arms with one seed are
    left out, and so are targets without others. Each interval is for one arm alone: among twenty
    arms that are all alike, one is expected to leave zero out.
    """
    sentences = []
    for target in study.targets:
        words: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
        for arm in arms:
            of_loss, of_accuracy = arm.loss_difference, arm.accuracy_difference
            difference = of_accuracy or of_loss
            if arm.target != target or difference is None or difference.half_width is None:
                continue
            gain = difference.mean if of_accuracy else -difference.mean
            told = abs(gain) > difference.half_width
            verdict_on = "not told apart" if not told else "better" if gain > 0.0 else "worse"
            words[verdict_on].append(f"{arm.arm} ({_text(difference, points=bool(of_accuracy))})")
        parts = [f"{word}: {', '.join(named)}" for word, named in words.items() if named]
        if parts:
            sentences.append(
                f"At ε = {target.epsilon:g}, against {study.baseline}: {'; '.join(parts)}."
            )
    return tuple(sentences)


def _text(difference: Interval, *, points: bool) -> str:
    """A difference with its interval: of accuracy in points, or of loss."""
    scale, what = (100.0, "points of accuracy") if points else (1.0, "of loss")
    mean, half_width = difference.mean * scale, (difference.half_width or 0.0) * scale
    return f"{mean:+.3g} ± {half_width:.2g} {what} at {CONFIDENCE:.0%}"
