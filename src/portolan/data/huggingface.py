"""Which files of a Hugging Face dataset belong to a configuration and a split.

The rules are those of the hub: the `configs` of the dataset card, else names that say their split.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from portolan.data.readers import InputFile
from portolan.errors import UsageError

CARD = "README.md"
DEFAULT_SPLIT = "train"
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)


def read_card(text: str, key: str) -> Mapping[str, Any]:
    """The settings at the top of a dataset card; empty when it has none.

    Raises:
        UsageError: they are not valid YAML.
    """
    import yaml

    found = _FRONT_MATTER.match(text)
    try:
        card = yaml.safe_load(found.group(1)) if found else {}
    except yaml.YAMLError as error:
        raise UsageError(
            f"source {key!r}: the card of the dataset is not valid YAML: {error}",
            remedy="pin a revision whose README.md is",
        ) from error
    return card if isinstance(card, dict) else {}


def choose_files(
    files: Sequence[InputFile], card: Mapping[str, Any], *, key: str, subset: str, split: str
) -> list[InputFile]:
    """Files of one configuration (`subset`) and one split, of the commoner of both formats.

    Raises:
        UsageError: the dataset has no such configuration or split; the message names those it has.
    """
    files = [file for file in files if PurePosixPath(file.path).name not in _NOT_DATA]
    split = split or DEFAULT_SPLIT
    configs = {
        str(config.get("config_name", "default")): config for config in card.get("configs") or ()
    }
    if configs and (subset in configs or not _is_folder(files, subset)):
        config = configs[_config_name(configs, key, subset)]
        chosen = _of_config(files, config, key, split)
    else:
        if subset:
            files = [file for file in files if subset in PurePosixPath(file.path).parts[:-1]]
        chosen = _by_name(files, key, split)
    if not chosen:
        raise UsageError(
            f"source {key!r}: the dataset has no Parquet or JSON-lines files of "
            f"{subset or 'its default configuration'}, split {split!r}",
            remedy="correct subset or split of this source",
        )
    formats = Counter(".parquet" in PurePosixPath(file.path).suffixes for file in chosen)
    is_parquet = formats[True] >= formats[False]
    return [f for f in chosen if (".parquet" in PurePosixPath(f.path).suffixes) == is_parquet]


def _is_folder(files: Sequence[InputFile], name: str) -> bool:
    return any(name in PurePosixPath(file.path).parts[:-1] for file in files)


def _config_name(configs: Mapping[str, Any], key: str, subset: str) -> str:
    if subset in configs:
        return subset
    named = [name for name, config in configs.items() if config.get("default")]
    if not subset:
        for name in (*named, *(["default"] if "default" in configs else []), *configs):
            if named or name == "default" or len(configs) == 1:
                return name
    raise UsageError(
        f"source {key!r}: the dataset has no configuration {subset or 'of its own choice'!r}",
        remedy=f"set subset to one of {', '.join(configs)}",
    )


def _of_config(
    files: Sequence[InputFile], config: Mapping[str, Any], key: str, split: str
) -> list[InputFile]:
    """Files that the card lists for a split; patterns as in fsspec, `**` over folders."""
    from fsspec.utils import glob_translate

    folder = str(config.get("data_dir", "")).strip("/")
    listed = config.get("data_files")
    if listed is None:
        within = [file for file in files if not folder or file.path.startswith(f"{folder}/")]
        return _by_name(within, key, split)
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        listed = [{"split": DEFAULT_SPLIT, "path": listed}]
    patterns: dict[str, list[str]] = {}
    for item in listed:
        paths = item["path"] if isinstance(item["path"], list) else [item["path"]]
        patterns.setdefault(str(item.get("split", DEFAULT_SPLIT)), []).extend(map(str, paths))
    if split not in patterns:
        raise _no_split(key, split, patterns)
    matchers = [
        re.compile(glob_translate(f"{folder}/{path}" if folder else path.removeprefix("./")))
        for path in patterns[split]
    ]
    return [file for file in files if any(matcher.match(file.path) for matcher in matchers)]


def _by_name(files: Sequence[InputFile], key: str, split: str) -> list[InputFile]:
    """Files whose path has the split's name as a word; all of them if no path names any split."""
    by_split: dict[str, list[InputFile]] = {}
    for file in files:
        words = set(re.split(r"[/._\- ]|(?<=\D)(?=\d)", file.path.lower()))
        named = [name for name, marks in _SPLIT_NAMES.items() if words & set(marks)]
        by_split.setdefault(named[0] if named else DEFAULT_SPLIT, []).append(file)
    if by_split and split not in by_split:
        raise _no_split(key, split, by_split)
    return by_split.get(split, [])


def _no_split(key: str, split: str, known: Mapping[str, Any]) -> UsageError:
    return UsageError(
        f"source {key!r}: the dataset has no split {split!r}",
        remedy=f"set split to one of {', '.join(sorted(known))}",
    )
