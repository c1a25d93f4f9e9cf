"""Searches, estimates and servers on top of everything else, imported where they are used."""
