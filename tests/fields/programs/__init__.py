"""The programs, a file for each field; importing this package enters all of them."""

from tests.programs.registry import enter_modules

enter_modules(__name__, __path__)
