"""What a study says, in sentences."""

from collections.abc import Sequence

from fedpriv.studies.intervals import CONFIDENCE, Interval
from fedpriv.studies.study import Study, Target
from fedpriv.studies.summary import ArmSummary


def verdict(study: Study, arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    """One sentence for each target: which arms are better or worse than the baseline.

    They are where the interval of their paired differences leaves zero out. Arms that cannot be
    told, as they share one seed with the baseline or none, are left out, and so are targets with
    no others. Each interval is for one arm alone: among twenty arms that are all alike, one is
    expected to leave zero out.
    """
    sentences = (
        _sentence(study, target, [arm for arm in arms if arm.target == target])
        for target in study.targets
    )
    return tuple(sentence for sentence in sentences if sentence)


def _sentence(study: Study, target: Target, arms: Sequence[ArmSummary]) -> str:
    in_points = any(arm.accuracy_difference for arm in arms)
    found: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
    for arm in arms:
        difference = arm.accuracy_difference if in_points else arm.loss_difference
        if difference is not None and difference.half_width is not None:
            gain = difference.mean if in_points else -difference.mean
            told = abs(gain) > difference.half_width
            word = ("better" if gain > 0.0 else "worse") if told else "not told apart"
            found[word].append(f"{arm.arm} ({_text(difference, 100.0 if in_points else 1.0)})")
    parts = [f"{word}: {', '.join(named)}" for word, named in found.items() if named]
    if not parts:
        return ""
    measure = "accuracy in points" if in_points else "loss"
    return (
        f"At ε = {target.epsilon:g}, {measure} against {study.baseline}, {CONFIDENCE:.0%} "
        f"intervals: {'; '.join(parts)}."
    )


def _text(difference: Interval, scale: float) -> str:
    return f"{scale * difference.mean:+.2f} ± {scale * (difference.half_width or 0.0):.2f}"
