"""Write docs/cli.md and docs/recipe.md from the code; `--check` only compares."""

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import typer

from portolan import recipe
from portolan.cli import app

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
        parts += [_options(command, typer.Context(command, info_name=name, parent=context))]
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
    sections = {
        name: field.annotation
        for name, field in recipe.Recipe.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, recipe.Settings)
    }
    sections["[[data.sources]]"] = recipe.SourceSettings
    for name, model in sections.items():
        title = name if name.startswith("[") else f"[{name}]"
        parts += [f"\n## {title}\n\n", inspect.cleandoc(model.__doc__ or ""), "\n\n"]
        parts += [_table(model, name)]
    return "".join(parts)


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


def main() -> int:
    """Write both files, or with `--check` say which differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, text in (("cli.md", command_line()), ("recipe.md", recipe_reference())):
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
