"""The registered forecast: what is predicted, on which conditions, and what failure will mean.

A registration is the body of a `forecast` record. It is never edited: an amendment is a new
record that supersedes it, states the data seen, and does not unscore it.
"""

import operator
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from portolan.canonical import canonical, stringify_floats
from portolan.errors import UsageError
from portolan.record.times import check_time
from portolan.scaling.forecast import METHOD_NAME, Forecast
from portolan.scaling.interval import LEVEL_LABELS

Applicability = Literal["match", "mismatch", "unverified"]

MANDATORY_FIELDS = (
    "title",
    "author",
    "made_at",
    "metric",
    "target",
    "recipe",
    "inputs",
    "method",
    "quantiles",
    "conditions",
    "bands",
    "scoring",
    "known_before",
    "changes",
    "on_failure",
)
METRIC_FIELDS = (
    "name",
    "evaluation_digest",
    "packing",
    "dropless",
    "weights_view",
    "tokenizer",
    "unit",
    "aggregation",
    "domains",
)
METHOD_FIELDS = ("code_commit", "script_sha256")
CONDITION_FIELDS = (
    "lineage",
    "sequence_length",
    "steps",
    "tokens_per_step",
    "mixture",
    "mixture_schedule",
    "optimizer",
    "transport",
    "metric_identity",
)
"""Fields that every registration must condition on."""
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
OPERATORS = ("==", "!=", *COMPARE, "in")

BANDS: list[dict[str, Any]] = [
    {"name": "green", "rule": "inside", "level": "0.5", "consecutive": 1, "consequence": "log"},
    {"name": "normal", "rule": "inside", "level": "0.9", "consecutive": 1, "consequence": "log"},
    {
        "name": "amber",
        "rule": "outside",
        "level": "0.9",
        "consecutive": 1,
        "consequence": "notify; run the health checklist within one evaluation; no recipe change "
        "on this alone",
    },
    {
        "name": "red",
        "rule": "outside",
        "level": "0.99",
        "consecutive": 2,
        "consequence": "incident: freeze non-urgent changes, evaluate the last checkpoint on the "
        "reference path, decide in writing to continue, roll back or amend",
    },
]
"""Bands of an evaluation, both sides alike; red needs two consecutive evaluations."""

SCORING: dict[str, Any] = {
    "headline": "WIS",
    "wis_levels": ["0.5", "0.8", "0.95"],
    "also": ["error", "z", "CRPS", "log score of the final", "coverage", "PIT"],
    "baselines": [
        "B0 = F0 at the same mark",
        "B2 = F0 final plus the mean of the last three residuals",
    ],
    "only": "evaluations whose conditions match",
}


def build_body(
    forecast: Forecast,
    *,
    title: str,
    author: str,
    made_at: str,
    metric: Mapping[str, Any],
    recipe: Mapping[str, Any],
    method: Mapping[str, Any],
    conditions: Sequence[Mapping[str, Any]],
    on_failure: str,
    evaluations_seen: Sequence[int] = (),
    expiry: str = "",
    reason: str = "",
    changes: Sequence[str] = (),
    refs: Sequence[str] = (),
) -> dict[str, Any]:
    """The validated body of a `forecast` record; every non-integer number a decimal string.

    Args:
        metric: identity of the metric of record, see METRIC_FIELDS (`name` may be left out).
        recipe: digests of model, optimizer, mixture, transport, precision, cadence.
        method: `code_commit` and `script_sha256`.
        conditions: `{field, op, value}`, see `minimum_conditions`.
        evaluations_seen: completed updates of the target's evaluations already known; any entry
            makes the forecast retrospective.
        expiry: until when it may be scored; by default the planned end of the target.
        reason, changes, refs: why an amendment is made, ids of changes, ids it rests on.
    """
    body = {
        "text": _sentence(title, forecast),
        "refs": list(refs),
        "title": title,
        "author": author,
        "made_at": made_at,
        "metric": {"name": forecast.headline, **metric},
        "target": forecast.target.record(),
        "recipe": dict(recipe),
        "inputs": list(forecast.inputs),
        "method": {
            "name": METHOD_NAME,
            "parameters": forecast.parameters,
            "warnings": list(forecast.warnings),
            **method,
        },
        "quantiles": forecast.quantiles_record(),
        "baseline": forecast.baseline_record(),
        "conditions": [dict(condition) for condition in conditions],
        "bands": BANDS,
        "scoring": SCORING,
        "known_before": _known_before(evaluations_seen),
        "expiry": expiry or f"after {forecast.target.steps} completed updates",
        "changes": list(changes),
        "on_failure": on_failure,
    }
    if reason:
        body["reason"] = reason
    body = stringify_floats(body)
    validate_body(body)
    return body


def _sentence(title: str, forecast: Forecast) -> str:
    final = forecast.metrics[forecast.headline]
    return (
        f"{title}: median {final.median:.4f} for {forecast.headline} at the end of "
        f"{forecast.target.run_id}, 95 % interval {final.quantile(0.025):.4f} to "
        f"{final.quantile(0.975):.4f}"
    )


def _known_before(evaluations_seen: Sequence[int]) -> dict[str, Any]:
    return {
        "count": len(evaluations_seen),
        "completed": max(evaluations_seen, default=0),
        "retrospective": bool(evaluations_seen),
    }


def minimum_conditions(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Equality conditions on every field of CONDITION_FIELDS, from the values at registration."""
    if missing := [name for name in CONDITION_FIELDS if values.get(name) in (None, "")]:
        raise UsageError(
            f"no value for the condition on {missing[0]!r}",
            remedy="a registration must say what it depends on",
        )
    return [
        {"field": name, "op": "==", "value": stringify_floats(values[name])}
        for name in CONDITION_FIELDS
    ]


def validate_body(body: Mapping[str, Any]) -> None:
    """Refuse a registration that cannot be scored later.

    Raises:
        UsageError: a missing or empty mandatory field, incomplete quantiles, conditions or
            bands, a float, or known evaluations that are not declared retrospective.
    """
    for name in MANDATORY_FIELDS:
        if name not in body or (name != "changes" and body[name] in ("", None, [], {})):
            raise UsageError(
                f"the registration lacks {name!r}",
                remedy="a forecast without it could not be scored; state it before the run",
            )
    canonical(dict(body))
    check_time(body["made_at"])
    for field, names in (("metric", METRIC_FIELDS), ("method", METHOD_FIELDS)):
        if missing := [name for name in names if name not in body[field]]:
            raise UsageError(f"the registration's {field} lacks {missing[0]!r}")
    _validate_quantiles(body["quantiles"], body["metric"]["name"])
    _validate_conditions(body["conditions"])
    names = [band.get("name") for band in body["bands"]]
    if names != [band["name"] for band in BANDS]:
        raise UsageError(f"the bands are {names}, expected green, normal, amber, red")
    known = body["known_before"]
    if known.get("count", -1) < 0 or bool(known["count"]) != known.get("retrospective"):
        raise UsageError(
            f"known_before = {known} does not say whether evaluations were known",
            remedy="count the target's evaluations seen; any makes it retrospective",
        )
    if body["changes"] and not body.get("reason"):
        raise UsageError("an amendment needs a reason", remedy="say why the forecast changed")


def _validate_quantiles(quantiles: Mapping[str, Any], headline: str) -> None:
    if headline not in quantiles or "1.00" not in quantiles[headline]:
        raise UsageError(f"the registration has no final quantiles of {headline!r}")
    for metric, marks in quantiles.items():
        for mark, row in marks.items():
            if sorted(row) != sorted(LEVEL_LABELS):
                raise UsageError(f"{metric} at mark {mark} lacks some of the 13 quantiles")
            values = [float(row[label]) for label in LEVEL_LABELS]
            if values != sorted(values):
                raise UsageError(f"the quantiles of {metric} at mark {mark} cross")


def _validate_conditions(conditions: Sequence[Mapping[str, Any]]) -> None:
    for condition in conditions:
        if set(condition) != {"field", "op", "value"} or condition["op"] not in OPERATORS:
            raise UsageError(
                f"the condition {dict(condition)} is not {{field, op, value}}",
                remedy=f"op is one of {' '.join(OPERATORS)}",
            )
    fields = {condition["field"] for condition in conditions}
    if missing := [name for name in CONDITION_FIELDS if name not in fields]:
        raise UsageError(
            f"the registration has no condition on {missing[0]!r}",
            remedy="add {field, op, value} for every field that the forecast depends on",
        )


def applicability(
    conditions: Sequence[Mapping[str, Any]], live: Mapping[str, Any]
) -> Applicability:
    """Whether a forecast applies to the live run: one broken condition is a `mismatch`.

    A field that `live` lacks or gives as None is `unverified`: its residual is not shown, and
    the forecast is not void.
    """
    if failed_conditions(conditions, live):
        return "mismatch"
    unknown = any(live.get(condition["field"]) is None for condition in conditions)
    return "unverified" if unknown else "match"


def failed_conditions(
    conditions: Sequence[Mapping[str, Any]], live: Mapping[str, Any]
) -> list[str]:
    """Fields of the conditions that the live run breaks."""
    return [
        condition["field"]
        for condition in conditions
        if live.get(condition["field"]) is not None
        and not _holds(live[condition["field"]], condition["op"], condition["value"])
    ]


def _holds(actual: Any, op: str, expected: Any) -> bool:
    actual = stringify_floats(actual)
    if op == "in":
        return any(_equal(actual, item) for item in expected)
    if op in ("==", "!="):
        return _equal(actual, expected) == (op == "==")
    left: Any = _number(actual)
    right: Any = _number(expected)
    if left is None or right is None:
        # Times of the record sort as text.
        left, right = str(actual), str(expected)
    return COMPARE[op](left, right)


def _equal(actual: Any, expected: Any) -> bool:
    """Equal values; an integer also equals its decimal string."""
    if isinstance(actual, bool) or isinstance(expected, bool):
        return actual is expected
    if isinstance(actual, int) != isinstance(expected, int):
        return _number(actual) == _number(expected) is not None
    return actual == expected


def _number(value: Any) -> Decimal | None:
    """A finite number from an integer or a decimal string, else None."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = Decimal(value)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
