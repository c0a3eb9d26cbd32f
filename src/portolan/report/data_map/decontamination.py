"""The page on test items in the training text: flags, sets, recall by injection, evidence."""

from typing import Any

from portolan.report.data_map.facts import Contamination
from portolan.report.figures import Table
from portolan.report.words import MISSING, count, percent, plural


def page_data(found: Contamination) -> list[dict[str, Any]]:
    """What the script of the page reads."""
    return [match._asdict() for match in found.matches]


def lead(found: Contamination) -> str:
    """One sentence on what was looked for and what was found."""
    active = sum(1 for one in found.sets if one.ngrams is not None)
    flagged = sum(found.flagged.values())
    return (
        f"{plural(active, 'evaluation set')} searched for in "
        f"{plural(sum(found.documents.values()), 'document')}: {count(flagged)} flagged and left "
        "out of training, each with the item that it holds."
    )


def flag_table(found: Contamination) -> Table:
    """Flagged documents by source, and how many of them hold an item of each set."""
    names = sorted({name for _, name in found.flags})
    rows = []
    for source in sorted(found.documents):
        flagged, documents = found.flagged.get(source, 0), found.documents[source]
        by_set = [found.flags.get((source, name), 0) for name in names]
        rows.append(
            (
                source,
                count(documents),
                count(flagged),
                percent(flagged / documents, 3) if documents else MISSING,
                *(count(number) if number else MISSING for number in by_set),
            )
        )
    columns = ("Source", "Documents", "Flagged", "Share", *names)
    note = "A document may hold items of several sets." if len(names) > 1 else ""
    return Table("Flagged documents by source and set", columns, tuple(rows), note)


def set_table(found: Contamination) -> Table:
    """The registry of evaluation sets."""
    rows = [
        (
            one.name,
            one.version or MISSING,
            one.license_spdx or MISSING,
            count(one.rows),
            count(one.ngrams),
            one.state,
        )
        for one in found.sets
    ]
    columns = ("Set", "Version", "Licence", "Items", "13-token windows", "State")
    return Table("Evaluation sets", columns, tuple(rows), wraps=True)


def recall_table(found: Contamination) -> Table:
    """Items found of those that were put into clean text."""
    rows = [
        (layout, count(injected), count(hits), percent(hits / injected) if injected else MISSING)
        for layout, injected, hits in found.recall
    ]
    columns = ("Layout", "Injected", "Found", "Recall")
    return Table("Recall by injection", columns, tuple(rows))
