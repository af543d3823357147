"""`python -m bridge demo`: migrates a real network from Linen to NNX, step by step, and checks it.

This file is the command line alone; everything that needs an extra or starts JAX is imported by
`_run`, so that `python -m bridge --help` is quick and works without the extra.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from bridge._cli import _command
from bridge._errors import BridgeError

_DEVICES = 8

_DESCRIPTION = """\
Trains a Linen CNN with BatchNorm and Dropout on scikit-learn's handwritten digits, data-parallel
over 8 emulated devices, and migrates it to NNX in the steps a team would take:

  0  linen           pure Linen baseline, trained from scratch
  1  wrapped         the whole model wrapped in ToNNX
  2  mixed           Linen with one block native NNX, through to_linen
  3  nnx-over-linen  NNX on top, Linen leaves in ToNNX
  4  nnx             everything in NNX

At each step the same weights travel. Outputs on the held-out digits are compared with the step
before; then the model trains on for a few steps, in which every weight and every BatchNorm
statistic has to move. No network is needed.
"""

_EPILOG = """\
exit codes:
  0  every comparison held and accuracy stayed above the floor
  1  a comparison failed, a weight stood still in training, or accuracy fell below the floor
  2  wrong usage
  3  the demo extra is missing: pip install 'linen-nnx-bridge[demo]'

examples:
  python -m bridge demo
  python -m bridge demo --epochs 3 --steps 2 --floor 0.5
  python -m bridge demo --json | jq '.steps[] | {name, max_abs_diff}'
"""


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `demo` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "demo",
        "migrate a network on handwritten digits from Linen to NNX, checking each step",
        _DESCRIPTION,
        _EPILOG,
        _run,
    )
    parser.add_argument(
        "--seed",
        type=_command.COUNT,
        default=0,
        metavar="N",
        help="seed of initial values, batch order and dropout (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=_command.POSITIVE,
        default=15,
        metavar="N",
        help="epochs that the Linen baseline trains (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=_command.POSITIVE,
        default=10,
        metavar="N",
        help="training steps after each migration step (default: %(default)s)",
    )
    parser.add_argument(
        "--floor",
        type=_command.SHARE,
        default=0.95,
        metavar="SHARE",
        help="held-out accuracy that every trained model must reach (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> _command.Result:
    try:
        import sklearn as sklearn
    except ImportError as error:
        raise BridgeError(
            "scikit-learn is not installed: pip install 'linen-nnx-bridge[demo]'"
        ) from error
    _emulate_devices()

    from bridge._demo import _digits, _migration, _report, _steps

    report = _migration.migrate(
        _digits.load(),
        _steps.STEPS,
        seed=arguments.seed,
        epochs=arguments.epochs,
        training_steps=arguments.steps,
        floor=arguments.floor,
        tell=lambda line: print(line, file=sys.stderr),
    )
    return _report.result_of(report)


def _emulate_devices() -> None:
    import jax

    # XLA reads its flags when the first device is used, so this works although `python -m bridge`
    # has imported JAX already. JAX reads JAX_PLATFORMS at import, so that has to go by its config.
    flags = {
        "--xla_force_host_platform_device_count": _DEVICES,
        # Compiling takes most of the time of a run this short, and this halves it.
        "--xla_backend_optimization_level": 1,
    }
    given = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in given if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join(kept + [f"{name}={flags[name]}" for name in flags])
    jax.config.update("jax_platforms", "cpu")
