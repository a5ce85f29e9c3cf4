"""Counts of a compiled program, from its text: kernels, operations of matrix products, bytes.

    program_costs(jax.jit(step).lower(...).compile().as_text(), 64, {"packs": 9}) -> Costs(kernels, operations, bytes)

It is an estimate for another device, whose compiler would fuse other operations into a kernel. A loop counts as often
as its trip count says, or `rounds` times if it ends by a condition (once inside of another such loop); `loops` gives
the counts of loops in a `jax.named_scope`. The branch with the most operations stands for a switch. Bytes are those
that every kernel reads and writes if nothing stays in a cache.
"""

import functools
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Costs", "count_loops", "program_costs"]

HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\((.*?)\)(.*)$")
ARRAY = re.compile(r"(pred|bf16|[fsuc])(\d*)\[([\d,]*)\]")
SCOPE = re.compile(r'op_name="[^"]*?([\w.]+)\)*/while"')  # scope of a loop, perhaps under vmap
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id"}


class Costs(NamedTuple):
    """Costs of one run of a program."""

    kernels: int
    operations: int  # multiplications and additions of its matrix products
    bytes: int

    def times(self, count: int) -> "Costs":
        return Costs(*(count * value for value in self))

    def plus(self, other: "Costs") -> "Costs":
        return Costs(*(a + b for a, b in zip(self, other)))


def program_costs(text: str, rounds: int, loops: Mapping[str, int] = MappingProxyType({})) -> Costs:
    """The costs of an optimised program, as `Compiled.as_text` writes it."""
    computations, entry = _computations(text)

    @functools.cache
    def costs_of(name: str, rounds: int) -> Costs:
        total, shapes = Costs(0, 0, 0), dict[str, str]()
        for result, shape, kind, operands, rest in computations[name]:
            shapes[result] = shape
            called = lambda key, rest=rest: re.findall(rf"{key}=%?([\w.\-]+)", rest)
            if kind == "while":
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
                scope = SCOPE.search(rest)
                named = loops.get(scope[1], rounds) if scope else rounds
                count, inside = (int(known[1]), rounds) if known else (named, 1)
                body = costs_of(called("body")[0], inside).plus(costs_of(called("condition")[0], inside))
                total = total.plus(body.times(count))
            elif kind == "conditional":
                listed = re.search(r"branch_computations=\{(.*?)\}", rest)
                branches = re.findall(r"[\w.\-]+", listed[1]) if listed else called(r"\w+_computation")
                total = total.plus(
                    max(
                        (costs_of(branch, rounds) for branch in branches),
                        key=lambda costs: (costs.operations, costs.bytes),
                    )
                )
            elif kind == "call":
                total = total.plus(costs_of(called("to_apply")[0], rounds))
            elif kind not in FREE:
                read = sum(_bytes(shapes.get(word, "")) for word in re.findall(r"%([\w.\-]+)", operands))
                inner = costs_of(called("calls")[0], rounds).operations if kind == "fusion" else 0
                if kind == "dot":
                    inner = _products(shape, shapes[re.findall(r"%([\w.\-]+)", operands)[0]], rest)
                total = total.plus(Costs(1, inner, _bytes(shape) + read))
        return total

    return costs_of(entry, rounds)


def count_loops(text: str, scope: str) -> int:
    """The number of loops of a program in a `jax.named_scope`."""
    found = map(SCOPE.search, filter(re.compile(r" while\(").search, text.splitlines()))
    return sum(one is not None and one[1] == scope for one in found)


def _computations(text: str) -> tuple[dict[str, list[tuple[str, ...]]], str]:
    """{name: (name, shape, kind, operands, rest) of every line}, and the name of the first to run."""
    found: dict[str, list[tuple[str, ...]]] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = head[2]
            found[current] = []
            entry = current if head[1] else entry
        elif current and (parts := LINE.match(line)):
            found[current].append(parts.groups())
    return found, entry


def _bytes(shape: str) -> int:
    """The bytes of an array, or of all arrays in a tuple."""
    width = lambda kind, bits: {"pred": 8, "bf16": 16}.get(kind) or int(bits)
    return sum(
        width(kind, bits) * math.prod(map(int, filter(None, dims.split(",")))) // 8
        for kind, bits, dims in ARRAY.findall(shape)
    )


def _products(shape: str, left: str, rest: str) -> int:
    """The operations of a matrix product, from the shapes of its result and of its left factor."""
    sizes = lambda text: [int(size) for size in ARRAY.search(text)[3].split(",") if size]  # type: ignore[index]
    over = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
    axes = [int(axis) for axis in over[1].split(",") if axis] if over else []
    return 2 * math.prod(sizes(shape)) * math.prod(sizes(left)[axis] for axis in axes)
