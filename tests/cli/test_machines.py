"""``moetrain launch``: its files are valid for their tools, and its jobs resume where they stopped.

Where sbatch, kubectl or SkyPilot is installed, its own parser reads the file. Otherwise tables here
have Slurm's options and the fields of a JobSet and a task, from their documentation.
"""

import functools
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from moetrain.cli.machines import main, shell_word, yaml_word
from tests.lib.command_lines import settled
from tests.lib.typed_commands import LAUNCHERS, by_slurm, free_port, losses, run_together

CONTAINER = ["--image", "registry/moetrain:1", "--volume", "runs"]
OWN = {"slurm": [], "k8s": CONTAINER, "sky": CONTAINER}
TWO = ["--nodes", "2", "--gpus", "2", "--train.global_batch_size", "64"]
HOSTILE = (
    "a  'b' \"c\" $HOME $(HOME) $$ `id` \\ \n# x: {y}\t%s * ~ é \x07\u2028\U0001f600 !! \\x41 --"
)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def printed(capsys):
    """Return the output of a dry run, which writes no file."""

    def run(way, *words):
        before = sorted(Path().iterdir())
        capsys.readouterr()  # drops earlier output
        recipe = [word for word in words[:1] if not word.startswith("-")]
        assert main([way, *recipe, *OWN[way], *words[len(recipe) :], "--dry_run"]) == 0
        assert sorted(Path().iterdir()) == before
        return capsys.readouterr().out

    return run


def clean(**more):
    """Remove a launcher's variables from the environment, and put ``bin`` first in its path."""
    path = f"{Path('bin').absolute()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith((*LAUNCHERS, "SKYPILOT"))}
    own = {"PATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return kept | own | {"CUDA_VISIBLE_DEVICES": "", "HOME": os.getcwd()} | more


def program(name, text):
    """Write a program ``bin/NAME`` in Python, for the scripts that run here."""
    path = Path("bin") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport json, os, signal, subprocess, sys, time\n{text}")
    path.chmod(0o755)


# ---- the tools' own parsers
# -----------------------------------------------------------------------

SBATCH = {
    "job-name": r"[\w-]+",
    "output": r"[\w-]+-%j\.log",
    "open-mode": "append|truncate",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "exclusive": "|user|mcs",
    "mem": r"\d+[KMGT]?",
    "requeue": "",
    "signal": r"([RB]:)?(\w+)(@\d+)?",
    "partition": r"\w+(,\w+)*",
    "time": r"[\d:-]+",
}
"""Options of man sbatch, with their arguments."""


def test_a_script_is_one_that_sbatch_takes(printed):
    more = ["--sbatch", "partition=gpu time=24:00:00", "--save_seconds", "90", "--name", "mine"]
    text = printed("slurm", "debug", *TWO, *more)
    assert text.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    given = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            name, _, value = re.fullmatch(r"#SBATCH --([a-z-]+)(=(\S+))?", line).groups()
            given[name] = value or ""
            assert re.fullmatch(SBATCH[name], given[name]), line
    assert given["nodes"] == given["ntasks-per-node"] == "2"
    assert given["signal"] == "B:USR1@90"
    assert given["job-name"] == "mine"
    assert {"requeue", "partition", "time"} <= given.keys()
    body = text.partition("\n\n")[2]
    assert "#SBATCH" not in body  # sbatch would not read it there
    if shutil.which("sbatch"):
        Path("script").write_text(text)
        words = ["sbatch", "--test-only", "script"]
        said = subprocess.run(words, capture_output=True, text=True).stderr
        assert not re.search("unrecognized option|[Ii]nvalid (option|.* specification)", said), said


@pytest.mark.parametrize("way", list(OWN))
def test_a_job_without_a_recipe_gives_the_run_its_settings_alone(way, printed):
    """The word after a setting is its value: it is no recipe, as it is none for train."""
    words = ["--nodes", "2", "--gpus", "1", "--data.source", "stdlib", "--output_dir", "out"]
    words += ["--train.global_batch_size", "64"]
    command = printed(way, *words)
    command = " ".join(command.replace("                    - ", " ").replace('"', "").split())
    given = "--data.source stdlib --output_dir out --train.global_batch_size 64"
    assert f"moetrain.train {given}" in command


# Fields by path, in which "*" is each entry of a list; from the API references of JobSet v1alpha2
# and of Kubernetes' batch/v1 and core/v1.
_JOB = "spec.replicatedJobs.*.template.spec"
_POD = f"{_JOB}.template.spec"
_CONTAINER = f"{_POD}.containers.*"
JOB_SET = {
    "": {"apiVersion": str, "kind": str, "metadata": dict, "spec": dict},
    "metadata": {"name": str},
    "spec": {"network": dict, "failurePolicy": dict, "replicatedJobs": list},
    "spec.network": {"enableDNSHostnames": bool, "subdomain": str},
    "spec.failurePolicy": {"maxRestarts": int, "rules": list},
    "spec.failurePolicy.rules.*": {"name": str, "action": str, "onJobFailureReasons": list},
    "spec.replicatedJobs.*": {"name": str, "replicas": int, "template": dict},
    "spec.replicatedJobs.*.template": {"spec": dict},
    _JOB: {"completionMode": str, "parallelism": int, "completions": int, "backoffLimit": int}
    | {"podFailurePolicy": dict, "template": dict},
    f"{_JOB}.podFailurePolicy": {"rules": list},
    f"{_JOB}.podFailurePolicy.rules.*": {"action": str, "onPodConditions": list},
    f"{_JOB}.podFailurePolicy.rules.*.onPodConditions.*": {"type": str, "status": str},
    f"{_JOB}.template": {"spec": dict},
    _POD: {"restartPolicy": str, "terminationGracePeriodSeconds": int}
    | {"containers": list, "volumes": list},
    _CONTAINER: {"name": str, "image": str, "workingDir": str, "command": list, "env": list}
    | {"resources": dict, "volumeMounts": list},
    f"{_CONTAINER}.env.*": {"name": str, "value": str},
    f"{_CONTAINER}.resources": {"limits": dict},
    f"{_CONTAINER}.resources.limits": {"nvidia.com/gpu": int},
    f"{_CONTAINER}.volumeMounts.*": {"name": str, "mountPath": str},
    f"{_POD}.volumes.*": {"name": str, "persistentVolumeClaim": dict, "emptyDir": dict}
    | {"configMap": dict},
    f"{_POD}.volumes.*.persistentVolumeClaim": {"claimName": str},
    f"{_POD}.volumes.*.emptyDir": {"medium": str},
    f"{_POD}.volumes.*.configMap": {"name": str},
}
TASK = {
    "": {"name": str, "num_nodes": int, "resources": dict, "volumes": dict, "setup": str}
    | {"run": str},
    "resources": {"accelerators": str, "image_id": str, "job_recovery": dict},
    "resources.job_recovery": {"max_restarts_on_errors": int},
    "volumes": {"/shared": str},
}


def assert_fields(value, schema, path=""):
    """Check that every mapping has only the fields, of the types, that ``schema`` has there."""
    inside = f"{path}." * bool(path)
    if isinstance(value, dict):
        for key, each in value.items():
            assert key in schema[path], f"{path} has no field {key}"
            assert type(each) is schema[path][key], f"{inside}{key}"
            assert_fields(each, schema, inside + key)
    elif isinstance(value, list):
        for each in value:
            assert_fields(each, schema, f"{inside}*")


def whole(value):
    """Return ``value`` without kubectl's additions, with resource numbers in its spelling."""
    if isinstance(value, dict):
        own = {k: whole(x) for k, x in value.items() if k not in ("creationTimestamp", "status")}
        return {k: str(x) if k == "nvidia.com/gpu" else x for k, x in own.items() if x != {}}
    return [whole(x) for x in value] if isinstance(value, list) else value


@pytest.mark.parametrize("is_file", [False, True])
def test_a_job_set_has_fields_that_there_are(is_file, printed):
    Path("my.toml").write_text(f'[model]\npreset = "debug"\n# {HOSTILE.splitlines()[0]}\n')
    recipe = ["my.toml", "--data.source", "stdlib"] if is_file else ["debug"]
    hostile = ["--train.sample_prompt", HOSTILE, "--name", "no"]  # "no" is false in YAML
    text = printed("k8s", *recipe, *TWO, *hostile)
    first, *others = yaml.safe_load_all(text)
    assert_fields(first, JOB_SET)
    assert (first["apiVersion"], first["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert {rule["action"] for rule in first["spec"]["failurePolicy"]["rules"]} == {
        "RestartJobSetAndIgnoreMaxRestarts"
    }
    (job,) = first["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy needs it
    # JobSet's documentation: the host of POD is JOBSET-JOB-INDEX-POD in the domain.
    assert f"--master-addr=no-{job['name']}-0-0.no" in container["command"]
    volumes = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    assert len(others) == is_file
    if is_file:
        (file,) = others
        assert file["data"] == {"run.toml": Path("my.toml").read_text()}
        assert (file["apiVersion"], file["kind"]) == ("v1", "ConfigMap")
        assert "/etc/moetrain/run.toml" in container["command"]
    if shutil.which("kubectl"):  # it drops fields that a Job does not have
        mine = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        words = ["kubectl", "set", "image", "--local", "-f", "-", "-o", "json"]
        words += [f"{container['name']}=another"]
        read = subprocess.run(
            words, input=json.dumps(mine), capture_output=True, text=True, check=True
        )
        container["image"] = "another"
        assert whole(json.loads(read.stdout)) == whole(mine)


def test_a_task_has_fields_that_there_are(printed):
    words = [*TWO, "--gpu", "h200", "--train.sample_prompt", HOSTILE, "--restarts", "5"]
    text = printed("sky", "debug", *words)
    task = yaml.safe_load(text)
    assert_fields(task, TASK)
    assert task["resources"]["accelerators"] == "H200:2"
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 5}
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    if importlib.util.find_spec("sky"):
        import sky

        read = sky.Task.from_yaml_config(task)
        assert (read.num_nodes, read.volumes) == (2, {"/shared": "runs"})


# ---- the ranks' arguments
# -------------------------------------------------------------------------


def expanded(word, variables):
    """Expand a word of a container's command as Kubernetes does."""

    def value(match):
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", value, word)


def started(way, text, node=0):
    """Return the arguments of the program that a file starts on a machine."""
    dump = "print(json.dumps(sys.argv[1:]))"
    if way == "k8s":
        command = next(yaml.safe_load_all(text))
        for key in ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec"):
            command = command[key]
        command = command["containers"][0]["command"]
        return [expanded(word, {"JOB_COMPLETION_INDEX": str(node)}) for word in command[1:]]
    program("srun" if way == "slurm" else "torchrun", dump)
    body = text if way == "slurm" else yaml.safe_load(text)["run"].replace("/shared", ".")
    own = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": str(node)}
    own |= {"SKYPILOT_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    words = ["bash", "-c", body]
    return json.loads(subprocess.run(words, env=clean(**own), capture_output=True).stdout)


@pytest.mark.parametrize("way", OWN)
def test_every_machine_gets_the_words_that_were_given(way, printed):
    settings = ["--train.sample_prompt", HOSTILE, f"--output_dir={HOSTILE.replace('/', '')}x"]
    text = printed(way, "debug", *TWO, *settings)
    for node in (0, 1):
        words = started(way, text, node)
        at = words.index("moetrain.train")
        assert words[at + 1 :] == ["debug", *TWO[4:], *settings]
        if way == "k8s":
            assert f"--node-rank={node}" in words
        elif way == "sky":
            assert words[words.index("--node-rank") + 1] == str(node)
            assert words[words.index("--master-addr") + 1] == "10.0.0.1"


def test_a_file_of_settings_goes_with_a_task(printed):
    settings = f"[model]\npreset = 'debug'\n[train]\nsample_prompt = '''{HOSTILE[:40]}'''\n"
    Path("my settings.toml").write_text(settings)
    words = started("sky", printed("sky", "my settings.toml", *TWO, "--data.source", "stdlib"))
    assert words[words.index("moetrain.train") + 1] == str(Path("run.toml").absolute())
    assert Path("run.toml").read_text() == settings


def test_any_text_comes_through_bash_and_yaml():
    drawn = random.Random(0)
    pieces = [*HOSTILE, *"\r\x00\x7f\x85\xa0\ufeff\ufffe,[]{}:-?&*!|>%@0", "''", "\\n", "$(", "é"]
    texts = ["".join(drawn.choices(pieces, k=drawn.randrange(12))) for _ in range(500)]
    texts.append(HOSTILE)
    assert [yaml.safe_load(f"- {yaml_word(text)}  # x") for text in texts] == [[x] for x in texts]
    words = [text.replace("\x00", "") for text in texts]  # an argument cannot hold it
    script = "printf '%s\\0' " + " ".join(map(shell_word, words))
    assert "\n" not in script
    block = yaml.safe_load(f"run: |\n  {script}\n")["run"]  # as in a task
    assert block == script + "\n"
    done = subprocess.run(["bash"], input=block.encode(), capture_output=True, check=True)
    assert done.stdout == b"".join(os.fsencode(word) + b"\0" for word in words)


# ---- refusals, and written files
# ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("slurm debug --nodes 0", r"nodes: '0' is not allowed \(number of machines\)"),
        ("slurm debug --gpus 8", r"launch: .*required: --nodes"),
        ("lsf debug --nodes 2", r"launch: .*invalid choice: 'lsf'"),
        ("slurm none --nodes 2", r"recipe: 'none' is not one of"),
        ("slurm debug --nodes 2 --optim.lrr 1", r"optim\.lrr: unknown setting; did you mean"),
        ("slurm debug --nodes 2 --image x", r"image: unknown setting"),
        ("k8s debug --nodes 2 --image x", r"launch: .*required: --volume"),
        ("sky debug --nodes 2 --image x --volume s3://b", r"volume: 's3://b'"),
        ("slurm debug --nodes 2 --name Mine", r"name: 'Mine' is not allowed"),
        ("slurm debug --nodes 2 --sbatch a=b;c=d\n", r"sbatch: "),
        ("slurm debug --nodes 2 --sbatch=--time=60", r"sbatch: '--time=60' is not allowed"),
        ("slurm rl-sort --nodes 2", r"recipe: 'rl-sort' sets rl.env"),
        # These meshes are impossible.
        ("slurm debug --nodes 3", r"train\.global_batch_size: 16 is not a multiple"),
        ("slurm debug --nodes 2 --parallel.tp 3", r"parallel"),
        (
            "slurm debug --nodes 2 --launch.nproc 4",
            r"launch\.nproc: 4: the job itself starts the ranks",
        ),
        ("slurm debug --nodes 2 --launch.max_restarts 1", r"launch\.max_restarts: 1: the job "),
        ("slurm debug --nodes 2 --checkpoint.resume never", r"checkpoint\.resume: 'never': "),
        ("slurm debug --nodes 2 --train.device cpu", r"launch\.gpus: .*train\.device 'cpu'"),
    ],
)
def test_launch_command_refuses_bad_jobs_in_one_line(words, says, capsys):
    assert main(words.split(" ")) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert re.match(f"error: {says}", error), error
    assert error.count("\n") == 1
    assert not list(Path().iterdir())


def test_launch_refuses_paths_that_a_container_lacks(monkeypatch, capsys):
    job = ["k8s", "debug", *CONTAINER, *TWO]
    for folder in ("/scratch/run", "../run", "/shared/../run"):
        assert main([*job, f"--output_dir={folder}"]) == 2
        assert "error: output_dir: " in capsys.readouterr().err
    assert main([*job, "--output_dir=/shared/a/b", "--dry_run"]) == 0
    monkeypatch.setenv("MOETRAIN_OPTIM__LR", "1e-4")
    assert main(job) == 2
    assert "error: optim.lr: set in this environment" in capsys.readouterr().err
    assert main(["slurm", *job[1:2], *TWO, "--dry_run"]) == 0  # sbatch sends it along


def test_a_file_is_written_once(capsys):
    for way, file in (("slurm", "sbatch"), ("k8s", "jobset.yaml"), ("sky", "sky.yaml")):
        path = Path(f"moetrain-debug.{file}")
        job = [way, "debug", *OWN[way], *TWO]
        assert main(job) == 0
        said = capsys.readouterr()
        assert said.out.startswith(f"wrote {path}; ")
        assert "fits: " in said.err
        text = path.read_text()
        assert main([*job, "--dry_run"]) == 0
        assert capsys.readouterr().out == text
        assert main([*job, "--name", "other", "--file", str(path)]) == 2
        said = capsys.readouterr().err.splitlines()
        (line,) = (text for text in said if text.startswith("error"))
        assert re.match(r"error: file: .* exists; give another by --file, or --overwrite$", line)
        assert path.read_text() == text
        assert main([*job, "--name", "other", "--file", str(path), "--overwrite"]) == 0
        assert path.read_text() != text
        capsys.readouterr()
    assert main([*job, "--file", "no/such/folder"]) == 2
    assert "error: file: 'no/such/folder': No such file" in capsys.readouterr().err


# ---- restarts
# -------------------------------------------------------------------------------------


SCONTROL = """
if sys.argv[1:3] == ["show", "job"]:
    print("   JobState=" + os.environ.get("STATE", "RUNNING"))
else:
    open("again", "a").write(" ".join(sys.argv[1:]) + ";")
"""


@pytest.mark.parametrize(
    ("code", "sent", "restarts", "state", "again"),
    [
        (0, None, 0, "RUNNING", False),
        (1, None, 0, "RUNNING", True),
        (137, None, 2, "RUNNING", True),
        (1, None, 3, "RUNNING", False),  # --restarts is exhausted
        (2, None, 0, "RUNNING", False),  # a wrong setting
        (143, signal.SIGUSR1, 9, "RUNNING", True),  # time is up
        (137, signal.SIGUSR1, 9, "RUNNING", True),
        (0, signal.SIGUSR1, 0, "RUNNING", False),  # it finished at that moment
        (143, None, 9, "RUNNING", True),  # a preemption that signals only the ranks
        (143, signal.SIGTERM, 9, "RUNNING", True),
        (143, None, 0, "COMPLETING", False),  # scancel
        (143, signal.SIGTERM, 0, "COMPLETING", False),
        (137, signal.SIGTERM, 0, "COMPLETING", False),
    ],
)
def test_a_script_queues_its_job_again(code, sent, restarts, state, again, printed):
    text = printed("slurm", "debug", *TWO)
    program("scontrol", SCONTROL)
    wait = f"""
def stop(number, frame):
    time.sleep(0.2)
    sys.exit({code})
signal.signal(signal.SIGUSR1, stop)
open('ready', 'w').close()
time.sleep(600 if {sent is not None} else 0)
sys.exit({code})"""
    program("srun", wait)
    Path("script").write_text(text)
    own = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(restarts), "STATE": state}
    job = subprocess.Popen(["bash", "script"], env=clean(**own))
    if sent is not None:
        while not Path("ready").exists():
            time.sleep(0.02)
        job.send_signal(sent)
    assert job.wait(timeout=60) == code
    assert Path("again").exists() == again
    assert not again or Path("again").read_text() == "requeue 77;"


SRUN = """
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[1:]
own = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "localhost"}
ranks = [
    subprocess.Popen(words, env={**os.environ, **own, "SLURM_PROCID": str(r)}) for r in range(2)
]
signal.signal(signal.SIGUSR1, lambda n, f: [rank.send_signal(n) for rank in ranks])
sys.exit(max(code if code >= 0 else 128 - code for code in [rank.wait() for rank in ranks]))
"""
"""Starts two ranks as if on two machines, forwards a signal, and exits with the highest code."""
LONG = ["train.steps=60", "train.sample_tokens=0"]


UNDISTURBED = []
"""Losses of two undisturbed ranks, computed once per process."""


@pytest.fixture
def settings(tiny_words, tmp_path):
    """Return the settings of a run in ``out``, and the losses of two undisturbed ranks."""
    words = settled([*(w for w in tiny_words if "device" not in w), *LONG, "output_dir=out"])
    if not UNDISTURBED:
        alone = [*words[:-1], "output_dir=alone", "train.device=cpu"]
        run_together(by_slurm(["moetrain.train", "debug", *alone]), tmp_path)
        UNDISTURBED.append(losses(tmp_path / "alone"))
    return words, UNDISTURBED[0]


def wait_for_steps(jobs, steps):
    metrics, end = Path("out/metrics.jsonl"), time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert time.monotonic() < end
        assert all(job.poll() is None for job in jobs)
        time.sleep(0.02)


def steps_saved():
    return [int(path.name.partition("-")[2]) for path in Path("out/checkpoints").glob("step-*")]


@pytest.mark.tier("long")
def test_a_slurm_job_that_is_stopped_ends_where_an_undisturbed_run_does(printed, settings):
    words, expected = settings
    Path("script").write_text(printed("slurm", "debug", "--nodes", "2", "--gpus", "1", *words))
    program("srun", SRUN)
    program("scontrol", SCONTROL)
    environment = clean(SLURM_JOB_ID=str(free_port()), MASTER_PORT=str(free_port()))
    job = subprocess.Popen(["bash", "script"], env=environment)
    wait_for_steps([job], 8)
    job.send_signal(signal.SIGTERM)  # it becomes SIGUSR1, as tested above
    assert job.wait(timeout=120) == 143
    (saved,) = steps_saved()
    assert 8 <= saved < 60
    assert Path("again").read_text() == f"requeue {environment['SLURM_JOB_ID']};"
    more = {"SLURM_RESTART_COUNT": "1", "MASTER_PORT": str(free_port())}
    again = subprocess.run(
        ["bash", "script"], env=environment | more, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr
    assert f"step-{saved:08d}" in again.stderr  # it resumes from this step
    assert losses(Path("out")) == expected


def agents(way, text):
    """Start torchrun as a file does on each of two machines; here both are this one."""
    port = str(free_port())
    for node in (0, 1):
        own = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NODE_RANK": str(node)}
        if way == "sky":
            body = yaml.safe_load(text)["run"].replace("/shared", ".").replace("29500", port)
            command = ["bash", "-c", body.replace("\n  torchrun", "\n  exec torchrun")]
        else:
            words = [word.replace("29500", port) for word in started(way, text, node)]
            host = "--master-addr=moetrain-out-ranks-0-0.moetrain-out"
            assert host in words
            words[words.index(host)] = "--master-addr=127.0.0.1"
            command = ["torchrun", *words]
        yield subprocess.Popen(command, env=clean(**own, SKYPILOT_NUM_NODES="2"))


@pytest.mark.tier("long")
def test_a_job_whose_machine_is_taken_away_ends_where_an_undisturbed_run_does(printed, settings):
    """Two tools take turns: both start a run by torchrun with the same arguments."""
    words, expected = settings
    texts = {way: printed(way, "debug", "--nodes", "2", "--gpus", "1", *words) for way in OWN}
    both = [*agents("k8s", texts["k8s"])]
    try:
        wait_for_steps(both, 8)
        both[1].terminate()  # as the kubelet does to the pod's first process
        assert all(job.wait(timeout=120) != 0 for job in both)
        (saved,) = steps_saved()
        assert 8 <= saved < 60
        both = [*agents("sky", texts["sky"])]
        assert [job.wait(timeout=300) for job in both] == [0, 0]
    finally:
        for job in both:
            job.kill()
    assert losses(Path("out")) == expected


# ---- Slurm itself --------------------------------------------------------------------------------

DAEMONS = ("munged", "slurmctld", "slurmd")
SLURM_CONF = """
ClusterName=here
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName={name} NodeAddr=127.0.0.1 CPUs={cores} Gres=gpu:2
PartitionName=all Nodes={name} Default=YES
"""
"""One node, this machine, with two fake GPUs."""


@pytest.fixture
def slurm(tmp_path):
    """Return a function that runs Slurm's commands; its daemons run as Debian installs them."""
    if os.geteuid() != 0 or not all(map(shutil.which, (*DAEMONS, "sbatch"))):
        pytest.skip(f"needs root, and {', '.join(DAEMONS)} (apt-get install slurmctld slurmd)")
    folder, name = tmp_path / "slurm", socket.gethostname().partition(".")[0]
    folder.mkdir(mode=0o755)
    ports = [free_port(), free_port()]
    facts = {"folder": folder, "name": name, "ports": ports, "cores": os.cpu_count()}
    (folder / "slurm.conf").write_text(SLURM_CONF.format(**facts))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    environment = clean(SLURM_CONF=str(folder / "slurm.conf"))
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge"]
    munge += [f"--{x}-file={folder}/munged.{x}" for x in ("pid", "log", "seed")]
    started = []
    try:
        for words in (munge, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", name]):
            with (folder / f"{words[0]}.said").open("w") as said:
                daemon = subprocess.Popen(words, stdout=said, stderr=said, env=environment)
                started.append(daemon)

        def run(*words):
            done = subprocess.run(words, capture_output=True, text=True, env=environment)
            return done.stdout + done.stderr

        wait_until(lambda: "idle" in run("sinfo", "--noheader", "--format=%T"))
        yield run
        run("scancel", "--signal=KILL", "--full", "--user=root")
    finally:
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait(timeout=60)


def wait_until(is_true):
    end = time.monotonic() + 240
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.tier("long")
def test_slurm_queues_a_job_again_until_it_ends_where_an_undisturbed_run_does(
    slurm, printed, settings
):
    words, expected = settings
    words = settled([*words, "checkpoint.interval=4"])
    own = ["--nodes", "1", "--gpus", "2", "--name", "job", "--save_seconds", "30"]
    script = printed("slurm", "debug", *own, *words)
    Path("script").write_text(script)
    assert re.search(r"Job \d+ to start at ", slurm("sbatch", "--test-only", "script"))
    job = slurm("sbatch", "--parsable", "script").strip()
    shown = functools.partial(slurm, "scontrol", "show", "job", job)

    def disturb(steps, disturbance):
        """Disturb the job after so many logged steps, and wait for its restart."""
        wait_until(lambda: Path("out/metrics.jsonl").exists())
        wait_for_steps([], steps)
        before = int(re.search(r"Restarts=(\d+)", shown())[1])
        disturbance()
        wait_until(lambda: has_started_again(before + 1))

    def has_started_again(restarts):
        """Wait for Slurm's restart, which comes two minutes after the processes end.

        The job must not restart in the second of the requeue: Slurm would call its credential
        revoked.
        """
        said = shown()
        if f"Restarts={restarts}" not in said:
            return False
        begins = re.search(r"JobState=PENDING .*StartTime=(2\S+)", said, re.S)
        if begins and (datetime.fromisoformat(begins[1]) - datetime.now()).total_seconds() > 10:
            slurm("scontrol", "update", f"JobId={job}", "StartTime=now+3")
        return "JobState=RUNNING" in said

    def kill():
        listed = slurm("scontrol", "listpids", f"{job}.0")
        (second,) = re.findall(rf"^(\d+) +{job} +0 +1 ", listed, re.M)
        os.kill(int(second), signal.SIGKILL)

    disturb(8, lambda: slurm("scancel", "--batch", "--signal=USR1", job))  # as at the time limit
    disturb(20, kill)
    disturb(32, lambda: slurm("scontrol", "requeue", job))
    wait_until(lambda: "JobState=COMPLETED" in shown())
    said = Path(f"job-{job}.log").read_text()
    assert said.count("resuming from out/checkpoints/step-") == 3
    assert said.count("stopped by SIGTERM") == 2
    assert losses(Path("out")) == expected
