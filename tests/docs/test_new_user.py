"""Jobs of a new user that no other test runs whole: commands and files as on the pages.

docs/quickstart.md lists every job with its page and its test.
"""

import pytest
import torch

from moetrain import Config, Trainer
from moetrain.cli.train import main, run_rl
from moetrain.train.metrics import read_metrics
from tests.lib.command_lines import settled
from tests.lib.pages import PAGES, blocks
from tests.lib.typed_commands import free_port, losses, run_together


@pytest.fixture
def of_the_page(tmp_path, monkeypatch):
    """Write a page's named blocks as files into the current folder: ``of_the_page("rl")``."""
    monkeypatch.chdir(tmp_path)

    def write(name: str) -> None:
        (page,) = [page for page in PAGES if page.stem == name]
        for _, file, text in blocks(page):
            if file:
                (tmp_path / file).write_text(text * (40 if file.endswith(".jsonl") else 1))

    return write


def by_moetrain(run: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Run by fresh interpreters, even if others are forked (tests/lib/forked_python.py)."""
    return [(["-m", *run, "--launch.nproc=2"], {"PYTHONHASHSEED": "0"})]


def by_torchrun_on_two_nodes(run: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words += ["--rdzv-id", "two", "--local-addr", "127.0.0.1"]
    return [([*words, "-m", *run], {})] * 2


def assert_two_ranks_train_as_one(how, words, folder):
    words = settled([*words, "train.steps=2", "train.sample_tokens=0"])
    one = Config.load(None, settled([*words, f"output_dir={folder}/one"]), environ={})
    Trainer(one).fit()
    run_together(how(["moetrain.train", *words]), folder)
    assert losses(folder / "out") == pytest.approx(losses(folder / "one"), rel=1e-5)
    assert list((folder / "out").glob("checkpoints/step-00000002/*-00001-*.safetensors"))


@pytest.mark.tier("long")
def test_two_ranks_train_as_one_process_does_however_they_are_started(tiny_words, tmp_path):
    assert_two_ranks_train_as_one(by_moetrain, tiny_words, tmp_path)


@pytest.mark.tier("wide")
def test_two_nodes_train_as_one_process_does(tiny_words, tmp_path):
    """The nodes are torchrun's. tests/train/test_checkpoints.py starts two ranks on one node, and
    tests/cli/test_machines.py two of Slurm, which train like torchrun's."""
    assert_two_ranks_train_as_one(by_torchrun_on_two_nodes, tiny_words, tmp_path)


# ---- data ----------------------------------------------------------------------------------------


def test_a_file_of_text_is_trained_on(tiny_words, tmp_path):
    """The command does not name the kind of data; the recipe's source gives way."""
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 200)
    words = [word for word in tiny_words if not word.startswith("data.") or "seq_len" in word]
    words += [f"data.path={tmp_path}/book.txt", f"data.cache_dir={tmp_path}/cache"]
    assert main(settled([*words, "train.steps=8"])) == 0
    found = losses(tmp_path / "out")
    assert len(found) == 8
    assert found[-1] < found[0]


def test_the_forms_of_the_page_are_trained_on_beside_each_other(of_the_page, tiny_words, tmp_path):
    of_the_page("data")
    words = [word for word in tiny_words if "data." not in word]
    words += ["data.path=mixed.jsonl", f"data.cache_dir={tmp_path}/cache", "data.seq_len=512"]
    assert main(settled([*words, "train.steps=2", "optim.lr=1e-2"])) == 0
    found = losses(tmp_path / "out")
    assert len(found) == 2
    assert found[1] < found[0]


# ---- fine-tuning and reinforcement learning, by the files of their pages -------------------------


@pytest.fixture
def model(tiny_words, tmp_path):
    """Write a model of byte tokens as a Hugging Face folder."""
    words = settled([*tiny_words, "train.steps=1", "train.sample_tokens=0", "data.seq_len=128"])
    words = settled([*words, "checkpoint.save_hf=yes", f"output_dir={tmp_path}/before"])
    return Trainer(Config.load(None, words, environ={})).fit().folder / "hf"


BRIEF = ["--train.device", "cpu", "--log.tensorboard", "no", "--output_dir", "out"]


@pytest.mark.tier("long")
def test_one_command_trains_adapters_and_merges_them(model, of_the_page, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    of_the_page("finetune")
    words = ["--model.path", str(model), "--data.path", "chats.jsonl", "--lora.rank", "8"]
    words += ["--optim.lr", "1e-2", "--train.global_batch_size", "4", "--data.seq_len", "128"]
    assert main([*words, *BRIEF]) == 0
    read = transformers.AutoModelForCausalLM.from_pretrained
    base = read(model, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(read(model, dtype=torch.float32), "out/adapter")
    merged = read("out/hf", dtype=torch.float32)
    ids_BS = torch.arange(60)[None]
    with torch.no_grad():
        plain, want, got = (each(ids_BS).logits for each in (base, adapted, merged))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (want - plain).abs().max() > 1e-3


LEARN = ["--train.steps", "2", "--train.global_batch_size", "8", "--rl.group_size", "4"]
LEARN += ["--rl.max_tokens", "4", "--rl.eval_tasks", "3", "--data.seq_len", "128"]


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (
            "jsonl --rl.prompts prompts.jsonl --rl.reward rewards.py:score",
            "What is 3 + 4?",
        ),
        ("double.py:Double --rl.chat no", "2*"),
    ],
    ids=["reward", "environment"],
)
def test_a_model_learns_from_the_reward_of_the_page(words, question, model, of_the_page, tmp_path):
    of_the_page("rl")
    assert run_rl(["--model.path", str(model), "--rl.env", *words.split(), *LEARN, *BRIEF]) == 0
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert any("eval_reward" in row for row in rows)
    said = (tmp_path / "out" / "completions" / "step-00000002.txt").read_text()
    assert question in said
