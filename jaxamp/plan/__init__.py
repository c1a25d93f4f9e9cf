"""Deciding: pure analysis from a jaxpr and a policy to a Plan."""


def make_plan(closed_jaxpr, policy, *, strict=False):
    return None
