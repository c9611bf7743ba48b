"""Code selected by the line tracer, and the wait recognised in a line of source."""

from __future__ import annotations

import json
import os
import sysconfig

from loops import each

from distdiag.knowledge.calls import call_in
from distdiag.training.line_trace.code_filter import CodeFilter

SITE = sysconfig.get_paths()["purelib"]


@each(
    "include, exclude, file, kind",
    [
        ((), (), "/home/me/train.py", "user"),
        ((), (), "/home/me/mypkg/model.py", "user"),
        ((), (), "<string>", "user"),
        ((), (), "<ipython-input-3-abc>", "user"),
        ((), (), "<frozen importlib._bootstrap>", None),
        ((), (), json.__file__, None),
        (("stdlib",), (), json.__file__, "stdlib"),
        ((), (), f"{SITE}/torch/nn/modules/linear.py", None),
        (("torch",), (), f"{SITE}/torch/nn/modules/linear.py", "library"),
        (("torch",), (), f"{SITE}/torchvision/ops.py", None),
        (("torch.nn",), (), f"{SITE}/torch/nn/modules/linear.py", "library"),
        (("torch.nn",), (), f"{SITE}/torch/optim/adamw.py", None),
        (("torch",), ("torch.nn",), f"{SITE}/torch/nn/modules/linear.py", None),
        (("all",), (), f"{SITE}/six.py", "library"),
        (("six",), (), f"{SITE}/six.py", "library"),
        ((), (), "/opt/other/lib/python3.9/site-packages/numpy/core.py", None),
        ((), ("mypkg",), "/home/me/mypkg/model.py", None),
        ((), ("mypkg.model",), "/home/me/mypkg/model.py", None),
        ((), ("mypkg.model",), "/home/me/mypkg/data.py", "user"),
        ((), ("/home/me/mypkg",), "/home/me/mypkg/model.py", None),
        ((), ("/home/me/my",), "/home/me/mypkg/model.py", "user"),
    ],
)
def test_what_is_traced(include: tuple[str, ...], exclude: tuple[str, ...], file: str, kind: str | None) -> None:
    assert CodeFilter(include, exclude).kind_of(file) == kind


def test_our_own_code_and_what_dataclasses_and_named_tuples_make_are_left_out() -> None:
    code_filter = CodeFilter(include=("all",))
    assert code_filter.kind_of(os.path.abspath(CodeFilter.__init__.__code__.co_filename)) is None
    assert code_filter.kind_of("<string>", "__create_fn__.<locals>.__init__", "__main__") is None
    assert code_filter.kind_of("<string>", "<lambda>", "namedtuple_Point") is None
    assert code_filter.kind_of("<string>", "f", "json") is None
    assert code_filter.kind_of("<string>", "f", "__main__") == "user"


@each(
    "source, kind, name",
    [
        ("dist.all_reduce(tensor)", "communication wait", "all_reduce"),
        ("torch.distributed.barrier(device_ids=[0])", "communication wait", "barrier"),
        ("loss.backward()", "communication wait", "backward"),
        ("dist.send(x, dst=1)", "communication wait", "send"),
        ("queue.send(x)", "", ""),
        ("numbers.reduce(f)", "", ""),
        ("work.wait()", "communication wait", "wait"),
        ("for batch in loader:", "data loading", "loader"),
        ("batch = next(data_iter)", "data loading", "next"),
        ("torch.save(state, path)", "checkpoint", "torch.save"),
        ("value = loss.item()", "gpu wait", "item"),
        ("time.sleep(60)  # before dist.barrier()", "", ""),
        ("log('dist.barrier() next')", "", ""),
        ("loss = model(batch)", "", ""),
        ("dist.destroy_process_group()", "teardown", "destroy_process_group"),
    ],
)
def test_what_a_line_may_wait_for(source: str, kind: str, name: str) -> None:
    assert call_in(source) == (kind, name)
