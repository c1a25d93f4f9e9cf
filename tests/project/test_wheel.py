"""The wheel runs in a fresh environment with its declared dependencies alone."""

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import jaxamp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PROGRAM = """
import jax, jax.numpy as jnp
import jaxamp

def loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"]) ** 2)

params = {"w1": jnp.ones((8, 16)) / 8, "w2": jnp.ones((16, 1)) / 16}
args = params, jnp.ones((4, 8))
plain, grads = jax.value_and_grad(jaxamp.amp(loss, "bf16"))(*args)
assert abs(plain - loss(*args)) < 0.01 and grads["w1"].dtype == jnp.float32
found = jaxamp.report(jax.grad(loss))(*args)
assert found.dots() == {"bf16": 5}, found.dots()
assert "of the FLOPs of matrix products in bf16" in str(found)
assert "product" in str(jaxamp.explain(loss)(*args))
state = jaxamp.training.DynamicLossScale(2.0**15)
(value, _), finite, state = jaxamp.training.scaled_value_and_grad(
    loss, policy="mixed_f16", loss_scale=state
)(*args)
assert finite and abs(value - loss(*args)) < 0.01
print("ran", jaxamp.__version__)
"""


def test_the_distribution_has_a_name_of_its_own():
    """Not that of another package; the import has it, and messages and docs say so."""
    assert PROJECT["name"] == "jax-mixed-precision"
    assert f"`{PROJECT['name']}`" in (ROOT / "README.md").read_text()
    own = [r for rs in PROJECT["optional-dependencies"].values() for r in rs if "[" in r]
    assert f"{PROJECT['name']}[demo]" in own
    assert not any(re.match(r"jaxamp\b", requirement) for requirement in own)


@pytest.mark.long
def test_the_wheel_runs_with_its_declared_dependencies(tmp_path):
    """Built and installed as users do; none of the libraries that it works beside is there."""

    def run(*command: object) -> str:
        done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("jax_mixed_precision-")
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh/bin/python"
    run(python, "-m", "pip", "install", wheel)
    listed = run(python, "-m", "pip", "list", "--format=freeze")
    assert re.search(r"^jax-mixed-precision==", listed, re.MULTILINE)
    for name in ("equinox", "flax", "haliax", "jmp", "optax"):
        assert not re.search(rf"^{name}==", listed, re.MULTILINE)
    assert run(python, "-I", "-c", _PROGRAM) == f"ran {jaxamp.__version__}\n"
    page = tmp_path / "report.html"
    asked = ("jax.numpy:dot", "--args", "f32[8,8]", "f32[8,8]")
    assert "100 % of the FLOPs" in run(python, "-m", "jaxamp", "report", *asked)
    run(python, "-m", "jaxamp", "report", *asked, "--html", page)
    assert "<!doctype html>" in page.read_text()
