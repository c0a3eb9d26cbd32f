"""The headline numbers of a finished target as claim records: what the page and the README say."""

from collections.abc import Iterator
from typing import Any

from portolan.pipeline.recorder import ProjectRecord
from portolan.project import Project
from portolan.record.quantities import ClaimedQuantity
from portolan.record.times import now
from portolan.record.types import Claim

HEADLINE = "eval_dropless/heldout/macro_loss"
LOSS_DIGITS = 4
FLOPS_DIGITS = 4
MADE_BY = "the project's owner, by portolan"


def claim_headline(project: Project, record: ProjectRecord, run_id: str) -> list[str]:
    """Record what is said of a finished run; returns the ids of claims that are new.

    A number that moved, for instance after an evaluation fix, supersedes the claim before it.
    Nothing is claimed of a run that is not finished.
    """
    outcome = project.read("runs", run_id, "finished.json")
    facts = project.read("runs", run_id, "run.json")
    if outcome is None or facts is None:
        return []
    known = {
        entry.body["quantity"]["basis"]: entry
        for entry in record.find("claim", subject=run_id)
        if "quantity" in entry.body
    }
    added = []
    for claim in _claims(run_id, facts["plan"], outcome, _forecast_median(record, run_id)):
        assert claim.quantity is not None
        before = known.get(claim.quantity.basis)
        if before is not None and before.body["quantity"] == claim.quantity.model_dump(
            mode="json", exclude_none=True
        ):
            continue
        replaced = [before.id] if before is not None else []
        added.append(record.journal.append("claim", claim, supersedes=replaced))
    return added


def _claims(
    run_id: str, plan: dict[str, Any], outcome: dict[str, Any], median: str | None
) -> Iterator[Claim]:
    """The claims of a run: loss, steps, tokens, parameters, operations, forecast."""
    completed = outcome["completed"]
    loss = f"{outcome['evaluation'][HEADLINE]:.{LOSS_DIGITS}f}"
    tokens = completed * plan["tokens_per_step"]
    flops = f"{plan['flops_with_head']:.{FLOPS_DIGITS - 1}e}".replace("e+", "e")
    rows = [
        (f"the final macro loss is {loss} nats per token", loss, "nats/token", "eval.macro.nats"),
        (f"{completed:,} updates were made", str(completed), "updates", "step.completed"),
        (f"it was trained on {tokens:,} tokens", str(tokens), "tokens", "tokens.nominal"),
        (f"it has {plan['total_params']:,} parameters", str(plan["total_params"]), "parameters",
         "params.total"),
        (f"{plan['active_params']:,} of them are active", str(plan["active_params"]),
         "parameters", "params.active"),
        (f"its training takes {flops} operations", flops, "FLOP", "flops.model.fwd_bwd"),
    ]  # fmt: skip
    if median is not None:
        text = f"the registered forecast of its final macro loss is {median} nats per token"
        rows.append((text, median, "nats/token", "forecast.macro.nats"))
    for statement, value, unit, basis in rows:
        quantity = ClaimedQuantity.model_validate(
            {"value": value, "unit": unit, "basis": basis, "scope": f"lineage:{run_id}"}
        )
        yield Claim(
            text=statement,
            statement=statement,
            subject=run_id,
            quantity=quantity,
            made_by=MADE_BY,
            date=now(),
            locator="site/index.html#summary",
            layer="claimed",
        )


def _forecast_median(record: ProjectRecord, run_id: str) -> str | None:
    """Median that the newest registered forecast of a run gives for its end, as it is printed."""
    found = [
        entry for entry in record.find("forecast") if entry.body["target"].get("lineage") == run_id
    ]
    if not found:
        return None
    quantiles = found[-1].body["quantiles"].get(HEADLINE, {}).get("1.00", {})
    return f"{float(quantiles['0.5']):.{LOSS_DIGITS}f}" if "0.5" in quantiles else None
