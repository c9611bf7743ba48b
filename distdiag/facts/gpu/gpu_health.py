"""Health of each GPU by nvidia-smi: memory errors, throttled clocks, NVLinks, processes.

`nvidia-smi -q` is a tree of "name : value" by indentation; some branches were renamed over the years ("Clocks Throttle
Reasons" became "Clocks Event Reasons"). Values missing in a driver or a GPU are None or empty.
"""

from __future__ import annotations

import re
from dataclasses import field, replace

from distdiag.facts import programs
from distdiag.facts.machine import user_name
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Tree = dict[str, Any]
    """By name a list of branches, each a Tree; below "" the text of this line. Names differ between drivers."""

_LINE = re.compile(r"^( *)(\S[^:]*?) *(?:: ?(.*))?$")
_HEADER = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])$")
_LINK_GPU = re.compile(r"^GPU (\d+): ")
_LINK = re.compile(r"^\s+Link (\d+): (.*)$")
_LINK_ERRORS = re.compile(r"(?:Link (\d+): )?(Replay|Recovery|CRC|Link Recovery [\w ]*|Symbol|Effective)[\w ]*: +(\d+)")
_SLOW_REASONS = ("HW Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown", "SW Thermal Slowdown")


@record
class GpuProcess:
    """A process on a GPU. `kind`: C computes, G draws. `user` is empty if not visible."""

    pid: int
    name: str
    kind: str = ""
    user: str = ""


@record
class GpuHealth:
    """One GPU, in nvidia-smi's order, that of the PCI bus.

    `uncorrectable`: memory errors since the driver was loaded or the GPU was reset. `slowdowns`:
    active reasons for throttling. `application_clock_mhz`: the limit of `nvidia-smi -ac`; `busy_percent`: share of time
    in kernels. `inactive_links`: NVLinks that are down, of `links`. `link_errors`: recoveries and replays of NVLinks,
    by "link N kind". `clock_mhz`: of the multiprocessors. `pcie_replays`: retransmitted packets since the reset.
    `recovery`: the action requested by the driver ("None", "Reset"). `clique`: the GPUs of several nodes that share
    memory over NVLink. `broken`: nvidia-smi's text in place of values ("GPU is lost").
    """

    index: int
    address: str
    name: str = ""
    uuid: str = ""
    persistence: str = ""
    mig: str = ""
    recovery: str = ""
    uncorrectable: int | None = None
    retired_pending: bool = False
    remap_pending: bool = False
    remap_failed: bool = False
    sram_threshold: bool = False
    slowdowns: tuple[str, ...] = ()
    temperature_c: int | None = None
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    power_limit_w: float | None = None
    default_limit_w: float | None = None
    pcie_width: str = ""
    pcie_width_max: str = ""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_replays: int | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    application_clock_mhz: int | None = None
    busy_percent: int | None = None
    power_w: float | None = None
    fabric: str = ""
    clique: str = ""
    links: int = 0
    inactive_links: tuple[int, ...] = ()
    link_errors: dict[str, int] = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] = ()
    broken: str = ""


@record
class Health:
    """All GPUs of a node. `error`: why none could be read; `driver`: its version from nvidia-smi."""

    gpus: tuple[GpuHealth, ...] = ()
    driver: str = ""
    error: str = ""


def read(timeout_s: float, *, users: bool = True) -> Health:
    """Query nvidia-smi, with `users` also the owners of the processes. Never raises."""
    try:
        done = programs.run(["nvidia-smi", "-q"], timeout_s=timeout_s)
    except programs.CannotRun:
        return Health(error="nvidia-smi is not on this node's PATH")
    if done.timed_out:
        return Health(error=f"nvidia-smi did not answer within {timeout_s:g} s")
    text = done.stdout.decode("utf-8", "replace")
    health = parse(text)
    if not health.gpus:
        words = (text + done.stderr.decode("utf-8", "replace")).strip().splitlines()
        return Health(error=f"nvidia-smi: {words[-1].strip()[:160]}" if words else f"nvidia-smi: status {done.status}")
    health = _with_users(health) if users else health
    left_s = max(1.0, (timeout_s - done.elapsed_s) / 2)
    answers = [programs.run(["nvidia-smi", "nvlink", option], timeout_s=left_s) for option in ("-s", "-e")]
    return with_links(health, *(answer.stdout.decode("utf-8", "replace") for answer in answers))


def parse(text: str) -> Health:
    """Parse the output of `nvidia-smi -q`."""
    driver, gpus = "", []
    blocks: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        header = _HEADER.match(line.strip()) if not line.startswith("     ") else None
        if header is not None:
            blocks.append((header[1].lower(), []))
        elif blocks:
            blocks[-1][1].append(line)
        elif line.startswith("Driver Version"):
            driver = line.partition(":")[2].strip()
    for index, (address, lines) in enumerate(blocks):
        gpus.append(_gpu(index, address, _tree(lines), "\n".join(lines)))
    return Health(gpus=tuple(gpus), driver=driver)


def _tree(lines: list[str]) -> Tree:
    """Build a tree by indentation; branches of one name, such as several processes, become a list."""
    root: Tree = {}
    above: list[tuple[int, Tree]] = [(-1, root)]
    for line in lines:
        match = _LINE.match(line.rstrip().expandtabs(4))
        if match is None:
            continue
        indent, name, value = len(match[1]), match[2].strip(), match[3]
        while indent <= above[-1][0]:
            above.pop()
        branch: Tree = {"": (value or "").strip()}
        above[-1][1].setdefault(name, []).append(branch)
        above.append((indent, branch))
    return root


def _branch(tree: Tree, *names: str) -> Tree:
    for name in names:
        tree = (tree.get(name) or [{}])[0]
    return tree


def _value(tree: Tree, *names: str) -> str:
    text = str(_branch(tree, *names).get("", ""))
    return "" if text in ("N/A", "[N/A]", "Unknown Error", "GPU is lost") else text


def _number(text: str) -> int | None:
    match = re.match(r"-?\d+", text)
    return int(match[0]) if match is not None else None


def _watts(text: str) -> float | None:
    match = re.match(r"\d+(?:\.\d+)?", text)
    return float(match[0]) if match is not None else None


def _gpu(index: int, address: str, tree: Tree, text: str) -> GpuHealth:
    volatile = {
        name: _number(str(branch[0][""])) for name, branch in _branch(tree, "ECC Errors", "Volatile").items() if name
    }
    wrong = [count for name, count in volatile.items() if "Uncorrectable" in name and count is not None]
    reasons = tree.get("Clocks Event Reasons") or tree.get("Clocks Throttle Reasons") or [{}]
    slow = {**reasons[0], **_branch(reasons[0], "HW Slowdown")}
    lost = re.search(r"GPU is lost|GPU requires reset|Unable to determine the device handle[^\n]*", text)
    power = _branch(tree, "GPU Power Readings") or _branch(tree, "Power Readings")
    link = _branch(tree, "PCI", "GPU Link Info")
    was_reset = _value(tree, "GPU Reset Status", "Reset Required") == "Yes"  # drivers before 565
    state, status = _value(tree, "Fabric", "State"), _value(tree, "Fabric", "Status")
    return GpuHealth(
        index=index,
        address=address,
        name=_value(tree, "Product Name"),
        uuid=_value(tree, "GPU UUID"),
        persistence=_value(tree, "Persistence Mode"),
        mig=_value(tree, "MIG Mode", "Current"),
        recovery=_value(tree, "GPU Recovery Action") or "Reset" * was_reset,
        uncorrectable=sum(wrong) if wrong else None,
        retired_pending=_value(tree, "Retired Pages", "Pending Page Blacklist") == "Yes",
        remap_pending=_value(tree, "Remapped Rows", "Pending") == "Yes",
        remap_failed=_value(tree, "Remapped Rows", "Remapping Failure Occurred") == "Yes",
        sram_threshold=_value(tree, "ECC Errors", "Aggregate", "SRAM Threshold Exceeded") == "Yes",
        slowdowns=tuple(name for name in _SLOW_REASONS if slow.get(name, [{}])[0].get("") == "Active"),
        temperature_c=_number(_value(tree, "Temperature", "GPU Current Temp")),
        memory_used_mib=_number(_value(tree, "FB Memory Usage", "Used")),
        memory_total_mib=_number(_value(tree, "FB Memory Usage", "Total")),
        power_limit_w=_watts(_value(power, "Current Power Limit") or _value(power, "Enforced Power Limit")),
        default_limit_w=_watts(_value(power, "Default Power Limit")),
        pcie_width=_value(link, "Link Width", "Current"),
        pcie_width_max=_value(link, "Link Width", "Max"),
        pcie_generation=_number(_value(link, "PCIe Generation", "Current")),
        pcie_generation_max=_number(_value(link, "PCIe Generation", "Max")),
        pcie_replays=_number(_value(tree, "PCI", "Replays Since Reset")),
        clock_mhz=_number(_value(tree, "Clocks", "SM")),
        max_clock_mhz=_number(_value(tree, "Max Clocks", "SM")),
        application_clock_mhz=_number(_value(tree, "Applications Clocks", "Graphics")),
        busy_percent=_number(_value(tree, "Utilization", "Gpu") or _value(tree, "Utilization", "GPU")),
        power_w=_watts(_value(power, "Power Draw") or _value(power, "Average Power Draw")),
        fabric=f"{state}, {status}" if state and status else state,
        clique=_clique(_branch(tree, "Fabric")),
        processes=_processes(tree),
        broken=lost[0] if lost is not None else "",
    )


def _clique(fabric: Tree) -> str:
    """Return the group of GPUs that can share memory over NVLink: cluster UUID and clique; empty on one node."""
    cluster, clique = _value(fabric, "ClusterUUID"), _value(fabric, "CliqueId")
    return f"{cluster}/{clique}" if cluster.strip("0-") else ""


def _processes(tree: Tree) -> tuple[GpuProcess, ...]:
    """Read the processes. Process ID, Type, Name and Used GPU Memory are siblings in the tree."""
    found = []
    for entry in _branch(tree, "Processes").get("Process ID", []):
        pid = _number(str(entry[""]))
        if pid is not None:
            found.append(GpuProcess(pid, _value(entry, "Name")[:120], _value(entry, "Type")))
    return tuple(found)


def _with_users(health: Health) -> Health:
    from distdiag.facts.process import procs  # a module not sent to ranks

    def user(pid: int) -> str:
        number = procs.owner(pid)
        return "" if number is None else user_name(number)

    gpus = (
        replace(gpu, processes=tuple(replace(each, user=user(each.pid)) for each in gpu.processes))
        for gpu in health.gpus
    )
    return replace(health, gpus=tuple(gpus))


def with_links(health: Health, status: str, errors: str) -> Health:
    """Add the output of `nvidia-smi nvlink -s` and `-e`."""
    links, counts = _links(status), _link_errors(errors)
    gpus = []
    for gpu in health.gpus:
        own = links.get(gpu.index, {})
        down = tuple(number for number, words in own.items() if "inactive" in words.lower())
        gpus.append(replace(gpu, links=len(own), inactive_links=down, link_errors=counts.get(gpu.index, {})))
    return replace(health, gpus=tuple(gpus))


def _links(text: str) -> dict[int, dict[int, str]]:
    found: dict[int, dict[int, str]] = {}
    own: dict[int, str] = {}
    for line in text.splitlines():
        if (gpu := _LINK_GPU.match(line)) is not None:
            own = found.setdefault(int(gpu[1]), {})
        elif (link := _LINK.match(line)) is not None:
            own[int(link[1])] = link[2].strip()
        elif "all links are inactive" in line.lower():  # a GPU of a machine with NVLink
            own[0] = "inactive"
    return found


def _link_errors(text: str) -> dict[int, dict[str, int]]:
    """Read the counters above zero; newer drivers print the link on a separate line."""
    found: dict[int, dict[str, int]] = {}
    own: dict[str, int] = {}
    link = "?"
    for line in text.splitlines():
        if (gpu := _LINK_GPU.match(line)) is not None:
            own = found.setdefault(int(gpu[1]), {})
            continue
        if (header := re.match(r"^\s+Link (\d+)\b", line)) is not None:
            link = header[1]
        count = _LINK_ERRORS.search(line)
        if count is not None and int(count[3]):
            own[f"link {link} {count[2].strip().lower()}"] = int(count[3])
    return found
