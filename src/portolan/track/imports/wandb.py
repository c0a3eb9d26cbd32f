"""Runs of Weights & Biases, through the official client's public interface."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from portolan.errors import PortolanError, UsageError
from portolan.track.imports.source import Chunk, SourceRun, chunk_of_lines, in_chunks

PAGE_LINES = 10_000
_PATH = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")
PROBLEM_REMEDY = "check the path entity/project/run and that the run is public or WANDB_API_KEY set"


class WandbRun:
    """One run, `entity/project/run` or its page's address.

    `samples` asks for the sampled history of that size, as dashboards show it; without it the
    full history is scanned. The key of the environment (WANDB_API_KEY) is used by the client and
    never read or stored here.
    """

    def __init__(self, path: str, *, samples: int | None = None, base_url: str = "") -> None:
        match = _PATH.fullmatch(path)
        if not match:
            raise UsageError(
                f"{path!r} names no Weights & Biases run", remedy="write entity/project/run"
            )
        self.path = "/".join(match.groups())
        self.samples = samples
        self.default_id = match[3] if samples is None else f"{match[3]}-sampled"
        self._base_url = base_url
        self._run = self._open()

    def _open(self) -> Any:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                "the client of Weights & Biases is not installed",
                remedy="install the extra: pip install 'portolan[wandb]'",
            ) from error
        os.environ.setdefault("WANDB_SILENT", "true")
        overrides = {"base_url": self._base_url} if self._base_url else {}
        with _translated(self.path):
            return wandb.Api(overrides=overrides, timeout=60).run(self.path)

    def describe(self) -> SourceRun:
        """Configuration, summary and length as the server reports them."""
        import wandb

        run = self._run
        query = "scan_history" if self.samples is None else "history"
        arguments = {"run": self.path, "page_size": str(PAGE_LINES)}
        if self.samples is not None:
            arguments = {"run": self.path, "samples": str(self.samples)}
        with _translated(self.path):
            attributes = run._attrs
            last_step = run.lastHistoryStep
        return SourceRun(
            kind="wandb",
            locator=str(run.url),
            name=str(attributes.get("displayName") or run.id),
            tool_version=f"wandb {wandb.__version__}",
            query=query,
            arguments=arguments,
            anonymous=False,
            state=str(run.state),
            created=str(attributes.get("createdAt") or "not_stated"),
            config=dict(run.config),
            summary=dict(run.summary_metrics or {}),
            num_lines=_count(attributes.get("historyLineCount")),
            last_step=last_step if last_step is not None and last_step >= 0 else None,
            sampled=self.samples is not None,
            tracker_field="_step",
        )

    def chunks(self, step_key: str) -> Iterator[Chunk]:
        """The history, in order of the client's `_step`."""
        line = 0
        for lines in in_chunks(self._lines()):
            yield chunk_of_lines(lines, line, step_key, "_timestamp")
            line += len(lines)

    def _lines(self) -> Iterator[dict[str, Any]]:
        with _translated(self.path):
            if self.samples is not None:
                yield from self._run.history(samples=self.samples, pandas=False)
            else:
                yield from self._run.scan_history(page_size=PAGE_LINES, use_cache=False)


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Errors of the client, with the run they are about."""
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    try:
        yield
    except (wandb.Error, WandbApiFailedError, ValueError) as error:
        raise PortolanError(f"{path}: {error}", remedy=PROBLEM_REMEDY) from error
