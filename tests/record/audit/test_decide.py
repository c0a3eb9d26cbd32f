"""The decision order on figures made for it, and the cells of a table that must be refused."""

import dataclasses
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.errors import UsageError
from portolan.record.audit.crosschecks import time_weighted_utilisation
from portolan.record.audit.decide import Decider
from portolan.record.audit.expressions import evaluate, show
from portolan.record.audit.figures import Figure, read_claims
from portolan.record.audit.folder import read_audit
from portolan.record.audit.formulas import Index
from portolan.record.audit.links import Link, Links
from portolan.record.audit.reconciliation import reconcile_folder
from portolan.record.audit.telemetry import read_telemetry
from portolan.record.verdicts import EXIT_CODES, VERDICTS, exit_code, worst

T = 11_264 * 4_096


def figure(identity, value, basis="steps.planned", unit="steps", layer="claimed", **fields):
    fields = {"source": "somewhere", "case": "c", **fields}
    return Figure(identity, identity, value, unit, basis, layer, **fields)


def decide(a, b, *others, links=(), reached=None, **fields):
    figures = [a, *([b] if b else []), *others]
    shared = frozenset(item.id for item in figures)
    decider = Decider(Index(figures, shared), Links(tuple(links)), reached, **fields)
    finding = decider.compare(a, b) if b else decider.examine(a)
    return finding.label


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [
        ("23.106e12", "23.11e12", True),
        ("22.76e9", "22762487808", True),
        ("23e9", "22762487808", True),
        ("22.8e9", "22762487808", True),
        ("18", "18.6", False),
        ("18.0", "18.04", True),
        ("0.0076", "0.00764", True),
        ("0.0", "0.04", True),
        ("390139", "390251", False),
        ("-1.5", "1.5", False),
    ],
)
def test_rounding_rule(first, second, agree):
    label = decide(figure("a", first), figure("b", second))
    assert label == ("agree within rounding" if agree else "conflict")


@given(st.decimals("1", "9e20", allow_nan=False, places=3), st.integers(1, 6))
def test_a_rounded_number_agrees_with_itself(value, digits):
    """Whatever a number is, its own rounding to k digits agrees with it by R2."""
    rounded = f"{value:.{digits - 1}e}".replace("e+", "e")
    label = decide(figure("a", rounded), figure("b", str(value)))
    assert label in ("agree", "agree within rounding")


def test_order_of_the_decision():
    a, b = figure("a", "390139"), figure("b", "390251", layer="launched")
    assert decide(a, dataclasses.replace(b, source="not_stated")) == "unsupported"
    assert decide(a, b, unreachable=frozenset({"somewhere"})) == "unreachable"
    later = dataclasses.replace(a, due=500)
    assert decide(later, b) == decide(later, b, reached=499) == "pending"
    assert decide(later, b, reached=500) == "conflict"
    own = Link("change", ("a", "b"), "run", "changed")
    assert decide(a, b, links=[own]) == "superseded"
    assert decide(a, b, links=[dataclasses.replace(own, recorder="auditor")]) == (
        "superseded (inferred)"
    )
    published = Link("published", ("b",), "run", "we know")
    assert decide(a, b, links=[published]) == "conflict (published)"
    first, second = (dataclasses.replace(f, scope=f"segment:{f.id}") for f in (a, b))
    assert decide(first, second) == "explained by time"
    assert decide(dataclasses.replace(a, scope="plan"), b) == "conflict"
    rows = (dataclasses.replace(a, as_of=1), dataclasses.replace(b, as_of=2))
    assert decide(*rows) == "explained by time"


def test_different_bases():
    batch = figure("B", "11264", "batch.sequences", "sequences/step", "launched")
    length = figure("S", "4096", "seq.tokens", "tokens", "launched")
    steps = figure("N", "390251", layer="launched")
    planned = figure("p", "18e12", "tokens.planned", "tokens")
    wrong = dataclasses.replace(planned, value="19e12")
    share = figure("q", "50.0", "progress.steps(780502)", "%", "claimed")
    row = figure("r", "390251", "step.row", "row", "observed")
    known = (batch, length, steps, row)
    assert decide(planned, share, *known) == "explained by basis (inferred)"
    stated = Link("definition", ("p", "q"), "run", "both are defined")
    assert decide(planned, share, *known, links=[stated]) == "explained by basis"
    assert decide(wrong, share, *known) == "conflict"
    pool = figure("x", "5", "retries.task", "retries", "claimed")
    assert decide(planned, pool, *known) == "unsupported"
    assert decide(pool, None) == "unsupported"
    assert decide(planned, None, *known) == "agree"
    tokens = str(390_251 * T)
    exact = dataclasses.replace(planned, value=tokens)
    assert decide(exact, None, *known) == "agree"
    nothing = figure("n", "7", "not_stated", "tokens")
    assert decide(nothing, None, *known) == "unsupported"
    fitting = dataclasses.replace(nothing, value=tokens)
    assert decide(fitting, None, *known) == "explained by basis (inferred)"


def test_other_subjects_are_never_compared_by_value():
    other = figure("b", "20072", scope="lineage:d2048", layer="launched")
    assert decide(figure("a", "390251", layer="launched"), other) == "explained by basis (inferred)"


def test_sampled_series_say_nothing_about_extremes(write_claims):
    rows = [f"mfu,mfu.segment@one-row,row,{n},{20 + n},%,tracker" for n in range(4)]
    head = "series,basis,clock,n,value,unit,public_source\n"
    claims = [
        "A-1,highest MFU,23,%,mfu.segment@one-row,claimed,owner,unknown,readme,,,",
        "B-1,MFU of the third row,22,%,mfu.segment@one-row,claimed,owner,unknown,readme,,row:2,",
        "C-1,MFU never fell below,21,%,mfu.segment@one-row,claimed,owner,unknown,readme,,,",
    ]
    full = reconcile_folder(write_claims(*claims, telemetry_csv=head + "\n".join(rows)))
    assert [f.label for f in full.findings] == [
        "agree within rounding", "agree within rounding", "conflict",
    ]  # fmt: skip
    del rows[1]
    part = reconcile_folder(write_claims(*claims, telemetry_csv=head + "\n".join(rows)))
    assert [(f.verdict, f.rule) for f in part.findings] == [
        ("unsupported", "R8"), ("agree_within_rounding", "R2"), ("unsupported", "R8"),
    ]  # fmt: skip
    assert part.series[0].completeness == "sampled 3 of 4"
    assert part.exit_code == 9


def test_a_bare_table_is_enough(write_claims):
    folder = write_claims(
        "T-1,batch,32,sequences/step,batch.sequences,launched,config,unknown,run.json,,,",
        "T-2,length,128,tokens,seq.tokens,launched,config,unknown,run.json,,,",
        "T-3,steps,588,steps,steps.planned,launched,config,unknown,run.json,,,",
        "T-4,tokens,2.4e6,tokens,tokens.planned,claimed,readme,unknown,README.md,,,",
        "U-1,tokens,3e6,tokens,tokens.nominal,claimed,readme,unknown,README.md,,,",
    )
    result = reconcile_folder(folder)
    labels = {(f.left, f.right): f.verdict for f in result.findings}
    assert labels["T-4", "=tokens.planned"] == "agree_within_rounding"
    assert labels["U-1", ""] == "conflict"
    assert result.exit_code == 1 and result.to_json()["counts"]["conflict"] == 1


def test_stitched_telemetry_is_never_full(tmp_path):
    path = tmp_path / "t.csv"
    rows = "".join(f"loss,ce.train.nats,row,{n},{9 - n}.5,nats\n" for n in (0, 1, 2, 1, 2, 3))
    path.write_text("series,basis,clock,n,value,unit\n" + rows)
    (series,) = read_telemetry([path], frozenset({4}))
    assert (series.completeness, series.last, series.points) == (
        "truncated",
        4,
        {4: Decimal("6.5")},
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("A,x,1,u,steps.guessed,claimed,o,d,s,,,", "not in the registry"),
        ("A,x,1,u,mfu.segment@,claimed,o,d,s,,,", "lacks its qualifier"),
        ("A,x,1.0e+5,u,racks,claimed,o,d,s,,,", "not a decimal number"),
        ("A,x,NaN,u,racks,claimed,o,d,s,,,", "not a decimal number"),
        ("A,x,1e999,u,racks,claimed,o,d,s,,,", "not a decimal number"),
        ("A,x,2026-01-01,time,time.wall,claimed,o,d,s,,,", "is not of the form"),
        ("A,x,1,u,racks,rumoured,o,d,s,,,", "not one of claimed"),
        ("A,x,1,,racks,claimed,o,d,s,,,", "unit is missing"),
        ("A,x,1,u,racks,claimed,o,d,s,,,tomorrow", "due is 'tomorrow'"),
        ("A,x,1,u,racks,claimed,o,d,s,,,\nA,x,1,u,racks,claimed,o,d,s,,,", "repeated"),
        ('A,"x,1,u,racks,claimed,o,d,s,,,', "cannot be read"),
    ],
)
def test_wrong_cells_are_named(write_claims, row, message):
    with pytest.raises(UsageError, match=message):
        reconcile_folder(write_claims(row))


GOOD = "A-1,x,1,u,racks,launched,o,d,s,,,"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("title = 1", "title: Input should be a valid string"),
        ("nothing", "is not TOML"),
        ("[" * 5000, "is not TOML"),
        ('title = "t"\nsecret = 1', "secret: Extra inputs"),
        ('title = "t"\nclaims = "../claims.csv"', "not the name of a file"),
        ('title = "t"\ntelemetry = ["/etc/passwd"]', "not the name of a file"),
        ('title = "t"\nshared = ["B-1"]', "shared names B-1"),
        ('title = "t"\n[[case]]\nid = "A"\ntitle = "t"\ncompare = ["A-1 ~ B"]', "names B"),
        (
            'title = "t"\n[[case]]\nid = "A"\ntitle = "t"\ncompare = ["=params.active"]',
            "no formula",
        ),
        (
            'title = "t"\n[[case]]\nid = "A"\ntitle = "t"\n'
            'sums = [{text = "x", expression = "__import__(1)"}]',
            "is not an expression",
        ),
    ],
)
def test_wrong_audit_files_are_named(write_claims, content, message):
    with pytest.raises(UsageError, match=message):
        reconcile_folder(write_claims(GOOD, audit_toml=content))


def test_claims_as_json_and_no_claims_at_all(tmp_path):
    with pytest.raises(UsageError, match="holds no table of claims"):
        read_audit(tmp_path)
    path = tmp_path / "claims.json"
    names = ("id", "quantity", "unit", "basis", "layer", "stated_by", "date", "public_source")
    cells = ",".join(f'"{name}": "racks"' for name in names).replace(
        '"layer": "racks"', '"layer": "launched"'
    )
    path.write_text("[{" + cells + ', "value": 11}]')
    assert read_claims(path)[0].number == 11
    for content in ("{}", "[1]", "[" * 100_000, '[{"value": NaN}]'):
        path.write_text(content)
        with pytest.raises(UsageError):
            read_claims(path)


@pytest.mark.parametrize(
    "expression", ["1 / 0", "2 ** 9", "{x}", "a", "1 if 1 else 2", "floor(1, 2)", "'a'", "1" * 501]
)
def test_expressions_that_are_refused(expression):
    with pytest.raises(UsageError):
        evaluate(expression, {})


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_expressions_follow_decimal_arithmetic(a, b):
    values = {"a": Decimal(a), "b": Decimal(b)}
    assert evaluate("floor({a} / {b})", values) == a // b
    assert evaluate("-({a} - {b}) * 2 + abs({a})", values) == -(a - b) * 2 + abs(a)
    assert show(Decimal(a)) == f"{a:,}"


def test_utilisation_of_the_run_is_not_the_mean_of_its_stages():
    """The golden stage figures of the public run: 23.65 % by time, 23.87 % as a plain mean."""
    stages = [(81_716, Decimal("18.5")), (64_423, Decimal("16.3")), (68_774, Decimal("14.7"))]
    flops, peak = Decimal("2.7e24") / 390_251, Decimal("2.5e15")
    run = time_weighted_utilisation(stages, flops, 704, peak)
    each = [flops / (704 * peak * seconds) for _, seconds in stages]
    mean = sum(count * share for (count, _), share in zip(stages, each, strict=True)) / 214_913
    assert [round(100 * share, 2) for share in (*each, run, mean)] == [
        Decimal(text) for text in ("21.25", "24.12", "26.74", "23.65", "23.87")
    ]


def test_words_and_exit_codes():
    assert worst(["agree", "pending", "superseded"]) == "pending" and worst([]) == "agree"
    assert [exit_code([verdict]) for verdict in VERDICTS] == [0, 0, 0, 0, 0, 8, 9, 9, 1]
    assert set(EXIT_CODES) == set(VERDICTS)
