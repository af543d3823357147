"""Check that a wheel holds the two typed packages, its metadata and nothing else."""

import sys
import zipfile
from pathlib import Path, PurePosixPath

PACKAGES = ("bridge", "registry")


def problems_in(names: list[str]) -> list[str]:
    """Return what is wrong with a wheel that holds the files ``names``, a sentence each."""
    problems = [
        f"{package}/{required} is missing"
        for package in PACKAGES
        for required in ("__init__.py", "py.typed")
        if f"{package}/{required}" not in names
    ]
    for name in names:
        path = PurePosixPath(name)
        in_package = path.parts[0] in PACKAGES and (path.suffix == ".py" or path.name == "py.typed")
        if not in_package and not path.parts[0].endswith(".dist-info"):
            problems.append(f"{name} does not belong in the wheel")
    return problems


def main(folder: Path) -> None:
    """Print the files of the only wheel in ``folder``.

    Raises:
        SystemExit: There is not exactly one wheel, or a file is missing or too many.
    """
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"expected one wheel in {folder}, found {len(wheels)}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
    print("\n".join(names))
    if problems := problems_in(names):
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
