"""Functions and classes that a configuration names by import path, and their options.

Throughout, `error` is the class of FedprivError to raise, and `what` the subject of its message.
"""

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Generic, TypeVar, cast

from fedpriv.errors import FedprivError, InvalidValueError, known_names

Function = Callable[..., object]
_Kind = TypeVar("_Kind")


def import_function(
    what: str,
    path: str,
    error: type[FedprivError],
    known: Mapping[str, Function | str] = MappingProxyType({}),
) -> Function:
    """Import and return the function or class at "package.module:function"; its module runs.

    `known` maps short names to functions or their paths.
    """
    target = known.get(path, path)
    if not isinstance(target, str):
        return target
    if known and ":" not in target:
        raise error(f"{what} is unknown; {known_names(path, known)}, or package.module:name")
    module_name, name = split_path(what, target, error)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as cause:  # a script may call sys.exit(0)
        reason = raised_at(cause)  # messages other than the following may hold users' data
        if isinstance(cause, ImportError):
            reason = str(cause)
        elif isinstance(cause, SyntaxError):  # its message has the file and line
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


def split_path(what: str, path: str, error: type[FedprivError]) -> tuple[str, str]:
    """Return the parts of "package.module:function"; `error` if a path has another form."""
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise error(f"{what} is not of the form package.module:function")
    return module, name


def check_installed(extra: str, *packages: str) -> None:
    """Refuse unless all packages of an extra, by default one with its name, are installed."""
    if missing := [name for name in packages or [extra] if find_spec(name) is None]:
        cure = f"pip install 'fedpriv[{extra}]' installs what is needed"
        raise InvalidValueError(f"{' and '.join(missing)} cannot be imported; {cure}")


def path_of(thing: object) -> str:
    """Return the import path of a class or function, or of an object's class."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{getattr(thing, '__module__', '?')}:{name}"


def check_options(
    what: str, function: Function, options: Iterable[str], error: type[FedprivError]
) -> None:
    """Raise `error` if options are unknown, or required ones are absent.

    A function that takes any keyword is not checked.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for option in options:
        if option not in by_name:
            problem = f"has no option {option!r}; {known_names(option, by_name)}"
            raise error(f"{what} {problem if by_name else 'takes no options'}")
    for name, parameter in by_name.items():
        if parameter.default is parameter.empty and name not in options:
            raise error(f"{what} needs the option {name!r}")


def raised_at(cause: BaseException) -> str:
    """Return an exception's type, file and line; its message may hold users' data."""
    at = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__} at {at.filename}:{at.lineno}"


def raised_with(cause: BaseException) -> str:
    """Return an exception's type, file, line and message."""
    return f"{raised_at(cause)}: {' '.join(str(cause).split())}"


def call_imported(
    what: str,
    function: Callable[..., _Kind],
    options: Mapping[str, object],
    error: type[FedprivError],
    describe: Callable[[BaseException], str] = raised_at,
) -> _Kind:
    """Call a user's function and return its result; wrong options and exceptions become an `error`.

    FedprivError, OSError and MemoryError propagate. `describe` puts an exception into words; pass
    `raised_with` if its message cannot hold users' data.
    """
    check_options(what, function, options, error)
    try:
        return function(**options)
    except (FedprivError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as cause:
        raise error(f"{what} cannot be made: {describe(cause)}") from cause


@dataclass(frozen=True)
class Choice(Generic[_Kind]):
    """A key of a configuration that names a class, by a short name or by its import path."""

    key: str
    known: Mapping[str, type[_Kind]]  # classes by short name
    kind: type  # the base class

    def build(
        self, name: str, options: Mapping[str, object], optional: Mapping[str, object]
    ) -> _Kind:
        """Return an object of the class, made from `options` and those of `optional` it takes.

        InvalidValueError if the class, an option or a value of an option is wrong.
        """
        what = f"{self.key} {name!r}"
        kind: object = import_function(what, name, InvalidValueError, self.known)
        if not (isinstance(kind, type) and issubclass(kind, self.kind)):
            actual = "another class" if isinstance(kind, type) else "not a class"
            base = path_of(self.kind)
            raise InvalidValueError(f"{what} is {actual}; it must be derived from {base}")
        parameters = inspect.signature(kind).parameters
        arguments = {k: v for k, v in optional.items() if k in parameters} | {**options}
        return cast(_Kind, call_imported(what, kind, arguments, InvalidValueError, raised_with))

    def name_of(self, value: object) -> str:
        """Return the short name of an object's class, or its import path."""
        kind = type(value)
        return next((name for name, other in self.known.items() if other is kind), path_of(kind))
