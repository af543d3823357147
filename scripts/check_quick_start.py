"""Run the README's quick start with an installed wheel, from a folder outside of the checkout.

`python scripts/check_quick_start.py dist` installs the only wheel of a folder beside the
dependencies that this Python has, without the checkout on its path.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
WHERE = "\nimport registry\n\nprint(bridge.__file__)\nprint(registry.__file__)\n"


def quick_start(readme: str) -> tuple[str, str]:
    """Return the program of the section "Quick start", and what it prints."""
    section = readme.split("## Quick start\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```(python|output)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    texts = {kind: [text for own, text in blocks if own == kind] for kind in ("python", "output")}
    return "\n\n".join(texts["python"]), "".join(texts["output"])


def main(dist: Path) -> None:
    """Run it with the only wheel in ``dist``.

    Raises:
        SystemExit: There is not exactly one wheel, it fails, or it prints something else.
    """
    wheels = list(dist.glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"expected one wheel in {dist}, found {len(wheels)}")
    program, expected = quick_start(README.read_text())
    with tempfile.TemporaryDirectory() as folder:
        site, file = Path(folder, "site"), Path(folder, "quick_start.py")
        install = ["-m", "pip", "install", "--no-deps", "--target", site, wheels[0]]
        subprocess.run([sys.executable, *install], check=True)
        file.write_text(program + WHERE)
        ran = subprocess.run(
            [sys.executable, file],
            cwd=folder,
            env={"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=False,
        )
        expected += f"{site}/bridge/__init__.py\n{site}/registry/__init__.py\n"
    if ran.returncode or ran.stdout != expected:
        raise SystemExit(f"{ran.stderr}\nexpected\n{expected}\nfound\n{ran.stdout}")
    print(f"Python {sys.version.split()[0]}: the quick start prints what the README says")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
