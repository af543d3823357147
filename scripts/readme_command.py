"""Print the command that the documents give for one of the package's extras, so that CI runs it."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")


def readme_command(extra: str) -> str:
    """Return the line of the documents' shell blocks that installs ``extra`` and uses it.

    Args:
        extra: The name of the extra, such as ``test``.

    Returns:
        The whole shell line.

    Raises:
        SystemExit: The documents have no such line, or more than one.
    """
    found = [
        line
        for document in DOCUMENTS
        for block in re.findall(
            r"^```sh\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE
        )
        for line in block.splitlines()
        if line.startswith(f"pip install -e '.[{extra}]' && ")
    ]
    if len(found) != 1:
        raise SystemExit(f"the documents have {len(found)} commands for the extra {extra!r}, not 1")
    return found[0]


if __name__ == "__main__":
    print(readme_command(sys.argv[1]))
