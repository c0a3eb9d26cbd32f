"""A project small enough to train inside a test: two domains of generated text."""

import random
from pathlib import Path

WORDS = (
    "the a of in and to model loss token expert router layer width ladder rung target forecast "
    "train check data batch step seed curve law head query value gate norm"
).split()

RECIPE = """\
name = "tiny"
seed = 0

[data]
heldout_bytes_per_domain = 6_000
heldout_documents_per_domain = 20

[[data.sources]]
key = "prose"
kind = "text"
path = "{folder}/prose"
license_spdx = "CC0-1.0"

[[data.sources]]
key = "tables"
kind = "text"
path = "{folder}/tables"
license_spdx = "CC0-1.0"

[tokenizer]
vocab_size = 320
sample_bytes = 60_000

[model]
family = "micro"
width = {target}
overrides = {{ sequence_length = 64, window = 32, num_experts = 8 }}

[budget]
tokens_per_active_param = {ratio}
batch_policy = "fixed"
batch_sequences = 16

[ladder]
widths = [48, 64, 80]
seeds = {{ 48 = 2 }}

[optimizer]
hyperball_scope = "per_expert"
newton_schulz_dtype = "float32"

[train]
temporary_checkpoint_seconds = {save_seconds}
permanent_checkpoint_steps = 100_000

[evaluation]
max_sequences_per_domain = 8
batch_sequences = 8
"""


def write_documents(folder: Path) -> None:
    """Generated prose and tables, 120 files each, from a fixed seed."""
    rng = random.Random(0)
    for name in ("prose", "tables"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(120):
            if name == "prose":
                text = " ".join(rng.choice(WORDS) for _ in range(300)) + "."
            else:
                rows = (f"{rng.choice(WORDS)},{rng.randrange(1000)}" for _ in range(100))
                text = "\n".join(rows)
            (folder / name / f"{number:03d}.txt").write_text(f"{name} {number}\n{text}\n")


def write_recipe(
    path: Path, folder: Path, *, ratio: float = 0.26, target: int = 96, save_seconds: float = 1.0
) -> None:
    """A recipe over `folder`, to be used as `portolan init --recipe FILE`."""
    path.write_text(
        RECIPE.format(folder=folder, ratio=ratio, target=target, save_seconds=save_seconds)
    )
