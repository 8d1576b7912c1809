"""The rooms of the package import downward only, and the control plane imports no I/O."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "kvtier"

# In the order of docs/design.md: a room imports only itself and rooms above it. Those on one line may not import one another.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("observe",),
    ("identity",),
    ("policy",),
    ("store",),
    ("plan",),
    ("record",),
    ("memory",),
    ("tier",),
    ("engine",),
    ("testing",),
    ("simulate",),
    ("report",),
    ("cli",),
)
CONTROL_PLANE = ("policy", "store", "plan")
IO_MODULES = frozenset(
    "asyncio concurrent ctypes fcntl glob http io logging mmap multiprocessing os pathlib queue random redis requests selectors "
    "shutil signal socket sqlite3 ssl subprocess tempfile threading time torch urllib vllm zmq".split()
)
# The one place for configuration and error types that every room may use.
LEAVES = frozenset({"config", "errors"})
ENGINE_MODULES = frozenset({"vllm"})


def imports_of(path: Path) -> list[str]:
    """Absolute names of all modules that a file imports, wherever in the file it does."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import of {node.module}; write it absolutely"
            assert node.module is not None
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def violations(room: str, names: list[str]) -> list[str]:
    """What of `names` a file in `room` may not import."""
    rank = {name: place for place, line in enumerate(ROOMS) for name in line}
    wrong = []
    for name in names:
        head, _, rest = name.partition(".")
        if head == "kvtier":
            other = rest.partition(".")[0]
            if other in rank and room in rank and other != room and rank[other] >= rank[room]:
                wrong.append(name)
        elif room in CONTROL_PLANE and head in IO_MODULES:
            wrong.append(name)
    return wrong


FILES = sorted(SRC.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_room_imports_downward_only(path: Path) -> None:
    assert violations(room_of(path), imports_of(path)) == []


def test_every_room_exists_and_is_listed() -> None:
    listed = {name for line in ROOMS for name in line}
    found = {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found == listed


def test_only_the_vllm_adapter_imports_vllm() -> None:
    for path in FILES:
        if "vllm" not in path.relative_to(SRC).parts[:-1]:
            assert not [name for name in imports_of(path) if name.partition(".")[0] in ENGINE_MODULES], path


@pytest.mark.parametrize(
    ("room", "name"),
    [("policy", "kvtier.store.tiered"), ("store", "time"), ("record", "kvtier.engine"), ("plan", "os.path")],
)
def test_the_rules_can_fail(room: str, name: str) -> None:
    assert violations(room, [name]) == [name]


@pytest.mark.parametrize(("room", "name"), [("engine", "kvtier.store"), ("cli", "os"), ("store", "kvtier.policy.base")])
def test_the_rules_can_pass(room: str, name: str) -> None:
    assert violations(room, [name]) == []
