"""Generation by the trainer's own model: requests in, completions out."""

from moetrain.rollout.engine import Generator
from moetrain.rollout.request import Completion, Request, RequestError, SamplingParams

__all__ = ["Completion", "Generator", "Request", "RequestError", "SamplingParams"]
