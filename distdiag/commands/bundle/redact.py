"""Placeholders for host names, addresses, users, home folders and secrets. Pure.

A name has one placeholder in all files, of the same kind: an address stays in the network of its neighbours, a home
under /home, and node7.cluster.local in one domain with its peers. Judgements by equality, network or path are therefore
unchanged. Secrets are the values of suspicious variables and options, in every form (URL, base64, hex, escaped), and
the matches of find_secrets.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import math
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from distdiag.commands.bundle import find_secrets
from distdiag.commands.bundle.collect import SECRET_NAME
from distdiag.facts.network.interfaces import is_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from distdiag.commands.bundle.collect import Names

# fmt: off
_COMMON = frozenset((
    "root", "localhost", "localdomain", "nobody", "daemon", "user", "users", "admin", "ubuntu", "debian", "centos",
    "rocky", "ec2-user", "runner", "jovyan", "app", "apps", "torch", "python", "python3", "cuda", "nccl", "gloo",
    "nvidia", "test", "tests", "data", "home", "train", "training", "model", "models", "host", "hosts", "node",
    "nodes", "rank", "ranks", "job", "jobs", "main", "master", "worker", "work", "workspace", "local", "bin", "lib",
    "usr", "opt", "var", "tmp", "proc", "sys", "dev", "slurm", "mpi", "ssh", "srun", "distdiag", "stacks", "waits",
    "log", "kernel", "recorder", "ras", "versions", "gpu", "cpu", "hang", "step", "error", "run",
))
# fmt: on
"""Words common in paths and logs; as a host or user name, replaced only if unambiguous."""
_NO_STEMS = frozenset(
    ("rank", "step", "gpu", "cuda", "cpu", "python", "local", "eth", "ib", "mlx", "job", "user", "worker")
)
"""Followed by a number these are not hosts, whatever the hosts' names."""
_PACKED = frozenset(("entries",))
"""Numbers packed into text: a change would corrupt the data, which contains no name."""
_OF_VERSIONS = re.compile(r"(?i)version|packages|requires|wheels|soname|release")
_OF_USERS = frozenset(("user", "uid"))
_OF_HOSTS = frozenset(("host", "hosts"))
_FIRST_PERSON = 1000
_CACHED = 400
_LONG_VALUE = 8

_UUID = r"(?P<uuid>(?<![0-9A-Fa-f])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Fa-f]))"
_MAC = r"(?P<mac>(?<![\w:])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}(?![\w:]))"
_IP6 = (
    r"(?P<ip6>(?<![\w:])(?:[23][0-9a-fA-F]{3}|[fF][cCdD][0-9a-fA-F]{2}|[fF][eE][89abAB][0-9a-fA-F]):[0-9a-fA-F:]{1,34})"
)
_IP4 = r"(?P<ip4>(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d))"
_AWS = r"(?P<awshost>\bip-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}\b)"
_MAIL = r"(?P<mail>(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})+)"
_HOMES = (
    r"(?P<homepath>(?<![\w/.])(?P<above>/(?:[\w.-]{1,64}/){0,4}?(?:home|homes|Users|users|staff|people)|/u|(?P<shared>"
    r"/(?:[\w.-]{1,64}/)?(?:scratch|fsx|lustre|gpfs|beegfs|nobackup|work)\d{0,2}))/(?P<owner>[A-Za-z0-9_][\w.-]{0,63}))"
)
_OWN_TOP = ("/home", "/Users", "/users", "/u")
_PERSON = re.compile(r"[a-z]{3,16}\d{0,3}")
"""A folder of a shared file system that may be a user's."""
_NO_PERSON = re.compile(
    r".*(?:run|exp|ckpt|check|data|model|log|code|src|job|train|test|eval|out|tmp|temp|cache|proj|team|group|share|common|net"
    r"|user|home|soft|tool|env|conda|venv|bin|lib|image|token|corpus|llama|qwen|gpt|bert|wiki|pile|laion|coco|public|bench).*"
)
_LEFT, _RIGHT = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"


class Redactor:
    """Replaces names and secrets; `map` has the original of each placeholder except secrets, kept in memory only."""

    def __init__(self, known: Names) -> None:
        self.map: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        self._domains: dict[str, str] = {}
        self._users: dict[str, str] = {}
        self._secrets: dict[str, tuple[str, str]] = {}
        self._forms: dict[str, str] = {}
        self._others: dict[str, str] = {}
        self._nets: dict[str, tuple[int, dict[str, int]]] = {}
        self._known_addresses = set(known.addresses)
        self._cache: dict[tuple[str, bool], str] = {}
        for host in known.hosts:
            self._host(host)
        for user in known.users:
            self._user(user)
        self._homes = sorted({home.rstrip("/") for home in known.homes if home.count("/") > 1}, key=len, reverse=True)
        for secret in sorted(set(known.secrets), key=len, reverse=True):
            stand_in = self._secret(secret, "value of a variable or an option")
            for form in _forms(secret):
                self._forms.setdefault(form, stand_in)
        self._known = re.compile("|".join(sorted(map(re.escape, self._forms), key=len, reverse=True)))
        self._pattern = self._compile()

    @property
    def secrets(self) -> dict[str, int]:
        """The number of distinct secrets replaced or searched for, by rule."""
        return dict(Counter(rule for _, rule in self._secrets.values()).most_common())

    def leaks(self, content: bytes) -> bool:
        """Return whether a file still contains a known secret, in any form."""
        return any(form.encode() in content for form in self._forms)

    def tree(self, value: Any, key: str = "", *, versions: bool = False) -> Any:  # noqa: ANN401 - any JSON
        """Return a JSON document with placeholders, including keys."""
        if isinstance(value, str):
            return value if key in _PACKED else self.text(value, versions=versions, is_host=key in _OF_HOSTS)
        if isinstance(value, dict):
            return {
                self.text(name, versions=versions): self.tree(
                    below, name, versions=versions or bool(_OF_VERSIONS.search(name))
                )
                if not (isinstance(below, str) and _is_secret_name(name) and not find_secrets.is_harmless(below))
                else self._secret(below, "named value")
                for name, below in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [
                self._secret(below, "option")
                if _is_of_option(before, below)
                else self.tree(below, key, versions=versions)
                for before, below in zip((None, *value), value, strict=False)
            ]
        if key in _OF_USERS and isinstance(value, int) and not isinstance(value, bool) and value >= _FIRST_PERSON:
            return self._numbered(f"uid {value}", "uid", first=_FIRST_PERSON)
        return value

    def text(self, text: str, *, versions: bool = False, is_host: bool = False) -> str:
        """Return a text with placeholders. `versions`: has version numbers, no addresses; `is_host`: is a host name."""
        if (whole := self._hosts.get(text.lower())) is not None and (is_host or text.lower() not in _COMMON):
            return whole
        if (cached := self._cache.get((text, versions))) is not None:
            return cached
        # In sequence: a random word may contain a known secret or a name.
        made = self._known.sub(lambda match: self._forms[match[0]], text) if self._forms else text
        made = find_secrets.replaced(made, self._secret)
        made = self._pattern.sub(lambda match: self._replace(match, versions=versions), made)
        made = find_secrets.random_replaced(made, self._secret)
        if len(text) <= _CACHED:
            self._cache[text, versions] = made
        return made

    def _compile(self) -> re.Pattern[str]:
        words = [name for name in self._hosts if name not in _COMMON and len(name) > 2 - any(map(str.isdigit, name))]
        words += [name for name in self._domains if "." in name]
        stems = {match[1] for name in words if (match := re.fullmatch(r"(.*?[a-z][-_]?)0*\d+", name))}
        parts = [_UUID]
        if self._homes:
            parts.append(rf"(?P<known>{'|'.join(map(re.escape, self._homes))})(?![\w.-])")
        parts += [_MAC, _IP6, _IP4, _AWS, _MAIL, _HOMES]
        if domains := _own_domains(self._domains):
            listed = "|".join(map(re.escape, domains))
            parts.append(rf"(?P<neighbour>(?<![\w.-])(?i:(?:[a-z0-9][a-z0-9-]{{0,62}}\.){{1,4}}(?:{listed}))){_RIGHT}")
        if words:
            parts.append(f"{_LEFT}(?i:{_alternatives('host', words)}){_RIGHT}")
        if stems := {stem for stem in stems if stem.rstrip("-_") not in _NO_STEMS and len(stem) > 1}:
            listed = "|".join(sorted(map(re.escape, stems), key=len, reverse=True))
            parts.append(rf"{_LEFT}(?P<list>(?i:{listed})\[[\d,-]{{1,400}}\])")
            parts.append(rf"{_LEFT}(?P<peer>(?i:{listed})\d{{1,6}}){_RIGHT}")
        if users := [user for user in self._users if user not in _COMMON and len(user) > 2]:
            parts.append(f"{_LEFT}{_alternatives('person', users)}{_RIGHT}")
        return re.compile("|".join(parts))

    def _replace(self, match: re.Match[str], *, versions: bool) -> str:
        found = match[0]
        made: dict[str, Callable[[], str]] = {
            "uuid": lambda: self._uuid(found),
            "homepath": lambda: self._home(match["above"], match["owner"], is_shared=match["shared"] is not None),
            "known": lambda: "/root" if found == "/root" else f"/home/{self._user(found.rpartition('/')[2])}",
            "mac": lambda: str(self._numbered(found.lower(), "mac")),
            "ip6": lambda: self._ip6(found),
            "ip4": lambda: self._ip4(match, versions=versions),
            "awshost": lambda: self._host(found),
            "mail": lambda: f"{self._user(found.partition('@')[0])}@{self._domain(found.partition('@')[2])}",
            "host": lambda: self._domains.get(found.lower()) or self._host(found),
            "peer": lambda: self._host(found),
            "neighbour": lambda: self._host(found),
            "list": lambda: self._listed(found),
            "person": lambda: self._user(found),
        }
        return made[match.lastgroup or ""]()

    def _secret(self, value: str, rule: str) -> str:
        if value in self._forms:
            return self._forms[value]
        return self._secrets.setdefault(value, (f"secret-{len(self._secrets) + 1}", rule))[0]

    def _host(self, name: str) -> str:
        low = name.lower()
        if low in self._hosts or low in ("", "localhost", "localhost.localdomain") or is_address(low.strip("[]")):
            return self._hosts.get(low, name)
        short, dot, domain = low.partition(".")
        if dot:
            made = f"{self._host(short)}.{self._domain(domain)}"
        else:
            made = f"host-{1 + sum('.' not in known for known in self._hosts)}"
        self._hosts[low] = made
        self.map[made] = low
        return made

    def _domain(self, name: str) -> str:
        low = name.lower()
        made = self._domains.setdefault(low, f"domain-{len(self._domains) + 1}.example")
        self.map[made] = low
        return made

    def _listed(self, found: str) -> str:
        stem, _, ranges = found[:-1].partition("[")
        names: list[str] = []
        for piece in ranges.split(","):
            first, _, last = piece.partition("-")
            if first.isdigit() and (last or first).isdigit() and int(last or first) - int(first) < 4096:
                names += [f"{stem}{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
        return ",".join(map(self._host, names)) or "host-list"

    def _home(self, above: str, owner: str, *, is_shared: bool) -> str:
        above = self._pattern.sub(lambda match: self._replace(match, versions=False), above)
        if owner not in self._users and (
            (is_shared and not (_PERSON.fullmatch(owner) and not _NO_PERSON.fullmatch(owner)))
            or (above not in _OWN_TOP and owner in _COMMON)
        ):
            return f"{above}/{self._pattern.sub(lambda match: self._replace(match, versions=False), owner)}"
        return f"{'/home' if above in _OWN_TOP else above}/{self._user(owner)}"

    def _user(self, name: str) -> str:
        if name == "root":
            return name
        made = self._users.setdefault(name, f"user-{len(self._users) + 1}")
        self.map[made] = name
        return made

    def _numbered(self, found: str, kind: str, *, first: int = 1) -> Any:  # noqa: ANN401 - a number for a uid
        number = first + sum(name.partition(" ")[0] == kind for name in self._others)
        known = self._others.setdefault(f"{kind} {found}", str(number))
        if kind == "uid":
            return int(known)
        made = f"02:00:00:00:{int(known) >> 8 & 255:02x}:{int(known) & 255:02x}"
        self.map[made] = found
        return made

    def _uuid(self, found: str) -> str:
        number = 1 + sum(name.startswith("uuid ") for name in self._others)
        made = self._others.setdefault(f"uuid {found.lower()}", f"00000000-0000-0000-0000-{number:012d}")
        self.map[made] = found.lower()
        return made

    def _place(self, net: str, host: str) -> tuple[int, int]:
        number, members = self._nets.setdefault(net, (len(self._nets), {}))
        return number, members.setdefault(host, len(members) + 1)

    def _ip4(self, match: re.Match[str], *, versions: bool) -> str:
        found = match["ip4"]
        try:
            address = ipaddress.IPv4Address(found)
        except ValueError:
            return found
        before = match.string[max(0, match.start() - 12) : match.start()]
        is_version = versions or re.search(r"(?i)(?:\.so\.|[=<>~!]=|version\W{0,3}|\bv)$", before)
        plain = address.is_loopback or address.is_unspecified or found == "255.255.255.255" or found.startswith("255.")
        if plain or (is_version and found not in self._known_addresses):
            return found
        net, _, host = found.rpartition(".")
        number, member = self._place(net, host)
        made = f"10.{number >> 8 & 255}.{number & 255}.{member}"
        self.map[made] = found
        return made

    def _ip6(self, found: str) -> str:
        tail = found[len(found.rstrip(":")) :] if found.endswith(":") and not found.endswith("::") else ""
        bare = found.removesuffix(tail)
        try:
            address = ipaddress.IPv6Address(bare)
        except ValueError:
            return found
        whole = address.exploded
        number, member = self._place(whole[:19], whole[20:])
        made = f"{'fe80' if address.is_link_local else 'fd00'}::{number:x}:{member:x}"
        self.map[made] = str(address)
        return made + tail


def learn(known: Names, documents: Iterable[Any]) -> Names:
    """Add the names in facts: `host` of any record, homes in paths, addresses of sockets."""
    hosts, users, addresses = dict.fromkeys(known.hosts), dict.fromkeys(known.users), dict.fromkeys(known.addresses)
    for key, text in (pair for document in documents for pair in _strings(document, "")):
        if key in _OF_HOSTS and re.fullmatch(r"[\w.-]{1,253}", text):
            hosts[text] = None
        if key in ("local", "remote", "addresses", "address"):
            addresses.update(dict.fromkeys(re.findall(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}", text)))
        for owner in re.finditer(_HOMES, text):
            if owner["shared"] is None and (owner["above"] in _OWN_TOP or owner["owner"] not in _COMMON):
                users[owner["owner"]] = None
        for owner in re.finditer(r"(?<![\w-])(?:USER|LOGNAME|USERNAME)=([a-z_][\w.-]{1,31})", text):
            users[owner[1]] = None
    return replace(known, hosts=tuple(hosts), users=tuple(users), addresses=tuple(addresses))


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - any JSON
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, below in value.items():
            yield from _strings(below, name)
    elif isinstance(value, (list, tuple)):
        for below in value:
            yield from _strings(below, key)


def _forms(secret: str) -> Iterator[str]:
    """Yield the forms of a secret: plain, escaped, in URLs, base64, hex."""
    data = secret.encode()
    yield secret
    yield from {quote(secret, safe=""), quote_plus(secret), json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    if len(data) < _LONG_VALUE:
        return
    yield from (data.hex(), data.hex().upper())
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):  # it may start at any of the three bytes that form four letters
            packed = encode(b"\0" * before + data).decode().rstrip("=")
            start, end = math.ceil(before * 8 / 6), (before + len(data)) * 8 // 6
            yield packed[start:end]


def _alternatives(name: str, words: Iterable[str]) -> str:
    return f"(?P<{name}>{'|'.join(sorted(map(re.escape, words), key=len, reverse=True))})"


def _is_of_option(before: object, value: object) -> bool:
    """Return whether a word is the secret value of the preceding option."""
    if not (isinstance(before, str) and isinstance(value, str) and before.startswith("-") and "=" not in before):
        return False
    return _is_secret_name(before) and find_secrets.is_named_secret(before.lstrip("-"), value)


def _is_secret_name(name: str) -> bool:
    return bool(SECRET_NAME.search(name.strip("-\"'")))


def _own_domains(domains: Iterable[str]) -> list[str]:
    """Return the site's own domains, longest first: corp.example for rack7.corp.example, but not co.uk."""
    found = {domain for domain in domains if "." in domain}
    for domain in tuple(found):
        above = domain.partition(".")[2]
        if any(len(label) > 3 for label in above.split(".")[:-1]):
            found.add(above)
    return sorted(found, key=len, reverse=True)
