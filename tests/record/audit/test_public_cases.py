"""X1 to X19: every public case yields its verdict and its arithmetic, and a small second audit."""

from pathlib import Path

import pytest

from portolan.record.audit.folder import read_audit
from portolan.record.audit.reconciliation import Reconciliation, reconcile_folder

EXAMPLES = Path(__file__).parents[3] / "examples"

ROUNDED, BASIS, TIME = "agree within rounding", "explained by basis", "explained by time"
CASES = {
    "X1": (ROUNDED, BASIS, "conflict"),
    "X2": ("conflict",),
    "X3": (BASIS,),
    "X4": (BASIS, "unsupported"),
    "X5": (BASIS, f"{BASIS} (inferred)"),
    "X6": (BASIS,),
    "X7": ("superseded",),
    "X8": ("conflict",),
    "X9": ("pending", "pending", BASIS),
    "X10": (TIME,) * 4,
    "X11": (TIME, TIME, f"{TIME} (inferred)", TIME),
    "X12": ("agree", ROUNDED, BASIS),
    "X13": ("conflict", "agree", "conflict"),
    "X14": ("conflict",),
    "X15": ("unsupported",) * 3,
    "X16": ("superseded", "superseded", BASIS),
    "X17": (ROUNDED,) * 3,
    "X18": ("conflict", "conflict", "agree"),
    "X19": ("pending",),
}
VARIANTS = {"X2": ("superseded (inferred)",), "X15": (f"{BASIS} (inferred)",) * 3}
ARITHMETIC = {
    "X1": ("= 18,005,144,633,344", "= 18,750,000,000,000", "= 0.8", "= 406,395.3 steps"),
    "X2": ("= 390,139\n", "= 390,139.493", "= 390,251\n", "= 390,250.636", "= 112, both are exact"),
    "X3": ("11 × 72 = 792", "176 × 4 = 704", "= 2.512e15", "= 2.233e15", "= 6.9186e18"),
    "X4": ("= 2.459e24", "= 2.696e24", "= 1.4996e11", "= 2.81e24", "= 3.6e24", "= 1.85"),
    "X5": ("= 55.08619", "= 55.07045", "= 9,915,515,011,072", "= 9,915,561,148,416"),
    "X7": ("|83,306 − 83,305| = 1,",),
    "X8": ("3 of 4 rungs at 100 %; d2048 at 8.1e1 %",),
    "X9": ("2.577 − 2.361 = 0.216",),
    "X12": ("= 23,106,000,000,000", "= 4,000,000,000 ≤ 5,000,000,000", "= 96,000,000,000"),
    "X17": ("2,487,808 ≤ 5,000,000", "37,512,192 ≤ 50,000,000", "237,512,192 ≤ 500,000,000"),
    "X19": ("= 66.4 days", "= 83.6 days", "= 86.4 days"),
}
REASONS = {
    "X9": ("void from step 0: the data mixture", "R1 refuses the difference of paloma.macro"),
    "X18": ("failed, disputed: error_evidence, no_success_mark",),
    "X4": ("states no basis, and none of the registry gives 5e24",),
    "X15": ("a launched figure alone does not document policy.run",),
}


@pytest.fixture(scope="module")
def marin() -> Reconciliation:
    return reconcile_folder(EXAMPLES / "marin-535b-audit")


@pytest.mark.parametrize("case", CASES)
def test_verdict_explanation_and_arithmetic(marin, case):
    (result,) = (found for found in marin.cases if found.id == case)
    assert tuple(finding.label for finding in result.findings) == CASES[case]
    variants = tuple(finding.label for v in result.variants for finding in v.findings)
    assert variants == VARIANTS.get(case, ())
    lines = [*result.arithmetic, *(line for f in result.findings for line in f.arithmetic)]
    text = "\n".join(lines) + "\n"
    for part in ARITHMETIC.get(case, ()):
        assert part in text, text
    reasons = " ".join(finding.reason for finding in result.findings)
    for part in REASONS.get(case, ()):
        assert part in reasons


def test_every_claim_is_used_and_the_worst_verdict_is_the_exit_code(marin):
    assert [case.id for case in marin.cases] == list(CASES)
    claims = {figure.id for figure in read_audit(EXAMPLES / "marin-535b-audit").figures}
    assert {figure.id for case in marin.cases for figure in case.figures} >= claims
    assert marin.exit_code == 1 and len(marin.open_conflicts) == 8


def test_cross_checks_hold_and_the_utilisation_refuses_to_decide(marin):
    outcomes = {check.name: check for check in marin.checks}
    refused = outcomes["MFU x peak x devices x step time = FLOPs of a step"]
    assert refused.outcome == "refused"
    assert "792 devices fit 2.25e15" in refused.reason
    assert "704 devices fit 2.5e15" in refused.reason
    words = [check.outcome for check in marin.checks if check is not refused]
    assert sorted(words) == ["holds"] * 6 + ["no data"] * 3
    text = " ".join(line for check in marin.checks for line in check.arithmetic)
    for part in ("3,572,819 / 4,112,940 = 86.9 %", "9.8 % above 6 A", "24,501 + 68,775 = 214,914"):
        assert part in text
    assert marin.lineage is not None and len(marin.lineage.excluded) == 2
    assert {series.completeness for series in marin.series} == {
        "sampled 11 of 114557", "sampled 14 of 183511",
    }  # fmt: skip


def test_shares_of_a_published_table():
    result = reconcile_folder(EXAMPLES / "llama3-interruptions")
    assert [f.label for f in result.findings] == ["conflict", ROUNDED, ROUNDED]
    assert [c.arithmetic[0].rpartition(" = ")[2] for c in result.cases] == [
        "35.3 %", "17.2 %", "8.35 %",
    ]  # fmt: skip
    assert result.exit_code == 1


def test_a_recorded_peak_lets_the_utilisation_decide(tmp_path):
    """The same figures with a source for the peak: the identity holds, and `mfu.run` follows."""
    for path in (EXAMPLES / "marin-535b-audit").iterdir():
        text = path.read_text()
        lines = [
            line.replace("unknown,not_stated", "unknown,a data sheet")
            if line.startswith("X3-10,")
            else line
            for line in text.splitlines(keepends=True)
        ]
        (tmp_path / path.name).write_text("".join(lines))
    checks = {check.name: check for check in reconcile_folder(tmp_path).checks}
    assert checks["MFU x peak x devices x step time = FLOPs of a step"].outcome == "holds"
    run = checks["utilisation of the run, weighted by time"]
    assert run.outcome == "holds" and run.arithmetic[0].endswith("= 23.65 %")
