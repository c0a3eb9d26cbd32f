import hashlib
import json
import os
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portolan.data.tokenizer import (
    BOS,
    EOS,
    PAD,
    BoundaryPolicy,
    DocumentTokenizer,
    read_sample,
    sample_documents,
    token_bytes,
    train_tokenizer,
    train_tokenizer_file,
)
from portolan.errors import PortolanError, UsageError

TRAIN = """
import sys, pathlib
from portolan.data.tokenizer import train_tokenizer_file
shards = [pathlib.Path(p) for p in sys.argv[2:]]
print(train_tokenizer_file(pathlib.Path(sys.argv[1]), [("web", shards)], vocab_size=1500))
"""
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def lengths(tokenizer):
    return token_bytes(tokenizer)


def write_rare_words(folder):
    """Words of random letters, so that very many pairs are equally frequent."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmno", k=5)) for _ in range(2000)]
    texts = [" ".join(draw.choices(words, k=80)) for _ in range(200)]
    rows = sorted((hashlib.md5(text.encode()).hexdigest(), text) for text in texts)
    table = pa.table({"id": [row[0] for row in rows], "text": [row[1] for row in rows]})
    pq.write_table(table, folder / "rare.parquet")
    return folder / "rare.parquet"


def test_every_process_trains_the_same_bytes(tmp_path):
    shards = [str(write_rare_words(tmp_path))]
    digests = set()
    for number, (parallel, threads) in enumerate(
        [("true", "1"), ("true", "2"), ("false", "1"), ("true", "2")]
    ):
        path = tmp_path / f"{number}.json"
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": parallel,
            "RAYON_NUM_THREADS": threads,
            "PYTHONHASHSEED": str(number),
        }
        command = [sys.executable, "-W", "error", "-c", TRAIN, str(path), *shards]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        digests |= {result.stdout.strip(), hashlib.sha256(path.read_bytes()).hexdigest()}
    assert len(digests) == 1


def test_alphabet_is_complete_and_special_tokens_come_first(tokenizer):
    vocabulary = json.loads(tokenizer.content)["model"]["vocab"]
    assert [vocabulary[token] for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert sum(len(piece) == 1 for piece in vocabulary) == 256
    assert tokenizer.vocab_size == len(vocabulary) == 320
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)


@given(any_text)
def test_every_text_comes_back(tokenizer, lengths, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert lengths[ids].sum() == len(text.encode())
    assert not set(ids) & set(tokenizer.special_ids)


@given(st.lists(st.one_of(any_text, st.sampled_from([BOS, EOS, PAD])), max_size=6).map("".join))
def test_special_text_is_ordinary_text(tokenizer, text):
    (ids,) = tokenizer.encode_documents([text])
    assert (ids[0], ids[-1]) == (0, 1)
    assert not set(ids[1:-1].tolist()) & {0, 1, 2}
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize(("bos", "eos"), [("none", "document"), ("document", "none")])
def test_policy_decides_the_boundary_tokens(tokenizer, bos, eos):
    changed = DocumentTokenizer(tokenizer.content, BoundaryPolicy(bos, eos))
    (ids,) = changed.encode_documents(["a ship"])
    assert (ids[0] == 0) == (bos == "document")
    assert (ids[-1] == 1) == (eos == "document")
    assert changed.digest == tokenizer.digest
    changed.check_boundaries(ids, np.array([0, len(ids)]), place="here")
    with pytest.raises(PortolanError, match="here"):
        tokenizer.check_boundaries(ids, np.array([0, len(ids)]), place="here")


def test_a_boundary_token_inside_is_found(tokenizer):
    tokens, offsets = np.array([0, 9, 1, 0, 0, 1]), np.array([0, 3, 6])
    with pytest.raises(PortolanError, match="1 other places"):
        tokenizer.check_boundaries(tokens, offsets, place="shard")


def test_special_tokens_have_no_bytes(tokenizer, lengths):
    assert lengths.dtype == np.int32
    assert lengths.shape == (320,)
    assert lengths[[0, 1, 2]].tolist() == [0, 0, 0]
    assert (lengths[3:] > 0).all()


def test_a_tokenizer_without_the_named_token_is_refused(tokenizer):
    with pytest.raises(UsageError, match="no token '</s>'"):
        DocumentTokenizer(tokenizer.content, eos_token="</s>")


def test_a_tokenizer_whose_boundary_token_is_not_special_is_refused(tokenizer):
    content = json.loads(tokenizer.content)
    for token in content["added_tokens"]:
        token["special"] = False
    with pytest.raises(PortolanError, match="special"):
        DocumentTokenizer(json.dumps(content).encode())


def test_templates_and_truncation_of_a_file_are_off(tokenizer):
    def sequence(name):
        return {"Sequence": {"id": name, "type_id": 0}}

    content = json.loads(tokenizer.content)
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, sequence("A")],
        "pair": [sequence("A"), sequence("B")],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }  # fmt: skip
    other = DocumentTokenizer(json.dumps(content).encode())
    text = "the tide and the wind and the tide"
    assert (
        other.encode_documents([text])[0].tolist() == tokenizer.encode_documents([text])[0].tolist()
    )


def test_vocabulary_must_be_reachable():
    with pytest.raises(UsageError, match="vocab_size is 100"):
        train_tokenizer(["some text"], vocab_size=100)
    with pytest.raises(UsageError, match="the sample supports"):
        train_tokenizer(["some text"], vocab_size=5000)


def test_sample_depends_on_the_documents_only(corpus):
    sample = sample_documents(corpus, seed=7, budget_bytes=9000)
    assert sample == sample_documents(corpus[::-1], seed=7, budget_bytes=9000)
    assert sample != sample_documents(corpus, seed=8, budget_bytes=9000)
    assert sum(item.num_bytes for item in sample) <= 9000
    larger = sample_documents(corpus, seed=7, budget_bytes=20000)
    assert larger[: len(sample)] == sample
    texts = read_sample(corpus, sample)
    assert [len(text.encode()) for text in texts] == [item.num_bytes for item in sample]


def test_a_first_document_over_the_budget_is_still_taken(corpus):
    assert len(sample_documents(corpus, seed=7, budget_bytes=1)) == 1


def test_no_documents_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no documents"):
        train_tokenizer_file(tmp_path / "tokenizer.json", [], vocab_size=400)
