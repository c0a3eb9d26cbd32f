"""A project folder made of formulas, at every stage: deterministic and quick.

Losses follow L(C, f) = E + A C^-alpha f^-beta with small waves; all names are those that a real
project writes.
"""

import hashlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist

from portolan.accounting import active_parameters, training_flops
from portolan.canonical import stringify_floats
from portolan.record.journal import Journal
from portolan.scaling.interval import LEVEL_LABELS, LEVELS
from portolan.scaling.score import score_run
from portolan.shapes import ModelConfig, derive_shape
from portolan.track.tracker import Tracker

MADE_AT = datetime(2026, 3, 1, 10, tzinfo=UTC)
STAGES = ("empty", "corpus", "ladder", "registered", "running", "finished")
MARKS = tuple(range(1, 21))
DOMAINS = ("stdlib-sources", "stdlib-tests", "package-readmes", "package-licences", "manual-topics")
MACRO = "eval_dropless/heldout/macro_loss"
SCRIPT = "<script>window.hacked=1</script>"
ASYMPTOTE, EXPONENT = 1.6, 0.08
SCALE = 2.2 * 2.8e11**EXPONENT
BYTES_PER_TOKEN = 3.1
LEAVES = (
    ("embed/table", False), ("blocks/moe/router", False), ("blocks/attn/head_gate", False),
    ("blocks/attn_norm/gain", False), ("blocks/attn_conv/taps", False), ("head/proj", True),
    ("blocks/attn/wq", True), ("blocks/attn/wo", True), ("blocks/moe/experts/gate", True),
    ("blocks/moe/experts/down", True), ("blocks/moe/latent_down", True),
    ("blocks/shared/0/gate", True), ("embed_gnorm/down", True),
)  # fmt: skip


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def law(flops: float, share: float = 1.0) -> float:
    return ASYMPTOTE + SCALE * flops**-EXPONENT * share**-0.09


class SampleRun:
    """One run of the sample: its shape, its plan and its formulas."""

    def __init__(self, width: int, seed: int, role: str, steps: int, batch: int) -> None:
        self.width, self.seed, self.role, self.steps = width, seed, role, steps
        self.config: ModelConfig = derive_shape("micro", width)
        self.id = f"{role}-d{width}-s{seed}"
        self.tokens_per_step = batch * self.config.sequence_length
        self.tokens = steps * self.tokens_per_step
        self.flops = float(training_flops(self.config, self.tokens, "no_head"))

    def loss(self, share: float) -> float:
        wave = 0.004 * math.sin(9 * share + self.width + 3 * self.seed)
        return law(self.flops, share) + wave

    def facts(self) -> dict:
        model = {name: getattr(self.config, name) for name in ModelConfig.__dataclass_fields__}
        return stringify_floats(
            {
                "id": self.id,
                "role": self.role,
                "width": self.width,
                "seed": self.seed,
                "model": model,
                "plan": {
                    "steps": self.steps,
                    "tokens": self.tokens,
                    "tokens_per_step": self.tokens_per_step,
                    "active_params": active_parameters(self.config),
                    "flops_no_head": self.flops,
                    "lr_capped": False,
                },
                "recipe_digest": digest("recipe"),
                "data": {"store": digest("store")},
            }
        )

    def log_metrics(self, folder: Path, completed: int) -> None:
        evaluations = {max(1, round(k * self.steps / 20)) - 1: k / 20 for k in MARKS}
        with Tracker(folder, 1, 0, clock=lambda: MADE_AT) as tracker:
            for row in range(completed):
                values = dict(self._row(row))
                if row in evaluations:
                    values |= dict(self._evaluation(evaluations[row]))
                tracker.log(row, values)

    def _row(self, row: int) -> list[tuple[str, float]]:
        share = (row + 1) / self.steps
        start = 6.2 * math.exp(-row / (0.012 * self.steps))
        ce = self.loss(max(share, 0.01)) + start * 0.5 + 0.03 * math.sin(row * 1.7)
        rate = 0.0221 * min(1.0, (row + 1) / (0.01 * self.steps)) * (1 - 0.95 * share)
        values = [
            ("train/cross_entropy", ce),
            ("train/loss", ce + 0.004),
            ("rate/hyperball", rate),
            ("rate/adam", rate * 3 / 13),
            ("throughput/step_seconds", 0.3 + 0.02 * math.sin(row)),
        ]
        if row % 10 == 0:
            values += self._norms(share) + self._router(share)
        return values

    def _norms(self, share: float) -> list[tuple[str, float]]:
        values, total = [], 0.0
        for index, (leaf, held) in enumerate(LEAVES):
            gradient = (0.9 * math.exp(-share * 12) + 0.05 + 0.3 * share * (1 - share)) / (
                1 + index
            )
            total += gradient**2
            size = 20 + 3 * index
            values.append((f"norm/gradient/{leaf}", gradient))
            growth = (
                1 + 1e-6 * math.sin(share * 40) if held else 1 + 0.4 * share ** (0.5 + index / 9)
            )
            values.append((f"norm/parameters/{leaf}", size * growth))
            if held:
                values.append((f"norm/drift/{leaf}", 1e-7))
        return [*values, ("norm/gradient/global", math.sqrt(total))]

    def _router(self, share: float) -> list[tuple[str, float]]:
        values = []
        top = math.log(self.config.num_experts)
        for layer in range(self.config.num_layers):
            load = (
                1.08
                + 0.06 * layer
                + 3 * math.exp(-share * 60)
                + 0.04 * math.sin(90 * share + layer)
            )
            values.append((f"router/load_max_over_mean/{layer}", load))
            values.append(
                (f"router/entropy/{layer}", top - 0.004 * (layer + 1) - 0.3 * math.exp(-share * 50))
            )
            values.append((f"router/drop_fraction/{layer}", 0.0))
        return values

    def _evaluation(self, share: float) -> list[tuple[str, float]]:
        macro, values, total = self.loss(share), [], 0.0
        for index, domain in enumerate(DOMAINS):
            value = macro + 0.35 * (index - 2) * (1 - 0.2 * share)
            total += value
            prefix = f"eval_dropless/heldout/{domain}"
            values.append((f"{prefix}/loss", value))
            values.append((f"{prefix}/bpb", value / math.log(2) / (BYTES_PER_TOKEN + 0.2 * index)))
        bits = macro / math.log(2) / BYTES_PER_TOKEN
        return [*values, (MACRO, total / len(DOMAINS)),
                ("eval_dropless/heldout/micro_loss", macro - 0.05),
                ("eval_dropless/heldout/macro_bpb", bits),
                ("eval_dropless/heldout/micro_bpb", bits - 0.02)]  # fmt: skip


RUNGS = tuple(
    SampleRun(width, seed, "rung", steps, batch)
    for width, seed, steps, batch in (
        (32, 0, 200, 16),
        (32, 1, 200, 16),
        (48, 0, 240, 32),
        (64, 0, 300, 32),
    )
)
TARGET = SampleRun(192, 0, "target", 600, 128)


def forecast_body() -> dict:
    def row(centre: float) -> dict:
        return {
            label: f"{centre + 0.012 * NormalDist().inv_cdf(level):.6f}"
            for label, level in zip(LEVEL_LABELS, LEVELS, strict=True)
        }

    offsets = {MACRO: 0.0} | {
        f"eval_dropless/heldout/{domain}/loss": 0.35 * (index - 2) * 0.8
        for index, domain in enumerate(DOMAINS)
    }
    centres = {k: law(TARGET.flops, k / 20) - 0.006 for k in MARKS}
    return {
        "title": "Final held-out loss of the target",
        "author": "A. Tester",
        "made_at": "2026-03-01T10:20:00.000Z",
        "metric": {"name": MACRO, "unit": "nats/token"},
        "target": {"lineage": TARGET.id, "steps": TARGET.steps, "flops": int(TARGET.flops),
                   "axis": "training FLOPs without the output head"},
        "method": {"name": "interval forecaster F1"},
        "quantiles": {
            name: {f"{k / 20:.2f}": row(centres[k] + offset) for k in MARKS}
            for name, offset in offsets.items()
        },
        "baseline": {"F0": {f"{k / 20:.2f}": f"{centres[k] + 0.004:.6f}" for k in MARKS},
                     "A": str(SCALE), "alpha": str(EXPONENT), "E": str(ASYMPTOTE)},
        "conditions": [{"field": "steps", "op": "==", "value": TARGET.steps}],
        "known_before": {"count": 0, "completed": 0, "retrospective": False},
        "on_failure": "the recipe is not scaled further before the cause is found",
    }  # fmt: skip


def corpus_summary() -> dict:
    licences = ("PSF-2.0", "PSF-2.0", "various", "various", "PSF-2.0")
    return {
        "sources": [
            {
                "key": key,
                "category": "code" if "tests" in key or "sources" in key else "prose",
                "license_spdx": licence,
                "license_class": "permissive",
                "documents": 812 + 97 * index,
                "bytes": 9_400_000 - 1_300_000 * index,
                "tokens": 3_030_000 - 410_000 * index,
                "heldout_documents": 40 + index,
                "heldout_tokens": 121_000 - 9_000 * index,
                "dropped": {"exact_duplicate": 31 * index, "too_short": 12 + index},
                "epochs": 1.31 + 0.2 * index,
            }
            for index, (key, licence) in enumerate(zip(DOMAINS, licences, strict=True))
        ],
        "tokenizer": {"vocab_size": 4096, "digest": digest("tokenizer"), "bos": "<|begin|>",
                      "eos": "<|end|>", "bytes_per_token": BYTES_PER_TOKEN},
        "store": {"digest": digest("store"), "tokens": 11_050_000, "documents": 5_030},
        "unigram_cross_entropy": {"macro": 6.3121, "micro": 6.2904},
    }  # fmt: skip


def _write_run(root: Path, run: SampleRun, completed: int) -> None:
    folder = root / "runs" / run.id
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run.facts()))
    if completed:
        run.log_metrics(folder, completed)
        (folder / "attempt-1.json").write_text("{}")


def _write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, sort_keys=True))


def build_sample(root: Path, stage: str, *, name: str = "Harbour pilot") -> Path:
    """Write a project folder that stands at a stage of STAGES; returns it."""
    reached = STAGES.index(stage)
    root.mkdir(parents=True)
    if reached == 0:
        return root
    journal = Journal.create(root / "record", name, time=moment(0), schema=False)
    _write_json(root / "corpus" / "summary.json", corpus_summary())
    journal.append("artifact", {"kind": "dataset", "text": "token store"}, time=moment(1))
    if reached >= 2:
        for index, run in enumerate(RUNGS):
            half = stage == "ladder" and index >= 2
            completed = run.steps if not half else (run.steps // 2 if index == 2 else 0)
            _write_run(root, run, completed)
            _write_attempt(journal, run, index + 2)
    if reached >= 3:
        body = forecast_body()
        identity = journal.append("forecast", body, time=moment(10))
        path = root / "forecasts" / f"{identity.partition(':')[2][:16]}.json"
        _write_json(path, body | {"id": identity})
        run = {"name": TARGET.id, "lineage": "sample", "text": "The target"}
        journal.append("run", run, time=moment(11))
        registration = {
            "text": "Plan and forecast are sealed",
            "lineage": "sample",
            "forecasts": [identity],
        }
        journal.append("registration", registration, time=moment(12))
        completed = {"registered": 0, "running": TARGET.steps // 2}.get(stage, TARGET.steps)
        _write_run(root, TARGET, completed)
    if reached >= 4:
        _write_attempt(journal, TARGET, 20)
    if reached >= 5:
        decision = {"kind": "decision", "text": "The target is finished"}
        journal.append("event", decision, time=moment(30))
        marks = {f"{k / 20:.2f}": TARGET.loss(k / 20) for k in MARKS}
        score = stringify_floats(score_run(forecast_body(), marks))
        _write_json(root / "runs" / TARGET.id / "score.json", score)
    journal.sign_head()
    return root


def _write_attempt(journal: Journal, run: SampleRun, minute: int) -> None:
    body = {"run": run.id, "ordinal": 1, "text": f"attempt 1 at {run.id} starts"}
    journal.append("attempt", body, time=moment(minute))


def moment(minute: int) -> str:
    return f"2026-03-01T10:{minute:02d}:00.000Z"
