"""JSON over HTTP to a server that the recipe names, with bounded retries."""

import json
import os
import time
from typing import Any

import httpcore2

from portolan.errors import PortolanError, UsageError

ATTEMPTS = 4
FIRST_WAIT_SECONDS = 0.2
TIMEOUT_SECONDS = 120.0
PASSING_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class EndpointError(PortolanError):
    """An endpoint did not give a usable answer."""


class Endpoint:
    """Posts JSON to one URL.

    Args:
        url: address of the endpoint.
        key_variable: environment variable that holds the bearer token, empty for none.
    """

    def __init__(self, url: str, key_variable: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"endpoint {url!r} is no http address",
                remedy="give the whole URL, such as http://127.0.0.1:8000/v1/embeddings",
            )
        self.url = url
        self.headers: list[tuple[str, str]] = [("Content-Type", "application/json")]
        if key_variable:
            if key_variable not in os.environ:
                raise UsageError(
                    f"the environment variable {key_variable!r} of key_variable is not set",
                    remedy=f"set {key_variable} to the key of {url}, or remove key_variable",
                )
            self.headers.append(("Authorization", f"Bearer {os.environ[key_variable]}"))

    def refused(self, problem: str) -> EndpointError:
        """An error that says what is wrong with an answer of this endpoint."""
        return EndpointError(
            f"the answer of {self.url} {problem}",
            remedy="check that it serves this model; finished shards are kept for the next try",
        )

    def post(self, body: Any) -> Any:
        """The JSON answer to `body`. Passing failures are tried 4 times, others are not.

        Raises:
            EndpointError: no usable answer.
        """
        content, problem = json.dumps(body).encode(), ""
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), TIMEOUT_SECONDS)
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
            try:
                answer = httpcore2.request(
                    "POST",
                    self.url,
                    headers=self.headers,
                    content=content,
                    extensions={"timeout": timeout},
                )
            except (httpcore2.NetworkError, httpcore2.TimeoutException) as error:
                problem = f"did not come: {error or type(error).__name__}"
                continue
            except httpcore2.ProtocolError as error:
                problem = f"broke off: {error}"
                continue
            if answer.status in PASSING_STATUS:
                problem = f"has status {answer.status}"
                continue
            if answer.status != 200:
                said = answer.content[:200].decode(errors="replace")
                raise self.refused(f"has status {answer.status}: {said}")
            try:
                return json.loads(answer.content)
            except ValueError as error:
                raise self.refused("is no JSON") from error
        raise self.refused(f"{problem}, {ATTEMPTS} times")
