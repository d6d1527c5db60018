"""A node whose certificate is struck off the enrolment by mistake while a run is under way."""

import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import tomli_w

from tests.deployment.checking import stop_and_check
from tests.deployment.sites import LONG, Site, await_answers


@pytest.mark.slow
def test_a_node_struck_off_is_out_until_it_is_enrolled_again_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    site = Site.lay_out(tmp_path, 144, 143)
    with (
        site.server(*LONG) as server,
        site.node("node-1") as staying,
        site.node("node-2") as leaving,
    ):
        await_answers(leaving)
        traps = site.traps("server")
        traps.arm("opened")
        traps.await_caught("opened", server)
        enrolled = tomllib.loads((tmp_path / "enrolment.toml").read_text(encoding="utf-8"))
        struck = copy.deepcopy(enrolled)
        del struck["nodes"]["node-2"]["certificate"]
        write(tmp_path / "enrolment.toml", struck)
        traps.free("opened")
        leaving.await_text("no connection: UNAUTHENTICATED .*struck off")
        await_answers(staying)
        site.await_releases(2, server)
        write(tmp_path / "enrolment.toml", enrolled)  # it was a mistake
        await_answers(leaving)
        stop_and_check(site, server)


def write(enrolment: Path, table: Mapping[str, object]) -> None:
    """Replace an enrolment as a whole."""
    edited = enrolment.with_suffix(".new")
    edited.write_text(tomli_w.dumps(table), encoding="utf-8")
    edited.replace(enrolment)
