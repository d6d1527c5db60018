"""What a configuration names by import path, and the options that it gives to it."""

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from fedpriv.errors import FedprivError, known_names

Function = Callable[..., object]


def import_function(what: str, path: str, error: type[FedprivError]) -> Function:
    """Import the function, or the class, at "package.module:function"; this runs its module.

    Args:
        what: what is imported, for the message, such as "model 'own.models:wide'".
        path: where it is.
        error: class of the error.

    Raises:
        FedprivError: of class `error`, if the path has another form, nothing callable is there, or
            the module raises; of what it raises only an ImportError and a SyntaxError are quoted.
    """
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise error(f"{what} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as cause:
        raise error(f"{what} cannot be imported: {cause}") from cause
    except SyntaxError as cause:  # its text says where
        raise error(f"{what} cannot be imported: SyntaxError: {cause}") from cause
    except Exception as cause:  # whatever somebody's module raises
        raise error(f"{what} cannot be imported: {raised_at(cause)}") from cause
    function = getattr(module, name, None)
    if not callable(function):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise error(
            f"{what} cannot be imported: module {module_name!r} has no function {name!r}; "
            f"{known_names(name, public)}"
        )
    return cast(Function, function)


def check_options(
    what: str,
    function: Function,
    options: Iterable[str],
    error: type[FedprivError],
    noun: str = "option",
) -> None:
    """Check names of options against a function's signature before it is called.

    Args:
        what: what takes the options, for the message.
        function: is to be called with them; one that takes any keyword is not checked.
        options: their names.
        error: class of the error.
        noun: what an option is called.

    Raises:
        FedprivError: of class `error`, if an option is unknown, or one without default is absent.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for option in options:
        if option not in known:
            raise error(f"{what} has no {noun} {option!r}; {known_names(option, known)}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise error(f"{what} needs the {noun} {name!r}")


def raised_at(cause: Exception) -> str:
    """What was raised, and in which line; nothing of what it says, which may hold users' data."""
    at = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__} at {at.filename}:{at.lineno}"


def raised_with(cause: Exception) -> str:
    """What was raised, in which line, and what it says."""
    return f"{raised_at(cause)}: {' '.join(str(cause).split())}"


def call_imported(
    what: str,
    function: Function,
    options: Mapping[str, object],
    error: type[FedprivError],
    told: Callable[[Exception], str] = raised_at,
) -> object:
    """Call somebody's function.

    Args:
        what: what is made, for the message.
        function: makes it.
        options: keyword arguments, from `check_options`.
        error: class of the error.
        told: what the message says of an exception; `raised_with` where it cannot hold users' data.

    Raises:
        FedprivError: what the function raises: of class `error`, unless it is one already.
        OSError: the function raises it.
        MemoryError: there is too little memory.
    """
    try:
        return function(**options)
    except (FedprivError, OSError, MemoryError):
        raise
    except Exception as cause:
        raise error(f"{what} cannot be made: {told(cause)}") from cause
