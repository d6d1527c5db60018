"""What the libraries that multiply matrices do not know of a processor; imports none of them."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_CORE = "OPENBLAS_CORETYPE"
_WIDE = ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl")
_ZEN_5 = 26


def processor() -> Mapping[str, str]:
    """What Linux says of the first processor, by name; empty where there is no Linux."""
    try:
        first, *_ = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")
    except OSError:
        return {}
    said = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in said}


def widen_openblas(
    said: Mapping[str, str] | None = None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Tell OpenBLAS of a width that it does not know to be there; before NumPy is imported.

    Releases up to 0.3.31 take AMD's processors since Zen 5 for ones without AVX-512, and multiply
    at half their rate. Who has chosen a core (`OPENBLAS_CORETYPE`) keeps it.

    Args:
        said: what is known of the processor, as from `processor`, which None asks.
        environment: where the choice is made.
    """
    said = processor() if said is None else said
    family, flags = said.get("cpu family", ""), said.get("flags", "").split()
    new = said.get("vendor_id") == "AuthenticAMD" and family.isdecimal() and int(family) >= _ZEN_5
    if new and set(_WIDE) <= set(flags):
        environment.setdefault(_CORE, "SkylakeX")
