"""Damaged files of a job: the job is set aside, and the others are served."""

import errno
import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from moetrain.config import ConfigError
from moetrain.jobs import store
from moetrain.jobs.api import Refused
from moetrain.jobs.run import JobRun
from moetrain.jobs.scheduler import Service
from tests.lib.deaths import dying
from tests.lib.job_servers import Failed, Remote, free_port
from tests.lib.job_services import answer_to, asker, config_of, new, rate, text_of, texts

SEEDS = (3, 4, 5)
NAMES = {seed: f"{seed:032x}:train:0" for seed in SEEDS}
BAD = SEEDS[1]
"""The job whose copies are damaged."""
STEP, LOOK = ("optim_step", rate(1e-2)), ("forward", texts(text_of(6)))
SAVE = ("save_weights_external", {"path": "more"})


def learn(seed):
    return "forward_backward", texts(text_of(seed))


def finish(service, name):
    """Serve the remaining requests of a job; return their results."""
    left = enumerate((learn(9), STEP, LOOK, SAVE), 10)
    return [answer_to(service, name, *request, number) for number, request in left]


def fate_of(service, name, expected):
    """Return why a job is not finished; nothing if it is, with the ``expected`` results."""
    try:
        answers = finish(service, name)
    except Refused as refusal:
        return str(refusal)
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert errors or answers == expected
    return errors[0] if errors else ""


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Kill a service of three jobs; return its folder, and the expected results of each job.

    Each job has two checkpoints, answers after them, and a pending request.
    """
    folder = tmp_path_factory.mktemp("left")
    service = Service(config_of(folder))
    for seed, name in NAMES.items():
        service.create(name, seed)
        ask = asker(service, name)
        for number in range(3):
            ask(*learn(seed + number))
            ask(*STEP)
        ask("save_weights", {"path": "kept"})
        ask(*learn(seed))
        ask(*LOOK)
    for name in NAMES.values():  # a turn of another job does not serve it
        service.submit(name, *STEP)
        # The service ignores hidden files.
        (folder / "jobs" / name / "answers" / ".DS_Store").touch()
    service.release()  # as the kernel releases a lock
    whole = shutil.copytree(folder, tmp_path_factory.mktemp("whole") / "out")
    with Service(config_of(whole)) as service:
        expected = {seed: finish(service, name) for seed, name in NAMES.items()}
    return folder, expected


def bytes_of(folder):
    files = [Path(at) / name for at, _, names in os.walk(folder) for name in names]
    return {file: file.open("rb").read() for file in files}


def rewrite(name, change):
    """Return a damage: ``change`` is applied to the bytes of the file ``name``."""

    def damage(job):
        path = job / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def remove(name):
    def damage(job):
        (shutil.rmtree if (job / name).is_dir() else Path.unlink)(job / name)

    return damage


def replace_by_file(name):
    def damage(job):
        shutil.rmtree(job / name)
        (job / name).write_text("no folder")

    return damage


def lose_answers(job):
    for number in range(5, 9):
        (job / "answers" / f"{number:08d}.json").unlink()


def later_version(data):
    return json.dumps({**json.loads(data), "version": 2}).encode()


def half(data):
    return data[: len(data) // 2]


AT_ONCE = {
    "empty": (rewrite("job.json", lambda _: b""), r"job\.json is damaged"),
    "half": (rewrite("job.json", half), r"job\.json is damaged"),
    "list": (rewrite("job.json", lambda _: b"[]"), r"job\.json .* holds a list, not an object"),
    "null": (rewrite("job.json", lambda _: b"null"), r"job\.json .* holds a NoneType"),
    "binary": (rewrite("job.json", lambda _: bytes(range(256))), r"job\.json is damaged"),
    "deep": (rewrite("job.json", lambda _: b"[" * 10**6), r"job\.json is damaged"),
    "type": (rewrite("job.json", lambda d: d.replace(b"4", b'"4"', 1)), r"job\.json .*checksum"),
    "old type": (rewrite("job.json", lambda _: b'{"seed": "4"}'), r"job\.json .* no seed"),
    "flipped": (rewrite("job.json", lambda d: d.replace(b"4", b"5", 1)), r"job\.json .*checksum"),
    "later": (rewrite("job.json", later_version), r"job\.json .*this version of moetrain"),
    "status": (
        rewrite("job.json", lambda _: b'{"seed": 4, "status": "paused", "source": null}'),
        r"job\.json .*this version of moetrain",
    ),
    "none": (remove("job.json"), r"job\.json is damaged: it is not there"),
    "folder": (lambda job: (job / "job.json").unlink() or (job / "job.json").mkdir(), "job"),
    "unreadable": (lambda job: (job / ".unreadable").write_text("job.json"), "Permission denied"),
    "closed": (lambda job: (job / ".unreadable").write_text("answers"), r"folder \(answers\)"),
    "foreign": (lambda job: (job / "answers/1x.json").touch(), r"answers/'1x\.json' is damaged"),
    "foreign folder": (lambda job: (job / "requests/old").mkdir(), r"requests/'old' is damaged"),
    "number": (
        lambda job: (job / "answers/99999999.json").touch(),
        r"requests/00000010\.json .*not there",
    ),
    "no answers": (replace_by_file("answers"), r"folder \(answers\)"),
    "no checkpoints": (replace_by_file("checkpoints"), r"folder \(checkpoints\)"),
    "checkpoints gone": (
        lambda job: [shutil.rmtree(path) for path in (job / "checkpoints").iterdir()],
        r"requests/00000000\.json is damaged: it is not there",
    ),
    "request gone": (remove("requests/00000008.json"), r"requests/00000008\.json .*not there"),
    "answer gone": (remove("answers/00000007.json"), r"answers/00000007\.json .*not there"),
    "answers gone": (lose_answers, "a checkpoint has seen 7 requests, but only 5 are answered"),
}
"""Damages that show when the service starts, with the message."""
LATER = {
    "request": (rewrite("requests/00000009.json", half), r"requests/00000009\.json is damaged"),
    "old request": (rewrite("requests/00000007.json", half), r"requests/00000007\.json is dam"),
    "flipped request": (
        rewrite("requests/00000009.json", lambda d: d.replace(b"0.01", b"0.02")),
        r"requests/00000009\.json .*checksum",
    ),
    "unknown request": (
        rewrite("requests/00000009.json", lambda _: b'{"kind": "optim_step", "digest": "x"}'),
        r"requests/00000009\.json .*no body",
    ),
    "answer": (rewrite("answers/00000007.json", half), r"answers/00000007\.json is damaged"),
    "unknown answer": (
        rewrite("answers/00000007.json", lambda _: b'{"kind": "dance", "digest": "", "error": ""}'),
        r"answers/00000007\.json .*this version",
    ),
    "checkpoints": (
        lambda job: [path.unlink() for path in (job / "checkpoints").glob("*/model-*")],
        "could not be restored",
    ),
}
"""Damages that show in the job's turn."""


def copies(left, tmp_path, damages):
    """Make a folder with the three jobs and a copy for each of ``damages``; return their ids."""
    folder = shutil.copytree(left, tmp_path / "out")
    names = {}
    for number, (key, damage) in enumerate(damages.items()):
        names[key] = f"{0xBAD0 + number:032x}"[::-1] + ":train:0"
        job = shutil.copytree(left / "jobs" / NAMES[BAD], folder / "jobs" / names[key])
        damage(job)
    return folder, names


@pytest.fixture
def unreadable(monkeypatch):
    """Simulate unreadable files of jobs, because root reads everything."""
    opened, scanned = Path.read_bytes, store.os.scandir

    def refuse(path):
        if isinstance(path, int):  # an open folder
            return
        path = Path(path)
        mark = path.parent / ".unreadable"
        if mark.exists() and mark.read_text() == path.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) or opened(path))
    monkeypatch.setattr(store.os, "scandir", lambda path: refuse(path) or scanned(path))


@pytest.mark.tier("long")
def test_damaged_jobs_are_set_aside_and_the_others_served(left, tmp_path, unreadable, caplog):
    both = AT_ONCE | LATER
    folder, names = copies(left[0], tmp_path, {key: damage for key, (damage, _) in both.items()})
    before = {name: bytes_of(folder / "jobs" / name) for name in names.values()}
    port = free_port()
    with Service(config_of(folder, f"jobs.port={port}")) as service:
        for key, (_, says) in AT_ONCE.items():
            known = service.find(names[key])
            assert known.status == "failed", key
            with pytest.raises(Refused, match=says):
                service.submit(names[key], *STEP)
            with pytest.raises(Refused, match=says):
                service.answer(names[key], 99)
            assert service.create(names[key], known.seed or 0) is known
            service.end(names[key])
            assert known.status == "failed"
        assert {service.find(names[key]).status for key in LATER} == {"open"}
        waiting = {key: service.answer(names[key], 9) for key in LATER}
        for seed in SEEDS:
            assert finish(service, NAMES[seed]) == left[1][seed]
        while service.turn():
            pass
        for key, (_, says) in LATER.items():
            with pytest.raises(Refused, match=says) as refused:
                service.submit(names[key], *STEP)
            assert waiting[key].result(0)["error"] in str(refused.value)
        with JobRun.serving(service):
            client, name = Remote(port), names["half"]
            assert client.call("GET", f"training_runs/{name}")["corrupted"]
            for ask in (
                lambda: client.ask(name, *STEP),
                lambda: client.retrieve(f"{name}:0"),
            ):
                with pytest.raises(Failed, match=r"job is failed: job\.json is damaged"):
                    ask()
    for key, name in names.items():
        assert f"job {name[:8]}:train:0 is served no more" in caplog.text, key
        after = bytes_of(folder / "jobs" / name)
        assert {path: after[path] for path in before[name]} == before[name], key  # no file is lost
    # The next start finds repaired jobs, and a deleted job stays deleted.
    (folder / "jobs" / names["foreign"] / "answers" / "1x.json").unlink()
    with Service(config_of(folder)) as service:
        assert finish(service, names["foreign"]) == left[1][BAD]
        gone = service.delete(names["half"])
        service.turn()
        gone.result(0)
    assert not (folder / "jobs" / names["half"]).exists()


def test_an_old_answer_that_is_damaged_costs_nothing_but_itself(left, tmp_path):
    damages = {"old": rewrite("answers/00000001.json", half)}
    folder, names = copies(left[0], tmp_path, damages)
    with Service(config_of(folder)) as service:
        assert "is damaged" in service.answer(names["old"], 1).result(0)["error"]
        assert "result" in service.answer(names["old"], 0).result(0)
        assert finish(service, names["old"]) == left[1][BAD]


def damage_at_random(draw):
    """Return a random damage: a file is cut, flipped, emptied, replaced or removed."""

    def damage(job):
        files = sorted(path for path in job.rglob("*") if path.is_file() and path.stat().st_size)
        kinds = sorted({path.parent for path in files} | {path.suffix for path in files}, key=str)
        kind = draw.choice(kinds)  # otherwise most would be of a checkpoint
        path = draw.choice([p for p in files if kind in (p.parent, p.suffix)])
        data = bytearray(path.read_bytes())
        match draw.randrange(5):
            case 0:
                del data[draw.randrange(len(data)) :]
            case 1 | 2:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            case 3:
                data = bytearray(draw.randbytes(len(data)))
            case 4:
                path.unlink()
                return
        path.write_bytes(data)

    return damage


@pytest.mark.tier("quick", long=["0-30"])
@pytest.mark.parametrize(
    ("seed", "number"), [(0, 30), *(pytest.param(s, 60, marks=pytest.mark.long) for s in (1,))]
)
def test_whatever_is_damaged_is_a_jobs_own_and_never_a_wrong_result(left, tmp_path, seed, number):
    draw = random.Random(seed)
    damages = {n: damage_at_random(draw) for n in range(number)}
    folder, names = copies(left[0], tmp_path, damages)
    with Service(config_of(folder)) as service:
        order = sorted(names.values(), key=lambda _: draw.random())
        fates = {name: fate_of(service, name, left[1][BAD]) for name in order}
        for seed in SEEDS:
            assert finish(service, NAMES[seed]) == left[1][seed]
        for name, fate in fates.items():
            # A job cannot know that its newest request is missing; its client does.
            is_whole = not fate or fate == "request 10 comes too early; the next number is 9"
            assert service.find(name).status == ("open" if is_whole else "failed")
            assert is_whole or re.search("is damaged: |cannot read ", fate), fate
    assert 0 < sum(map(bool, fates.values())) < number


def test_a_base_that_is_damaged_is_one_line(left, tmp_path):
    folder = shutil.copytree(left[0], tmp_path / "out")
    rewrite("base.json", half)(folder)
    with pytest.raises(ConfigError, match=r"output_dir: in .* base\.json is damaged: .*remove it"):
        Service(config_of(folder))


def test_an_answer_that_cannot_be_written_is_in_no_checkpoint(left, tmp_path, monkeypatch):
    """The disk is full for one moment, and then takes a checkpoint."""
    folder = shutil.copytree(left[0], tmp_path / "out")
    with Service(config_of(folder)) as service, monkeypatch.context() as patch:

        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(store, "write_durably", full)
        with pytest.raises(OSError, match="No space"):
            service.turn()
    with Service(config_of(folder)) as service:
        for seed in SEEDS:
            assert finish(service, NAMES[seed]) == left[1][seed]


def test_death_while_a_job_is_created_leaves_no_job_or_the_whole_job(tmp_path, monkeypatch):
    """The client had no answer, so it sends the request again, or goes."""
    name, left = NAMES[BAD], []
    for after in itertools.count():
        folder = tmp_path / str(after)
        service, is_answered = Service(config_of(folder)), False
        with dying(monkeypatch, after):
            service.create(name, BAD)
            is_answered = True
        service.release()
        if is_answered:
            break
        files = sorted(path.name for path in (folder / "jobs" / name).rglob("*") if path.is_file())
        left.append("whole" if files == ["job.json"] else "part" if files else "none")
        with Service(config_of(folder)) as service:
            if left[-1] == "whole":
                assert service.find(name).seed == BAD
                assert service.create(name, BAD) is service.find(name)
            else:
                assert service.jobs == {}
                assert service.create(name, BAD + 1).seed == BAD + 1  # nothing knows the old seed
            assert service.find(name).status == "open"
            assert "result" in answer_to(service, name, *learn(1))
    assert [kind for kind, _ in itertools.groupby(left)] == ["none", "part", "whole"]


def test_a_job_is_saved_by_time(tmp_path, monkeypatch):
    with Service(config_of(tmp_path, "jobs.save_interval=99", "checkpoint.minutes=1")) as service:
        name = new(service)
        root = tmp_path / "jobs" / name / "checkpoints"
        asker(service, name)(*learn(1))
        service.session.now.saved_time -= 61
        asker(service, name)(*learn(1))  # there is none in the middle of a step
        assert not list(root.glob("*"))
        for request in (STEP, LOOK):
            asker(service, name)(*request)
            assert [path.name for path in root.glob("*")] == ["step-00000003"]
