"""Host lists: what each form names, where errors point, and that folding loses nothing."""

from __future__ import annotations

import random

import pytest
from loops import each

from distdiag.cluster.hostlist import expand
from distdiag.cluster.hosts import Host, fold, fold_ranks_within, fold_within, parse_hosts
from distdiag.errors import UsageError


@each(
    "text, names",
    [
        ("node[1-4,7]", "node1 node2 node3 node4 node7"),
        ("node[08-11]", "node08 node09 node10 node11"),
        ("a,b[1-2],c", "a b1 b2 c"),
        ("c,a,b", "c a b"),
        ("node[01-03,010]", "node01 node02 node03 node010"),
        ("n[1-2]c[3-4]", "n1c3 n1c4 n2c3 n2c4"),
        ("r[1-2]n[01-02]-ib[0-1]", "r1n01-ib0 r1n01-ib1 r1n02-ib0 r1n02-ib1 r2n01-ib0 r2n01-ib1 r2n02-ib0 r2n02-ib1"),
        ("x[0-2]y,z", "x0y x1y x2y z"),
        ("node[1-2][3-4]", "node13 node14 node23 node24"),
        ("node[1,1,2]", "node1 node2"),
        ("node[1-10/2]", "node1 node3 node5 node7 node9"),
        ("node[01-10/3]", "node01 node04 node07 node10"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[08-101/31]", "n08 n39 n70 n101"),
        ("n[3-3,0,00]", "n3 n0 n00"),
        ("n[1-4],!n[2-3]", "n1 n4"),
        ("^n2,n[1-3],!n3,!n9", "n1"),
        ("n1,n01,!n1", "n01"),
        ("1a,[1-2],007,10.0.0.[9-10]", "1a 1 2 007 10.0.0.9 10.0.0.10"),
        ("gpu[1-2].dc1.example.com, b_c ,d-", "gpu1.dc1.example.com gpu2.dc1.example.com b_c d-"),
        ("[fe80::1],[::1],[fe80::2%eth0]", "fe80::1 ::1 fe80::2%eth0"),
        ("n1,!n1", ""),
        ("", ""),
    ],
)
def test_a_list_names_hosts_in_the_order_written(text: str, names: str) -> None:
    assert expand(text) == names.split()


@each(
    "text, token",
    [
        ("node[1-", "node[1-"),
        ("a,node[1[2]", "node[1[2]"),
        ("node1]", "]"),
        ("node[]", "[]"),
        ("node[3-1]", "3-1"),
        ("node[1-3,]", "[1-3,]"),
        ("node[1,,3]", "[1,,3]"),
        ("a,node[7,8-011]", "8-011"),
        ("node[01-9]", "01-9"),
        ("node[1-4/0]", "1-4/0"),
        ("node[a-c]", "a-c"),
        ("node[1-2-3]", "1-2-3"),
        ("node[-1]", "-1"),
        ("node[1, 2]", " 2"),
        ("node[1-99999999999999999999]", "1-99999999999999999999"),
        ("a,,b", "host"),
        ("a, ,b", "host"),
        ("a,", "host"),
        (",a", "host"),
        ("!,a", "host"),
        ("n1,a b", "a b"),
        ("a\tb", "white space"),
        ("a/b", "/"),
        ("n[1-2];reboot", ";"),
        ("$(x)", "$"),
        ("b\xfccher", "\xfc"),
        ("a,-oProxyCommand", "'-'"),
        ("n1,..", "'.'"),
        ("x@n1", "@"),
        ("n1:8", ":"),
        ("node[1:4]", "1:4"),
        ("[fe80::zz]", "fe80::zz"),
        ("[fe80::1%a b]", "a b"),
    ],
)
def test_an_error_names_the_token(text: str, token: str) -> None:
    with pytest.raises(UsageError) as error:
        expand(text)
    assert str(error.value).startswith("host list: ")
    assert token in str(error.value)


def test_an_error_far_into_a_long_list_is_short() -> None:
    with pytest.raises(UsageError, match="host name '/' contains '/'"):
        expand("n1," * 666 + "n2,/," + "n3," * 666)
    with pytest.raises(UsageError, match="unmatched bracket") as error:
        expand("n1," * 666 + "n[2," + "n3," * 666)
    assert len(str(error.value)) < 120


def test_a_million_names_and_not_one_more() -> None:
    names = expand("node[0000001-1000000]")
    assert (len(names), names[0], names[-1]) == (1_000_000, "node0000001", "node1000000")
    for text in ("n[1-1000001]", "n[1-1000][1-1001]", "n,n[1-1000000]", "n[1-999999999999999999]", "n,!x[1-1000001]"):
        with pytest.raises(UsageError, match="more are allowed"):
            expand(text)
    with pytest.raises(UsageError, match=r"'n\[1-3\]' expands to 3 names; at most 2 more"):
        expand("n[1-3]", limit=2)


@each(
    "names, folded",
    [
        ("", ""),
        ("n01", "n01"),
        ("login", "login"),
        ("n1 n01 n2 n02", "n[1-2],n[01-02]"),
        ("n1 n01 n001", "n1,n01,n001"),
        ("n8 n9 n10 n11", "n[8-11]"),
        ("n08 n09 n10 n11", "n[08-11]"),
        ("n099 n100 n101 n1000", "n[099-101,1000]"),
        ("n1 n2 n10 n01", "n[1-2,10],n01"),
        ("n0 n00 n1", "n[0-1],n00"),
        ("n3 n1 n2 n7", "n[1-3,7]"),
        ("r1n01 r1n02 r2n01 r2n02", "r[1-2]n[01-02]"),
        ("r1n01 r1n02 r2n01", "r1n[01-02],r2n01"),
        ("b1 a1 b2", "b[1-2],a1"),
        ("1 2 3a", "[1-2],3a"),
        ("10.0.0.9 10.0.0.10", "10.0.0.[9-10]"),
        ("fe80::1 n1", "[fe80::1],n1"),
        ("x1234567890123456789 x1234567890123456790", "x1234567890123456789,x1234567890123456790"),
        ("n1 n1 n2", "n[1-2]"),
    ],
)
def test_names_fold_by_their_text_and_their_padding(names: str, folded: str) -> None:
    assert fold(names.split()) == folded
    assert sorted(expand(folded)) == sorted(set(names.split()))


def random_name(dice: random.Random) -> str:
    def number(digits: int) -> str:
        return str(dice.randrange(10**digits)).zfill(dice.choice([0, 0, 2, 3]))

    shapes = [
        lambda: "n" + number(2),
        lambda: f"gpu-{number(4)}.dc{number(1)}.example.com",
        lambda: f"r{number(1)}c{number(1)}n{number(2)}-ib{number(1)}",
        lambda: number(3) + dice.choice(["", "a", "-x", "_"]),
        lambda: ".".join(number(2) for _ in range(4)),
        lambda: "".join(dice.choice("ab019_") for _ in range(dice.randrange(1, 30))),
        lambda: "serial" + number(dice.choice([17, 18, 19, 25])),
        lambda: f"fe80::{dice.randrange(1, 2**16):x}",
    ]
    return dice.choice(shapes)()


@each("seed", range(3))
def test_ten_thousand_random_names_survive_folding(seed: int) -> None:
    dice = random.Random(seed)
    names = list({random_name(dice): None for _ in range(10_000)})
    again = expand(fold(names))
    assert len(again) == len(names)
    assert set(again) == set(names)


def test_small_sets_of_alike_names_survive_folding() -> None:
    dice = random.Random(0)
    alike = ["n1", "n01", "n001", "n10", "n010", "n100", "n1x1", "n01x1", "n1x01", "n10x10", "n", "n0", "n00"]
    for _ in range(2000):
        names = dice.sample(alike, dice.randrange(len(alike)))
        assert sorted(expand(fold(names))) == sorted(names)


@each(
    "text, hosts",
    [
        ("a", [Host(name="a")]),
        ("u@n[1-2]:8", [Host(name="n1", user="u", slots=8), Host(name="n2", user="u", slots=8)]),
        ("ssh://a", [Host(name="a")]),
        ("ssh://bob@a:2222, b:1", [Host(name="a", user="bob", port=2222), Host(name="b", slots=1)]),
        ("ssh://u@[::1]:22", [Host(name="::1", user="u", port=22)]),
        ("[fe80::1]:8", [Host(name="fe80::1", slots=8)]),
        ("[fe80::1:8]", [Host(name="fe80::1:8")]),
        ("u@a:2,b:3,!b", [Host(name="a", user="u", slots=2)]),
        ("a:0,b", [Host(name="b")]),
    ],
)
def test_hosts_are_given_with_user_slots_and_port(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text).hosts == tuple(hosts)
    assert parse_hosts(text).duplicates == ()


@each(
    "text, slots",
    [("a,a", None), ("a:8,a", 8), ("a,a:8", 8), ("a:8,b,a:4", 12), ("a:1,a:1,a:1", 3)],
)
def test_a_host_named_again_is_one_host_and_a_duplicate(text: str, slots: int | None) -> None:
    found = parse_hosts(text)
    assert found.hosts[0] == Host(name="a", slots=slots)
    assert found.duplicates == ("a",)
    assert [host.name for host in found.hosts].count("a") == 1


def test_what_is_said_of_a_host_only_later_is_kept() -> None:
    assert parse_hosts("n[1-2],ssh://u@n1:23").hosts[0] == Host(name="n1", user="u", port=23)


def test_n1_n01_and_n001_are_three_hosts() -> None:
    found = parse_hosts("n1,n01,n001")
    assert [host.name for host in found.hosts] == ["n1", "n01", "n001"]
    assert found.duplicates == ()


@each(
    "text, words",
    [
        ("fe80::1:8", "is ambiguous"),
        ("a,u@fe80::1", "is ambiguous"),
        ("a:x", "'x' is not a number of slots"),
        ("a:-1", "'-1' is not a number of slots"),
        ("a:", "'' is not a number of slots"),
        ("a:8888888", "'8888888' is not a number of slots"),
        ("ssh://a:0", "'0' is not a port"),
        ("ssh://a:65536", "'65536' is not a port"),
        ("ssh://a/", "'/'"),
        (":8", "missing host name"),
        ("u@", "missing host name"),
        ("@hosts.txt", "missing user"),
        ("-l@a", "'-l' is not a user name"),
        ("u;x@a", "'u;x' is not a user name"),
        ("u@-a", "starts with '-'"),
        ("u@a@b", "'@'"),
        ("u@n[3-1]:8", "'3-1' is descending"),
        ("!u@a", "'@'"),
        ("a,,b", "missing host"),
        ("", "no host given"),
        ("a,!a", "no host given"),
    ],
)
def test_an_error_in_a_host_names_it(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_hosts(text)
    assert str(error.value).startswith("host list: ")
    assert words in str(error.value)


def test_a_bare_address_is_told_to_go_into_brackets() -> None:
    with pytest.raises(UsageError) as error:
        parse_hosts("fe80::1:8")
    assert "brackets" in error.value.hint
    assert "[fe80::1]:8" in error.value.hint


def test_a_long_list_is_counted_and_its_first_named() -> None:
    hosts = [f"n{number}-x" for number in range(0, 40, 2)]
    assert fold_within(hosts[:2], 20) == "n[0,2]-x"
    assert fold_within(hosts, 20) == "20 hosts (n0-x,...)"
    assert fold_ranks_within(range(1000), 20) == "0-999"
    assert fold_ranks_within(range(0, 1000, 3), 30) == "334 ranks (0,3,6,9,12,15,...)"
    assert fold_ranks_within([10**6, 10**6 + 2], 10) == "2 ranks (1000000,...)"
