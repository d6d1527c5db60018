"""What a release consists of agrees, and lists what it should."""

import json
import re
import tomllib
from typing import Any

import yaml

import fedpriv
from tests.release import component, graph, hashed, sbom
from tests.test_docs import MAKE_TARGETS, ROOT

CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def package(name: str, *needs: str, **known: object) -> dict[str, Any]:
    archive = {"hashes": {"sha256": name.encode().hex() * 4}}
    return {
        "metadata": {"name": name, "version": "1.0+cpu", "requires_dist": [*needs], **known},
        "download_info": {"url": f"file:///secret/{name}.whl", "archive_info": archive},
    }


PACKAGES = {
    "top": package("top", "A_b[fast]>=1", 'old; python_version < "3"', 'test; extra == "test"'),
    "a-b": package("A_b", 'Quick; extra == "fast"', "top", license_expression="MIT"),
    "quick": package("Quick", classifier=["License :: OSI Approved :: BSD License"]),
    "test": package("test"),
}


def test_an_sbom_lists_what_is_needed_and_by_whom() -> None:
    edges = {"top": {"a-b"}, "a-b": {"quick", "top"}, "quick": set()}
    assert graph(PACKAGES, "top") == edges
    bill = sbom(PACKAGES, "top")
    assert bill["metadata"]["component"] == component("top", PACKAGES["top"])
    assert [part["name"] for part in bill["components"]] == ["a-b", "quick"]
    first, second = bill["components"]
    assert first["purl"] == "pkg:pypi/a-b@1.0%2Bcpu"
    assert first["licenses"] == [{"expression": "MIT"}]
    assert second["licenses"] == [{"license": {"name": "BSD License"}}]
    assert {link["ref"] for link in bill["dependencies"]} == {
        part["bom-ref"] for part in (bill["metadata"]["component"], *bill["components"])
    }


def test_every_package_has_its_hash_and_none_its_place() -> None:
    text = hashed(PACKAGES)
    lines = text.splitlines()[1:]
    assert [line.partition("==")[0] for line in lines] == ["a-b", "quick", "test", "top"]
    assert lines[-1] == f"top==1.0+cpu --hash=sha256:{'746f70' * 4}"
    assert "secret" not in text + json.dumps(sbom(PACKAGES, "top"))


def test_version_and_day_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert fedpriv.__version__ == project["version"] == citation["version"]
    headings = re.findall(r"^## (.*)$", CHANGES, re.MULTILINE)
    released = f"[{fedpriv.__version__}] - {citation['date-released']}"
    assert headings[:2] == ["[Unreleased]", released]


def test_hooks_and_forms_name_what_exists() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    for hook in hooks["repos"][0]["hooks"]:
        assert hook["entry"].removeprefix("make ") in MAKE_TARGETS
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.name for form in forms] == ["bug.yml", "config.yml", "guarantee.yml"]
    for form in forms:
        read = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert form.name == "config.yml" or {"name", "description", "body"} <= set(read)
        for name in re.findall(r"`([\w/]+\.md)`", form.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), name
