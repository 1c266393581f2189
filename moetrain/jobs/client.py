"""A client of the service, for Python programs; it needs nothing but Python.

    jobs = Client("http://127.0.0.1:8100")
    job = jobs.create(seed=1)
    job.forward_backward(data=[{"tokens": [5, 6, 7]}])
    job.optim_step(lr=1e-4)
    job.sample(prompts=[[5, 6]], max_tokens=20)["completions"]

Requests are numbered, so that one whose answer got lost can be sent again and is done once: with
``patience`` set, a client does not notice that the service was killed and started again.
"""

import http.client
import json
import secrets
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

_LOST = (http.client.HTTPException, OSError)
_RETRY_SECONDS = 0.1


class RequestFailed(RuntimeError):
    """The service answered with an error; the message is its line."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True)
class Client:
    """The address of a service, and how many seconds to wait while it does not answer."""

    url: str
    token: str | None = None
    patience: float = 0.0

    def create(self, seed: int = 0, name: str | None = None) -> "_RemoteJob":
        """Make a new job, or go on with the job of id ``name``."""
        name = secrets.token_hex(16) if name is None else name
        known = self.call("POST", "/v1/jobs", {"id": name, "seed": seed})
        return _RemoteJob(self, name, known["next_number"])

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Send a request and return the JSON reply; retries for :attr:`patience` seconds.

        Raises:
            RequestFailed: the service answered with an error.
            OSError: there was no answer.
        """
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        deadline = time.monotonic() + self.patience
        while True:
            try:
                with urllib.request.urlopen(request) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise RequestFailed(error.code, _problem(error)) from None
            except _LOST:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)


def _problem(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]
    except (ValueError, KeyError):
        return str(error)


@dataclass
class _RemoteJob:
    """One job of a service, for use by one thread at a time."""

    client: Client
    id: str
    next_number: int

    def ask(self, kind: str, **body: Any) -> dict[str, Any]:
        """Return the result of a request; raises as :meth:`Client.call`."""
        number = self.next_number
        here = f"/v1/jobs/{self.id}"
        path = f"{here}/requests/{kind}?number={number}"
        try:
            reply = self.client.call("POST", path, body)
            self.next_number = number + 1
        except RequestFailed as failure:
            self.next_number += failure.status == 422  # it was taken up, and failed
            raise
        while "result" not in reply:
            reply = self.client.call("GET", f"{here}/answers/{number}")
        return reply["result"]

    def forward_backward(self, data: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """Add the gradients of ``data`` to the step's; returns the loss and its terms."""
        return self.ask("forward_backward", data=data, **body)

    def forward(self, data: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """Return the log-probabilities of every text's tokens."""
        return self.ask("forward", data=data, **body)

    def optim_step(self, lr: float) -> dict[str, Any]:
        """Update the adapter with the step's gradients."""
        return self.ask("optim_step", lr=lr)

    def sample(self, prompts: list[list[int]], max_tokens: int, **body: Any) -> dict[str, Any]:
        """Sample completions of every prompt."""
        return self.ask("sample", prompts=prompts, max_tokens=max_tokens, **body)

    def save(self, name: str) -> dict[str, Any]:
        """Save the job's state under a name."""
        return self.ask("save", name=name)

    def load(self, name: str) -> dict[str, Any]:
        """Go back to a save."""
        return self.ask("load", name=name)

    def describe(self) -> dict[str, Any]:
        """Return the job's status."""
        return self.client.call("GET", f"/v1/jobs/{self.id}")

    def cancel(self) -> dict[str, Any]:
        """Cancel waiting requests; the job takes up no more."""
        return self.client.call("POST", f"/v1/jobs/{self.id}/cancel", {})

    def delete(self) -> None:
        """Remove the job and its files."""
        try:
            self.client.call("DELETE", f"/v1/jobs/{self.id}")
        except RequestFailed as failure:
            if failure.status != 404:  # the job is gone: the reply to the first attempt got lost
                raise
