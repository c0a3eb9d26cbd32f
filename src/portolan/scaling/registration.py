"""The registered forecast: what is predicted, on which conditions, and what failure will mean.

A registration is the body of a `forecast` record. It is never edited: an amendment is a new
record that supersedes it, states the data seen, and does not unscore it.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from portolan.canonical import canonical, stringify_floats
from portolan.errors import UsageError
from portolan.record.times import check_time, parse_time
from portolan.scaling.forecast import Forecast
from portolan.scaling.interval import LEVEL_LABELS
from portolan.scaling.ladder import NUM_MARKS, evaluation_marks

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
    "expiry",
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
TARGET_FIELDS = (
    "lineage",
    "steps",
    "tokens",
    "tokens_per_step",
    "sequence_length",
    "flops",
    "axis",
    "marks",
)
RECIPE_FIELDS = (
    "model",
    "optimizer",
    "mixture",
    "mixture_schedule",
    "tokenizer",
    "transport",
    "precision",
    "reference_tokens",
    "evaluation_cadence",
)
INPUT_FIELDS = ("run", "config_digest", "evaluations_sha256", "marks", "seed")
METHOD_FIELDS = ("name", "parameters", "code_commit", "script_sha256")
SCORING_FIELDS = ("headline", "baselines")
BAND_FIELDS = ("name", "rule", "level", "consecutive", "consequence")
PARTS = {
    "metric": METRIC_FIELDS,
    "target": TARGET_FIELDS,
    "recipe": RECIPE_FIELDS,
    "method": METHOD_FIELDS,
    "scoring": SCORING_FIELDS,
}
"""What each table of a registration must state."""
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
        "B1 = final of the previous recipe's law, where there is one",
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
    previous_law: Mapping[str, Any] | None = None,
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
        expiry: `after N completed updates` or `until TIME`; by default the target's planned end.
        previous_law: baseline B1 as {name, value}: the final loss by the previous recipe's law.
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
            "name": forecast.method,
            "parameters": forecast.parameters,
            "warnings": list(forecast.warnings),
            **method,
        },
        "quantiles": forecast.quantiles_record(),
        "baseline": forecast.baseline_record() | ({"B1": previous_law} if previous_law else {}),
        "conditions": [dict(condition) for condition in conditions],
        "bands": BANDS,
        "scoring": SCORING,
        "known_before": known_before(evaluations_seen, first_completed(forecast)),
        "expiry": expiry or expiry_after(forecast.target.steps),
        "changes": list(changes),
        "on_failure": on_failure,
        **({"reason": reason} if reason else {}),
    }
    body = stringify_floats(body)
    validate_body(body)
    return body


def first_completed(forecast: Forecast) -> int:
    """Completed updates at the first mark that is forecast."""
    first = forecast.metrics[forecast.headline].marks[0]
    return evaluation_marks(forecast.target.steps)[first - 1]


def _sentence(title: str, forecast: Forecast) -> str:
    final = forecast.metrics[forecast.headline]
    return (
        f"{title}: median {final.median:.4f} for {forecast.headline} at the end of "
        f"{forecast.target.run_id}, 95 % interval {final.quantile(0.025):.4f} to "
        f"{final.quantile(0.975):.4f}"
    )


def known_before(evaluations_seen: Sequence[int], first_predicted: int = 0) -> dict[str, Any]:
    """The evaluations known when a forecast is made.

    It is retrospective if any is at or after `first_predicted`, the completed updates of the
    first evaluation that it gives quantiles for.
    """
    last = max(evaluations_seen, default=0)
    return {
        "count": len(evaluations_seen),
        "completed": last,
        "retrospective": bool(evaluations_seen) and last >= first_predicted,
    }


def expiry_after(steps: int) -> str:
    """Expiry at the planned end of a run."""
    return f"after {steps} completed updates"


def is_expired(expiry: str, completed: int, time: str | None = None) -> bool:
    """Whether an evaluation after `completed` updates, made at `time`, comes after the expiry.

    A dated expiry needs `time`; without it the forecast does not count as expired.
    """
    bound = _expiry_bound(expiry)
    if isinstance(bound, int):
        return completed > bound
    return time is not None and parse_time(time) > parse_time(bound)


def _expiry_bound(expiry: str) -> int | str:
    """Completed updates or the time that an expiry names."""
    if match := re.fullmatch(r"after (\d+) completed updates", expiry):
        return int(match[1])
    if match := re.fullmatch(r"until (\S+)", expiry):
        return check_time(match[1])
    raise UsageError(
        f"the expiry {expiry!r} names neither a step nor a time",
        remedy="write `after N completed updates` or `until 2026-12-31T00:00:00.000Z`",
    )


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
    _expiry_bound(body["expiry"])
    for part, names in PARTS.items():
        _require(body[part], names, part)
    for number, entry in enumerate(body["inputs"]):
        _require(entry, INPUT_FIELDS, f"inputs[{number}]")
    _validate_quantiles(body["quantiles"], body["metric"]["name"])
    _validate_conditions(body["conditions"])
    names = [band.get("name") for band in body["bands"]]
    if names != [band["name"] for band in BANDS]:
        raise UsageError(f"the bands are {names}, expected green, normal, amber, red")
    for band in body["bands"]:
        _require(band, BAND_FIELDS, f"band {band['name']}")
    _validate_known(body)
    if body["changes"] and not body.get("reason"):
        raise UsageError("an amendment needs a reason", remedy="say why the forecast changed")


def _require(part: Mapping[str, Any], names: Sequence[str], place: str) -> None:
    """Every name of a part is there and says something."""
    for name in names:
        if part.get(name) in (None, "", [], {}):
            raise UsageError(
                f"the registration's {place} lacks {name!r}",
                remedy="state it before the run; it cannot be filled in afterwards",
            )


def _validate_known(body: Mapping[str, Any]) -> None:
    known = body["known_before"]
    marks = body["quantiles"][body["metric"]["name"]]
    first = round(min(float(mark) for mark in marks) * NUM_MARKS)
    count, completed = known.get("count", -1), known.get("completed", -1)
    late = count > 0 and completed >= evaluation_marks(int(body["target"]["steps"]))[first - 1]
    if min(count, completed) < 0 or late != known.get("retrospective"):
        raise UsageError(
            f"known_before = {known} does not say whether evaluations were known",
            remedy="count the target's evaluations seen; one that is forecast makes it "
            "retrospective",
        )


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


def validate_amendment(body: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Refuse an amendment that hides why it is made, what was seen, or how the end was moved.

    Raises:
        UsageError: no reason, no change, another metric, or a new horizon without the output of
            the delay simulator.
    """
    validate_body(body)
    for field in ("reason", "changes"):
        if not body.get(field):
            raise UsageError(
                f"the amendment lacks {field!r}", remedy="say which change it answers, and why"
            )
    if body["metric"] != earlier["metric"]:
        raise UsageError(
            "the amendment forecasts another metric than the registration it supersedes",
            remedy="keep the registered metric; register another one on its own",
        )
    if body["known_before"]["count"] < earlier["known_before"]["count"]:
        raise UsageError("the amendment knows fewer evaluations than the forecast before it")
    moved = body["target"]["steps"] != earlier["target"]["steps"]
    if moved and not body["method"].get("delay"):
        raise UsageError(
            f"the horizon moved from {earlier['target']['steps']} to {body['target']['steps']} "
            "updates without a simulation",
            remedy="attach the output of `portolan delay`",
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
