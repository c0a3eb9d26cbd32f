"""Links between figures: the records that say which one counts, or what each of them means."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from portolan.record.bases import NOT_STATED

LinkKind = Literal["correction", "change", "registration", "definition", "published", "void"]
Recorder = Literal["run", "auditor"]


@dataclass(frozen=True)
class Link:
    """One record about figures.

    Args:
        kind: `correction` and `change` name (earlier, later); `registration` and `definition`
            say what their figures mean; `published` that the owners state the conflict
            themselves; `void` that a forecast is no strict test any more, from a step on.
        figures: ids of the figures.
        recorder: `run` if the run's own record says so, `auditor` if it is the auditor's inference.
        text: what it says, in a sentence.
        assumption: it is not known to exist; the reconciliation is made without it and with it.
        from_step: completed updates from which a `void` holds.
    """

    kind: LinkKind
    figures: tuple[str, ...]
    recorder: Recorder
    text: str
    source: str = NOT_STATED
    url: str = ""
    date: str = NOT_STATED
    assumption: bool = False
    from_step: int | None = None

    @property
    def is_fact(self) -> bool:
        """Whether the public record itself states it."""
        return self.recorder == "run" and not self.assumption


@dataclass(frozen=True)
class Links:
    """The links in force, asked by figure."""

    all: tuple[Link, ...]

    def superseding(self, first: str, second: str) -> Link | None:
        """The correction or change that leads from one of two figures to the other."""
        return self._first(("correction", "change"), {first, second})

    def defining(self, figures: Sequence[str]) -> Link | None:
        """A link that states the definitions of all of these figures; facts come first."""
        found = [
            link
            for link in self.all
            if link.kind in ("definition", "registration") and set(figures) <= set(link.figures)
        ]
        return min(found, key=lambda link: not link.is_fact, default=None)

    def registering(self, figure: str) -> Link | None:
        """The registration that documents a figure."""
        return self._first(("registration",), {figure})

    def published(self, figures: Iterable[str]) -> bool:
        """Whether the owners state a conflict of these figures in public."""
        named = set(figures)
        return any(link.kind == "published" and named & set(link.figures) for link in self.all)

    def void(self, figure: str) -> Link | None:
        """The condition that a forecast has left."""
        return self._first(("void",), {figure})

    def _first(self, kinds: Sequence[LinkKind], figures: set[str]) -> Link | None:
        matching = (
            link for link in self.all if link.kind in kinds and figures <= set(link.figures)
        )
        return next(matching, None)
