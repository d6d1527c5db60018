"""What options of the command line can be chosen from, without importing what they choose."""

from enum import StrEnum


class FigureFormat(StrEnum):
    """How a figure is written."""

    PNG = "png"
    SVG = "svg"


class Policy(StrEnum):
    """How users are sampled."""

    POISSON = "poisson"
    EVERY_USER = "every-user"
    FIXED_SIZE = "fixed-size"


class Relation(StrEnum):
    """Which neighbours an ε compares."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


class LogFormat(StrEnum):
    """What a line of a log looks like."""

    TEXT = "text"
    JSON = "json"


class Engine(StrEnum):
    """Where simulated users train."""

    IN_PROCESS = "in-process"
    FLOWER = "flower"
