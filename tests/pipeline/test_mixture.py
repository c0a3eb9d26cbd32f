"""Mixtures of a project: files, swarms, proposals; and the documents behind a step."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.pipeline.tools import run_command

from portolan.data.mixture import MixtureError, load_mixture
from portolan.errors import UsageError
from portolan.files import write_json_atomic
from portolan.pipeline.changes import read_phase
from portolan.pipeline.corpus import Corpus, find_corpus
from portolan.pipeline.mixing import (
    epoch_prefixes,
    phase_counts,
    readable_tokens,
    reference_tokens,
    save_mixture,
    simulated_epochs,
    target_mixture,
    target_phases,
)
from portolan.pipeline.mixture_view import print_mixture
from portolan.pipeline.plan import plan_width
from portolan.pipeline.runs import describe, planned_runs
from portolan.pipeline.swarm import Ground, plan_swarm
from portolan.project import Project, open_project
from portolan.recipe import Recipe, find_recipe, load_recipe
from portolan.record.journal import Journal

T = 10**12
TOKENS = {"c00q0": 900, "c00q1": 2_000_000, "c01q0": 40_000, "c01q4": 500_000, "c02q2": 3_000_000}
COOLDOWN = 'mixture.phases=[{name="cooldown", from_fraction=0.8}]'


def corpus_of(root: Path, recipe: Recipe, tokens: dict[str, int] = TOKENS) -> Corpus:
    """A corpus of which only digests and the sizes of the cells exist."""
    digests = {"digest": "0" * 64}
    summary = {"store": digests, "tokenizer": digests, "heldout": digests}
    corpus = Corpus(Project(root, recipe), summary)
    corpus.__dict__["store"] = SimpleNamespace(tokens_by_cell=tokens)
    return corpus


def pocket(root: Path, *overrides: str) -> Corpus:
    return corpus_of(root, load_recipe(find_recipe("pocket"), overrides))


def test_every_cell_that_a_run_can_read_under_the_cap_has_a_weight(tmp_path):
    corpus = pocket(tmp_path)
    recipe = corpus.project.recipe
    assert readable_tokens(recipe, TOKENS) == TOKENS | {"c00q0": 0}
    for width in (*recipe.ladder.widths, recipe.model.width):
        rung = plan_width(recipe, width)
        mixture = corpus.mixture(rung)
        assert [n for n, count in mixture.phases[0].counts.items() if not count] == ["c00q0"]
        prefixes = epoch_prefixes(mixture, simulated_epochs(rung, reference_tokens(recipe)))
        assert all(prefixes[name] for name, count in mixture.phases[0].counts.items() if count)
        assert max(mixture.epochs().values()) <= 8
    counts = {
        tuple(corpus.mixture(plan_width(recipe, w)).phases[0].counts.items()) for w in (32, 96)
    }
    assert len(counts) == 1


def test_a_cell_that_one_lattice_step_would_repeat_too_often_is_not_lifted(tmp_path):
    corpus = corpus_of(tmp_path, load_recipe(find_recipe("marin-535b")),
                       {"big": 30 * T, "small": 38_146_973, "tiny": 3_400_000})  # fmt: skip
    recipe = corpus.project.recipe
    mixture = corpus.mixture(plan_width(recipe, 6144))
    # One step of 49,152 over 18.75e12 tokens is 381 million: more than 8 epochs of either cell.
    assert mixture.phases[0].counts == {"big": 49_152, "small": 0, "tiny": 0}
    assert mixture.block_sequences == mixture.lattice == 49_152


def test_target_phases_split_the_reference_tokens_as_the_run_splits_its_own():
    recipe = load_recipe(find_recipe("marin-535b"), (COOLDOWN,))
    (_, _, main), (name, start, cooldown) = target_phases(recipe)
    assert (name, start) == ("cooldown", 312_192)
    assert main / 18_750_000_000_000 == pytest.approx(312_192 / 390_251)
    assert main + cooldown == pytest.approx(18_750_000_000_000, abs=1)


def test_epochs_are_simulated_up_to_1e23_flops():
    recipe = load_recipe(find_recipe("marin-535b"))
    small = plan_width(recipe, 768)
    assert simulated_epochs(small, reference_tokens(recipe)) == (small.tokens, 18_750 * 10**9)
    assert simulated_epochs(plan_width(recipe, 6144), reference_tokens(recipe)) is None


def write_recipe_with(root: Path, mixture: str) -> None:
    text = find_recipe("pocket").read_text()
    (root / "recipe.toml").write_text(f"{text}\n[mixture]\n{mixture}\n")


def test_mixture_file_of_the_recipe_sets_every_run_and_its_identity(tmp_path):
    plain = pocket(tmp_path, COOLDOWN)
    counts = {"main": {"c00q1": 20, "c01q4": 20, "c02q2": 24},
              "cooldown": {"c00q1": 10, "c01q4": 20, "c02q2": 34}}  # fmt: skip
    full = {phase: {n: row.get(n, 0) for n in TOKENS} for phase, row in counts.items()}
    made = target_mixture(plain, full, 64, name="mine")
    made.save(tmp_path / "mine.json")
    phases = 'phases = [{name = "cooldown", from_fraction = 0.8}]'
    write_recipe_with(tmp_path, f'file = "mine.json"\n{phases}')
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe.digest() != plain.project.recipe.digest()
    corpus = corpus_of(tmp_path, recipe)
    for width in (32, 48, 64, 96):
        mixture = corpus.mixture(plan_width(recipe, width))
        assert [dict(phase.counts) for phase in mixture.phases] == list(full.values())
        assert (mixture.lattice, mixture.provenance["digest"]) == (64, made.digest)
    before = [run.run_id for run in planned_runs(corpus.project, corpus)]
    full["cooldown"] |= {"c00q1": 11, "c01q4": 19}
    target_mixture(plain, full, 64, name="mine").save(tmp_path / "mine.json")
    changed = corpus_of(tmp_path, load_recipe(tmp_path / "recipe.toml"))
    after = [run.run_id for run in planned_runs(changed.project, changed)]
    assert not set(before) & set(after)
    for text, message in (
        ('file = "mine.json"', "has the phases main, cooldown, the recipe main"),
        (f'file = "mine.json"\nweights = {{c00q1 = 1.0}}\n{phases}', "both given"),
        ('file = "none.json"', "not a mixture file"),
    ):
        write_recipe_with(tmp_path, text)
        with pytest.raises(UsageError, match=message):
            load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"store_digest": "1" * 64}, "store digest is 1111"),
        ({"tokenizer_digest": "1" * 64}, "tokenizer digest is 1111"),
        ({"sequence_length": 64}, "sequence length is 64"),
        ({"cap_epochs": 9.0}, "its cap is 9 epochs"),
        ({"cells": TOKENS | {"c01q4": 1_000_000}}, "cell c01q4 was fitted with 1000000"),
        ({"start_step": 4}, "the run expects"),
        ({"budget_tokens": 1}, "the run expects"),
    ],
)
def test_each_file_that_is_not_for_this_run_is_refused(change, message, tmp_path):
    corpus = pocket(tmp_path)
    counts = dict.fromkeys(TOKENS, 0) | {"c00q1": 40, "c02q2": 24}
    made = target_mixture(corpus, {"main": counts}, 64, name="mine")
    if phase := {k: v for k, v in change.items() if k in ("start_step", "budget_tokens")}:
        first = dataclasses.replace(made.phases[0], **phase)
        phases = (made.phases[0], dataclasses.replace(first, name="late"))
        change = {"phases": phases if "start_step" in phase else (first,)}
    dataclasses.replace(made, **change).save(tmp_path / "mine.json")
    write_recipe_with(tmp_path, 'file = "mine.json"\n')
    if "phases" in change and len(change["phases"]) > 1:
        phases = 'phases = [{name = "late", from_fraction = 0.5}]'
        write_recipe_with(tmp_path, f'file = "mine.json"\n{phases}')
    changed = corpus_of(tmp_path, load_recipe(tmp_path / "recipe.toml"))
    with pytest.raises(MixtureError, match=message):
        changed.mixture(plan_width(changed.project.recipe, 32))


def test_a_phase_of_a_file_can_change_a_run(tmp_path):
    corpus = pocket(tmp_path, COOLDOWN)
    recipe = corpus.project.recipe
    mixed = corpus.mixture(plan_width(recipe, recipe.model.width)).phases[0].counts
    moved = dict(mixed) | {"c00q1": mixed["c00q1"] - 3, "c01q4": mixed["c01q4"] + 3}
    lattice = sum(mixed.values())
    file = target_mixture(corpus, {"main": mixed, "cooldown": moved}, lattice, name="file")
    file.save(tmp_path / "file.json")
    for phase, counts in (("main", mixed), ("cooldown", moved), ("", moved)):
        weights, origin = read_phase(corpus, tmp_path / "file.json", phase)
        assert phase_counts(recipe, weights, TOKENS, lattice) == dict(counts)
        assert f"{phase or 'cooldown'} of file.json, digest {file.digest[:16]}" in origin
    with pytest.raises(UsageError, match="no phase 'end'") as caught:
        read_phase(corpus, tmp_path / "file.json", "end")
    assert caught.value.remedy == "use main, cooldown"
    dataclasses.replace(file, store_digest="1" * 64).save(tmp_path / "other.json")
    with pytest.raises(MixtureError, match="store digest"):
        read_phase(corpus, tmp_path / "other.json", "")


def test_a_resumed_run_keeps_the_phases_that_have_begun(tmp_path):
    counts = dict.fromkeys(TOKENS, 0) | {"c00q1": 40, "c02q2": 24}
    first = target_mixture(pocket(tmp_path), {"main": counts}, 64, name="mine")
    other = target_mixture(
        pocket(tmp_path), {"main": counts | {"c00q1": 39, "c02q2": 25}}, 64, name="mine"
    )
    path = tmp_path / "mixture.json"
    save_mixture(first, path, 0)
    with pytest.raises(MixtureError, match="phase 'main' has been used"):
        save_mixture(other, path, 7)
    assert load_mixture(path) == first
    save_mixture(other, path, 0)
    assert load_mixture(path) == other


def test_a_grid_is_shown_by_domain_and_by_bucket(tmp_path, capsys):
    counts = {"c00q0": 0, "c00q1": 16, "c01q0": 1, "c01q4": 15, "c02q2": 32}
    print_mixture(target_mixture(pocket(tmp_path), {"main": counts}, 64, name="mine"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    weights = {row[1]: row[5] for row in rows if len(row) == 9}
    assert weights["c00"] == weights["c01"] == "0.2500" and weights["c02"] == "0.5000"
    assert [weights[f"q{q}"] for q in (0, 1, 2, 4)] == ["0.0156", "0.2500", "0.5000", "0.2344"]


# ------------------------------------------------------------------ a whole project


def opened(root: Path, *overrides: str) -> Ground:
    project = open_project(root, overrides)
    corpus = find_corpus(project)
    assert corpus is not None
    return Ground(project, corpus)


def pretend_training(ground: Ground, num_designs: int) -> None:
    """Leave what the runs of a swarm would: the more tables, the better, with a little noise."""
    rng = np.random.default_rng(0)
    for member in plan_swarm(ground, num_designs=num_designs, num_seeds=2, candidates=()):
        tables = member.mixture.weights(0)["tables"]
        for run in member.runs.values():
            folder = member.project.runs / run.run_id
            folder.mkdir(parents=True)
            write_json_atomic(folder / "run.json", describe(member.project, member.corpus, run))
            member.mixture.save(folder / "mixture.json")
            values = (3 - tables + 0.01 * rng.normal() for _ in range(2))
            keys = (f"eval_dropless/heldout/{name}/bpb" for name in ("prose", "tables"))
            metrics = dict(zip(keys, values, strict=True))
            write_json_atomic(folder / "finished.json", {"evaluation": metrics})


def test_files_are_proposed_recorded_checked_compared_and_used(project, cli):
    paths = []
    for options in (("proportional",), ("temperature", "--exponent", 0.3), ("unimax",)):
        done = cli("-C", project, "mixture", "propose", "--method", *options)
        assert (done.code, done.err) == (0, ""), done.err
        assert "epochs per cell 0." in done.out and "(cap 8)" in done.out
        paths.append(project / done.out.split("mixture: ")[1].split("\n")[0])
    assert load_mixture(paths[1]).provenance["exponent"] == 0.3
    recorded = [r.body for r in Journal.open(project / "record").records() if r.type == "artifact"]
    names = [body["files"][0]["path"] for body in recorded if body["kind"] == "mixture"]
    assert names == [path.relative_to(project).as_posix() for path in paths]
    assert cli("-C", project, "verify").code == 0
    assert "fits this project" in cli("-C", project, "mixture", "check", paths[0]).out
    shown = cli("mixture", "diff", paths[0], paths[1]).out
    assert "total variation of main: 0.0" in shown
    setting = f'mixture.file="{names[1]}"'
    shown = cli("-C", project, "mixture", "show", "--set", setting)
    assert "tiny-temperature" in shown.out and names[1] in shown.out
    broken = load_mixture(paths[0])
    dataclasses.replace(broken, store_digest="1" * 64).save(paths[0])
    done = cli("-C", project, "mixture", "check", paths[0])
    assert (done.code, "store digest is 1111" in done.err) == (2, True)
    ground = opened(project, setting)
    run = planned_runs(ground.project, ground.corpus)[-1]
    loader = ground.corpus.loader(run.order, run.seed, reference_tokens(ground.project.recipe))
    assert loader.order.mixture.phases[0].counts == load_mixture(paths[1]).phases[0].counts


def test_swarm_leaves_evidence_that_the_search_uses(project, cli):
    ground = opened(project)
    done = cli("-C", project, "mixture", "propose", "--method", "surrogate")
    assert (done.code, "no swarm" in done.err) == (2, True)
    shown = cli("-C", project, "mixture", "swarm", "--designs", 5, "--dry-run").out
    assert "6 mixtures, 7 runs of width 48, 7 missing" in shown
    pretend_training(ground, 5)
    done = cli("-C", project, "mixture", "swarm", "--designs", 5)
    assert (done.code, "7 runs of width 48, 0 missing" in done.out) == (0, True), done.err
    (evidence,) = (project / "mixtures").glob("swarm-*.json")
    content = json.loads(evidence.read_text())
    assert len(content["runs"]) == 7 and set(content["cells"]) == {"prose", "tables"}
    digests = set()
    for model in ("process", "process", "exposure", "log-linear"):
        options = ("--method", "surrogate", "--model", model, "--seed", 3)
        done = cli("-C", project, "mixture", "propose", *options)
        assert (done.code, done.err) == (0, ""), done.err
        path = project / done.out.split("mixture: ")[1].split("\n")[0]
        mixture = load_mixture(path)
        assert mixture.weights(0)["tables"] > content["proportional"][0][1] / content["lattice"]
        assert max(mixture.epochs().values()) <= 8
        digests.add((model, mixture.digest))
    assert len(digests) == 3
    done = cli("-C", project, "mixture", "swarm", "--designs", 0, "--candidate", path, "--dry-run")
    assert "2 mixtures, 4 runs" in done.out


@pytest.mark.slow
def test_swarm_trains_resumes_and_is_recorded(project, finished):
    def call(*options: object) -> str:
        done = run_command("-C", project, "mixture", *options, environment=finished.environment)
        assert (done.code, done.err) == (0, ""), done.err
        return done.out

    assert "3 runs of width 48, 3 missing: 60 updates" in call("swarm", "--designs", 1)
    grown = call("swarm", "--designs", 3)
    assert "5 runs of width 48, 2 missing" in grown and "proportional │     2" in grown
    proposed = call("propose", "--method", "surrogate", "--seed", 1)
    assert "leave-one-out rank correlation of the surrogate over 5 runs" in proposed
    records = list(Journal.open(project / "record").records())
    swarm = [r.body["name"] for r in records if r.type == "run" and "swarm" in r.body["name"]]
    assert len(swarm) == 5
    assert len({(project / "runs" / name / "mixture.json").read_text() for name in swarm}) == 4
    assert run_command("-C", project, "verify").out.startswith("ok(")
    shown = run_command("-C", project, "show-batch", 0, "--run", swarm[-1])
    assert shown.out.startswith("row=0 tokens=0-")


def test_documents_of_a_step_follow_from_the_record_alone(project, cli):
    expected = cli("-C", project, "show-batch", 5)
    (folder,) = (project / "runs").glob("target-*")
    shutil.rmtree(project / "corpus" / "documents")
    (project / "corpus" / "summary.json").unlink()
    recipe = project / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("seed = 0", "seed = 7", 1))
    assert cli("-C", project, "show-batch", 5) == expected
    moved = (project / "corpus" / "tokens").rename(project / "elsewhere")
    done = cli("-C", project, "show-batch", 5)
    assert (done.code, "is not in" in done.err, "curate the same" in done.err) == (1, True, True)
    rows = [line.split() for line in done.out.splitlines()]
    assert len(rows) == 16 and all(len(row) == 4 for row in rows)
    moved.rename(project / "corpus" / "tokens")
    mixture = folder / "mixture.json"
    mixture.write_text(mixture.read_text().replace('"name": "tiny"', '"name": "other"'))
    done = cli("-C", project, "show-batch", 5)
    assert (done.code, "not the file that the record names" in done.err) == (1, True)
    mixture.unlink()
    assert "the record lacks" in cli("-C", project, "show-batch", 5).err
    (project / "record" / "journal.jsonl").unlink()
    assert "lacks its journal" in cli("-C", project, "show-batch", 5).err
