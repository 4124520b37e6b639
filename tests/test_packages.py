"""What the package says that it needs is what its modules import."""

import ast
import importlib.metadata
import pathlib
import re
import sys
import tomllib

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITH_OTHERS = {"jinja2"}  # not imported: transformers renders chat templates with it, and does not ask for it
BY_OTHERS = {"starlette", "pydantic", "pydantic-core"}  # what fastapi consists of
NO_PACKAGE = {"jetstream"}  # used where a user has it


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {normal(r.name): r for r in map(Requirement, lines)}


NEEDED = requirements(PROJECT["dependencies"])
EXTRAS = requirements([line for lines in PROJECT["optional-dependencies"].values() for line in lines])


def imported() -> set[str]:
    """Names of the packages that any module imports, at its top or later."""
    modules: set[str] = set()
    for file in (ROOT / "jrl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module)
    tops = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names) - {"jrl"} - NO_PACKAGE
    owners = importlib.metadata.packages_distributions()
    # Of the packages that share a namespace ("orbax") it is the one that is declared, or any.
    candidates = {top: {normal(name) for name in owners.get(top, [top])} for top in tops}
    return {min(names & {*NEEDED, *EXTRAS} or names) for names in candidates.values()}


def test_every_import_is_declared():
    found = imported()
    assert "jax" in found and "orbax-checkpoint" in found
    assert found - {*NEEDED, *EXTRAS} - BY_OTHERS == set()


def test_nothing_is_declared_that_no_module_imports():
    assert {*NEEDED} - imported() == WITH_OTHERS


def test_the_constraints_hold_a_version_of_every_dependency_that_is_allowed():
    pins = requirements((ROOT / "constraints.txt").read_text().splitlines()[1:])
    for name, requirement in NEEDED.items():
        (pin,) = pins[name].specifier
        assert requirement.specifier.contains(pin.version), name
