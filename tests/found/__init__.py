"""Regions found in programs."""
