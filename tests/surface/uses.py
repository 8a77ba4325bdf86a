"""What our sources use of vLLM, and what of it is different in other sources of vLLM."""

import ast
import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.surface.sources import Function, Scope, Sources, Symbol, decorators, last_name

Place: TypeAlias = tuple[str, int, int, int, str, str, int]
"""Module of ours, line, first and last column, kind, name and turn: the same whatever vLLM is looked at."""


@dataclass(frozen=True)
class Use:
    name: str
    kind: str
    symbol: Symbol | None  # None: vLLM has the module or the class, but not the name in it
    has_moved: bool = False
    is_public: bool = False  # of what `vllm.__all__` names
    calls_super: bool = False  # an override that extends vLLM's method, and does not replace it

    def signature(self) -> list[str]:
        node = None if self.symbol is None else self.symbol.node
        if isinstance(node, Function):
            return parameters(node)
        if isinstance(node, ast.AnnAssign):
            default = (
                "" if node.value is None or self.kind != "constructs" else f" = {ast.unparse(node.value)}"
            )
            return [f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default}"]
        if isinstance(node, ast.ClassDef) and self.kind == "constructs":
            return sorted(f"{name} is required" for name in required_fields(node))
        return []

    def body(self) -> list[str]:
        """Lines of a function without its docstring, formatted alike."""
        node = None if self.symbol is None else self.symbol.node
        if not isinstance(node, Function):
            return []
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        return "\n".join(map(ast.unparse, body)).splitlines()


def parameters(function: Function) -> list[str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    found = [_parameter(*each) for each in zip(positional, defaults, strict=True)]
    if given.vararg or given.kwonlyargs:
        found.append(f"*{ast.unparse(given.vararg) if given.vararg else ''}")
    found += [_parameter(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    found += [f"**{ast.unparse(given.kwarg)}"] if given.kwarg else []
    found += [
        f"@{name}" for name in sorted(decorators(function) & {"property", "staticmethod", "classmethod"})
    ]
    found += ["async"] if isinstance(function, ast.AsyncFunctionDef) else []
    return [*found, f"-> {ast.unparse(function.returns)}"] if function.returns else found


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(parameter) if default is None else f"{ast.unparse(parameter)} = {ast.unparse(default)}"


def required_fields(owner: ast.ClassDef) -> Iterator[str]:
    for node in owner.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=None, annotation=annotation):
                if "ClassVar" not in ast.unparse(annotation):
                    yield name


class Reader:
    """Reads our modules beside one version of vLLM."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        vllm = sources.module("vllm")
        exported = sources.names(vllm).get("__all__")
        names = [] if exported is None else ast.literal_eval(exported.node.value)
        self._public = {symbol.name for name in names if (symbol := sources.attribute(vllm, name))}
        self.uses: dict[Place, Use] = {}
        self.alone: set[str] = set()  # mixins without anything of vLLM below

    def read(self, module: Symbol, turn: int) -> None:
        self._turn = turn
        self._visit(module.node, Scope(module, None, {}))

    def _visit(self, node: ast.AST, scope: Scope, called: ast.expr | None = None) -> None:
        if isinstance(node, ast.ClassDef):
            owner = self._sources.names(scope.owner or scope.module).get(node.name)
            scope = Scope(scope.module, owner, scope.variables)
            if owner is not None:
                self._class(owner, scope)
        elif isinstance(node, Function):
            scope = self._sources.inside(node, scope)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node, scope)
        elif isinstance(node, ast.Attribute):
            self._attribute(node, scope, "calls" if node is called else "reads")
        elif isinstance(node, ast.Call):
            self._call(node, scope)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
            self._add(scope, node, "names", node.value, self._sources.find(node.value))
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope, node.func if isinstance(node, ast.Call) else None)

    def _add(
        self,
        scope: Scope,
        node: ast.AST,
        kind: str,
        name: str,
        symbol: Symbol | None,
        shown: str = "",
        moved: bool = False,
    ) -> None:
        place = (
            scope.module.module,
            node.lineno,
            node.col_offset,
            node.end_col_offset,
            kind,
            name,
            self._turn,
        )
        is_public = symbol is not None and self._is_public(symbol)
        calls_super = kind == "overrides" and f"super().{name}(" in ast.unparse(node)
        self.uses[place] = Use(
            shown or (symbol.name if symbol else name), kind, symbol, moved, is_public, calls_super
        )

    def _is_public(self, symbol: Symbol) -> bool:
        first, *members = symbol.path.split(".")
        is_private = any(name.startswith("_") and name != "__init__" for name in members)
        return f"{symbol.module}.{first}" in self._public and not is_private

    def _is_over_vllm(self, owner: Symbol) -> bool:
        if not owner.is_class:
            return owner.is_vllm and not owner.path
        return owner.is_vllm or any(map(self._is_over_vllm, self._sources.bases(owner)))

    def _class(self, owner: Symbol, scope: Scope) -> None:
        """Its names that vLLM's bases have as well."""
        if owner.path.endswith("Mixin") and not self._is_over_vllm(owner):
            self.alone.add(owner.name)
        if not self._is_over_vllm(owner):
            return
        for name, own in self._sources.names(owner).items():
            theirs = self._sources.attribute(owner, name, inherited=True)
            if theirs is None or theirs.is_vllm:
                is_declared = isinstance(own.node, ast.AnnAssign) and own.node.value is None
                kind = (
                    "overrides" if isinstance(own.node, Function) else "declares" if is_declared else "sets"
                )
                self._add(scope, own.node, kind, name, theirs, "" if theirs else own.name)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        origin = f"{self._sources.origin(scope.module, node)}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            dotted = origin + alias.name
            if dotted.partition(".")[0] == "vllm":
                symbol = self._sources.find(dotted)
                found = symbol or self._sources.moved(dotted)
                self._add(scope, alias, "imports", dotted, found, dotted, symbol is None)

    def _attribute(self, node: ast.Attribute, scope: Scope, kind: str) -> None:
        is_super = isinstance(node.value, ast.Call) and last_name(node.value.func) == "super"
        owner = scope.owner if is_super else self._sources.class_of(self._sources.infer(node.value, scope))
        if owner is None or not self._is_over_vllm(owner):
            return
        symbol = self._sources.attribute(owner, node.attr, inherited=is_super)
        if symbol is None or symbol.is_vllm:
            self._add(scope, node, "sets" if isinstance(node.ctx, ast.Store) else kind, node.attr, symbol)

    def _call(self, node: ast.Call, scope: Scope) -> None:
        """A constructor, or `dataclasses.replace`."""
        called = self._sources.infer(node.func, scope)
        if last_name(node.func) == "replace" and called is None and node.args:
            made = self._sources.class_of(self._sources.infer(node.args[0], scope))
        elif isinstance(called, Symbol) and called.is_class and self._is_over_vllm(called):
            made = called
            init = self._sources.attribute(made, "__init__")
            if init is not None:
                if init.is_vllm:
                    self._add(scope, node, "constructs", "__init__", init)
                return
            self._add(scope, node, "constructs", made.path, made)
        else:
            return
        if made is not None and made.is_class and self._is_over_vllm(made):
            for keyword in node.keywords:
                if keyword.arg is not None:
                    field = self._sources.attribute(made, keyword.arg)
                    self._add(scope, keyword, "constructs", keyword.arg, field)


def combinations(
    sources: Sources, ours: Iterable[Symbol], at_run_time: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """The classes of vLLM that each of our classes is combined with, also by class statements of its
    subclasses."""
    found = defaultdict(list, {mixin: list(classes) for mixin, classes in at_run_time.items()})
    classes = [symbol for module in ours for symbol in sources.names(module).values() if symbol.is_class]
    for _ in range(3):  # as deep as our mixins derive from each other
        for symbol in classes:
            bases = sources.bases(symbol)
            over = [base.name for base in bases if base.is_vllm] + found[symbol.path]
            for base in bases:
                if not base.is_vllm:
                    found[base.path] += [name for name in over if name not in found[base.path]]
    return {mixin: over for mixin, over in found.items() if over}


def used(ours: Iterable[Path], vllm: Path, at_run_time: Mapping[str, list[str]]) -> dict[Place, Use]:
    """All uses of the package `vllm` in our packages. `at_run_time` names the classes of vLLM that a mixin is
    combined with by other than class statements.

    Raises `LookupError` for a mixin that nothing is known to be combined with, for a mixin in `at_run_time`
    that does not exist, and for a folder that is not vLLM's.
    """
    if vllm.name != "vllm" or not (vllm / "__init__.py").is_file():
        raise LookupError(f"{vllm} is not the package `vllm`")
    sources = Sources([*ours, vllm])
    modules = [
        module
        for package in ours
        for name, _ in sources.modules(package.name)
        if (module := sources.module(name))
    ]
    ours_by_path = {
        symbol.path for module in modules for symbol in sources.names(module).values() if symbol.is_class
    }
    if unknown := at_run_time.keys() - ours_by_path:
        raise LookupError(f"there is no class {', '.join(sorted(unknown))}: correct COMBINED_AT_RUN_TIME")
    combined = combinations(sources, modules, at_run_time)
    mixed = [module for module in modules if combined.keys() & sources.names(module).keys()]
    reader = Reader(sources)
    for turn in range(max(map(len, combined.values()), default=1)):
        sources.combine({mixin: over[turn % len(over)] for mixin, over in combined.items()})
        for module in modules if turn == 0 else mixed:
            reader.read(module, turn)
    if reader.alone:
        alone = ", ".join(sorted(reader.alone))
        raise LookupError(f"no class is known to be combined with {alone}: add it to COMBINED_AT_RUN_TIME")
    return reader.uses


@dataclass(frozen=True)
class Change:
    status: str
    details: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()  # of a method's body


def change(before: Use | None, after: Use | None) -> Change | None:
    """What becomes of one use; None if nothing does. A name of ours that vLLM now has as well clashes with
    it; a method that we override and that now does something else is "rewritten"."""
    if before is None or before.symbol is None:
        is_ours = before is not None and before.kind in ("overrides", "sets")
        has_theirs = after is not None and after.symbol is not None
        return Change("clashes", (f"with {after.symbol.name}",)) if is_ours and has_theirs else None
    if after is None:
        return Change("unclear", ("what it is an attribute of can no longer be told",))
    if after.symbol is None:
        return Change("vanished")
    if after.has_moved and not before.has_moved:
        return Change("moved", (f"to {after.symbol.name}",))
    old, new = before.signature(), after.signature()
    differences = [f"- {part}" for part in old if part not in new] + [
        f"+ {part}" for part in new if part not in old
    ]
    if old != new:
        return Change("changed", tuple(differences or [f"order: {', '.join(new)}"]))
    if before.kind == "overrides" and before.body() != after.body():
        lines = list(difflib.unified_diff(before.body(), after.body(), n=1, lineterm=""))[2:]
        removed, added = (sum(line.startswith(sign) for line in lines) for sign in "-+")
        role = "ours calls it" if before.calls_super else "ours replaces it"
        return Change("rewritten", (f"{role}; lines of its body: -{removed} +{added}",), tuple(lines))
    return None
