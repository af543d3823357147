"""Each private part of Flax broken in turn: one error says so, or only some programs need it."""

import json
import pathlib
import subprocess
import sys

import flax
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def renamed(name):
    return rf"\b{name}\b", f"{name}_of_old"


# Parts that the quick start needs, and that have no public way.
ERRORS = {
    "linen.module._context": renamed("_context"),
    "_context.module_stack": renamed("module_stack"),
    "Pytree._pytree__nodes": renamed("_pytree__nodes"),
    "Pytree._pytree__state": renamed("_pytree__state"),
    "PytreeState._initializing": renamed("_initializing"),
    "PytreeState": renamed("PytreeState"),
    "HashableMapping": renamed("HashableMapping"),
    "graphlib.NodeDef": renamed("NodeDef"),
    "graphlib.VariableDef": renamed("VariableDef"),
    "fields of VariableDef": renamed("array_refdef"),
    "graphlib.Static": renamed("Static"),
}
# Parts that nothing in the quick start needs, or whose absence costs a convenience.
UNUSED = {
    "Module._state": renamed("_state"),
    "nothing": (r"\bno such name\b", ""),
    "Variable._raw_value": renamed("_raw_value"),
    "Variable._trace_state": renamed("_trace_state"),
    "Variable._var_metadata": renamed("_var_metadata"),
    "InterceptorContext": renamed("InterceptorContext"),
    "method_handler_wrapped": renamed("method_handler_wrapped"),
    "HashableMapping._mapping": renamed("_mapping"),
    "Scope._mutable_collection": renamed("_mutable_collection"),
    "graphlib.get_node_impl": renamed("get_node_impl"),
    "_nnx_tabulate_id": renamed("_nnx_tabulate_id"),
    "_graph_node_flatten": renamed("_graph_node_flatten"),
    "Module._register_submodules": renamed("_register_submodules"),
    "LazyRng": renamed("LazyRng"),
    "Module.clone(_deep_clone)": renamed("_deep_clone"),
    "_get_unbound_fn": renamed("_get_unbound_fn"),
    "union_filters": renamed("union_filters"),
}


@pytest.fixture(scope="module")
def results():
    cases = [[name, *case] for name, case in {**ERRORS, **UNUSED}.items()]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests._flax.broken_flax"],
        cwd=ROOT,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(line) for line in ran.stdout.splitlines())


@pytest.fixture(scope="module")
def printed(results):
    return results["nothing"]["printed"]


@pytest.mark.parametrize("part", ERRORS)
def test_one_error_names_the_part_and_the_version(results, part):
    found = results[part]
    assert found["imported"]
    assert {"BridgeError", "ImportError"} <= set(found["errors"]), found["text"]
    assert f"Flax {flax.__version__}" in found["text"]


@pytest.mark.parametrize("part", UNUSED)
def test_the_quick_start_runs_without_parts_that_only_some_programs_need(results, printed, part):
    found = results[part]
    assert found["errors"] == [], found["text"]
    assert found["printed"] == printed
    assert "(4, 3)" in printed
    assert found["warnings"] == []
