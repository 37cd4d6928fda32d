"""Errors of one line, versions, shell completion: what every verb shares."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support import trace_path

from memtrace._version import __version__
from memtrace.cli import VERBS, main
from memtrace.cli.parsing import nearest, verb_module, verb_parser
from memtrace.environment import environment

TINY = str(trace_path("tiny-llama_3-steps"))


def run(capsysbinary: pytest.CaptureFixture[bytes], *args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), whichever way the command ends."""
    try:
        code = main(args)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsysbinary.readouterr()
    return code, out.decode(), err.decode()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("estimate",), "memtrace estimate: the following arguments are required: --model"),
        (("report",), "memtrace report: the following arguments are required: FILE"),
        (("report", "x", "--jsn"), "memtrace report: unrecognized arguments: --jsn; did you mean --json?"),
        (("export", "x", "-f", "pdf"), "memtrace export: argument --format/-f: invalid choice: 'pdf'"),
        (("export", "x", "-f"), "memtrace export: argument --format/-f: expected one argument"),
        (("completion", "tcsh"), "memtrace completion: argument SHELL: invalid choice: 'tcsh'"),
        (
            ("estimate", "--model", "llama2-7b", "--seq-len", "512", "--world-size", "2"),
            "memtrace estimate: unrecognized arguments: --world-size 2; runs on several GPUs: memtrace dryrun",
        ),
        (("--verison",), "memtrace: unrecognized arguments: --verison; did you mean --version"),
        (("reprot", "x"), "memtrace: no verb and no file 'reprot'; did you mean report"),
        (("frag", "x"), "memtrace: no verb and no file 'frag'; did you mean fragmentation?"),
        (("zzzz",), "memtrace: no verb and no file 'zzzz'; memtrace --help lists them"),
    ],
)
def test_one_clear_line(capsysbinary: pytest.CaptureFixture[bytes], args: tuple[str, ...], said: str) -> None:
    code, out, err = run(capsysbinary, *args)
    assert (code, out) == (2, "")
    assert err.startswith(said), err
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_option_is_one_line_in_every_verb(capsysbinary: pytest.CaptureFixture[bytes], verb: str) -> None:
    required = [action for action in verb_parser(verb, verb_module(verb))._actions if action.required]
    if verb == "run":  # what follows the script is the script's own
        pytest.skip("takes any words")
    given = [word for action in required for word in [*action.option_strings[:1], _value(action)]]
    code, out, err = run(capsysbinary, verb, *given, "--no-such-option")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"(see memtrace {verb} --help)" in err


def _value(action: object) -> str:
    choices = getattr(action, "choices", None)
    return str(next(iter(choices))) if choices else "1"


def test_control_characters_in_arguments_are_not_printed(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for args in (("\x1b[31mx",), ("report", "x", "--\x1b[31m")):
        code, _, err = run(capsysbinary, *args)
        assert code == 2 and "\x1b" not in err and err.count("\n") == 1


def test_nearest_words() -> None:
    assert nearest("reprot", VERBS)[0] == "report"
    assert nearest("simulat", VERBS)[0] == "simulate"
    assert nearest("", VERBS) == nearest("qqqq", VERBS) == []
    assert len(nearest("e", ["ea", "eb", "ec", "ed"])) <= 3


# -- versions ---------------------------------------------------------------------------------------------------------


def test_version_is_one_line(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(capsysbinary, "--version") == (0, f"memtrace {__version__}\n", "")


def test_environment_for_bug_reports(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    code, out, err = run(capsysbinary, "--version", "--verbose")
    assert (code, err) == (0, "")
    first, *rows = out.splitlines()
    assert first == f"memtrace {__version__}"
    shown = {name: value.strip() for name, _, value in (row.partition(":") for row in rows)}
    assert shown["numpy"] == metadata.version("numpy")
    assert shown["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert {"system", "textual", "orjson", "torch", "torch built for", "NVIDIA driver", "GPUs", "terminal"} <= set(
        shown
    )


def test_the_environment_names_no_person_host_or_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "/home/somebody/term")
    text = "\n".join(f"{name} {value}" for name, value in environment())
    for secret in (str(Path.home()), str(Path.cwd()), sys.prefix, sys.executable, socket.gethostname(), "somebody"):
        assert secret not in text


def test_the_environment_is_told_without_importing_torch() -> None:
    code = (
        "import sys; from memtrace.cli import main; main(['--version', '--verbose'])\n"
        "sys.exit(bool({'torch', 'numpy', 'textual'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_report_does_without_numpys_masked_arrays() -> None:
    code = (
        "import sys, numpy; before = set(sys.modules); from memtrace.cli import main; main(['report', sys.argv[1]])\n"
        "sys.exit('numpy.ma' in sys.modules.keys() - before)"
    )
    subprocess.run([sys.executable, "-c", code, str(trace_path("tiny-llama_3-steps"))], check=True, capture_output=True)


# -- completion -------------------------------------------------------------------------------------------------------

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
_shtab_memtrace memtrace "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, as the command prints it."""
    folder, made = tmp_path_factory.mktemp("completion"), {}
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "memtrace", "completion", shell]
        made[shell] = folder / f"_memtrace.{shell}"
        made[shell].write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return made


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("re",), {"report"}),
        (("s",), {"segments", "simulate", "sweep", "steps", "scrub"}),
        (("report", "--js"), {"--json"}),
        (("export", "--format", "sp"), {"speedscope"}),
        (("completion", ""), {"bash", "zsh", "fish"}),
        (("report", "x/a"), {"x/a file.pickle"}),
        (("diff", "x/a file.pickle", "x/b"), {"x/b.pickle"}),
        (("--ver",), {"--version", "--verbose"}),
    ],
)
def test_bash_completes(scripts: dict[str, Path], tmp_path: Path, words: tuple[str, ...], offered: set[str]) -> None:
    (tmp_path / "x").mkdir()
    for name in ("a file.pickle", "b.pickle"):
        (tmp_path / "x" / name).touch()
    command = ["bash", "--norc", "-c", BASH, "bash", str(scripts["bash"]), "memtrace", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == offered


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["-n"]), ("fish", ["--no-execute"]), ("bash", ["-n"])])
def test_scripts_have_every_verb_and_parse(scripts: dict[str, Path], shell: str, check: list[str]) -> None:
    text = scripts[shell].read_text(encoding="utf-8")
    assert not [verb for verb in VERBS if not re.search(rf"\b{verb}\b", text)]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    done = subprocess.run([shell, *check, str(scripts[shell])], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_fish_completes(scripts: dict[str, Path], tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed here")
    code = f"source {scripts['fish']}; complete -C 'memtrace export --format per'; complete -C 'memtrace scr'"
    home = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True, env=home)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["perfetto", "scrub"]


def test_help_and_version_as_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["version"], ["-V"]):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith("memtrace ")
    for words, shown in ((["help"], "memtrace VERB"), (["help", "report"], "memtrace report")):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0 and shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "args",
    [
        ["explain", TINY, "--capacity", ""],
        ["simulate", TINY, "--capacity", ""],
        ["report", TINY, "--rules", ""],
        ["graph", TINY, "--region", ""],
        ["timeline", TINY, "--plot", ""],
        ["diff", TINY, TINY, "--plot", ""],
        ["ranks", ""],
    ],
)
def test_an_empty_value_is_not_taken_for_none(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) in (2, 3)
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("memtrace: ")
