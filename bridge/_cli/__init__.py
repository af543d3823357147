"""The commands of `python -m bridge` besides `demo`: one file each, imported when it runs.

Only argparse is imported here, so that `--help` is quick and works without rich.
"""

from . import _convert, _diff, _inspect, _parity, _report, _rewrite

COMMANDS = (
    _report.add_command,
    _inspect.add_command,
    _convert.add_command,
    _diff.add_command,
    _parity.add_command,
    _rewrite.add_command,
)
"""What adds each command to the subparsers, in the order of `--help`."""
