"""The feature: screens of values. rich and jinja2 are imported when one is drawn."""

import importlib

from jaxamp.core.features import Feature

FEATURE = Feature(name="display", screens=lambda: importlib.import_module("jaxamp.display.screens"))
