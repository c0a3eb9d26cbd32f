"""One giant group: 200,000 near-equal texts in bounded memory."""

import json
import random
import subprocess
import sys

import pyarrow as pa
import pytest
from tests.data.normalized import rows_of

from portolan.data.dedup import NormalizedSource
from portolan.data.documents import (
    DOCUMENT_SCHEMA,
    Stage,
    document_id,
    run_stage,
    shard_name,
    write_shard,
)
from portolan.data.engine import Dataset
from portolan.files import read_json

COUNT = 200_000
BUDGET_BYTES = 512 << 20
PROGRAM = """
import json, resource, sys
from pathlib import Path
from portolan.curation_settings import FuzzySettings, ReviewedLoss
from portolan.data.dedup import NormalizedSource
from portolan.data.engine import Engine
from portolan.data.fuzzy.near_duplicates import find_near_duplicates
from portolan.files import read_json

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

corpus, folder = Path(sys.argv[1]), Path(sys.argv[2])
before = peak()
source = NormalizedSource("forms", folder, read_json(folder / "manifest.json"))
review = ReviewedLoss(source="forms", reason="one form", reviewer="me", max_loss=1)
settings = FuzzySettings(reviewed_losses=(review,), containment=0.75)
engine = Engine(task_bytes=128 << 20)
found = find_near_duplicates(engine, [source], [], settings, corpus)
counts = dict(found.counts["forms"])
print(json.dumps({"folder": str(found.removed.folder), "counts": counts, "used": peak() - before}))
"""


def write_forms(corpus):
    """Texts of at most 60 words that differ in a few of their last ones, one of them longest."""
    generator = random.Random(6)
    form = [f"field{number}" for number in range(50)]
    texts = {
        f"{' '.join(form)} {number} {'x ' * generator.randint(0, 4)}" for number in range(COUNT)
    }
    texts.add(
        " ".join([*form, "and", "the", "longest", "of", "all", "of", "these", "forms"]) + "!" * 9
    )
    rows = sorted((document_id(text), text) for text in texts)

    def build(folder):
        def tables():
            for begin in range(0, len(rows), 8192):
                ids, part = zip(*rows[begin : begin + 8192], strict=True)
                nulls, zeros = [None] * len(part), [0] * len(part)
                yield pa.table(
                    [ids, part, nulls, nulls, [""] * len(part), zeros, nulls],
                    schema=DOCUMENT_SCHEMA,
                )

        name = shard_name(0, 1)
        entry = write_shard(folder, name, DOCUMENT_SCHEMA, tables())
        return [entry], {"counts": {"kept": len(rows), "kept_text_bytes": 0}}

    folder, manifest, _ = run_stage(corpus / "documents", Stage("forms", 1, {}), build)
    return NormalizedSource("forms", folder, manifest), dict(rows)


@pytest.mark.slow
def test_a_giant_group_of_near_equal_texts_stays_within_its_memory(tmp_path):
    source, texts = write_forms(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(source.folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["used"] < BUDGET_BYTES
    longest = max(texts, key=lambda name: len(texts[name]))
    within = Dataset.open(next(tmp_path.glob("attributes/fuzzy_dup_*"))).within("forms")
    removed = {row["id"] for row in rows_of(within)}
    assert len(removed) == result["counts"]["removed"] > 0.99 * COUNT
    assert longest not in removed
    evidence = rows_of(within.within("evidence"))
    assert {row["removed_id"] for row in evidence} == removed
    assert not {row["kept_id"] for row in evidence} & removed
    assert min(row["containment"] for row in evidence) >= 0.75
    assert read_json(source.folder / "manifest.json")["counts"]["kept"] == len(texts)
    sizes = {row["component_size"] for row in evidence}
    assert max(sizes) > 100_000 and {row["split_level"] for row in evidence} - {0}
