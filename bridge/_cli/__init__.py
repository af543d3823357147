"""The commands of `python -m bridge` besides `demo`: a folder each, imported when it runs.

Only argparse is imported here, so that `--help` is quick and works without rich.
"""

from . import convert, diff, inspect, parity, report, rewrite

COMMANDS = (
    report.add_command,
    inspect.add_command,
    convert.add_command,
    diff.add_command,
    parity.add_command,
    rewrite.add_command,
)
"""What adds each command to the subparsers, in the order of `--help`."""
