"""Defaults of options from variables and files: which goes before which, and whose files are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import need_root
from support_warm import distdiag

from distdiag import defaults
from distdiag.lazy_typer import Invocation, Sub, load

if TYPE_CHECKING:
    from collections.abc import Sequence

HANG = Sub("hang", "")
LOGS = Sub("logs", "")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an empty folder of configuration beside it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "config" / "distdiag").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("DISTDIAG_")]:
        monkeypatch.delenv(name)
    return tmp_path


def write(home: Path, *, own: str = "", work: str = "") -> None:
    for path, text in ((home / "config/distdiag/config.toml", own), (home / "work/distdiag.toml", work)):
        if text:
            path.write_text(text)
            path.chmod(0o600)


def used(words: Sequence[str], sub: Sub = HANG) -> dict[str, tuple[object, str]]:
    """Parse a command line; return its defaults: value and last part of the origin."""
    typed = Invocation([sub.name, *words], command=sub.name)
    load(sub, words, typed).make_context(sub.name, list(words), obj=typed)
    return {each.parameter: (each.value, Path(each.origin).name) for each in typed.used}


def test_a_variable_goes_before_the_folder_and_the_folder_before_the_user(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, own='job = "a"\nuser = "a"\nfanout = 1', work='job = "b"\nuser = "b"')
    monkeypatch.setenv("DISTDIAG_JOB", "c")
    assert used([]) == {
        "job": ("c", "DISTDIAG_JOB"),
        "user": ("b", "distdiag.toml"),
        "fanout": (1, "config.toml"),
    }


def test_the_command_line_wins(home: Path) -> None:
    write(home, own='python = "a"\ntimeout = 9')
    assert used(["--python", "b"]) == {"timeout": (9, "config.toml")}


def test_a_table_is_for_one_command(home: Path) -> None:
    write(home, own='hosts = "n1"\n[hang]\nhosts = "n2"\ntimeout = 9')
    assert used([])["hosts"] == ("n2", "config.toml")
    assert used([], LOGS) == {"hosts": ("n1", "config.toml")}


def test_lists_and_flags(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTDIAG_ENV", "A=1 'B=2 3'")
    write(home, own='strict = true\nlogs = "one.log"')
    assert used([]) == {
        "env": (("A=1", "B=2 3"), "DISTDIAG_ENV"),
        "strict": (True, "config.toml"),
        "logs": (("one.log",), "config.toml"),
    }


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], {"hosts", "via"}),
        (["--slurm-job", "7"], set()),
        (["--hostfile", "hosts"], {"via"}),
        (["--kube", "app=train"], {"namespace"}),
        (["--from", "facts"], set()),
    ],
)
def test_hosts_that_are_typed_replace_those_of_files(home: Path, words: list[str], kept: set[str]) -> None:
    write(home, own='hosts = "n1"\nvia = "docker exec -i {host}"\nnamespace = "ml"')
    assert set(used(words)) == kept


def test_a_rank_takes_its_hosts_from_the_launcher(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, own='hosts = "n1"\ntimeout = 9')
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert set(used([])) == {"timeout"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts = ", "Invalid value"),
        ("[hang]\nhots = 'n1'", "hang has no option --hots"),
        ("timeout = 'soon'", "--timeout is set by"),
        ("python = ['a', 'b']", "--python takes one value, not a list"),
    ],
)
def test_a_wrong_file_is_wrong_usage_and_is_named(home: Path, text: str, said: str) -> None:
    write(home, work=text)
    done = distdiag("hang", "--json")
    assert done.code == 2
    assert said in done.err
    assert str(home / "work/distdiag.toml") in done.err.replace("\n", "")
    assert done.report["error"]["id"] == "usage"


def test_help_is_printed_whatever_the_files_hold(home: Path) -> None:
    write(home, own="hosts = ", work="hosts = ")
    for words in (("--help",), ("hang", "-h"), ("config", "--help"), ("estimate", "--help")):
        assert distdiag(*words).code == 0


def test_a_file_that_others_can_write_is_ignored(home: Path) -> None:
    write(home, work='setup = "true"')
    (home / "work/distdiag.toml").chmod(0o666)
    (file,) = defaults.files()
    assert file.ignored.startswith("other users can write it: chmod go-w")
    assert "is ignored: other users can write it" in distdiag("hang", "--from", "nothing").err


def test_a_cloned_repository_runs_no_program_and_logs_in_nowhere(home: Path) -> None:
    write(home, own='python = "a"', work=f'python = "{home}/evil"\nhosts = "evil"\n[hang]\nhtml = "out"\nquick = true')
    assert used([]) == {"python": ("a", "config.toml"), "quick": (True, "distdiag.toml")}
    folder = home / "work"
    line = f"distdiag: {folder}/distdiag.toml: --hosts, --html, --python ignored; to allow: "
    line += f'trust = ["{folder}"] in {home}/config/distdiag/config.toml\n'
    done = distdiag("hang", "--from", "nothing")
    assert done.err.count(line) == 1
    assert "--html" not in distdiag("hang", "--html", "page", "--from", "nothing").err.partition("ignored")[0]
    config = distdiag("config", "--json").report["data"]["settings"]
    assert {each["option"] for each in config if each["is_refused"]} == {"--python", "--hosts", "--html"}
    shown = distdiag("config").out
    assert line.removeprefix("distdiag: ") in shown
    assert shown.endswith("OK: 5 defaults, 3 of them ignored\n")


def test_a_trusted_folder_sets_every_option(home: Path) -> None:
    (home / "link").symlink_to(home / "work")
    write(home, own=f'trust = ["/nowhere", "{home}/link"]', work='python = "b"')
    assert used([]) == {"python": ("b", "distdiag.toml")}
    assert distdiag("config").code == 0
    write(home, own=f'trust = ["{home}"]', work=f'trust = ["{home}/work"]\npython = "b"')
    assert used([]) == {}


def test_trust_is_a_list(home: Path) -> None:
    write(home, own=f'trust = "{home}/work"', work="quick = true")
    assert "config.toml: trust takes a list of folders" in distdiag("hang", "--from", "nothing").err.replace("\n", "")


def test_every_option_of_hosts_and_files_needs_trust() -> None:
    names = {
        each.name
        for sub in (HANG, Sub("core-bt", ""), Sub("run", ""))
        for each in load(sub, [], Invocation([])).params
        if defaults._needs_trust(each)
    }
    assert {"via", "setup", "env", "python", "kube_debug", "accept_new", "hostfile", "save", "html"} <= names
    assert {"exe", "on_stall", "sanitizer"} <= names
    assert not {"fanout", "quick", "timeout", "job", "stall", "rank"} & names


@pytest.mark.parametrize("whose", ["file", "folder", "link"])
def test_a_file_of_another_user_is_ignored(home: Path, whose: str) -> None:
    need_root()
    write(home, work='setup = "touch /tmp/never"')
    path = home / "work/distdiag.toml"
    if whose == "link":
        (home / "work").chmod(0o1777)
        path.rename(home / "real.toml")
        path.symlink_to(home / "real.toml")
        os.lchown(path, 65534, 65534)
    else:
        os.chown(path if whose == "file" else path.parent, 65534, 65534)
    (file,) = defaults.files()
    assert "another user" in file.ignored
    assert used([]) == {}


def test_a_pipe_is_not_waited_for(home: Path) -> None:
    os.mkfifo(home / "work/distdiag.toml")
    (file,) = defaults.files()
    assert file.ignored == "not a file"


def test_verbose_names_the_origin_and_config_shows_all(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, work="quick = true")
    monkeypatch.setenv("DISTDIAG_TIMEOUT", "5")
    done = distdiag("hang", "-v", "--from", "nothing")
    assert "distdiag: --timeout 5 from DISTDIAG_TIMEOUT\n" in done.err
    assert f"distdiag: --quick true from {home}/work/distdiag.toml\n" in done.err
    report = distdiag("config", "--json").report["data"]
    shown = {each["option"]: (each["value"], each["origin"]) for each in report["settings"]}
    assert shown == {
        "--timeout": ("5", "DISTDIAG_TIMEOUT"),
        "--quick": ("true", f"{home}/work/distdiag.toml"),
    }
    assert report["files"][f"{home}/work/distdiag.toml"] == "read"


@pytest.mark.parametrize(
    ("text", "said"), [("hots = 1", "no option hots"), ("[hanng]\nquick = true", "no command hanng")]
)
def test_config_names_what_no_command_has(home: Path, text: str, said: str) -> None:
    write(home, own=text)
    done = distdiag("config")
    assert done.code == 2
    assert said in done.err


def test_variables_between_distdiags_own_processes_are_no_options(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTDIAG_LINES", "{}")
    assert "DISTDIAG_LINES" not in distdiag("config").out
