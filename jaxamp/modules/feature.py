"""The feature: scopes have the modules of equinox, nnx and classes of one's own."""

from __future__ import annotations

from jaxamp.core.features import Feature, Work


def _work() -> Work:
    from jaxamp.modules.list_items import name_modules

    return Work(name=name_modules)


FEATURE = Feature(name="modules", work=_work)
