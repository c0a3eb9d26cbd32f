"""What every benchmark prints: machine, load, versions, claims and rows."""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def claim(name: str, value: float, unit: str, target: str, holds: bool) -> dict[str, Any]:
    """One claim, its measured value and whether it holds in this run."""
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds}


def row(what: str, value: float | None, unit: str) -> dict[str, Any]:
    """One measured number; None where it cannot be known."""
    return {"what": what, "value": value, "unit": unit}


def report(
    rows: list[dict[str, Any]], claims: list[dict[str, Any]], packages: Sequence[str]
) -> dict[str, Any]:
    """The whole result, ready for JSON."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "load": os.getloadavg()[0],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "claims": claims,
        "rows": rows,
    }


def main(
    description: str | None,
    run: Callable[..., dict[str, Any]],
    arguments: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Parse --quick, --json and further `arguments`, run, print the table.

    `run` gets `quick` and the value of each further argument by its name.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    for name, settings in (arguments or {}).items():
        parser.add_argument(name, **settings)
    options = vars(parser.parse_args())
    file = options.pop("json")
    result = run(**options)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"{result['machine']}, load {result['load']:.2f}; {versions}")
    for entry in result["rows"]:
        value = "null" if entry["value"] is None else f"{entry['value']:,.3f}"
        print(f"{entry['what']:<60} {value:>14} {entry['unit']}")
    for entry in result["claims"]:
        word = "holds" if entry["holds"] else "FAILS"
        print(f"{entry['name']}: {entry['value']:.3f} {entry['unit']} ({entry['target']}) {word}")
    if file:
        file.write_text(json.dumps(result, indent=2) + "\n")
