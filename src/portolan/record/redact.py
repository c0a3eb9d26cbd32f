"""Secrets leave the command line and the environment before anything is hashed."""

import re
from collections.abc import Mapping, Sequence

REDACTED = "redacted"

_SECRET_NAME = re.compile(r"(^|[_-])(token|key|secret|password|credentials?)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_KEPT_PREFIXES = (
    "CUDA_",
    "HF_",
    "JAX_",
    "LIBTPU_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "OPENBLAS_",
    "PORTOLAN_",
    "SLURM_",
    "TF_",
    "TOKENIZERS_",
    "TPU_",
    "WANDB_",
    "XLA_",
)
_KEPT_NAMES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONPATH", "TZ")


def is_secret_name(name: str) -> bool:
    """Whether a variable or option *ends* in token, key, secret, password or credential(s).

    The word must follow the start, `_` or `-`: `HF_TOKEN` and `--api-key` are secret,
    `--tokens` and `--token-budget` are not. Of a dotted setting only the last part counts.
    """
    return bool(_SECRET_NAME.search(name.lstrip("-").rpartition(".")[2]))


def scrub_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """Replace the values of secret options (`--x=v`, `--x v`, `a.x=v`) and logins in URLs."""
    scrubbed: list[str] = []
    hide_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("--"):
            scrubbed.append(REDACTED)
            hide_next = False
            continue
        hide_next = not equals and argument.startswith("-") and is_secret_name(argument)
        if equals and is_secret_name(name):
            scrubbed.append(f"{name}={REDACTED}")
        else:
            scrubbed.append(_plain(argument))
    return tuple(scrubbed)


def scrub_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Replace the values of secret variables and logins in URLs."""
    return {
        name: REDACTED if is_secret_name(name) else _plain(value)
        for name, value in sorted(environment.items())
    }


def select_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change a run's numbers, by an allow-list, secrets replaced."""
    kept = {
        name: value
        for name, value in environment.items()
        if (name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES)) and value.strip()
    }
    return scrub_environment(kept)


def _plain(text: str) -> str:
    return _URL_LOGIN.sub(REDACTED, text) if text.strip() else repr(text)
