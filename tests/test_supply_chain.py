"""The supply chain: every package has a hash that pip enforces, and the list of components is a CycloneDX document."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOT_INSTALLED = {
    "torch",
    "wandb",
}  # torch has a hash for each build, and wandb is in no extra that `make setup` installs


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lock_has_the_versions_of_the_constraints_and_hashes_of_all() -> None:
    lock = load_tool("lock")
    pins, locked = lock.read_pins(lock.CONSTRAINTS), lock.read_pins(lock.LOCK)
    advice = "run `make lock`"
    assert locked == {name: version for name, version in pins.items() if name not in NOT_INSTALLED}, advice
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra in ("dev", "docs", "test") for name in project["optional-dependencies"][extra]]
    names = {lock.normalize(re.split(r"[^\w-]", name)[0]) for name in [*project["dependencies"], *extras]}
    assert names - {"tastemaker", "torch"} <= locked.keys(), advice
    entries = re.split(r"\n(?=\w)", lock.LOCK.read_text())[1:]
    assert len(entries) == len(locked)
    assert [entry.split("==")[0] for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)] == []


def record_pip_calls(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, list[tuple[str, ...]]]:
    """Return tools/setup.py and the arguments of its calls of `pip install`, which are not made."""
    setup, calls = load_tool("setup"), list[tuple[str, ...]]()
    with monkeypatch.context() as patch:
        patch.setattr(setup.venv, "create", lambda *arguments, **options: None)
        patch.setattr(setup, "install", lambda python, *arguments: calls.append(arguments))
        setup.main(Path("environment"))
    return setup, calls


def test_setup_installs_by_hash_first(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, (by_hash, rest) = record_pip_calls(monkeypatch)
    assert "--require-hashes" in by_hash and by_hash[-2:] == ("--requirement", setup.LOCK)
    assert rest[-2:] == ("--editable", ".[dev]")


@pytest.mark.slow
def test_setup_refuses_a_package_with_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, (by_hash, _) = record_pip_calls(monkeypatch)
    wheel = tmp_path / "planted-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("planted-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
        archive.writestr(
            "planted-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("planted-1.0.dist-info/RECORD", "")
    own_lock = tmp_path / "own.lock"
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "DRY_RUN": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    arguments = [str(own_lock) if argument == setup.LOCK else argument for argument in by_hash]
    own_lock.write_text(f"planted==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    setup.install(Path(sys.executable), *arguments)
    with wheel.open("ab") as file:  # a zip archive may have a comment, so this is still a wheel
        file.seek(-2, 2)
        file.write(b"\x01\x00x")
    with pytest.raises(SystemExit, match=r"(?i)hash"):
        setup.install(Path(sys.executable), *arguments)


def check_component(component: dict[str, Any]) -> None:
    """Check what the schema of CycloneDX 1.6 demands of a component."""
    assert component["type"] in {"library", "file"} and component["name"]
    hashes = [*component.get("hashes", []), *(h for r in component.get("externalReferences", []) for h in r["hashes"])]
    assert all(item["alg"] == "SHA-256" and re.fullmatch(r"[0-9a-f]{64}", item["content"]) for item in hashes)
    assert hashes or component["name"] == "torch"
    for item in component.get("licenses", []):
        assert item.get("expression") or item["license"]["name"]
    assert len(component.get("licenses", [])) <= 1 or all("license" in item for item in component["licenses"])
    assert component.get("scope", "required") in {"required", "optional", "excluded"}
    if component["type"] == "library":
        assert component["purl"] == component["bom-ref"] == f"pkg:pypi/{component['name']}@{component['version']}"


def test_list_of_components_is_a_cyclonedx_document() -> None:
    sbom = load_tool("sbom")
    document = sbom.build_sbom()
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["serialNumber"])
    for component in document["components"]:
        check_component(component)
    references = [component["bom-ref"] for component in document["components"]]
    assert len(set(references)) == len(references)
    for item in document["dependencies"]:
        assert {item["ref"], *item["dependsOn"]} <= {*references, document["metadata"]["component"]["bom-ref"]}

    by_name = {component["name"]: component for component in document["components"]}
    assert set(load_tool("lock").read_pins(ROOT / "requirements.lock")) | {"torch"} <= by_name.keys()
    assert by_name["numpy"]["scope"] == "required" and by_name["pytest"]["scope"] == "excluded"
    assert by_name["av"]["scope"] == "optional"
    assert by_name["torch"]["licenses"] and by_name["numpy"]["licenses"]
    assert len(by_name["numpy"]["externalReferences"][0]["hashes"]) > 10  # several systems and versions of Python
    assert any("DejaVu" in name for name in by_name)


def test_components_are_listed_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    sbom = load_tool("sbom")

    def is_missing(name: str) -> None:
        raise sbom.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sbom.metadata, "requires", is_missing)
    monkeypatch.setattr(sbom.metadata, "metadata", is_missing)
    components = sbom.build_sbom()["components"]
    assert any(component["name"] == "torch" for component in components)
    for component in components:
        check_component(component)
        assert "scope" not in component
