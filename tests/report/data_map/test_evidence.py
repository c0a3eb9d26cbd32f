"""The stratified sample of evidence, against a plain one over all rows in memory."""

import random

import pyarrow as pa
import pyarrow.parquet as pq

from portolan.report.data_map.evidence import PER_STRATUM, sample_strata


def write_shards(folder, rows, number):
    paths = []
    for i in range(number):
        path = folder / f"part-{i}.parquet"
        pq.write_table(pa.Table.from_pylist(rows[i::number]), path, row_group_size=37)
        paths.append(path)
    return paths


def make_rows(sources, number):
    rng = random.Random(0)
    return [
        {
            "id": f"{rng.getrandbits(64):016x}",
            "source": rng.choice(sources),
            "kept": rng.choice("xy"),
        }
        for _ in range(number)
    ]


def test_the_smallest_ids_of_every_stratum_whatever_the_shards(tmp_path):
    rows = make_rows("abc", 500)
    expected = []
    for stratum in sorted({(row["source"], row["kept"]) for row in rows}):
        mine = sorted(r["id"] for r in rows if (r["source"], r["kept"]) == stratum)
        expected += [(*stratum, name) for name in mine[:PER_STRATUM]]
    for number in (1, 3):
        (tmp_path / str(number)).mkdir()
        paths = write_shards(tmp_path / str(number), rows, number)
        found, sizes, each = sample_strata(paths, ("source", "kept"), ("id",), most=400)
        assert [(r["source"], r["kept"], r["id"]) for r in found] == expected
        assert sum(sizes.values()) == 500 and each == PER_STRATUM


def test_many_strata_give_fewer_rows_each(tmp_path):
    names = [f"source-{i}" for i in range(30)]
    paths = write_shards(tmp_path, make_rows(names, 2_000), 2)
    found, sizes, each = sample_strata(paths, ("source", "kept"), ("id",), most=300)
    assert each == 5 and len(found) == 300 and len(sizes) == 60
    assert sample_strata([], ("source",), ("id",), most=10) == ([], {}, PER_STRATUM)
