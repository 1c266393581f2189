"""scripts/walk.py: each walk comes to its target, opens no file twice, and is that of the page."""

import sys
import threading

import pytest
import walk as script
from walk import WALKS, Call, Landmark, Recorder, Walk, stops_of

from moetrain.config import Config, ConfigError
from moetrain.config.sources import shortened

MAIN = Call("moetrain.cli.train", "main")
FIT, STEP = (Call("moetrain.train.loop", f"Trainer.{name}") for name in ("fit", "train_step"))
UPDATE = Call("moetrain.train.engine", "Engine.step")
CONFIG = Call("moetrain.config", "Config.load")


def files(stops):
    return [(stop.path.removeprefix("moetrain/"), stop.is_again) for stop in stops]


@pytest.fixture(scope="module", params=WALKS)
def walked(request):
    """The name of a walk, and its stacks from a run."""
    pytest.importorskip("tinker" if request.param == "request" else "torch")
    return request.param, script.record(WALKS[request.param])


@pytest.mark.tier("long", quick=["request"])
def test_walk_comes_by_its_landmarks_to_its_target(walked):
    name, stacks = walked
    reached = [":".join(stack[-1]) for stack in stacks.values()]
    assert reached == [f"moetrain.{landmark.function}" for landmark in WALKS[name].landmarks]


def test_walk_opens_no_file_twice(walked):
    name, stacks = walked
    assert script.again(stops_of(stacks)) == [], script.printed(name, stops_of(stacks))


def test_page_has_the_walk(walked):
    name, stacks = walked
    page = script.PAGE.read_text("utf-8")
    assert script.section(name, stops_of(stacks)) in page, "run python scripts/walk.py --write"


def test_page_has_no_other_walk():
    page = script.PAGE.read_text("utf-8")
    assert page.startswith(script.HEAD)
    assert page.count("\n## ") == len(WALKS)


def test_stops_are_files_in_the_order_of_their_first_call():
    stops = stops_of({"1. read": [MAIN, CONFIG], "2. update": [MAIN, FIT, STEP, UPDATE]})
    expected = ["cli/train.py", "config/__init__.py", "train/loop.py", "train/engine.py"]
    assert files(stops) == [(path, False) for path in expected]
    assert stops[1].calls == {CONFIG: ["1. read"]}
    assert stops[2].calls == {FIT: [], STEP: []}


def test_stops_mark_a_call_that_leads_up_the_list_once():
    # config is opened below cli and left for the loop, which calls it.
    stacks = {"1": [MAIN, CONFIG], "2": [MAIN, FIT, CONFIG], "3": [MAIN, FIT, CONFIG, UPDATE]}
    stops = stops_of(stacks)
    expected = [("cli/train.py", False), ("config/__init__.py", False), ("train/loop.py", False)]
    assert files(stops) == [*expected, ("config/__init__.py", True), ("train/engine.py", False)]
    assert script.again(stops) == ["moetrain/config/__init__.py"]


def test_stops_allow_a_stack_that_begins_in_a_file_further_up():
    stacks = {"1": [MAIN, FIT, UPDATE], "2": [STEP, UPDATE]}
    assert files(stops_of(stacks)) == files(stops_of({"1": [MAIN, FIT, UPDATE]}))


def test_recorder_takes_stacks_of_all_threads_up_to_the_last_landmark():
    landmark = Landmark("", "config.sources:shortened")
    recorder, before = Recorder([landmark, landmark]), sys.getprofile()
    with recorder.recording():
        thread = threading.Thread(target=shortened, args=("a",))
        thread.start()
        thread.join()
        for word in ("b", "c"):
            shortened(word)
    assert sys.getprofile() is before
    assert recorder.stacks == [[Call("moetrain.config.sources", "shortened")]] * 2


def test_recorder_counts_a_stack_from_where_its_landmark_says():
    function = "config.sources:_cut"
    recorder = Recorder(
        [Landmark("", function), Landmark("", function, "config.sources:shortened")]
    )
    with recorder.recording():
        for _ in range(2):
            with pytest.raises(ConfigError, match="is not one of"):
                Config.load("no recipe", environ={})
    whole, counted = recorder.stacks
    assert whole[0] == CONFIG
    assert (
        counted == whole[-2:] == [Call("moetrain.config.sources", x) for x in ("shortened", "_cut")]
    )


def test_record_says_which_landmark_was_not_reached():
    walk = Walk("", (Landmark("", "train.loop:Trainer.fit"),), lambda folder: print("did nothing"))
    with pytest.raises(SystemExit, match=r"no call of train\.loop:Trainer\.fit, in:\ndid nothing"):
        script.record(walk)


def test_check_fails_if_a_file_comes_twice(monkeypatch, capsys):
    stacks = {"1. a": [MAIN, CONFIG], "2. b": [MAIN, FIT, CONFIG]}
    monkeypatch.setattr(script, "record", lambda walk: stacks)
    monkeypatch.setattr(sys, "argv", ["walk.py", "batch", "--check"])
    assert script.main() == 1
    assert "4. moetrain/config/__init__.py (again)" in capsys.readouterr().out
    del stacks["2. b"]
    assert script.main() == 0
