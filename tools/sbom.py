"""Write the software bill of materials, in CycloneDX 1.6: `python tools/sbom.py build/tastemaker.cdx.json`.

It lists the packages of requirements.lock with their hashes, torch, and the third-party fonts and pictures in the
package. hatchling runs this file as a build hook, so that every wheel contains the list in .dist-info/sboms (PEP 770).
Licenses, scopes and dependencies are those of installed packages: in an isolated build environment, where nothing is
installed, they are left out. The same inputs give the same bytes.

Only the standard library and packaging, which hatchling needs, are used: a library for the format would be a build
requirement of everybody who installs from source.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FILE_NAME = "tastemaker.cdx.json"
ART = Path("tastemaker/playground/art")
DEVELOPMENT_EXTRAS = ("dev", "docs", "test")
Json = dict[str, Any]


def read_packages(root: Path) -> dict[str, tuple[str, list[str]]]:
    """Return version and SHA-256 hashes of each package that is pinned by hash, and of torch, by name."""
    packages = dict[str, tuple[str, list[str]]]()
    for entry in re.split(r"\n(?=\w)", (root / "requirements.lock").read_text(encoding="utf-8")):
        if match := re.match(r"([\w.-]+)==([^\s;\\]+)", entry):
            packages[canonicalize_name(match[1])] = match[2], re.findall(r"--hash=sha256:(\w{64})", entry)
    torch = re.search(r"^torch==(\S+)", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return {**packages, "torch": (torch[1], [])} if torch else packages


def find_dependencies(name: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """Return what an installed package needs on this system; nothing if it is not installed."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(name) or ()]
    except metadata.PackageNotFoundError:
        return []
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [item for item in requirements if not item.marker or any(map(item.marker.evaluate, environments))]


def find_closure(requirements: Iterable[Requirement]) -> dict[str, set[str]]:
    """Return the names of all packages that requirements lead to, each with what it needs itself."""
    closure, queue = dict[str, set[str]](), list(requirements)
    visited = set[tuple[str, frozenset[str]]]()
    while queue:
        item = queue.pop()
        name, key = canonicalize_name(item.name), (canonicalize_name(item.name), frozenset(item.extras))
        if key not in visited:
            visited.add(key)
            needed = find_dependencies(name, item.extras)
            closure.setdefault(name, set()).update(canonicalize_name(other.name) for other in needed)
            queue += needed
    return closure


def describe_license(name: str) -> list[Json]:
    """Return the license of an installed package: the SPDX expression, or its name as far as that is known."""
    try:
        fields = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return []
    if expression := fields.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = [text.split(" :: ")[-1] for text in fields.get_all("Classifier", []) if text.startswith("License ::")]
    stated = (fields.get("License") or "").strip().splitlines()[:1]
    names = classifiers or [line[:100] for line in stated if line and line != "UNKNOWN"]
    return [{"license": {"name": text}} for text in names]


def describe_package(name: str, version: str, hashes: list[str], scope: str | None) -> Json:
    """Return a package as a component, with the hashes of its files, of which each system has its own."""
    purl = f"pkg:pypi/{name}@{version}"
    component: Json = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    # Not as `hashes` of the component, which would have to be those of a single file.
    files = [{"alg": "SHA-256", "content": content} for content in hashes]
    release = {"type": "distribution", "url": purl, "comment": "one hash for each file of the release", "hashes": files}
    optional = {"scope": scope, "licenses": describe_license(name), "externalReferences": [release] if hashes else []}
    return {**component, **{key: value for key, value in optional.items() if value}}


def describe_art(root: Path) -> list[Json]:
    """Return the third-party pictures and fonts inside the package, from the table of their credits."""
    components = []
    for line in (root / ART / "CREDITS.md").read_text(encoding="utf-8").splitlines():
        match = re.match(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", line)
        for path in sorted((root / ART).glob(match[1])) if match else ():
            assert match
            file, license = path.relative_to(root).as_posix(), re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", match[4]).strip()
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            components.append(
                {
                    "type": "file",
                    "bom-ref": file,
                    "name": file,
                    "description": match[2].strip(),
                    "hashes": [{"alg": "SHA-256", "content": content}],
                    "licenses": [{"license": {"name": license}}],
                }
            )
    return components


def build_sbom(root: Path = ROOT) -> Json:
    """Return the bill of materials as a CycloneDX document."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    packages = read_packages(root)
    required = find_closure(map(Requirement, project["dependencies"]))
    extras = {name: value for name, value in project["optional-dependencies"].items() if name not in DEVELOPMENT_EXTRAS}
    optional = find_closure(Requirement(text) for value in extras.values() for text in value)
    is_installed = any(required.values())
    graph = {**optional, **required} if is_installed else {}

    def find_scope(name: str) -> str | None:
        kinds = ("required", name in required), ("optional", name in optional), ("excluded", True)
        return next(kind for kind, matches in kinds if matches) if is_installed else None

    def list_references(names: Iterable[str]) -> list[str]:
        return sorted(f"pkg:pypi/{name}@{packages[name][0]}" for name in names if name in packages)

    described = [describe_package(name, *packages[name], find_scope(name)) for name in sorted(packages)]
    direct = (canonicalize_name(Requirement(text).name) for text in project["dependencies"])
    component = {"type": "library", "bom-ref": own, "name": project["name"], "version": project["version"], "purl": own}
    document: Json = {
        "metadata": {
            "component": {**component, "licenses": [{"expression": project["license"]}]},
            "tools": {"components": [{"type": "application", "name": "tools/sbom.py", "version": project["version"]}]},
        },
        "components": [*described, *describe_art(root)],
        "dependencies": [
            {"ref": own, "dependsOn": list_references(direct)},
            *(
                {"ref": list_references([name])[0], "dependsOn": list_references(graph[name])}
                for name in sorted(graph.keys() & packages.keys())
            ),
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
    } | document


def write_sbom(path: Path, root: Path = ROOT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(build_sbom(root), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class SbomBuildHook(BuildHookInterface):
    """Puts the bill of materials into wheels, but not into editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: Json) -> None:
        if version == "standard":
            self.folder = tempfile.TemporaryDirectory()
            path = Path(self.folder.name, FILE_NAME)
            write_sbom(path, Path(self.root))
            build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: Json, artifact_path: str) -> None:
        if version == "standard":
            self.folder.cleanup()


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else f"build/{FILE_NAME}")
    write_sbom(target)
    print(f"{target}: {len(build_sbom()['components'])} components")
