"""What an installed wheel runs in a bare environment: README, report, explain, training.

    python -I tests/project/bare_wheel.py README.md

Nothing of the project is on the path but the wheel: `-I` leaves out the current folder.
"""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxamp

for block in re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(), re.M | re.S):
    exec(compile(block, "README.md", "exec"), globals())


def mlp(params, x):
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"]) ** 2)


params = {"w1": jnp.ones((8, 16)) / 8, "w2": jnp.ones((16, 4)) / 16}
args = params, jnp.ones((4, 8))
plain, grads = jax.value_and_grad(jaxamp.amp(mlp, "bf16"))(*args)
assert abs(plain - mlp(*args)) < 0.01
assert grads["w1"].dtype == jnp.float32
found = jaxamp.report(jax.grad(mlp))(*args)
assert found.dots() == {"bf16": 5}, found.dots()
assert "100 % of the FLOPs of matrix products in bf16" in str(found)
assert "product" in str(jaxamp.explain(mlp)(*args))
assert found.to_json()
state = jaxamp.training.DynamicLossScale(2.0**15)
(value, _), finite, state = jaxamp.training.scaled_value_and_grad(
    mlp, policy="mixed_f16", loss_scale=state
)(*args)
assert finite
assert abs(value - mlp(*args)) < 0.01
if importlib.util.find_spec("rich"):
    assert found.full().to_html()
else:
    refused = []
    for draw in (lambda: str(found.full()), found.to_html):
        try:
            draw()
        except jaxamp.errors.InspectionError as error:
            refused.append(str(error))
    assert ["pip install 'jax-mixed-precision[report]'" in words for words in refused] == [True] * 2
print("ran", jaxamp.__version__)
