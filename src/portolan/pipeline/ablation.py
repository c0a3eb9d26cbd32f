"""The verb `ablate`: train what a suite lacks, then the table, its record and its page."""

import dataclasses
import json
from collections.abc import Sequence

from portolan.console import say
from portolan.pipeline.ablation_suite import changed, make_suite, print_costs, train_suite
from portolan.pipeline.ablation_table import build_table, print_table, write_table
from portolan.pipeline.recorder import ProjectRecord
from portolan.pipeline.stages import require_corpus
from portolan.project import Project
from portolan.report.ablation import PAGE


def ablate(
    project: Project,
    *,
    arms: Sequence[str] = (),
    widths: Sequence[int] = (),
    num_seeds: int,
    tokens_per_active_param: float | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    num_workers: int | None = None,
) -> None:
    """Run the suite, resuming where it stopped.

    Args:
        arms: names of arms; none means all.
        widths: none means the two smallest rungs of the recipe.
        tokens_per_active_param: in place of the recipe's.
        dry_run: say what it costs and train nothing.
        as_json: print the table as JSON.
        num_workers: runs at once on a CPU; None for as many as cores and memory allow.
    """
    if tokens_per_active_param is not None:
        key = "budget.tokens_per_active_param"
        recipe = changed(project.recipe, {key: tokens_per_active_param})
        project = dataclasses.replace(project, recipe=recipe)
    suite = make_suite(
        project, require_corpus(project), arms=arms, widths=widths, num_seeds=num_seeds
    )
    if dry_run:
        print_costs(suite)
        return
    record = ProjectRecord(project)
    if not train_suite(suite, record, num_workers) and not as_json:
        say("nothing to train: every run of this suite is done")
    table = build_table(suite)
    path = write_table(project, record, table)
    if as_json:
        say(json.dumps(table, indent=2, ensure_ascii=False))
        return
    print_table(table)
    say(f"table: {project.relative(path)}")
    say(f"page: {(project.site / PAGE).resolve()}")
