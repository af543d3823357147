"""Print the oldest supported version of every dependency, as pip constraints."""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def oldest_requirements() -> list[str]:
    """Return ``name==version`` for each dependency of pyproject.toml, from its lower bound.

    Raises:
        SystemExit: A dependency is not written as ``name>=version``.
    """
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    unbounded = [text for text in dependencies if not re.fullmatch(r"[\w-]+>=[\d.]+", text)]
    if unbounded:
        raise SystemExit(f"{PYPROJECT.name}: expected name>=version, found {unbounded}")
    return [text.replace(">=", "==") for text in dependencies]


if __name__ == "__main__":
    print("\n".join(oldest_requirements()))
