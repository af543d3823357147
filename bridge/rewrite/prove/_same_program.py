"""Compares two models as programs: the same operations on the same values, in any order.

Both are traced, and every value gets a number by what computes it. Equal numbers are equal results
and equal gradients, to the bit and for all inputs of these shapes, and nothing is compiled or run.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from bridge._conversion.collections import OUTPUTS
from bridge.rewrite.observe._snapshots import is_array

from ._draws import is_same_kind

_AGAIN = ("checkpoint", "remat2")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", *_AGAIN)
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_ALIASES = ("copy", "copy_p")
_COMMUTATIVE = ("add", "mul", "max", "min", "and", "or", "eq", "ne")
# Of a loop; each doubles the time that its numbers take.
_MOST_CARRIED = 8
_Function: TypeAlias = Callable[[Sequence[Any]], Any]
_NO_STATE = (nnx.RngState, nnx.Intermediate, nnx.Perturbation)


class Found(NamedTuple):
    """What a comparison of two programs found.

    Attributes:
        same: whether they do the same; False also if that is unknown, None if the first one raises.
        again: whether a gradient computes as many parts again in both, by the options of `remat`;
            True also if that is unknown.
    """

    same: bool | None
    again: bool = True


def compare_programs(
    linen: tuple[Any, Mapping[str, Any]],
    model: Any,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    method: str | None = None,
    keys: Mapping[str, Any] | None = None,
    state: bool = False,
) -> Found:
    """Compares a Linen module and an NNX module with these weights.

    Equal values in the variables are taken for the same weight. The NNX module is not changed.
    `method` is None for `__call__`. `keys` are the Linen module's keys by stream; they draw what
    those of `model` draw. With `state`, the collections besides `params` may change, and are
    compared.
    """
    given = Given(inputs, kwargs)
    old, leaves = _linen_program(*linen, given.call, method, keys, state=state)
    new, values = _nnx_program(model, given.call, method)
    try:
        traced_old = traced(old, leaves, given.arrays)
    except UnknownProgramError:
        return Found(None)
    try:
        traced_new = traced(new, values, given.arrays)
    except UnknownProgramError:
        return Found(False)
    first, second = (_again(_opened(program)[0]) for program, _ in (traced_old, traced_new))
    numbering = Numbering()
    before_old = [numbering.weight(leaf) for leaf in leaves]
    before_new = list(map(numbering.weight, jax.tree.leaves(nnx.state(model, nnx.Not(_NO_STATE)))))
    differs = Found(False, first == second)
    if len(set(before_old)) != len(leaves) or len(set(before_new)) != len(before_new):
        # One weight cannot be told from another, or is held twice and has two gradients.
        return differs
    try:
        outputs_old, after_old = numbering.outputs(traced_old, leaves, given.arrays)
        outputs_new, after_new = numbering.outputs(traced_new, values, given.arrays)
    except UnknownProgramError:
        # It is compared by its numbers.
        return differs
    if outputs_old != outputs_new:
        return differs
    changed = _changed(before_old, map(numbering.unstopped, after_old))
    is_same = changed is not None and changed == (
        _changed(before_new, map(numbering.unstopped, after_new))
    )
    return differs._replace(same=is_same or not state)


def is_same_function(one: _Function, other: _Function, arrays: Sequence[Any]) -> bool:
    """Whether two functions of a list of arrays do the same; False also if that is unknown."""
    numbering = Numbering()

    def outputs(function: _Function) -> Any:
        program = traced(lambda _, own: (function(own), []), (), arrays)
        return numbering.outputs(program, (), arrays)[0]

    try:
        return outputs(one) == outputs(other)
    except UnknownProgramError:
        return False


def _again(jaxpr: Any) -> Counter[str]:
    """How many parts of a program a gradient computes again, by the options of `remat`."""
    found = Counter[str]()
    for equation in jaxpr.eqns:
        if str(equation.primitive) in _AGAIN:
            policy = equation.params["policy"]
            name = getattr(policy, "__qualname__", type(policy).__name__)
            found[f"prevent_cse={equation.params['prevent_cse']}, policy={name}"] += 1
        for each in core.jaxprs_in_params(equation.params):
            found += _again(_opened(each)[0])
    return found


class Given:
    """The arguments of a call, the arrays apart."""

    def __init__(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._leaves, self._tree = jax.tree.flatten((tuple(inputs), dict(kwargs)))
        self.arrays = [leaf for leaf in self._leaves if is_array(leaf)]

    def call(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        """Calls a function with these arrays in the place of its own."""
        own = iter(arrays)
        given = [next(own) if is_array(leaf) else leaf for leaf in self._leaves]
        args, named = jax.tree.unflatten(self._tree, given)
        return function(*args, **named)


# Runs a function on the inputs; their arrays are given.
_Call: TypeAlias = Callable[[Callable[..., Any], Sequence[Any]], Any]
# Leaves and input arrays -> (output, leaves after the call).
_Program: TypeAlias = Callable[[Any, Any], tuple[Any, list[Any]]]
# A jaxpr, and the shapes of what it returns.
_Traced: TypeAlias = tuple[Any, Any]


def _linen_program(
    module: Any,
    variables: Mapping[str, Any],
    call: _Call,
    method: str | None,
    keys: Mapping[str, Any] | None,
    *,
    state: bool,
) -> tuple[_Program, list[Any]]:
    """A call of a Linen module as a function of its leaves, and these."""
    leaves, tree = jax.tree.flatten(dict(variables))
    mutable = [name for name in variables if name != "params" and name not in OUTPUTS]

    def run(leaves: Any, arrays: Any) -> tuple[Any, list[Any]]:
        own = jax.tree.unflatten(tree, leaves)

        def apply(*args: Any, **named: Any) -> Any:
            function = getattr(type(module), method) if method else None
            options = {"method": function, "rngs": keys, "mutable": mutable if state else False}
            return module.apply(own, *args, **options, **named)

        output = call(apply, arrays)
        output, updates = output if state else (output, {})
        return output, jax.tree.leaves({**own, **updates})

    return run, leaves


def _nnx_program(model: Any, call: _Call, method: str | None) -> tuple[_Program, list[Any]]:
    """The same of an NNX module."""
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)

    def run(leaves: Any, arrays: Any) -> tuple[Any, list[Any]]:
        own = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
        output = call(getattr(own, method) if method else own, arrays)
        return output, jax.tree.leaves(nnx.state(own, nnx.Not(_NO_STATE)))

    return run, leaves


def _changed(before: Sequence[int], later: Iterable[int]) -> dict[int, int] | None:
    """What became of each value that changed; None if one value became several."""
    found: dict[int, int] = {}
    after = list(later)
    if len(before) != len(after):
        return None
    for one, other in zip(before, after, strict=True):
        if one != other and found.setdefault(one, other) != other:
            return None
    return found


def _only_shapes(name: str, params: Mapping[str, Any]) -> bool:
    """Whether an operation that keeps the number of elements keeps them and their order."""
    if params.get("sharding") is not None:
        return False
    match name:
        case "reshape":
            return params["dimensions"] is None
        case "broadcast_in_dim" | "squeeze" | "convert_element_type":
            return True
    return False


class UnknownProgramError(Exception):
    """A program cannot be traced, or has more to it than can be seen."""


def traced(function: _Program, leaves: Sequence[Any], arrays: Sequence[Any]) -> _Traced:
    """The jaxpr of a program, and the shapes of what it returns.

    Raises UnknownProgramError if the program raises, as it does where it needs a mode.
    """
    try:
        return jax.make_jaxpr(function, return_shape=True)(list(leaves), list(arrays))
    except Exception as error:
        raise UnknownProgramError(str(error)) from error


def _opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants; JAX 0.12 has one class for both, older ones have two."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def _counted(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many values a loop is given that stay, and how many it carries."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    # JAX 0.12 keeps the trees instead.
    consts, carry, _ = map(len, params["ft_in"].unpack())
    return consts, carry


class Numbering:
    """Numbers for values: the same number is the same value."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._stopped: dict[int, int] = {}

    def weight(self, array: Any) -> int:
        """The number of a weight, by what it holds; no constant has it."""
        return self._array(array, "weight")

    def unstopped(self, number: int) -> int:
        """The number of a value that is the same, with its gradient."""
        return self._stopped.get(number, number)

    def outputs(
        self, program: _Traced, leaves: Sequence[Any], arrays: Sequence[Any]
    ) -> tuple[Any, list[int]]:
        """The numbers of what a program returns: the tree of its output, and the list behind it.

        Raises UnknownProgramError if it has effects, or a rule for gradients of its own.
        """
        closed, shapes = program
        if closed.effects:
            raise UnknownProgramError(str(closed.effects))
        # Inputs are told apart by their place, as their values may be the same.
        given = [self._number(("input", index, each.shape)) for index, each in enumerate(arrays)]
        found = self._run(closed, [*map(self.weight, leaves), *given])
        tree = jax.tree.structure(shapes[0])
        return jax.tree.unflatten(tree, found[: tree.num_leaves]), found[tree.num_leaves :]

    def _array(self, array: Any, kind: str) -> int:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            if is_same_kind(array.dtype):
                return self._number("same key")
            array = jax.random.key_data(array)
        own = np.asarray(array)
        digest = hashlib.sha256(own.tobytes()).hexdigest()
        return self._number((kind, own.shape, str(own.dtype), digest))

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _run(self, closed: Any, inputs: Sequence[int]) -> list[int]:
        jaxpr, consts = _opened(closed)
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        constants = [self._array(each, "constant") for each in consts]
        known |= dict(zip(jaxpr.constvars, constants, strict=True))
        for equation in jaxpr.eqns:
            given = [self._read(each, known) for each in equation.invars]
            known |= dict(zip(equation.outvars, self._equation(equation, given), strict=True))
        return [self._read(each, known) for each in jaxpr.outvars]

    def _read(self, atom: Any, known: Mapping[Any, int]) -> int:
        if isinstance(atom, core.Literal):
            kind: Any = atom.aval
            return self._array(np.asarray(atom.val, kind.dtype), "constant")
        return known[atom]

    def _equation(self, equation: Any, given: list[int]) -> list[int]:
        name, params = str(equation.primitive), equation.params
        outs: list[Any] = [var.aval for var in equation.outvars]
        if name in _CALLS or name in _CUSTOM:
            inner = params.get("call_jaxpr", params.get("jaxpr"))
            found = self._run(inner, given)
            if name in _CALLS:
                return found
            place = str(getattr(_opened(inner)[0].debug_info, "func_src_info", ""))
            if not is_known_rule(place):
                raise UnknownProgramError(f"a rule for gradients: {place}")
            # Its gradient is the function's own, and may be of inputs that the result ignores.
            return [
                self._number((name, place, tuple(given), index, each))
                for index, each in enumerate(found)
            ]
        first = equation.invars[0].aval if equation.invars else None
        if first is not None and len(given) == 1 and first.dtype == outs[0].dtype:
            if first.shape == outs[0].shape and (name in _ALIASES or _only_shapes(name, params)):
                return given
            if first.size == outs[0].size and _only_shapes(name, params):
                # Both ways of adding dimensions of size 1.
                return [self._number(("reshape", given[0], outs[0].shape))]
        if name == "scan" and (found := self._scan(equation, given)) is not None:
            return found
        if name == "cond":
            index, *operands = given
            branches = [self._run(each, operands) for each in params["branches"]]
            return [self._number(("cond", index, each)) for each in zip(*branches, strict=True)]
        if name in _COMMUTATIVE:
            given = sorted(given)
        own = tuple(
            (key, self._param(value)) for key, value in sorted(params.items()) if key != "weak_type"
        )
        found = [
            self._of_kind((name, own, tuple(given), index, aval.shape, str(aval.dtype)), aval)
            for index, aval in enumerate(outs)
        ]
        if name == "stop_gradient":
            self._stopped.update(zip(found, given, strict=True))
        return found

    def _scan(self, equation: Any, given: list[int]) -> list[int] | None:
        """The numbers of what a loop returns, in whatever order it has its values; None if unknown.

        A carried value is numbered by what it is before the first turn and by what a turn makes of
        it, which names the other carried values in turn. Of two loops with n values that change,
        those that are alike for 2 n turns are alike for all turns.
        """
        params = equation.params
        consts, carry = _counted(params)
        fixed, initial, slices = (
            given[:consts],
            given[consts : consts + carry],
            given[consts + carry :],
        )
        inside: list[Any] = [var.aval for var in _opened(params["jaxpr"])[0].invars[consts:]]
        outside: list[Any] = [var.aval for var in equation.outvars]
        loop = params["length"], params["reverse"]
        pieces = [
            self._of_kind(("slice", *loop, number), aval)
            for number, aval in zip(slices, inside[carry:], strict=True)
        ]

        def turn(carried: list[int]) -> tuple[list[int], list[int]]:
            results = self._run(params["jaxpr"], [*fixed, *carried, *pieces])
            return results[:carry], results[carry:]

        # Numbers that nothing else has, not even a loop around this one.
        apart = [self._number(("carried", len(self._numbers))) for _ in initial]
        changing = [index for index, number in enumerate(turn(apart)[0]) if number != apart[index]]
        if len(changing) > _MOST_CARRIED:
            return None
        carried = [*initial]
        for index in changing:
            carried[index] = self._of_kind(("first", *loop, initial[index]), inside[index])
        for _ in range(2 * len(changing)):
            later, _ = turn(carried)
            for index in changing:
                key = "next", carried[index], later[index]
                carried[index] = self._of_kind(key, inside[index])
        later, stacked = turn(carried)
        results = [*initial]
        for index in changing:
            results[index] = self._of_kind(("last", carried[index], later[index]), outside[index])
        whole = dict(zip(pieces, slices, strict=True))
        for number, aval in zip(stacked, outside[carry:], strict=True):
            stack = self._of_kind(("stack", *loop, number), aval)
            if number in self._stopped:
                plain = self._of_kind(("stack", *loop, self._stopped[number]), aval)
                self._stopped[stack] = plain
            results.append(whole.get(number, stack))
        return results

    def _of_kind(self, key: Any, aval: Any) -> int:
        """The number of a value by what makes it; random keys are all the same."""
        return self._number("same key" if is_same_kind(aval.dtype) else key)

    def _param(self, value: Any) -> Any:
        if isinstance(_opened(value)[0], core.Jaxpr):
            kinds: list[Any] = [var.aval for var in _opened(value)[0].invars]
            inputs = [
                self._number(("argument", index, kind.shape, str(kind.dtype)))
                for index, kind in enumerate(kinds)
            ]
            return ("function", *self._run(value, inputs))
        if isinstance(value, list | tuple):
            return (type(value).__name__, *map(self._param, value))
        if isinstance(value, Mapping):
            return tuple((str(key), self._param(each)) for key, each in sorted(value.items()))
        if is_array(value):
            return self._array(value, "constant")
        # A function is itself alone: closures of one factory have one name.
        try:
            hash(value)
        except TypeError:
            return repr(value)
        return (type(value).__name__, value)


_OWNERS = ("jax", "flax")


def is_known_rule(place: str) -> bool:
    """Whether a function with a rule for gradients is one of JAX's or Flax's, and no closure.

    A rule may depend on things that no trace shows: the arguments of a factory, and arguments that
    are not differentiated. A function at the top of a module that differentiates all arguments has
    one rule. `place` comes from JAX's debug information, such as `relu at functions.py:71`.
    """
    name, _, rest = place.partition(" at ")
    file, _, line = rest.rpartition(":")
    for known, module in list(sys.modules.items()):
        if known.partition(".")[0] in _OWNERS and getattr(module, "__file__", None) == file:
            found = vars(module).get(name)
            if isinstance(found, jax.custom_jvp | jax.custom_vjp) and not found.nondiff_argnums:
                code = getattr(inspect.unwrap(found), "__code__", None)
                return code is not None and str(code.co_firstlineno) == line
    return False
