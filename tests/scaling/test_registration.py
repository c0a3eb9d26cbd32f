"""What a registered forecast must hold, and when it stops applying."""

import copy

import pytest

from portolan.canonical import canonical, digest, parse
from portolan.errors import PortolanError, UsageError
from portolan.record import types
from portolan.scaling import registration
from portolan.scaling.forecast import forecast_ladder
from portolan.scaling.registration import applicability, build_body, validate_body

MACRO = "eval_dropless/heldout/macro_loss"
HASH = "ab" * 32
LIVE = {
    "lineage": "d96",
    "sequence_length": 128,
    "steps": 735,
    "tokens_per_step": 8192,
    "mixture": HASH,
    "mixture_schedule": [["0", HASH], ["588", HASH]],
    "optimizer": HASH,
    "transport": "grouped",
    "metric_identity": HASH,
}


@pytest.fixture(scope="module")
def forecast(micro_ladder, micro_target):
    return forecast_ladder(micro_ladder, micro_target, metrics=[MACRO])


@pytest.fixture(scope="module")
def make(forecast):
    def build(**changes):
        arguments = {
            "title": "Micro target",
            "author": "test",
            "made_at": "2026-01-01T00:00:00.000Z",
            "metric": {
                "evaluation_digest": HASH,
                "packing": 128,
                "dropless": True,
                "weights_view": "raw",
                "tokenizer": HASH,
                "unit": "nats per token",
                "aggregation": "unweighted mean over domains",
                "domains": ["code"],
            },
            "recipe": {
                "model": HASH,
                "optimizer": HASH,
                "mixture": HASH,
                "mixture_schedule": HASH,
                "tokenizer": HASH,
                "transport": "grouped",
                "precision": "float32",
                "reference_tokens": 6_021_120,
                "evaluation_cadence": "every 5 %",
            },
            "method": {"code_commit": "0" * 40, "script_sha256": HASH},
            "conditions": registration.minimum_conditions(LIVE),
            "on_failure": "the micro law does not extrapolate to d96; add a rung",
        }
        return build_body(forecast, **(arguments | changes))

    return build


@pytest.fixture(scope="module")
def body(make):
    return make()


def test_published_digests():
    """The canonical form and the id rule of the record, by their own example."""
    example = {"a": "1.5", "b": ["x", "y"]}
    assert digest(example) == "41d688a2ca7df989aa59b118a0735f6b9a6cf8e45b37bcea8071c5e320700ff8"
    line = {"body": example, "supersedes": [], "type": "forecast"}
    assert digest(line) == "30d8664c97ed60ef5a0a08a356fe2607a199744d80804e396ec24a79b801f763"


def test_body_is_complete_and_canonical(body, forecast):
    assert set(registration.MANDATORY_FIELDS) <= set(body)
    assert parse(canonical(body)) == body
    row = body["quantiles"][MACRO]["1.00"]
    assert float(row["0.5"]) == pytest.approx(forecast.metrics[MACRO].median, abs=1e-6)
    assert body["metric"]["name"] == MACRO
    assert body["target"]["steps"] == 735
    assert body["target"]["axis"] == "training FLOPs without the output head"
    assert set(body["baseline"]) == {"metric", "F0", "A", "alpha", "E"}
    assert [band["name"] for band in body["bands"]] == ["green", "normal", "amber", "red"]
    assert body["known_before"] == {"count": 0, "completed": 0, "retrospective": False}
    assert len(body["inputs"]) == 5


def test_the_journal_accepts_the_body(body):
    assert types.Forecast.model_validate(body).to_json() == body


def test_order_of_keys_does_not_change_the_digest_but_any_value_does(body):
    shuffled = dict(reversed(list(body.items())))
    assert digest(shuffled) == digest(body)
    seen = {digest(body)}
    for name in registration.MANDATORY_FIELDS:
        changed = copy.deepcopy(body)
        changed[name] = "changed"
        seen.add(digest(changed))
    assert len(seen) == len(registration.MANDATORY_FIELDS) + 1


@pytest.mark.parametrize("name", registration.MANDATORY_FIELDS)
def test_a_missing_field_is_refused(body, name):
    with pytest.raises(UsageError, match=name):
        validate_body({key: value for key, value in body.items() if key != name})
    if name != "changes":
        with pytest.raises(UsageError, match=name):
            validate_body(body | {name: type(body[name])()})


def test_incomplete_quantiles_are_refused(body):
    for damage in (
        lambda q: q[MACRO].pop("1.00"),
        lambda q: q[MACRO]["0.50"].pop("0.5"),
        lambda q: q[MACRO]["0.50"].update({"0.5": "99.0"}),
        lambda q: q.pop(MACRO) and q.update({"other": {}}),
    ):
        broken = copy.deepcopy(body)
        damage(broken["quantiles"])
        with pytest.raises(UsageError):
            validate_body(broken)


def test_incomplete_conditions_bands_and_floats_are_refused(body):
    with pytest.raises(UsageError, match="transport"):
        validate_body(
            body | {"conditions": [c for c in body["conditions"] if c["field"] != "transport"]}
        )
    wrong = [*body["conditions"], {"field": "steps", "op": "~", "value": 1}]
    with pytest.raises(UsageError, match="op"):
        validate_body(body | {"conditions": wrong})
    with pytest.raises(UsageError, match="bands"):
        validate_body(body | {"bands": body["bands"][:2]})
    with pytest.raises(PortolanError, match="decimal string"):
        validate_body(body | {"recipe": {"rate": 0.1}})
    for part, names in registration.PARTS.items():
        for name in names:
            less = {key: value for key, value in body[part].items() if key != name}
            with pytest.raises(UsageError, match=name):
                validate_body(body | {part: less})
    for name in registration.INPUT_FIELDS:
        less = [{k: v for k, v in entry.items() if k != name} for entry in body["inputs"]]
        with pytest.raises(UsageError, match=name):
            validate_body(body | {"inputs": less})
    silent = [dict(band, consequence="") for band in body["bands"]]
    with pytest.raises(UsageError, match="consequence"):
        validate_body(body | {"bands": silent})
    with pytest.raises(UsageError, match="optimizer"):
        registration.minimum_conditions(LIVE | {"optimizer": ""})


def test_a_forecast_made_after_an_evaluation_says_so(make, body):
    late = make(evaluations_seen=[37, 74])
    assert late["known_before"] == {"count": 2, "completed": 74, "retrospective": True}
    hidden = {"count": 2, "completed": 74, "retrospective": False}
    with pytest.raises(UsageError, match="known_before"):
        validate_body(body | {"known_before": hidden})


def test_an_evaluation_before_the_first_mark_is_known_but_not_forecast(make):
    early = make(evaluations_seen=[1])
    assert early["known_before"] == {"count": 1, "completed": 1, "retrospective": False}


def test_expiry_is_a_step_or_a_time(make, body):
    assert body["expiry"] == "after 735 completed updates"
    assert registration.is_expired(body["expiry"], 736)
    assert not registration.is_expired(body["expiry"], 735)
    dated = make(expiry="until 2026-06-01T00:00:00.000Z")["expiry"]
    assert registration.is_expired(dated, 1, "2026-06-01T00:00:00.001Z")
    assert not registration.is_expired(dated, 9999, "2026-06-01T00:00:00.000Z")
    assert not registration.is_expired(dated, 9999)
    with pytest.raises(UsageError, match="expiry"):
        make(expiry="some day")


def test_a_previous_law_stands_among_the_baselines(make):
    stated = make(previous_law={"name": "May", "value": 2.0451})
    assert stated["baseline"]["B1"] == {"name": "May", "value": "2.0451"}


def test_an_amendment_needs_a_reason(make):
    change = "change:" + HASH
    with pytest.raises(UsageError, match="reason"):
        make(changes=[change])
    amended = make(changes=[change], reason="the context length changed")
    assert amended["reason"] == "the context length changed"


@pytest.mark.parametrize("field", registration.CONDITION_FIELDS)
def test_gate_on_each_minimum_field(body, field):
    conditions = body["conditions"]
    assert applicability(conditions, LIVE) == "match"
    other = LIVE[field] + 1 if isinstance(LIVE[field], int) else "other"
    assert applicability(conditions, LIVE | {field: other}) == "mismatch"
    assert registration.failed_conditions(conditions, LIVE | {field: other}) == [field]
    assert applicability(conditions, LIVE | {field: None}) == "unverified"
    assert applicability(conditions, {k: v for k, v in LIVE.items() if k != field}) == "unverified"


def test_a_known_violation_outweighs_an_unknown_field(body):
    live = LIVE | {"steps": 736, "transport": None}
    assert applicability(body["conditions"], live) == "mismatch"


@pytest.mark.parametrize(
    ("op", "value", "actual", "result"),
    [
        ("<=", 735, 735, "match"),
        ("<=", 735, 736, "mismatch"),
        ("<", "0.5", 0.4, "match"),
        (">=", "0.5", 0.4, "mismatch"),
        (">", 5, 10, "match"),
        ("==", "0.95", 0.95, "match"),
        ("==", 5, "5.0", "match"),
        ("==", True, 1, "mismatch"),
        ("!=", "grouped", "ragged", "match"),
        ("in", ["grouped", "ragged"], "ragged", "match"),
        ("in", ["grouped", "ragged"], "pooled", "mismatch"),
        ("<=", "2026-06-01T00:00:00.000Z", "2026-05-31T23:59:59.000Z", "match"),
        ("<=", "2026-06-01T00:00:00.000Z", "2026-06-02T00:00:00.000Z", "mismatch"),
    ],
)
def test_operators(op, value, actual, result):
    assert applicability([{"field": "x", "op": op, "value": value}], {"x": actual}) == result
