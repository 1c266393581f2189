"""Helpers of tests/jobs/test_tinker.py that other tests use too."""

import threading
import warnings

import pytest
import tinker

from moetrain.config import Config, Recipes
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.jobs.run import JobRun
from moetrain.jobs.scheduler import Service
from moetrain.models.hf.save import save_hf
from tests.lib.generators import make_model
from tests.lib.job_servers import free_port


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Return a service of a tiny model with a tokenizer, which listens and works."""
    folder = tmp_path_factory.mktemp("tinker")
    save_hf(make_model(), folder / "hf", tokenizer=ByteTokenizer().export())
    port, over = free_port(), threading.Event()
    words = [f"model.path={folder / 'hf'}", "train.device=cpu", "data.seq_len=64", "lora.rank=8"]
    words += [f"jobs.port={port}", f"output_dir={folder / 'out'}", "jobs.max_saves=6"]
    words += ["train.micro_batch_size=2", "train.global_batch_size=2"]
    config = Config.load(None, words, environ={}, recipes=Recipes.JOBS)
    with Service(config) as service, JobRun.serving(service):

        def work():
            while not over.is_set():
                service.turn()
                service.wait(0.02)

        thread = threading.Thread(target=work)
        thread.start()
        yield service
        over.set()
        thread.join(30)
        assert not list((folder / "out" / "jobs").glob("*:sample:*"))


@pytest.fixture(scope="module")
def served(service):
    """Return the SDK's client of the service."""
    address = f"http://127.0.0.1:{service.config.jobs.port}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = tinker.ServiceClient(base_url=address, api_key="tml-any")
        yield client
        client.close("success").result()
