"""What each primitive is: the kinds of operation that a policy speaks about."""

from __future__ import annotations

import enum


class OpKind(enum.Enum):
    """The five kinds of operation; a policy gives a precision to each.

    >>> OpKind("DataMovement")
    <OpKind.DATA_MOVEMENT: 'DataMovement'>
    """

    COMPUTE = "Compute"
    REDUCTION = "Reduction"
    ELEMENTWISE = "Elementwise"
    DATA_MOVEMENT = "DataMovement"
    BOUNDARY = "Boundary"
