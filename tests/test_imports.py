"""The pipeline has one direction, and so do the imports."""

import ast
from pathlib import Path

import meta_attention

SOURCE = Path(meta_attention.__file__).parent

# each stage may import from those before it; names on one line do not see each other
STAGES = [
    {"errors"},
    {"config", "precision"},
    {"ops"},
    {"experts", "controller"},
    {"routing"},
    {"layers", "objective"},
    {"depth"},
    {"models", "testing"},
    {"adapt"},
    {"evaluation"},
    {"training", "report", "bench"},
    {"adapt.training", "ablation"},
    {"cli"},
]
ORDER = {name: stage for stage, names in enumerate(STAGES) for name in names}


def stage_of(module: str) -> str:
    """Where a module below ``meta_attention`` belongs: a package, or one inside of it."""
    first, *rest = module.split(".")
    inner = ".".join([first, *rest[:1]])
    return inner if inner in ORDER else first


def imported_stages(path: Path) -> set[str]:
    """Stages below ``meta_attention`` that a module imports at any level."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "meta_attention":
                names = [f"meta_attention.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        prefix = "meta_attention."
        found |= {stage_of(n.removeprefix(prefix)) for n in names if n.startswith(prefix)}
    return found


def test_imports_follow_the_pipeline():
    for path in SOURCE.rglob("*.py"):
        relative = path.relative_to(SOURCE)
        home = stage_of(".".join(relative.with_suffix("").parts))
        if home == "__init__":
            continue
        assert home in ORDER, f"{relative}: give {home} a place in STAGES"
        for other in imported_stages(path) - {home}:
            assert ORDER[other] < ORDER[home], f"{relative} imports {other}"


def test_every_public_name_loads():
    for name in meta_attention.__all__:
        assert getattr(meta_attention, name) is not None
    assert set(meta_attention.__all__) == set(meta_attention._HOME)


def test_no_import_falls_back_silently():
    """``except ImportError`` may only raise: an implementation asked for runs or raises."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ExceptHandler) and "ImportError" in ast.dump(node.type or node):
                assert isinstance(node.body[-1], ast.Raise), path
