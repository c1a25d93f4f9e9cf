"""Inspection of what a policy does to a program; it reads plans and decides nothing."""
