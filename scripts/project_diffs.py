"""Print how the steps of the guides' projects differ, or write it into the guides.

``python scripts/project_diffs.py`` prints the diffs, ``python scripts/project_diffs.py write`` puts
them into the guide and the page of all diffs beside it, each below its marker
``<!-- diff: step_1/train.py -->``. A step's folder holds the files that it changes or adds; what is
not there is as in the step before.
"""

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = ROOT / "migration_guides" / "projects"
GUIDES = {
    "08_migrating_a_codebase.md": "digits",
    "08_migrating_a_codebase_diffs.md": "digits",
}
DIFF = re.compile(r"<!-- diff: (\S+) -->\n(?:\n```diff\n.*?\n```\n)?", re.DOTALL)


def steps(project: Path) -> list[Path]:
    """Return the folders of a project's steps, in order."""
    return sorted(project.glob("step_*"), key=lambda step: int(step.name.removeprefix("step_")))


def diffs(project: Path) -> dict[str, str]:
    """Return the diff of each file that a step changes or adds: ``{step/file: diff}``."""
    base, *later = steps(project)
    before = _files(base)
    found = {}
    for step in later:
        after = _files(step)
        for name, text in after.items():
            lines = difflib.unified_diff(
                before.get(name, "").splitlines(), text.splitlines(), name, name, lineterm=""
            )
            found[f"{step.name}/{name}"] = "\n".join(lines)
        before |= after
    return found


def shown(text: str) -> list[str]:
    """Return which diffs a guide shows, in its order."""
    return [match[1] for match in DIFF.finditer(text)]


def renewed(text: str, found: dict[str, str]) -> str:
    """Return a guide's text with the diffs as they are.

    Raises:
        KeyError: when the guide shows a file that its step does not hold.
    """
    return DIFF.sub(lambda m: f"<!-- diff: {m[1]} -->\n\n```diff\n{found[m[1]]}\n```\n", text)


def _files(step: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(step.glob("*.py"))}


def main() -> None:
    """Print the diffs, or write them."""
    if sys.argv[1:] != ["write"]:
        for project in sorted(set(GUIDES.values())):
            print("\n\n".join(diffs(PROJECTS / project).values()))
        return
    for name, project in GUIDES.items():
        guide, found = PROJECTS.parent / name, diffs(PROJECTS / project)
        text = guide.read_text(encoding="utf-8")
        guide.write_text(renewed(text, found), encoding="utf-8")


if __name__ == "__main__":
    main()
