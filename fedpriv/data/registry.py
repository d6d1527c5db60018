"""Populations by name, for configuration files."""

from collections.abc import Mapping

from fedpriv.data.population import Population
from fedpriv.errors import DataError, InvalidValueError, known_names
from fedpriv.importing import call_imported, check_options, import_function

_LOADERS = {
    "digits": "fedpriv.data.digits:load_digits",
    "hugging-face": "fedpriv.data.hugging_face:load_hugging_face",
    "mnist-writers": "fedpriv.data.mnist:load_mnist_writers",
    "redealt": "fedpriv.data.hugging_face:load_redealt",
    "shakespeare-roles": "fedpriv.data.shakespeare:load_shakespeare_roles",
    "synthetic": "fedpriv.data.synthetic:synthetic_population",
}


def load_population(name: str, options: Mapping[str, object]) -> Population:
    """Load a population by its name, or by the import path of a function that makes one.

    Guarantees: of an exception that is not fedpriv's own, its message says the type and the line,
    and nothing of the text, which may hold users' data.

    Args:
        name: "digits", "hugging-face", "mnist-writers", "redealt", "shakespeare-roles",
            "synthetic", or "package.module:function". Naming a function runs it: read a
            configuration file before you use it.
        options: arguments of the loader, by name; they are checked against its signature before
            it is called.

    Returns:
        What the loader returns.

    Raises:
        DataError: no such name, module or function, or the function raises, or returns something
            else than a Population.
        InvalidValueError: an option is unknown or missing, or the loader refuses its value.
        OSError: the function raises it.
    """
    if name not in _LOADERS and ":" not in name:
        raise DataError(
            f"unknown population {name!r}; {known_names(name, _LOADERS)}, "
            "or package.module:function"
        )
    what = f"population {name!r}"
    loader = import_function(what, _LOADERS.get(name, name), DataError)
    check_options(what, loader, options, InvalidValueError)
    population = call_imported(what, loader, options, DataError)
    if not isinstance(population, Population):
        raise DataError(
            f"{name} returned a {type(population).__name__}; it must return a Population"
        )
    return population
