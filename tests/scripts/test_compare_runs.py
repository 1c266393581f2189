"""scripts/compare_runs.py: the command line of each run."""

from compare_runs import arguments


def test_later_settings_replace_earlier_ones():
    common = ["debug", "optim.lr=1e-3", "train.steps=200"]
    found = arguments([*common, "optim.lr=3e-3"], ["output_dir=out", "log.interval=1"])
    assert found[0] == "debug"
    given = dict(zip(found[1::2], found[2::2], strict=True))
    assert given == {
        "--optim.lr": "3e-3",
        "--train.steps": "200",
        "--output_dir": "out",
        "--log.interval": "1",
    }
