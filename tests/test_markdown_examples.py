import textwrap

import pytest
from sybil.document import Document
from sybil.example import SybilFailure

from tests.markdown_examples import MarkdownExampleParser


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs all examples of a Markdown text and returns their namespace."""

    def run_text(text):
        path = tmp_path / "guide.md"
        path.write_text(textwrap.dedent(text))
        document = Document.parse(str(path), MarkdownExampleParser())
        for example in document.examples():
            example.evaluate()
        return document.namespace

    return run_text


def test_output_that_matches_passes_and_names_live_on_in_later_blocks(run):
    namespace = run(
        """
        ```python
        x = 41
        print("x is", x)
        ```

        ```output
        x is ...
        ```

        Prose, and a block of another language:

        ```sh
        exit 1
        ```

        ```python
        x += 1
        ```
        """
    )
    assert namespace["x"] == 42


def test_output_that_differs_fails_and_shows_both(run):
    with pytest.raises(SybilFailure, match=r"(?s)Expected:\s+two\nGot:\s+one"):
        run(
            """
            ```python
            print("one")
            ```
            ```output
            two
            ```
            """
        )


def test_expected_output_that_is_never_printed_fails(run):
    with pytest.raises(SybilFailure, match="Got nothing"):
        run("```python\nx = 1\n```\n\n```output\n1\n```\n")


@pytest.mark.parametrize(
    "end", ["", "\n\n```python\nx = 1\n```\n"], ids=["at the end", "before a block"]
)
def test_printing_without_an_output_block_fails(run, end):
    with pytest.raises(SybilFailure, match="Expected nothing"):
        run(f'```python\nprint("unchecked")\n```{end}')


def test_an_output_block_behind_prose_is_refused_with_its_line(run):
    with pytest.raises(ValueError, match=r"line 6, column 1: an output block must directly follow"):
        run("```python\nx = 1\n```\n\nProse.\n```output\n1\n```\n")


def test_an_error_in_a_block_points_to_its_line_in_the_document(run):
    with pytest.raises(ZeroDivisionError) as raised:
        run("Prose.\n\n```python\nx = 1\nx / 0\n```\n")
    assert raised.traceback[-1].lineno + 1 == 5
    assert raised.traceback[-1].path.name == "guide.md"


def test_output_of_a_jitted_function_is_checked_too(run):
    run(
        """
        ```python
        import jax

        jax.jit(lambda x: jax.debug.print("x is {}", x))(2.5)
        ```

        ```output
        x is 2.5
        ```
        """
    )
