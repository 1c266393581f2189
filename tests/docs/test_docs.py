"""README.md and docs/ are correct: commands, paths, links, settings, names of metrics.

A fenced block whose first line has a second word (``toml mine.toml``) is a file that commands of
the same page may name. ``MODEL`` in a command is a Hugging Face checkpoint, ``DENSE`` a dense one,
and ``outputs/debug`` the folder of a run: all are made here, tiny.
"""

import argparse
import ast
import importlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import tomllib
from contextlib import redirect_stderr

import pytest
import torch
from pydantic import BaseModel
from torch.distributed.run import get_args_parser

from moetrain.cli import checkpoint, generate, machines, plan, serve, translate
from moetrain.cli.main import main as named
from moetrain.cli.train import JOBS, RL, TRAIN, main
from moetrain.config import Config, LoraSection, Recipes
from moetrain.models.decoders import DenseDecoder
from moetrain.models.families import PRESETS
from moetrain.models.hf.load import load_hf
from moetrain.models.hf.peft import save_peft
from moetrain.models.hf.save import save_hf
from moetrain.models.parts.lora import Adapter
from moetrain.models.transformer import Transformer
from moetrain.rl.loop import RlTrainer
from moetrain.serve.server import CompletionServer
from moetrain.train.loop import Trainer
from moetrain.train.metrics import read_metrics
from tests.lib.pages import PAGES, ROOT, blocks, load_script
from tests.lib.toy_environments import YES_NO_MAYBE

LOG = sorted((ROOT / "docs" / "log").glob("*.md"))
LESSONS = sorted((ROOT / "docs" / "lessons").glob("*.md"))
PROSE = [*PAGES, *LOG, *LESSONS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PROGRAMS = {f"moetrain.{program.name}": program for program in (TRAIN, RL, JOBS)}
OTHERS = {"bash", "cd", "git", "pip", "ruff", "pyright", "tensorboard", "uv", ".ci/run"}
"""Commands of other projects; only the extras that pip installs are checked."""


def name_of(page):
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def commands(page):
    """Yield the words of every command in a page's ``sh`` blocks, and of those within sentences."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    inline = re.findall(r"`((?:python|torchrun) [^`]+)`", prose)
    for text in (*inline, *(text for language, _, text in blocks(page) if language == "sh")):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


COMMANDS = list(dict.fromkeys((page, tuple(words)) for page in PAGES for words in commands(page)))


@pytest.fixture(scope="module")
def folder(corpus, token_cache, tmp_path_factory):
    """Make the folder for commands: a run in ``outputs/debug``, and its export as ``MODEL``."""
    folder = tmp_path_factory.mktemp("docs")
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8}
    sizes |= {"num_experts": 8, "moe_intermediate_size": 32}
    words = [f"model.{name}={size}" for name, size in sizes.items()]
    words += ["data.source=text", f"data.path={corpus}", f"data.cache_dir={token_cache}"]
    words += ["data.seq_len=64", "data.eval_fraction=0.2", "train.steps=2", "train.eval_rows=2"]
    words += ["train.micro_batch_size=2", "train.global_batch_size=2", "train.device=cpu"]
    words += ["log.interval=1", "log.tensorboard=no", "train.sample_tokens=0"]
    words += ["checkpoint.save_hf=yes", "checkpoint.interval=1"]
    words += [f"output_dir={folder / 'outputs' / 'debug'}"]
    Trainer(Config.load("debug", words, environ={})).fit()
    # Texts are parsed for special tokens, as in models on the hub.
    about = folder / "outputs" / "debug" / "hf" / "tokenizer_config.json"
    about.write_text(about.read_text().replace('"split_special_tokens": true', '"a": 1'))
    (folder / "outputs" / "MODEL-chats").mkdir()
    for export in ("MODEL", "outputs/MODEL-chats/hf"):
        (folder / export).symlink_to(folder / "outputs" / "debug" / "hf")
    dense = PRESETS["qwen3-0.6b"].model_dump() | {"num_layers": 1, "vocab_size": 264}
    dense |= {"hidden_size": 64, "intermediate_size": 32}
    model = Transformer(DenseDecoder.model_validate(dense))
    model.init_weights(std=0.02, seed=0)
    save_hf(model, folder / "DENSE")
    shutil.copy(folder / "outputs" / "debug" / "hf" / "tokenizer.json", folder / "DENSE")
    routed, rank = load_hf(folder / "MODEL"), 8
    shape = routed.get_parameter("layers.0.attn.wo.weight").shape
    wo = Adapter(a=torch.ones(rank, shape[1]), b=torch.ones(shape[0], rank), scale=1.0)
    save_peft(
        folder / "outputs" / "MODEL-chats" / "adapter",
        routed.arch,
        LoraSection(rank=rank),
        [("layers.0.attn.wo.weight", shape, wo)],
        base="MODEL",
    )
    first = "checkpoints/step-00000001"
    shutil.copytree(folder / "outputs" / "debug" / first, folder / "outputs" / "other" / first)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """Make :func:`folder` the current one; settings come from the command alone.

    The pages' data is not there, so a dry run does not open it.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr("moetrain.data.preview.preview", lambda config, vocab_size: "data")
    return folder


@pytest.mark.tier(
    "quick", wide=["docs/parallelism.md: moetrain plan qwen3-30b-a3b --gpus 8 --top 8"]
)
@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{name_of(p)}: {' '.join(w)[:70]}" for p, w in COMMANDS]
)
def test_a_command_is_one(page, words, here, monkeypatch, capsys):
    for _, name, text in blocks(page):
        if name:
            (here / name).write_text(text * (100 if name.endswith(".jsonl") else 1))
    for before in COMMANDS[: COMMANDS.index((page, words))]:  # another worker may have run it
        if before[0] == page and missing_model(words) in before[1]:
            check(list(before[1]), monkeypatch)
    check(list(words), monkeypatch)


def missing_model(words):
    """Return the folder of a model that an earlier command of the page has to write, or None."""
    path = words[words.index("--model.path") + 1] if "--model.path" in words else ""
    return path if path.startswith("outputs/") and not os.path.exists(path) else None


def check(words, monkeypatch):
    while re.fullmatch(r"\w+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program in ("python", "python3") and rest[0] == "-m":
        check_module(rest[1], rest[2:], 1)
    elif program in ("python", "python3"):
        check_script(rest[0], rest[1:], monkeypatch)
    elif program == "torchrun":
        given = get_args_parser().parse_args(rest)
        path, rest = given.training_script, given.training_script_args
        world = int(given.nnodes.split(":")[0]) * int(given.nproc_per_node)
        check_module(path, rest, world) if given.module else check_script(path, rest, monkeypatch)
    elif program == "srun":
        options = [*itertools.takewhile(lambda word: word.startswith("-"), rest)]
        world = math.prod(int(option.partition("=")[2]) for option in options)
        python, m, module, *words = rest[len(options) :]
        assert (python, m) == ("python", "-m")
        check_module(module, words, world)
    elif program == "moetrain" and rest[0] == "version":
        assert named(rest[:2]) == 0
    elif program == "moetrain":
        check_module(f"moetrain.{rest[0]}", rest[1:], 1)
    elif program == "curl":
        check_request(rest)
    else:
        assert program in OTHERS
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for names in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert set(names.split(",")) <= extras["optional-dependencies"].keys()


def check_module(module, words, world):
    """Check a command of a module; ``world``: the processes that a launcher starts."""
    if module in PROGRAMS:
        check_run(PROGRAMS[module], words, world)
    elif module == "moetrain.serve":
        serve._parse(words)
    elif module == "moetrain.generate":
        assert generate.main([*words, "--max_tokens", "2"]) == 0
    elif module == "moetrain.translate":
        assert translate.main(words) == 0
    elif module == "moetrain.plan":
        assert plan.main(words) == 0
    elif module == "moetrain.launch":
        assert machines.main([*words, "--dry_run"]) == 0
    elif module == "moetrain.checkpoint":
        differ = words[0] == "diff"
        assert checkpoint.main(words) == differ, words
    else:
        assert module in ("pip", "pytest", "venv")


def check_run(program, words, world):
    """Parse and plan a run's command; a command for GPUs is planned for H200s."""
    if {"--help", "--version"} & {*words}:
        assert main(words, program) == 0
        return
    settings = [word for word in words if word != "--dry_run"]
    is_source = bool(settings) and not settings[0].startswith("--")
    source = [settings.pop(0)] if is_source else [None]
    config = program.load(*source, settings)
    is_big = words[:1] and words[0].startswith("qwen3")
    if is_big and config.launch.gpus is None:
        if "--launch.nproc" in settings:
            at = settings.index("--launch.nproc")
            world = int(settings[at + 1])
            del settings[at : at + 2]
        settings += ["--launch.gpus", str(world), "--launch.gpu", "h200"]
    with redirect_stderr(io.StringIO()) as said:
        code = main([*filter(None, source), *settings, "--dry_run"], program)
    assert code == 0, said.getvalue()
    lines = said.getvalue().splitlines()  # the last line may be about the host's memory
    assert not is_big or any(line.startswith("fits: ") for line in lines[-2:])


class Parsed(Exception):
    """A script's command line was accepted."""


def check_script(path, words, monkeypatch):
    """Check that a script's parser takes ``words``, and that the rest are settings."""
    assert (ROOT / path).is_file(), path
    if "argparse" not in (ROOT / path).read_text():
        assert all(not word.startswith("-") for word in words)
        return
    known = argparse.ArgumentParser.parse_known_args

    def parse_some(parser, args=None, namespace=None):
        raise Parsed(*known(parser, args, namespace))

    def parse_all(parser, args=None, namespace=None):
        found, rest = known(parser, args, namespace)
        assert not rest, rest
        raise Parsed(found, rest)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_some)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_all)
    monkeypatch.setattr(sys, "argv", [path, *words])
    monkeypatch.syspath_prepend(ROOT / "scripts")  # as when a script runs
    with pytest.raises(Parsed) as parsed:
        load_script(path).main()
    found, settings = parsed.value.args
    for run in getattr(found, "run", None) or [["", *settings]]:
        source, *common = getattr(found, "common", None) or [getattr(found, "recipe", None)]
        Config.load(source, [*common, *run[1:]], environ={})


def check_request(words):
    """Check that the server of ``moetrain.serve`` accepts the body of a request."""
    url = next(word for word in words if word.startswith("http"))
    if "-d" in words:
        kind = CompletionServer.BODIES["/v1/" + url.partition("/v1/")[2]]
        kind.model_validate(json.loads(words[words.index("-d") + 1]))


def test_help_is_printed(capsys):
    for module, program in PROGRAMS.items():
        assert main(["--help"], program) == 0
        assert capsys.readouterr().out.startswith(f"usage: python -m {module} ")


@every_page
def test_python_imports_what_there_is(page):
    for language, _, text in blocks(page):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("moetrain"):
                module = importlib.import_module(str(node.module))
                assert [n.name for n in node.names if not hasattr(module, n.name)] == []


@pytest.mark.tier("long")
def test_python_that_has_all_it_needs_runs(here):
    programs = [
        text
        for page in PAGES
        for language, _, text in blocks(page)
        if language == "python"
        and any(word in text for word in ('"MODEL"', "micro_batches = ", "objective=", "pairs ="))
    ]
    assert len(programs) == 8
    for text in programs:
        exec(compile(text, "docs", "exec"), {})


def slugs(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_job_has_a_page_and_a_test_that_exist():
    text = (ROOT / "docs" / "quickstart.md").read_text()
    table = text.partition("| job | page | tested by |\n|---|---|---|\n")[2].partition("\n\n")[0]
    jobs = table.splitlines()
    assert len(jobs) >= 24
    for job in jobs:
        row = re.fullmatch(r"\| .+ \| \[.+\]\((.+)#(.+)\) \| `([\w/]+\.py)::(\w+)` \|", job)
        assert row, f"give a job, a link to a heading and a test: {job}"
        page, anchor, file, name = row.groups()
        assert anchor in slugs(ROOT / "docs" / page), job
        tree = ast.parse((ROOT / "tests" / file).read_text())
        tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in tests, job


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in slugs(file), target
    for path in re.findall(r"\b(?:moetrain|scripts|tests)/[\w./]*\w\.(?:py|toml|txt)\b", text):
        assert (ROOT / path).is_file(), path
    for folder in re.findall(r"\bmoetrain/[\w/]*/(?![\w.])", text):
        assert (ROOT / folder).is_dir(), folder


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [name_of(page) for page in PAGES[1:] if f"({name_of(page)}" not in text] == []


def test_the_index_of_the_log_links_every_topic():
    text = (ROOT / "docs" / "log" / "README.md").read_text()
    linked = re.findall(r"^\| \[.+\]\((.+\.md)\) \|", text, re.M)
    assert sorted(linked) == [page.name for page in LOG if page.name != "README.md"]


@pytest.mark.parametrize("page", [p for p in LOG if p.name != "README.md"], ids=name_of)
def test_entries_of_the_log_begin_with_date_and_commit_newest_first(page):
    """CONTRIBUTING.md gives this form."""
    headings = re.findall(r"^##+ (.*)$", page.read_text(), re.M)
    found = [re.match(r"(\d{4}-\d\d-\d\d), [0-9a-f]{7,8}: \S", text) for text in headings]
    assert headings
    assert [text for text, match in zip(headings, found, strict=True) if not match] == []
    dates = [match[1] for match in found if match]
    assert dates == sorted(dates, reverse=True)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_settings_that_prose_names_exist():
    fields = {name: field.default for name, field in Config.model_fields.items()}
    sections = {k: type(x).model_fields for k, x in fields.items() if isinstance(x, BaseModel)}
    for page in PAGES:
        for section, key in re.findall(r"`-{0,2}(\w+)\.(\w+)[` =]", page.read_text()):
            if section in sections and key not in ("py", "toml", "jsonl"):
                assert key in sections[section], f"{name_of(page)}: {section}.{key}"


def test_the_pages_of_settings_and_of_names_elsewhere_are_fresh():
    script = load_script("scripts/write_settings.py")
    for name, text in (("settings.md", script.render()), ("names.md", script.render_names())):
        page = (ROOT / "docs" / name).read_text()
        assert page == text, "run python scripts/write_settings.py"


def test_every_preset_is_on_the_page_of_families():
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(.+?)`", page.partition("## Presets")[2].partition("\n## ")[0])
    ours = {n for n, x in PRESETS.items() if type(x).__module__.startswith("moetrain.")}
    assert {*listed} == ours | {"model.preset"}


def test_every_setting_is_on_its_page(capsys):
    page = (ROOT / "docs" / "settings.md").read_text()
    assert main(["--help"]) == 0
    named = re.findall(r"^  --([\w.]+) ", capsys.readouterr().out, re.M)
    assert len(named) > 100
    assert [name for name in named if f"| `{name}` |" not in page] == []


def undocumented(rows):
    """Return keys that docs/metrics.md lacks; for ``key/LAYERS`` the first part counts."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    keys = {key.partition("/")[0] + "/" * ("/" in key) for row in rows for key in row}
    keys |= {key for row in rows for key in row if key.startswith("seconds/")}
    return {key for key in keys if f"`{key}" not in page}


def test_every_metric_of_a_run_is_explained(folder):
    rows = read_metrics(folder / "outputs" / "debug" / "metrics.jsonl")
    assert any("loss" in row for row in rows)
    assert undocumented(rows) == set()


def test_every_metric_of_reinforcement_learning_is_explained(tmp_path):
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 16}
    words = [f"model.{name}={size}" for name, size in sizes.items()]
    words += ["train.steps=2", "train.micro_batch_size=4", "train.global_batch_size=16"]
    words += ["rl.supervised_steps=1", "rl.group_size=4", "rl.eval_tasks=2", "rl.kl_coef=0.1"]
    words += [
        "rl.entropy_coef=0.1",
        "rl.ratio=proximal",
        f"rl.env={YES_NO_MAYBE}",
        "rl.max_tokens=6",
    ]
    words += ["train.device=cpu", "log.tensorboard=no", f"output_dir={tmp_path}"]
    RlTrainer(Config.load("rl-sort", words, environ={}, recipes=Recipes.RL)).fit()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert any("eval_reward" in row for row in rows)
    assert any("reward" in row for row in rows)
    assert undocumented(rows) == set()
