"""Helpers of tests/rl/test_collect.py that other tests use too."""

from moetrain.config import Config
from moetrain.rl.collect import Collector
from tests.lib.generators import make_generator

STOPS = (7, 11, 200, 201, 202)


def collector_of(environment, longest=100, generator=None, **values):
    words = [f"rl.{k}={v}" for k, v in {"max_tokens": 12, "step_timeout": 0.5, **values}.items()]
    settings = Config.load("debug", words, environ={}).rl
    generator = generator or make_generator(page_size=4, num_pages=60, max_tokens=32)
    return Collector(generator, environment, settings, stop_ids=STOPS, longest=longest)
