"""The command line: help with examples, exit codes, errors without tracebacks."""

import re
import subprocess
import sys

import pytest
import typer
from tests.pipeline.tools import call_main

from portolan import __version__, cli
from portolan.errors import (
    PortolanError,
    ResumeRefused,
    StorageError,
    TrainingDiverged,
    UsageError,
)
from portolan.health import status
from portolan.record import verdicts
from portolan.record.verify import EXIT_CODES

ROOT = typer.main.get_command(cli.app)
VERBS = ROOT.list_commands(typer.Context(ROOT))  # type: ignore[attr-defined]
DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 130}


@pytest.fixture
def call(monkeypatch, capsys):
    return lambda *arguments: call_main(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_has_an_example_that_is_understood(verb, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = call(verb, "--help")
    assert (done.code, done.err) == (0, "")
    found = re.search(r"Example: portolan (?:-C (\S+) )?([a-z-]+)(.*)", done.out)
    assert found, done.out
    assert found[2] == verb
    for option in re.findall(r"--[a-z-]+", found[3]):
        assert option in done.out.split("Example:")[1]


def test_help_lists_every_documented_exit_code(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    done = call("--help")
    (text,) = re.findall(r"Exit codes: (.*)", done.out)
    assert {int(code) for code in re.findall(r"\d+", text)} == DOCUMENTED
    doc = (cli.__doc__ or "").split("Exit codes: ")[1]
    assert {int(code) for code in re.findall(r"\b(\d+)\b", doc)} == DOCUMENTED
    used = {PortolanError, UsageError, ResumeRefused, StorageError, TrainingDiverged}
    codes = {kind.exit_code for kind in used} | set(EXIT_CODES.values()) | {cli.INTERRUPTED}
    codes |= set(verdicts.EXIT_CODES.values()) | set(status.EXIT_CODES.values())
    assert codes == DOCUMENTED


def test_no_command_and_unknown_words_are_wrong_usage(call):
    assert call().code in (0, 2)
    for words in (["nothing"], ["plan", "--nothing"], ["show-batch"], ["show-batch", "-1"]):
        done = call(*words)
        assert done.code == 2, words
        assert "Traceback" not in done.err


def test_version_is_that_of_the_package(call):
    assert call("version").out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PortolanError("it failed", remedy="mend it"), 1, "it failed\n  remedy: mend it"),
        (UsageError("wrong [red]word[/red]"), 2, "wrong [red]word[/red]"),
        (ResumeRefused("not trusted"), 3, "not trusted"),
        (StorageError("full"), 6, "full"),
        (TrainingDiverged("not finite"), 7, "not finite"),
        (OSError(28, "No space left on device", "file"), 6, "cannot write file: No space left"),
        (OSError(22, "Invalid argument"), 1, "OSError: [Errno 22] Invalid argument"),
        (ZeroDivisionError("division by zero"), 1, "please report it with what --debug shows"),
        (KeyboardInterrupt(), 130, "interrupted\n  remedy: run the same command again"),
    ],
)
def test_errors_become_one_message_and_an_exit_code(error, code, text, call, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("portolan.project.create_project", fail)
    done = call("init", "folder")
    assert done.code == code
    assert done.err.startswith("portolan: ")
    assert text in done.err
    assert "Traceback" not in done.err
    if code != 130:
        with pytest.raises(type(error)):
            call("--debug", "init", "folder")


def test_plan_starts_quickly_and_without_the_array_library(call):
    code = (
        "import sys, portolan.cli; sys.argv = ['portolan', 'plan', '--recipe', 'marin-535b'];"
        "\ntry: portolan.cli.main()\nexcept SystemExit as stop: print('code', stop.code)"
        "\nprint('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("code 0\nFalse\n")
    for figure in ("535,477,106,688", "22,762,487,808", "390,251", "18,005,144,633,344"):
        assert figure in done.stdout
    assert "2.696e+24" in done.stdout


def test_project_folder_is_named_before_the_verb(call):
    done = call("-C", "nowhere", "verify")
    assert (done.code, "nowhere has no record" in done.err) == (2, True)
