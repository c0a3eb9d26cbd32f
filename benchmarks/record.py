"""Time of the record: verifying a long journal, appending to it, reconciling, logging a row.

Run `python benchmarks/record.py [--quick] [--json FILE]`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import claim, main, report, row

from portolan.record.audit.reconciliation import reconcile_folder
from portolan.record.chain import NO_LINE, encode_line
from portolan.record.journal import Journal
from portolan.track.tracker import Tracker

NUM_KEYS = 60
TIME = "2026-01-01T00:00:00.000Z"


def write_journal(folder: Path, num_lines: int) -> None:
    """A valid unsigned journal of `num_lines` save events."""
    folder.mkdir(parents=True)
    previous = NO_LINE
    with (folder / "journal.jsonl").open("wb") as file:
        for seq in range(num_lines):
            body: dict[str, Any] = {"text": "start", "name": "benchmark", "key": "none"}
            if seq:
                body = {
                    "text": f"checkpoint {seq} saved",
                    "kind": "save",
                    "refs": [],
                    "run": "target",
                    "step": {"clock": "completed", "n": seq},
                    "evidence": [f"manifest {seq:064x}"],
                    "detail": {"attempt": 1, "bytes": 5_363_800_000_000},
                }
            record_type = "event" if seq else "genesis"
            record, line = encode_line(seq, previous, record_type, body, (), TIME)
            file.write(line + b"\n")
            previous = record.line_hash


VERIFY = """
import json, resource, sys, time
from pathlib import Path
from portolan.record.verify import verify_journal
begin, begin_processor = time.perf_counter(), time.process_time()
verdict = verify_journal(Path(sys.argv[1]))
seconds = time.perf_counter() - begin
processor = time.process_time() - begin_processor
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([verdict.word, verdict.num_lines, seconds, processor, memory]))
"""


def measure_verify(folder: Path, num_lines: int) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak memory (MiB) of one verification in its own process."""
    write_journal(folder, num_lines)
    done = subprocess.run(
        [sys.executable, "-c", VERIFY, str(folder)], capture_output=True, text=True, check=True
    )
    word, found, seconds, processor_seconds, mebibytes = json.loads(done.stdout)
    if (word, found) != ("unsigned", num_lines):
        raise SystemExit(f"the benchmark's own journal does not verify: {word}, {found} lines")
    return seconds, processor_seconds, mebibytes


def percentiles(durations: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum in milliseconds."""
    ordered = sorted(duration * 1000 for duration in durations)
    return ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1]


def measure_log(folder: Path, num_rows: int) -> tuple[list[float], list[float]]:
    """Seconds, and processor seconds, of each call of `log` with NUM_KEYS values."""
    durations: list[float] = []
    processor: list[float] = []
    with Tracker(folder, 1, 0) as tracker:
        for row in range(num_rows):
            values = {f"norm/gradient/leaf{key}": row / (key + 1) for key in range(NUM_KEYS)}
            begin, begin_processor = time.perf_counter(), time.thread_time()
            tracker.log(row, values)
            durations.append(time.perf_counter() - begin)
            processor.append(time.thread_time() - begin_processor)
    return durations, processor


def measure_append(folder: Path, num_records: int) -> list[float]:
    """Seconds of each append to an existing journal, fsync included."""
    journal = Journal.open(folder)
    durations = []
    for number in range(num_records):
        body = {"text": f"note {number}", "kind": "decision", "step": "not_stated"}
        begin = time.perf_counter()
        journal.append("event", body)
        durations.append(time.perf_counter() - begin)
    return durations


APPEND = """
import sys
from pathlib import Path
from portolan.record.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    body = {"text": f"{sys.argv[2]} {number}", "kind": "save", "step": "unknown"}
    journal.append("event", body)
"""


def measure_two_writers(folder: Path, num_records: int) -> tuple[float, int]:
    """Seconds in which two processes append `num_records` each, and how many records are lost."""
    Journal.create(folder, "benchmark")
    begin = time.perf_counter()
    command = [sys.executable, "-c", APPEND, str(folder)]
    writers = [subprocess.Popen([*command, who, str(num_records)]) for who in "ab"]
    exit_codes = [writer.wait() for writer in writers]
    if any(exit_codes):
        raise SystemExit("a writer failed")
    seconds = time.perf_counter() - begin
    texts = [str(record.body.get("text")) for record in Journal.open(folder).records()]
    in_order = all(
        [text for text in texts if text.startswith(f"{who} ")]
        == [f"{who} {number}" for number in range(num_records)]
        for who in "ab"
    )
    lost = 2 * num_records + 1 - len(texts)
    return seconds, lost if in_order else max(1, lost)


def measure_reconcile(folder: Path, num_claims: int) -> float:
    """Seconds to reconcile a table of `num_claims` claims, four to a question."""
    folder.mkdir()
    head = "id,quantity,value,unit,basis,layer,stated_by,date,public_source\n"
    layers = ("launched", "claimed", "registered", "observed")
    rows = (
        f"c{n // 4}-{n % 4},steps,{n // 4},steps,steps.planned,{layers[n % 4]},o,unknown,s\n"
        for n in range(num_claims)
    )
    (folder / "claims.csv").write_text(head + "".join(rows))
    begin = time.perf_counter()
    result = reconcile_folder(folder)
    if len(result.findings) != num_claims * 3 // 4 or result.exit_code != 0:
        raise SystemExit("the benchmark's own claims do not reconcile")
    return time.perf_counter() - begin


def run(quick: bool) -> dict[str, Any]:
    """All measurements as {machine, load, versions, claims, rows}."""
    num_lines, num_rows, num_records = (20_000, 2_000, 100) if quick else (100_000, 20_000, 500)
    folder = Path(tempfile.mkdtemp(prefix="portolan-benchmark-"))
    try:
        seconds, processor_seconds, mebibytes = measure_verify(folder / "long", num_lines)
        log, log_processor = map(percentiles, measure_log(folder / "run", num_rows))
        durations = sorted(measure_append(folder / "long", num_records))
        append, append_95 = percentiles(durations), 1000 * durations[int(0.95 * num_records)]
        writers, lost = measure_two_writers(folder / "shared", num_records)
        reconcile = measure_reconcile(folder / "claims", num_lines // 10)
    finally:
        shutil.rmtree(folder)
    per_hundred_thousand = seconds * 100_000 / num_lines
    rows = [
        row(f"verify {num_lines} lines", seconds, "s"),
        row("verify, processor time", processor_seconds, "s"),
        row("verify, peak memory of the process", mebibytes, "MiB"),
        row(f"log {NUM_KEYS} values, median", log[0], "ms"),
        row(f"log {NUM_KEYS} values, 99th percentile", log[1], "ms"),
        row(f"log {NUM_KEYS} values, maximum", log[2], "ms"),
        row("log, processor time, 99th percentile", log_processor[1], "ms"),
        row(f"append with fsync after {num_lines} lines, median", append[0], "ms"),
        row("append with fsync, 95th percentile", append_95, "ms"),
        row("append with fsync, 99th percentile", append[1], "ms"),
        row(f"two writers, {2 * num_records} appends", writers, "s"),
        row(f"reconcile {num_lines // 10} claims", reconcile, "s"),
    ]
    claims = [
        _below("a journal of 100,000 lines verifies", per_hundred_thousand, "s", 10.0),
        _below("verification runs in bounded memory", mebibytes, "MiB", 256.0),
        _below("appending to it, 95th percentile", append_95, "ms", 5.0),
        claim("records that two writers lose or interleave", lost, "records", "= 0", lost == 0),
        _below("logging a row, 99th percentile", log[1], "ms", 1.0),
    ]
    return report(rows, claims, ("portolan", "rfc8785", "pydantic", "pyarrow", "polars"))


def _below(name: str, value: float, unit: str, limit: float) -> dict[str, Any]:
    return claim(name, value, unit, f"< {limit:g}", value < limit)


if __name__ == "__main__":
    main(__doc__, run)
