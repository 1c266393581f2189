"""A teacher behind a URL answers like a checkpoint, and its failures are one line."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch

from moetrain.config import ConfigError
from moetrain.config.sources import RunFailed
from moetrain.data.chat import CHATML
from moetrain.data.packing import IGNORE_INDEX
from moetrain.data.tokenizer import ByteTokenizer, load_tokenizer
from moetrain.generate.engine import Generator
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from moetrain.rl import learn
from moetrain.rl.learn import LoadedTeacher, ServedTeacher
from moetrain.rl.loop import RlTrainer
from moetrain.rl.losses import PolicyObjective
from moetrain.rl.setup import Setup
from moetrain.train.estimates.plan import plan_memory
from moetrain.train.samples import pack
from moetrain.train.session import resolve_run
from tests.lib.distributed import spawn
from tests.lib.engines import make_engine
from tests.lib.generators import ARCH
from tests.lib.rl_runs import config_of, lines_of
from tests.lib.rl_samples import make_samples
from tests.lib.servers import serving


def made(vocab_size=257, seed=0):
    """Return a model whose vocabulary is the tokenizer's, or smaller."""
    model = Transformer(ARCH.model_copy(update={"vocab_size": vocab_size}))
    model.init_weights(std=0.3, seed=seed)
    return model


def saved(folder, seed):
    save_hf(made(seed=seed), folder, tokenizer=ByteTokenizer().export(CHATML))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("teacher"), seed=0)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("student"), seed=1)


@pytest.fixture(scope="module")
def teacher(folder):
    """Serve the teacher, and yield its URL."""
    with serving(Generator(load_hf(folder), load_tokenizer(str(folder)))) as (client, _):
        yield str(client.base_url).removesuffix("/v1/")


def judged(student, teacher, top_k, layout=()):
    """Return samples with the scores of ``teacher``, a folder or a URL, and the loss."""
    values = {"model.path": student, "rl.teacher": teacher, "rl.teacher_top_k": top_k}
    values |= {"data.seq_len": 16, "train.global_batch_size": 4, "train.device": "cpu"}
    engine = make_engine(
        *(f"{k}={v}" for k, v in (values | dict(layout)).items()), base=(), micro=2
    )
    config, samples = engine.config, make_samples(5, 13, 9, 2, 16)
    batches = pack(samples, 16, 2, min_batches=4)
    asked = ServedTeacher(config, engine.world)
    if not config.rl.is_teacher_served:
        asked = LoadedTeacher(config, str(teacher), engine)
    found = asked.judged(batches)
    terms = engine.forward(found, PolicyObjective(config.rl)).terms
    return found, {name: term.item() for name, term in terms.items()}


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_served_teacher_says_what_it_says_as_a_checkpoint(student, folder, teacher, top_k):
    """They agree up to fp32's rounding in two orders of summation; JSON keeps every bit."""
    (ours, terms), (theirs, expected) = (judged(student, x, top_k) for x in (teacher, folder))
    assert len(ours) == 4
    for mine, other in zip(ours, theirs, strict=True):
        is_one = mine.targets_BS != IGNORE_INDEX
        if not top_k:
            torch.testing.assert_close(mine.teacher_BS[is_one], other.teacher_BS[is_one])
            continue
        both = mine.teacher_BS2K[is_one], other.teacher_BS2K[is_one]
        assert torch.equal(both[0][:, 0], both[1][:, 0])
        torch.testing.assert_close(*both)
    assert terms == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert terms["teacher_kl"] > 0.1 or not top_k


def test_each_rank_is_given_the_scores_of_its_own_rows(tmp_path, monkeypatch):
    """Ranks 0 and 1 have the same rows, and so have ranks 2 and 3; the first of each pair asks."""
    asked, told = [], [None] * 4

    def scores(self, text, number):
        asked.append(text)
        return [{token: -token / 8} for token in text[1:]]

    monkeypatch.setattr(ServedTeacher, "_scores", scores)
    words = {"rl.teacher": "http://127.0.0.1:1", "rl.teacher_top_k": 0, "rl.supervised_steps": 0}
    config, rows_of_pairs = config_of(tmp_path, **words), [[0, 0, 1, 1], told]
    rows = [pack(make_samples(*lengths), 16, 2, min_batches=2) for lengths in ((5, 13), (9, 7, 3))]
    for rank in range(4):  # one after another: a pair's first rank answers before the second asks
        found = iter(rows_of_pairs)

        def gather(mine, rank=rank, found=found):
            answers = next(found)
            answers[rank] = mine
            return answers

        world = SimpleNamespace(rank=rank, data_rank=rank // 2, gather=gather)
        judged = ServedTeacher(config, world).judged(rows[rank // 2])
        for batch, own in zip(judged, rows[rank // 2], strict=True):
            is_one = own.targets_BS != IGNORE_INDEX
            assert torch.equal(batch.teacher_BS[is_one], -own.targets_BS[is_one] / 8), rank
    assert len(asked) == 5


def on_each_rank(student, teacher, layouts):
    return [judged(student, teacher, 5, layout) for layout in layouts]


@pytest.mark.tier("wide")
def test_ranks_with_the_same_rows_have_one_answer(student, teacher, monkeypatch):
    asked, submit = [], Generator.submit

    def counted(self, *requests):
        asked.extend(requests)
        submit(self, *requests)

    monkeypatch.setattr(Generator, "submit", counted)
    (whole, expected), number = judged(student, teacher, 5), len(asked)
    assert number == 5
    ((one, terms),), ((other, _),) = spawn(2, on_each_rank, student, teacher, [{"parallel.tp": 2}])
    for batches in zip(one, other, whole, strict=True):
        mine, theirs, alone = (batch.teacher_BS2K for batch in batches)
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, alone)
    assert terms["teacher_kl"] == pytest.approx(expected["teacher_kl"], rel=1e-4)
    assert len(asked) == 2 * number


@pytest.mark.tier("wide", long=["0"])
@pytest.mark.parametrize("top_k", [0, 8])
def test_a_run_learns_the_same_from_a_teacher_elsewhere(folder, teacher, tmp_path, top_k):
    words = {"rl.teacher_top_k": top_k, "rl.advantage": "none", "rl.group_size": 1}
    words |= {"rl.supervised_steps": 0, "train.steps": 2, "optim.lr": 0.01, "data.seq_len": 32}
    words |= {"train.eval_interval": 0, "rl.eval_tasks": 0}
    rows = []
    for name, where in {"path": folder, "url": teacher}.items():
        RlTrainer(config_of(tmp_path / name, **words, **{"rl.teacher": where})).fit()
        rows.append([row for row in lines_of(tmp_path / name) if "teacher_kl" in row])
    assert len(rows[0]) == 2
    for row, other in zip(*rows, strict=True):
        for name in ("loss", "teacher_kl", "grad_norm", "reward"):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


@contextlib.contextmanager
def answering(reply):
    """Yield the URL of a server that always gives this reply."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "x"}]}).encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def refused(tmp_path, **values):
    config = config_of(tmp_path / "out", **{"rl.supervised_steps": 0, **values})
    with pytest.raises(ConfigError) as found:
        Setup(*resolve_run(config), "cpu")
    assert found.value.field == "rl.teacher"
    assert "\n" not in str(found.value)
    return found.value.problem


def test_what_a_teacher_cannot_do_is_said_before_the_first_step(teacher, tmp_path):
    def says(text, url=teacher, **values):
        problem = refused(tmp_path, **{"rl.teacher": url, **values})
        assert repr(url) in problem
        assert text in problem

    gone = "http://127.0.0.1:9"
    says("does not answer", gone)
    says("refused>); serve it by python -m moetrain.serve", gone)
    says(
        "gives 257 likeliest tokens, fewer than rl.teacher_top_k 300; lower",
        **{"rl.teacher_top_k": 300, "data.seq_len": 16},
    )
    says("not rl.temperature 0.5; set rl.temperature 1, or", **{"rl.temperature": 0.5})
    says("refuses rows of data.seq_len 128 with 0 likeliest", **{"data.seq_len": 128})
    with answering({"choices": [{"text": "a"}]}) as url:
        says("answers without prompt_logprobs; serve it by moetrain.serve or vLLM", url)
    scored = [None, *({str(i): {"logprob": -1.0}} for i in range(40))]
    with answering({"choices": [{"prompt_logprobs": scored}]}) as url:
        says("has other tokens than data.tokenizer; serve one with the same tokenizer", url)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_teacher_that_redirects_sends_the_token_nowhere(tmp_path, monkeypatch, status):
    (tmp_path / "serve.token").write_text("secret")
    monkeypatch.setattr(learn, "user_cache_dir", lambda: tmp_path)
    heard = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append(self.headers.get("authorization"))
            self.send_error(404)

        def log_message(self, *args):
            pass

    class Redirecting(Elsewhere):
        def do_GET(self):
            self.send_response(status)
            self.send_header("location", f"http://127.0.0.1:{other.server_port}/")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        with HTTPServer(("127.0.0.1", 0), Redirecting) as first:
            for server in (other, first):
                threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{first.server_port}"
            config = config_of(tmp_path / "out", **{"rl.teacher": url})
            with pytest.raises(
                ConfigError, match=r"redirects to 'http://127\.0\.0\.1:\d+/', where"
            ):
                ServedTeacher(config).check(ByteTokenizer())
            first.shutdown()
        other.shutdown()
    assert heard == []


def test_a_teacher_of_fewer_tokens_is_refused(tmp_path):
    with serving(Generator(made(200), ByteTokenizer())) as (client, _):
        url = str(client.base_url)
        assert "a token outside of 0 to 199" in refused(tmp_path, **{"rl.teacher": url})


def test_a_teacher_that_ends_ends_the_run(folder):
    engine = make_engine(
        f"model.path={folder}",
        "rl.teacher=http://127.0.0.1:9",
        "rl.step_timeout=1.5",
        "data.seq_len=16",
        "train.device=cpu",
        base=(),
    )
    with pytest.raises(RunFailed, match=r"rl.teacher: 'http://127.0.0.1:9' does not answer"):
        ServedTeacher(engine.config, engine.world).judged(pack(make_samples(5), 16, 2))


def test_memory_has_no_teacher_that_is_elsewhere(folder, teacher, tmp_path):
    texts = []
    for where in (folder, teacher):
        config, arch = resolve_run(config_of(tmp_path / "out", **{"rl.teacher": where}))
        texts.append(plan_memory(config, arch, generates=True))
    assert ["teacher" in text for text in texts] == [True, False]
