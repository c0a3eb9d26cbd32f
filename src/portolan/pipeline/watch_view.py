"""How a person, a log or a program sees the status of a run."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from portolan.console import say
from portolan.health.monitor import Alarm
from portolan.health.status import Status


def print_json(status: Status, indent: int | None = None) -> None:
    """The status as JSON; in one line unless indented."""
    say(json.dumps(status.to_json(), indent=indent, sort_keys=True))


def print_alarms(alarms: Sequence[Alarm], unmeasured: Sequence[str], *, as_json: bool) -> None:
    """The alarms of a replayed trace in order, and the rules that had nothing to look at."""
    if as_json:
        content = {"alarms": [a.to_json() for a in alarms], "rules_not_measured": list(unmeasured)}
        say(json.dumps(content, indent=2, sort_keys=True))
        return
    for alarm in alarms:
        moment = datetime.fromtimestamp(alarm.raised, UTC)
        say(f"{moment:%Y-%m-%d %H:%M:%S} {alarm.severity} {alarm.rule.id} {alarm.text}")
    say(f"{len(alarms)} alarms; rules not measured: {', '.join(unmeasured) or 'none'}")


def print_line(status: Status) -> None:
    """One parseable line a report."""
    parts = [
        f"run={status.run_id}",
        f"state={status.state.replace(' ', '_')}",
        f"step={status.completed}/{status.steps}",
        f"verdict={status.verdict.replace(' ', '_')}",
    ]
    if status.evaluations:
        last = status.evaluations[-1]
        parts.append(f"evaluation={last.value:.4f}")
        parts.append(f"band={last.words.split(':')[0].replace(' ', '_')}")
        if last.residual is not None:
            parts.append(f"residual={last.residual:+.4f}")
    if status.reasons:
        parts.append(f"reason={json.dumps(status.reasons[0].text)}")
    say(" ".join(parts))


STYLES = {"clear": "bold green", "watch": "bold yellow", "off course": "bold red",
          "no verdict": "bold"}  # fmt: skip


def render(status: Status) -> Group:
    """The whole status for a person."""
    head = Text.assemble(
        (status.verdict, STYLES[status.verdict]),
        f"  {status.run_id}: {status.state}, {status.completed} of {status.steps} updates; "
        f"forecast {status.forecast}",
    )
    parts: list[Any] = [head]
    for reason in status.reasons:
        parts.append(Text(f"  {reason.severity}: {reason.text}"))
        if reason.advice:
            parts.append(Text(f"    try: {reason.advice}"))
    if status.evaluations:
        parts.append(_evaluation_table(status))
    if status.state != "not started":
        parts.append(_checklist_table(status))
        clear, why = status.early
        parts.append(Text(f"first 3 %: {'clear' if clear else 'not clear'} ({why})"))
    if status.shapes:
        parts.append(_shape_table(status))
    if status.peak:
        parts.append(Text(status.peak))
    if status.unmeasured_rules:
        parts.append(Text(f"rules not measured: {', '.join(status.unmeasured_rules)}"))
    parts += [Text(f"note: {notice}") for notice in status.notices]
    return Group(*parts)


def _evaluation_table(status: Status) -> Table:
    table = Table(title="Evaluations, nats per token", title_justify="left")
    for name in ("run", "measured", "median", "90 % interval", "difference", "status"):
        table.add_column(name, justify="left" if name == "status" else "right")
    for item in status.evaluations:
        known = item.residual is not None
        table.add_row(
            f"{item.fraction:.0%}",
            f"{item.value:.4f}",
            f"{item.median:.4f}" if known else "-",
            f"{item.low_90:.4f} to {item.high_90:.4f}" if known else "-",
            f"{item.residual:+.4f}" if known else "-",
            item.words,
        )
    return table


def _checklist_table(status: Status) -> Table:
    table = Table(title="Checklist", title_justify="left")
    for name in ("item", "question", "verdict", "found", "not measured in"):
        table.add_column(name, overflow="fold")
    for result in status.checklist:
        table.add_row(
            str(result.item.number),
            result.item.title,
            result.verdict,
            result.reason,
            ", ".join(w for w in result.unmeasured if w != "all"),
        )
    return table


def _shape_table(status: Status) -> Table:
    table = Table(title="Shapes against the rungs at the same share", title_justify="left")
    for name in ("signal", "", "run", "value", "ladder", "closest rung"):
        table.add_column(name, overflow="fold")
    for item in status.shapes:
        table.add_row(
            item.signal,
            "level" if item.kind == "level" else "growth",
            f"{item.band.fraction:.0%}",
            f"{item.value:.4g}" + ("" if item.inside else " *"),
            f"{item.band.low:.4g} to {item.band.high:.4g}",
            item.band.nearest(item.value)[0],
        )
    return table
