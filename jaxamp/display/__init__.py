"""Screens of values: at a terminal, as a page. rich and jinja2 are imported when one needs them."""

import importlib

from jaxamp.inspect.displayable import register_screens

register_screens(lambda: importlib.import_module("jaxamp.display.screens"))
