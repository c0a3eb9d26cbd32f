"""Write docs/cli.md, docs/recipe.md and the tables of docs/health.md from the code.

`--check` only compares.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from portolan import curation_settings, recipe, source_settings, timetable
from portolan.cli import app
from portolan.health.checklist import ITEMS, WINDOWS
from portolan.health.rules import CADENCE_SECONDS, RULES
from portolan.health.status import EXIT_CODES

FOLDER = Path(__file__).parent
HEADER = "<!-- Written by docs/generate.py: change the code, then run `make docs`. -->\n\n"


def command_line() -> str:
    """Every verb with its help, arguments and options."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="portolan")
    parts = [HEADER, "# Command line\n\n", inspect.cleandoc(root.help or ""), "\n\n"]
    parts += [root.epilog or "", "\n\n"]
    parts += ["Options before the verb:\n\n", _options(root, context)]
    for name in sorted(root.list_commands(context)):  # type: ignore[attr-defined]
        command = root.get_command(context, name)  # type: ignore[attr-defined]
        parts += [f"\n## portolan {name}\n\n", inspect.cleandoc(command.help or ""), "\n\n"]
        below = typer.Context(command, info_name=name, parent=context)
        parts += [_options(command, below)]
        for inner in sorted(getattr(command, "commands", ())):
            verb = command.get_command(below, inner)  # type: ignore[attr-defined]
            parts += [f"\n### portolan {name} {inner}\n\n", inspect.cleandoc(verb.help or "")]
            parts += ["\n\n", _options(verb, typer.Context(verb, info_name=inner, parent=below))]
    return "".join(parts)


def _options(command: Any, context: Any) -> str:
    rows = []
    for parameter in command.get_params(context):
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if "--help" in names:
            continue
        if parameter.param_type_name == "argument":
            names = parameter.name.upper()
        text = getattr(parameter, "help", "") or ""
        default = parameter.default
        shown = "" if default in (None, "", False) or callable(default) else f" (default {default})"
        rows.append(f"- `{names}`: {text}{shown}\n")
    return "".join(rows) or "No options.\n"


def recipe_reference() -> str:
    """Every key of a recipe with type, default and meaning."""
    parts = [HEADER, "# Recipe\n\n", inspect.cleandoc(recipe.Recipe.__doc__ or ""), "\n\n"]
    parts += ["A recipe is a TOML file. Every verb takes `--set section.key=value`.\n\n"]
    parts += [_table(recipe.Recipe, "")]
    sections = dict(_tables(recipe.Recipe, ""))
    sections["[[data.sources]]"] = source_settings.SourceSettings
    sections["[[data.fuzzy.reviewed_losses]]"] = curation_settings.ReviewedLoss
    sections["[[data.decontamination.sets]]"] = curation_settings.EvaluationSource
    sections["[[mixture.phases]]"] = timetable.MixturePhase
    sections["[[context.stages]]"] = timetable.ContextStage
    for name, model in sections.items():
        title = name if name.startswith("[") else f"[{name}]"
        parts += [f"\n## {title}\n\n", inspect.cleandoc(model.__doc__ or ""), "\n\n"]
        parts += [_table(model, name)]
    return "".join(parts)


def _tables(model: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, settings) of every table below a table."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, recipe.Settings):
            yield f"{prefix}{name}", kind
            yield from _tables(kind, f"{prefix}{name}.")


def _table(model: Any, section: str) -> str:
    lines = ["| key | type | default |\n", "|---|---|---|\n"]
    for name, field in model.model_fields.items():
        kind = str(field.annotation).replace("typing.", "").replace("portolan.recipe.", "")
        if isinstance(field.annotation, type):
            kind = field.annotation.__name__
        default = "required" if field.is_required() else repr(field.default)
        if isinstance(field.default, recipe.Settings):
            default = "see below"
        kind, default = (text.replace("|", "or") for text in (kind, default))
        lines.append(f"| `{name}` | {kind} | {default} |\n")
    return "".join(lines)


def health_reference() -> str:
    """docs/health.md with its tables filled in between their markers; the prose is kept."""
    rules = [
        (rule.id, rule.words, rule.severity, _pending(rule), rule.advice) for rule in RULES.values()
    ]
    signals = [
        (rule.id, ", ".join(f"`{name}`" for name in rule.signals)) for rule in RULES.values()
    ]
    items = [(str(item.number), item.title, item.limit, ", ".join(item.windows)) for item in ITEMS]
    windows = [(w.name, f"{w.start:.0%} to {w.end:.0%}", w.reason) for w in WINDOWS]
    tables = {
        "verdicts": (("verdict", "exit code"), [(w, str(c)) for w, c in EXIT_CODES.items()]),
        "rules": (("rule", "condition", "severity", "pending", "what to try"), rules),
        "signals": (("rule", "signals"), signals),
        "checklist": (("item", "question", "passes when", "windows"), items),
        "windows": (("window", "share of the run", "why"), windows),
    }
    text = (FOLDER / "health.md").read_text()
    for name, (columns, lines) in tables.items():
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end -->)"
        filled = _markdown(columns, lines)
        text, count = re.subn(
            pattern, lambda found, new=filled: found[1] + new + found[2], text, flags=re.DOTALL
        )
        assert count == 1, f"docs/health.md needs one table {name}"
    return text


def _pending(rule: Any) -> str:
    if rule.immediate:
        return "immediate"
    return f"{rule.pending_seconds / CADENCE_SECONDS:g} min" if rule.pending_seconds else "none"


def _markdown(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    rows = [columns, tuple("---" for _ in columns), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', 'or') for cell in row)} |\n" for row in rows)


def main() -> int:
    """Write the files, or with `--check` say which differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    written = {
        "cli.md": command_line(),
        "recipe.md": recipe_reference(),
        "health.md": health_reference(),
    }
    for name, text in written.items():
        path = FOLDER / name
        if check:
            if not path.is_file() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
