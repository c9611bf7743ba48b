"""Secrets in a text: known formats, values near words of authentication, random words. Pure.

Each is replaced by the result of `replace(value, rule)`. Hashes of commits, files, images and containers are kept: keys
can be hexadecimal too, so hexadecimal words count only near a word of authentication.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from distdiag.knowledge import secrets

if TYPE_CHECKING:
    from collections.abc import Callable

    Replace = Callable[[str, str], str]

_COLOUR = re.compile(r"(?:\x1b|\\x1b|\\u001b|\\033|\\e|\^\[)\[[0-9;:?]{0,40}[A-Za-z]")
_WORDS = re.compile(
    r"(?i)pass(?!ed|es)|pwd|pw\b|secret|token(?!s|iz|_(?:count|id|type|len))|key(?!word|board)|auth|cred"
    r"|cookie|signature|sig\b|webhook|dsn|login|pin\b|license|session|access|hmac|wandb|encryption|bearer|salt\b"
)
"""A cheap filter for lines that may have named values."""

# Names whose values are always passwords, and names whose values are secrets if random.
_PASSWORD = (
    r"[\w.-]{0,60}?(?:passw(?:or)?d|passphrase|passcode|(?<!key)secret(?!ar)|credential|(?<!_)pwd|[-_.]pwd|pgpass"
    r"|(?:api|access|account|private|shared|signing|encryption|license|client|master|deploy|auth|service)[-_. ]?key"
    r"|token(?!s\b|iz|_?(?:id|count|type|len|per|limit|num|embed|mask|parallel))|(?<!x)auth(?!or(?!iz))|cookie|webhook|(?<![a-z])creds)"
    r"[\w-]{0,40}|[\w.-]{0,60}(?:(?<![a-z])pw|PW|(?<![a-z])pass|PASS|dsn)"
)
_KEY = r"(?:[\w.-]{0,60}[-_])?(?:key|sig|signature|salt|hmac|key[-_]data)"
_QUOTE = r"(?:\\{0,3}[\"'`])"
_VALUE = (
    rf"(?P<quote>{_QUOTE})(?P<quoted>(?:(?!(?P=quote))[^\n]){{1,4000}})(?P=quote)"
    r"|(?:(?i:bearer|basic|token|apikey)[ \t]+)?(?P<bare>[^\s,;&)\]}\"'`<>\\]{1,4000})"
)
_EQUALS = r"[ \t]{0,3}(?:=>|:=|=|%3D|:(?![:/]))[ \t]{0,3}"
_NAMED = re.compile(
    rf"(?P<head>(?<![\w.-])(?P<name>(?i:{_PASSWORD})|(?i:{_KEY})){_QUOTE}?(?:{_EQUALS}|{_QUOTE},[ \t]?))(?:{_VALUE})"
)
_HEADER = re.compile(
    r"(?i)(?P<head>\b(?:(?:proxy-)?authorization|(?:set-)?cookie|x-[\w-]{0,40}(?:token|key|auth))\\{0,3}[\"']?\s?:\s?\\{0,3}[\"']?"
    r"(?:(?:bearer|basic|digest|token|apikey|negotiate|aws4-hmac-sha256)[ \t]+)?)(?P<bare>[^\r\n\"'\\]{4,8000})"
)
_OPTION = re.compile(
    rf"(?P<head>(?<![\w-])(?:setenv[ \t]+|(?=-))(?P<name>-{{0,2}}(?i:{_PASSWORD}|[\w-]{{0,40}}key))[ \t]+)"
    r"(?P<bare>(?![-|&>])[^\s|&;]{3,4000})"
)
_XML = re.compile(rf"(?P<head><(?P<name>(?i:{_PASSWORD}|{_KEY}))>)(?P<bare>[^<>\n]{{1,4000}})(?=</)")
_PROSE = re.compile(
    r"(?i)(?P<head>\b(?P<name>passwords?|passphrase|passwd|passcode|pwd?|secret|token|credentials?|key|pin)\b"
    r"[ \t]+(?:\w+[ \t]+){0,3}?(?P<is>is|was|are|to|as|=|:)?:?[ \t]*)(?<=[ \t:=])"
    rf"(?:(?P<quote>{_QUOTE})(?P<quoted>[^\s\"'`]{{3,400}})(?P=quote)|(?P<bare>[^\s\"'`,;()]{{4,400}}))"
)
_TICKET = re.compile(r"(?P<head>\b(?i:bearer|basic)[ \t]+)(?P<bare>[\w.~+/=-]{8,4000})")
_NEAR = re.compile(
    r"(?i)(?<![a-z])(?:api|access|secret|private|license|signing|encryption|account|session|shared|master"
    r"|(?<!cache[ _-])key(?!word)|token(?!iz|s)|passw|passphrase|credential|auth(?!or(?!iz))|login|logged in"
    r"|bearer|hmac|salt|wandb|cookie|sessionid)"
)
_ALONE = re.compile(r"(?<![\w/.+~-])[A-Za-z0-9_+/~-]{16,400}={0,2}(?![\w/+~-]|\.\w)")
_OF_A_HASH = re.compile(
    r"(?i)(?:commit|sha-?\d*|md5|checksum|digest|hash\w*|rev\w*|container\w*|docker|image|etag|tree|blob|git\w*|build\w*"
    r"|cgroup|crc\w*|comm|commid|\w*cache\w*|head|tag|layer|snapshot|version|fingerprint|merge|branch|ref|graph|pod|scope"
    r"|inode|guid|uuid|artifact|file|object|store|triton|inductor|@)"
    r"(?:\W{1,4}(?:is|at|of|key|to|id|for|with|the|miss|hit|name|base)){0,4}\W{0,4}$"
)
_NO_PASSWORD = re.compile(
    r"(?i)required|incorrect|wrong|invalid|empty|missing|not|too|set|unset|expired|needed|none|null|true|false|yes|no|on|off"
    r"|ok|correct|valid|the|a|an|in|for|of|and|or|was|is|has|to|by|with|from|changed|updated|being|accepted|rejected|denied"
    r"|failed|file|prompt|hidden|default|disabled|enabled|munge|password|authentication|provided|given|stored|read|used"
    r"|based|protected|unknown|it|this|that|your|my|here|there|then|error|please|must|should|will|can|cannot|longer|weak"
    r"|auth/\w+|basic|bearer|slurm|str|int|bytes|object|optional\w*|same|different|loaded|found|absent|sent|ignored|\W*"
)
_HARMLESS = re.compile(
    r"(?i)(?:none|null|true|false|yes|no|on|off|str|bytes|auth/\w+|munge|disabled|enabled|default|unset|redacted|required|basic|bearer)"
    r"|[*x.<>…_-]{1,80}|secret-\d+|<[^>]*>|\$?\{+[^}]*\}*|\$\(?\w+\)?|%\(?\w+\)?s?|os\.environ.*|getpass.*|\(.*|\[.*|\W*"
)
_NO_SECRET_NAME = re.compile(
    r"(?i)(?:forward|backward|fwd|bwd|first|second|single|multi|one|two|per|n|num|test|opt\w*|fusion|compiler|render)"
    r"[-_. ]?pass"
    r"|(?:by|com|sur|over|under)pass|.*(?:cache|state|dict|public|pub|partition|primary|foreign|sort|group|map|dedup|routing|topic"
    r"|row|host|hot|idempotency|store|prefix)[-_]?key|.*tokens|.*[-_](?:file|path|dir|folder|timeout|len|length|size|count|type|name|interval|expir\w+"
    r"|ttl|id|ids|mode|method|enabled|backend|provider|required|plugin|kwargs|info|alttypes)"
)
_IS_PASSWORD = re.compile(r"(?i)passw|passphrase|passcode|pwd|pass$|pw$")
_PATH = re.compile(r"(?:~|\.{1,2})?/(?:[\w.@+-]+/)*[\w.@+-]*")
_SEPARATORS = re.compile(r"[_/+~.=-]")
_LEAST_RANDOM = 20
_LONG_KEY = 24
_CHANGES = 0.35
_ENTROPY = 3.4


def replaced(text: str, replace: Replace) -> str:
    """Return a text without colours, with secrets replaced, except random words far from any name."""
    if "[" in text:
        text = _COLOUR.sub("", text)
    low = text.lower()
    for rule in secrets.rules():
        if any(word in low for word in rule.words):
            text = rule.pattern.sub(lambda match, rule=rule: _of_form(match, rule.id, replace), text)  # type: ignore[misc]
    if _WORDS.search(text):
        text = "\n".join(_line(line, replace) if _WORDS.search(line) else line for line in text.split("\n"))
    return text


def random_replaced(text: str, replace: Replace) -> str:
    """Replace words that look like keys, wherever they are."""
    return _ALONE.sub(
        lambda match: replace(match[0], "random word") if is_random(match[0]) and not _is_hash(match) else match[0],
        text,
    )


def is_random(word: str) -> bool:
    """Return whether a word looks like a key by itself: both cases and digits, unordered; not a C++ name."""
    if len(word) < _LEAST_RANDOM or word.startswith(
        ("_Z", "CUDA", "GPU-", "MIG-", "Cijk_", "sha256-", "sha512-", "AAAAB3Nz", "AAAAC3Nz", "AAAAE2Vj")
    ):
        return False
    if not all(re.search(kind, word) for kind in ("[a-z]", "[A-Z]", "[0-9]")):
        return False
    if len(_SEPARATORS.findall(word.rstrip("="))) > max(2, len(word) // 8):
        return False
    names = sum(len(run) for run in re.findall("[a-z]{3,}", word))
    return changes(word) >= _CHANGES and names < len(word) / 2 and _entropy(word) > _ENTROPY


def changes(word: str) -> float:
    """Return how often adjacent letters and digits differ in kind: 0.6 in random words, below 0.3 in names."""
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" if c.isalpha() else "" for c in word]
    pairs = [(one, other) for one, other in pairwise(kinds) if one and other]
    return sum(one != other for one, other in pairs) / len(pairs) if pairs else 0.0


def looks_random(word: str) -> bool:
    """Return whether a value may be a key if its name suggests it: a hash, or letters and digits mixed."""
    bare = word.rstrip("=")
    if re.match(r"AAAA[BCE][A-Za-z0-9]{4}|\d{4}-\d\d-\d\d[T_ ]?\d\d|sha(?:256|512)-", bare):  # a public key, a time
        return False
    if re.fullmatch(r"[0-9a-fA-F]{16,}", bare):
        return any(c.isdigit() for c in bare) and any(c.isalpha() for c in bare)
    if re.fullmatch(r"[\w.]*\.\w*[a-z]{4,}[\w.]*", bare) and changes(bare) < _CHANGES:  # layers.0.weight
        return False
    mixed = any(c.isdigit() for c in bare) and any(c.isalpha() for c in bare)
    return (len(bare) >= 8 and mixed and changes(bare) >= 0.2) or (len(bare) >= 16 and changes(bare) >= _CHANGES)


def _entropy(word: str) -> float:
    share = [word.count(letter) / len(word) for letter in set(word)]
    return -sum(each * math.log2(each) for each in share)


def _of_form(match: re.Match[str], rule: str, replace: Replace) -> str:
    groups = match.groupdict()
    random = groups.get("random")
    is_long = random is not None and len(random) >= _LONG_KEY and changes(random) >= _CHANGES / 3
    if random is not None and not (is_long or looks_random(random)):
        return match[0]
    secret = groups.get("secret") or groups.get("secret2") or match[0]
    if is_harmless(secret):
        return match[0]
    return match[0].replace(secret, replace(secret, rule))


def _line(line: str, replace: Replace) -> str:
    line = _HEADER.sub(lambda match: _valued(match, "HTTP header", replace), line)
    line = _NAMED.sub(lambda match: _of_name(match, "named value", replace), line)
    line = _OPTION.sub(lambda match: _of_name(match, "option", replace), line)
    line = _XML.sub(lambda match: _of_name(match, "named value", replace), line)
    line = _TICKET.sub(
        lambda match: _valued(match, "HTTP header", replace) if looks_random(match["bare"]) else match[0], line
    )
    line = _PROSE.sub(lambda match: _of_prose(match, replace), line)
    if (near := _NEAR.search(line)) is not None:
        line = _ALONE.sub(
            lambda match: (
                replace(match[0], "random word beside a word of authentication")
                if match.start() > near.start() and _is_key_near(match)
                else match[0]
            ),
            line,
        )
    return line


def _value(match: re.Match[str]) -> str:
    return match.groupdict().get("quoted") or match["bare"]


def _valued(match: re.Match[str], rule: str, replace: Replace) -> str:
    value = _value(match)
    if is_harmless(value):
        return match[0]
    place = match.start("bare") if match["bare"] else match.start("quoted")
    place -= match.start()
    return match[0][:place] + replace(value, rule) + match[0][place + len(value) :]


def _of_name(match: re.Match[str], rule: str, replace: Replace) -> str:
    name, value = match["name"].lstrip("-"), _value(match)
    if not is_named_secret(name, value) or (name.lower().endswith("key") and _is_hash(match)):
        return match[0]
    if match["bare"] and match["head"].endswith(": ") and _is_plain(name, value):
        return match[0]
    return _valued(match, rule, replace)


def is_named_secret(name: str, value: str) -> bool:
    """Return whether a value is a secret, by name and value."""
    if is_harmless(value) or _NO_SECRET_NAME.fullmatch(name):
        return False
    if _PATH.fullmatch(value) and not is_random(value) and value.count("/") > 0:
        return False
    is_password = _IS_PASSWORD.search(name) is not None or "secret" in name.lower()
    if re.fullmatch(r"[\d.]{1,5}|0x[0-9a-f]{1,16}|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?:[a-z%]{1,5})?", value) and (
        not is_password or "." in value
    ):
        return False
    if re.fullmatch(rf"(?i){_KEY}", name) and not re.search(
        r"(?i)(?:api|access|account|private|shared|signing|encryption|license|client|master|deploy|auth|service|secret)[-_]?key",
        name,
    ):
        return looks_random(value)
    return not (value.startswith(("http://", "https://")) and not re.search(r"(?i)webhook|dsn|password", name))


def _is_plain(name: str, value: str) -> bool:
    """Return whether this is a sentence with a colon: 'token: the', 'CredentialsError: Unable to'."""
    if _IS_PASSWORD.search(name) and name.lower() != "pass":
        return _NO_PASSWORD.fullmatch(value.strip(":.")) is not None
    return re.fullmatch(r"[A-Za-z]{1,15}[.,]?|[A-Za-z]+:", value) is not None or name.endswith(("Error", "Exception"))


def _of_prose(match: re.Match[str], replace: Replace) -> str:
    value = _value(match).rstrip(".!")
    if is_harmless(value) or _NO_PASSWORD.fullmatch(value.rstrip(":")) or _PATH.fullmatch(value):
        return match[0]
    stated = match["quoted"] is not None or match["is"] in ("is", "was", "=", ":")
    is_password = match["name"].lower().startswith("p") and (stated or _is_mixed(value))
    place = match.start("bare") if match["bare"] else match.start("quoted")
    if not (is_password or looks_random(value)) or _OF_A_HASH.search(match.string, max(0, place - 60), place):
        return match[0]
    place -= match.start()
    return match[0][:place] + replace(value, "password in words") + match[0][place + len(value) :]


def _is_mixed(value: str) -> bool:
    """Return whether a word mixes letters and digits like a password: hunter2, but not 12ms, v1.2, 0x1f, or a:1."""
    return re.fullmatch(r"(?=.*\d)[A-Za-z][A-Za-z0-9!#$%&*+?@^~-]{4,60}", value) is not None


def _is_key_near(match: re.Match[str]) -> bool:
    word = match[0]
    is_hex = re.fullmatch(r"[0-9a-fA-F]{16,400}", word) is not None
    if _is_hash(match) or (not is_hex and "/" in word and not is_random(word)):
        return False
    separators = len(_SEPARATORS.findall(word.rstrip("=")))
    return looks_random(word) and separators <= max(2, len(word) // 8) and not is_harmless(word)


def _is_hash(match: re.Match[str]) -> bool:
    place = match.start("bare") if "bare" in match.re.groupindex and match["bare"] else match.start()
    return _OF_A_HASH.search(match.string, max(0, place - 60), place) is not None


def is_harmless(value: str) -> bool:
    """Return whether the value of a suspicious name is harmless: a word of Python or shells, or a placeholder."""
    return _HARMLESS.fullmatch(value.strip("\"'\\")) is not None
