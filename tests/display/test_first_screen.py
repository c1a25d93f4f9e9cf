"""The first screens of report and explain: what a program's owner wants to know, in 30 lines."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tests.models.solved
import tests.models.trained  # noqa: F401
from jaxamp import PrecisionPolicy, Rule, explain, report
from jaxamp.kernels.target_gpu import TargetGpu, lowering_for
from tests.inspect.programs import MLP, mlp_loss, spec
from tests.models import registry

FEW = ("linen-attention", "optimistix-newton", "optax-contrib-muon")
MOST, WIDTH = 30, 120


def _call(name):
    made = registry.build(name)
    if isinstance(made, registry.Trained):
        return jax.value_and_grad(made.loss), (made.params, made.batch)
    return made.solve, made.args


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.long)
        for name in registry.MODELS
    ],
)
def test_a_model_of_another_package_fits_one_screen(name):
    """At most 30 lines of at most 120 columns; of attention it says what there is, or why not."""
    if missing := registry.missing(name):
        pytest.skip(f"not installed: {missing}")
    fn, args = _call(name)
    for found in (report(fn)(*args), explain(fn)(*args)):
        lines = str(found).splitlines()
        assert 3 < len(lines) <= MOST
        assert max(map(len, lines)) <= WIDTH
        assert "key<" not in str(found)
    said = [line for line in str(report(fn)(*args)).splitlines() if line.startswith("Attention: ")]
    assert said
    assert "0 regions" not in "".join(said)


def _attend(w, x):
    with jax.named_scope("attend"):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", q, k)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v)


ATTEND = spec(64, 192), spec(2, 64, 64)
FUSED = PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)


def _said(found):
    return " ".join(str(found).partition("Attention: ")[2].split())


def test_attention_runs_as_one_kernel_or_the_screen_says_why_not():
    """Where no kernel is at hand, by the policy's word, and where a program is in the way."""

    def returned(w, x):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k))
        return jnp.einsum("bts,bsd->btd", weights, v), weights

    off = PrecisionPolicy.MIXED_BF16.replace(fused_attention=False)
    words = {
        "1 of 1 region runs as one kernel.": report(_attend, FUSED),
        "1 region (attend) stays as written: no kernel runs it on this CPU.": report(_attend),
        "1 region (attend) stays as written: the policy says fused_attention=False.": report(
            _attend, off
        ),
        "weights are returned.": report(returned, FUSED),
        "none in this program": report(lambda w, x: x @ w, FUSED),
    }
    for word, ask in words.items():
        assert word in _said(ask(*ATTEND))
    with lowering_for(TargetGpu((9, 0), 91200)):
        assert "runs as one kernel" in _said(report(_attend)(*ATTEND))


def test_a_loss_whose_logits_a_call_bends_is_no_attention():
    """What a call's cotangents are multiplied by in the backward pass says only around the call."""
    head = jax.jit(lambda h, e: 30 * jnp.tanh(h @ e.T / 30))

    def loss(h, e):
        return -jax.nn.log_softmax(head(jnp.tanh(h @ e.T) @ e, e))[:, 0].mean()

    fn = jax.value_and_grad(loss, argnums=(0, 1))
    assert "none in this program" in _said(report(fn)(jnp.ones((32, 16)), jnp.ones((64, 16))))


def test_a_large_loss_is_divided_or_the_screen_says_why_not():
    """As the policy says; without a word the prediction decides, and the cure is named."""

    def loss(w, x):
        return jax.nn.logsumexp(x @ w, axis=-1).sum()

    args = spec(256, 32768), spec(4096, 256)
    texts = {
        word: str(
            report(jax.grad(loss), PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=word))(*args)
        )
        for word in (None, True)
    }
    assert "never stored" in texts[True].partition("Loss: 1 of 1 region is divided, and ")[2]
    assert "stays as written" in texts[None].partition("Loss: ")[2]
    assert ("as long" in texts[None]) is ("loss_in_chunks='memory'" in texts[None])
    assert "Loss: none in this program" in str(report(jnp.dot)(spec(8, 8), spec(8, 8)))


def test_memory_and_bytes_are_those_of_the_values():
    """By hand: a product reads two float32 matrices and writes bf16; another reads that."""
    found = report(lambda x, w: x @ w @ w)(spec(8, 8), spec(8, 8))
    first, second = (o.each for o in found.contractions)
    assert (first.bytes, first.bytes_narrow, first.bytes_f32) == (2 * 256 + 128, 128, 3 * 256)
    assert (second.bytes, second.bytes_narrow) == (128 + 2 * 256, 128)
    step = report(jax.grad(mlp_loss))(*MLP)
    kept = sum(r.bytes for r in step.residuals)
    wide = sum(r.bytes_f32 for r in step.residuals)
    assert kept < wide <= 2 * kept
    assert f"{100 * (wide - kept) / wide:.1f} % less" in str(step)


def test_small_products_are_said_to_be_small_and_large_ones_are_not():
    """The size that pays is in the sentence; one large product is enough to leave it out."""
    small = " ".join(str(report(jnp.dot)(spec(64, 64), spec(64, 64))).split())
    assert "Small products: the largest, [64,64] × [64,64]" in small
    assert "1024 × 1024 × 1024" in small
    assert "Small products" not in str(report(jnp.dot)(spec(4096, 4096), spec(4096, 4096)))


def test_products_without_gain_can_be_narrow_all_the_same():
    """The screen prints the rule; under it the product is narrow."""

    def inner(x, y):
        return jnp.vdot(x, y)

    text = str(report(inner)(spec(8), spec(8)))
    assert "policy.with_rules(jaxamp.Rule(precision='bf16', kind='compute'))" in text
    policy = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="bf16", kind="compute"))
    assert report(inner, policy)(spec(8), spec(8)).dots() == {"bf16": 1}


def test_layers_of_a_library_are_one_row_by_their_module():
    """Not by the one line of the user's that calls the network."""
    import flax.linen as nn

    net = nn.Sequential([nn.Dense(32) for _ in range(4)])
    params = jax.eval_shape(net.init, jax.random.key(0), spec(8, 32))
    text = str(report(jax.grad(lambda p, x: net.apply(p, x).sum()))(params, spec(8, 32)))
    assert "Sequential/layers_* × 4" in text
    assert "test_first_screen.py" not in text.partition("In float32")[0]


def test_dead_products_are_left_out():
    """A result that nobody reads is no product of the program."""

    def two(x, w):
        _ = jnp.sin(x @ w.T)
        return x @ w

    found = report(two)(spec(8, 8), spec(8, 8))
    text = str(found.full())
    assert text.count("bf16[8,8] × bf16[8,8]") == 1
    assert " × 0 " not in text


def test_everything_is_behind_one_word():
    """`full()` and `everything=True` print the same tables; the first screen names them."""
    found = report(mlp_loss)(*MLP)
    assert "report.full()" in str(found)
    assert str(found.full()) == str(report(mlp_loss, everything=True)(*MLP)) != str(found)
    told = explain(mlp_loss)(*MLP)
    assert str(told.full()) == str(explain(mlp_loss, everything=True)(*MLP))


_BARE = """
import sys
sys.modules["rich"] = sys.modules["jinja2"] = None
import jax.numpy as jnp, jaxamp
x = jnp.ones((8, 8))
print(jaxamp.report(jnp.dot)(x, x)), print(jaxamp.explain(lambda a: a @ a)(x))
jaxamp.explain(jnp.dot)(x, x)._repr_html_(), jaxamp.report(jnp.dot)(x, x)._repr_html_()
for draw in (str, lambda r: r.to_html()):
    try:
        draw(jaxamp.report(jnp.dot, everything=True)(x, x))
    except jaxamp.errors.InspectionError as error:
        assert "pip install 'jax-mixed-precision[report]'" in str(error), error
    else:
        raise AssertionError(draw)
"""


def test_first_screens_need_neither_rich_nor_jinja():
    """What is missing for the others is an error that says what to install."""
    done = subprocess.run([sys.executable, "-c", _BARE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "100 % of the FLOPs of matrix products in bf16" in done.stdout


def test_text_and_terminal_show_the_same():
    """With rich and without, line by line."""
    if importlib.util.find_spec("rich") is None:
        pytest.skip("rich is not installed")
    import io

    from rich.console import Console

    found = report(jax.grad(mlp_loss))(*MLP)
    file = io.StringIO()
    Console(file=file, width=WIDTH, color_system=None).print(found)
    drawn = [line.rstrip() for line in file.getvalue().splitlines()]
    assert drawn == str(found).splitlines()


def test_cells_of_a_notebook_have_their_names(monkeypatch):
    """IPython compiles a cell as a file of a made-up name, which no reader knows."""
    path = "/tmp/ipykernel_7/421.py"
    names = {"format_code_name": {path: ("Cell", "In[3]")}.get}
    shell = SimpleNamespace(compile=SimpleNamespace(**names))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    found = {}
    exec(compile("def cell(x):\n    return x @ x\n", path, "exec"), found)
    x = jnp.ones((8, 8))
    assert "In[3]:2" in str(report(found["cell"])(x))
    shown = explain(found["cell"])(x).full()
    assert "In[3]" in str(shown)
    assert "421.py" not in str(shown)


def test_weights_that_the_program_widens_are_wide_and_a_rule_has_them_narrow():
    """A checkpoint in bfloat16 whose arrays the program casts to float32 before each product."""

    def layers(x, w):
        return jnp.tanh(x @ w.astype(jnp.float32)) @ w.T.astype(jnp.float32)

    args = spec(64, 256), jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    said = str(report(layers)(*args))
    assert "all matrix products in f32" in said
    assert "an operand was cast to f32 explicitly" in said
    assert "narrow all the same: policy.with_rules" in said
    ruled = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="bf16", kind="compute"))
    assert "100 % of the FLOPs of matrix products in bf16" in str(report(layers, ruled)(*args))
