"""Time of the record: verifying a long journal, appending to one, logging a row of metrics.

Run `python benchmarks/record.py [--quick] [--json FILE]`.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from portolan.record.chain import NO_LINE, encode_line
from portolan.record.journal import Journal
from portolan.record.verify import verify_journal
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


def measure_verify(folder: Path, num_lines: int) -> tuple[float, float, float]:
    """Seconds, processor seconds and added peak memory (MiB) of one verification."""
    write_journal(folder, num_lines)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, begin_processor = time.perf_counter(), time.process_time()
    verdict = verify_journal(folder)
    seconds = time.perf_counter() - begin
    processor_seconds = time.process_time() - begin_processor
    if (verdict.word, verdict.num_lines) != ("unsigned", num_lines):
        raise SystemExit(f"the benchmark's own journal does not verify: {verdict}")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, processor_seconds, (after - before) / 1024


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
    """Seconds of each append, fsync included."""
    journal = Journal.create(folder / "record", "benchmark")
    durations = []
    for number in range(num_records):
        body = {"text": f"note {number}", "kind": "decision", "step": "not_stated"}
        begin = time.perf_counter()
        journal.append("event", body)
        durations.append(time.perf_counter() - begin)
    return durations


def run(quick: bool) -> dict[str, Any]:
    """All measurements as {machine, load, versions, claims, rows}."""
    num_lines, num_rows, num_records = (20_000, 2_000, 100) if quick else (100_000, 20_000, 500)
    folder = Path(tempfile.mkdtemp(prefix="portolan-benchmark-"))
    load = os.getloadavg()[0]
    try:
        seconds, processor_seconds, mebibytes = measure_verify(folder / "long", num_lines)
        log, log_processor = map(percentiles, measure_log(folder / "run", num_rows))
        append = percentiles(measure_append(folder / "project", num_records))
    finally:
        shutil.rmtree(folder)
    per_hundred_thousand = seconds * 100_000 / num_lines
    rows = [
        {"what": f"verify {num_lines} lines", "value": seconds, "unit": "s"},
        {"what": "verify, processor time", "value": processor_seconds, "unit": "s"},
        {"what": "verify, added peak memory", "value": mebibytes, "unit": "MiB"},
        {"what": f"log {NUM_KEYS} values, median", "value": log[0], "unit": "ms"},
        {"what": f"log {NUM_KEYS} values, 99th percentile", "value": log[1], "unit": "ms"},
        {"what": f"log {NUM_KEYS} values, maximum", "value": log[2], "unit": "ms"},
        {"what": "log, processor time, 99th percentile", "value": log_processor[1], "unit": "ms"},
        {"what": "append with fsync, median", "value": append[0], "unit": "ms"},
        {"what": "append with fsync, 99th percentile", "value": append[1], "unit": "ms"},
    ]
    claims = [
        claim("a journal of 100,000 lines verifies", per_hundred_thousand, "s", 10.0),
        claim("verification adds bounded memory", mebibytes, "MiB", 32.0),
        claim("logging a row, 99th percentile", log[1], "ms", 1.0),
    ]
    packages = ("portolan", "rfc8785", "pydantic", "pyarrow", "polars")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "load": load,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "claims": claims,
        "rows": rows,
    }


def claim(name: str, value: float, unit: str, limit: float) -> dict[str, Any]:
    """One claim: the value must stay below the limit."""
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "target": f"< {limit:g}",
        "holds": value < limit,
    }


def main() -> None:
    """Print the table; with --json also write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, scaled up")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    result = run(arguments.quick)
    print(f"{result['machine']}, load {result['load']:.1f}")
    for row in result["rows"]:
        print(f"{row['what']:<40} {row['value']:>10.3f} {row['unit']}")
    for item in result["claims"]:
        word = "holds" if item["holds"] else "FAILS"
        print(f"{item['name']:<40} {item['value']:>10.3f} {item['unit']} {item['target']} {word}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
