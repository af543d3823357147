"""Runs the Python blocks of a Markdown document and checks what they print."""

import contextlib
import doctest
import io
from collections.abc import Iterator

import jax
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class PrintedOutputEvaluator(PythonEvaluator):
    """Runs an example and compares what it printed with its lexeme ``output``.

    An example without an output block must print nothing, so that no output stays unchecked.
    """

    def __call__(self, example: Example) -> str | None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            super().__call__(example)
            # jax.debug.print may still be on its way.
            jax.effects_barrier()
        expected = example.region.lexemes["output"]
        checker = doctest.OutputChecker()
        if checker.check_output(expected, printed.getvalue(), OUTPUT_FLAGS):
            return None
        return checker.output_difference(
            doctest.Example(example.parsed, expected), printed.getvalue(), OUTPUT_FLAGS
        )


class MarkdownExampleParser:
    """Finds each ``python`` block, together with the ``output`` block right behind it."""

    def __init__(self) -> None:
        self.lexer = FencedCodeBlockLexer("python|output")
        self.evaluator = PrintedOutputEvaluator()

    def __call__(self, document: Document) -> Iterator[Region]:
        example = None
        for block in self.lexer(document):
            source = block.lexemes["source"]
            if block.lexemes["language"] == "python":
                if example:
                    yield example
                example = Region(
                    block.start, block.end, source, self.evaluator, lexemes={"output": ""}
                )
            elif example and not document.text[example.end : block.start].strip():
                yield Region(
                    example.start, block.end, example.parsed, self.evaluator, {"output": source}
                )
                example = None
            else:
                raise ValueError(
                    f"{document.path}, {document.line_column(block.start)}: "
                    "an output block must directly follow a python block"
                )
        if example:
            yield example
