"""Documents and recipes that cannot be used: a clear error, and nothing that is trusted later."""

import json
import shutil
from pathlib import Path

import pytest
from tests.pipeline.tiny import write_documents, write_recipe
from tests.pipeline.tools import Cli

MEGABYTE = 1 << 20
VERBS = (
    "plan",
    "run",
    "curate",
    "ladder",
    "forecast",
    "register",
    "train",
    "score",
    "evaluate",
    "sample",
    "show-batch",
    "verify",
    "report",
)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    for name in ("prose", "tables"):
        (folder / name).mkdir(parents=True)
    return folder


@pytest.fixture
def project(documents: Path, tmp_path: Path, cli: Cli) -> Path:
    write_recipe(tmp_path / "recipe.toml", documents)
    made = cli("init", tmp_path / "project", "--recipe", tmp_path / "recipe.toml")
    assert made.code == 0
    return tmp_path / "project"


def sources(project: Path) -> dict[str, dict]:
    summary = json.loads((project / "corpus" / "summary.json").read_text())
    return {source["key"]: source for source in summary["sources"]}


def write_line(path: Path, start: bytes = b"") -> None:
    """One line of 200 MB."""
    with path.open("wb") as file:
        file.write(start)
        for _ in range(200):
            file.write(b"word " * (MEGABYTE // 5))


def write_zeros(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(200 * MEGABYTE)


def write_invalid(path: Path) -> None:
    path.write_bytes("Käse ".encode("latin-1") * 100)


UNUSABLE = {
    "zeros": (write_zeros, "binary"),
    "one line": (write_line, "too_long"),
    "not UTF-8": (write_invalid, "invalid_utf8"),
}


def test_empty_folder_is_named_with_its_source(project, documents, cli):
    done = cli("-C", project, "curate")
    assert done.code == 2
    assert f"source 'prose': no files in '{documents}/prose'" in done.err
    assert "remedy: put files there" in done.err
    assert not list(project.rglob("summary.json"))
    assert cli("-C", project, "run", "--dry-run").out.startswith("would do: curate, ")


@pytest.mark.parametrize("kind", UNUSABLE)
def test_nothing_but_unusable_files_is_an_error_that_says_why(kind, project, documents, cli):
    write, reason = UNUSABLE[kind]
    paths = [documents / name / "file.txt" for name in ("prose", "tables")]
    for path in paths:
        write(path)
    done = cli("-C", project, "curate")
    for path in paths:
        path.unlink()
    assert done.code == 2
    assert "source 'prose': nothing remains of 1 documents" in done.err
    assert f"(1 {reason}; for example file.txt#0)" in done.err
    assert not (project / "corpus" / "summary.json").exists()
    write_documents(documents)
    assert cli("-C", project, "curate").code == 0
    assert all(source["documents"] > 100 for source in sources(project).values())


def test_unusable_files_among_others_are_left_out_and_counted(project, documents, cli):
    write_documents(documents)
    added = []
    for number, (write, _) in enumerate(UNUSABLE.values()):
        added.append(documents / "prose" / f"bad-{number}.txt")
        write(added[-1])
    done = cli("-C", project, "curate")
    for path in added:
        path.unlink()
    assert (done.code, done.err) == (0, "")
    dropped = sources(project)["prose"]["dropped"]
    reasons = [reason for _, reason in UNUSABLE.values()]
    assert {reason: dropped[reason] for reason in reasons} == dict.fromkeys(reasons, 1)
    assert "left out: 1 binary, 1 invalid_utf8, 1 too_long" in done.out
    assert sources(project)["prose"]["read"] == 123


def test_line_of_200_megabytes_in_json_lines_is_left_out(tmp_path, documents, cli):
    write_documents(documents)
    texts = [path.read_text() for path in sorted((documents / "prose").glob("*.txt"))]
    shutil.rmtree(documents / "prose")
    (documents / "prose").mkdir()
    lines = (documents / "prose" / "lines.jsonl").open("w")
    with lines:
        lines.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    write_line(documents / "prose" / "long.jsonl", b'{"text": "')
    write_recipe(tmp_path / "recipe.toml", documents)
    text = (tmp_path / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text.replace('kind = "text"', 'kind = "jsonl"', 1))
    cli("init", tmp_path / "project", "--recipe", tmp_path / "recipe.toml")
    done = cli("-C", tmp_path / "project", "curate")
    (documents / "prose" / "long.jsonl").unlink()
    assert (done.code, done.err) == (0, "")
    assert sources(tmp_path / "project")["prose"]["dropped"]["too_long"] == 1


def test_too_little_text_is_an_error_with_a_remedy(project, documents, cli):
    for name in ("prose", "tables"):
        (documents / name / "only.txt").write_text(f"a short document of {name}\n")
    done = cli("-C", project, "run")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "remedy: " in done.err
    assert not (project / "corpus" / "summary.json").exists()


def test_recipe_with_a_typo_names_key_file_line_and_remedy(tmp_path, documents, cli):
    path = tmp_path / "recipe.toml"
    write_recipe(path, documents)
    text = path.read_text().replace("batch_sequences = 16", "batch_sequence = 16")
    path.write_text(text)
    line = text[: text.index("batch_sequence =")].count("\n") + 1
    for done in (
        cli("init", tmp_path / "project", "--recipe", path),
        cli("plan", "--recipe", path),
    ):
        assert (done.code, done.out) == (2, "")
        assert f"{path}, line {line}: unknown key 'budget.batch_sequence'" in done.err
        assert "did you mean 'batch_sequences'?" in done.err
    assert not (tmp_path / "project").exists()


def test_override_with_a_typo_names_the_override(project, cli):
    done = cli("-C", project, "run", "--set", "budget.batch_sequence=16")
    assert done.code == 2
    assert "--set budget.batch_sequence=16: unknown key" in done.err
    done = cli("-C", project, "run", "--set", "model.width=50")
    assert done.code == 2
    assert "--set model.width=50: width = 50 is not in family 'micro'" in done.err
    assert sorted(path.name for path in project.iterdir()) == ["recipe.toml"]


@pytest.mark.parametrize("verb", VERBS)
def test_folder_without_a_project_is_an_error_of_every_verb(verb, tmp_path, cli):
    done = cli("-C", tmp_path, verb, *([0] if verb == "show-batch" else []))
    assert done.code == 2
    assert str(tmp_path) in done.err
    assert "remedy: " in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", sorted({*VERBS} - {"plan", "run", "curate", "verify"}))
def test_verb_before_curation_says_what_to_do_first(verb, project, cli):
    done = cli("-C", project, verb, *([0] if verb == "show-batch" else []))
    if verb == "report":
        assert done.code == 0
        return
    assert (done.code, "portolan curate" in done.err) == (1, True)
    assert sorted(path.name for path in project.iterdir()) == ["recipe.toml"]


def test_init_keeps_what_is_there(project, tmp_path, cli):
    before = (project / "recipe.toml").read_bytes()
    again = cli("init", project)
    assert (again.code, "already holds a project" in again.err) == (2, True)
    assert cli("init", project, "--exist-ok").code == 0
    assert (project / "recipe.toml").read_bytes() == before
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in cli("init", file).err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("")
    assert "is not empty" in cli("init", tmp_path / "full").err


def test_unknown_run_and_recipe_are_named(project, cli):
    done = cli("init", project.parent / "other", "--recipe", "pokcet")
    assert (done.code, "use one of laptop, marin-535b, pocket" in done.err) == (2, True)
