"""Hostfiles of every kind by one grammar, and the environment variables of SLURM and LSF."""

from __future__ import annotations

import pytest
from loops import each

from distdiag.cluster.hostfile import lsf_hosts, read_hostfile, slurm_tasks
from distdiag.cluster.hosts import Host
from distdiag.errors import UsageError

H1, H2 = Host(name="h1"), Host(name="h2")
H1_8, H2_4 = Host(name="h1", slots=8), Host(name="h2", slots=4)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        pytest.param("h1 slots=8 max_slots=16\nh2 slots=4\n", [H1_8, H2_4], id="Open MPI"),
        pytest.param("h1 slots = 8 max-slots = 16\nh2\tslots= 4", [H1_8, H2_4], id="spaces around ="),
        pytest.param("h1\nh2\n", [H1, H2], id="bare"),
        pytest.param("h1\nh1\nh2 slots=2\nh1\nh2\nh2", [Host(name="h1", slots=3), H2_4], id="repeats count"),
        pytest.param("h1 slots=3\nh2 slots=4\nh1 slots=5\n", [H1_8, H2_4], id="slots add up"),
        pytest.param("h1:8\nh2:4 ifname=eth0 binding=user:0,1\n", [H1_8, H2_4], id="MPICH"),
        pytest.param("h2\nh2\nh1\nh2\nh2", [H2_4, H1], id="PBS"),
        pytest.param("h[1-2]:8,!h2\nh2 slots=4", [H1_8], id="pdsh, excluded"),
        pytest.param("h1, h2\n", [H1, H2], id="pdsh, comma and space"),
        pytest.param("n[01-02]x[1-2]\n", [Host(name=f"n0{n}x{x}") for n in (1, 2) for x in (1, 2)], id="pdsh, ranges"),
        pytest.param("[1-2]\n", [Host(name="1"), Host(name="2")], id="a range alone is no group"),
        pytest.param("\ufeffh1 slots=8\r\n\r\nh2 slots=4\r\n", [H1_8, H2_4], id="Windows"),
        pytest.param("# note\n \t# h3\nh1\t slots=8\t# h4 slots=1\n\n#h5\nh2:4 #", [H1_8, H2_4], id="notes"),
        pytest.param("h1 slots=0\nh2\n", [H2], id="no slots, no host"),
        pytest.param("h1:0\nh1:8", [H1_8], id="slots on another line"),
        pytest.param("u@h1 slots=8\n", [Host(name="h1", user="u", slots=8)], id="user"),
        pytest.param("h1 port=2222 user=u colour=red", [Host(name="h1", user="u", port=2222)], id="port"),
        pytest.param("ssh://u@h1:2222 slots=8", [Host(name="h1", user="u", port=2222, slots=8)], id="ssh"),
        pytest.param(
            "[fe80::1]:8\n[::1] slots=2", [Host(name="fe80::1", slots=8), Host(name="::1", slots=2)], id="IPv6"
        ),
        pytest.param("h1 empty= slots=8", [H1_8], id="empty value"),
        pytest.param("h1 a='-o B=c slots=1' d=\"x y\" slots=8", [H1_8], id="quoted values"),
    ],
)
def test_each_kind_of_hostfile_is_read(text: str, hosts: list[Host]) -> None:
    assert list(read_hostfile(text, "hosts").hosts) == hosts


@each(
    "text, duplicates",
    [("h1\nh1\nh2", ()), ("h1 slots=1\nh1 slots=1\nh2\nh2", ("h1",)), ("h1\nh1:2", ("h1",)), ("h1:2,h1:2", ("h1",))],
)
def test_a_repeat_is_a_duplicate_where_slots_are_given(text: str, duplicates: tuple[str, ...]) -> None:
    assert read_hostfile(text, "hosts").duplicates == duplicates


def test_a_host_that_is_bare_once_and_sized_once_has_one_slot_more() -> None:
    assert read_hostfile("h1 slots=2\nh1", "hosts").hosts == (Host(name="h1", slots=3),)


@each(
    "text, line, words",
    [
        ("h1\nh2 slots=x", 2, "'x' is not a number of slots"),
        ("h1 slots=-1", 1, "'-1' is not a number of slots"),
        ("h1 slots=", 1, "'' is not a number of slots"),
        ("h1 slots=2 slots=3", 1, "slots is given twice"),
        ("h1:2 slots=3", 1, "slots is given twice"),
        ("# note\r\n\r\n  h1 slots=1.5", 3, "'1.5' is not a number of slots"),
        ("\ufeffh1:x", 1, "'x' is not a number of slots"),
        ("h1 8", 1, "white space"),
        ("h1 slots", 1, "white space"),
        ("h1 slots=2 4", 1, "'4' is not key=value"),
        ("slots=2", 1, "'='"),
        ("n[3-1] slots=2", 1, "'3-1' is descending"),
        ("h1,,h2", 1, "missing host"),
        ("h1#note", 1, "'#'"),
        ("fe80::1:8", 1, "is ambiguous"),
        ("h1 port=0", 1, "'0' is not a port"),
        ("h1 user=-l", 1, "'-l' is not a user name"),
        ("[gpu]\nh1", 1, "'gpu' is not a number or a range"),
    ],
)
def test_an_error_names_the_file_and_the_line(text: str, line: int, words: str) -> None:
    with pytest.raises(UsageError) as error:
        read_hostfile(text, "my hosts")
    assert str(error.value).startswith(f"my hosts, line {line}: ")
    assert words in str(error.value)


@each("text", ["", "\n \r\n", "# h1\n", "h1 slots=0", "h1\n!h1"])
def test_a_file_without_hosts_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="hosts: no hosts in it"):
        read_hostfile(text, "hosts")


def test_a_million_hosts_is_the_limit_of_all_lines_together() -> None:
    with pytest.raises(UsageError, match=r"line 2: .* expands to 1,000,000 names; at most 999,999 more"):
        read_hostfile("h\nn[1-1000000]", "hosts")


@each("text, tasks", [("8", [8]), ("2(x2),1", [2, 2, 1]), ("1,2,3(x1)", [1, 2, 3]), ("4(x12)", [4] * 12)])
def test_slurm_tasks_are_listed_node_by_node(text: str, tasks: list[int]) -> None:
    assert slurm_tasks(text) == tasks


@each("text", ["", "2(x2),", "2(x)", "1,x", "1,2(x2", "-1"])
def test_a_malformed_slurm_list_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"^SLURM_TASKS_PER_NODE: "):
        slurm_tasks(text)


def test_lsf_hosts_come_with_their_slots() -> None:
    assert lsf_hosts("h1 8 h2 4") == [H1_8, H2_4]
    assert lsf_hosts(" h1 3  h2 4 h1 5 ") == [H1_8, H2_4]


@each("text", ["", "h1", "h1 8 h2", "h1 x", "-h 8", "h[1-2] 8"])
def test_a_malformed_lsf_list_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"^LSB_MCPU_HOSTS: "):
        lsf_hosts(text)
