"""Print the README's command for one of the package's extras: CI runs what the README says."""

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def readme_command(extra: str) -> str:
    """Return the line of the README's shell blocks that installs ``extra`` and uses it.

    Args:
        extra: The name of the extra, such as ``test``.

    Returns:
        The whole shell line.

    Raises:
        SystemExit: The README has no such line, or more than one.
    """
    found = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.startswith(f"pip install -e '.[{extra}]' && ")
    ]
    if len(found) != 1:
        raise SystemExit(f"{README.name} has {len(found)} commands for the extra {extra!r}, not 1")
    return found[0]


if __name__ == "__main__":
    print(readme_command(sys.argv[1]))
