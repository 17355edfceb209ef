"""A law that can't be broken is no law: each meets a small house in which somebody broke it."""

from __future__ import annotations

from pathlib import Path

import laws
import pytest
from test_laws import Law

BORDER = '"""What it does, and what it doesn\'t know."""\n'

TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
LATE = "importlib.import_module('penstock.server.api_server.routes')"
# law, file, its text after the docstring, a word of the complaint
PLANTED: list[tuple[Law, str, str, str]] = [
    (laws.rooms_have_a_floor, "cellar/wine.py", "", "cellar"),
    (
        laws.rooms_look_down,
        "models/llama.py",
        "from penstock.execute.runner import run",
        "above it",
    ),
    (laws.rooms_look_down, "models/llama.py", "from penstock import execute", "above it"),
    (laws.rooms_look_down, "models/llama.py", "import penstock.engine.engine as e", "above it"),
    (laws.rooms_look_down, "schedule/rows.py", "import penstock.text.chat", "its own floor"),
    (laws.rooms_look_down, "schedule/rows.py", "from ..text import chat", "its own floor"),
    (
        laws.rooms_look_down,
        "schedule/rows.py",
        "def f():\n    from penstock.kernels import ops",
        "its own floor",
    ),
    (
        laws.rooms_look_down,
        "schedule/rows.py",
        TYPED + "from penstock.engine import engine",
        "above it",
    ),
    (laws.rooms_look_down, "text/chat.py", "import importlib\n" + LATE, "above it"),
    (laws.rooms_look_down, "jobs/run.py", "from penstock import LLM", "above it"),
    (
        laws.rooms_look_down,
        "execute/batch.py",
        "from penstock.text.tokenizer import Tokenizer",
        "doesn't see text",
    ),
    (laws.rooms_look_down, "layers/mlp.py", "from penstock.text import chat", "doesn't see text"),
    (
        laws.rooms_look_down,
        "bench/run_load.py",
        "from penstock.schedule.step import StepPlan",
        "only",
    ),
    (
        laws.sub_rooms_look_down,
        "server/online/auth.py",
        "from penstock.server.api_server.routes import f",
        "not below it",
    ),
    (
        laws.sub_rooms_look_down,
        "server/openai/forms.py",
        "import penstock.server.batch.files",
        "not below it",
    ),
    (
        laws.sub_rooms_look_down,
        "server/online/auth.py",
        "from penstock.server import api_server",
        "not below it",
    ),
    (
        laws.sub_rooms_look_down,
        "server/online/a.py",
        TYPED + "from penstock.server.batch.files import F",
        "not below it",
    ),
    (laws.sub_rooms_look_down, "server/auth.py", "", "no sub-room"),
    (
        laws.imports_make_no_circle,
        "text/chat.py",
        "from penstock.text.chat import Chat",
        "chat.py -> text/chat.py",
    ),
    (laws.packages_stay_in_their_places, "schedule/rows.py", "import torch", "no torch"),
    (
        laws.packages_stay_in_their_places,
        "text/chat.py",
        "def f():\n    from torch import nn",
        "no torch",
    ),
    (
        laws.packages_stay_in_their_places,
        "kernels/reference/a.py",
        "import triton.language as tl",
        "kernels/triton/",
    ),
    (laws.packages_stay_in_their_places, "jobs/curve.py", "import matplotlib", "inside functions"),
    (laws.packages_stay_in_their_places, "deploy/on_ray.py", "import ray", "inside functions"),
    (laws.packages_stay_in_their_places, "request.py", "import msgspec", "stdlib and numpy"),
    (
        laws.packages_stay_in_their_places,
        "server/api_server/routes.py",
        "import zmq",
        "engine/channel.py",
    ),
    (laws.nothing_runs_strangers_code, "weights/checkpoint.py", "import pickle", "pickle"),
    (
        laws.nothing_runs_strangers_code,
        "weights/checkpoint.py",
        "from pickle import loads",
        "pickle",
    ),
    (
        laws.nothing_runs_strangers_code,
        "weights/checkpoint.py",
        "import torch\ntorch.load('x')",
        "torch.load",
    ),
    (laws.nothing_runs_strangers_code, "jobs/run.py", "x = eval('1')", "eval"),
    (laws.nothing_runs_strangers_code, "jobs/run.py", "exec('1')", "exec"),
    (
        laws.nothing_runs_strangers_code,
        "text/chat.py",
        "f(trust_remote_code=True)",
        "trust_remote_code",
    ),
    (
        laws.nothing_runs_strangers_code,
        "text/chat.py",
        "f(**{'trust_remote_code': True})",
        "trust_remote_code",
    ),
    (
        laws.nothing_runs_strangers_code,
        "vllm_arguments/engine_table.py",
        "f(trust_remote_code=True)",
        "trust_remote_code",
    ),
    (
        laws.nothing_runs_strangers_code,
        "text/engine_table.py",
        "f('trust_remote_code')",
        "trust_remote_code",
    ),
    (
        laws.nothing_runs_strangers_code,
        "text/chat.py",
        "numpy.load('x', allow_pickle=True)",
        "allow_pickle",
    ),
    (laws.nothing_runs_strangers_code, "engine/channel.py", "socket.send_pyobj({})", "send_pyobj"),
    (
        laws.state_is_handed_over,
        "engine/engine.py",
        "def f():\n    global now\n    now = 1",
        "global now",
    ),
    (laws.files_can_be_read, "engine/engine.py", "x = 1\n" * 450, "452 lines"),
    (laws.no_utils, "engine/utils.py", "", "utils"),
    (laws.no_utils, "engine/text_utils/x.py", "", "text_utils"),
    (
        laws.docstrings_begin_plainly,
        "jobs/run.py",
        'def f():\n    """Of a run."""',
        "begins with Of",
    ),
    (
        laws.docstrings_begin_plainly,
        "jobs/run.py",
        'class F:\n    """As another."""',
        "begins with As",
    ),
    (laws.tests_can_fail, "cpu/test_x.py", "def test_x():\n    print(1)", "asserts nothing"),
    (laws.tests_can_fail, "cpu/test_x.py", "def test_x():\n    assert True", "can't fail"),
    (laws.tests_can_fail, "cpu/test_x.py", "def test_x():\n    assert f() or 1", "can't fail"),
    (
        laws.tests_can_fail,
        "cpu/test_x.py",
        "def test_x():\n    assert (f() == 1, 'why')",
        "can't fail",
    ),
    (
        laws.tests_draw_the_same_each_time,
        "cpu/test_x.py",
        "import os\nassert os.urandom(3)",
        "os.urandom(3)",
    ),
    (
        laws.tests_draw_the_same_each_time,
        "cpu/x.py",
        "import random\nr = random.Random()",
        "random.Random()",
    ),
    (
        laws.tests_draw_the_same_each_time,
        "cpu/x.py",
        "import secrets\nr = secrets.randbits(3)",
        "secrets.randbits",
    ),
    (
        laws.tests_that_need_torch_say_so,
        "text/test_x.py",
        "import torch\nassert torch",
        "mark.torch",
    ),
]


def plant(root: Path, path: str, text: str, border: str = BORDER) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(border + text + "\n")


@pytest.mark.parametrize(("law", "path", "text", "word"), PLANTED)
def test_a_law_finds_what_breaks_it(
    law: Law, path: str, text: str, word: str, tmp_path: Path
) -> None:
    plant(tmp_path, path, text)
    broken = law(tmp_path)
    assert len(broken) == 1
    assert word in broken[0] and broken[0].startswith(path.split("/")[0])


def test_a_circle_is_found_wherever_its_imports_stand(tmp_path: Path) -> None:
    plant(tmp_path, "engine/a.py", "from penstock.engine import b")
    plant(tmp_path, "engine/b.py", "def f():\n    from penstock.engine.c import C")
    assert laws.imports_make_no_circle(tmp_path) == []
    plant(
        tmp_path,
        "engine/c.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A",
    )
    assert laws.imports_make_no_circle(tmp_path) == [
        "engine/a.py:2: a circle of imports: engine/a.py -> engine/b.py -> engine/c.py ->"
        " engine/a.py"
    ]


def test_a_circle_of_scripts_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "shapes.py", "from side import a")
    plant(tmp_path, "gpu/side.py", "def f():\n    import shapes")
    assert laws.scripts_make_no_circle(tmp_path) == [
        "gpu/side.py:3: a circle of imports: gpu/side.py -> shapes.py -> gpu/side.py"
    ]


def test_a_test_that_imports_the_long_run_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "reliability/flood.py", "from service import x")
    plant(tmp_path, "reliability/run.py", "import flood")
    plant(tmp_path, "server/test_x.py", "from flood import y")
    assert laws.tests_stand_without_the_long_run(tmp_path) == [
        "server/test_x.py: imports flood of tests/reliability: what both need lies in tests/harness"
    ]


def test_a_file_without_a_border_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "llm.py", "x = 1", border="")
    assert laws.files_draw_their_border(tmp_path) == [
        "llm.py:1: opens with no docstring: say what it does and what it doesn't know"
    ]


def test_an_undeclared_package_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "server/api_server/routes.py", "import fastapi, zmq, json")
    assert laws.packages_are_declared(tmp_path, frozenset({"fastapi", "pyzmq"})) == []
    assert len(laws.packages_are_declared(tmp_path, frozenset({"fastapi"}))) == 1


def test_names_that_stand_twice_are_found(tmp_path: Path) -> None:
    plant(tmp_path, "server/openai/forms.py", "")
    plant(tmp_path, "jobs/forms.py", "class Batch: ...\nclass _Own: ...")
    plant(tmp_path, "text/read.py", "class Batch: ...\nclass _Own: ...")
    plant(tmp_path, "kernels/triton/forms.py", "")
    broken = laws.names_stand_once(tmp_path)
    assert [each.split(": give")[0] for each in broken] == [
        "jobs/forms.py: forms.py is also in server/openai/forms.py",
        "jobs/forms.py:2: Batch is also in text/read.py:2",
    ]
