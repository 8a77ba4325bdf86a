"""Finds definitions in Python sources, and what names and expressions stand for. Nothing is imported.

Types come from annotations, constructor calls and simple assignments; everything else is unknown, and so is
`Any`.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Import: TypeAlias = ast.Import | ast.ImportFrom


@dataclass(frozen=True, eq=False)
class Symbol:
    """What a name stands for: a module (`path` is empty), class, function, variable, field or import."""

    module: str
    path: str
    node: ast.AST
    within: ast.AST | None = None  # the import statement, or the method that assigns to `self`

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}".rstrip(".")

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_vllm(self) -> bool:
        return self.module.partition(".")[0] == "vllm"


@dataclass(frozen=True, eq=False)
class Scope:
    module: Symbol
    owner: Symbol | None  # the class
    variables: "dict[str, Value]"


@dataclass(frozen=True)
class Instance:
    """An object of the type that `annotation` names in `scope`."""

    scope: Scope
    annotation: ast.expr


Value: TypeAlias = Symbol | Instance | None


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """With those in branches, without those in functions and classes."""
    for node in body:
        yield node
        for part in ("body", "handlers", "orelse", "finalbody"):
            if not isinstance(node, ast.ClassDef | Function):
                yield from statements(getattr(node, part, []))


def targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to. Of several at once it can only be told that they exist, not what they
    are."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=several)]):
            return several
        case ast.Assign(targets=several):
            return several
        case ast.AnnAssign(target=target):
            return [target]
    return []


def decorators(node: Function) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2] if isinstance(node, ast.Name | ast.Attribute) else ""


class Sources:
    """The packages in `folders`."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = {folder.name: folder for folder in folders}
        self._pending: set[Symbol] = set()
        for name in ("module", "names", "moved"):  # of these the answers are kept
            setattr(self, name, cache(getattr(self, name)))
        self.combine({})

    def combine(self, combined: Mapping[str, str]) -> None:
        """From now on, each class of ours that `combined` names has the class of vLLM beside it as a further
        base."""
        self.value, self.bases = cache(self._value), cache(self._bases)
        self._combined: dict[str, Symbol | None] = {}
        self._combined = {name: self.find(dotted) or self.moved(dotted) for name, dotted in combined.items()}
        self.value, self.bases = cache(self._value), cache(self._bases)

    def modules(self, package: str) -> Iterator[tuple[str, Path]]:
        folder = self._folders[package]
        for file in sorted(folder.rglob("*.py")):
            yield (
                ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(
                    ".__init__"
                ),
                file,
            )

    def module(self, name: str) -> Symbol | None:
        package, *rest = name.split(".")
        if package not in self._folders:
            return None
        path = self._folders[package].joinpath(*rest)
        file = path / "__init__.py" if path.is_dir() else path.parent / f"{path.name}.py"
        if file.exists():
            return Symbol(name, "", parsed(file))
        return Symbol(name, "", ast.Module([], [])) if path.is_dir() else None

    def names(self, owner: Symbol) -> dict[str, Symbol]:
        """What a module or a class defines, the attributes that its methods give to `self` included."""
        found: dict[str, Symbol] = {}
        on_self = []

        def define(name: str, node: ast.AST, within: ast.AST | None = None) -> None:
            found.setdefault(name, Symbol(owner.module, f"{owner.path}.{name}".lstrip("."), node, within))

        for node in statements(owner.node.body):
            if isinstance(node, ast.ClassDef) or (
                isinstance(node, Function) and "overload" not in decorators(node)
            ):
                define(node.name, node)
            for target in targets(node):
                if isinstance(target, ast.Name):
                    define(target.id, node)
            if owner.path and isinstance(node, Function):
                for inner in ast.walk(node):
                    for target in targets(inner):
                        match target:
                            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                                on_self.append((attr, inner, node))
        # An annotation tells more than a value, and a value more than a constant.
        on_self.sort(key=lambda it: (isinstance(it[1], ast.Assign), isinstance(it[1].value, ast.Constant)))
        for name, node, method in on_self:
            define(name, node, method)
        if not owner.path:
            for node in ast.walk(owner.node):
                for alias in node.names if isinstance(node, Import) else []:
                    star = f"* {node.lineno}" if alias.name == "*" else ""
                    define(star or alias.asname or alias.name.partition(".")[0], alias, node)
        return found

    def find(self, dotted: str) -> Symbol | None:
        first, *rest = dotted.split(".")
        found = self.module(first)
        for name in rest:
            found = self.attribute(found, name)
        return found

    def attribute(self, owner: Symbol | None, name: str, *, inherited: bool = False) -> Symbol | None:
        """Of a module, or of a class and its bases; `inherited`: of its bases alone."""
        if owner is not None and not owner.path:
            found = self.names(owner).get(name)
            return self._beyond(owner, name) if found is None else self._imported(found)
        if owner is None or not owner.is_class:
            return None
        own = None if inherited else self.names(owner).get(name)
        if own is not None and not (
            isinstance(own.node, ast.AnnAssign) and last_name(own.node.annotation) == "Any"
        ):
            return own
        return next((found for base in self.bases(owner) if (found := self.attribute(base, name))), own)

    def _beyond(self, module: Symbol, name: str) -> Symbol | None:
        """A module in a package, or what `from ... import *` brings."""
        if (found := self.module(f"{module.module}.{name}")) is not None:
            return found
        stars = (symbol for key, symbol in self.names(module).items() if key.startswith("* "))
        return next(
            (found for star in stars if (found := self.find(f"{self.origin(module, star.within)}.{name}"))),
            None,
        )

    def _bases(self, owner: Symbol) -> list[Symbol]:
        bases = [self.infer(base, self.top(owner)) for base in owner.node.bases] + [
            self._combined.get(owner.path)
        ]
        return [base for base in bases if isinstance(base, Symbol) and base.is_class]

    def top(self, symbol: Symbol) -> Scope:
        return Scope(self.module(symbol.module), None, {})

    def origin(self, module: Symbol, statement: ast.ImportFrom) -> str:
        """The module that the statement imports from."""
        if not statement.level:
            return statement.module
        folders = f"{module.module}.x" if self.module(f"{module.module}.__init__") else module.module
        return ".".join(
            [*folders.split(".")[: -statement.level], *([statement.module] if statement.module else [])]
        )

    def _imported(self, symbol: Symbol) -> Symbol | None:
        """What an import brings, be it moved; any other symbol itself."""
        match symbol.within:
            case ast.ImportFrom():
                dotted = f"{self.origin(self.module(symbol.module), symbol.within)}.{symbol.node.name}"
                return self.find(dotted) or self.moved(dotted)
            case ast.Import():
                return self.module(symbol.node.name if symbol.node.asname else symbol.path)
        return symbol

    def moved(self, dotted: str) -> Symbol | None:
        """What is defined by that name in another module of vLLM, the one with the most similar name."""
        package, _, name = dotted.rpartition(".")
        if package.partition(".")[0] != "vllm":
            return None
        defined = re.compile(rf"^(class|def|async def) {name}\b|^{name}(:.*)? = ".encode(), re.MULTILINE)
        modules = [module for module, file in self.modules("vllm") if defined.search(file.read_bytes())]
        nearest = max(
            modules, key=lambda module: SequenceMatcher(None, module, package).ratio(), default=None
        )
        return None if nearest is None else self.find(f"{nearest}.{name}")

    # -- what expressions stand for

    def _value(self, symbol: Symbol) -> Value:
        """What a name stands for when it is read."""
        node = symbol.node
        if symbol in self._pending:
            return None
        if isinstance(node, Function) and decorators(node) & {"property", "cached_property"}:
            return self.instance(self.top(symbol), node.returns)
        if isinstance(node, ast.AnnAssign) and last_name(node.annotation) not in ("TypeAlias", "type"):
            return self.instance(self.top(symbol), node.annotation)
        if isinstance(node, ast.AnnAssign) or (
            isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Tuple)
        ):
            self._pending.add(symbol)
            scope = self.top(symbol)
            if symbol.within is not None:
                scope = self.inside(
                    symbol.within, Scope(scope.module, self.find(symbol.name.rpartition(".")[0]), {})
                )
            found = None if node.value is None else self.infer(node.value, scope)
            self._pending.remove(symbol)
            return found
        return symbol

    def instance(self, scope: Scope, annotation: ast.expr | None) -> Value:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.Subscript) and last_name(annotation.value) == "type":
            return self.class_of(self.instance(scope, annotation.slice))
        return None if annotation is None else Instance(scope, annotation)

    def class_of(self, value: Value) -> Symbol | None:
        """The first class that a value's annotation names; a class itself."""
        if not isinstance(value, Instance):
            return value
        match value.annotation:
            case ast.BinOp(left=left, right=right):
                return self.class_of(self.instance(value.scope, left)) or self.class_of(
                    self.instance(value.scope, right)
                )
            case ast.Subscript(value=head, slice=inner):
                is_wrapper = last_name(head) in ("Optional", "Final", "ClassVar")
                return self.class_of(self.instance(value.scope, inner if is_wrapper else head))
            case ast.Name() | ast.Attribute() as name:
                symbol = self.symbol(name, value.scope)
                if symbol is None or symbol.is_class:
                    return symbol
                alias = getattr(symbol.node, "value", None)
                return self.class_of(self.instance(self.top(symbol), alias))
        return None

    def element(self, value: Value) -> Value:
        """Of a container: what its subscripts, a loop or `get` give."""
        if not isinstance(value, Instance):
            return None
        match value.annotation:
            case ast.BinOp(left=left, right=right):
                scope = value.scope
                return self.element(self.instance(scope, left)) or self.element(self.instance(scope, right))
            case ast.Subscript(value=head, slice=inner):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return self.instance(
                    value.scope, parts[-1 if last_name(head).lower().endswith(("dict", "mapping")) else 0]
                )
        return None

    def symbol(self, name: ast.expr, scope: Scope) -> Symbol | None:
        """Of a name with or without dots. That of an attribute is looked up in the class of the object."""
        match name:
            case ast.Name(id=identifier):
                return self.attribute(scope.module, identifier)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=attr):
                return self.attribute(scope.owner, attr, inherited=True)
            case ast.Attribute(value=value, attr=attr):
                return self.attribute(self.class_of(self.infer(value, scope)), attr)
        return None

    def infer(self, node: ast.expr, scope: Scope) -> Value:
        match node:
            case ast.Name(id=name) if name in scope.variables:
                return scope.variables[name]
            case ast.Name() | ast.Attribute():
                symbol = self.symbol(node, scope)
                return None if symbol is None else self.value(symbol)
            case ast.Subscript(value=value):
                return self.element(self.infer(value, scope))
            case ast.Await(value=value) | ast.NamedExpr(value=value):
                return self.infer(value, scope)
            case ast.IfExp(body=one, orelse=other) | ast.BoolOp(values=[one, other, *_]):
                return self.infer(one, scope) or self.infer(other, scope)
            case ast.Call(func=ast.Attribute(value=value, attr="get" | "pop")) if found := self.element(
                self.infer(value, scope)
            ):
                return found
            case ast.Call(func=func, args=[first, *_]) if last_name(func) in (
                "list",
                "sorted",
                "copy",
                "replace",
            ):
                return self.infer(first, scope)
            case ast.Call(func=func):
                called = self.infer(func, scope)
                if isinstance(called, Symbol) and called.is_class:
                    return Instance(self.top(called), ast.parse(called.path, mode="eval").body)
                if isinstance(called, Symbol) and isinstance(called.node, Function):
                    return self.instance(self.top(called), called.node.returns)
        return None

    def inside(self, function: Function, outer: Scope) -> Scope:
        """The scope of a function: parameters and variables whose type can be told."""
        scope = Scope(outer.module, outer.owner, dict(outer.variables))
        known = scope.variables
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in every:
            known[argument.arg] = self.instance(self.top(outer.module), argument.annotation)
        if outer.owner is not None and every and every[0].arg in ("self", "cls"):
            itself = ast.parse(outer.owner.path, mode="eval").body
            known[every[0].arg] = (
                Instance(self.top(outer.module), itself) if every[0].arg == "self" else outer.owner
            )

        def learn(target: ast.expr, value: Value) -> None:
            if isinstance(target, ast.Name) and known.get(target.id) is None:
                known[target.id] = value

        kinds = (ast.Assign, ast.NamedExpr, ast.AnnAssign, ast.For, ast.AsyncFor, ast.comprehension)
        nodes = [node for node in ast.walk(function) if isinstance(node, kinds)]
        for target, node in sorted(
            ((node.targets[0] if isinstance(node, ast.Assign) else node.target, node) for node in nodes),
            key=lambda it: (it[0].lineno, it[0].col_offset),
        ):
            match node:
                case ast.AnnAssign(annotation=annotation):
                    learn(target, self.instance(self.top(outer.module), annotation))
                case ast.Assign(value=ast.Tuple(elts=values)) if isinstance(target, ast.Tuple):
                    for each, value in zip(target.elts, values, strict=False):
                        learn(each, self.infer(value, scope))
                case ast.Assign(value=value) | ast.NamedExpr(value=value):
                    learn(target, self.infer(value, scope))
                case _:
                    items = node.iter
                    if isinstance(items, ast.Call) and last_name(items.func) in ("items", "values"):
                        items = items.func.value
                        target = target.elts[-1] if isinstance(target, ast.Tuple) else target
                    learn(target, self.element(self.infer(items, scope)))
        return scope
