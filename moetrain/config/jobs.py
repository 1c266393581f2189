"""The section ``jobs``: the service that trains many adapters beside one model, a turn at a time.

A file of its own, as :mod:`moetrain.config.rl` is. What a job is: :mod:`moetrain.jobs`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from moetrain.config.sections import Section, from_home


class JobsSection(Section):
    """Job service (python -m moetrain.jobs): its HTTP server and its limits."""

    host: str = "127.0.0.1"
    """Address that the HTTP server listens on; by default from this machine alone."""
    port: int = Field(default=8100, ge=1, le=65535)
    """Port of the HTTP server."""
    auth: Literal["auto", "token", "none"] = "auto"
    """Who is served. token: whoever sends the bearer token of jobs.token_file; none: everybody who
    can connect; auto: none where jobs.host is a loopback address, else token."""
    token_file: str | None = None
    """File with the bearer token; unset: output_dir/token, which is made if there is none."""
    max_jobs: int = Field(default=256, gt=0)
    """Jobs that clients may have at once; further ones are refused until some are deleted."""
    max_queued: int = Field(default=64, gt=0)
    """Requests of one job that may wait at once."""
    max_request_mib: int = Field(default=64, gt=0, le=1024)
    """Size of one request, MiB."""
    max_completions: int = Field(default=1024, gt=0)
    """Completions that one sample request may ask for, over all its prompts."""
    max_saves: int = Field(default=16, gt=0)
    """Named saves of one job."""
    max_loaded: int = Field(default=8, gt=0)
    """Jobs whose adapters and moments stay in host memory between their turns, 12 bytes a trained
    parameter each, and 16 in the middle of a step; others are read from the disk at each turn."""
    save_interval: int = Field(default=20, gt=0)
    """Requests of a job between two of its checkpoints. What came after the last one is in its log
    of requests, and is computed again after a restart."""

    _from_home = field_validator("token_file")(from_home)
