"""OpenBLAS is told of AVX-512 only where the processor has it and OpenBLAS does not see it."""

import pytest

from fedpriv.processor import processor, widen_openblas

ZEN_5 = {
    "vendor_id": "AuthenticAMD",
    "cpu family": "26",
    "flags": "fpu avx2 avx512f avx512dq avx512cd avx512bw avx512vl",
}


def choice(said: dict[str, str], **environment: str) -> str | None:
    widen_openblas(said, environment)
    return environment.get("OPENBLAS_CORETYPE")


def test_a_new_processor_of_amd_gets_the_wide_core() -> None:
    assert choice(ZEN_5) == "SkylakeX"


def test_who_has_chosen_keeps_the_choice() -> None:
    assert choice(ZEN_5, OPENBLAS_CORETYPE="Haswell") == "Haswell"


@pytest.mark.parametrize(
    "other",
    [
        {"vendor_id": "GenuineIntel"},
        {"cpu family": "25"},
        {"cpu family": "new"},
        {"flags": "fpu avx2"},
        {"flags": "avx512f avx512dq avx512cd avx512bw"},
    ],
)
def test_all_others_are_left_alone(other: dict[str, str]) -> None:
    assert choice({**ZEN_5, **other}) is None


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert choice({}) is None


def test_the_processor_is_read_where_linux_tells() -> None:
    said = processor()
    assert said == {} or all(name and name == name.strip() for name in said)
