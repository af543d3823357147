import io
import re
import sys

import jax.numpy as jnp
import pytest

from bridge import __main__, checkpoint
from bridge._cli import _output
from bridge._cli._output import Result
from bridge._cli.report import _document, _report

from .command_line import COMMANDS, run


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.0%"), (1e-6, "<0.1%"), (0.5, "50.0%"), (1 - 1e-6, ">99.9%"), (1.0, "100.0%")],
)
def test_a_percentage_is_all_or_nothing_only_if_the_share_is(share, text):
    assert _report._percentage(share) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (3 * 2**70, "3145728.0 PiB"),
    ],
)
def test_bytes_are_written_for_people(count, text):
    assert _output.byte_text(count) == text


def test_a_pipe_gets_whole_lines_without_control_sequences(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    rows = [("a/" * 200 + "[red]:smile:", "1", ""), ("b", "22", "x")]
    table = _output.new_table(("path", "size", "box"), rows, right=("size",))
    show(table, "[bold]a line " + "y" * 300)
    lines = capsys.readouterr().out.splitlines()
    width = len("a/" * 200 + "[red]:smile:") + 2
    assert lines == [
        "path".ljust(width) + "size  box",
        ("a/" * 200 + "[red]:smile:").ljust(width) + "   1",
        "b".ljust(width) + "  22  x",
        "[bold]a line " + "y" * 300,
    ]


def test_columns_of_wide_characters_are_aligned(capsys):
    rows = [("層/重み", "1"), ("nine/long", "22")]
    show(_output.new_table(("path", "size"), rows, right=("size",)))
    lines = capsys.readouterr().out.splitlines()
    # Each of the four characters takes two columns.
    assert lines == ["path       size", "層/重み       1", "nine/long    22"]


def test_a_terminal_gets_its_width_and_names_as_they_are(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stream)
    for name, value in (("COLUMNS", "40"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    table = _output.new_table(("path", "source"), [("layers/[0]/kernel", "w" * 60)])
    show(table, "[bold]:smile: " + "y" * 60)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert max(len(line.rstrip()) for line in shown[:-1]) <= 40
    assert shown[1].startswith("layers/[0]/kernel  www")
    # Nothing is cut.
    assert "".join(shown[:-1]).count("w") == 60
    assert "[bold]:smile: " + "y" * 60 in "".join(shown)


def test_a_stream_that_cannot_show_a_name_gets_it_escaped(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("model", {"params": {"Ω": jnp.ones(1)}})
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert __main__.main(["inspect", "model"]) == 0
    assert b"params      \\u03a9" in raw.getvalue()


def test_what_a_command_does_is_shown_on_stderr_only_in_a_terminal(monkeypatch):
    shown = {}
    for is_terminal in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda value=is_terminal: value)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with _output.working("reading", is_json=False) as tell:
            # No markup.
            tell("[/]")
        shown[is_terminal] = "[/]" in stream.getvalue()
    assert shown == {False: False, True: True}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_and_exit_codes(capsys, command):
    outcome = run(capsys, command, "--help")
    assert outcome.code == 0
    assert "exit codes:" in outcome.out
    assert f"  python -m bridge {command} " in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100
    assert command in run(capsys, "--help").out


@pytest.mark.parametrize("command", ["inspect", "convert", "diff"])
def test_help_describes_the_json_document(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    for name, value in (("a", 1.0), ("b", 2.0)):
        checkpoint.save(tmp_path / name, {"params": {"w": jnp.full(2, value)}})
    arguments = {
        "inspect": ["a"],
        "convert": ["a", "out", "--dry-run"],
        "diff": ["a", "b"],
    }
    document = run(capsys, command, *arguments[command], "--json").document
    described = run(capsys, command, "--help").out.partition("The JSON document is")[2]
    assert keys(document) == set(re.findall(r'"(\w+)":', described))


def test_the_docstring_describes_the_json_document_of_the_report(capsys):
    target = "tests._cli.mixed_models:make_with_inputs"
    arguments = ("--json", "--min-migrated", "0")
    document = run(capsys, "report", target, *arguments).document
    assert keys(document) == set(re.findall(r'"(\w+)":', _document.__doc__ or ""))


def show(*shown):
    _output.write(Result("test", {}, shown), as_json=False)


def keys(document):
    """Every key at any depth."""
    if isinstance(document, list):
        return set().union(*map(keys, document))
    if isinstance(document, dict):
        return set(document) | set().union(*map(keys, document.values()))
    return set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["report"],
        ["inspect"],
        ["convert", "a", "b", "--format", "haiku"],
        ["diff", "a"],
        ["diff", "a", "b", "--atol", "-1"],
        ["diff", "a", "b", "--rtol", "nan"],
        ["diff", "a", "b", "--rtol", "small"],
        ["report", "m:f", "--min-migrated", "most"],
        ["report", "m:f", "--min-migrated", "60"],
    ],
)
def test_wrong_usage_is_exit_code_two(capsys, arguments):
    outcome = run(capsys, *arguments)
    assert outcome.code == 2
    assert f"usage: python -m bridge {arguments[0]}" in outcome.err


def test_help_needs_no_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit) as exit_info:
        __main__.main(["report", "--help"])
    assert exit_info.value.code == 0
