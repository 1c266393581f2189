"""Generation with adapters beside frozen weights, and updates of the adapters."""

import pytest
import torch

from moetrain.cli.generate import main as generate
from moetrain.data.tokenizer import ByteTokenizer
from moetrain.generate.engine import Generator
from moetrain.generate.weights import WeightUpdate, _replica_bytes, replica
from moetrain.models.hf.save import save_hf
from moetrain.models.transformer import Transformer
from tests.lib.adapter_rollouts import answers_of, check, follow
from tests.lib.adapters import EVERYTHING, adapted
from tests.lib.distributed import spawn
from tests.lib.engines import weights_of


def test_adapters_are_used_and_updated():
    check(*follow([]))


def test_replica_borrows_frozen_weights():
    engine = adapted(EVERYTHING)
    model, experts = replica(engine)
    generator = Generator(model, experts=experts, num_pages=20, page_size=4)
    update = WeightUpdate(engine, generator)
    own = {name for name, x in engine.fsdp.members.items() if x.rule.trainable}
    assert set(dict(model.named_parameters())) - own == generator.borrowed
    assert _replica_bytes(engine) == sum(model.get_parameter(name).nbytes for name in own)
    update()
    expected, before = answers_of(generator), weights_of(engine)
    generator.sleep(weights=True)
    assert not any(model.get_parameter(name).untyped_storage().nbytes() for name in own)
    assert all(torch.equal(x, before[name]) for name, x in weights_of(engine).items())
    generator.wake()
    update()
    assert answers_of(generator) == expected


def test_the_commands_take_adapters(tmp_path, capsys):
    engine = adapted(EVERYTHING, "model.vocab_size=264")
    engine.save_peft(tmp_path / "adapter")
    with torch.device("cpu"):
        whole = Transformer(engine.arch)
    whole.load_state_dict({n: w.to("cpu", copy=True) for n, w in engine.weights(merged=True)})
    merged, plain = tmp_path / "merged", tmp_path / "plain"
    save_hf(whole, merged, tokenizer=ByteTokenizer().export())
    own = {name: member.local for name, member in engine.fsdp.members.items()}
    whole.load_state_dict({n: own.get(n, w) for n, w in whole.state_dict().items()})
    save_hf(whole, plain, tokenizer=ByteTokenizer().export())
    words = ["--prompt", "AB", "--device", "cpu", "--temperature", "0", "--max_tokens", "20"]
    texts = []
    for where in ([merged], [plain, "--adapter", tmp_path / "adapter"], [plain]):
        assert generate([*map(str, where), *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert generate([str(plain), "--adapter", str(plain), *words]) == 2
    assert capsys.readouterr().err.startswith("error: adapter: ")


def follow_all(runs):
    return [follow(words) for words in runs]


@pytest.mark.tier("long")
def test_adapters_are_used_and_updated_on_two_ranks():
    runs = [["parallel.ep=2"], ["parallel.tp=2"], ["parallel.pp=2"]]
    for answers in spawn(2, follow_all, runs, timeout=100):
        for answer in answers:
            check(*answer)
