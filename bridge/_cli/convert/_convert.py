"""`python -m bridge convert`: rewrites a checkpoint from one layout into the other."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from bridge._cli import _command

_DESCRIPTION = """\
Reads a checkpoint of any layout and writes its weights to OUT in the layout that --to names.

With --model the conversion is made against the model that reads OUT, as bridge.port.plan does:
Flax's own layers are matched by rules of their own (fused gates, stacked layers), the rest by name,
and every leaf has to have its place. Without --model, --rules alone says what becomes of each leaf,
as for bridge.checkpoint.restore; rules that reshape or split arrays need --model.

--rules FILE is TOML, or JSON if its name ends in .json:

  [rules]                            # expression for a Linen path = NNX path
  "encoder/Dense_0" = "encoder.fc1"
  'block_(\\d+)' = 'blocks.\\1'

  [collections]                      # expression for an NNX path = collection, for an NNX state
  '.*\\.(mean|var)' = "batch_stats"  # which tells none; the first match counts. A Linen --model
  ".*" = "params"                    # tells them as well.

A rule holds for the path that it matches and all below it, in both directions.

RNG state is left out, and so is what is beside the model, such as an optimizer's state and step;
the command names it. Metadata boxes are kept by --format bridge alone, but for arrays that a rule
stacks, takes apart or lays out otherwise.

--suggest prints the rules that --model needs instead, as Python and as TOML, with what speaks for
each. With --input, or the inputs that a TARGET gives, the model is traced to see the order of its
calls, and with --source-model the one that wrote CHECKPOINT too.

--overwrite replaces a checkpoint and nothing else: OUT may not hold any other file, and not be a
link, the current directory, CHECKPOINT, or a directory above one of these. A file has to be of the
same --format; one of safetensors or npz has to be written by the bridge, as data sets have these
formats too. The old one is there until the new one is complete.
"""

_EPILOG = """\
exit codes:
  0  OUT was written, or would be (--dry-run)
  1  the checkpoint does not fit the model; nothing was written
  2  wrong usage, or something cannot be read or written

examples:
  python -m bridge convert linen_checkpoint nnx_checkpoint --to nnx --rules rules.toml --dry-run
  python -m bridge convert linen_checkpoint nnx_checkpoint --to nnx --model models.py:make_nnx
  python -m bridge convert nnx_checkpoint model.msgpack --to linen \\
      --model models.py:make_linen --input 1,28,28,1
  python -m bridge convert linen_checkpoint --to nnx --model models.py:make_nnx --suggest
  python -m bridge convert nnx_checkpoint model.npz --to linen --input 1,28,28,1 \\
      --model models.py:make_linen --source-model models.py:make_nnx
  python -m bridge convert linen_checkpoint model.npz --to linen

The JSON document is {"schema": "linen-nnx-bridge/convert", "version": 1, "written": bool,
"mistaken_for": "linen" | "nnx" | null (what OUT is read as without --layout, if not as --to says),
"left_out": [str], "ok": bool, "entries": [{"kind": str, "source": [str], "target": [str]}]}; with
--model it has all that bridge.port.Plan.to_json gives.
"""

_BY_NAME = ("msgpack", "safetensors", "npz")


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the command `convert` to the subparsers of `python -m bridge`."""
    parser = _command.new_parser(
        commands,
        "convert",
        "rewrite a checkpoint from one layout into the other",
        _DESCRIPTION,
        _EPILOG,
        _run,
        _idle,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory or file")
    parser.add_argument("out", metavar="OUT", type=_command.path, nargs="?", help="what is written")
    parser.set_defaults(late="out")
    parser.add_argument("--to", choices=("linen", "nnx"), required=True, help="the layout of OUT")
    parser.add_argument(
        "--rules", metavar="FILE", type=_command.path, help="the table of paths, TOML or JSON"
    )
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="the model that reads OUT, package.module:name or file.py:name; see report --help",
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="print the rules that --model needs, with what speaks for each, and write nothing",
    )
    parser.add_argument(
        "--source-model",
        metavar="TARGET",
        help="the model that wrote CHECKPOINT: an NNX one whose layers --to linen has to know, as"
        " it does for fused gates; a Linen one that --suggest traces beside --model",
    )
    _command.add_input(parser)
    _command.add_kwarg(parser)
    parser.add_argument(
        "--format",
        choices=("orbax", "msgpack", "bridge", "safetensors", "npz"),
        help="orbax and msgpack: what a program of that library writes itself; bridge: what"
        " programs of both read; safetensors and npz: arrays by name (default: what the end of"
        " OUT's name says, else orbax)",
    )
    _command.add_within(parser)
    _command.add_layout(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the plan and write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint at OUT")


def _idle(arguments: argparse.Namespace) -> Iterator[_command.Idle]:
    if arguments.model is None:
        yield "without --model", ["--input", "--kwarg", "--source-model"]
    elif not arguments.suggest and arguments.to == "nnx":
        yield "with --to nnx and without --suggest", ["--source-model"]


def _run(arguments: argparse.Namespace) -> int:
    from bridge._cli import _conversion_plan, _leaves, _output, _rules_file

    from . import _write

    _check_usage(arguments)
    if arguments.suggest:
        return _suggest(arguments)
    if arguments.format is None:
        named = arguments.out.suffix.removeprefix(".") if arguments.out else ""
        arguments.format = named if named in _BY_NAME else "orbax"
    to_nnx = arguments.to == "nnx"
    rules = _rules_file.load(arguments.rules)
    if not arguments.dry_run:
        _write.check_free(
            arguments.out, arguments.checkpoint, arguments.format, overwrite=arguments.overwrite
        )
    with _output.working(f"reading {arguments.checkpoint}"):
        contents = _leaves.read(arguments.checkpoint, arguments.within, arguments.layout)
        conversion = _conversion_plan.conversion_of(contents, rules, arguments, to_nnx=to_nnx)
    writes, mistaken = conversion.ok and not arguments.dry_run, None
    if writes:
        with _output.working(f"writing {arguments.out}"):
            _write.write(
                arguments.out,
                arguments.checkpoint,
                conversion.make(),
                arguments.format,
                arguments.to,
                overwrite=arguments.overwrite,
            )
        mistaken = _write.mistaken_for(arguments.out, arguments.to, arguments.format)
    if arguments.json:
        header = {"written": writes, "mistaken_for": mistaken, "left_out": [*contents.left_out]}
        _output.show_json("convert", {**header, **conversion.to_json()})
    else:
        _output.show(*_renderables(conversion, arguments, contents.left_out, writes))
        if mistaken:
            _output.show(
                f"{arguments.format} does not note the layout, and this is read as {mistaken}"
                f" unless told: --layout {arguments.to} on the command line,"
                f" layout={arguments.to!r} for checkpoint.restore"
            )
    return _command.OK if conversion.ok else _command.FAILED


def _check_usage(arguments: argparse.Namespace) -> None:
    from bridge._cli._input_errors import InputError

    if arguments.suggest and arguments.model is None:
        raise InputError(
            "--suggest", "no --model", "the model that needs the rules", "give --model"
        )
    if arguments.out is None and not arguments.suggest:
        raise InputError("OUT", "nothing", "what is to be written", "give a path")


def _suggest(arguments: argparse.Namespace) -> int:
    """Prints the rules that a model needs."""
    from bridge._cli import _leaves, _output, _rules_file

    from . import _suggestions

    rules = _rules_file.load(arguments.rules)
    with _output.working(f"reading {arguments.checkpoint}"):
        contents = _leaves.read(arguments.checkpoint, arguments.within, arguments.layout)
        found, lacking = _suggestions.suggestions(contents, rules, arguments)
    _output.show_suggestions("convert", found, as_json=arguments.json, lacking=lacking)
    return _command.OK if found.plan.ok else _command.FAILED


def _renderables(
    conversion: Any, arguments: argparse.Namespace, left_out: Sequence[str], writes: bool
) -> Iterator[Any]:
    from rich.text import Text

    from bridge._cli._output import new_table

    if conversion.plan is not None:
        yield str(conversion.plan)
    else:
        table = new_table(arguments.checkpoint, arguments.out.name)
        for sources, target in conversion.moves:
            table.add_row(Text(", ".join(sources)), Text(target))
        yield table
    yield ""
    if left_out:
        yield f"left out, as it is no weight: {', '.join(left_out)}"
    if writes:
        yield f"written: {arguments.out} (layout {arguments.to}, {arguments.format})"
    elif conversion.ok:
        yield "nothing was written (--dry-run)"
    else:
        remedy = "--suggest proposes rules"
        if conversion.source_classes_are_open:
            remedy += (
                ", and --source-model tells the NNX model's layers, as norms and gates need it"
            )
        yield f"nothing was written: the checkpoint does not fit the model; {remedy}"
