"""Bodies and journals that the tests of the record share."""

from pathlib import Path
from typing import Any

import pytest

from portolan.record.journal import Journal
from portolan.record.quantities import plan_quantity
from portolan.record.signing import SigningKey

HASH = "ab" * 32


@pytest.fixture
def bodies() -> dict[str, dict[str, Any]]:
    """One complete body of several types, by type."""
    plan = {
        "tokens": plan_quantity(6_553_600, "tokens", "tokens.planned"),
        "steps": plan_quantity(400, "steps", "steps.planned"),
        "batch": plan_quantity(64, "sequences", "batch.sequences"),
        "sequence": plan_quantity(256, "tokens", "seq.tokens"),
        "devices": plan_quantity(1, "devices", "devices.mesh"),
        "flops": plan_quantity(1.5e15, "FLOP", "flops.model.fwd_bwd"),
    }
    return {
        "registration": {
            "text": "the pocket run",
            "lineage": "pocket",
            "question": "does the ladder forecast the target?",
            "hypothesis": "the final loss lies inside the 90 % interval",
            "plan": {name: quantity.model_dump(mode="json") for name, quantity in plan.items()},
            "data_manifest": HASH,
            "code_ref": "0.1.0",
            "primary_metric": "eval.macro.nats",
            "stop_rule": "400 steps",
            "analysis": "score the registered quantiles",
            "failure": "the final loss lies outside the 99 % interval",
            "retention": "everything",
            "rollback_depth": "2 checkpoints",
            "recovery_policy": "resume from the newest verified checkpoint",
            "responsible": "the person who started the run",
            "inferred": [],
        },
        "run": {
            "text": "the target run",
            "name": "target",
            "lineage": "pocket",
            "fork": {"checkpoint": 0, "row": -1, "tracker_step": "not_stated"},
            "role": "production",
        },
        "attempt": {
            "text": "first attempt",
            "run": "target",
            "ordinal": 1,
            "start": "2026-01-01T00:00:00.000Z",
            "restored_from": "fresh",
            "container_digest": "not_stated",
            "lock_digest": HASH,
            "code_commit": "0.1.0",
            "tree_state": "clean",
            "config_digest": HASH,
            "data_manifest_digest": HASH,
            "argv": ["portolan", "train", "--tokens", "5", "--api-key", "s3cret"],
            "env": {"HF_TOKEN": "s3cret", "XLA_FLAGS": "--xla_x=1"},
            "hosts_digest": "not_stated",
        },
        "event": {
            "text": "the loss jumped",
            "kind": "incident",
            "step": {"clock": "completed", "n": 12},
            "cause": {"text": "a bad batch", "status": "likely"},
            "evidence": ["row 11 of the metrics"],
        },
    }


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A new journal in project/record with a fixed key."""
    project = tmp_path / "project"
    SigningKey(bytes(range(32))).save(project / ".portolan" / "key.ed25519")
    return Journal.create(project / "record", "demo")
