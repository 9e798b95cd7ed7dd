import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from replicast import __version__
from replicast.cli import COMMANDS, main
from replicast.launcher.plan import JobPlan

HEAVY = ("tensorflow", "keras", "numpy", "rich")
CHECKPOINT = [["checkpoint", name] for name in ("diff", "list", "patch", "show", "verify")]
EVERY_COMMAND = [*([name] for name in COMMANDS), *CHECKPOINT]


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "train.py").write_text("raise SystemExit('must not be started')")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('must not be imported')")
    (tmp_path / "package" / "train.py").touch()
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def tf_config(port: int, index: int = 0) -> str:
    addresses = [f"127.0.0.1:{port}", "127.0.0.1:1"]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def refused(*arguments: str) -> str:
    """Runs a command that must be refused with one line, before anything is made or started."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    assert not Path("runs").exists()
    return result.output


def test_launchers_are_more_patient_than_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[JobPlan] = []
    monkeypatch.setattr("replicast.launcher.launcher.supervise", lambda job, environ: made.append(job))
    for secs in ("10", "60"):
        monkeypatch.setenv("REPLICAST_HEARTBEAT_TIMEOUT", secs)
        invoke("run", "train.py")
    assert [one.host_timeouts.silent_secs for one in made] == [30.0, 120.0]
    assert [one.timeouts.frozen_secs for one in made] == [10.0, 60.0]


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [([[], ["run"], ["doctor"]], HEAVY), (EVERY_COMMAND, ("tensorflow", "keras"))],
    ids=["what starts a job", "every command"],
)
def test_help_does_not_load_what_is_heavy(commands: list[list[str]], heavy: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom replicast.cli import main\n"
        f"for words in {commands!r}:\n"
        "    main([*words, '--help'], prog_name='replicast', standalone_mode=False)\n"
        f"sys.stderr.write(repr([name for name in {heavy!r} if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "[]")
    assert result.stdout.count("Usage: ") == len(commands)


def test_the_launcher_starts_its_workers_before_it_loads_what_is_heavy() -> None:
    code = (
        "import subprocess, sys\nfrom replicast.cli import main\nstart = subprocess.Popen.__init__\n"
        "def noted(self, *rest, **named):\n"
        f"    print([name for name in {HEAVY!r} if name in sys.modules], flush=True)\n"
        "    start(self, *rest, **named)\n"
        "subprocess.Popen.__init__ = noted\n"
        "main(['run', '--tee', 'none', '-m', 'package.train'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize("words", EVERY_COMMAND, ids=" ".join)
def test_help_has_an_example_and_the_exit_codes(words: list[str]) -> None:
    output = invoke(*words, "--help").output
    summary = " ".join(output.split("\n\n")[1].split())
    assert summary.index(".") == len(summary) - 1  # one sentence, without names of the code
    assert f"Examples:\n    replicast {' '.join(words)}" in output
    assert ("Exit code:" in output) == (words != ["checkpoint"])


@pytest.mark.parametrize("words", EVERY_COMMAND, ids=" ".join)
def test_a_shell_completes_the_options_of_a_line_that_is_not_finished(words: list[str]) -> None:
    found = ShellComplete(main, {}, "replicast", "_REPLICAST_COMPLETE").get_completions(words, "--hel")
    assert [one.value for one in found] == ["--help"]


def test_help_lists_every_command_and_another_is_a_usage_error() -> None:
    output = invoke("--help").output
    for name, (_, summary) in COMMANDS.items():
        assert name in output
        assert summary in output
    assert COMMANDS["run"][1] in invoke("run", "--help").output
    assert invoke("--version").output == f"replicast, version {__version__}\n"
    unknown = invoke("fly")
    assert (unknown.exit_code, "No such command 'fly'" in unknown.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-n", "0", "train.py"], "-n must be at least 1"),
        (["-n", "2", "missing.py"], "no script 'missing.py'"),
        (["-n", "2", "python", "train.py"], "Give the script alone"),
        (["-n", "2", "/usr/bin/python3.11", "train.py"], "Give the script alone"),
        (["-n", "2", "-m", "no_such_module"], "no module 'no_such_module'"),
        (["-n", "2", "-m", ".train"], "no module '.train'"),
        (["-n", "2", "--node-rank", "1", "train.py"], "--node-rank needs --hosts"),
        (["-n", "2", "--tee", "2", "train.py"], "--tee"),
        (["-n", "2", "--run-dir", "train.py", "train.py"], "--run-dir"),
        (["-n", "2", "--run-dir", "r", "--log-dir", "train.py/x", "train.py"], "--log-dir"),
        # With underscores, as users of torchrun type them.
        (["--hosts", "a,b", "--node_rank=2", "train.py"], "--node-rank must be from 0 to 1"),
        (
            ["--nnodes", "2", "--rdzv_endpoint", "a:x", "train.py"],
            "--rdzv-endpoint must be the host and port",
        ),
        (["--nnodes=2", "--node_rank=0", "--rdzv_endpoint=a:29500", "train.py"], "cannot meet at port 29500"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments: list[str], expected: str) -> None:
    assert expected in refused("run", *arguments)


@pytest.mark.parametrize(
    ("value", "arguments", "expected"),
    [
        ("{", [], "TF_CONFIG is not valid"),
        (tf_config(5, index=2), [], "must be one of those"),
        (tf_config(1), [], "same address"),
        (tf_config(5), ["-n", "2"], "exactly one worker"),
        (tf_config(5), ["--hosts", "a,b"], "exactly one worker"),
    ],
)
def test_a_tf_config_that_cannot_be_used_is_refused_in_one_line(
    value: str, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", value)
    assert expected in refused("run", *arguments, "train.py")


def test_a_port_that_is_taken_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("TF_CONFIG", tf_config(port))
        assert f"Port {port} is in use" in refused("run", "train.py")
        monkeypatch.delenv("TF_CONFIG")
        monkeypatch.setattr("replicast.cli.launch._PORTS_SECS", 0.0)  # Launchers of hosts wait for it before.
        several = ["--hosts", "a,b", "--node-rank", "0", "--port", str(port)]
        assert f"Port {port} is in use" in refused("run", *several, "train.py")
