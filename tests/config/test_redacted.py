"""Passwords, keys and signatures in URLs of settings are printed nowhere."""

import json
import logging
import os

import pytest

from moetrain.cli.train import main
from moetrain.config import Config, ConfigError, logger
from moetrain.config.sources import RunFailed, redacted, shortened
from moetrain.train.loop import Trainer

URLS = {
    "https://ada:hunter2@example.org/a?b=c#d": "https://***@example.org/a?b=c#d",
    "s3://hunter2@bucket/a": "s3://***@bucket/a",
    "https://a:hunter2%40@[::1]:8000/v1": "https://***@[::1]:8000/v1",
    "https://a:hunter2@x@example.org": "https://***@example.org",
    # These are signed URLs from the vendors' documentation.
    "https://b.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=hunter2"
    "%2F20260101&X-Amz-Expires=60&X-Amz-Signature=hunter2": "https://b.s3.amazonaws.com/k?"
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=***&X-Amz-Expires=60&X-Amz-Signature=***",
    "https://b.s3.amazonaws.com/k?X-Amz-Security-Token=hunter2": "https://b.s3.amazonaws.com/k?"
    "X-Amz-Security-Token=***",
    "https://s.googleapis.com/b?X-Goog-Credential=hunter2&x-goog-signature=hunter2": "https://"
    "s.googleapis.com/b?X-Goog-Credential=***&x-goog-signature=***",
    "https://a.blob.core.windows.net/c/b?sv=2024-11-04&sr=b&sig=hunter2%3D": "https://a.blob.core."
    "windows.net/c/b?sv=2024-11-04&sr=b&sig=***",
    "https://d.cloudfront.net/a?Expires=1&Signature=hunter2&Key-Pair-Id=K2": "https://d.cloudfront."
    "net/a?Expires=1&Signature=***&Key-Pair-Id=K2",
    "http://example.org/?access_token=hunter2&page=2": "http://example.org/?access_token=***&page=2",
    "http://example.org/?api_key=hunter2&apikey=hunter2": "http://example.org/?api_key=***&apikey=***",
}
PLAIN = [
    "https://example.org/a@b?monkey=1&tokenizer=x",
    "a@b",
    "ada:hunter2@host",
    "key=x",
    "s3://b",
]


@pytest.mark.parametrize("url", URLS)
def test_redacted_leaves_no_secret_and_all_else(url):
    assert redacted(f"a {url} b") == f"a {URLS[url]} b"
    assert redacted(URLS[url]) == URLS[url]
    assert "hunter2" not in shortened(url + "a" * 300)
    assert "hunter2" not in shortened(url.replace("hunter2", "hunter2" * 60))
    assert redacted(json.dumps({"a": [url]})) == json.dumps({"a": [URLS[url]]})
    for error in (ConfigError("data.path", f"{url!r} does not exist"), RunFailed(f"no {url}")):
        assert "hunter2" not in f"{error} {error!r} {getattr(error, 'problem', '')}"


@pytest.mark.parametrize("text", PLAIN)
def test_redacted_changes_nothing_else(text):
    assert redacted(text) == text


URL = "https://ada:hunter2@localhost:1/a.jsonl?X-Amz-Signature=hunter2"


@pytest.mark.parametrize(
    "words",
    [
        [f"data.path={URL}"],
        ["data.path", URL],
        [URL],
        [f"--{URL}"],
        [f"data.path={URL}", f"data.path={URL}b"],
        [f"data.mixture={URL}"],
        [f"model.path={URL}"],
        [f"train.steps={URL}"],
        [f"checkpoint.resume={URL}"],
        [f"checkpoint.store={URL.replace('https', 'nowhere')}"],
    ],
)
def test_an_error_of_a_command_has_no_password(words, tmp_path, capsys):
    assert main(["--train.device=cpu", f"--output_dir={tmp_path / 'out'}", *words]) == 2
    said = capsys.readouterr()
    assert "hunter2" not in said.out + said.err
    assert said.err.count("\n") == 1


def test_lines_of_the_log_have_no_password(caplog):
    with caplog.at_level(logging.INFO):
        logger.info("reading %s and %d more", URL, 3)
        logger.info("%s", "a%b")
    assert caplog.messages == [
        "reading https://***@localhost:1/a.jsonl?X-Amz-Signature=*** and 3 more",
        "a%b",
    ]


def test_what_a_run_writes_has_no_password(tiny, tmp_path, capsys, caplog):
    store = "memory://ada:hunter2@store"
    with caplog.at_level(logging.INFO):
        config = tiny("train.steps=2", f"checkpoint.store={store}")
        assert config.checkpoint.store == store
        Trainer(config).fit()
        Trainer(tiny("train.steps=3", f"checkpoint.store={store}b")).fit()
    said = capsys.readouterr()
    assert "hunter2" not in said.out + said.err + caplog.text
    written = [
        os.path.join(at, name) for at, _, names in os.walk(tmp_path / "out") for name in names
    ]
    assert len(written) > 5
    for path in written:
        with open(path, "rb") as file:
            assert b"hunter2" not in file.read(), path
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["checkpoint"]["store"] == "memory://***@storeb"
    del settings["checkpoint"]["store"]
    again = Config.load(settings, [], environ={})
    assert again.train.steps == 3


def test_shortened_takes_numbers_that_python_does_not_print():
    assert shortened(10**5000) == "a number of 16610 bits"
    assert shortened([10**5000]) == "a value that holds a number of thousands of digits"
