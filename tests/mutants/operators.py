"""All small mistakes that operators can make in a module: the pool from which mutants are drawn.

Why not a library: mutmut and cosmic-ray draw nothing by a seed and drop no statements. mutmut
replaces each function by a trampoline, which changes the source that AutoGraph and cloudpickle
read, and leaves code outside of functions alone. cosmic-ray starts one command for each mutant,
with neither a choice of tests nor a fork of a process that has TensorFlow.

Text for people is never changed: strings, log lines, annotations, and raised errors.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import textwrap

from tests.mutants import sources, tokens

COMPARISON, ARITHMETIC, LOGIC, DROPPED = "comparison", "arithmetic", "logic", "dropped"
OPERATORS = (COMPARISON, ARITHMETIC, LOGIC, DROPPED)

_NEIGHBOURS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
#: Objects with methods that write log lines.
_LOGS = {"logging", "_log", "warnings"}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One change of a module's source, in characters."""

    operator: str
    line: int
    start: int
    end: int
    new: str

    def made_in(self, source: str) -> str:
        """Return the source with the mistake."""
        return source[: self.start] + self.new + source[self.end :]


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.mistakes: list[Mistake] = []
        self._lines = source.split("\n")
        self._starts = tokens.line_starts(source)
        self._tokens = tokens.read(source)
        self._token_starts = [token.start for token in self._tokens]

    def _offset(self, line: int, column_bytes: int) -> int:
        text = self._lines[line - 1].encode()[:column_bytes].decode()
        return self._starts[line - 1] + len(text)

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _between(self, left: ast.expr, right: ast.expr) -> tuple[int, int]:
        """Return the place of the operator between two operands."""
        start, end = self._end(left), self._start(right)
        first = bisect.bisect_left(self._token_starts, start)
        last = bisect.bisect_left(self._token_starts, end)
        within = [token for token in self._tokens[first:last] if token.text not in "()"]
        return within[0].start, within[-1].end

    def _add(self, operator: str, line: int, start: int, end: int, new: str) -> None:
        self.mistakes.append(Mistake(operator, line, start, end, new))

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            place = self._between(left, right)
            self._add(COMPARISON, right.lineno, *place, _NEIGHBOURS[type(operator)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            place = node.lineno, self._start(node), self._end(node)
            self._add(ARITHMETIC, *place, str(node.value + 1))
            if node.value > 0:
                self._add(ARITHMETIC, *place, str(node.value - 1))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        signs: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+"}
        if type(node.op) in signs and not (_joins(node.left) or _joins(node.right)):
            place = self._between(node.left, node.right)
            self._add(ARITHMETIC, node.right.lineno, *place, signs[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._add(LOGIC, right.lineno, *self._between(left, right), new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start = self._start(node)
            self._add(LOGIC, node.lineno, start, start + len("not"), "")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):
            self.generic_visit(node)
        elif not _writes_log(node.value):
            self._drop(node)
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [ast.unparse(target) for target in node.targets]
        if targets == ["__all__"]:
            return
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._drop(node)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is None:
            return
        if isinstance(node.target, ast.Attribute | ast.Subscript):
            self._drop(node)
        self.visit(node.target)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop(node)
        self.generic_visit(node)

    def _drop(self, node: ast.stmt) -> None:
        self._add(DROPPED, node.lineno, self._start(node), self._end(node), "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip an exception: its text is a message."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip a formatted text: it is a message."""

    def visit_arg(self, node: ast.arg) -> None:
        """Skip an argument's annotation; the argument's default is visited elsewhere."""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)  # and not node.returns

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test) or "__main__" in ast.unparse(node.test):
            return
        self.generic_visit(node)


def _joins(node: ast.expr) -> bool:
    """Whether an operand of `+` shows that texts or lists are joined."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    if isinstance(node, ast.BinOp):
        return _joins(node.left) or _joins(node.right)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def _writes_log(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id in _LOGS
    )


def mistakes(source: str) -> list[Mistake]:
    """Return all mistakes that can be made in a module's code, in order of their places.

    A few mistakes do not compile, for example a dropped `not` at the beginning of a line.
    """
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.mistakes, key=lambda mistake: (mistake.start, mistake.end, mistake.new))


def surroundings(source: str, mistake: Mistake) -> list[range]:
    """Return the lines of a mistake's statement, of the function around it, and of the module."""
    tree = ast.parse(source)
    functions = [sources.lines_of(node) for _, node in _around(tree, mistake.line)]
    return [_head(tree, mistake.line), *functions[-1:], range(source.count("\n") + 2)]


def statement_of(source: str, mistake: Mistake) -> tuple[str, str, str]:
    """Return where a mistake is made, the statement there, and the statement with the mistake.

    The result is `where`, `old` and `new` of a record of the same mutant. A compound statement is
    returned without its body.
    """
    tree, starts = ast.parse(source), tokens.line_starts(source)
    head = _head(tree, mistake.line)
    start, end = starts[head.start - 1], [*starts, len(source)][head.stop - 1]
    mutated = mistake.made_in(source)
    end_mutated = end + len(mutated) - len(source)
    where = [name for name, _ in _around(tree, mistake.line)]
    return (
        where[-1] if where else "",
        textwrap.dedent(source[start:end]).strip(),
        textwrap.dedent(mutated[start:end_mutated]).strip(),
    )


def _around(tree: ast.Module, line: int) -> list[tuple[str, sources.Definition]]:
    """Return the names and nodes of the definitions around a line, outer ones first."""
    return [
        (name, node) for name, node in sources.definitions(tree) if line in sources.lines_of(node)
    ]


def _head(tree: ast.Module, line: int) -> range:
    """Return the lines of the innermost statement at a line, without its body."""
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not statements:  # a decorator
        return range(line, line + 1)
    inner = min(statements, key=lambda node: (node.end_lineno or 0) - node.lineno)
    body = getattr(inner, "body", None)
    last = max(body[0].lineno - 1, inner.lineno) if body else inner.end_lineno or line
    if line > last:  # clauses (for example an `except`) that are not statements
        return range(line, line + 1)
    return range(inner.lineno, last + 1)
