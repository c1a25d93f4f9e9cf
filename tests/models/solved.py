"""Solvers, samplers, optimizers and simulations: the accuracy asked for is still met."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.registry import Solved, model

KEY = jax.random.key(0)

# Rubin (1981), the effect of coaching on test scores in eight schools.
EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], np.float32)
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], np.float32)


@model("numpyro-nuts-eight-schools", "numpyro")
def eight_schools() -> Solved:
    """numpyro: NUTS on the eight schools; a sampler has nothing to gain and is left alone."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import NUTS

    def schools() -> None:
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu + tau * z, ERRORS), obs=EFFECTS)

    kernel = NUTS(schools, target_accept_prob=0.9)
    start = kernel.init(KEY, 200, None, (), {})

    def sample(state: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            state = kernel.sample(state, (), {})
            return state, (state.z["mu"], state.accept_prob, state.diverging)

        return jax.lax.scan(step, state, None, length=600)[1]

    def check(result: Any) -> None:
        mu, accept, diverging = (np.asarray(x)[200:] for x in result)
        # The posterior mean of mu is 4.4 with a deviation of 3.3 (Stan's reference posterior).
        assert abs(mu.mean() - 4.4) < 1.2
        assert accept.mean() > 0.8
        assert diverging.mean() < 0.02

    return Solved(sample, (start,), check, same=True)


@model("numpyro-nuts-diabetes", "numpyro", "sklearn")
def diabetes() -> Solved:
    """numpyro: NUTS inside amp on the diabetes data; its density has a product."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import NUTS
    from sklearn.datasets import load_diabetes

    features, target = load_diabetes(return_X_y=True)
    x = np.float32(features / features.std(0))
    y = np.float32((target - target.mean()) / target.std())

    def regression() -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.7), obs=y)

    kernel = NUTS(regression)
    start = kernel.init(KEY, 150, None, (), {})

    def sample(state: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            state = kernel.sample(state, (), {})
            return state, (state.z["w"], state.accept_prob)

        return jax.lax.scan(step, state, None, length=450)[1]

    def check(result: Any) -> None:
        w, accept = (np.asarray(r)[150:] for r in result)
        precision = x.T @ x / 0.49 + np.eye(x.shape[1])  # the posterior is a normal in closed form
        mean = np.linalg.solve(precision, x.T @ y / 0.49)
        deviation = np.sqrt(np.diag(np.linalg.inv(precision)))
        assert (np.abs(w.mean(0) - mean) < 0.5 * deviation).all()
        assert accept.mean() > 0.6

    return Solved(sample, (start,), check, same=False)


@model("diffrax-stiff", "diffrax")
def stiff() -> Solved:
    """diffrax: van der Pol's oscillator by an implicit solver, with Newton's method inside."""
    import diffrax

    def solve(y0: Any, solver: Any = None, rtol: float = 1e-4) -> Any:
        def field(t: Any, y: Any, _: Any) -> Any:
            return jnp.stack([y[1], 20.0 * (1 - y[0] ** 2) * y[1] - y[0]])

        return diffrax.diffeqsolve(
            diffrax.ODETerm(field), solver or diffrax.Kvaerno5(), 0.0, 10.0, 1e-3, y0,
            stepsize_controller=diffrax.PIDController(rtol=rtol, atol=1e-6), max_steps=4096,
        ).ys[-1]  # fmt: skip

    y0 = jnp.array([2.0, 0.0])

    def check(y: Any) -> None:
        with jax.enable_x64(True):
            exact = solve(jnp.array([2.0, 0.0], jnp.float64), diffrax.Kvaerno5(), 1e-9)
        np.testing.assert_allclose(y, exact, rtol=2e-3)

    return Solved(lambda y0: solve(y0), (y0,), check, same=True)


@model("optimistix-levenberg-marquardt", "optimistix")
def least_squares() -> Solved:
    """optimistix: an exponential decay fitted by Levenberg-Marquardt to its tolerance."""
    import optimistix as optx

    t = jnp.linspace(0, 2, 40)
    truth = jnp.array([2.5, 1.3])

    def residual(p: Any, observed: Any) -> Any:
        return p[0] * jnp.exp(-p[1] * t) - observed

    def solve(observed: Any) -> Any:
        solver = optx.LevenbergMarquardt(rtol=1e-5, atol=1e-6)
        return optx.least_squares(residual, solver, jnp.array([1.0, 0.5]), observed).value

    def check(found: Any) -> None:
        np.testing.assert_allclose(found, truth, rtol=1e-4)

    return Solved(solve, (truth[0] * jnp.exp(-truth[1] * t),), check, same=False)


@model("optimistix-newton", "optimistix")
def root() -> Solved:
    """optimistix: a root by Newton's method, elementwise; nothing to gain."""
    import optimistix as optx

    def solve(target: Any) -> Any:
        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        fn = lambda y, a: jnp.tanh(y) + y**3 - a  # noqa: E731
        return jax.vmap(lambda a: optx.root_find(fn, solver, jnp.float32(0.5), a).value)(target)

    def check(y: Any) -> None:
        y = np.asarray(y, np.float64)
        np.testing.assert_allclose(np.tanh(y) + y**3, [0.5, 1.0, 3.0], atol=1e-5)

    return Solved(solve, (jnp.array([0.5, 1.0, 3.0]),), check, same=True)


@model("jaxopt-lbfgs", "jaxopt", "sklearn")
def lbfgs() -> Solved:
    """jaxopt: logistic regression on the iris data by L-BFGS, to the minimum of the loss."""
    import jaxopt
    from sklearn.datasets import load_iris

    features, labels = load_iris(return_X_y=True)
    data = np.float32((features - features.mean(0)) / features.std(0)), labels

    def loss(w: Any, data: Any) -> Any:
        return jaxopt.objective.multiclass_logreg(w, data) + 0.01 * jnp.sum(w**2)

    def solve(w: Any, data: Any) -> Any:
        return jaxopt.LBFGS(loss, maxiter=100, tol=1e-4).run(w, data).params

    def check(w: Any) -> None:
        best = solve(jnp.zeros((4, 3)), data)
        assert float(loss(w, data) - loss(best, data)) < 1e-3

    return Solved(solve, (jnp.zeros((4, 3)), data), check, same=False)


@model("jax-md-nve", "jax_md")
def molecules() -> Solved:
    """jax-md: soft spheres in a periodic box; a simulation keeps its energy."""
    from jax_md import energy, quantity, simulate, space

    displacement, shift = space.periodic(6.0)
    potential = energy.soft_sphere_pair(displacement)
    start, step = simulate.nve(potential, shift, 1e-2)
    places = jax.random.uniform(KEY, (40, 2)) * 6
    state = start(jax.random.key(1), places, kT=0.1)

    def total(state: Any) -> Any:
        return potential(state.position) + quantity.kinetic_energy(
            momentum=state.momentum, mass=state.mass
        )

    def run(state: Any) -> Any:
        last = jax.lax.fori_loop(0, 400, lambda _, s: step(s), state)
        return total(last), last.position

    before = float(total(state))

    def check(result: Any) -> None:
        np.testing.assert_allclose(float(result[0]), before, rtol=2e-3)

    return Solved(run, (state,), check, same=True)


@model("blackjax-hmc", "blackjax")
def hamiltonian() -> Solved:
    """blackjax: Hamiltonian Monte Carlo on a banana-shaped density."""
    import blackjax

    def density(x: Any) -> Any:
        return -0.5 * (x[0] ** 2 + (x[1] - x[0] ** 2) ** 2)

    kernel = blackjax.hmc(density, 0.2, jnp.ones(2), 8)
    start = kernel.init(jnp.zeros(2))

    def sample(state: Any, key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            state, info = kernel.step(key, state)
            return state, (state.position, info.acceptance_rate)

        return jax.lax.scan(step, state, jax.random.split(key, 2000))[1]

    def check(result: Any) -> None:
        x, accepted = map(np.asarray, result)
        np.testing.assert_allclose(x.mean(0), [0.0, 1.0], atol=0.25)
        assert accepted.mean() > 0.8

    return Solved(sample, (start, KEY), check, same=True)


def _contrib(name: str) -> None:
    @model(f"optax-contrib-{name}", "optax")
    def make() -> Solved:
        """optax.contrib: an update of parameters and moments is exact; there is nothing to gain."""
        import optax
        from optax import contrib

        optimizer = getattr(contrib, name)(learning_rate=0.05)
        rng = np.random.default_rng(0)
        params = {"w": rng.normal(size=(6, 5)).astype(np.float32), "b": np.zeros(5, np.float32)}
        grads = jax.tree.map(lambda p: 0.1 * rng.normal(size=p.shape).astype(np.float32), params)

        def steps(params: Any) -> Any:
            state = optimizer.init(params)
            for _ in range(3):
                updates, state = optimizer.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            return params

        want = jax.jit(steps)(params)

        def check(got: Any) -> None:
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, want)

        return Solved(steps, (params,), check, same=True)


for _name in (
    "schedule_free_adamw",
    "prodigy",
    "dadapt_adamw",
    "ademamix",
    "simplified_ademamix",
    "cocob",
):
    _contrib(_name)


@model("optax-contrib-muon", "optax")
def muon() -> Solved:
    """optax.contrib: muon, whose orthogonalised updates are made of products."""
    from optax import contrib

    optimizer = contrib.muon(0.05)
    w = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)

    def update(w: Any) -> Any:
        return optimizer.update({"w": w}, optimizer.init({"w": w}), {"w": w})[0]["w"]

    want = np.asarray(jax.jit(update)(w))

    by_hand = np.asarray(jax.jit(update)(jnp.bfloat16(w)), np.float32)  # as its authors run it

    def check(got: Any) -> None:
        assert np.linalg.norm(got - want) <= np.linalg.norm(by_hand - want)

    return Solved(update, (w,), check, same=False)


@model("optax-losses", "optax")
def losses() -> Solved:
    """optax: losses of given logits and targets have nothing to gain."""
    import optax

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(32, 10)).astype(np.float32) * 5
    soft = np.asarray(jax.nn.softmax(rng.normal(size=(32, 10)).astype(np.float32)))
    labels = rng.integers(0, 10, 32)

    def all_of_them(logits: Any, soft: Any) -> Any:
        return [
            optax.softmax_cross_entropy(logits, soft),
            optax.softmax_cross_entropy_with_integer_labels(logits, labels),
            optax.sigmoid_focal_loss(logits, soft),
            optax.huber_loss(logits, soft),
            optax.cosine_distance(logits, soft),
            optax.kl_divergence(jax.nn.log_softmax(logits), soft),
            optax.convex_kl_divergence(jax.nn.log_softmax(logits), soft),
            optax.ntxent(logits, labels),
            optax.losses.poly_loss_cross_entropy(logits, soft),
        ]

    want = jax.jit(all_of_them)(logits, soft)

    def check(got: Any) -> None:
        for x, y in zip(got[:7] + got[8:], want[:7] + want[8:], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[7], want[7], rtol=2e-2)  # its similarities are a product

    return Solved(all_of_them, (logits, soft), check, same=False)
