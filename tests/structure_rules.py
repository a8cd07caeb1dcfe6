"""What the structure test holds the package to, as functions over source text. No torch; nothing is imported or run.

``check_package(root)`` walks a package folder by its syntax trees and returns one line for each violation. The tables
at the top are the design's: which room stands at which height, which files are paper, which edges are allowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "dayzero"

HEIGHTS: Mapping[str, int] = {
    **dict.fromkeys(("console", "decl", "errors", "extensions", "finding", "hardware", "terminal", "units", "view"), 0),
    **dict.fromkeys(("arch", "cache", "checkpoint", "ops", "parallel"), 1),
    **dict.fromkeys(("chat", "models"), 2),
    **dict.fromkeys(("blocks", "planner", "rehearse"), 3),
    "engine": 4,
    **dict.fromkeys(("acceptance", "server"), 5),
    **dict.fromkeys(("cli", "commands", "demo", "__main__"), 6),
}
# Files that make up one room though they lie apart.
SAME_ROOM = ({"cli", "commands", "demo", "__main__"},)
# Height 0 is shared by all, so it has an order of its own: what a file there may import.
GROUND: Mapping[str, frozenset[str]] = {
    "errors": frozenset(),
    "units": frozenset(),
    "finding": frozenset({"errors", "units"}),
    "decl": frozenset({"errors", "units"}),
    "view": frozenset({"decl", "errors", "units"}),
    "extensions": frozenset({"errors"}),
    "hardware": frozenset({"decl", "errors", "extensions", "units"}),
    "terminal": frozenset(),
    "console": frozenset({"errors", "finding", "terminal", "units"}),
}

PAPER_ROOMS = {*GROUND, "arch", "chat", "checkpoint", "models", "planner"}
PAPER_FILES = {
    "__init__.py",
    "acceptance/__init__.py",
    "acceptance/files.py",
    *(
        f"acceptance/accept/{name}.py"
        for name in ("__init__", "compare", "digest", "junit", "paired", "record", "registry", "stage")
    ),
    *(f"acceptance/doctor/{name}.py" for name in ("__init__", "diagnosis", "record", "rules", "show")),
    *(
        f"acceptance/page/{name}.py"
        for name in (
            "__init__",
            "bars",
            "comparison",
            "curves",
            "heat",
            "histogram",
            "ladder",
            "numbers",
            "pictures",
            "reading",
            "shapes",
            "svg",
            "write",
        )
    ),
    "cache/__init__.py",
    "cache/layout.py",
    "cache/manager.py",
    "cache/pool.py",
    "cache/prefix.py",
    "cache/reuse.py",
    "cache/sequence.py",
    "cache/snapshots.py",
    "engine/__init__.py",
    "engine/buckets.py",
    "engine/check.py",
    "engine/config.py",
    "engine/demand.py",
    "engine/events.py",
    "engine/grammar_words.py",
    "engine/heap.py",
    "engine/live.py",
    "engine/media.py",
    "engine/packer.py",
    "engine/request.py",
    "engine/residency.py",
    "engine/scheduler.py",
    "engine/sequence.py",
    "engine/step.py",
    "ops/__init__.py",
    "ops/bindings.py",
    "ops/capture.py",
    "ops/catalog.py",
    "ops/catalog_cuda.py",
    "ops/line.py",
    "ops/experts_sizes.py",
    "ops/experts_tables.py",
    "ops/latent_forms.py",
    "ops/tiles.py",
    "parallel/__init__.py",
    "parallel/cut.py",
    "parallel/mesh.py",
}
# The only files of a paper room that hold tensors.
DEVICE_FILES = {
    f"checkpoint/{name}.py" for name in ("building", "dequant", "extents", "lazy", "staging", "statistics", "stream")
}  # fmt: skip
# planner/detect asks the machine what it has; the package's own names (LLM) load their modules when first used.
LATE_IMPORT_ALLOWED = {"planner/detect.py", "__init__.py"}
DEVICE_PACKAGES = {"torch", "triton", "transformers", "compressed_tensors", "accelerate"}
DEVICE_MODULES = {"safetensors.torch"}

MODEL_NAMES = (
    "kimi", "moonshot", "moonvit", "deepseek", "glm", "qwen", "gpt_oss", "gptoss", "llama", "smollm", "minimax",
    "gemma", "mistral", "mixtral", "hunyuan", "ernie", "nemotron", "falcon", "jamba", "bailing", "olmo",
)  # fmt: skip
MODEL_NAMES_ALLOWED = {"models", "chat", "oracles", "demo"}
# Whole strings of the config vocabulary that happen to hold one: a value of rope_type, and a key, in many families.
CONFIG_WORDS = {"llama3", "is_llama_config"}

# Process edges, with the reason. Anywhere else a broad except hides a bug.
BROAD_EXCEPT_ALLOWED = {
    "commands/frame.py": "turns every exception into one sentence and an exit code",
    "engine/worker.py": "the edge of the engine process: the parent is told what it ended of",
    "chat/tokenizer.py": "the tokenizers library raises nothing narrower than Exception for a damaged file",
    "engine/grammar.py": "whatever a grammar library does, panics included, ends one request and not the engine",
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_CLASS_DEPTH = 2
# A kernel is one function to its compiler: its parameters are pointers, strides and constants, and it has no structure
# to put them in; a body cut in two would be inlined again. So kernels have their own limits.
KERNEL_DECORATORS = {"jit", "autotune", "heuristics"}
MAX_KERNEL_LINES = 140


@dataclass(frozen=True)
class Source:
    """One parsed file. name: path below the package, with slashes. modules: dotted names of all files around it."""

    name: str
    text: str
    tree: ast.Module
    modules: frozenset[str]

    @property
    def room(self) -> str:
        return room_of(self.name)

    @property
    def paper(self) -> bool:
        return is_paper(self.name)


def room_of(name: str) -> str:
    """``arch/spec.py`` -> ``arch``, ``units.py`` -> ``units``, ``__init__.py`` -> ````."""
    head = name.split("/")[0].removesuffix(".py")
    return "" if head == "__init__" else head


def is_paper(name: str) -> bool:
    return (room_of(name) in PAPER_ROOMS and name not in DEVICE_FILES) or name in PAPER_FILES


def check_package(root: Path) -> list[str]:
    """Every violation below ``root``, a folder laid out as the package is."""
    files = sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)
    names = [path.relative_to(root).as_posix() for path in files]
    modules = frozenset(_module_of(name) for name in names)
    found = []
    for path, name in zip(files, names, strict=True):
        text = path.read_text(encoding="utf-8")
        source = Source(name, text, ast.parse(text, name), modules)
        for rule in RULES:
            found += [f"{name}:{line}: {message}" for line, message in rule(source)]
    return list(dict.fromkeys(found))


def _module_of(name: str) -> str:
    parts = [PACKAGE, *name.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


Violations = Iterator[tuple[int, str]]


# --- imports -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported module. late: inside a function. typing: under ``if TYPE_CHECKING``, so it never happens."""

    module: str
    line: int
    late: bool
    typing: bool


def imports_of(source: Source) -> list[Import]:
    """Imports of every kind: statements, relative ones, and import_module or __import__ with a literal name."""
    found: list[Import] = []
    _walk_imports(source, source.tree, False, False, found)
    return found


def _walk_imports(source: Source, node: ast.AST, late: bool, typing: bool, found: list[Import]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for part in child.body:
                _walk_imports(source, ast.Module([part], []), late, True, found)
            for part in child.orelse:
                _walk_imports(source, ast.Module([part], []), late, typing, found)
            continue
        for module in _imported(source, child):
            found.append(Import(module, getattr(child, "lineno", 0), late, typing))
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        _walk_imports(source, child, late or inside, typing, found)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imported(source: Source, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = [PACKAGE, *source.name.split("/")[:-1]]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        known = source.modules | DEVICE_MODULES
        return [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
    if isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0]
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
            return [str(first.value)]
    return []


def check_heights(source: Source) -> Violations:
    room = source.room
    if room == "oracles":
        for item in imports_of(source):
            if item.module.partition(".")[0] == PACKAGE:
                yield item.line, f"an oracle is independent and imports nothing of {PACKAGE}, but imports {item.module}"
        return
    if room and room not in HEIGHTS:
        yield 1, f"room {room!r} has no height in the structure rules"
        return
    for item in imports_of(source):
        top, _, rest = item.module.partition(".")
        if top in ("tests", "conftest"):
            yield item.line, f"imports {item.module}: nothing imports tests"
        if top == PACKAGE:
            # What the package's own __init__ names late, or for type checkers only, is not imported with it.
            problem = "" if not room and (item.late or item.typing) else _height_problem(room, rest.partition(".")[0])
            if problem:
                yield item.line, f"imports {item.module}: {problem}"


def _height_problem(room: str, other: str) -> str:
    if other in ("", room) or any({room, other} <= together for together in SAME_ROOM):
        return ""
    if other == "oracles":
        return "oracles are data, run by path in a process of their own"
    if other not in HEIGHTS:
        return f"room {other!r} has no height in the structure rules"
    if not room:
        return "the package itself imports nothing of its rooms when it is imported"
    if HEIGHTS[room] == 0 and HEIGHTS[other] == 0:
        return "" if other in GROUND[room] else f"{room} may import {sorted(GROUND[room])} only"
    if HEIGHTS[other] > HEIGHTS[room]:
        return f"{other} (height {HEIGHTS[other]}) stands above {room} ({HEIGHTS[room]})"
    return f"rooms at one height ({HEIGHTS[room]}) do not import each other" if HEIGHTS[other] == HEIGHTS[room] else ""


def check_paper(source: Source) -> Violations:
    if not source.paper:
        return
    for item in imports_of(source):
        if item.typing or (item.late and source.name in LATE_IMPORT_ALLOWED):
            continue
        top, _, rest = item.module.partition(".")
        if top in DEVICE_PACKAGES or any(f"{item.module}.".startswith(f"{name}.") for name in DEVICE_MODULES):
            yield item.line, f"a paper file imports {item.module}"
        elif top == PACKAGE and rest and not _paper_module(rest, source.modules):
            yield item.line, f"a paper file imports {item.module}, which is no paper file"


def _paper_module(rest: str, modules: frozenset[str]) -> bool:
    path = rest.replace(".", "/")
    is_folder = any(module.startswith(f"{PACKAGE}.{rest}.") for module in modules)
    return is_paper(f"{path}/__init__.py" if is_folder else f"{path}.py")


# --- names, edges -------------------------------------------------------------------------------------------------

_MODEL_NAME = re.compile(r"(?<![a-z])(?:" + "|".join(name.replace("_", "[-_ ]") for name in MODEL_NAMES) + ")")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def model_name_in(text: str) -> str:
    """The first model name that stands in ``text`` as a word, a hump (``NovaLlama``) or a part between underscores."""
    match = _MODEL_NAME.search(_HUMP.sub(" ", text).lower()) or _MODEL_NAME.search(text.lower())
    return match.group() if match else ""


def check_model_names(source: Source) -> Violations:
    if source.room in MODEL_NAMES_ALLOWED:
        return
    if model_name_in(source.name):
        yield 1, f"the file name holds the model name {model_name_in(source.name)!r}"
    free_text = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(source.tree):
        for text in _texts(node):
            if id(node) not in free_text and model_name_in(text):
                yield getattr(node, "lineno", 1), f"model name {model_name_in(text)!r} outside models/ and chat/"


def _texts(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) and node.value not in CONFIG_WORDS else []
    if isinstance(node, ast.alias):
        return [node.name, node.asname or ""]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    fields = ("id", "attr", "arg", "name")
    return [value for field in fields if isinstance(value := getattr(node, field, None), str)]


def check_environment(source: Source) -> Violations:
    if source.room == "oracles" or HEIGHTS.get(source.room) == HEIGHTS["cli"]:
        return
    for node in ast.walk(source.tree):
        names = {getattr(node, "attr", ""), getattr(node, "id", "")}
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names |= {alias.name for alias in node.names}
        for name in sorted(names & {"environ", "environb", "getenv", "putenv"}):
            yield getattr(node, "lineno", 1), f"os.{name}: the environment is read by the command line only"


def check_broad_except(source: Source) -> Violations:
    if source.name in BROAD_EXCEPT_ALLOWED:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or _last_name(kind) in ("Exception", "BaseException") for kind in kinds):
                yield node.lineno, "a broad except away from a process edge"
        elif isinstance(node, ast.Call) and _last_name(node.func) == "suppress":
            if any(_last_name(kind) in ("Exception", "BaseException") for kind in node.args):
                yield node.lineno, "a broad suppress away from a process edge"


def _last_name(node: ast.expr | None) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


# --- sizes --------------------------------------------------------------------------------------------------------


def check_sizes(source: Source) -> Violations:
    num_lines = source.text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield 1, f"{num_lines} lines, the limit is {MAX_FILE_LINES}: split the file"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size, kernel = (node.end_lineno or node.lineno) - node.lineno + 1, _is_kernel(node, source)
            limit = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
            if size > limit:
                yield node.lineno, f"{node.name} has {size} lines, the limit is {limit}"
            count = _num_parameters(node.args)
            if count > MAX_PARAMETERS and not kernel:
                yield node.lineno, f"{node.name} has {count} parameters, the limit is {MAX_PARAMETERS}"


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef, source: Source) -> bool:
    """A function that Triton compiles: by its decorator, in the one folder that has them."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return source.name.startswith("ops/triton/") and any(_last_name(call) in KERNEL_DECORATORS for call in calls)


def _num_parameters(args: ast.arguments) -> int:
    named = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in named)


def check_class_depth(source: Source) -> Violations:
    """Depth within a file: a class, and one that derives from it. Library bases and Protocols do not count."""
    bases = {
        node.name: [_last_name(base) for base in node.bases]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }

    def depth(name: str, seen: frozenset[str] = frozenset()) -> int:
        inner = [base for base in bases.get(name, ()) if base in bases and base not in seen]
        return 1 + max((depth(base, seen | {name}) for base in inner), default=0)

    # Errors are a tree that is read, not called through: user error, its kind, one special case.
    limit = MAX_CLASS_DEPTH + (source.name == "errors.py")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and depth(node.name) > limit:
            yield node.lineno, f"class {node.name} is {depth(node.name)} deep, the limit is {limit}"


RULES = (
    check_heights,
    check_paper,
    check_model_names,
    check_environment,
    check_broad_except,
    check_sizes,
    check_class_depth,
)

# --- text of tracked files ----------------------------------------------------------------------------------------

# Written in pieces, so that this file does not find itself.
_FOLDERS = "|".join(("work", "root", "tmp", "opt", "home" + r"/\w+"))
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:" + _FOLDERS + r")/[\w.]")
REGISTRY_HOST = re.compile("|".join((r"py" + r"pi\.org", r"python" + r"hosted\.org", r"npm" + r"js\.(?:org|com)",
                                     r"debian" + r"\.org", r"download\.py" + r"torch\.org")))  # fmt: skip


def check_text(name: str, text: str) -> list[str]:
    """Paths of one machine and hosts of package registries in a tracked file."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in (("a path of one machine", MACHINE_PATH), ("a registry host", REGISTRY_HOST)):
            if pattern.search(line):
                found.append(f"{name}:{number}: holds {what}: {line.strip()[:80]}")
    return found
