"""Functions and classes that a configuration names by import path, and the options given to them.

`error` is the class of the FedprivError that is raised, `what` the subject of its sentence.
"""

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from fedpriv.errors import FedprivError, InvalidValueError, known_names

Function = Callable[..., object]
_Kind = TypeVar("_Kind")


def import_function(what: str, path: str, error: type[FedprivError]) -> Function:
    """Import the function or class at "package.module:function"; this runs its module."""
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise error(f"{what} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as cause:  # a script may end itself, as if all were well
        reason = raised_at(cause)  # without the message, unless it cannot hold users' data
        if isinstance(cause, ImportError):
            reason = str(cause)
        elif isinstance(cause, SyntaxError):  # its text says where
            reason = f"SyntaxError: {cause}"
        raise error(f"{what} cannot be imported: {reason}") from cause
    function = getattr(module, name, None)
    if not callable(function):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise error(
            f"{what} cannot be imported: module {module_name!r} has no function {name!r}; "
            f"{known_names(name, public)}"
        )
    return cast(Function, function)


def path_of(thing: object) -> str:
    """Import path of a class or function, or of an object's class."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{getattr(thing, '__module__', '?')}:{name}"


def check_options(
    what: str,
    function: Function,
    options: Iterable[str],
    error: type[FedprivError],
    noun: str = "option",
) -> None:
    """Refuse unknown and absent options, unless the function takes any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some of those built in have none; the call will tell
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for option in options:
        if option not in known:
            lacks = f"has no {noun} {option!r}; {known_names(option, known)}"
            raise error(f"{what} {lacks if known else 'takes no options'}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise error(f"{what} needs the {noun} {name!r}")


def raised_at(cause: BaseException) -> str:
    """What was raised, and in which line, without its message, which may hold users' data."""
    at = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__} at {at.filename}:{at.lineno}"


def raised_with(cause: BaseException) -> str:
    """What was raised, in which line, and its message."""
    return f"{raised_at(cause)}: {' '.join(str(cause).split())}"


def call_imported(
    what: str,
    function: Callable[..., _Kind],
    options: Mapping[str, object],
    error: type[FedprivError],
    told: Callable[[BaseException], str] = raised_at,
) -> _Kind:
    """Call a user's function; FedprivError, OSError and MemoryError pass, the rest is an `error`.

    `told` puts an exception into words: `raised_with` where it cannot hold users' data.
    """
    try:
        return function(**options)
    except (FedprivError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as cause:
        raise error(f"{what} cannot be made: {told(cause)}") from cause


@dataclass(frozen=True)
class Choice(Generic[_Kind]):
    """A key of a configuration that names a class: one that is known, or the import path of one."""

    key: str
    known: Mapping[str, type[_Kind]]
    kind: type  # that the class must be derived from

    def build(
        self, name: str, options: Mapping[str, object], optional: Mapping[str, object]
    ) -> _Kind:
        """An object of the class, with options, and with the optional ones that it takes."""
        what = f"{self.key} {name!r}"
        found: object = self.known.get(name) or import_function(what, name, InvalidValueError)
        if not (isinstance(found, type) and issubclass(found, self.kind)):
            given = "another class" if isinstance(found, type) else "not a class"
            wanted = path_of(self.kind)
            raise InvalidValueError(f"{what} is {given}; it must be derived from {wanted}")
        known = inspect.signature(found).parameters
        taken = {k: v for k, v in optional.items() if k in known} | {**options}
        check_options(what, found, taken, InvalidValueError)
        made = call_imported(what, found, taken, InvalidValueError, raised_with)
        return cast(_Kind, made)

    def name_of(self, value: object) -> str:
        """The known name of an object's class, or its import path."""
        kind = type(value)
        return next((name for name, each in self.known.items() if each is kind), path_of(kind))
