"""Placeholders of bundle for names and secrets, and text left unchanged."""

from __future__ import annotations

import base64

import pytest
from secrets_corpus import harmless, planted

from distdiag.commands.bundle.collect import Names
from distdiag.commands.bundle.redact import Redactor, learn
from distdiag.knowledge.secrets import rules

SECRET = 'hunter2-abc!"x'


@pytest.fixture
def redactor() -> Redactor:
    known = Names(
        hosts=(
            "node17",
            "gpu-a.cluster.local",
            "b",
            "train",
        ),
        users=(
            "alice",
            "root",
        ),
        homes=("/nfs/staff/alice",),
        addresses=("12.4.5.9",),
        secrets=(SECRET,),
    )
    return Redactor(known)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("NODE17: lost node18, node[17-19]", "host-1: lost host-5, host-1,host-5,host-6"),
        ("gpu-a gpu-a.cluster.local cluster.local", "host-2 host-2.domain-1.example domain-1.example"),
        ("10.1.2.3:29500 10.1.2.4 10.9.2.3", "10.0.0.1:29500 10.0.0.2 10.0.1.1"),
        ("alice /home/bob/x /nfs/staff/alice/x alice_x malice", "user-1 /home/user-2/x /home/user-1/x user-1_x malice"),
        ("root /root 127.0.0.1 0.0.0.0 localhost ::1", "root /root 127.0.0.1 0.0.0.0 localhost ::1"),
        ("libcublas.so.12.4.5.8 torch==2.1.0.4", "libcublas.so.12.4.5.8 torch==2.1.0.4"),
        ("lib 12.4.5.9", "lib 10.0.0.1"),
        ("std::vector c10d::add 12:34:56.123", "std::vector c10d::add 12:34:56.123"),
        ("fe80::1ff:fe23:4567:890a 2001:db8::7", "fe80::0:1 fd00::1:1"),
        (
            "max_tokens=5 tokens: 7 key=3 author=x token_count=12",
            "max_tokens=5 tokens: 7 key=3 author=x token_count=12",
        ),
        ("HF_TOKEN=abc password: 'a b c' --api-key zz99", "HF_TOKEN=secret-2 password: 'secret-3' --api-key secret-4"),
        ("postgres://u:pw1234@db/x", "postgres://secret-2@db/x"),
        ("python train.py at b", "python train.py at b"),
        ("_ZN5torch8autograd6Engine17evaluate_functionE", "_ZN5torch8autograd6Engine17evaluate_functionE"),
        ("at XyZabc123DEF456ghi789JKLmno", "at secret-2"),
        ("01:02:03:aa:bb:cc 0000:65:00.0", "02:00:00:00:00:01 0000:65:00.0"),
    ],
)
def test_what_becomes_of_a_text(redactor: Redactor, text: str, made: str) -> None:
    assert redactor.text(text) == made
    assert redactor.text(text) == made  # and again


def test_a_known_secret_is_found_in_every_form(redactor: Redactor) -> None:
    for before in ("", "u", "us", "user:"):
        packed = base64.b64encode(f"{before}{SECRET}".encode()).decode()
        assert redactor.text(f"x {packed} y").count("secret-1") == 1, before
        assert not redactor.leaks(redactor.text(f"x {packed} y").encode())
    for form in ('hunter2-abc!\\"x', "hunter2-abc%21%22x", SECRET.encode().hex()):
        assert redactor.text(f"<{form}>") == "<secret-1>"


def test_documents_keep_their_shape(redactor: Redactor) -> None:
    tree = {
        "host": "b",
        "user": 1007,
        "process": {"user": 0, "local": "192.168.7.1:80"},
        "packages": {"nvidia-cublas": "10.2.1.243"},
        "entries": "alice+node17",
        "environment": {"API_TOKEN": "short", "RANK": "1"},
        "argv": ("--password", "s3cret!"),
    }
    assert redactor.tree(tree) == {
        "host": "host-3",
        "user": 1000,
        "process": {"user": 0, "local": "10.0.0.1:80"},
        "packages": {"nvidia-cublas": "10.2.1.243"},
        "entries": "alice+node17",
        "environment": {"API_TOKEN": "secret-2", "RANK": "1"},
        "argv": ["--password", "secret-3"],
    }


def test_names_are_learned_from_facts() -> None:
    known = learn(Names(), [{"host": "n7", "path": "/home/carol/run", "local": "10.2.1.243:5"}])
    redactor = Redactor(known)
    assert redactor.text("n7 carol 10.2.1.243") == "host-1 user-1 10.0.0.1"


def test_many_words_without_a_name_take_no_time(redactor: Redactor) -> None:
    for text in ("a=" * 50_000, "key" * 30_000, "-" * 100_000, "1." * 50_000, ":" * 100_000, "token" * 20_000):
        redactor.text(text)


def test_planted_secrets_are_replaced_and_their_rules_have_a_source() -> None:
    cases = planted()
    left = [
        (case.kind, case.text)
        for case in cases
        if any(line in Redactor(Names()).text(case.text) for line in case.secret.split("\n"))
    ]
    assert (len(cases), len({case.kind for case in cases}) >= 40, left) == (150, True, [])
    assert all(rule.source and rule.words for rule in rules())


def test_hashes_identifiers_and_sentences_stay_readable() -> None:
    texts = harmless()
    replaced = [text for text in texts if (redactor := Redactor(Names())).text(text) and redactor.secrets]
    assert (len(set(texts)), len(replaced) <= 3) == (300, True), replaced


def test_which_rule_found_a_secret_is_counted(redactor: Redactor) -> None:
    redactor.text("curl -u bob:hunter22 x; curl -u bob:other33 x; wandb login 0123456789abcdef0123456789abcdef01234567")
    assert redactor.secrets == {
        "password of curl or wget": 2,
        "value of a variable or an option": 1,
        "password of a login command": 1,
    }


def test_users_outside_home_and_hosts_of_the_same_domain(redactor: Redactor) -> None:
    made = redactor.text("/scratch/jdoe/x /gpfs/users/erin/y /scratch/run7/ckpt login1.cluster.local github.com")
    assert made == "/scratch/user-2/x /gpfs/users/user-3/y /scratch/run7/ckpt host-5.domain-1.example github.com"


def test_long_texts_of_one_word_take_no_time(redactor: Redactor) -> None:
    for unit in (
        "password ",
        "curl ",
        "docker login ",
        "://",
        "machine ",
        "mysql -",
        "key=",
        "\x1b[",
        "echo ",
        "<key>",
    ):
        redactor.text(unit * (60_000 // len(unit)))
