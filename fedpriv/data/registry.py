"""Populations by name, for configuration files."""

import importlib
import inspect
from collections.abc import Callable, Mapping

from fedpriv.data.population import Population
from fedpriv.errors import DataError, InvalidValueError, known_names

_LOADERS = {
    "digits": "fedpriv.data.digits:load_digits",
    "mnist-writers": "fedpriv.data.mnist:load_mnist_writers",
    "synthetic": "fedpriv.data.synthetic:synthetic_population",
}


def load_population(name: str, options: Mapping[str, object]) -> Population:
    """Load a population by its name, or by the import path of a function that makes one.

    Args:
        name: "digits", "mnist-writers", "synthetic", or "package.module:function". Naming a
            function runs it: read a configuration file before you use it.
        options: arguments of the loader, by name; they are checked against its signature before
            it is called.

    Returns:
        What the loader returns.

    Raises:
        DataError: no such name, module or function, or the function's result is not a Population.
        InvalidValueError: an option is unknown or missing, or the loader refuses its value.
    """
    if name not in _LOADERS and ":" not in name:
        raise DataError(
            f"unknown population {name!r}; {known_names(name, _LOADERS)}, "
            "or package.module:function"
        )
    loader = _import_function(_LOADERS.get(name, name))
    _check_options(name, loader, options)
    population = loader(**options)
    if not isinstance(population, Population):
        raise DataError(
            f"{name} returned a {type(population).__name__}; it must return a Population"
        )
    return population


def _import_function(path: str) -> Callable[..., object]:
    module_name, _, function_name = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise DataError(f"{path!r} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise DataError(
            f"module {module_name!r} of {path!r} cannot be imported: {error}"
        ) from error
    function = vars(module).get(function_name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise DataError(
            f"module {module_name!r} has no function {function_name!r}; "
            f"{known_names(function_name, functions)}"
        )
    loader: Callable[..., object] = function
    return loader


def _check_options(name: str, loader: Callable[..., object], options: Mapping[str, object]) -> None:
    parameters = inspect.signature(loader).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for option in options:
        if option not in known:
            raise InvalidValueError(
                f"population {name!r} has no option {option!r}; {known_names(option, known)}"
            )
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise InvalidValueError(f"population {name!r} needs the option {option!r}")
