"""JAX's own tests of meshes, ``shard_map`` and export, every ``jax.jit`` in them one of ``amp``.

They are no part of the installed package: ``JAX_CHECKOUT`` names a checkout of JAX at the installed
version. Numbers are compared as bfloat16 allows. What a test asserts of the text of a program, or
of how often JAX traces, is that of a program without casts.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import re
import sys
import types
import unittest
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import test_util

from jaxamp import amp
from jaxamp.errors import IdlePolicyWarning
from tests.conformance.jobs import Job, SkipJob

FILES = ("pjit_test", "shard_map_test", "export_test")
POLICY = "mixed_bf16"
TOLERANCE = 0.04  # of the largest number: products of products, in bfloat16

_TEXTS = r"as_text|str\(|jaxpr|mlir_module|in_avals|cost_analysis|\bhlo\b|pretty"
_COUNTS = r"count_\w+\(|cache_size|cache_info|cache_miss|_cpp_cache|num_traces|count\b"
_NAMES = r"assertRaises|fun_name|__name__|jit_name|assertLogs|traceback"
_PHASE = "multiplies by the cosine of a large sum, whose phase no product of bfloat16 holds"
KNOWN = {
    "ArrayPjitTest.test_pjit_with_mismatched_static_argnames": (
        "declares an argument static by its position alone, which for amp is so by name as well"
    ),
    "ShardMapTest.test_shmap_unreduced_fsdp_custom_vjp_bwd": _PHASE,
    "ShardMapTest.test_shmap_unreduced_fsdp_grad": _PHASE,
}


def folder() -> Path:
    """Return the folder of JAX's tests.

    Raises:
        FileNotFoundError: there is none, or it is that of another version.
    """
    root, version = Path(os.environ.get("JAX_CHECKOUT", "")), jax.__version__
    known = root / "jax" / "version.py"
    if not known.exists() or f'_version = "{version}"' not in known.read_text():
        raise FileNotFoundError(
            f"JAX_CHECKOUT names no checkout of JAX {version}: git clone --depth 1 --branch "
            f"jax-v{version} https://github.com/jax-ml/jax, and set JAX_CHECKOUT to its folder."
        )
    return root / "tests"


def all_jobs(count: int) -> list[Job]:
    """A fixed choice of the tests of all files."""
    names = sorted(_names(), key=lambda name: zlib.crc32(name.encode()))
    return [Job("jax_tests", name) for name in names[:count]]


def _names() -> Iterator[str]:
    for file in FILES:
        for found in unittest.TestLoader().loadTestsFromModule(_module(file)):
            yield from (f"{file}/{type(test).__name__}.{test._testMethodName}" for test in found)


def run(name: str) -> None:
    """Runs a test with `amp`, and if it fails as it is.

    Raises:
        SkipJob: it fails as it is, or asserts what only a program without casts has.
        AssertionError: it fails under `amp`.
    """
    file, _, test = name.partition("/")
    module = _module(file)
    with mock.patch.multiple(module, **_replaced(module)), _near():
        failure = _failure(module, test)
    if failure is None:
        return
    if test in KNOWN:
        raise SkipJob(KNOWN[test])
    if plain := _failure(module, test):
        raise SkipJob(f"plain JAX itself: {plain.splitlines()[-1][:80]}")
    if _is_of_the_test(failure):
        for pattern, what in ((_COUNTS, "how often it is traced"), (_TEXTS, "a program's text")):
            if re.search(pattern, _source(module, test)):
                raise SkipJob(f"asserts {what}")
    raise AssertionError(failure[-580:])


def _is_of_the_test(failure: str) -> bool:
    """Return whether a test itself has raised, rather than what it calls, and for no number."""
    innermost = re.findall(r'File "(.*?)"', failure)[-1]
    return any(place in innermost for place in (str(folder()), "unittest", "test_util"))


@functools.cache
def _module(file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(file, folder() / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "argv", sys.argv[:1]):
        spec.loader.exec_module(module)
    return module


def _failure(module: types.ModuleType, name: str) -> str | None:
    """Run a test; return the traceback of its failure."""
    result = unittest.TestResult()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IdlePolicyWarning)
        kind, _, method = name.partition(".")
        getattr(module, kind)(method).run(result)
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    failed = [text for _, text in (*result.failures, *result.errors)]
    return failed[0].strip() if failed else None


def _source(module: types.ModuleType, name: str) -> str:
    """Return the text of a test, whose parameters may follow its name."""
    kind, _, method = name.partition(".")
    text = Path(str(module.__file__)).read_text()
    (owner,) = (n for n in _parsed(text).body if isinstance(n, ast.ClassDef) and n.name == kind)
    named = [n for n in owner.body if isinstance(n, ast.FunctionDef) and method.startswith(n.name)]
    longest = max(named, key=lambda n: len(n.name), default=owner)
    return ast.get_source_segment(text, longest) or ""


_parsed = functools.cache(ast.parse)


def _replaced(module: types.ModuleType) -> dict[str, Any]:
    """Return the names of a module under which it finds ``jax.jit``, and what takes its place."""
    amped = types.ModuleType("jax")
    amped.__dict__.update(vars(jax), jit=functools.partial(_amped, jax.jit))
    pjit = getattr(module, "pjit", None)
    return {"jax": amped} | ({"pjit": functools.partial(_amped, pjit)} if pjit else {})


def _amped(jit: Any, fn: Any = None, *args: Any, **words: Any) -> Any:
    if fn is None:
        return functools.partial(_amped, jit, *args, **words)
    static = {name: words[name] for name in ("static_argnums", "static_argnames") if name in words}
    return jit(amp(fn, POLICY, **static), *args, **words)


@contextlib.contextmanager
def _near() -> Iterator[None]:
    """Compare floats as near as bfloat16 brings them, whatever a test asks for."""
    case = test_util.JaxTestCase
    close = functools.partialmethod(_assert_close)
    with (
        mock.patch.object(case, "assertAllClose", close),
        mock.patch.object(case, "assertArraysEqual", close),
        mock.patch.object(case, "assertArraysAllClose", close),
        mock.patch.object(np.testing, "assert_array_equal", _check_close),
        mock.patch.object(np.testing, "assert_allclose", _check_close),
    ):
        yield


def _assert_close(_: Any, got: Any, want: Any, *args: Any, **words: Any) -> None:
    trees = [jax.tree.leaves(tree) for tree in (got, want)]
    is_tree = len(trees[0]) == len(trees[1])  # and no list for an array
    for one, other in zip(*(trees if is_tree else ([got], [want])), strict=True):
        if words.get("check_dtypes", False):
            assert jnp.asarray(one).dtype == jnp.asarray(other).dtype
        _check_close(one, other)


def _check_close(got: Any, want: Any, *args: Any, **words: Any) -> None:
    got, want = (np.asarray(x) for x in (got, want))
    assert np.broadcast_shapes(got.shape, want.shape) in (got.shape, want.shape)
    if not all(jnp.issubdtype(x.dtype, jnp.number) for x in (got, want)):
        assert np.all(got == want)
        return
    got, want = (x.astype(np.complex128) for x in (got, want))
    finite = np.isfinite(want)
    largest = np.abs(want[finite]).max(initial=0)
    assert np.array_equal(finite, np.isfinite(got)) or got.shape != want.shape
    assert np.all(np.abs(got - want)[np.isfinite(got - want)] <= TOLERANCE * largest + 1e-6)
