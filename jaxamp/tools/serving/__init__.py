"""Parameters stored narrow: programs that read low-precision copies without casting them.

A program that ``amp`` has rewritten reads its f32 parameters through casts. Where every use of a
parameter is the same cast, perhaps behind a gather, slice, transpose or loop, the parameter can be
cast once and for all: ``narrow_dtypes`` finds these, and ``run_narrow`` runs the program on them.
The results are those of f32 parameters bit for bit, because what only moves values commutes with
what rounds them. A narrow value that some operation does need wide is widened there, exactly.
"""

from jaxamp.tools.serving.narrow import narrow_dtypes, run_narrow
from jaxamp.tools.serving.served_model import Loaded, Served, load_served, serve

__all__ = ["Loaded", "Served", "load_served", "narrow_dtypes", "run_narrow", "serve"]
