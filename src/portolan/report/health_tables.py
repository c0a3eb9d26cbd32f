"""The section Status of the page: verdict in words, checklist, shapes beside the rungs."""

from portolan.report.facts import Project
from portolan.report.figures import Table
from portolan.report.words import MISSING, count, percent, plural

VERDICT_WORDS = {
    "clear": "Clear: the newest evaluation is inside the 90 % band and nothing else stands out.",
    "watch": "Watch: something is outside what the forecast or the small runs lead to expect.",
    "off course": "Off course: a decision in writing is due: continue, roll back or amend.",
    "no verdict": "No verdict: no evaluation can be held against a registered forecast.",
}


def introduction(project: Project) -> str:
    """Verdict, where the run stood, and what the checklist found, in sentences."""
    health = project.health
    if health is None:
        return ""
    failed = sum(item.verdict == "fail" for item in health.items)
    missing = sum(item.verdict == "not measured" for item in health.items)
    text = VERDICT_WORDS.get(health.verdict, health.verdict)
    text += f" As of update {count(health.completed)} of {count(health.steps)} ({health.state}); "
    text += f"of {plural(len(health.items), 'item')} of the checklist {failed} failed"
    if missing:
        text += f" and {missing} could not be measured, which is not a pass"
    text += f". The first 3 % of the run: {health.early}."
    if health.peak:
        text += f" {health.peak[:1].upper()}{health.peak[1:]}."
    return text


def tables(project: Project) -> tuple[Table, ...]:
    """Reasons, checklist and shapes; empty without a status."""
    health = project.health
    if health is None:
        return ()
    found = []
    if health.reasons:
        rows = tuple((r.severity, r.text, r.advice or MISSING) for r in health.reasons)
        found.append(Table("Why", ("Severity", "Reason", "What to try"), rows, wraps=True))
    if health.items:
        rows = tuple(
            (
                f"{item.number}. {item.title}",
                item.verdict,
                item.found,
                ", ".join(w for w in item.unmeasured if w != "all") or MISSING,
            )
            for item in health.items
        )
        note = (
            "Windows: W1 the first 3 % of the run, W2 22 to 35 %, W4 the last fifth, Wc after a "
            f"change. {plural(health.num_unmeasured_rules, 'monitoring rule')} had no signal to "
            "look at."
        )
        columns = ("Item", "Verdict", "Found", "Not measured in")
        found.append(Table("Checklist", columns, rows, note, wraps=True))
    if health.shapes:
        found.append(_shape_table(health.shapes))
    return tuple(found)


def _shape_table(shapes: tuple) -> Table:
    rows = tuple(
        (
            shape.signal if shape.kind == "level" else f"growth of {shape.signal}",
            percent(shape.fraction, 0),
            f"{shape.value:.4g}".replace("-", "−"),
            f"{shape.low:.4g} to {shape.high:.4g}".replace("-", "−"),
            "inside" if shape.inside else "outside",
            shape.nearest,
        )
        for shape in shapes
    )
    note = (
        "The ladder's range is that of the small runs at the same share of their run, extended to "
        "the size of the target. Growth is the slope of the logarithm over the newest 2 % of the "
        "run. One value outside is noise; the checklist asks for two in a row."
    )
    columns = ("Signal", "Run", "Value", "Ladder", "Place", "Closest")
    return Table("Shapes beside the small runs", columns, rows, note)
