"""Doing: emit the program that a Plan describes."""

import jax


def run_plan(closed_jaxpr, plan, *args):
    return jax.core.eval_jaxpr(closed_jaxpr.jaxpr, closed_jaxpr.consts, *args)
